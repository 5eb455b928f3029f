"""When to take a checkpoint: policies over a `Profile`, and the controller that keeps to the budget.

No clock, no threads, no torch: the agent asks it at each iteration, the server to preview a setting.
"""

from holdfast.pacing.controller import FIRST_SECONDS, Controller
from holdfast.pacing.estimator import Observation
from holdfast.pacing.failures import Failures, History
from holdfast.pacing.planner import find_policy, parse_policy, plan, policies, policy_names
from holdfast.pacing.policy import Policy
from holdfast.pacing.profile import Plan, Profile, SnapshotMode
from holdfast.pacing.settings import (
    DEFAULT_BUDGET,
    MAX_BUDGET,
    MAX_INTERVAL,
    MIN_BUDGET,
    Settings,
    parse_budget,
    parse_every,
    parse_mtbf,
)

__all__ = [
    "DEFAULT_BUDGET",
    "FIRST_SECONDS",
    "MAX_BUDGET",
    "MAX_INTERVAL",
    "MIN_BUDGET",
    "Controller",
    "Failures",
    "History",
    "Observation",
    "Plan",
    "Policy",
    "Profile",
    "Settings",
    "SnapshotMode",
    "find_policy",
    "parse_budget",
    "parse_every",
    "parse_mtbf",
    "parse_policy",
    "plan",
    "policies",
    "policy_names",
]
