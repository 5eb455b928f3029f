"""The interface through which every library is measured."""

from __future__ import annotations

import os
import shutil
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.disk import opened

if TYPE_CHECKING:
    from .training import BenchmarkTraining


class Contender:
    """One library in one configuration, attached to one training.

    The loop calls `save` after an iteration, `before_step` and `after_step` around each following optimizer step,
    and `end_iteration` after each iteration without a checkpoint. Their duration blocks training. A checkpoint is
    durable when the library, or this class in its thread or process, has fsynced it.
    """

    note = ""
    """A note below the table."""
    reads_in_place = False
    """Whether `restore` reads into existing tensors, so that the optimizer needs its moments first."""
    max_in_flight = 1
    """Number of checkpoints that its memory can hold."""
    hook_seconds = 0.0
    """Time in its own optimizer hooks, which `before_step` does not include."""
    persist_seconds: float | None = None
    """Time from the end of the copy in memory until the last checkpoint was durable; `None` if unknown."""

    def __init__(self, training: BenchmarkTraining, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.newest = folder
        """Path of the newest checkpoint."""
        self.written = CompletionTime()

    def prepare(self) -> None:
        """Start threads and processes, and allocate memory."""

    def save(self, step: int) -> None:
        """Begin a checkpoint; return when the loop may continue. May wait for the one before."""

    def before_step(self) -> None: ...

    def after_step(self) -> None: ...

    def end_iteration(self) -> None: ...

    def durable(self) -> bool:
        """Return whether all checkpoints are durable or have failed."""
        return self.written.seen

    def finish(self) -> float:
        """Wait until all is durable; return the `time.perf_counter()` of the last one."""
        return self.written.wait()

    def before_restore(self, fresh: BenchmarkTraining) -> None:
        """Prepare `restore`, unmeasured."""
        if self.reads_in_place:
            fresh.fill_optimizer()

    def restore(self, fresh: BenchmarkTraining) -> None:
        """Load the newest checkpoint into another model and optimizer of the same shape."""

    def after_restore(self) -> None: ...

    def close(self) -> None: ...

    def prune(self) -> None:
        """Delete all but the newest checkpoint, unmeasured."""
        for path in self.folder.iterdir():
            if path != self.newest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def place(self, step: int) -> Path:
        self.newest = self.folder / f"step-{step:06d}"
        return self.newest


class NoCheckpoints(Contender):
    """No checkpoints: its apparent cost is the noise of the other figures."""

    def save(self, step: int) -> None:
        self.written.now()


def fsync_tree(path: Path) -> None:
    """fsync a file or a directory with its contents, and the parent directory."""
    for each in [*path.rglob("*"), path, path.parent]:
        with opened(each, os.O_RDONLY) as fd:
            os.fsync(fd)


class CompletionTime:
    """The time at which a future completed, from its callback: the loop may look much later."""

    def __init__(self) -> None:
        self._future: Future[Any] | None = None
        self._at = time.perf_counter()
        self._seen = threading.Event()

    def now(self) -> None:
        self._at = time.perf_counter()

    def of(self, future: Future[Any]) -> None:
        self._future, self._seen = future, threading.Event()
        future.add_done_callback(self._done)

    def wait(self) -> float:
        """Return the time; raise what the future raises."""
        if self._future is not None:
            self._future.result()
            self._seen.wait()  # the future wakes its waiters before it calls back
        return self._at

    @property
    def seen(self) -> bool:
        return self._future is None or self._seen.is_set()

    def _done(self, _: object) -> None:
        self.now()
        self._seen.set()
