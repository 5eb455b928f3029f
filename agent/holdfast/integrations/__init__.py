"""Adapters for training frameworks, loggers and tracing, each in a module that imports its framework.

An adapter creates a `Session` from the objects of a framework, calls `session.step` at the end of each update, and
saves what only the framework knows: its loops, its callbacks and its position in the data. It may import the
session and everything below it; no other package of the agent imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def reject_common_names(objects: Mapping[str, Any], further: Mapping[str, Any]) -> None:
    """Raise ValueError if `state` of the user has a name under which an adapter saves an object itself."""
    if common := sorted(objects.keys() & further.keys()):
        raise ValueError(
            f"state={{{common[0]!r}: ...}}: the adapter saves its own object as this; use another name"
        )
