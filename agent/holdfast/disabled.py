"""Strategies that `HOLDFAST_DISABLE=planes,parity` switches off in production, without a change of the script.

Checkpoints that were written with a disabled strategy can still be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

VARIABLE = "HOLDFAST_DISABLE"
STRATEGIES = {
    "device-copy": "snapshots are copied directly to host memory, without a copy in device memory",
    "drain": "checkpoints are not copied to another store, regardless of the setting drain",
    "incremental": "all rows of a tensor are written, regardless of the setting incremental",
    "fork": "host state is copied, regardless of the setting host_state",
    "inventory": "Holdfast does not look for state that no checkpoint holds",
    "links": "unchanged files are written again instead of linked",
    "machine-metrics": "use of processors, memory, disks and network is not reported",
    "memory-tier": "the supervisor's memory neither keeps snapshots nor completes them after a crash",
    "parity": "checkpoints have no parity, regardless of the setting parity",
    "peers": "no snapshot is sent to another host, regardless of the setting peers",
    "store-shares": "what the job writes to its store is neither reported nor limited",
    "planes": "checkpoints are not compressed, regardless of the setting compress",
}
"""What each name means. The names of policies can be given as well: checkfreq then replaces them."""


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
            off.append(f"{VARIABLE} switches off the policy {name}: checkfreq replaces it")
        else:
            known = ", ".join([*STRATEGIES, *replaceable])
            warnings.append(f"{VARIABLE}={name!r} has no effect: the names are {known}")
    return off, warnings
