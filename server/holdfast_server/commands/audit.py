"""`holdfast audit`: list the audit log, and verify that it was not changed."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.protocol.administration import AuditEntry
from holdfast_server.commands.database import (
    EXIT_REFUSED,
    EXIT_USAGE,
    Db,
    Json,
    command_group,
    fail,
    in_database,
    moment,
    print_json,
    print_rows,
)
from holdfast_server.db import Database
from holdfast_server.records import audit

app = command_group("List and verify the audit log of a server, on its machine.")


@app.command("list")
def list_entries(
    who: Annotated[str, typer.Option(help="Only changes by this user or key.")] = "",
    action: Annotated[
        str, typer.Option(help="Only this action, or all that begin with this word: key, restore.")
    ] = "",
    job: Annotated[str, typer.Option(help="Only changes of this job.")] = "",
    project: Annotated[str, typer.Option(help="Only changes of this project.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Number of rows.")] = 50,
    db: Db = None,
    json: Json = False,
) -> None:
    """List changes, newest first."""
    question = audit.AuditQuery(who=who, action=action, job=job, project=project)

    def work(database: Database, _: float) -> list[AuditEntry]:
        with database.read() as session:
            return audit.entries(session, question, limit=limit)

    rows = in_database(db, work)
    print_rows(
        rows, name="entries", json=json, header=("row", "when", "who", "what", "about", "before", "after"),
        cells=lambda row: (
            str(row.id), moment(row.at), row.who, row.action, row.job or row.project or "",
            _printable(row.before), _printable(row.after),
        ),
    )  # fmt: skip


@app.command()
def verify(
    known: Annotated[
        str | None,
        typer.Option(metavar="ROW:DIGEST", help="Output of an earlier run: that row must still exist."),
    ] = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Verify the digests of the whole log, and print the first row that was changed, moved or removed.

    A user who can write to the database can rewrite the whole log. Store the output of this command elsewhere and
    pass it with --known later: a rewritten log does not contain that row.
    """
    row, digest = _known(known)

    def work(database: Database, _: float) -> audit.ChainCheck:
        with database.read() as session:
            return audit.verify(session, known=(row, digest) if row else None)

    found = in_database(db, work)
    if json:
        print_json(found)
    elif found.broken is not None:
        print(f"Row {found.broken} is not valid: {found.reason}. The {found.rows} rows before it are valid.")
    else:
        print(f"All {found.rows} rows are valid. Store this elsewhere: {found.rows}:{found.head}")
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
            f"--known {text!r}: pass the output of an earlier `holdfast audit verify`, as in 120:9f86d0…",
            EXIT_USAGE,
        )


def _printable(text: str | None) -> str:
    # names come from users: they must not control the terminal
    return "" if text is None else "".join(letter if letter.isprintable() else "?" for letter in text)
