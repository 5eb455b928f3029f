"""Writes on a thread of the training process: the simplest backend, with no second process to lose."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from holdfast.persist.beside import Beside
from holdfast.persist.courtesy import be_nice
from holdfast.persist.pacer import Pacer
from holdfast.persist.task import Task, Written
from holdfast.persist.writing import write_checkpoint
from holdfast.store import Store

if TYPE_CHECKING:
    from holdfast.snapshot import Snapshot


class ThreadBackend:
    name = "thread"

    def __init__(self, store: Store) -> None:
        self._store = store
        self._hurry = threading.Event()

    def write(self, task: Task, snapshot: Snapshot) -> Written:
        # a thread of its own: where a niceness can be taken but not given back, the caller keeps what it has
        return Beside("holdfast-write", lambda: self._write(task, snapshot.payload())).result()

    def hurry(self) -> None:
        self._hurry.set()

    def close(self) -> None: ...

    def _write(self, task: Task, payload: memoryview) -> Written:
        be_nice()
        pacer = Pacer(task.origin.bytes_per_second, self._hurry.wait)
        return write_checkpoint(self._store, task, payload, pace=pacer)
