"""How a job would carry out an order to restore: as its attempt says, as long as there is one."""

from __future__ import annotations

from typing import cast

from holdfast.protocol import RestoreMode
from holdfast_server import models


def mode_of(attempt: models.Attempt | None, *, alive: bool) -> RestoreMode:
    """One that does not say goes back in place: all did, before they could say."""
    if not alive or attempt is None:
        return "next_start"
    return cast("RestoreMode", attempt.restore_mode or "in_place")


def reason_of(attempt: models.Attempt | None, *, alive: bool) -> str:
    """Why a running job does not go back in place; empty where it does, or does not run."""
    if attempt is None or mode_of(attempt, alive=alive) == "in_place" or not alive:
        return ""
    return attempt.restore_reason or "its script cannot be taken back while it runs"


def told(attempt: models.Attempt | None, *, alive: bool) -> str:
    """What would happen, and when, in words."""
    match mode_of(attempt, alive=alive):
        case "in_place":
            return "in place, at the next iteration boundary"
        case "relaunch":
            why = reason_of(attempt, alive=alive)
            return f"by starting the script again, which its supervisor does at once: {why}"
        case "next_start" if alive:
            why = reason_of(attempt, alive=alive)
            return f"at the next start of the script, which nobody makes by itself: {why}"
        case _:
            return "at the next start of the job"
