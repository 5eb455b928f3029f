"""Where the ranks of a trainer are stuck: each dumps its own stacks on a signal, or py-spy looks from outside."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence

from holdfast.supervision import STACKS_SIGNAL, Rank

PATIENCE_SECONDS = 3.0
"""A dump takes milliseconds, unless the process is stopped or in the midst of a system call that does not end."""
SETTLED_SECONDS = 0.2
PY_SPY_SECONDS = 20.0


def captured(ranks: Sequence[Rank]) -> dict[int, str]:
    """The stacks of each rank, by rank; what could be said in their place where one does not answer."""
    for each in ranks:
        _ask(each)
    deadline = time.monotonic() + PATIENCE_SECONDS
    return {each.rank: _dumped(each, deadline) or _seen_from_outside(each) for each in ranks}


def _ask(rank: Rank) -> None:
    if STACKS_SIGNAL is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(rank.pid, STACKS_SIGNAL)


def _dumped(rank: Rank, deadline: float) -> str:
    """What it wrote, once nothing more comes; nothing where it wrote nothing in time."""
    text, since = "", time.monotonic()
    while time.monotonic() < deadline:
        found = _read(rank)
        if found != text:
            text, since = found, time.monotonic()
        elif text and time.monotonic() - since >= SETTLED_SECONDS:
            break
        time.sleep(0.02)
    return text


def _read(rank: Rank) -> str:
    try:
        return _training_first(rank.path.read_text(errors="replace").strip())
    except OSError:
        return ""


def _training_first(dump: str) -> str:
    """The thread that took the signal, which is the one that trains, comes last in a dump, and is wanted first."""
    threads = dump.split("\n\n")
    return "\n\n".join(sorted(threads, key=lambda thread: not thread.startswith("Current thread")))


def _seen_from_outside(rank: Rank) -> str:
    py_spy = shutil.which("py-spy")
    if py_spy is None:
        return "it does not answer, and py-spy is not installed to look at it from outside"
    command = [py_spy, "dump", "--pid", str(rank.pid)]
    try:
        seen = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=PY_SPY_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not answer, nor can py-spy look at it: {error}"
    return seen.stdout.strip() or f"it does not answer, nor can py-spy look at it: {seen.stderr.strip()}"
