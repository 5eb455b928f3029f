from __future__ import annotations

import asyncio
import sqlite3

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import IntegrityError, OperationalError

from holdfast_migrations import NotOurDatabase
from holdfast_server import models
from holdfast_server.db import Database, DatabaseBusy, DatabaseClosed, DatabaseInUse
from holdfast_server.settings import ServerSettings, database_url, default_database, is_loopback


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
def database(tmp_path):
    return Database(str(tmp_path / "holdfast.db"))


def job(name):
    async def work(session):
        session.add(models.Job(name=name, created_at=1.0, last_contact_at=1.0))

    return work


async def jobs(database):
    async with database.read() as session:
        return await session.scalar(select(func.count()).select_from(models.Job))


def test_connections_are_durable_checked_and_patient(database):
    async def pragmas(session):
        names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        return [await session.scalar(text(f"PRAGMA {name}")) for name in names]

    async def scenario(database):
        async with database.read() as session:
            assert await pragmas(session) == ["wal", 2, 1, 5000]
        return await database.write(pragmas)

    assert run(database, scenario) == ["wal", 2, 1, 5000]


def test_units_that_wait_together_share_a_commit_and_fail_alone(database):
    async def scenario(database):
        commits = []
        commit = database._commit

        async def counted(units):
            commits.append(len(units))
            await commit(units)

        database._commit = counted
        names = ["a", "b", "a", "c"]
        outcomes = await asyncio.gather(
            *(database.write(job(name), job=name) for name in names), return_exceptions=True
        )
        assert [isinstance(outcome, IntegrityError) for outcome in outcomes] == [False, False, True, False]
        assert sum(commits) == 4
        assert len(commits) < 4
        return await jobs(database)

    assert run(database, scenario) == 3


def test_listeners_hear_after_the_commit_and_only_of_what_was_stored(database):
    async def failing(session):
        raise ValueError("no")

    async def scenario(database):
        with database.changes.subscribe() as subscription:
            with pytest.raises(ValueError, match="no"):
                await database.write(failing, job="failed")
            assert not await subscription.wait(0.0)
            await database.write(job("stored"), job="stored")
            assert await subscription.wait(60)
            return await jobs(database)

    assert run(database, scenario) == 1


def test_readers_cannot_write(database):
    async def scenario(database):
        async with database.read() as session:
            session.add(models.Job(name="x", created_at=1.0, last_contact_at=1.0))
            with pytest.raises(OperationalError, match="readonly"):
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


def test_a_disk_that_is_full_acknowledges_nothing_and_is_recovered_from(database):
    async def fill(session):
        session.add(models.Job(name="big", created_at=1.0, last_contact_at=1.0, recent=bytes(10_000_000)))

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
    monkeypatch.setattr(client.app.state.database, "write", full)
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
    monkeypatch.setattr("holdfast_server.db.WAITING_UNITS", 3)

    async def scenario(database):
        writes = (database.write(job(f"job{number}")) for number in range(10))
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        assert [isinstance(outcome, DatabaseBusy) for outcome in outcomes] == [False] * 3 + [True] * 7
        return await jobs(database)

    assert run(database, scenario) == 3


def test_nothing_is_stored_after_closing(database):
    async def scenario(database):
        await database.close()
        with pytest.raises(DatabaseClosed):
            await database.write(job("late"))
        with pytest.raises(DatabaseClosed):
            await database.ready()

    run(database, scenario)


def test_one_file_has_one_server(database):
    database.prepare()
    with pytest.raises(DatabaseInUse, match="--db"):
        Database(str(database.path)).prepare()
    database.release()
    other = Database(str(database.path))
    other.prepare()
    other.release()


def test_a_migration_that_fails_lets_the_file_go(database, monkeypatch):
    def broken(*_):
        raise sqlite3.DatabaseError("file is not a database")

    monkeypatch.setattr("holdfast_migrations.upgrade", broken)
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
    for refused in ("sqlite://", "sqlite:///:memory:", "postgresql://h/x"):
        with pytest.raises(ValueError, match="database"):
            database_url(refused)
