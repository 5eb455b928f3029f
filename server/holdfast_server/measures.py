"""What the server counts, and what Prometheus reads of it and of the jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from holdfast_server.ingest import Received
from holdfast_server.views import JobSummary

_Read = Callable[[JobSummary], float | None]

_JOB_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("iteration", "Last finished iteration", lambda job: job.iteration),
    ("attempt", "Number of the newest attempt", lambda job: job.attempt),
    ("last_contact_seconds", "Seconds since the job was last heard", lambda job: job.last_contact_seconds),
    ("loss", "The newest loss", lambda job: job.loss),
    ("iterations_per_second", "Over the newest iterations", lambda job: job.iterations_per_second),
    ("overhead_ratio", "Measured overhead of checkpointing", lambda job: job.measured_overhead),
    ("budget_ratio", "Allowed overhead", lambda job: job.budget),
    ("interval_iterations", "Iterations between checkpoints", lambda job: job.interval),
    ("exposure_iterations", "Iterations lost if it died now", lambda job: job.exposure_iterations),
    ("exposure_seconds", "Work lost if it died now", lambda job: job.exposure_seconds),
    ("checkpoints", "Durable checkpoints", lambda job: job.checkpoints_total),
    (
        "checkpoints_failing",
        "Checkpoints that failed since the last durable one",
        lambda job: job.failing.count if job.failing else 0,
    ),
)


class ServerMeasures:
    """One registry an app, so that two in a process do not count for each other."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._batches = Counter("holdfast_ingest_batches_total", "Batches", ["result"], registry=self.registry)
        self._samples = Counter("holdfast_ingest_samples_total", "Samples stored", registry=self.registry)
        self._events = Counter("holdfast_ingest_events_total", "Events stored", registry=self.registry)
        self._unknown = Counter(
            "holdfast_ingest_unknown_events_total", "Events not understood, left out", registry=self.registry
        )
        self._seconds = Histogram("holdfast_ingest_seconds", "From a batch to its commit", registry=self.registry)

    @contextmanager
    def ingesting(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except Exception:  # whatever refused it, it is counted; what is answered is decided further out
            self._batches.labels("refused").inc()
            raise
        self._seconds.observe(time.perf_counter() - started)

    def ingested(self, received: Received) -> None:
        self._batches.labels("acknowledged").inc()
        self._samples.inc(len(received.samples.iteration) if received.samples else 0)
        self._events.inc(len(received.events))
        self._unknown.inc(received.unknown_events)

    def exposition(self, jobs: Sequence[JobSummary], *, listeners: int) -> bytes:
        """The server's counters and the jobs as they are now; a job that is gone leaves no figure behind."""
        now = CollectorRegistry()
        Gauge("holdfast_listeners", "Open streams and long polls", registry=now).set(listeners)
        status = Gauge("holdfast_job_status", "1 for the status the job has", ["job", "status"], registry=now)
        for job in jobs:
            status.labels(job.job, job.status).set(1)
        for name, meaning, read in _JOB_GAUGES:
            gauge = Gauge(f"holdfast_job_{name}", meaning, ["job"], registry=now)
            for job in jobs:
                value = read(job)
                if value is not None:
                    gauge.labels(job.job).set(value)
        return generate_latest(self.registry) + generate_latest(now)
