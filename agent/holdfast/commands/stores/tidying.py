"""`holdfast store gc` and `repair`: remove what nothing needs, and records that keep a job from going on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import msgspec
import typer

from holdfast.checkpoint import garbage_collection
from holdfast.checkpoint.garbage_collection import Item, Plan
from holdfast.client import NotFound
from holdfast.commands.console import EXIT_USAGE, asking, counted, fail, print_json, print_table, size
from holdfast.commands.options import DryRun, Json, OnlyJob, StorePath, Token, Yes
from holdfast.commands.stores.arguments import jobs_of, opened
from holdfast.config import Config
from holdfast.protocol.retention import Retention
from holdfast.store import Store

P = TypeVar("P", bound=Plan)

_KEEP = "About how many checkpoints of each job stay, as in holdfast.Session(keep=...): 12, or HOLDFAST_KEEP."
_RETENTION = "Rules in its place, as in holdfast.Session(retention=...): 'last 5, every 1000, size 200GB'."
_SERVER = "Where the jobs' server is: what its open orders name stays."
_ENDED = "The jobs have ended on other machines, too. One that still runs there loses its records."
_WHILE_RUNNING = "Also jobs that run or may run. Restoring what is removed fails; nothing else is disturbed."


def gc(
    path: StorePath,
    job: OnlyJob = None,
    keep: Annotated[int | None, typer.Option(min=1, help=_KEEP)] = None,
    retention: Annotated[str | None, typer.Option(help=_RETENTION)] = None,
    drop: Annotated[list[str] | None, typer.Option(help="This checkpoint goes; needs --job. Repeatable.")] = None,
    while_running: Annotated[bool, typer.Option("--while-running", help=_WHILE_RUNNING)] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    server: Annotated[str | None, typer.Option(envvar="HOLDFAST_SERVER", help=_SERVER)] = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Remove checkpoints that the retention rules do not keep, and leftovers of crashes and damage.

    A running session does this by itself after each checkpoint, so a job that runs is passed over. What is never
    removed, unless you name it: what is pinned, the one a restart goes on from, where lineages began, what the
    last three restores left, the newest eight that somebody asked for by hand, what an open order of --server
    names.

    Examples: holdfast store gc checkpoints --dry-run  ·  holdfast store gc checkpoints --job char-gpt --keep 4  ·
    holdfast store gc checkpoints --retention "last 5, every 1000, size 200GB"
    """
    if json and not (dry_run or yes):
        fail("--json cannot ask: give --dry-run or --yes with it", EXIT_USAGE)
    rules = _rules(retention, keep)
    with opened(path) as store:
        jobs = jobs_of(store, _dropped_from(job, drop))
        wanted = _ordered(server, token, jobs) if server else {}
        plans = [garbage_collection.plan(store, name, rules, drop or (), wanted.get(name, ())) for name in jobs]
        _require_known(store, job, drop)
        ours = [each for each in plans if while_running or each.running is None]
        if not json:
            print_plans(plans, ours, "--while-running includes it", dry_run=dry_run)
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
    """Remove records of attempts and lineages with implausible numbers, so that a job takes checkpoints again.

    A wrong number can reach a store from a server that an older agent believed, or from whoever else can write to
    it. Removed are attempts, and lineages without checkpoints, whose number is out of range or far beyond those
    before it. No checkpoint is touched, and pins stay. A job that runs, or may run on another machine, is passed
    over.

    Examples: holdfast store repair checkpoints --dry-run  ·  holdfast store repair checkpoints --job char-gpt  ·
    holdfast store repair s3://bucket/checkpoints --ended --yes
    """
    if json and not (dry_run or yes):
        fail("--json cannot ask: give --dry-run or --yes with it", EXIT_USAGE)
    with opened(path) as store:
        plans = [garbage_collection.plan_repair(store, name, has_ended=ended) for name in jobs_of(store, job)]
        ours = [each for each in plans if each.running is None]
        if not json:
            print_plans(plans, ours, "end it first; --ended says that it has on another machine", dry_run=dry_run)
            for each in ours:
                if each.pins is not None:
                    pins = counted(len(each.pins.checkpoints), "pin")
                    print(f"{each.job}: {pins} to be noted again, as attempt {each.newest_left}")
                for line in each.unmended:
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
    """What open orders name. A server that does not answer ends the command: it may hold one."""
    found = {}
    with asking(server, token) as client:
        for job in jobs:
            with contextlib.suppress(NotFound):
                order = client.job(job).open_order
                found[job] = [order.checkpoint] if order is not None else []
    return found


def _dropped_from(job: str | None, drop: list[str] | None) -> str | None:
    if drop and job is None:
        fail("--drop needs --job: names of checkpoints are the same in every job", EXIT_USAGE)
    return job


def _require_known(store: Store, job: str | None, drop: list[str] | None) -> None:
    if drop and job is not None:
        unknown = sorted(set(drop) - set(store.checkpoints(job)))
        if unknown:
            fail(f"{job} has no checkpoint {', '.join(unknown)}")


def carry_out(plans: list[P], remove: Callable[[P], None]) -> None:
    """Do what was planned; what was removed is printed even if that ends with an error."""
    try:
        for each in plans:
            remove(each)
    finally:
        gone = [item for each in plans for item in each.items if item.removed]
        print(f"removed {counted(len(gone), 'item')}, {_sum(gone)}", file=sys.stderr)


def as_carried_out(planned: P, ours: bool) -> P:
    """A plan as printed for scripts: without items where its job was passed over."""
    return planned if ours else msgspec.structs.replace(planned, items=[])


def print_plans(plans: Sequence[Plan], ours: Sequence[Plan], way_in: str, *, dry_run: bool) -> None:
    """What would go, and which jobs are passed over: `way_in` says how they would not be."""
    for each in plans:
        if each not in ours:
            print(f"{each.job} {each.running}: passed over; {way_in}")
    rows = [(each.job, item.name, _size(item), item.why) for each in ours for item in each.items]
    if not rows:
        print("nothing to remove")
        return
    print_table(("JOB", "NAME", "SIZE", "WHY"), rows)
    items = [item for each in ours for item in each.items]
    stays = ", ".join(f"{each.job} keeps {counted(each.stays, 'checkpoint')}" for each in ours)
    print(f"\n{counted(len(items), 'item')}, {_sum(items)}{' would go' if dry_run else ''}; {stays}")


def _size(item: Item) -> str:
    return "-" if item.size_bytes is None else size(item.size_bytes)


def _sum(items: list[Item]) -> str:
    return size(sum(item.size_bytes or 0 for item in items))
