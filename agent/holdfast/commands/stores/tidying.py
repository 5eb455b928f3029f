"""`holdfast store gc` and `repair`: remove unneeded checkpoints, and records that block a job."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import msgspec
import typer

from holdfast.checkpoint import garbage_collection
from holdfast.checkpoint.garbage_collection import RemovableItem, RemovalPlan
from holdfast.client import NotFound
from holdfast.commands.console import EXIT_USAGE, asking, counted, fail, print_json, print_table
from holdfast.commands.options import DryRun, Json, OnlyJob, StorePath, Token, Yes
from holdfast.commands.stores.arguments import jobs_of, opened
from holdfast.config import Config
from holdfast.pacing.quantities import format_bytes
from holdfast.protocol.retention import Retention
from holdfast.store import Store

P = TypeVar("P", bound=RemovalPlan)

_KEEP = (
    "Approximate number of checkpoints to keep per job, as in holdfast.Session(keep=...): 12, or HOLDFAST_KEEP."
)
_RETENTION = "Rules instead of --keep, as in holdfast.Session(retention=...): 'last 5, every 1000, size 200GB'."
_SERVER = "The address of the server; checkpoints that its open restore requests name are kept."
_ENDED = "Assume that jobs on other machines have ended. A job that still runs there loses its records."
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
    rules = _rules(retention, keep)
    with opened(path) as store:
        jobs = jobs_of(store, _dropped_from(job, drop))
        wanted = _ordered(server, token, jobs) if server else {}
        plans = [garbage_collection.plan(store, name, rules, drop or (), wanted.get(name, ())) for name in jobs]
        _require_known(store, job, drop)
        ours = [each for each in plans if while_running or each.running is None]
        if not json:
            print_plans(plans, ours, "use --while-running to include it", dry_run=dry_run)
        if not dry_run and any(each.items for each in ours):
            if not yes:
                typer.confirm("Remove these?", abort=True)
            carry_out(ours, lambda each: garbage_collection.carry_out(store, each))
    if json:
        print_json([as_carried_out(each, each in ours) for each in plans])


def repair(
    path: StorePath,
    job: OnlyJob = None,
    ended: Annotated[bool, typer.Option("--ended", help=_ENDED)] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Remove records of attempts and lineages with implausible numbers, so that a job can take checkpoints again.

    A wrong number can come from another program that writes to the store. The command removes records of attempts,
    and of lineages without checkpoints, whose number is out of range or far above the previous number. Checkpoints
    and pins are kept. Jobs that run, or may run on another machine, are skipped.

    Examples: holdfast store repair checkpoints --dry-run  ·  holdfast store repair checkpoints --job char-gpt  ·
    holdfast store repair s3://bucket/checkpoints --ended --yes
    """
    if json and not (dry_run or yes):
        fail("--json does not ask for confirmation: use it with --dry-run or --yes", EXIT_USAGE)
    with opened(path) as store:
        plans = [garbage_collection.plan_repair(store, name, has_ended=ended) for name in jobs_of(store, job)]
        ours = [each for each in plans if each.running is None]
        if not json:
            print_plans(
                plans, ours, "end it first, or use --ended if it has ended on another machine", dry_run=dry_run
            )
            for each in ours:
                if each.pins is not None:
                    pins = counted(len(each.pins.checkpoints), "pin")
                    print(f"{each.job}: {pins} to be recorded again by attempt {each.newest_left}")
                for line in each.unrepairable:
                    print(f"{each.job}: {line}")
        if not dry_run and any(each.items or each.pins for each in ours):
            if not yes:
                typer.confirm("Repair this?", abort=True)
            carry_out(ours, lambda each: garbage_collection.repair(store, each))
    if json:
        print_json([as_carried_out(each, each in ours) for each in plans])


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


def _dropped_from(job: str | None, drop: list[str] | None) -> str | None:
    if drop and job is None:
        fail("--drop needs --job: jobs have checkpoints of the same names", EXIT_USAGE)
    return job


def _require_known(store: Store, job: str | None, drop: list[str] | None) -> None:
    if drop and job is not None:
        unknown = sorted(set(drop) - set(store.checkpoints(job)))
        if unknown:
            fail(f"{job} has no checkpoint {', '.join(unknown)}")


def carry_out(plans: list[P], remove: Callable[[P], None]) -> None:
    """Carry out the plans, and print what was removed, also after an error."""
    try:
        for each in plans:
            remove(each)
    finally:
        gone = [item for each in plans for item in each.items if item.removed]
        print(f"removed {counted(len(gone), 'item')}, {_sum(gone)}", file=sys.stderr)


def as_carried_out(planned: P, ours: bool) -> P:
    """Return a plan for JSON output, without items when its job is skipped."""
    return planned if ours else msgspec.structs.replace(planned, items=[])


def print_plans(plans: Sequence[RemovalPlan], ours: Sequence[RemovalPlan], remedy: str, *, dry_run: bool) -> None:
    """Print what is removed, and which jobs are skipped; `remedy` says how to include them."""
    for each in plans:
        if each not in ours:
            print(f"{each.job} {each.running}: skipped; {remedy}")
    rows = [(each.job, item.name, _size(item), item.why) for each in ours for item in each.items]
    if not rows:
        print("nothing to remove")
        return
    print_table(("JOB", "NAME", "SIZE", "WHY"), rows)
    items = [item for each in ours for item in each.items]
    stays = ", ".join(f"{each.job} keeps {counted(each.stays, 'checkpoint')}" for each in ours)
    print(f"\n{counted(len(items), 'item')}, {_sum(items)}{' would be removed' if dry_run else ''}; {stays}")


def _size(item: RemovableItem) -> str:
    return "-" if item.size_bytes is None else format_bytes(item.size_bytes)


def _sum(items: list[RemovableItem]) -> str:
    return format_bytes(sum(item.size_bytes or 0 for item in items))
