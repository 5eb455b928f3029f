"""Commands that change a job: its settings, pins, labels and numbers, and its removal from the server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Any

import typer

from holdfast.client import Client, JobSummary, ServerError
from holdfast.commands.console import EXIT_USAGE, complain, fail, parsed, percent, print_or_json, say, with_client
from holdfast.commands.options import Checkpoint, JobName, Json, NoWait, Yes
from holdfast.pacing.settings import parse_budget, parse_every, parse_unsaved_work, parse_write_budget
from holdfast.protocol.field_types import MAX_ATTEMPT, MAX_LINEAGE
from holdfast.protocol.orders import parse_on_trouble
from holdfast.protocol.wire import Desired
from holdfast.retention import RULES, parse_retention
from holdfast.units import duration, format_interval, format_rate, parse_positive_seconds

ACKNOWLEDGED_WITHIN_SECONDS = 15.0
POLL_SECONDS = 0.25


_RULES = (
    "Rules separated by commas, or `default`: the training script's setting. "
    f"{'; '.join(f'`{rule}`: {kept}' for rule, kept in RULES.items())}."
)


@with_client
def budget(
    client: Client,
    job: JobName,
    budget: Annotated[
        str, typer.Argument(metavar="BUDGET", help="2%, 0.02, or `default`: the training script's setting.")
    ],
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Set the budget: the share of training time that checkpointing may take.

    Examples: holdfast budget char-gpt 2%  ·  holdfast budget char-gpt default
    """
    value = None if budget == "default" else parsed(parse_budget, budget)
    done = "budget set by the script" if value is None else f"budget {percent(value)}"
    _edit(client, job, done, no_wait=no_wait, json=json, budget=value)


@with_client
def write_budget(
    client: Client,
    job: JobName,
    rate: Annotated[
        str, typer.Argument(metavar="RATE", help="2TB/day, 500GB/h, or `default`: the training script's setting.")
    ],
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Limit what checkpoints send to the store, in addition to the budget of training time.

    It counts the bytes that are sent: after compression, with parity, without linked files.

    Examples: holdfast write-budget char-gpt 2TB/day  ·  holdfast write-budget char-gpt default
    """
    value = None if rate == "default" else parsed(parse_write_budget, rate)
    done = "write budget set by the script" if value is None else f"write budget {format_rate(value)}"
    _edit(client, job, done, no_wait=no_wait, json=json, write_budget=value)


@with_client
def unsaved_work(
    client: Client,
    job: JobName,
    limit: Annotated[
        str, typer.Argument(metavar="TIME", help="10min, 1h, or `default`: the training script's setting.")
    ],
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Limit the work that a failure may lose, as far as both budgets allow.

    Examples: holdfast unsaved-work char-gpt 5min  ·  holdfast unsaved-work char-gpt default
    """
    value = None if limit == "default" else parsed(parse_unsaved_work, limit)
    done = "unsaved work set by the script" if value is None else f"unsaved work at most {duration(value)}"
    _edit(client, job, done, no_wait=no_wait, json=json, max_unsaved_work=value)


@with_client
def every(
    client: Client,
    job: JobName,
    interval: Annotated[
        str,
        typer.Argument(
            metavar="INTERVAL", help="A number of iterations, a time as in 10min, or `auto`: the policy decides."
        ),
    ],
    hold: Annotated[
        str | None,
        typer.Option("--for", metavar="TIME", help="Return the interval to the policy after this time, as in 2h."),
    ] = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Fix the interval between checkpoints in iterations or in time, or return it to the policy.

    Examples: holdfast every char-gpt 50  ·  holdfast every char-gpt 10min --for 2h  ·  holdfast every char-gpt
    auto
    """
    value = None if interval == "auto" else parsed(parse_every, interval)
    done = "interval set by the policy" if value is None else f"a checkpoint every {format_interval(value)}"
    limit = {}
    if hold is not None:
        limit["every_seconds"] = parsed(lambda text: parse_positive_seconds(text, "--for"), hold)
        done += f" for {hold}"
    _edit(
        client,
        job,
        done,
        no_wait=no_wait,
        json=json,
        every=interval if isinstance(value, timedelta) else value,
        **limit,
    )


@with_client
def policy(
    client: Client,
    job: JobName,
    policy: Annotated[
        str,
        typer.Argument(metavar="POLICY", help="The policy's name, or `default`: the training script's setting."),
    ],
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Choose the interval policy: goodput, checkfreq, young-daly, coci or fixed.

    checkfreq takes checkpoints as often as the budget allows. goodput also weighs what failures cost and chooses
    the interval that finishes the job soonest, within the budget. `holdfast plan --job JOB` compares them.

    Examples: holdfast policy char-gpt goodput  ·  holdfast policy char-gpt default
    """
    value = None if policy == "default" else policy.strip().lower()
    done = "policy set by the script" if value is None else f"policy {value}"
    _edit(client, job, done, no_wait=no_wait, json=json, policy=value)


@with_client
def on_trouble(
    client: Client,
    job: JobName,
    rule: Annotated[
        str,
        typer.Argument(metavar="RULE", help="off, observe, restore, or `default`: the training script's setting."),
    ],
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Choose what the job does when its loss is wrong: not finite, or risen without recovering.

    `observe` only reports what it would do; start with it. `restore` restores the last good checkpoint and leaves
    out the data of those iterations, at most twice in 1,000 iterations, or as in `restore 3 in 2000 then pause`.

    Examples: holdfast on-trouble char-gpt observe  ·  holdfast on-trouble char-gpt "restore 1 in 5000 then end"
    """
    value = None if rule == "default" else str(parsed(parse_on_trouble, rule))
    done = "reaction to wrong losses set by the script" if value is None else f"reaction to wrong losses: {value}"
    _edit(client, job, done, no_wait=no_wait, json=json, on_trouble=value)


@with_client
def retention(
    client: Client,
    job: JobName,
    rules: Annotated[
        str,
        typer.Argument(metavar="RULES", help=_RULES),
    ],
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Choose which checkpoints are kept.

    A checkpoint stays if any rule keeps it, within `size`. With `per lineage` the rules apply to each lineage
    separately. The newest durable checkpoint, pinned ones and safety checkpoints are always kept.

    Examples: holdfast retention char-gpt "last 5, every 1000"  ·  holdfast retention char-gpt "spaced 12, size
    200GB"  ·  holdfast retention char-gpt "last 3, per lineage"  ·  holdfast retention char-gpt default
    """
    value = None if rules == "default" else str(parsed(parse_retention, rules))
    done = "retention set by the script" if value is None else f"retention '{value}'"
    _edit(client, job, done, no_wait=no_wait, json=json, retention=value)


@with_client
def pause_checkpoints(client: Client, job: JobName, no_wait: NoWait = False, json: Json = False) -> None:
    """Take no checkpoints until `holdfast resume-checkpoints`; training continues.

    Example: holdfast pause-checkpoints char-gpt
    """
    _edit(client, job, "checkpoints paused", no_wait=no_wait, json=json, paused=True)


@with_client
def resume_checkpoints(client: Client, job: JobName, no_wait: NoWait = False, json: Json = False) -> None:
    """Take checkpoints again after `holdfast pause-checkpoints`.

    Example: holdfast resume-checkpoints char-gpt
    """
    _edit(client, job, "checkpoints resumed", no_wait=no_wait, json=json, paused=False)


@with_client
def pin(client: Client, job: JobName, checkpoint: Checkpoint, no_wait: NoWait = False, json: Json = False) -> None:
    """Keep a checkpoint, whatever the retention rules say, until `holdfast unpin`.

    The job also records the pin in its store. A job that is not running does so at its next start.

    Example: holdfast pin char-gpt 1200
    """
    _pin(client, job, checkpoint, pinned=True, no_wait=no_wait, json=json)


@with_client
def unpin(
    client: Client, job: JobName, checkpoint: Checkpoint, no_wait: NoWait = False, json: Json = False
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
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="The label, at most 64 characters; empty removes it.")
    ],
    json: Json = False,
) -> None:
    """Label a checkpoint; the job's page shows the label next to the iteration.

    Examples: holdfast label char-gpt 1200 "before the new data"  ·  holdfast label char-gpt 1200 ""
    """
    with suggest_nearest("label", job, checkpoint):
        row = client.label(job, checkpoint, text or None)
    print_or_json(row, f"{row.id} is labeled {row.label}" if row.label else f"{row.id} has no label", json=json)


@with_client
def delete(client: Client, job: JobName, yes: Yes = False) -> None:
    """Delete a job and its reports from the server. Its checkpoints stay in the store.

    The job must not be running. A later report under the same name begins a new job.

    Example: holdfast delete char-gpt
    """
    found = client.job(job)
    if not yes:
        say(f"{job} is {found.status}, at iteration {found.iteration}. Its checkpoints stay in its store.")
        typer.confirm(f"Delete everything that {client.server} has stored about it?", abort=True)
    client.delete_job(job)
    say(f"{job} is deleted; its checkpoints stay in its store")


@with_client
def reset_numbers(
    client: Client,
    job: JobName,
    attempt: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_ATTEMPT, metavar="N", help="The largest attempt number of the job."),
    ] = None,
    lineage: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_LINEAGE, metavar="N", help="The largest lineage number of the job."),
    ] = None,
    json: Json = False,
) -> None:
    """Correct the largest attempt or lineage number that the server knows of a job.

    Use it after a report with wrong numbers, once the key that sent the report is revoked. `holdfast store show`
    shows the numbers in the store.

    Example: holdfast reset-numbers char-gpt --attempt 7 --lineage 3
    """
    if attempt is None and lineage is None:
        fail("nothing to change: give --attempt, --lineage or both", EXIT_USAGE)
    numbers = client.reset_numbers(job, attempt=attempt, lineage=lineage)
    attempt, lineage = numbers.latest_attempt + 1, numbers.latest_lineage + 1
    done = f"{job}: the next attempt is {attempt} or later, and the next lineage {lineage} or later"
    print_or_json(numbers, done, json=json)


def _edit(client: Client, job: str, done: str, *, no_wait: bool, json: bool, **changes: Any) -> None:
    """Change settings, and print whether the job has applied the new version and at which iteration."""
    desired = client.edit(job, **changes)
    seen = wait_until_applied(client, job, desired.version, 0.0 if no_wait else ACKNOWLEDGED_WITHIN_SECONDS)
    print_or_json(acknowledgement(seen, desired), f"{done}: {describe(seen, desired.version)}", json=json)


def _pin(client: Client, job: str, checkpoint: str, *, pinned: bool, no_wait: bool, json: bool) -> None:
    with suggest_nearest("pin" if pinned else "unpin", job, checkpoint):
        row = client.pin(job, checkpoint, pinned=pinned)
    version = client.desired(job).version
    seen = wait_until_applied(client, job, version, 0.0 if no_wait else ACKNOWLEDGED_WITHIN_SECONDS)
    done = f"{row.id} is {'pinned' if row.pinned else 'not pinned'}: {describe(seen, version)}"
    print_or_json({"checkpoint": row, "applied": is_applied(seen, version)}, done, json=json)


@contextlib.contextmanager
def suggest_nearest(command: str, job: str, checkpoint: str) -> Iterator[None]:
    """Name the nearest earlier checkpoint if the job has none at that iteration."""
    try:
        yield
    except ServerError as error:
        if error.code == "no_such_checkpoint" and (nearest := error.body.get("nearest")):
            complain(f"{job} has no checkpoint {checkpoint}.")
            fail(f"the nearest earlier one is at {nearest['iteration']}: holdfast {command} {job} {nearest['id']}")
        raise


def is_applied(seen: JobSummary, version: int) -> bool:
    return (seen.applied_version or 0) >= version


def acknowledgement(seen: JobSummary, desired: Desired) -> dict[str, object]:
    """Return the state of `describe` as fields, for scripts."""
    applied = is_applied(seen, desired.version)
    iteration = seen.applied_iteration if applied else None
    return {"desired": desired, "applied": applied, "applied_iteration": iteration}


def describe(seen: JobSummary, version: int) -> str:
    """Return in words whether the job has applied a version."""
    if is_applied(seen, version):
        return f"version {version}, applied at iteration {seen.applied_iteration}"
    return f"version {version}, not applied yet ({seen.job} is {seen.status})"


def wait_until_applied(client: Client, job: str, version: int, within_seconds: float) -> JobSummary:
    """Wait until the job has applied the version, is not running, or the time is up."""
    deadline = time.monotonic() + within_seconds
    while True:
        seen = client.job(job)
        if is_applied(seen, version) or not seen.alive or time.monotonic() >= deadline:
            return seen
        time.sleep(POLL_SECONDS)
