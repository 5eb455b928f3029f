"""Why something was not stored."""

from __future__ import annotations


class DatabaseInUse(RuntimeError):
    """Another server has this file open."""


class DatabaseClosed(RuntimeError):
    """The server is stopping: nothing more is stored."""


class DatabaseBusy(RuntimeError):
    """More waits to be written than the database keeps up with: come back later."""


class DatabaseUnavailable(RuntimeError):
    """The database does not answer, or broke off: what was to be stored may not be."""
