"""Detection of spikes in a reported loss: values far above the usual ones before, with no model of the curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEAST_SAMPLES = 50
"""Finite losses before an iteration that are needed to judge it."""
NORMAL = 1.4826
"""Standard deviation of normal noise in median absolute deviations."""
LEAST_SPREAD = 0.01
"""Least spread as a share of the median: a loss that hardly changes would otherwise spike with each rounding."""
LEAST_HEIGHT = 0.001
"""Least height of a spike as a share of the loss at the start: a loss that converges to zero varies by orders of
magnitude, which a spread within 200 iterations does not show."""

NEWEST_SECONDS = 30.0
"""Age up to which a spike is new: more than the time between two evaluations of the rules."""
RECORD = 2.0
"""How many times as far above the median as the losses before it a spike is."""
NEWEST_LOSSES = 10
"""Losses of a rise that are not compared with; spiking iterations that are as close are one spike."""


@dataclass(frozen=True, slots=True)
class LossSpike:
    """The first iteration of a spike."""

    iteration: int
    loss: float
    usual: float
    """Median of the losses before it."""
    spreads: float
    """Distance from the median in spreads."""


def find_spikes(
    iterations: NDArray[np.int64],
    losses: Floats,
    *,
    limit: float,
    window: int,
    after: int = 0,
    start: float = 0.0,
) -> list[LossSpike]:
    """Return the spikes, earliest first.

    An iteration spikes if its loss is more than `limit` spreads above the median of the finite losses before it,
    and `RECORD` times as far above it as each of them but the newest. The spread is the median absolute deviation,
    scaled to the standard deviation of normal noise. The second condition is for losses with frequent large
    values, such as those of small batches. A spike is at least as high as `LEAST_HEIGHT` of the loss at the start.
    Losses that are not finite are left out: `loss_nan` reports them.

    Args:
        iterations: ascending.
        losses: one for each iteration.
        limit: in spreads.
        window: number of losses before an iteration that it is compared with.
        after: iterations up to this one are only compared with.
        start: loss at the start of the job; 0 if it is unknown.
    """
    finite = np.isfinite(losses)
    places, values = iterations[finite], losses[finite]
    least = min(LEAST_SAMPLES, window)
    first = max(least, int(np.searchsorted(places, after, side="right")))
    if len(values) <= first:
        return []
    padded = np.concatenate([np.full(window, np.nan), values[:-1]])
    before = sliding_window_view(padded, window)[first:]
    median, highest = (np.median, np.max) if first >= window else (np.nanmedian, np.nanmax)  # the first are padded
    usual = median(before, axis=1)
    spread = NORMAL * median(np.abs(before - usual[:, None]), axis=1)
    spread = np.maximum(np.maximum(spread, LEAST_SPREAD * np.abs(usual)), 1e-12)
    record = highest(before[:, : window - NEWEST_LOSSES], axis=1) - usual
    above = values[first:] - usual
    found: list[LossSpike] = []
    last = -window
    high = (above > limit * spread) & (above > RECORD * record) & (above > LEAST_HEIGHT * start)
    for index in np.flatnonzero(high).tolist():
        if index - last > NEWEST_LOSSES:
            where, spreads = first + index, float(above[index] / spread[index])
            found.append(LossSpike(int(places[where]), float(values[where]), float(usual[index]), spreads))
        last = index
    return found


@dataclass(frozen=True, slots=True)
class LossHistory:
    """The newest losses of a job on its current lineage."""

    iterations: NDArray[np.int64]
    losses: Floats
    at: Floats
    """Seconds since the epoch, on the clock of the training machine."""
    replayed_until: int
    """Last iteration that an earlier lineage or attempt trained before."""
    start: float = 0.0
    """Loss at the start of the job; 0 if it is unknown."""

    def newest_spike(self, limit: float, window: int) -> LossSpike | None:
        """Return the last spike of the newest iterations, without the warm-up.

        Of the iterations that a restore repeats, only a spike from which the loss has not returned.
        """
        old = int(np.searchsorted(self.at, self.at[-1] - NEWEST_SECONDS))
        after = max(int(self.iterations[old]) - 1, window)
        repeats = self.replayed_until >= self.iterations[0]
        begin = window if repeats else after
        spikes = find_spikes(
            self.iterations, self.losses, limit=limit, window=window, after=begin - window, start=self.start
        )
        for spike in reversed(spikes):
            if spike.iteration > max(after, self.replayed_until):
                return spike
            if window < spike.iteration <= self.replayed_until and self.lasts(spike, limit):
                return spike
        return None

    def lasts(self, spike: LossSpike, limit: float) -> bool:
        """Return whether the loss has not returned within `NEWEST_LOSSES` iterations of a spike."""
        since = self.losses[np.searchsorted(self.iterations, spike.iteration) :]
        since = since[np.isfinite(since)]
        most = max(limit * (spike.loss - spike.usual) / spike.spreads, LEAST_HEIGHT * self.start)
        return len(since) >= NEWEST_LOSSES and has_returned(since, spike.usual, most) is False


@dataclass(frozen=True, slots=True)
class OpenSpike:
    """The spike of an open alert, with the losses before it: later ones may be as wrong as the spike."""

    subject: str
    message: str
    value: float | None
    iteration: int
    lineage: int
    before: Floats
    """Losses before it, oldest first."""

    def has_ended(self, newest: Sequence[float], limit: float, window: int, start: float = 0.0) -> bool | None:
        """Return whether the newest losses are as usual before the spike; `None` if that is unknown."""
        before = self.before[np.isfinite(self.before)][-window:]
        if not len(before):
            return None
        usual = float(np.median(before))
        spread = NORMAL * float(np.median(np.abs(before - usual)))
        least = max(spread, LEAST_SPREAD * abs(usual), 1e-12)
        return has_returned(np.array(newest), usual, max(limit * least, LEAST_HEIGHT * start))


def has_returned(losses: Floats, usual: float, most_above: float) -> bool | None:
    """Return whether the newest losses are near the usual one again; `None` if none of them is finite."""
    newest = losses[-NEWEST_LOSSES:]
    finite = newest[np.isfinite(newest)]
    return bool(np.median(finite) - usual <= most_above) if len(finite) else None
