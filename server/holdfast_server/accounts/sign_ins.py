"""Sign-in with a password, and the browser sessions of people."""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import Struct
from sqlalchemy import ColumnElement, delete, or_, select, update
from sqlalchemy.orm import Session

from holdfast_server import models
from holdfast_server.accounts import passwords, people, rate_limits, secrets
from holdfast_server.accounts.secrets import digest, new_session
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import InvalidCredentials, UnknownPerson, UnknownSession
from holdfast_server.core.principal import ANONYMOUS, Principal
from holdfast_server.db import Database, transaction
from holdfast_server.records import audit

TIDY_SECONDS = 3600.0
"""Time between two deletions of expired rows."""
IDLE_SECONDS = 12 * 3600.0
"""A session ends this long after its last request."""
LASTS_SECONDS = 7 * 86400.0
"""A session ends this long after the sign-in."""
SEEN_SECONDS = 60.0
"""Resolution of the time of the last request."""
MAX_BROWSER = 200
"""Stored characters of the User-Agent header."""


class BrowserSession(Struct, frozen=True, kw_only=True):
    id: str
    created_at: float
    seen_at: float
    address: str
    browser: str
    this: bool
    """Whether it is the session of the current request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """The browser that signs in."""

    address: str
    browser: str
    replaces: str | None = None
    """Secret of the browser's previous session, which ends: a session planted by an attacker must not survive."""
    device: str | None = None
    """The browser's device cookie."""


def with_password(db: Database, name: str, password: str, visitor: Visitor, *, now: float) -> str:
    """Return the secret of the new session. Raises TooManySignInAttempts and InvalidCredentials."""
    known = name.strip().lower()
    try:
        check_password(db, known, password, visitor, now=now)
    except InvalidCredentials:
        with db.read() as session:
            person = session.get(models.PersonRecord, known)
        # Do not log an unknown name: it may be a password, entered into the wrong field.
        about = {"name": known if person else "unknown name", "address": visitor.address}
        db.write(
            lambda session: audit.record(
                session, who=ANONYMOUS.name, action="person.sign_in_failed", now=now, after=about
            )
        )
        raise
    return begin(db, known, visitor, by="password", now=now)


def check_password(db: Database, person: str, password: str, visitor: Visitor, *, now: float) -> None:
    """Verify a password, unless too many attempts failed. Raises TooManySignInAttempts, InvalidCredentials."""
    passwords.require_room()  # before an attempt is counted: the visitor did nothing wrong
    stored = _password_hash(db, person)
    device = visitor.device
    if device is not None and (stored is None or not secrets.is_device(device, person, stored)):
        device = None
    rate_limits.take_attempt(db, person, visitor.address, device=device, now=now)
    if not passwords.verify(password[: passwords.LONGEST + 1], stored):
        raise InvalidCredentials
    rate_limits.reset(db, person, visitor.address, device=device)


def new_device(db: Database, name: str) -> str | None:
    """Return a device cookie for a browser in which the person has just entered their password."""
    known = name.strip().lower()
    stored = _password_hash(db, known)
    return None if stored is None else secrets.new_device(known, stored)


def _password_hash(db: Database, name: str) -> str | None:
    """Return the stored hash; `None` also for people of the identity provider, who have no password here."""
    with db.read() as session:
        person = session.get(models.PersonRecord, name)
    return person.password if person is not None and person.issuer is None else None


def begin(db: Database, person: str, visitor: Visitor, *, by: str, now: float) -> str:
    """Begin a session and return its secret. Raises UnknownPerson if the person was removed in the meantime."""
    secret = new_session()
    kept = digest(secret)

    def work(session: Session) -> None:
        row = session.get(models.PersonRecord, person)
        if row is None:
            raise UnknownPerson(person)
        row.signed_in_at = now
        if visitor.replaces is not None:
            session.execute(
                delete(models.SignInRecord).where(models.SignInRecord.digest == digest(visitor.replaces))
            )
        session.add(
            models.SignInRecord(
                digest=kept,
                id=kept.hex()[:16],
                person=person,
                created_at=now,
                seen_at=now,
                address=visitor.address,
                browser=visitor.browser[:MAX_BROWSER],
            )
        )
        session.flush()
        about = {"by": by, "address": visitor.address}
        audit.record(session, who=person, action="person.sign_in", now=now, after=about)

    db.write(work)
    return secret


def _is_open(now: float) -> tuple[ColumnElement[bool], ...]:
    return models.SignInRecord.seen_at > now - IDLE_SECONDS, models.SignInRecord.created_at > now - LASTS_SECONDS


def find(session: Session, secret: str, *, now: float) -> tuple[Principal, float] | None:
    """Return the person and the time of the last request of an open session."""
    rows = models.SignInRecord
    query = select(models.PersonRecord, rows).join(rows, rows.person == models.PersonRecord.name)
    found = session.execute(query.where(rows.digest == digest(secret), *_is_open(now))).one_or_none()
    if found is None:
        return None
    person, row = found
    principal = people.principal_of(session, person, sign_in_id=row.id)
    entered_at = None if person.password is None else row.created_at
    return replace(principal, password_entered_at=entered_at), row.seen_at


@transaction
def note_seen(session: Session, sign_in: str, *, now: float) -> None:
    session.execute(update(models.SignInRecord).where(models.SignInRecord.id == sign_in).values(seen_at=now))


def list_sessions(db: Database, principal: Principal, *, now: float) -> list[BrowserSession]:
    """List a person's open sessions, the most recently used first."""
    table = models.SignInRecord
    query = select(table).where(table.person == principal.name, *_is_open(now))
    with db.read() as session:
        found = session.scalars(query.order_by(table.seen_at.desc(), table.id))
        return [answer_from(row, BrowserSession, this=row.id == principal.sign_in_id) for row in found]


@transaction
def end(session: Session, principal: Principal, sign_in: str, *, now: float) -> None:
    """Sign out one of a person's browsers. Raises UnknownSession."""
    table = models.SignInRecord
    ended = delete(table).where(table.id == sign_in, table.person == principal.name)
    if session.execute(ended.returning(table.id)).one_or_none() is None:
        raise UnknownSession
    audit.record(session, who=principal.name, action="person.sign_out", now=now, before={"session": sign_in})


@transaction
def end_others(session: Session, principal: Principal, *, now: float) -> None:
    """Sign out all of a person's browsers but the current one."""
    table = models.SignInRecord
    others = delete(table).where(table.person == principal.name, table.id != (principal.sign_in_id or ""))
    ended = session.execute(others.returning(table.id)).all()
    if ended:
        about = {"sessions": len(ended)}
        audit.record(session, who=principal.name, action="person.sign_out", now=now, before=about)


@transaction
def delete_expired(session: Session, now: float) -> None:
    """Delete expired sessions, one-time links, OIDC flows and rate limits."""
    rows = models.SignInRecord
    ended = or_(rows.seen_at <= now - IDLE_SECONDS, rows.created_at <= now - LASTS_SECONDS)
    session.execute(delete(rows).where(ended))
    for table in (models.SharedSessionRecord, models.OneTimeLinkRecord, models.OidcFlowRecord):
        session.execute(delete(table).where(table.expires_at <= now))
    rate_limits.delete_full(session, now=now)
