"""The command `report`: what happened to a job or to the fleet over some hours."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast.client import Client
from holdfast.commands.console import print_json, print_table, say, with_client
from holdfast.commands.options import Json
from holdfast.protocol.report import Report, cost_text, gpu_hours, outcome_text
from holdfast.units import duration, share

SHOWN = 20
"""Rows of a list as text."""


@with_client
def report(
    client: Client,
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="The job. Default: all jobs.")] = None,
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="How far back, as in 12h or 7d; at most 31 days.")
    ] = "12h",
    project: Annotated[
        str | None, typer.Option("--project", metavar="PROJECT", help="Without JOB: only jobs of this project.")
    ] = None,
    json: Json = False,
) -> None:
    """Report on the last hours: what needs a decision, what failed and its cost, and who did what.

    Example: holdfast report --since 12h
    """
    found = client.report(job, since=since, project=project)
    if json:
        print_json(found)
        return
    say(f"{duration(found.ends_at - found.begins_at)} until {_stamp(found.ends_at)}: {found.headline}")
    for sentence in found.omissions:
        say(f"{sentence}.")
    _print_decisions(found)
    _print_failures(found)
    _print_actions(found)
    _print_time(found)


def _print_decisions(found: Report) -> None:
    if found.decisions:
        say("", f"NEEDS A DECISION ({len(found.decisions)})")
        for row in found.decisions[:SHOWN]:
            step = f". {row.verdict.next_step}" if row.verdict.next_step else ""
            say(f"  {row.job}: {row.verdict.text}{step}")
        _print_more(len(found.decisions))


def _print_failures(found: Report) -> None:
    if found.failures:
        say("", f"FAILURES ({found.failures_total})")
        for row in found.failures[:SHOWN]:
            times = f"{row.count} × " if row.count > 1 else ""
            say(
                f"  {row.job}: {times}{row.cause} at {row.iteration}, {_clock(row.at)}; {gpu_hours(row.gpu_hours)}"
            )
            say(f"    {cost_text(row)}; {outcome_text(row)}")
        _print_more(len(found.failures))


def _print_actions(found: Report) -> None:
    if found.actions:
        say("", f"DONE ({found.actions_total})")
        for row in found.actions[:SHOWN]:
            say(f"  {_clock(row.at)} {row.job}: {row.text}, by {row.actor}")
        _print_more(found.actions_total)


def _print_time(found: Report) -> None:
    if found.projects:
        say("", "TIME")
        header = ("PROJECT", "JOBS", "FAILURES", "GPU-HOURS", "PRODUCTIVE", "LOST", "DOWN")
        rows = [
            (
                row.project,
                str(row.jobs),
                str(row.failures),
                f"{row.gpu_hours:,.1f}",
                *(
                    share(row.buckets[name] / row.gpu_hours) if row.gpu_hours else "-"
                    for name in ("productive", "lost", "down")
                ),
            )
            for row in found.projects
        ]
        print_table(header, rows)


def _print_more(count: int) -> None:
    if count > SHOWN:
        say(f"  and {count - SHOWN:,} more: --json lists them")


def _stamp(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _clock(at: float) -> str:
    return time.strftime("%a %H:%M", time.localtime(at))
