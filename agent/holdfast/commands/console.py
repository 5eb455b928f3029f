"""What all commands share: the client, printing, a progress bar, and exit codes.

0: success. 1: refused or failed. 2: wrong usage. 3: no server is reachable.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar, get_type_hints

import msgspec
import typer

from holdfast import units
from holdfast.client import Client, Invalid, ServerError, UnreachableError
from holdfast.commands.options import DEFAULT_SERVER, Server, Token
from holdfast.system.masking import escaped

EXIT_REFUSED, EXIT_USAGE, EXIT_UNREACHABLE = 1, 2, 3
EXIT_CODES = "Exit codes: 0 success, 1 refused or failed (the reason is printed), 2 wrong usage"
EXIT_CODES_WITH_SERVER = f"{EXIT_CODES}, 3 no server is reachable"

T = TypeVar("T")


def say(*lines: str, error: bool = False) -> None:
    """Print lines to stdout or stderr, with control characters escaped. No command prints in another way."""
    stream = sys.stderr if error else sys.stdout
    try:
        for line in lines or ("",):
            print(escaped(line), file=stream, flush=True)
    except BrokenPipeError:  # the reader has ended, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # the interpreter flushes the stream again
        raise typer.Exit(EXIT_REFUSED) from None


def complain(message: str) -> None:
    say(f"holdfast: {message}", error=True)


def fail(message: str, code: int = EXIT_REFUSED) -> NoReturn:
    complain(message)
    raise typer.Exit(code)


@contextlib.contextmanager
def asking(server: str, token: str | None) -> Iterator[Client]:
    """Open a client whose errors end the command with one sentence."""
    client = parsed(lambda text: Client(text, token), server)
    try:
        yield client
    except Invalid as error:  # only the server knows some values, such as the installed policies
        fail(str(error), EXIT_USAGE)
    except ServerError as error:
        if error.code == "unknown_job":  # the server's message names an HTTP request, not a command
            fail(f"job {error.body.get('job')!r} not found; `holdfast jobs` lists the jobs")
        fail(str(error))
    except UnreachableError as error:
        fail(str(error), EXIT_UNREACHABLE)


def with_client(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options --server and --token to a command, and pass it a client as the first argument."""

    @functools.wraps(command)
    def with_options(*, server: str, token: str | None, **given: Any) -> None:
        with asking(server, token) as client:
            command(client, **given)

    hints = get_type_hints(command, include_extras=True)
    _, *own = inspect.signature(command).parameters.values()
    shared = [
        inspect.Parameter("server", inspect.Parameter.KEYWORD_ONLY, default=DEFAULT_SERVER, annotation=Server),
        inspect.Parameter("token", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Token),
    ]
    parameters = [each.replace(kind=each.KEYWORD_ONLY, annotation=hints[each.name]) for each in own]
    with_options.__signature__ = inspect.Signature([*parameters, *shared])  # type: ignore[attr-defined]
    with_options.__annotations__ = {each.name: each.annotation for each in (*parameters, *shared)}
    del with_options.__wrapped__
    return with_options


def parsed(parse: Callable[[str], T], text: str) -> T:
    """Return `parse(text)`, or end the command with the reason."""
    try:
        return parse(text)
    except ValueError as error:
        fail(str(error), EXIT_USAGE)


def print_json(value: object) -> None:
    """Print JSON, with "nan", "inf" and "-inf" as the server writes them."""
    text = msgspec.json.format(msgspec.json.encode(_encodable(msgspec.to_builtins(value)))).decode()
    # the encoder escapes the control characters of ASCII only
    say(*(re.sub(r"[^ -~]", _json_escape, line) for line in text.split("\n")))


def print_or_json(value: object, text: str, *, json: bool) -> None:
    if json:
        print_json(value)
    else:
        say(text)


def _json_escape(found: re.Match[str]) -> str:
    return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1].replace("\x7f", "\\u007f")


def _encodable(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):  # the name of a file may have bytes that are not text
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = [[escaped(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else units.percent(fraction)


def seconds(value: float | None) -> str:
    return "-" if value is None else units.duration(value)


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes the bytes done and the total bytes."""
    if not sys.stderr.isatty():
        yield lambda done_bytes, total_bytes: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(escaped(what), total=None)
        yield lambda done_bytes, total_bytes: shown.update(task, completed=done_bytes, total=total_bytes)
