"""Simulated jobs under other load, and with stores and iterations that vary: how they keep the budget."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from holdfast.pacing import Controller, PacingSettings
from holdfast.save.compression import Compression
from holdfast.save.run import RunState

from .noisy import BUDGET, PHASE_SECONDS, SHARES, BudgetRecord
from .paced import PacedJob

GROWS_FOR_ITERATIONS = 20_000
COMPRESSED, ENCODING, ENCODING_INTERFERENCE = 0.8, 2.0, 1.6
"""With compression: size of a checkpoint, time to encode it in writes, and factor of the interference"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEffect:
    """What a load does to a job: factors of its times, and the scatter of its iterations."""

    iteration: float = 1.0
    interference: float = 1.0
    write: float = 1.0
    stall: float = 1.0
    scatter: float = 0.12
    """Standard deviation of the logarithm."""
    outliers: float = 0.01
    """Share of iterations that take much longer: a Pareto tail."""


LOAD_EFFECTS = {
    0.0: LoadEffect(),
    0.5: LoadEffect(iteration=1.6, interference=1.5, write=1.7, stall=2.2, scatter=0.4, outliers=0.03),
    1.0: LoadEffect(iteration=3.0, write=2.5, stall=4.0, scatter=0.35, outliers=0.05),
}
"""Roughly those of `noisy_training` on a machine of 2 cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseCase:
    """The costs of a job without load, and what changes them before each iteration."""

    compute_seconds: float = 0.1
    interference: float = 0.2
    stall_seconds: float = 0.002
    persist_seconds: float = 0.06
    vary: Callable[[PacedJob, random.Random], None] = lambda job, chance: None

    def apply(self, job: PacedJob, effect: LoadEffect, chance: random.Random) -> None:
        job.compute_seconds = self.compute_seconds * effect.iteration
        job.interference = self.interference * effect.interference
        job.persist_seconds = self.persist_seconds * effect.write
        job.stall_seconds = self.stall_seconds * effect.stall
        self.vary(job, chance)


def _sleeping_disk(job: PacedJob, chance: random.Random) -> None:
    if job.waited_seconds > 20:
        job.persist_seconds += 6.0


def _slow_network(job: PacedJob, chance: random.Random) -> None:
    job.persist_seconds = 0.02 * 1000 ** chance.random()


def _evaluation(job: PacedJob, chance: random.Random) -> None:
    if job.iteration % 500 == 499:
        job.compute_seconds *= 100


def _accumulation(job: PacedJob, chance: random.Random) -> None:
    job.compute_seconds *= 1.5 if job.iteration % 8 == 7 else 0.93


def _growing_state(job: PacedJob, chance: random.Random) -> None:
    size = 1 + 3 * min(1.0, job.iteration / GROWS_FOR_ITERATIONS)
    job.stall_seconds *= size
    job.persist_seconds *= size


NOISE_CASES = {
    "a checkpoint overlaps one iteration": NoiseCase(),
    "stalls": NoiseCase(interference=0.05, stall_seconds=0.015, persist_seconds=0.05),
    "long writes": NoiseCase(compute_seconds=0.15, interference=0.15, stall_seconds=0.005, persist_seconds=0.4),
    "short iterations": NoiseCase(
        compute_seconds=0.02, interference=0.3, stall_seconds=0.001, persist_seconds=0.03
    ),
    "long iterations": NoiseCase(compute_seconds=1.0, stall_seconds=0.01, persist_seconds=0.5),
    "a disk that sleeps after 20 s": NoiseCase(compute_seconds=1.0, persist_seconds=2.0, vary=_sleeping_disk),
    "a store with a latency of 20 ms to 20 s": NoiseCase(vary=_slow_network),
    "an evaluation every 500 iterations": NoiseCase(vary=_evaluation),
    "accumulation over 8 iterations": NoiseCase(vary=_accumulation),
    "a state that grows fourfold": NoiseCase(vary=_growing_state),
}


def simulated_noise(
    case: NoiseCase,
    seed: int,
    *,
    iterations: int | None = None,
    seconds: float = math.inf,
    shares: tuple[float, ...] = SHARES,
    budget: float = BUDGET,
    policy: str = "checkfreq",
    compress: bool = False,
) -> tuple[BudgetRecord, float]:
    """Simulate a job under loads by turns; return its record and its true overhead after the evidence phase.

    Args:
        case: the job.
        seed: of the order and lengths of the phases, and of the noise.
        iterations: length of the job; `None`: until `seconds`.
        seconds: the same in time.
        shares: loads to take turns, keys of LOAD_EFFECTS.
        budget: overhead budget.
        policy: interval policy.
        compress: compress checkpoints while that pays, as the session does.
    """
    chance = random.Random(seed)
    effect = LOAD_EFFECTS[0.0]

    def noise() -> float:
        outlier = 1 + 0.5 * chance.paretovariate(1.5) if chance.random() < effect.outliers else 1.0
        return min(chance.lognormvariate(0, effect.scatter) * outlier, 30.0)

    controller = Controller(PacingSettings(budget=budget, policy=policy))
    job = PacedJob(controller, noise=noise, snapshot_seconds=0.005)
    encoder = SimulatedEncoder(controller, enabled=compress)
    record, turn, phase_ends = BudgetRecord(budget=budget), chance.randrange(len(shares)), 0.0
    counted_seconds = bare_seconds = 0.0
    while job.iteration != iterations and job.seconds < seconds:
        if job.seconds >= phase_ends:
            effect, turn = LOAD_EFFECTS[shares[turn % len(shares)]], turn + 1
            phase_ends = job.seconds + chance.choice(PHASE_SECONDS)
        case.apply(job, effect, chance)
        before, bare_before, checkpoints = job.seconds, job.bare_seconds, len(job.starts)
        encoder.step(job)
        took = job.seconds - before
        record.iteration(took, controller, started=len(job.starts) > checkpoints)
        if record.seconds > 0:
            counted_seconds += took
            bare_seconds += job.bare_seconds - bare_before
    return record, counted_seconds / bare_seconds - 1 if bare_seconds > 0 else 0.0


class SimulatedEncoder:
    """Steps a job whose checkpoints are compressed while the session's `Compression` allows it."""

    def __init__(self, controller: Controller, *, enabled: bool) -> None:
        reporter: Any = SimpleNamespace(notice=lambda *_: None)
        self._compression = Compression(controller, reporter) if enabled else None
        self._encodes = self._compression is not None and self._compression.begin()
        """The checkpoint in flight, or else the next one, is compressed."""
        self._persist_seconds = self._encode_seconds = 0.0

    def step(self, job: PacedJob) -> None:
        encode_seconds = ENCODING * job.persist_seconds if self._encodes else 0.0
        if self._encodes:
            job.persist_seconds = COMPRESSED * job.persist_seconds + encode_seconds
            job.interference *= ENCODING_INTERFERENCE if job.under_way else 1.0
        begun, in_flight = len(job.starts), bool(job.under_way)
        job.step()
        if len(job.starts) > begun:
            self._persist_seconds, self._encode_seconds = job.persist_seconds, encode_seconds
        elif in_flight and not job.under_way:
            run: Any = SimpleNamespace(
                state=RunState.DURABLE,
                draft=SimpleNamespace(encode_seconds=self._encode_seconds),
                result=SimpleNamespace(seconds=self._persist_seconds),
            )
            if self._compression is not None:
                self._compression.settled(run)
                self._encodes = self._compression.begin()
