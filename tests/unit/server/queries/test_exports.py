"""A window of a job as files: what a spreadsheet, pandas and Perfetto are given."""

from __future__ import annotations

import csv
import io
import json
import sys

import pytest

from holdfast.protocol.wire import LineageStarted, Samples, Stall
from holdfast_server.app import COMPRESSED_BYTES
from holdfast_server.models import SampleSeriesRecord
from holdfast_server.queries import exports, traces
from tests.support.postgres import ON_BOTH
from tests.support.server_fixtures import sqlite_unless_marked as sqlite_unless_marked

JOB = "/api/v1/jobs/char-gpt"
EXPORT = f"{JOB}/export"
FAR = 10**11


@pytest.fixture
def job(agent):
    agent.start()
    agent.train(20)
    agent.checkpoint(10)
    return agent


def rows(answer):
    assert answer.status_code == 200, answer.text
    return list(csv.DictReader(io.StringIO(answer.text)))


def test_every_iteration_of_a_window_is_a_row(job, client):
    found = rows(client.get(f"{EXPORT}/samples.csv?from=5&to=8"))
    assert [row["iteration"] for row in found] == ["5", "6", "7", "8"]
    assert {(row["iterations"], row["seconds"], row["loss"], row["loss_min"]) for row in found} == {
        ("1", "0.1", "2.5", "2.5")
    }
    assert client.get(f"{EXPORT}/samples.csv").headers["content-disposition"] == (
        'attachment; filename="char-gpt-samples.csv"'
    )


def test_what_was_abandoned_is_there_and_says_so(job, client):
    job.iteration, job.lineage = 10, 2
    job.say(LineageStarted(at=job.at, lineage=2, iteration=10, parent="000000000010-1"))
    job.train(3)
    found = rows(client.get(f"{EXPORT}/samples.csv?from=11"))
    assert [(row["lineage"], row["abandoned"]) for row in found] == [("1", "true")] * 10 + [("2", "false")] * 3


def test_a_long_window_is_sent_a_part_at_a_time_and_whole(job, client, monkeypatch):
    monkeypatch.setattr(exports, "PART_ITERATIONS", 7)
    assert [row["iteration"] for row in rows(client.get(f"{EXPORT}/samples.csv"))] == [
        str(n) for n in range(1, 21)
    ]


def test_numbers_that_are_none_are_told_as_they_are(agent, client):
    agent.start()
    metrics = {"loss": [float("nan"), float("inf")], "=cmd": [1.0, 2.0]}
    agent.say(
        samples=Samples(
            iteration=[1, 2], lineage=[1, 1], at=[agent.at, agent.at + 1], seconds=[0.1, 0.1],
            stall_seconds=[0.0, 0.0], data_seconds=[0.0, 0.0], metrics=metrics,
        )
    )  # fmt: skip
    found = rows(client.get(f"{EXPORT}/samples.csv"))
    assert [row["loss"] for row in found] == ["nan", "inf"]
    assert "'=cmd" in found[0]


def test_a_job_without_iterations_gives_a_head_and_no_rows(agent, client):
    agent.start()
    assert rows(client.get(f"{EXPORT}/samples.csv")) == []


def test_checkpoints_come_as_rows_with_their_state(job, client):
    job.checkpoint(20, "failed", reason="=HYPERLINK(1)")
    found = rows(client.get(f"{EXPORT}/checkpoints.csv"))
    assert [(row["iteration"], row["state"]) for row in found] == [("10", "durable"), ("20", "failed")]
    assert found[1]["reason"] == "'=HYPERLINK(1)"
    assert not {"metrics", "verified"} & found[0].keys()  # the list of checkpoints has them


def test_two_stretches_far_apart_are_two_parts(job, client):
    job.iteration, job.lineage = FAR, 2
    job.say(LineageStarted(at=job.at, lineage=2, iteration=FAR, parent="000000000010-1"))
    job.train(2)
    found = rows(client.get(f"{EXPORT}/samples.csv"))
    assert [int(row["iteration"]) for row in found] == [*range(1, 21), FAR + 1, FAR + 2]


def test_a_stretch_with_a_hole_in_it_is_few_parts(job, client):
    job.iteration = FAR
    job.train(2)
    found = rows(client.get(f"{EXPORT}/samples.csv"))
    assert [int(row["iteration"]) for row in found] == [*range(1, 21), FAR + 1, FAR + 2]


def series(number, first, last, count):
    return SampleSeriesRecord(
        id=number, uid="first", attempt=1, lineage=number, metrics=b"", first_iteration=first, last_iteration=last,
        rows=count, widest_chunk=0, chunks_from=0, finest_from=0, last_at=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("all_series", "parts"),
    [
        ([], []),
        ([series(1, 1, 20_000, 20_000)], [(1, 8192), (8193, 16_384), (16_385, 24_576)]),
        ([series(1, 1, 10, 10), series(2, 5, 8, 4)], [(1, 8192)]),
        ([series(1, 1, 9000, 9000), series(2, 15_000, 15_001, 2)], [(1, 8192), (8193, 16_384)]),
        ([series(1, 1, 10, 10), series(2, FAR, FAR + 1, 2)], [(1, 8192), (FAR, FAR + 8191)]),
        ([series(1, 1, 2 * FAR, 2)], [(1, 2 * FAR)]),
    ],
)
def test_parts_are_made_of_what_is_there(all_series, parts):
    assert list(exports.spans(all_series, 1, 2 * FAR)) == parts


def say_metrics(agent, metrics):
    agent.say(
        samples=Samples(
            iteration=[1, 2], lineage=[1, 1], at=[agent.at, agent.at + 1], seconds=[0.1, 0.1],
            stall_seconds=[0.0, 0.0], data_seconds=[0.0, 0.0], metrics=metrics,
        )
    )  # fmt: skip


@pytest.fixture
def colliding(agent):
    agent.start()
    say_metrics(agent, {"grad": [1.0, 2.0], "grad_max": [8.0, 9.0], "seconds": [5.0, 5.0]})


def test_metrics_whose_columns_would_be_the_same_are_told_apart(colliding, client):
    first, _ = rows(client.get(f"{EXPORT}/samples.csv"))
    assert (first["grad"], first["grad_max"], first["metric.grad_max"]) == ("1.0", "1.0", "8.0")
    assert (first["seconds"], first["metric.seconds"]) == ("0.1", "5.0")


def test_parquet_holds_the_same_and_is_not_compressed_again(colliding, client):
    parquet = pytest.importorskip("pyarrow.parquet")
    answer = client.get(f"{EXPORT}/samples.parquet?from=2&to=2")
    assert (answer.status_code, answer.headers.get("content-encoding")) == (200, None)
    assert int(answer.headers["content-length"]) == len(answer.content) > COMPRESSED_BYTES
    (row,) = parquet.read_table(io.BytesIO(answer.content)).to_pylist()
    assert (row["iteration"], row["grad_max"], row["metric.grad_max"], row["abandoned"]) == (2, 2.0, 9.0, False)
    assert 'data-export="samples.parquet"' in client.get("/jobs/char-gpt").text


def test_without_pyarrow_parquet_is_refused_and_not_offered(job, client, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    answer = client.get(f"{EXPORT}/samples.parquet?from=5&to=8")
    assert answer.status_code == 409
    assert "install Holdfast with its extra `parquet`" in answer.json()["message"]
    assert 'data-export="samples.parquet"' not in client.get("/jobs/char-gpt").text


@ON_BOTH
def test_checkpoints_are_sent_a_part_at_a_time_and_whole(job, client, monkeypatch):
    monkeypatch.setattr(exports, "PART_CHECKPOINTS", 2)
    for iteration in (1, 2, 15, 20):
        job.checkpoint(iteration)
    found = rows(client.get(f"{EXPORT}/checkpoints.csv?from=2"))
    assert [row["iteration"] for row in found] == ["2", "10", "15", "20"]


def test_an_attempt_is_a_trace_with_its_iterations_checkpoints_and_waits(job, client):
    job.say(Stall(at=job.at + 1.0, iteration=10, lineage=1, kind="data_fetch", seconds=0.5))
    stages = {"snapshot_started_at": job.at + 1.5, "snapshot_seconds": 0.25, "persist_started_at": job.at + 1.75}
    job.checkpoint(15, **stages, persist_seconds=1.0)
    told = json.loads(client.get(f"{EXPORT}/trace.json").text)
    tracks = {one["tid"]: one["args"]["name"] for one in told["traceEvents"] if one["name"] == "thread_name"}
    spans = [(tracks[one["tid"]], one["name"], one["dur"]) for one in told["traceEvents"] if one["ph"] == "X"]
    assert sum(track == "iterations" for track, _, _ in spans) == 20
    assert ("iterations", "iteration 7", 100_000.0) in spans
    assert ("stalls", "data_fetch", 500_000.0) in spans
    assert {("snapshot", "checkpoint 15", 250_000.0), ("persist", "checkpoint 15", 1_000_000.0)} <= set(spans)
    assert [one["args"]["loss"] for one in told["traceEvents"] if one["name"] == "loss"] == [2.5] * 20
    assert all(one["ts"] >= 0 for one in told["traceEvents"] if "ts" in one)


def spans_of(client, query=""):
    told = client.get(f"{EXPORT}/trace.json{query}").json()
    found = [one for one in told["traceEvents"] if one["ph"] == "X" and one["tid"] == 1]
    return told, [(one["name"], one["args"]["iterations"], one["dur"]) for one in found]


def test_a_trace_of_a_window_has_each_of_its_iterations_however_long_the_run(job, client):
    job.train(6000)
    waits = [Stall(at=job.at + 1.0, iteration=n, lineage=1, kind="data_fetch", seconds=0.5) for n in (1, 3000)]
    job.say(*waits)
    told, found = spans_of(client, "?from=2999&to=3002")
    assert found == [(f"iteration {n:,}", 1, 100_000.0) for n in range(2999, 3003)]
    assert [one["args"] for one in told["traceEvents"] if one["name"] == "data_fetch"] == [{"iteration": 3000}]
    _, whole = spans_of(client)
    assert sum(count for _, count, _ in whole) == 6020
    assert len(whole) <= 2000


def test_a_trace_of_a_window_is_of_the_attempt_at_its_end(job, client):
    second = job.restarted()
    second.start(resumed_from="000000000020-1")
    second.train(5)
    assert client.get(f"{EXPORT}/trace.json?to=20").json()["otherData"]["attempt"] == 1
    told, found = spans_of(client, "?from=18&to=22")
    assert (told["otherData"]["attempt"], [name for name, _, _ in found]) == (2, ["iteration 21", "iteration 22"])
    assert len(spans_of(client, "?attempt=1")[1]) == 20


def test_a_trace_says_what_it_leaves_out(job, client, monkeypatch):
    monkeypatch.setattr(traces, "MOST_ROWS", 1)
    for iteration in (11, 12):
        job.checkpoint(iteration, snapshot_seconds=0.25)
    assert client.get(f"{EXPORT}/trace.json?from=11").json()["otherData"]["of"] == ["checkpoints"]
    assert "of" not in client.get(f"{EXPORT}/trace.json?from=12").json()["otherData"]


def test_what_is_no_number_is_not_in_a_trace(agent, client):
    agent.start()
    nan = float("nan")
    agent.say(
        samples=Samples(
            iteration=[1, 9], lineage=[1, 1], at=[agent.at + 1, agent.at + 2], seconds=[nan, 0.5],
            stall_seconds=[0.0, 0.0], data_seconds=[0.0, 0.0], metrics={"loss": [2.5, nan]},
        )
    )  # fmt: skip
    agent.checkpoint(9, snapshot_seconds=0.25, stall_seconds=nan)
    told, found = spans_of(client)
    assert found == [("iteration 9", 1, 500_000.0)]
    assert [one["args"]["loss"] for one in told["traceEvents"] if one["name"] == "loss"] == [2.5]
    assert "nan" not in json.dumps(told).lower()


def test_a_trace_of_an_attempt_that_never_was_is_refused(job, client):
    answer = client.get(f"{EXPORT}/trace.json?attempt=9")
    assert (answer.status_code, "no attempt 9" in answer.json()["message"]) == (422, True)


@pytest.mark.parametrize("name", ["samples.csv", "samples.parquet", "checkpoints.csv", "trace.json"])
def test_an_unknown_job_has_no_files(client, name):
    assert client.get(f"/api/v1/jobs/nobody/export/{name}").status_code == 404
