"""Spans and metrics of real sessions, read back from the memory exporters of the SDK."""

import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread, current_thread

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import holdfast
from holdfast.integrations import opentelemetry
from holdfast.save.host_buffers import Arena
from holdfast.save.run import (
    CopyResult,
    RunState,
    WriteResult,
)
from holdfast.store.local import LocalWriter
from tests.support import persist_job
from tests.support.eventually import eventually
from tests.support.small_session import iterate, session_of


@pytest.fixture
def exported():
    """(tracer provider, meter provider, function that returns what was exported)"""
    spans, reader, tracer_provider = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
    tracer_provider.add_span_processor(SimpleSpanProcessor(spans))
    meter_provider = MeterProvider([reader])

    def read(session):
        """Spans by name, and metrics as {name: [(attributes, value or count)]}."""
        opentelemetry_of(session)._drain()
        by_name, values = {}, {}
        for span in spans.get_finished_spans():
            by_name.setdefault(span.name, []).append(span)
        for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics:
            values[metric.name] = [
                (point.attributes, point.value if hasattr(point, "value") else point.count)
                for point in metric.data.data_points
            ]
        return by_name, values

    yield {"tracer_provider": tracer_provider, "meter_provider": meter_provider}, read
    meter_provider.shutdown()


def opentelemetry_of(session):
    (found,) = (each for each in session._saver._listeners if isinstance(each, opentelemetry.Instrumentation))
    return found


def test_a_checkpoint_is_a_span_with_the_spans_of_its_phases(tmp_path, exported):
    providers, read = exported
    model, optimizer, session = session_of(tmp_path, loop=holdfast.Variables())
    opentelemetry.instrument(session, **providers)
    before = time.time_ns()
    for _ in range(3):
        iterate(model, optimizer, session)
        session.wait(300)
    session.close()
    spans, values = read(session)
    assert len(spans["holdfast.checkpoint"]) == 3
    for root, iteration in zip(spans["holdfast.checkpoint"], (1, 2, 3), strict=True):
        assert root.parent is None
        assert root.attributes["holdfast.job"] == "m"
        assert root.attributes["holdfast.checkpoint"] == f"{iteration:012d}-1"
        assert (root.attributes["holdfast.iteration"], root.attributes["holdfast.lineage"]) == (iteration, 1)
        assert (root.attributes["holdfast.rank"], root.attributes["holdfast.attempt"]) == (0, 1)
        assert root.attributes["holdfast.bytes"] > 0
        assert root.status.status_code is StatusCode.UNSET
        for name in ("holdfast.snapshot", "holdfast.persist"):
            (child,) = (each for each in spans[name] if each.parent.span_id == root.context.span_id)
            assert before < root.start_time <= child.start_time <= child.end_time
            assert child.end_time < time.time_ns()
    roots = {root.context.span_id for root in spans["holdfast.checkpoint"]}
    assert {each.parent.span_id for each in spans["holdfast.snapshot_wait"]} <= roots
    assert sum(value for _, value in values["holdfast.checkpoints"]) == 3
    ((about, size),) = values["holdfast.checkpoint.size"]
    assert size == sum(root.attributes["holdfast.bytes"] for root in spans["holdfast.checkpoint"])
    assert about["holdfast.job"] == "m"
    assert [value for _, value in values["holdfast.persist.duration"]] == [3]


def test_a_failed_checkpoint_has_error_status(tmp_path, exported, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    providers, read = exported
    model, optimizer, session = session_of(tmp_path)
    opentelemetry.instrument(session, **providers)
    monkeypatch.setattr(LocalWriter, "commit", fail)
    iterate(model, optimizer, session)
    session.wait(300)
    spans, values = read(session)
    session._close("test")
    (root,), (persist,) = spans["holdfast.checkpoint"], spans["holdfast.persist"]
    assert root.status.status_code is persist.status.status_code is StatusCode.ERROR
    assert "No space left" in root.status.description
    assert root.attributes["holdfast.state"] == "failed"
    assert "holdfast.checkpoint.size" not in values


def test_a_torn_checkpoint_has_error_status(tmp_path, exported):
    providers, read = exported
    session = session_of(tmp_path)[2]
    opentelemetry.instrument(session, **providers)
    run = persist_job.requested(7, opentelemetry_of(session))
    run.begin_copy(Arena(), run.draft)
    run.end_copy(CopyResult(seconds=0.5, torn=["model.weight"]))
    run.end(RunState.TORN, WriteResult(reason=run.copy.problem))
    spans, values = read(session)
    session.close()
    (root,), (snapshot,) = spans["holdfast.checkpoint"], spans["holdfast.snapshot"]
    assert root.status.status_code is snapshot.status.status_code is StatusCode.ERROR
    assert "model.weight" in root.status.description
    assert snapshot.end_time - snapshot.start_time == pytest.approx(5e8, rel=1e-3)
    assert [(each["holdfast.state"], value) for each, value in values["holdfast.checkpoints"]] == [("torn", 1)]


def test_a_resume_and_a_restore_are_spans(tmp_path, exported):
    providers, read = exported
    model, optimizer, session = session_of(tmp_path, loop=holdfast.Variables())
    iterate(model, optimizer, session)
    session.close()
    model, optimizer, session = session_of(tmp_path, loop=holdfast.Variables())
    session.resume()
    opentelemetry.instrument(session, **providers)
    iterate(model, optimizer, session)
    session.wait(300)
    session.restore(1)
    iterate(model, optimizer, session)
    session.close()
    spans, values = read(session)
    resume, restore = spans["holdfast.restore"]
    assert [each.attributes["holdfast.lineage"] for each in (resume, restore)] == [1, 2]
    assert [each.attributes["holdfast.iteration"] for each in (resume, restore)] == [1, 1]
    assert resume.start_time < resume.end_time < restore.start_time < restore.end_time
    assert [value for _, value in values["holdfast.restore.duration"]] == [2]


class SpanThreads(SpanProcessor):
    """Names of the threads that start spans."""

    def __init__(self):
        self.names = set()

    def on_start(self, span, parent_context=None):
        self.names.add(current_thread().name)


def test_no_span_is_made_on_the_training_thread(tmp_path, exported):
    providers, _ = exported
    providers["tracer_provider"].add_span_processor(threads := SpanThreads())
    model, optimizer, session = session_of(tmp_path)
    opentelemetry.instrument(session, **providers)
    session._meter.clock.stall("snapshot_wait", 0.001)
    for _ in range(3):
        iterate(model, optimizer, session)
    session.close()
    eventually(lambda: threads.names, "a span")
    assert current_thread().name not in threads.names


SCRIPT = """
import sys, torch, holdfast, holdfast.integrations.opentelemetry
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
session = holdfast.Session("m", store=sys.argv[1], every=1, model=model, optimizer=optimizer)
holdfast.integrations.opentelemetry.instrument(session)
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    session.step()
"""


def test_without_a_provider_spans_and_metrics_go_where_the_environment_says(tmp_path, monkeypatch):
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_): ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "my-training")
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True, timeout=300
        )
        server.shutdown()
    assert done.returncode == 0, done.stderr
    bodies = dict(received)
    assert b"holdfast.persist" in bodies["/v1/traces"]
    assert b"my-training" in bodies["/v1/traces"]
    assert b"holdfast.checkpoint.size" in bodies["/v1/metrics"]


def test_nothing_of_opentelemetry_is_imported_without_it():
    code = (
        "import holdfast, sys; holdfast.Session; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]"
