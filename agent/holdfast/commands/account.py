"""The command `account`: what GPU time and storage went into, and what was lost."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast.client import Client
from holdfast.commands.console import print_json, print_table, say, with_client
from holdfast.commands.options import Json, Labels, as_label_filters
from holdfast.protocol.account import IDLE_RULE, LOSS_CAUSES, SAVED_RULE, Account, AccountKey, AccountWindow, money
from holdfast.protocol.report import gpu_hours
from holdfast.units import format_bytes, share

SHOWN = 20
"""Rows of a table as text."""


@with_client
def account(
    client: Client,
    since: Annotated[AccountWindow, typer.Option("--since", help="The window, which ends now.")] = "24h",
    by: Annotated[AccountKey, typer.Option("--by", help="What to group rows by.")] = "project",
    project: Annotated[
        str | None, typer.Option("--project", metavar="PROJECT", help="Only jobs of this project.")
    ] = None,
    owner: Annotated[str | None, typer.Option("--owner", metavar="OWNER", help="Only jobs of this owner.")] = None,
    label: Labels = None,
    store: Annotated[
        str | None, typer.Option("--store", metavar="ADDRESS", help="Only jobs that write to this store.")
    ] = None,
    json: Json = False,
) -> None:
    """Show GPU-hours that were productive, lost by cause, unsaved and saved, and what the stores hold.

    Example: holdfast account --since 7d --by owner
    """
    labels = ", ".join(as_label_filters(label)) or None
    found = client.reports.account(since, by=by, project=project, owner=owner, label=labels, store=store)
    if json:
        print_json(found)
        return
    if found.accounted_at is None and not found.rows:
        say("No figures yet: the server computes them every 5 minutes.")
        return
    say(f"{_stamp(found.begins_at)} to {_stamp(found.accounted_at or found.ends_at)}: {headline(found)}")
    _print_rows(found)
    _print_stores(found)
    say("", f"{SAVED_RULE}.", f"{IDLE_RULE}.")


def headline(found: Account) -> str:
    """Return the account in one sentence."""
    total = found.total
    parts = [gpu_hours(total.gpu_hours)]
    if total.gpu_hours:
        parts.append(f"{share(total.productive_gpu_hours / total.gpu_hours)} productive")
        causes = sorted(total.lost_gpu_hours.items(), key=lambda item: -item[1])
        lost = ", ".join(f"{cause} {gpu_hours(hours)}" for cause, hours in causes if hours > 0)
        parts.append(f"lost to {lost}" if lost else "nothing lost")
    parts.append(f"{gpu_hours(total.unsaved_gpu_hours)} unsaved now")
    if total.saved_gpu_hours:
        parts.append(f"about {gpu_hours(total.saved_gpu_hours)} saved by checkpoints")
    if total.cost is not None and total.lost_cost is not None:
        parts.append(f"{money(total.lost_cost, found.currency)} of {money(total.cost, found.currency)} lost")
    return "; ".join(parts)


def _print_rows(found: Account) -> None:
    if not found.rows:
        return
    header = (found.by.upper(), "JOBS", "GPU-HOURS", "PRODUCTIVE", *(cause.upper() for cause in LOSS_CAUSES))
    rows = [
        (
            row.name or "-",
            str(row.jobs),
            f"{row.gpu_hours:,.1f}",
            share(row.productive_gpu_hours / row.gpu_hours) if row.gpu_hours else "-",
            *(f"{hours:,.1f}" for hours in row.lost_gpu_hours.values()),
            f"{row.unsaved_gpu_hours:,.1f}",
            f"~{row.saved_gpu_hours:,.1f}",
        )
        for row in found.rows[:SHOWN]
    ]
    say("")
    print_table((*header, "UNSAVED", "SAVED"), rows)
    if found.rows_total > SHOWN:
        say(f"  and {found.rows_total - SHOWN:,} more: --json lists them")


def _print_stores(found: Account) -> None:
    stores = [row for row in found.stores if row.store]
    if not stores:
        return
    say("")
    rows = [
        (
            row.store,
            row.host or "-",
            str(row.jobs),
            f"{'~' * row.is_estimate}{format_bytes(row.stored_bytes)}",
            f"{format_bytes(row.written_bytes_per_hour)}/h",
            free_space(row.free_bytes, row.total_bytes),
            "-" if row.days_until_full is None else f"~{row.days_until_full:,.0f} d",
        )
        for row in stores[:SHOWN]
    ]
    print_table(("STORE", "HOST", "JOBS", "STORED", "WRITTEN", "FREE", "FULL IN"), rows)


def free_space(free_bytes: int | None, total_bytes: int | None) -> str:
    total = "" if total_bytes is None else f" of {format_bytes(total_bytes)}"
    return "-" if free_bytes is None else format_bytes(free_bytes) + total


def _stamp(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
