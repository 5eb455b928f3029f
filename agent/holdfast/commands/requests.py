"""Commands that request something from a job and wait for it: checkpoint, probe, verify, restore, undo."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

import typer

from holdfast.client import CheckpointInfo, Client, JobSummary, NoticeInfo, Order, ServerError, UnreachableError
from holdfast.commands.console import complain, fail, parsed, print_json, say, seconds, with_client
from holdfast.commands.control import (
    POLL_SECONDS,
    acknowledgement,
    describe,
    is_applied,
    suggest_nearest,
    wait_until_applied,
)
from holdfast.commands.options import Checkpoint, JobName, Json, NoWait, Timeout
from holdfast.protocol.analyses import SAME_LOSSES
from holdfast.protocol.orders import skip_of
from holdfast.protocol.wire import OPEN_ORDER_STATES, Desired
from holdfast.units import format_bytes, parse_positive_seconds

PROBE_CODE = "data"
"""The code of the notice with a probe's result."""

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

    def find(seen: JobSummary, version: int) -> CheckpointInfo | None:
        since = client.applied_at(job, version) or seen.applied_iteration or 0
        rows = [row for row in client.checkpoints(job) if before.get(row.id) != row]
        return _requested_checkpoint(rows, lineage, since)

    desired, seen, row = _request(
        client, job, "checkpoint_request", "checkpoint requested", find,
        _is_in_progress, wait_seconds=None if no_wait else timeout, quiet=json,
    )  # fmt: skip
    if json:
        print_json({**acknowledgement(seen, desired), "checkpoint": row})
    if no_wait:
        return
    if row is not None and row.state == "durable":
        if not json:
            took = "" if row.persist_seconds is None else f", written in {seconds(row.persist_seconds)}"
            say(f"durable: {row.id}, {format_bytes(row.payload_bytes)}{took}")
    elif row is not None and not _is_in_progress(row):
        fail(f"the checkpoint at iteration {row.iteration} is {row.state}: {row.reason or 'no reason given'}")
    elif not seen.alive and not is_applied(seen, desired.version):
        fail(f"no checkpoint was taken: {job} is {seen.status}; repeat the request after its next start")
    elif not seen.alive:
        fail(f"{job} is {seen.status}; it did not report that the checkpoint became durable")
    else:
        progress = "not begun" if row is None else f"still {row.state}"
        fail(f"the checkpoint is {progress} after {timeout:g} s; see `holdfast show {job}`")


@with_client
def probe(
    client: Client, job: JobName, no_wait: NoWait = False, timeout: Timeout = 120.0, json: Json = False
) -> None:
    """Measure how long a batch takes to load and prepare, and suggest how to load faster.

    At the end of an iteration the job reads the next batches twice, for at most 10 seconds. Training waits, and
    then continues from the same place in the data. A checkpoint in progress is finished first.

    Example: holdfast probe char-gpt
    """
    before = max((notice.id for notice in client.notices(job)), default=0)

    def find(seen: JobSummary, version: int) -> NoticeInfo | None:
        """Return the first notice about data loading since the request."""
        since = (notice for notice in client.notices(job) if notice.code == PROBE_CODE and notice.id > before)
        return min(since, key=lambda notice: notice.id, default=None)

    desired, seen, answer = _request(
        client, job, "probe_request", "probe requested", find,
        lambda answer: answer is None, wait_seconds=None if no_wait else timeout, quiet=json,
    )  # fmt: skip
    if json:
        print_json({**acknowledgement(seen, desired), "answer": answer})
    if no_wait:
        return
    if answer is not None and answer.level == "info":
        if not json:
            say(*answer.message.split(". "))
    elif answer is not None:
        fail(answer.message)
    elif not seen.alive and not is_applied(seen, desired.version):
        fail(f"nothing was measured: {job} is {seen.status}; repeat the request after its next start")
    elif not seen.alive:
        fail(f"{job} is {seen.status}; it ended before it reported a result")
    else:
        fail(f"no result after {timeout:g} s; the notices on the job's page will show it")


def _request(
    client: Client,
    job: str,
    setting: str,
    done: str,
    find: Callable[[JobSummary, int], T | None],
    is_open: Callable[[T | None], bool],
    *,
    wait_seconds: float | None,
    quiet: bool,
) -> tuple[Desired, JobSummary, T | None]:
    """Request it, and return what `find` returns once that is not open, the job ended, or the time is up."""
    deadline = time.monotonic() + (wait_seconds or 0.0)
    desired = client.edit(job, **{setting: True})
    with _interruptible("the request stays open"):
        seen = wait_until_applied(client, job, desired.version, deadline - time.monotonic())
        if not quiet:
            say(f"{done}: {describe(seen, desired.version)}")
        if wait_seconds is None or not is_applied(seen, desired.version):
            return desired, seen, None
        while True:
            found = find(seen, desired.version)
            if not is_open(found) or not seen.alive or time.monotonic() >= deadline:
                return desired, seen, found
            time.sleep(POLL_SECONDS)
            seen = client.job(job)


def _is_in_progress(row: CheckpointInfo | None) -> bool:
    return row is None or row.state in ("snapshot", "persisting")


def _requested_checkpoint(rows: list[CheckpointInfo], lineage: int, iteration: int) -> CheckpointInfo | None:
    """Return the first requested checkpoint at or after an iteration, or on a lineage that began since."""
    after = [row for row in rows if row.lineage > lineage or row.iteration >= iteration]
    order = sorted(after, key=lambda row: (row.lineage, row.iteration))
    first = next((row for row in order if row.kind == "requested"), None)
    if first is not None and first.state == "torn":  # the job retakes it at once, possibly as a scheduled one
        again = (row for row in order if (row.lineage, row.iteration) > (first.lineage, first.iteration))
        return next(again, None)
    return first


@contextlib.contextmanager
def _interruptible(consequence: str) -> Iterator[None]:
    """End with a sentence when Ctrl-C interrupts the wait."""
    try:
        yield
    except KeyboardInterrupt:
        fail(f"no longer waiting; {consequence}")


# ---- a verification ----------------------------------------------------------------------------


@with_client
def verify(
    client: Client,
    job: JobName,
    checkpoint: Checkpoint,
    against: Annotated[
        str | None, typer.Option(metavar="CHECKPOINT", help="Also compare its tensors with this checkpoint.")
    ] = None,
    no_wait: NoWait = False,
    timeout: Timeout = 600.0,
    json: Json = False,
) -> None:
    """Verify a checkpoint: the job reads every byte back and compares it with its digests.

    The job reads slowly in the background while it trains. A job that is not running does so at its next start,
    and this command does not wait; `holdfast store verify` reads the store directly.

    Examples: holdfast verify char-gpt 1200  ·  holdfast verify char-gpt 1200 --against 1000
    """
    with suggest_nearest("verify", job, checkpoint):
        found = client.verify(job, checkpoint, against=against)
    alive = client.job(job).alive
    waited = alive and not no_wait
    deadline = time.monotonic() + (timeout if waited else 0.0)
    with _interruptible(f"the job still verifies {found.checkpoint}"):
        while found.open and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            found = client.verification(job, found.checkpoint)
    if json:
        print_json(found)
    name = found.checkpoint
    if found.open and waited:
        fail(f"{name} is not verified yet; the request stays open")
    if found.open:
        done = f"verification of {name} requested"
        done += "" if alive else f": {job} is not running and verifies it at its next start"
    elif found.state == "sound":
        done = f"{name} is sound: {format_bytes(found.read_bytes)} in {seconds(found.seconds)}, on {found.host}"
    else:
        state = "not verified" if found.state in ("failed", "cancelled") else found.state
        fail(f"{name} is {state}: {found.reason}")
    if not json:
        say(done)


# ---- a restore, an undo -------------------------------------------------------------------------


@with_client
def restore(
    client: Client,
    job: JobName,
    iteration: Annotated[int, typer.Argument(min=0, metavar="ITERATION", help="The iteration to restore.")],
    no_wait: NoWait = False,
    timeout: Timeout = 300.0,
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Expire the request after this time, as in 90min or 12h. [default: a week]"
        ),
    ] = None,
    nearest: Annotated[
        bool,
        typer.Option("--nearest", help="Restore the nearest earlier checkpoint if ITERATION has none."),
    ] = False,
    degraded: Annotated[
        bool,
        typer.Option(
            "--degraded",
            help="Accept a damaged checkpoint whose important bytes are left; approximate the lost low-order "
            "bytes.",
        ),
    ] = False,
    skip_batches: Annotated[
        int, typer.Option(metavar="N", min=0, help="Leave out the N batches after ITERATION.", show_default=False)
    ] = 0,
    skip_to: Annotated[
        int,
        typer.Option(
            metavar="ITERATION",
            min=0,
            help="Leave out the data of all iterations up to this one.",
            show_default=False,
        ),
    ] = 0,
    loader: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            min=0,
            help="With several loaders: the number of the one whose data to leave out, from 0.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Restore a job to its checkpoint at ITERATION; training continues from there.

    A running job restores in place at the end of its iteration. It first saves its current state, so that
    `holdfast undo` can return to it. A script that cannot be restored in place is restarted by `holdfast run`.
    Without a supervisor, and for a job that is not running, the restore happens at the next start, and this
    command does not wait. If there is no checkpoint at ITERATION, nothing changes and the command names the
    nearest earlier one; `--nearest` restores that one. `holdfast checkpoints JOB` lists the restorable
    checkpoints.

    With `--degraded`, the checkpoint may be damaged beyond repair if its parity can repair all important bytes:
    the lost low-order bytes of a number are replaced by the midpoint of their possible values. The lineage and all
    its checkpoints are then permanently marked inexact. `holdfast undo` returns to the state before.

    Training repeats the same data and reaches the same losses, unless you leave out data: `--skip-batches 200`
    leaves out the 200 batches of `session.batches` after ITERATION, `--skip-to 1423` those of all iterations up to
    1423. Iterations continue to count from ITERATION. `holdfast undo` also restores the previous position in the
    data.

    Example: holdfast restore char-gpt 1200 --skip-to 1423
    """
    expires_seconds = None
    if expires is not None:
        expires_seconds = parsed(lambda text: parse_positive_seconds(text, "expires"), expires)
    try:
        skip = skip_of(skip_batches, skip_to, iteration, loader)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    order = _request_restore(
        client, job, iteration, nearest=nearest, expires_seconds=expires_seconds, degraded=degraded, skip=skip
    )
    if not json and skip is None:
        _warn_of_same_losses(client, order)
    _follow(client, order, timeout, no_wait=no_wait, json=json)


@with_client
def undo(
    client: Client,
    job: JobName,
    no_wait: NoWait = False,
    timeout: Timeout = 300.0,
    json: Json = False,
) -> None:
    """Undo the last restore of a job: training continues from the state before it.

    An undo is a restore too, and can itself be undone.

    Example: holdfast undo char-gpt
    """
    last = next((each for each in client.orders(job) if each.state == "restored"), None)
    if last is None:
        fail(f"nothing to undo: {job} has no completed restore")
    _follow(client, client.undo_restore(job, last.id), timeout, no_wait=no_wait, json=json)


def _warn_of_same_losses(client: Client, order: Order) -> None:
    """Warn that the job will repeat a wrong loss if the restored checkpoint is from before it."""
    with contextlib.suppress(ServerError, UnreachableError):  # the restore goes on without this warning
        if repeats := client.preview_restore(order.job, order.checkpoint).repeats:
            complain(f"this restore goes back to before {repeats}: {SAME_LOSSES}")


def _follow(client: Client, order: Order, timeout: float, *, no_wait: bool, json: bool) -> None:
    """Follow a restore request to its end, unless the job needs another start for it."""
    job = order.job
    seen = client.job(job)
    waiting = seen.alive and seen.restore_mode != "next_start" and not no_wait
    if seen.alive and seen.restore_mode == "relaunch" and not json:
        say(f"{job} restarts for this restore: {seen.restore_reason}")
    try:
        for moved in client.follow(order, timeout_seconds=timeout) if waiting else ():
            order = moved
            if not json:
                say(_progress(order))
    except KeyboardInterrupt:
        fail(f"no longer waiting; request {order.id} stays {order.state}")
    if json:
        print_json(order)
    if not waiting:
        if not json:
            when = _when(seen)
            say(f"restore of {job} to iteration {order.iteration}: {order.state} (request {order.id}){when}")
    elif order.state in OPEN_ORDER_STATES:
        fail(f"still {order.state} after {timeout:g} s; request {order.id} stays open")
    elif order.state != "restored":
        fail(f"the restore of {job} to iteration {order.iteration} ended as {order.state}: {order.reason}")


def _when(seen: JobSummary) -> str:
    if not seen.alive:
        return f"; {seen.job} is {seen.status}: the restore happens at its next start"
    if seen.restore_mode == "next_start":
        return f"; the restore happens when you start the script again: {seen.restore_reason}"
    return ""


def _request_restore(client: Client, job: str, iteration: int, *, nearest: bool, **how: Any) -> Order:
    try:
        return client.restore(job, iteration, **how)
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
        complain(f"{missing}.")
        alternative = f", or {iteration} --nearest" if there <= iteration else ""
        fail(f"the {which} is at {there}: holdfast restore {job} {there}{alternative}")
    say(f"{missing}: restoring the {which}, {there}", error=True)
    return client.restore(job, there, **how)


def _progress(order: Order) -> str:
    line = f"{order.state:<10} {order.job} to iteration {order.iteration}"
    if order.state == "restored":
        took = "" if order.seconds is None else f" in {seconds(order.seconds)}"
        line += f"{took}, on lineage {order.new_lineage}"
        if order.safety_checkpoint:
            line += f"; the state before it is kept as {order.safety_checkpoint}"
    return line
