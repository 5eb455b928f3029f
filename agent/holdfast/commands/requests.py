"""What an operator asks a job for once, and waits for: checkpoint, probe, verification, restore, undo."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, TypeVar

import typer

from holdfast.client import CheckpointRow, Client, JobSummary, NoticeRow, Order, ServerError
from holdfast.commands.console import fail, parsed, print_json, seconds, size, with_client
from holdfast.commands.control import (
    POLL_SECONDS,
    acknowledgement,
    is_applied,
    offered_nearest,
    told,
    wait_until_applied,
)
from holdfast.commands.options import Checkpoint, JobName, Json, NoWait, Timeout
from holdfast.pacing.quantities import parse_positive_seconds
from holdfast.protocol.messages import OPEN_ORDER_STATES, Desired

UNDER_WAY = ("snapshot", "persisting")
PROBE_CODE = "data"
"""The code of the notice that answers a probe."""

T = TypeVar("T")


# ---- a checkpoint, a probe ---------------------------------------------------------------------


@with_client
def checkpoint(
    client: Client, job: JobName, no_wait: NoWait = False, timeout: Timeout = 300.0, json: Json = False
) -> None:
    """Take a checkpoint at the end of the current iteration, and wait until it is durable.

    Example: holdfast checkpoint char-gpt
    """
    lineage = client.job(job).lineage
    before = {row.id: row for row in client.checkpoints(job)}

    def asked_for(seen: JobSummary, version: int) -> CheckpointRow | None:
        since = client.applied_at(job, version) or seen.applied_iteration or 0
        return _asked_for([row for row in client.checkpoints(job) if before.get(row.id) != row], lineage, since)

    desired, seen, row = _request(
        client, job, "checkpoint_request", "a checkpoint now", asked_for,
        _is_under_way, wait_seconds=None if no_wait else timeout, quiet=json,
    )  # fmt: skip
    if json:
        print_json({**acknowledgement(seen, desired), "checkpoint": row})
    if no_wait:
        return
    if row is not None and row.state == "durable":
        if not json:
            took = "" if row.persist_seconds is None else f", written in {seconds(row.persist_seconds)}"
            print(f"durable: {row.id}, {size(row.payload_bytes)}{took}")
    elif row is not None and not _is_under_way(row):
        fail(f"the checkpoint at iteration {row.iteration} is {row.state}: {row.reason or 'no reason was given'}")
    elif not seen.alive and not is_applied(seen, desired.version):
        fail(f"{job} is {seen.status}, and a request does not wait for the next start: no checkpoint")
    elif not seen.alive:
        fail(f"{job} is {seen.status}: no word that its checkpoint became durable")
    else:
        stands = "not begun" if row is None else f"still {row.state}"
        fail(f"the checkpoint is {stands} after {timeout:g} s; `holdfast show {job}` tells the newest durable")


@with_client
def probe(
    client: Client, job: JobName, no_wait: NoWait = False, timeout: Timeout = 120.0, json: Json = False
) -> None:
    """Measure how long a batch takes to fetch and to prepare, and what would make loading faster.

    At the end of an iteration the job reads the batches that come next twice, for at most 10 seconds in which
    training waits. The place in the data stays what it was. A checkpoint that is being written is waited for.

    Example: holdfast probe char-gpt
    """
    before = max((notice.id for notice in client.notices(job)), default=0)

    def answered(seen: JobSummary, version: int) -> NoticeRow | None:
        """The first notice about the data since."""
        since = (notice for notice in client.notices(job) if notice.code == PROBE_CODE and notice.id > before)
        return min(since, key=lambda notice: notice.id, default=None)

    desired, seen, answer = _request(
        client, job, "probe_request", "a probe of the data", answered,
        lambda answer: answer is None, wait_seconds=None if no_wait else timeout, quiet=json,
    )  # fmt: skip
    if json:
        print_json({**acknowledgement(seen, desired), "answer": answer})
    if no_wait:
        return
    if answer is not None and answer.level == "info":
        if not json:
            print("\n".join(answer.message.split(". ")))
    elif answer is not None:
        fail(answer.message)
    elif not seen.alive and not is_applied(seen, desired.version):
        fail(f"{job} is {seen.status}, and a request does not wait for the next start: nothing was measured")
    elif not seen.alive:
        fail(f"{job} is {seen.status}: it ended before it answered")
    else:
        fail(f"no answer after {timeout:g} s; when it comes, the job's page shows it among its notices")


def _request(
    client: Client,
    job: str,
    setting: str,
    what: str,
    find: Callable[[JobSummary, int], T | None],
    is_open: Callable[[T | None], bool],
    *,
    wait_seconds: float | None,
    quiet: bool,
) -> tuple[Desired, JobSummary, T | None]:
    """Ask for it, and return what `find` found once it is no longer open, the job had gone, or the time was up."""
    deadline = time.monotonic() + (wait_seconds or 0.0)
    desired = client.edit(job, **{setting: True})
    with _interruptible(f"what was asked of {job} stays asked"):
        seen = wait_until_applied(client, job, desired.version, deadline - time.monotonic())
        if not quiet:
            print(f"{what}: {told(seen, desired.version)}", flush=True)
        if wait_seconds is None or not is_applied(seen, desired.version):
            return desired, seen, None
        while True:
            found = find(seen, desired.version)
            if not is_open(found) or not seen.alive or time.monotonic() >= deadline:
                return desired, seen, found
            time.sleep(POLL_SECONDS)
            seen = client.job(job)


def _is_under_way(row: CheckpointRow | None) -> bool:
    return row is None or row.state in UNDER_WAY


def _asked_for(rows: list[CheckpointRow], lineage: int, iteration: int) -> CheckpointRow | None:
    """The first requested one at or after an iteration; a restore at the same boundary begins a new lineage."""
    after = [row for row in rows if row.lineage > lineage or row.iteration >= iteration]
    order = sorted(after, key=lambda row: (row.lineage, row.iteration))
    first = next((row for row in order if row.kind == "requested"), None)
    if first is not None and first.state == "torn":  # it is taken again at once, as what it was or as scheduled
        again = (row for row in order if (row.lineage, row.iteration) > (first.lineage, first.iteration))
        return next(again, None)
    return first


@contextlib.contextmanager
def _interruptible(stays: str) -> Iterator[None]:
    """Ctrl-C ends the wait, and says what goes on without it."""
    try:
        yield
    except KeyboardInterrupt:
        fail(f"no longer waiting; {stays}")


# ---- a verification ----------------------------------------------------------------------------


@with_client
def verify(
    client: Client,
    job: JobName,
    checkpoint: Checkpoint,
    against: Annotated[
        str | None, typer.Option(metavar="CHECKPOINT", help="Also tell how far its tensors are from this one.")
    ] = None,
    no_wait: NoWait = False,
    timeout: Timeout = 600.0,
    json: Json = False,
) -> None:
    """Verify a checkpoint: the job reads every byte back and compares it with its digests.

    The job itself does it, beside its training and slowly. One that is not running does so at its next start, and
    is not waited for: where the store is, `holdfast store verify` does it at once.

    Examples: holdfast verify char-gpt 1200  ·  holdfast verify char-gpt 1200 --against 1000
    """
    with offered_nearest("verify", job, checkpoint):
        found = client.verify(job, checkpoint, against=against)
    alive = client.job(job).alive
    waited = alive and not no_wait
    deadline = time.monotonic() + (timeout if waited else 0.0)
    with _interruptible(f"{found.checkpoint} is still to be read"):
        while found.open and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            found = client.verification(job, found.checkpoint)
    if json:
        print_json(found)
    name = found.checkpoint
    if found.open and waited:
        fail(f"{name} is not read yet; it stays asked")
    if found.open:
        said = f"{name} is to be read back"
        said += "" if alive else f": {job} is not running, and reads it at its next start"
    elif found.state == "sound":
        said = f"{name} is sound: {size(found.read_bytes)} in {seconds(found.seconds)}, on {found.host}"
    else:
        state = "not verified" if found.state in ("failed", "cancelled") else found.state
        fail(f"{name} is {state}: {found.reason}")
    if not json:
        print(said)


# ---- a restore, an undo -------------------------------------------------------------------------


@with_client
def restore(
    client: Client,
    job: JobName,
    iteration: Annotated[int, typer.Argument(min=0, metavar="ITERATION", help="The iteration to restore.")],
    no_wait: NoWait = False,
    timeout: Timeout = 300.0,
    expires: Annotated[
        str | None, typer.Option(help="Expire the request after this time, as in 90min or 12h. [default: a week]")
    ] = None,
    nearest: Annotated[
        bool,
        typer.Option("--nearest", help="Restore the nearest earlier checkpoint if there is none at ITERATION."),
    ] = False,
    json: Json = False,
) -> None:
    """Restore a job to its checkpoint at ITERATION; training continues from there.

    A running job restores in place at the end of its iteration. It saves the state that it leaves first, so that
    `holdfast undo` can return to it. A script that cannot be rewound while it runs is restarted by `holdfast run`.
    Without a supervisor, and for a job that is not running, the restore happens at the next start, and this
    command does not wait. If there is no checkpoint at ITERATION, nothing changes and the nearest earlier one is
    named, unless you give `--nearest`. `holdfast checkpoints JOB` lists the restore points.

    Example: holdfast restore char-gpt 1200 --nearest
    """
    expires_seconds = None
    if expires is not None:
        expires_seconds = parsed(lambda text: parse_positive_seconds(text, "expires"), expires)
    order = _order(client, job, iteration, expires_seconds, nearest=nearest)
    _carry_out(client, order, timeout, no_wait=no_wait, json=json)


@with_client
def undo(
    client: Client,
    job: JobName,
    no_wait: NoWait = False,
    timeout: Timeout = 300.0,
    json: Json = False,
) -> None:
    """Undo the last restore of a job: training continues from the state that the restore left.

    An undo is a restore too, and can itself be undone.

    Example: holdfast undo char-gpt
    """
    last = next((each for each in client.orders(job) if each.state == "restored"), None)
    if last is None:
        fail(f"{job} has not been taken back: there is nothing to undo")
    _carry_out(client, client.undo_restore(job, last.id), timeout, no_wait=no_wait, json=json)


def _carry_out(client: Client, order: Order, timeout: float, *, no_wait: bool, json: bool) -> None:
    """Follow an order to its end, where the job can come to that by itself."""
    job = order.job
    seen = client.job(job)
    waiting = seen.alive and seen.restore_mode != "next_start" and not no_wait
    if seen.alive and seen.restore_mode == "relaunch" and not json:
        print(f"{job} is started again for it: {seen.restore_reason}", flush=True)
    try:
        for moved in client.follow(order, timeout_seconds=timeout) if waiting else ():
            order = moved
            if not json:
                print(_progress(order), flush=True)
    except KeyboardInterrupt:
        fail(f"no longer waiting; the order {order.id} stays {order.state}")
    if json:
        print_json(order)
    if not waiting:
        if not json:
            when = _when(seen)
            print(f"restore of {job} to iteration {order.iteration}: {order.state} (order {order.id}){when}")
    elif order.state in OPEN_ORDER_STATES:
        fail(f"still {order.state} after {timeout:g} s; the order {order.id} stays open")
    elif order.state != "restored":
        fail(f"the restore of {job} to iteration {order.iteration} ended as {order.state}: {order.reason}")


def _when(seen: JobSummary) -> str:
    if not seen.alive:
        return f"; {seen.job} is {seen.status}, and it takes effect at its next start"
    if seen.restore_mode == "next_start":
        return f"; it takes effect when you start the script again: {seen.restore_reason}"
    return ""


def _order(client: Client, job: str, iteration: int, expires_seconds: float | None, *, nearest: bool) -> Order:
    try:
        return client.restore(job, iteration, expires_seconds=expires_seconds)
    except ServerError as error:
        if error.code != "no_such_checkpoint":
            raise
        if earlier := error.body.get("nearest"):
            which, there = "nearest earlier one", int(earlier["iteration"])
        elif oldest := client.oldest_restorable(job):
            which, there = "oldest that exists", oldest.iteration
        else:
            raise
    missing = f"{job} has no checkpoint at iteration {iteration}"
    if not nearest or there > iteration:
        print(f"holdfast: {missing}.", file=sys.stderr)
        alternative = f", or {iteration} --nearest" if there <= iteration else ""
        fail(f"the {which} is at {there}: holdfast restore {job} {there}{alternative}")
    print(f"{missing}: restoring the {which}, {there}", file=sys.stderr)
    return client.restore(job, there, expires_seconds=expires_seconds)


def _progress(order: Order) -> str:
    line = f"{order.state:<10} {order.job} to iteration {order.iteration}"
    if order.state == "restored":
        took = "" if order.seconds is None else f" in {seconds(order.seconds)}"
        line += f"{took}, on lineage {order.new_lineage}"
        if order.safety_checkpoint:
            line += f"; the state left behind is kept as {order.safety_checkpoint}"
    return line
