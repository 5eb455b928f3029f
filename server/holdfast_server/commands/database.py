"""What all of them share: which database, what they are called in the log, how they end."""

from __future__ import annotations

import asyncio
import getpass
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, NoReturn, TypeVar

import msgspec
import typer
from sqlalchemy.exc import SQLAlchemyError

from holdfast_migrations import CannotStore, DatabaseTooNew, NotOurDatabase
from holdfast_server.core.encoding import to_json
from holdfast_server.core.errors import Refused, UnknownProject
from holdfast_server.core.settings import default_database
from holdfast_server.db import Database, DatabaseInUse, DatabaseUnavailable

EXIT_REFUSED, EXIT_USAGE = 1, 2

T = TypeVar("T")

Db = Annotated[
    str | None,
    typer.Option(
        "--db",
        envvar="HOLDFAST_DB",
        help="Where the server stores, as `holdfast serve` has it.",
        show_default="$XDG_DATA_HOME/holdfast/holdfast.db",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def in_database(db: str | None, work: Callable[[Database, float], Awaitable[T]]) -> T:
    """Do it, whether a server runs or not; a refusal ends the command with one sentence."""

    async def run() -> T:
        async with _opened(db) as database:
            return await work(database, time.time())

    try:
        return asyncio.run(run())
    except UnknownProject as refusal:
        fail(f"{refusal}: `holdfast project add` makes one")
    except Refused as refusal:
        fail(str(refusal))
    except (CannotStore, DatabaseTooNew, NotOurDatabase, DatabaseUnavailable, OSError, ValueError) as error:
        fail(str(error), EXIT_USAGE)
    except SQLAlchemyError as error:
        fail(f"the database does not answer: {str(error).partition(chr(10))[0]}")


@asynccontextmanager
async def _opened(db: str | None) -> AsyncIterator[Database]:
    database = Database(db or str(default_database()))
    # A server that runs has brought it up to date; SQLite itself keeps two writers apart.
    with suppress(DatabaseInUse):
        database.prepare()
    await database.open()
    try:
        yield database
    finally:
        await database.close()


def whoami() -> str:
    """Who is on this machine, as the log calls them."""
    try:
        return f"{getpass.getuser()} on the server"
    except (KeyError, OSError):  # a container may run under a number that nobody has a name for
        return "somebody on the server"


def print_json(value: object) -> None:
    print(msgspec.json.format(to_json(value)).decode())


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def moment(at: float | None) -> str:
    return "never" if at is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def fail(message: str, code: int = EXIT_REFUSED) -> NoReturn:
    print(f"holdfast: {message}", file=sys.stderr)
    raise typer.Exit(code)
