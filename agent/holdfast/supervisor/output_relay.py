"""The process that passes the output of a trainer on, and sends its last lines to the server.

It never waits for the server while it passes output on: a thread sends. It ends with the last process of the
trainer that holds the output open.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.protocol.tracebacks import exception_in, exception_text
from holdfast.protocol.wire import MAX_OUTPUT_CHARACTERS, MAX_OUTPUT_LINES, OUTPUT_RANK, OutputReport
from holdfast.supervisor import end_causes
from holdfast.supervisor.output_capture import copy_window_size
from holdfast.system import processes, supervisor_channel, supervisor_files
from holdfast.system.masking import mask_text
from holdfast.system.supervisor_channel import PublishedAttempt
from holdfast.system.supervisor_files import EndInOutput

if TYPE_CHECKING:
    from holdfast.supervisor.supervisor_link import SupervisorReporter

READ_BYTES = 65536
SEND_SECONDS, MOST_WAIT_SECONDS = 3.0, 30.0
"""Time between two reports of new lines, and the longest wait for a server that does not answer."""
LAST_REPORT_SECONDS = 10.0
MAX_EXCEPTION = 300
MAX_LINE_BYTES = 4 * MAX_OUTPUT_CHARACTERS + 2000
"""More than is shown: a secret at the end of what is shown must be known as one."""
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b(?:\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_=>()#%][0-9A-B]?)"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
"""Control characters, and those that have no width or change the direction of text."""


class OutputTail:
    """The last lines of an output. Of a line that is overwritten, as by a progress bar, the last state counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque(maxlen=MAX_OUTPUT_LINES)
        self._open: dict[int, bytes] = {}
        """The unfinished line of each stream."""
        self.count = 0
        """Number of lines so far."""

    def add(self, stream: int, data: bytes) -> None:
        *ended, rest = (self._open.get(stream, b"") + data).split(b"\n")
        with self._lock:
            self._lines.extend(_last_written(line) for line in ended)
            self.count += len(ended)
        self._open[stream] = _last_written(rest) + (b"\r" if rest.endswith(b"\r") else b"")

    def end(self) -> None:
        """End the unfinished lines."""
        for stream in [stream for stream, line in self._open.items() if line.strip()]:
            self.add(stream, b"\n")

    def since(self, number: int) -> tuple[int, list[str]]:
        """Return the lines from a number on, or from the oldest that is left, with the number of the first."""
        with self._lock:
            first = max(number, self.count - len(self._lines))
            lines = list(self._lines)[len(self._lines) - (self.count - first) :]
        return first, [plain(line) for line in lines]


def _last_written(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2][:MAX_LINE_BYTES]


def plain(line: bytes) -> str:
    """Return a line without escape sequences, control characters and secrets."""
    text = _CONTROLS.sub("", _ESCAPES.sub("", line.decode(errors="replace")))
    return mask_text(text)[:MAX_OUTPUT_CHARACTERS]


class OutputSender:
    """The thread that reports new lines to the server of the attempt that the trainer publishes."""

    def __init__(self, folder: Path, tail: OutputTail) -> None:
        self._folder, self._tail = folder, tail
        self._sent = 0
        self._reporter: SupervisorReporter | None = None
        self._ended = threading.Event()
        before = supervisor_files.published_attempt(folder)
        self._uid_before = before.uid if before is not None else None
        """The attempt of the previous start."""
        self._thread = threading.Thread(target=self._run, name="holdfast-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Report what is left, within a limited time."""
        self._ended.set()
        self._thread.join(LAST_REPORT_SECONDS)

    def _run(self) -> None:
        wait_seconds = SEND_SECONDS
        while not self._ended.wait(wait_seconds):
            has_sent = self._send()
            wait_seconds = SEND_SECONDS if has_sent else min(2 * wait_seconds, MOST_WAIT_SECONDS)
        self._send()

    def _send(self) -> bool:
        """Report new lines. Return False if the server did not accept them."""
        attempt = supervisor_files.published_attempt(self._folder)
        if self._tail.count == self._sent or attempt is None or attempt.uid == self._uid_before:
            return True
        if not attempt.server:
            return True
        try:
            first, lines = self._tail.since(self._sent)
            if not self._report(attempt, OutputReport(at=time.time(), first=first, lines=lines)):
                return False
            self._sent = first + len(lines)
        except Exception as error:  # output is passed on without reports
            supervisor_channel.logger.debug("the output cannot be reported: %s", error)
            return False
        return True

    def _report(self, attempt: PublishedAttempt, report: OutputReport) -> bool:
        from holdfast.supervisor.supervisor_link import SupervisorReporter  # only with a server

        if self._reporter is None:
            self._reporter = SupervisorReporter(OUTPUT_RANK)
        return self._reporter.send(attempt, 0, report)


def relay(
    streams: dict[int, int],
    control: int,
    drained: int,
    tail: OutputTail,
    at_end: Callable[[], object] = lambda: None,
) -> None:
    """Pass on what each source yields to its target until all have ended.

    `control` ends with the trainer or the supervisor; as soon as all has been passed on, `at_end` is called and
    `drained` is closed.
    """
    poll, broken, unfinished = select.poll(), set[int](), set(streams)
    is_draining = has_drained = False
    for fd in (*streams, control):
        poll.register(fd, select.POLLIN)
    while unfinished:
        ready = {fd for fd, _ in poll.poll(0 if is_draining else None)}
        if control in ready:
            poll.unregister(control)
            is_draining = True
        for source in ready & unfinished:
            if not (data := _read(source)):
                poll.unregister(source)
                unfinished.remove(source)
                continue
            tail.add(source, data)
            if (target := streams[source]) not in broken and not _write(target, data):
                broken.add(target)  # keep reading: the trainer goes on without a reader
        if is_draining and not ready:
            _end_draining(drained, at_end)
            is_draining, has_drained = False, True  # a process that outlives the trainer may still write
    if not has_drained:
        _end_draining(drained, at_end)


def _end_draining(drained: int, at_end: Callable[[], object]) -> None:
    at_end()
    os.close(drained)


def publish_end(folder: Path, tail: OutputTail) -> None:
    """Publish to the supervisor the exception that the output ends with and the cause, as far as it shows them."""
    _, lines = tail.since(0)
    position, cause = exception_in(lines), end_causes.cause_in(lines)
    exception = exception_text(lines[position])[:MAX_EXCEPTION] if position is not None else ""
    supervisor_files.publish_end(folder, EndInOutput(exception=exception, cause=cause))


def _read(source: int) -> bytes:
    try:
        return os.read(source, READ_BYTES)
    except OSError:  # the end of a pseudo-terminal
        return b""


def _write(target: int, data: bytes) -> bool:
    """Write all; return False if nothing reads it any more."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(target, rest) :]
        except BlockingIOError:
            select.select([], [target], [])
        except OSError:
            return False
    return True


def main(arguments: Sequence[str]) -> None:
    """Run with the folder, the descriptors `control` and `drained`, and each source and target."""
    # a relay that is stopped or ended would stop the trainer
    for number in (*processes.STOP_SIGNALS, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTSTP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    folder, control, drained, *pairs = arguments
    streams = {int(source): int(target) for source, _, target in (pair.partition(":") for pair in pairs)}

    def follow_size(*_: object) -> None:
        for source, target in streams.items():
            with contextlib.suppress(OSError):  # not a terminal
                copy_window_size(target, source)

    signal.signal(signal.SIGWINCH, follow_size)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.STOP_SIGNALS)
    tail = OutputTail()
    sender = OutputSender(Path(folder), tail)
    relay(streams, int(control), int(drained), tail, lambda: publish_end(Path(folder), tail))
    tail.end()
    sender.close()


if __name__ == "__main__":
    main(sys.argv[1:])
