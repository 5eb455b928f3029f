"""OpenTelemetry: spans and metrics of checkpoints and restores.

The training thread only appends to a queue. Spans are made and exported by background threads.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, cast

from opentelemetry import context, metrics, trace
from opentelemetry.trace import Status, StatusCode

from holdfast.protocol.wire import StallKind
from holdfast.save.run import SETTLED, Run, RunState
from holdfast.session import Session
from holdfast.system import io_pool

KNOWN_CHECKPOINTS = 64
"""Number of recent checkpoints that a later wait can belong to."""


class Instrumentation:
    """Records the checkpoints and restores of one session."""

    def __init__(self, session: Session, tracer: trace.Tracer, meter: metrics.Meter) -> None:
        self._session, self._tracer = session, tracer
        self._about: dict[str, str | int] = {
            "holdfast.job": session.job,
            "holdfast.attempt": session.attempt,
            "holdfast.rank": session.rank,
        }
        self._durations = {
            name: meter.create_histogram(f"holdfast.{name}.duration", unit="s")
            for name in ("snapshot_wait", "snapshot", "persist", "restore")
        }
        self._bytes = meter.create_counter(
            "holdfast.checkpoint.size", unit="By", description="Bytes of durable checkpoints"
        )
        self._count = meter.create_counter("holdfast.checkpoints", unit="{checkpoint}")
        self._overhead = meter.create_gauge(
            "holdfast.overhead", unit="1", description="Measured share of training time that checkpoints cost"
        )
        self._queue: deque[tuple[Any, ...]] = deque()
        """(method, its arguments): what background threads record."""
        self._lock = threading.Lock()
        """Guards `_parents`; held while spans are made, which does no I/O."""
        self._parents: dict[str, context.Context] = {}
        """Context of the span of each recent checkpoint."""
        self._waits: dict[str, list[tuple[float, float]]] = {}
        """Waits for checkpoints that have no span yet."""
        self._current = ""
        """Checkpoint that training waits for, if it waits."""
        session.observe(self, on_stall=self.stalled)
        session.on_restored(self.restored)
        atexit.register(self._at_exit)

    # Called by the session

    def run_changed(self, run: Run, state: RunState) -> None:
        if state is RunState.COPYING:
            self._current = run.id
        elif state in SETTLED:
            draft = run.draft
            facts = {
                "holdfast.checkpoint": run.id,
                "holdfast.iteration": draft.iteration,
                "holdfast.lineage": draft.lineage,
                "holdfast.kind": draft.kind,
                "holdfast.state": str(state),
                "holdfast.bytes": run.result.stored_bytes or run.size_bytes,
            }
            times = (draft.created_at, run.copy.seconds, run.write_started_at, run.result.seconds, time.time())
            overhead = self._session.measured_overhead
            self._queue.append((self._checkpoint, facts, state, run.result.reason, times, overhead))
            io_pool.submit(self._drain)

    def stalled(self, kind: StallKind, seconds: float) -> None:
        if kind == "snapshot_wait":
            self._queue.append((self._wait, self._current, seconds, time.time()))

    def restored(self, iteration: int, lineage: int) -> None:
        facts = {"holdfast.iteration": iteration, "holdfast.lineage": lineage}
        self._queue.append((self._restore, facts, *self._session.last_restore_times))
        io_pool.submit(self._drain)

    def _at_exit(self) -> None:
        """Close the session, whose last checkpoint counts too, before the providers shut down."""
        self._session.close_at_exit()
        self._drain()

    # On background threads

    def _drain(self) -> None:
        with self._lock:
            while self._queue:
                record, *arguments = self._queue.popleft()
                record(*arguments)

    def _checkpoint(
        self,
        facts: dict[str, Any],
        state: RunState,
        reason: str | None,
        times: tuple[float, float, float, float, float],
        overhead: float | None,
    ) -> None:
        started_at, copy_seconds, write_started_at, write_seconds, ended_at = times
        error = None if state is RunState.DURABLE else reason or str(state)
        root = self._span("checkpoint", started_at, ended_at, facts, error=error)
        parent = trace.set_span_in_context(root)
        if copy_seconds:
            failed = error if not write_started_at else None
            self._span("snapshot", started_at, started_at + copy_seconds, facts, parent, failed)
            self._durations["snapshot"].record(copy_seconds, self._about)
        if write_started_at:
            self._span("persist", write_started_at, write_started_at + write_seconds, facts, parent, error)
            self._durations["persist"].record(write_seconds, self._about)
        self._count.add(1, {**self._about, "holdfast.state": str(state)})
        if state is RunState.DURABLE:
            self._bytes.add(facts["holdfast.bytes"], self._about)
        if overhead is not None:
            self._overhead.set(overhead, self._about)
        checkpoint = facts["holdfast.checkpoint"]
        self._parents[checkpoint] = parent
        for wait in self._waits.pop(checkpoint, ()):
            self._wait(checkpoint, *wait)
        while len(self._parents) > KNOWN_CHECKPOINTS:
            del self._parents[next(iter(self._parents))]

    def _wait(self, checkpoint: str, seconds: float, ended_at: float) -> None:
        if (parent := self._parents.get(checkpoint)) is None:  # its span is made when it has settled
            self._waits.setdefault(checkpoint, []).append((seconds, ended_at))
            return
        facts = {"holdfast.checkpoint": checkpoint}
        self._span("snapshot_wait", ended_at - seconds, ended_at, facts, parent)
        self._durations["snapshot_wait"].record(seconds, self._about)

    def _restore(self, facts: dict[str, Any], began_at: float, ended_at: float) -> None:
        self._span("restore", began_at, ended_at, facts)
        self._durations["restore"].record(ended_at - began_at, self._about)

    def _span(
        self,
        name: str,
        began_at: float,
        ended_at: float,
        facts: Mapping[str, Any],
        parent: context.Context | None = None,
        error: str | None = None,
    ) -> trace.Span:
        span = self._tracer.start_span(
            f"holdfast.{name}",
            context=parent or context.Context(),
            attributes={**self._about, **facts},
            start_time=_nanoseconds(began_at),
        )
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_nanoseconds(max(began_at, ended_at)))
        return span


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def instrument(
    session: Session,
    *,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> None:
    """Report spans and metrics of a session's checkpoints and restores.

    Call it once, before the first iteration, on each rank that is to report.

    Args:
        session: the session.
        tracer_provider: default: the global one, if the script has set one; else one that exports by OTLP.
        meter_provider: likewise, for metrics.

    The OTLP exporters read the `OTEL_*` environment variables. With OTEL_TRACES_EXPORTER or OTEL_METRICS_EXPORTER
    set to `none`, nothing of that kind is exported.

    Raises:
        ImportError: no provider is set, and the SDK or the exporter is not installed.
    """
    tracer_provider = tracer_provider or _tracer_provider()
    meter_provider = meter_provider or _meter_provider()
    Instrumentation(session, tracer_provider.get_tracer("holdfast"), meter_provider.get_meter("holdfast"))


def _tracer_provider() -> trace.TracerProvider:
    found = trace.get_tracer_provider()
    if not isinstance(found, trace.ProxyTracerProvider) or not _is_exported("TRACES"):
        return found
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if _protocol("TRACES") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return cast("trace.TracerProvider", provider)


def _meter_provider() -> metrics.MeterProvider:
    found = metrics.get_meter_provider()
    if type(found).__name__ != "_ProxyMeterProvider" or not _is_exported("METRICS"):
        return found
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    if _protocol("METRICS") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    else:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    return cast("metrics.MeterProvider", MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())]))


def _is_exported(signal: str) -> bool:
    return os.environ.get(f"OTEL_{signal}_EXPORTER", "otlp") != "none"


def _protocol(signal: str) -> str | None:
    return os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
