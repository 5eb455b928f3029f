"""COCI's rule as published: checkpoints after equal steps of the loss.

H. Li, Z. Wang, H. Zhao et al., "Convergence-aware optimal checkpointing for exploratory deep learning training
jobs", FGCS 164, 2025, 107597. With a loss exp(θ₁ t + θ₂), normalised to [0, 1], failures at the rate λ and
checkpoints that cost Ts, its Theorem 4.1 makes the step

    Pe = (1 - exp(θ₁ Ts)) (1/(2λ) - 1/(2θ₁))

and the next checkpoint is due loss⁻¹(loss(t) - Pe) - t later. It is kept so that it can be compared with. The
integral behind it lacks the Jacobian |dt/dp| = 1/(|θ₁| p). So Pe has the unit of a time but is taken for a share
of the loss, grows with Ts and not with √Ts, and depends on the unit that time is counted in. Here that is the
minute, at which typical jobs get tens of checkpoints. To first order, as much learning is lost between equal steps
as between as many evenly spaced checkpoints; for a limited number of them `convergence` has the better answer.

Data parallelism (Theorem 4.2) needs no form of its own here: θ₁ and Ts are measured on the job as it runs.
"""

from __future__ import annotations

import math

from .bounds import checkpoint_cost
from .expectation import expect_within
from .limited import falling, goodput_instead, spent
from .policy import History, cost_in_words, failures_in_words, failures_of, percent, usable_iteration
from .profile import Plan, Profile
from .settings import MAX_INTERVAL, Settings

MINUTE = 60.0


def coci(profile: Profile, settings: Settings, history: History) -> Plan:
    """The interval to the next equal step of the loss.

    Where there is no loss curve, or less than one step of the loss is left, which is where the rule ends, goodput
    decides. `settings.checkpoints`, where it is set, is kept to.
    """
    if (plan := spent(settings, history, "coci")) is not None:
        return plan
    curve, failures = falling(history), failures_of(settings, history)
    if curve is None or not usable_iteration(profile):
        return goodput_instead(profile, settings, history, history.why_no_progress)
    cost = checkpoint_cost(profile)
    a_minute = MINUTE / profile.iteration_seconds
    step = loss_step(curve.decay * a_minute, cost / MINUTE, failures.rate * MINUTE)
    left = math.exp(-curve.decay * history.iterations)
    if not step < left:  # nor where a figure is no number
        because = f"{percent(left)} of the loss is left and a step of COCI's rule is {percent(step)}"
        return goodput_instead(profile, settings, history, because)
    wanted = -math.log1p(-step / left) / curve.decay
    reason = (
        f"for equal steps of the loss, {percent(step)} of it each, by COCI's published rule: "
        f"{cost_in_words(profile, cost)} and {failures_in_words(failures)}"
    )
    # several steps within one iteration are one checkpoint
    iterations = max(1, round(min(wanted, MAX_INTERVAL)))
    return expect_within(profile, settings, history, iterations, policy="coci", reason=reason)


def loss_step(decay: float, cost: float, rate: float) -> float:
    """Pe of Theorem 4.1, for θ₁ = -`decay` and λ = `rate` a minute, and Ts = `cost` in minutes."""
    return -math.expm1(-decay * cost) * (1 / (2 * rate) + 1 / (2 * decay))
