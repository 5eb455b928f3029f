"""What a trainer and the supervisor above it tell each other, in a folder that both know. Knows no torch.

The trainer's rank 0 says which job it trains, so that the supervisor can ask the server for orders and the store
for newer attempts. Every rank opens a file for its stacks and dumps them there when a signal asks for them: from
within a signal handler, whatever the interpreter is stuck in.
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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.protocol.messages import RestoreOrder
from holdfast.system import processes

logger = logging.getLogger("holdfast")

VARIABLE = "HOLDFAST_SUPERVISION"
EXIT_FENCED = 75
"""How a supervised trainer ends when a newer attempt of its job has begun: EX_TEMPFAIL."""
STACKS_SIGNAL: int | None = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None
"""Of those that no program means anything by."""
_PREFIX, _LOCK = "holdfast-run-", "supervisor.lock"
_UID = ".uid"
EXIT_RELAUNCH = 79
"""How it ends when it is to be started again for an order to restore, which it cannot carry out while it runs."""
STARTED_AT = "HOLDFAST_STARTED_AT"
"""When the supervisor started the trainer, in seconds since the epoch."""
PROGRESS_VARIABLE = "HOLDFAST_PROGRESS"
PROGRESS_LAYOUT = struct.Struct("<qq")
"""The last finished iteration, and how many times that was told: negative once training is over."""
LOG_TIME = "%Y-%m-%d %H:%M:%S"
PREVIOUS_EXIT = "HOLDFAST_PREVIOUS_EXIT"
"""How the start before this one ended, where the supervisor restarted the trainer."""
_TRAINED = "trained.json"
_ASKED, _NOTED = "relaunch.json", "order.json"
_STACKS = "rank-{rank}.{pid}.stacks"
DUMP_SECONDS = 3.0
"""A dump takes milliseconds, unless the process is stopped or in the midst of a system call that does not end."""
DUMP_SETTLED_SECONDS = 0.2
PY_SPY_SECONDS = 20.0

_attempts = itertools.count()
"""Attempts that this process has reported."""


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervised trainer trains."""

    job: str
    uid: str
    attempt: int
    """0 while its store cannot be written to."""
    lineage: int
    store: str
    server: str | None


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank that can be asked for its stacks."""

    rank: int
    pid: int
    path: Path


@contextlib.contextmanager
def folder_of_a_supervisor() -> Iterator[Path]:
    """Gone with the supervisor; if that is killed, with the next one of the same user on this machine."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as made:
        lock = os.open(Path(made, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _remove_abandoned(Path(made).parent)
            yield Path(made)
        finally:
            os.close(lock)


def _remove_abandoned(place: Path) -> None:
    """Those whose lock nobody holds any more: a number of a process would prove nothing."""
    for lock in place.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # of somebody else, or held
            folder = os.lstat(lock.parent)
            if folder.st_uid != os.geteuid() or not stat.S_ISDIR(folder.st_mode):
                continue
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(fd)


def say(line: str, level: int = logging.INFO) -> None:
    """Write a line of the supervisor to stderr, in the form of the trainer's own."""
    at, name = time.strftime(LOG_TIME), logging.getLevelName(level)
    print(f"{at} {name} holdfast run: {line}", file=sys.stderr, flush=True)


def introduce(trained: Trained) -> None:
    """Tell the supervisor, if there is one, what is trained here. Never raises."""
    if not (folder := os.environ.get(VARIABLE)):
        return
    path = Path(folder, _TRAINED)
    try:
        written = path.with_suffix(f".{os.getpid()}")
        written.write_bytes(msgspec.json.encode(trained))
        written.rename(path)
    except OSError as error:
        logger.warning("the supervisor cannot be told what is trained: %s", error)


def announce(uid: str) -> None:
    """Tell the supervisor, if there is one, that the attempt of this uid is its own, before it begins: one that is
    killed before it has introduced itself must not be taken for somebody else's. Never raises."""
    if not (folder := os.environ.get(VARIABLE)):
        return
    try:
        Path(folder, uid).with_suffix(_UID).touch()
    except OSError as error:
        logger.warning("the supervisor cannot be told which attempt this is: %s", error)


def announced(folder: Path) -> set[str]:
    """The uids of all attempts that were begun, or were about to be, under this supervisor."""
    return {path.stem for path in folder.glob(f"*{_UID}")}


def introduced(folder: Path) -> Trained | None:
    """What the trainer has said; None while it has said nothing that can be read."""
    try:
        return msgspec.json.decode(Path(folder, _TRAINED).read_bytes(), type=Trained)
    except (OSError, msgspec.DecodeError):
        return None


def is_supervised() -> bool:
    """A supervisor would start this process again."""
    return bool(os.environ.get(VARIABLE))


def age_seconds() -> float | None:
    """Since the supervisor, if there is one, started the trainer."""
    try:
        return max(0.0, time.time() - float(os.environ[STARTED_AT]))
    except (KeyError, ValueError):
        return None


def attempt_began_at() -> float:
    """Return when the attempt began that this process reports now.

    Where a supervisor restarted the trainer, that is when the process started: the job is not down while it
    imports torch and loads a checkpoint. A further attempt of the same process begins now.
    """
    now, first = time.time(), next(_attempts) == 0
    if not first or PREVIOUS_EXIT not in os.environ or (age := age_seconds()) is None:
        return now
    return min(now, max(now - age, processes.started_at(os.getpid()) or 0.0))


def ask_relaunch(order: RestoreOrder) -> str:
    """Have the supervisor start the trainer again when it ends now, for this order, whose id is returned.

    OSError: it cannot be asked.
    """
    path = Path(os.environ[VARIABLE], _ASKED)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_bytes(msgspec.json.encode(order))
    written.rename(path)
    return order.id


def take_relaunch(folder: Path) -> RestoreOrder | None:
    """The order that the start which ended now wants another one for; that one finds it noted."""
    noted = Path(folder, _NOTED)
    noted.unlink(missing_ok=True)
    try:
        Path(folder, _ASKED).rename(noted)
        return msgspec.json.decode(noted.read_bytes(), type=RestoreOrder)
    except (OSError, msgspec.DecodeError):
        return None


def noted_order() -> RestoreOrder | None:
    """The order that this start was made for, also where no server can be asked."""
    try:
        return msgspec.json.decode(Path(os.environ[VARIABLE], _NOTED).read_bytes(), type=RestoreOrder)
    except (KeyError, OSError, msgspec.DecodeError):
        return None


def expose(rank: int) -> None:
    """Let the supervisor, if there is one, ask this process for the stacks of its threads. Never raises."""
    folder = os.environ.get(VARIABLE)
    if not folder or STACKS_SIGNAL is None or not hasattr(faulthandler, "register"):
        return
    try:  # faulthandler holds the file open
        file = open(Path(folder, _STACKS.format(rank=rank, pid=os.getpid())), "wb", buffering=0)  # noqa: SIM115
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
    except (OSError, ValueError, RuntimeError) as error:
        logger.debug("no stacks can be asked for: %s", error)


def ranks(folder: Path) -> list[Rank]:
    """Those that can be asked for their stacks, by number."""
    found = []
    for path in folder.glob("rank-*.stacks"):
        with contextlib.suppress(ValueError):
            rank, pid = path.stem.removeprefix("rank-").split(".")
            found.append(Rank(int(rank), int(pid), path))
    return sorted(found, key=lambda each: each.rank)


def forget_ranks(folder: Path) -> None:
    """Those of a start that is over."""
    for each in ranks(folder):
        with contextlib.suppress(OSError):
            each.path.unlink()


class ProgressFile:
    """The file named by HOLDFAST_PROGRESS, mapped: it shows the supervisor that a job moves. Without one it does
    nothing."""

    def __init__(self, path: str | None = None) -> None:
        self._memory: mmap.mmap | None = None
        self._updates = 0
        path = path if path is not None else os.environ.get(PROGRESS_VARIABLE)
        if not path:
            return
        try:
            with open(path, "r+b") as handle:
                self._memory = mmap.mmap(handle.fileno(), PROGRESS_LAYOUT.size)
        except (OSError, ValueError) as error:
            logger.warning("%s=%s cannot be used: %s", PROGRESS_VARIABLE, path, error)

    def update(self, iteration: int) -> None:
        if self._memory is not None:
            self._updates += 1
            PROGRESS_LAYOUT.pack_into(self._memory, 0, iteration, self._updates)

    def rest(self) -> None:
        """Training is over; what comes now may take as long as it likes."""
        if self._memory is not None:
            iteration, updates = PROGRESS_LAYOUT.unpack_from(self._memory, 0)
            PROGRESS_LAYOUT.pack_into(self._memory, 0, iteration, -abs(updates))

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def stacks_of(ranks: Sequence[Rank]) -> dict[int, str]:
    """The stacks of each rank, by rank; what could be said in their place where one does not answer."""
    for each in ranks:
        _ask(each)
    deadline = time.monotonic() + DUMP_SECONDS
    return {each.rank: _dumped(each, deadline) or _seen_from_outside(each) for each in ranks}


def _ask(rank: Rank) -> None:
    if STACKS_SIGNAL is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(rank.pid, STACKS_SIGNAL)


def _dumped(rank: Rank, deadline: float) -> str:
    """What it wrote, once nothing more comes; nothing where it wrote nothing in time."""
    text, since = "", time.monotonic()
    while time.monotonic() < deadline:
        found = _read(rank)
        if found != text:
            text, since = found, time.monotonic()
        elif text and time.monotonic() - since >= DUMP_SETTLED_SECONDS:
            break
        time.sleep(0.02)
    return text


def _read(rank: Rank) -> str:
    try:
        return _training_first(rank.path.read_text(errors="replace").strip())
    except OSError:
        return ""


def _training_first(dump: str) -> str:
    """The thread that took the signal, which is the one that trains, comes last in a dump, and is wanted first."""
    threads = dump.split("\n\n")
    return "\n\n".join(sorted(threads, key=lambda thread: not thread.startswith("Current thread")))


def _seen_from_outside(rank: Rank) -> str:
    py_spy = shutil.which("py-spy")
    if py_spy is None:
        return "it does not answer, and py-spy is not installed to look at it from outside"
    command = [py_spy, "dump", "--pid", str(rank.pid)]
    try:
        seen = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=PY_SPY_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not answer, nor can py-spy look at it: {error}"
    return seen.stdout.strip() or f"it does not answer, nor can py-spy look at it: {seen.stderr.strip()}"


def taken_over(trained: Trained, own: Collection[str] = ()) -> str | None:
    """Who else has begun a newer attempt of the job; None where nobody has, or the store cannot be asked.

    `own` are the uids of attempts that are this supervisor's as well.
    """
    if not trained.attempt:
        return None
    from holdfast.store import newest_attempt, open_store  # not while a trainer starts: it takes memory

    try:
        newest = newest_attempt(open_store(trained.store), trained.job)
    except (OSError, ValueError) as error:
        logger.debug("the store cannot be asked for the newest attempt: %s", error)
        return None
    if newest is None or newest.number <= trained.attempt or newest.uid in (trained.uid, *own):
        return None
    return f"attempt {newest.number} of {trained.job} was started on {newest.host} (process {newest.pid})"
