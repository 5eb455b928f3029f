"""`holdfast token`: keys for programs, on the server's machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, cast

import typer

from holdfast.pacing.quantities import parse_positive_seconds
from holdfast_server.accounts import tokens
from holdfast_server.accounts.secrets import PREFIX_CHARACTERS
from holdfast_server.commands.database import (
    EXIT_USAGE,
    Db,
    Json,
    fail,
    in_database,
    moment,
    print_json,
    print_table,
    whoami,
)
from holdfast_server.core.principal import OPERATOR, SCOPES, Scope
from holdfast_server.models import DEFAULT_PROJECT

NEVER = "never"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Keys with which agents and scripts reach a server that has accounts: on its machine.",
)


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is for.")],
    scope: Annotated[
        list[str] | None, typer.Option(help="report, read, control or admin; may be given several times.")
    ] = None,
    project: Annotated[str, typer.Option(help="Whose jobs it is for.")] = DEFAULT_PROJECT,
    every_project: Annotated[bool, typer.Option("--every-project", help="It is for all of them.")] = False,
    job: Annotated[str | None, typer.Option(help="The only job that it is for.")] = None,
    expires: Annotated[str, typer.Option(help="How long it works: 90d, 12h, or never.")] = "365d",
    db: Db = None,
    json: Json = False,
) -> None:
    """Make a key, and print it: once, here. Without --scope it can report, as an agent does, and nothing else.

    Examples: holdfast token create "cluster agents"  ·  holdfast token create laptop --scope read --scope control
    """
    scopes = scope or ["report"]
    if not set(scopes) <= set(SCOPES):
        fail(f"there are the scopes {', '.join(SCOPES)}", EXIT_USAGE)
    wish = tokens.Wish(
        name=name,
        scopes=cast("list[Scope]", scopes),
        project=None if every_project else project,
        job=job,
        seconds=_seconds(expires),
    )
    maker = replace(OPERATOR, name=whoami())
    secret, row = in_database(db, lambda database, now: tokens.create(database, wish, maker=maker, now=now))
    if json:
        print_json({"token": secret, "listed": row})
        return
    print(secret)


@app.command("list")
def list_keys(db: Db = None, json: Json = False) -> None:
    """Which keys there are, what each may do, and when it was last used."""
    rows = in_database(db, lambda database, now: tokens.rows(database, asker=OPERATOR, now=now))
    if json:
        print_json({"tokens": rows})
        return
    table = [
        (
            row.prefix,
            row.name,
            ",".join(row.scopes),
            row.job or row.project or "every project",
            row.created_by,
            moment(row.last_used_at),
            "until revoked" if row.state == "works" and row.expires_at is None
            else moment(row.expires_at) if row.state == "works" else row.state,
        )
        for row in rows
    ]  # fmt: skip
    print_table(("key", "name", "may", "for", "made by", "last used", "works until"), table)


@app.command()
def revoke(
    prefix: Annotated[str, typer.Argument(metavar="KEY", help="Its beginning, as `holdfast token list` has it.")],
    db: Db = None,
) -> None:
    """Take a key back; no server takes it 5 seconds later."""
    asker = replace(OPERATOR, name=whoami())
    beginning = prefix.rstrip("…")[:PREFIX_CHARACTERS]
    row = in_database(db, lambda database, now: tokens.revoke(database, beginning, asker=asker, now=now))
    print(f"{row.prefix} ({row.name}) is revoked.")


def _seconds(text: str) -> float | None:
    if text == NEVER:
        return None
    try:
        return parse_positive_seconds(text, "--expires")
    except ValueError as error:
        fail(str(error), EXIT_USAGE)
