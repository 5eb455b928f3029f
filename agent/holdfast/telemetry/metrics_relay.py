"""Relay of metrics from the last stage of a pipeline to rank 0, which reports them.

The ranks use the store of torch.distributed, which needs no call of rank 0 at the same time. Imported only for
pipelines.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Sequence

import msgspec

from holdfast.retention import LoggedMetric
from holdfast.telemetry.iteration_metrics import Iteration
from holdfast.torch_internals import default_store

SEND_SECONDS = 0.1
"""Least time between two messages of a rank, and between two questions of rank 0."""
PATIENCE_SECONDS = 5.0
"""How long rank 0 keeps an iteration for metrics of another rank."""
MOST_KEPT = 4096
"""Iterations whose metrics rank 0 keeps."""

Measured = list[tuple[Iteration, dict[str, float]]]
Place = tuple[int, int]
"""A lineage and an iteration of it."""


class _Message(msgspec.Struct, frozen=True, array_like=True):
    upto: Place
    """The metrics of all iterations up to this one were sent."""
    metrics: list[tuple[Place, dict[str, float]]]


class MetricsSender:
    """Sends the metrics of this rank to rank 0. For the training thread only."""

    def __init__(self, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._key, self._clock = key, clock
        self._sent_at = -math.inf
        """When the last message was sent; infinite when the store was lost."""
        self._unsent: list[tuple[Place, dict[str, float]]] = []

    def relay(self, measured: Measured, *, wait: bool) -> Measured:
        """Send metrics from time to time, with `wait` at once; return what was given."""
        self._unsent += [((each.lineage, each.iteration), metrics) for each, metrics in measured]
        now = self._clock()
        if self._unsent and (wait or now >= self._sent_at + SEND_SECONDS) and self._sent_at < math.inf:
            if any(metrics for _, metrics in self._unsent):
                found = [each for each in self._unsent if each[1]]
                data = msgspec.msgpack.encode(_Message(self._unsent[-1][0], found))
                try:
                    default_store().set(f"{self._key}/{default_store().add(self._key, 1)}", data)
                except (RuntimeError, ValueError):  # the store is lost, or the script has closed it: the job ends
                    self._sent_at = math.inf
                    return measured
            self._sent_at = now
            self._unsent.clear()
        return measured

    def newest(self, lineage: int, iteration: int) -> dict[str, LoggedMetric]:
        """Return nothing: only rank 0 has the metrics of other ranks."""
        return {}


class MetricsReceiver:
    """Adds the metrics of other ranks to the iterations of rank 0. For the training thread, except `newest`."""

    def __init__(self, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._key, self._clock = key, clock
        self._asked_at = -math.inf
        self._number = 1
        """That of the next message."""
        self._waiting: collections.deque[tuple[float, Iteration, dict[str, float]]] = collections.deque()
        """Iterations that may get metrics, each with the time at which it ended."""
        self._received: collections.OrderedDict[Place, dict[str, float]] = collections.OrderedDict()
        self._upto: Place = (0, 0)
        self._is_lost = False
        """The store of torch.distributed did not answer, and is not asked again."""

    def relay(self, measured: Measured, *, wait: bool) -> Measured:
        """Return iterations with the metrics of other ranks; with `wait`, also those that got none."""
        now = self._clock()
        self._waiting.extend((now, *each) for each in measured)
        if wait or now >= self._asked_at + SEND_SECONDS:
            self._asked_at = now
            self._receive()
        ready: Measured = []
        while self._waiting:
            ended_at, iteration, own = self._waiting[0]
            place = iteration.lineage, iteration.iteration
            if not (wait or place <= self._upto or now >= ended_at + PATIENCE_SECONDS):
                break
            self._waiting.popleft()
            ready.append((iteration, self._received.get(place, {}) | own))
        return ready

    def newest(self, lineage: int, iteration: int) -> dict[str, LoggedMetric]:
        """Return the newest finite value of each metric up to an iteration of a lineage. For any thread."""
        found: dict[str, LoggedMetric] = {}
        for place, metrics in list(self._received.items()):
            if place[0] == lineage and place[1] <= iteration:
                for name, value in metrics.items():
                    if math.isfinite(value):
                        found[name] = LoggedMetric(value=value, iteration=place[1])
                    else:
                        found.pop(name, None)
        return found

    def _receive(self) -> None:
        if self._is_lost:
            return
        try:
            store = default_store()
            while store.check([key := f"{self._key}/{self._number}"]):
                message = msgspec.msgpack.decode(store.get(key), type=_Message)
                store.delete_key(key)
                self._number += 1
                self._upto = message.upto
                for place, metrics in message.metrics:
                    self._received[place] = self._received.get(place, {}) | metrics
        except (RuntimeError, ValueError):  # the store is lost, or the script has closed it: the job ends
            self._is_lost = True
        while len(self._received) > MOST_KEPT:
            self._received.popitem(last=False)


def metrics_relay(key: str, rank: int, group: Sequence[int]) -> MetricsSender | MetricsReceiver | None:
    """Return the relay of a rank: of ranks with the same stages, the first one sends.

    Args:
        key: a key in the store of torch.distributed, the same on all ranks.
        rank: this rank.
        group: the ranks with the same stages as this one.
    """
    if rank == 0:
        return MetricsReceiver(key)
    return MetricsSender(key) if rank == group[0] else None
