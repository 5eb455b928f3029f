"""Polling for a condition that only the file system or another process can fulfill."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 300.0
"""Timeout in seconds, long enough for a busy machine."""
POLL_SECONDS = 0.01


def eventually(
    condition: Callable[[], object], what: str = "the condition", seconds: float = PATIENCE_SECONDS
) -> None:
    """Wait until `condition` holds; fail the test, naming `what` it waited for, after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(POLL_SECONDS)
