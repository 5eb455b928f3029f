"""Protected jobs: a second person must approve requests about them within 15 minutes."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast.protocol.administration import Approval
from holdfast.protocol.jobs import Order
from holdfast.protocol.orders import DataSkip, HaltAction
from holdfast.protocol.values import JobValue, Scalar
from holdfast.protocol.wire import Desired
from holdfast.units import duration
from holdfast_server import models
from holdfast_server.control import control
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import NotPossible, PermissionDenied, UnknownApproval, WaitsForApproval
from holdfast_server.core.principal import OPERATOR, Principal
from holdfast_server.db import Database, job_transaction
from holdfast_server.queries.job_view import find_job
from holdfast_server.records import audit, job_values, restore_orders

T = TypeVar("T")

APPROVAL_SECONDS = 900.0
"""Time for a second person to approve a request."""
LISTED = 20


class RestoreWish(msgspec.Struct, frozen=True, kw_only=True, tag="restore"):
    """A restore, as `control.order_restore` takes it."""

    checkpoint: str | None = None
    iteration: int | None = None
    key: str
    expires_seconds: float | None = None
    degraded: bool = False
    skip: DataSkip | None = None

    @property
    def what(self) -> str:
        parts = [f"restore {self.checkpoint or f'iteration {self.iteration}'}"]
        if self.degraded:
            parts.append("replacing damaged bytes")
        if self.skip is not None and self.skip.batches:
            loader = "" if self.skip.loader is None else f" of loader {self.skip.loader}"
            parts.append(f"leaving out {self.skip.batches:,} batches{loader}")
        elif self.skip is not None:
            parts.append(f"leaving out the data up to iteration {self.skip.to_iteration}")
        if self.expires_seconds is not None:
            parts.append(f"within {duration(self.expires_seconds)}")
        return ", ".join(parts)


class TrainingWish(msgspec.Struct, frozen=True, kw_only=True, tag="training"):
    action: HaltAction

    @property
    def what(self) -> str:
        return f"{self.action} training"


class ValueWish(msgspec.Struct, frozen=True, kw_only=True, tag="value"):
    name: str
    value: Scalar | None

    @property
    def what(self) -> str:
        text = "the default of the script" if self.value is None else msgspec.json.encode(self.value).decode()
        return f"set {self.name} to {text}"


class UnprotectWish(msgspec.Struct, frozen=True, kw_only=True, tag="unprotect"):
    what: str = "remove the protection"


Wish = RestoreWish | TrainingWish | ValueWish | UnprotectWish
"""What needs approval, where the job is protected. A further kind is one more class, and one case of `_do`."""


def carry_out(db: Database, job: str, wish: Wish, do: Callable[[], T], *, asker: Principal, now: float) -> T:
    """Carry out a request, or have it wait for a second person if the job is protected.

    Raises:
        WaitsForApproval: it waits; it was recorded and audited.
        NotPossible: it needs a second person, and this server has no accounts.
        What `do` raises.
    """
    with db.read() as session:
        is_protected = find_job(session, job).protected
    if not is_protected:
        return do()
    if asker is OPERATOR:
        raise NotPossible(
            f"{job} is protected: a second person must approve this, and this server has no accounts"
        )
    found = _ask(db, job, wish, asker=asker, now=now)
    raise WaitsForApproval(found.id, found.expires_at, found.what)


def restore(db: Database, job: str, wish: RestoreWish, *, asker: Principal, now: float) -> tuple[Order, bool]:
    """Order a restore, as `control.order_restore`, or have it wait for approval."""
    do = partial(
        control.order_restore, db, job, checkpoint=wish.checkpoint, iteration=wish.iteration, key=wish.key,
        who=asker.name, now=now, expires_seconds=wish.expires_seconds, degraded=wish.degraded, skip=wish.skip,
    )  # fmt: skip
    with db.read() as session:
        is_repeated = restore_orders.find_by_key(session, job, wish.key) is not None
    return do() if is_repeated else carry_out(db, job, wish, do, asker=asker, now=now)


def order_training(db: Database, job: str, action: HaltAction, *, asker: Principal, now: float) -> Desired:
    """Order to pause or end training, as `control.order_training`, or have it wait for approval."""
    do = partial(control.order_training, db, job, action, who=asker.name, now=now)
    return carry_out(db, job, TrainingWish(action=action), do, asker=asker, now=now)


def set_value(
    db: Database, job: str, name: str, value: Scalar | None, *, asker: Principal, now: float
) -> JobValue:
    """Change a value of the script, as `control.set_value`, or have it wait for approval."""
    do = partial(control.set_value, db, job, name, value, who=asker.name, now=now)
    return carry_out(db, job, ValueWish(name=name, value=value), do, asker=asker, now=now)


@job_transaction
def _ask(session: Session, job: str, wish: Wish, *, asker: Principal, now: float) -> Approval:
    """Record the request. While it waits, a repeated one is the same request."""
    row = find_job(session, job)
    if isinstance(wish, RestoreWish):
        chosen = control.restorable(
            session, row, wish.checkpoint, wish.iteration, degraded=wish.degraded, skip=wish.skip
        )
        wish = msgspec.structs.replace(wish, checkpoint=chosen.id, iteration=None)
    elif isinstance(wish, ValueWish):
        value = job_values.allowed(session, row, wish.name, wish.value)
        wish = msgspec.structs.replace(wish, value=value)
    encoded = msgspec.json.encode(wish).decode()
    for waiting in _waiting(session, job, now=now):
        if waiting.what == wish.what and waiting.owner == asker.owner:
            return _shown(waiting, now=now)
    made = models.ApprovalRecord(
        id=uuid.uuid4().hex, job=job, what=wish.what, request=encoded, who=asker.name, owner=asker.owner,
        created_at=now, expires_at=now + APPROVAL_SECONDS, state="waiting",
    )  # fmt: skip
    session.add(made)
    session.flush()
    audit.record(
        session, who=asker.name, action="approval.ask", now=now, job=job, project=row.project,
        after={"approval": made.id, "what": made.what},
    )  # fmt: skip
    return _shown(made, now=now)


@job_transaction
def approve(session: Session, job: str, approval: str, *, asker: Principal, now: float) -> Approval:
    """Approve a request of another person, and carry it out in the same transaction.

    Raises:
        UnknownJob, UnknownApproval.
        PermissionDenied: the asker, or a key of the asker, cannot approve.
        NotPossible: it no longer waits.
        What the request raises; it then still waits.
    """
    row, project = _find_waiting(session, job, approval, now=now), find_job(session, job).project
    if asker.owner == row.owner or asker is OPERATOR:
        raise PermissionDenied(f"{row.owner} asked to {row.what}: a second person must approve it")
    row.state, row.decided_by, row.decided_at = "approved", asker.name, now
    session.flush()
    wish: Wish = msgspec.json.decode(row.request, type=Wish)
    _do(session, job, wish, who=f"{row.who}, approved by {asker.name}", now=now)
    audit.record(
        session, who=asker.name, action="approval.approve", now=now, job=job, project=project,
        after={"approval": row.id, "what": row.what, "asked_by": row.who},
    )  # fmt: skip
    return _shown(row, now=now)


@job_transaction
def decline(session: Session, job: str, approval: str, *, asker: Principal, now: float) -> Approval:
    """Decline a request, or withdraw your own. Raises UnknownJob, UnknownApproval, NotPossible."""
    row, project = _find_waiting(session, job, approval, now=now), find_job(session, job).project
    row.state, row.decided_by, row.decided_at = "declined", asker.name, now
    session.flush()
    audit.record(
        session, who=asker.name, action="approval.decline", now=now, job=job, project=project,
        after={"approval": row.id, "what": row.what, "asked_by": row.who},
    )  # fmt: skip
    return _shown(row, now=now)


def protect(db: Database, job: str, *, protected: bool, has_accounts: bool, asker: Principal, now: float) -> None:
    """Protect a job, or remove its protection, which needs approval as well.

    Raises:
        UnknownJob, WaitsForApproval.
        NotPossible: this server has no accounts.
    """
    if not has_accounts:
        if protected:
            raise NotPossible(
                "a protected job needs a second person: add accounts to this server first (holdfast user add)"
            )
        _set_protected(db, job, protected=False, who=asker.name, now=now)
    elif protected:
        _set_protected(db, job, protected=True, who=asker.name, now=now)
    else:
        remove = partial(_set_protected, db, job, protected=False, who=asker.name, now=now)
        carry_out(db, job, UnprotectWish(), remove, asker=asker, now=now)


def approvals(session: Session, job: str, *, now: float) -> list[Approval]:
    """Return the newest requests that need or needed approval, newest first."""
    rows = models.ApprovalRecord
    query = select(rows).where(rows.job == job).order_by(rows.created_at.desc(), rows.id).limit(LISTED)
    return [_shown(row, now=now) for row in session.scalars(query)]


def _do(session: Session, job: str, wish: Wish, *, who: str, now: float) -> None:
    match wish:
        case RestoreWish():
            control.place_restore(
                session, job, checkpoint=wish.checkpoint, iteration=None, key=wish.key, who=who, now=now,
                expires_seconds=wish.expires_seconds, degraded=wish.degraded, skip=wish.skip, is_approved=True,
            )  # fmt: skip
        case TrainingWish(action=action):
            control.place_training_order(session, job, action, who=who, now=now, is_approved=True)
        case ValueWish():
            control.place_value(session, job, wish.name, wish.value, who=who, now=now, is_approved=True)
        case UnprotectWish():
            _write_protected(session, job, protected=False, who=who, now=now)


def _write_protected(session: Session, job: str, *, protected: bool, who: str, now: float) -> None:
    row = find_job(session, job)
    if row.protected == protected:
        return
    row.protected = protected
    session.flush()
    audit.record(
        session, who=who, action="job.protect" if protected else "job.unprotect", now=now, job=job,
        project=row.project, before={"protected": not protected}, after={"protected": protected},
    )  # fmt: skip


_set_protected = job_transaction(_write_protected)


def _find_waiting(session: Session, job: str, approval: str, *, now: float) -> models.ApprovalRecord:
    find_job(session, job)
    row = session.get(models.ApprovalRecord, approval, with_for_update=True)
    if row is None or row.job != job:
        raise UnknownApproval(job, approval)
    if (state := _shown(row, now=now).state) != "waiting":
        by = f" by {row.decided_by}" if row.decided_by else ": ask again"
        raise NotPossible(f"the request to {row.what} is {state}{by}")
    return row


def _waiting(session: Session, job: str, *, now: float) -> list[models.ApprovalRecord]:
    rows = models.ApprovalRecord
    query = select(rows).where(rows.job == job, rows.state == "waiting", rows.expires_at > now)
    return list(session.scalars(query))


def _shown(row: models.ApprovalRecord, *, now: float) -> Approval:
    is_expired = row.state == "waiting" and row.expires_at <= now
    return answer_from(row, Approval, state="expired" if is_expired else row.state)
