"""The folder through which a trainer and its supervisor exchange information. Does not import torch.

Rank 0 of the trainer publishes its attempt, so that the supervisor can poll the server for restore requests and
the store for newer attempts. Each rank opens a file for its stacks, and a signal handler dumps them there, even if
the interpreter is stuck.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import logging
import mmap
import os
import signal
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from holdfast.protocol.wire import RestoreOrder
from holdfast.system import process_facts

if TYPE_CHECKING:
    from holdfast.system.published_imports import ImportsPublisher

logger = logging.getLogger("holdfast")

T = TypeVar("T")

VARIABLE = "HOLDFAST_SUPERVISION"
EXIT_FENCED = 75
"""Exit status of a supervised trainer whose job has a newer attempt: EX_TEMPFAIL."""
EXIT_HOST_FAULT = 76
"""Exit status of a supervisor that leaves its host to be started on another one."""
STACKS_SIGNAL: int | None = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None
"""A real-time signal, which programs rarely use."""
UID = ".uid"
EXIT_ENDED = 77
"""Exit status of a trainer that an operator ended: it must not be restarted."""
EXIT_RELAUNCH = 79
"""Exit status of a trainer that must be restarted for a restore, which it cannot do in place."""
STARTED_AT = "HOLDFAST_STARTED_AT"
"""Variable with the time at which the supervisor started the trainer, in seconds since the epoch."""
PROGRESS_VARIABLE = "HOLDFAST_PROGRESS"
PROGRESS_LAYOUT = struct.Struct("<qq")
"""The last finished iteration, and the number of updates, negative while training is paused or over."""
LOG_TIME = "%Y-%m-%d %H:%M:%S"
PREVIOUS_EXIT = "HOLDFAST_PREVIOUS_EXIT"
"""Variable with the reason why the previous start ended, if the supervisor restarted the trainer."""
ATTEMPT = "attempt.json"
ENDED = "ended.txt"
REQUESTED_RELAUNCH, RELAUNCH = "relaunch.json", "order.json"
STACKS = "rank-{rank}.{pid}.stacks"
SESSIONS_BEGUN = "holdfast/begun"
"""Key in the store of torch.distributed: all ranks have joined, and a later start of a rank cannot."""

_reported_attempts = itertools.count()
"""Number of attempts that this process has reported."""


class PublishedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """The attempt that a supervised trainer runs."""

    job: str
    uid: str
    attempt: int
    """Number of the attempt; 0 while the store cannot be written."""
    lineage: int
    store: str
    server: str | None
    progress: tuple[int, int] = (0, 0)
    """Contents of the progress file when it was published, which another session may have written."""


def publish_attempt(attempt: PublishedAttempt) -> None:
    """Publish the attempt to the supervisor, if there is one. Never raises."""
    if not (folder := os.environ.get(VARIABLE)):
        return
    try:
        with contextlib.suppress(KeyError, OSError, struct.error):
            progress = PROGRESS_LAYOUT.unpack(Path(os.environ[PROGRESS_VARIABLE]).read_bytes())
            attempt = msgspec.structs.replace(attempt, progress=progress)
        write_struct(Path(folder, ATTEMPT), attempt)
    except OSError as error:
        logger.warning("cannot publish this attempt to the supervisor: %s", error)


def publish_uid(uid: str) -> None:
    """Publish the uid of an attempt that is about to begin, if there is a supervisor. Never raises.

    A trainer that is killed before it publishes its attempt must not look like another supervisor's.
    """
    if not (folder := os.environ.get(VARIABLE)):
        return
    try:
        Path(folder, uid).with_suffix(UID).touch()
    except OSError as error:
        logger.warning("cannot publish the uid of this attempt to the supervisor: %s", error)


def write_struct(path: Path, content: msgspec.Struct) -> None:
    written = path.with_suffix(f".{os.getpid()}")
    written.write_bytes(msgspec.json.encode(content))
    written.rename(path)


def read_struct(path: Path, kind: type[T]) -> T | None:
    """Return what `write_struct` wrote; `None` if there is no such file, or another content."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def is_supervised() -> bool:
    """Return whether a supervisor restarts this process."""
    return bool(os.environ.get(VARIABLE))


def seconds_since_start() -> float | None:
    """Return the time since the supervisor, if there is one, started the trainer."""
    try:
        return max(0.0, time.time() - float(os.environ[STARTED_AT]))
    except (KeyError, ValueError):
        return None


def attempt_start_time() -> float:
    """Return the start time of the attempt that this process reports now.

    After a restart by the supervisor, that is the start of the process: the job is not down while it imports torch
    and loads a checkpoint. A further attempt of the same process begins now.
    """
    now, first = time.time(), next(_reported_attempts) == 0
    if not first or PREVIOUS_EXIT not in os.environ or (age := seconds_since_start()) is None:
        return now
    return min(now, max(now - age, process_facts.started_at(os.getpid()) or 0.0))


def request_relaunch(order: RestoreOrder) -> str:
    """Request that the supervisor restart the trainer for a restore, and return the restore's id.

    OSError: the request cannot be written.
    """
    write_struct(Path(os.environ[VARIABLE], REQUESTED_RELAUNCH), order)
    return order.id


def publish_ended(how: str) -> None:
    """Publish that training ends on request, as under torchrun the exit status is lost. Never raises."""
    if folder := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):
            Path(folder, ENDED).write_text(how)


def relaunch_order() -> RestoreOrder | None:
    """Return the restore that this start is to carry out; known even if the server does not respond."""
    folder = os.environ.get(VARIABLE)
    return read_struct(Path(folder, RELAUNCH), RestoreOrder) if folder else None


def enable_stack_dump(rank: int) -> None:
    """Let the supervisor, if there is one, dump the stacks of this process. Never raises."""
    folder = os.environ.get(VARIABLE)
    if not folder or STACKS_SIGNAL is None or not hasattr(faulthandler, "register"):
        return
    try:  # faulthandler holds the file open
        file = open(Path(folder, STACKS.format(rank=rank, pid=os.getpid())), "wb", buffering=0)  # noqa: SIM115
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
    except (OSError, ValueError, RuntimeError) as error:
        logger.debug("stack dumps are not available: %s", error)


class ProgressFile:
    """The mapped file HOLDFAST_PROGRESS, in which the supervisor reads the progress."""

    def __init__(self, memory: mmap.mmap, imports: ImportsPublisher) -> None:
        self._memory, self._imports = memory, imports
        self._updates = 0

    def update(self, iteration: int) -> None:
        self._updates += 1
        PROGRESS_LAYOUT.pack_into(self._memory, 0, iteration, self._updates)
        self._imports.update(self._updates)

    def rest(self, *, is_resting: bool = True) -> None:
        """Mark training as paused or finished, so that a wait is not taken for a hang, or as running again."""
        iteration, updates = PROGRESS_LAYOUT.unpack_from(self._memory, 0)
        PROGRESS_LAYOUT.pack_into(self._memory, 0, iteration, -abs(updates) if is_resting else abs(updates))

    def close(self) -> None:
        self._memory.close()


def open_progress_file(leads: bool) -> ProgressFile | None:
    """Open the file of the progress for one rank of each host, `leads` for rank 0.

    `None` for other ranks, without a supervisor, or if it cannot be used.
    """
    path = os.environ.get(PROGRESS_VARIABLE)
    if not path or not (leads or os.environ.get("LOCAL_RANK") == "0"):
        return None
    try:
        with open(path, "r+b") as handle:
            memory = mmap.mmap(handle.fileno(), PROGRESS_LAYOUT.size)
    except (OSError, ValueError) as error:
        logger.warning("%s=%s cannot be used: %s", PROGRESS_VARIABLE, path, error)
        return None
    from holdfast.system.published_imports import ImportsPublisher  # only under a supervisor

    return ProgressFile(memory, ImportsPublisher(os.environ.get(VARIABLE, "")))
