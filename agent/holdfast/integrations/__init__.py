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
            f"state={{{common[0]!r}: ...}}: the adapter saves an object of this name; use another name"
        )


def reject_restore_in_place(settings: Mapping[str, Any], loop: str) -> None:
    """Raise ValueError for `restorable_in_place=True` in the settings of a session whose `loop` cannot go back."""
    if settings.get("restorable_in_place"):
        raise ValueError(
            f"restorable_in_place=True: {loop} cannot go back while it runs; drop it, and a restore restarts the "
            "script"
        )
