"""Signing in: the check of a password, and the browsers that are signed in, each until it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_server import models
from holdfast_server.accounts import passwords, people, rate_limits, secrets
from holdfast_server.accounts.secrets import digest, new_session
from holdfast_server.core.errors import NotSignedIn, UnknownPerson, UnknownSession
from holdfast_server.core.principal import Principal
from holdfast_server.db import Database
from holdfast_server.records import audit

IDLE_SECONDS = 12 * 3600.0
"""A browser that was not seen for so long is signed out."""
LASTS_SECONDS = 7 * 86400.0
"""From sign-in; then somebody shows again who they are."""
SEEN_SECONDS = 60.0
"""How exactly it is known when a browser was last seen."""
MOST_SHOWN = 200
"""Characters of what a browser says of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignInRow:
    """A browser that somebody is signed in with."""

    id: str
    created_at: float
    seen_at: float
    address: str
    browser: str
    this: bool
    """The one that asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Where a request to sign in came from."""

    address: str
    browser: str
    replaces: str | None = None
    """The secret of the session that the browser had before: it ends, so that nobody can plant one."""
    device: str | None = None
    """The browser's device cookie."""


async def with_password(db: Database, name: str, password: str, visitor: Visitor, *, now: float) -> str:
    """The secret of a new session.

    Raises:
        TooManyTries: for this name or from this address.
        NotSignedIn: the name, or the password, is not right.
    """
    known = name.strip().lower()
    try:
        await check_password(db, known, password, visitor, now=now)
    except NotSignedIn:
        async with db.read() as session:
            person = await session.get(models.PersonRecord, known)
        await _note_failure(db, known if person else "somebody unknown", visitor, now=now)
        raise
    return await begin(db, known, visitor, by="password", now=now)


async def check_password(db: Database, person: str, password: str, visitor: Visitor, *, now: float) -> None:
    """Verify a password, as long as there are tries left. Raises TooManyTries, NotSignedIn."""
    passwords.require_room()  # before a try is taken: a busy server is not the visitor's mistake
    stored = await _password_hash(db, person)
    device = visitor.device
    if device is not None and (stored is None or not secrets.is_device(device, person, stored)):
        device = None
    await rate_limits.take(db, person, visitor.address, device=device, now=now)
    if not await passwords.verify(password[: passwords.LONGEST + 1], stored):
        raise NotSignedIn
    await rate_limits.forgive(db, person, visitor.address, device=device)


async def new_device(db: Database, name: str) -> str | None:
    """A device cookie for a browser in which somebody has just shown their password; None without a password."""
    known = name.strip().lower()
    stored = await _password_hash(db, known)
    return None if stored is None else secrets.new_device(known, stored)


async def _password_hash(db: Database, name: str) -> str | None:
    """None, too, for people of the identity provider: no password of this server signs them in."""
    async with db.read() as session:
        person = await session.get(models.PersonRecord, name)
    return person.password if person is not None and person.issuer is None else None


async def begin(db: Database, person: str, visitor: Visitor, *, by: str, now: float) -> str:
    """Sign somebody in who has shown who they are. Raises UnknownPerson for one who was removed meanwhile."""
    secret = new_session()
    kept = digest(secret)

    async def work(session: AsyncSession) -> None:
        row = await session.get(models.PersonRecord, person)
        if row is None:
            raise UnknownPerson(person)
        row.signed_in_at = now
        if visitor.replaces is not None:
            await session.execute(
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
                browser=visitor.browser[:MOST_SHOWN],
            )
        )
        await session.flush()
        about = {"by": by, "address": visitor.address}
        await audit.record(session, who=person, action="person.sign_in", now=now, after=about)

    await db.write(work)
    return secret


async def find(session: AsyncSession, secret: str, *, now: float) -> tuple[Principal, float] | None:
    """Whose session this is, and when it was last seen; None once it has ended."""
    rows = models.SignInRecord
    living = (rows.seen_at > now - IDLE_SECONDS, rows.created_at > now - LASTS_SECONDS)
    query = select(models.PersonRecord, rows).join(rows, rows.person == models.PersonRecord.name)
    found = (await session.execute(query.where(rows.digest == digest(secret), *living))).one_or_none()
    if found is None:
        return None
    person, row = found
    principal = await people.principal_of(session, person, sign_in=row.id)
    typed_at = None if person.password is None else row.created_at
    return replace(principal, password_typed_at=typed_at), row.seen_at


async def seen(db: Database, sign_in: str, *, now: float) -> None:
    async def work(session: AsyncSession) -> None:
        await session.execute(
            update(models.SignInRecord).where(models.SignInRecord.id == sign_in).values(seen_at=now)
        )

    await db.write(work)


async def rows(db: Database, principal: Principal, *, now: float) -> list[SignInRow]:
    """The browsers that somebody is signed in with, the one seen last first."""
    table = models.SignInRecord
    query = (
        select(table)
        .where(table.person == principal.name)
        .where(table.seen_at > now - IDLE_SECONDS, table.created_at > now - LASTS_SECONDS)
        .order_by(table.seen_at.desc(), table.id)
    )
    async with db.read() as session:
        found: Sequence[models.SignInRecord] = (await session.scalars(query)).all()
    return [
        SignInRow(
            id=row.id,
            created_at=row.created_at,
            seen_at=row.seen_at,
            address=row.address,
            browser=row.browser,
            this=row.id == principal.session,
        )
        for row in found
    ]


async def end(db: Database, principal: Principal, sign_in: str, *, now: float) -> None:
    """Sign one of their browsers out. Raises UnknownSession."""
    table = models.SignInRecord

    async def work(session: AsyncSession) -> None:
        mine = delete(table).where(table.id == sign_in, table.person == principal.name)
        if (await session.execute(mine.returning(table.id))).one_or_none() is None:
            raise UnknownSession
        await audit.record(
            session, who=principal.name, action="person.sign_out", now=now, before={"session": sign_in}
        )

    await db.write(work)


async def end_others(db: Database, principal: Principal, *, now: float) -> None:
    """Sign all their other browsers out."""
    table = models.SignInRecord

    async def work(session: AsyncSession) -> None:
        others = delete(table).where(table.person == principal.name, table.id != (principal.session or ""))
        ended = (await session.execute(others.returning(table.id))).all()
        if ended:
            about = {"sessions": len(ended)}
            await audit.record(session, who=principal.name, action="person.sign_out", now=now, before=about)

    await db.write(work)


async def _note_failure(db: Database, name: str, visitor: Visitor, *, now: float) -> None:
    """A name that nobody has may be a password that was typed into the wrong field: it is not written down."""

    async def work(session: AsyncSession) -> None:
        about = {"name": name, "address": visitor.address}
        await audit.record(session, who="nobody", action="person.sign_in_failed", now=now, after=about)

    await db.write(work)
