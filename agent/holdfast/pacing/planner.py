"""From settings and a profile to a plan: operators' orders first, then the chosen policy.

checkfreq: as often as the pipeline allows and the budget permits. Algorithm 1 of J. Mohan, A. Phanishayee,
    V. Chidambaram, "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", FAST'21, section 4.2, as printed there.
goodput: the exact optimum of the effective training time ratio (see `interval_cost`), for the mean of the
    posterior over the failure rate. The budget is a ceiling, not a target.
young-daly: √(2δM) - δ, the rule that schedulers and papers compare with.
fixed: an interval that an operator or the script set, kept whatever it costs.

Other packages add policies by entry points of the group `holdfast.policies`, functions like those here:

    [project.entry-points."holdfast.policies"]
    tidal = "my_package.tidal:tidal"

They are looked for when a name is none of ours, and loaded when first needed. A faulty one never stops a job:
checkfreq decides then, and the reason says so.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from holdfast.pacing.failures import History
from holdfast.pacing.interval_cost import (
    best_interval,
    budget_interval,
    checkpoint_cost,
    daly_interval_seconds,
    expect,
    expect_within,
    lag_seconds,
    pipeline_interval,
)
from holdfast.pacing.policy import (
    Policy,
    cost_in_words,
    duration,
    failures_in_words,
    failures_of,
    percent,
    plural,
    usable_iteration,
)
from holdfast.pacing.profile import Plan, Profile
from holdfast.pacing.settings import MAX_INTERVAL, Settings

GROUP = "holdfast.policies"


def checkfreq(profile: Profile, settings: Settings, history: History) -> Plan:
    """The most frequent checkpoints that keep their cost within the budget."""
    plan = expect_within(profile, settings, history, 1, policy="checkfreq", reason="")
    if plan.interval is None:
        return plan
    cost = checkpoint_cost(profile)
    price = cost_in_words(profile, cost)
    share = f"{percent(cost / (plan.interval * profile.iteration_seconds))} of {plural(plan.interval)}"
    pipeline, affordable = pipeline_interval(profile), budget_interval(profile, settings.budget) or 1
    if affordable >= pipeline and affordable > 1:
        reason = f"{price}, {share}: as often as the budget of {percent(settings.budget)} allows"
    elif pipeline > 1:
        busy = duration(lag_seconds(profile))
        reason = f"a checkpoint takes {busy} to become durable and the next waits for it; {price}, {share}"
    else:
        reason = f"{price}, {share}: every iteration is within the budget of {percent(settings.budget)}"
    return replace(plan, reason=reason)


def goodput(profile: Profile, settings: Settings, history: History) -> Plan:
    """The interval of the highest effective training time ratio that the budget and the pipeline allow."""
    if not usable_iteration(profile):
        return expect_within(profile, settings, history, 1, policy="goodput", reason="")
    failures = failures_of(settings, history)
    best = best_interval(profile, failures.rate)
    cost = cost_in_words(profile, checkpoint_cost(profile))
    reason = (
        f"for the most progress in the time there is: best every {plural(best)} "
        f"({duration(best * profile.iteration_seconds)}), as {cost} and {failures_in_words(failures)}"
    )
    plan = expect_within(profile, settings, history, best, policy="goodput", reason=reason)
    if plan.effective is None:
        return plan
    return replace(plan, reason=f"{plan.reason}; {percent(plan.effective)} of the time moves training forward")


def young_daly(profile: Profile, settings: Settings, history: History) -> Plan:
    """Daly's first-order interval, or as near above as the budget and the pipeline allow."""
    failures, cost = failures_of(settings, history), checkpoint_cost(profile)
    seconds = daly_interval_seconds(failures.rate, cost)
    iterations = seconds / profile.iteration_seconds if usable_iteration(profile) else 1
    reason = (
        f"for the least time lost to checkpoints and failures, by Young's and Daly's approximation: every "
        f"{duration(seconds)}, as {cost_in_words(profile, cost)} and {failures_in_words(failures)}"
    )
    wanted = max(1, round(min(MAX_INTERVAL, iterations)))
    return expect_within(profile, settings, history, wanted, policy="young-daly", reason=reason)


def fixed(profile: Profile, settings: Settings, history: History) -> Plan:
    """Every `settings.every` iterations; without that number CheckFreq decides."""
    if settings.every is None:
        plan = checkfreq(profile, settings, history)
        return replace(
            plan, reason=f"no interval is set for the policy fixed, so checkfreq decides: {plan.reason}"
        )
    interval = max(1, settings.every)
    plan = expect(profile, settings, history, interval, policy="fixed", reason=f"set to every {plural(interval)}")
    if plan.overhead is None:
        return plan
    if plan.overhead > settings.budget:
        warning = f": {percent(plan.overhead)} is more than the budget of {percent(settings.budget)}"
    elif lag_seconds(profile) > interval * profile.iteration_seconds + plan.cost_seconds:
        warning = ": writing one takes longer than that, so checkpoints will wait for each other"
    else:
        warning = f", within the budget of {percent(settings.budget)}"
    return replace(plan, reason=f"{plan.reason}{warning}")


policies: dict[str, Policy] = {
    "checkfreq": checkfreq,
    "goodput": goodput,
    "young-daly": young_daly,
    "fixed": fixed,
}
"""Ours. Those of other packages are found by `find_policy`."""


def plan(profile: Profile | None, settings: Settings, history: History = History()) -> Plan:  # noqa: B008
    """The plan in force under `settings`: paused wins over an ordered interval, and that over the policy.

    Never raises: settings may come from a server newer than this agent. A policy unknown here is replaced
    by checkfreq, and the reason says so. `profile` is None until an iteration and a checkpoint were measured.
    """
    if settings.paused:
        return Plan(
            interval=None, policy=settings.policy, overhead=0.0, reason="paused: no checkpoints until resumed"
        )
    if settings.every is not None:
        if profile is None:
            interval = max(1, settings.every)
            return Plan(
                interval=interval, policy="fixed", reason=f"set to every {plural(interval)}; cost not known yet"
            )
        return fixed(profile, settings, history)
    if profile is None:
        return Plan(
            interval=None, policy=settings.policy, reason="still measuring iterations and the first checkpoint"
        )
    try:
        policy = find_policy(settings.policy)
    except ValueError as error:
        return _checkfreq_instead(profile, settings, history, str(error))
    return policy(profile, settings, history)


def find_policy(name: str) -> Policy:
    """One of ours or of another package; ValueError where there is none of this name, or it cannot be loaded."""
    if name in policies:
        return policies[name]
    if name not in installed():
        raise ValueError(f"policy {name!r} is not one of {', '.join(policy_names())}")
    found = _loaded(name)
    if isinstance(found, str):
        raise ValueError(found)
    return found


def policy_names() -> list[str]:
    """All that can be chosen, those of other packages included."""
    return sorted({*policies, *installed()})


def parse_policy(value: str) -> str:
    """The name of a policy as typed; ValueError with the names that exist otherwise."""
    text = str(value).strip().lower()
    find_policy(text)
    return text


@cache
def installed() -> dict[str, EntryPoint]:
    """Policies of other packages, by name in lower case."""
    return {entry.name.lower(): entry for entry in entry_points(group=GROUP)}


@cache
def _loaded(name: str) -> Policy | str:
    """The installed policy, safe to call with anything; why not, where it cannot be loaded, without a retry."""
    entry = installed()[name]
    try:
        policy = entry.load()
    except Exception as error:  # importing another package's module may raise anything
        return f"policy {name!r} of {entry.value} cannot be loaded: {type(error).__name__}: {error}"
    if not callable(policy):
        return f"policy {name!r} of {entry.value} is no function"

    def guarded(profile: Profile, settings: Settings, history: History) -> Plan:
        try:
            made: object = policy(profile, settings, history)
        except Exception as error:  # another package's code must not stop training
            why = f"policy {name!r} failed: {type(error).__name__}: {error}"
            return _checkfreq_instead(profile, settings, history, why)
        interval = made.interval if isinstance(made, Plan) else -1
        if not isinstance(made, Plan) or not (
            interval is None or (isinstance(interval, int) and 1 <= interval <= MAX_INTERVAL)
        ):
            why = f"policy {name!r} made no plan that can be kept"
            return _checkfreq_instead(profile, settings, history, why)
        if interval is None:
            return Plan(interval=None, policy=name, reason=str(made.reason))
        # cost, overhead and exposure are computed here, whatever the plan says
        return expect(profile, settings, history, interval, policy=name, reason=str(made.reason))

    return guarded


def _checkfreq_instead(profile: Profile, settings: Settings, history: History, because: str) -> Plan:
    made = checkfreq(profile, settings, history)
    return replace(made, reason=f"{because}; checkfreq decides: {made.reason}")
