"""What every contender is measured through."""

from __future__ import annotations

import os
import shutil
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .training import Training


class Contender:
    """One library, in one setting, that checkpoints one training.

    The loop calls `save` after an iteration, `before_step` and `after_step` around each optimizer step that
    follows, `end_iteration` after each iteration without a checkpoint. What these take is time that training
    was held up. A checkpoint counts as durable when it has been fsynced: by the library, or by us in the
    library's place, in its own thread or process where there is one.
    """

    note = ""
    """What a reader of the table must know."""
    reads_in_place = False
    """`restore` reads into tensors that are there, so the optimizer must have its moments before."""
    max_in_flight = 1
    """How many checkpoints its memory can hold at once."""
    hook_seconds = 0.0
    """How long hooks of its own held optimizer steps up, where `before_step` does not see it."""
    persist_seconds: float | None = None
    """From the end of the copy in memory until the last checkpoint was durable; None where nobody can tell."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.newest = folder
        """The last checkpoint."""

    def prepare(self) -> None:
        """Start threads and processes, allocate what can be allocated."""

    def save(self, step: int) -> None:
        """Begin a checkpoint; return when the loop may go on. Waits for the one before, where it must."""

    def before_step(self) -> None: ...

    def after_step(self) -> None: ...

    def end_iteration(self) -> None: ...

    def durable(self) -> bool:
        """Whether all that was saved is durable, or has failed."""
        return True

    def finish(self) -> float:
        """Wait until all is durable; the `time.perf_counter()` at which the last one became so."""
        return time.perf_counter()

    def before_restore(self, fresh: Training) -> None:
        """What may come before `restore`, unmeasured."""
        if self.reads_in_place:
            fresh.fill_optimizer()

    def restore(self, fresh: Training) -> None:
        """Put the newest checkpoint into another model and optimizer of the same shape."""

    def after_restore(self) -> None: ...

    def close(self) -> None: ...

    def prune(self) -> None:
        """Remove all but the newest checkpoint, unmeasured."""
        for path in self.folder.iterdir():
            if path != self.newest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def place(self, step: int) -> Path:
        self.newest = self.folder / f"step-{step:06d}"
        return self.newest


class Plain(Contender):
    """No checkpoints: what it seems to cost is the noise of the others' figures."""


def fsync_tree(path: Path) -> None:
    """fsync a file or a directory with all that is in it, and the directory that names it."""
    _fsync_below(path)
    _fsync(path.parent)


def _fsync_below(path: Path) -> None:
    if path.is_dir():
        for each in path.iterdir():
            _fsync_below(each)
    _fsync(path)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Moment:
    """When a future was done, as its own callback saw it: the loop may look much later."""

    def __init__(self) -> None:
        self._future: Future[Any] | None = None
        self._at = time.perf_counter()
        self._seen = threading.Event()

    def of(self, future: Future[Any]) -> None:
        self._future, self._seen = future, threading.Event()
        future.add_done_callback(self._done)

    def wait(self) -> float:
        """Raises what the future raises."""
        if self._future is not None:
            self._future.result()
            self._seen.wait()  # the future wakes those who wait before it calls back
        return self._at

    @property
    def seen(self) -> bool:
        return self._future is None or self._seen.is_set()

    def _done(self, _: object) -> None:
        self._at = time.perf_counter()
        self._seen.set()
