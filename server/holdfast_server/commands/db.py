"""`holdfast db`: the server's database: its size, copies of it, and how long it keeps what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from holdfast.pacing.quantities import parse_positive_seconds
from holdfast.protocol.questions import Kept, RetentionChanges
from holdfast_server.commands.database import Db, Json, fail, in_database, print_json, whoami
from holdfast_server.control import retention
from holdfast_server.core.settings import database_url, default_database
from holdfast_server.db import Database, backups
from holdfast_server.db.backups import in_words
from holdfast_server.models import DEFAULT_PROJECT

FOR_EVER = "forever"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="The server's database, on its machine: its size, copies of it, how long it keeps what.",
)

Project = Annotated[str, typer.Argument(metavar="PROJECT", help="Whose jobs it is about.")]


@app.command()
def size(db: Db = None, json: Json = False) -> None:
    """How large the database is."""
    try:
        found = backups.size_bytes(database_url(db or str(default_database())))
    except (RuntimeError, ValueError, OSError) as error:
        fail(str(error))
    print_json({"bytes": found}) if json else print(in_words(found))


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where the copy goes.")], db: Db = None
) -> None:
    """Copy all that is stored, as it is at this moment. The server may run meanwhile."""
    try:
        copied = backups.backup(database_url(db or str(default_database())), file.absolute())
    except (backups.CannotCopy, ValueError, OSError) as error:
        fail(str(error))
    print(f"Copied to {file} ({in_words(copied)}).")


@app.command("put-back")
def put_back(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A copy that `holdfast db backup` made.")],
    replace: Annotated[bool, typer.Option("--replace", help="Where there is a database, put it aside.")] = False,
    db: Db = None,
) -> None:
    """Make a copy the server's database again. Jobs stay where they are: `holdfast restore` takes those back."""
    try:
        kept = backups.put_back(database_url(db or str(default_database())), file.absolute(), replace=replace)
    except (RuntimeError, ValueError, OSError) as error:
        fail(str(error))
    print(f"{file} is the database now." + (f" The one before is kept in {kept}." if kept is not None else ""))


@app.command()
def keep(
    project: Project = DEFAULT_PROJECT,
    samples: Annotated[str | None, typer.Option(help="Thin older samples into roll-ups: 90d, or forever.")] = None,
    fine: Annotated[str | None, typer.Option(help="Thin older roll-ups into coarser ones.")] = None,
    reports: Annotated[
        str | None, typer.Option(help="Forget older stalls, notices, figures of pacing, and alerts that are over.")
    ] = None,
    samples_size: Annotated[str | None, typer.Option(help="Thin the oldest samples beyond this: 20GB.")] = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """How long a project keeps what its jobs report. Without options it tells; what was never set is kept."""
    try:
        changes = RetentionChanges(
            samples_seconds=_seconds("--samples", samples),
            fine_seconds=_seconds("--fine", fine),
            reports_seconds=_seconds("--reports", reports),
            samples_bytes=_bytes(samples_size),
        )
    except ValueError as error:
        fail(str(error))

    async def work(database: Database, now: float) -> Kept:
        if changes == RetentionChanges():
            return await retention.kept(database, project)
        return await retention.change(database, project, changes, who=whoami(), request_id="", now=now)

    kept = in_database(db, work)
    if json:
        print_json(kept)
        return
    for name, label in _LABELS.items():
        value = getattr(kept, name)
        words = (
            FOR_EVER if value is None else in_words(value) if name.endswith("_bytes") else f"{value / 86400:g} d"
        )
        print(f"{label:<34}{words}")


_LABELS = {
    "samples_seconds": "samples",
    "fine_seconds": "roll-ups of 64 iterations",
    "reports_seconds": "stalls, notices, pacing, alerts",
    "samples_bytes": "samples, at most",
    "stored_bytes": "samples, now",
}


def _seconds(name: str, text: str | None) -> float | msgspec.UnsetType | None:
    if text is None:
        return msgspec.UNSET
    return None if text == FOR_EVER else parse_positive_seconds(text, name)


def _bytes(text: str | None) -> int | msgspec.UnsetType | None:
    if text is None:
        return msgspec.UNSET
    if text == FOR_EVER:
        return None
    for unit, factor in _UNITS.items():
        number = text.upper().removesuffix(unit).strip()
        if number != text.upper() and number.replace(".", "", 1).isdigit():
            return int(float(number) * factor)
    raise ValueError(f"{text!r} is no size: give 500MB, 20GB or {FOR_EVER}")
