"""Annotations of iterations: added, edited and deleted by people, and kept with their lineages."""

from __future__ import annotations

import json

import pytest

from holdfast.protocol.field_types import MAX_ANNOTATION
from holdfast.protocol.wire import AnnotationReport, LineageStarted
from holdfast_server.control import iteration_annotations, report_retention
from tests.support.postgres import ON_SQLITE

JOB = "/api/v1/jobs/char-gpt"
NOTES = f"{JOB}/annotations"


def annotate(client, text, **fields):
    return client.post(NOTES, json={"text": text, **fields})


def shown(client):
    rows = client.get(NOTES).json()["annotations"]
    return [(row["iteration"], row["lineage"], row["text"], row["abandoned"]) for row in rows]


def restore(agent, iteration, lineage):
    parent = f"{iteration:012d}-{agent.lineage}"
    agent.iteration, agent.lineage = iteration, lineage
    agent.say(LineageStarted(at=agent.at, lineage=lineage, iteration=iteration, parent=parent))


def mark(agent, message, iteration=None):
    at = agent.iteration if iteration is None else iteration
    where = {"at": agent.at + 60, "iteration": at, "lineage": agent.lineage}
    agent.say(AnnotationReport(**where, text=message))


def test_an_annotation_is_added_edited_and_deleted_with_its_author(job, client, clock):
    made = annotate(client, "  new data ", iteration=12).json()
    assert (made["iteration"], made["text"], made["who"]) == (12, "new data", "operator")
    clock.now += 60
    changed = client.patch(f"{NOTES}/{made['id']}", json={"text": "new data, shard 7"}).json()
    assert (changed["text"], changed["written_at"]) == ("new data, shard 7", clock())
    assert shown(client) == [(12, 1, "new data, shard 7", False)]
    assert client.delete(f"{NOTES}/{made['id']}").status_code == 204
    assert shown(client) == []
    assert client.delete(f"{NOTES}/{made['id']}").status_code == 404
    entries = client.get("/api/v1/audit", params={"action": "annotation"}).json()["entries"]
    assert [entry["action"] for entry in entries] == ["annotation.delete", "annotation.edit", "annotation.add"]
    assert json.loads(entries[0]["before"])["text"] == "new data, shard 7"


def test_without_an_iteration_the_newest_is_annotated(job, client):
    assert annotate(client, "here").json()["iteration"] == 30


def test_on_the_time_axis_an_annotation_is_where_its_iteration_ended(job, client):
    made = annotate(client, "here", iteration=15).json()
    timeline = client.get(f"{JOB}/timeline").json()
    (series,) = timeline["series"]
    assert made["at"] == pytest.approx(series["at"][14], abs=0.2)


@ON_SQLITE
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": " "}, "text"),
        ({"text": "x" * (MAX_ANNOTATION + 1)}, "text"),
        ({"text": "two\nlines"}, "text"),
        ({"text": "later", "iteration": 31}, "iteration"),
        ({"text": "earlier", "iteration": -1}, "iteration"),
    ],
)
def test_what_cannot_be_an_annotation_is_refused_with_its_field(job, client, fields, field):
    refused = client.post(NOTES, json=fields)
    assert (refused.status_code, refused.json()["field"]) == (422, field)
    assert shown(client) == []


def test_after_a_restore_to_before_it_an_annotation_belongs_to_the_abandoned_lineage(job, client):
    annotate(client, "before", iteration=15)
    annotate(client, "after", iteration=25)
    restore(job, 20, 2)
    assert shown(client) == [(25, 1, "after", True), (15, 1, "before", False)]
    job.train(10)
    annotate(client, "again", iteration=25)
    annotate(client, "of the first lineage", iteration=12)
    assert shown(client)[:2] == [(25, 2, "again", False), (25, 1, "after", True)]
    assert (12, 1, "of the first lineage", False) in shown(client)


def test_an_annotation_of_the_script_at_an_earlier_iteration_is_of_the_lineage_that_trained_it(job, client):
    restore(job, 20, 2)
    job.train(10)
    mark(job, "found late", iteration=12)
    assert shown(client) == [(12, 1, "found late", False)]
    (row,) = client.get(NOTES).json()["annotations"]
    assert (row["who"], row["at"] < row["written_at"]) == (None, True)


def test_people_change_only_the_annotations_of_people(job, client):
    mark(job, "epoch 1")
    (row,) = client.get(NOTES).json()["annotations"]
    for refused in (
        client.patch(f"{NOTES}/{row['id']}", json={"text": "x"}),
        client.delete(f"{NOTES}/{row['id']}"),
    ):
        assert refused.status_code == 409
    assert shown(client) == [(30, 1, "epoch 1", False)]


def test_the_number_of_annotations_is_limited(job, client, monkeypatch):
    monkeypatch.setattr(iteration_annotations, "MOST_BY_PEOPLE", 2)
    assert [annotate(client, "x").status_code for _ in range(3)] == [201, 201, 409]


def test_old_annotations_of_the_script_go_with_the_reports_and_those_of_people_stay(job, client, clock):
    mark(job, "epoch 1")
    annotate(client, "by a person")
    client.patch("/api/v1/projects/default/retention", json={"reports_seconds": 86400})
    report_retention.apply_all(client.app.state.services.database, clock() + 90 * 86400)
    assert [row[2] for row in shown(client)] == ["by a person"]
