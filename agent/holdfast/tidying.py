"""What of a store may go while no session looks after it: by retention's rules, and what nobody reads any more."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection

import msgspec

from holdfast import processes, restore
from holdfast.retention import Retention, expendable
from holdfast.sizes import Sizes
from holdfast.store import Attempt, Store
from holdfast.store.retention import held, protected

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
    newest = store.newest_attempt(job)
    running = None if newest is None else running_where(newest)
    committed = store.checkpoints(job)
    lineages = store.lineages(job)
    head = next((checkpoint for checkpoint, _ in restore.candidates(store, job)), None)
    never = protected(
        lineages, max((each.number for each in lineages), default=0), restore.of_kind(store, job, "requested")
    )
    never |= held(store, job) | {*wanted, *([head] if head is not None else [])}
    pins = noted.checkpoints if (noted := store.pins(job)) is not None else ()
    sizes = Sizes(store, job).of(committed)
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


def running_where(attempt: Attempt) -> str | None:
    """Where an attempt runs or, on another machine, may run; None when its process has ended."""
    if attempt.host != socket.gethostname():
        return f"may still run on {attempt.host}, as attempt {attempt.number}"
    try:
        os.kill(attempt.pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # there is one of that number, of somebody else
        pass
    started_at = processes.started_at(attempt.pid)
    if started_at is not None and started_at > attempt.started_at + SLACK_SECONDS:
        return None  # its number went to a process that began later
    return f"runs here, as attempt {attempt.number} in process {attempt.pid}"
