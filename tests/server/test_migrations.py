from __future__ import annotations

import sqlite3

import pytest

import holdfast_migrations
from holdfast_server.settings import database_url


@pytest.fixture
def url(tmp_path):
    return database_url(str(tmp_path / "holdfast.db"))


def tables(url):
    connection = sqlite3.connect(url.database)
    try:
        rows = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        )
        return {name for (name,) in rows} - {"alembic_version"}
    finally:
        connection.close()


def test_an_empty_database_gets_all_tables_and_matches_the_models(url):
    assert holdfast_migrations.upgrade(url) == ["0001"]
    assert {"jobs", "attempts", "lineages", "checkpoints", "orders", "chunks", "batches"} <= tables(url)
    holdfast_migrations.check(url)


def test_the_check_sees_a_difference(url):
    holdfast_migrations.upgrade(url)
    connection = sqlite3.connect(url.database)
    connection.execute("ALTER TABLE jobs ADD COLUMN mood TEXT")
    connection.close()
    with pytest.raises(holdfast_migrations.command.util.CommandError, match="New upgrade operations"):
        holdfast_migrations.check(url)


def test_upgrading_twice_changes_nothing(url):
    holdfast_migrations.upgrade(url)
    assert holdfast_migrations.upgrade(url) == []
    assert holdfast_migrations.current(url) == "0001"


def test_the_way_back_leads_to_an_empty_database(url):
    holdfast_migrations.upgrade(url)
    holdfast_migrations.downgrade(url, "base")
    assert tables(url) == set()
    assert holdfast_migrations.upgrade(url) == ["0001"]


def test_a_database_of_a_later_release_is_refused(url):
    holdfast_migrations.upgrade(url)
    with sqlite3.connect(url.database) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(holdfast_migrations.DatabaseTooNew, match="9999"):
        holdfast_migrations.upgrade(url)


def test_a_migration_that_breaks_off_leaves_nothing_behind(url, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("the power went")

    monkeypatch.setattr("alembic.operations.BatchOperations.create_index", broken)
    with pytest.raises(RuntimeError, match="the power went"):
        holdfast_migrations.upgrade(url)
    assert tables(url) == set()
    monkeypatch.undo()
    assert holdfast_migrations.upgrade(url) == ["0001"]


def test_the_database_itself_refuses_a_second_open_order(url):
    holdfast_migrations.upgrade(url)
    connection = sqlite3.connect(url.database)
    connection.execute(
        "INSERT INTO jobs (name, created_at, last_contact_at, uid, attempt, sequence, iteration, lineage, "
        "latest_lineage, recent, paced, version, paused, paused_version, checkpoint_request, applied_version) "
        "VALUES ('j', 1, 1, '', 0, 0, 0, 0, 0, '', '', 0, 0, 0, 0, 0)"
    )

    def order(name, state):
        connection.execute(
            "INSERT INTO orders (id, job, key, checkpoint, iteration, state, created_at, who, fence, "
            "from_iteration, from_lineage) VALUES (?, 'j', ?, 'c', 1, ?, 1, 'w', 1, 1, 1)",
            (name, name, state),
        )

    order("a", "restored")
    order("b", "requested")
    for state in ("requested", "delivered", "restoring"):
        with pytest.raises(sqlite3.IntegrityError):
            order("c", state)
    order("d", "failed")
    connection.close()
