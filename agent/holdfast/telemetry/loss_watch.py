"""A watch over the losses of one rank: when one is not finite, or has risen and stays up."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

SPREADS = 6.0
"""Distance of a spike above the median of the losses before it, in multiples of their usual noise."""
WINDOW = 200
"""Number of losses that a loss is compared with; that many first iterations of a job are not judged."""
LEAST_SAMPLES = 50
NORMAL = 1.4826
"""Standard deviation of normal noise in median absolute deviations."""
LEAST_SPREAD, LEAST_HEIGHT = 0.01, 0.001
"""Least spread as a share of the median, and least height of a spike as a share of the loss at the start."""
RECORD, NEWEST_LOSSES = 2.0, 10
"""Ratio of a spike's distance from the median to that of all other losses but the newest."""
START_LOSSES = 20
"""Losses whose median is the loss at the start."""
STAYS_UP = 20
"""Iterations after which the loss must be back to usual."""


@dataclass(slots=True)
class _Spike:
    """A loss that has risen, until it is known whether it returns."""

    iteration: int
    usual: float
    most_above: float
    since: list[tuple[int, float]] = field(default_factory=list)


class LossWatch:
    """Finds the first iteration of trouble: a loss that is not finite, or one that spikes and stays up.

    The rule is that of the alert `loss_spike`. For the training thread.
    """

    def __init__(self) -> None:
        self._before: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._first: list[float] = []
        """The first losses of the job."""
        self._spike: _Spike | None = None
        self.trouble: int | None = None
        """First iteration of the trouble; `None` while there is none."""

    @property
    def is_suspicious(self) -> bool:
        """Whether the loss is wrong, or has risen just now."""
        return self.trouble is not None or self._spike is not None

    def add(self, iteration: int, loss: float) -> None:
        """Judge the loss of an iteration; they come in order."""
        spike = self._spike
        if self.trouble is not None:
            return
        if not math.isfinite(loss):
            self.trouble = iteration if spike is None else spike.iteration
        elif spike is not None:
            spike.since.append((iteration, loss))
            if len(spike.since) >= STAYS_UP:
                self._conclude(spike)
        elif (found := self._judged(iteration, loss)) is not None:
            self._spike = found
        else:
            self._before.append((iteration, loss))
            if len(self._first) < START_LOSSES:
                self._first.append(loss)

    def _judged(self, iteration: int, loss: float) -> _Spike | None:
        if iteration <= WINDOW or len(self._before) < LEAST_SAMPLES:
            return None
        losses = [each for _, each in self._before]
        highest = max(losses[:-NEWEST_LOSSES])
        if loss <= highest:  # as nearly all are: nothing is sorted for them
            return None
        usual = median(losses)
        spread = max(NORMAL * median(abs(each - usual) for each in losses), LEAST_SPREAD * abs(usual), 1e-12)
        most_above = max(SPREADS * spread, LEAST_HEIGHT * median(self._first))
        if loss - usual <= max(most_above, RECORD * (highest - usual)):
            return None
        return _Spike(iteration, usual, most_above, [(iteration, loss)])

    def _conclude(self, spike: _Spike) -> None:
        newest = [loss for _, loss in spike.since[-NEWEST_LOSSES:]]
        if median(newest) - spike.usual > spike.most_above:
            self.trouble = spike.iteration
        else:
            self._before.extend(spike.since)
        self._spike = None

    def restart(self, iteration: int) -> None:
        """Go on after a restore to `iteration`: later losses are those of another state."""
        self.trouble, self._spike = None, None
        kept = [each for each in self._before if each[0] <= iteration]
        self._before.clear()
        self._before.extend(kept)
