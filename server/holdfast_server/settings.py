"""How a server is configured."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.engine import URL, make_url

from holdfast.protocol import DEFAULT_PORT


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

    def __post_init__(self) -> None:
        # A header loses the blanks around what it carries, so that a secret with some would never be right.
        object.__setattr__(self, "token", (self.token or "").strip() or None)

    @property
    def url(self) -> URL:
        return database_url(self.database)

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)


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
    url = make_url(database)
    if url.get_backend_name() != "sqlite":
        raise ValueError(f"database {database!r}: this version stores in SQLite only; give the path of a file")
    if not url.database or url.database == ":memory:":
        raise ValueError(f"database {database!r}: an in-memory database would forget what it acknowledged")
    return url.set(drivername="sqlite+aiosqlite")


def default_database() -> Path:
    """Where data goes when nobody says: $XDG_DATA_HOME/holdfast/holdfast.db."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "holdfast" / "holdfast.db"
