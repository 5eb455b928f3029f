"""Why a database is left as it is."""

from __future__ import annotations


class DatabaseTooNew(RuntimeError):
    """A later release of Holdfast has migrated this database."""


class NotOurDatabase(RuntimeError):
    """It holds something else."""


class CannotStore(RuntimeError):
    """The database that was named cannot be used; says why, and what to do."""


class DriverMissing(CannotStore):
    """PostgreSQL is spoken to through libraries that a plain server does without."""

    def __init__(self, error: ModuleNotFoundError) -> None:
        super().__init__(f"storing in PostgreSQL needs {error.name}: install Holdfast with its extra `postgres`")
