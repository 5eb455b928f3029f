"""Several servers on one PostgreSQL: what one of them hears, the others tell."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.protocol.jobs import DesiredChanges
from holdfast_server import models
from holdfast_server.control import control
from holdfast_server.core.settings import database_url
from holdfast_server.db import Database, DatabaseUnavailable, postgres, relay
from holdfast_server.db import database as database_module
from holdfast_server.db.background_jobs import BackgroundJob, background_jobs_running, run_once
from tests.support.postgres import ON_POSTGRES, ON_SQLITE, ask

JOB = "char-gpt"
NOW = 1_790_000_000.0


def job(name):
    def work(session):
        session.add(models.JobRecord(name=name, created_at=1.0, last_contact_at=1.0))

    return work


def run(empty_database, scenario):
    """`scenario` with two instances that serve the same database."""

    async def whole():
        here, there = Database(empty_database), Database(empty_database)
        here.open()
        there.open()
        try:
            return await asyncio.wait_for(scenario(here, there), 300)
        finally:
            here.close()
            there.close()

    return asyncio.run(whole())


def edit(database):
    changes = DesiredChanges(paused=True)
    return control.edit(database, JOB, changes, version=None, who="operator", now=NOW)


def lose_the_listener(database):
    """As when the network between a server and its database breaks."""
    pid = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"
    found = ask(database, f"SELECT pg_terminate_backend(pid) FROM ({pid}) AS listening")
    assert len(found) == 2


@ON_POSTGRES
def test_an_edit_at_one_instance_wakes_who_waits_at_another(empty_database, monkeypatch):
    monkeypatch.setattr(relay, "POLL_SECONDS", 3600)
    monkeypatch.setattr(relay, "GATHER_SECONDS", 3600)

    async def scenario(here, there):
        here.write(job(JOB))
        with there.changes.subscribe(JOB) as waiting, there.changes.subscribe("another") as other:
            edit(here)
            assert await waiting.wait(300)
            assert not await other.wait(0.0)
            return control.desired(there, JOB, now=NOW)

    assert run(empty_database, scenario).paused


@ON_POSTGRES
def test_what_agents_report_is_gathered_and_told_together(empty_database, monkeypatch):
    monkeypatch.setattr(relay, "POLL_SECONDS", 3600)
    monkeypatch.setattr(relay, "GATHER_SECONDS", 0.05)

    async def scenario(here, there):
        told = []
        monkeypatch.setattr(relay.ChangeRelay, "_send", counted(relay.ChangeRelay._send, told))
        with there.changes.subscribe("job-99") as last, there.changes.subscribe("job-0") as first:
            for stored in [here.submit(job(f"job-{n}"), job=f"job-{n}") for n in range(100)]:
                stored.result()
            assert await last.wait(300)
            assert await first.wait(300)
        return len(told)

    assert run(empty_database, scenario) < 50


def counted(tell, told):
    def telling(self, connection):
        told.append(set(self._gathered))
        tell(self, connection)

    return telling


@ON_POSTGRES
def test_of_very_many_changes_it_is_told_that_there_were_some(empty_database, monkeypatch):
    monkeypatch.setattr(relay, "POLL_SECONDS", 3600)
    monkeypatch.setattr(relay, "MOST_NAMES", 3)

    async def scenario(here, there):
        with there.changes.subscribe("quiet") as quiet:
            for number in range(5):
                here._backend._relay.announce(f"job-{number}", at_once=False)
            here._backend._relay.announce("job-5", at_once=True)
            return await quiet.wait(300)

    assert run(empty_database, scenario)


@ON_POSTGRES
@pytest.mark.parametrize("jobs", [1, 10])
def test_samples_at_one_instance_wake_no_agent_that_waits_at_another(empty_database, monkeypatch, jobs):
    """However many report: each of them would ask its instance whether there is anything for it."""
    monkeypatch.setattr(relay, "POLL_SECONDS", 3600)
    monkeypatch.setattr(relay, "MOST_NAMES", 3)

    async def scenario(here, there):
        with there.changes.subscribe("job-0", samples=False) as agent, there.changes.subscribe("job-0") as page:
            for number in range(jobs):
                at_once = number == jobs - 1
                here._backend._relay.announce(f"job-{number}", at_once=at_once, samples_only=True)
            heard = [await page.wait(300), await agent.wait(0.0)]
            here._backend._relay.announce("job-0", at_once=True)
            return [*heard, await agent.wait(300)]

    assert run(empty_database, scenario) == [True, False, True]


@ON_POSTGRES
def test_what_was_told_while_nobody_listened_is_found_out(empty_database, monkeypatch):
    """The listening connections are lost, an edit is made, and nothing but the next connection tells of it."""
    monkeypatch.setattr(relay, "POLL_SECONDS", 3600)

    async def scenario(here, there):
        here.write(job(JOB))
        with there.changes.subscribe(JOB) as waiting:
            lose_the_listener(empty_database)
            ask(empty_database, "UPDATE jobs SET version = version + 1")
            return await waiting.wait(300)

    assert run(empty_database, scenario)


@ON_POSTGRES
def test_an_edit_that_nobody_told_of_is_looked_up(empty_database, monkeypatch):
    monkeypatch.setattr(relay, "POLL_SECONDS", 0.02)

    async def scenario(here, there):
        here.write(job(JOB))
        with there.changes.subscribe(JOB) as waiting:
            # The first look sees the job for the first time.
            assert await waiting.wait(300)
            assert not await waiting.wait(0.2)
            ask(empty_database, "UPDATE jobs SET version = version + 1")
            return await waiting.wait(300)

    assert run(empty_database, scenario)


@ON_POSTGRES
def test_it_is_looked_up_however_much_there_is_to_tell(empty_database, monkeypatch):
    """An instance at which agents report has something to tell every quarter of a second."""
    monkeypatch.setattr(relay, "POLL_SECONDS", 0.3)

    async def scenario(here, there):
        here.write(job(JOB))

        async def report():
            while True:
                there._backend._relay.announce("busy", at_once=True)
                await asyncio.sleep(0.01)

        reporting = asyncio.create_task(report())
        try:
            with there.changes.subscribe(JOB) as waiting:
                assert await waiting.wait(300), "it looks for the first time"
                ask(empty_database, "UPDATE jobs SET version = version + 1")
                return await waiting.wait(300)
        finally:
            reporting.cancel()

    assert run(empty_database, scenario)


@ON_POSTGRES
def test_one_instance_sees_to_the_chores_until_it_is_gone(empty_database):
    done = []

    def chore(name):
        def note(database, now):
            done.append((name, now))

        return BackgroundJob("note", 1.0, note)

    async def scenario(here, there):
        first = [
            await run_once(chore("here"), here, lambda: NOW),
            await run_once(chore("there"), there, lambda: NOW),
        ]
        again = [
            await run_once(chore("here"), here, lambda: NOW),
            await run_once(chore("there"), there, lambda: NOW),
        ]
        assert first == again == [True, False]
        here.close()
        assert await run_once(chore("there"), there, lambda: NOW)
        here.open()
        assert not await run_once(chore("here"), here, lambda: NOW)

    run(empty_database, scenario)
    assert done == [("here", NOW), ("here", NOW), ("there", NOW)]


@ON_POSTGRES
def test_an_instance_that_lost_its_connection_asks_again_whether_it_leads(empty_database):
    async def scenario(here, there):
        assert here.leads()
        held = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND database IS NOT NULL"
        ask(empty_database, f"SELECT pg_terminate_backend(pid) FROM ({held}) AS holding")
        assert there.leads()
        assert not here.leads()

    run(empty_database, scenario)


@ON_POSTGRES
def test_chores_that_ask_together_take_one_connection_between_them(empty_database, monkeypatch):
    connect, made = postgres.connect, []

    def counted(url):
        made.append(url)
        return connect(url)

    async def scenario(here, there):
        monkeypatch.setattr(postgres, "connect", counted)
        with ThreadPoolExecutor(6) as threads:
            assert list(threads.map(lambda _: here.leads(), range(6))) == [True] * 6
        assert len(made) == 1

    run(empty_database, scenario)


def test_a_chore_that_fails_is_logged_and_done_again(empty_database, caplog):
    tries, done = [], threading.Event()

    def fails_once(database, now):
        tries.append(now)
        if len(tries) == 1:
            raise ValueError("no")
        done.set()

    async def scenario():
        database = Database(empty_database)
        database.open()
        async with background_jobs_running([BackgroundJob("example", 0.01, fails_once)], database, lambda: NOW):
            assert await asyncio.to_thread(done.wait, 300)
        database.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "background job example failed; it will run again" in caplog.text
    assert tries[:2] == [NOW, NOW]


@ON_POSTGRES
def test_a_database_that_went_away_is_said_to_be_unavailable_and_comes_back(
    client, agent, empty_database, cluster
):
    agent.start()
    cluster.crash()
    try:
        assert client.get("/readyz").status_code == 503
        assert client.get("/api/v1/jobs").status_code == 503
        assert client.get("/healthz").status_code == 200
    finally:
        cluster.start()
    assert agent.train(1).acked == 1
    assert client.get("/readyz").status_code == 200


# ---- whether a server is ready --------------------------------------------------------------------


@ON_POSTGRES
def test_one_that_can_only_be_read_is_not_ready(empty_database):
    """As a standby, to which a name may lead after the primary has gone."""

    Database(empty_database).prepare()
    ask(empty_database, f"ALTER DATABASE {name_of(empty_database)} SET default_transaction_read_only = on")
    database = Database(empty_database)
    database.open()
    try:
        with pytest.raises(DatabaseUnavailable, match="standby"):
            asyncio.run(database.ready())
    finally:
        database.close()


def name_of(url):
    return database_url(url).database


@ON_SQLITE
def test_one_that_nobody_gets_to_write_to_is_not_ready(empty_database, monkeypatch):
    monkeypatch.setattr(database_module, "READY_SECONDS", 0.2)

    async def scenario():
        database = Database(empty_database)
        database.prepare()
        database.open()
        await database.ready()
        other = sqlite3.connect(database.path, isolation_level=None)
        try:
            other.execute("BEGIN IMMEDIATE")
            asked = await asyncio.gather(*(database.ready() for _ in range(50)), return_exceptions=True)
            assert {type(error) for error in asked} == {DatabaseUnavailable}
            assert database.writes_waiting <= 1, "many who ask are one question"
            other.execute("ROLLBACK")
            await database.ready()
        finally:
            other.close()
            database.close()

    asyncio.run(scenario())
