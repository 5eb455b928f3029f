"""The command `holdfast serve`."""

from __future__ import annotations

import gc
import os
import resource
import socket
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Annotated, NoReturn
from urllib.parse import urlsplit

import typer
import uvicorn
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from holdfast.protocol import DEFAULT_PORT
from holdfast_migrations import CannotStore, DatabaseTooNew, NotOurDatabase
from holdfast_server import logs
from holdfast_server.accounts import people
from holdfast_server.accounts.doors import Accounts
from holdfast_server.accounts.provider import check_address
from holdfast_server.accounts.provider_settings import ProviderSettings, from_environment
from holdfast_server.alerts.settings import AlertSettings
from holdfast_server.app import create_app
from holdfast_server.backups import in_words, size_bytes
from holdfast_server.db import Database, DatabaseInUse
from holdfast_server.settings import HOW_TO_MAKE_ONE, MIN_TOKEN, ServerSettings, default_database, is_loopback

SHUTDOWN_SECONDS = 5
KEEP_ALIVE_SECONDS = 75
"""Longer than agents and proxies leave a connection idle, so that it is not closed under a request."""
EXIT_USAGE = 2
MOST_OPEN_FILES = 65_536


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


def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; on others than loopback everybody shows who they are.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = DEFAULT_PORT,
    db: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_DB",
            help="SQLite file to store in, made where there is none; or postgresql://USER@HOST/NAME.",
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
    accounts: Annotated[
        bool | None,
        typer.Option(
            "--accounts/--no-accounts",
            envvar="HOLDFAST_ACCOUNTS",
            help="People sign in, and programs have keys of their own.",
            show_default="where there are people, and beyond loopback without a token",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_ADDRESS", help="Where people reach this server, as in https://holdfast.example."
        ),
    ] = None,
    log_format: Annotated[
        logs.Format, typer.Option(envvar="HOLDFAST_LOG_FORMAT", help="Text for people, or a line of JSON each.")
    ] = "human",
    log_level: Annotated[
        logs.Level | None,
        typer.Option(
            envvar="HOLDFAST_LOG_LEVEL",
            help="The least that is logged; info has a line for each request.",
            show_default="warning for people, info for JSON",
        ),
    ] = None,
) -> None:
    """Start the server and its dashboard.

    On loopback, the default, nobody needs to sign in. On any other address people have accounts, and programs
    have keys: the first start prints a link with which the first admin sets the server up.

        holdfast serve --host 0.0.0.0

    One secret that all agents and people share does instead, where it is enough:

        export HOLDFAST_TOKEN=$(python -c "import secrets; print(secrets.token_urlsafe(32))")

    Mail and webhooks for alerts are set up in HOLDFAST_SMTP_HOST, _PORT, _USER, _PASSWORD, _FROM, _SECURITY and
    HOLDFAST_WEBHOOKS, HOLDFAST_WEBHOOK_HOSTS.

    Settings of an identity provider are read from HOLDFAST_OIDC_ISSUER, _CLIENT_ID, _CLIENT_SECRET and _ROLES.
    """
    settings = ServerSettings(
        host=host,
        port=port,
        database=db or str(default_database()),
        token=token or None,
        allowed_hosts=(*(allow_host or ()), *_own_names(host)),
        accounts=accounts,
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
        create_app(settings, database=database),
        access_log=False,
        log_config=None,
        log_level=level,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        server_header=False,
    )
    _open_many_files()
    try:
        _Server(config, database, settings, _address(listener)).run(sockets=[listener])
    except KeyboardInterrupt:
        print("Holdfast has stopped.", flush=True)
    finally:
        database.release()


def _open_many_files() -> None:
    """Each rank that reports holds a connection, and each job's agent another: at the limit that most shells and
    systemd begin a process with, 1,024, a few hundred jobs would be all. Anybody may raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _check(settings: ServerSettings) -> None:
    exposed = not settings.loopback
    if exposed and settings.token is None and settings.accounts is False:
        _refuse(
            f"{settings.host} can be reached from other machines, and anybody there could restore and stop "
            f"training: leave --no-accounts out, set a shared secret in HOLDFAST_TOKEN, here and for the agents, "
            f"or serve on 127.0.0.1; {HOW_TO_MAKE_ONE} makes a secret"
        )
    if exposed and settings.token is not None and not settings.accounts and len(settings.token) < MIN_TOKEN:
        _refuse(
            f"the token (HOLDFAST_TOKEN) has {len(settings.token)} characters, and {settings.host} can be reached "
            f"from other machines, where somebody may guess it: take one of at least {MIN_TOKEN}; "
            f"{HOW_TO_MAKE_ONE} makes one"
        )
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
