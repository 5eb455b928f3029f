"""Notification of changes between instances by PostgreSQL's LISTEN and NOTIFY.

The commit of a NOTIFY takes a lock on the whole database. One in each ingest transaction would cost three quarters
of the throughput, so changes are collected for a moment and sent together. A lost connection loses notifications,
so the versions of jobs with subscriptions are polled as well.
"""

from __future__ import annotations

import logging
import math
import os
import random
import select as io
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Any

import psycopg
from sqlalchemy import ARRAY, Connection, Text, any_, bindparam, select, text
from sqlalchemy.exc import SQLAlchemyError

from holdfast_server import models
from holdfast_server.core.bus import ChangeBus

CHANNEL = "holdfast_changes"
EVERYTHING = ""
"""Sent instead of many names: any job may have changed."""
SAMPLES = "~"
"""Prefix of a job with only new samples; no job name starts with it."""
MOST_NAMES = 500
GATHER_SECONDS = 0.25
POLL_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 2.0

logger = logging.getLogger(__name__)


class ChangeRelay:
    """Exchange of changes between this instance's bus and other instances, in a thread with one connection."""

    def __init__(self, connect: Callable[[], Connection], changes: ChangeBus) -> None:
        self._connect = connect
        self._changes = changes
        self._lock = Lock()
        """Held while gathered changes, or the time to send them, change."""
        self._gathered: set[str] = set()
        self._send_at = math.inf
        self._seen: dict[str, int] = {}
        self._listening = Event()
        self._stopped = Event()
        self._pipe = (-1, -1)
        """Wakes the thread, which waits for the database and for this."""
        self._thread: Thread | None = None

    def open(self, seconds: float) -> None:
        """Start to listen, and wait so long for the first connection."""
        self._stopped.clear()
        self._listening.clear()
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = Thread(target=self._run, name="holdfast-changes", daemon=True)
        self._thread.start()
        self._listening.wait(seconds)

    def close(self) -> None:
        if self._thread is None:
            return
        self._stopped.set()
        self._wake()
        self._thread.join()
        self._thread = None
        for end in self._pipe:
            os.close(end)

    def announce(self, job: str, *, at_once: bool, samples_only: bool = False) -> None:
        with self._lock:
            self._gathered.add(SAMPLES + job if samples_only else job)
            send_at = time.monotonic() + (0.0 if at_once else GATHER_SECONDS)
            if send_at >= self._send_at:
                return
            self._send_at = send_at
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # enough is written already
            os.write(self._pipe[1], b"x")

    def _run(self) -> None:
        """Listen and send until closed, and reconnect as needed."""
        pause = 0.0
        while not self._stopped.is_set():
            try:
                connection = self._connect()
            except _LOST as error:
                pause = min(LONGEST_PAUSE_SECONDS, 2 * pause + 0.1)
                logger.warning("cannot listen for changes of other instances, retrying: %s", error)
                self._stopped.wait(random.uniform(0, pause))  # noqa: S311
                continue
            pause = 0.0
            try:
                self._listen(connection)
            except _LOST as error:
                logger.warning("lost the connection for changes of other instances, reconnecting: %s", error)
            finally:
                with suppress(*_LOST):
                    connection.close()

    def _listen(self, connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        connection.execute(text(f"LISTEN {CHANNEL}"))
        # notifications before this moment may have been missed
        self._changes.publish_all()
        self._listening.set()
        poll_at = time.monotonic() + POLL_SECONDS
        while not self._stopped.is_set():
            seconds = max(0.0, min(poll_at, self._send_at) - time.monotonic())
            io.select([driver.fileno(), self._pipe[0]], [], [], seconds)
            with suppress(BlockingIOError):
                os.read(self._pipe[0], 4096)
            for heard in driver.notifies(timeout=0):
                if heard.pid != driver.info.backend_pid:
                    self._hear(heard.payload)
            now = time.monotonic()
            if now >= self._send_at:
                self._send(connection)
            if now >= poll_at:  # however many changes there are
                self._poll(connection)
                poll_at = now + POLL_SECONDS

    def _send(self, connection: Connection) -> None:
        with self._lock:
            names, self._gathered, self._send_at = self._gathered, set(), math.inf
        sent = _few({name for name in names if name.startswith(SAMPLES)}, SAMPLES + EVERYTHING)
        sent += _few({name for name in names if not name.startswith(SAMPLES)}, EVERYTHING)
        try:
            connection.execute(
                text("SELECT pg_notify(:channel, name) FROM unnest(CAST(:names AS text[])) AS sent(name)"),
                {"channel": CHANNEL, "names": sent},
            )
        except BaseException:  # send the names later
            with self._lock:
                self._gathered |= names
                self._send_at = 0.0
            raise

    def _hear(self, job: str) -> None:
        samples_only, name = job.startswith(SAMPLES), job.removeprefix(SAMPLES)
        if name == EVERYTHING:
            self._changes.publish_all(samples_only=samples_only)
        else:
            self._changes.publish(name, samples_only=samples_only)

    def _poll(self, connection: Connection) -> None:
        """Publish jobs whose version has changed, for waiting agents; pages refresh regularly anyway."""
        jobs = models.JobRecord
        names = bindparam("names", sorted(self._changes.listened()), ARRAY(Text))
        found = connection.execute(select(jobs.name, jobs.version).where(jobs.name == any_(names)))
        versions = {name: version for name, version in found}  # noqa: C416 - rows are not plain tuples
        for job, version in versions.items():
            if self._seen.get(job) != version:
                self._changes.publish(job)
        self._seen = versions


_LOST = (OSError, psycopg.Error, SQLAlchemyError)
"""Errors of a connection."""


def _few(names: Collection[str], otherwise: str) -> list[str]:
    return sorted(names) if len(names) <= MOST_NAMES else [otherwise]
