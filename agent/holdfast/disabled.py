"""Strategies that `HOLDFAST_DISABLE=planes,parity` switches off in production, without a change of the script.

What was written with a strategy that is disabled now can still be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

VARIABLE = "HOLDFAST_DISABLE"
STRATEGIES = {
    "device-copy": "snapshots are copied to host memory at once, not within device memory first",
    "drain": "checkpoints are not copied to another store, whatever the setting drain says",
    "incremental": "all rows of a tensor are written, whatever the setting incremental says",
    "fork": "host state is copied, whatever the setting host_state says",
    "inventory": "state that no checkpoint holds is not looked for",
    "links": "unchanged files are written again instead of linked",
    "memory-tier": "the supervisor's memory neither keeps snapshots nor completes them after a crash",
    "parity": "checkpoints have no parity, whatever the setting parity says",
    "peers": "no snapshot is sent to another host, whatever the setting peers says",
    "planes": "checkpoints are not compressed, whatever the setting compress says",
}
"""What each name means. The names of policies can be given as well: checkfreq then decides in their place."""


def disabled_names() -> list[str]:
    """Return the names in the environment variable."""
    return sorted({name.strip().lower() for name in os.environ.get(VARIABLE, "").split(",")} - {""})


def is_disabled(name: str) -> bool:
    """Return whether a strategy, or a policy, is switched off."""
    return VARIABLE in os.environ and name in disabled_names()


def describe(policies: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return what is switched off, and warnings about names that have no effect."""
    off, warnings = list[str](), list[str]()
    replaceable = sorted(set(policies) - {"checkfreq", "fixed"})
    for name in disabled_names():
        if name in STRATEGIES:
            off.append(f"{VARIABLE} switches off {name}: {STRATEGIES[name]}")
        elif name in replaceable:
            off.append(f"{VARIABLE} switches off the policy {name}: checkfreq decides in its place")
        else:
            known = ", ".join([*STRATEGIES, *replaceable])
            warnings.append(f"{VARIABLE}={name!r} has no effect: the names are {known}")
    return off, warnings
