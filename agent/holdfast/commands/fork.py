"""`holdfast fork`: begin a new job from a checkpoint of another, in the store."""

from __future__ import annotations

import os
import socket
import time
from typing import Annotated

import msgspec
import typer

from holdfast.checkpoint import forking, restore
from holdfast.checkpoint.forking import Fork
from holdfast.commands.console import EXIT_USAGE, fail, parsed, print_json, progress_bar, say
from holdfast.commands.options import Json, StoreJob, StoreOption, Token
from holdfast.commands.stores.arguments import chosen, opened
from holdfast.config import DEFAULT_STORE
from holdfast.errors import Fenced
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.protocol.wire import (
    AttemptFinished,
    AttemptStarted,
    Batch,
    Checkpoint,
    Event,
    Inventory,
    LineageStarted,
)
from holdfast.server_link.http_client import send_once
from holdfast.store import Store

REPORT_SECONDS = 5.0


def fork(
    job: StoreJob,
    iteration: Annotated[
        str, typer.Argument(metavar="ITERATION", help="An iteration, the name of a checkpoint, or `latest`.")
    ],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The name of the new job.")],
    store: StoreOption = DEFAULT_STORE,
    server: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_SERVER",
            help="Report the fork to this server; otherwise the new job does when it starts.",
        ),
    ] = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Start a new job from a copy of a checkpoint of another job.

    The new job gets a copy of the checkpoint, which takes no space in a directory, so that the other job may
    continue, be restored or be deleted. The first start of the new job resumes exactly: iteration, position in the
    data, random numbers. Repeating the command has no effect; a name that is taken is refused.
    The exit code is 0 when the fork exists, even if the server is unreachable, 1 after a failure, 2 for misuse.

    Examples: holdfast fork char-gpt 1200 char-gpt-lr3  ·  holdfast fork char-gpt latest try --store s3://runs/main
    """
    with opened(store) as keeper:
        try:
            made = forking.existing_fork(keeper, job, new)
            if made is None or not _is_requested(made, iteration):
                checkpoint = chosen(keeper, job, iteration)
                with progress_bar(f"{job} {checkpoint}") as progress:
                    made = forking.fork(keeper, job, checkpoint, new, progress=progress)
        except ValueError as error:
            fail(str(error), EXIT_USAGE)
        except Fenced:
            fail(f"another process is starting a job named {new}: check it, then try again")
        reported = _report(keeper, made, server, token) if server and made.new else None
        where = keeper.url
    if json:
        print_json({**msgspec.to_builtins(made), "store": where, "reported": reported})
        return
    verb = "begins" if made.new else "is already a fork, and began"
    say(f"{new} {verb} at iteration {made.iteration:,} of {job} ({made.origin.checkpoint}) in {where}")
    if made.new:
        say(f'start it like {job}, with this store and holdfast.Session("{new}", ...)')
        if reported is False:
            say(f"{server} could not be reached: it shows the fork when {new} starts", error=True)


def _is_requested(made: Fork, iteration: str) -> bool:
    """Return whether an existing fork is the requested one; the other job may be gone."""
    of = made.origin.checkpoint
    return iteration == of or (
        iteration.isascii() and iteration.isdecimal() and int(iteration) == parse_checkpoint_id(of)[0]
    )


def _report(store: Store, made: Fork, server: str, token: str | None) -> bool:
    """Report the fork to the server, and return whether it was accepted."""
    at, iteration, lineage = time.time(), made.iteration, made.lineage
    copy = restore.manifest(store, made.job, made.checkpoint)
    events: list[Event] = [
        AttemptStarted(
            at=at, iteration=iteration, lineage=lineage, resumed_from=made.checkpoint,
            host=socket.gethostname(), pid=os.getpid(),
        ),
        LineageStarted(at=at, iteration=iteration, lineage=lineage, parent=made.checkpoint, origin=made.origin),
        Checkpoint(
            at=at, iteration=iteration, lineage=copy.lineage, id=made.checkpoint, kind="scheduled",
            state="durable", payload_bytes=sum(file.size_bytes for file in copy.files),
        ),
        Inventory(at=at, checkpoints=[made.checkpoint]),
        AttemptFinished(at=at, iteration=iteration, lineage=lineage, reason=forking.FORKED),
    ]  # fmt: skip
    batch = Batch(
        job=made.job, uid=made.uid, attempt=made.attempt, rank=0, sequence=0, sent_at=at, iteration=iteration,
        lineage=lineage, events=events,
    )  # fmt: skip
    return parsed(lambda address: send_once(address, token, batch, REPORT_SECONDS), server)
