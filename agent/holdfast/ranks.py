"""The ranks of a job: who this process is among them, and how all of them come to the same decision.

They talk over a gloo group of our own: in the group that trains, a wait of ours would hold up a collective of the
script's, and its watchdog would take that for a failure.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist

from holdfast.errors import HoldfastError
from holdfast.remote import Failed

T = TypeVar("T")
logger = logging.getLogger("holdfast")

PATIENCE_SECONDS = 3600.0
"""A rank that is away for so long does not come back. One that dies is noticed at once: its connections close."""
NEVER_SENT_TAG = 1 << 30
"""No number of a checkpoint comes to that."""
TOLD_AFTER_SECONDS = 20.0
"""From when a person wants to know what a start waits for."""


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

    def close(self) -> None: ...


class SideGroup(Ranks):
    """One of several ranks. Every method but `send` and `receive` is for the training thread.

    Raises:
        RanksLost: another rank is gone. No later call can succeed, on any rank.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._loss: str | None = None
        with told_while_waiting(f"rank {self.rank} waits for the other ranks: each of them makes the session"):
            self._group: dist.ProcessGroup | None = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=PATIENCE_SECONDS), group_desc="holdfast"
            )

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
        with self._noticing():
            return self._open.broadcast(numbers, 0)

    def heard(self, work: dist.Work) -> None:
        """Wait until what was announced is here."""
        with self._noticing():
            try:
                work.wait(timedelta(seconds=TOLD_AFTER_SECONDS))
            except RuntimeError:
                if work.is_completed():  # it failed
                    raise
                logger.warning(
                    "rank %d waits for the other ranks: each of them has to call session.step() equally often",
                    self.rank,
                )
                work.wait()

    def send(self, to: int, tag: int, data: bytes) -> None:
        """To one rank, which receives it under the same tag. From any thread."""
        length = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        with self._noticing():
            self._open.send([length], to, 2 * tag).wait()
            self._open.send([_bytes(data)], to, 2 * tag + 1).wait()

    def receive(self, source: int, tag: int) -> bytes:
        """What one rank sends under a tag. From any thread."""
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        with self._noticing():
            self._open.recv([length], source, 2 * tag).wait()
            data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
            self._open.recv([data], source, 2 * tag + 1).wait()
        return data.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gives, by rank."""
        lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world_size)]
        with self._noticing():
            own = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
            self._open.allgather([lengths], [own]).wait()
            most = max(int(length) for length in lengths)
            padded = [torch.empty(most, dtype=torch.uint8, device="cpu") for _ in lengths]
            self._open.allgather([padded], [_bytes(data.ljust(most, b"\0"))]).wait()
        pairs = zip(padded, lengths, strict=True)
        return [content[: int(length)].numpy().tobytes() for content, length in pairs]

    def close(self) -> None:
        """Let go of the others: whoever waits in here, and whoever waits for this rank, is told at once."""
        group, self._group = self._group, None
        if group is None:
            return
        for rank in range(self.world_size):
            if rank != self.rank:
                # gloo closes all its connections when a wait for one takes too long, and at nothing else: while
                # a thread waits, a group that is destroyed goes on
                with contextlib.suppress(RuntimeError):
                    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                    group.recv([nothing], rank, NEVER_SENT_TAG).wait(timedelta(milliseconds=1))
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # the script was there before
            dist.destroy_process_group(group)

    @property
    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RanksLost(self._loss or "this rank has let go of the others")
        return self._group

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        """Where talk breaks off nothing can be agreed on any more; the ranks that are left find out, too."""
        try:
            yield
        except RuntimeError as error:
            if self._loss is None and self._group is not None:
                # gloo names a line of its own source and an address; which rank it was, it does not know
                what = str(error).splitlines()[0].partition("] ")[2].partition(". ")[0][:200]
                self._loss = f"another rank of this job is gone or does not answer ({what})"
            self.close()
            raise RanksLost(self._loss or "this rank has let go of the others") from error

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


@contextlib.contextmanager
def told_while_waiting(message: str) -> Iterator[None]:
    timer = threading.Timer(TOLD_AFTER_SECONDS, logger.warning, (message,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
