"""A private PostgreSQL cluster behind a Unix socket, which ends with the test run."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from holdfast_server.core.settings import database_url
from tests.support import ram_disk

START_SECONDS = 300
ROOM_BYTES = 1 << 30
"""With the databases of the tests, and what PostgreSQL writes ahead of them."""
ON_SQLITE = pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
"""For what concerns SQLite alone, or happens before a database is read."""
ON_POSTGRES = pytest.mark.parametrize("database_kind", ["postgresql"], indirect=True)
"""For what concerns PostgreSQL alone."""
ON_BOTH = pytest.mark.parametrize("database_kind", ["sqlite", "postgresql"], indirect=True)
"""For single tests of files whose others run on SQLite: see `sqlite_unless_marked`."""
# Nothing here outlives a loss of power, and need not; what a crash of the processes may lose is as it always is.
SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "listen_addresses": "",
    "max_connections": "100",
    "shared_buffers": "32MB",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_wal_size": "64MB",
    "autovacuum": "off",
    "log_min_messages": "fatal",
}
DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}
_DIE_WITH_PARENT = 1


class NoPostgres(Exception):
    """There is none on this machine; says what to do."""


def binaries() -> Path:
    """The folder of initdb and postgres: in PATH, or where Debian puts them, the newest first."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: -int(path.parent.name))
    found = shutil.which("initdb")
    for folder in (*([Path(found).resolve().parent] if found else []), *versions):
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise NoPostgres("no PostgreSQL here: install it (Debian: apt-get install postgresql)")


class Cluster:
    def __init__(self) -> None:
        self._binaries = binaries()
        # Not in pytest's own folders, which are closed to the user that PostgreSQL runs as. On a disk, a database
        # for a test takes half a second: some hundred files, and a checkpoint.
        self.directory = Path(tempfile.mkdtemp(prefix="holdfast-pg-", dir=ram_disk.place(ROOM_BYTES)))
        self._user = "postgres" if os.getuid() == 0 else None
        if self._user is not None:
            shutil.chown(self.directory, self._user)
        self._run("initdb", "-D", str(self.directory / "data"), "-U", "postgres", "-A", "trust", "-E", "UTF8",
                  "--locale=C", "--no-sync")  # fmt: skip
        rules = self.directory / "data" / "pg_hba.conf"
        rules.write_text(f"local all guarded scram-sha-256\n{rules.read_text()}")
        self._process: subprocess.Popen[bytes] | None = None
        self._names = (f"test{number}" for number in count(1))

    def start(self) -> None:
        settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", self.directory / "data", "-k", self.directory, *settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                preexec_fn=_die_with_parent,
                **self._as_user(),
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self._process.poll() is None, (self.directory / "log").read_text()
            assert time.monotonic() < deadline, "PostgreSQL does not answer"
            time.sleep(0.02)

    def crash(self) -> None:
        """As `pg_ctl stop -m immediate`: every process of it ends at once, and nothing is tidied up."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(timeout=START_SECONDS)

    def remove(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.crash()
        shutil.rmtree(self.directory)

    def url(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self.directory}"

    def create(self, template: str = "template0") -> str:
        """A database, a copy of another one; returns its name."""
        name = next(self._names)
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
        return name

    def drop(self, database: str) -> None:
        self.execute(f"DROP DATABASE {database} WITH (FORCE)")

    def execute(self, statement: str, database: str = "postgres") -> list[tuple]:
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url("postgres"), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def _run(self, program: str, *arguments: str) -> None:
        ended = subprocess.run(
            [self._binaries / program, *arguments], capture_output=True, text=True, cwd="/", **self._as_user()
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr

    def _as_user(self) -> dict:
        return {} if self._user is None else {"user": self._user, "group": self._user, "extra_groups": []}


def ask(database: str, statement: str, **values: object) -> list[tuple]:
    """What a database of either kind answers to a statement of its own SQL, behind the server's back."""
    url = database_url(database)
    engine = create_engine(url.set(drivername=DRIVERS[url.get_backend_name()]), poolclass=NullPool)
    with engine.begin() as connection:
        result = connection.execute(text(statement), values)
        return [tuple(row) for row in result] if result.returns_rows else []


def check_matches_models(database: str) -> None:
    """Raise if tables and models differ, except indexes on expressions, which SQLite does not report."""
    from alembic import command

    from holdfast_migrations import history
    from holdfast_migrations.connections import connected
    from holdfast_server.models import Base

    with connected(database_url(database)) as connection, connection.begin(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*expression-based index")
        configuration = history._config(connection)
        configuration.attributes["metadata"] = Base.metadata
        command.check(configuration)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGQUIT)
