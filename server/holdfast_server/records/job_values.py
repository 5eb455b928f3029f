"""Values of jobs that operators change while they train: values in force, and changes with their states."""

from __future__ import annotations

import uuid

import msgspec
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from holdfast.protocol import value_rules
from holdfast.protocol.values import (
    MAX_VALUES,
    JobValue,
    Scalar,
    ValueDefinition,
    ValueEdit,
    ValueReport,
    ValueState,
)
from holdfast_server import models
from holdfast_server.core.errors import InvalidSetting, UnknownValue
from holdfast_server.records import audit, desired_state
from holdfast_server.records.ancestry import Ancestry
from holdfast_server.records.desired_state import StoredChange

CHANGES_SHOWN = 50
"""Newest changes of each value in an answer."""
REQUESTED: ValueState = "requested"

_changes = models.ValueChangeRecord


def values_of(session: Session, job: models.JobRecord) -> list[JobValue]:
    """Return the values by name, with their changes, newest first."""
    rows = models.JobValueRecord
    values = session.scalars(select(rows).where(rows.job == job.name).order_by(rows.name)).all()
    if not values:
        return []
    numbered = select(
        _changes.id,
        func.row_number().over(partition_by=_changes.name, order_by=_changes.version.desc()).label("place"),
    ).where(_changes.job == job.name)
    newest = numbered.subquery()
    query = select(_changes).join(newest, newest.c.id == _changes.id).where(newest.c.place <= CHANGES_SHOWN)
    edits: dict[str, list[ValueEdit]] = {}
    for row in session.scalars(query.order_by(_changes.version.desc())):
        edits.setdefault(row.name, []).append(_as_edit(row, job))
    return [
        JobValue(
            definition=_definition(row),
            value=msgspec.json.decode(row.value),
            is_default=row.is_default,
            at=row.at,
            changes=edits.get(row.name, []),
        )
        for row in values
    ]


def set_value(
    session: Session, job: models.JobRecord, name: str, value: Scalar | None, *, who: str, now: float
) -> None:
    """Request a change of a value; `None` returns to the script's own. A change that is open is superseded.

    Raises:
        UnknownValue.
        InvalidSetting: the script does not allow the value.
    """
    row, wanted = _wanted(session, job, name, value)
    open_change = session.scalar(
        select(_changes)
        .where(_changes.job == job.name, _changes.name == name, _changes.state == REQUESTED)
        .order_by(_changes.version.desc())
        .limit(1)
    )
    in_force = None if row.is_default else msgspec.json.decode(row.value)
    before = in_force if open_change is None else msgspec.json.decode(open_change.value)
    if wanted == before and type(wanted) is type(before):
        return
    _supersede(session, job.name, f"{who} changed it again", _changes.name == name)
    made = StoredChange(field="value", name=name, before=before, after=wanted)
    desired_state.add_version(session, job, [made], who=who, now=now)
    change = _changes(
        id=uuid.uuid4().hex, job=job.name, name=name, value=_encoded(wanted), before=_encoded(before), who=who,
        at=now, version=job.version, made_in_lineage=job.lineage, state=REQUESTED,
    )  # fmt: skip
    session.add(change)
    session.flush()
    audit.record(
        session, who=who, action="value.set", now=now, job=job.name, project=job.project,
        before={name: before}, after={name: wanted, "version": job.version},
    )  # fmt: skip


def allowed(session: Session, job: models.JobRecord, name: str, value: Scalar | None) -> Scalar | None:
    """Return a value of its kind. Raises UnknownValue; InvalidSetting: the script does not allow it."""
    return _wanted(session, job, name, value)[1]


def _wanted(
    session: Session, job: models.JobRecord, name: str, value: Scalar | None
) -> tuple[models.JobValueRecord, Scalar | None]:
    row = session.get(models.JobValueRecord, (job.name, name))
    if row is None:
        raise UnknownValue(job.name, name)
    try:
        return row, None if value is None else value_rules.parsed(_definition(row), value)
    except ValueError as error:
        raise InvalidSetting("value", str(error)) from None


def record(session: Session, job: models.JobRecord, event: ValueReport, *, current: bool) -> None:
    """Store an agent's report; values that no script can have defined are ignored."""
    given = event.definition
    try:
        definition = value_rules.define(given.name, given.default, given.low, given.high, given.choices)
        value = value_rules.parsed(definition, event.value)
    except ValueError:
        return
    if current and _has_room(session, job.name, definition.name):
        encoded = msgspec.json.encode(definition).decode()
        session.merge(
            models.JobValueRecord(
                job=job.name, name=definition.name, definition=encoded, value=_encoded(value),
                is_default=event.is_default, at=event.at,
            )
        )  # fmt: skip
    change = session.get(_changes, event.change) if event.change is not None else None
    if change is None or change.job != job.name or change.name != definition.name:
        return
    if not event.refused and change.state != "applied":
        change.state, change.iteration, change.lineage, change.reason = (
            "applied",
            event.iteration,
            event.lineage,
            None,
        )
        _mark(session, change, definition, at=event.at)
    elif event.refused and change.state == REQUESTED:
        change.state, change.reason = "refused", event.refused[:_REASON]


_REASON = 300


def supersede_by_restore(session: Session, job: str, lineage: int) -> None:
    """Discard changes requested before a restore, which began this lineage."""
    _supersede(session, job, "a restore came after it", _changes.made_in_lineage < lineage)


def values_at(
    session: Session, job: models.JobRecord, iteration: int, ancestry: Ancestry
) -> dict[str, Scalar | None]:
    """Return what operators had set at an iteration of a path, by name; `None` is the script's own."""
    rows = select(_changes).where(
        _changes.job == job.name, _changes.state == "applied", _changes.iteration <= iteration
    )
    found: dict[str, Scalar | None] = {}
    for row in session.scalars(rows.order_by(_changes.iteration, _changes.version)):
        if (row.iteration or 0, row.lineage or 0) in ancestry:
            found[row.name] = msgspec.json.decode(row.value)
    return found


def _supersede(session: Session, job: str, reason: str, condition: object) -> None:
    session.execute(
        update(_changes)
        .where(_changes.job == job, _changes.state == REQUESTED, condition)  # type: ignore[arg-type]
        .values(state="superseded", reason=reason)
    )


def _has_room(session: Session, job: str, name: str) -> bool:
    rows = models.JobValueRecord
    if session.get(rows, (job, name)) is not None:
        return True
    known = session.scalar(select(func.count()).select_from(rows).where(rows.job == job))
    return (known or 0) < MAX_VALUES


def _mark(session: Session, change: models.ValueChangeRecord, definition: ValueDefinition, *, at: float) -> None:
    """Annotate the iteration at which a change was applied."""
    before, after = (
        value_rules.shown(msgspec.json.decode(text), definition.default) for text in (change.before, change.value)
    )
    session.add(
        models.AnnotationRecord(
            job=change.job, iteration=change.iteration, lineage=change.lineage, at=at,
            text=f"{change.name}: {before} → {after}", who=change.who, written_at=at,
        )
    )  # fmt: skip


def _definition(row: models.JobValueRecord) -> ValueDefinition:
    return msgspec.json.decode(row.definition, type=ValueDefinition)


def _encoded(value: Scalar | None) -> str:
    return msgspec.json.encode(value).decode()


def _as_edit(row: models.ValueChangeRecord, job: models.JobRecord) -> ValueEdit:
    return ValueEdit(
        id=row.id, name=row.name, value=msgspec.json.decode(row.value), before=msgspec.json.decode(row.before),
        who=row.who, at=row.at, state=row.state,  # type: ignore[arg-type]
        delivered=row.version <= job.delivered_version, iteration=row.iteration, lineage=row.lineage,
        reason=row.reason,
    )  # fmt: skip
