"""Captures the output of a trainer for the server, without changing what the terminal or a file receives.

The trainer writes to pipes, or to a pseudo-terminal in the place of a terminal. A separate process, the relay,
passes the bytes on. It ignores stop signals and outlives this process: a supervisor that is killed must not break
the pipes of a trainer that is still saving its state.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import sys
import termios
import tty
from collections.abc import Mapping
from pathlib import Path

from holdfast.system import processes, supervisor_files

RELAY = "holdfast.supervisor.output_relay"
DRAIN_SECONDS = 5.0
"""How long to wait until the last output of an ended trainer has been passed on."""
REPORT_SECONDS = 12.0
"""How long the last relay may take to send the last lines before the supervisor ends."""


class OutputCapture:
    """The capture of one start. OSError: no pipe, terminal or process can be had.

    Args:
        folder: the supervisor's folder, in which the trainer publishes its attempt.
        environment: environment of the relay, with the token of the server.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.stdout: int | None = None
        self.stderr: int | None = None
        """What the trainer's output goes to; `None`: where that of this process goes."""
        with contextlib.ExitStack() as on_error, contextlib.ExitStack() as of_relay:

            def opened(pair: tuple[int, int]) -> tuple[int, int]:
                of_relay.callback(os.close, pair[0])
                on_error.callback(os.close, pair[1])
                return pair

            streams = []
            if _is_open(1):
                source, self.stdout = opened(_channel(1))
                streams.append((source, 1))
            if _is_open(2):
                if self.stdout is not None and os.path.sameopenfile(1, 2):
                    self.stderr = self.stdout  # in one channel, so that their order stays
                else:
                    source, self.stderr = opened(_channel(2))
                    streams.append((source, 2))
            # the relay sees the end of this process, or of the trainer, as the end of the pipe `control`
            control, self._control = opened(os.pipe())
            self._drained, drained = os.pipe()
            of_relay.callback(os.close, drained)
            on_error.callback(os.close, self._drained)
            passed = [control, drained, *(source for source, _ in streams)]
            words = [
                str(folder),
                str(control),
                str(drained),
                *(f"{source}:{target}" for source, target in streams),
            ]
            with processes.blocked(*processes.STOP_SIGNALS):
                self.relay = subprocess.Popen(  # noqa: S603  this interpreter
                    [sys.executable, "-P", "-m", RELAY, *words],
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    pass_fds=passed,
                )
            on_error.pop_all()

    def trainer_started(self) -> None:
        """Close the ends that the trainer has inherited, or will never inherit."""
        for fd in {self.stdout, self.stderr} - {None}:
            os.close(fd)  # type: ignore[arg-type]

    def trainer_ended(self) -> None:
        """Wait until the output so far has been passed on."""
        os.close(self._control)
        select.select([self._drained], [], [], DRAIN_SECONDS)
        os.close(self._drained)


def begin(folder: Path, environment: Mapping[str, str]) -> OutputCapture | None:
    """Begin a capture; `None` where it is not possible, which a line of the log says."""
    try:
        return OutputCapture(folder, environment)
    except OSError as error:
        supervisor_files.log_line(f"the output of the trainer cannot be captured: {error}")
        return None


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _channel(target: int) -> tuple[int, int]:
    """Return the reading and the writing end of a pseudo-terminal if `target` is a terminal, else of a pipe."""
    if not os.isatty(target):
        return os.pipe()
    reading, writing = os.openpty()
    tty.setraw(writing)  # the real terminal translates line ends
    with contextlib.suppress(OSError):
        copy_window_size(target, writing)
    return reading, writing


def copy_window_size(source: int, target: int) -> None:
    """Give one terminal the size of another."""
    fcntl.ioctl(target, termios.TIOCSWINSZ, fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * 8))
