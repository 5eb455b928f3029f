"""Which rank the others wait for, from what each told of itself."""

from __future__ import annotations

from functools import partial

import pytest

from holdfast.protocol.wire import RankTotals
from holdfast_server import models
from holdfast_server.queries import ranks
from holdfast_server.queries.ranks import OWN, WHOLE, RankMeans, compare
from holdfast_server.records.rank_totals import delete_old
from tests.support import database_queries

T = 1_790_000_000.0
RANKS = "/api/v1/jobs/char-gpt/ranks"


def means(rank, own, *, barrier=None, data=0.0, stall=0.0):
    whole = own if barrier is None else own + barrier
    return RankMeans(
        rank=rank, iterations=10, iteration_seconds=whole, longest_seconds=whole, stall_seconds=stall,
        data_seconds=data, barrier_seconds=barrier,
    )  # fmt: skip


def together(*own, exchange=0.01):
    """Ranks that meet after each iteration: whoever is done waits for the last, then all exchange."""
    return [means(rank, seconds, barrier=max(own) - seconds + exchange) for rank, seconds in enumerate(own)]


def test_ranks_that_meet_are_compared_by_their_own_time():
    found = compare(together(0.20, 0.21, 0.30, 0.205))
    assert found.measure == OWN
    assert (found.median_seconds, list(found.slow), found.waited_for) == (pytest.approx(0.205), [2], 2)
    assert found.waits_seconds[0] == pytest.approx(0.1)
    assert found.waits_seconds[2] == 0


def test_of_two_ranks_the_slower_one_shows():
    assert list(compare(together(0.2, 0.3)).slow) == [1]


def test_ranks_that_differ_by_little_hold_up_nobody():
    found = compare(together(0.200, 0.201, 0.199, 0.203))
    assert (found.slow, found.waited_for) == ({}, None)


def test_ranks_that_scatter_have_no_straggler_among_them():
    found = compare(together(0.1, 0.2, 0.3, 0.4, 0.5))
    assert found.slow == {}


def test_without_the_barrier_whole_iterations_are_compared():
    found = compare([means(0, 0.2), means(1, 0.2), means(2, 0.4)])
    assert (found.measure, list(found.slow), found.waited_for) == (WHOLE, [2], None)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({}, "its own work"),
        ({"data": 0.09}, "waiting for batches"),
        ({"stall": 0.06}, "waiting for its checkpoints"),
    ],
)
def test_what_most_of_the_difference_is_is_told(fields, cause):
    found = compare([means(0, 0.2, barrier=0.1), means(1, 0.2, barrier=0.1), means(2, 0.3, barrier=0.0, **fields)])
    assert found.slow == {2: cause}


def told(agent, rank, seconds, barrier, *, at=T + 60, iterations=100):
    """What a rank reports of a hundred iterations."""
    agent.rank, agent.sequence = rank, agent.sequence + 1
    agent.say(
        RankTotals(
            at=at, lineage=1, first_iteration=1, last_iteration=iterations, iterations=iterations,
            seconds=seconds * iterations, longest_seconds=seconds * 2, barrier_iterations=iterations,
            barrier_seconds=barrier * iterations,
        )
    )  # fmt: skip


def test_ranks_report_and_the_slow_one_is_named(agent, client, clock):
    agent.start(world_size=3)
    agent.train(100, seconds=0.31)
    clock.now = T + 60
    for rank, own in ((0, 0.2), (1, 0.3), (2, 0.2)):
        told(agent, rank, 0.31, 0.31 - own)
    answer = client.get(RANKS).json()
    assert [answer[name] for name in ("world_size", "reporting", "stragglers", "waited_for")] == [3, 3, [1], 1]
    assert answer["waiting_gpu_seconds"] == pytest.approx(0.2)
    first = answer["ranks"][0]
    assert (first["rank"], first["straggler"], first["iterations"]) == (1, True, 100)
    assert first["own_seconds"] == pytest.approx(0.3)
    page = " ".join(client.get("/jobs/char-gpt/ranks").text.split())
    assert "1 straggler: rank 1" in page
    assert "Ranks" in client.get("/jobs/char-gpt").text


def test_the_heat_goes_by_the_measure_of_the_table_beside_it(agent, client, clock):
    agent.start(world_size=3)
    agent.train(100, seconds=0.31)
    clock.now = T + 60
    for rank in (1, 2):
        told(agent, rank, 0.31, 0.1)

    def heat():
        ask = {"db": database_queries.of(client), "job": "char-gpt", "window": "1h", "now": clock.now}
        times = partial(ranks.rank_times, **ask)()
        found = partial(ranks.rank_heat, ranks=[1, 2], measure=times.measure, **ask)()
        return times.measure, {round(seconds, 3) for row in found.values() for seconds in row if seconds}

    assert heat() == (WHOLE, {0.31})
    told(agent, 0, 0.31, 0.1)  # of rank 0, only the barrier is taken from this
    assert heat() == (OWN, {0.21})


def test_what_other_ranks_tell_moves_nothing_of_the_job(agent, client, clock):
    agent.start(world_size=2)
    agent.train(5)
    before = client.get("/api/v1/jobs/char-gpt").json()
    told(agent, 1, 0.3, 0.0)
    assert client.get("/api/v1/jobs/char-gpt").json() == before


def test_another_attempt_has_other_ranks(agent, client):
    agent.start(world_size=2)
    told(agent, 1, 0.3, 0.0)
    agent.rank = 0
    agent.restarted().start(world_size=2)
    assert client.get(RANKS).json()["ranks"] == []


def test_what_is_sent_twice_counts_once(agent, client):
    agent.start(world_size=2)
    told(agent, 1, 0.3, 0.0)
    agent.send(agent.sent[-1])
    assert client.get(RANKS).json()["ranks"][0]["iterations"] == 100


def test_a_job_of_one_rank_has_no_panel_of_ranks(agent, client):
    agent.start()
    agent.train(3)
    assert 'id="ranks"' not in client.get("/jobs/char-gpt").text
    assert 'id="goodput"' in client.get("/jobs/char-gpt").text


def test_what_ranks_told_long_ago_goes_and_the_account_of_the_job_stays(agent, client, clock):
    clock.now = T + 1000
    agent.start(world_size=2)
    agent.train(100, seconds=1.0)
    told(agent, 1, 1.0, 0.0, at=T + 100)
    told(agent, 1, 1.0, 0.0, at=T + 1000)
    database = database_queries.of(client)

    def forget():
        database.write(lambda session: delete_old(session, "char-gpt", T + 900))

    forget()
    found = client.get(RANKS).json()["ranks"]
    assert {row["rank"]: row["iterations"] for row in found} == {0: 100, 1: 100}


@pytest.mark.parametrize("database_kind", ["sqlite"])
def test_a_thousand_ranks_are_compared_in_a_few_statements_with_an_index(empty_database):
    def row(rank, bucket):
        own = 0.5 if rank == 617 else 0.2 + 0.0001 * (rank % 7)
        return {
            "job": "big", "rank": rank, "bucket": bucket, "uid": "first", "lineage": 1, "first_iteration": 1,
            "last_iteration": 1000, "begins_at": T, "ends_at": T + 600, "iterations": 1000, "seconds": 510.0,
            "longest_seconds": 0.6, "stall_seconds": 0.0, "data_seconds": 0.0, "barrier_iterations": 1000,
            "barrier_seconds": 510.0 - own * 1000,
        }  # fmt: skip

    def ask(database):
        job = {"name": "big", "created_at": T, "last_contact_at": T, "uid": "first"}
        attempt = {"job": "big", "uid": "first", "attempt": 1, "started_at": T, "iteration": 0, "lineage": 1}
        buckets = range(int(T // 600) - 7, int(T // 600) + 1)
        work = [row(rank, bucket) for rank in range(1000) for bucket in buckets]
        database_queries.fill(
            database,
            {
                models.JobRecord: [job],
                models.AttemptRecord: [{**attempt, "last_iteration": 0, "world_size": 1000}],
                models.RankTotalsRecord: work,
            },
        )
        with database_queries.statements() as many:
            answer = ranks.rank_times(database, "big", "1h", now=T)
        assert (answer.reporting, answer.stragglers, answer.waited_for) == (1000, [617], 617)
        assert len(many) <= 4
        ((sql, values),) = [one for one in many if "FROM rank_totals" in one[0]]
        assert "SEARCH rank_totals USING INDEX" in database_queries.plan(database, (sql, values))

    database_queries.alone(empty_database, ask)
