"""A SQLite file as it was before a migration, kept beside it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from sqlalchemy import Connection


def keep(connection: Connection, file: Path, revision: str) -> Path:
    """A copy of `file`, named after the revision that it is at; whole, or none."""
    kept = file.with_name(f"{file.name}.at-{revision}")
    unfinished = kept.with_name(kept.name + ".part")
    unfinished.unlink(missing_ok=True)
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    shutil.copymode(file, unfinished)
    driver = connection.connection.driver_connection
    assert driver is not None
    driver.execute("VACUUM INTO ?", (str(unfinished),))
    with unfinished.open("rb") as copy:
        os.fsync(copy.fileno())
    unfinished.replace(kept)
    return kept
