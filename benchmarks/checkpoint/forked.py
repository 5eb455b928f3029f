"""Forked checkpoints: a child writes its copy-on-write image of the state while training goes on.

Garg, Mohan, Sullivan, Cooperman, "CRUM: Checkpoint-Restart Support for CUDA's Unified Memory", CLUSTER 2018. There
a proxy process holds the device, and shadow pages mirror its memory; here the state is in host memory, so only the
fork is left of it. Each page that the optimizer writes while the child lives is copied by a page fault.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .contender import Contender
from .training import BenchmarkTraining


class ForkedSave(Contender):
    reads_in_place = True
    note = "raw bytes in the order of the state, without names or digests; CPU only"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._waiter = ThreadPoolExecutor(1)

    def save(self, step: int) -> None:
        self.finish()
        spans = [(tensor.data_ptr(), tensor.nbytes) for _, tensor in self.training.tensors()]
        path = os.fsencode(self.place(step))
        child = os.fork()
        if not child:  # no torch, no locks: the other threads do not exist here
            _write_and_exit(path, spans)
        self.written.of(self._waiter.submit(_wait, child))

    def restore(self, fresh: BenchmarkTraining) -> None:
        with self.newest.open("rb", buffering=0) as file:
            for _, tensor in fresh.tensors():
                view = _view(tensor.data_ptr(), tensor.nbytes)
                while view:
                    view = view[file.readinto(view) or len(view) :]


def _wait(child: int) -> None:
    if status := os.waitpid(child, 0)[1]:
        raise RuntimeError(f"the child ended with status {status}")


def _view(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def _write_and_exit(path: bytes, spans: list[tuple[int, int]]) -> None:
    status = 1
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        for span in spans:
            view = _view(*span)
            while view:
                view = view[os.write(fd, view) :]
        os.fsync(fd)
        status = 0
    finally:
        os._exit(status)
