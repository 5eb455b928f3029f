"""CheckFreq's policy: as often as the pipeline allows and the budget permits.

Algorithm 1 of J. Mohan, A. Phanishayee, V. Chidambaram, "CheckFreq: Frequent, Fine-Grained DNN Checkpointing",
FAST'21, section 4.2, as printed there (the authors' released code ignores the budget when it chooses k). Its
quantities are in `bounds`, for no other policy may overstep them. Two things are added: k is rounded up and at
least 1, and the measured cost of a checkpoint, once known, takes the place of the predicted stall To.
"""

from __future__ import annotations

from dataclasses import replace

from .bounds import budget_interval, checkpoint_cost, lag_seconds, pipeline_interval
from .expectation import expect_within
from .policy import History, cost_in_words, duration, percent, plural
from .profile import Plan, Profile
from .settings import Settings


def checkfreq(profile: Profile, settings: Settings, history: History) -> Plan:
    """The most frequent checkpoints that keep their cost within the budget."""
    plan = expect_within(profile, settings, history, 1, policy="checkfreq", reason="")
    return plan if plan.interval is None else replace(plan, reason=_why(profile, settings, plan.interval))


def _why(profile: Profile, settings: Settings, interval: int) -> str:
    cost = checkpoint_cost(profile)
    price = cost_in_words(profile, cost)
    share = f"{percent(cost / (interval * profile.iteration_seconds))} of {plural(interval)}"
    pipeline, affordable = pipeline_interval(profile), budget_interval(profile, settings.budget) or 1
    if affordable >= pipeline and affordable > 1:
        return f"{price}, {share}: as often as the budget of {percent(settings.budget)} allows"
    if pipeline > 1:
        busy = duration(lag_seconds(profile))
        return f"a checkpoint takes {busy} to become durable and the next waits for it; {price}, {share}"
    return f"{price}, {share}: every iteration is within the budget of {percent(settings.budget)}"
