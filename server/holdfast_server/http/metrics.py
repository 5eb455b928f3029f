"""Prometheus metrics of the server and of the jobs.

Names contain the unit, and counters end in `_total`. No label takes values that a client chooses, except the
names of jobs and the addresses of stores: only the most recent jobs are exported, and a gauge counts the others;
of stores, those with the highest rate, and in the account those with the most bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from holdfast.protocol.account import Account, AccountStore
from holdfast.protocol.jobs import JobStatus, JobSummary
from holdfast.protocol.stores import StoreSummary
from holdfast_server.ingest.admission import Overloaded
from holdfast_server.ingest.batches import Received

# do not export a second series for each counter with its creation time
disable_created_metrics()  # type: ignore[no-untyped-call]

MOST_JOBS = 200
"""Jobs that are exported one by one, those with the latest contact; each has about twenty series."""
MOST_STORES = 100
BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

_Read = Callable[[JobSummary], float | None]

_JOB_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("iteration", "Last finished iteration", lambda job: job.iteration),
    ("attempt", "Number of the newest attempt", lambda job: job.attempt),
    ("ranks", "Processes of the newest attempt", lambda job: job.world_size),
    ("last_contact_age_seconds", "Time since the last report", lambda job: job.last_contact_seconds),
    ("loss", "Newest loss", lambda job: job.loss),
    ("iterations_per_second", "Speed over the newest iterations", lambda job: job.iterations_per_second),
    ("tokens_per_second", "Tokens of all ranks over the newest iterations", lambda job: job.tokens_per_second),
    ("samples_per_second", "Samples of all ranks over the newest iterations", lambda job: job.samples_per_second),
    ("iterations_total", "Number of iterations that the job will have in total", lambda job: job.total_iterations),
    ("progress_ratio", "Share of these iterations that are finished", lambda job: job.progress),
    ("remaining_seconds", "Estimated time to the last iteration", lambda job: job.remaining_seconds),
    ("overhead_ratio", "Measured overhead of checkpointing", lambda job: job.measured_overhead),
    ("budget_ratio", "Allowed overhead", lambda job: job.budget),
    ("interval_iterations", "Iterations between checkpoints", lambda job: job.interval),
    ("unsaved_iterations", "Iterations lost by a crash now", lambda job: job.unsaved_iterations),
    ("unsaved_seconds", "Work lost by a crash now", lambda job: job.unsaved_seconds),
    ("unsaved_gpu_hours", "Work of all ranks lost by a crash now", lambda job: job.unsaved_gpu_hours),
    ("checkpoints_durable", "Durable checkpoints", lambda job: job.checkpoints_total),
    (
        "checkpoints_failing",
        "Checkpoints that failed since the last durable one",
        lambda job: job.failing.count if job.failing else 0,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSnapshot:
    """State of the server at the time of a scrape."""

    jobs: Sequence[JobSummary]
    """The jobs that are exported one by one."""
    by_status: Mapping[JobStatus, int]
    """Number of jobs by status, of all jobs."""
    listeners: int
    database_bytes: int | None
    writes_waiting: int
    alerts_by_severity: Mapping[str, int] = field(default_factory=dict)
    account: Account | None = None
    """The account of the last 24 hours by project."""
    stores: Sequence[StoreSummary] = ()


class ServerMetrics:
    """Metrics of one application, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, buckets=BUCKETS_SECONDS, registry=registry)
        Gauge("holdfast_build_info", "Version of the server; always 1", ["version"], registry=registry).labels(
            version("holdfast")
        ).set(1)
        self._batches = counter("holdfast_ingest_batches_total", "Batches received", ["result"])
        self._acknowledged = self._batches.labels("acknowledged")
        self._samples = counter("holdfast_ingest_samples_total", "Samples stored")
        self._events = counter("holdfast_ingest_events_total", "Events stored")
        self._unknown = counter(
            "holdfast_ingest_unknown_events_total", "Events of unknown types, which were ignored"
        )
        self._seconds = histogram("holdfast_ingest_duration_seconds", "Time from receiving a batch to its commit")
        # kept by labels: to look one up among prometheus_client's takes longer than to count
        self._requests = cache(
            counter("holdfast_http_requests_total", "Requests answered", ["method", "route", "status"]).labels
        )
        self._request_seconds = cache(
            histogram(
                "holdfast_http_request_duration_seconds",
                "Time from a request to the end of its response, without long polls and streams",
                ["method", "route"],
            ).labels
        )
        self._deliveries = counter(
            "holdfast_alert_deliveries_total", "Attempts to deliver a message", ["channel", "result"]
        )
        self._scrubs = counter(
            "holdfast_checkpoint_scrubs_total", "Checkpoints that scrubs reported, by result", ["result"]
        )

    @contextmanager
    def ingesting(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except Overloaded:
            self._batches.labels("put_off").inc()
            raise
        except Exception:  # count every refusal; the caller chooses the response
            self._batches.labels("refused").inc()
            raise
        self._seconds.observe(time.perf_counter() - started)

    def ingested(self, received: Received) -> None:
        self._acknowledged.inc()
        if received.samples:
            self._samples.inc(len(received.samples))
        if received.batch.events:
            self._events.inc(len(received.batch.events))
        if received.unknown_events:
            self._unknown.inc(received.unknown_events)

    def answered(self, *, method: str, route: str, status: int, seconds: float | None) -> None:
        """Count a response; `seconds` is None for long polls and streams, whose duration the client determines."""
        method = method if method in METHODS else "other"
        self._requests(method, route, f"{status // 100}xx" if status else "gone").inc()
        if seconds is not None:
            self._request_seconds(method, route).observe(seconds)

    def delivered(self, *, channel: str, taken: bool) -> None:
        self._deliveries.labels(channel, "delivered" if taken else "refused").inc()

    def scrubbed(self, result: str) -> None:
        self._scrubs.labels(result).inc()

    def exposition(self, seen: MetricsSnapshot) -> bytes:
        """Return the metrics in the text format; deleted jobs have none."""
        now = CollectorRegistry()
        Gauge("holdfast_listeners", "Open streams and long polls", registry=now).set(seen.listeners)
        Gauge("holdfast_database_writes_waiting", "Writes that wait for the database", registry=now).set(
            seen.writes_waiting
        )
        if seen.database_bytes is not None:
            Gauge("holdfast_database_size_bytes", "Size of the database", registry=now).set(seen.database_bytes)
        others = sum(seen.by_status.values()) - len({job.job for job in seen.jobs})
        Gauge("holdfast_jobs_not_exported", "Jobs without metrics of their own", registry=now).set(others)
        by_status = Gauge("holdfast_jobs", "Jobs by status", ["status"], registry=now)
        for status, count in seen.by_status.items():
            by_status.labels(status).set(count)
        alerts = Gauge("holdfast_alerts_open", "Alerts that have not resolved", ["severity"], registry=now)
        for severity, count in seen.alerts_by_severity.items():
            alerts.labels(severity).set(count)
        if seen.account is not None:
            _of_account(now, seen.account)
        _of_jobs(now, seen.jobs)
        _of_stores(now, seen.stores)
        return generate_latest(self.registry) + generate_latest(now)


_ACCOUNT_GAUGES: tuple[tuple[str, str, Callable[[AccountStore], float | None]], ...] = (
    ("stored_bytes", "Checkpoints of jobs in the store", lambda store: store.stored_bytes),
    ("written_bytes", "Checkpoints that became durable in 24 hours", lambda store: store.written_bytes),
    ("until_full_seconds", "Estimated time until the store is full", lambda store: store.seconds_until_full),
)


def _of_account(registry: CollectorRegistry, account: Account) -> None:
    """Export sums over the last 24 hours: gauges, since a restart can make productive hours lost ones."""
    hours = Gauge(
        "holdfast_account_gpu_hours", "GPU-hours of 24 hours by category", ["project", "category"],
        registry=registry,
    )  # fmt: skip
    gauge = partial(Gauge, labelnames=["project"], registry=registry)
    unsaved = gauge("holdfast_account_unsaved_gpu_hours", "Unsaved work of jobs that have not ended")
    saved = gauge("holdfast_account_saved_gpu_hours", "Estimated work that checkpoints saved in 24 hours")
    for row in account.rows:
        for category, value in row.categories.items():
            hours.labels(row.name, category).set(value)
        unsaved.labels(row.name).set(row.unsaved_gpu_hours)
        saved.labels(row.name).set(row.saved_gpu_hours)
    for name, meaning, read in _ACCOUNT_GAUGES:
        by_store = Gauge(f"holdfast_account_store_{name}", meaning, ["store", "address"], registry=registry)
        for store in account.stores[:MOST_STORES]:
            if store.store and (amount := read(store)) is not None:
                by_store.labels(store.id or store.store, store.store).set(amount)


_STORE_GAUGES: tuple[tuple[str, str, Callable[[StoreSummary], float | None]], ...] = (
    ("bytes_per_second", "Rate at which all jobs write now", lambda store: store.bytes_per_second),
    (
        "limit_bytes_per_second",
        "Limit of the rate at which all jobs write",
        lambda store: store.limit.bytes_per_second if store.limit else None,
    ),
    ("waiting_bytes", "Bytes of checkpoints that are copied but not durable", lambda store: store.waiting_bytes),
    ("written_bytes", "Bytes that jobs have written", lambda store: store.written_bytes),
    ("free_bytes", "Free space", lambda store: store.free_bytes),
    ("total_bytes", "Size of the file system", lambda store: store.total_bytes),
)


def _of_stores(registry: CollectorRegistry, stores: Sequence[StoreSummary]) -> None:
    for name, meaning, read in _STORE_GAUGES:
        gauge = Gauge(f"holdfast_store_{name}", meaning, ["store", "address"], registry=registry)
        for store in stores:
            value = read(store)
            if value is not None:
                gauge.labels(store.id, store.address).set(value)


def _of_jobs(registry: CollectorRegistry, jobs: Sequence[JobSummary]) -> None:
    status = Gauge("holdfast_job_status", "1 for the status the job has", ["job", "status"], registry=registry)
    durable = Gauge(
        "holdfast_job_last_durable_timestamp_seconds",
        "When the last checkpoint became durable",
        ["job"],
        registry=registry,
    )
    for job in jobs:
        status.labels(job.job, job.status).set(1)
        if job.last_durable is not None:
            durable.labels(job.job).set(job.last_durable.at)
    for name, meaning, read in _JOB_GAUGES:
        gauge = Gauge(f"holdfast_job_{name}", meaning, ["job"], registry=registry)
        for job in jobs:
            value = read(job)
            if value is not None:
                gauge.labels(job.job).set(value)
