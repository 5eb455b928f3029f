"""What iterations and checkpoints take: recent spans, busy iterations against idle ones, the measured profile."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from statistics import median

from holdfast.pacing.estimator import (
    Comparison,
    Measurement,
    Observation,
    Reservoir,
    Slowdown,
    Span,
    clipped_mean,
    compare,
    conclude,
    deviation,
    measure,
    scatter,
)
from holdfast.pacing.profile import Profile

SPAN_ITERATIONS = 10
WINDOW_SPANS, WINDOW_ITERATIONS = 3, 50
"""A window is max(3 intervals, 50 iterations): that many spans of at least one interval each."""
SETTLED_SPANS = 48
BASELINE_ITERATIONS = 64
TIMED_ITERATIONS = 20
"""Idle iterations whose mean is Ti: few, so that it follows a change of the batch size within a window."""
FRESH_ITERATIONS, FRESH_IDLE = 500, 10
"""Idle iterations are held against busy ones for so long; with fewer of them than that the baseline is stale."""
CHANGED_ERRORS = 4.0
"""Beyond so many standard errors between the newest slowdown and the long run's, something has changed."""
CHANGED_HORIZONS = (WINDOW_SPANS, 4 * WINDOW_SPANS)
"""Comparisons that count as the newest: few for a great change, more for a smaller one."""
CLEAR_ERRORS = 2.0
"""By how many standard errors a figure must clear its threshold."""
RECENT_UPDATES = 31
RECENT_CHECKPOINTS = 3
"""Whose median counts: the first ones pay for memory and files that they are first to touch."""


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
        self._idle_whole: deque[float] = deque(maxlen=TIMED_ITERATIONS)
        self._busy: deque[float] = deque(maxlen=BASELINE_ITERATIONS)
        self._busy_whole: deque[float] = deque(maxlen=TIMED_ITERATIONS)

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
            if (comparison := self._open.comparison) is not None:
                self._comparisons.append(comparison)
            self._closed.append(self._open)
            self._open = Span()
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

    def _window(self) -> list[Span]:
        window, iterations = [self._open], self._open.iterations
        for span in reversed(self._closed):
            if len(window) >= WINDOW_SPANS and iterations >= WINDOW_ITERATIONS:
                break
            window.append(span)
            iterations += span.iterations
        return window[::-1]


class Gap:
    """A rare pause of checkpoints: where every iteration overlaps one, nothing idle is left to compare with."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._until_idle: int | None = None
        self._left = 0

    @property
    def open(self) -> bool:
        """Whether checkpoints are being put off."""
        return self._until_idle is not None

    def open_if_needed(self, interval: int, budget: float) -> bool:
        """Whether the window should be judged only after a few idle iterations; if so, let them come."""
        if self._ledger.paired:
            return False
        suspected = self._ledger.suspected()
        if suspected.stall_overhead > budget:
            return False
        over = suspected.overhead - CLEAR_ERRORS * suspected.error > budget
        if not over and not self._ledger.stale:
            return False
        self._ledger.renew_baseline()
        self._until_idle = self._ledger.idle_iterations + FRESH_IDLE
        # A persist that never ends must not keep checkpoints from starting for ever.
        self._left = max(WINDOW_ITERATIONS, 3 * interval)
        return True

    def passed(self) -> None:
        """One more iteration."""
        if self._until_idle is None:
            return
        self._left -= 1
        if self._ledger.idle_iterations >= self._until_idle:
            self._ledger.compare_with_gap()
            self._until_idle = None
        elif self._left <= 0:
            self._until_idle = None

    def abandon(self) -> None:
        self._until_idle = None


class Measured:
    """The `Profile` that policies decide from, of what iterations and checkpoints took."""

    def __init__(self, ledger: Ledger, in_flight: int) -> None:
        self.cost_seconds: float | None = None
        """Of one checkpoint, as it was last accepted."""
        self.saved: Profile | None = None
        """What an attempt before knew."""
        self.checkpoints = 0
        """Measured so far, by this attempt."""
        self._ledger = ledger
        self._in_flight = in_flight
        self._updates: deque[float] = deque(maxlen=RECENT_UPDATES)
        self._checkpoints: deque[Profile] = deque(maxlen=RECENT_CHECKPOINTS)

    def update(self, seconds: float | None) -> None:
        """An optimizer's step took so long; what is no duration says nothing."""
        if seconds is not None and _is_duration(seconds):
            self._updates.append(seconds)

    def checkpoint(self, taken: Profile) -> None:
        """One has become durable: the fields that concern it. What is no duration says nothing."""
        if not (_is_duration(taken.snapshot_seconds) and _is_duration(taken.persist_seconds)):
            return
        if not taken.device_copy_seconds >= 0:
            taken = replace(taken, device_copy_seconds=math.inf)
        self._checkpoints.append(taken)
        self.checkpoints += 1

    @property
    def profile(self) -> Profile | None:
        """What was saved, until an iteration and a checkpoint were measured here."""
        seconds = self._ledger.iteration_seconds
        if not self._checkpoints or seconds is None:
            return self.saved
        return replace(
            self._checkpoints[-1],
            iteration_seconds=seconds,
            update_seconds=min(median(self._updates), seconds) if self._updates else 0.0,
            snapshot_seconds=median(each.snapshot_seconds for each in self._checkpoints),
            persist_seconds=median(each.persist_seconds for each in self._checkpoints),
            in_flight=self._in_flight,
            cost_seconds=self.cost_seconds,
        )

    @property
    def on_device(self) -> bool:
        """The state, or some of it, was in a device's memory at the last checkpoint."""
        return bool(self._checkpoints) and self._checkpoints[-1].memory_total_bytes > 0

    @property
    def spread(self) -> dict[str, float]:
        """By how much the figures of the profile scatter: the median deviation from the median, by field."""
        found = {
            "iteration_seconds": self._ledger.idle_seconds,
            "update_seconds": list(self._updates),
            "snapshot_seconds": [each.snapshot_seconds for each in self._checkpoints],
            "persist_seconds": [each.persist_seconds for each in self._checkpoints],
        }
        return {name: deviation(values) for name, values in found.items() if len(values) > 1}


def _part(seconds: float, of_seconds: float) -> float:
    """A wait as measured, within 0 and the time it is a part of; not a number: none."""
    return min(seconds, of_seconds) if math.isfinite(seconds) and seconds > 0 else 0.0


def _is_duration(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0
