"""Two lanes: what happened and what was measured are numbered apart, and give way apart."""

from __future__ import annotations

import array
import asyncio
import math
import sqlite3
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from holdfast.protocol.wire import Batch, Gap, Notice, Samples
from holdfast_server.ingest import batches, position
from holdfast_server.ingest.admission import AdmissionControl, Overloaded
from tests.support.postgres import ON_SQLITE

JOB = "/api/v1/jobs/char-gpt"


def measured(first, count, *, lineage=1, loss=2.0):
    """As agents send it: columns of bytes."""
    floats = lambda value: array.array("d", [value] * count).tobytes()  # noqa: E731
    return Samples(
        iteration=array.array("q", range(first, first + count)).tobytes(),
        lineage=array.array("q", [lineage] * count).tobytes(),
        at=array.array("d", [1_790_000_000.0 + first + row for row in range(count)]).tobytes(),
        seconds=floats(0.1), stall_seconds=floats(0.0), data_seconds=floats(0.0),
        metrics={"loss": floats(loss)},
    )  # fmt: skip


def send(agent, lane, sequence, *, samples=None, events=(), gaps=(), iteration=None, rank=0):
    agent.iteration = agent.iteration if iteration is None else iteration
    batch = Batch(job=agent.job, uid=agent.uid, attempt=agent.attempt, rank=rank, lane=lane, sequence=sequence,
                  sent_at=agent.at, iteration=agent.iteration, lineage=agent.lineage, samples=samples,
                  events=list(events), gaps=list(gaps))  # fmt: skip
    return agent.send(msgspec.msgpack.encode(batch))


def note(text):
    return Notice(at=1.0, iteration=1, lineage=1, level="info", code=text, message=text)


def counted(client, model):
    """Rows of a table, on either database."""
    from sqlalchemy import func, select

    def ask() -> Any:
        with client.app.state.services.database.read() as session:
            return session.scalar(select(func.count()).select_from(model))

    return ask()


def test_the_same_number_in_both_lanes_names_two_batches(agent, client):
    from holdfast_server import models

    agent.start()
    for _ in range(2):
        send(agent, "samples", 0, samples=measured(1, 10), iteration=10)
        send(agent, "control", 7, events=[note("kept")])
        send(agent, "samples", 7, samples=measured(11, 10), iteration=20)
    assert (counted(client, models.ChunkRecord), counted(client, models.NoticeRecord)) == (2, 1)
    assert client.get(JOB).json()["iteration"] == 20


def test_columns_of_bytes_and_lists_are_the_same_samples(agent, client):
    agent.start()
    send(agent, "samples", 0, samples=measured(1, 3, loss=math.inf), iteration=3)
    agent.train(2, loss=math.nan)
    (series,) = client.get(f"{JOB}/timeline").json()["series"]
    assert series["iteration"] == [1, 2, 3, 4, 5]
    assert series["metrics"]["loss"]["mean"] == ["inf"] * 3 + ["nan"] * 2


def test_a_lane_that_lags_does_not_take_a_job_back(agent, client):
    agent.start()
    send(agent, "control", 5, events=[note("x")], iteration=100)
    send(agent, "samples", 0, samples=measured(1, 50), iteration=50)
    assert client.get(JOB).json()["iteration"] == 100
    send(agent, "samples", 1, samples=measured(51, 60), iteration=110)
    assert client.get(JOB).json()["iteration"] == 110


def test_a_restore_takes_it_back_all_the_same(agent, client):
    agent.start()
    send(agent, "samples", 0, samples=measured(1, 50), iteration=50)
    agent.lineage = 2
    send(agent, "samples", 1, samples=measured(21, 5, lineage=2), iteration=25)
    summary = client.get(JOB).json()
    assert (summary["iteration"], summary["lineage"]) == (25, 2)


@ON_SQLITE
@pytest.mark.parametrize(
    ("columns", "word"),
    [
        ({"iteration": b"1234567"}, "not a multiple of 8"),
        ({"iteration": bytes(16), "at": bytes(8)}, "columns differ"),
        ({"iteration": bytes(16), "metrics": {"loss": bytes(24)}}, "columns differ"),
        ({"iteration": array.array("q", [-1]).tobytes()}, "iteration is outside 0 to"),
        ({"iteration": list(range(200)), "lineage": list(range(200))}, "200 lineages"),
    ],
)
def test_columns_that_cannot_be_are_refused_in_words(client, columns, word):
    body = {"job": "char-gpt", "uid": "u", "attempt": 1, "rank": 0, "lane": "samples", "sequence": 0,
            "sent_at": 1.0, "iteration": 0, "lineage": 1, "samples": columns}  # fmt: skip
    reply = client.post("/api/v1/ingest", content=msgspec.msgpack.encode(body),
                        headers={"Content-Type": "application/msgpack"})  # fmt: skip
    assert reply.status_code == 422
    assert word in reply.json()["message"]


def test_what_was_left_out_stands_for_what_the_batch_says(agent, client):
    agent.start()
    agent.lineage = 3
    send(agent, "samples", 0, samples=Samples(iteration=[1, 2]), iteration=2)
    (series,) = client.get(f"{JOB}/timeline").json()["series"]
    assert (series["lineage"], series["at"]) == (3, [agent.at, agent.at])
    assert series["seconds"]["mean"] == ["nan", "nan"]


def test_under_pressure_samples_give_way_and_events_do_not(agent, client):
    agent.start()
    services = client.app.state.services
    client.app.state.services = replace(services, admission=AdmissionControl(services.database, limit_bytes=1000))
    body = msgspec.msgpack.encode(
        Batch(job="char-gpt", uid="first", attempt=1, rank=0, lane="samples", sequence=0, sent_at=1.0,
              iteration=20, lineage=1, samples=measured(1, 20))
    )  # fmt: skip
    headers = {"Content-Type": "application/msgpack"}
    reply = client.post("/api/v1/ingest", content=body, headers=headers)
    assert (reply.status_code, reply.json()["error"], reply.headers["retry-after"]) == (
        429,
        "too_many_samples",
        "2",
    )
    send(agent, "control", 3, events=[note("kept")])
    big = msgspec.msgpack.encode(
        Batch(job="char-gpt", uid="first", attempt=1, rank=0, sequence=4, sent_at=1.0, iteration=20, lineage=1,
              events=[note("x" * 1000)])
    )  # fmt: skip
    reply = client.post("/api/v1/ingest", content=big, headers=headers)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    told = client.get("/metrics").text
    assert 'holdfast_ingest_batches_total{result="put_off"} 2.0' in told
    assert "holdfast_ingest_duration_seconds_count 2.0" in told, "of those that were committed, and of no other"


def test_bodies_that_arrive_at_once_are_held_up_to_a_limit():
    """Each may have eight megabytes, and nobody knows yet what is in them."""
    room = AdmissionControl(None, limit_bytes=100)  # type: ignore[arg-type]

    async def scenario():
        more = asyncio.Event()

        async def slowly():
            yield b"x" * 60
            await more.wait()
            yield b"x" * 30

        async def at_once(size):
            yield b"x" * size

        first = asyncio.create_task(room.read(slowly()))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await room.read(at_once(41))
        assert len(await room.read(at_once(40))) == 40
        more.set()
        assert len(await first) == 90
        assert len(await room.read(at_once(200))) == 200, "alone"

    asyncio.run(scenario())


def test_what_is_wrong_with_a_batch_is_told_in_a_sentence_however_long_that_is(client):
    body = msgspec.json.encode({"job": "x" * 1_000_000, "uid": "a", "attempt": 1, "rank": 0, "sequence": 0,
                                "sent_at": 1.0, "iteration": 0, "lineage": 0})  # fmt: skip
    reply = client.post("/api/v1/ingest", content=body, headers={"Content-Type": "application/json"})
    assert (reply.status_code, len(reply.content) < 1000) == (422, True)


def test_samples_may_take_most_of_the_room_and_leave_some_for_the_rest():
    class IdlePressure:
        pressure = 0.0

    room = AdmissionControl(IdlePressure(), limit_bytes=100)  # type: ignore[arg-type]
    with room.admitting("samples", 80):
        with pytest.raises(Overloaded):
            room.admitting("samples", 1).__enter__()
        with room.admitting("control", 20), pytest.raises(Overloaded):
            room.admitting("control", 1).__enter__()
    with room.admitting("samples", 80):
        pass
    IdlePressure.pressure = 0.8
    with room.admitting("control", 1), pytest.raises(Overloaded):
        room.admitting("samples", 1).__enter__()


def test_gaps_are_on_the_timeline_and_told(agent, client):
    agent.start()
    gap = Gap(lineage=1, first_iteration=5, last_iteration=40, dropped=18)
    send(agent, "samples", 0, samples=measured(1, 3), gaps=[gap], iteration=41)
    send(agent, "samples", 0, samples=measured(1, 3), gaps=[gap], iteration=41)
    timeline = client.get(f"{JOB}/timeline?from=1&to=41").json()
    assert timeline["gaps"] == [msgspec.to_builtins(gap)]
    assert client.get(f"{JOB}/timeline?from=41&to=50").json()["gaps"] == []
    messages = [notice["message"] for notice in client.get(f"{JOB}/notices").json()["notices"]]
    assert messages == ["the agent dropped 18 samples while it could not reach a server"]


def test_names_long_past_are_one_that_stands_for_all(agent, client, monkeypatch):
    from holdfast_server import models

    monkeypatch.setattr(position, "NAMES_KEPT", 10)
    agent.start()
    for sequence in range(45):
        send(agent, "samples", sequence, samples=measured(10 * sequence + 1, 10), iteration=10 * sequence + 10)
    assert counted(client, models.BatchRecord) < 30
    before = counted(client, models.ChunkRecord)
    for body in list(agent.sent):
        agent.send(body)
    assert counted(client, models.ChunkRecord) == before == 45
    assert client.get(f"{JOB}/notices").json()["notices"] == []


def test_a_metric_beyond_what_a_stretch_may_have_is_left_out_and_told(agent, client):
    agent.start()
    for sequence, first in enumerate((1, 2)):
        samples = measured(first, 1)
        samples.metrics = {f"m{sequence}-{number}": samples.at for number in range(80)}
        send(agent, "samples", sequence, samples=samples, iteration=first)
    (series,) = client.get(f"{JOB}/timeline").json()["series"]
    assert len(series["metrics"]) == 100
    assert [notice["code"] for notice in client.get(f"{JOB}/notices").json()["notices"]] == ["metrics_left_out"]


def test_a_batch_that_cannot_be_stored_leaves_nothing_and_is_stored_when_it_comes_again(
    agent, client, monkeypatch
):
    """The unit is rolled back: nothing of it stays, its name least of all."""
    from holdfast_server import models
    from holdfast_server.samples import sample_series

    agent.start()
    real = sample_series.roll_up

    def broken(*_: Any, **__: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(sample_series, "roll_up", broken)
    with pytest.raises(sqlite3.OperationalError):
        send(agent, "samples", 0, samples=measured(1, 10), iteration=10)
    assert (
        counted(client, models.ChunkRecord),
        counted(client, models.SampleSeriesRecord),
        counted(client, models.BatchRecord),
    ) == (
        0,
        0,
        1,
    )
    monkeypatch.setattr(sample_series, "roll_up", real)
    send(agent, "samples", 0, samples=measured(1, 10), iteration=10)
    assert counted(client, models.ChunkRecord) == 1


def test_every_kind_of_batch_is_decoded_alike():
    """Msgpack and JSON, lists and bytes: the same table."""
    samples = measured(1, 4, loss=math.nan)
    lists = Samples(iteration=[1, 2, 3, 4], lineage=[1] * 4, at=[1_790_000_001.0 + row for row in range(4)],
                    seconds=[0.1] * 4, stall_seconds=[0.0] * 4, data_seconds=[0.0] * 4,
                    metrics={"loss": [math.nan] * 4})  # fmt: skip
    whole = {
        "job": "j",
        "uid": "u",
        "attempt": 1,
        "rank": 0,
        "sequence": 0,
        "sent_at": 1.0,
        "iteration": 4,
        "lineage": 1,
    }
    bodies = [msgspec.msgpack.encode({**whole, "samples": each}) for each in (samples, lists)]
    tables = [batches.decode(body, "msgpack", now=1.0).samples for body in bodies]
    as_text = msgspec.to_builtins(lists) | {"metrics": {"loss": ["nan"] * 4}}
    tables.append(batches.decode(msgspec.json.encode({**whole, "samples": as_text}), "json", now=1.0).samples)
    tables.append(batches.decode(msgspec.json.encode({**whole, "samples": samples}), "json", now=1.0).samples)
    shown = {
        (lineage, table.iteration.tobytes(), table.metrics, table.values.tobytes())
        for taken in tables
        if taken is not None
        for lineage, table in taken.tables
    }
    assert len(shown) == 1
