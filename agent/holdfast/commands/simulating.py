"""`holdfast plan --simulate`: every policy through the same failures, beside what the formulas say of them."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.commands.plot import ettr
from holdfast.pacing import Failures, History, Profile, Settings
from holdfast.pacing.outlook import Outlook
from holdfast.simulation import FORESEEN_FAILURES, Row, compare_planned

RUNS = 20
SIMULATED_HEADER = ("", "ETTR", "QUARTILES", "CHECKPOINTS", "HOURS LOST A DAY")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What one policy came to, over all runs."""

    policy: str
    ettr: float
    ettr_low: float
    """The lower quartile; `ettr` is the median."""
    ettr_high: float
    checkpoints: float
    lost_hours_a_day: float
    """Of each GPU: stalls, work done twice, restarts."""
    runs: int


def simulated(found: Outlook) -> list[Simulated]:
    """Of the job that was looked at; some seconds of a processor's time."""
    persist_seconds = max(0.0, found.lag_seconds)
    profile = Profile(
        iteration_seconds=found.iteration_seconds,
        persist_seconds=persist_seconds,
        cost_seconds=found.cost_seconds,
    )
    history = History(
        failures=Failures(world_size=found.world_size, mean_seconds=found.mtbf_seconds),
        restart_seconds=found.restart_seconds,
    )
    settings = Settings(budget=found.budget)
    return [_summed(row) for row in compare_planned(profile, settings, history, seeds=range(RUNS))]


def told_of(rows: list[Simulated]) -> str:
    return (
        f"Simulated: {rows[0].runs} runs of each policy, each for about {FORESEEN_FAILURES:.0f} mean times "
        "between failures, with the same failures for all; the rate is what it is assumed to be."
    )


def row_of(each: Simulated) -> tuple[str, ...]:
    return (
        each.policy,
        ettr(each.ettr),
        f"{ettr(each.ettr_low)} to {ettr(each.ettr_high)}",
        f"{each.checkpoints:,.0f}",
        f"{each.lost_hours_a_day:.2f}",
    )


def _summed(row: Row) -> Simulated:
    share = row.spread("ettr")
    return Simulated(
        policy=row.name,
        ettr=share.median,
        ettr_low=share.low,
        ettr_high=share.high,
        checkpoints=row.spread("checkpoints").median,
        lost_hours_a_day=24 * (1 - share.median),
        runs=len(row.outcomes),
    )
