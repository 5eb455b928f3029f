"""The supervisor's side of the folder that it shares with trainers, and what one start keeps there for the next.

Only a supervisor loads it, and a trainer that has one. Does not import torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.protocol.wire import RestoreOrder
from holdfast.system.masking import escaped
from holdfast.system.supervisor_channel import (
    ATTEMPT,
    ENDED,
    LOG_TIME,
    RELAUNCH,
    REQUESTED_RELAUNCH,
    STACKS_SIGNAL,
    UID,
    VARIABLE,
    PublishedAttempt,
    read_struct,
    write_struct,
)

logger = logging.getLogger("holdfast")

_PREFIX, _LOCK = "holdfast-run-", "supervisor.lock"
_END = "end.json"
DUMP_SECONDS = 3.0
"""Limit of a stack dump. It takes milliseconds, unless the process is stopped or stuck in a system call."""
DUMP_SETTLED_SECONDS = 0.2
PY_SPY_SECONDS = 20.0
_STORES, _EARLIER_STORES = "stores.{rank}.json", "earlier-stores.{rank}.json"
_opened_stores: list[tuple[str, str]] = []
"""The jobs and stores of the sessions of this process, in their order."""


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


def published_uids(folder: Path) -> set[str]:
    """Return the uids of all attempts that began, or were about to, under this supervisor."""
    return {path.stem for path in folder.glob(f"*{UID}")}


def published_attempt(folder: Path) -> PublishedAttempt | None:
    """Return the attempt that the trainer published, or `None` if there is none yet."""
    return read_struct(Path(folder, ATTEMPT), PublishedAttempt)


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
        write_struct(Path(folder, _STORES.format(rank=rank)), StoresOfStart(stores=stores))
    except OSError as error:
        logger.debug("cannot publish the store of this session to the supervisor: %s", error)


def stores_of_earlier_starts(rank: int) -> StoresOfStart:
    """Return the stores of the starts before this one under the same supervisor."""
    if not (folder := os.environ.get(VARIABLE)):
        return StoresOfStart()
    return read_struct(Path(folder, _EARLIER_STORES.format(rank=rank)), StoresOfStart) or StoresOfStart()


def keep_stores(folder: Path, progress: tuple[int, int]) -> None:
    """Keep the stores of a start that has ended for the next one, with the iteration that its last job reached."""
    attempt = published_attempt(folder)
    last = (
        {attempt.job: progress[0]} if attempt is not None and progress[0] and progress != attempt.progress else {}
    )
    for path in folder.glob(_STORES.format(rank="*")):
        rank = path.name.split(".")[1]
        earlier = folder / _EARLIER_STORES.format(rank=rank)
        before = read_struct(earlier, StoresOfStart) or StoresOfStart()
        if (found := read_struct(path, StoresOfStart)) is not None:
            with contextlib.suppress(OSError):
                write_struct(earlier, StoresOfStart(stores=found.stores, reached=before.reached | last))
                path.unlink()


def publish_end(folder: Path, end: EndInOutput) -> None:
    """Publish what the output of an ended start shows about its end. Never raises."""
    with contextlib.suppress(OSError):
        write_struct(Path(folder, _END), end)


def take_end(folder: Path) -> EndInOutput:
    """Return what the output of the start that has just ended shows, once."""
    path = Path(folder, _END)
    end = read_struct(path, EndInOutput) or EndInOutput()
    path.unlink(missing_ok=True)
    return end


def take_relaunch(folder: Path) -> RestoreOrder | None:
    """Return the restore that the trainer requested a restart for, and keep it for the next start."""
    relaunch = Path(folder, RELAUNCH)
    relaunch.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        Path(folder, REQUESTED_RELAUNCH).rename(relaunch)
    return read_struct(relaunch, RestoreOrder)


def take_ended(folder: Path) -> str | None:
    """Return how the last start ended on request, once; None if it did not."""
    path = Path(folder, ENDED)
    try:
        how = path.read_text()
        path.unlink()
    except OSError:
        return None
    return how


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
