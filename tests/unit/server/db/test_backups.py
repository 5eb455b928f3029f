from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast_server.commands.db import app
from holdfast_server.core.settings import database_url
from holdfast_server.db import Database, DatabaseInUse, backups

runner = CliRunner()


@pytest.fixture
def stored(tmp_path):
    """A database in which something is."""
    path = tmp_path / "holdfast.db"
    database = Database(str(path))
    database.prepare()
    database.release()
    write(path, "first")
    return path


def write(path, project):
    connection = sqlite3.connect(path)
    connection.execute("INSERT INTO projects (name, created_at) VALUES (?, 1)", (project,))
    connection.commit()
    connection.close()


def projects(path):
    connection = sqlite3.connect(path)
    found = {name for (name,) in connection.execute("SELECT name FROM projects")}
    connection.close()
    return found - {"default"}


def test_a_copy_is_all_that_is_stored_while_a_server_has_the_database(stored, tmp_path):
    server = Database(str(stored))
    with server.alone():
        size = backups.backup(database_url(str(stored)), tmp_path / "copy")
    assert (projects(tmp_path / "copy"), size) == ({"first"}, os.path.getsize(tmp_path / "copy"))
    assert not list(tmp_path.glob("*.part"))


def test_what_is_put_back_is_the_database_and_the_other_is_kept(stored, tmp_path):
    url = database_url(str(stored))
    backups.backup(url, tmp_path / "copy")
    write(stored, "later")
    kept = backups.put_back(url, tmp_path / "copy", replace=True)
    assert (projects(stored), projects(kept)) == ({"first"}, {"first", "later"})
    assert Database(str(stored)).prepare().revisions == []


def test_whatever_goes_wrong_there_is_a_database(stored, tmp_path, monkeypatch):
    """A server that is started next would begin an empty one, and nobody would notice for a while."""
    url = database_url(str(stored))
    backups.backup(url, tmp_path / "copy")
    write(stored, "later")

    def fail(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(backups, "_settle", fail)
    with pytest.raises(OSError, match="disk is gone"):
        backups.put_back(url, tmp_path / "copy", replace=True)
    assert projects(stored) == {"first", "later"}


def test_what_is_stored_is_for_whoever_runs_the_server_alone(stored, tmp_path):
    def rights(path):
        return path.stat().st_mode & 0o777

    url = database_url(str(stored))
    backups.backup(url, tmp_path / "copy")
    assert (rights(stored), rights(tmp_path / "copy")) == (0o600, 0o600)
    stored.chmod(0o640)
    backups.put_back(url, tmp_path / "copy", replace=True)
    assert rights(stored) == 0o640, "as somebody has set it"


def test_a_copy_is_put_back_where_nothing_is(stored, tmp_path):
    backups.backup(database_url(str(stored)), tmp_path / "copy")
    assert backups.put_back(database_url(str(tmp_path / "new.db")), tmp_path / "copy", replace=False) is None
    assert projects(tmp_path / "new.db") == {"first"}


def test_nothing_is_replaced_unasked(stored, tmp_path):
    url = database_url(str(stored))
    backups.backup(url, tmp_path / "copy")
    with pytest.raises(backups.CannotCopy, match="exists: --replace"):
        backups.put_back(url, tmp_path / "copy", replace=False)
    with pytest.raises(backups.CannotCopy, match="exists"):
        backups.backup(url, tmp_path / "copy")
    assert projects(stored) == {"first"}


def test_a_database_that_a_server_has_is_not_replaced(stored, tmp_path):
    url = database_url(str(stored))
    backups.backup(url, tmp_path / "copy")
    server = Database(str(stored))
    with server.alone(), pytest.raises(DatabaseInUse):
        backups.put_back(url, tmp_path / "copy", replace=True)
    assert projects(stored) == {"first"}


def other_program(path: Path) -> None:
    sqlite3.connect(path).execute("CREATE TABLE bookmarks (url TEXT)").connection.close()


def later_release(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
    connection.execute("INSERT INTO alembic_version VALUES ('9999')")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (other_program, "not a backup of a Holdfast database"),
        (later_release, "a later release"),
        (lambda path: path.write_bytes(b"not a database at all" * 100), "is not a backup of a Holdfast database"),
        (lambda path: None, "is not a backup of a Holdfast database"),
    ],
)
def test_what_is_no_copy_is_not_put_back(stored, tmp_path, make, words):
    make(tmp_path / "copy")
    with pytest.raises(backups.CannotCopy, match=words):
        backups.put_back(database_url(str(stored)), tmp_path / "copy", replace=True)
    assert projects(stored) == {"first"}


def test_a_damaged_copy_is_not_put_back(stored, tmp_path):
    copy = tmp_path / "copy"
    backups.backup(database_url(str(stored)), copy)
    content = bytearray(copy.read_bytes())
    content[4096 * 3 : 4096 * 6] = bytes(range(256)) * 48
    copy.write_bytes(content)
    with pytest.raises(backups.CannotCopy, match=r"damaged|no copy"):
        backups.put_back(database_url(str(stored)), copy, replace=True)
    assert projects(stored) == {"first"}


def test_postgresql_is_copied_with_its_own_tools(tmp_path):
    url = database_url("postgresql://me:secret@db/holdfast")
    with pytest.raises(backups.CannotCopy, match="pg_dump") as refused:
        backups.backup(url, tmp_path / "copy")
    assert "secret" not in str(refused.value)
    with pytest.raises(backups.CannotCopy, match="pg_restore"):
        backups.put_back(url, tmp_path / "copy", replace=True)


def test_the_commands_tell_what_they_did(stored, tmp_path):
    def run(*arguments):
        return runner.invoke(app, [*arguments, "--db", str(stored)])

    copy = str(tmp_path / "copy")
    assert "Copied to" in run("backup", copy).output
    assert run("backup", copy).exit_code == 1
    assert "Restored from" in run("restore", copy, "--replace").output
    assert run("size").output.strip().endswith("kB")
    assert "forever" in run("keep").output
    assert "90 d" in run("keep", "--samples", "90d", "--samples-size", "2.5GB").output
    assert "2.5 GB" in run("keep").output
    assert run("keep", "--samples", "soon").exit_code == 1


def test_what_is_not_there_is_said_and_not_made(tmp_path):
    for path, words in ((tmp_path / "none.db", "there is no database"), (tmp_path / "no" / "x.db", "there is no")):
        ended = runner.invoke(app, ["size", "--db", str(path)])
        assert (ended.exit_code, words in ended.output, path.exists()) == (1, True, False)
    (tmp_path / "other.db").write_text("something else, of some length " * 100)
    ended = runner.invoke(app, ["size", "--db", str(tmp_path / "other.db")])
    assert (ended.exit_code, "cannot be read: file is not a database" in ended.output) == (1, True)


def test_a_postgresql_database_is_as_large_as_it_says(empty_database):
    database = Database(empty_database)
    database.prepare()
    database.release()
    assert backups.size_bytes(database.url) > 4096
