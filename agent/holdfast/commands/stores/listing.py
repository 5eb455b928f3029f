"""`holdfast store ls` and `verify`."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from holdfast.checkpoint import restore
from holdfast.commands.console import EXIT_REFUSED, EXIT_USAGE, fail, print_json, print_table, progress_bar, say
from holdfast.commands.options import Json, OnlyJob, StorePath
from holdfast.commands.stores.arguments import chosen, for_each_job, opened, reason
from holdfast.errors import DamagedCheckpoint, HoldfastError
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.store import Store
from holdfast.units import format_bytes


class ListedCheckpoint(msgspec.Struct, kw_only=True):
    """A checkpoint in the output."""

    job: str
    checkpoint: str
    state: str = "committed"
    """committed, verified, repairable, damaged, unreadable, or removed: by retention, while it was read."""
    iteration: int | None = None
    lineage: int | None = None
    kind: str | None = None
    payload_bytes: int | None = None
    stored_bytes: int | None = None
    """The payload and its parity."""
    created_at: float | None = None
    reason: str | None = None
    places: list[str] | None = None
    """Addresses of those of the tiers that have the checkpoint; null without tiers."""


def ls(path: StorePath, job: OnlyJob = None, json: Json = False) -> None:
    """List the committed checkpoints of a store by job, oldest first.

    SIZE includes parity. A file that several checkpoints share counts for each of them. For a drained directory,
    given as DIRECTORY+ADDRESS, WHERE shows which of the two has a checkpoint.

    Examples: holdfast store ls checkpoints  ·  holdfast store ls checkpoints --job char-gpt --json
    """
    with opened(path) as store:
        wanted, has_failed = named(store, job)
        found = [row for each in wanted if (row := described(store, *each)).state != "removed"]
        for row in found:
            row.places = store.places(row.job, row.checkpoint)
        print_found(found, path, json=json)
    if has_failed:
        raise typer.Exit(EXIT_REFUSED)


def named(store: Store, job: str | None, checkpoint: str | None = None) -> tuple[list[tuple[str, str]], bool]:
    """Return the checkpoints of all jobs, of one, or the one with this name, which needs a job.

    The second result says whether a job could not be read.
    """
    if checkpoint is None:
        listed, has_failed = for_each_job(store, job, lambda name: (name, store.checkpoints(name)))
        return [(name, each) for name, checkpoints in listed for each in checkpoints], has_failed
    if job is None:
        fail("--checkpoint needs --job", EXIT_USAGE)
    return [(job, chosen(store, job, checkpoint))], False


def described(store: Store, job: str, checkpoint: str) -> ListedCheckpoint:
    row = ListedCheckpoint(job=job, checkpoint=checkpoint)
    try:
        manifest = restore.manifest(store, job, checkpoint)
    except (HoldfastError, OSError) as error:
        return broken(store, row, error)
    row.iteration, row.lineage, row.kind = manifest.iteration, manifest.lineage, manifest.kind
    row.created_at = manifest.created_at
    row.payload_bytes = sum(file.size_bytes for file in manifest.files)
    row.stored_bytes = sum(file.stored_bytes for file in manifest.files)
    return row


def broken(store: Store, row: ListedCheckpoint, error: HoldfastError | OSError) -> ListedCheckpoint:
    row.state = "damaged" if isinstance(error, DamagedCheckpoint) else "unreadable"
    row.reason = reason(error) if isinstance(error, OSError) else str(error)
    if row.state == "damaged" and row.checkpoint not in store.checkpoints(row.job):
        row.state, row.reason = "removed", "it was removed from the store meanwhile"
    return row


def print_found(found: list[ListedCheckpoint], path: str, *, json: bool) -> None:
    if json:
        print_json(found)
    elif not found:
        say(f"no checkpoints in {path}")
    else:
        header: tuple[str, ...] = ("JOB", "CHECKPOINT", "ITERATION", "KIND", "SIZE", "STATE")
        rows = [_cells(row) for row in found]
        if any(row.places for row in found):
            header = (*header, "WHERE")
            rows = [(*cells, ", ".join(row.places or ())) for cells, row in zip(rows, found, strict=True)]
        print_table(header, rows)


def _cells(row: ListedCheckpoint) -> tuple[str, ...]:
    taken = "-" if row.stored_bytes is None else format_bytes(row.stored_bytes)
    state = f"{row.state}: {row.reason}" if row.reason else row.state
    return row.job, row.checkpoint, str(row.iteration or "-"), row.kind or "-", taken, state


def verify(
    path: StorePath,
    job: OnlyJob = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Verify only the checkpoint of this name; needs --job.")
    ] = None,
    json: Json = False,
) -> None:
    """Read every byte of every checkpoint and compare it with its digests.

    The exit code is 0 when all checkpoints are sound, and 1 when one is damaged or cannot be read. The output says
    what to do about a damaged checkpoint. Damage that parity can repair is repaired in memory only, and such a
    checkpoint is `repairable`.

    Examples: holdfast store verify checkpoints  ·  holdfast store verify checkpoints --job char-gpt --json
    """
    with opened(path) as store:
        wanted, has_failed = named(store, job, checkpoint)
        found = [_verified(store, *each, f"{i} of {len(wanted)}") for i, each in enumerate(wanted, 1)]
        print_found(found, path, json=json)
        if not json:
            for row in found:
                if row.state == "damaged":
                    say("", *_advice(store, row, found).split("\n"))
            if any(row.state == "repairable" for row in found):
                say(
                    "", f"A restore repairs such damage in memory. Repair it: holdfast store scrub {path} --repair"
                )
    if has_failed or any(row.state not in ("verified", "removed") for row in found):
        raise typer.Exit(EXIT_REFUSED)


def _verified(store: Store, job: str, checkpoint: str, place: str) -> ListedCheckpoint:
    row = described(store, job, checkpoint)
    if row.reason is not None:
        return row
    try:
        with progress_bar(f"{job} {checkpoint} ({place})") as progress:
            damage: list[str] = []
            restore.verify(store, job, checkpoint, progress=progress, on_repaired=damage.append)
    except (HoldfastError, OSError) as error:
        return broken(store, row, error)
    row.state, row.reason = ("repairable", "; ".join(damage)) if damage else ("verified", None)
    return row


def _advice(store: Store, damaged: ListedCheckpoint, found: list[ListedCheckpoint]) -> str:
    """Explain what a damaged checkpoint means for its job, and how to remove it."""
    job, checkpoint = damaged.job, damaged.checkpoint
    sound = {row.checkpoint for row in found if row.job == job and row.state in ("verified", "repairable")}
    order = [each for each, _ in restore.candidates(store, job)]
    start = next((each for each in order if each in sound), None)
    stays = "it remains until retention removes it"
    if start is None:
        meaning = f"No checkpoint of {job} is sound: a restart begins at iteration 0."
    elif order.index(start) < order.index(checkpoint):
        meaning = f"A restart does not need it: {job} resumes from {start}, which is sound."
    else:
        meaning = f"A restart resumes from the newest sound checkpoint, {start}."
        at = damaged.iteration if damaged.iteration is not None else parse_checkpoint_id(checkpoint)[0]
        stays = f"the next checkpoint of iteration {at:,} replaces it"
    return (
        f"{job} {checkpoint} is damaged. {meaning}\n"
        f"  keep it:    do nothing; {stays}\n"
        f"  remove it:  holdfast store gc {store.url} --job {job} --drop {checkpoint}"
    )
