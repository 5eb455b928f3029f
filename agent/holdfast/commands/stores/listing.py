"""`holdfast store ls`: what there is."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from holdfast import restore
from holdfast.commands.console import Json, print_json, print_table, size
from holdfast.commands.stores.asking import OfJob, Where, jobs_of, opened, reason
from holdfast.errors import DamagedCheckpoint, HoldfastError
from holdfast.format import Manifest
from holdfast.store import Store


class Found(msgspec.Struct, kw_only=True):
    """One checkpoint of a store, as printed."""

    job: str
    checkpoint: str
    state: str = "committed"
    """committed, verified, damaged, or unreadable: by this Holdfast, or just now."""
    iteration: int | None = None
    lineage: int | None = None
    kind: str | None = None
    payload_bytes: int | None = None
    created_at: float | None = None
    reason: str | None = None


def ls(path: Where, job: OfJob = None, json: Json = False) -> None:
    """List the committed checkpoints of a store, job by job, oldest first.

    Examples: holdfast store ls checkpoints  ·  holdfast store ls checkpoints --job char-gpt --json
    """
    with opened(path) as store:
        print_found([described(store, *each) for each in named(store, job)], path, json=json)


def named(store: Store, job: str | None) -> Iterator[tuple[str, str]]:
    for name in jobs_of(store, job):
        for checkpoint in store.checkpoints(name):
            yield name, checkpoint


def described(store: Store, job: str, checkpoint: str) -> Found:
    try:
        manifest = restore.manifest(store, job, checkpoint)
    except (HoldfastError, OSError) as error:
        return broken(Found(job=job, checkpoint=checkpoint), error)
    return _row(job, checkpoint, manifest)


def broken(row: Found, error: HoldfastError | OSError) -> Found:
    state = "damaged" if isinstance(error, DamagedCheckpoint) else "unreadable"
    told = reason(error) if isinstance(error, OSError) else str(error)
    return msgspec.structs.replace(row, state=state, reason=told)


def print_found(found: list[Found], path: str, *, json: bool) -> None:
    if json:
        print_json(found)
    elif not found:
        print(f"no checkpoints in {path}")
    else:
        header = ("JOB", "CHECKPOINT", "ITERATION", "KIND", "SIZE", "STATE")
        print_table(header, [_cells(row) for row in found])


def _row(job: str, checkpoint: str, manifest: Manifest) -> Found:
    return Found(
        job=job,
        checkpoint=checkpoint,
        iteration=manifest.iteration,
        lineage=manifest.lineage,
        kind=manifest.kind,
        payload_bytes=sum(file.size_bytes for file in manifest.files),
        created_at=manifest.created_at,
    )


def _cells(row: Found) -> tuple[str, ...]:
    taken = "-" if row.payload_bytes is None else size(row.payload_bytes)
    state = f"{row.state}: {row.reason}" if row.reason else row.state
    return row.job, row.checkpoint, str(row.iteration or "-"), row.kind or "-", taken, state
