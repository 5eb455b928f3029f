"""Convergence-aware placement: the policy `coci` against even spacing with equal writes, and COCI's comparison.

H. Li, Z. Wang, H. Zhao et al., "Convergence-aware optimal checkpointing for exploratory deep learning training
jobs" (COCI), FGCS 164, 2025, 107597. Its objective P_l is the loss that is given away: for each checkpoint what
would have been learned in its time, and what failures take back. The published integral for the latter is over the
loss p and lacks the Jacobian |dt/dp|; both forms are computed. Loss exp(-θ t); λ per minute, as in its code.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.harness import run
from holdfast.pacing import FailureHistory, PacingSettings, Profile
from holdfast.simulation import compare_placement

TOTAL = 100_000
CHECKPOINTS = 40
STEEPNESSES = 5, 10
STATE_BYTES = 10**9
GRID = 4000

COSTS = {"DenseNet201": 0.13, "ResNet152": 0.27, "VGG16": 0.59, "VGG19": 0.60, "BERT-large": 1.60}
"""Ts in seconds, from the paper."""
MTBF_HOURS = 4.0, 8.0, 16.0, 70.0
DECAY_PER_MINUTE = 0.078
"""θ of the published example."""
LENGTH = 5.0
"""θ T: the loss falls to 0.7 %, in about an hour."""
WORKERS = (0.3, 4), (0.6, 2), (1.0, 1)
"""Data parallel: so many workers up to that share of the iterations."""
EFFICIENCY = 0.9


def main() -> dict[str, float]:
    """Compare with even spacing, print, and return the figures."""
    found: dict[str, float] = {}
    profile = Profile(iteration_seconds=1.0, checkpoint_bytes=STATE_BYTES, cost_seconds=0.0)
    settings = PacingSettings(write_bytes_per_second=STATE_BYTES * CHECKPOINTS / TOTAL, max_unsaved_seconds=1e9)
    print(f"coci against even spacing, {CHECKPOINTS} checkpoints each; in parentheses by the formula:", flush=True)
    for steepness in STEEPNESSES:
        made = compare_placement(profile, settings, FailureHistory(), TOTAL, steepness)
        x = steepness / 2
        theory = (2 / steepness) * 2 * (1 - math.exp(-x)) ** 2 / (1 - math.exp(-steepness))
        found[f"coci_lost_progress_vs_even_{steepness}"] = round(made.lost_progress, 3)
        print(
            f"  θT = {steepness}: {len(made.iterations)} and {made.even_checkpoints} checkpoints; progress lost "
            f"by a failure {made.lost_progress:.3f} ({theory:.3f}); iterations repeated "
            f"{made.repeated_iterations:.2f}"
        )
        for share, ratio in made.ended_early.items():
            density = math.exp(-x * share) * x / (1 - math.exp(-x))
            found[f"coci_early_end_{round(100 * share)}_{steepness}"] = round(ratio, 3)
            print(f"    ended for good at {share:.0%} of the run: {ratio:.2f} ({1 / density:.2f})")
    return found | _published()


@dataclass(frozen=True)
class _Job:
    """A job of the paper, in minutes of one worker's training."""

    cost: float
    rate: float
    parallel: bool

    @property
    def length(self) -> float:
        return LENGTH / DECAY_PER_MINUTE

    def workers(self, at: float) -> int:
        return next(n for share, n in WORKERS if at <= share * self.length) if self.parallel else 1

    def speed(self, at: float) -> float:
        workers = self.workers(at)
        return EFFICIENCY * workers if workers > 1 else 1.0

    def left(self, at: float) -> float:
        return math.exp(-DECAY_PER_MINUTE * at)

    def every(self, minutes: float) -> list[float]:
        """A fixed interval of wall-clock time."""
        return self._steps(lambda at: minutes * self.speed(at))

    def equal_steps(self, step_of: Callable[[float, float], float]) -> list[float]:
        """Checkpoints after equal steps of the loss, none where less than a step is left."""

        def ahead(at: float) -> float:
            # Theorem 4.2: with g workers, θ grows by the acceleration and Ts by g
            step = step_of(DECAY_PER_MINUTE * self.speed(at), self.cost * self.workers(at))
            left = self.left(at)
            return -math.log1p(-step / left) / DECAY_PER_MINUTE if step < left else math.inf

        return self._steps(ahead)

    def _steps(self, ahead: Callable[[float], float]) -> list[float]:
        at: list[float] = []
        here = ahead(0.0)
        while here < self.length:
            at.append(here)
            here += ahead(here)
        return at

    def given_away(self, taken: Sequence[float], *, jacobian: bool) -> float:
        """P_l of checkpoints at these places: as published, or with the Jacobian."""
        given = sum(self.left(at) - self.left(at + self.cost * self.workers(at) * self.speed(at)) for at in taken)
        ends, step, minutes = [0.0, *taken], self.length / GRID, 0.0
        for n in range(GRID):
            at = (n + 0.5) * step
            took = step / self.speed(at)
            minutes += took / 2
            chance = self.rate * math.exp(-self.rate * minutes)
            at_stake = self.left(ends[bisect_right(ends, at) - 1]) - self.left(at)
            given += at_stake * chance * (took if jacobian else self.left(n * step) - self.left((n + 1) * step))
            minutes += took / 2
        return given


def _published() -> dict[str, float]:
    """COCI's rule and the fixed interval √(2Ts/λ) under the paper's definitions."""
    print("COCI's rule (equal steps of the loss) against the fixed interval √(2Ts/λ), loss given away:")
    found = {}
    for parallel, claim in ((False, -40.18), (True, -60.64)):
        changes: dict[bool, list[float]] = {False: [], True: []}
        for cost in COSTS.values():
            for hours in MTBF_HOURS:
                job = _Job(cost=cost / 60, rate=1 / (60 * hours), parallel=parallel)
                fixed = job.every(math.sqrt(2 * job.cost / job.rate))
                rule = job.equal_steps(
                    lambda decay, ts, rate=job.rate: -math.expm1(-decay * ts) * (1 / (2 * rate) + 1 / (2 * decay))
                )
                for jacobian, ratios in changes.items():
                    before = job.given_away(fixed, jacobian=jacobian)
                    ratios.append(100 * (job.given_away(rule, jacobian=jacobian) / before - 1))
        name = "parallel" if parallel else "serial"
        as_published, corrected = (statistics.median(changes[key]) for key in (False, True))
        print(
            f"  {name}: {as_published:+.1f} % with the published integral (best job {min(changes[False]):+.1f} %, "
            f"claim {claim:+.2f} %), {corrected:+.1f} % with the Jacobian (median of {len(changes[False])} jobs)"
        )
        found[f"coci_rule_{name}_as_published_percent"] = round(as_published, 1)
        found[f"coci_rule_{name}_corrected_percent"] = round(corrected, 1)
    return found


if __name__ == "__main__":
    run(main)
