"""The driver's end of the line to a worker."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ANSWER_SECONDS = 240.0
LEAVE_SECONDS = 15.0


class LeftOut(Exception):
    """A contender cannot take part, or not any longer; the message says why."""


class Worker:
    def __init__(self, kind: str, log: Path) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._channel, self._log = ours, log
        # One compute thread each, and a process group of its own, so that its helpers can be ended with it.
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
        """One of its turns. LeftOut when it breaks or does not answer."""
        try:
            self._channel.send((what, arguments))
            if not self._channel.poll(ANSWER_SECONDS):
                raise LeftOut(f"{what}: no answer in {ANSWER_SECONDS:.0f} s")
            answer, error = self._channel.recv()
        except (EOFError, OSError) as gone:
            raise LeftOut(f"{what}: its process ended ({self._last_words()})") from gone
        if error is not None:
            raise LeftOut(f"{what}: {_first_and_last(error)}")
        return answer

    def end(self) -> None:
        """Hang up, and make sure that neither it nor a helper of its stays."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "without a word")


def _first_and_last(text: str) -> str:
    """Of what a library said: a remote traceback says what happened in its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if len(lines) < 2 else f"{lines[0]} … {lines[-1]}"
