"""The watch over losses judges as the alert of the server does, and leaves what returns alone."""

import math
import random

import numpy as np
import pytest

from holdfast.protocol.orders import OnTrouble, parse_on_trouble
from holdfast.telemetry import loss_watch
from holdfast.telemetry.loss_watch import STAYS_UP, WINDOW, LossWatch
from holdfast_server.alerts import loss_spikes
from holdfast_server.alerts.conditions import KINDS
from holdfast_server.samples import limits


def curve(seed, iterations=600, noise=0.05):
    draws = random.Random(seed)
    return [2.0 * math.exp(-n / 300) + 1.0 + draws.gauss(0, noise) for n in range(1, iterations + 1)]


def watched(losses, start=1):
    watch = LossWatch()
    for iteration, loss in enumerate(losses, start=start):
        watch.add(iteration, loss)
        if watch.trouble is not None:
            break
    return watch


def test_the_figures_are_those_of_the_alert():
    for name in ("LEAST_SAMPLES", "NORMAL", "LEAST_SPREAD", "LEAST_HEIGHT", "RECORD", "NEWEST_LOSSES"):
        assert getattr(loss_watch, name) == getattr(loss_spikes, name)
    rule = KINDS["loss_spike"]
    assert (rule.limit, rule.window) == (loss_watch.SPREADS, loss_watch.WINDOW)
    assert loss_watch.START_LOSSES == limits.START_LOSSES


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("height", [0.2, 0.5, 3.0])
def test_a_rise_that_stays_is_trouble_where_the_alert_finds_a_spike(seed, height):
    losses = curve(seed)
    losses[400:] = [loss + height for loss in losses[400:]]
    found = loss_spikes.find_spikes(
        np.arange(1, len(losses) + 1),
        np.array(losses),
        limit=6,
        window=WINDOW,
        start=float(np.median(losses[:20])),
    )
    after = [spike.iteration for spike in found if spike.iteration > WINDOW]
    assert watched(losses).trouble == (after[0] if after else None)


def test_a_spike_that_returns_is_no_trouble():
    losses = curve(1)
    losses[400:405] = [9.0] * 5
    assert watched(losses).trouble is None


def test_a_loss_that_is_not_finite_is_trouble_at_once_and_from_the_rise_before_it():
    losses = curve(1)
    losses[300] = math.nan
    assert watched(losses).trouble == 301
    losses[295:300] = [9.0] * 5
    assert watched(losses).trouble == 296
    assert watched([math.inf]).trouble == 1


def test_it_is_suspicious_from_the_rise_on():
    watch = watched([*curve(1, 400), 9.0])
    assert watch.is_suspicious
    assert watch.trouble is None
    for iteration in range(402, 401 + STAYS_UP):
        watch.add(iteration, 1.5)
    assert not watch.is_suspicious


def test_after_a_restore_later_losses_are_forgotten():
    watch = watched([*curve(1, 400), math.nan])
    watch.restart(380)
    assert watch.trouble is None
    for iteration, loss in enumerate(curve(1)[380:], start=381):
        watch.add(iteration, loss)
    assert watch.trouble is None


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("off", OnTrouble()),
        ("observe", OnTrouble("observe")),
        ("restore", OnTrouble("restore", 2, 1000)),
        (" Restore 3 in 2000", OnTrouble("restore", 3, 2000)),
    ],
)
def test_rules_are_parsed(value, rule):
    assert parse_on_trouble(value) == rule
