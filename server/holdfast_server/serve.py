"""The command `holdfast serve`."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import sys
import time
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import Annotated, NoReturn
from urllib.parse import urlsplit

import typer
import uvicorn
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from holdfast.protocol.messages import DEFAULT_PORT
from holdfast_migrations import CannotStore, DatabaseTooNew, NotOurDatabase
from holdfast_server.accounts import people
from holdfast_server.accounts.auth_backends import Accounts
from holdfast_server.accounts.oidc import check_address
from holdfast_server.app import Web, create_app
from holdfast_server.core import logs
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.oidc_settings import ProviderSettings, from_environment
from holdfast_server.core.settings import (
    HOW_TO_MAKE_ONE,
    MAX_JOBS,
    MIN_TOKEN,
    ServerSettings,
    default_database,
    is_loopback,
)
from holdfast_server.db import Database, DatabaseInUse
from holdfast_server.db.backups import in_words, size_bytes

DASHBOARD = "holdfast_web"
SHUTDOWN_SECONDS = 5
KEEP_ALIVE_SECONDS = 75
"""Longer than agents and proxies leave a connection idle, so that it is not closed under a request."""
HEADER_SECONDS = 20.0
"""In which the header of a request has to arrive: a connection that trickles holds a file and memory."""
EXIT_USAGE = 2
MOST_OPEN_FILES = 65_536


class _HttpProtocol(HttpToolsProtocol):
    """Closes a connection on which no whole request header arrives in time: uvicorn would wait for ever.

    The time runs from the first byte after a connection or an answer to the end of the header. Between requests,
    uvicorn's limit for idle connections holds, and for bodies that of `BodyDeadlineMiddleware`.
    """

    header_seconds = HEADER_SECONDS
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_header()

    def on_headers_complete(self) -> None:
        self._stop()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _expect_header(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.header_seconds, self.transport.close)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    """Ends open streams and long polls first: uvicorn would wait for them until it gives up."""

    def __init__(self, config: uvicorn.Config, database: Database, settings: ServerSettings, address: str) -> None:
        super().__init__(config)
        self._database = database
        self._settings = settings
        self._address = address

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A second Ctrl-C changes nothing: to leave at once would leave the database open behind us.
        if not self.should_exit:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            # What is imported and set up by now stays: looked through for garbage again and again, with some
            # hundred thousand objects, it would make whoever asks at that moment wait.
            gc.collect()
            gc.freeze()
            if isinstance(self.config.app.state.door, Accounts):  # type: ignore[union-attr]
                await self._say_who_may()
            print(f"Holdfast is at {self._address} (Ctrl-C ends it)", flush=True)

    async def _say_who_may(self) -> None:
        if self._settings.token is not None:
            print("People sign in and keys are made here: HOLDFAST_TOKEN opens nothing on this server", flush=True)
        link = await people.setup_link(self._database, who="the server", now=time.time())
        if link is not None:
            where = (self._settings.address or self._address).rstrip("/")
            minutes = f"{people.SETUP_LINK_SECONDS / 60:.0f} minutes"
            print(f"Set it up, within {minutes}, at {where}/setup#{link}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._database.changes.close()
        await super().shutdown(sockets)


Host = Annotated[str, typer.Option(help="Address to listen on; on any but loopback, clients must authenticate.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")]
DatabasePlace = Annotated[
    str | None,
    typer.Option(
        envvar="HOLDFAST_DB",
        help="SQLite file, created if missing, or postgresql://USER@HOST/NAME.",
        show_default="$XDG_DATA_HOME/holdfast/holdfast.db",
    ),
]
SharedToken = Annotated[
    str | None,
    typer.Option(
        envvar="HOLDFAST_TOKEN",
        help="Shared secret of agents and users, at least 16 characters. Set it in the environment: other "
        "users of this machine can read command lines.",
    ),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        envvar="HOLDFAST_HOSTS",
        help="Host name by which browsers reach this server; repeatable. Clients must then authenticate.",
    ),
]
HasAccounts = Annotated[
    bool | None,
    typer.Option(
        "--accounts/--no-accounts",
        envvar="HOLDFAST_ACCOUNTS",
        help="Users sign in, and programs have their own keys.",
        show_default="on once there are users, and on an exposed server without a token",
    ),
]
PublicAddress = Annotated[
    str | None,
    typer.Option(
        envvar="HOLDFAST_ADDRESS",
        help="Public URL, as in https://holdfast.example. Unless it is loopback, clients must authenticate.",
    ),
]
MaxJobs = Annotated[
    int,
    typer.Option(
        envvar="HOLDFAST_MAX_JOBS",
        min=1,
        help="Jobs that a project may have; a report that would begin one more is refused.",
    ),
]
LogFormat = Annotated[
    logs.Format, typer.Option(envvar="HOLDFAST_LOG_FORMAT", help="Plain text, or one JSON object per line.")
]
LogLevel = Annotated[
    logs.Level | None,
    typer.Option(
        envvar="HOLDFAST_LOG_LEVEL",
        help="Lowest level that is logged; info has a line per request.",
        show_default="warning for text, info for JSON",
    ),
]


def serve(
    host: Host = "127.0.0.1",
    port: Port = DEFAULT_PORT,
    db: DatabasePlace = None,
    token: SharedToken = None,
    allow_host: AllowedHosts = None,
    accounts: HasAccounts = None,
    address: PublicAddress = None,
    max_jobs: MaxJobs = MAX_JOBS,
    log_format: LogFormat = "human",
    log_level: LogLevel = None,
) -> None:
    """Start the server and its dashboard.

    On loopback, the default, no sign-in is needed, and requests that a proxy forwarded are refused. An exposed
    server, one with another --host, a public --address or an --allow-host, has accounts for people and keys for
    programs: the first start prints a link with which the first admin sets the server up.

        holdfast serve --host 0.0.0.0

    Alternatively, all agents and users share one secret:

        export HOLDFAST_TOKEN=$(python -c "import secrets; print(secrets.token_urlsafe(32))")

    HOLDFAST_SMTP_HOST, _PORT, _USER, _PASSWORD, _FROM, _SECURITY and HOLDFAST_WEBHOOKS, HOLDFAST_WEBHOOK_HOSTS
    configure mail and webhooks for alerts. HOLDFAST_OIDC_ISSUER, _CLIENT_ID, _CLIENT_SECRET and _ROLES configure
    an identity provider.
    """
    settings = ServerSettings(
        host=host,
        port=port,
        database=db or str(default_database()),
        token=token or None,
        allowed_hosts=(*(allow_host or ()), *_own_names(host)),
        accounts=accounts,
        max_jobs=max_jobs,
        address=_public(address),
        provider=_provider(),
        alerts=_alerts(),
    )
    level: logs.Level = log_level or ("warning" if log_format == "human" else "info")
    logs.set_up(log_format, level)
    _check(settings)
    listener = _listener(settings)
    database = _prepared(settings)
    config = uvicorn.Config(
        create_app(settings, web=_dashboard(), database=database),
        access_log=False,
        log_config=None,
        log_level=level,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        server_header=False,
        http=_HttpProtocol,
    )
    _open_many_files()
    try:
        _Server(config, database, settings, _address(listener)).run(sockets=[listener])
    except KeyboardInterrupt:
        print("Holdfast has stopped.", flush=True)
    finally:
        database.release()


def _dashboard() -> Web:
    """The dashboard, by the name of its package: the server depends on none."""
    web: Web = import_module(DASHBOARD).web
    return web


def _open_many_files() -> None:
    """Each rank that reports holds a connection, and each job's agent another: at the limit that most shells and
    systemd begin a process with, 1,024, a few hundred jobs would be all. Anybody may raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _check(settings: ServerSettings) -> None:
    exposed_by = settings.exposed_by
    if exposed_by and settings.token is None and settings.accounts is False:
        _refuse(
            f"{exposed_by} lets other machines reach this server, and anybody there could restore and stop "
            f"training: remove --no-accounts, set a shared secret in HOLDFAST_TOKEN, here and for the agents, or "
            f"serve on 127.0.0.1 without a public name; {HOW_TO_MAKE_ONE} makes a secret"
        )
    if settings.token is not None and not settings.accounts and len(settings.token) < MIN_TOKEN:
        short = f"the token (HOLDFAST_TOKEN) has {len(settings.token)} characters"
        advice = f"use at least {MIN_TOKEN}; {HOW_TO_MAKE_ONE} makes one"
        if exposed_by:
            _refuse(f"{short}, and {exposed_by} lets other machines reach and guess it: {advice}")
        print(f"holdfast serve: warning: {short} and can be guessed: {advice}", file=sys.stderr, flush=True)
    try:
        settings.url  # noqa: B018 - it is read for what it refuses
    except ValueError as error:
        _refuse(f"--db (HOLDFAST_DB): {error}")


def _public(address: str | None) -> str | None:
    if not address:
        return None
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        _refuse(
            f"--address (HOLDFAST_ADDRESS) {address!r} is none: write it as browsers show it, https://holdfast.example"
        )
    return address.rstrip("/")


def _provider() -> ProviderSettings | None:
    try:
        settings = from_environment(os.environ)
        if settings is not None:
            check_address(settings.issuer)
    except ValueError as error:
        _refuse(str(error))
    return settings


def _alerts() -> AlertSettings:
    try:
        return AlertSettings.of(os.environ)
    except ValueError as error:
        _refuse(str(error))


def _listener(settings: ServerSettings) -> socket.socket:
    host = settings.host.strip("[]")
    try:
        family = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, settings.port), family=family, backlog=2048)
    except OSError as error:
        # socket.create_server adds the address to the system's words
        reason = (error.strerror or str(error)).partition(" (while")[0]
        _refuse(
            f"cannot listen on {settings.host} port {settings.port}: {reason}. Another server may run there; "
            "choose another port with --port"
        )


def _prepared(settings: ServerSettings) -> Database:
    try:
        database = Database(settings.database)
        upgraded = database.prepare()
    except (DatabaseInUse, DatabaseTooNew, NotOurDatabase, CannotStore) as error:
        _refuse(str(error))
    except (OSError, SQLAlchemyError) as error:
        _refuse(
            f"cannot store in {database.place} ({_reason(error)}): name a file that can be written with --db "
            "(HOLDFAST_DB)"
        )
    print(f"Storing in {database.place} ({in_words(size_bytes(database.url))})", flush=True)
    if upgraded.revisions:
        print(f"Brought the database up to date: {', '.join(upgraded.revisions)}", flush=True)
    if upgraded.backup is not None:
        print(f"As it was before, it is kept in {upgraded.backup}", flush=True)
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
