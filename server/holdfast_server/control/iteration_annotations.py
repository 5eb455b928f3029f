"""Annotations of iterations by people, which the pages and the HTTP API call."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast.protocol.field_types import MAX_ANNOTATION, MAX_INTEGER
from holdfast.protocol.jobs import Annotation, NewAnnotation
from holdfast_server import models
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import InvalidSetting, NotPossible, UnknownAnnotation
from holdfast_server.db import job_transaction
from holdfast_server.queries.job_view import JobView, find_job
from holdfast_server.records import audit
from holdfast_server.records.ancestry import Ancestry, ancestry_of
from holdfast_server.samples import reading

MOST_ROWS = 2000
MOST_BY_PEOPLE = 2000
"""Most annotations of a job by people."""


def list_annotations(view: JobView, *, limit: int = 100, by_people: bool | None = None) -> list[Annotation]:
    """List annotations, latest iterations first; `by_people`: only theirs, or the script's."""
    rows = models.AnnotationRecord
    query = select(rows).where(rows.job == view.name).order_by(rows.iteration.desc(), rows.id.desc())
    if by_people is not None:
        query = query.where(rows.who.is_not(None) if by_people else rows.who.is_(None))
    path = view.ancestry()
    return [_as_answer(row, path) for row in view.session.scalars(query.limit(min(limit, MOST_ROWS)))]


def find(view: JobView, annotation: int) -> Annotation:
    """Raises UnknownAnnotation."""
    return _as_answer(_find(view.session, view.name, annotation), view.ancestry())


@job_transaction
def add(session: Session, job: str, request: NewAnnotation, *, who: str, now: float) -> Annotation:
    """Annotate an iteration of the path to the current one.

    Raises:
        UnknownJob.
        InvalidSetting: the text is empty or too long, or the iteration is not finished.
        NotPossible: the job has as many annotations as it may.
    """
    text, rows = _text(request.text), models.AnnotationRecord
    found = find_job(session, job)
    iteration = found.iteration if request.iteration is None else request.iteration
    if not 0 <= iteration <= found.iteration:
        reason = f"iteration {iteration:,} is not finished: the newest is {found.iteration:,}"
        raise InvalidSetting("iteration", reason)
    known = session.scalar(select(func.count()).where(rows.job == job, rows.who.is_not(None)))
    if (known or 0) >= MOST_BY_PEOPLE:
        raise NotPossible(f"{job} has {MOST_BY_PEOPLE:,} annotations, the maximum: delete one first")
    path = ancestry_of(session, found)
    lineage = path.lineage_at(iteration)
    at = reading.time_of(session, job, lineage, iteration) or now
    row = rows(job=job, iteration=iteration, lineage=lineage, at=at, text=text, who=who, written_at=now)
    session.add(row)
    session.flush()
    _record(session, "add", row, who=who, now=now, after={"text": text})
    return _as_answer(row, path)


@job_transaction
def edit(session: Session, job: str, annotation: int, text: str, *, who: str, now: float) -> Annotation:
    """Change the text of an annotation. The editor becomes its author.

    Raises:
        UnknownJob, UnknownAnnotation.
        InvalidSetting: the text is empty or too long.
        NotPossible: the script wrote it.
    """
    text = _text(text)
    found = find_job(session, job)
    row = _of_person(session, job, annotation)
    if row.text != text:
        before = {"text": row.text, "who": row.who}
        row.text, row.who, row.written_at = text, who, now
        session.flush()
        _record(session, "edit", row, who=who, now=now, before=before, after={"text": text})
    return _as_answer(row, ancestry_of(session, found))


@job_transaction
def delete(session: Session, job: str, annotation: int, *, who: str, now: float) -> None:
    """Delete an annotation. Raises UnknownJob, UnknownAnnotation; NotPossible: the script wrote it."""
    find_job(session, job)
    row = _of_person(session, job, annotation)
    session.delete(row)
    session.flush()
    _record(session, "delete", row, who=who, now=now, before={"text": row.text, "who": row.who})


def _text(text: str) -> str:
    text = text.strip()
    if not text:
        raise InvalidSetting("text", "enter the text of the annotation")
    if len(text) > MAX_ANNOTATION:
        reason = f"an annotation has at most {MAX_ANNOTATION} characters; this one has {len(text)}"
        raise InvalidSetting("text", reason)
    if not text.isprintable():
        raise InvalidSetting("text", "an annotation must not contain line breaks or control characters")
    return text


def _find(session: Session, job: str, annotation: int) -> models.AnnotationRecord:
    row = session.get(models.AnnotationRecord, annotation) if 0 <= annotation <= MAX_INTEGER else None
    if row is None or row.job != job:
        raise UnknownAnnotation(job, annotation)
    return row


def _of_person(session: Session, job: str, annotation: int) -> models.AnnotationRecord:
    row = _find(session, job, annotation)
    if row.who is None:
        raise NotPossible("the script wrote this annotation: only annotations of people can be changed")
    return row


def _as_answer(row: models.AnnotationRecord, path: Ancestry) -> Annotation:
    return answer_from(row, Annotation, abandoned=(row.iteration, row.lineage) not in path)


def _record(
    session: Session,
    act: str,
    row: models.AnnotationRecord,
    *,
    who: str,
    now: float,
    before: audit.Facts | None = None,
    after: audit.Facts | None = None,
) -> None:
    place = {"annotation": row.id, "iteration": row.iteration, "lineage": row.lineage}
    audit.record(
        session, who=who, action=f"annotation.{act}", now=now, job=row.job, before=before,
        after={**place, **(after or {})},
    )  # fmt: skip
