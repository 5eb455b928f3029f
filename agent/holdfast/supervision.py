"""What a trainer and the supervisor above it tell each other, in a folder that both know. Knows no torch.

The trainer's rank 0 says which job it trains, so that the supervisor can ask the server for orders and the store
for newer attempts. Every rank opens a file for its stacks and dumps them there when a signal asks for them: from
within a signal handler, whatever the interpreter is stuck in.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

logger = logging.getLogger("holdfast")

VARIABLE = "HOLDFAST_SUPERVISION"
EXIT_FENCED = 75
"""How a supervised trainer ends when a newer attempt of its job has begun: EX_TEMPFAIL."""
STACKS_SIGNAL: int | None = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None
"""Of those that no program means anything by."""
_TRAINED = "trained.json"
_STACKS = "rank-{rank}.{pid}.stacks"

_files: list[IO[bytes]] = []
"""Held open: the signal handler writes to their descriptors."""


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


def introduced(folder: Path) -> Trained | None:
    """What the trainer has said; None while it has said nothing that can be read."""
    try:
        return msgspec.json.decode(Path(folder, _TRAINED).read_bytes(), type=Trained)
    except (OSError, msgspec.DecodeError):
        return None


def expose(rank: int) -> None:
    """Let the supervisor, if there is one, ask this process for the stacks of its threads. Never raises."""
    folder = os.environ.get(VARIABLE)
    if not folder or STACKS_SIGNAL is None or not hasattr(faulthandler, "register"):
        return
    try:
        file = open(Path(folder, _STACKS.format(rank=rank, pid=os.getpid())), "wb", buffering=0)  # noqa: SIM115
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
    except (OSError, ValueError, RuntimeError) as error:
        logger.debug("no stacks can be asked for: %s", error)
    else:
        _files.append(file)


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
