"""Manners of whatever works beside training: it comes second to the processors, and first when memory runs out."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

NICENESS = 10
OUT_OF_MEMORY_SCORE = 500
"""Of 1,000: where memory runs out, a helper dies and costs one checkpoint, before a trainer does."""


def be_nice() -> None:
    """For the calling thread, and what it starts from here on; a trainer that is nicer still sets the measure."""
    if sys.platform == "linux":  # where niceness belongs to a thread, not to the whole process
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # a sandbox without that call
            os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def volunteer() -> None:
    """Let the kernel take this process before others when memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OUT_OF_MEMORY_SCORE))
