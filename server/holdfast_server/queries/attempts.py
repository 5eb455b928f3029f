"""The attempts of a job: their output, their configuration, and how two of them differ."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import get_args

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast.protocol.attempts import (
    AttemptConfiguration,
    AttemptName,
    AttemptOutput,
    AttemptSummary,
    ValueDifference,
)
from holdfast.protocol.tracebacks import exception_in
from holdfast.protocol.wire import ConfigurationSection
from holdfast_server import models
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import InvalidSetting, UnknownAttempt
from holdfast_server.queries import summaries
from holdfast_server.queries.job_view import JobView
from holdfast_server.records import job_status
from holdfast_server.records.attempt_reports import configuration_of, output_of

ORIGIN = "origin"
"""Compares with the attempt whose checkpoint a fork copied."""
FORKED = "forked"
"""End of the attempt as which a fork is stored; it trained nothing."""


def attempts(view: JobView, *, limit: int) -> list[AttemptSummary]:
    """Return the attempts of a job, newest first."""
    rows = models.AttemptRecord
    query = (
        select(rows)
        .where(rows.job == view.name, rows.finished.is_distinct_from(FORKED))
        .order_by(rows.started_at.desc())
        .limit(limit)
    )
    return [answer_from(row, AttemptSummary) for row in view.session.scalars(query)]


def configuration(
    view: JobView, attempt: int, *, against: str = "", visible: Collection[str] | None = None
) -> AttemptConfiguration:
    """Return the configuration of an attempt, compared with that of another one.

    Args:
        against: number of another attempt of the job, or `origin`; without one, nothing is compared.
        visible: projects that the user may see; `None`: all.

    Raises:
        UnknownAttempt: the job has no such attempt, or no origin that the user may see.
        InvalidSetting: `against` is neither a number nor `origin`.
    """
    session, job = view.session, view.name
    values = configuration_of(session, job, _uid(session, job, attempt))
    found = AttemptConfiguration(
        job=job,
        attempt=attempt,
        configuration=values.get("configuration", {}),
        environment=values.get("environment", {}),
    )
    if not against:
        return found
    other = _other(session, job, against, visible)
    before = configuration_of(session, other.job, _uid(session, other.job, other.attempt))
    return msgspec.structs.replace(found, against=other, differences=list(_differences(before, values)))


def waiting_host(view: JobView) -> str:
    """Return the host whose supervisor waits for a restore request; empty if none does."""
    alive = job_status.status_of(view.job, view.attempt, now=view.now).alive
    return job_status.waiting_host(view.session, view.attempt, alive=alive)


def output(view: JobView, attempt: int) -> AttemptOutput:
    """Return the last lines of output of an attempt. Raises UnknownAttempt."""
    first, lines = output_of(view.session, view.name, _uid(view.session, view.name, attempt))
    exception = exception_in(lines)
    return AttemptOutput(job=view.name, attempt=attempt, first=first, lines=lines, exception=exception)


def _uid(session: Session, job: str, attempt: int) -> str:
    """Return the newest attempt of that number: after a deleted store, numbers repeat."""
    rows = models.AttemptRecord
    query = select(rows.uid).where(rows.job == job, rows.attempt == attempt).order_by(rows.started_at.desc())
    uid = session.scalar(query.limit(1))
    if uid is None:
        raise UnknownAttempt(job, f"attempt {attempt}")
    return uid


def _other(session: Session, job: str, against: str, visible: Collection[str] | None) -> AttemptName:
    if against == ORIGIN:
        return _origin(session, job, visible)
    if not against.isascii() or not against.isdigit() or len(against) > 9:
        raise InvalidSetting("against", f"against={against!r}: give the number of an attempt, or `{ORIGIN}`")
    return AttemptName(job=job, attempt=int(against))


def _origin(session: Session, job: str, visible: Collection[str] | None) -> AttemptName:
    """Return the attempt that wrote the checkpoint which the fork copied, else the newest one of that job."""
    origin = summaries.origin_of(session, job)
    hidden = origin is not None and visible is not None and origin.project not in visible
    if origin is None or origin.job is None or origin.project is None or hidden:
        raise UnknownAttempt(job, "origin that you may see")
    found = session.get(models.CheckpointRecord, (origin.job, origin.checkpoint))
    rows = models.AttemptRecord
    known = select(rows.attempt).where(rows.job == origin.job)
    if found is not None:
        attempt = session.scalar(known.where(rows.attempt == found.attempt).limit(1))
        if attempt is not None:
            return AttemptName(job=origin.job, attempt=attempt)
    newest = session.scalar(known.order_by(rows.started_at.desc()).limit(1))
    return AttemptName(job=origin.job, attempt=newest or 0)


def _differences(
    before: Mapping[ConfigurationSection, Mapping[str, str]],
    after: Mapping[ConfigurationSection, Mapping[str, str]],
) -> Iterator[ValueDifference]:
    for section in get_args(ConfigurationSection):
        old, new = before.get(section, {}), after.get(section, {})
        for name in [*new, *(name for name in old if name not in new)]:
            if old.get(name) != new.get(name):
                yield ValueDifference(section=section, name=name, before=old.get(name), after=new.get(name))
