"""People: who they are, what they may do in which project, and how they choose a password."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.administration import PersonRow
from holdfast_server import models
from holdfast_server.accounts import passwords, tokens
from holdfast_server.accounts.secrets import digest, new_link
from holdfast_server.core.errors import DeadLink, InvalidSetting, NotPossible, UnknownPerson, UnknownProject
from holdfast_server.core.principal import Principal, Role
from holdfast_server.db import Database
from holdfast_server.records import audit

SETUP_LINK_SECONDS = 3600.0
RESET_LINK_SECONDS = 24 * 3600.0

_NAME = re.compile(r"[a-z0-9][a-z0-9._@+-]{0,99}")
_TAKEN = frozenset({"operator", "agent", "nobody", "server", "holdfast", "key"})
"""What the log and the pages call those who are nobody in particular."""


def valid_name(text: str) -> str:
    """The name as it is kept, in small letters; InvalidSetting for what cannot be one."""
    name = text.strip().lower()
    if _NAME.fullmatch(name) is None:
        reason = "a name has 1 to 100 letters a to z, digits and . _ @ + -, and begins with a letter or a digit"
        raise InvalidSetting("name", reason)
    if name in _TAKEN:
        raise InvalidSetting("name", f"{name!r} is what this server calls others: take another name")
    return name


async def anybody(session: AsyncSession) -> bool:
    return await session.scalar(select(models.PersonRecord.name).limit(1)) is not None


async def any_admin(session: AsyncSession) -> bool:
    """Whether somebody can look after this server: until then, its setup link makes the first one."""
    return bool(await session.scalar(select(func.count()).where(models.PersonRecord.admin)))


async def principal_of(
    session: AsyncSession, person: models.PersonRecord, *, sign_in: str | None = None
) -> Principal:
    members = models.MembershipRecord
    rows = await session.execute(select(members.project, members.role).where(members.person == person.name))
    roles = {project: Role[role] for project, role in rows}
    return Principal(
        kind="person", name=person.name, admin=person.admin, roles=MappingProxyType(roles), session=sign_in
    )


async def by_provider(db: Database, name: str) -> bool:
    """Whether they sign in through the identity provider, and have no password here."""
    async with db.read() as session:
        person = await session.get(models.PersonRecord, name)
    return person is not None and person.issuer is not None


async def rows(db: Database) -> list[PersonRow]:
    """By name."""
    people, members = models.PersonRecord, models.MembershipRecord
    async with db.read() as session:
        found = (await session.scalars(select(people).order_by(people.name))).all()
        roles: dict[str, dict[str, str]] = {person.name: {} for person in found}
        for row in await session.scalars(select(members).order_by(members.project)):
            roles[row.person][row.project] = row.role
    return [
        PersonRow(
            name=person.name,
            admin=person.admin,
            roles=roles[person.name],
            signs_in_by="identity provider" if person.issuer else "password" if person.password else "link",
            created_at=person.created_at,
            signed_in_at=person.signed_in_at,
        )
        for person in found
    ]


async def add(
    db: Database, name: str, *, admin: bool = False, roles: Mapping[str, Role] | None = None, who: str, now: float
) -> tuple[str, str]:
    """A person without a password: their name as it is kept, and the secret of a link to choose one.

    Args:
        db: where it is stored.
        name: what they are called.
        admin: whether they look after the whole server.
        roles: what they may do, by project.
        who: the name of the one who asked.
        now: seconds since the epoch.

    Raises:
        InvalidSetting: not a name.
        NotPossible: somebody has it.
        UnknownProject: nobody is added.
    """
    name, roles = valid_name(name), roles or {}

    async def work(session: AsyncSession) -> str:
        if await session.get(models.PersonRecord, name) is not None:
            raise NotPossible(f"somebody here is called {name} already")
        session.add(models.PersonRecord(name=name, admin=admin, created_at=now))
        await session.flush()
        for project, role in roles.items():
            if await session.get(models.ProjectRecord, project) is None:
                raise UnknownProject(project)
            session.add(models.MembershipRecord(person=name, project=project, role=role.name))
        link = await _new_link(session, name, now=now)
        about: dict[str, object] = {"name": name, "admin": admin}
        if roles:
            about["roles"] = {project: role.name for project, role in roles.items()}
        await audit.record(session, who=who, action="person.add", now=now, after=about)
        return link

    return name, await db.write(work)


async def remove(db: Database, name: str, *, who: str, now: float) -> int:
    """Take a person's rights, sign-ins and keys; returns how many keys that were. What they did stays in the log.

    Raises:
        UnknownPerson.
        NotPossible: the last one who can look after this server.
    """

    async def work(session: AsyncSession) -> int:
        person = await _locked(session, name)
        if person.admin:
            await _another_admin(session, name)
        revoked = await tokens.revoke_of(session, name, now=now)
        await session.execute(delete(models.PersonRecord).where(models.PersonRecord.name == name))
        await audit.record(
            session, who=who, action="person.remove", now=now, before={"name": name, "keys_revoked": revoked}
        )
        return revoked

    return await db.write(work)


async def set_admin(db: Database, name: str, admin: bool, *, who: str, now: float) -> None:
    """Whether they look after the whole server. Raises UnknownPerson, NotPossible for the last one who does."""

    async def work(session: AsyncSession) -> None:
        person = await _locked(session, name)
        if person.admin == admin:
            return
        if not admin:
            await _another_admin(session, name)
        person.admin = admin
        await session.flush()
        revoked = 0
        if not admin:
            revoked = await tokens.revoke_above(session, await principal_of(session, person), now=now)
        await audit.record(
            session, who=who, action="person.admin", now=now, before={"name": name, "admin": not admin},
            after={"name": name, "admin": admin} | _with_keys(revoked),
        )  # fmt: skip

    await db.write(work)


async def set_role(db: Database, name: str, project: str, role: Role | None, *, who: str, now: float) -> None:
    """What they may do in a project; None: nothing. Keys of theirs that may do more are revoked.

    Raises:
        UnknownPerson, UnknownProject.
    """

    async def work(session: AsyncSession) -> None:
        person = await _locked(session, name)
        if await session.get(models.ProjectRecord, project) is None:
            raise UnknownProject(project)
        before = await change_role(session, person, project, role)
        if before == role:
            return
        revoked = await tokens.revoke_above(session, await principal_of(session, person), now=now)
        await audit.record(
            session, who=who, action="person.role", now=now, project=project,
            before={"name": name, "role": before.name if before else None},
            after={"name": name, "role": role.name if role else None} | _with_keys(revoked),
        )  # fmt: skip

    await db.write(work)


def _with_keys(revoked: int) -> dict[str, object]:
    return {"keys_revoked": revoked} if revoked else {}


async def change_role(
    session: AsyncSession, person: models.PersonRecord, project: str, role: Role | None
) -> Role | None:
    """What it was before."""
    row = await session.get(models.MembershipRecord, (person.name, project))
    before = Role[row.role] if row else None
    if row is not None and role is None:
        await session.delete(row)
    elif row is not None and role is not None:
        row.role = role.name
    elif role is not None:
        session.add(models.MembershipRecord(person=person.name, project=project, role=role.name))
    await session.flush()
    return before


async def reset_link(db: Database, name: str, *, who: str, now: float) -> str:
    """The secret of a link with which they choose a new password; the links before it are dead.

    Raises:
        UnknownPerson.
        NotPossible: they sign in through the identity provider.
    """

    async def work(session: AsyncSession) -> str:
        _require_password_here(await _locked(session, name))
        link = await _new_link(session, name, now=now)
        await audit.record(session, who=who, action="person.reset_link", now=now, after={"name": name})
        return link

    return await db.write(work)


async def setup_link(db: Database, *, who: str, now: float) -> str | None:
    """The secret of a link that makes the first admin; None where there is one. The links before it are dead."""

    async def work(session: AsyncSession) -> str | None:
        if await any_admin(session):
            return None
        link = await _new_link(session, None, now=now)
        await audit.record(session, who=who, action="server.setup_link", now=now)
        return link

    return await db.write(work)


async def set_up(db: Database, link: str, name: str, password: str, *, now: float) -> str:
    """The first admin's name as it is kept.

    Raises:
        DeadLink, InvalidSetting, WeakPassword, NotPossible.
    """
    name = valid_name(name)
    passwords.check(password, name)
    await _living(db, link, now=now)
    hashed = await passwords.hashed(password)

    async def work(session: AsyncSession) -> str:
        person = await _used(session, link, now=now)
        if person is not None or await any_admin(session):
            raise DeadLink
        if await session.get(models.PersonRecord, name) is not None:
            raise NotPossible(f"somebody here is called {name} already")
        session.add(models.PersonRecord(name=name, password=hashed, admin=True, created_at=now))
        await session.flush()
        await audit.record(session, who=name, action="server.setup", now=now, after={"name": name, "admin": True})
        return name

    return await db.write(work)


async def choose_password(db: Database, link: str, password: str, *, now: float) -> str:
    """By a link that somebody was given; returns whose it was. Every browser of theirs is signed out.

    Raises:
        DeadLink, WeakPassword.
        NotPossible: they sign in through the identity provider.
    """
    owner = await _living(db, link, now=now)
    if owner is None:
        raise DeadLink
    passwords.check(password, owner)
    hashed = await passwords.hashed(password)

    async def work(session: AsyncSession) -> str:
        if await _used(session, link, now=now) != owner:
            raise DeadLink
        person = await _locked(session, owner)
        _require_password_here(person)
        person.password = hashed
        await session.execute(delete(models.SignInRecord).where(models.SignInRecord.person == owner))
        await audit.record(session, who=owner, action="person.password", now=now, after={"by": "link"})
        return owner

    return await db.write(work)


async def change_password(db: Database, name: str, password: str, *, keep: str | None, now: float) -> None:
    """Every browser but the one of the sign-in `keep` is signed out. Raises UnknownPerson, WeakPassword."""
    passwords.check(password, name)
    hashed = await passwords.hashed(password)

    async def work(session: AsyncSession) -> None:
        person = await _locked(session, name)
        person.password = hashed
        others = delete(models.SignInRecord).where(
            models.SignInRecord.person == name, models.SignInRecord.id != (keep or "")
        )
        await session.execute(others)
        await session.execute(delete(models.LinkRecord).where(models.LinkRecord.person == name))
        await audit.record(session, who=name, action="person.password", now=now, after={"by": "themselves"})

    await db.write(work)


async def _locked(session: AsyncSession, name: str) -> models.PersonRecord:
    row = await session.get(models.PersonRecord, name, with_for_update=True)
    if row is None:
        raise UnknownPerson(name)
    return row


def _require_password_here(person: models.PersonRecord) -> None:
    """A password would outlive the account at the identity provider, with the roles that it gave last."""
    if person.issuer is not None:
        raise NotPossible(
            f"{person.name} signs in through the identity provider and has no password here: reset it there"
        )


async def _another_admin(session: AsyncSession, name: str) -> None:
    # All of them are locked, so that the last two cannot take the role from each other at the same moment.
    query = (
        select(models.PersonRecord.name)
        .where(models.PersonRecord.admin)
        .order_by(models.PersonRecord.name)
        .with_for_update()
    )
    if set(await session.scalars(query)) <= {name}:
        raise NotPossible(
            f"{name} is the only one who looks after this server: give the role to another one first"
        )


async def _new_link(session: AsyncSession, person: str | None, *, now: float) -> str:
    links, secret = models.LinkRecord, new_link()
    await session.execute(delete(links).where(links.person == person if person else links.person.is_(None)))
    seconds = RESET_LINK_SECONDS if person else SETUP_LINK_SECONDS
    session.add(models.LinkRecord(digest=digest(secret), person=person, created_at=now, expires_at=now + seconds))
    await session.flush()
    return secret


async def _living(db: Database, link: str, *, now: float) -> str | None:
    """Whose it is, before a password is hashed for it. Raises DeadLink."""
    async with db.read() as session:
        row = await session.get(models.LinkRecord, digest(link.strip()))
    if row is None or row.expires_at <= now:
        raise DeadLink
    return row.person


async def _used(session: AsyncSession, link: str, *, now: float) -> str | None:
    """Claims the link: of two who come with it, one finds it gone. Raises DeadLink."""
    links = models.LinkRecord
    claim = (
        delete(links).where(links.digest == digest(link.strip()), links.expires_at > now).returning(links.person)
    )
    found = (await session.execute(claim)).one_or_none()
    if found is None:
        raise DeadLink
    person: str | None = found[0]
    return person
