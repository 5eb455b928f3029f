"""The part of a rank that sends its newest complete snapshot to a rank on another host.

A snapshot is sent once it is digested, while it is written to the store. Its memory is not locked meanwhile: a
later snapshot that needs it removes the completion marker first, which ends the transfer, and the receiver
compares all digests before it counts as held.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from pathlib import Path

from holdfast.checkpoint.reading import RateLimiter
from holdfast.errors import HoldfastError
from holdfast.peers.connection import CHUNK_BYTES, PeerConnection, StoreReplica
from holdfast.peers.places import RankPlace
from holdfast.save.completion_marker import decode_marker
from holdfast.save.host_buffers import Arena
from holdfast.save.run import Run, RunState
from holdfast.system.io_pool import lower_cpu_priority
from holdfast.telemetry.reporter import Reporter

logger = logging.getLogger("holdfast")

SEND_SHARE = 0.1
"""Share of the time between two snapshots over which one is sent."""
FIRST_SECONDS, MOST_SECONDS = 1.0, 30.0
"""Duration of sending while that time is not known, and the longest: until it ends a lost host costs more."""
FIRST_RETRY_SECONDS, MOST_RETRY_SECONDS = 1.0, 60.0
"""Wait before a snapshot that failed is sent again, which doubles; the next snapshot is sent at once."""
MARKER_POLL_SECONDS = 0.02
CLOSE_SECONDS = 5.0
NOTICE_CODE = "peers"


class _Overwritten(HoldfastError):
    """A later snapshot uses the memory."""


class ReplicaSender:
    """Sends snapshots to `target`, the newest one next; listens to the runs of the session."""

    def __init__(self, target: RankPlace, target_rank: int, reporter: Reporter) -> None:
        self._target, self._target_rank, self._reporter = target, target_rank, reporter
        self._lock = threading.Lock()
        self._next: Run | None = None
        """The snapshot to send when the current one is sent."""
        self._is_sending = False
        self._work, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._written_at: float | None = None
        """When the last snapshot was copied, and the time from the one before to it."""
        self._interval_seconds: float | None = None
        self._failure: str | None = None
        """Why the last snapshot was not sent; reported once."""
        self.sent_iteration = 0
        """Iteration of the newest snapshot that the other host holds."""

    @property
    def is_sending(self) -> bool:
        """A snapshot is being sent, or about to be: checkpoints wait for that, but not where it is sent again."""
        return self._is_sending

    def run_changed(self, run: Run, state: RunState) -> None:
        """Send the snapshot of a run that is copied. The last one of a job ends this: other ranks will close."""
        if state is not RunState.WRITING or self._closing.is_set():
            return
        if run.draft.kind == "final":
            self._closing.set()
            self._work.set()
            return
        now = time.monotonic()
        with self._lock:
            if self._written_at is not None:
                self._interval_seconds = now - self._written_at
            self._written_at = now
            self._next, self._is_sending = run, True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="holdfast-peers-send", daemon=True)
                self._thread.start()
            self._work.set()

    def close(self) -> None:
        """Stop sending, also a snapshot that is half sent."""
        self._closing.set()
        self._work.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        lower_cpu_priority()
        failed: Run | None = None
        retry_seconds = FIRST_RETRY_SECONDS
        while not self._closing.is_set():
            if self._work.wait(retry_seconds if failed is not None else None):
                failed, retry_seconds = None, FIRST_RETRY_SECONDS
            else:
                retry_seconds = min(2 * retry_seconds, MOST_RETRY_SECONDS)
            with self._lock:
                self._work.clear()
                run, self._next = self._next or failed, None
            failed = None
            if run is not None and not self._closing.is_set() and not self._send_or_report(run):
                failed = run
            with self._lock:
                self._is_sending = self._next is not None

    def _send_or_report(self, run: Run) -> bool:
        """Send the snapshot of a run if it is still in memory; return False if it may be sent again."""
        try:
            is_sent = self._send(run)
        except _Overwritten as error:
            logger.debug("%s was not sent to %s: %s", run.id, self._target.host, error)
        except Exception as error:  # keep this thread alive: later snapshots may be sent
            if self._closing.is_set():
                return True
            if str(error) != self._failure:
                self._failure = str(error)
                self._reporter.notice(
                    "warning", NOTICE_CODE,
                    f"the snapshot of iteration {run.draft.iteration:,} was not sent to rank {self._target_rank} "
                    f"on {self._target.host}: {error}. If this host is lost, the job resumes from an older one, "
                    "or from the store",
                )  # fmt: skip
            return False
        else:
            if is_sent:
                self._failure, self.sent_iteration = None, run.draft.iteration
        return True

    def _send(self, run: Run) -> bool:
        """Send the snapshot of a run; return False if it never became complete."""
        arena = run.arena
        if arena is None or arena.marker is None or (content := self._marker_of(run, arena.marker)) is None:
            return False
        marker = decode_marker(content, -1)
        if marker is None or marker.draft.id != run.id:
            return False
        with contextlib.closing(self._connect()) as connection:
            connection.send(StoreReplica(marker=content, size_bytes=marker.draft.size_bytes))
            if connection.receive_reply(marker.draft.size_bytes).data:  # it holds it already
                return True
            self._send_payload(connection, arena, arena.marker, marker.draft.size_bytes)
            connection.receive_reply(marker.draft.size_bytes)
        return True

    def _connect(self) -> PeerConnection:
        return PeerConnection.open(self._target.address, self._target.port, self._target.token)

    def _send_payload(self, connection: PeerConnection, arena: Arena, marker: Path, size_bytes: int) -> None:
        first = _identity(marker)
        seconds = FIRST_SECONDS if self._interval_seconds is None else SEND_SHARE * self._interval_seconds
        pace = RateLimiter(size_bytes / max(min(seconds, MOST_SECONDS), 1e-3), wait=self._closing.wait)
        payload = arena.bytes(size_bytes)
        for start in range(0, size_bytes, CHUNK_BYTES):
            part = payload[start : start + CHUNK_BYTES]
            pace(len(part))
            if self._closing.is_set():
                raise _Overwritten("the session closes")
            if first is None or _identity(marker) != first:
                raise _Overwritten("a later snapshot uses its memory")
            connection.send_bytes(part)

    def _marker_of(self, run: Run, path: Path) -> bytes | None:
        """Wait for the completion marker of a run; None if it ended without one."""
        while (content := _content(path)) is None:
            if self._closing.is_set() or run.wait_settled(MARKER_POLL_SECONDS):
                return _content(path)
        return content


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _identity(path: Path) -> tuple[int, int] | None:
    """Identify the file at a path: each snapshot has a marker that was written anew."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
