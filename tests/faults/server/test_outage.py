"""A server outage of two hours: events arrive complete and in order, and dropped samples are reported as gaps.

Ten seconds of it last until the agent has stored them where a crash cannot lose them, which takes milliseconds.
"""

from __future__ import annotations

import threading
from time import perf_counter

import numpy as np
import pytest

from holdfast.protocol.wire import Notice
from holdfast.server_link import batch_sender, event_queue, http_client
from holdfast.server_link.connection import ServerConnection
from holdfast.telemetry.iteration_metrics import Iteration
from holdfast_server.samples import sample_codec
from tests.support.postgres import ON_SQLITE, ask

pytestmark = pytest.mark.processes

ITERATIONS_A_SECOND, EVENTS_A_SECOND = 100, 10
STEP_SECONDS = 10
"""What the job reports in one go."""
WITH_A_SERVER_SECONDS = 50
"""Before the outage, and after it."""
PATIENCE_SECONDS = 120.0


class ReportingJob:
    """Reports as a training loop does, some seconds' worth at a time."""

    def __init__(self, link: ServerConnection, monkeypatch: pytest.MonkeyPatch) -> None:
        self.iterations = self.events = 0
        self._link = link
        self._moved, self._moves = threading.Condition(), 0
        for name in ("store_events", "acknowledged"):
            monkeypatch.setattr(event_queue.EventQueue, name, self._telling(getattr(event_queue.EventQueue, name)))

    def _telling(self, move):
        def moved(*arguments):
            move(*arguments)
            with self._moved:
                self._moves += 1
                self._moved.notify_all()

        return moved

    def train(self, seconds: int) -> None:
        for _ in range(seconds // STEP_SECONDS):
            before = self._moves
            for _ in range(ITERATIONS_A_SECOND * STEP_SECONDS):
                self.iterations += 1
                at = 1e9 + self.iterations / ITERATIONS_A_SECOND
                self._link.sample(Iteration(self.iterations, 1, at, 0.01, None), {"loss": 1 / self.iterations})
            for _ in range(EVENTS_A_SECOND * STEP_SECONDS):
                self.events += 1
                self._link.event(
                    Notice(at=1e9, iteration=self.iterations, lineage=1, level="info", code="test",
                           message=str(self.events))
                )  # fmt: skip
            with self._moved:
                assert self._moved.wait_for(lambda seen=before: self._moves > seen, PATIENCE_SECONDS)


@ON_SQLITE
@pytest.mark.parametrize(
    ("seconds", "waiting_samples"), [(50, 1000), pytest.param(7200, 40_000, marks=pytest.mark.long)]
)
def test_nothing_that_happened_is_lost_and_what_was_thinned_is_told(
    serve, new_database, tmp_path, monkeypatch, seconds, waiting_samples
):
    monkeypatch.setattr(batch_sender, "BURST_SECONDS", 0.0)
    monkeypatch.setattr(http_client, "MAX_BACKOFF_SECONDS", 0.1)
    monkeypatch.setattr(event_queue, "WAITING_SAMPLES", waiting_samples)
    server = serve()
    link = ServerConnection(server=server.url, token=None, job="char-gpt", uid="u", attempt=1, rank=0,
                spool=tmp_path / "spool", flush_seconds=0.001)  # fmt: skip
    job = ReportingJob(link, monkeypatch)
    link.start()
    job.train(WITH_A_SERVER_SECONDS)
    server.kill()
    job.train(seconds)
    spooled_bytes = sum(file.stat().st_size for file in (tmp_path / "spool").iterdir())
    server = serve("--port", server.url.rpartition(":")[2])
    began = perf_counter()
    job.train(WITH_A_SERVER_SECONDS)
    link.close(600.0)
    caught_up_seconds = perf_counter() - began

    assert list((tmp_path / "spool").iterdir()) == []
    notices = ask(new_database, "SELECT message FROM notices WHERE code = 'test' ORDER BY id")
    output = [int(message) for (message,) in notices]
    assert output == list(range(1, job.events + 1)), "events are missing, twice, or out of order"
    missing = missing_of(job.iterations, ask(new_database, "SELECT columns FROM chunks"))
    gaps = ask(new_database, "SELECT first_iteration, last_iteration, dropped FROM gaps")
    assert len(missing) > 0, "nothing was thinned: this shows nothing"
    assert len(missing) == sum(dropped for _, _, dropped in gaps)
    in_a_gap = np.zeros(job.iterations + 1, dtype=bool)
    for first, last, _ in gaps:
        in_a_gap[first : last + 1] = True
    assert in_a_gap[missing].all()
    print(
        f"\n{seconds} s away: {job.events} events, {spooled_bytes / 2**20:.1f} MiB of them on disk, "
        f"all there and in order; {len(missing)} of {job.iterations} samples thinned away, "
        f"and as many reported, in {len(gaps)} gaps; caught up in {caught_up_seconds:.0f} s"
    )


def missing_of(iterations: int, chunks: list[tuple]) -> np.ndarray:
    """Those up to so many that no chunk has. None is there twice."""
    stored = np.concatenate([sample_codec.unpack(bytes(chunk)).iteration for (chunk,) in chunks])
    assert len(stored) == len(np.unique(stored)), "samples are there twice"
    return np.setdiff1d(np.arange(1, iterations + 1), stored)
