"""Where a job's time went, from what its agents said to what the API answers."""

from __future__ import annotations

from functools import partial

import pytest

from holdfast.protocol.wire import AttemptFinished, LineageStarted, RankTotals, Stall
from holdfast_server import models
from holdfast_server.queries import goodput as questions
from holdfast_server.queries.goodput import stalls_over_time
from holdfast_server.records.failures import attempts_of_jobs
from tests.support import database_queries

GOODPUT = "/api/v1/jobs/char-gpt/goodput"
T = 1_790_000_000.0


def goodput(client, window="all"):
    answer = client.get(f"{GOODPUT}?window={window}").json()
    found = {bucket["name"]: bucket["seconds"] for bucket in answer["buckets"]}
    assert sum(round(seconds * 1e6) for seconds in found.values()) == round(answer["wall_seconds"] * 1e6)
    return answer, {name: pytest.approx(seconds, abs=1e-3) for name, seconds in found.items() if seconds}


def train(agent, iterations, *, start, seconds=1.0):
    """Iterations that follow each other, of which the first begins at `start`; told when the last has ended."""
    agent.at = start - agent.iteration * seconds
    agent.client.app.state.services.clock.now = start + iterations * seconds
    agent.train(iterations, seconds=seconds)
    agent.at = start + iterations * seconds


def test_a_job_that_nobody_knows_has_no_account(client):
    assert client.get(GOODPUT).status_code == 404


def test_a_window_that_there_is_not_is_refused(agent, client):
    agent.start()
    assert client.get(f"{GOODPUT}?window=2d").status_code == 422


def test_an_attempt_starts_trains_and_waits(agent, client, clock):
    agent.start()
    train(agent, 50, start=T + 10)
    clock.now = T + 61
    answer, found = goodput(client)
    # of each second, the agent of these tests waits 1 ms for checkpoints and 2 ms for batches
    assert found == {
        "starting": 10,
        "productive": 49.85,
        "snapshot_wait": 0.05,
        "data_fetch": 0.1,
        "unexplained": 1,
    }
    assert (answer["iterations"], answer["lost_iterations"]) == (50, 0)
    assert answer["goodput"] == pytest.approx(49.85 / 61)


def test_what_a_crash_threw_away_is_lost_and_what_repeats_it_stands(agent, client, clock):
    agent.start()
    train(agent, 50, start=T)
    clock.now = T + 50
    agent.say()
    second = agent.restarted()
    second.iteration, second.at = 30, T + 80
    second.start(previous_exit="killed by SIGKILL")
    train(second, 25, start=T + 85)
    clock.now = T + 110
    second.say()
    answer, found = goodput(client)
    assert (answer["iterations"], answer["lost_iterations"]) == (55, 20)
    assert found["lost"] == 20
    assert (found["down"], found["starting"]) == (30, 5)


def test_what_a_restore_left_is_lost_but_what_lies_before_it_stands(agent, client, clock):
    agent.start()
    train(agent, 50, start=T)
    agent.checkpoint(20)
    agent.iteration, agent.lineage = 20, 2
    agent.say(
        LineageStarted(at=T + 54, lineage=2, iteration=20, parent="000000000020-1"),
        Stall(at=T + 54, iteration=20, lineage=2, kind="restore", seconds=4.0),
    )
    train(agent, 10, start=T + 54)
    clock.now = T + 64
    answer, found = goodput(client)
    assert (answer["iterations"], answer["lost_iterations"]) == (30, 30)
    assert (found["lost"], found["restoring"]) == (30, 4)


def test_an_attempt_that_has_not_said_where_it_starts_has_thrown_nothing_away(agent, client, clock):
    agent.start()
    train(agent, 50, start=T)
    clock.now = T + 60
    second = agent.restarted()
    second.iteration, second.at = 0, T + 60
    second.say()
    assert goodput(client)[0]["lost_iterations"] == 0


def test_a_finished_job_is_not_down(agent, client, clock):
    agent.start()
    train(agent, 50, start=T)
    agent.say(AttemptFinished(at=T + 50, iteration=50, lineage=1, reason="finished"))
    clock.now = T + 10_000
    answer, found = goodput(client)
    assert answer["wall_seconds"] == 50
    assert "down" not in found


def test_a_job_that_fell_silent_is_down(agent, client, clock):
    agent.start()
    train(agent, 50, start=T)
    clock.now = T + 50
    agent.say()
    clock.now = T + 3600
    assert goodput(client)[1]["down"] == 3550


def test_a_window_holds_what_lies_in_it(agent, client, clock):
    agent.start()
    train(agent, 5000, start=T)
    clock.now = T + 5000
    agent.say()
    answer, found = goodput(client, "1h")
    assert (answer["wall_seconds"], "starting" in found) == (3600, False)
    assert answer["iterations"] == pytest.approx(3600, abs=2)


def test_only_the_attempts_that_reach_into_a_window_are_read(agent, client, clock):
    one = agent
    for number in range(4):
        one.at = clock.now = T + number * 2000
        one.start()
        train(one, 100, start=one.at)
        one = one.restarted(f"after {number}")
    answer, found = goodput(client, "1h")
    assert (answer["wall_seconds"], answer["iterations"], found["down"]) == (3600, 200, 3400)

    def read():
        with database_queries.of(client).read() as session:
            return attempts_of_jobs(session, ["char-gpt"], since=clock.now - 3600)["char-gpt"]

    assert [life.attempt.started_at - T for life in read()] == [2000, 4000, 6000]


def test_a_long_wait_is_laid_into_the_stretches_before_its_end(agent, client, clock):
    clock.now = T + 3600
    agent.start()
    waits = (("restore", 1830, 720.0), ("data_fetch", 90, 200.0), ("snapshot_wait", 3590, 0.2))
    agent.say(
        *(Stall(at=T + at, iteration=1, lineage=1, kind=kind, seconds=seconds) for kind, at, seconds in waits),
        Stall(at=T + 3600, iteration=2, lineage=1, kind="snapshot_wait", seconds=0.3),
    )
    answer = partial(stalls_over_time, database_queries.of(client), "char-gpt", "1h", now=T + 3600)()
    assert answer.stretch_seconds == 60
    waited = {kind: {place: s for place, s in enumerate(row) if s} for kind, row in answer.seconds.items()}
    assert waited == {
        "restore": dict.fromkeys(range(19, 31), 60.0),
        "data_fetch": {0: 60.0, 1: 60.0},
        "snapshot_wait": {59: pytest.approx(0.5)},
    }
    assert list(waited) == ["restore", "data_fetch", "snapshot_wait"]


def test_the_barrier_of_rank_0_is_told_by_itself(agent, client, clock):
    agent.start(world_size=2)
    train(agent, 50, start=T)
    work = {"lineage": 1, "first_iteration": 1, "last_iteration": 50, "iterations": 50, "longest_seconds": 1.0}
    agent.say(RankTotals(at=T + 50, seconds=50.0, barrier_iterations=50, barrier_seconds=10.0, **work))
    clock.now = T + 50
    answer, found = goodput(client)
    assert (found["barrier"], answer["iterations"]) == (10, 50)


def ten_minutes(number, **fields):
    return {
        "job": "char-gpt", "rank": 0, "bucket": int(T // 600) + number, "uid": "first", "lineage": 1,
        "first_iteration": number * 100 + 1, "last_iteration": (number + 1) * 100, "begins_at": T + number * 600,
        "ends_at": T + (number + 1) * 600, "iterations": 100, "seconds": 600.0, "longest_seconds": 6.0,
        "stall_seconds": 6.0, "data_seconds": 12.0, "barrier_iterations": 0, "barrier_seconds": 0.0, **fields,
    }  # fmt: skip


@pytest.mark.parametrize("database_kind", ["sqlite"])
def test_a_million_iterations_take_as_many_statements_as_a_few_and_an_index_for_each(empty_database):
    def ask(database):
        job = {"name": "char-gpt", "created_at": T, "last_contact_at": T, "uid": "first", "lineage": 1}
        attempt = {"job": "char-gpt", "uid": "first", "attempt": 1, "started_at": T, "iteration": 0, "lineage": 1}
        lineage = {"job": "char-gpt", "lineage": 1, "at": T, "iteration": 0, "last_iteration": 0}
        database_queries.fill(
            database,
            {
                models.JobRecord: [job],
                models.AttemptRecord: [{**attempt, "last_iteration": 0, "versions": b"\x80"}],
                models.LineageRecord: [lineage],
                models.RankTotalsRecord: [ten_minutes(0)],
            },
        )
        with database_queries.statements() as few:
            questions.goodput(database, "char-gpt", "all", now=T + 600)
        database_queries.fill(
            database, {models.RankTotalsRecord: [ten_minutes(number) for number in range(1, 10_000)]}
        )
        with database_queries.statements() as many:
            answer = questions.goodput(database, "char-gpt", "all", now=T + 600 * 10_000)
        assert answer.iterations == 1_000_000
        assert len(many) == len(few) <= 8
        plans = {sql: database_queries.plan(database, (sql, values)) for sql, values in many if "FROM" in sql}
        for table in ("rank_totals", "stalls", "attempts", "lineages"):
            found = [plan for sql, plan in plans.items() if f"FROM {table}" in sql]
            assert found
            assert all(f"SEARCH {table} USING" in plan and "SCAN" not in plan for plan in found), found

    database_queries.alone(empty_database, ask)
