"""Desired state of a job: its versions, who made each, and from which iteration on it applied.

One module, since a setting is parsed, changed, reverted and described here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import msgspec
from msgspec import UNSET
from sqlalchemy import bindparam, select, update
from sqlalchemy.orm import Session

from holdfast.pacing import parse_budget, parse_every, parse_policy
from holdfast.pacing.settings import parse_unsaved_work, parse_write_budget
from holdfast.protocol import value_rules
from holdfast.protocol.jobs import DesiredChanges, Edit, Order, SettingChange, is_alert
from holdfast.protocol.orders import TrainingOrder, parse_on_trouble
from holdfast.protocol.store_shares import StoreShare
from holdfast.protocol.values import ValueChange
from holdfast.protocol.wire import OPEN_ORDER_STATES, DataSkip, Desired, RestoreOrder, VerifyRequest
from holdfast.retention import parse_retention
from holdfast.units import FixedInterval, duration, exact_percent, format_interval, format_rate
from holdfast_server import models
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import InvalidSetting, VersionConflict
from holdfast_server.db import Database, Statement, named_jobs
from holdfast_server.records import audit, store_shares
from holdfast_server.records.interval_status import paced_of

T = TypeVar("T")

AGENT = "agent"
"""Author of the versions in which an order ended."""
SERVER = "the server"
SCRIPT = "script default"
LEAST_HELD_SECONDS, MOST_HELD_SECONDS = 60.0, 30 * 86400.0
"""Limits for the duration of a temporary interval."""
OPEN_VERIFICATIONS = ("requested", "reading")
OVERRIDES_EVERY_SECONDS = 10.0

Setting = Literal[
    "budget", "write budget", "unsaved work", "policy", "interval", "checkpoints", "retention", "on trouble"
]
"""Settings, which can be edited and reverted."""
Field = Setting | Literal["checkpoint", "data probe", "restore", "training", "value", "pin", "unpin", "verify"]
"""Settings, and requests for a single action."""
SETTINGS: tuple[Setting, ...] = get_args(Setting)
CHANGED_BY: Mapping[Field, str] = {
    "checkpoints": "paused", "write budget": "write_budget", "unsaved work": "max_unsaved_work",
    "on trouble": "on_trouble",
}  # fmt: skip
"""Names of settings in `DesiredChanges`, where they differ."""
DECIDE_THE_INTERVAL: frozenset[Field] = frozenset({"budget", "write budget", "unsaved work", "policy", "interval"})
"""Settings that decide together: an edit of one of them conflicts with a later edit of any."""


class Interval(msgspec.Struct, frozen=True):
    """A fixed interval, and the time until which it holds, in seconds since the epoch."""

    every: int | None = None
    """In iterations."""
    until: float | None = None
    seconds: float | None = None
    """In wall-clock time, instead of `every`."""

    @property
    def fixed(self) -> FixedInterval | None:
        return self.every if self.seconds is None else timedelta(seconds=self.seconds)


class StoredChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change as it is stored; `described` renders it as text."""

    field: Field
    before: bool | int | float | str | Interval | None = None
    """Value of a setting, `None` for the script's own; state of an order."""
    after: bool | int | float | str | Interval | None = None
    """As `before`; of a request about a checkpoint, the checkpoint's id."""
    script_budget: float | None = None
    """The script's own budget, as the agent reported it, if `before` stands for that."""
    iteration: int | None = None
    """Target iteration of an order."""
    against: str | None = None
    """Checkpoint whose tensors a verification compares."""
    name: str | None = None
    """Name of a value."""


_changes = msgspec.json.Decoder(list[StoredChange])
_training = msgspec.json.Decoder(TrainingOrder)

_points, _verifications = models.CheckpointRecord, models.VerificationRecord
_changes_of_values = models.ValueChangeRecord
_PINS = (
    select(_points.job, _points.id, _points.pinned_by)
    .where(_points.job.in_(named_jobs()), _points.pinned_at.is_not(None))
    .order_by(_points.id)
)
_VERSION = Statement(
    select(models.JobRecord.version, models.JobRecord.pins_known, models.JobRecord.share_number).where(
        models.JobRecord.name == bindparam("job")
    )
)
_PINNED = Statement(
    select(_points.id, _points.pinned_by)
    .where(_points.job == bindparam("job"), _points.pinned_at.is_not(None))
    .order_by(_points.id)
)
_VALUES = (
    select(_changes_of_values.job, _changes_of_values.id, _changes_of_values.name, _changes_of_values.value,
           _changes_of_values.made_in_lineage)
    .where(_changes_of_values.job.in_(named_jobs()), _changes_of_values.state == "requested")
    .order_by(_changes_of_values.version)
)  # fmt: skip
_VERIFICATIONS = (
    select(_verifications.job, _verifications.request, _verifications.checkpoint, _verifications.against)
    .where(_verifications.job.in_(named_jobs()), _verifications.state.in_(OPEN_VERIFICATIONS))
    .order_by(_verifications.request)
)


# ---- desired state ------------------------------------------------------------------------------


def is_newer(
    session: Session, job: str, *, after: int, alert_pins: str | None, share_number: int | None = None
) -> bool:
    """Return whether the version is after `after`, the shares have another number, or the alert pins are others
    than these, separated by commas.

    A connected agent asks this again and again, mostly in vain. It takes a tenth of the time of `read`, or less.
    """
    connection = session.connection()
    job = job.replace("\0", "\ufffd")  # as `models.base.PlainText` stores it
    version, pins_known, number = _VERSION.first(connection, {"job": job}) or (0, False, 0)
    if version > after or share_number not in (None, number):
        return True
    if alert_pins is None:
        return False
    pinned = _PINNED.all(connection, {"job": job}) if pins_known else []
    return alert_pins != ",".join(checkpoint for checkpoint, who in pinned if is_alert(who))


def read(session: Session, job: models.JobRecord, *, now: float) -> Desired:
    asked = open_requests(session, [job.name])
    shares = store_shares.shares_of(session, job.name)
    return of(job, open_order(session, job.name), asked.get(job.name, NOTHING_ASKED), shares, now=now)


class OpenRequests(msgspec.Struct):
    """Pins and requested verifications of a job's checkpoints, and changes of its values."""

    pins: list[str] = []
    alert_pins: list[str] = []
    """Those of `pins` that only open alerts keep."""
    verify: list[VerifyRequest] = []
    """Open verification requests, oldest first."""
    values: list[ValueChange] = []
    """Changes of values that are not applied yet, oldest first."""


NOTHING_ASKED = OpenRequests()


def open_requests(session: Session, jobs: Sequence[str]) -> dict[str, OpenRequests]:
    """Return the requests by job, of the jobs that have any."""
    found: dict[str, OpenRequests] = {}
    for job, checkpoint, who in session.execute(_PINS, {"jobs": jobs}):
        asked_for = found.setdefault(job, OpenRequests())
        asked_for.pins.append(checkpoint)
        if is_alert(who):
            asked_for.alert_pins.append(checkpoint)
    for job, request, checkpoint, against in session.execute(_VERIFICATIONS, {"jobs": jobs}):
        asked = VerifyRequest(id=request, checkpoint=checkpoint, against=against)
        found.setdefault(job, OpenRequests()).verify.append(asked)
    for job, change, name, value, lineage in session.execute(_VALUES, {"jobs": jobs}):
        wanted = ValueChange(id=change, name=name, value=msgspec.json.decode(value), lineage=lineage)
        found.setdefault(job, OpenRequests()).values.append(wanted)
    return found


def of(
    job: models.JobRecord,
    order: models.RestoreOrderRecord | Order | None,
    asked: OpenRequests,
    shares: tuple[StoreShare, ...] = (),
    *,
    now: float,
) -> Desired:
    return answer_from(
        job,
        Desired,
        shares=shares,
        pins=tuple(asked.pins) if job.pins_known else None,
        alert_pins=tuple(asked.alert_pins) if job.pins_known else (),
        verify=tuple(asked.verify),
        values=tuple(asked.values),
        training=None if job.training_order is None else _training.decode(job.training_order),
        restore=None if order is None or is_expired(order, now) else _wanted(order, now),
        latest_attempt=job.attempt,
    )


def is_expired(order: models.RestoreOrderRecord | Order, now: float) -> bool:
    """Return whether no attempt may start an order any more; one that is being carried out does not expire."""
    return order.state != "restoring" and order.expires_at is not None and order.expires_at <= now


def _wanted(order: models.RestoreOrderRecord | Order, now: float) -> RestoreOrder:
    ends_at = None if order.state == "restoring" else order.expires_at
    left = None if ends_at is None else ends_at - now
    return answer_from(order, RestoreOrder, expires_in_seconds=left, skip=skip_of_order(order))


def skip_of_order(order: models.RestoreOrderRecord | Order) -> DataSkip | None:
    """Return the data that an order is to leave out."""
    return msgspec.json.decode(order.skip, type=DataSkip) if isinstance(order.skip, str) else order.skip


def open_order(session: Session, job: str) -> models.RestoreOrderRecord | None:
    orders = models.RestoreOrderRecord
    query = select(orders).where(orders.job == job, orders.state.in_(OPEN_ORDER_STATES))
    return session.scalars(query).one_or_none()


# ---- versions -----------------------------------------------------------------------------------


def add_version(
    session: Session, job: models.JobRecord, changes: Sequence[StoredChange], *, who: str, now: float
) -> None:
    """Store changes as a new version; every change of `Desired` goes through here."""
    job.version += 1
    encoded = msgspec.json.encode(changes).decode()
    session.add(models.SettingsVersionRecord(job=job.name, version=job.version, who=who, at=now, changes=encoded))


def check_version(session: Session, job: models.JobRecord, version: int, edited: set[Field]) -> None:
    """Raise `VersionConflict` if a version later than the editor's changed a setting that `edited` depends on.

    A request for a single action depends on no setting, so it conflicts with nothing.
    """
    if version > job.version:
        raise VersionConflict(
            version=job.version, who="the server", at=job.created_at, what="there is no such version yet"
        )
    depends = edited & {*SETTINGS}
    if depends & DECIDE_THE_INTERVAL:
        depends |= DECIDE_THE_INTERVAL
    versions = models.SettingsVersionRecord
    query = select(versions).where(versions.job == job.name, versions.version > version).order_by(versions.version)
    later = [as_edit(row) for row in session.scalars(query)]
    missed = [edit for edit in later if any(change.field in depends for change in edit.changes)]
    if missed:
        what = "; ".join(edit.summary for edit in missed)
        raise VersionConflict(version=job.version, who=missed[-1].who, at=missed[-1].at, what=what)


def change(job: models.JobRecord, changes: DesiredChanges, *, now: float) -> list[StoredChange]:
    """Apply changes to `job`, and return those that change a value. Raises InvalidSetting: a value is invalid."""
    made: list[StoredChange] = []
    if changes.budget is not UNSET:
        budget = _parsed("budget", parse_budget, changes.budget)
        paced = paced_of(job)
        known = paced.budget if paced and job.budget is None else None
        made.append(StoredChange(field="budget", before=job.budget, after=budget, script_budget=known))
        job.budget = budget
    if changes.write_budget is not UNSET:
        rate = _parsed("write_budget", parse_write_budget, changes.write_budget)
        made.append(StoredChange(field="write budget", before=job.write_bytes_per_second, after=rate))
        job.write_bytes_per_second = rate
    if changes.max_unsaved_work is not UNSET:
        seconds = _parsed("max_unsaved_work", parse_unsaved_work, changes.max_unsaved_work)
        made.append(StoredChange(field="unsaved work", before=job.max_unsaved_seconds, after=seconds))
        job.max_unsaved_seconds = seconds
    if changes.policy is not UNSET:
        policy = _parsed("policy", parse_policy, changes.policy)
        made.append(StoredChange(field="policy", before=job.policy, after=policy))
        job.policy = policy
    if changes.every is not UNSET:
        held = None if changes.every_seconds is UNSET else changes.every_seconds
        after = _interval(_parsed("every", parse_every, changes.every), held, now)
        before = Interval(job.every, job.every_until, job.interval_seconds)
        made.append(StoredChange(field="interval", before=before, after=after))
        job.every, job.every_until, job.interval_seconds = after.every, after.until, after.seconds
    elif changes.every_seconds is not UNSET:
        raise InvalidSetting("every_seconds", "it limits the time of a fixed interval: give every as well")
    if changes.paused is not UNSET:
        made.append(StoredChange(field="checkpoints", before=job.paused, after=changes.paused))
        if changes.paused != job.paused:
            job.paused, job.paused_version = changes.paused, job.version + 1
    if changes.retention is not UNSET:
        parsed = _parsed("retention", parse_retention, changes.retention)
        rules = None if parsed is None else str(parsed)
        made.append(StoredChange(field="retention", before=job.retention, after=rules))
        job.retention = rules
    if changes.on_trouble is not UNSET:
        rule = _parsed("on_trouble", parse_on_trouble, changes.on_trouble)
        made.append(
            StoredChange(field="on trouble", before=job.on_trouble, after=None if rule is None else str(rule))
        )
        job.on_trouble = None if rule is None else str(rule)
    if changes.checkpoint_request is not UNSET and changes.checkpoint_request:
        made.append(StoredChange(field="checkpoint"))
        job.checkpoint_request += 1
    if changes.probe_request is not UNSET and changes.probe_request:
        made.append(StoredChange(field="data probe"))
        job.probe_request += 1
    if not made:
        fields = ", ".join(name for name in DesiredChanges.__struct_fields__ if name != "every_seconds")
        raise InvalidSetting("", f"nothing to change: give at least one of {fields}")
    return [one for one in made if one.field not in SETTINGS or one.before != one.after]


def _parsed(field: str, parse: Callable[[Any], T], value: object) -> T | None:
    try:
        return None if value is None else parse(value)
    except ValueError as error:
        raise InvalidSetting(field, str(error)) from None


def _interval(every: FixedInterval | None, held_seconds: float | None, now: float) -> Interval:
    until = None
    if held_seconds is not None:
        if not LEAST_HELD_SECONDS <= held_seconds <= MOST_HELD_SECONDS:
            reason = f"a temporary interval lasts 1 min to 30 days, not {held_seconds:g} s"
            raise InvalidSetting("every_seconds", reason)
        if every is None:
            raise InvalidSetting("every_seconds", "an automatic interval does not end: give every as well")
        until = now + held_seconds
    if isinstance(every, timedelta):
        return Interval(until=until, seconds=every.total_seconds())
    return Interval(every, until)


def reverting_changes(row: models.SettingsVersionRecord, *, now: float) -> DesiredChanges:
    """Return the changes that revert a version.

    A temporary interval is restored for the rest of its time, and not at all after that.

    Raises:
        InvalidSetting: the version requested an action, which cannot be reverted.
    """
    back: dict[str, Any] = {}
    for made in _changes.decode(row.changes):
        if isinstance(made.before, Interval):
            left = UNSET if made.before.until is None else made.before.until - now
            if left is UNSET or left >= LEAST_HELD_SECONDS:
                fixed = made.before.fixed
                back["every"] = format_interval(fixed) if isinstance(fixed, timedelta) else fixed
                back["every_seconds"] = left
            else:
                back["every"] = None
        elif made.field in SETTINGS:
            back[CHANGED_BY.get(made.field, made.field)] = made.before
        else:
            what = f"{made.field} {described(made).after}"
            raise InvalidSetting("edit", f"version {row.version} cannot be reverted: {what}")
    return DesiredChanges(**back)


def delivered(session: Session, job: str, version: int) -> None:
    """Record that the agent has `version`, because it asks for later ones."""
    jobs = models.JobRecord
    session.execute(
        update(jobs)
        .where(jobs.name == job, jobs.delivered_version < version, jobs.version >= version)
        .values(delivered_version=version)
    )


def record_applied(session: Session, job: models.JobRecord, version: int, iteration: int, at: float) -> None:
    """Record from which iteration on the agent applies `version`, and with it the earlier ones.

    A version that this database never had, because an earlier one was deleted, is ignored.
    """
    if version > job.version:
        return
    versions = models.SettingsVersionRecord
    session.execute(
        update(versions)
        .where(versions.job == job.name, versions.version <= version, versions.applied_iteration.is_(None))
        .values(applied_iteration=iteration, applied_at=at)
    )
    if version > job.applied_version:
        job.applied_version, job.applied_iteration, job.applied_at = version, iteration, at


# ---- versions as text -------------------------------------------------------------------------


def edit_rows(session: Session, job: str, *, limit: int) -> list[Edit]:
    versions = models.SettingsVersionRecord
    query = (
        select(versions)
        .where(versions.job == job, versions.who != AGENT)
        .order_by(versions.version.desc())
        .limit(limit)
    )
    return [as_edit(row) for row in session.scalars(query)]


def as_edit(row: models.SettingsVersionRecord) -> Edit:
    changes = [described(change) for change in _changes.decode(row.changes)]
    return answer_from(row, Edit, summary=_summary(changes), changes=changes)


def _summary(changes: Sequence[SettingChange]) -> str:
    shown = [change for change in changes if change.before != change.after] or changes
    return ", ".join(
        f"{change.field} {change.before} → {change.after}" if change.before else f"{change.field} {change.after}"
        for change in shown
    )


def described(made: StoredChange) -> SettingChange:
    """Render a change as text."""
    before, after = _text(made, made.before, made.script_budget), _text(made, made.after, None)
    match made.field:
        case "checkpoint" | "data probe":
            before, after = "", "now"
        case "restore":
            place = f"to {made.iteration}"
            before, after = (before or (place if after else "")), (after or place)
        case "value":
            return SettingChange(field=f"value {made.name}", before=before, after=after)
        case "verify" if made.against:
            after = f"{after} compared with {made.against}"
    return SettingChange(field=made.field, before=before, after=after)


def _text(made: StoredChange, value: object, script_budget: float | None) -> str:
    match made.field, value:
        case "write budget", float() | int():
            return format_rate(value)
        case "unsaved work", float() | int():
            return duration(value)
        case "budget" | "write budget" | "unsaved work" | "policy" | "retention" | "on trouble" | "value", None:
            return SCRIPT if script_budget is None else f"{SCRIPT} ({exact_percent(script_budget)})"
        case "budget", float() | int():
            return exact_percent(value)
        case "interval", Interval():
            return _interval_text(value)
        case "checkpoints", _:
            return "paused" if value else "running"
        case "value", bool() | int() | float() | str():
            return value_rules.shown(value)
    return "" if value is None else str(value)


def _interval_text(interval: Interval) -> str:
    fixed = interval.fixed
    if fixed is None:
        return "automatic"
    until = "" if interval.until is None else f" until {datetime.fromtimestamp(interval.until, UTC):%F %T} UTC"
    return f"every {format_interval(fixed) if isinstance(fixed, timedelta) else fixed}{until}"


# ---- temporary intervals: when one ends, the policy decides again ----------------------------------


def end_overrides(db: Database, now: float) -> None:
    """End the temporary intervals whose time is over."""
    jobs = models.JobRecord
    with db.read() as session:
        found = session.scalars(select(jobs.name).where(jobs.every_until <= now)).all()
    for job in found:
        db.write(partial(_end_override, job=job, now=now), job=job, at_once=True)


def _end_override(session: Session, *, job: str, now: float) -> None:
    row = session.get(models.JobRecord, job)
    if row is None or row.every_until is None or row.every_until > now:
        return  # another interval was set in the meantime
    record_edit(session, row, DesiredChanges(every=None), version=None, who=SERVER, now=now)


def record_edit(
    session: Session, job: models.JobRecord, changes: DesiredChanges, *, version: int | None, who: str, now: float
) -> None:
    """Store an edit as a version, and record it in the audit log, unless it changes nothing.

    `version` is the version that the editor saw, or None to skip the check for conflicts.
    """
    made = change(job, changes, now=now)
    if version is not None:
        check_version(session, job, version, {one.field for one in made})
    if not made:
        return
    add_version(session, job, made, who=who, now=now)
    session.flush()
    shown = [described(one) for one in made]
    audit.record(
        session, who=who, action="settings.edit", now=now, job=job.name, project=job.project,
        before={one.field: one.before for one in shown},
        after={one.field: one.after for one in shown} | {"version": job.version},
    )  # fmt: skip
