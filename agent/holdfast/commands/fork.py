"""`holdfast fork`: a new job from a checkpoint of another, on the store itself."""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Annotated

import msgspec
import typer

from holdfast.checkpoint import forking
from holdfast.checkpoint.forking import Fork
from holdfast.commands.console import EXIT_USAGE, fail, parsed, print_json
from holdfast.commands.options import Json, StoreJob, StoreOption, Token
from holdfast.commands.progress_bar import progress_bar
from holdfast.commands.stores.arguments import chosen, opened
from holdfast.config import DEFAULT_STORE
from holdfast.errors import Fenced
from holdfast.protocol.messages import (
    AttemptFinished,
    AttemptStarted,
    Batch,
    Event,
    Inventory,
    LineageStarted,
    parse_checkpoint_id,
)
from holdfast.server_link.http_client import send_once

TELL_SECONDS = 5.0


def fork(
    job: StoreJob,
    iteration: Annotated[
        str, typer.Argument(metavar="ITERATION", help="Where: an iteration, a checkpoint's name, or `latest`.")
    ],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The name of the new job.")],
    store: StoreOption = DEFAULT_STORE,
    server: Annotated[
        str | None, typer.Option(envvar="HOLDFAST_SERVER", help="A server to tell; the new job's start does, too.")
    ] = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Start a new job from a copy of a checkpoint of another job.

    The new job has a copy of the checkpoint (in a directory one that takes no room), so that the other one may go
    on, be taken back or be deleted. Its first start goes on from there exactly: iteration, place in the data,
    random numbers and all. Done twice, it is done once; a name that is taken is refused.

    Examples: holdfast fork char-gpt 1200 char-gpt-lr3  ·  holdfast fork char-gpt latest try --store s3://runs/main
    """
    with opened(store) as keeper:
        try:
            made = forking.made_before(keeper, job, new)
            if made is None or not _is_asked(made, iteration):
                checkpoint = chosen(keeper, job, iteration)
                with progress_bar(f"{job} {checkpoint}") as progress:
                    made = forking.fork(keeper, job, checkpoint, new, progress=progress)
        except ValueError as error:
            fail(str(error), EXIT_USAGE)
        except Fenced:
            fail(f"somebody begins a job of the name {new} just now: look at it, then try again")
        told = _tell(made, server, token) if server and made.new else None
        where = keeper.url
    if json:
        print_json({**msgspec.to_builtins(made), "store": where, "told": told})
        return
    verb = "begins" if made.new else "is a fork already, and began"
    print(f"{new} {verb} at iteration {made.iteration:,} of {job} ({made.origin.checkpoint}) in {where}")
    if made.new:
        print(f'start it as {job} is started, with this store and holdfast.Session("{new}", ...)')
        if told is False:
            print(f"{server} was not told: it learns of the fork when {new} starts", file=sys.stderr)


def _is_asked(made: Fork, iteration: str) -> bool:
    """The same wish again; the other job need not be there any more."""
    of = made.origin.checkpoint
    return iteration == of or (
        iteration.isascii() and iteration.isdecimal() and int(iteration) == parse_checkpoint_id(of)[0]
    )


def _tell(made: Fork, server: str, token: str | None) -> bool:
    """Whether the server knows of it now, before the new job has been started."""
    at, iteration, lineage = time.time(), made.iteration, made.lineage
    events: list[Event] = [
        AttemptStarted(
            at=at, iteration=iteration, lineage=lineage, resumed_from=made.checkpoint,
            host=socket.gethostname(), pid=os.getpid(),
        ),
        LineageStarted(at=at, iteration=iteration, lineage=lineage, parent=made.checkpoint, origin=made.origin),
        Inventory(at=at, checkpoints=[made.checkpoint]),
        AttemptFinished(at=at, iteration=iteration, lineage=lineage, reason=forking.FORKED),
    ]  # fmt: skip
    batch = Batch(
        job=made.job, uid=made.uid, attempt=made.attempt, rank=0, sequence=0, sent_at=at, iteration=iteration,
        lineage=lineage, events=events,
    )  # fmt: skip
    return parsed(lambda address: send_once(address, token, batch, TELL_SECONDS), server)
