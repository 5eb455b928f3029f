"""`holdfast db`: the size of the server's database, backups, and limits on what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer

from holdfast.protocol.analyses import ReportRetention, ReportRetentionChanges
from holdfast.units import format_bytes, parse_bytes, parse_positive_seconds
from holdfast_server.commands.database import Db, Json, command_group, fail, in_database, print_json, whoami
from holdfast_server.control import report_retention
from holdfast_server.core.settings import database_url, default_database
from holdfast_server.db import Database, backups
from holdfast_server.models import DEFAULT_PROJECT

FOR_EVER = "forever"

T = TypeVar("T")

app = command_group(
    "Manage the server's database, on its machine: size, backup, restore and limits on stored data."
)

Project = Annotated[str, typer.Argument(metavar="PROJECT", help="The project whose jobs the limits apply to.")]


@app.command()
def size(db: Db = None, json: Json = False) -> None:
    """Print the size of the database."""
    try:
        found = backups.size_bytes(database_url(db or str(default_database())))
    except (RuntimeError, ValueError, OSError) as error:
        fail(str(error))
    print_json({"bytes": found}) if json else print(format_bytes(found))


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to create.")], db: Db = None
) -> None:
    """Back up the database. The server may run meanwhile."""
    try:
        copied = backups.backup(database_url(db or str(default_database())), file.absolute())
    except (backups.CannotCopy, ValueError, OSError) as error:
        fail(str(error))
    print(f"Copied to {file} ({format_bytes(copied)}).")


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A backup that `holdfast db backup` made.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an existing database, and keep it under another name.")
    ] = False,
    db: Db = None,
) -> None:
    """Restore the server's database from a backup. To restore a job to a checkpoint, use `holdfast restore`."""
    try:
        kept = backups.put_back(database_url(db or str(default_database())), file.absolute(), replace=replace)
    except (RuntimeError, ValueError, OSError) as error:
        fail(str(error))
    print(f"Restored from {file}." + (f" The previous database is in {kept}." if kept is not None else ""))


@app.command()
def keep(
    project: Project = DEFAULT_PROJECT,
    samples: Annotated[
        str | None, typer.Option(help="Downsample older samples to roll-ups: 90d, or forever.")
    ] = None,
    fine: Annotated[str | None, typer.Option(help="Downsample older roll-ups to coarser ones.")] = None,
    reports: Annotated[
        str | None, typer.Option(help="Delete older stalls, notices, interval decisions and resolved alerts.")
    ] = None,
    samples_size: Annotated[
        str | None, typer.Option(help="Downsample the oldest samples beyond this size: 20GB.")
    ] = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Set or, without options, print how long a project keeps its data. Without limits, it keeps everything."""
    try:
        changes = ReportRetentionChanges(
            samples_seconds=_limit(parse_positive_seconds, "--samples", samples),
            fine_seconds=_limit(parse_positive_seconds, "--fine", fine),
            reports_seconds=_limit(parse_positive_seconds, "--reports", reports),
            samples_bytes=_limit(_whole_bytes, "--samples-size", samples_size),
        )
    except ValueError as error:
        fail(str(error))

    def work(database: Database, now: float) -> ReportRetention:
        if changes == ReportRetentionChanges():
            return report_retention.get_settings(database, project)
        return report_retention.change(database, project, changes, who=whoami(), now=now)

    kept = in_database(db, work)
    if json:
        print_json(kept)
        return
    for name, label in _LABELS.items():
        value = getattr(kept, name)
        words = FOR_EVER
        if value is not None:
            words = format_bytes(value) if name.endswith("_bytes") else f"{value / 86400:g} d"
        print(f"{label:<34}{words}")


_LABELS = {
    "samples_seconds": "samples",
    "fine_seconds": "roll-ups of 64 iterations",
    "reports_seconds": "stalls, notices, decisions, alerts",
    "samples_bytes": "samples, size limit",
    "stored_bytes": "samples, current size",
}


def _limit(parse: Callable[[str, str], T], name: str, text: str | None) -> T | msgspec.UnsetType | None:
    if text is None:
        return msgspec.UNSET
    return None if text == FOR_EVER else parse(text, name)


def _whole_bytes(text: str, name: str) -> int:
    return int(parse_bytes(text, name))
