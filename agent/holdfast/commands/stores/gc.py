"""`holdfast store gc`: remove checkpoints that no rule keeps, and leftovers."""

from __future__ import annotations

import contextlib
from typing import Annotated

import msgspec
import typer

from holdfast.checkpoint import garbage_collection
from holdfast.checkpoint.garbage_collection import RemovableItem, RemovalPlan
from holdfast.client import NotFound
from holdfast.commands.console import (
    EXIT_REFUSED,
    EXIT_USAGE,
    asking,
    complain,
    counted,
    fail,
    print_json,
    print_table,
    say,
)
from holdfast.commands.options import DryRun, Json, OnlyJob, StorePath, Token, Yes
from holdfast.commands.stores.arguments import for_each_job, jobs_of, opened, reason
from holdfast.config import Config
from holdfast.errors import HoldfastError
from holdfast.retention import Retention
from holdfast.store import Store
from holdfast.units import format_bytes

_KEEP = (
    "Approximate number of checkpoints to keep per job, as in holdfast.Session(keep=...): 12, or HOLDFAST_KEEP."
)
_RETENTION = "Rules instead of --keep, as in holdfast.Session(retention=...): 'last 5, every 1000, size 200GB'."
_SERVER = "The address of the server; checkpoints that its open restore requests name are kept."
_WHILE_RUNNING = "Include jobs that run or may run. Only restores of removed checkpoints are affected."


def gc(
    path: StorePath,
    job: OnlyJob = None,
    keep: Annotated[int | None, typer.Option(min=1, help=_KEEP)] = None,
    retention: Annotated[str | None, typer.Option(help=_RETENTION)] = None,
    drop: Annotated[
        list[str] | None, typer.Option(help="Remove this checkpoint; needs --job. Repeatable.")
    ] = None,
    while_running: Annotated[bool, typer.Option("--while-running", help=_WHILE_RUNNING)] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    server: Annotated[str | None, typer.Option(envvar="HOLDFAST_SERVER", help=_SERVER)] = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Remove checkpoints that the retention rules do not keep, and leftovers of crashes and damage.

    A running session does this after each checkpoint, so running jobs are skipped. These are removed only with
    --drop: pinned checkpoints, the one that a restart resumes from, the first ones of lineages, the states that
    the last three restores replaced, the newest eight taken on request, and those in open restore requests of
    --server.

    Examples: holdfast store gc checkpoints --dry-run  ·  holdfast store gc checkpoints --job char-gpt --keep 4  ·
    holdfast store gc checkpoints --retention "last 5, every 1000, size 200GB"
    """
    if json and not (dry_run or yes):
        fail("--json does not ask for confirmation: use it with --dry-run or --yes", EXIT_USAGE)
    if drop and job is None:
        fail("--drop needs --job: different jobs have checkpoints with the same names", EXIT_USAGE)
    rules = _rules(retention, keep)
    with opened(path) as store:
        wanted = _ordered(server, token, jobs_of(store, job)) if server else {}
        plans, has_failed = for_each_job(
            *(store, job),
            lambda name: garbage_collection.plan(store, name, rules, drop or (), wanted.get(name, ())),
        )
        if job is not None and (unknown := sorted(set(drop or ()) - set(store.checkpoints(job)))):
            fail(f"{job} has no checkpoint {', '.join(unknown)}")
        ours = [each for each in plans if while_running or each.running is None]
        if not json:
            _print_plans(plans, ours, dry_run=dry_run)
        if not dry_run and any(each.items for each in ours):
            if not yes:
                typer.confirm("Remove these?", abort=True)
            has_failed |= _carry_out(store, ours)
    if json:
        print_json([each if each in ours else msgspec.structs.replace(each, items=[]) for each in plans])
    if has_failed:
        raise typer.Exit(EXIT_REFUSED)


def _rules(retention: str | None, keep: int | None) -> Retention:
    try:
        return Config.from_arguments_and_environment(retention=retention, keep=keep).retention_rules
    except ValueError as error:
        fail(str(error), EXIT_USAGE)


def _ordered(server: str, token: str | None, jobs: list[str]) -> dict[str, list[str]]:
    """Return the checkpoints that open restore requests name. Exits when the server does not answer."""
    found = {}
    with asking(server, token) as client:
        for job in jobs:
            with contextlib.suppress(NotFound):
                order = client.job(job).open_order
                found[job] = [order.checkpoint] if order is not None else []
    return found


def _carry_out(store: Store, plans: list[RemovalPlan]) -> bool:
    """Carry out the plans, print what was removed, and return whether something was not."""
    has_failed = False
    try:
        for each in plans:
            try:
                garbage_collection.carry_out(store, each)
            except (HoldfastError, OSError) as error:
                complain(f"{each.job}: {reason(error) if isinstance(error, OSError) else error}")
                has_failed = True
    finally:
        gone = [item for each in plans for item in each.items if item.removed]
        say(f"removed {counted(len(gone), 'item')}, {_sum(gone)}", error=True)
    return has_failed


def _print_plans(plans: list[RemovalPlan], ours: list[RemovalPlan], *, dry_run: bool) -> None:
    """Print what is removed, and which jobs are skipped."""
    for each in plans:
        if each not in ours:
            say(f"{each.job} {each.running}: skipped; use --while-running to include it")
    rows = [(each.job, item.name, _size(item), item.why) for each in ours for item in each.items]
    if not rows:
        say("nothing to remove")
        return
    print_table(("JOB", "NAME", "SIZE", "WHY"), rows)
    items = [item for each in ours for item in each.items]
    stays = ", ".join(f"{each.job} keeps {counted(each.stays, 'checkpoint')}" for each in ours)
    say("", f"{counted(len(items), 'item')}, {_sum(items)}{' would be removed' if dry_run else ''}; {stays}")


def _size(item: RemovableItem) -> str:
    return "-" if item.size_bytes is None else format_bytes(item.size_bytes)


def _sum(items: list[RemovableItem]) -> str:
    return format_bytes(sum(item.size_bytes or 0 for item in items))
