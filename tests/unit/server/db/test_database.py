from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from holdfast_migrations import NotOurDatabase
from holdfast_server import models
from holdfast_server.core.errors import UnknownJob
from holdfast_server.core.settings import ServerSettings, database_url, default_database, is_loopback
from holdfast_server.db import (
    Database,
    DatabaseBusy,
    DatabaseClosed,
    DatabaseInUse,
    DatabaseUnavailable,
    Statement,
    on_connection,
    sqlite,
)
from holdfast_server.db import database as database_module
from holdfast_server.db.background_jobs import BackgroundJob, run_once
from tests.support.eventually import eventually
from tests.support.postgres import ON_POSTGRES, ON_SQLITE

LEAVES = "BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END"
AT_COMMIT = "AFTER INSERT ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION leaves()"


def run(database, scenario):
    database.prepare()
    database.open()
    try:
        return scenario(database)
    finally:
        database.close()


def outcomes_of(submitted):
    return [one.exception() for one in submitted]


@pytest.fixture
def database(empty_database):
    return Database(empty_database)


def job(name):
    def work(session):
        session.add(models.JobRecord(name=name, created_at=1.0, last_contact_at=1.0))

    return work


def jobs(database):
    with database.read() as session:
        return session.scalar(select(func.count()).select_from(models.JobRecord))


@ON_SQLITE
def test_connections_are_durable_checked_and_patient(database):
    def pragmas(session):
        names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout", "temp_store")
        return [session.scalar(text(f"PRAGMA {name}")) for name in names]

    def scenario(database):
        with database.read() as session:
            assert pragmas(session) == ["wal", 2, 1, 5000, 0]
        return database.write(pragmas)

    assert run(database, scenario) == ["wal", 2, 1, 5000, 2]  # savepoints in memory


@ON_POSTGRES
def test_a_commit_waits_for_the_disk_whatever_the_server_is_set_to(database, cluster):
    def setting(session):
        return session.scalar(text("SHOW synchronous_commit"))

    assert cluster.execute("SHOW synchronous_commit") == [("off",)]
    assert run(database, lambda database: database.write(setting)) == "on"


def test_what_is_read_in_one_session_is_of_one_moment(database):
    def scenario(database):
        count = select(func.count()).select_from(models.JobRecord)
        with database.read() as session:
            before = session.scalar(count)
            database.write(job("a"))
            within = session.scalar(count)
        return before, within, jobs(database)

    assert run(database, scenario) == (0, 0, 1)


def test_units_that_wait_together_share_a_commit_and_fail_alone(database):
    def scenario(database):
        commits = []
        commit = database._backend._commit

        def counted(units):
            commits.append(len(units))
            return commit(units)

        database._backend._commit = counted
        names = ["a", "b", "a", "c"]
        outcomes = outcomes_of([database.submit(job(name), job="a") for name in names])
        assert [isinstance(outcome, IntegrityError) for outcome in outcomes] == [False, False, True, False]
        assert sum(commits) == 4
        assert len(commits) < 4
        return jobs(database)

    assert run(database, scenario) == 3


def test_listeners_hear_after_the_commit_and_only_of_what_was_stored(database):
    def failing(session):
        raise ValueError("no")

    async def listening(database):
        with database.changes.subscribe() as subscription:
            with pytest.raises(ValueError, match="no"):
                database.write(failing, job="failed")
            assert not await subscription.wait(0.0)
            database.write(job("stored"), job="stored")
            assert await subscription.wait(300)
            return jobs(database)

    assert run(database, lambda database: asyncio.run(listening(database))) == 1


def test_readers_cannot_write(database):
    def scenario(database):
        with database.read() as session:
            session.add(models.JobRecord(name="x", created_at=1.0, last_contact_at=1.0))
            with pytest.raises(DBAPIError, match=r"read-?only"):
                session.flush()

    run(database, scenario)


def test_a_caller_that_gives_up_does_not_stop_the_writer(database):
    def scenario(database):
        database.submit(job("left")).cancel()
        database.write(job("stayed"))
        return jobs(database)

    assert run(database, scenario) == 2


ADD_PROJECT = Statement(text("INSERT INTO projects (name, created_at) VALUES (:name, 1.0)"))


def fails_after_it_wrote(session):
    on_connection(session, ADD_PROJECT.run, {"name": "failed"})
    job("failed")(session)
    session.flush()
    raise UnknownJob("failed")


def breaks_a_constraint(session):
    job("failed")(session)
    session.flush()
    on_connection(session, ADD_PROJECT.run, {"name": "failed"}, {"name": "failed"})


def fails_after_its_own_commit(session):
    job("failed")(session)
    session.commit()
    raise ValueError("no")


def breaks_a_constraint_at_commit(session):
    session.execute(text("PRAGMA defer_foreign_keys = ON"))
    session.add(models.JobRecord(name="failed", project="missing", created_at=1.0, last_contact_at=1.0))


@ON_SQLITE
@pytest.mark.parametrize(
    "work",
    [fails_after_it_wrote, breaks_a_constraint, fails_after_its_own_commit, breaks_a_constraint_at_commit],
)
@pytest.mark.parametrize("units", [1, 3], ids=["alone", "grouped"])
def test_units_that_fail_store_nothing_and_leave_no_transaction_open(database, work, units):
    def scenario(database):
        all_submitted = threading.Event()
        database.submit(lambda _: all_submitted.wait(300))
        failing = [database.submit(work) for _ in range(units)]
        all_submitted.set()
        assert None not in outcomes_of(failing)
        with closing(sqlite3.connect(database.path, timeout=0, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # fails while another transaction is open
            other.execute("ROLLBACK")
            stored = other.execute("SELECT name FROM jobs UNION SELECT name FROM projects").fetchall()
            assert stored == [("default",)]
        database.write(job("next"))
        return jobs(database)

    assert run(database, scenario) == 1


@ON_SQLITE
def test_a_disk_that_is_full_acknowledges_nothing_and_is_recovered_from(database):
    def fill(session):
        session.add(models.JobRecord(name="big", created_at=1.0, last_contact_at=1.0, recent=bytes(10_000_000)))

    def limit(session):
        session.execute(text("PRAGMA max_page_count = 1"))

    def lift(session):
        session.execute(text("PRAGMA max_page_count = 1000000"))

    def scenario(database):
        database.write(limit)
        with pytest.raises(OperationalError, match="full"):
            database.write(fill)
        database.write(lift)
        database.write(job("after"))
        return jobs(database)

    assert run(database, scenario) == 1


def test_a_full_disk_is_said_as_such_over_http(client, agent, monkeypatch):
    def full(*_, **__):
        raise OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full"))

    agent.start()
    monkeypatch.setattr(client.app.state.services.database, "stored", full)
    reply = client.post("/api/v1/ingest", content=agent.sent[0], headers={"Content-Type": "application/msgpack"})
    assert (reply.status_code, reply.json()["error"], reply.headers["retry-after"]) == (507, "disk_full", "1")
    monkeypatch.undo()
    agent.train(1)


def test_closing_commits_what_waits(database):
    def scenario(database):
        waiting = [database.submit(job(f"job{number}")) for number in range(200)]
        database.close()
        assert outcomes_of(waiting) == [None] * 200
        database.open()
        return jobs(database)

    assert run(database, scenario) == 200


def test_more_than_can_wait_is_sent_away(database, monkeypatch):
    monkeypatch.setattr("holdfast_server.db.database.WAITING_UNITS", 3)

    def scenario(database):
        may_end = threading.Event()
        first = database.submit(lambda _: may_end.wait(300), job="x")
        eventually(lambda: database.writes_waiting == 0)
        waiting = [database.submit(job(f"job{number}"), job="x") for number in range(3)]
        for number in range(3, 10):
            with pytest.raises(DatabaseBusy):
                database.submit(job(f"job{number}"), job="x")
        may_end.set()
        assert outcomes_of([first, *waiting]) == [None] * 4
        return jobs(database)

    assert run(database, scenario) == 3


@ON_SQLITE
def test_a_read_that_finds_no_free_connection_in_time_is_refused_as_unavailable(database, monkeypatch):
    monkeypatch.setattr(database_module, "CONNECTIONS", 1)
    monkeypatch.setattr(sqlite, "READER_SECONDS", 0.01)

    def scenario(database):
        with database.read() as session:
            session.scalar(text("SELECT 1"))
            with pytest.raises(DatabaseUnavailable, match="does not answer"):
                jobs(database)
        assert jobs(database) == 0

    run(database, scenario)


def test_nothing_is_stored_after_closing(database):
    def scenario(database):
        database.close()
        with pytest.raises(DatabaseClosed):
            database.write(job("late"))
        with pytest.raises(DatabaseClosed):
            asyncio.run(database.ready())

    run(database, scenario)


@ON_SQLITE
def test_one_file_has_one_server(database):
    database.prepare()
    with pytest.raises(DatabaseInUse, match="--db"):
        Database(str(database.path)).prepare()
    database.release()
    other = Database(str(database.path))
    other.prepare()
    other.release()


@ON_SQLITE
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_one_file_has_one_server_under_any_name(database, link):
    database.prepare()
    other = Database(str(database.path.with_name("other.db")))
    link(database.path, other.path)
    with pytest.raises(DatabaseInUse, match="another Holdfast server"):
        other.prepare()
    with pytest.raises(DatabaseInUse), other.alone():
        pass
    database.release()
    other.prepare()
    with pytest.raises(DatabaseInUse):
        database.prepare()
    other.release()


@ON_SQLITE
def test_a_database_that_accepts_no_write_is_not_ready(client):
    def refuse(session):
        session.execute(
            text(
                "CREATE TRIGGER full BEFORE UPDATE ON alembic_version BEGIN "
                "SELECT RAISE(ABORT, 'database or disk is full'); END"
            )
        )

    def accept(session):
        session.execute(text("DROP TRIGGER full"))

    database = client.app.state.services.database
    assert client.get("/readyz").status_code == 200
    database.write(refuse)
    reply = client.get("/readyz")
    assert (reply.status_code, reply.json()["error"]) == (503, "not_ready")
    database.write(accept)
    assert client.get("/readyz").status_code == 200


@ON_SQLITE
def test_a_migration_that_fails_lets_the_file_go(database, monkeypatch):
    def broken(*_):
        raise sqlite3.DatabaseError("file is not a database")

    monkeypatch.setattr("holdfast_server.db.sqlite.upgrade", broken)
    with pytest.raises(sqlite3.DatabaseError):
        database.prepare()
    monkeypatch.undo()
    database.prepare()
    database.release()


def test_closing_waits_for_reads_in_progress(database):
    def scenario(database):
        reading, may_end = threading.Event(), threading.Event()

        def read():
            with database.read() as session:
                reading.set()
                assert may_end.wait(300)
                return session.scalar(text("SELECT 1"))

        with ThreadPoolExecutor(2) as threads:
            answer = threads.submit(read)
            assert reading.wait(300)
            closing = threads.submit(database.close)
            eventually(lambda: database._reader is None)
            may_end.set()
            closing.result()
            return answer.done(), answer.result()

    assert run(database, scenario) == (True, 1)


def test_only_the_default_place_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    ours = Database(str(default_database()))
    ours.prepare()
    ours.release()
    with pytest.raises(NotOurDatabase, match="there is no directory"):
        Database(str(tmp_path / "a" / "b" / "holdfast.db")).prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("localhost.example", False), ("", False)],
)  # fmt: skip
def test_what_counts_as_loopback(host, expected):
    assert is_loopback(host) is expected


def test_a_database_is_a_path_or_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(database_url("h.db")) == f"sqlite:///{tmp_path}/h.db"
    assert ServerSettings(database="sqlite:////var/h.db").url.database == "/var/h.db"
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert str(default_database()) == "/data/holdfast/holdfast.db"
    for refused in ("sqlite://", "sqlite:///:memory:", "postgresql://h", "mysql://h/x", "postgresql://h:port/x"):
        with pytest.raises(ValueError, match="database"):
            database_url(refused)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+asyncpg", "postgresql+psycopg"])
def test_a_postgresql_url_may_be_written_in_any_of_its_ways(scheme):
    url = database_url(f"{scheme}://me:secret@host:5433/holdfast?sslmode=require")
    assert url.drivername == "postgresql+psycopg"
    assert (url.host, url.port, url.database, url.query["sslmode"]) == ("host", 5433, "holdfast", "require")


def test_where_it_stores_is_told_without_the_password():
    assert Database("postgresql://me:secret@host/holdfast").place == "postgresql://me:***@host/holdfast"
    for refused in ("postgresql://me:secret@host", "mysql://me:secret@host/x", "postgresql://me:secret@h:port/x"):
        with pytest.raises(ValueError, match="database") as told:
            database_url(refused)
        assert "secret" not in str(told.value)


@ON_POSTGRES
def test_work_that_the_database_takes_back_runs_again(database):
    """As after a deadlock."""
    runs = []

    def work(session):
        runs.append(1)
        session.add(models.JobRecord(name="once", created_at=1.0, last_contact_at=1.0))
        session.flush()
        if len(runs) < 3:
            session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40P01'; END $$"))

    def scenario(database):
        database.write(work)
        return jobs(database)

    assert (run(database, scenario), len(runs)) == (1, 3)


@ON_POSTGRES
def test_a_connection_that_is_lost_in_the_middle_costs_nobody_anything(database):
    lost = []

    def work(session):
        session.add(models.JobRecord(name="once", created_at=1.0, last_contact_at=1.0))
        session.flush()
        if not lost:
            lost.append(1)
            session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    def scenario(database):
        submitted = [database.submit(work, job="same"), database.submit(job("beside"), job="same")]
        assert outcomes_of(submitted) == [None, None]
        return jobs(database)

    assert run(database, scenario) == 2


@ON_POSTGRES
def test_work_is_not_run_again_when_nobody_knows_whether_it_was_stored(database, cluster):
    """The connection breaks while COMMIT is under way."""
    cluster.execute(
        f"CREATE FUNCTION leaves() RETURNS trigger LANGUAGE plpgsql AS '{LEAVES}'", database.url.database
    )
    cluster.execute(f"CREATE CONSTRAINT TRIGGER leaves {AT_COMMIT}", database.url.database)
    runs = []

    def work(session):
        runs.append(1)
        session.add(models.JobRecord(name="maybe", created_at=1.0, last_contact_at=1.0))
        session.flush()

    def scenario(database):
        with pytest.raises(DatabaseUnavailable):
            database.write(work)
        return jobs(database)

    assert (run(database, scenario), len(runs)) == (0, 1)


@ON_POSTGRES
def test_units_about_one_job_run_alone_and_about_others_beside_it(database):
    """Each looks, waits for the others, and writes what it saw, as no two could that overlap."""
    inside, most = set(), []

    def work(name):
        def look_and_write(session):
            assert name not in inside
            inside.add(name)
            row = session.get(models.JobRecord, name)
            most.append(len(inside))
            session.execute(text("SELECT pg_sleep(0.02)"))
            if row is None:
                session.add(models.JobRecord(name=name, created_at=1.0, last_contact_at=1.0, version=1))
            else:
                row.version += 1
            session.flush()
            inside.remove(name)

        return look_and_write

    def scenario(database):
        other = Database(database.url.render_as_string(hide_password=False))
        other.open()
        names = ["a", "b"] * 5
        outcomes_of([one.submit(work(name), job=name) for name in names for one in (database, other)])
        other.close()
        with database.read() as session:
            return list(session.scalars(select(models.JobRecord.version)))

    assert run(database, scenario) == [10, 10]
    assert max(most) > 1


@ON_POSTGRES
def test_statements_that_a_migration_changed_are_prepared_anew(database, cluster):
    """Another instance has added a column; the driver prepares what it runs for the sixth time."""
    everything = text("SELECT * FROM projects WHERE name <> :name").bindparams(name="")

    def all_projects(session):
        return [row._asdict() for row in session.execute(everything)]

    def scenario(database):
        for _ in range(10):
            before = database.write(all_projects)
        cluster.execute("ALTER TABLE projects ADD COLUMN more int", database.url.database)
        assert "more" not in before[0]
        return database.write(all_projects)[0]["more"]

    assert run(database, scenario) is None


def test_a_background_job_that_finds_no_database_is_skipped_without_a_traceback(database, caplog):
    def refused(database, now):
        raise OperationalError("SELECT 1", None, OSError("connection refused"))

    def scenario(database):
        return asyncio.run(run_once(BackgroundJob("example", 1.0, refused), database, lambda: 0.0))

    assert not run(database, scenario)
    (record,) = [each for each in caplog.records if "example" in each.message]
    assert record.message.startswith("skipped background job example")
    assert record.exc_info is None
