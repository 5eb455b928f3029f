"""The command `holdfast serve`."""

from __future__ import annotations

import socket
import sys
from types import FrameType
from typing import Annotated, NoReturn

import typer
import uvicorn
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from holdfast.protocol import DEFAULT_PORT
from holdfast_migrations import DatabaseTooNew, NotOurDatabase
from holdfast_server.app import create_app
from holdfast_server.bus import LocalBus
from holdfast_server.db import Database, DatabaseInUse
from holdfast_server.settings import HOW_TO_MAKE_ONE, MIN_TOKEN, ServerSettings, default_database, is_loopback

SHUTDOWN_SECONDS = 5
KEEP_ALIVE_SECONDS = 75
"""Longer than agents and proxies leave a connection idle, so that it is not closed under a request."""
EXIT_USAGE = 2


class _Server(uvicorn.Server):
    """Ends open streams and long polls first: uvicorn would wait for them until it gives up."""

    def __init__(self, config: uvicorn.Config, changes: LocalBus, address: str) -> None:
        super().__init__(config)
        self._changes = changes
        self._address = address

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A second Ctrl-C changes nothing: to leave at once would leave the database open behind us.
        if not self.should_exit:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(f"Holdfast is at {self._address} (Ctrl-C ends it)", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._changes.close()
        await super().shutdown(sockets)


def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = DEFAULT_PORT,
    db: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_DB",
            help="SQLite file to store in, made where there is none.",
            show_default="$XDG_DATA_HOME/holdfast/holdfast.db",
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_TOKEN",
            help="Shared secret that agents send and people sign in with. Better given in the environment: "
            "other users of this machine can read command lines.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            envvar="HOLDFAST_HOSTS",
            help="Name under which browsers reach this server; may be given several times.",
        ),
    ] = None,
) -> None:
    """Start the server and its dashboard.

    On loopback, the default, nobody needs to sign in. On any other address the server asks for a shared
    secret, and does not start without one:

        export HOLDFAST_TOKEN=$(python -c "import secrets; print(secrets.token_urlsafe(32))")

        holdfast serve --host 0.0.0.0
    """
    settings = ServerSettings(
        host=host,
        port=port,
        database=db or str(default_database()),
        token=token or None,
        allowed_hosts=(*(allow_host or ()), *_own_names(host)),
    )
    _check(settings)
    listener = _listener(settings)
    database = _prepared(settings)
    config = uvicorn.Config(
        create_app(settings, database=database),
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        server_header=False,
    )
    try:
        _Server(config, database.changes, _address(listener)).run(sockets=[listener])
    except KeyboardInterrupt:
        print("Holdfast has stopped.", flush=True)
    finally:
        database.release()


def _check(settings: ServerSettings) -> None:
    if not settings.loopback and settings.token is None:
        _refuse(
            f"{settings.host} can be reached from other machines, and anybody there could restore and stop "
            f"training: set a shared secret in HOLDFAST_TOKEN, here and for the agents, or serve on 127.0.0.1; "
            f"{HOW_TO_MAKE_ONE} makes one"
        )
    if not settings.loopback and len(settings.token or "") < MIN_TOKEN:
        _refuse(
            f"the token has {len(settings.token or '')} characters, and {settings.host} can be reached from other "
            f"machines, where somebody may guess it: take one of at least {MIN_TOKEN}; {HOW_TO_MAKE_ONE} makes one"
        )
    try:
        settings.url  # noqa: B018 - it is read for what it refuses
    except ValueError as error:
        _refuse(str(error))


def _listener(settings: ServerSettings) -> socket.socket:
    host = settings.host.strip("[]")
    try:
        family = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, settings.port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or str(error)
        _refuse(
            f"cannot listen on {settings.host} port {settings.port} ({reason}): "
            "another server may be there already; choose another with --port"
        )


def _prepared(settings: ServerSettings) -> Database:
    database = Database(settings.database)
    try:
        applied = database.prepare()
    except (DatabaseInUse, DatabaseTooNew, NotOurDatabase) as error:
        _refuse(str(error))
    except (OSError, SQLAlchemyError) as error:
        _refuse(f"cannot store in {database.path} ({_reason(error)}): name a file that can be written with --db")
    print(f"Storing in {database.path}", flush=True)
    if applied:
        print(f"Brought the database up to date: {', '.join(applied)}", flush=True)
    return database


def _reason(error: OSError | SQLAlchemyError) -> str:
    """What went wrong, without the statement that it went wrong in."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error.orig if isinstance(error, DBAPIError) else error).partition("\n")[0]


def _own_names(host: str) -> tuple[str, ...]:
    return () if is_loopback(host) else (socket.gethostname(),)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)  # noqa: S104
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def _refuse(message: str) -> NoReturn:
    print(f"holdfast serve: {message}", file=sys.stderr)
    raise typer.Exit(EXIT_USAGE)
