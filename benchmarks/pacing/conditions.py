"""COCI's comparison under each of its conditions: alone, data parallel, ended early; by four measures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.simulation import Row, compare

from .coci import BASELINE, BUDGETED, COSTS, MTBF_HOURS, job, loss_given_away, places, ways

SIMULATED = ("DenseNet201", "VGG16", "BERT-large")
"""Of the least, the middle and the greatest cost: these are simulated as well, with each time between failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    key: str
    words: str
    parallel: bool = False
    stopped: float = 1.0


CONDITIONS = (
    Condition(key="serial", words="one worker, to the end"),
    Condition(key="parallel", words="data parallel, 4 workers, then 2, then 1", parallel=True),
    Condition(key="quarter", words="one worker, ended at 25 % by somebody", stopped=0.25),
    Condition(key="half", words="one worker, ended at 50 % by somebody", stopped=0.5),
)


@dataclass(frozen=True, slots=True)
class Range:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One policy under one condition, as ratios: 1 is what the fixed interval costs."""

    name: str
    checkpoints: Range
    """Their number, where nothing fails."""
    published: Range
    """P_l as published, over all 20 jobs."""
    true: Range
    """P_l with the Jacobian."""
    published_vs_checkfreq: Range
    true_vs_checkfreq: Range
    lost: float
    """P_l, simulated: its sum over all runs."""
    time: float
    """Time that was not useful, simulated: its sum over all runs."""
    ettr: float
    """Mean of the simulated runs."""
    late: Range
    """Hours to the end of those runs: the median and the quartiles on either side."""


def compared(condition: Condition, seeds: Sequence[int]) -> list[Compared]:
    """Every policy, first as it is by the baseline's name."""
    runs: dict[str, list[Row]] = {}
    for model in SIMULATED:
        for hours in MTBF_HOURS:
            work = job(COSTS[model], parallel=condition.parallel, stopped=condition.stopped)
            for row in compare(work, ways(work, 1 / (3600 * hours)), per_job_hour=1 / hours, seeds=seeds):
                runs.setdefault(row.name, []).append(row)
    expected = _expected(condition)
    return [
        Compared(
            name=name,
            checkpoints=Range.of(expected[name].checkpoints),
            published=_against(expected, name, BASELINE, "published"),
            true=_against(expected, name, BASELINE, "true"),
            published_vs_checkfreq=_against(expected, name, BUDGETED, "published"),
            true_vs_checkfreq=_against(expected, name, BUDGETED, "true"),
            lost=_loss(rows) / _loss(runs[BASELINE]),
            time=_sum(rows, "fault_cost_seconds") / _sum(runs[BASELINE], "fault_cost_seconds"),
            ettr=statistics.fmean(row.mean("ettr") for row in rows),
            late=_hours(rows),
        )
        for name, rows in runs.items()
    ]


@dataclass(frozen=True, slots=True)
class _Expected:
    """Of one policy, one entry for each of the 20 jobs."""

    checkpoints: list[float]
    published: list[float]
    true: list[float]


def _expected(condition: Condition) -> dict[str, _Expected]:
    found: dict[str, _Expected] = {}
    for cost in COSTS.values():
        for hours in MTBF_HOURS:
            work, rate = job(cost, parallel=condition.parallel, stopped=condition.stopped), 1 / (3600 * hours)
            for way in ways(work, rate):
                taken = places(work, way)
                entry = found.setdefault(way.name, _Expected([], [], []))
                entry.checkpoints.append(len(taken))
                entry.published.append(loss_given_away(work, taken, rate, jacobian=False))
                entry.true.append(loss_given_away(work, taken, rate, jacobian=True))
    return found


def _against(expected: dict[str, _Expected], name: str, other: str, measure: str) -> Range:
    ours, theirs = getattr(expected[name], measure), getattr(expected[other], measure)
    return Range.of([one / another for one, another in zip(ours, theirs, strict=True)])


def _loss(rows: list[Row]) -> float:
    return _sum(rows, "loss_lost") + _sum(rows, "loss_delayed")


def _sum(rows: list[Row], measure: str) -> float:
    return sum(row.mean(measure) for row in rows)


def _hours(rows: list[Row]) -> Range:
    walls = [outcome.wall_seconds / 3600 for row in rows for outcome in row.outcomes]
    low, middle, high = statistics.quantiles(walls, n=4, method="inclusive")
    return Range(middle, low, high)
