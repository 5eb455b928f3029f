"""Limits of stores: matching, division, and what jobs get of it, as two jobs report at the same time."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from holdfast.protocol.store_shares import StoreReport, StoreShare
from holdfast.protocol.stores import NewStoreLimit, NewStoreWeight
from holdfast_server import models
from holdfast_server.control import control, stores
from holdfast_server.core.errors import InvalidSetting, UnknownJob, UnknownStore
from holdfast_server.db import Database
from holdfast_server.queries import stores as listing
from holdfast_server.queries.stores import StoreQuery
from holdfast_server.records import desired_state, store_shares
from holdfast_server.records.share_division import LAPSE_SECONDS

NOW = 1_790_000_000.0
STORE, PATH = "f" * 32, "/mnt/lustre/runs"


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    database = Database(str(tmp_path / "h.db"))
    database.prepare()
    database.open()
    yield database
    database.close()


def attempt(job: str, uid: str) -> models.AttemptRecord:
    return models.AttemptRecord(
        job=job, uid=uid, attempt=1, started_at=NOW, iteration=1, lineage=1, last_iteration=1, iterations=1
    )


def add_job(db: Database, job: str, *, uid: str = "uid", project: str = "default") -> None:
    def work(session) -> None:  # type: ignore[no-untyped-def]
        if session.get(models.ProjectRecord, project) is None:
            session.add(models.ProjectRecord(name=project, created_at=NOW))
            session.flush()
        session.add(models.JobRecord(name=job, project=project, created_at=NOW, last_contact_at=NOW, uid=uid))
        session.flush()
        session.add(attempt(job, uid))

    db.write(work)


def report(db: Database, job: str, *, at: float = NOW, uid: str = "uid", **values: object) -> None:
    facts = {"store": STORE, "address": PATH, "host": "node-1", "checkpoint_bytes": 100} | values
    event = StoreReport(at=at, **facts)  # type: ignore[arg-type]
    db.write(lambda session: store_shares.record(session, job, uid, event, now=at))
    if store_shares.has_limits(db):
        store_shares.divide_now(db, at)


def share(db: Database, job: str) -> StoreShare | None:
    return next(iter(control.desired(db, job, now=NOW).shares or ()), None)


def set_limit(db: Database, target: str = PATH, limit: str = "200MB/s", **values: int) -> None:
    stores.set_limit(db, NewStoreLimit(target=target, limit=limit, **values), who="ada", now=NOW)


def two_jobs(db: Database) -> None:
    for job in "a", "b":
        add_job(db, job)
        report(db, job, wants=1)


@pytest.mark.parametrize("target", [STORE, PATH, "/mnt/lustre", "/mnt/lustre/", "/"])
def test_a_limit_is_for_an_id_or_what_is_below_an_address(db: Database, target: str) -> None:
    two_jobs(db)
    set_limit(db, target)
    assert share(db, "a") is not None


@pytest.mark.parametrize("target", ["e" * 32, "/mnt/lus", "/mnt/lustre/runs/x", "s3://mnt/lustre"])
def test_a_limit_is_for_nothing_else(db: Database, target: str) -> None:
    two_jobs(db)
    set_limit(db, target)
    assert share(db, "a") is None


def test_the_closest_limit_counts(db: Database) -> None:
    two_jobs(db)
    set_limit(db, "/mnt", "1MB/s")
    set_limit(db, PATH, "2MB/s")
    with db.read() as session:
        found = listing.get(session, STORE, visible_projects=None, now=NOW)
    assert found.limit is not None
    assert found.limit.target == PATH


def test_starts_are_granted_one_after_the_other_at_the_whole_rate(db: Database) -> None:
    two_jobs(db)
    set_limit(db, writers=1)
    assert [each.granted for job in ("a", "b") if (each := share(db, job)) is not None] == [1, 0]
    report(db, "a", wants=1, started=1, writing=True)
    found = share(db, "a")
    assert found is not None
    assert found.bytes_per_second == 200e6
    report(db, "a", wants=1, started=1, at=NOW + 5)
    second = share(db, "b")
    assert second is not None
    assert (second.granted, second.bytes_per_second) == (1, 200e6)


def test_an_agent_that_waits_gets_the_new_share_without_a_new_version(db: Database) -> None:
    two_jobs(db)
    before = control.desired(db, "b", now=NOW)
    set_limit(db)
    with db.read() as session:
        is_newer = partial(desired_state.is_newer, session, "b", after=before.version, alert_pins="")
        assert is_newer(share_number=before.share_number)
        assert not is_newer(share_number=None)
    after = control.desired(db, "b", now=NOW)
    assert after.version == before.version
    assert after.share_number > before.share_number


def test_a_limit_that_is_removed_frees_the_jobs(db: Database) -> None:
    two_jobs(db)
    set_limit(db)
    number = control.desired(db, "a", now=NOW).share_number
    stores.remove_limit(db, PATH, who="ada", now=NOW + 1)
    after = control.desired(db, "a", now=NOW)
    assert after.shares == ()
    assert after.share_number > number


def test_a_job_that_fell_silent_or_ended_leaves_its_place_to_others(db: Database) -> None:
    two_jobs(db)
    set_limit(db, writers=1)
    report(db, "a", wants=1, started=1, writing=True)

    def fall_silent(session) -> None:  # type: ignore[no-untyped-def]
        session.get_one(models.JobRecord, "b").last_contact_at = NOW + store_shares.SILENT_SECONDS

    db.write(fall_silent)
    store_shares.divide_regularly(db, NOW + store_shares.SILENT_SECONDS)
    second = share(db, "b")
    assert second is not None
    assert second.granted == 1
    assert share(db, "a") is None


def test_requests_of_a_new_attempt_count_from_the_start(db: Database) -> None:
    two_jobs(db)
    set_limit(db)
    report(db, "a", wants=7, started=6, written_bytes=500)
    db.write(lambda session: setattr(session.get_one(models.JobRecord, "a"), "uid", "new"))
    db.write(lambda session: session.add(attempt("a", "new")))
    report(db, "a", uid="new", wants=1, written_bytes=30, at=NOW + LAPSE_SECONDS + 1)
    found = share(db, "a")
    assert found is not None
    assert found.granted == 1
    with db.read() as session:
        store = listing.get(session, STORE, visible_projects=None, now=NOW)
    assert {each.job: each.written_bytes for each in store.writers}["a"] == 530


def test_divisions_at_the_same_time_grant_no_more_than_the_limit_has(db: Database) -> None:
    """Reports of all jobs arrive at once, and each is followed by a division."""
    jobs = [f"job-{number}" for number in range(12)]
    for job in jobs:
        add_job(db, job)
    set_limit(db, writers=3)
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda job: report(db, job, wants=1), jobs))
    granted = [job for job in jobs if (found := share(db, job)) is not None and found.granted]
    assert len(granted) == 3


def test_reports_that_arrive_while_a_division_waits_are_part_of_it(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_jobs(db)
    set_limit(db)
    divided, real, release = list[float](), store_shares.divide_all, threading.Event()

    def divide(session: Session, *, now: float) -> dict[str, int]:
        divided.append(now)
        return real(session, now=now)

    monkeypatch.setattr(store_shares, "divide_all", divide)
    event = StoreReport(at=NOW, store=STORE, address=PATH)

    async def report_together() -> None:
        db.submit(lambda _: release.wait(300))  # the division waits for its turn
        reports = [asyncio.create_task(store_shares.follow_reports(db, [event], now=NOW)) for _ in range(20)]
        try:
            for report in itertools.islice(asyncio.as_completed(reports, timeout=60), 19):
                await report
        finally:
            release.set()
        await asyncio.gather(*reports)

    asyncio.run(report_together())
    assert len(divided) == 1


def test_a_weight_is_for_a_job_that_writes_there(db: Database) -> None:
    two_jobs(db)
    set_limit(db)
    stores.set_weight(db, STORE, NewStoreWeight(job="a", weight=3.0), who="ada", now=NOW)
    with db.read() as session:
        store = listing.get(session, STORE, visible_projects=None, now=NOW)
    shares = {each.job: each.share_bytes_per_second for each in store.writers}
    assert shares == pytest.approx({"a": 150e6, "b": 50e6})
    with pytest.raises(UnknownJob):
        stores.set_weight(db, STORE, NewStoreWeight(job="c", weight=1.0), who="ada", now=NOW)
    with pytest.raises(UnknownStore):
        stores.set_weight(db, "x", NewStoreWeight(job="a", weight=1.0), who="ada", now=NOW)


def test_jobs_of_other_projects_are_counted_but_not_named(db: Database) -> None:
    add_job(db, "mine", project="vision")
    add_job(db, "theirs", project="nlp")
    for job in "mine", "theirs":
        report(db, job, writing=True, bytes_per_second=10.0, waiting_bytes=5)
    with db.read() as session:
        store = listing.get(session, STORE, visible_projects=frozenset({"vision"}), now=NOW)
        assert [each.job for each in store.writers] == ["mine"]
        assert (store.hidden_writers, store.bytes_per_second, store.waiting_bytes) == (1, 20.0, 10)
        assert listing.find(session, StoreQuery(visible_projects={"audio"}), now=NOW).stores == []
        with pytest.raises(UnknownStore):
            listing.get(session, STORE, visible_projects=frozenset({"audio"}), now=NOW)


def test_the_same_path_on_two_hosts_is_two_stores_without_an_id_and_a_bucket_is_one(db: Database) -> None:
    for number, host in enumerate(("node-1", "node-2")):
        add_job(db, f"disk-{number}")
        report(db, f"disk-{number}", store="", address="/scratch", host=host)
        add_job(db, f"bucket-{number}")
        report(db, f"bucket-{number}", store="", address="s3://bucket/runs", host=host)
    with db.read() as session:
        found = listing.find(session, StoreQuery(order="address"), now=NOW).stores
    assert [store.address for store in found] == ["/scratch", "/scratch", "s3://bucket/runs"]


@pytest.mark.parametrize("bad", [{"limit": "fast"}, {"limit": 0}, {"limit": "1MB/s", "holds": "soon"}])
def test_a_limit_that_makes_no_sense_is_refused(db: Database, bad: dict[str, str]) -> None:
    with pytest.raises(InvalidSetting):
        stores.set_limit(db, NewStoreLimit(target="/mnt", **bad), who="ada", now=NOW)  # type: ignore[arg-type]
