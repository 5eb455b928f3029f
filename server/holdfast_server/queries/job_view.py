"""A job as one read sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from sqlalchemy.orm import Session

from holdfast_server import models
from holdfast_server.core.errors import UnknownJob
from holdfast_server.db import Database
from holdfast_server.records.ancestry import Ancestry, LineageStart, lineage_starts


class JobView:
    """A job, found once, in the session of one read: queries about the job take it, and pages pass it on.

    All answers from one view are consistent. Lineages and the current attempt are read when the first query needs
    them.
    """

    def __init__(self, session: Session, job: models.JobRecord, *, now: float) -> None:
        self.session = session
        self.job = job
        self.name = job.name
        self.now = now
        """Time of the request in seconds since the epoch."""

    @cached_property
    def lineages(self) -> list[LineageStart]:
        """Where each lineage begins, and from which checkpoint."""
        return lineage_starts(self.session, [self.name]).get(self.name, [])

    @cached_property
    def attempt(self) -> models.AttemptRecord | None:
        """The current attempt; `None` before the first report."""
        return self.session.get(models.AttemptRecord, (self.name, self.job.uid))

    def ancestry(self, lineage: int | None = None) -> Ancestry:
        """Return the ancestry of a lineage, by default of the current one."""
        return Ancestry(self.lineages, self.job.lineage if lineage is None else lineage)


def find_job(session: Session, job: str) -> models.JobRecord:
    row = session.get(models.JobRecord, job)
    if row is None:
        raise UnknownJob(job)
    return row


@contextmanager
def view_job(db: Database, job: str, *, now: float) -> Iterator[JobView]:
    """Open a read session and find a job. Raises UnknownJob."""
    with db.read() as session:
        yield JobView(session, find_job(session, job), now=now)
