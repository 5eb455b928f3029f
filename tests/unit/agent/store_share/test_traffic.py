"""What a session writes to its store: it waits for its start, keeps to its share, and goes on without a server."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.protocol.field_types import MAX_INTEGER
from holdfast.protocol.store_shares import StoreReport, StoreShare
from holdfast.store import open_store
from holdfast.store_share.traffic import StoreTraffic
from holdfast.system.files import Files


class Clock:
    """A clock that waits advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


class Job:
    """The traffic of a job, with what it reported."""

    def __init__(self, store: Path, world_size: int = 1) -> None:
        self.clock, self.events = Clock(), list[StoreReport]()
        self.link = SimpleNamespace(answered_at=self.clock.now)
        reporter: Any = SimpleNamespace(link=self.link, event=self.events.append)
        controller: Any = SimpleNamespace(plan=None, profile=None)
        self.store = open_store(str(store))
        self.reporter = reporter
        self.traffic = StoreTraffic(self.store, reporter, controller, world_size, self.clock, self.clock.wait)
        self.traffic.identified.result(10)

    def share(self, rate: float = 100.0, granted: int = 0) -> None:
        self.link.answered_at = self.clock.now
        share = StoreShare(
            address=self.store.url, bytes_per_second=rate, granted=granted, holds_seconds=60.0,
            fallback_bytes_per_second=10.0, longest_wait_seconds=300.0,
        )  # fmt: skip
        self.traffic.follow([share])

    def run(self, kind: str = "scheduled", number: int = 1) -> Any:
        run = SimpleNamespace(number=number, kind=kind, is_urgent=False, size_bytes=1000)
        self.traffic.begin(run)
        return run

    def seconds_to_write(self, run: Any, size_bytes: int = 1000) -> float:
        before = self.clock.now
        if (pace := self.traffic.pace(run, run.kind)) is not None:
            pace(size_bytes)
        return self.clock.now - before


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "store")


def test_a_job_without_a_limit_waits_for_nothing(job: Job) -> None:
    job.traffic.follow([])
    assert job.traffic.may_begin()
    assert job.seconds_to_write(job.run()) == 0


def test_a_start_is_requested_once_and_waits_until_it_is_granted(job: Job) -> None:
    job.share()
    assert not job.traffic.may_begin()
    assert not job.traffic.may_begin()
    assert [event.wants for event in job.events if event.wants] == [1]
    job.share(granted=1)
    assert job.traffic.may_begin()
    job.run()
    assert (job.events[-1].wants, job.events[-1].started, job.events[-1].writing) == (1, 1, True)
    assert not job.traffic.may_begin()  # the next one is a request of its own
    assert job.events[-1].wants == 2


def test_a_write_keeps_within_the_share_and_follows_its_changes(job: Job) -> None:
    job.share(rate=2000.0)
    run = job.run()
    assert job.seconds_to_write(run, 2000) == pytest.approx(1.0)
    job.share(rate=4000.0)
    assert job.seconds_to_write(run, 2000) == pytest.approx(0.5)


def test_each_rank_gets_its_part(tmp_path: Path) -> None:
    job = Job(tmp_path / "store", world_size=4)
    job.share(rate=8000.0)
    assert job.traffic.rank_rate("scheduled") == 2000.0
    assert job.traffic.rank_rate("final") == 0.0
    assert job.seconds_to_write(job.run(), 2000) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["requested", "safety", "final"])
def test_what_somebody_waits_for_is_not_limited(job: Job, kind: str) -> None:
    job.share()
    assert job.seconds_to_write(job.run(kind)) == 0


def test_a_write_that_becomes_urgent_goes_on_at_full_speed(job: Job) -> None:
    job.share(rate=2000.0)
    run = job.run()
    run.is_urgent = True  # as SIGTERM, a wait of the script and the end of the session make it
    assert job.seconds_to_write(run, 10**12) == 0


def test_the_share_holds_without_a_server_and_then_the_fallback(job: Job) -> None:
    job.share(rate=2000.0)
    assert not job.traffic.may_begin()
    job.clock.now += 59
    assert not job.traffic.may_begin()
    assert job.traffic.rate() == 2000.0
    job.clock.now += 2
    assert job.traffic.may_begin()
    assert job.traffic.rate() == 10.0
    job.link.answered_at = job.clock.now  # it answers again
    assert job.traffic.rate() == 2000.0


def test_a_start_that_is_never_granted_does_not_block(job: Job) -> None:
    job.share()
    assert not job.traffic.may_begin()
    job.clock.now += 299
    job.link.answered_at = job.clock.now
    assert not job.traffic.may_begin()
    job.clock.now += 1
    job.link.answered_at = job.clock.now
    assert job.traffic.may_begin()


def test_a_job_that_another_attempt_replaced_is_not_blocked(job: Job) -> None:
    job.share()
    job.reporter.link = None
    assert job.traffic.may_begin()


def test_bytes_are_counted_while_they_are_written_and_once(job: Job) -> None:
    job.share(rate=2000.0)
    run = job.run()
    assert job.seconds_to_write(run, 400) == pytest.approx(0.2)
    job.clock.now += 60
    report = job.traffic.sample()
    assert report is not None
    assert (report.written_bytes, report.waiting_bytes, report.writing) == (400, 1000, True)
    job.traffic.end(run, 1000)
    last = job.events[-1]
    assert (last.written_bytes, last.waiting_bytes, last.writing, last.checkpoint_bytes) == (1000, 0, False, 1000)
    assert job.traffic.sample() is None


def test_each_measurement_of_the_disk_is_reported_once(job: Job) -> None:
    """A later report with an old figure would replace a newer one of another job of the store."""
    run = job.run()
    assert job.events[0].free_bytes  # once its id was known
    assert (job.events[-1].free_bytes, job.events[-1].total_bytes) == (None, None)
    job.traffic.end(run, 1000)
    last = job.events[-1]
    assert last.free_bytes is not None
    assert last.total_bytes is not None
    assert 0 < last.free_bytes < last.total_bytes
    job.clock.now += 60
    after = job.traffic.sample()
    assert after is not None
    assert after.free_bytes is None


def test_a_disk_larger_than_a_number_of_the_protocol_is_reported(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Files, "free_bytes", lambda *_: 2 * MAX_INTEGER)
    monkeypatch.setattr(Files, "total_bytes", lambda *_: 3 * MAX_INTEGER)
    job.traffic.end(job.run(), 1000)
    encoded = msgspec.msgpack.encode(job.events[-1])
    assert msgspec.msgpack.decode(encoded, type=StoreReport).free_bytes == MAX_INTEGER
