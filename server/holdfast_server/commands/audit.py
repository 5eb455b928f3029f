"""`holdfast audit`: who changed what, and whether the log is as it was written."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.protocol.administration import AuditEntry
from holdfast_server.commands.database import (
    EXIT_REFUSED,
    EXIT_USAGE,
    Db,
    Json,
    fail,
    in_database,
    moment,
    print_json,
    print_table,
)
from holdfast_server.db import Database
from holdfast_server.records import audit

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="The audit log of a server: on its machine.",
)


@app.command("list")
def list_entries(
    who: Annotated[str, typer.Option(help="Only what they did.")] = "",
    action: Annotated[str, typer.Option(help="Only this, or what begins with this word: key, restore.")] = "",
    job: Annotated[str, typer.Option(help="Only about this job.")] = "",
    project: Annotated[str, typer.Option(help="Only about this project.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="The newest so many.")] = 50,
    db: Db = None,
    json: Json = False,
) -> None:
    """Who changed what, the newest first."""
    question = audit.Question(who=who, action=action, job=job, project=project)

    async def work(database: Database, _: float) -> list[AuditEntry]:
        async with database.read() as session:
            return await audit.entries(session, question, limit=limit)

    rows = in_database(db, work)
    if json:
        print_json({"entries": rows})
        return
    table = [
        (
            str(row.id), moment(row.at), row.who, row.action, row.job or row.project or "",
            _printable(row.before), _printable(row.after),
        )
        for row in rows
    ]  # fmt: skip
    print_table(("row", "when", "who", "what", "about", "before", "after"), table)


@app.command()
def verify(
    known: Annotated[
        str | None,
        typer.Option(metavar="ROW:DIGEST", help="What an earlier run printed: that row has to be there still."),
    ] = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Go through the whole log, and name the first row that is not as it was written.

    Whoever can write to the database can write the whole log anew. Keep what this prints somewhere else, and give
    it back with --known: a log that was rewritten does not hold that row any more.
    """
    row, digest = _known(known)

    async def work(database: Database, _: float) -> audit.Verdict:
        async with database.read() as session:
            return await audit.verify(session, known=(row, digest) if row else None)

    found = in_database(db, work)
    if json:
        print_json(found)
    elif found.broken is not None:
        print(f"Row {found.broken} does not fit: {found.reason}. The {found.rows} rows before it do.")
    else:
        print(f"All {found.rows} rows fit. Keep this: {found.rows}:{found.head}")
    if found.broken is not None:
        raise typer.Exit(EXIT_REFUSED)


def _known(text: str | None) -> tuple[int, bytes]:
    if text is None:
        return 0, b""
    row, _, digest = text.partition(":")
    try:
        return int(row), bytes.fromhex(digest)
    except ValueError:
        fail(
            f"--known {text!r}: give what an earlier `holdfast audit verify` printed, as in 120:9f86d0…",
            EXIT_USAGE,
        )


def _printable(text: str | None) -> str:
    # what somebody named something is not to move the cursor of whoever reads the log
    return "" if text is None else "".join(letter if letter.isprintable() else "?" for letter in text)
