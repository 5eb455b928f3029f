"""Shared by all commands: opening the database, output, and exit statuses."""

from __future__ import annotations

import getpass
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, NoReturn, TypeVar

import msgspec
import typer
from sqlalchemy.exc import SQLAlchemyError

from holdfast_migrations import CannotStore, DatabaseTooNew, NotOurDatabase
from holdfast_server.core.encoding import to_json
from holdfast_server.core.errors import RequestRefused, UnknownProject
from holdfast_server.core.settings import default_database
from holdfast_server.db import Database, DatabaseInUse, DatabaseUnavailable

EXIT_REFUSED, EXIT_USAGE = 1, 2

R = TypeVar("R")
T = TypeVar("T")

Db = Annotated[
    str | None,
    typer.Option(
        "--db",
        envvar="HOLDFAST_DB",
        help="The server's database, as for `holdfast serve`.",
        show_default="$XDG_DATA_HOME/holdfast/holdfast.db",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def command_group(help: str) -> typer.Typer:  # noqa: A002 - as typer calls it
    return typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        help=help,
    )


def in_database(db: str | None, work: Callable[[Database, float], T]) -> T:
    """Run `work`, whether a server is running or not. A refusal ends the command with one sentence."""

    try:
        with _opened(db) as database:
            return work(database, time.time())
    except UnknownProject as refusal:
        fail(f"{refusal}: create it with `holdfast project add`")
    except RequestRefused as refusal:
        fail(str(refusal))
    except (CannotStore, DatabaseTooNew, NotOurDatabase, DatabaseUnavailable, OSError, ValueError) as error:
        fail(str(error), EXIT_USAGE)
    except SQLAlchemyError as error:
        fail(f"database error: {str(error).partition(chr(10))[0]}")


@contextmanager
def _opened(db: str | None) -> Iterator[Database]:
    database = Database(db or str(default_database()))
    # A running server has migrated it, and SQLite serializes writers.
    with suppress(DatabaseInUse):
        database.prepare()
    database.open()
    try:
        yield database
    finally:
        database.close()


def whoami() -> str:
    """Return the name of this user for the audit log."""
    try:
        return f"{getpass.getuser()} on the server"
    except (KeyError, OSError):  # a container may run under a user id without a name
        return "unknown user on the server"


def print_json(value: object) -> None:
    print(msgspec.json.format(to_json(value)).decode())


def print_rows(
    rows: Sequence[R], *, name: str, json: bool, header: Sequence[str], cells: Callable[[R], Sequence[str]]
) -> None:
    """Print rows as a table, or with `json` as an object with one list."""
    if json:
        print_json({name: rows})
        return
    table = [header, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def moment(at: float | None) -> str:
    return "never" if at is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def fail(message: str, code: int = EXIT_REFUSED) -> NoReturn:
    print(f"holdfast: {message}", file=sys.stderr)
    raise typer.Exit(code)
