"""Takes snapshots, writes several at a time, and says what became of each."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.errors import Fenced, HoldfastError
from holdfast.persist import process
from holdfast.persist.backend import Backend, Lost, Refused
from holdfast.persist.choice import Choice
from holdfast.persist.commit import NotPrepared, RankChannel, commit, decline
from holdfast.persist.task import Origin, Task, Written
from holdfast.persist.thread import ThreadBackend
from holdfast.remote import told
from holdfast.store import Store

if TYPE_CHECKING:
    from holdfast.snapshot import Snapshot

logger = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The end of a snapshot: durable, torn or failed."""

    snapshot: Snapshot
    state: str
    started_at: float
    seconds: float
    reason: str | None = None
    backend: str | None = None
    """What wrote it; None when it did not come to that."""
    fenced: bool = False
    """It failed because a newer attempt of the job has begun."""
    newest: bool = False
    """Durable, and none that was submitted after it is durable yet. A slow old one is a checkpoint like any
    other, but what was the newest before it settled remains so."""


class Persister:
    """Writes up to `slots` snapshots at the same time, each on a thread of its own, begun in the order submitted.

    `release` is called when a snapshot's arena may be used again; then `settled`, once a snapshot, never two
    at a time. Both are called on a persisting thread, as `began` is. `line` leads to the other ranks of the job.
    """

    def __init__(
        self,
        store: Store,
        *,
        slots: int = 1,
        backend: str = "thread",
        release: Callable[[Snapshot], None],
        began: Callable[[Snapshot], None],
        settled: Callable[[Settled], None],
        line: RankChannel | None = None,
    ) -> None:
        self._store, self._slots, self._line = store, slots, line
        self._release, self._began, self._settled = release, began, settled
        self._lanes: list[threading.Thread] = []
        self._queue: queue.SimpleQueue[_Submitted | _Declined | None] = queue.SimpleQueue()
        self._submitted, self._open = 0, 0
        self._newest_durable = 0
        self._lock, self._settling = threading.Lock(), threading.Lock()
        self._choice = Choice(backend, _refusals(store))
        self._backends: dict[str, Backend] = {}

    @property
    def backend(self) -> str:
        """What writes the next one."""
        with self._lock:
            return self._choice.current

    @property
    def reason(self) -> str:
        """Why that, in words."""
        with self._lock:
            return self._choice.reason

    @property
    def chosen(self) -> str | None:
        """What writes them from now on; None while several are tried."""
        with self._lock:
            return self._choice.chosen

    @property
    def shares_memory(self) -> bool:
        """Snapshots must lie where another process can get at them; until one does, a thread writes them."""
        with self._lock:
            return self._choice.possible != ["thread"]

    def measured(self, backend: str, cost_seconds: float, persist_seconds: float) -> None:
        """What a checkpoint that `backend` wrote cost training, for "auto" to choose by."""
        with self._lock:
            self._choice.measured(backend, cost_seconds, persist_seconds)

    def submit(self, snapshot: Snapshot, origin: Origin) -> None:
        with self._lock:
            if len(self._lanes) < min(self._open + 1, self._slots):
                self._start_lane()
            self._submitted += 1
            self._open += 1
            item = _Submitted(self._submitted, snapshot, origin)
            snapshot.submitted = True  # right before it is, or Ctrl-C would leave it to nobody
            self._queue.put(item)

    def decline(self, number: int, reason: str) -> None:
        """Tell the other ranks that this one has nothing to write for the checkpoint of that number."""
        with self._lock:
            if not self._lanes:
                self._start_lane()
            self._queue.put(_Declined(number, reason))

    def prepare(self) -> None:
        """Start a thread while that is possible: a script's only checkpoint may be the one at its exit."""
        with self._lock:
            if not self._lanes:
                self._start_lane()

    def _start_lane(self) -> None:
        lane = threading.Thread(target=self._run, name="holdfast-persist", daemon=True)
        try:
            lane.start()
        except RuntimeError:  # as many as there may be: those that there are do it all
            if not self._lanes:
                raise
        else:
            self._lanes.append(lane)

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Finish what was submitted, at full speed; False when `timeout_seconds` was not enough.

        Helper processes finish what they have in hand even then.
        """
        with self._lock:
            lanes, backends = list(self._lanes), list(self._backends.values())
        for _ in lanes:
            self._queue.put(None)
        for backend in backends:
            backend.hurry()
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        for lane in lanes:
            lane.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        for backend in backends:
            backend.close()
        return not any(lane.is_alive() for lane in lanes)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Declined):
                self._decline(item)
                continue
            item.snapshot.copied.wait()
            at, started = time.time(), time.perf_counter()
            end = self._persist(item)
            self._settle(item, end, at, time.perf_counter() - started)

    def _settle(self, item: _Submitted, end: _End, at: float, seconds: float) -> None:
        snapshot = item.snapshot
        snapshot.outcome, snapshot.reason = end.state, end.reason
        self._release(snapshot)
        with self._settling:
            newest = end.state == "durable" and item.number > self._newest_durable
            if newest:
                self._newest_durable = item.number
            try:
                self._settled(
                    Settled(
                        snapshot=snapshot,
                        state=end.state,
                        started_at=at,
                        seconds=seconds,
                        reason=end.reason,
                        backend=end.backend,
                        fenced=end.fenced,
                        newest=newest,
                    )
                )
            except Exception:  # a thread's edge: without it no further checkpoint would ever be written
                logger.exception("could not report checkpoint of iteration %d", snapshot.iteration)
            finally:
                with self._lock:
                    self._open -= 1
                snapshot.settled.set()
                self._let_go_of_unused()

    def _let_go_of_unused(self) -> None:
        """A helper of a backend that was not chosen would keep memory for nothing."""
        with self._lock:
            unused = [name for name in self._backends if name not in self._choice.possible]
            backends = [self._backends.pop(name) for name in unused]
        for backend in backends:
            backend.close()

    def _persist(self, item: _Submitted) -> _End:
        snapshot, problem = item.snapshot, _problem(item.snapshot)
        if problem is not None and self._line is None:
            return _End.without(problem)
        writing = _Chosen()
        try:
            if problem is None:
                self._began(snapshot)
            task = Task.of(snapshot, item.origin)
            if self._line is None:
                self._write_as_chosen(task, snapshot, writing)
            else:
                write = functools.partial(self._write_as_chosen, snapshot=snapshot, writing=writing)
                snapshot.stored_bytes = commit(
                    *(self._line, snapshot.number, self._store, task, problem, write),
                    told=snapshot.ranks.extend,
                )
        except NotPrepared as other:
            return _End.without(other)
        except Exception as error:  # a thread's edge: the job trains on, the event says what broke
            if isinstance(error, Lost):  # nobody else clears away what it had half-done before the next attempt
                with contextlib.suppress(OSError):
                    self._store.forsake(item.origin.job, snapshot.id, item.origin.attempt)
            reason = self._reason(error, writing.backend, snapshot)
            return _End("failed", reason, writing.backend or None, fenced=isinstance(error, Fenced))
        return _End("durable", backend=writing.backend)

    def _write_as_chosen(self, task: Task, snapshot: Snapshot, writing: _Chosen) -> Written:
        while True:
            writing.backend = self.backend if snapshot.arena.fd >= 0 else "thread"
            try:
                return self._write(writing.backend, task, snapshot)
            except Refused as refused:
                with self._lock:
                    self._choice.refused(writing.backend, str(refused))

    def _decline(self, item: _Declined) -> None:
        assert self._line is not None
        try:
            decline(self._line, item.number, item.reason)
        except Exception as error:  # a thread's edge; who talks to the other ranks next meets it again
            logger.debug("checkpoint %d was not declined: %s", item.number, error)

    def _write(self, name: str, task: Task, snapshot: Snapshot) -> Written:
        with self._lock:
            backend = self._backends.get(name) or _MAKERS[name](self._store)
            self._backends[name] = backend
        return backend.write(task, snapshot)

    def _reason(self, error: Exception, backend: str, snapshot: Snapshot) -> str:
        match error:
            case HoldfastError() | OSError():
                return told(error)
            case Lost():
                with self._lock:
                    self._choice.failed(backend, str(error))
                return str(error)
        with self._lock:
            self._choice.failed(backend, f"{type(error).__name__}: {error}")
        logger.error("persisting the checkpoint of iteration %d failed", snapshot.iteration, exc_info=error)
        return told(error)


@dataclass(frozen=True, slots=True)
class _Submitted:
    number: int
    snapshot: Snapshot
    origin: Origin


@dataclass(frozen=True, slots=True)
class _Declined:
    number: int
    reason: str


@dataclass(slots=True)
class _Chosen:
    backend: str = ""


@dataclass(frozen=True, slots=True)
class _End:
    state: str
    reason: str | None = None
    backend: str | None = None
    fenced: bool = False

    @classmethod
    def without(cls, problem: NotPrepared) -> _End:
        return cls("torn" if problem.torn else "failed", str(problem))


def _problem(snapshot: Snapshot) -> NotPrepared | None:
    """Why it cannot become durable, if so."""
    if snapshot.failure is not None:
        return NotPrepared(f"the copy failed: {snapshot.failure}")
    if snapshot.rebuilt:
        return NotPrepared("the objects are made of other tensors than at the checkpoint before", torn=True)
    if snapshot.torn:
        names = ", ".join(snapshot.torn[:3])
        return NotPrepared(f"{len(snapshot.torn)} tensors changed while they were copied: {names}", torn=True)
    if snapshot.round_trip is not None:
        try:
            snapshot.round_trip.require_same(snapshot.trees, snapshot.slots, snapshot.views, snapshot.shards)
        except Exception as error:  # whatever it is, a resume would meet it as well
            return NotPrepared(f"a checkpoint of this state could not be loaded: {told(error)}")
    return None


_MAKERS: dict[str, Callable[[Store], Backend]] = {
    "thread": ThreadBackend,
    "process": process.ProcessBackend,
}


def _refusals(store: Store) -> dict[str, str]:
    refusal = process.refusal(store)
    return {} if refusal is None else {"process": refusal}
