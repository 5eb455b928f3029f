"""Invariants that hold for a store after its writers were killed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from holdfast.checkpoint import restore
from holdfast.errors import HoldfastError
from holdfast.store import Lineage, open_store

RECORDS = ("attempts", "endings", "lineages")
Ground = tuple[int, int]
"""(lineage, iteration) of a durable checkpoint."""


def acknowledged(told: Sequence[str], prefix: str = "ground ") -> list[Ground]:
    words = [line.removeprefix(prefix).split() for line in told if line.startswith(prefix)]
    return [(int(lineage), int(iteration)) for lineage, iteration in words]


def safe(root: Path, job: str = "job") -> Ground:
    """Return where a restart would resume, from verified checkpoints; (0, 0) if there is none."""
    store = open_store(root)
    lineages = store.records(job, Lineage)
    for checkpoint, continues in restore.candidates(store, job):
        manifest = restore.verify(store, job, checkpoint)
        return (lineages[-1].number if continues and lineages else manifest.lineage), manifest.iteration
    return (lineages[-1].number, lineages[-1].iteration) if lineages else (0, 0)


def violations(root: Path, told: Sequence[str], *, leftovers_allowed: int = 1, job: str = "job") -> list[str]:
    """Return the invariants that a store violates after its writer was killed."""
    store, found = open_store(root), []
    listed = store.checkpoints(job)
    for checkpoint in listed:
        try:
            restore.verify(store, job, checkpoint)
        except HoldfastError as error:
            found.append(f"offers {checkpoint}, which is not sound: {error}")
    if found:
        return found
    if (promised := max(acknowledged(told), default=(0, 0))) > (best := safe(root, job)):
        found.append(f"lost ground: {promised} was acknowledged, {best} is there: {listed}")
    retention_queue = {line.split()[1] for line in told if line.startswith("retention_queue ")}
    durable = {line.split()[1] for line in told if line.startswith("durable ")}
    if gone := durable - retention_queue - set(listed):
        found.append(f"lost {sorted(gone)}, which were not deleted; there is {listed}")
    if len(left := leftovers(root, job)) > leftovers_allowed:
        found.append(f"too many leftovers: {left}")
    return found


def leftovers(root: Path, job: str = "job") -> list[str]:
    """Return the files and folders that belong to no checkpoint and no record."""
    directory, checkpoints = root / job, open_store(root).checkpoints(job)
    if not directory.is_dir():
        return []
    known = {".lock", *RECORDS, *checkpoints}
    found = [path for path in directory.iterdir() if path.name not in known]
    for records in filter(Path.is_dir, (directory / name for name in RECORDS)):
        found += [path for path in records.iterdir() if path.name.startswith(".")]
    return sorted(str(path.relative_to(directory)) for path in found)
