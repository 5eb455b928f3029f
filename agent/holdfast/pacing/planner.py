"""The interval policies, and `plan`, which applies the settings.

goodput (the default): the exact optimum of the effective training time ratio (see `interval_cost`) for the mean of
    the posterior of the failure rate. The budgets are ceilings, not targets.
checkfreq: the shortest interval within the ceilings, which spends a budget in full. Algorithm 1 of J. Mohan,
    A. Phanishayee, V. Chidambaram, "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", FAST'21, section 4.2.
young-daly: √(2δM) - δ, the first-order rule of Young (1974) and Daly (2006).
fixed: the interval from the script or an operator, at any cost.
coci: within the write budget, dense where training learns fast (see `coci`).

Other packages add policies as entry points of the group `holdfast.policies`:

    [project.entry-points."holdfast.policies"]
    tidal = "my_package.tidal:tidal"

They are loaded when first needed. If one fails, checkfreq decides, and the reason says so.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from holdfast.disabled import is_disabled
from holdfast.pacing.failures import FailureHistory
from holdfast.pacing.interval_cost import (
    Ceilings,
    checkpoint_cost,
    daly_interval_seconds,
    forecast,
    forecast_within_ceilings,
    lag_seconds,
    optimal_interval,
    write_budget,
)
from holdfast.pacing.policy import (
    IntervalPlan,
    Policy,
    Profile,
    describe_cost,
    describe_failures,
    estimate_failures,
    has_iteration_time,
)
from holdfast.pacing.settings import MAX_INTERVAL, PacingSettings, interval_iterations
from holdfast.units import FixedInterval, duration, format_interval, format_iterations, format_rate, percent

GROUP = "holdfast.policies"


def checkfreq(profile: Profile, settings: PacingSettings, history: FailureHistory) -> IntervalPlan:
    """Choose the shortest interval within the ceilings."""
    plan = forecast_within_ceilings(profile, settings, history, 1, policy="checkfreq", reason="")
    if plan.interval is None:
        return plan
    cost = checkpoint_cost(profile)
    price = describe_cost(profile, cost)
    share = f"{percent(cost / (plan.interval * profile.iteration_seconds))} of {format_iterations(plan.interval)}"
    ceilings = Ceilings.of(profile, settings)
    if ceilings.shortest == 1:
        reason = f"{price}, {share}: every iteration is within the budget of {percent(settings.budget)}"
    elif ceilings.shortest == ceilings.overhead:
        reason = f"{price}, {share}: as often as the budget of {percent(settings.budget)} allows"
    else:
        reason = f"{price}, {share}: {ceilings.explain(profile, settings)}"
    return replace(plan, reason=reason)


def goodput(profile: Profile, settings: PacingSettings, history: FailureHistory) -> IntervalPlan:
    """Choose the interval with the highest effective training time ratio within the ceilings."""
    if not has_iteration_time(profile):
        return forecast_within_ceilings(profile, settings, history, 1, policy="goodput", reason="")
    failures = estimate_failures(settings, history)
    best = optimal_interval(profile, failures.rate)
    cost = describe_cost(profile, checkpoint_cost(profile))
    reason = (
        f"for the most progress per unit of time: best every {format_iterations(best)} "
        f"({duration(best * profile.iteration_seconds)}), as {cost} and {describe_failures(failures)}"
    )
    plan = forecast_within_ceilings(profile, settings, history, best, policy="goodput", reason=reason)
    if plan.ettr is None:
        return plan
    return replace(plan, reason=f"{plan.reason}; {percent(plan.ettr)} of the time moves training forward")


def young_daly(profile: Profile, settings: PacingSettings, history: FailureHistory) -> IntervalPlan:
    """Choose Daly's first-order interval within the ceilings."""
    failures, cost = estimate_failures(settings, history), checkpoint_cost(profile)
    seconds = daly_interval_seconds(failures.rate, cost)
    iterations = seconds / profile.iteration_seconds if has_iteration_time(profile) else 1
    reason = (
        f"for the least time lost to checkpoints and failures, by Young's and Daly's approximation: every "
        f"{duration(seconds)}, as {describe_cost(profile, cost)} and {describe_failures(failures)}"
    )
    wanted = max(1, round(min(MAX_INTERVAL, iterations)))
    return forecast_within_ceilings(profile, settings, history, wanted, policy="young-daly", reason=reason)


def fixed(profile: Profile, settings: PacingSettings, history: FailureHistory) -> IntervalPlan:
    """Choose `settings.every`; without it, checkfreq decides."""
    if settings.every is None:
        plan = checkfreq(profile, settings, history)
        return replace(
            plan, reason=f"no interval is set for the policy fixed, so checkfreq decides: {plan.reason}"
        )
    if not has_iteration_time(profile) and isinstance(settings.every, timedelta):
        return _unmeasured(settings.every)
    interval = interval_iterations(settings.every, profile.iteration_seconds)
    reason = f"set to every {format_interval(settings.every)}"
    plan = forecast(profile, settings, history, interval, policy="fixed", reason=reason)
    plan = replace(plan, interval_seconds=_interval_seconds(settings.every))
    if plan.overhead is None:
        return plan
    if plan.overhead > settings.budget:
        warning = f": {percent(plan.overhead)} is more than the budget of {percent(settings.budget)}"
    elif Ceilings.of(profile, settings).written > interval:
        warning = f": more than the write budget of {format_rate(write_budget(profile, settings))}"
    elif lag_seconds(profile) > interval * profile.iteration_seconds + plan.cost_seconds:
        warning = ": writing one takes longer than that, so checkpoints will wait for each other"
    else:
        warning = f", {percent(plan.overhead)} overhead"  # it would not change to keep the budget
    return replace(plan, reason=f"{plan.reason}{warning}")


policies: dict[str, Policy] = {
    "checkfreq": checkfreq,
    "goodput": goodput,
    "young-daly": young_daly,
    "fixed": fixed,
}
"""The built-in policies; `find_policy` also finds those of other packages."""


def plan(
    profile: Profile | None,
    settings: PacingSettings,
    history: FailureHistory = FailureHistory(),  # noqa: B008
) -> IntervalPlan:
    """Return the plan under `settings`: a pause comes before a fixed interval, and that before the policy.

    Never raises: settings may come from a newer server, so checkfreq replaces an unknown policy, and the reason
    says so. `profile` is `None` until an iteration and a checkpoint are measured.
    """
    if settings.paused:
        return IntervalPlan(
            interval=None, policy=settings.policy, overhead=0.0, reason="paused: no checkpoints until resumed"
        )
    if settings.every is not None:
        return _unmeasured(settings.every) if profile is None else fixed(profile, settings, history)
    if profile is None:
        return IntervalPlan(
            interval=None, policy=settings.policy, reason="still measuring iterations and the first checkpoint"
        )
    try:
        if is_disabled(settings.policy):
            raise ValueError(f"policy {settings.policy!r} is switched off by HOLDFAST_DISABLE")
        policy = find_policy(settings.policy)
    except ValueError as error:
        return _checkfreq_instead(profile, settings, history, str(error))
    return policy(profile, settings, history)


def _unmeasured(every: FixedInterval) -> IntervalPlan:
    """Return the plan of a fixed interval of which the cost is unknown."""
    return IntervalPlan(
        interval=max(1, every) if isinstance(every, int) else None,
        interval_seconds=_interval_seconds(every),
        policy="fixed",
        reason=f"set to every {format_interval(every)}; cost not known yet",
    )


def _interval_seconds(every: FixedInterval) -> float | None:
    return every.total_seconds() if isinstance(every, timedelta) else None


def find_policy(name: str) -> Policy:
    """Return a policy by name; ValueError if it does not exist or cannot be loaded."""
    if name in policies:
        return policies[name]
    if name not in installed():
        raise ValueError(f"policy {name!r} is not one of {', '.join(policy_names())}")
    found = _loaded(name)
    if isinstance(found, str):
        raise ValueError(found)
    return found


def policy_names() -> list[str]:
    """Return the names of all policies, including those of other packages."""
    return sorted({*policies, *installed()})


def comparable_policies() -> list[str]:
    """Return the names of the policies whose interval does not depend on the progress of a job."""
    return [name for name in policy_names() if name != COCI.name]


def parse_policy(value: str) -> str:
    """Parse the name of a policy; ValueError with the existing names otherwise."""
    text = str(value).strip().lower()
    find_policy(text)
    return text


COCI = EntryPoint("coci", "holdfast.pacing.coci:coci", GROUP)
"""Loaded when it is chosen."""


@cache
def installed() -> dict[str, EntryPoint]:
    """Return the policies that are loaded when needed, by name in lower case: coci, those of other packages."""
    return {entry.name.lower(): entry for entry in (*entry_points(group=GROUP), COCI)}


@cache
def _loaded(name: str) -> Policy | str:
    """Load a policy of another package and guard its calls; return the reason if it cannot be loaded."""
    entry = installed()[name]
    try:
        policy = entry.load()
    except Exception as error:  # importing another package's module may raise anything
        return f"policy {name!r} of {entry.value} cannot be loaded: {type(error).__name__}: {error}"
    if not callable(policy):
        return f"policy {name!r} of {entry.value} is not a function"

    def guarded(profile: Profile, settings: PacingSettings, history: FailureHistory) -> IntervalPlan:
        try:
            made: object = policy(profile, settings, history)
        except Exception as error:  # another package's code must not stop training
            why = f"policy {name!r} failed: {type(error).__name__}: {error}"
            return _checkfreq_instead(profile, settings, history, why)
        interval = made.interval if isinstance(made, IntervalPlan) else -1
        if not isinstance(made, IntervalPlan) or not (
            interval is None or (isinstance(interval, int) and 1 <= interval <= MAX_INTERVAL)
        ):
            why = f"policy {name!r} returned no valid plan"
            return _checkfreq_instead(profile, settings, history, why)
        if interval is None:
            return IntervalPlan(interval=None, policy=name, reason=str(made.reason))
        # do not trust cost, overhead and unsaved work of the returned plan
        return forecast(profile, settings, history, interval, policy=name, reason=str(made.reason))

    return guarded


def _checkfreq_instead(
    profile: Profile, settings: PacingSettings, history: FailureHistory, because: str
) -> IntervalPlan:
    made = checkfreq(profile, settings, history)
    return replace(made, reason=f"{because}; checkfreq decides: {made.reason}")
