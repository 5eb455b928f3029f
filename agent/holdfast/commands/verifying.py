"""`holdfast verify`: have the job read one of its checkpoints back, and what it found."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast.client import Client, ServerError, Verification
from holdfast.commands.console import (
    DEFAULT_SERVER,
    JobName,
    Json,
    NoWait,
    Server,
    Token,
    asking,
    fail,
    print_json,
    seconds,
    size,
)
from holdfast.commands.control import POLL_SECONDS
from holdfast.commands.keeping import Checkpoint, offer_nearest


def verify(
    job: JobName,
    checkpoint: Checkpoint,
    against: Annotated[
        str | None, typer.Option(metavar="CHECKPOINT", help="Also tell how far its tensors are from this one.")
    ] = None,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    no_wait: NoWait = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for it; it stays asked after that.")] = 600.0,
    json: Json = False,
) -> None:
    """Verify a checkpoint: the job reads every byte back and compares it with its digests.

    The job itself does it, beside its training and slowly. One that is not running does so at its next start, and
    is not waited for: where the store is, `holdfast store verify` does it at once.

    Examples: holdfast verify char-gpt 1200  ·  holdfast verify char-gpt 1200 --against 1000
    """
    with asking(server, token) as client:
        try:
            found = client.verify(job, checkpoint, against=against)
        except ServerError as error:
            offer_nearest(error, "verify", job, checkpoint)
            raise
        alive = client.job(job).alive
        if alive and not no_wait:
            found = _follow(client, job, found, timeout)
    if json:
        print_json(found)
    _conclude(job, found, alive, waited=alive and not no_wait, quiet=json)


def _follow(client: Client, job: str, found: Verification, timeout_seconds: float) -> Verification:
    deadline = time.monotonic() + timeout_seconds
    try:
        while found.open and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            found = client.verification(job, found.checkpoint)
    except KeyboardInterrupt:
        fail(f"no longer waiting; {found.checkpoint} is still to be read")
    return found


def _conclude(job: str, found: Verification, alive: bool, *, waited: bool, quiet: bool) -> None:
    if found.open:
        if waited:
            fail(f"{found.checkpoint} is not read yet; it stays asked")
        when = "" if alive else f": {job} is not running, and reads it at its next start"
        if not quiet:
            print(f"{found.checkpoint} is to be read back{when}")
    elif found.state == "sound":
        if not quiet:
            took = f"{size(found.read_bytes)} in {seconds(found.seconds)}"
            print(f"{found.checkpoint} is sound: {took}, on {found.host}")
    else:
        fail(f"{found.checkpoint} is {_WORDS.get(found.state, found.state)}: {found.reason}")


_WORDS = {"failed": "not verified", "gone": "gone", "cancelled": "not verified"}
