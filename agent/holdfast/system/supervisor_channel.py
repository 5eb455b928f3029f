"""The folder through which a trainer and its supervisor exchange information. Does not import torch.

Rank 0 of the trainer publishes its attempt, so that the supervisor can poll the server for restore requests and
the store for newer attempts. Each rank opens a file for its stacks, and a signal handler dumps them there, even if
the interpreter is stuck.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import itertools
import logging
import mmap
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from holdfast.protocol.wire import RestoreOrder
from holdfast.system import processes
from holdfast.system.masking import escaped

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
_PREFIX, _LOCK = "holdfast-run-", "supervisor.lock"
_UID = ".uid"
EXIT_RELAUNCH = 79
"""Exit status of a trainer that must be restarted for a restore, which it cannot do in place."""
STARTED_AT = "HOLDFAST_STARTED_AT"
"""Variable with the time at which the supervisor started the trainer, in seconds since the epoch."""
PROGRESS_VARIABLE = "HOLDFAST_PROGRESS"
PROGRESS_LAYOUT = struct.Struct("<qq")
"""The last finished iteration, and the number of updates, negative once training is over."""
LOG_TIME = "%Y-%m-%d %H:%M:%S"
PREVIOUS_EXIT = "HOLDFAST_PREVIOUS_EXIT"
"""Variable with the reason why the previous start ended, if the supervisor restarted the trainer."""
_ATTEMPT, _END = "attempt.json", "end.json"
_REQUESTED_RELAUNCH, _RELAUNCH = "relaunch.json", "order.json"
_STACKS = "rank-{rank}.{pid}.stacks"
DUMP_SECONDS = 3.0
"""Limit of a stack dump. It takes milliseconds, unless the process is stopped or stuck in a system call."""
DUMP_SETTLED_SECONDS = 0.2
PY_SPY_SECONDS = 20.0

_STORES, _EARLIER_STORES = "stores.{rank}.json", "earlier-stores.{rank}.json"
_opened_stores: list[tuple[str, str]] = []
"""The jobs and stores of the sessions of this process, in their order."""
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


class StoresOfStart(msgspec.Struct, kw_only=True):
    """The stores of the sessions of a start, and of earlier ones, on one rank."""

    stores: dict[str, list[str]] = {}
    """By job, in the order of its sessions in the script."""
    reached: dict[str, int] = {}
    """By job, the last finished iteration of the start that ended last."""


class EndInOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What the output of an ended start shows about its end; empty where it shows nothing."""

    exception: str = ""
    """The exception that ended it."""
    cause: str = ""
    """Name of the cause, of `end_causes`."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank whose stacks can be dumped, to the file `path`."""

    rank: int
    pid: int
    path: Path


@contextlib.contextmanager
def supervisor_folder() -> Iterator[Path]:
    """Create the folder of this supervisor. A killed supervisor's folder is removed by the user's next one."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as made:
        lock = os.open(Path(made, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _remove_abandoned_folders(Path(made).parent)
            yield Path(made)
        finally:
            os.close(lock)


def _remove_abandoned_folders(place: Path) -> None:
    """Remove folders whose lock is free; a process id could have been reused."""
    for lock in place.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # of another user, or in use
            folder = os.lstat(lock.parent)
            if folder.st_uid != os.geteuid() or not stat.S_ISDIR(folder.st_mode):
                continue
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(fd)


def log_line(line: str, level: int = logging.INFO) -> None:
    """Write a log line of the supervisor to stderr, in the trainer's format."""
    at, name = time.strftime(LOG_TIME), logging.getLevelName(level)
    print(f"{at} {name} holdfast run: {escaped(line)}", file=sys.stderr, flush=True)


def publish_attempt(attempt: PublishedAttempt) -> None:
    """Publish the attempt to the supervisor, if there is one. Never raises."""
    if not (folder := os.environ.get(VARIABLE)):
        return
    try:
        with contextlib.suppress(KeyError, OSError, struct.error):
            progress = PROGRESS_LAYOUT.unpack(Path(os.environ[PROGRESS_VARIABLE]).read_bytes())
            attempt = msgspec.structs.replace(attempt, progress=progress)
        _write(Path(folder, _ATTEMPT), attempt)
    except OSError as error:
        logger.warning("cannot publish this attempt to the supervisor: %s", error)


def publish_uid(uid: str) -> None:
    """Publish the uid of an attempt that is about to begin, if there is a supervisor. Never raises.

    A trainer that is killed before it publishes its attempt must not look like another supervisor's.
    """
    if not (folder := os.environ.get(VARIABLE)):
        return
    try:
        Path(folder, uid).with_suffix(_UID).touch()
    except OSError as error:
        logger.warning("cannot publish the uid of this attempt to the supervisor: %s", error)


def published_uids(folder: Path) -> set[str]:
    """Return the uids of all attempts that began, or were about to, under this supervisor."""
    return {path.stem for path in folder.glob(f"*{_UID}")}


def published_attempt(folder: Path) -> PublishedAttempt | None:
    """Return the attempt that the trainer published, or `None` if there is none yet."""
    return _read_struct(Path(folder, _ATTEMPT), PublishedAttempt)


def opened_stores(job: str) -> tuple[int, tuple[str, ...]]:
    """Return how many sessions of a job this process has begun, and the jobs of all its sessions."""
    jobs = tuple(name for name, _ in _opened_stores)
    return jobs.count(job), jobs


def publish_store(rank: int, job: str, store: str, earlier: StoresOfStart) -> None:
    """Publish the store of a session to later starts under the same supervisor. Never raises."""
    if not (folder := os.environ.get(VARIABLE)):
        return
    _opened_stores.append((job, store))
    stores = {name: list(known) for name, known in earlier.stores.items()}
    places: dict[str, int] = {}
    for name, url in _opened_stores:
        place, known = places.get(name, 0), stores.setdefault(name, [])
        known[place : place + 1] = [url]
        places[name] = place + 1
    try:
        _write(Path(folder, _STORES.format(rank=rank)), StoresOfStart(stores=stores))
    except OSError as error:
        logger.debug("cannot publish the store of this session to the supervisor: %s", error)


def stores_of_earlier_starts(rank: int) -> StoresOfStart:
    """Return the stores of the starts before this one under the same supervisor."""
    if not (folder := os.environ.get(VARIABLE)):
        return StoresOfStart()
    return _read_struct(Path(folder, _EARLIER_STORES.format(rank=rank)), StoresOfStart) or StoresOfStart()


def keep_stores(folder: Path, progress: tuple[int, int]) -> None:
    """Keep the stores of a start that has ended for the next one, with the iteration that its last job reached."""
    attempt = published_attempt(folder)
    last = (
        {attempt.job: progress[0]} if attempt is not None and progress[0] and progress != attempt.progress else {}
    )
    for path in folder.glob(_STORES.format(rank="*")):
        rank = path.name.split(".")[1]
        earlier = folder / _EARLIER_STORES.format(rank=rank)
        before = _read_struct(earlier, StoresOfStart) or StoresOfStart()
        if (found := _read_struct(path, StoresOfStart)) is not None:
            with contextlib.suppress(OSError):
                _write(earlier, StoresOfStart(stores=found.stores, reached=before.reached | last))
                path.unlink()


def publish_end(folder: Path, end: EndInOutput) -> None:
    """Publish what the output of an ended start shows about its end. Never raises."""
    with contextlib.suppress(OSError):
        _write(Path(folder, _END), end)


def take_end(folder: Path) -> EndInOutput:
    """Return what the output of the start that has just ended shows, once."""
    path = Path(folder, _END)
    end = _read_struct(path, EndInOutput) or EndInOutput()
    path.unlink(missing_ok=True)
    return end


def _write(path: Path, content: msgspec.Struct) -> None:
    written = path.with_suffix(f".{os.getpid()}")
    written.write_bytes(msgspec.json.encode(content))
    written.rename(path)


def _read_struct(path: Path, kind: type[T]) -> T | None:
    """Return what `_write` wrote; `None` if there is no such file, or another content."""
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
    return min(now, max(now - age, processes.started_at(os.getpid()) or 0.0))


def request_relaunch(order: RestoreOrder) -> str:
    """Request that the supervisor restart the trainer for a restore, and return the restore's id.

    OSError: the request cannot be written.
    """
    _write(Path(os.environ[VARIABLE], _REQUESTED_RELAUNCH), order)
    return order.id


def take_relaunch(folder: Path) -> RestoreOrder | None:
    """Return the restore that the trainer requested a restart for, and keep it for the next start."""
    relaunch = Path(folder, _RELAUNCH)
    relaunch.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        Path(folder, _REQUESTED_RELAUNCH).rename(relaunch)
    return _read_struct(relaunch, RestoreOrder)


def relaunch_order() -> RestoreOrder | None:
    """Return the restore that this start is to carry out; known even if the server does not respond."""
    folder = os.environ.get(VARIABLE)
    return _read_struct(Path(folder, _RELAUNCH), RestoreOrder) if folder else None


def enable_stack_dump(rank: int) -> None:
    """Let the supervisor, if there is one, dump the stacks of this process. Never raises."""
    folder = os.environ.get(VARIABLE)
    if not folder or STACKS_SIGNAL is None or not hasattr(faulthandler, "register"):
        return
    try:  # faulthandler holds the file open
        file = open(Path(folder, _STACKS.format(rank=rank, pid=os.getpid())), "wb", buffering=0)  # noqa: SIM115
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
    except (OSError, ValueError, RuntimeError) as error:
        logger.debug("stack dumps are not available: %s", error)


def ranks(folder: Path) -> list[RankProcess]:
    """Return the processes whose stacks can be dumped, by rank."""
    found = []
    for path in folder.glob("rank-*.stacks"):
        with contextlib.suppress(ValueError):
            rank, pid = path.stem.removeprefix("rank-").split(".")
            found.append(RankProcess(int(rank), int(pid), path))
    return sorted(found, key=lambda each: each.rank)


def remove_stack_files(folder: Path) -> None:
    """Remove the stack files of a start that has ended."""
    for each in ranks(folder):
        with contextlib.suppress(OSError):
            each.path.unlink()


class ProgressFile:
    """The mapped file HOLDFAST_PROGRESS, in which the supervisor reads the progress."""

    def __init__(self, memory: mmap.mmap, imports: ImportsPublisher) -> None:
        self._memory, self._imports = memory, imports
        self._updates = 0

    def update(self, iteration: int) -> None:
        self._updates += 1
        PROGRESS_LAYOUT.pack_into(self._memory, 0, iteration, self._updates)
        self._imports.update(self._updates)

    def rest(self) -> None:
        """Mark training as finished, so that a slow end of the script is not taken for a hang."""
        iteration, updates = PROGRESS_LAYOUT.unpack_from(self._memory, 0)
        PROGRESS_LAYOUT.pack_into(self._memory, 0, iteration, -abs(updates))

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


def dump_stacks(ranks: Sequence[RankProcess]) -> dict[int, str]:
    """Return the stacks of each rank, or an explanation if a rank does not respond."""
    if STACKS_SIGNAL is not None:
        for each in ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each.pid, STACKS_SIGNAL)
    deadline = time.monotonic() + DUMP_SECONDS
    return {each.rank: _dumped(each, deadline) or _dump_by_py_spy(each) for each in ranks}


def _dumped(rank: RankProcess, deadline: float) -> str:
    """Return a complete dump, or an empty text if there is none in time."""
    text, since = "", time.monotonic()
    while time.monotonic() < deadline:
        found = _read(rank)
        if found != text:
            text, since = found, time.monotonic()
        elif text and time.monotonic() - since >= DUMP_SETTLED_SECONDS:
            break
        time.sleep(0.02)
    return text


def _read(rank: RankProcess) -> str:
    try:
        return _training_first(rank.path.read_text(errors="replace").strip())
    except OSError:
        return ""


def _training_first(dump: str) -> str:
    """Put the thread that handled the signal first, which is the one that trains; a dump has it last."""
    threads = dump.split("\n\n")
    return "\n\n".join(sorted(threads, key=lambda thread: not thread.startswith("Current thread")))


def _dump_by_py_spy(rank: RankProcess) -> str:
    py_spy = shutil.which("py-spy")
    if py_spy is None:
        return "no response to the signal, and py-spy is not installed"
    command = [py_spy, "dump", "--pid", str(rank.pid)]
    try:
        dump = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=PY_SPY_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no response to the signal, and py-spy failed: {error}"
    return dump.stdout.strip() or f"no response to the signal, and py-spy failed: {dump.stderr.strip()}"
