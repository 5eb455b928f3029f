"""When to take a checkpoint: policies over a `Profile`, and the controller that keeps to the budget.

No clock, no threads, no torch: the agent asks it at each iteration, the server to preview a setting.
"""

from .controller import FIRST_SECONDS, Controller
from .estimate import Observation
from .failures import Failures, History
from .planning import find_policy, parse_policy, plan, policies, policy_names
from .policy import Policy
from .profile import Plan, Profile, SnapshotMode
from .settings import (
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
