"""People: their names, roles and passwords, and the one-time links with which they choose a password."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.administration import Person
from holdfast_server import models
from holdfast_server.accounts import passwords, tokens
from holdfast_server.accounts.projects import require_project
from holdfast_server.accounts.secrets import digest, new_link
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import InvalidSetting, LinkExpired, NotPossible, UnknownPerson
from holdfast_server.core.principal import Principal, Role
from holdfast_server.db import Database, transaction
from holdfast_server.records import audit

SETUP_LINK_SECONDS = 3600.0
RESET_LINK_SECONDS = 24 * 3600.0

_NAME = re.compile(r"[a-z0-9][a-z0-9._@+-]{0,99}")
_RESERVED = frozenset({"operator", "agent", "anonymous", "server", "holdfast", "key"})
"""Names that the audit log and the pages use for clients without an account."""


def valid_name(text: str) -> str:
    """Return the name as it is stored, in lower case. Raises InvalidSetting."""
    name = text.strip().lower()
    if _NAME.fullmatch(name) is None:
        reason = "use 1 to 100 letters a to z, digits and . _ @ + -, starting with a letter or a digit"
        raise InvalidSetting("name", reason)
    if name in _RESERVED:
        raise InvalidSetting("name", f"the name {name!r} is reserved: choose another one")
    return name


async def has_people(session: AsyncSession) -> bool:
    return await session.scalar(select(models.PersonRecord.name).limit(1)) is not None


async def has_admin(session: AsyncSession) -> bool:
    return bool(await session.scalar(select(func.count()).where(models.PersonRecord.admin)))


async def principal_of(
    session: AsyncSession, person: models.PersonRecord, *, sign_in_id: str | None = None
) -> Principal:
    members = models.MembershipRecord
    rows = await session.execute(select(members.project, members.role).where(members.person == person.name))
    roles = MappingProxyType({project: Role[role] for project, role in rows})
    return Principal(kind="person", name=person.name, admin=person.admin, roles=roles, sign_in_id=sign_in_id)


async def uses_identity_provider(db: Database, name: str) -> bool:
    """Return whether the person signs in through the identity provider, and thus has no password here."""
    async with db.read() as session:
        person = await session.get(models.PersonRecord, name)
    return person is not None and person.issuer is not None


async def list_people(db: Database) -> list[Person]:
    """List all people by name."""
    people, members = models.PersonRecord, models.MembershipRecord
    async with db.read() as session:
        found = (await session.scalars(select(people).order_by(people.name))).all()
        roles: dict[str, dict[str, str]] = {person.name: {} for person in found}
        for row in await session.scalars(select(members).order_by(members.project)):
            roles[row.person][row.project] = row.role
    return [
        answer_from(
            person,
            Person,
            roles=roles[person.name],
            signs_in_by="identity provider" if person.issuer else "password" if person.password else "link",
        )
        for person in found
    ]


@transaction
async def add(
    session: AsyncSession,
    name: str,
    *,
    admin: bool = False,
    roles: Mapping[str, Role] | None = None,
    who: str,
    now: float,
) -> tuple[str, str]:
    """Add a person without a password.

    Returns:
        The name as it is stored, and the secret of a link with which they choose a password.

    Raises:
        InvalidSetting: the name is not valid.
        NotPossible: the name exists.
        UnknownProject: there is no such project; nothing is stored.
    """
    name, roles = valid_name(name), roles or {}
    await _insert(session, models.PersonRecord(name=name, admin=admin, created_at=now))
    for project, role in roles.items():
        await require_project(session, project)
        session.add(models.MembershipRecord(person=name, project=project, role=role.name))
    link = await _new_link(session, name, now=now)
    about: dict[str, object] = {"name": name, "admin": admin}
    if roles:
        about["roles"] = {project: role.name for project, role in roles.items()}
    await audit.record(session, who=who, action="person.add", now=now, after=about)
    return name, link


@transaction
async def remove(session: AsyncSession, name: str, *, who: str, now: float) -> int:
    """Remove a person with their browser sessions, and revoke their keys. The audit log keeps what they did.

    Returns:
        The number of keys that were revoked.

    Raises:
        UnknownPerson: there is no such person.
        NotPossible: they are the last server administrator.
    """
    person = await _locked(session, name)
    if person.admin:
        await _require_another_admin(session, name)
    revoked = await tokens.revoke_of(session, name, now=now)
    await session.execute(delete(models.PersonRecord).where(models.PersonRecord.name == name))
    await audit.record(
        session, who=who, action="person.remove", now=now, before={"name": name, "keys_revoked": revoked}
    )
    return revoked


@transaction
async def set_admin(session: AsyncSession, name: str, admin: bool, *, who: str, now: float) -> None:
    """Make a person an administrator, or not. Raises UnknownPerson; NotPossible for the last one."""
    person = await _locked(session, name)
    if person.admin == admin:
        return
    if not admin:
        await _require_another_admin(session, name)
    person.admin = admin
    await session.flush()
    revoked = 0
    if not admin:
        revoked = await tokens.revoke_above(session, await principal_of(session, person), now=now)
    await audit.record(
        session, who=who, action="person.admin", now=now, before={"name": name, "admin": not admin},
        after={"name": name, "admin": admin} | keys_revoked(revoked),
    )  # fmt: skip


@transaction
async def set_role(
    session: AsyncSession, name: str, project: str, role: Role | None, *, who: str, now: float
) -> None:
    """Set or remove (`None`) a person's role in a project, and revoke those of their keys that exceed it.

    Raises:
        UnknownPerson, UnknownProject.
    """
    person = await _locked(session, name)
    await require_project(session, project)
    before = await change_role(session, person, project, role)
    if before == role:
        return
    revoked = await tokens.revoke_above(session, await principal_of(session, person), now=now)
    await audit.record(
        session, who=who, action="person.role", now=now, project=project,
        before={"name": name, "role": before.name if before else None},
        after={"name": name, "role": role.name if role else None} | keys_revoked(revoked),
    )  # fmt: skip


def keys_revoked(count: int) -> dict[str, object]:
    """Return the field of an audit row that says how many keys a change revoked."""
    return {"keys_revoked": count} if count else {}


async def change_role(
    session: AsyncSession, person: models.PersonRecord, project: str, role: Role | None
) -> Role | None:
    """Store the role and return the previous one."""
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


@transaction
async def reset_link(session: AsyncSession, name: str, *, who: str, now: float) -> str:
    """Return the secret of a link with which the person chooses a new password. It replaces earlier links.

    Raises:
        UnknownPerson: there is no such person.
        NotPossible: they sign in through the identity provider.
    """
    _require_local_password(await _locked(session, name))
    link = await _new_link(session, name, now=now)
    await audit.record(session, who=who, action="person.reset_link", now=now, after={"name": name})
    return link


@transaction
async def setup_link(session: AsyncSession, *, who: str, now: float) -> str | None:
    """Return the secret of a link that creates the first administrator; `None` if there is one already."""
    if await has_admin(session):
        return None
    link = await _new_link(session, None, now=now)
    await audit.record(session, who=who, action="server.setup_link", now=now)
    return link


async def create_first_admin(db: Database, link: str, name: str, password: str, *, now: float) -> str:
    """Create the first administrator with a setup link, and return the name as it is stored.

    Raises:
        LinkExpired, InvalidSetting, WeakPassword, NotPossible.
    """
    name = valid_name(name)
    passwords.check(password, name)
    await _owner_of(db, link, now=now)
    hashed = await passwords.hashed(password)

    async def work(session: AsyncSession) -> str:
        if await _use(session, link, now=now) is not None or await has_admin(session):
            raise LinkExpired
        await _insert(session, models.PersonRecord(name=name, password=hashed, admin=True, created_at=now))
        await audit.record(session, who=name, action="server.setup", now=now, after={"name": name, "admin": True})
        return name

    return await db.write(work)


async def choose_password(db: Database, link: str, password: str, *, now: float) -> str:
    """Set the password of a link's owner, sign out all their browsers, and return their name.

    Raises:
        LinkExpired, WeakPassword.
        NotPossible: they sign in through the identity provider.
    """
    owner = await _owner_of(db, link, now=now)
    if owner is None:
        raise LinkExpired
    passwords.check(password, owner)
    hashed = await passwords.hashed(password)

    async def work(session: AsyncSession) -> str:
        if await _use(session, link, now=now) != owner:
            raise LinkExpired
        person = await _locked(session, owner)
        _require_local_password(person)
        person.password = hashed
        await session.execute(delete(models.SignInRecord).where(models.SignInRecord.person == owner))
        await audit.record(session, who=owner, action="person.password", now=now, after={"by": "link"})
        return owner

    return await db.write(work)


async def change_password(db: Database, name: str, password: str, *, keep: str | None, now: float) -> None:
    """Set a password and sign out all browsers but the session `keep`. Raises UnknownPerson, WeakPassword."""
    passwords.check(password, name)
    hashed = await passwords.hashed(password)

    async def work(session: AsyncSession) -> None:
        person = await _locked(session, name)
        person.password = hashed
        others = delete(models.SignInRecord).where(
            models.SignInRecord.person == name, models.SignInRecord.id != (keep or "")
        )
        await session.execute(others)
        await session.execute(delete(models.OneTimeLinkRecord).where(models.OneTimeLinkRecord.person == name))
        await audit.record(session, who=name, action="person.password", now=now, after={"by": "themselves"})

    await db.write(work)


async def _insert(session: AsyncSession, person: models.PersonRecord) -> None:
    if await session.get(models.PersonRecord, person.name) is not None:
        raise NotPossible(f"the name {person.name} is taken")
    session.add(person)
    await session.flush()


async def _locked(session: AsyncSession, name: str) -> models.PersonRecord:
    row = await session.get(models.PersonRecord, name, with_for_update=True)
    if row is None:
        raise UnknownPerson(name)
    return row


def _require_local_password(person: models.PersonRecord) -> None:
    """Refuse a password that would outlive the account at the identity provider, with its last roles."""
    if person.issuer is not None:
        raise NotPossible(
            f"{person.name} signs in through the identity provider and has no password here: reset it there"
        )


async def _require_another_admin(session: AsyncSession, name: str) -> None:
    # Lock all administrators, so that the last two cannot remove each other at the same moment.
    query = (
        select(models.PersonRecord.name)
        .where(models.PersonRecord.admin)
        .order_by(models.PersonRecord.name)
        .with_for_update()
    )
    if set(await session.scalars(query)) <= {name}:
        raise NotPossible(f"{name} is the only server administrator: give the role to another person first")


async def _new_link(session: AsyncSession, person: str | None, *, now: float) -> str:
    links, secret = models.OneTimeLinkRecord, new_link()
    await session.execute(delete(links).where(links.person == person if person else links.person.is_(None)))
    seconds = RESET_LINK_SECONDS if person else SETUP_LINK_SECONDS
    session.add(
        models.OneTimeLinkRecord(digest=digest(secret), person=person, created_at=now, expires_at=now + seconds)
    )
    await session.flush()
    return secret


async def _owner_of(db: Database, link: str, *, now: float) -> str | None:
    """Return a valid link's owner, before the server spends time on hashing a password. Raises LinkExpired."""
    async with db.read() as session:
        row = await session.get(models.OneTimeLinkRecord, digest(link.strip()))
    if row is None or row.expires_at <= now:
        raise LinkExpired
    return row.person


async def _use(session: AsyncSession, link: str, *, now: float) -> str | None:
    """Delete the link and return its owner. Of two concurrent uses, one raises LinkExpired."""
    links = models.OneTimeLinkRecord
    claim = (
        delete(links).where(links.digest == digest(link.strip()), links.expires_at > now).returning(links.person)
    )
    found = (await session.execute(claim)).one_or_none()
    if found is None:
        raise LinkExpired
    person: str | None = found[0]
    return person
