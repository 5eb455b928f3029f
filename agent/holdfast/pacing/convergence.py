"""Convergence-aware placing of a limited number of checkpoints: dense where much is learned, else sparse.

Should a job die for good, the learning since its last checkpoint is lost: with hazard λ, progress rate r = -L'
and density n of checkpoints, ∫ λ r / (2n) is to be expected. Among all placings of N checkpoints, ∫ n = N, that
is least for n = N √(λ r) / ∫ √(λ r) (Cauchy and Schwarz). It is the question of H. Li, Z. Wang, H. Zhao et al.,
"Convergence-aware optimal checkpointing for exploratory deep learning training jobs", FGCS 164, 2025, 107597,
whose own answer is kept in `coci`. Where checkpoints are paid for in training time, and failures cost nothing
but time, convergence does not matter, and `goodput` is right.

With one λ for what is to come it cancels. For L = c + A exp(-θ i), with R iterations and N checkpoints to go,
the next one is due after -(2/θ) ln(1 - (1 - exp(-θ R / 2)) / N) iterations, and the last falls on the end of
the job. What was spent and what is ahead are looked at anew in each plan: an interval is meant for the next
checkpoint only.
"""

from __future__ import annotations

import math

from .expectation import expect_within
from .limited import falling, goodput_instead, spent
from .policy import History, plural
from .profile import Plan, Profile
from .settings import Settings

DENSEST = 4.0
"""At most so many times as dense as evenly spaced: a curve fitted too early must not use up all checkpoints."""


def convergence(profile: Profile, settings: Settings, history: History) -> Plan:
    """The next of `settings.checkpoints` checkpoints, placed so that the least learning is lost on average.

    Without a limit, or without an end of the job to spread them to, goodput decides; without a loss curve they are
    spread evenly. When all are taken there are no more.
    """
    if (plan := spent(settings, history, "convergence")) is not None:
        return plan
    if settings.checkpoints is None:
        because = "convergence places a limited number of checkpoints and none is set"
        return goodput_instead(profile, settings, history, because)
    if history.total_iterations is None:
        because = "convergence has to know how many iterations the job will have"
        return goodput_instead(profile, settings, history, because)
    ahead = history.total_iterations - history.iterations
    if ahead <= 0:
        because = f"the job has gone beyond its planned end at {plural(history.total_iterations)}"
        return goodput_instead(profile, settings, history, because)
    left = settings.checkpoints - history.checkpoints
    curve = falling(history)
    wanted = next_interval(curve.decay if curve else 0.0, ahead, left)
    if curve is None:
        how = f"spread evenly, as {history.why_no_progress}"
    else:
        how = "dense where the loss falls fast; it trades a later completion for less learning lost early on"
    reason = (
        f"for the least learning lost should the job die for good: {left:,} of {settings.checkpoints:,} "
        f"checkpoints left for {plural(ahead)}, {how}"
    )
    return expect_within(profile, settings, history, max(1, round(wanted)), policy="convergence", reason=reason)


def next_interval(decay: float, ahead: float, left: int) -> float:
    """Iterations until the next of `left` checkpoints, with `ahead` to go and a loss that falls at `decay`."""
    even = ahead / left
    x = decay * ahead / 2
    if left == 1 or x < 1e-9:
        return even
    return max(-math.log1p(math.expm1(-x) / left) * 2 / decay, even / DENSEST)
