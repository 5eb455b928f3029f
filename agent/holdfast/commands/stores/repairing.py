"""`holdfast store repair`: remove records whose numbers keep a job from taking checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast import tidying
from holdfast.commands.console import EXIT_USAGE, Json, counted, fail, print_json
from holdfast.commands.stores.asking import OfJob, Where, jobs_of, opened
from holdfast.commands.stores.tidying import as_carried_out, carry_out, print_plans

_ENDED = "The jobs have ended on other machines, too. One that still runs there loses its records."


def repair(
    path: Where,
    job: OfJob = None,
    ended: Annotated[bool, typer.Option("--ended", help=_ENDED)] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
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
        plans = [tidying.plan_repair(store, name, has_ended=ended) for name in jobs_of(store, job)]
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
            carry_out(ours, lambda each: tidying.repair(store, each))
    if json:
        print_json([as_carried_out(each, each in ours) for each in plans])
