"""A PostgreSQL database, which several instances of the server may share.

Units run at READ COMMITTED, under an advisory lock on their job, or on one lock for all units about no job. Under
the lock a unit reads what was committed before, so it may read, decide and write as on SQLite, which has one
writer. SERIALIZABLE would need no lock, but would repeat the reports of a job's many ranks again and again.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Condition, Lock

import psycopg
from sqlalchemy import create_engine, event, func, select, text
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from holdfast_migrations import Upgraded, upgrade
from holdfast_server.core.bus import ChangeBus
from holdfast_server.db.relay import ChangeRelay
from holdfast_server.db.statements import DatabaseUnavailable, job_key, lock_key
from holdfast_server.db.units import GROUP_UNITS, WriteUnit, run_unit

WRITERS = 8
"""Number of jobs whose units run at the same time."""
CONNECT_SECONDS = 5
CONNECTION_OPTIONS = {
    "application_name": "holdfast",
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 20,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 40_000,
}
"""Of libpq. A server that has gone is given up after 40 seconds; its own limits, below, are shorter."""
SESSION_SETTINGS = {
    "jit": "off",  # compilation takes longer than any of our queries
    "statement_timeout": "30s",
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "60s",
}
ATTEMPTS = 8
LONGEST_PAUSE_SECONDS = 1.0

_TAKEN_BACK = ("40001", "40P01")
"""Serialization failure and deadlock: the database has rolled back the transaction."""
_OUT_OF_REACH = ("08", "28", "3D", "53", "57P")
"""Prefixes of states: no connection, access denied, no database, no resources, server stopping or starting."""
_OUT_OF_PATIENCE = ("55P03", "57014")
"""States of timeouts of locks and statements."""
_STALE_PLAN = "0A000"
"""State of a prepared statement after another instance migrated the tables. A rollback makes the driver prepare it
again."""

logger = logging.getLogger(__name__)


class PostgresBackend:
    def __init__(self, url: URL, changes: ChangeBus) -> None:
        self.url = url
        self.place = url.set(drivername="postgresql").render_as_string(hide_password=True)
        self._relay = ChangeRelay(lambda: connect(url), changes)
        self._writer: Engine | None = None
        self._settled: Callable[[list[WriteUnit]], None] = lambda _: None
        self._lanes: dict[str | None, deque[WriteUnit]] = {}
        """Waiting units by job. A lane exists until its units are stored."""
        self._lane_ended = Condition()
        """Held while lanes change."""
        self._threads = ThreadPoolExecutor(WRITERS, "holdfast-writer")
        self._leading: Connection | None = None
        self._asking = Lock()
        """Lock that lets one background job at a time ask whether this instance leads, with one connection."""

    def prepare(self) -> Upgraded:
        return upgrade(self.url)

    def release(self) -> None:
        """Do nothing: any number of servers may use the database."""

    def open(self, settled: Callable[[list[WriteUnit]], None], *, readers: int) -> Engine:
        self._settled = settled
        self._threads = ThreadPoolExecutor(WRITERS, "holdfast-writer")
        # A unit that gets a lost connection detects this and runs again.
        self._writer = _engine(self.url, pool_size=WRITERS, isolation_level="READ COMMITTED")
        self._relay.open(CONNECT_SECONDS)
        engine = _engine(self.url, pool_size=readers, isolation_level="REPEATABLE READ", pool_pre_ping=True)
        return engine.execution_options(postgresql_readonly=True)

    def close(self) -> None:
        with self._lane_ended:
            self._lane_ended.wait_for(lambda: not self._lanes)
        self._threads.shutdown()
        self._relay.close()
        if self._leading is not None:
            _end(self._leading)
        if self._writer is not None:
            self._writer.dispose()
        self._writer = self._leading = None

    @property
    def waiting(self) -> int:
        with self._lane_ended:
            return sum(map(len, self._lanes.values()))

    @property
    def writing(self) -> bool:
        return self._writer is not None

    def submit(self, unit: WriteUnit) -> None:
        """Queue a unit behind the others of its job, with which it shares a connection and commits."""
        with self._lane_ended:
            lane = self._lanes.get(unit.job)
            if lane is not None:
                lane.append(unit)
                return
            self._lanes[unit.job] = deque([unit])
        self._threads.submit(self._run_lane, unit.job)

    def _run_lane(self, job: str | None) -> None:
        """Run a group of a job's units, and let the other jobs have their turn before the next one."""
        with self._lane_ended:
            lane = self._lanes[job]
            group = [lane.popleft() for _ in range(min(GROUP_UNITS, len(lane)))]
        self._commit(group)
        for unit in group:
            if unit.error is None and unit.job is not None:
                self._relay.announce(unit.job, at_once=unit.at_once, samples_only=unit.samples_only)
            if unit.error is not None and self.unavailable(unit.error):
                unit.error = _unavailable(unit.error)
        self._settled(group)
        with self._lane_ended:
            if lane:
                self._threads.submit(self._run_lane, job)
            else:
                del self._lanes[job]
                self._lane_ended.notify_all()

    def _commit(self, units: list[WriteUnit]) -> None:
        for pause in _pauses():
            committing = False
            assert self._writer is not None
            try:
                with self._writer.connect() as connection:
                    connection.begin()
                    _run(connection, units)
                    committing = True
                    connection.commit()
                    return
            except Exception as error:
                # on any error the units fail, and no batch is acknowledged
                if pause is not None and self._may_run_again(error, committing=committing):
                    time.sleep(pause)
                    continue
                logger.warning("stored none of %d writes: %s", len(units), error)
                for unit in units:
                    unit.error = error
                return

    def _may_run_again(self, error: Exception, *, committing: bool) -> bool:
        """Return whether units may run again: before COMMIT is sent, a lost transaction is always rolled back.

        After that its outcome is unknown. Agents send a batch again under the same name; users look first.
        """
        if committing:
            return _state(error) in _TAKEN_BACK
        return self.unavailable(error) or _state(error) in (*_TAKEN_BACK, _STALE_PLAN)

    def unavailable(self, error: Exception) -> bool:
        if isinstance(error, OSError | NoConnectionLeft | DatabaseUnavailable):
            return True
        if isinstance(error, DBAPIError) and error.connection_invalidated:
            return True
        state = _state(error)
        return state.startswith(_OUT_OF_REACH) or state in _OUT_OF_PATIENCE

    def leads(self) -> bool:
        """Return whether this instance holds the lock, which lasts as long as its connection, or gets it now."""
        with self._asking:
            return self._holds_the_lock() or self._takes_the_lock()

    def _holds_the_lock(self) -> bool:
        if self._leading is None:
            return False
        try:
            self._leading.execute(text("SELECT 1"))
        except (OSError, SQLAlchemyError):
            lost, self._leading = self._leading, None
            _end(lost)
        return self._leading is not None

    def _takes_the_lock(self) -> bool:
        try:
            connection = connect(self.url)
        except (OSError, psycopg.Error, SQLAlchemyError) as error:
            raise _unavailable(error) from error
        try:
            if connection.scalar(select(func.pg_try_advisory_lock(lock_key("chores")))):
                self._leading = connection
        finally:
            if self._leading is None:
                _end(connection)
        return self._leading is not None


def connect(url: URL) -> Connection:
    """Open a long-lived connection outside the pools, with autocommit."""
    return _engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT").connect()


def _engine(url: URL, **options: object) -> Engine:
    pooled = {} if "poolclass" in options else {"max_overflow": 0, "pool_timeout": CONNECT_SECONDS}
    wanted = {name: value for name, value in CONNECTION_OPTIONS.items() if name not in url.query}
    engine = create_engine(url, connect_args=wanted, **pooled, **options)

    @event.listens_for(engine, "connect")
    def set_up(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        cursor.execute(_SET_UP, SESSION_SETTINGS)
        cursor.close()
        connection.commit()

    return engine


_SET_UP = (
    f"SELECT {', '.join(f'set_config({name!r}, %({name})s, false)' for name in SESSION_SETTINGS)}, "
    # an acknowledged batch must be on disk, even if the user or database has this turned off
    "CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', false) END"
)


def _run(connection: Connection, units: list[WriteUnit]) -> None:
    connection.execute(select(func.pg_advisory_xact_lock(job_key(units[0].job))))
    for unit in units:
        session = Session(connection, join_transaction_mode="create_savepoint", expire_on_commit=False)
        run_unit(session, unit)
        if unit.error is None:
            continue
        if connection.invalidated:
            raise DatabaseUnavailable("the connection was lost") from unit.error
        if _state(unit.error) in (*_TAKEN_BACK, _STALE_PLAN):
            raise unit.error


def _end(connection: Connection) -> None:
    with suppress(OSError, SQLAlchemyError):
        connection.close()


def _pauses() -> Iterator[float | None]:
    """Before each further attempt, with full jitter; None after the last."""
    for number in range(ATTEMPTS):
        yield random.uniform(0, min(LONGEST_PAUSE_SECONDS, 0.02 * 2**number))  # noqa: S311
    yield None


def _state(error: BaseException | None) -> str:
    """Return PostgreSQL's SQLSTATE code of an error; empty for other errors."""
    while error is not None:
        if isinstance(state := getattr(error, "sqlstate", None), str):
            return state
        error = error.orig if isinstance(error, DBAPIError) else error.__cause__
    return ""


def _unavailable(error: Exception) -> DatabaseUnavailable:
    if isinstance(error, DatabaseUnavailable):
        return error
    unavailable = DatabaseUnavailable(f"the database does not answer: {error}")
    unavailable.__cause__ = error
    return unavailable
