"""Detection of spikes in a reported loss: values far above the usual ones before, with no model of the curve."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from sqlalchemy import and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_server import models
from holdfast_server.samples import sample_codec
from holdfast_server.samples.limits import LOSS

if TYPE_CHECKING:
    from holdfast_server.alerts.facts import JobFacts

Floats = NDArray[np.float64]

LEAST_SAMPLES = 50
"""Finite losses before an iteration that are needed to judge it."""
NORMAL = 1.4826
"""Standard deviation of normal noise in median absolute deviations."""
LEAST_SPREAD = 0.01
"""Least spread as a share of the median: a loss that hardly changes would otherwise spike with each rounding."""

NEWEST_SECONDS = 30.0
"""Age up to which a spike is new: more than the time between two evaluations of the rules."""
MOST_NEWEST = 5000
"""Most iterations of that time that are checked."""
SPAN = 2000
"""Iterations that are read before them."""
JOBS_AT_ONCE = 50
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
    iterations: NDArray[np.int64], losses: Floats, *, limit: float, window: int, after: int = 0
) -> list[LossSpike]:
    """Return the spikes, earliest first.

    An iteration spikes if its loss is more than `limit` spreads above the median of the finite losses before it,
    and `RECORD` times as far above it as each of them but the newest. The spread is the median absolute deviation,
    scaled to the standard deviation of normal noise. The second condition is for losses with frequent large
    values, such as those of small batches. Losses that are not finite are left out: `loss_nan` reports them.

    Args:
        iterations: ascending.
        losses: one for each iteration.
        limit: in spreads.
        window: number of losses before an iteration that it is compared with.
        after: iterations up to this one are only compared with.
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
    for index in np.flatnonzero((above > limit * spread) & (above > RECORD * record)).tolist():
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

    def newest_spike(self, limit: float, window: int) -> LossSpike | None:
        """Return the last spike of the newest iterations, without the warm-up and what a restore repeats."""
        old = int(np.searchsorted(self.at, self.at[-1] - NEWEST_SECONDS))
        before = int(self.iterations[old]) - 1
        after = max(before, self.replayed_until, window)
        spikes = find_spikes(self.iterations, self.losses, limit=limit, window=window, after=after - window)
        return next((spike for spike in reversed(spikes) if spike.iteration > after), None)


async def read_losses(session: AsyncSession, jobs: Sequence[JobFacts]) -> dict[str, LossHistory]:
    """Read the newest losses of the jobs that train and report one."""
    reads = {job.job: _from(job) for job in jobs if job.status == "running" and job.loss is not None}
    if not reads:
        return {}
    replayed = await _replayed_until(session, list(reads))
    lineages = {job.job: job.lineage for job in jobs}
    rows = models.ChunkRecord
    chunks: dict[str, list[tuple[int, bytes]]] = {}
    names = list(reads)
    for start in range(0, len(names), JOBS_AT_ONCE):
        wanted = or_(
            *(
                and_(rows.job == name, rows.lineage == lineages[name], rows.last_iteration >= reads[name])
                for name in names[start : start + JOBS_AT_ONCE]
            )
        )
        query = select(rows.job, rows.attempt, rows.columns).where(rows.rank == 0, wanted).order_by(rows.id)
        for name, attempt, columns in await session.execute(query):
            chunks.setdefault(name, []).append((attempt, columns))
    made = await asyncio.to_thread(lambda: {name: _joined(found) for name, found in chunks.items()})
    return {
        name: LossHistory(*columns, replayed_until=replayed.get(name, 0))
        for name, columns in made.items()
        if columns is not None
    }


def _from(job: JobFacts) -> int:
    """Return the first iteration to read: enough for the window of any rule, also if not each one has a loss."""
    newest = min(MOST_NEWEST, math.ceil((job.iterations_per_second or 1.0) * NEWEST_SECONDS))
    return job.iteration - SPAN - newest


def _joined(chunks: list[tuple[int, bytes]]) -> tuple[NDArray[np.int64], Floats, Floats] | None:
    """Return iterations, losses and times, ascending; of an iteration that was repeated, the newest."""
    newest = max(attempt for attempt, _ in chunks)
    tables = [sample_codec.unpack(columns) for attempt, columns in chunks if attempt == newest]
    parts = [(table.iteration, loss, table.at) for table in tables if (loss := table.metric(LOSS)) is not None]
    if not parts:
        return None
    iterations, losses, at = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(iterations, kind="stable")
    return iterations[order], losses[order], at[order]


async def _replayed_until(session: AsyncSession, names: list[str]) -> dict[str, int]:
    """Return by job the last iteration of its other lineages and earlier attempts."""
    jobs, lineages, attempts = models.JobRecord, models.LineageRecord, models.AttemptRecord
    found: dict[str, int] = {}
    for rows, other in (
        (lineages, lineages.lineage != jobs.lineage),
        (attempts, attempts.uid != jobs.uid),
    ):
        query = select(rows.job, func.max(rows.last_iteration)).join(jobs, jobs.name == rows.job)
        for name, last in await session.execute(query.where(rows.job.in_(names), other).group_by(rows.job)):
            found[name] = max(found.get(name, 0), last)
    return found
