"""`holdfast store`: look into a store of checkpoints without a server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer

from holdfast import restore
from holdfast.commands.console import (
    EXIT_CODES,
    EXIT_REFUSED,
    EXIT_USAGE,
    Json,
    fail,
    print_json,
    print_table,
    size,
)
from holdfast.errors import HoldfastError
from holdfast.format import Manifest
from holdfast.store import Store, open_store

app = typer.Typer(no_args_is_help=True, help=f"Look into a store of checkpoints; needs no server.\n\n{EXIT_CODES}")

Where = Annotated[str, typer.Argument(metavar="PATH", help="The store, as given to holdfast.Session.")]
OfJob = Annotated[str | None, typer.Option("--job", help="Only this job.")]


class Found(msgspec.Struct, kw_only=True):
    """One checkpoint of a store, as printed."""

    job: str
    checkpoint: str
    state: str = "committed"
    iteration: int | None = None
    lineage: int | None = None
    kind: str | None = None
    payload_bytes: int | None = None
    created_at: float | None = None
    reason: str | None = None


@app.command("ls")
def ls(path: Where, job: OfJob = None, json: Json = False) -> None:
    """List the committed checkpoints of a store, job by job, oldest first.

    Examples: holdfast store ls checkpoints  ·  holdfast store ls checkpoints --job char-gpt --json
    """
    store = _open(path)
    _print([_described(store, *named) for named in _named(store, job)], path, json=json)


@app.command("verify")
def verify(path: Where, job: OfJob = None, json: Json = False) -> None:
    """Read every byte of every checkpoint and compare it with its digests; exit code 1 if any is damaged.

    Example: holdfast store verify checkpoints
    """
    store = _open(path)
    found = [_verified(store, *named) for named in _named(store, job)]
    _print(found, path, json=json)
    if any(row.state == "damaged" for row in found):
        raise typer.Exit(EXIT_REFUSED)


def _open(path: str) -> Store:
    if "://" not in path and not os.path.isdir(path):
        fail(f"store {path!r}: there is no such directory", EXIT_USAGE)
    try:
        return open_store(path)
    except ValueError as error:
        fail(str(error), EXIT_USAGE)


def _named(store: Store, job: str | None) -> Iterator[tuple[str, str]]:
    jobs = store.jobs()
    if job is not None and job not in jobs:
        fail(f"store {store.url!r} has no job {job!r}; it has: {', '.join(jobs) or 'none'}")
    for name in jobs if job is None else [job]:
        for checkpoint in store.checkpoints(name):
            yield name, checkpoint


def _described(store: Store, job: str, checkpoint: str) -> Found:
    try:
        manifest = restore.manifest(store, job, checkpoint)
    except HoldfastError as error:
        return Found(job=job, checkpoint=checkpoint, state="damaged", reason=str(error))
    return _row(job, checkpoint, manifest, "committed")


def _verified(store: Store, job: str, checkpoint: str) -> Found:
    row = _described(store, job, checkpoint)
    if row.state == "damaged":
        return row
    try:
        restore.verify(store, job, checkpoint)
    except HoldfastError as error:
        return msgspec.structs.replace(row, state="damaged", reason=str(error))
    return msgspec.structs.replace(row, state="verified")


def _row(job: str, checkpoint: str, manifest: Manifest, state: str) -> Found:
    return Found(
        job=job,
        checkpoint=checkpoint,
        state=state,
        iteration=manifest.iteration,
        lineage=manifest.lineage,
        kind=manifest.kind,
        payload_bytes=sum(file.size_bytes for file in manifest.files),
        created_at=manifest.created_at,
    )


def _print(found: list[Found], path: str, *, json: bool) -> None:
    if json:
        print_json(found)
    elif not found:
        print(f"no checkpoints in {path}")
    else:
        header = ("JOB", "CHECKPOINT", "ITERATION", "KIND", "SIZE", "STATE")
        print_table(header, [_cells(row) for row in found])


def _cells(row: Found) -> tuple[str, ...]:
    taken = "-" if row.payload_bytes is None else size(row.payload_bytes)
    state = f"{row.state}: {row.reason}" if row.reason else row.state
    return row.job, row.checkpoint, str(row.iteration or "-"), row.kind or "-", taken, state
