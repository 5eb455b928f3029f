"""What-if plans: a job's measured profile with other budgets, intervals, failure rates or numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from holdfast.pacing import FailureHistory, PacingSettings, interval_iterations, parse_budget, parse_every, plan
from holdfast.pacing.failures import ASSUMED_RESTART_SECONDS, FailureEstimate
from holdfast.pacing.policy import has_iteration_time
from holdfast.pacing.settings import parse_mtbf, parse_unsaved_work, parse_write_budget
from holdfast.pacing.what_if import at_world_size, compare_intervals
from holdfast.protocol.analyses import JobPlan, Origin, SettingsPreview
from holdfast.protocol.wire import IntervalDecision
from holdfast.units import FixedInterval, parse_seconds
from holdfast_server import models
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.queries.job_view import JobView
from holdfast_server.records.failures import ObservedFailures, failures_of
from holdfast_server.records.interval_status import in_force, paced_of, profile_of, settings_of

MAX_RANKS = 10_000_000
MAX_TYPED = 40
"""Characters of an input that are parsed, and quoted in an error."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Changed assumptions; `None`: as measured or set."""

    budget: float | None = None
    write_bytes_per_second: float | None = None
    max_unsaved_seconds: float | None = None
    every: FixedInterval | None = None
    """An additional interval to show."""
    mtbf_seconds: float | None = None
    ranks: int | None = None
    restart_seconds: float | None = None


AS_IT_IS = WhatIf()


def what_if(
    *,
    budget: str | None = None,
    write_budget: str | None = None,
    max_unsaved_work: str | None = None,
    every: str | None = None,
    mtbf: str | None = None,
    ranks: str | None = None,
    restart: str | None = None,
    bare: str = "fraction",
) -> WhatIf:
    """Parse inputs, of which empty ones are ignored.

    `bare`: meaning of a budget without a % sign, as for `parse_budget`.

    Raises:
        InvalidSetting: an input is invalid; names the field.
    """
    return WhatIf(
        budget=_read("budget", budget, lambda text: parse_budget(text, bare=bare)),
        write_bytes_per_second=_read("write_budget", write_budget, parse_write_budget),
        max_unsaved_seconds=_read("max_unsaved_work", max_unsaved_work, parse_unsaved_work),
        every=_read("every", every, parse_every),
        mtbf_seconds=_read("mtbf", mtbf, parse_mtbf),
        ranks=_read("ranks", ranks, _ranks),
        restart_seconds=_read("restart", restart, lambda text: parse_seconds(text, "restart")),
    )


def _read(field: str, text: str | None, parse: Callable[[str], T]) -> T | None:
    if text is None or not text.strip():
        return None
    try:
        return parse(text.strip()[:MAX_TYPED])
    except ValueError as error:
        raise InvalidSetting(field, str(error)) from None


def _ranks(text: str) -> int:
    digits = text.replace(",", "")
    if not (digits.isascii() and digits.isdigit()) or not 1 <= int(digits) <= MAX_RANKS:
        raise ValueError(f"ranks {text!r} is not a whole number from 1 to {MAX_RANKS:,}")
    return int(digits)


def preview_settings(
    job: models.JobRecord, *, budget: float | None, every: FixedInterval | str | None
) -> SettingsPreview:
    """Return the plan for changed settings; None leaves a setting. Raises InvalidSetting."""
    paced = paced_of(job)
    settings = _preview_settings(job, paced, budget, every)
    profile = profile_of(paced)
    return SettingsPreview(
        plan=plan(profile, settings) if profile else None,
        in_force=in_force(paced),
        why_none="" if profile else "the job is still measuring its iterations",
        measured_overhead=paced.measured_overhead if paced and profile else None,
    )


def _preview_settings(
    job: models.JobRecord,
    paced: IntervalDecision | None,
    budget: float | None,
    every: FixedInterval | str | None,
) -> PacingSettings:
    try:
        chosen = None if budget is None else parse_budget(budget)
        interval = None if every is None else parse_every(every)
    except ValueError as error:
        raise InvalidSetting("budget" if budget is not None else "every", str(error)) from None
    settings = settings_of(job, paced)
    return replace(settings, budget=settings.budget if chosen is None else chosen, every=interval)


def plan_job(view: JobView, what_if: WhatIf = AS_IT_IS) -> JobPlan:
    row = view.job
    seen = failures_of(view.session, row)
    paced = paced_of(row)
    profile = profile_of(paced)
    if profile is not None and not has_iteration_time(profile):
        profile = None
    failures = _failures(seen, paced, what_if)
    restart = what_if.restart_seconds
    if restart is None:
        restart = seen.restart_seconds if seen.restart_seconds is not None else ASSUMED_RESTART_SECONDS
    return JobPlan(
        job=view.name,
        comparison=None
        if paced is None or profile is None
        else compare_intervals(
            profile,
            _settings(row, paced, what_if),
            FailureHistory(failures=failures, restart_seconds=restart),
            current=paced.interval,
            requested=()
            if what_if.every is None
            else (interval_iterations(what_if.every, profile.iteration_seconds),),
        ),
        why_none="" if profile else "the job is still measuring its iterations",
        held_by_hand=row.every is not None or row.interval_seconds is not None,
        failures=seen.count,
        running_seconds=seen.running_seconds,
        restarts=seen.restarts,
        origins=_origins(seen, paced, what_if),
    )


def _failures(seen: ObservedFailures, paced: IntervalDecision | None, what_if: WhatIf) -> FailureEstimate:
    """Combine the assumed or stated mean time between failures with the observed failures."""
    ranks = what_if.ranks or seen.failures.world_size
    if what_if.mtbf_seconds is not None:
        return FailureEstimate(world_size=ranks, mean_seconds=what_if.mtbf_seconds)
    if paced is None or paced.mtbf_seconds is None:
        return at_world_size(seen.failures, ranks)
    # stated for the current number of ranks; it scales as that of any job
    here, there = seen.failures, replace(seen.failures, world_size=ranks)
    stated = paced.mtbf_seconds * there.prior_seconds / here.prior_seconds
    return replace(at_world_size(here, ranks), mean_seconds=stated)


def _settings(job: models.JobRecord, paced: IntervalDecision, what_if: WhatIf) -> PacingSettings:
    settings = settings_of(job, paced)
    return replace(
        settings,
        budget=what_if.budget or settings.budget,
        write_bytes_per_second=what_if.write_bytes_per_second or settings.write_bytes_per_second,
        max_unsaved_seconds=what_if.max_unsaved_seconds or settings.max_unsaved_seconds,
    )


def _origins(seen: ObservedFailures, paced: IntervalDecision | None, what_if: WhatIf) -> dict[str, Origin]:
    mtbf: Origin = "estimated" if seen.count else "assumed"
    if what_if.mtbf_seconds or (paced is not None and paced.mtbf_seconds and not seen.count):
        mtbf = "stated"
    return {
        "mtbf_seconds": mtbf,
        "restart_seconds": "stated"
        if what_if.restart_seconds is not None
        else ("measured" if seen.restarts else "assumed"),
        "world_size": "stated" if what_if.ranks else "measured",
        "budget": "stated" if what_if.budget else "set",
        "write_bytes_per_second": "stated" if what_if.write_bytes_per_second else "set",
        "max_unsaved_seconds": "stated" if what_if.max_unsaved_seconds else "set",
    }
