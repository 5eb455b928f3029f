"""Maintenance of a store without a session: retention and leftovers."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection

import msgspec

from holdfast.checkpoint import restore
from holdfast.checkpoint.stored_manifest import has_other_format
from holdfast.retention import Retention, checkpoints_to_delete
from holdfast.store import Attempt, Lineage, Store, newest_attempt, newest_pins
from holdfast.store.records import ASKED_FOR, held_checkpoints, protected_checkpoints
from holdfast.system import process_facts

SLACK_SECONDS = 60.0
"""Tolerated difference between the start of a process and the time in the record that it wrote."""


class RemovableItem(msgspec.Struct, kw_only=True):
    """A checkpoint or leftover that may be removed."""

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
    """Where the job runs or may run; its session then maintains the store. `None`: it does not run."""
    items: list[RemovableItem]
    stays: int
    """Number of checkpoints that remain."""


def plan(
    store: Store, job: str, rules: Retention, drop: Collection[str] = (), wanted: Collection[str] = ()
) -> RemovalPlan:
    """Plan which checkpoints and leftovers of a job to remove.

    Args:
        drop: checkpoints to remove in any case.
        wanted: checkpoints that open restore orders name, which only a server knows.
    """
    newest = newest_attempt(store, job)
    running = None if newest is None else running_where(newest)
    committed = store.checkpoints(job)
    lineages = store.records(job, Lineage)
    head = next((checkpoint for checkpoint, _ in restore.candidates(store, job)), None)
    asked_for = restore.of_kind(store, job, "requested", ASKED_FOR)
    never = protected_checkpoints(lineages, max((each.number for each in lineages), default=0), asked_for)
    never |= held_checkpoints(store, job) | {*wanted, *([head] if head is not None else [])}
    pins = noted.checkpoints if (noted := newest_pins(store, job)) is not None else ()
    sizes, metrics = restore.RetentionFacts(store, job).read(committed)
    # what another version of Holdfast wrote is removed only by name
    never |= {each for each in committed if each not in sizes and has_other_format(store, job, each)}
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
    """Remove the planned items, and mark each removed one.

    Raises:
        Fenced: a newer attempt has begun.
        OSError: an item could not be removed, the first one of them; the others are removed.
    """
    failure: OSError | None = None
    for item in planned.items:
        try:
            if item.is_leftover:
                store.remove_leftover(planned.job, item.name)
            else:
                store.delete(planned.job, item.name, planned.attempt)
        except OSError as error:
            failure = failure or error
        else:
            item.removed = True
    if failure is not None:
        raise failure


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
    started_at = process_facts.started_at(attempt.pid)
    if started_at is not None and started_at > attempt.started_at + SLACK_SECONDS:
        return None  # the process id was reused
    return f"runs here, as attempt {attempt.number} in process {attempt.pid}"
