"""`budget`, `every`, `pause`, `resume`, `checkpoint`: what a job should be, and its acknowledgement."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast.client import Client, Job
from holdfast.commands.console import (
    DEFAULT_SERVER,
    JobName,
    Json,
    NoWait,
    Server,
    Token,
    asking,
    fail,
    parsed,
    percent,
    print_json,
)
from holdfast.pacing.settings import parse_budget, parse_every
from holdfast.protocol import Desired

ACKNOWLEDGED_WITHIN_SECONDS = 15.0
DURABLE_WITHIN_SECONDS = 120.0


def budget(
    job: JobName,
    budget: Annotated[str, typer.Argument(help="2%, 0.02, or `default`: the script's own.")],
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Allow checkpointing this much of the training time.

    Examples: holdfast budget char-gpt 2%  ·  holdfast budget char-gpt default
    """
    value = None if budget == "default" else parsed(parse_budget, budget)
    said = "budget as the script has it" if value is None else f"budget {percent(value)}"
    with asking(server, token) as client:
        _acknowledge(client, job, client.edit(job, budget=value), said, no_wait=no_wait, json=json)


def every(
    job: JobName,
    iterations: Annotated[str, typer.Argument(help="A number of iterations, or `auto`: the policy decides.")],
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Take a checkpoint every so many iterations, whatever it costs, or let the policy decide again.

    Examples: holdfast every char-gpt 50  ·  holdfast every char-gpt auto
    """
    value = None if iterations == "auto" else parsed(parse_every, iterations)
    said = "interval left to the policy" if value is None else f"a checkpoint every {value} iterations"
    with asking(server, token) as client:
        _acknowledge(client, job, client.edit(job, every=value), said, no_wait=no_wait, json=json)


def pause(
    job: JobName,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Take no checkpoints until `holdfast resume`; training itself goes on.

    Example: holdfast pause char-gpt
    """
    with asking(server, token) as client:
        said = "checkpoints paused"
        _acknowledge(client, job, client.edit(job, paused=True), said, no_wait=no_wait, json=json)


def resume(
    job: JobName,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Take checkpoints again after `holdfast pause`.

    Example: holdfast resume char-gpt
    """
    with asking(server, token) as client:
        said = "checkpoints resumed"
        _acknowledge(client, job, client.edit(job, paused=False), said, no_wait=no_wait, json=json)


def checkpoint(
    job: JobName,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Take a checkpoint now, at the end of the iteration that is running.

    Example: holdfast checkpoint char-gpt
    """
    with asking(server, token) as client:
        said = "a checkpoint now"
        before = {row.id for row in client.checkpoints(job)}
        applied = _acknowledge(
            client, job, client.edit(job, checkpoint_request=True), said, no_wait=no_wait, json=json
        )
        if applied and not no_wait:
            _follow_checkpoint(client, job, before, quiet=json)


def _follow_checkpoint(client: Client, job: str, before: set[str], *, quiet: bool) -> None:
    """Applied is not yet done: wait until what was asked for is durable, or say why it is not."""
    deadline = time.monotonic() + DURABLE_WITHIN_SECONDS
    while time.monotonic() < deadline:
        asked = [row for row in client.checkpoints(job) if row.kind == "requested" and row.id not in before]
        if asked and asked[0].state == "durable":
            if not quiet:
                print(f"durable: {asked[0].id}, {asked[0].payload_bytes / 1e6:,.1f} MB")
            return
        if asked and asked[0].state in ("failed", "torn"):
            fail(f"the checkpoint of iteration {asked[0].iteration} {asked[0].state}: {asked[0].reason}")
        time.sleep(0.25)
    fail(f"not durable after {DURABLE_WITHIN_SECONDS:g} s; `holdfast show {job}` tells how it stands")


def _acknowledge(client: Client, job: str, desired: Desired, said: str, *, no_wait: bool, json: bool) -> bool:
    """Print how far the edit got: taken by the server, or applied by the job (True), and at which iteration."""
    seen = client.job(job) if no_wait else _wait_until_applied(client, job, desired.version)
    applied = (seen.applied_version or 0) >= desired.version
    if json:
        iteration = seen.applied_iteration if applied else None
        print_json({"desired": desired, "applied": applied, "applied_iteration": iteration})
    elif applied:
        print(f"{said}: version {desired.version}, applied at iteration {seen.applied_iteration}")
    else:
        print(f"{said}: version {desired.version}, not applied yet ({job} is {seen.status})")
    return applied


def _wait_until_applied(client: Client, job: str, version: int) -> Job:
    deadline = time.monotonic() + ACKNOWLEDGED_WITHIN_SECONDS
    while True:
        seen = client.job(job)
        applied = (seen.applied_version or 0) >= version
        if applied or not seen.alive or time.monotonic() > deadline:
            return seen
        time.sleep(0.25)
