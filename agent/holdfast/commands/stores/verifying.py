"""`holdfast store verify`: whether it is still what was written, and what to do where it is not."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from holdfast import restore
from holdfast.commands.bar import progress_bar
from holdfast.commands.console import EXIT_REFUSED, EXIT_USAGE, Json, fail
from holdfast.commands.stores.asking import OfJob, Where, chosen, opened
from holdfast.commands.stores.listing import Found, broken, described, named, print_found
from holdfast.errors import HoldfastError
from holdfast.protocol import parse_checkpoint_id
from holdfast.store import Store


def verify(
    path: Where,
    job: OfJob = None,
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
    return msgspec.structs.replace(row, state="verified")


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
