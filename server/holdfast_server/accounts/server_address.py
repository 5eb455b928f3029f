"""The address at which the server that started last is reached, for links that commands print."""

from __future__ import annotations

from sqlalchemy.orm import Session

from holdfast_server import models
from holdfast_server.db import Database, transaction

_ONE = 1


@transaction
def remember(session: Session, address: str, *, now: float) -> None:
    session.merge(models.ServerAddressRecord(one=_ONE, address=address.rstrip("/"), started_at=now))


def known(database: Database) -> models.ServerAddressRecord | None:
    """Return the address of the server that started last on this database; `None` if none has."""
    with database.read() as session:
        return session.get(models.ServerAddressRecord, _ONE)
