"""A pool of fork servers that runs many small trials, two at a time."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from tests.support.fork_server import ForkServer

T = TypeVar("T")
AT_ONCE = 2
LONG = [pytest.mark.long, pytest.mark.timeout(3600)]
"""Marks of tests that only `make test-long` runs."""


def every_other(cases: Sequence[T], step: int) -> list[T]:
    """Each `step`-th of them: what there is time for in an ordinary run."""
    return list(cases[step // 2 :: step])


def covering(cases: Iterable[T], *kinds: Callable[[T], Hashable]) -> list[T]:
    """Few of them that are of every kind, early ones and late ones: what there is time for in an ordinary run."""
    found, seen = [], set[tuple[int, Hashable]]()
    shuffled = list(cases)
    random.Random(0).shuffle(shuffled)
    for case in shuffled:
        of = {(number, kind(case)) for number, kind in enumerate(kinds)}
        if not of <= seen:
            found.append(case)
            seen |= of
    return found


class TrialPool:
    """Pool with one fork server for each trial that runs at the same time."""

    def __init__(self, *modules: str) -> None:
        self._all = [ForkServer(*modules) for _ in range(AT_ONCE)]
        self._free: queue.SimpleQueue[ForkServer] = queue.SimpleQueue()
        for fork_server in self._all:
            self._free.put(fork_server)

    def each(self, trial: Callable[[ForkServer, T], Sequence[str]], cases: Iterable[T]) -> list[str]:
        """What was wrong in any of the trials, with the case in front."""

        def run(case: T) -> list[str]:
            fork_server = self._free.get()
            try:
                return [f"{case}: {each}" for each in trial(fork_server, case)]
            finally:
                self._free.put(fork_server)

        with ThreadPoolExecutor(AT_ONCE) as workers:
            return [each for found in workers.map(run, cases) for each in found]

    def one(self) -> ForkServer:
        return self._all[0]

    def close(self) -> None:
        for fork_server in self._all:
            fork_server.close()
