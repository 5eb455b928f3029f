"""`holdfast pin`, `unpin` and `label`: what an operator says of one checkpoint."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from holdfast.client import CheckpointRow, Client, ServerError
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
)
from holdfast.commands.control import ACKNOWLEDGED_WITHIN_SECONDS, is_applied, told, wait_until_applied

Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="Its iteration, or its id as in 000000001200-3.")
]


def pin(
    job: JobName,
    checkpoint: Checkpoint,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Exempt a checkpoint from retention until `holdfast unpin`, also when there is no server.

    The job notes it beside its checkpoints. One that is not running does so at its next start.

    Example: holdfast pin char-gpt 1200
    """
    _pin(job, checkpoint, server, token, pinned=True, no_wait=no_wait, json=json)


def unpin(
    job: JobName,
    checkpoint: Checkpoint,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Let the retention rules apply to a checkpoint again.

    Example: holdfast unpin char-gpt 1200
    """
    _pin(job, checkpoint, server, token, pinned=False, no_wait=no_wait, json=json)


def label(
    job: JobName,
    checkpoint: Checkpoint,
    text: Annotated[str, typer.Argument(help="What to call it, in at most 64 characters; empty: nothing.")],
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    json: Json = False,
) -> None:
    """Label a checkpoint; the job's page shows the label beside the iteration.

    Examples: holdfast label char-gpt 1200 "before the new data"  ·  holdfast label char-gpt 1200 ""
    """
    with asking(server, token) as client:
        try:
            row = client.label(job, checkpoint, text or None)
        except ServerError as error:
            offer_nearest(error, "label", job, checkpoint)
            raise
    if json:
        print_json(row)
    else:
        print(f"{row.id} is called {row.label}" if row.label else f"{row.id} has no label")


def _pin(
    job: str, checkpoint: str, server: str, token: str | None, *, pinned: bool, no_wait: bool, json: bool
) -> None:
    with asking(server, token) as client:
        row = _pinned(client, job, checkpoint, pinned=pinned)
        version = client.desired(job).version
        seen = wait_until_applied(client, job, version, 0.0 if no_wait else ACKNOWLEDGED_WITHIN_SECONDS)
    if json:
        print_json({"checkpoint": row, "applied": is_applied(seen, version)})
    else:
        print(f"{row.id} is {'pinned' if row.pinned else 'not pinned'}: {told(seen, version)}")


def _pinned(client: Client, job: str, checkpoint: str, *, pinned: bool) -> CheckpointRow:
    try:
        return client.pin(job, checkpoint, pinned=pinned)
    except ServerError as error:
        offer_nearest(error, "pin" if pinned else "unpin", job, checkpoint)
        raise


def offer_nearest(error: ServerError, command: str, job: str, checkpoint: str) -> None:
    """Where there is none at that iteration, the nearest earlier one."""
    if error.code == "no_such_checkpoint" and (nearest := error.body.get("nearest")):
        print(f"holdfast: {job} has no checkpoint {checkpoint}.", file=sys.stderr)
        fail(f"the nearest earlier one is at {nearest['iteration']}: holdfast {command} {job} {nearest['id']}")
