"""Worker processes, as seen by the driver."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, end_group

ANSWER_SECONDS = 240.0
LEAVE_SECONDS = 15.0


class ContenderExcluded(Exception):
    """A contender that cannot take part, with the reason."""


class WorkerProcess:
    def __init__(self, kind: str, log: Path) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._channel, self._log = ours, log
        # One compute thread, and a process group of its own, so that helpers end with the worker.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker", kind, str(theirs.fileno())],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()
        self.pid = self._process.pid

    def call(self, what: str, *arguments: Any) -> Any:
        """Run one call in the worker; ContenderExcluded if it fails or times out."""
        try:
            self._channel.send((what, arguments))
            if not self._channel.poll(ANSWER_SECONDS):
                raise ContenderExcluded(f"{what}: no answer in {ANSWER_SECONDS:.0f} s")
            answer, error = self._channel.recv()
        except (EOFError, OSError) as gone:
            raise ContenderExcluded(f"{what}: its process ended ({self._last_words()})") from gone
        if error is not None:
            raise ContenderExcluded(f"{what}: {_first_and_last(error)}")
        return answer

    def end(self) -> None:
        """Close the channel and end the worker with all of its helpers."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_SECONDS)
        end_group(self._process, at_once=True)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def _first_and_last(text: str) -> str:
    """Shorten an error to its first and last line; a remote traceback ends with the cause."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if len(lines) < 2 else f"{lines[0]} … {lines[-1]}"
