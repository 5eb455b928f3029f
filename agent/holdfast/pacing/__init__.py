"""When to take a checkpoint: policies, and the controller that keeps the measured overhead within the budget.

`Controller` is the entry point of the agent, `plan` that of the server and the command line. Pure: no clock, no
threads, no torch, and no import from other packages of ours. `docs/internals/pacing.md` explains how it works.
"""

from holdfast.pacing.controller import FIRST_SECONDS, Controller
from holdfast.pacing.estimator import Observation
from holdfast.pacing.failures import FailureEstimate, FailureHistory
from holdfast.pacing.planner import find_policy, parse_policy, plan, policies, policy_names
from holdfast.pacing.policy import IntervalPlan, Policy, Profile, SnapshotMode
from holdfast.pacing.settings import (
    DEFAULT_BUDGET,
    MAX_BUDGET,
    MAX_INTERVAL,
    MIN_BUDGET,
    PacingSettings,
    interval_iterations,
    interval_time,
    parse_budget,
    parse_every,
    parse_mtbf,
)
from holdfast.units import FixedInterval

__all__ = [
    "DEFAULT_BUDGET",
    "FIRST_SECONDS",
    "MAX_BUDGET",
    "MAX_INTERVAL",
    "MIN_BUDGET",
    "Controller",
    "FailureEstimate",
    "FailureHistory",
    "FixedInterval",
    "IntervalPlan",
    "Observation",
    "PacingSettings",
    "Policy",
    "Profile",
    "SnapshotMode",
    "find_policy",
    "interval_iterations",
    "interval_time",
    "parse_budget",
    "parse_every",
    "parse_mtbf",
    "parse_policy",
    "plan",
    "policies",
    "policy_names",
]
