"""Maintenance of a store without a session: retention, leftovers, records with implausible numbers."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator

import msgspec

from holdfast.checkpoint import restore
from holdfast.protocol.messages import MAX_ATTEMPT, MAX_LINEAGE, PLAUSIBLE_STEP, parse_checkpoint_id
from holdfast.protocol.retention import Retention, checkpoints_to_delete
from holdfast.store import Attempt, Lineage, Pins, RecordName, Store, newest_attempt, newest_pins
from holdfast.store.records import decode_record, held_checkpoints, protected_checkpoints
from holdfast.system import processes

SLACK_SECONDS = 60.0
"""Tolerated difference between the start of a process and the time in the record that it wrote."""


class RemovableItem(msgspec.Struct, kw_only=True):
    """Something that may be removed."""

    name: str
    why: str
    size_bytes: int | None
    """None when its manifest cannot be read."""
    is_leftover: bool = False
    removed: bool = False


class RemovalPlan(msgspec.Struct, kw_only=True):
    """The checkpoints and leftovers of one job that may be removed."""

    job: str
    attempt: int
    """The newest attempt; once another begins, nothing more is removed."""
    running: str | None
    """Where the job runs or may run, so that its session maintains the store."""
    items: list[RemovableItem]
    stays: int
    """Number of checkpoints that remain."""


class RepairPlan(RemovalPlan):
    """The records of a job with implausible numbers."""

    newest_left: int
    """The newest attempt that remains; 0 when none does."""
    pins: Pins | None
    """Pins recorded by a removed attempt, to be recorded again."""
    unrepairable: list[str]
    """Messages about numbers that are exhausted and cannot be freed."""


def plan(
    store: Store, job: str, rules: Retention, drop: Collection[str] = (), wanted: Collection[str] = ()
) -> RemovalPlan:
    """Plan which checkpoints and leftovers of a job to remove.

    Args:
        store: where the checkpoints of the job are.
        job: its name.
        rules: the retention rules.
        drop: checkpoints to remove in any case.
        wanted: checkpoints that open restore orders name, which only a server knows.
    """
    newest = newest_attempt(store, job)
    running = None if newest is None else running_where(newest)
    committed = store.checkpoints(job)
    lineages = store.records(job, Lineage)
    head = next((checkpoint for checkpoint, _ in restore.candidates(store, job)), None)
    never = protected_checkpoints(
        lineages, max((each.number for each in lineages), default=0), restore.of_kind(store, job, "requested")
    )
    never |= held_checkpoints(store, job) | {*wanted, *([head] if head is not None else [])}
    pins = noted.checkpoints if (noted := newest_pins(store, job)) is not None else ()
    sizes, metrics = restore.CheckpointFacts(store, job).read(committed)
    named = [each for each in committed if each in drop]
    gone = {each: "selected with --drop" + (", although pinned" if each in pins else "") for each in named}
    rest = [checkpoint for checkpoint in committed if checkpoint not in gone]
    gone |= checkpoints_to_delete(rest, rules, protected=never, pinned=pins, sizes=sizes, metrics=metrics)
    items = [RemovableItem(name=each, why=why, size_bytes=sizes.get(each)) for each, why in gone.items()]
    stays = len(committed) - len(items)
    items += [
        RemovableItem(name=each.name, why=each.what, size_bytes=each.size_bytes, is_leftover=True)
        for each in store.leftovers(job)
    ]
    return RemovalPlan(job=job, attempt=newest.number if newest else 0, running=running, items=items, stays=stays)


def carry_out(store: Store, planned: RemovalPlan) -> None:
    """Remove what was planned, and mark each removed item.

    Raises:
        Fenced: a newer attempt has begun.
        OSError: the store failed; some items are removed.
    """
    for item in planned.items:
        if item.is_leftover:
            store.remove_leftover(planned.job, item.name)
        else:
            store.delete(planned.job, item.name, planned.attempt)
        item.removed = True


def plan_repair(store: Store, job: str, *, has_ended: bool = False) -> RepairPlan:
    """Plan which records of attempts, and of lineages without checkpoints, to remove.

    A number is implausible if it is out of range or almost, or far above the previous number. The lowest number is
    always plausible.

    Args:
        store: where the checkpoints of the job are.
        job: its name.
        has_ended: whether attempts on other machines have ended; otherwise they may still run.
    """
    records, committed = store.record_names(job), store.checkpoints(job)
    attempts = [each for each in records if each.kind == "attempt"]
    lineages = [each for each in records if each.kind == "lineage"]
    writers = {each.number for each in attempts if each.is_needed}
    trained = {parse_checkpoint_id(each)[1] for each in committed}
    gone = dict(_implausible(attempts, MAX_ATTEMPT, writers))
    newest_left = max((each.number for each in attempts if each.name not in gone), default=0)
    suspects = [each for each in attempts if each.name in gone or each.number == newest_left]
    gone |= _implausible(lineages, MAX_LINEAGE, trained)
    gone |= {
        each.name: "its attempt has no record"
        for each in records
        if each.kind == "ending" and each.number > newest_left
    }
    noted = newest_pins(store, job)
    kept = {"attempt": (writers | {newest_left}, MAX_ATTEMPT), "lineage": (trained, MAX_LINEAGE)}
    return RepairPlan(
        job=job,
        attempt=store.latest_attempt(job),
        running=_running(store, job, suspects, has_ended=has_ended),
        items=[
            RemovableItem(name=each.name, why=gone[each.name], size_bytes=None)
            for each in records
            if each.name in gone
        ],
        stays=len(committed),
        newest_left=newest_left,
        pins=noted if noted is not None and noted.attempt > newest_left else None,
        unrepairable=[
            f"{what} {max(numbers):,} remains because checkpoints belong to it, and few numbers are left: "
            f"to continue training, fork the job with holdfast fork"
            for what, (numbers, most) in kept.items()
            if any(most - PLAUSIBLE_STEP < number <= most for number in numbers)
        ],
    )


def repair(store: Store, planned: RepairPlan) -> None:
    """Remove what was planned, mark removed items, and record pins again. Raises what `carry_out` does."""
    for item in planned.items:
        store.remove_record(planned.job, item.name, planned.attempt)
        item.removed = True
    if planned.pins is not None:
        store.append(planned.job, msgspec.structs.replace(planned.pins, attempt=planned.newest_left))


def _implausible(records: list[RecordName], most: int, needed: Collection[int]) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of records of one kind."""
    known = sorted(each for each in needed if each <= most)
    for record in sorted(records, key=lambda each: each.number):
        before = max((each for each in known if each <= record.number), default=None)
        if record.number > most:
            yield record.name, f"above {most:,}, the largest number"
        elif record.number > most - PLAUSIBLE_STEP and record.number not in needed:
            yield record.name, f"leaves too few numbers up to the largest, {most:,}"
        elif before is not None and record.number > before + PLAUSIBLE_STEP:
            yield record.name, f"far above {before:,}, the previous number"
        else:
            known.append(record.number)


def _running(store: Store, job: str, suspects: list[RecordName], *, has_ended: bool) -> str | None:
    """Return where one of these attempts runs or may run, ignoring unreadable records."""
    for record in reversed(suspects):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            attempt = decode_record(store.read_record(job, record.name), Attempt, record.number)
            if has_ended and attempt.host != socket.gethostname():
                continue
            if (where := running_where(attempt)) is not None:
                return where
    return None


def running_where(attempt: Attempt) -> str | None:
    """Return where an attempt runs or, on another machine, may run; None when its process has ended."""
    if attempt.host != socket.gethostname():
        return f"may still run on {attempt.host}, as attempt {attempt.number}"
    if attempt.pid <= 0:
        return None
    try:
        os.kill(attempt.pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:  # the process belongs to another user
        pass
    started_at = processes.started_at(attempt.pid)
    if started_at is not None and started_at > attempt.started_at + SLACK_SECONDS:
        return None  # the process id was reused
    return f"runs here, as attempt {attempt.number} in process {attempt.pid}"
