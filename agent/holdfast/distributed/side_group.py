"""Communication of several ranks, over a gloo group next to the one that trains.

In the training group, the waits of Holdfast would delay collectives of the script, which the NCCL watchdog would
report as a failure.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import timedelta
from typing import Any, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist

from holdfast.distributed.ranks import Ranks, RanksLost
from holdfast.distributed.wait_reports import WaitReports
from holdfast.errors import Failed, HoldfastError
from holdfast.system.io_pool import DaemonPool
from holdfast.system.supervisor_channel import SESSIONS_BEGUN
from holdfast.torch_internals import default_store, rendezvous_store

T = TypeVar("T")
logger = logging.getLogger("holdfast")

GROUP_TIMEOUT_SECONDS = 3600.0
"""Timeout of an operation. A rank that dies is detected when its connections close: at once, or when the last
child that inherited them exits (a DataLoader worker checks every few seconds whether its parent lives)."""
UNUSED_TAG = 1 << 30
"""A tag larger than that of any checkpoint."""
WARN_AFTER_SECONDS = 20.0
"""Time after which a wait for other ranks is logged."""
WARN_OF_RANK_SECONDS = 120.0
"""Time after which a wait for a message of one rank is logged: it may write its part of a checkpoint for long."""
WAIT_SLICE_SECONDS = 1.0
"""Maximum duration of one wait in gloo, which neither handles signals nor notices that the group is closed."""
MOST_EXCHANGES = 64
"""Maximum number of concurrent exchanges: more than there are checkpoints in flight."""
CLOSE_SECONDS = 1.0
"""Time to close connections, which takes milliseconds; threads that take longer hang in gloo, and are left."""


class SideGroup(Ranks):
    """One of several ranks. All methods except `send` and `receive` must be called on the training thread.

    Raises:
        RanksLost: another rank is lost. All later calls fail, on every rank.
    """

    _made = 0

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._loss: str | None = None
        self._lock = threading.RLock()
        """Held to begin an operation, and to close the group."""
        self._broadcast_work: dist.Work | None = None
        """The last broadcast. Its caller may have stopped waiting for it."""
        self._closed: Future[None] = Future()
        """Releases the threads that wait for an exchange."""
        self._workers = DaemonPool("holdfast-ranks", MOST_EXCHANGES, in_background=False)
        with warn_while_waiting(
            f"rank {self.rank} waits for the other ranks: each of them must create the session, and they must "
            "reach each other over the network interface that GLOO_SOCKET_IFNAME names"
        ):
            self._group: dist.ProcessGroup | None = self._workers.submit(_new_group).result()
        SideGroup._made += 1
        self.key = f"holdfast/{SideGroup._made}"
        """Prefix of keys in the store; the same on all ranks, because they create groups in the same order."""
        self._exit_key = f"{self.key}/end"
        with contextlib.suppress(RuntimeError):  # store lost: the job ends
            rendezvous_store().set(SESSIONS_BEGUN, b"1")
        self._waits = WaitReports(f"{self.key}/waits", self.rank, self._workers)

    def decide(self, question: Callable[[], T], kind: Any) -> T:
        error: Exception | None = None
        data = b""
        if self.leads:
            failed, answer = None, None
            try:
                answer = question()
            except Exception as raised:  # the other ranks wait for an answer
                error, failed = raised, Failed.of(raised)
            data = msgspec.msgpack.encode((failed, answer))
        data = self._broadcast(data)
        if error is not None:
            raise error
        failed, answer = msgspec.msgpack.decode(data, type=tuple[Failed | None, kind | None])
        if failed is not None:
            raise failed.error()
        return cast("T", answer)

    def run_on_all(self, work: Callable[[], T]) -> T:
        error: Exception | None = None
        try:
            result = work()
        except RanksLost:
            raise
        except Exception as raised:  # sent to the other ranks, which must fail as well
            error = raised
        failed = Failed.of(error) if error is not None else None
        try:
            outcomes = self.gather(msgspec.msgpack.encode(failed))
        except RanksLost:
            if error is not None:  # more useful than RanksLost
                raise error from None
            raise
        for rank, data in enumerate(outcomes):
            first = msgspec.msgpack.decode(data, type=Failed | None)
            if first is not None:
                if error is not None and rank == self.rank:
                    raise error
                raise first.error(f"rank {rank}: ") from error
        return result

    def start_broadcast(self, numbers: torch.Tensor) -> dist.Work:
        """Begin to broadcast rank 0's numbers into a tensor of the same size on the other ranks."""
        with self._detecting_loss(), self._lock:
            self._broadcast_work = self._open.broadcast(numbers, 0)
            return self._broadcast_work

    def wait_for(self, work: dist.Work) -> None:
        """Wait until a broadcast has finished."""
        with self._detecting_loss():
            if not self._wait_completed(work, within_seconds=WARN_AFTER_SECONDS):
                logger.warning(
                    "rank %d waits for the other ranks: each must call session.step() equally often",
                    self.rank,
                )
            self._await(work)

    def send(self, to: Sequence[int], tag: int, data: bytes) -> None:
        """Send the same bytes to several ranks, which receive them under the same tag. For any thread."""

        at = 0

        def exchange() -> None:
            nonlocal at
            length = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
            works = [self._open.send([length], rank, 2 * tag) for rank in to]
            content = _bytes(data)
            works += [self._open.send([content], rank, 2 * tag + 1) for rank in to]
            for at, work in enumerate(works):  # noqa: B007  read where the wait fails or takes long
                work.wait()

        self._in_worker(exchange, tag, lambda: to[at % len(to)] if to else None)

    def receive(self, sources: Sequence[int], tag: int) -> list[bytes]:
        """Receive what several ranks send under a tag, in the order of `sources`. For any thread."""

        at = 0

        def fill(into: Sequence[torch.Tensor], tag: int) -> None:
            nonlocal at
            works = [self._open.recv([data], rank, tag) for data, rank in zip(into, sources, strict=True)]
            for at, work in enumerate(works):  # noqa: B007  as in `send`
                work.wait()

        def exchange() -> list[bytes]:
            lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in sources]
            fill(lengths, 2 * tag)
            contents = [torch.empty(int(length), dtype=torch.uint8, device="cpu") for length in lengths]
            fill(contents, 2 * tag + 1)
            return [content.numpy().tobytes() for content in contents]

        return self._in_worker(exchange, tag, lambda: sources[at] if sources else None)

    def gather(self, data: bytes) -> list[bytes]:
        lengths = self._gathered(torch.tensor([len(data)], dtype=torch.int64, device="cpu"))
        most = max(int(length) for length in lengths)
        padded = self._gathered(_bytes(data.ljust(most, b"\0")))
        pairs = zip(padded, lengths, strict=True)
        return [content[: int(length)].numpy().tobytes() for content, length in pairs]

    @contextlib.contextmanager
    def time_limit(self, seconds: float, reason: str) -> Iterator[None]:
        """Limit the duration of the block: after that, close the group and raise RanksLost with `reason`."""

        def expire() -> None:
            self._loss = self._loss or reason
            self.close()

        with _timer(seconds, expire):
            yield

    def request_exit(self) -> None:
        with contextlib.suppress(RuntimeError):  # store lost: this rank exits when its grace period ends
            default_store().set(self._exit_key, b"1")

    @property
    def is_exit_requested(self) -> bool:
        try:
            return bool(default_store().check([self._exit_key]))
        except RuntimeError:
            return False

    def report_trouble(self, lineage: int, iteration: int) -> None:
        key = f"{self._exit_key}/trouble/{lineage}"
        with contextlib.suppress(RuntimeError):  # store lost: the job ends
            default_store().set(f"{key}/{self.rank}", str(iteration))
            default_store().set(key, b"1")  # one key to poll, however many ranks there are

    def reported_trouble(self, lineage: int) -> int | None:
        key, store = f"{self._exit_key}/trouble/{lineage}", default_store()
        try:
            if not store.check([key]):
                return None
            keys = (f"{key}/{rank}" for rank in range(self.world_size))
            return min((int(store.get(each)) for each in keys if store.check([each])), default=None)
        except RuntimeError:
            return None

    def close(self) -> None:
        """Close the group: waits of this rank, and of others for this rank, fail at once."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        with self._lock:
            if self._group is None:
                return
            # a separate thread: if gloo hangs, releasing the last reference to a group never returns
            closing = threading.Thread(
                target=_disconnect, args=(self._group, others), name="holdfast-ranks-close", daemon=True
            )
            self._group = None
        closing.start()
        self._closed.set_result(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        # a thread that is still running at interpreter exit would abort the process
        closing.join(CLOSE_SECONDS)
        self._workers.close(deadline - time.monotonic())

    @property
    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise self._lost()
        return self._group

    def _lost(self) -> RanksLost:
        return RanksLost(self._loss or "this rank has closed its connections to the other ranks")

    @contextlib.contextmanager
    def _detecting_loss(self, awaited: Callable[[], int | None] = lambda: None) -> Iterator[None]:
        """Turn errors of gloo into RanksLost, and close the group so that the remaining ranks fail as well.

        `awaited` returns the rank that this one waits for. It is reported before the group is closed, so that
        ranks which wait for this one can name the cause.
        """
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            is_timeout = time.monotonic() - started >= GROUP_TIMEOUT_SECONDS
            if self._loss is None and self._group is not None:
                cause = self._waits.cause("lost", awaited(), is_early=is_timeout)
                named = "" if cause is None else f": rank {cause}"
                reason = f"{named} ({_short_reason(error)})"
                self._loss = self._loss or f"another rank of this job has ended or does not respond{reason}"
            self.close()
            raise self._lost() from error

    def _wait_completed(self, work: dist.Work, *, within_seconds: float) -> bool:
        """Wait for a collective to end, successfully or not; a wait that times out does not abort it."""
        deadline = time.monotonic() + within_seconds
        while not work.is_completed():
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                return False
            with contextlib.suppress(RuntimeError):  # a timeout, or a failure, which `work.wait` raises again
                # at least a millisecond: gloo takes 0 as no timeout
                work.wait(timedelta(seconds=max(0.001, min(left_seconds, WAIT_SLICE_SECONDS))))
            if self._group is None and not work.is_completed():  # it may never complete
                raise self._lost()
        return True

    def _await(self, work: dist.Work) -> None:
        self._wait_completed(work, within_seconds=math.inf)
        work.wait()

    def _in_worker(self, exchange: Callable[[], T], tag: int, awaited: Callable[[], int | None]) -> T:
        """Run `exchange` on a worker thread, so that closing the group releases the caller.

        `awaited` returns the rank that it waits for. A point-to-point operation may never return: gloo does not
        fail one that is half transferred when its connection closes, and a wait with a short timeout closes all.
        """
        warn_at = time.monotonic() + WARN_OF_RANK_SECONDS
        with self._detecting_loss(awaited):
            with self._lock:
                if self._group is None:
                    raise self._lost()
            # not under the lock: where no thread can start, it runs here, and `close` must be able to end it
            outcome = self._workers.submit(exchange)
            pending: list[Future[Any]] = [outcome, self._closed]
            while not wait(pending, WAIT_SLICE_SECONDS, FIRST_COMPLETED).done:
                if self._broadcast_work is not None and self._broadcast_work.is_completed():
                    self._broadcast_work.wait()  # raises if it failed: gloo may then deliver nothing more
                if time.monotonic() >= warn_at and (suspect := awaited()) is not None:
                    warn_at = math.inf
                    cause = self._waits.cause(str(tag), suspect, is_early=True)
                    logger.warning("rank %d waits for rank %s to write a checkpoint", self.rank, cause or suspect)
            if not outcome.done():
                raise self._lost()
            return outcome.result()

    def _gathered(self, own: torch.Tensor) -> list[torch.Tensor]:
        every = [torch.empty_like(own) for _ in range(self.world_size)]
        with self._detecting_loss():
            with self._lock:
                work = self._open.allgather([every], [own])
            self._await(work)
        return every

    def _broadcast(self, data: bytes) -> bytes:
        length = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        self.wait_for(self.start_broadcast(length))
        content = _bytes(data) if self.leads else torch.empty(int(length), dtype=torch.uint8, device="cpu")
        self.wait_for(self.start_broadcast(content))
        return data if self.leads else content.numpy().tobytes()


def warn_while_waiting(message: str) -> contextlib.AbstractContextManager[None]:
    """Log a warning if the block takes longer than WARN_AFTER_SECONDS."""
    return _timer(WARN_AFTER_SECONDS, lambda: logger.warning(message))


@contextlib.contextmanager
def _timer(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(seconds, act)
    timer.name, timer.daemon = "holdfast-ranks-wait", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _new_group() -> dist.ProcessGroup:
    try:
        group: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS), group_desc="holdfast"
        )
        return group
    except RuntimeError as error:
        raise HoldfastError(
            "could not connect to the other ranks over gloo, which Holdfast uses with any backend of training "
            f"({_short_reason(error)}): set GLOO_SOCKET_IFNAME to the network interface that connects the ranks, "
            "such as eth0"
        ) from error


def _disconnect(group: dist.ProcessGroup, others: list[int]) -> None:
    for rank in others:
        # gloo closes its connections only when a wait times out: destroying the group does not end a wait of
        # another thread
        with contextlib.suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            group.recv([nothing], rank, UNUSED_TAG).wait(timedelta(milliseconds=1))
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # the script has destroyed it already
        dist.destroy_process_group(group)


def _short_reason(error: Exception) -> str:
    """Shorten an error of gloo: drop the line in gloo's source and the address; it does not name the rank."""
    first = str(error).partition("\n")[0]
    return (first.partition("] ")[2] or first).partition(". ")[0][:200] or type(error).__name__


def _bytes(data: bytes) -> torch.Tensor:
    if not data:  # frombuffer rejects an empty buffer
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
