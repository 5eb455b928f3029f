from __future__ import annotations

import asyncio
import os
import sqlite3
import threading

import anyio
import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from holdfast_migrations import NotOurDatabase
from holdfast_server import models
from holdfast_server.core.settings import ServerSettings, database_url, default_database, is_loopback
from holdfast_server.db import (
    Database,
    DatabaseBusy,
    DatabaseClosed,
    DatabaseInUse,
    DatabaseUnavailable,
    sqlite,
)
from tests.support.postgres import ON_POSTGRES, ON_SQLITE

LEAVES = "BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END"
AT_COMMIT = "AFTER INSERT ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION leaves()"


def run(database, scenario):
    async def whole():
        database.prepare()
        await database.open()
        try:
            return await scenario(database)
        finally:
            await database.close()

    return asyncio.run(whole())


@pytest.fixture
def database(empty_database):
    return Database(empty_database)


def job(name):
    async def work(session):
        session.add(models.JobRecord(name=name, created_at=1.0, last_contact_at=1.0))

    return work


async def jobs(database):
    async with database.read() as session:
        return await session.scalar(select(func.count()).select_from(models.JobRecord))


@ON_SQLITE
def test_connections_are_durable_checked_and_patient(database):
    async def pragmas(session):
        names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        return [await session.scalar(text(f"PRAGMA {name}")) for name in names]

    async def scenario(database):
        async with database.read() as session:
            assert await pragmas(session) == ["wal", 2, 1, 5000]
        return await database.write(pragmas)

    assert run(database, scenario) == ["wal", 2, 1, 5000]


@ON_POSTGRES
def test_a_commit_waits_for_the_disk_whatever_the_server_is_set_to(database, cluster):
    async def setting(session):
        return await session.scalar(text("SHOW synchronous_commit"))

    assert cluster.execute("SHOW synchronous_commit") == [("off",)]
    assert run(database, lambda database: database.write(setting)) == "on"


def test_what_is_read_in_one_session_is_of_one_moment(database):
    async def scenario(database):
        count = select(func.count()).select_from(models.JobRecord)
        async with database.read() as session:
            before = await session.scalar(count)
            # Whoever writes is another task, as in the server.
            await asyncio.create_task(database.write(job("a")))
            within = await session.scalar(count)
        return before, within, await jobs(database)

    assert run(database, scenario) == (0, 0, 1)


def test_units_that_wait_together_share_a_commit_and_fail_alone(database):
    async def scenario(database):
        commits = []
        commit = database._backend._commit

        def counted(units):
            commits.append(len(units))
            return commit(units)

        database._backend._commit = counted
        names = ["a", "b", "a", "c"]
        outcomes = await asyncio.gather(
            *(database.write(job(name), job="a") for name in names), return_exceptions=True
        )
        assert [isinstance(outcome, IntegrityError) for outcome in outcomes] == [False, False, True, False]
        assert sum(commits) == 4
        assert len(commits) < 4
        return await jobs(database)

    assert run(database, scenario) == 3


@ON_SQLITE
def test_work_that_waits_for_something_else_fails_alone(database):
    async def waits(session):
        session.add(models.JobRecord(name="half", created_at=1.0, last_contact_at=1.0))
        await session.flush()
        await asyncio.sleep(0)

    async def scenario(database):
        outcomes = await asyncio.gather(
            database.write(job("before")), database.write(waits), database.write(job("after")),
            return_exceptions=True,
        )  # fmt: skip
        assert [type(outcome) for outcome in outcomes] == [type(None), RuntimeError, type(None)]
        return await jobs(database)

    assert run(database, scenario) == 2


def test_listeners_hear_after_the_commit_and_only_of_what_was_stored(database):
    async def failing(session):
        raise ValueError("no")

    async def scenario(database):
        with database.changes.subscribe() as subscription:
            with pytest.raises(ValueError, match="no"):
                await database.write(failing, job="failed")
            assert not await subscription.wait(0.0)
            await database.write(job("stored"), job="stored")
            assert await subscription.wait(300)
            return await jobs(database)

    assert run(database, scenario) == 1


def test_readers_cannot_write(database):
    async def scenario(database):
        async with database.read() as session:
            session.add(models.JobRecord(name="x", created_at=1.0, last_contact_at=1.0))
            with pytest.raises(DBAPIError, match=r"read-?only"):
                await session.flush()

    run(database, scenario)


def test_a_caller_that_gives_up_does_not_stop_the_writer(database):
    async def scenario(database):
        impatient = asyncio.create_task(database.write(job("left")))
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        await database.write(job("stayed"))
        return await jobs(database)

    assert run(database, scenario) == 2


@ON_SQLITE
def test_a_disk_that_is_full_acknowledges_nothing_and_is_recovered_from(database):
    async def fill(session):
        session.add(models.JobRecord(name="big", created_at=1.0, last_contact_at=1.0, recent=bytes(10_000_000)))

    async def limit(session):
        await session.execute(text("PRAGMA max_page_count = 1"))

    async def lift(session):
        await session.execute(text("PRAGMA max_page_count = 1000000"))

    async def scenario(database):
        await database.write(limit)
        with pytest.raises(OperationalError, match="full"):
            await database.write(fill)
        await database.write(lift)
        await database.write(job("after"))
        return await jobs(database)

    assert run(database, scenario) == 1


def test_a_full_disk_is_said_as_such_over_http(client, agent, monkeypatch):
    async def full(*_, **__):
        raise OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full"))

    agent.start()
    monkeypatch.setattr(client.app.state.services.database, "write", full)
    reply = client.post("/api/v1/ingest", content=agent.sent[0], headers={"Content-Type": "application/msgpack"})
    assert (reply.status_code, reply.json()["error"], reply.headers["retry-after"]) == (507, "disk_full", "1")
    monkeypatch.undo()
    agent.train(1)


def test_closing_commits_what_waits(database):
    async def scenario(database):
        waiting = [asyncio.create_task(database.write(job(f"job{number}"))) for number in range(200)]
        await asyncio.sleep(0)
        await database.close()
        await asyncio.gather(*waiting)
        await database.open()
        return await jobs(database)

    assert run(database, scenario) == 200


def test_more_than_can_wait_is_sent_away(database, monkeypatch):
    monkeypatch.setattr("holdfast_server.db.database.WAITING_UNITS", 3)

    async def scenario(database):
        writes = (database.write(job(f"job{number}")) for number in range(10))
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        assert [isinstance(outcome, DatabaseBusy) for outcome in outcomes] == [False] * 3 + [True] * 7
        return await jobs(database)

    assert run(database, scenario) == 3


@ON_SQLITE
def test_a_read_that_finds_no_free_connection_in_time_is_refused_as_unavailable(database, monkeypatch):
    monkeypatch.setattr(sqlite, "READERS", 1)
    monkeypatch.setattr(sqlite, "READER_SECONDS", 0.01)

    async def scenario(database):
        async with database.read() as session:
            await session.scalar(text("SELECT 1"))
            with pytest.raises(DatabaseUnavailable, match="does not answer"):
                await jobs(database)
        assert await jobs(database) == 0

    run(database, scenario)


def test_nothing_is_stored_after_closing(database):
    async def scenario(database):
        await database.close()
        with pytest.raises(DatabaseClosed):
            await database.write(job("late"))
        with pytest.raises(DatabaseClosed):
            await database.ready()

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
    async def refuse(session):
        await session.execute(
            text(
                "CREATE TRIGGER full BEFORE UPDATE ON alembic_version BEGIN "
                "SELECT RAISE(ABORT, 'database or disk is full'); END"
            )
        )

    async def accept(session):
        await session.execute(text("DROP TRIGGER full"))

    database = client.app.state.services.database
    assert client.get("/readyz").status_code == 200
    client.portal.call(database.write, refuse)
    reply = client.get("/readyz")
    assert (reply.status_code, reply.json()["error"]) == (503, "not_ready")
    client.portal.call(database.write, accept)
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


def test_closing_waits_for_reads_that_were_given_up(database):
    async def scenario(database):
        reading = asyncio.Event()

        async def read_for_ever():
            async with database.read() as session:
                await session.execute(text("SELECT 1"))
                reading.set()
                await asyncio.Event().wait()

        given_up = asyncio.create_task(read_for_ever())
        await reading.wait()
        given_up.cancel()
        await database.close()
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert run(database, scenario) == set()


def test_a_task_group_that_is_cancelled_lets_a_read_end(database):
    """As that of a streamed answer does whose client has gone."""

    async def scenario(database):
        found = []

        async def read(group):
            async with database.read() as session:
                group.cancel_scope.cancel()
                found.append(await session.scalar(text("SELECT 1")))
            await asyncio.sleep(0)
            found.append("not cancelled")

        async with anyio.create_task_group() as group:
            group.start_soon(read, group)
        return found

    assert run(database, scenario) == [1]


@ON_SQLITE
def test_a_reader_that_is_cancelled_while_its_connection_opens_waits_for_it(database, monkeypatch):
    """The thread of the connection would outlive the event loop."""
    go, connect = threading.Event(), sqlite3.connect

    async def scenario(database):
        opening, loop = asyncio.Semaphore(0), asyncio.get_running_loop()

        def slow(*arguments, **options):
            loop.call_soon_threadsafe(opening.release)
            assert go.wait(300)
            return connect(*arguments, **options)

        async with database.read() as first:
            await first.execute(text("SELECT 1"))
            monkeypatch.setattr(sqlite3, "connect", slow)
            readers = [asyncio.create_task(jobs(database)) for _ in range(2)]
            for _ in readers:
                await opening.acquire()
            for _ in range(20):  # again and again, as a task group of anyio does
                for reader in readers:
                    reader.cancel()
                await asyncio.sleep(0)
            waiting = [reader for reader in readers if not reader.done()]
            go.set()
            await asyncio.wait(readers)
            monkeypatch.undo()
            assert await jobs(database) == 0
            return len(waiting)

    assert run(database, scenario) == 2


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
    assert str(database_url("h.db")) == f"sqlite+aiosqlite:///{tmp_path}/h.db"
    assert ServerSettings(database="sqlite:////var/h.db").url.database == "/var/h.db"
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert str(default_database()) == "/data/holdfast/holdfast.db"
    for refused in ("sqlite://", "sqlite:///:memory:", "postgresql://h", "mysql://h/x", "postgresql://h:port/x"):
        with pytest.raises(ValueError, match="database"):
            database_url(refused)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+asyncpg", "postgresql+psycopg"])
def test_a_postgresql_url_may_be_written_in_any_of_its_ways(scheme):
    url = database_url(f"{scheme}://me:secret@host:5433/holdfast?sslmode=require")
    assert url.drivername == "postgresql+asyncpg"
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

    async def work(session):
        runs.append(1)
        session.add(models.JobRecord(name="once", created_at=1.0, last_contact_at=1.0))
        await session.flush()
        if len(runs) < 3:
            await session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40P01'; END $$"))

    async def scenario(database):
        await database.write(work)
        return await jobs(database)

    assert (run(database, scenario), len(runs)) == (1, 3)


@ON_POSTGRES
def test_a_connection_that_is_lost_in_the_middle_costs_nobody_anything(database):
    lost = []

    async def work(session):
        session.add(models.JobRecord(name="once", created_at=1.0, last_contact_at=1.0))
        await session.flush()
        if not lost:
            lost.append(1)
            await session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    async def scenario(database):
        outcomes = await asyncio.gather(
            database.write(work, job="same"), database.write(job("beside"), job="same"), return_exceptions=True
        )
        assert outcomes == [None, None]
        return await jobs(database)

    assert run(database, scenario) == 2


@ON_POSTGRES
def test_work_is_not_run_again_when_nobody_knows_whether_it_was_stored(database, cluster):
    """The connection breaks while COMMIT is under way."""
    cluster.execute(
        f"CREATE FUNCTION leaves() RETURNS trigger LANGUAGE plpgsql AS '{LEAVES}'", database.url.database
    )
    cluster.execute(f"CREATE CONSTRAINT TRIGGER leaves {AT_COMMIT}", database.url.database)
    runs = []

    async def work(session):
        runs.append(1)
        session.add(models.JobRecord(name="maybe", created_at=1.0, last_contact_at=1.0))
        await session.flush()

    async def scenario(database):
        with pytest.raises(DatabaseUnavailable):
            await database.write(work)
        return await jobs(database)

    assert (run(database, scenario), len(runs)) == (0, 1)


@ON_POSTGRES
def test_units_about_one_job_run_alone_and_about_others_beside_it(database):
    """Each looks, waits for the others, and writes what it saw, as no two could that overlap."""
    inside, most = set(), []

    def work(name):
        async def look_and_write(session):
            assert name not in inside
            inside.add(name)
            row = await session.get(models.JobRecord, name)
            most.append(len(inside))
            await session.execute(text("SELECT pg_sleep(0.02)"))
            if row is None:
                session.add(models.JobRecord(name=name, created_at=1.0, last_contact_at=1.0, version=1))
            else:
                row.version += 1
            await session.flush()
            inside.remove(name)

        return look_and_write

    async def scenario(database):
        other = Database(database.url.render_as_string(hide_password=False))
        await other.open()
        names = ["a", "b"] * 5
        await asyncio.gather(*(one.write(work(name), job=name) for name in names for one in (database, other)))
        await other.close()
        async with database.read() as session:
            return list(await session.scalars(select(models.JobRecord.version)))

    assert run(database, scenario) == [10, 10]
    assert max(most) > 1
