"""Holdfast, through its public API."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import holdfast
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.store import open_store

from .contender import Contender
from .training import BenchmarkTraining

JOB = "benchmark"
NEVER = 10**9
KEEP = 3
TIMEOUT_SECONDS = 120.0


class HoldfastContender(Contender):
    """Holdfast: the figures include digests and events, and the slow-down also the deletion of old checkpoints."""

    note = "digests, and deletes old checkpoints, while the slow-down is measured"

    def __init__(self, *arguments: Any, max_in_flight: int = 1, **options: Any) -> None:
        super().__init__(*arguments)
        self.max_in_flight = max_in_flight
        # Around the session's own hook, which blocks the optimizer: hooks run in the order of registration.
        self._hook_began = self.hook_seconds = 0.0
        self.training.optimizer.register_step_pre_hook(self._hooks_begin)
        self._session = open_session(self.folder, self.training, max_in_flight=max_in_flight, **options)
        self.training.optimizer.register_step_pre_hook(self._hooks_end)
        self._watcher, self._in_flight = ThreadPoolExecutor(1), list[Future[float]]()
        self._twin = self.folder.with_name(f"{self.folder.name}.restored")
        self._durable_at = time.perf_counter()

    def prepare(self) -> None:
        self._session.resume()
        self._session.step()  # allocates in the background
        self._session.wait(TIMEOUT_SECONDS)

    def save(self, step: int) -> None:
        # A session delays a checkpoint instead of blocking training while its memory is in use. Other libraries
        # wait and take it, so do the same here; it matters if every iteration is saved.
        self._session._saver.snapshots.wait_free(TIMEOUT_SECONDS)
        self._session.checkpoint()
        self._session.step()
        self._saved_iteration, run = self._session.iteration, self._session._saver.snapshots._copy.run
        self._in_flight.append(self._watcher.submit(self._watch, run))

    def end_iteration(self) -> None:
        self._session.step()

    def durable(self) -> bool:
        return all(future.done() for future in self._in_flight)

    def finish(self) -> float:
        if self._in_flight:
            *_, self._durable_at = (future.result() for future in self._in_flight)
            self._in_flight.clear()
            self._session.wait(TIMEOUT_SECONDS)  # old checkpoints are deleted
            name = open_store(self.folder).checkpoints(JOB)[-1]
            if parse_checkpoint_id(name)[0] != self._saved_iteration:
                raise RuntimeError(f"iteration {self._saved_iteration} is missing: the newest is {name}")
            self.newest = self.folder / JOB / name
        return self._durable_at

    def before_restore(self, fresh: BenchmarkTraining) -> None:
        # Do not fence the training session: restore from the same files in another store.
        shutil.copytree(self.folder, self._twin, copy_function=os.link)
        self._restoring = open_session(self._twin, fresh)

    def restore(self, fresh: BenchmarkTraining) -> None:
        if not self._restoring.resume():
            raise RuntimeError("nothing was restored")

    def after_restore(self) -> None:
        self._restoring.close()
        shutil.rmtree(self._twin)

    def close(self) -> None:
        self._session.close()

    def prune(self) -> None:
        pass  # retention did

    def _watch(self, run: Any) -> float:
        run.wait_copied()
        copied = time.perf_counter()
        run.wait_settled(TIMEOUT_SECONDS)
        durable = time.perf_counter()
        self.persist_seconds = durable - copied
        return durable

    def _hooks_begin(self, *_: object) -> None:
        self._hook_began = time.perf_counter()

    def _hooks_end(self, *_: object) -> None:
        self.hook_seconds += time.perf_counter() - self._hook_began


def open_session(folder: Path, training: BenchmarkTraining, **options: Any) -> holdfast.Session:
    """Return a session that takes no checkpoint before the options say so."""
    options = {"every": NEVER, "keep": KEEP} | options
    return holdfast.Session(
        JOB, store=folder, server="", model=training.model, optimizer=training.optimizer, **options
    )
