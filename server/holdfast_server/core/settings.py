"""How a server is configured."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from holdfast.protocol.messages import DEFAULT_PORT
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.oidc_settings import ProviderSettings

MAX_JOBS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    database: str
    """A path of a SQLite file, or a URL."""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    token: str | None = field(default=None, repr=False)
    """The shared secret of agents and people; None: no login, for loopback only."""
    allowed_hosts: tuple[str, ...] = ()
    """Names beside localhost under which browsers reach this server."""
    alerts: AlertSettings = field(default_factory=AlertSettings)
    """How alerts leave the server."""
    accounts: bool | None = None
    """Whether people sign in and programs have keys of their own. None: where people exist, and where an exposed
    server has no shared secret."""
    max_jobs: int = MAX_JOBS
    """Jobs of one project; a report that would begin one more is refused."""
    address: str | None = None
    """The public URL, as in https://holdfast.example; None: taken from each request."""
    provider: ProviderSettings | None = None
    """Where else people may sign in."""

    def __post_init__(self) -> None:
        # A header loses the blanks around what it carries, so that a secret with some would never be right.
        object.__setattr__(self, "token", (self.token or "").strip() or None)

    @property
    def url(self) -> URL:
        return database_url(self.database)

    @property
    def exposed_by(self) -> str | None:
        """The option that lets other machines reach this server, with its value; None on loopback.

        A server that listens on loopback is exposed too where it has a public name: a proxy answers for that name.
        """
        if not is_loopback(self.host):
            return f"--host {self.host}"
        if self.address and not is_loopback(urlsplit(self.address).hostname or ""):
            return f"--address {self.address}"
        names = [name for name in self.allowed_hosts if not is_loopback(name)]
        return f"--allow-host {names[0]}" if names else None


MIN_TOKEN = 16
"""Characters of a shared secret that other machines may try to guess."""
HOW_TO_MAKE_ONE = 'python -c "import secrets; print(secrets.token_urlsafe(32))"'


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def database_url(database: str) -> URL:
    """The SQLAlchemy URL of what `--db` names; ValueError for what this server cannot store in."""
    if "://" not in database:
        return URL.create("sqlite+aiosqlite", database=str(Path(database).expanduser().absolute()))
    try:
        url = make_url(database.replace("postgres://", "postgresql://", 1))
    except (ArgumentError, ValueError):  # some of their messages repeat the text, and the password in it
        raise ValueError(
            "the database is no URL: write postgresql://USER@HOST/NAME, or the path of a file"
        ) from None
    match url.get_backend_name():
        case "postgresql":
            if not url.database:
                raise ValueError(f"database {url}: it names no database; write postgresql://USER@HOST/NAME")
            return url.set(drivername="postgresql+asyncpg")
        case "sqlite":
            if not url.database or url.database == ":memory:":
                raise ValueError(f"database {url}: an in-memory database would forget what it acknowledged")
            return url.set(drivername="sqlite+aiosqlite")
    raise ValueError(f"database {url}: Holdfast stores in PostgreSQL, or in SQLite: give the path of a file")


def default_database() -> Path:
    """Where data goes when nobody says: $XDG_DATA_HOME/holdfast/holdfast.db."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "holdfast" / "holdfast.db"
