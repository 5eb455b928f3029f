"""`budget`, `every`, `policy`, `retention`, `pause`, `resume`: what a job should be, and its acknowledgement."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast.client import Client, JobSummary
from holdfast.commands.console import (
    DEFAULT_SERVER,
    JobName,
    Json,
    NoWait,
    Server,
    Token,
    asking,
    parsed,
    percent,
    print_json,
)
from holdfast.pacing.quantities import parse_positive_seconds
from holdfast.pacing.settings import parse_budget, parse_every
from holdfast.protocol import Desired
from holdfast.retention import parse_retention

ACKNOWLEDGED_WITHIN_SECONDS = 15.0
POLL_SECONDS = 0.25


def budget(
    job: JobName,
    budget: Annotated[str, typer.Argument(help="2%, 0.02, or `default`: the script's own.")],
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Set the budget: the share of training time that checkpointing may take.

    Examples: holdfast budget char-gpt 2%  ·  holdfast budget char-gpt default
    """
    value = None if budget == "default" else parsed(parse_budget, budget)
    said = "budget as the script has it" if value is None else f"budget {percent(value)}"
    with asking(server, token) as client:
        _acknowledge(client, job, client.edit(job, budget=value), said, no_wait=no_wait, json=json)


def every(
    job: JobName,
    iterations: Annotated[str, typer.Argument(help="A number of iterations, or `auto`: the policy decides.")],
    held: Annotated[
        str | None, typer.Option("--for", help="So long, as in 2h; then the policy decides again.")
    ] = None,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Fix the interval between checkpoints in iterations, or return it to the policy.

    Examples: holdfast every char-gpt 50  ·  holdfast every char-gpt 50 --for 2h  ·  holdfast every char-gpt auto
    """
    value = None if iterations == "auto" else parsed(parse_every, iterations)
    seconds = None if held is None else parsed(lambda text: parse_positive_seconds(text, "--for"), held)
    said = "interval left to the policy" if value is None else f"a checkpoint every {value} iterations"
    with asking(server, token) as client:
        if seconds is None:
            desired = client.edit(job, every=value)
        else:
            desired, said = client.edit(job, every=value, every_seconds=seconds), f"{said} for {held}"
        _acknowledge(client, job, desired, said, no_wait=no_wait, json=json)


def policy(
    job: JobName,
    policy: Annotated[str, typer.Argument(help="Its name, or `default`: the script's own.")],
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Choose the interval policy: checkfreq, goodput, young-daly or fixed.

    checkfreq takes checkpoints as often as the budget allows. goodput asks what failures cost and takes them as
    often as gets the job done soonest, within the budget. `holdfast plan --job JOB` compares them.

    Examples: holdfast policy char-gpt goodput  ·  holdfast policy char-gpt default
    """
    value = None if policy == "default" else policy.strip().lower()
    said = "policy as the script has it" if value is None else f"policy {value}"
    with asking(server, token) as client:
        _acknowledge(client, job, client.edit(job, policy=value), said, no_wait=no_wait, json=json)


def retention(
    job: JobName,
    rules: Annotated[str, typer.Argument(help="'last 5, every 1000', or `default`: the script's own.")],
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Choose which checkpoints stay: the last so many, one every so many iterations, so many spaced ever further
    apart, as many as have room, for each lineage by itself.

    A checkpoint stays when one of `last`, `every` and `spaced` keeps it, and `size` has room for it. The newest
    durable one, pinned ones and the ways back from restores stay whatever the rules say.

    Examples: holdfast retention char-gpt "last 5, every 1000"  ·  holdfast retention char-gpt "spaced 12, size
    200GB"  ·  holdfast retention char-gpt "last 3, per lineage"  ·  holdfast retention char-gpt default
    """
    value = None if rules == "default" else str(parsed(parse_retention, rules))
    said = "retention as the script has it" if value is None else f"retention '{value}'"
    with asking(server, token) as client:
        _acknowledge(client, job, client.edit(job, retention=value), said, no_wait=no_wait, json=json)


def pause(
    job: JobName,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Take no checkpoints until `holdfast resume`; training continues.

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


def _acknowledge(client: Client, job: str, desired: Desired, said: str, *, no_wait: bool, json: bool) -> None:
    """Print how far the edit got: taken by the server, or applied by the job, and at which iteration."""
    within_seconds = 0.0 if no_wait else ACKNOWLEDGED_WITHIN_SECONDS
    seen = wait_until_applied(client, job, desired.version, within_seconds)
    if json:
        print_json(acknowledgement(seen, desired))
    else:
        print(f"{said}: {told(seen, desired.version)}")


def is_applied(seen: JobSummary, version: int) -> bool:
    return (seen.applied_version or 0) >= version


def acknowledgement(seen: JobSummary, desired: Desired) -> dict[str, object]:
    """For scripts."""
    applied = is_applied(seen, desired.version)
    iteration = seen.applied_iteration if applied else None
    return {"desired": desired, "applied": applied, "applied_iteration": iteration}


def told(seen: JobSummary, version: int) -> str:
    if is_applied(seen, version):
        return f"version {version}, applied at iteration {seen.applied_iteration}"
    return f"version {version}, not applied yet ({seen.job} is {seen.status})"


def wait_until_applied(client: Client, job: str, version: int, within_seconds: float) -> JobSummary:
    """The job once it acts on the version, is not there to do so, or the time is up."""
    deadline = time.monotonic() + within_seconds
    while True:
        seen = client.job(job)
        if is_applied(seen, version) or not seen.alive or time.monotonic() >= deadline:
            return seen
        time.sleep(POLL_SECONDS)
