"""What a soak must leave: equal losses, all durable checkpoints, ended orders, and nothing else."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.soak.ledger import differences
from benchmarks.soak.processes import Supervised, marked
from holdfast.checkpoint import restore
from holdfast.client import Client, ServerError, UnreachableError
from holdfast.errors import HoldfastError
from holdfast.store import Lineage, open_store

EXAMPLES = 3
NOT_OURS = ("torch", "pymp-")
"""Prefixes of what torch, torchrun and multiprocessing leave when they are killed."""


def job_row(job: Supervised, client: Client, stall_seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Return the row of a job, and what is wrong with it."""
    first = job.ledgers[0]
    row = {
        "what": "job", "job": job.kind, "iterations": len(first.steps),
        "attempts": len({step.attempt for step in first.steps}),
        "lineages": len({step.lineage for step in first.steps}),
        "durable": len(first.durable), "stall_seconds": round(job.stall_seconds, 1),
        "supervisor_ends": dict(collections.Counter(map(str, job.ends))),
    }  # fmt: skip
    wrong = [*unlike_reference(job), *vanished(job, client), *restored_elsewhere(job)]
    wrong += [text for ledger in job.ledgers for text in ledger.lost]
    left = open_store(job.store).leftovers(job.kind)
    wrong += [f"in its store, {each.name} was {each.what}" for each in left]
    if job.stall_seconds > stall_seconds:
        wrong.append(f"no iteration for {job.stall_seconds:.0f} s")
    return row, [f"{job.kind}: {text}" for text in wrong]


def unlike_reference(job: Supervised) -> Iterator[str]:
    """Yield the first iterations of each rank with another loss than in an undisturbed run."""
    last = max((step.iteration for ledger in job.ledgers for step in ledger.steps), default=0)
    if not last:
        yield "it has not trained"
        return
    references = job.reference(last)
    for rank, (ledger, reference) in enumerate(zip(job.ledgers, references, strict=True)):
        found = list(differences(ledger.steps, reference))
        yield from (f"rank {rank}: {text}" for text in found[:EXAMPLES])
        if len(found) > EXAMPLES:
            yield f"rank {rank}: {len(found) - EXAMPLES} more"


def vanished(job: Supervised, client: Client) -> Iterator[str]:
    """Yield the durable checkpoints that are gone and that retention has not deleted, and the damaged ones."""
    store = open_store(job.store)
    present = set(store.checkpoints(job.kind))
    for checkpoint in present:
        try:
            restore.verify(store, job.kind, checkpoint)
        except HoldfastError as error:
            yield f"{checkpoint} is damaged: {error}"
    gone = set(job.ledgers[0].durable) - set((job.folder / "deletions").read_text().split()) - present
    yield from (f"{checkpoint} was durable, is not in the store, and was not deleted" for checkpoint in gone)
    known = {row.id: row for row in every_checkpoint(client, job.kind)}
    bucket = job.folder.parent / "bucket" / "bucket" / "soak" / job.kind
    present |= {path.parents[1].name for path in bucket.glob("*/*/manifest.json")}
    for checkpoint, row in known.items():
        if row.restorable and checkpoint not in present:
            yield f"the server lists {checkpoint}, which is not in the store"


def every_checkpoint(client: Client, job: str) -> Iterator[Any]:
    page = client.checkpoints(job, limit=500)
    while page:
        yield from page
        page = client.checkpoints(job, limit=500, before=page[-1].id)


def restored_elsewhere(job: Supervised) -> Iterator[str]:
    """Yield the lineages that do not begin at the iteration that was restored."""
    begun = {record.number: record.iteration for record in open_store(job.store).records(job.kind, Lineage)}
    firsts: dict[int, int] = {}
    for step in job.ledgers[0].steps:
        firsts.setdefault(step.lineage, step.iteration)
    for lineage, iteration in firsts.items():
        if lineage in begun and iteration != begun[lineage] + 1:
            yield f"lineage {lineage} began at iteration {iteration - 1}, not {begun[lineage]}"


def ends_of_restores(client: Client, restores: Sequence[tuple[str, str]]) -> tuple[dict[str, int], list[str]]:
    """Return how many restores ended in which state, and those that have not ended."""
    states: collections.Counter[str] = collections.Counter()
    wrong = []
    for job, number in restores:
        try:
            order = client.order(job, number)
        except (ServerError, UnreachableError) as error:
            wrong.append(f"{job}: restore {number}: {error}")
            continue
        states[f"{order.state}: {order.reason}" if order.reason else order.state] += 1
        if order.open:
            wrong.append(f"{job}: the restore to {order.checkpoint} is still {order.state}")
    return dict(states), wrong


def left_over(folder: Path) -> list[str]:
    """Return the processes and temporary files that are left, and end those processes."""
    _, left = psutil.wait_procs(list(marked(folder)), timeout=10)
    wrong = [f"process {each.pid} is left: {each.name()}" for each in left]
    for each in left:
        each.kill()
    psutil.wait_procs(left, timeout=10)
    names = [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith(NOT_OURS)]
    return wrong + [f"left in the temporary directory: {name}" for name in names]
