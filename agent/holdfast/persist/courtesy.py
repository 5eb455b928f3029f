"""Manners of whatever works beside training: it comes second to the processors, and first when memory runs out."""

from __future__ import annotations

import contextlib
from pathlib import Path

from holdfast.io_pool import lower_cpu_priority as be_nice

__all__ = ["be_nice", "volunteer"]

OUT_OF_MEMORY_SCORE = 500
"""Of 1,000: where memory runs out, a helper dies and costs one checkpoint, before a trainer does."""


def volunteer() -> None:
    """Let the kernel take this process before others when memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OUT_OF_MEMORY_SCORE))
