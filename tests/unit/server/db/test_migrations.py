from __future__ import annotations

import subprocess
import sys
import threading
from importlib.resources import files

import msgspec
import pytest
from alembic.util import CommandError
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

import holdfast_migrations
from holdfast_migrations import CannotStore, Upgraded, connections, history
from holdfast_server.core.settings import database_url
from holdfast_server.db import Database
from tests.support.postgres import ON_POSTGRES, ON_SQLITE, ask, check_matches_models

VERSIONS = files("holdfast_migrations") / "versions"

JOB = (
    "INSERT INTO jobs (name, project, created_at, last_contact_at, uid, attempt, sequence, iteration, lineage, "
    "latest_lineage, recent, paced, version, paused, paused_version, checkpoint_request, applied_version) "
    "VALUES ('j', 'default', 1, 1, '', 0, 0, 0, 0, 0, '', '', 0, false, 0, 0, 0)"
)
ALL = sorted(holdfast_migrations.known_revisions())
NEXT = f"{int(ALL[-1]) + 1:04}"
NEXT_REVISION = f"""
import sqlalchemy as sa
from alembic import op

revision = "{NEXT}"
down_revision = "{ALL[-1]}"


def upgrade():
    op.add_column("jobs", sa.Column("mood", sa.String(), nullable=False, server_default="good"))
    op.create_index("ix_jobs_mood", "jobs", ["mood"])
"""


@pytest.fixture
def next_release(tmp_path, monkeypatch):
    """Make this process a later release, which has one more revision: a column of `jobs` and its index."""
    folder = tmp_path / "next_versions"
    folder.mkdir()
    (folder / f"{NEXT}_mood.py").write_text(NEXT_REVISION)
    original = history._config

    def config(connection=None):
        found = original(connection)
        found.set_main_option("path_separator", "newline")
        found.set_main_option("version_locations", f"{VERSIONS}\n{folder}")
        return found

    monkeypatch.setattr(history, "_config", config)
    monkeypatch.setattr(holdfast_migrations, "_newest", lambda: NEXT)
    history._scripts.cache_clear()
    yield
    monkeypatch.undo()
    history._scripts.cache_clear()


@pytest.fixture
def stored(url, place):
    """A database of this release, with a job."""
    holdfast_migrations.upgrade(url)
    ask(place, JOB)


@pytest.fixture
def place(new_database):
    return new_database


@pytest.fixture
def url(place):
    return database_url(place)


def tables(place):
    query = {
        "sqlite": "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'",
        "postgresql": "SELECT tablename FROM pg_tables WHERE schemaname = 'public'",
    }[database_url(place).get_backend_name()]
    return {name for (name,) in ask(place, query)} - {"alembic_version"}


def revision(place):
    return ask(str(place), "SELECT version_num FROM alembic_version")[0][0]


def test_an_empty_database_gets_all_tables_and_matches_the_models(url, place):
    assert holdfast_migrations.upgrade(url) == Upgraded(ALL)
    assert {"jobs", "attempts", "lineages", "checkpoints", "orders", "chunks", "batches"} <= tables(place)
    check_matches_models(place)


def test_a_database_of_an_earlier_release_keeps_its_rows(url, place):
    first = next(number for number in ALL if number > "0007")
    holdfast_migrations.upgrade(url, "0007")
    ask(place, JOB)
    ask(
        place,
        "INSERT INTO attempts (job, uid, attempt, started_at, iteration, lineage, iterations, last_iteration, "
        "host, pid, world_size, supervised, versions) VALUES ('j', 'u', 1, 1, 0, 0, 0, 0, '', 1, 1, false, '')",
    )
    assert holdfast_migrations.upgrade(url).revisions == ALL[ALL.index(first) :]
    assert ask(place, "SELECT archived_at, on_trouble, protected FROM jobs") == [(None, None, False)]
    assert ask(place, "SELECT uid, stores, batches_an_iteration FROM attempts") == [("u", None, None)]
    check_matches_models(place)


def test_open_alerts_of_one_message_are_one_group(url, place):
    """Their incident is named by the first one, and ends with the last one."""
    holdfast_migrations.upgrade(url, "0017")
    ask(
        place,
        "INSERT INTO alert_channels (id, project, name, kind, target, secret, least_severity, enabled, "
        "created_at, created_by) VALUES ('c', 'default', 'c', 'slack', 'x', '', 'info', true, 1, '')",
    )
    for number, resolved in ((1, "NULL"), (2, "NULL"), (3, "9"), (4, "NULL")):
        ask(place, JOB.replace("'j'", f"'j{number}'"))
        ask(
            place,
            "INSERT INTO alerts (id, project, job, rule, kind, severity, subject, message, since, fired_at, "
            f"resolved_at) VALUES ({number}, 'default', 'j{number}', 'silent', 'silent', 'critical', '', '', 1, "
            f"2, {resolved})",
        )
    for number, first in ((1, 1), (2, 1), (3, 1), (4, 4), (None, None)):
        payload = msgspec.msgpack.encode({"alert": first and {"id": first}})
        ask(
            place,
            "INSERT INTO alert_deliveries (channel, alert, event, payload, state, tries, created_at, next_at) "
            "VALUES ('c', :alert, :event, :payload, 'delivered', 1, 1, 1)",
            alert=number, event="firing" if number else "test", payload=payload,
        )  # fmt: skip
    holdfast_migrations.upgrade(url)
    for query in (
        "SELECT id, group_id FROM alerts ORDER BY id",
        "SELECT alert, group_id FROM alert_deliveries WHERE alert IS NOT NULL ORDER BY alert",
    ):
        assert ask(place, query) == [(1, 1), (2, 1), (3, 3), (4, 4)]


def test_free_space_moves_from_addresses_to_the_stores_that_have_them(url, place):
    holdfast_migrations.upgrade(url, "0019")
    for store, address, free in (("a", "/mnt", 90), ("b", "/scratch", 50), ("c", "/scratch", "NULL")):
        ask(place, f"INSERT INTO stores VALUES ('{store}', '{address}', 'node', {free}, 172900.0)")
    for address, day, free in (
        ("/mnt", 86400, 99),
        ("/mnt", 172800, 91),
        ("/scratch", 86400, 7),
        ("/other", 0, 5),
    ):
        ask(place, f"INSERT INTO account_stores VALUES ('{address}', {day}, {day + 10}, {free})")
    holdfast_migrations.upgrade(url)
    rows = ask(place, "SELECT store, day, at, free_bytes, total_bytes FROM store_disks ORDER BY store, day")
    assert [tuple(row) for row in rows] == [
        ("a", 86400, 86410.0, 99, None), ("a", 172800, 172810.0, 91, None), ("b", 172800, 172900.0, 50, None),
    ]  # fmt: skip
    assert len(ask(place, "SELECT id, address, host, at FROM stores")) == 3


@pytest.mark.parametrize("number", ALL)
def test_a_revision_lists_its_tables_and_columns_itself(number):
    (revision,) = (file.read_text() for file in VERSIONS.iterdir() if file.name.startswith(f"{number}_"))
    assert [word for word in ("models", "create_all", "metadata") if word in revision] == []


def test_the_check_sees_a_difference(url, place):
    holdfast_migrations.upgrade(url)
    ask(place, "ALTER TABLE jobs ADD COLUMN mood TEXT")
    with pytest.raises(CommandError, match="New upgrade operations"):
        check_matches_models(place)


def test_upgrading_twice_changes_nothing(url, place):
    holdfast_migrations.upgrade(url)
    assert holdfast_migrations.upgrade(url) == Upgraded([])
    assert revision(place) == ALL[-1]


@pytest.mark.processes
def test_a_start_that_has_nothing_to_do_does_not_wait_for_alembic(url):
    start = (
        "import sys, sqlalchemy, holdfast_migrations\n"
        "done = holdfast_migrations.upgrade(sqlalchemy.make_url(sys.argv[1]))\n"
        "print(done.revisions, 'alembic' in sys.modules)"
    )
    command = [sys.executable, "-c", start, url.render_as_string(hide_password=False)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == f"{ALL} True\n"
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[] False\n"


def test_a_later_release_migrates_what_is_stored(stored, url, place, next_release):
    assert holdfast_migrations.upgrade(url).revisions == [NEXT]
    assert ask(place, "SELECT name, mood FROM jobs") == [("j", "good")]


def test_a_database_of_a_later_release_is_refused(url, place):
    holdfast_migrations.upgrade(url)
    ask(place, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(holdfast_migrations.DatabaseTooNew, match="9999"):
        holdfast_migrations.upgrade(url)


@pytest.mark.parametrize("at", ["0007", ALL[-2]])
def test_a_database_with_other_tables_of_that_revision_is_refused_and_left_alone(at, url, place):
    """Before the first release, revisions had the same numbers and other tables."""
    holdfast_migrations.upgrade(url, at)
    ask(place, JOB)
    ask(place, "ALTER TABLE jobs RENAME COLUMN recent TO latest")
    before = tables(place)
    with pytest.raises(holdfast_migrations.NotOurDatabase, match=rf"revision {at}, but lacks the column 'recent'"):
        holdfast_migrations.upgrade(url)
    assert (revision(place), tables(place)) == (at, before)
    assert ask(place, "SELECT name FROM jobs") == [("j",)]


def test_a_current_database_with_other_tables_is_refused_by_a_server(url, place):
    holdfast_migrations.upgrade(url)
    ask(place, "DROP TABLE chunks")
    database = Database(place)
    with pytest.raises(holdfast_migrations.NotOurDatabase, match=rf"{ALL[-1]}, but lacks the table 'chunks'"):
        database.prepare()
    ask(place, "CREATE TABLE chunks (job TEXT)")
    other = Database(place)  # the file is not locked
    with pytest.raises(holdfast_migrations.NotOurDatabase, match=r"lacks the column '\w+' of table 'chunks'"):
        other.prepare()


def test_a_database_of_another_program_is_refused_and_left_alone(url, place):
    ask(place, "CREATE TABLE invoices (x INTEGER)")
    with pytest.raises(holdfast_migrations.NotOurDatabase, match="invoices"):
        holdfast_migrations.upgrade(url)
    assert tables(place) == {"invoices"}


def test_a_migration_that_breaks_off_leaves_nothing_behind(url, place, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("the power went")

    monkeypatch.setattr("alembic.operations.Operations.bulk_insert", broken)
    with pytest.raises(RuntimeError, match="the power went"):
        holdfast_migrations.upgrade(url)
    assert tables(place) == set()
    monkeypatch.undo()
    assert holdfast_migrations.upgrade(url).revisions == ALL


@ON_SQLITE
def test_a_file_is_kept_as_it_was_before_it_is_migrated(stored, url, tmp_path, next_release):
    kept = holdfast_migrations.upgrade(url).backup
    assert kept == tmp_path / f"holdfast.db.at-{ALL[-1]}"
    assert revision(kept) == ALL[-1]
    assert ask(str(kept), "SELECT name FROM jobs") == [("j",)]
    assert ask(str(kept), "PRAGMA integrity_check") == [("ok",)]


@ON_SQLITE
def test_a_copy_that_could_not_be_made_leaves_the_file_as_it_is(stored, url, place, tmp_path, next_release):
    (tmp_path / f"holdfast.db.at-{ALL[-1]}.part").mkdir()
    with pytest.raises(OSError, match="part"):
        holdfast_migrations.upgrade(url)
    assert revision(place) == ALL[-1]


@ON_POSTGRES
def test_two_servers_that_start_together_migrate_once(url):
    done = []

    def start():
        done.append(holdfast_migrations.upgrade(url).revisions)

    servers = [threading.Thread(target=start) for _ in range(3)]
    for server in servers:
        server.start()
    for server in servers:
        server.join()
    assert sorted(done) == [[], [], ALL]


@ON_POSTGRES
def test_a_migration_lets_others_through_while_it_waits_for_a_table(
    stored, url, place, cluster, monkeypatch, next_release
):
    """A transaction reads `jobs` and stays open; statements that come after the migration run before it."""
    monkeypatch.setattr(connections, "LOCK_SECONDS", 0.1)
    pauses = []

    with connections.connected(url) as reader:
        reader.execute(text("SELECT pg_advisory_unlock_all()"))
        reader.commit()
        reader.execute(text("SELECT count(*) FROM jobs"))

        def pause(seconds):
            pauses.append(seconds)
            assert ask(place, "UPDATE jobs SET iteration = iteration + 1 RETURNING iteration") == [(len(pauses),)]
            if len(pauses) == 2:
                reader.rollback()

        monkeypatch.setattr("holdfast_migrations.connections.time.sleep", pause)
        assert holdfast_migrations.upgrade(url).revisions == [NEXT]
    assert len(pauses) == 2


@ON_POSTGRES
def test_a_table_that_is_never_free_is_told_of(stored, url, place, monkeypatch, next_release):
    monkeypatch.setattr(connections, "LOCK_SECONDS", 0.01)
    monkeypatch.setattr(connections, "LOCK_TRIES", 3)
    monkeypatch.setattr("holdfast_migrations.connections.time.sleep", lambda _: None)
    with connections.connected(url) as reader:
        reader.execute(text("SELECT pg_advisory_unlock_all()"))
        reader.commit()
        reader.execute(text("SELECT count(*) FROM jobs"))
        with pytest.raises(CannotStore, match="lock timeout"):
            holdfast_migrations.upgrade(url)
    assert revision(place) == ALL[-1]


@ON_POSTGRES
def test_a_server_that_migrates_for_ever_is_not_waited_for(url, monkeypatch):
    monkeypatch.setattr(connections, "OTHERS_SECONDS", 0.01)
    with connections.connected(url), pytest.raises(CannotStore, match="another server has been migrating"):
        holdfast_migrations.upgrade(url)


def test_a_database_of_another_encoding_is_refused(cluster):
    cluster.execute("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
    try:
        with pytest.raises(CannotStore, match="LATIN1"):
            holdfast_migrations.upgrade(database_url(cluster.url("latin")))
    finally:
        cluster.drop("latin")


def test_the_database_itself_refuses_a_second_open_order(stored, place):
    def order(name, state):
        ask(
            place,
            "INSERT INTO orders (id, job, key, checkpoint, iteration, state, created_at, who, fence, "
            "from_iteration, from_lineage) VALUES (:name, 'j', :name, 'c', 1, :state, 1, 'w', 1, 1, 1)",
            name=name,
            state=state,
        )

    order("a", "restored")
    order("b", "requested")
    for state in ("requested", "delivered", "restoring", "unknown"):
        with pytest.raises(IntegrityError):
            order("c", state)
    order("d", "failed")
