"""`holdfast token`: manage the keys of programs on the server's machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, cast

import typer

from holdfast.units import parse_positive_seconds
from holdfast_server.accounts import tokens
from holdfast_server.accounts.secrets import PREFIX_CHARACTERS
from holdfast_server.commands.database import (
    EXIT_USAGE,
    Db,
    Json,
    command_group,
    fail,
    in_database,
    moment,
    print_json,
    print_rows,
    whoami,
)
from holdfast_server.core.principal import OPERATOR, SCOPES, Scope
from holdfast_server.models import DEFAULT_PROJECT

NEVER = "never"

app = command_group("Manage the keys of agents and scripts for a server with accounts, on its machine.")


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that says what the key is for.")],
    scope: Annotated[list[str] | None, typer.Option(help="report, read, control or admin; repeatable.")] = None,
    project: Annotated[str, typer.Option(help="The project that the key is for.")] = DEFAULT_PROJECT,
    every_project: Annotated[bool, typer.Option("--every-project", help="The key is for all projects.")] = False,
    job: Annotated[str | None, typer.Option(help="Limit the key to this job.")] = None,
    expires: Annotated[str, typer.Option(help="Lifetime: 90d, 12h, or never.")] = "365d",
    db: Db = None,
    json: Json = False,
) -> None:
    """Create a key and print it, once. Without --scope it can only report, as agents do.

    Examples: holdfast token create "cluster agents"  ·  holdfast token create laptop --scope read --scope control
    """
    scopes = scope or ["report"]
    if not set(scopes) <= set(SCOPES):
        fail(f"unknown scope: use {', '.join(SCOPES)}", EXIT_USAGE)
    request = tokens.TokenRequest(
        name=name,
        scopes=cast("list[Scope]", scopes),
        project=None if every_project else project,
        job=job,
        seconds=_seconds(expires),
    )
    maker = replace(OPERATOR, name=whoami())
    secret, row = in_database(db, lambda database, now: tokens.create(database, request, maker=maker, now=now))
    if json:
        print_json({"token": secret, "listed": row})
        return
    print(secret)


@app.command("list")
def list_keys(db: Db = None, json: Json = False) -> None:
    """List keys with their permissions and the time of their last use."""
    rows = in_database(db, lambda database, now: tokens.list_tokens(database, asker=OPERATOR, now=now))
    print_rows(
        rows, name="tokens", json=json,
        header=("key", "name", "scopes", "for", "created by", "last used", "expires"),
        cells=lambda row: (
            row.prefix, row.name, ",".join(row.scopes), row.job or row.project or "every project", row.created_by,
            moment(row.last_used_at), moment(row.expires_at) if row.state == "works" else row.state,
        ),
    )  # fmt: skip


@app.command()
def revoke(
    prefix: Annotated[
        str, typer.Argument(metavar="KEY", help="The key's prefix, as `holdfast token list` shows it.")
    ],
    db: Db = None,
) -> None:
    """Revoke a key. It stops working within 5 seconds."""
    asker = replace(OPERATOR, name=whoami())
    known = prefix.rstrip("…")[:PREFIX_CHARACTERS]
    row = in_database(db, lambda database, now: tokens.revoke(database, known, asker=asker, now=now))
    print(f"Revoked {row.prefix} ({row.name}).")


def _seconds(text: str) -> float | None:
    if text == NEVER:
        return None
    try:
        return parse_positive_seconds(text, "--expires")
    except ValueError as error:
        fail(str(error), EXIT_USAGE)
