"""`holdfast checkpoint`: one now, and whether it became durable."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast.client import CheckpointRow, Client, JobSummary
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
from holdfast.commands.control import POLL_SECONDS, acknowledgement, is_applied, told, wait_until_applied
from holdfast.protocol import Desired

UNDER_WAY = ("snapshot", "persisting")


def checkpoint(
    job: JobName,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    no_wait: NoWait = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until it is durable.")] = 300.0,
    json: Json = False,
) -> None:
    """Take a checkpoint at the end of the current iteration, and wait until it is durable.

    Example: holdfast checkpoint char-gpt
    """
    deadline = time.monotonic() + (0.0 if no_wait else timeout)
    with asking(server, token) as client:
        lineage = client.job(job).lineage
        before = {row.id: row for row in client.checkpoints(job)}
        desired = client.edit(job, checkpoint_request=True)
        try:
            seen = wait_until_applied(client, job, desired.version, deadline - time.monotonic())
            if not json:
                print(f"a checkpoint now: {told(seen, desired.version)}", flush=True)
            row = None
            if not no_wait and is_applied(seen, desired.version):
                since = lineage, client.applied_at(job, desired.version) or seen.applied_iteration or 0
                row, seen = _follow(client, seen, before, since, deadline)
        except KeyboardInterrupt:
            fail(f"no longer waiting; what was asked of {job} stays asked")
    if json:
        print_json({**acknowledgement(seen, desired), "checkpoint": row})
    if not no_wait:
        _conclude(seen, desired, row, timeout, quiet=json)


def _follow(
    client: Client, seen: JobSummary, before: dict[str, CheckpointRow], since: tuple[int, int], deadline: float
) -> tuple[CheckpointRow | None, JobSummary]:
    """The checkpoint as it ended, or as it stood when the job had gone or the time was up."""
    while True:
        rows = [row for row in client.checkpoints(seen.job) if before.get(row.id) != row]
        row = _asked_for(rows, *since)
        ended = row is not None and row.state not in UNDER_WAY
        if ended or not seen.alive or time.monotonic() >= deadline:
            return row, seen
        time.sleep(POLL_SECONDS)
        seen = client.job(seen.job)


def _asked_for(rows: list[CheckpointRow], lineage: int, iteration: int) -> CheckpointRow | None:
    """The first requested one at or after an iteration; a restore at the same boundary begins a new lineage."""
    after = [row for row in rows if row.lineage > lineage or row.iteration >= iteration]
    order = sorted(after, key=lambda row: (row.lineage, row.iteration))
    first = next((row for row in order if row.kind == "requested"), None)
    if first is not None and first.state == "torn":  # it is taken again at once, as what it was or as scheduled
        again = (row for row in order if (row.lineage, row.iteration) > (first.lineage, first.iteration))
        return next(again, None)
    return first


def _conclude(
    seen: JobSummary, desired: Desired, row: CheckpointRow | None, timeout: float, *, quiet: bool
) -> None:
    if row is not None and row.state == "durable":
        if not quiet:
            took = "" if row.persist_seconds is None else f", written in {seconds(row.persist_seconds)}"
            print(f"durable: {row.id}, {size(row.payload_bytes)}{took}")
    elif row is not None and row.state not in UNDER_WAY:
        fail(f"the checkpoint at iteration {row.iteration} is {row.state}: {row.reason or 'no reason was given'}")
    elif not seen.alive and not is_applied(seen, desired.version):
        fail(f"{seen.job} is {seen.status}, and a request does not wait for the next start: no checkpoint")
    elif not seen.alive:
        fail(f"{seen.job} is {seen.status}: no word that its checkpoint became durable")
    else:
        stands = "not begun" if row is None else f"still {row.state}"
        fail(
            f"the checkpoint is {stands} after {timeout:g} s; `holdfast show {seen.job}` tells the newest durable"
        )
