"""Long windows are read from roll-ups, and show what the samples would; so do merged and thinned ones."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from sqlalchemy import func, select

from holdfast.protocol.analyses import ReportRetentionChanges
from holdfast.protocol.wire import Samples
from holdfast_server import models
from holdfast_server.control import report_retention
from holdfast_server.db.background_jobs import BackgroundJob, run_once
from holdfast_server.samples import compaction, read_plan

JOB = "/api/v1/jobs/char-gpt"
DAY = 86_400.0


def train(agent, count, rng, batch=700):
    """Iterations of an attempt, some with odd losses."""
    done = 0
    while done < count:
        rows = min(batch, count - done)
        first = agent.iteration + 1
        agent.iteration += rows
        done += rows
        numbers = range(first, first + rows)
        losses = [rng.choice([math.nan, math.inf, -math.inf]) if rng.random() < 0.001 else rng.gauss(2, 1)
                  for _ in numbers]  # fmt: skip
        agent.say(
            samples=Samples(
                iteration=list(numbers), lineage=[agent.lineage] * rows, at=[agent.at + n for n in numbers],
                seconds=[0.5 + n % 7 / 10 for n in numbers], stall_seconds=[0.25] * rows,
                data_seconds=[0.125] * rows,
                metrics={"loss": losses, "now and then": [float(n) if n % 50 == 0 else math.nan for n in numbers]},
            )
        )  # fmt: skip


@pytest.fixture
def clock(clock):
    """At the end of the long runs that are reported here."""
    clock.now += 100_000
    return clock


@pytest.fixture
def crashed(agent, client):
    """A job that was killed twice: what it repeated counts as it was repeated, and the rest is lost for now."""
    rng = random.Random(5)
    agent.start()
    train(agent, 9000, rng)
    second = agent.restarted()
    second.iteration = 6100
    second.start()
    train(second, 2500, rng)
    third = second.restarted("third")
    third.iteration = 7000
    third.start()
    train(third, 900, rng)
    return third


def series_of(client, query):
    return client.get(f"{JOB}/timeline?{query}").json()["series"]


def alike(one, other):
    """The same but for the order in which sums were rounded."""
    assert len(one) == len(other) > 0
    for left, right in zip(one, other, strict=True):
        for name in ("lineage", "abandoned", "lost", "iteration", "at"):
            assert left[name] == right[name]
        for name in ("stall_seconds", "data_seconds"):
            assert left[name] == pytest.approx(right[name])
        bands = [(left["seconds"], right["seconds"])]
        bands += [(left["metrics"][name], right["metrics"][name]) for name in right["metrics"]]
        for mine, theirs in bands:
            for kind, values in theirs.items():
                assert [value for value in mine[kind] if isinstance(value, str)] == [
                    value for value in values if isinstance(value, str)
                ]
                numbers = [np.nan if isinstance(value, str) else value for value in mine[kind]]
                wanted = [np.nan if isinstance(value, str) else value for value in values]
                assert numbers == pytest.approx(wanted, nan_ok=True)


QUERIES = ["points=120", "points=20", "points=3", "from=100&to=8765&points=40", "from=6050&to=7950&points=25"]


@pytest.mark.parametrize("query", QUERIES)
def test_rollups_show_what_the_samples_would(crashed, client, monkeypatch, query):
    monkeypatch.setattr(read_plan, "MOST_WHOLE_ROWS", 10**9)
    monkeypatch.setattr(read_plan, "LEVELS", ())
    whole = series_of(client, query)
    monkeypatch.undo()
    alike(series_of(client, query), whole)
    points = int(query.rpartition("points=")[2])
    assert max(len(one["iteration"]) for one in whole) <= points


def test_what_an_attempt_has_reported_counts_from_its_first_to_its_last(crashed, client):
    standing, lost = series_of(client, "points=2000&from=6900&to=8700")
    assert (standing["iteration"][-1], lost["iteration"][0], lost["lost"]) == (7900, 7901, True)
    assert lost["iteration"][-1] == 8700


def run(client, work, now=0.0):
    chore = BackgroundJob("test", 1.0, work)
    assert client.portal.call(run_once, chore, client.app.state.services.database, lambda: now)


def scalar(client, query):
    def ask() -> Any:
        with client.app.state.services.database.read() as session:
            return session.scalar(query)

    return ask()


def chunks(client):
    return scalar(client, select(func.count()).select_from(models.ChunkRecord))


def test_merged_chunks_are_read_as_the_small_ones_were(agent, client):
    agent.start()
    train(agent, 9900, random.Random(1), batch=90)
    before = [series_of(client, query) for query in ("points=2000&from=5&to=1500", "points=90")]
    run(client, compaction.compact, now=agent.at + 9900 + 2 * compaction.SETTLED_SECONDS)
    assert chunks(client) == 3
    assert [series_of(client, query) for query in ("points=2000&from=5&to=1500", "points=90")] == before
    assert scalar(client, select(models.SampleSeriesRecord.chunks)) == 3
    assert scalar(client, select(models.SampleSeriesRecord.chunk_bytes)) == scalar(
        client, select(func.sum(func.length(models.ChunkRecord.columns)))
    )


def test_what_has_just_come_is_not_merged_yet(agent, client):
    agent.start()
    train(agent, 3000, random.Random(1), batch=90)
    before = chunks(client)
    run(client, compaction.compact, now=agent.at + compaction.SETTLED_SECONDS)
    assert chunks(client) == before


def keep(client, **limits):
    reply = client.patch("/api/v1/projects/default/retention", json=limits)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_old_samples_are_thinned_into_rollups(agent, client):
    agent.start()
    train(agent, 20_000, random.Random(2))
    before, near = series_of(client, "points=100"), series_of(client, "from=15000&to=15400&points=500")
    keep(client, samples_seconds=10_000.0)
    run(client, report_retention.apply_all, now=agent.at + 20_000)
    first = scalar(client, select(models.SampleSeriesRecord.chunks_from))
    assert 9000 < first <= 10_000
    assert scalar(client, select(func.min(models.ChunkRecord.last_iteration))) >= first
    alike(series_of(client, "points=100"), before)
    assert series_of(client, "from=15000&to=15400&points=500") == near
    (thinned,) = series_of(client, "from=1000&to=1640&points=500")
    assert len(thinned["iteration"]) == 10
    (both,) = series_of(client, f"from={first - 640}&to={first + 600}&points=2000")
    assert both["iteration"] == sorted(set(both["iteration"]))
    assert len(both["iteration"]) > 600


def test_old_rollups_are_thinned_into_coarser_ones(agent, client):
    agent.start()
    train(agent, 20_000, random.Random(2))
    before = series_of(client, "points=12")
    keep(client, samples_seconds=8_000.0, fine_seconds=14_000.0)
    run(client, report_retention.apply_all, now=agent.at + 20_000)
    assert scalar(client, select(models.SampleSeriesRecord.finest_from)) == 23 * 256
    assert (
        scalar(client, select(func.min(models.RollupRecord.bucket)).where(models.RollupRecord.level == 6))
        == 23 * 4
    )
    alike(series_of(client, "points=12"), before)
    (coarse,) = series_of(client, "from=1&to=4095&points=500")
    assert len(coarse["iteration"]) == 16
    run(client, report_retention.apply_all, now=agent.at + 20_000)
    alike(series_of(client, "points=12"), before)


def test_where_nothing_is_to_go_nothing_is_written(crashed, client, monkeypatch):
    """Each write keeps reports waiting, and a project has thousands of stretches."""
    database, written = client.app.state.services.database, []
    write = database.write

    def counted(work, **about):
        written.append(work)
        return write(work, **about)

    monkeypatch.setattr(database, "write", counted)
    keep(client, samples_seconds=8_000.0, fine_seconds=14_000.0)
    written.clear()
    run(client, report_retention.apply_all, now=crashed.at)
    assert written == []
    run(client, report_retention.apply_all, now=crashed.at + 30_000)
    assert written
    written.clear()
    run(client, report_retention.apply_all, now=crashed.at + 30_000)
    assert written == []


def test_what_ended_first_goes_first_when_there_is_too_much(crashed, client, monkeypatch):
    monkeypatch.setattr(report_retention, "LEAST_BYTES", 1)
    train(crashed, 20_000, random.Random(3), batch=1000)
    limit = keep(client)["stored_bytes"] // 2
    keep(client, samples_bytes=limit)
    run(client, report_retention.apply_all)
    assert limit // 2 < keep(client)["stored_bytes"] <= limit
    chunks = select(models.SampleSeriesRecord.chunks)
    by_uid = {
        uid: scalar(client, chunks.where(models.SampleSeriesRecord.uid == uid))
        for uid in ("first", "second", "third")
    }
    assert by_uid["first"] == by_uid["second"] == 0 < by_uid["third"]


def test_old_reports_go_and_new_ones_stay(agent, client):
    from holdfast.protocol.wire import Notice, Stall

    agent.start()
    for at in (0.0, 100 * DAY):
        agent.say(
            Stall(at=at, iteration=1, lineage=1, kind="restore", seconds=1.0),
            Notice(at=at, iteration=1, lineage=1, level="info", code="x", message="y"),
        )
    keep(client, reports_seconds=50 * DAY)
    run(client, report_retention.apply_all, now=110 * DAY)
    for table in (models.StallRecord, models.NoticeRecord):
        assert scalar(client, select(func.count()).select_from(table)) == 1
        assert scalar(client, select(func.min(table.at))) == 100 * DAY


def test_old_alerts_go_with_what_was_told_of_them_and_those_that_hold_stay(agent, client):
    agent.start()
    common = {"project": "default", "job": agent.job, "rule": "silent", "kind": "silent", "severity": "info",
              "message": "", "since": 0.0, "fired_at": 0.0}  # fmt: skip
    told = {"channel": "c", "event": "firing", "payload": b"", "created_at": 0.0, "next_at": 0.0}

    def add(session):
        session.add(models.AlertChannelRecord(
            id="c", project="default", name="c", kind="webhook", target="https://a.org/", secret="",
            least_severity="info", created_at=0.0, created_by="",
        ))  # fmt: skip
        session.add_all([
            models.AlertRecord(id=1, **common, resolved_at=0.0),
            models.AlertRecord(id=2, **common),
            models.AlertRecord(id=3, **common, resolved_at=0.0, silenced_until=200 * DAY),
            models.AlertRecord(id=4, **common, resolved_at=100 * DAY),
            models.AlertRecord(id=5, **common, resolved_at=0.0),
        ])  # fmt: skip
        session.flush()
        session.add_all([
            models.AlertDeliveryRecord(id=1, **told, alert=1, state="delivered", ended_at=1.0),
            models.AlertDeliveryRecord(id=2, **told, alert=None, state="failed", ended_at=1.0),
            models.AlertDeliveryRecord(id=3, **told, alert=5, state="waiting"),
            models.AlertDeliveryRecord(id=4, **told, alert=4, state="delivered", ended_at=100 * DAY),
        ])  # fmt: skip

    client.app.state.services.database.write(add)
    keep(client, reports_seconds=50 * DAY)
    run(client, report_retention.apply_all, now=110 * DAY)
    assert ids(client, models.AlertRecord) == [2, 3, 4, 5]
    assert ids(client, models.AlertDeliveryRecord) == [3, 4]


def ids(client, rows):
    def look():
        with client.app.state.services.database.read() as session:
            return sorted(session.scalars(select(rows.id)))

    return look()


def test_without_limits_all_is_kept(crashed, client):
    before = chunks(client)
    run(client, report_retention.apply_all, now=1e12)
    assert chunks(client) == before


def test_limits_are_told_and_taken_back(client):
    assert keep(client, samples_seconds=90 * DAY)["samples_seconds"] == 90 * DAY
    assert keep(client, reports_seconds=DAY)["samples_seconds"] == 90 * DAY
    assert keep(client, samples_seconds=None)["samples_seconds"] is None
    actions = client.get("/api/v1/audit").json()["entries"]
    assert [entry["action"] for entry in actions].count("retention.edit") == 3


@pytest.mark.parametrize(
    "limits", [{"samples_seconds": 5.0}, {"samples_bytes": 1}, {"samples_seconds": "x"}, {"y": 1}]
)
def test_limits_that_cannot_be_are_refused(client, limits):
    assert client.patch("/api/v1/projects/default/retention", json=limits).status_code == 422


def test_a_project_that_is_not_there_keeps_nothing(client):
    assert client.get("/api/v1/projects/nowhere/retention").status_code == 404
    assert client.patch("/api/v1/projects/nowhere/retention", json={}).status_code == 404


def test_changes_are_what_was_given_and_no_more():
    assert msgspec.to_builtins(ReportRetentionChanges(samples_seconds=None)) == {"samples_seconds": None}
