"""When to take a checkpoint: policies over a `Profile`, and the controller that keeps to the budget.

No clock, no threads, no torch: the agent asks it at each iteration, the server to preview a setting.
"""

from .controller import Controller
from .estimate import Observation
from .planning import parse_policy, plan, policies
from .policy import History, Policy
from .profile import Plan, Profile, SnapshotMode
from .settings import (
    DEFAULT_BUDGET,
    MAX_BUDGET,
    MAX_INTERVAL,
    MIN_BUDGET,
    Settings,
    parse_budget,
    parse_every,
)

__all__ = [
    "DEFAULT_BUDGET",
    "MAX_BUDGET",
    "MAX_INTERVAL",
    "MIN_BUDGET",
    "Controller",
    "History",
    "Observation",
    "Plan",
    "Policy",
    "Profile",
    "Settings",
    "SnapshotMode",
    "parse_budget",
    "parse_every",
    "parse_policy",
    "plan",
    "policies",
]
