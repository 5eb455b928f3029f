"""Phase 2: drains snapshots to a store in the background, and says what became of each."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast import format as fmt
from holdfast.errors import Fenced
from holdfast.snapshot import Snapshot
from holdfast.store import Store

logger = logging.getLogger("holdfast")

PERSIST_NICENESS = 10
"""Training's threads go first where there are fewer cores than work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who writes a checkpoint, and after which one."""

    job: str
    attempt: int
    parent: str | None
    world_size: int
    versions: dict[str, str]
    replaces: bool = False
    """A checkpoint of the same name was found to be damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The end of a snapshot: durable, torn or failed."""

    snapshot: Snapshot
    state: str
    started_at: float
    seconds: float
    reason: str | None = None


class Persister:
    """One thread that writes snapshots in the order they were taken.

    `settled` is called on that thread, once a snapshot, when its arena is free again.
    """

    def __init__(
        self,
        store: Store,
        *,
        release: Callable[[Snapshot], None],
        began: Callable[[Snapshot], None],
        settled: Callable[[Settled], None],
    ) -> None:
        self._store = store
        self._release, self._began, self._settled = release, began, settled
        self._queue: queue.SimpleQueue[tuple[Snapshot, Origin] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, snapshot: Snapshot, origin: Origin) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holdfast-persist", daemon=True)
            self._thread.start()
        self._queue.put((snapshot, origin))

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Finish what was submitted; False when `timeout_seconds` was not enough."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        _be_nice()
        while (item := self._queue.get()) is not None:
            snapshot, origin = item
            settled = self._persist(snapshot, origin)
            snapshot.outcome, snapshot.reason = settled.state, settled.reason
            self._release(snapshot)
            try:
                self._settled(settled)
            except Exception:  # a thread's edge: without it no further checkpoint would ever be written
                logger.exception("could not report checkpoint of iteration %d", snapshot.iteration)
            finally:
                snapshot.settled.set()

    def _persist(self, snapshot: Snapshot, origin: Origin) -> Settled:
        snapshot.copied.wait()
        at, started = time.time(), time.perf_counter()

        def settle(state: str, reason: str | None = None) -> Settled:
            seconds = time.perf_counter() - started
            return Settled(snapshot=snapshot, state=state, started_at=at, seconds=seconds, reason=reason)

        if snapshot.failure is not None:
            return settle("failed", f"the copy failed: {snapshot.failure}")
        if snapshot.torn:
            names = ", ".join(snapshot.torn[:3])
            return settle("torn", f"{len(snapshot.torn)} tensors changed while they were copied: {names}")
        self._began(snapshot)
        try:
            self._write(snapshot, origin)
        except Fenced as error:
            return settle("failed", str(error))
        except OSError as error:
            place = f" ({error.filename})" if error.filename else ""
            return settle("failed", f"{error.strerror or error}{place}")
        except Exception as error:  # a thread's edge: the job trains on, the event says what broke
            logger.exception("persisting the checkpoint of iteration %d failed", snapshot.iteration)
            return settle("failed", f"{type(error).__name__}: {error}")
        return settle("durable")

    def _write(self, snapshot: Snapshot, origin: Origin) -> None:
        header = fmt.payload_header(
            snapshot.slots, {"job": origin.job, "iteration": str(snapshot.iteration), "rank": "0"}
        )
        payload = snapshot.payload()
        writer = self._store.begin(origin.job, snapshot.id, origin.attempt, len(header) + len(payload))
        try:
            started = time.perf_counter()
            writer.write("rank-0.safetensors", [header, payload])
            write_seconds = time.perf_counter() - started
            manifest = _manifest(snapshot, origin, header, payload, write_seconds)
            writer.commit(fmt.encode_manifest(manifest), replace=origin.replaces)
        except BaseException:
            writer.abort()
            raise


def _manifest(
    snapshot: Snapshot, origin: Origin, header: bytes, payload: memoryview, write_seconds: float
) -> fmt.Manifest:
    name = "rank-0.safetensors"
    tensors = [
        fmt.Tensor(
            name=slot.name,
            dtype=slot.dtype,
            shape=slot.shape,
            global_shape=slot.shape,
            offsets=(0,) * len(slot.shape),
            file=name,
            start=len(header) + slot.start,
            end=len(header) + slot.end,
            digest=whole,
            chunks=chunks,
            view=snapshot.views.get(slot.name),
        )
        for slot in snapshot.slots
        for whole, chunks in [fmt.digest_tensor(payload[slot.start : slot.end])]
    ]
    file = fmt.File(
        name=name,
        size_bytes=len(header) + len(payload),
        header_bytes=len(header),
        header_digest=fmt.digest(header),
    )
    return fmt.Manifest(
        job=origin.job,
        iteration=snapshot.iteration,
        lineage=snapshot.lineage,
        attempt=origin.attempt,
        kind=snapshot.kind,
        created_at=snapshot.started_at,
        parent=origin.parent,
        world_size=origin.world_size,
        files=[file],
        tensors=tensors,
        state=snapshot.trees,
        timings={
            "snapshot_seconds": snapshot.seconds,
            "stall_seconds": snapshot.stall_seconds,
            "write_seconds": write_seconds,
        },
        versions=origin.versions,
    )


def _be_nice() -> None:
    if sys.platform == "linux":  # where niceness belongs to a thread, not to the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PERSIST_NICENESS)
