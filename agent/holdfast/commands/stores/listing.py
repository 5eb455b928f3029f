"""`holdfast store ls` and `verify`: what there is, and whether it is still what was written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer

from holdfast.checkpoint import restore
from holdfast.commands.console import EXIT_REFUSED, EXIT_USAGE, fail, print_json, print_table, size
from holdfast.commands.options import Json, OnlyJob, StorePath
from holdfast.commands.progress_bar import progress_bar
from holdfast.commands.stores.arguments import chosen, jobs_of, opened, reason
from holdfast.errors import DamagedCheckpoint, HoldfastError
from holdfast.protocol.messages import parse_checkpoint_id
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


def ls(path: StorePath, job: OnlyJob = None, json: Json = False) -> None:
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
    row = Found(job=job, checkpoint=checkpoint)
    try:
        manifest = restore.manifest(store, job, checkpoint)
    except (HoldfastError, OSError) as error:
        return broken(row, error)
    row.iteration, row.lineage, row.kind = manifest.iteration, manifest.lineage, manifest.kind
    row.created_at = manifest.created_at
    row.payload_bytes = sum(file.size_bytes for file in manifest.files)
    return row


def broken(row: Found, error: HoldfastError | OSError) -> Found:
    row.state = "damaged" if isinstance(error, DamagedCheckpoint) else "unreadable"
    row.reason = reason(error) if isinstance(error, OSError) else str(error)
    return row


def print_found(found: list[Found], path: str, *, json: bool) -> None:
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


def verify(
    path: StorePath,
    job: OnlyJob = None,
    checkpoint: Annotated[str | None, typer.Option(help="Only this one, by its name; with --job.")] = None,
    json: Json = False,
) -> None:
    """Read every byte of every checkpoint and compare it with its digests.

    Exit code 0 when all are sound, 1 when one is damaged or cannot be read; what to do about it is printed.

    Examples: holdfast store verify checkpoints  ·  holdfast store verify checkpoints --job char-gpt --json
    """
    with opened(path) as store:
        if checkpoint is not None and job is None:
            fail("--checkpoint names one of a job: give --job, too", EXIT_USAGE)
        wanted = list(
            named(store, job) if checkpoint is None else [(job or "", chosen(store, job or "", checkpoint))]
        )
        found = [_verified(store, *each, f"{i} of {len(wanted)}") for i, each in enumerate(wanted, 1)]
        print_found(found, path, json=json)
        if not json:
            for row in found:
                if row.state == "damaged":
                    print("\n" + _advice(store, row, found))
    if any(row.state != "verified" for row in found):
        raise typer.Exit(EXIT_REFUSED)


def _verified(store: Store, job: str, checkpoint: str, place: str) -> Found:
    row = described(store, job, checkpoint)
    if row.reason is not None:
        return row
    try:
        with progress_bar(f"{job} {checkpoint} ({place})") as progress:
            restore.verify(store, job, checkpoint, progress=progress)
    except (HoldfastError, OSError) as error:
        return broken(row, error)
    row.state = "verified"
    return row


def _advice(store: Store, damaged: Found, found: list[Found]) -> str:
    """What a damaged checkpoint means for its job, and how to be rid of it."""
    job, checkpoint = damaged.job, damaged.checkpoint
    sound = {row.checkpoint for row in found if row.job == job and row.state == "verified"}
    order = [each for each, _ in restore.candidates(store, job)]
    start = next((each for each in order if each in sound), None)
    stays = "it stays until retention takes it"
    if start is None:
        meaning = f"No checkpoint of {job} is sound: started again, it begins afresh."
    elif order.index(start) < order.index(checkpoint):
        meaning = f"A restart needs none of it: {job} goes on from {start}, which is sound."
    else:
        meaning = f"Started again, {job} goes on from the newest sound one by itself: {start}."
        at = damaged.iteration if damaged.iteration is not None else parse_checkpoint_id(checkpoint)[0]
        stays = f"the next checkpoint of iteration {at:,} takes its place"
    return (
        f"{job} {checkpoint} is damaged. {meaning}\n"
        f"  keep it:    do nothing; {stays}\n"
        f"  remove it:  holdfast store gc {store.url} --job {job} --drop {checkpoint}"
    )
