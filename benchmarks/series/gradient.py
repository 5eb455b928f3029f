"""The gradient of one source, with its forward states in a store or recomputed from a few snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast_series import SeriesStore

from .revolve import Advance, Restore, Reverse, Snapshot, schedule
from .wave import Adjoint, Survey, Wave


@dataclass(frozen=True)
class Shot:
    """A source, and what the receivers recorded of it."""

    survey: Survey
    source: Tensor
    wavelet: list[float]
    observed: Tensor

    @classmethod
    def fired(cls, survey: Survey, column: int, velocity: Tensor) -> Shot:
        """Return a shot over a velocity, which the inversion does not know."""
        source, wavelet = survey.source(column), survey.wavelet().tolist()
        wave = Wave(survey, velocity**2)
        records = [recorded for _, recorded in _sweep(wave, source, wavelet)]
        return cls(survey, source, wavelet, torch.stack(records))


def misfit(shot: Shot, wave: Wave) -> float:
    """Return half the sum of squared residuals."""
    records = torch.stack([recorded for _, recorded in _sweep(wave, shot.source, shot.wavelet)])
    return float((records - shot.observed).square().sum()) / 2


def forward_states(shot: Shot, wave: Wave) -> Iterator[Tensor]:
    """Yield what the adjoint needs of each state."""
    for laplacian, _ in _sweep(wave, shot.source, shot.wavelet):
        yield wave.below_water(laplacian)


def stored_gradient(shot: Shot, wave: Wave, store: SeriesStore, every: int = 1) -> Tensor:
    """Return the gradient; every `every`-th state is stored, and stands for as many."""
    store.clear()
    residuals = []
    for number, (laplacian, recorded) in enumerate(_sweep(wave, shot.source, shot.wavelet)):
        if number % every == 0:
            store.put(number, wave.below_water(laplacian))
        residuals.append(recorded - shot.observed[number])
    adjoint, states = Adjoint(wave), reversed(store)
    for number in range(shot.survey.steps - 1, -1, -1):
        state = next(states)[1] if number % every == 0 else None
        adjoint.step(residuals[number], state, every)
    return adjoint.gradient


def snapshot_bytes(survey: Survey) -> int:
    """Return the size of what a forward solve continues from: two states."""
    return 2 * survey.side**2 * survey.dtype.itemsize


def recomputed_gradient(shot: Shot, wave: Wave, slots: int) -> tuple[Tensor, int]:
    """Return the gradient and the number of steps solved, with `slots` snapshots, the initial zeros included."""
    now, before = wave.zeros(), wave.zeros()
    snapshots: list[tuple[Tensor, Tensor]] = []
    residuals: list[Tensor] = []
    adjoint, solved = Adjoint(wave), 0

    def solve(number: int) -> Tensor:
        nonlocal now, before, solved
        laplacian = wave.step(now, before, shot.source, shot.wavelet[number])
        now, before, solved = before, now, solved + 1
        if number == len(residuals):
            residuals.append(wave.recorded(now) - shot.observed[number])
        return laplacian

    for action in schedule(shot.survey.steps, slots):
        match action:
            case Snapshot():
                snapshots.append((now.clone(), before.clone()))
            case Restore():
                now.copy_(snapshots[-1][0])
                before.copy_(snapshots[-1][1])
                if action.last:
                    snapshots.pop()
            case Advance(start, end):
                for number in range(start, end):
                    solve(number)
            case Reverse(number):
                is_new = number == len(residuals)  # only the last step is solved to be reversed
                laplacian = solve(number) if is_new else wave.laplacian(now)
                adjoint.step(residuals[number], wave.below_water(laplacian))
    return adjoint.gradient, solved


def _sweep(wave: Wave, source: Tensor, wavelet: list[float]) -> Iterator[tuple[Tensor, Tensor]]:
    now, before = wave.zeros(), wave.zeros()
    for force in wavelet:
        laplacian = wave.step(now, before, source, force)
        now, before = before, now
        yield laplacian, wave.recorded(now)
