"""Samples of iterations and checkpoints: recent spans, the idle baseline, and the measured profile."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from holdfast.pacing.estimator import (
    CheckpointSpan,
    Observation,
    OverheadEstimate,
    SlowdownEstimate,
    SpanComparison,
    SpanIteration,
    clipped_mean,
    compare,
    conclude,
    deviation,
    measure,
    scatter,
)
from holdfast.pacing.policy import Profile

SPAN_ITERATIONS = 10
"""Minimum iterations of a span."""
WINDOW_SPANS, WINDOW_ITERATIONS = 3, 50
"""A window is the newest spans that together hold both: 3 intervals and 50 iterations."""
SETTLED_SPANS = 48
"""Spans of the long-run average."""
BASELINE_ITERATIONS = 64
TIMED_ITERATIONS = 20
"""Idle iterations whose mean is Ti: few, so that it follows a change of the batch size within a window."""
PROBE_IDLE = 5
"""Idle iterations after which a pause of checkpoints ends."""
COMPARABLE_ITERATIONS = 500
"""Iterations for which a comparison holds while busy iterations take as long as they did in it."""
CHANGED_ERRORS = 4.0
"""Standard errors between the newest slowdown and the long-run one beyond which something has changed."""
CHANGED_HORIZONS = (WINDOW_SPANS, 4 * WINDOW_SPANS)
"""Newest comparisons in which a change is looked for: few for a large change, more for a smaller one."""
CLEAR_ERRORS = 2.0
"""Standard errors by which a figure must clear its threshold."""
RECENT_UPDATES = 31
RECENT_CHECKPOINTS = 3
"""Checkpoints of which the median counts: the first ones allocate memory and files."""


class OverheadSamples:
    """Iterations of one job, in spans from one checkpoint to a later one; idle: no checkpoint overlapped it."""

    def __init__(self) -> None:
        self.idle_iterations = 0
        self._closed: deque[CheckpointSpan] = deque(maxlen=SETTLED_SPANS)
        self._open = CheckpointSpan()
        self._comparisons: deque[SpanComparison] = deque(maxlen=SETTLED_SPANS)
        self._times: deque[tuple[float, int]] = deque(maxlen=SETTLED_SPANS)
        """Seconds and iterations of complete spans, whatever the interval was."""
        self._compared_busy, self._since_compared = 0.0, 0
        """Mean busy iteration of the newest comparison, and the iterations since then."""
        self._idle: deque[float] = deque(maxlen=BASELINE_ITERATIONS)
        self._idle_whole: deque[float] = deque(maxlen=TIMED_ITERATIONS)
        self._busy: deque[float] = deque(maxlen=BASELINE_ITERATIONS)
        self._busy_whole: deque[float] = deque(maxlen=TIMED_ITERATIONS)

    def add(self, seen: Sequence[Observation]) -> None:
        """Add iterations, except those whose duration is not finite and positive."""
        added = list[SpanIteration]()
        for each in seen:
            seconds = each.seconds
            if not (math.isfinite(seconds) and seconds > 0):
                continue
            stall = _part(each.checkpoint_stall_seconds, seconds)
            whole = seconds - stall
            compute = whole - _part(each.data_seconds, whole)
            added.append((seconds, stall, compute, each.in_flight))
            if each.in_flight:
                self._busy.append(compute)
                self._busy_whole.append(whole)
            else:
                self.idle_iterations += 1
                self._idle.append(compute)
                self._idle_whole.append(whole)
        self._since_compared += len(added)
        self._open.add(added)

    def started(self) -> None:
        """Begin a checkpoint, and with it a new span if the open one is complete."""
        if self._open.checkpoints == 0:
            self._open = CheckpointSpan()
        elif self.complete:
            if (comparison := self._open.comparison) is not None:
                self._comparisons.append(comparison)
                self._compared_busy, self._since_compared = clipped_mean(self._open.busy.values), 0
            self._closed.append(self._open)
            self._times.append((self._open.seconds, self._open.iterations))
            self._open = CheckpointSpan()
        self._open.checkpoints += 1

    def restart(self) -> None:
        """Drop the open span: a restore undid its iterations."""
        self._open = CheckpointSpan()

    def forget(self) -> None:
        """Drop closed spans after the interval changed; an open span of one checkpoint continues."""
        self._closed.clear()
        if self._open.checkpoints > 1:
            self._open = CheckpointSpan()

    @property
    def complete(self) -> bool:
        """Whether the open span is long enough to be judged."""
        return self._open.iterations >= SPAN_ITERATIONS

    @property
    def open_idle(self) -> int:
        """Idle iterations of the open span."""
        return len(self._open.idle.values)

    @property
    def open_checkpoints(self) -> int:
        return self._open.checkpoints

    @property
    def shows_cost(self) -> bool:
        """Whether the open span holds a checkpoint and iterations that it overlapped."""
        return self._open.checkpoints > 0 and bool(self._open.busy.values)

    @property
    def spans(self) -> int:
        return len(self._closed) + (self._open.checkpoints > 0)

    @property
    def checkpoints(self) -> int:
        """Checkpoints since the interval last changed."""
        return sum(span.checkpoints for span in self._closed) + self._open.checkpoints

    @property
    def iteration_seconds(self) -> float | None:
        """Ti, data waits included; of busy iterations if there is no idle one."""
        return clipped_mean(self._idle_whole or self._busy_whole) or None

    @property
    def mean_seconds(self) -> float | None:
        """Mean of all spans but the slowest one: a wait that came once says nothing of those to come."""
        recurring = sorted(self._times, key=lambda span: span[0] / span[1])[:-1]
        return sum(seconds for seconds, _ in recurring) / sum(n for _, n in recurring) if recurring else None

    @property
    def idle_seconds(self) -> list[float]:
        """Durations of the newest idle iterations, data waits included."""
        return list(self._idle_whole)

    def recent(self, slowdown: SlowdownEstimate) -> OverheadEstimate:
        """Estimate the overhead of the newest window."""
        return measure(self._window(), slowdown)

    def settled(self, slowdown: SlowdownEstimate) -> OverheadEstimate:
        """Estimate the overhead since the interval last changed."""
        return measure([*self._closed, self._open], slowdown)

    @property
    def paired(self) -> bool:
        """Whether the newest window holds busy and idle iterations of one span, or no busy ones."""
        newest = self._window()
        return any(span.comparison for span in newest) or not any(span.busy_seconds for span in newest)

    def comparable(self, slowdown: SlowdownEstimate, tolerance: float) -> bool:
        """Return whether `slowdown` holds for the open span, although its iterations are all busy.

        It does for a while, if the newest comparison confirmed it and busy iterations are as long as in that one.
        Both are compared with a tolerance, as a share of an iteration.
        """
        if not self._compared_busy or self._since_compared > COMPARABLE_ITERATIONS:
            return False
        changed = clipped_mean(self._open.busy.values) / self._compared_busy - 1
        return max(abs(changed), abs(self._comparisons[-1].share - slowdown.share)) <= tolerance

    def slowdown(self) -> SlowdownEstimate:
        """Return the long-run slowdown or, if the newest comparisons clearly differ from it, only theirs."""
        newest_span = self._open.comparison
        comparisons = [*self._comparisons, newest_span] if newest_span else list(self._comparisons)
        if not comparisons:
            comparison = compare(self._busy, self._idle)
            return conclude([comparison] if comparison else [], self._scatter)
        scatter = self._scatter
        settled = conclude(comparisons, scatter)
        for horizon in CHANGED_HORIZONS:
            newest = conclude(comparisons[-horizon:], scatter)
            if abs(newest.share - settled.share) > CHANGED_ERRORS * newest.error:
                while len(self._comparisons) > horizon - (newest_span is not None):
                    self._comparisons.popleft()
                return newest
        return settled

    @property
    def _scatter(self) -> float:
        return scatter(self._idle if len(self._idle) > len(self._busy) // 4 else self._busy)

    def _window(self) -> list[CheckpointSpan]:
        window, iterations = [self._open], self._open.iterations
        for span in reversed(self._closed):
            if len(window) >= WINDOW_SPANS and iterations >= WINDOW_ITERATIONS:
                break
            window.append(span)
            iterations += span.iterations
        return window[::-1]


class BaselineProbe:
    """A pause of checkpoints to measure idle iterations, for jobs where a checkpoint overlaps every iteration."""

    def __init__(self, samples: OverheadSamples) -> None:
        self._samples = samples
        self._left = 0
        self.is_active = False

    def start_if_needed(self, interval: int, budget: float, slowdown: SlowdownEstimate) -> bool:
        """Start if the window cannot be judged without idle iterations; return whether it started."""
        if self._samples.paired or self._samples.comparable(slowdown, budget):
            return False
        if self._samples.recent(slowdown).stall_overhead > budget:
            return False
        # A write that never ends must not prevent checkpoints forever.
        self._set(max(WINDOW_ITERATIONS, 3 * interval))
        return True

    def advance(self, iterations: int) -> None:
        self._set(0 if self._samples.open_idle >= PROBE_IDLE else max(0, self._left - iterations))

    def stop(self) -> None:
        self._set(0)

    def _set(self, left: int) -> None:
        self._left, self.is_active = left, left > 0


class ProfileSamples:
    """Collects the measurements of iterations and checkpoints that make the `Profile`."""

    def __init__(self, samples: OverheadSamples, in_flight: int) -> None:
        self.cost_seconds: float | None = None
        """The last accepted cost of one checkpoint."""
        self.saved: Profile | None = None
        """The profile of an earlier attempt."""
        self.checkpoints = 0
        """Number of checkpoints measured so far, by this attempt."""
        self._samples = samples
        self._in_flight = in_flight
        self._updates: deque[float] = deque(maxlen=RECENT_UPDATES)
        self._checkpoints: deque[Profile] = deque(maxlen=RECENT_CHECKPOINTS)

    def update(self, seen: Sequence[Observation]) -> None:
        """Add the durations of optimizer steps that are valid."""
        updates = (each.update_seconds for each in seen)
        self._updates.extend(each for each in updates if each is not None and _is_duration(each))

    def checkpoint(self, taken: Profile) -> None:
        """Add the measurements of a durable checkpoint, if valid."""
        if not (_is_duration(taken.snapshot_seconds) and _is_duration(taken.persist_seconds)):
            return
        if not taken.device_copy_seconds >= 0:
            taken = replace(taken, device_copy_seconds=math.inf)
        self._checkpoints.append(taken)
        self.checkpoints += 1

    @property
    def profile(self) -> Profile | None:
        """The saved profile until an iteration and a checkpoint are measured."""
        seconds = self._samples.iteration_seconds
        if not self._checkpoints or seconds is None:
            return self.saved
        return replace(
            self._checkpoints[-1],
            iteration_seconds=seconds,
            mean_seconds=self._samples.mean_seconds or (self.saved.mean_seconds if self.saved else None),
            update_seconds=min(median(self._updates), seconds) if self._updates else 0.0,
            snapshot_seconds=median(each.snapshot_seconds for each in self._checkpoints),
            persist_seconds=median(each.persist_seconds for each in self._checkpoints),
            written_bytes=_mean(
                [each.written_bytes for each in self._checkpoints if each.written_bytes is not None]
            ),
            in_flight=self._in_flight,
            cost_seconds=self.cost_seconds,
        )

    @property
    def spread(self) -> dict[str, float]:
        """Median absolute deviation, by field of the profile."""
        found = {
            "iteration_seconds": self._samples.idle_seconds,
            "update_seconds": list(self._updates),
            "snapshot_seconds": [each.snapshot_seconds for each in self._checkpoints],
            "persist_seconds": [each.persist_seconds for each in self._checkpoints],
        }
        return {name: deviation(values) for name, values in found.items() if len(values) > 1}


def _part(seconds: float, of_seconds: float) -> float:
    """Limit a measured wait to the time that it is a part of; 0 if it is not finite."""
    return min(seconds, of_seconds) if math.isfinite(seconds) and seconds > 0 else 0.0


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _is_duration(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0
