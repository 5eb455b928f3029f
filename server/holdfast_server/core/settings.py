"""Configuration of the server."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from holdfast.protocol.wire import DEFAULT_PORT
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.oidc_settings import ProviderSettings

MAX_JOBS = 10_000


@dataclass(frozen=True, slots=True)
class Prices:
    """What turns the account into money."""

    gpu_hour: float | None = None
    """Price of one GPU for an hour; `None`: the account has no costs of GPUs."""
    tb_month: float | None = None
    """Price of 1 TB for a month; `None`: it has no costs of storage."""
    currency: str = ""
    """Shown after amounts, as in `EUR`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    database: str
    """Path of a SQLite file, or a URL."""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    token: str | None = field(default=None, repr=False)
    """Shared secret of agents and people, or `None`."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names, in addition to localhost, by which browsers reach this server."""
    alerts: AlertSettings = field(default_factory=AlertSettings)
    accounts: bool | None = None
    """Whether people sign in and programs have keys. `None`: if people exist, or if the server is exposed without
    a shared secret."""
    max_jobs: int = MAX_JOBS
    """Limit of the jobs of a project."""
    address: str | None = None
    """Public URL, as in https://holdfast.example; `None` to use that of each request."""
    provider: ProviderSettings | None = None
    prices: Prices = Prices()

    def __post_init__(self) -> None:
        # HTTP strips spaces around header values: a secret with such spaces could never match.
        object.__setattr__(self, "token", (self.token or "").strip() or None)

    @property
    def url(self) -> URL:
        return database_url(self.database)

    @property
    def exposed_by(self) -> str | None:
        """Return the option that lets other machines reach this server, or `None`.

        A server on loopback with a public name is exposed too: a proxy serves that name.
        """
        if not is_loopback(self.host):
            return f"--host {self.host}"
        if self.address and not is_loopback(urlsplit(self.address).hostname or ""):
            return f"--address {self.address}"
        names = [name for name in self.allowed_hosts if not is_loopback(name)]
        return f"--allow-host {names[0]}" if names else None


MIN_TOKEN = 16
"""Least length of a shared secret if other machines can reach the server."""
HOW_TO_GENERATE = 'python -c "import secrets; print(secrets.token_urlsafe(32))"'


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def database_url(database: str) -> URL:
    """Return the SQLAlchemy URL for the value of `--db`. Raises ValueError."""
    if "://" not in database:
        return URL.create("sqlite", database=str(Path(database).expanduser().absolute()))
    try:
        url = make_url(database.replace("postgres://", "postgresql://", 1))
    except (ArgumentError, ValueError):  # their messages may contain the password
        raise ValueError(
            "invalid database URL: write postgresql://USER@HOST/NAME, or the path of a file"
        ) from None
    match url.get_backend_name():
        case "postgresql":
            if not url.database:
                raise ValueError(f"database {url}: the name is missing; write postgresql://USER@HOST/NAME")
            return url.set(drivername="postgresql+psycopg")
        case "sqlite":
            if not url.database or url.database == ":memory:":
                raise ValueError(f"database {url}: an in-memory database loses acknowledged reports")
            return url.set(drivername="sqlite")
    raise ValueError(f"database {url}: Holdfast supports PostgreSQL URLs and paths of SQLite files")


def default_database() -> Path:
    """Return $XDG_DATA_HOME/holdfast/holdfast.db."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "holdfast" / "holdfast.db"
