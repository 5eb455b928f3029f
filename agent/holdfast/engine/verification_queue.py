"""Carry out requests to verify stored checkpoints, one at a time, while training goes on.

A background thread waits for a process that does the work; see `holdfast.checkpoint.verification`.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from typing import IO, TYPE_CHECKING

import msgspec

from holdfast.checkpoint.retention_queue import Protector, RetentionQueue
from holdfast.errors import printable
from holdfast.protocol import wire
from holdfast.protocol.wire import VerifyRequest
from holdfast.save.history import History
from holdfast.system import io_pool
from holdfast.telemetry.reporter import Reporter

if TYPE_CHECKING:
    from holdfast.checkpoint.verification import VerifyResult

logger = logging.getLogger("holdfast")

BYTES_PER_SECOND = 100e6
"""Read rate that leaves bandwidth for checkpoints that are being written."""
PROGRESS_SECONDS = 5.0


class Verifier:
    """Carries out the server's requests. The polling thread calls `follow`, the training thread `close`."""

    def __init__(self, history: History, retention: RetentionQueue, reporter: Reporter) -> None:
        self._history, self._retention, self._reporter = history, retention, reporter
        self._wanted: tuple[VerifyRequest, ...] = ()
        self._done: set[VerifyRequest] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._running: Future[None] | None = None
        self._is_running = self._closed = False
        self._lock = threading.Lock()

    def follow(self, wanted: tuple[VerifyRequest, ...]) -> None:
        """Carry out new requests, and abandon those that were withdrawn."""
        with self._lock:
            self._wanted = wanted
            self._done &= set(wanted)
            if self._next() is None or self._is_running or self._closed:
                return
            self._is_running = True
        # not under the lock: runs on this thread where none can be started
        self._running = io_pool.submit(self._run)

    def close(self) -> None:
        """Abandon the current request; the server repeats it at the next start."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        if self._running is not None and not self._running.cancel():  # otherwise it has not begun
            concurrent.futures.wait([self._running])

    def _run(self) -> None:
        while True:
            with self._lock:
                request = None if self._closed else self._next()
                if request is None:
                    self._is_running = False
                    return
            try:
                self._retention.protect(Protector.VERIFICATION, request.checkpoint)
                self._verify(request)
            except Exception as error:  # a failed request must not prevent the next one
                logger.exception("%s: verification of %s failed", self._reporter.job, request.checkpoint)
                self._report(request, verdict="failed", reason=f"{type(error).__name__}: {error}")
            self._retention.protect(Protector.VERIFICATION, None)
            with self._lock:
                self._done.add(request)

    def _next(self) -> VerifyRequest | None:
        return next((each for each in self._wanted if each not in self._done), None)

    def _given_up(self, request: VerifyRequest) -> bool:
        return self._closed or request not in self._wanted

    def _verify(self, request: VerifyRequest) -> None:
        from holdfast.checkpoint.verification import VerifyMessage, VerifyResult  # few jobs are asked for one

        lines, started, reported_at = msgspec.json.Decoder(VerifyMessage), time.monotonic(), 0.0
        self._report(request)
        with tempfile.TemporaryFile() as errors:
            process = self._start(request, errors)
            assert process.stdout is not None
            finding: VerifyResult | None = None
            with process.stdout as output:
                for line in output:
                    message = lines.decode(line)
                    if self._given_up(request):
                        break
                    if isinstance(message, VerifyResult):
                        finding = message
                    elif time.monotonic() - reported_at >= PROGRESS_SECONDS:
                        reported_at = time.monotonic()
                        self._report(request, read_bytes=message.read_bytes, total_bytes=message.total_bytes)
            if finding is None:
                process.kill()
            status = process.wait()
            with self._lock:
                self._process = None
            if self._given_up(request):
                return
            if finding is None:
                reason = f"the verification process {_ended(status, errors)}"
                finding = VerifyResult(verdict="failed", reason=reason)
        self._conclude(request, finding, time.monotonic() - started)

    def _conclude(self, request: VerifyRequest, finding: VerifyResult, seconds: float) -> None:
        if finding.verdict == "damaged":
            self._history.mark_damaged(request.checkpoint)
            self._reporter.damaged(request.checkpoint, finding.reason or "", "damaged, as verification shows")
        elif finding.verdict == "sound":
            self._history.mark_damaged(request.checkpoint, damaged=False)
        if finding.other_damaged is not None:
            message = f"{request.checkpoint} could not be compared with {request.against}: {finding.other_damaged}"
            self._reporter.notice("warning", "verify", message)
        self._report(
            request,
            verdict=finding.verdict,
            against=None if finding.other_damaged else request.against,
            reason=finding.reason,
            read_bytes=finding.read_bytes,
            total_bytes=finding.total_bytes,
            seconds=seconds,
            tensors=finding.tensors,
        )

    def _start(self, request: VerifyRequest, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        words = [self._history.store.url, self._history.job, request.checkpoint, str(BYTES_PER_SECOND)]
        with self._lock:
            self._process = subprocess.Popen(  # noqa: S603  this interpreter, and no text from users
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "holdfast.checkpoint.verification",
                    *words,
                    *filter(None, [request.against]),
                ],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for the trainer only
            )
            if self._closed:
                self._process.kill()
            return self._process

    def _report(self, request: VerifyRequest, **what: object) -> None:
        reason = what.pop("reason", None)
        event = wire.VerificationReport(
            at=time.time(),
            request=request.id,
            checkpoint=request.checkpoint,
            host=platform.node(),
            reason=printable(str(reason)) if reason else None,
            **what,  # type: ignore[arg-type]
        )
        self._reporter.event(event)


def _ended(status: int, errors: IO[bytes]) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    errors.seek(0)
    last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    return f"ended with exit status {status}" + "".join(f": {line}" for line in last)
