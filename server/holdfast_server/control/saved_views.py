"""Views of the fleet that a user saved: filter, order and columns under a name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from holdfast_server import models
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.db import Database

MOST_VIEWS = 20
"""Most saved views of one user, which share one line above the list."""
MOST_NAME, MOST_QUERY = 40, 2000


@dataclass(frozen=True, slots=True)
class SavedView:
    name: str
    query: str


def saved_views(session: Session, user: str) -> list[SavedView]:
    """Return the views of a user by name."""
    rows = models.SavedViewRecord
    found = session.execute(select(rows.name, rows.query).where(rows.user == user).order_by(rows.name))
    return [SavedView(name, query) for name, query in found]


def save(db: Database, user: str, name: str, query: str) -> None:
    """Save a view, in place of one of the same name.

    Raises:
        InvalidSetting: the name is empty or too long, the query is too long, or the user has `MOST_VIEWS`.
    """
    name = " ".join(name.split())
    if not 1 <= len(name) <= MOST_NAME:
        raise InvalidSetting("name", f"a view needs a name of 1 to {MOST_NAME} characters")
    if len(query) > MOST_QUERY:
        raise InvalidSetting("query", f"the filter has more than {MOST_QUERY} characters: save a shorter one")
    db.write(partial(_save, user=user, name=name, query=query))


def _save(session: Session, *, user: str, name: str, query: str) -> None:
    rows = models.SavedViewRecord
    found = session.get(rows, (user, name))
    if found is not None:
        found.query = query
        return
    if (session.scalar(select(func.count()).where(rows.user == user)) or 0) >= MOST_VIEWS:
        raise InvalidSetting("name", f"there are {MOST_VIEWS} saved views already: delete one first")
    session.add(rows(user=user, name=name, query=query))


def forget(db: Database, user: str, name: str) -> None:
    """Delete a view; one that does not exist is deleted already."""
    rows = models.SavedViewRecord
    gone = delete(rows).where(rows.user == user, rows.name == name)

    def work(session: Session) -> None:
        session.execute(gone)

    db.write(work)
