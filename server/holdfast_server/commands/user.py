"""`holdfast user`: manage people on the server's machine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from holdfast.protocol.administration import Person
from holdfast_server.accounts import people, server_address
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
from holdfast_server.core.principal import Role
from holdfast_server.db import Database
from holdfast_server.models import DEFAULT_PROJECT

NO_ROLE = "none"

Name = Annotated[str, typer.Argument(metavar="NAME", help="The person's name.")]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        envvar="HOLDFAST_ADDRESS",
        help="Public URL of the server, for links.",
        show_default="URL of the server that last started on this database",
    ),
]
DEFAULT_ADDRESS = "http://127.0.0.1:7117"

app = command_group(
    "Manage the people who sign in to a server, on its machine. The server may be running or stopped."
)


@app.command()
def add(
    name: Name,
    server_admin: Annotated[bool, typer.Option("--server-admin", help="Make them a server admin.")] = False,
    admin: Annotated[bool, typer.Option("--admin", hidden=True)] = False,
    role: Annotated[str | None, typer.Option(help="Role in the project: viewer, operator or admin.")] = None,
    project: Annotated[str, typer.Option(help="The project of the role.")] = DEFAULT_PROJECT,
    address: Address = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Add a person and print the link with which they choose a password."""
    roles = {} if role is None else {project: _role(role)}
    added, link = in_database(
        db,
        lambda database, now: people.add(
            database, name, admin=server_admin or admin, roles=roles, who=whoami(), now=now
        ),
    )
    what = f"Added {added}. Link for choosing a password, valid for a day:"
    _print_link(what, _address(address, db), f"reset#{link}", json)


@app.command("list")
def list_people(db: Db = None, json: Json = False) -> None:
    """List people and their roles."""
    rows = in_database(db, lambda database, _: people.list_people(database))
    print_rows(
        rows, name="people", json=json, header=("name", "roles", "signs in by", "last sign-in"),
        cells=lambda row: (row.name, _roles(row), row.signs_in_by, moment(row.signed_in_at)),
    )  # fmt: skip


def _roles(person: Person) -> str:
    held = ["server admin"] if person.admin else []
    return ", ".join(held + [f"{role} of {project}" for project, role in person.roles.items()]) or "-"


@app.command()
def role(
    name: Name,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="viewer, operator, admin, or none.")],
    project: Annotated[str, typer.Option(help="The project of the role.")] = DEFAULT_PROJECT,
    server_admin: Annotated[
        bool, typer.Option("--server-admin", help="Make them a server admin (admin), or no longer one (none).")
    ] = False,
    server: Annotated[bool, typer.Option("--server", hidden=True)] = False,
    db: Db = None,
) -> None:
    """Set or remove a person's role in a project: `holdfast user role ada operator --project vision`."""
    held = None if role == NO_ROLE else _role(role)
    on_server = server_admin or server
    if on_server and held not in (None, Role.admin):
        fail("--server-admin accepts admin and none only: other roles are per project", EXIT_USAGE)

    def work(database: Database, now: float) -> None:
        if on_server:
            people.set_admin(database, name, held is not None, who=whoami(), now=now)
        else:
            people.set_role(database, name, project, held, who=whoami(), now=now)

    in_database(db, work)
    where = "on the server" if on_server else f"in {project}"
    print(f"{name} has {'no role' if held is None else f'the role {held.name}'} {where}.")


@app.command()
def remove(name: Name, db: Db = None) -> None:
    """Remove a person, sign out their browsers, and revoke their keys."""
    revoked = in_database(db, lambda database, now: people.remove(database, name, who=whoami(), now=now))
    keys = f" and revoked {revoked} key{'s' * (revoked != 1)}" if revoked else ""
    print(f"Removed {name}{keys}.")


@app.command("reset-link")
def reset_link(name: Name, address: Address = None, db: Db = None, json: Json = False) -> None:
    """Print a link with which a person chooses a new password. It works once, for a day."""
    link = in_database(db, lambda database, now: people.reset_link(database, name, who=whoami(), now=now))
    what = f"Link for {name} to choose a password, valid for a day:"
    _print_link(what, _address(address, db), f"reset#{link}", json)


@app.command("setup-link")
def setup_link(address: Address = None, db: Db = None, json: Json = False) -> None:
    """Print a link that creates the first administrator. It replaces earlier links."""
    link = in_database(db, lambda database, now: people.setup_link(database, who=whoami(), now=now))
    if link is None:
        fail("this server has an administrator already: `holdfast user reset-link NAME` sets a new password")
    minutes = f"{people.SETUP_LINK_SECONDS / 60:.0f} minutes"
    what = f"Link to set up the server, valid for {minutes}:"
    _print_link(what, _address(address, db), f"setup#{link}", json)


def _address(given: str | None, db: str | None) -> str:
    """Return the address with which links begin, and say where it comes from unless it was given."""
    if given is not None:
        return given.rstrip("/")
    known = in_database(db, lambda database, _: server_address.known(database))
    if known is None:
        address, whose = DEFAULT_ADDRESS, "the default, because no server has started on this database"
    else:
        address, whose = known.address, f"of the server that started at {moment(known.started_at)}"
    print(f"The link begins with {address}, {whose}; --address gives another.", file=sys.stderr)
    return address


def _print_link(what: str, address: str, path: str, json: bool) -> None:
    link = f"{address}/{path}"
    if json:
        print_json({"link": link})
    else:
        print(f"{what} {link}")


def _role(text: str) -> Role:
    if text not in Role.__members__:
        fail(f"unknown role {text!r}: use {', '.join(Role.__members__)} or {NO_ROLE}", EXIT_USAGE)
    return Role[text]
