"""What the policies share that look at the loss, or place a limited number of checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace

from .goodput import goodput
from .policy import History
from .profile import Plan, Profile
from .progress import LossCurve
from .settings import Settings


def goodput_instead(profile: Profile, settings: Settings, history: History, because: str) -> Plan:
    plan = goodput(profile, settings, history)
    return replace(plan, reason=f"{because}, so goodput decides: {plan.reason}")


def spent(settings: Settings, history: History, policy: str) -> Plan | None:
    """The plan of a job that has taken all the checkpoints it may; None while some are left, or without limit."""
    limit = settings.checkpoints
    if limit is None or history.checkpoints < limit:
        return None
    return Plan(
        interval=None,
        policy=policy,
        reason=f"all {limit:,} checkpoints that the job may take are taken: no more until the limit is raised, "
        "another policy is chosen or somebody asks for one",
    )


def falling(history: History) -> LossCurve | None:
    """The loss curve, where it can be used."""
    curve = history.progress
    return curve if curve is not None and 0 < curve.decay < math.inf else None
