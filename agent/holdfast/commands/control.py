"""What an operator changes of a job: its settings, pins, labels and numbers, and whether it is there at all."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from holdfast.client import Client, JobSummary, ServerError
from holdfast.commands.console import EXIT_USAGE, fail, parsed, percent, print_or_json, with_client
from holdfast.commands.options import Checkpoint, JobName, Json, NoWait, Yes
from holdfast.pacing.quantities import parse_positive_seconds
from holdfast.pacing.settings import parse_budget, parse_every
from holdfast.protocol.messages import MAX_ATTEMPT, MAX_LINEAGE, Desired
from holdfast.protocol.retention import parse_retention

ACKNOWLEDGED_WITHIN_SECONDS = 15.0
POLL_SECONDS = 0.25


@with_client
def budget(
    client: Client,
    job: JobName,
    budget: Annotated[str, typer.Argument(help="2%, 0.02, or `default`: the script's own.")],
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Set the budget: the share of training time that checkpointing may take.

    Examples: holdfast budget char-gpt 2%  ·  holdfast budget char-gpt default
    """
    value = None if budget == "default" else parsed(parse_budget, budget)
    said = "budget as the script has it" if value is None else f"budget {percent(value)}"
    _acknowledge(client, job, client.edit(job, budget=value), said, no_wait=no_wait, json=json)


@with_client
def every(
    client: Client,
    job: JobName,
    iterations: Annotated[str, typer.Argument(help="A number of iterations, or `auto`: the policy decides.")],
    held: Annotated[
        str | None, typer.Option("--for", help="So long, as in 2h; then the policy decides again.")
    ] = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Fix the interval between checkpoints in iterations, or return it to the policy.

    Examples: holdfast every char-gpt 50  ·  holdfast every char-gpt 50 --for 2h  ·  holdfast every char-gpt auto
    """
    value = None if iterations == "auto" else parsed(parse_every, iterations)
    seconds = None if held is None else parsed(lambda text: parse_positive_seconds(text, "--for"), held)
    said = "interval left to the policy" if value is None else f"a checkpoint every {value} iterations"
    if seconds is None:
        desired = client.edit(job, every=value)
    else:
        desired, said = client.edit(job, every=value, every_seconds=seconds), f"{said} for {held}"
    _acknowledge(client, job, desired, said, no_wait=no_wait, json=json)


@with_client
def policy(
    client: Client,
    job: JobName,
    policy: Annotated[str, typer.Argument(help="Its name, or `default`: the script's own.")],
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
    _acknowledge(client, job, client.edit(job, policy=value), said, no_wait=no_wait, json=json)


@with_client
def retention(
    client: Client,
    job: JobName,
    rules: Annotated[str, typer.Argument(help="'last 5, every 1000', or `default`: the script's own.")],
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
    _acknowledge(client, job, client.edit(job, retention=value), said, no_wait=no_wait, json=json)


@with_client
def pause(client: Client, job: JobName, no_wait: NoWait = False, json: Json = False) -> None:
    """Take no checkpoints until `holdfast resume`; training continues.

    Example: holdfast pause char-gpt
    """
    _acknowledge(client, job, client.edit(job, paused=True), "checkpoints paused", no_wait=no_wait, json=json)


@with_client
def resume(
    client: Client,
    job: JobName,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Take checkpoints again after `holdfast pause`.

    Example: holdfast resume char-gpt
    """
    said = "checkpoints resumed"
    _acknowledge(client, job, client.edit(job, paused=False), said, no_wait=no_wait, json=json)


@with_client
def pin(
    client: Client,
    job: JobName,
    checkpoint: Checkpoint,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Exempt a checkpoint from retention until `holdfast unpin`, also when there is no server.

    The job notes it beside its checkpoints. One that is not running does so at its next start.

    Example: holdfast pin char-gpt 1200
    """
    _pin(client, job, checkpoint, pinned=True, no_wait=no_wait, json=json)


@with_client
def unpin(
    client: Client,
    job: JobName,
    checkpoint: Checkpoint,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Let the retention rules apply to a checkpoint again.

    Example: holdfast unpin char-gpt 1200
    """
    _pin(client, job, checkpoint, pinned=False, no_wait=no_wait, json=json)


@with_client
def label(
    client: Client,
    job: JobName,
    checkpoint: Checkpoint,
    text: Annotated[str, typer.Argument(help="What to call it, in at most 64 characters; empty: nothing.")],
    json: Json = False,
) -> None:
    """Label a checkpoint; the job's page shows the label beside the iteration.

    Examples: holdfast label char-gpt 1200 "before the new data"  ·  holdfast label char-gpt 1200 ""
    """
    with offered_nearest("label", job, checkpoint):
        row = client.label(job, checkpoint, text or None)
    print_or_json(row, f"{row.id} is called {row.label}" if row.label else f"{row.id} has no label", json=json)


@with_client
def delete(
    client: Client,
    job: JobName,
    yes: Yes = False,
) -> None:
    """Delete a job from the server, with all that is stored of it there. Its checkpoints stay in the store.

    The job must not be running. A later report under the same name begins a new job.

    Example: holdfast delete char-gpt
    """
    found = client.job(job)
    if not yes:
        print(f"{job} is {found.status}, at iteration {found.iteration}. Its checkpoints stay in its store.")
        typer.confirm(f"Delete all that {client.server} has stored of it?", abort=True)
    client.delete_job(job)
    print(f"{job} is deleted; its checkpoints stay in its store")


@with_client
def reset_numbers(
    client: Client,
    job: JobName,
    attempt: Annotated[
        int | None, typer.Option(min=0, max=MAX_ATTEMPT, help="The largest attempt number of the job.")
    ] = None,
    lineage: Annotated[
        int | None, typer.Option(min=0, max=MAX_LINEAGE, help="The largest lineage number of the job.")
    ] = None,
    json: Json = False,
) -> None:
    """Correct the largest attempt or lineage number that the server knows of a job.

    For a job of which a report told wrong numbers: revoke the key that sent it first. `holdfast store show` tells
    the numbers that the store has.

    Example: holdfast reset-numbers char-gpt --attempt 7 --lineage 3
    """
    if attempt is None and lineage is None:
        fail("nothing to change: give --attempt, --lineage or both", EXIT_USAGE)
    numbers = client.reset_numbers(job, attempt=attempt, lineage=lineage)
    attempt, lineage = numbers.latest_attempt + 1, numbers.latest_lineage + 1
    said = f"{job}: the next attempt is {attempt} or later, and the next lineage {lineage} or later"
    print_or_json(numbers, said, json=json)


def _acknowledge(client: Client, job: str, desired: Desired, said: str, *, no_wait: bool, json: bool) -> None:
    """Print how far the edit got: taken by the server, or applied by the job, and at which iteration."""
    within_seconds = 0.0 if no_wait else ACKNOWLEDGED_WITHIN_SECONDS
    seen = wait_until_applied(client, job, desired.version, within_seconds)
    print_or_json(acknowledgement(seen, desired), f"{said}: {told(seen, desired.version)}", json=json)


def _pin(client: Client, job: str, checkpoint: str, *, pinned: bool, no_wait: bool, json: bool) -> None:
    with offered_nearest("pin" if pinned else "unpin", job, checkpoint):
        row = client.pin(job, checkpoint, pinned=pinned)
    version = client.desired(job).version
    seen = wait_until_applied(client, job, version, 0.0 if no_wait else ACKNOWLEDGED_WITHIN_SECONDS)
    said = f"{row.id} is {'pinned' if row.pinned else 'not pinned'}: {told(seen, version)}"
    print_or_json({"checkpoint": row, "applied": is_applied(seen, version)}, said, json=json)


@contextlib.contextmanager
def offered_nearest(command: str, job: str, checkpoint: str) -> Iterator[None]:
    """Where there is no checkpoint at that iteration, name the nearest earlier one."""
    try:
        yield
    except ServerError as error:
        if error.code == "no_such_checkpoint" and (nearest := error.body.get("nearest")):
            print(f"holdfast: {job} has no checkpoint {checkpoint}.", file=sys.stderr)
            fail(f"the nearest earlier one is at {nearest['iteration']}: holdfast {command} {job} {nearest['id']}")
        raise


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
