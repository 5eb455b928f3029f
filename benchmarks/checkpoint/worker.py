"""The process of one contender; it sleeps until the driver calls it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.disk import fill_cache, forget_cached
from benchmarks.harness import cpu_seconds, seconds_of

PAIRS = 2
"""Checkpoints per turn."""
STATES_ON_DEVICE = 4
"""Required free memory in sizes of the state: training, restore target, and what was read."""

Measured = dict[str, list[float]]
"""Samples by measure."""


class WorkerCalls:
    """The calls of the driver."""

    def start(self, name: str, scale: dict[str, Any], folder: Path) -> int | None:
        """Build the training; return the bytes of its state, or `None` if it does not fit into memory."""
        import torch

        from .scale import TrainingScale
        from .training import BenchmarkTraining

        torch.set_num_threads(1)
        self._name, self._folder = name, folder
        asked = TrainingScale(**scale)
        if asked.device == "cuda" and torch.cuda.mem_get_info()[0] < STATES_ON_DEVICE * asked.state_bytes:
            return None
        self._training = BenchmarkTraining(asked)
        self._step = 0
        self.iterate(2)
        return self._training.state_bytes

    def iterate(self, count: int) -> float:
        """Return the seconds of so many iterations without the contender."""
        return self._training.seconds(count)

    def prepare(self) -> str:
        from .registry import by_name

        self._folder.mkdir(parents=True)
        self._contender = by_name(self._name).build(self._training, self._folder)
        self._contender.prepare()
        return self._contender.note

    def one(self, iterations: int) -> int:
        """Take a checkpoint and train on; return how many snapshots fit into the contender's memory."""
        self._save()
        for _ in range(iterations):
            self._iterate()
            self._contender.end_iteration()
        self._contender.finish()
        self._contender.prune()
        return self._contender.max_in_flight

    def pair(self, k: int) -> Measured:
        """Measure two checkpoints, each with the k iterations after it, between k iterations without one.

        Each is compared with its neighbors, so that slow changes of the machine cancel out.
        """
        self._training.iterate()  # warm the caches after the other contenders
        before, found = self.iterate(k), []
        for _ in range(PAIRS):
            seen = self._checkpointed(k)
            after = self.iterate(k)
            plain, before = (before + after) / 2, after
            found.append(seen | {"iteration": plain / k, "slowdown": seen["slowdown"] - plain})
        return {measure: [each[measure] for each in found] for measure in found[0]}

    def _checkpointed(self, k: int) -> dict[str, float]:
        """So far, `slowdown` is the whole time."""
        cpu, own_cpu, hooks = cpu_seconds(os.getpid()), time.thread_time(), self._contender.hook_seconds
        started = time.perf_counter()
        blocked = self._save()
        for _ in range(k):
            blocked += self._iterate() + seconds_of(self._contender.end_iteration)
        self._training.synchronize()
        seconds = time.perf_counter() - started
        blocked += self._contender.hook_seconds - hooks
        while not self._contender.durable():  # training continues, as in a real job
            self._iterate()
            self._contender.end_iteration()
        durable = self._contender.finish() - started
        background = cpu_seconds(os.getpid()) - cpu - (time.thread_time() - own_cpu)
        self._contender.prune()
        return {
            "blocked": blocked,
            "slowdown": seconds,
            "background_cpu": max(0.0, background),  # /proc's clock may lag behind ours
            "durable": durable,
        }

    def every(self, count: int) -> Measured:
        """Measure iterations with a checkpoint after each, and without."""
        self._training.iterate()
        plain = self.iterate(count)
        for _ in range(self._contender.max_in_flight):  # until the maximum is in flight
            self._iterate()
            self._save()

        def iterate() -> None:
            self._iterate()
            self._save()

        seconds = self._training.seconds(count, iterate)
        self._contender.finish()
        self._contender.prune()
        return {"every_iteration": [seconds / plain]}

    def restore(self) -> Measured:
        """Take a checkpoint without training, then restore it with a cold and a warm cache."""
        self._training.iterate()
        self._training.synchronize()
        started = time.perf_counter()
        self._save()
        durable = self._contender.finish() - started
        self._contender.prune()
        found = {
            "durable_idle": [durable],
            "restore_cold": [self._restore(cold=True)],
            "restore_warm": [self._restore(cold=False)],
        }
        persist = self._contender.persist_seconds
        return found if persist is None else found | {"persist_idle": [persist]}

    def close(self) -> None:
        self._contender.close()

    def _save(self) -> float:
        self._step += 1
        self._training.synchronize()
        return seconds_of(lambda: self._contender.save(self._step))

    def _iterate(self) -> float:
        return self._training.iterate(self._contender.before_step, self._contender.after_step)

    def _restore(self, *, cold: bool) -> float:
        from .training import BenchmarkTraining, differing

        gc.collect()
        with contextlib.suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)  # as at the start of a process
        fresh = BenchmarkTraining(self._training.scale, blank=True)
        self._contender.before_restore(fresh)
        (forget_cached if cold else fill_cache)(self._contender.newest)
        started = time.perf_counter()
        self._contender.restore(fresh)
        fresh.touch()
        touched = time.perf_counter()
        fresh.touch()  # exclude what a repeated call takes
        seconds = touched - started - (time.perf_counter() - touched)
        self._contender.after_restore()
        if wrong := differing(self._training, fresh):
            raise RuntimeError(f"{len(wrong)} tensors came back wrong: {', '.join(wrong[:3])}")
        del fresh
        self._training.give_back()
        return seconds


def serve(channel: Connection, turns: Any) -> None:
    """Serve calls until the driver closes the channel."""
    while True:
        try:
            what, arguments = channel.recv()
        except EOFError:
            break
        try:
            answer = getattr(turns, what)(*arguments), None
        except Exception as error:  # leave a failing contender out, with the reason, and log the traceback
            traceback.print_exc()
            answer = None, f"{type(error).__name__}: {error}"
        if torch := sys.modules.get("torch"):  # leave the memory of the GPU to the others
            torch.cuda.empty_cache()
        channel.send(answer)
    with contextlib.suppress(Exception):  # the process ends anyway; closing the library leaves less behind
        turns.close()


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    kind, descriptor = sys.argv[1:]
    turns: Any = WorkerCalls()
    if kind == "limits":
        from .limits import MachineLimits

        turns = MachineLimits()
    serve(Connection(int(descriptor)), turns)


if __name__ == "__main__":
    main()
