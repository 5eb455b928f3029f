"""The controller's memory: recent spans of iterations, and what comparing busy with idle ones has shown so far."""

from __future__ import annotations

import math
from collections import deque

from .estimate import (
    Comparison,
    Measurement,
    Observation,
    Reservoir,
    Slowdown,
    Span,
    clipped_mean,
    compare,
    conclude,
    measure,
    scatter,
)

SPAN_ITERATIONS = 10
WINDOW_SPANS, WINDOW_ITERATIONS = 3, 50
"""A window is max(3 intervals, 50 iterations): that many spans of at least one interval each."""
SETTLED_SPANS = 48
BASELINE_ITERATIONS = 64
FRESH_ITERATIONS, FRESH_IDLE = 500, 10
"""Idle iterations are held against busy ones for so long; with fewer of them than that the baseline is stale."""
CHANGED_ERRORS = 4.0
"""Beyond so many standard errors between the newest slowdown and the long run's, something has changed."""
CHANGED_HORIZONS = (WINDOW_SPANS, 4 * WINDOW_SPANS)
"""Comparisons that count as the newest: few for a great change, more for a smaller one."""


class Ledger:
    def __init__(self) -> None:
        self.idle_iterations = 0
        """Idle iterations seen, ever."""
        self._iterations = 0
        self._closed: deque[Span] = deque(maxlen=SETTLED_SPANS)
        self._open = Span()
        self._comparisons: deque[Comparison] = deque(maxlen=SETTLED_SPANS)
        self._idle: deque[float] = deque(maxlen=BASELINE_ITERATIONS)
        self._idle_at: deque[int] = deque(maxlen=BASELINE_ITERATIONS)
        """After how many iterations in all each of them came."""
        self._idle_whole: deque[float] = deque(maxlen=BASELINE_ITERATIONS)
        self._busy: deque[float] = deque(maxlen=BASELINE_ITERATIONS)
        self._busy_whole: deque[float] = deque(maxlen=BASELINE_ITERATIONS)

    def add(self, seen: Observation) -> None:
        """Take one iteration into account; one whose times are no numbers says nothing and is left out."""
        seconds = seen.seconds
        if not (math.isfinite(seconds) and seconds > 0):
            return
        stall = _part(seen.checkpoint_stall_seconds, seconds)
        whole = seconds - stall
        compute = whole - _part(seen.data_seconds, whole)
        self._open.add(seconds, stall, compute, in_flight=seen.in_flight)
        self._iterations += 1
        if seen.in_flight:
            self._busy.append(compute)
            self._busy_whole.append(whole)
        else:
            self.idle_iterations += 1
            self._idle.append(compute)
            self._idle_at.append(self._iterations)
            self._idle_whole.append(whole)

    def started(self) -> None:
        """A checkpoint starts here: the end of a span, if that one is long enough to be judged."""
        if self._open.checkpoints == 0:
            self._open = Span()
        elif self.complete:
            self._close()
        self._open.checkpoints += 1

    def restart(self) -> None:
        """What the open span holds belongs to a past that a restore undid."""
        self._open = Span()

    def forget(self) -> None:
        """Judge from here on only: the interval has changed. An open span of one checkpoint goes on."""
        self._closed.clear()
        if self._open.checkpoints > 1:
            self._open = Span()

    def renew_baseline(self) -> None:
        """The idle iterations known are too old to compare with; the next ones take their place."""
        self._idle.clear()
        self._idle_at.clear()

    @property
    def stale(self) -> bool:
        """Too few idle iterations are recent enough to compare with."""
        return len(self._fresh_idle) < FRESH_IDLE

    @property
    def complete(self) -> bool:
        return self._open.iterations >= SPAN_ITERATIONS

    @property
    def shows_cost(self) -> bool:
        """The open span holds a checkpoint and iterations that it overlapped."""
        return self._open.checkpoints > 0 and bool(self._open.busy.values)

    @property
    def spans(self) -> int:
        return len(self._closed) + (self._open.checkpoints > 0)

    @property
    def iteration_seconds(self) -> float | None:
        """Ti, data waits included; of busy iterations where an order for every iteration leaves no other."""
        return clipped_mean(self._idle_whole or self._busy_whole) or None

    @property
    def idle_seconds(self) -> list[float]:
        """Of the newest idle iterations, data waits included."""
        return list(self._idle_whole)

    def recent(self, slowdown: Slowdown) -> Measurement:
        """Of the newest window."""
        return measure(self._window(), slowdown)

    def settled(self, slowdown: Slowdown) -> Measurement:
        """Of all that is remembered since the interval last changed."""
        return measure([*self._closed, self._open], slowdown)

    def suspected(self) -> Measurement:
        """The newest window if its busy iterations are held against the last idle ones, however old these are."""
        return measure(self._window(), self._unpaired())

    @property
    def paired(self) -> bool:
        """The newest window holds both kinds of iteration side by side, or none that a checkpoint overlapped."""
        newest = self._window()
        return any(span.comparison for span in newest) or not any(span.busy_seconds for span in newest)

    def slowdown(self) -> Slowdown:
        """The long run's, unless the newest comparisons clearly say otherwise; then those before are forgotten."""
        mine = self._open.comparison
        comparisons = [*self._comparisons, mine] if mine else list(self._comparisons)
        if not comparisons:
            return self._unpaired()
        scatter = self._scatter
        settled = conclude(comparisons, scatter)
        for horizon in CHANGED_HORIZONS:
            newest = conclude(comparisons[-horizon:], scatter)
            if abs(newest.share - settled.share) > CHANGED_ERRORS * newest.error:
                while len(self._comparisons) > horizon - (mine is not None):
                    self._comparisons.popleft()
                return newest
        return settled

    def compare_with_gap(self) -> None:
        """A deliberate gap has brought fresh idle iterations: hold the busy ones around it against them."""
        comparison = compare(self._busy, self._idle)
        if comparison is not None:
            self._comparisons.append(comparison)
            self._open.idle = Reservoir()

    @property
    def _fresh_idle(self) -> list[float]:
        since = self._iterations - FRESH_ITERATIONS
        return [compute for compute, at in zip(self._idle, self._idle_at, strict=True) if at > since]

    def _unpaired(self) -> Slowdown:
        comparison = compare(self._busy, self._fresh_idle or self._idle)
        return conclude([comparison] if comparison else [], self._scatter)

    @property
    def _scatter(self) -> float:
        return scatter(self._idle if len(self._idle) > len(self._busy) // 4 else self._busy)

    def _close(self) -> None:
        comparison = self._open.comparison
        if comparison is not None:
            self._comparisons.append(comparison)
        self._closed.append(self._open)
        self._open = Span()

    def _window(self) -> list[Span]:
        window, iterations = [self._open], self._open.iterations
        for span in reversed(self._closed):
            if len(window) >= WINDOW_SPANS and iterations >= WINDOW_ITERATIONS:
                break
            window.append(span)
            iterations += span.iterations
        return window[::-1]


def _part(seconds: float, of_seconds: float) -> float:
    """A wait as measured, within 0 and the time it is a part of; not a number: none."""
    return min(seconds, of_seconds) if math.isfinite(seconds) and seconds > 0 else 0.0
