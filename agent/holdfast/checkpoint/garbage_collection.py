"""Maintenance of a store that no session looks after: retention, leftovers, records with implausible numbers."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator

import msgspec

from holdfast.checkpoint import restore
from holdfast.protocol.messages import MAX_ATTEMPT, MAX_LINEAGE, PLAUSIBLE_STEP, parse_checkpoint_id
from holdfast.protocol.retention import Retention, expendable
from holdfast.store import Attempt, Lineage, Pins, RecordName, Store, newest_attempt, newest_pins
from holdfast.store.records import decode_record, held, protected
from holdfast.system import processes

SLACK_SECONDS = 60.0
"""Clocks of a process's start and of the record it wrote may differ by so much."""


class Item(msgspec.Struct, kw_only=True):
    """Something that may go."""

    name: str
    why: str
    size_bytes: int | None
    """None where its manifest cannot be read."""
    is_leftover: bool = False
    removed: bool = False


class Plan(msgspec.Struct, kw_only=True):
    """What may go of one job."""

    job: str
    attempt: int
    """The newest; should another begin, nothing is removed any more."""
    running: str | None
    """Where the job runs or may run, so that its own session looks after the store."""
    items: list[Item]
    stays: int
    """How many checkpoints are left."""


class RepairPlan(Plan):
    """Records of a job to remove, since their numbers are implausible."""

    newest_left: int
    """The newest attempt that stays; 0: none does."""
    pins: Pins | None
    """Noted under an attempt beyond that, and to be noted again."""
    unmended: list[str]
    """Numbers that have run out and cannot be freed, in words."""


def plan(
    store: Store, job: str, rules: Retention, drop: Collection[str] = (), wanted: Collection[str] = ()
) -> Plan:
    """What may go by `rules`, beside pinned ones and whatever retention protects.

    Args:
        store: where the job's checkpoints are.
        job: its name.
        rules: what stays.
        drop: checkpoints that go whatever retention says.
        wanted: what open orders name, which a store by itself does not know.
    """
    newest = newest_attempt(store, job)
    running = None if newest is None else running_where(newest)
    committed = store.checkpoints(job)
    lineages = store.records(job, Lineage)
    head = next((checkpoint for checkpoint, _ in restore.candidates(store, job)), None)
    never = protected(
        lineages, max((each.number for each in lineages), default=0), restore.of_kind(store, job, "requested")
    )
    never |= held(store, job) | {*wanted, *([head] if head is not None else [])}
    pins = noted.checkpoints if (noted := newest_pins(store, job)) is not None else ()
    sizes = restore.Sizes(store, job).of(committed)
    named = [each for each in committed if each in drop]
    gone = {each: "named to go" + (", though pinned" if each in pins else "") for each in named}
    rest = [checkpoint for checkpoint in committed if checkpoint not in gone]
    gone |= expendable(rest, rules, never=never, pinned=pins, sizes=sizes)
    items = [Item(name=each, why=why, size_bytes=sizes.get(each)) for each, why in gone.items()]
    stays = len(committed) - len(items)
    items += [
        Item(name=each.name, why=each.what, size_bytes=each.size_bytes, is_leftover=True)
        for each in store.leftovers(job)
    ]
    return Plan(job=job, attempt=newest.number if newest else 0, running=running, items=items, stays=stays)


def carry_out(store: Store, planned: Plan) -> None:
    """Remove what was planned, and mark each item when it is gone.

    Raises:
        Fenced: a newer attempt has begun.
        OSError: the store cannot; what was removed before that is gone.
    """
    for item in planned.items:
        if item.is_leftover:
            store.remove_leftover(planned.job, item.name)
        else:
            store.delete(planned.job, item.name, planned.attempt)
        item.removed = True


def plan_repair(store: Store, job: str, *, has_ended: bool = False) -> RepairPlan:
    """Records to remove: of attempts, and of lineages without checkpoints.

    A number is implausible if it is out of range or about to be, or lies far beyond the number before it. The
    lowest is the start of the job's numbers, wherever that is.

    Args:
        store: where the job's checkpoints are.
        job: its name.
        has_ended: attempts on other machines have ended; otherwise they may still run.
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
        each.name: "its attempt is not on record"
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
            Item(name=each.name, why=gone[each.name], size_bytes=None) for each in records if each.name in gone
        ],
        stays=len(committed),
        newest_left=newest_left,
        pins=noted if noted is not None and noted.attempt > newest_left else None,
        unmended=[
            f"{what} {max(numbers):,} stays, since checkpoints are stored under it, and few numbers are left: "
            f"to train on, fork the job with holdfast fork"
            for what, (numbers, most) in kept.items()
            if any(most - PLAUSIBLE_STEP < number <= most for number in numbers)
        ],
    )


def repair(store: Store, planned: RepairPlan) -> None:
    """Remove what was planned, mark each item when it is gone, and note pins again. Raises as `carry_out` does."""
    for item in planned.items:
        store.remove_record(planned.job, item.name, planned.attempt)
        item.removed = True
    if planned.pins is not None:
        store.append(planned.job, msgspec.structs.replace(planned.pins, attempt=planned.newest_left))


def _implausible(records: list[RecordName], most: int, needed: Collection[int]) -> Iterator[tuple[str, str]]:
    """(name, why) of records of one kind."""
    known = sorted(each for each in needed if each <= most)
    for record in sorted(records, key=lambda each: each.number):
        before = max((each for each in known if each <= record.number), default=None)
        if record.number > most:
            yield record.name, f"beyond {most:,}, the largest number"
        elif record.number > most - PLAUSIBLE_STEP and record.number not in needed:
            yield record.name, f"leaves too few numbers up to {most:,}, the largest"
        elif before is not None and record.number > before + PLAUSIBLE_STEP:
            yield record.name, f"far beyond {before:,}, the number before it"
        else:
            known.append(record.number)


def _running(store: Store, job: str, suspects: list[RecordName], *, has_ended: bool) -> str | None:
    """Where one of these attempts runs or may run. A record that cannot be read is of none."""
    for record in reversed(suspects):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            attempt = decode_record(store.read_record(job, record.name), Attempt, record.number)
            if has_ended and attempt.host != socket.gethostname():
                continue
            if (where := running_where(attempt)) is not None:
                return where
    return None


def running_where(attempt: Attempt) -> str | None:
    """Where an attempt runs or, on another machine, may run; None when its process has ended."""
    if attempt.host != socket.gethostname():
        return f"may still run on {attempt.host}, as attempt {attempt.number}"
    if attempt.pid <= 0:
        return None
    try:
        os.kill(attempt.pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:  # there is one of that number, of somebody else
        pass
    started_at = processes.started_at(attempt.pid)
    if started_at is not None and started_at > attempt.started_at + SLACK_SECONDS:
        return None  # its number went to a process that began later
    return f"runs here, as attempt {attempt.number} in process {attempt.pid}"
