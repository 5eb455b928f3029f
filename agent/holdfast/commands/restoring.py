"""`holdfast restore` and `holdfast undo`: the one-click restore, from a terminal, and back."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from holdfast.client import Client, JobSummary, Order, ServerError
from holdfast.commands.console import (
    DEFAULT_SERVER,
    EXIT_USAGE,
    JobName,
    Json,
    NoWait,
    Server,
    Token,
    asking,
    fail,
    print_json,
    seconds,
)
from holdfast.pacing.quantities import parse_positive_seconds
from holdfast.protocol import OPEN_ORDER_STATES


def restore(
    job: JobName,
    iteration: Annotated[int, typer.Argument(min=0, metavar="ITERATION", help="The iteration to restore.")],
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    no_wait: NoWait = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for the restore; the request stays open.")
    ] = 300.0,
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
    expires_seconds = None if expires is None else _spell_seconds(expires)
    with asking(server, token) as client:
        order = _order(client, job, iteration, expires_seconds, nearest=nearest)
        _carry_out(client, order, timeout, no_wait=no_wait, json=json)


def undo(
    job: JobName,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    no_wait: NoWait = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for the restore; the request stays open.")
    ] = 300.0,
    json: Json = False,
) -> None:
    """Undo the last restore of a job: training continues from the state that the restore left.

    An undo is a restore too, and can itself be undone.

    Example: holdfast undo char-gpt
    """
    with asking(server, token) as client:
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
    if waiting:
        order = _follow(client, order, timeout, quiet=json)
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


def _spell_seconds(expires: str) -> float:
    try:
        return parse_positive_seconds(expires, "expires")
    except ValueError as error:
        fail(str(error), EXIT_USAGE)


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


def _follow(client: Client, order: Order, timeout_seconds: float, *, quiet: bool) -> Order:
    try:
        for moved in client.follow(order, timeout_seconds=timeout_seconds):
            order = moved
            if not quiet:
                print(_progress(order), flush=True)
    except KeyboardInterrupt:
        fail(f"no longer waiting; the order {order.id} stays {order.state}")
    return order


def _progress(order: Order) -> str:
    line = f"{order.state:<10} {order.job} to iteration {order.iteration}"
    if order.state == "restored":
        took = "" if order.seconds is None else f" in {seconds(order.seconds)}"
        line += f"{took}, on lineage {order.new_lineage}"
        if order.safety_checkpoint:
            line += f"; the state left behind is kept as {order.safety_checkpoint}"
    return line
