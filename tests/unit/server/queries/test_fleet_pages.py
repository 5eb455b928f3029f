"""A fleet of ten thousand jobs, a page at a time."""

from __future__ import annotations

import re

import msgspec
import pytest

from holdfast_server import models
from holdfast_server.queries.fleet import FleetQuery, fleet
from holdfast_server.samples.limits import RecentSamples
from tests.support import database_queries
from tests.support.postgres import ON_SQLITE

JOBS = "/api/v1/jobs"
NOW = 1_790_000_000.0
STATUSES = {"running": 7, "finished": 1, "failed": 1, "silent": 1}
"""Of ten jobs each."""
_RECENT = msgspec.msgpack.encode(RecentSamples(seconds=[0.25] * 200, loss=[2.5] * 200, metrics={"loss": 2.5}))


def read_fleet(database, question):
    with database.read() as session:
        return fleet(session, question, now=NOW)


def grow(client, jobs):
    database_queries.fill(database_queries.of(client), rows_of(jobs))


def rows_of(jobs, *, beside=0):
    """Jobs that have trained a while, each with checkpoints, a restart and stalls; one in four is of team b."""
    kinds = [status for status, share in STATUSES.items() for _ in range(share)]
    rows = {
        table: []
        for table in (
            models.ProjectRecord,
            models.JobRecord,
            models.AttemptRecord,
            models.LineageRecord,
            models.CheckpointRecord,
        )
    }
    rows |= {models.StallRecord: []}
    if beside:
        del rows[models.ProjectRecord]
    else:
        rows[models.ProjectRecord].append({"name": "team-b", "created_at": 0.0})
    for number in range(beside, beside + jobs):
        name, kind = f"job-{number:05d}", kinds[number % 10]
        heard = NOW - (3600 if kind == "silent" else 1) - number / jobs
        rows[models.JobRecord].append(
            {
                "name": name, "project": "team-b" if number % 4 == 0 else "default", "created_at": 0.0,
                "last_contact_at": heard, "uid": f"{name}-2", "attempt": 2, "iteration": 900, "lineage": 1,
                "latest_lineage": 1, "recent": _RECENT, "longest_seconds": 0.25,
            }
        )  # fmt: skip
        for attempt in (1, 2):
            finished = "ValueError" if kind == "failed" else kind if kind == "finished" else None
            rows[models.AttemptRecord].append(
                {
                    "job": name, "uid": f"{name}-{attempt}", "attempt": attempt, "started_at": NOW - 5000,
                    "iteration": 0, "lineage": 1, "last_iteration": 900, "iterations": 450, "world_size": 8,
                    "finished": finished if attempt == 2 else None,
                }
            )  # fmt: skip
        rows[models.LineageRecord].append(
            {"job": name, "lineage": 1, "at": 0.0, "iteration": 0, "last_iteration": 900}
        )
        rows[models.CheckpointRecord] += [
            {
                "job": name, "id": f"{iteration:012d}-1", "iteration": iteration, "lineage": 1, "at": NOW - 900,
                "kind": "scheduled", "state": "durable", "attempt": 2, "sequence": 1,
            }
            for iteration in range(300, 900, 100)
        ]  # fmt: skip
        rows[models.StallRecord].append(
            {"job": name, "at": NOW, "iteration": 880, "lineage": 1, "kind": "data_fetch", "seconds": 0.5}
        )
    return rows


def ask(client, **query):
    answer = client.get(JOBS, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def names(answer):
    return [job["job"] for job in answer["jobs"]]


def test_a_page_has_its_rows_and_tells_how_many_there_are(client):
    grow(client, 60)
    answer = ask(client, sort="name", page=2, size=25)
    assert names(answer) == [f"job-{number:05d}" for number in range(25, 50)]
    assert [answer[name] for name in ("page", "pages", "size", "total")] == [2, 3, 25, 60]
    assert answer["counts"] == {"running": 42, "finished": 6, "failed": 6, "silent": 6}
    assert answer["projects"] == ["default", "team-b"]


def test_of_pages_that_there_are_not_the_last_is_shown(client):
    grow(client, 30)
    answer = ask(client, sort="name", page=99, size=20)
    assert (answer["page"], len(answer["jobs"])) == (2, 10)
    assert ask(client, search="none of that name")["pages"] == 1


def test_jobs_are_found_by_status_project_and_name(client):
    grow(client, 60)
    failed = ask(client, status="failed", sort="name")
    assert names(failed) == [f"job-000{tens}8" for tens in range(6)]
    assert {job["status"] for job in failed["jobs"]} == {"failed"}
    assert (failed["total"], failed["counts"]["running"]) == (6, 42)
    of_b = ask(client, project="team-b")
    assert of_b["total"] == sum(of_b["counts"].values()) == 15
    assert {job["project"] for job in of_b["jobs"]} == {"team-b"}
    assert names(ask(client, search="JOB-00012", status="running")) == ["job-00012"]


def test_living_jobs_come_first_by_name_and_then_those_heard_last(client):
    grow(client, 20)
    found = ask(client, sort="living")["jobs"]
    statuses = [job["status"] for job in found]
    assert statuses == sorted(statuses, key=lambda status: status != "running")
    living, others = names({"jobs": found[:14]}), found[14:]
    assert living == sorted(living)
    ages = [job["last_contact_seconds"] for job in others]
    assert ages == sorted(ages)
    paged = [name for page in range(1, 6) for name in names(ask(client, sort="living", size=4, page=page))]
    assert paged == names({"jobs": found})
    ended = names(ask(client, sort="living", status=others[0]["status"]))
    assert ended == [job["job"] for job in others if job["status"] == others[0]["status"]]


@pytest.mark.parametrize("order", ["unsaved", "durable"])
def test_the_worst_of_many_jobs_are_found_without_naming_each(empty_database, order):
    def ask(database):
        database_queries.fill(database, rows_of(200))
        with database_queries.statements() as noted:
            answer = read_fleet(database, FleetQuery(order=order, status="running", search="job", size=10))
        assert [job.last_durable.iteration for job in answer.jobs] == [800] * 10
        assert max(len(values) for _, values in noted if values) < 150

    database_queries.alone(empty_database, ask)


def test_no_job_is_on_two_pages_or_on_none(client):
    grow(client, 60)
    for order in ("living", "name", "heard", "iteration", "status"):
        seen = [name for page in (1, 2, 3) for name in names(ask(client, sort=order, page=page, size=25))]
        assert len(seen) == len(set(seen)) == 60, order


@ON_SQLITE
@pytest.mark.parametrize("query", ["sort=color", "status=asleep", "page=0", "size=0", "size=501"])
def test_what_cannot_be_asked_is_refused(client, query):
    assert client.get(f"{JOBS}?{query}").status_code == 422


def test_unsaved_work_is_told_in_gpu_hours_too(client):
    grow(client, 1)
    (job,) = ask(client)["jobs"]
    assert (job["world_size"], job["unsaved_iterations"], job["unsaved_seconds"]) == (8, 100, 25.0)
    assert job["unsaved_gpu_hours"] == pytest.approx(25 * 8 / 3600)


def test_whoever_may_see_one_project_sees_and_counts_no_other(client):
    grow(client, 40)

    def seen():
        question = FleetQuery(visible_projects={"team-b"}, size=100)
        return read_fleet(database_queries.of(client), question)

    answer = seen()
    assert {job.project for job in answer.jobs} == {"team-b"}
    assert (answer.total, sum(answer.counts.values()), answer.projects) == (10, 10, ["team-b"])


@pytest.mark.parametrize("database_kind", ["sqlite"])
def test_ten_thousand_jobs_take_no_more_statements_than_ten_and_none_goes_without_an_index(empty_database):
    def ask(database):
        database_queries.fill(database, rows_of(10))
        with database_queries.statements() as few:
            read_fleet(database, FleetQuery(size=10))
        database_queries.fill(database, rows_of(9_990, beside=10))
        for order in ("living", "heard", "name"):
            with database_queries.statements() as many:
                answer = read_fleet(database, FleetQuery(order=order, page=3, search="job"))
            assert (answer.total, len(answer.jobs)) == (10_000, 50)
            assert len(many) <= len(few) <= 18
            for sql, values in many:
                if sql.startswith(("SELECT", "WITH")):
                    found = database_queries.plan(database, (sql, values))
                    # To count, to sort and to search for part of a name, all jobs are gone through once.
                    assert "SCAN jobs" not in found or "count(" in sql or "LIMIT" in sql, found
                    assert not re.search(r"SCAN (attempts|lineages|checkpoints|stalls|orders|order_tr)", found), (
                        found
                    )

    database_queries.alone(empty_database, ask)


@pytest.mark.parametrize("database_kind", ["sqlite"])
def test_of_those_that_have_ended_the_last_heard_of_are_found_without_sorting_all(empty_database):
    def ask(database):
        database_queries.fill(database, rows_of(200))
        with database_queries.statements() as noted:
            read_fleet(database, FleetQuery(page=4))
        (others,) = [(sql, values) for sql, values in noted if "last_contact_at DESC" in sql]
        found = database_queries.plan(database, others)
        assert "ix_jobs_last_contact_at" in found
        assert "TEMP B-TREE FOR ORDER BY" not in found

    database_queries.alone(empty_database, ask)


@pytest.mark.parametrize("database_kind", ["sqlite"])
@pytest.mark.parametrize("order", ["unsaved", "overhead", "durable"])
def test_what_is_worst_takes_as_many_statements_whatever_the_number_and_one_look_at_each_job(
    empty_database, order
):
    def ask(database):
        database_queries.fill(database, rows_of(10))
        with database_queries.statements() as few:
            read_fleet(database, FleetQuery(order=order, size=10))
        database_queries.fill(database, rows_of(990, beside=10))
        with database_queries.statements() as many:
            answer = read_fleet(database, FleetQuery(order=order, page=3))
        assert (answer.total, len(answer.jobs)) == (1000, 50)
        assert len(many) == len(few) <= 18
        for one in many:
            if one[0].startswith(("SELECT", "WITH")):
                found = database_queries.plan(database, one)
                assert not re.search(r"SCAN (attempts|lineages|checkpoints|stalls|orders|order_tr)", found), found

    database_queries.alone(empty_database, ask)
