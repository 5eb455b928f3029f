"""The ranks of a job: who this process is among them, and how all of them come to the same decision.

They talk over a gloo group of our own: in the group that trains, a wait of ours would hold up a collective of the
script's, and its watchdog would take that for a failure.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist

from holdfast.distributed.error_transport import Failed
from holdfast.errors import HoldfastError
from holdfast.torch_internals import default_store

T = TypeVar("T")
logger = logging.getLogger("holdfast")

PATIENCE_SECONDS = 3600.0
"""A rank that is away for so long does not come back. One that dies is noticed when its connections close: at
once, or with the last process that it forked, which holds them, too (a worker of a DataLoader looks for its parent
every few seconds)."""
NEVER_SENT_TAG = 1 << 30
"""No number of a checkpoint comes to that."""
TOLD_AFTER_SECONDS = 20.0
"""From when a person wants to know what a start waits for."""
SLICE_SECONDS = 1.0
"""A wait within gloo is at most so long: it takes no notice of a signal, nor of a group that is closed."""
PARTING_SECONDS = 1.0
"""Closing connections takes milliseconds; what has not ended by then is stuck in gloo, and left behind."""


class RanksLost(HoldfastError):
    """Another rank is gone, or does not answer."""


def rank_and_world_size() -> tuple[int, int]:
    """From torch.distributed where it is set up, else from RANK and WORLD_SIZE where both are, else (0, 1)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


class Ranks:
    """The only rank of a job. What it decides holds, and what it does is done."""

    rank, world_size = 0, 1

    @property
    def leads(self) -> bool:
        """Rank 0: it decides, listens to operators and writes manifests."""
        return self.rank == 0

    def decide(self, question: Callable[[], T], kind: Any) -> T:
        """Rank 0's answer, of type `kind`, on all ranks; or what it raised. The others do not ask."""
        return question()

    def together(self, work: Callable[[], T]) -> T:
        """Do it on every rank; where it fails on any, all raise what the first of these raised."""
        return work()

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gives, by rank."""
        return [data]

    def ask_to_end(self) -> None:
        """Let rank 0 know that this rank was told to end."""

    @property
    def asked_to_end(self) -> bool:
        """Whether any rank was; for rank 0 to look at now and then."""
        return False

    def close(self) -> None: ...


class SideGroup(Ranks):
    """One of several ranks. Every method but `send` and `receive` is for the training thread.

    Raises:
        RanksLost: another rank is gone. No later call can succeed, on any rank.
    """

    _made = 0

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._loss: str | None = None
        self._lock = threading.RLock()
        """Held where an operation begins, and where the group is let go of."""
        self._outcomes: set[Future[Any]] = set()
        """What threads of this process wait for."""
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        """Those of `_workers` that run nothing; never more are made than exchanges run at the same time."""
        worker, group = self._new_worker(), Future[dist.ProcessGroup]()
        worker.submit(_connected, group)
        with told_while_waiting(
            f"rank {self.rank} waits for the other ranks: each of them makes the session, and they connect over "
            "the network interface that GLOO_SOCKET_IFNAME names"
        ):
            self._group: dist.ProcessGroup | None = group.result()
        self._idle.append(worker)
        SideGroup._made += 1
        self._ending = f"holdfast/{SideGroup._made}/end"
        """The same key on all ranks: each makes its groups in the same order."""

    def decide(self, question: Callable[[], T], kind: Any) -> T:
        error: Exception | None = None
        data = b""
        if self.leads:
            failed, answer = None, None
            try:
                answer = question()
            except Exception as raised:  # the others wait for an answer, whatever it is
                error, failed = raised, Failed.of(raised)
            data = msgspec.msgpack.encode((failed, answer))
        data = self._broadcast(data)
        if error is not None:
            raise error
        failed, answer = msgspec.msgpack.decode(data, type=tuple[Failed | None, kind | None])
        if failed is not None:
            raise failed.error()
        return cast("T", answer)

    def together(self, work: Callable[[], T]) -> T:
        error: Exception | None = None
        try:
            result = work()
        except RanksLost:
            raise
        except Exception as raised:  # told to the others, which would go on without this one
            error = raised
        failed = Failed.of(error) if error is not None else None
        try:
            told = self.gather(msgspec.msgpack.encode(failed))
        except RanksLost:
            if error is not None:  # what it says of this rank is worth more
                raise error from None
            raise
        for rank, data in enumerate(told):
            first = msgspec.msgpack.decode(data, type=Failed | None)
            if first is not None:
                if error is not None and rank == self.rank:
                    raise error
                raise first.error(f"rank {rank}: ") from error
        return result

    def announce(self, numbers: torch.Tensor) -> dist.Work:
        """Begin to send rank 0's numbers to all; the others give a tensor of the same size for them."""
        with self._noticing(), self._lock:
            return self._open.broadcast(numbers, 0)

    def heard(self, work: dist.Work) -> None:
        """Wait until what was announced is here."""
        with self._noticing():
            if not self._has_ended(work, within_seconds=TOLD_AFTER_SECONDS):
                logger.warning(
                    "rank %d waits for the other ranks: each of them has to call session.step() equally often",
                    self.rank,
                )
            self._await(work)

    def send(self, to: Sequence[int], tag: int, data: bytes) -> None:
        """Send the same bytes to several ranks, which receive them under the same tag. From any thread."""

        def exchange() -> None:
            length = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
            works = [self._open.send([length], rank, 2 * tag) for rank in to]
            content = _bytes(data)
            works += [self._open.send([content], rank, 2 * tag + 1) for rank in to]
            for work in works:
                work.wait()

        self._in_worker(exchange)

    def receive(self, sources: Sequence[int], tag: int) -> list[bytes]:
        """What each of several ranks sends under a tag, in the order of `sources`. From any thread."""

        def exchange() -> list[bytes]:
            lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in sources]
            self._receive(lengths, sources, 2 * tag)
            contents = [torch.empty(int(length), dtype=torch.uint8, device="cpu") for length in lengths]
            self._receive(contents, sources, 2 * tag + 1)
            return [content.numpy().tobytes() for content in contents]

        return self._in_worker(exchange)

    def _receive(self, into: Sequence[torch.Tensor], sources: Sequence[int], tag: int) -> None:
        works = [self._open.recv([data], rank, tag) for data, rank in zip(into, sources, strict=True)]
        for work in works:
            work.wait()

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gives, by rank."""
        lengths = self._gathered(torch.tensor([len(data)], dtype=torch.int64, device="cpu"))
        most = max(int(length) for length in lengths)
        padded = self._gathered(_bytes(data.ljust(most, b"\0")))
        pairs = zip(padded, lengths, strict=True)
        return [content[: int(length)].numpy().tobytes() for content, length in pairs]

    @contextlib.contextmanager
    def within(self, seconds: float, otherwise: str) -> Iterator[None]:
        """What is said in here takes no longer: after that this rank lets go of the others, and says why."""

        def give_up() -> None:
            self._loss = self._loss or otherwise
            self.close()

        with _unless_done_within(seconds, give_up):
            yield

    def ask_to_end(self) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # whoever keeps it is gone, and this rank ends when its time is over
            default_store().set(self._ending, b"1")

    @property
    def asked_to_end(self) -> bool:
        try:
            return bool(default_store().check([self._ending]))
        except RuntimeError:
            return False

    def close(self) -> None:
        """Let go of the others: whoever waits in here, and whoever waits for this rank, is told at once."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        with self._lock:
            if self._group is None:
                return
            # where gloo is stuck the last reference to a group never comes back from being given up
            parting = threading.Thread(
                target=_part, args=(self._group, others), name="holdfast-ranks-close", daemon=True
            )
            self._group = None
            outcomes, workers = list(self._outcomes), list(self._workers)
        parting.start()
        for outcome in outcomes:
            with contextlib.suppress(InvalidStateError):  # it is there
                outcome.set_exception(self._lost())
        for worker in workers:
            worker.end()
        deadline = time.monotonic() + PARTING_SECONDS
        for thread in (parting, *workers):  # one that ends while the interpreter does would abort the process
            thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise self._lost()
        return self._group

    def _lost(self) -> RanksLost:
        return RanksLost(self._loss or "this rank has let go of the others")

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        """Where talk breaks off nothing can be agreed on any more; the ranks that are left find out, too."""
        try:
            yield
        except RuntimeError as error:
            with self._lock:
                if self._loss is None and self._group is not None:
                    self._loss = f"another rank of this job is gone or does not answer ({_gist(error)})"
            self.close()
            raise self._lost() from error

    def _has_ended(self, work: dist.Work, *, within_seconds: float) -> bool:
        """Well or not. A collective, which a wait that is too short does no harm."""
        deadline = time.monotonic() + within_seconds
        while not work.is_completed():
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                return False
            with contextlib.suppress(RuntimeError):  # it takes longer; or it has failed, and is asked about that
                # to gloo no millisecond is for ever
                work.wait(timedelta(seconds=max(0.001, min(left_seconds, SLICE_SECONDS))))
            if self._group is None and not work.is_completed():  # and it may never be
                raise self._lost()
        return True

    def _await(self, work: dist.Work) -> None:
        self._has_ended(work, within_seconds=math.inf)
        work.wait()

    def _in_worker(self, exchange: Callable[[], T]) -> T:
        """Run `exchange` on a worker thread, so that its caller can be released.

        An operation between two ranks may never return: when connections close, gloo does not report to one whose
        data is half transferred; and a wait with a short timeout closes all connections.
        """
        outcome: Future[T] = Future()
        with self._noticing():
            with self._lock:
                if self._group is None:
                    raise self._lost()
                worker = self._idle.pop() if self._idle else self._new_worker()
                self._outcomes.add(outcome)
            worker.submit(exchange, outcome)
            try:
                return outcome.result()
            finally:
                with self._lock:
                    self._outcomes.discard(outcome)
                    if outcome.done() and self._group is not None:
                        self._idle.append(worker)

    def _new_worker(self) -> _Worker:
        worker = _Worker(f"holdfast-ranks-{len(self._workers) + 1}")
        worker.start()
        self._workers.append(worker)
        return worker

    def _gathered(self, own: torch.Tensor) -> list[torch.Tensor]:
        every = [torch.empty_like(own) for _ in range(self.world_size)]
        with self._noticing():
            with self._lock:
                work = self._open.allgather([every], [own])
            self._await(work)
        return every

    def _broadcast(self, data: bytes) -> bytes:
        length = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        self.heard(self.announce(length))
        content = _bytes(data) if self.leads else torch.empty(int(length), dtype=torch.uint8, device="cpu")
        self.heard(self.announce(content))
        return data if self.leads else content.numpy().tobytes()


def join() -> Ranks:
    """The ranks of this job; where there are several, each of them has to call it, and waits for the others.

    Raises:
        ValueError: there are several, and torch.distributed is not set up yet.
    """
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return Ranks()
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"holdfast.Session: this is rank {rank} of {world_size} (RANK, WORLD_SIZE); call "
            "torch.distributed.init_process_group before it is made, or unset both where the processes train "
            "by themselves"
        )
    return SideGroup()


def told_while_waiting(message: str) -> contextlib.AbstractContextManager[None]:
    return _unless_done_within(TOLD_AFTER_SECONDS, lambda: logger.warning(message))


@contextlib.contextmanager
def _unless_done_within(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(seconds, act)
    timer.name, timer.daemon = "holdfast-ranks-wait", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Worker(threading.Thread):
    """Runs exchanges that may never return, one at a time; a daemon, so that the process can end all the same."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, exchange: Callable[[], T], outcome: Future[T]) -> None:
        def task() -> None:
            # whoever waited may have been released meanwhile, by an outcome that is set already
            with contextlib.suppress(InvalidStateError):
                try:
                    result = exchange()
                except BaseException as error:  # raised by the caller, which waits for the outcome
                    outcome.set_exception(error)
                else:
                    outcome.set_result(result)

        self._tasks.put(task)

    def end(self) -> None:
        """End after what is under way."""
        self._tasks.put(None)

    def run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def _connected() -> dist.ProcessGroup:
    try:
        group: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=PATIENCE_SECONDS), group_desc="holdfast"
        )
        return group
    except RuntimeError as error:
        raise HoldfastError(
            "the ranks of this job talk over gloo, whatever they train over, and this one could not connect to "
            f"the others ({_gist(error)}): set GLOO_SOCKET_IFNAME to the network interface over which they reach "
            "each other, such as eth0"
        ) from error


def _part(group: dist.ProcessGroup, others: list[int]) -> None:
    for rank in others:
        # gloo closes all its connections when a wait for one takes too long, and at nothing else: while a thread
        # waits, a group that is destroyed goes on
        with contextlib.suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            group.recv([nothing], rank, NEVER_SENT_TAG).wait(timedelta(milliseconds=1))
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # the script was there before
        dist.destroy_process_group(group)


def _gist(error: Exception) -> str:
    """gloo names a line of its own source and an address; which rank it was, it does not know."""
    first = str(error).partition("\n")[0]
    return (first.partition("] ")[2] or first).partition(". ")[0][:200] or type(error).__name__


def _bytes(data: bytes) -> torch.Tensor:
    if not data:  # frombuffer takes none
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
