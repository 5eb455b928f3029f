"""Verification of checkpoints: requests, verdicts, and norms of tensors.

The server reads no store. A request is part of a job's desired state until an agent reports its verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import msgspec
from sqlalchemy.orm import Session

from holdfast.protocol import wire
from holdfast.protocol.jobs import ScrubReport, TensorRow, Tensors, Verification
from holdfast.protocol.wire import MAX_OPEN_VERIFICATIONS, MAX_REPORTED_TENSORS, TensorNorms
from holdfast_server import models
from holdfast_server.core import compression
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import NotPossible
from holdfast_server.records import desired_state
from holdfast_server.records.checkpoints import DURABLE
from holdfast_server.records.desired_state import OPEN_VERIFICATIONS, StoredChange

IN_REACH = (DURABLE, "damaged")
VERDICTS = ("sound", "damaged")
MAX_NAME = 200
"""Characters of a tensor's name."""
MAX_TENSORS_BYTES = 2**20
_LEVEL = 6

_norms = msgspec.msgpack.Decoder(TensorNorms)


def find(session: Session, job: str, checkpoint: str) -> Verification:
    row = session.get(models.VerificationRecord, (job, checkpoint))
    if row is None:
        return Verification(checkpoint=checkpoint)
    return answer_from(row, Verification, measured_at=row.tensors_at)


def request(
    session: Session,
    job: models.JobRecord,
    point: models.CheckpointRecord,
    *,
    against: models.CheckpointRecord | None,
    who: str,
    now: float,
) -> bool:
    """Request a verification; return whether it is new.

    Raises:
        NotPossible: a checkpoint is not in the store, or too many requests are open.
    """
    if against is not None and against.id == point.id:
        raise NotPossible(f"checkpoint {point.id} cannot be compared with itself: choose another one")
    for each in filter(None, (point, against)):
        if each.state not in IN_REACH:
            raise NotPossible(
                f"checkpoint {each.id} is {each.state}: only checkpoints in the store can be verified"
            )
    other = against.id if against is not None else None
    row = session.get(models.VerificationRecord, (job.name, point.id))
    if row is not None and row.state in OPEN_VERIFICATIONS and row.against == other:
        return False
    asked = desired_state.open_requests(session, [job.name]).get(job.name, desired_state.NOTHING_ASKED)
    if sum(each.checkpoint != point.id for each in asked.verify) >= MAX_OPEN_VERIFICATIONS:
        raise NotPossible(
            f"{job.name} has {MAX_OPEN_VERIFICATIONS} open verifications, the maximum: wait until one has finished"
        )
    desired_state.add_version(
        session, job, [StoredChange(field="verify", after=point.id, against=other)], who=who, now=now
    )
    if row is None:
        row = models.VerificationRecord(job=job.name, checkpoint=point.id)
        session.add(row)
    row.request, row.against, row.asked_by, row.asked_at = job.version, other, who, now
    _move(row, "requested", at=now)
    session.flush()
    return True


def cancel(session: Session, job: models.JobRecord, checkpoint: str, *, who: str, now: float) -> bool:
    """Cancel the open request; return whether there was one."""
    row = session.get(models.VerificationRecord, (job.name, checkpoint))
    if row is None or row.state not in OPEN_VERIFICATIONS:
        return False
    _move(row, "cancelled", at=now, reason=f"cancelled by {who}")
    _close(session, job, row, who=who, now=now)
    session.flush()
    return True


def record(
    session: Session, job: models.JobRecord, event: wire.VerificationReport, *, attempt: int, now: float
) -> None:
    """Apply a report of a verification; of an earlier request, only the verdict counts."""
    row = session.get(models.VerificationRecord, (job.name, event.checkpoint))
    if row is None:
        return
    if event.verdict in VERDICTS and event.at >= (row.verified_at or 0.0):
        row.verdict, row.verified_at, row.verified_host = event.verdict, event.at, event.host
        if event.tensors is not None and (packed := _packed(event.tensors)) is not None:
            row.tensors, row.tensors_at, row.tensors_against = packed, event.at, event.against
    if event.verdict == "sound":
        _repair(session, job.name, event.checkpoint, attempt=attempt)
    if event.request != row.request or row.state not in OPEN_VERIFICATIONS:
        return
    row.host, row.read_bytes, row.total_bytes = event.host, event.read_bytes, event.total_bytes
    row.state, row.at, row.seconds, row.reason = event.verdict or "reading", event.at, event.seconds, event.reason
    if event.verdict is not None:
        _close(session, job, row, who=desired_state.AGENT, now=now)


def record_scrub(session: Session, point: models.CheckpointRecord, report: ScrubReport, *, now: float) -> None:
    """Apply the result of a scrub: remaining damage makes the checkpoint damaged, and a repair durable again."""
    is_sound = report.state in ("sound", "repaired")
    if not is_sound and point.state == DURABLE:
        point.state, point.reason = "damaged", report.reason
    elif is_sound and point.state == "damaged":
        point.state, point.reason = DURABLE, None
    row = session.get(models.VerificationRecord, (point.job, point.id))
    if row is None:
        row = models.VerificationRecord(
            job=point.job, checkpoint=point.id, request=0, asked_by="", asked_at=now, state="", at=now
        )
        session.add(row)
    verdict = "sound" if is_sound else "damaged"
    row.verdict, row.verified_at, row.verified_host = verdict, now, report.host
    if row.state not in OPEN_VERIFICATIONS:  # an open request keeps its progress
        _move(row, verdict, at=now, reason=report.reason)
        row.host, row.read_bytes, row.total_bytes = report.host, report.read_bytes, report.read_bytes
        row.seconds = report.seconds
    session.flush()


def _repair(session: Session, job: str, checkpoint: str, *, attempt: int) -> None:
    """Make a damaged checkpoint durable again, because its data was repaired."""
    point = session.get(models.CheckpointRecord, (job, checkpoint))
    if point is not None and point.state == "damaged" and point.attempt <= attempt:
        point.state, point.reason = DURABLE, None


def _move(row: models.VerificationRecord, state: str, *, at: float, reason: str | None = None) -> None:
    row.state, row.at, row.reason = state, at, reason
    row.host, row.read_bytes, row.total_bytes, row.seconds = "", 0, 0, None


def _close(
    session: Session, job: models.JobRecord, row: models.VerificationRecord, *, who: str, now: float
) -> None:
    """Remove the request from the desired state."""
    ended = StoredChange(field="verify", before=row.checkpoint, after=row.state)
    desired_state.add_version(session, job, [ended], who=who, now=now)


# ---- tensors -------------------------------------------------------------------------------------


def tensors(session: Session, job: str, checkpoint: str, other: str | None) -> Tensors:
    here = session.get(models.VerificationRecord, (job, checkpoint))
    there = session.get(models.VerificationRecord, (job, other)) if other else None
    ours, theirs = _unpacked(here), _unpacked(there)
    measure: Literal["none", "norms", "difference"] = "none"
    rows = list(_rows(ours)) if ours is not None else []
    missing = [] if ours is not None else [checkpoint]
    if other is None:
        pass
    elif ours is not None and here is not None and here.tensors_against == other:
        measure, rows = "difference", list(_rows(ours, dict(zip(ours.name, _other_norms(ours), strict=True))))
    elif ours is not None and theirs is not None:
        back = there is not None and there.tensors_against == checkpoint  # distances are symmetric
        distances = _numbers(theirs.distance) if back else [math.nan] * len(theirs.name)
        seen = dict(zip(theirs.name, zip(_numbers(theirs.norm), distances, strict=True), strict=True))
        measure, rows = "difference" if back else "norms", list(_rows(ours, seen))
    elif theirs is None:
        missing.append(other)
    return Tensors(
        checkpoint=checkpoint,
        other=other,
        measure=measure,
        measured_at=here.tensors_at if here is not None else None,
        missing=missing,
        rows=sorted(rows, key=_place),
        left_out=ours.left_out if ours is not None else 0,
    )


def _other_norms(norms: TensorNorms) -> Iterator[tuple[float, float]]:
    return zip(_numbers(norms.other_norm), _numbers(norms.distance), strict=True)


def _rows(norms: TensorNorms, beside: dict[str, tuple[float, float]] | None = None) -> Iterator[TensorRow]:
    columns = (norms.name, norms.elements, norms.norm, norms.largest, norms.nan, norms.inf)
    for name, elements, norm, largest, nan, inf in zip(*columns, strict=True):
        other_norm, distance = (beside or {}).get(name, (math.nan, math.nan))
        yield TensorRow(
            name=name,
            elements=int(elements),
            norm=norm,
            largest=largest,
            nan=int(nan),
            inf=int(inf),
            other_norm=_known(other_norm),
            distance=_known(distance),
            change=_change(norm, other_norm, distance),
        )


def _change(norm: float, other_norm: float, distance: float) -> float | None:
    """Return the relative change: of the measured difference, or else of the norms."""
    if math.isnan(other_norm):
        return None
    differs = norm - other_norm if math.isnan(distance) else distance
    if other_norm:
        return differs / other_norm
    return math.inf if differs else 0.0


def _place(row: TensorRow) -> tuple[bool, float, str]:
    change = -1.0 if row.change is None else abs(row.change)
    return not (row.nan or row.inf), -change, row.name


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _packed(norms: TensorNorms) -> bytes | None:
    """Encode norms; None if columns differ in length or are too long."""
    columns = (norms.elements, norms.norm, norms.largest, norms.nan, norms.inf)
    beside = (norms.other_norm, norms.distance)
    wanted = {len(norms.name)} | {len(column) for column in columns} | {len(column) for column in beside if column}
    lists = all(isinstance(column, list) for column in (*columns, *beside))
    if not lists or len(wanted) != 1 or len(norms.name) > MAX_REPORTED_TENSORS:
        return None
    norms.name = [name[:MAX_NAME].replace("\0", "\ufffd") for name in norms.name]
    return compression.compress(msgspec.msgpack.encode(norms), _LEVEL)


def _unpacked(row: models.VerificationRecord | None) -> TensorNorms | None:
    if row is None or row.tensors is None:
        return None
    return _norms.decode(compression.decompress(row.tensors, MAX_TENSORS_BYTES))


def _numbers(column: list[float] | bytes) -> list[float]:
    assert isinstance(column, list)
    return column
