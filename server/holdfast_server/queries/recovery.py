"""Places from which a job would resume if it ended now: the newest snapshot or checkpoint in each."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import ColumnElement, select

from holdfast.protocol.analyses import HostRecovery, Recovery, RecoveryPlace, RecoverySource
from holdfast.protocol.field_types import HeldSnapshot
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.protocol.jobs import JobStatus
from holdfast_server import models
from holdfast_server.queries.job_view import JobView
from holdfast_server.records import attempt_reports, checkpoints
from holdfast_server.records.job_status import ENDED, status_of

NOTHING_COMPLETE = "no snapshot of all ranks is complete now"

_stores = msgspec.json.Decoder(list[str])


@dataclass(frozen=True, slots=True)
class CompleteSnapshot:
    """A snapshot of which the hosts of a job hold each part."""

    id: str
    needs: frozenset[str]
    """Hosts without which a part of it is lost."""

    @property
    def iteration(self) -> int:
        return parse_checkpoint_id(self.id)[0]


def recovery(view: JobView) -> Recovery:
    """Return the snapshot or checkpoint that a start of the job would find in each place."""
    attempt = view.attempt
    held: dict[str, list[HeldSnapshot]] = {}
    if attempt is not None:
        held = attempt_reports.memories_of(view.session, view.name, attempt.uid)
    status = status_of(view.job, attempt, now=view.now).status
    if status in ENDED:
        held = {host: [] for host in held}
    snapshots = complete_snapshots(held, view.job.lineage)
    sources = _memory(held, snapshots, attempt, status)
    sources += _durable(view, _stores.decode(attempt.stores) if attempt and attempt.stores else [])
    return Recovery(
        job=view.name,
        iteration=view.job.iteration,
        sources=_with_losses(sources, view.job.iteration),
        hosts=_hosts(held, snapshots),
    )


def complete_snapshots(held: Mapping[str, Sequence[HeldSnapshot]], lineage: int) -> list[CompleteSnapshot]:
    """Return the snapshots of a lineage of which some host holds each part, the newest first."""
    holders: dict[tuple[str, str, int], dict[int, set[str]]] = {}
    for host, snapshots in held.items():
        for snapshot in snapshots:
            key = snapshot.id, snapshot.origin, snapshot.world_size
            for rank in snapshot.ranks:
                holders.setdefault(key, {}).setdefault(rank, set()).add(host)
    found = [
        CompleteSnapshot(checkpoint, frozenset().union(*(hosts for hosts in parts.values() if len(hosts) == 1)))
        for (checkpoint, _, world_size), parts in holders.items()
        if parse_checkpoint_id(checkpoint)[1] == lineage
        and sum(rank < world_size for rank in parts) == world_size > 0
    ]
    return sorted(found, key=lambda snapshot: snapshot.iteration, reverse=True)


def _memory(
    held: Mapping[str, Sequence[HeldSnapshot]],
    snapshots: Sequence[CompleteSnapshot],
    attempt: models.AttemptRecord | None,
    status: JobStatus,
) -> list[RecoverySource]:
    has_ended, note = status in ENDED, "as last reported" if status == "silent" else ""
    if has_ended:
        why = "freed when the job ended"
    elif held:
        why = NOTHING_COMPLETE
    elif attempt is not None and attempt.supervised:
        why = "nothing reported: the agent keeps no snapshots in memory"
    else:
        why = "not kept: start the job with holdfast run"
    where = "memory of the host" if len(held) < 2 else "memory of the hosts"
    newest = next(iter(snapshots), None)
    found = [_source("memory", where, "the processes end", newest.id if newest else None, why, note)]
    if len(held) > 1:
        safe = next((snapshot for snapshot in snapshots if not snapshot.needs), None)
        why = why if has_ended else "no snapshot is complete without one of the hosts: start it with peers=1"
        found.append(_source("peers", "memory of peers", "one host is lost", safe.id if safe else None, why, note))
    return found


def _durable(view: JobView, stores: Sequence[str]) -> list[RecoverySource]:
    rows, address = models.CheckpointRecord, stores[0] if stores else ""
    if len(stores) < 2:
        newest = _newest(view)
        return [_source("store", "store", "all memory is lost", newest, "no durable checkpoint", address)]
    near = _newest(view, rows.copy_place.is_distinct_from("behind"))
    far, failure = _newest(view, rows.copy_place.is_not(None)), "the local directory is also lost"
    return [
        _source("local", "local directory", "all memory is lost", near, "no durable checkpoint", address),
        _source("store", "store behind it", failure, far, "nothing copied yet", stores[1]),
    ]


def _newest(view: JobView, *conditions: ColumnElement[bool]) -> str | None:
    """Return the id of the newest durable checkpoint that stands."""
    rows = models.CheckpointRecord
    query = select(rows.id).where(rows.job == view.name, rows.state == checkpoints.DURABLE)
    query = query.where(checkpoints.stands(view.ancestry()), *conditions)
    return view.session.scalar(query.order_by(rows.iteration.desc(), rows.lineage.desc()).limit(1))


def _source(
    place: RecoveryPlace, name: str, failure: str, checkpoint: str | None, why_none: str, note: str = ""
) -> RecoverySource:
    return RecoverySource(
        place=place, name=name, failure=failure, checkpoint=checkpoint,
        iteration=None if checkpoint is None else parse_checkpoint_id(checkpoint)[0],
        resumes_from=0, loses=0, note=why_none if checkpoint is None else note,
    )  # fmt: skip


def _with_losses(sources: Sequence[RecoverySource], iteration: int) -> list[RecoverySource]:
    """Add to each place the iteration from which the job resumes if it and those below are left."""
    found: list[RecoverySource] = []
    newest = 0
    for source in reversed(sources):
        newest = max(newest, source.iteration or 0)
        lost = max(0, iteration - newest)
        found.append(msgspec.structs.replace(source, resumes_from=newest, loses=lost))
    return found[::-1]


def _hosts(held: Iterable[str], snapshots: Sequence[CompleteSnapshot]) -> list[HostRecovery]:
    def without(host: str) -> int | None:
        return next((snapshot.iteration for snapshot in snapshots if host not in snapshot.needs), None)

    hosts = [HostRecovery(host=host, iteration=without(host)) for host in held]
    return sorted(hosts, key=lambda one: -sys.maxsize if one.iteration is None else one.iteration)
