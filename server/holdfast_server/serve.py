"""The command `holdfast serve`."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import FrameType
from typing import Annotated, NoReturn, TypeVar
from urllib.parse import urlsplit

import typer
import uvicorn
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from holdfast.protocol.wire import DEFAULT_PORT
from holdfast.units import format_bytes
from holdfast_migrations import CannotStore, DatabaseTooNew, NotOurDatabase
from holdfast_server.accounts import people, server_address
from holdfast_server.accounts.auth_backends import AccountsAuth
from holdfast_server.app import Web, create_app
from holdfast_server.core import logs, oidc_settings
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.settings import (
    HOW_TO_GENERATE,
    MAX_JOBS,
    MIN_TOKEN,
    Prices,
    ServerSettings,
    default_database,
    is_loopback,
)
from holdfast_server.db import Database, DatabaseInUse, DatabaseUnavailable
from holdfast_server.db.backups import size_bytes
from holdfast_server.http.services import services_of

T = TypeVar("T")

DASHBOARD = "holdfast_web"
SHUTDOWN_SECONDS = 5
KEEP_ALIVE_SECONDS = 75
"""Longer than agents and proxies keep an idle connection: the server must not close it under a request."""
COLLECT_AFTER = (20_000, 50, 10)
"""Thresholds of the garbage collector, which would scan the hundreds of objects of each long poll too often."""
HEADER_SECONDS = 20.0
"""Time limit for the header of a request: a slow connection holds a file descriptor and memory."""
EXIT_USAGE = 2
MOST_OPEN_FILES = 65_536
ARENAS = 2
M_ARENA_MAX = -8
"""From malloc.h of glibc."""


class _HttpProtocol(HttpToolsProtocol):
    """Closes a connection if the header of a request does not arrive in time: uvicorn would wait forever.

    The time runs from the first byte to the end of the header. Uvicorn's limit for idle connections applies
    between requests, and that of `BodyMiddleware` to bodies.
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
    """Ends open streams and long polls before it shuts down: uvicorn would wait for them until its timeout."""

    def __init__(self, config: uvicorn.Config, database: Database, settings: ServerSettings, address: str) -> None:
        super().__init__(config)
        self._database = database
        self._settings = settings
        self._address = address

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Ignore a second Ctrl-C: exiting at once would leave the database open.
        if not self.should_exit:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            # Exclude the objects that exist by now from garbage collection: scanning several hundred thousand of
            # them again and again would delay requests.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*COLLECT_AFTER)
            public = self._settings.address or self._address
            with suppress(DatabaseUnavailable, SQLAlchemyError):  # it only serves commands on this machine
                remember = partial(server_address.remember, self._database, public, now=time.time())
                await self._database.ask("background", remember)
            if isinstance(services_of(self.config.app).auth, AccountsAuth):
                await self._print_sign_in()
            print(f"Holdfast is at {self._address} (press Ctrl-C to stop)", flush=True)

    async def _print_sign_in(self) -> None:
        if self._settings.token is not None:
            print("This server has accounts and keys, so it ignores HOLDFAST_TOKEN", flush=True)
        make = partial(people.setup_link, self._database, who="the server", now=time.time())
        link = await self._database.ask("background", make)
        if link is not None:
            where = (self._settings.address or self._address).rstrip("/")
            minutes = f"{people.SETUP_LINK_SECONDS / 60:.0f} minutes"
            print(f"Set up the server within {minutes} at {where}/setup#{link}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._database.changes.close()
        await super().shutdown(sockets)


Host = Annotated[str, typer.Option(help="Address to listen on; except on loopback, clients must authenticate.")]
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
        help="Most jobs per project; reports that would create more are refused.",
    ),
]
GpuHourPrice = Annotated[
    float | None,
    typer.Option(
        envvar="HOLDFAST_GPU_HOUR_PRICE",
        min=0,
        help="Price of one GPU-hour; the account then shows costs.",
        show_default="none",
    ),
]
TbMonthPrice = Annotated[
    float | None,
    typer.Option(
        envvar="HOLDFAST_TB_MONTH_PRICE",
        min=0,
        help="Price of storing 1 TB of checkpoints for a month; the account then shows costs.",
        show_default="none",
    ),
]
Currency = Annotated[
    str,
    typer.Option(envvar="HOLDFAST_CURRENCY", help="Currency shown after costs, as in EUR.", show_default="none"),
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
    gpu_hour_price: GpuHourPrice = None,
    tb_month_price: TbMonthPrice = None,
    currency: Currency = "",
    log_format: LogFormat = "human",
    log_level: LogLevel = None,
) -> None:
    """Start the server and its dashboard.

    On loopback, the default, no sign-in is needed, and requests from a proxy are refused. An exposed server, with
    another --host, a public --address or an --allow-host, has accounts for people and keys for programs: its first
    start prints a link for setting up the first administrator.

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
        prices=Prices(gpu_hour_price, tb_month_price, currency.strip()),
        provider=_from_environment(oidc_settings.from_environment),
        alerts=_from_environment(AlertSettings.from_environment),
    )
    _share_arenas()
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
        print("Holdfast stopped.", flush=True)
    finally:
        database.release()


def _dashboard() -> Web:
    """Import the dashboard by the name of its package, because the server does not depend on it."""
    web: Web = import_module(DASHBOARD).web
    return web


def _open_many_files() -> None:
    """Raise the limit of open files: with the usual 1,024, connections of agents limit a server to a few hundred
    jobs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _share_arenas() -> None:
    """Make all threads allocate from two arenas of glibc.

    By default each thread has an arena of its own, which keeps the memory of the largest read that ran in it, and
    reads take turns between threads. An operator's own MALLOC_ARENA_MAX stays in force.
    """
    if "MALLOC_ARENA_MAX" in os.environ:
        return
    with suppress(AttributeError):  # other C libraries have no arenas
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


def _check(settings: ServerSettings) -> None:
    exposed_by = settings.exposed_by
    if exposed_by and settings.token is None and settings.accounts is False:
        _refuse(
            f"{exposed_by} lets other machines reach this server without authentication: remove --no-accounts, "
            "set a shared secret in HOLDFAST_TOKEN for the server and its agents, or serve on 127.0.0.1 without a "
            f"public name. To make a secret: {HOW_TO_GENERATE}"
        )
    if settings.token is not None and not settings.accounts and len(settings.token) < MIN_TOKEN:
        short = f"the token (HOLDFAST_TOKEN) has {len(settings.token)} characters"
        advice = f"use at least {MIN_TOKEN}. To make a secret: {HOW_TO_GENERATE}"
        if exposed_by:
            _refuse(f"{short}, and {exposed_by} lets other machines guess it: {advice}")
        print(f"holdfast serve: warning: {short} and can be guessed: {advice}", file=sys.stderr, flush=True)
    try:
        settings.url  # noqa: B018 - raises for an invalid URL
    except ValueError as error:
        _refuse(f"--db (HOLDFAST_DB): {error}")


def _public(address: str | None) -> str | None:
    if not address:
        return None
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        _refuse(f"--address (HOLDFAST_ADDRESS): invalid URL {address!r}: write it like https://holdfast.example")
    return address.rstrip("/")


def _from_environment(read: Callable[[Mapping[str, str]], T]) -> T:
    try:
        return read(os.environ)
    except ValueError as error:
        _refuse(str(error))


def _listener(settings: ServerSettings) -> socket.socket:
    host = settings.host.strip("[]")
    try:
        family = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, settings.port), family=family, backlog=2048)
    except OSError as error:
        # socket.create_server adds the address to the system's message
        reason = (error.strerror or str(error)).partition(" (while")[0]
        _refuse(
            f"cannot listen on {settings.host} port {settings.port}: {reason}. If another server uses the port, "
            "choose another one with --port"
        )


def _prepared(settings: ServerSettings) -> Database:
    try:
        database = Database(settings.database)
        upgraded = database.prepare()
    except (DatabaseInUse, DatabaseTooNew, NotOurDatabase, CannotStore) as error:
        _refuse(str(error))
    except (OSError, SQLAlchemyError) as error:
        _refuse(
            f"cannot write to {database.place} ({_reason(error)}): choose a writable file with --db (HOLDFAST_DB)"
        )
    print(f"Database: {database.place} ({format_bytes(size_bytes(database.url))})", flush=True)
    if upgraded.revisions:
        print(f"Migrated the database: {', '.join(upgraded.revisions)}", flush=True)
    if upgraded.backup is not None:
        print(f"Backup from before the migration: {upgraded.backup}", flush=True)
    return database


def _reason(error: OSError | SQLAlchemyError) -> str:
    """Return the error message without the SQL statement."""
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
