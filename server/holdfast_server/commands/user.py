"""`holdfast user`: people, on the server's machine."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast_server.accounts import people
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
from holdfast_server.core.principal import Role
from holdfast_server.db import Database
from holdfast_server.models import DEFAULT_PROJECT

NO_ROLE = "none"

Name = Annotated[str, typer.Argument(metavar="NAME", help="The person's name.")]
Address = Annotated[
    str,
    typer.Option(
        "--address", envvar="HOLDFAST_ADDRESS", help="Where people reach the server: links begin with it."
    ),
]
HERE = "http://127.0.0.1:7117"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="People who sign in to a server: on its machine, beside it or while it is down.",
)


@app.command()
def add(
    name: Name,
    admin: Annotated[bool, typer.Option("--admin", help="They look after the whole server.")] = False,
    role: Annotated[str | None, typer.Option(help="viewer, operator or admin of the project.")] = None,
    project: Annotated[str, typer.Option(help="Where they have the role.")] = DEFAULT_PROJECT,
    address: Address = HERE,
    db: Db = None,
    json: Json = False,
) -> None:
    """Add a person, and print the link with which they choose a password."""
    roles = {} if role is None else {project: _role(role)}
    added, link = in_database(
        db, lambda database, now: people.add(database, name, admin=admin, roles=roles, who=whoami(), now=now)
    )
    _tell(f"{added} is here. They choose a password, within a day, at", f"{address}/reset#{link}", json)


@app.command("list")
def list_people(db: Db = None, json: Json = False) -> None:
    """Who may sign in, and what they may do."""
    rows = in_database(db, lambda database, _: people.rows(database))
    if json:
        print_json({"people": rows})
        return
    table = [
        (
            row.name,
            ", ".join(
                (["admin of the server"] if row.admin else []) + [f"{r} of {p}" for p, r in row.roles.items()]
            )
            or "-",
            row.signs_in_by,
            moment(row.signed_in_at),
        )
        for row in rows
    ]
    print_table(("name", "roles", "signs in by", "last sign-in"), table)


@app.command()
def role(
    name: Name,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="viewer, operator, admin, or none.")],
    project: Annotated[str, typer.Option(help="Where they have it.")] = DEFAULT_PROJECT,
    server: Annotated[bool, typer.Option("--server", help="Of the whole server: admin or none.")] = False,
    db: Db = None,
) -> None:
    """Give somebody a role in a project, or take it: `holdfast user role ada operator --project vision`."""
    held = None if role == NO_ROLE else _role(role)
    if server and held not in (None, Role.admin):
        fail("of the whole server somebody is admin or nothing: give other roles by project", EXIT_USAGE)

    async def work(database: Database, now: float) -> None:
        if server:
            await people.set_admin(database, name, held is not None, who=whoami(), now=now)
        else:
            await people.set_role(database, name, project, held, who=whoami(), now=now)

    in_database(db, work)
    where = "the whole server" if server else project
    print(f"{name} is {'nothing' if held is None else held.name} of {where}.")


@app.command()
def remove(name: Name, db: Db = None) -> None:
    """Take all rights of a person; their browsers are signed out, and the keys that they made are revoked."""
    revoked = in_database(db, lambda database, now: people.remove(database, name, who=whoami(), now=now))
    keys = "" if not revoked else f", and {revoked} {'key' if revoked == 1 else 'keys'} of theirs revoked"
    print(f"{name} is removed{keys}.")


@app.command("reset-link")
def reset_link(name: Name, address: Address = HERE, db: Db = None, json: Json = False) -> None:
    """Print a link with which somebody chooses a new password; it works once, for a day."""
    link = in_database(db, lambda database, now: people.reset_link(database, name, who=whoami(), now=now))
    _tell(f"{name} chooses a password, within a day, at", f"{address}/reset#{link}", json)


@app.command("setup-link")
def setup_link(address: Address = HERE, db: Db = None, json: Json = False) -> None:
    """Print a link with which the first admin sets the server up; the ones before it are dead."""
    link = in_database(db, lambda database, now: people.setup_link(database, who=whoami(), now=now))
    if link is None:
        fail("this server has an admin already: `holdfast user reset-link NAME` makes them a new password")
    _tell(f"Within {people.SETUP_LINK_SECONDS / 60:.0f} minutes, at", f"{address}/setup#{link}", json)


def _tell(what: str, link: str, json: bool) -> None:
    if json:
        print_json({"link": link})
    else:
        print(f"{what} {link}")


def _role(text: str) -> Role:
    if text not in Role.__members__:
        fail(f"{text!r} is no role: there are {', '.join(Role.__members__)}, and {NO_ROLE}", EXIT_USAGE)
    return Role[text]
