"""The verdict on a job: its condition in one sentence."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

VerdictCause = Literal[
    "failed", "silent", "restarting", "restoring", "failing", "stuck", "loss", "damaged", "late", "alert",
    "paused", "data", "straggler", "starting", "unprotected", "healthy", "stopped", "finished",
]  # fmt: skip
"""Causes of a verdict, the most severe first."""
VerdictLevel = Literal["critical", "warning", "info", "good", "ended"]


class Verdict(Struct, kw_only=True, frozen=True):
    """The most severe condition of a job, in one sentence."""

    cause: VerdictCause
    level: VerdictLevel
    text: str
    """The condition with its figure, without a full stop."""
    next_step: str = ""
    """What to do about it; empty if there is nothing to do."""
