"""The process of one contender: it waits, without a sound, until it is told to take its turn."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PAIRS = 2
"""Checkpoints a turn."""
STATES_ON_DEVICE = 4
"""Free memory asked for: one trains, another is restored into, and what was read may be there once more."""

Measured = dict[str, list[float]]
"""By measure, one for each time that it was taken."""


class Turns:
    """What the driver can ask for."""

    def start(self, name: str, scale: dict[str, Any], folder: Path) -> int | None:
        """Build the training, without the library; the bytes of its state, None where there is no room for it."""
        import torch

        from .scale import Scale
        from .training import Training

        torch.set_num_threads(1)
        self._name, self._folder = name, folder
        asked = Scale(**scale)
        if asked.device == "cuda" and torch.cuda.mem_get_info()[0] < STATES_ON_DEVICE * asked.state_bytes:
            return None
        self._training = Training(asked)
        self._step = 0
        self.iterate(2)
        return self._training.state_bytes

    def iterate(self, count: int) -> float:
        """Seconds of so many iterations without the contender."""
        self._training.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            self._training.iterate()
        self._training.synchronize()
        return time.perf_counter() - started

    def prepare(self) -> str:
        from .registry import by_name

        self._folder.mkdir(parents=True)
        self._contender = by_name(self._name).build(self._training, self._folder)
        self._contender.prepare()
        return self._contender.note

    def one(self, iterations: int) -> int:
        """A checkpoint and some iterations after it; how many snapshots it has memory for."""
        self._save()
        for _ in range(iterations):
            self._iterate()
            self._contender.end_iteration()
        self._contender.finish()
        self._contender.prune()
        return self._contender.max_in_flight

    def pair(self, k: int) -> Measured:
        """Two checkpoints and the k iterations after each, between stretches of k iterations without one.

        Each is compared with those before and after it: what slowly changes in a machine is not seen then.
        """
        self._training.iterate()  # what others left in the caches is not to be seen in the first stretch
        before, found = self.iterate(k), []
        for _ in range(PAIRS):
            seen = self._checkpointed(k)
            after = self.iterate(k)
            plain, before = (before + after) / 2, after
            found.append(seen | {"iteration": plain / k, "slowdown": seen["slowdown"] - plain})
        return {measure: [each[measure] for each in found] for measure in found[0]}

    def _checkpointed(self, k: int) -> dict[str, float]:
        """`slowdown` is the whole time yet."""
        cpu, own_cpu, hooks = self._cpu(), time.thread_time(), self._contender.hook_seconds
        started = time.perf_counter()
        blocked = self._save()
        for _ in range(k):
            blocked += self._iterate()
            blocked += self._end_iteration()
        self._training.synchronize()
        seconds = time.perf_counter() - started
        blocked += self._contender.hook_seconds - hooks
        while not self._contender.durable():  # training goes on meanwhile, as it would
            self._iterate()
            self._contender.end_iteration()
        durable = self._contender.finish() - started
        background = self._cpu() - cpu - (time.thread_time() - own_cpu)
        self._contender.prune()
        return {
            "blocked": blocked,
            "slowdown": seconds,
            "background_cpu": max(0.0, background),  # where there is none, /proc's clock may be behind ours
            "durable": durable,
        }

    def every(self, count: int) -> Measured:
        """A checkpoint after each iteration, beside iterations without."""
        self._training.iterate()
        plain = self.iterate(count)
        for _ in range(self._contender.max_in_flight):  # until all that can be in flight is
            self._iterate()
            self._save()
        started = time.perf_counter()
        for _ in range(count):
            self._iterate()
            self._save()
        seconds = time.perf_counter() - started
        self._contender.finish()
        self._contender.prune()
        return {"every_iteration": [seconds / plain]}

    def restore(self) -> Measured:
        """A checkpoint with nothing beside it, then restored with a cold cache and with a warm one."""
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
        started = time.perf_counter()
        self._contender.save(self._step)
        return time.perf_counter() - started

    def _iterate(self) -> float:
        return self._training.iterate(self._contender.before_step, self._contender.after_step)

    def _end_iteration(self) -> float:
        started = time.perf_counter()
        self._contender.end_iteration()
        return time.perf_counter() - started

    def _restore(self, *, cold: bool) -> float:
        from .limits import fill_cache, forget_cached
        from .processes import give_memory_back
        from .training import Training, differing

        give_memory_back()
        fresh = Training(self._training.scale, blank=True)
        self._contender.before_restore(fresh)
        (forget_cached if cold else fill_cache)(self._contender.newest)
        started = time.perf_counter()
        self._contender.restore(fresh)
        fresh.touch()
        touched = time.perf_counter()
        fresh.touch()  # what it takes when all is there already is none of the restoring
        seconds = touched - started - (time.perf_counter() - touched)
        self._contender.after_restore()
        if wrong := differing(self._training, fresh):
            raise RuntimeError(f"{len(wrong)} tensors came back wrong: {', '.join(wrong[:3])}")
        del fresh
        self._training.give_back()
        return seconds

    @staticmethod
    def _cpu() -> float:
        from .processes import cpu_seconds

        return cpu_seconds(os.getpid())


def serve(channel: Connection, turns: Any) -> None:
    """Answer until the driver hangs up."""
    while True:
        try:
            what, arguments = channel.recv()
        except EOFError:
            break
        try:
            channel.send((getattr(turns, what)(*arguments), None))
        except (
            Exception
        ) as error:  # a contender that breaks is left out, with its reason, and its place in the log
            traceback.print_exc()
            channel.send((None, f"{type(error).__name__}: {error}"))
    with contextlib.suppress(Exception):  # it ends anyhow; a library that closes leaves less behind
        turns.close()


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    kind, descriptor = sys.argv[1:]
    turns: Any
    if kind == "contender":
        turns = Turns()
    elif kind == "limits":
        from .limits import Limits

        turns = Limits()
    else:
        from .own import Own

        turns = Own()
    serve(Connection(int(descriptor)), turns)


if __name__ == "__main__":
    main()
