"""Alerts about slow training: none in 100,000 iterations of healthy jobs, and one about each real cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from holdfast.protocol.administration import AlertRule
from holdfast.protocol.wire import AttemptFinished
from holdfast_server.alerts import evaluation, incidents, rules
from holdfast_server.alerts.conditions import KINDS
from holdfast_server.alerts.facts import JobFacts
from holdfast_server.queries.ranks import RankFindings, RankMeans, compare
from holdfast_server.samples.limits import (
    RecentSamples,
    latest,
    median_seconds,
    throughput,
    usual_iteration_seconds,
    usual_throughput,
)

ITERATIONS = 100_000
FACTS = JobFacts(job="a", project="default", status="running")


@dataclass
class Watched:
    """A rule with its default limit and delay, and the alerts that it raised."""

    kind: str
    row: object = None
    fired: int = 0

    def look(self, facts: JobFacts, now: float) -> None:
        kind = KINDS[self.kind]
        rule = AlertRule(
            project="default", name=kind.name, kind=kind.name, title=kind.title, meaning=kind.meaning,
            unit=kind.unit, built_in=True, enabled=True, severity=kind.severity, limit=kind.limit,
            for_seconds=kind.for_seconds, jobs="*",
        )  # fmt: skip
        result = kind.judge(facts, kind.limit)
        match incidents.next_step(self.row, rule, result, now=now):
            case "begin":
                self.row = incidents.begin("a", rule, result, now=now)
            case "fire":
                self.row.fired_at, self.fired = now, self.fired + 1
            case "discard" | "resolve":
                self.row = None
            case "start_clearing":
                self.row.clear_since = now
            case "keep_firing":
                self.row.clear_since = None


def healthy(name: str, rng: np.random.Generator, count: int = ITERATIONS) -> np.ndarray:
    """Seconds of the iterations of a job that is all right."""
    seconds = rng.lognormal(0, 0.1, count)
    match name:
        case "noisy":
            return 0.5 * rng.lognormal(0, 0.5, count)
        case "checkpoints":  # each 100th iteration stalls, and each 2,000th evaluates for a minute
            seconds[::100] += 3.0
            seconds[::2000] += 60.0
        case "accumulation":  # each 8th iteration does the work of the optimizer
            seconds[::8] *= 3.0
        case "drift":  # by day, others load the same network
            seconds *= 1 + 0.08 * np.sin(2 * np.pi * np.cumsum(seconds) / 86400)
    return seconds


def looks(seconds: np.ndarray, batch: int = 20) -> Iterator[tuple[float, RecentSamples]]:
    recent, now = RecentSamples(), 0.0
    for begin in range(0, len(seconds), batch):
        some = seconds[begin : begin + batch].tolist()
        now += sum(some)
        recent = latest(recent, some, [], {})
        yield now, recent


def facts_of(recent: RecentSamples) -> JobFacts:
    return replace(
        FACTS, iteration_seconds=median_seconds(recent.seconds),
        usual_iteration_seconds=usual_iteration_seconds(recent), throughput=throughput(recent),
        usual_throughput=usual_throughput(recent),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["plain", "noisy", "checkpoints", "accumulation", "drift"])
def test_no_alert_about_iteration_time_in_healthy_iterations(name):
    watched = Watched("iteration_time")
    for now, recent in looks(healthy(name, np.random.default_rng(7))):
        watched.look(facts_of(recent), now)
    assert watched.fired == 0


@pytest.mark.parametrize("name", ["plain", "noisy", "checkpoints", "accumulation"])
def test_iterations_that_take_half_as_long_again_raise_one_alert(name):
    watched, rng = Watched("iteration_time"), np.random.default_rng(7)
    seconds = np.concatenate([healthy(name, rng, 20_000), 1.5 * healthy(name, rng, 3_000)])
    for now, recent in looks(seconds):
        watched.look(facts_of(recent), now)
    assert watched.fired == 1


def test_less_than_a_millisecond_an_iteration_is_no_slower_iteration():
    judge = KINDS["iteration_time"].judge
    short = judge(replace(FACTS, iteration_seconds=9e-4, usual_iteration_seconds=5e-4), 25.0)
    longer = judge(replace(FACTS, iteration_seconds=2e-3, usual_iteration_seconds=5e-4), 25.0)
    assert (short.broken, short.clear, longer.broken) == (False, True, True)


def findings(own: np.ndarray, data: np.ndarray) -> RankFindings:
    """What ten minutes of iterations are summarized to; rows are ranks."""
    means = [
        RankMeans(
            rank=rank, iterations=own.shape[1], iteration_seconds=float(own.max(axis=0).mean()),
            longest_seconds=0.0, stall_seconds=0.0, data_seconds=float(data[rank].mean()),
            barrier_seconds=float((own.max(axis=0) - own[rank]).mean()),
        )
        for rank in range(len(own))
    ]  # fmt: skip
    compared = compare(means)
    slowest = max(compared.slow, key=compared.own_seconds.__getitem__, default=None)
    middle = compared.median_seconds
    return RankFindings(
        data_seconds=means[0].data_seconds * own.shape[1],
        seconds=means[0].iteration_seconds * own.shape[1],
        iterations=own.shape[1],
        slowest=slowest,
        slower=0.0 if slowest is None else compared.own_seconds[slowest] / middle - 1,
        slower_seconds=0.0 if slowest is None else compared.own_seconds[slowest] - middle,
        why="" if slowest is None else compared.slow[slowest],
    )


def watch_ranks(kind: str, own: np.ndarray, data: np.ndarray, each: int) -> int:
    watched = Watched(kind)
    for step, begin in enumerate(range(0, own.shape[1], each)):
        found = findings(own[:, begin : begin + each], data[:, begin : begin + each])
        watched.look(replace(FACTS, ranks=found), step * 300.0)
    return watched.fired


@pytest.mark.parametrize("kind", ["straggler", "data_wait"])
@pytest.mark.parametrize(("scale", "each"), [(1.0, 300), (2e-3, 300), (1.0, 30)])
def test_no_alert_about_ranks_and_data_in_healthy_iterations(kind, scale, each):
    rng = np.random.default_rng(11)
    own = scale * rng.lognormal(0, 0.15, (8, ITERATIONS))
    data = 0.05 * own * rng.lognormal(0, 1.0, own.shape)
    assert watch_ranks(kind, own, data, each) == 0


def test_tiny_differences_are_below_the_floor_whatever_their_share():
    rng = np.random.default_rng(11)
    own = 5e-4 * rng.lognormal(0, 0.1, (8, 20_000))
    own[3] *= 2
    assert watch_ranks("straggler", own, own, 300) == watch_ranks("data_wait", own, own, 300) == 0


def test_a_slow_rank_and_a_wait_for_data_raise_one_alert_each():
    rng = np.random.default_rng(11)
    own = rng.lognormal(0, 0.15, (8, 20_000))
    own[3, 5_000:] *= 1.79
    data = 0.67 * own
    assert (watch_ranks("straggler", own, data, 300), watch_ranks("data_wait", own, data, 300)) == (1, 1)


def test_goodput_is_judged_of_a_whole_hour_and_ends_above_its_limit_only():
    judge = KINDS["goodput_low"].judge
    assert judge(FACTS, 50.0) is None
    low, near, good = (judge(replace(FACTS, goodput=share), 50.0) for share in (0.4, 0.52, 0.6))
    assert [(each.broken, each.clear) for each in (low, near, good)] == [
        (True, False),
        (False, False),
        (False, True),
    ]


def test_the_rules_about_an_analysis_are_evaluated_on_their_own(client, agent, clock):
    """What one evaluation raises, the other one leaves alone."""
    database = client.app.state.services.database
    rules.change(
        database, "default", "goodput_low", rules.RuleChanges(limit=100.0, for_seconds=0.0), who="x", now=clock.now
    )
    agent.start()
    for _ in range(370):
        agent.at = clock.now
        agent.train(1)
        clock.now += 10
    evaluation.evaluate(database, clock.now)
    assert client.get("/api/v1/alerts").json()["alerts"] == []
    evaluation.evaluate(database, clock.now, analyzed=True)
    evaluation.evaluate(database, clock.now)
    (alert,) = client.get("/api/v1/alerts").json()["alerts"]
    assert (alert["rule"], "% of the last hour advanced training (limit 100 %)" in alert["message"]) == (
        "goodput_low", True,
    )  # fmt: skip


@pytest.mark.parametrize(("ended", "raised"), [("preempted", []), ("RuntimeError", ["goodput_low"])])
def test_a_planned_stop_is_no_low_goodput_and_a_failure_is(client, agent, clock, ended, raised):
    database = client.app.state.services.database
    rules.change(database, "default", "goodput_low", rules.RuleChanges(for_seconds=0.0), who="x", now=clock.now)

    def train(agent, times):
        for _ in range(times):
            agent.at = clock.now
            agent.train(1, seconds=10.0)
            clock.now += 10

    agent.start()
    train(agent, 400)
    agent.at = clock.now
    agent.say(AttemptFinished(at=clock.now, iteration=agent.iteration, lineage=1, reason=ended))
    clock.now += 12 * 3600
    again = agent.restarted("again")
    again.at = clock.now
    again.start()
    train(again, 60)
    evaluation.evaluate(database, clock.now, analyzed=True)
    assert [alert["rule"] for alert in client.get("/api/v1/alerts").json()["alerts"]] == raised
