"""Numbers and times that a job cannot have are refused or corrected, and an admin mends what got through."""

from __future__ import annotations

import re

import msgspec
import pytest
from sqlalchemy import select

from holdfast.protocol.field_types import MAX_ATTEMPT, MAX_LINEAGE
from holdfast.protocol.wire import PLAUSIBLE_STEP, AttemptStarted, Batch, Checkpoint, Gap, LineageStarted, Samples
from holdfast_server import models
from holdfast_server.samples.limits import MAX_AHEAD_SECONDS

JOB = "/api/v1/jobs/char-gpt"
T = 1_790_000_000.0


def post(client, **fields):
    batch = {"job": "char-gpt", "uid": "evil", "attempt": 1, "rank": 0, "sequence": 0, "sent_at": T,
             "iteration": 0, "lineage": 1, **fields}  # fmt: skip
    return client.post(
        "/api/v1/ingest",
        content=msgspec.msgpack.encode(Batch(**batch)),
        headers={"Content-Type": "application/msgpack"},
    )


def began(lineage, at=T):
    return LineageStarted(at=at, lineage=lineage, iteration=0)


def desired(client):
    return client.get(f"{JOB}/desired").json()


@pytest.fixture
def running(agent):
    """A job whose fifth attempt trains on its third lineage."""
    agent.attempt, agent.lineage = 5, 3
    agent.start()
    agent.train(10)
    return agent


# ---- bounds ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"lineage": MAX_LINEAGE + 1}, "lineage"),
        ({"attempt": MAX_ATTEMPT + 1}, "attempt"),
        ({"attempt": 2**53}, "attempt"),
        ({"iteration": 2**53 + 1}, "iteration"),
        ({"samples": Samples(iteration=[1], lineage=[MAX_LINEAGE + 1])}, "lineage"),
        ({"samples": Samples(iteration=[2**53 + 1])}, "iteration"),
        ({"gaps": [Gap(lineage=MAX_LINEAGE + 1, first_iteration=1, last_iteration=2, dropped=1)]}, "lineage"),
    ],
)
def test_a_number_out_of_bounds_is_refused_by_the_name_of_its_field(client, fields, name):
    reply = post(client, **fields)
    assert (reply.status_code, reply.json()["error"]) == (422, "invalid_batch")
    assert re.search(rf"\b{name}\b", reply.json()["message"])
    assert client.get(JOB).status_code == 404


def test_an_event_with_a_lineage_out_of_bounds_is_left_out(client, running):
    running.say(began(MAX_LINEAGE + 1))
    assert desired(client)["latest_lineage"] == 3


def test_an_unknown_job_may_be_at_any_attempt_and_lineage(client):
    """The server's database may have been lost."""
    assert post(client, attempt=5000, lineage=70_000, events=[began(70_000)]).status_code == 200
    assert (desired(client)["latest_attempt"], desired(client)["latest_lineage"]) == (5000, 70_000)


# ---- far beyond what is known ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"attempt": 5 + PLAUSIBLE_STEP + 1}, "attempt"),
        ({"attempt": MAX_ATTEMPT}, "attempt"),
        ({"attempt": 6, "lineage": MAX_LINEAGE}, "lineage"),
        ({"attempt": 6, "events": [began(MAX_LINEAGE)]}, "lineage"),
        ({"attempt": 6, "samples": Samples(iteration=[1], lineage=[3 + PLAUSIBLE_STEP + 1])}, "lineage"),
        ({"attempt": 6, "gaps": [Gap(lineage=5000, first_iteration=1, last_iteration=2, dropped=1)]}, "lineage"),
        (
            {"attempt": 6, "events": [Checkpoint(at=T, id=f"000000000001-{MAX_LINEAGE}", iteration=1,
                                                 lineage=MAX_LINEAGE, kind="scheduled", state="durable")]},
            "lineage",
        ),
    ],
)  # fmt: skip
def test_a_number_far_beyond_the_known_ones_of_a_job_changes_nothing(client, running, fields, name):
    before = client.get(JOB).json()
    for _ in range(3):
        reply = post(client, **fields)
        assert (reply.status_code, reply.json()["error"]) == (422, "implausible_numbers")
        assert name in reply.json()["message"]
        assert "holdfast reset-numbers char-gpt" in reply.json()["message"]
    assert client.get(JOB).json() == before
    assert [row["code"] for row in client.get(f"{JOB}/notices").json()["notices"]] == ["implausible_numbers"]
    running.train(5)  # it is fenced by nothing
    assert client.get(JOB).json()["iteration"] == 15


def test_a_number_a_plausible_step_beyond_is_taken(client, running):
    numbers = {"attempt": 5 + PLAUSIBLE_STEP, "lineage": 3 + PLAUSIBLE_STEP}
    assert post(client, **numbers).status_code == 200


def test_a_later_batch_of_the_running_attempt_is_held_to_the_same(client, running):
    jump = Samples(iteration=[11], lineage=[MAX_LINEAGE])
    assert post(client, uid=running.uid, attempt=5, lineage=3, sequence=9, samples=jump).status_code == 422
    assert desired(client)["latest_lineage"] == 3


def test_a_job_that_went_on_without_this_server_is_taken_again(client, clock, running):
    """As with a database that was put back from an old copy: the job has had a number a second at most."""
    clock.now += 10_000
    assert post(client, uid="later", attempt=5 + 11_001, sent_at=clock.now).status_code == 422
    assert post(client, uid="later", attempt=5 + 11_000, lineage=3 + 11_000, sent_at=clock.now).status_code == 200
    assert desired(client)["latest_attempt"] == 11_005


def test_a_name_that_was_reported_with_the_largest_numbers_does_not_keep_its_job_out(client, clock, fresh_agent):
    """A real job begins at 1, whatever somebody made of its name before."""
    assert post(client, attempt=MAX_ATTEMPT, lineage=MAX_LINEAGE, events=[began(MAX_LINEAGE)]).status_code == 200
    clock.now += 60
    real = fresh_agent(client, at=clock.now)
    real.start()
    real.train(4)
    told = client.get(JOB).json()
    assert (told["attempt"], told["iteration"], told["status"]) == (1, 4, "running")


# ---- an admin sets them right ----------------------------------------------------------------


def test_an_admin_sets_the_numbers_of_a_job_right(client, clock, running):
    forged = {"attempt": 5 + PLAUSIBLE_STEP, "lineage": 3 + PLAUSIBLE_STEP, "iteration": 10**6}
    assert post(client, **forged, sent_at=T + 60, events=[began(3 + PLAUSIBLE_STEP)]).status_code == 200
    clock.now += 120
    running.at += 120
    reset = client.patch(f"{JOB}/numbers", json={"latest_attempt": 5, "latest_lineage": 3})
    assert (reset.status_code, reset.json()) == (200, {"latest_attempt": 5, "latest_lineage": 3})
    running.train(5)  # neither fenced nor behind
    told = client.get(JOB).json()
    assert (told["attempt"], told["lineage"], told["iteration"]) == (5, 3, 15)
    assert (desired(client)["latest_attempt"], desired(client)["latest_lineage"]) == (5, 3)
    (entry,) = client.get("/api/v1/audit", params={"action": "job"}).json()["entries"]
    assert (entry["action"], entry["job"]) == ("job.numbers", "char-gpt")
    assert msgspec.json.decode(entry["before"]) == {"latest_attempt": 1005, "latest_lineage": 1003}
    assert msgspec.json.decode(entry["after"]) == {"latest_attempt": 5, "latest_lineage": 3}


def test_an_admin_lets_a_job_in_whose_numbers_are_far_beyond(client, running):
    assert post(client, uid="copy", attempt=90_000, lineage=80_000).status_code == 422
    client.patch(f"{JOB}/numbers", json={"latest_attempt": 90_000, "latest_lineage": 80_000}).raise_for_status()
    assert post(client, uid="copy", attempt=90_000, lineage=80_000).status_code == 200


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, ""),
        ({"latest_attempt": -1}, "latest_attempt"),
        ({"latest_attempt": MAX_ATTEMPT + 1}, "latest_attempt"),
        ({"latest_lineage": MAX_LINEAGE + 1}, "latest_lineage"),
        ({"attempt": 1}, "body"),
    ],
)
def test_numbers_that_no_job_can_have_are_not_set(client, running, changes, field):
    reply = client.patch(f"{JOB}/numbers", json=changes)
    assert (reply.status_code, reply.json()["field"]) == (422, field)
    assert desired(client)["latest_attempt"] == 5


# ---- times beyond the server's clock ---------------------------------------------------------


def times(client):
    """Every time that is stored of jobs, by table and column."""

    def read():
        found = {}
        with client.app.state.services.database.read() as session:
            for table in models.Base.metadata.sorted_tables:
                for column in table.columns:
                    if "job" in table.c and (column.name == "at" or column.name.endswith("_at")):
                        for (value,) in session.execute(select(column).where(column.is_not(None))):
                            found.setdefault(f"{table.name}.{column.name}", []).append(value)
        return found

    return read()


def test_a_clock_that_is_ahead_dates_nothing_into_the_future(client, clock):
    ahead = 4e9
    events = [
        AttemptStarted(at=ahead - 20, iteration=0, lineage=1),
        began(1, at=ahead - 20),
        Checkpoint(at=ahead - 5, id="000000000002-1", iteration=2, lineage=1, kind="scheduled", state="durable",
                   snapshot_started_at=ahead - 9, persist_started_at=2 * ahead),
    ]  # fmt: skip
    samples = Samples(iteration=[1, 2, 3], at=[ahead - 10, ahead - 5, 2 * ahead], seconds=[1.0] * 3)
    assert post(client, sent_at=ahead, events=events, samples=samples).status_code == 200
    found = times(client)
    assert {
        "attempts.started_at",
        "lineages.at",
        "checkpoints.at",
        "chunks.last_at",
        "rank_totals.ends_at",
    } <= found.keys()
    assert max(max(values) for values in found.values()) <= clock.now + MAX_AHEAD_SECONDS
    assert client.get(JOB).json()["started_at"] == T - 20  # as long before the report as it said
    (series,) = client.get(f"{JOB}/timeline").json()["series"]
    assert series["at"] == [T - 10, T - 5, T]


def test_an_attempt_from_a_clock_that_is_ahead_gives_way_to_the_next(client, clock, fresh_agent):
    assert post(client, sent_at=4e9, attempt=1).status_code == 200
    clock.now += 60
    real = fresh_agent(client, uid="real", attempt=1, at=clock.now)
    real.start()
    real.train(3)
    assert (client.get(JOB).json()["attempt"], client.get(JOB).json()["iteration"]) == (1, 3)


def test_a_clock_that_is_a_little_ahead_is_left_alone(client, agent):
    agent.at += MAX_AHEAD_SECONDS
    agent.start()
    assert client.get(JOB).json()["started_at"] == T + MAX_AHEAD_SECONDS
