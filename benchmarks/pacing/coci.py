"""COCI's own comparison: its jobs, its rule as published and mended, its baselines, its objective.

H. Li, Z. Wang, H. Zhao et al., "Convergence-aware optimal checkpointing for exploratory deep learning training
jobs", FGCS 164, 2025, 107597. Its objective P_l is the loss that is given away: for each checkpoint what would
have been learnt in its time, and what failures take back. The published integral for the latter is taken over the
loss p and lacks the Jacobian |dt/dp|; both forms are here. Loss exp(-θ t) from 1 on; λ a minute, as in its code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from holdfast.pacing import History, Plan, Policy, Profile, Settings, policies
from holdfast.simulation import (
    Exponential,
    Job,
    Knowledge,
    ListedFailures,
    Round,
    Way,
    certain,
    foreseen,
    simulate,
)

COSTS = {"DenseNet201": 0.13, "ResNet152": 0.27, "VGG16": 0.59, "VGG19": 0.60, "BERT-large": 1.60}
"""Ts in seconds."""
MTBF_HOURS = (4.0, 8.0, 16.0, 70.0)
DECAY_A_MINUTE = 0.078
"""θ of the published example."""
LENGTH = 5.0
"""θ T: the loss falls to 0.7 %, in about an hour."""
ITERATION_SECONDS = 0.5
WORKERS = ((0.3, 4), (0.6, 2), (1.0, 1))
"""Data parallel: so many workers up to that share of the iterations, more while more is learnt."""
EFFICIENCY = 0.9
GRID = 2000
BASELINE, BUDGETED = "fixed interval (CCM)", "checkfreq, 3.5 %"
PUBLISHED, MENDED = "COCI as published", "COCI, Jacobian mended"
OURS = "coci, then goodput"
"""The policy `coci`: where COCI's rule ends, goodput goes on."""


def job(cost_seconds: float, *, parallel: bool = False, stopped: float = 1.0) -> Job:
    """One of its jobs, alone or with varying workers, ended by somebody at a share of its iterations."""
    decay = DECAY_A_MINUTE * ITERATION_SECONDS / 60
    total = round(LENGTH / decay)
    rounds = tuple(
        Round(
            until_iteration=round(share * total),
            workers=workers,
            speed=EFFICIENCY * workers if workers > 1 else 1.0,
            cost_factor=workers,
        )
        for share, workers in WORKERS
    )
    return Job(
        total_iterations=total,
        iteration_seconds=ITERATION_SECONDS,
        cost_seconds=cost_seconds,
        restart_seconds=30.0,
        rounds=rounds if parallel else (),
        stop_iteration=round(stopped * total),
        curve=Exponential(rate=decay),
    )


def ways(work: Job, rate: float) -> list[Way]:
    """The policies that are compared, all told the true rate (failures a second) and the true loss curve.

    None but CheckFreq is held to a budget: the comparison is of what each would do by itself. `convergence` may
    take as many checkpoints as CCM takes.
    """
    assert work.curve is not None
    total = work.total_iterations
    knows = Knowledge(rate=lambda now, workers: rate, failures=certain(rate), progress=foreseen(work.curve, total))
    alone = Settings(budget=1.0)
    interval = math.sqrt(2 * work.cost_seconds / rate)
    ccm = Way(name=BASELINE, policy=_every_seconds(interval), knowledge=knows, replan_seconds=math.inf)
    as_many = replace(alone, checkpoints=max(1, len(places(replace(work, stop_iteration=None), ccm))))
    return [
        ccm,
        Way(name=BUDGETED, policy=policies["checkfreq"], knowledge=knows, replan_seconds=math.inf),
        Way(name=PUBLISHED, policy=_equal_steps(work, rate, mended=False), knowledge=knows),
        Way(name=MENDED, policy=_equal_steps(work, rate, mended=True), knowledge=knows),
        Way(name=OURS, policy=policies["coci"], settings=alone, knowledge=knows),
        Way(name="convergence", policy=policies["convergence"], settings=as_many, knowledge=knows),
        Way(name="goodput", policy=policies["goodput"], settings=alone, knowledge=knows),
    ]


def _every_seconds(seconds: float) -> Policy:
    """CCM: a fixed interval, laid down once for the whole job."""

    def policy(profile: Profile, settings: Settings, history: History) -> Plan:
        return Plan(interval=max(1, round(seconds / profile.iteration_seconds)), policy="ccm")

    return policy


def _equal_steps(work: Job, rate: float, *, mended: bool) -> Policy:
    """COCI: checkpoints after equal steps of the loss, none where less than a step is left.

    With the Jacobian the recovery term is ∫ (p - iPe) λ exp(-λt) dt, about Pe/2 (1 - exp(-λT)), and that of the
    checkpoints is (1 - exp(θ₁Ts)) (1 - exp(2θ₁T)) / (2 Pe): their sum is least for a Pe that goes with √Ts.
    """
    assert isinstance(work.curve, Exponential)
    decay = work.curve.rate
    seconds = work.total_iterations * work.iteration_seconds
    failing = -math.expm1(-rate * seconds)
    learning = -math.expm1(-2 * decay * work.total_iterations)

    def policy(profile: Profile, settings: Settings, history: History) -> Plan:
        cost = profile.cost_seconds or 0.0
        a_minute = decay * 60 / profile.iteration_seconds
        missed = -math.expm1(-a_minute * cost / 60)
        if mended:
            step = math.sqrt(missed * learning / failing)
        else:
            step = missed * (1 / (2 * rate * 60) + 1 / (2 * a_minute))
        left = math.exp(-decay * history.iterations)
        interval = None if step >= left else max(1, round(-math.log1p(-step / left) / decay))
        return Plan(interval=interval, policy="coci")

    return policy


def places(work: Job, way: Way) -> list[int]:
    """After which iterations it takes checkpoints as long as nothing fails."""
    taken: list[int] = []

    def spy(profile: Profile, settings: Settings, history: History) -> Plan:
        if history.checkpoints > len(taken):
            taken.append(history.iterations)
        return way.policy(profile, settings, history)

    simulate(work, spy, way.settings, failures=ListedFailures([]), knowledge=way.knowledge)
    return taken


def loss_given_away(work: Job, taken: Sequence[int], rate: float, *, jacobian: bool) -> float:
    """P_l of checkpoints at these places: as published, or with the Jacobian. Failures a second."""
    assert work.curve is not None
    loss, last = work.curve.loss_at, work.last_iteration
    given = 0.0
    for place in taken:
        its = work.round_at(place - 1)
        ahead = work.cost_seconds * its.cost_factor * its.speed / work.iteration_seconds
        given += loss(place) - loss(place + ahead)
    step = last / GRID
    seconds = 0.0
    ends = iter([*taken, last])
    begin, end = 0, next(ends)
    for n in range(GRID):
        at = (n + 0.5) * step
        while at > end:
            begin, end = end, next(ends)
        took = step * work.iteration_seconds / work.round_at(int(at)).speed
        seconds += took / 2
        chance = rate * math.exp(-rate * seconds)
        at_stake = loss(begin) - loss(at)
        if jacobian:
            given += at_stake * chance * took
        else:
            given += at_stake * 60 * chance * (loss(n * step) - loss((n + 1) * step))
        seconds += took / 2
    return given
