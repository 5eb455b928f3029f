"""People: their names, roles and passwords, and the one-time links with which they choose a password."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

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


def has_people(session: Session) -> bool:
    return session.scalar(select(models.PersonRecord.name).limit(1)) is not None


def has_admin(session: Session) -> bool:
    return bool(session.scalar(select(func.count()).where(models.PersonRecord.admin)))


def principal_of(session: Session, person: models.PersonRecord, *, sign_in_id: str | None = None) -> Principal:
    members = models.MembershipRecord
    rows = session.execute(select(members.project, members.role).where(members.person == person.name))
    roles = MappingProxyType({project: Role[role] for project, role in rows})
    return Principal(kind="person", name=person.name, admin=person.admin, roles=roles, sign_in_id=sign_in_id)


def uses_identity_provider(db: Database, name: str) -> bool:
    """Return whether the person signs in through the identity provider, and thus has no password here."""
    with db.read() as session:
        person = session.get(models.PersonRecord, name)
    return person is not None and person.issuer is not None


def list_people(db: Database) -> list[Person]:
    """List all people by name."""
    people, members = models.PersonRecord, models.MembershipRecord
    with db.read() as session:
        found = session.scalars(select(people).order_by(people.name)).all()
        roles: dict[str, dict[str, str]] = {person.name: {} for person in found}
        for row in session.scalars(select(members).order_by(members.project)):
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
def add(
    session: Session,
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
    _insert(session, models.PersonRecord(name=name, admin=admin, created_at=now))
    for project, role in roles.items():
        require_project(session, project)
        session.add(models.MembershipRecord(person=name, project=project, role=role.name))
    link = _new_link(session, name, now=now)
    about: dict[str, object] = {"name": name, "admin": admin}
    if roles:
        about["roles"] = {project: role.name for project, role in roles.items()}
    audit.record(session, who=who, action="person.add", now=now, after=about)
    return name, link


@transaction
def remove(session: Session, name: str, *, who: str, now: float) -> int:
    """Remove a person with their browser sessions, and revoke their keys. The audit log keeps what they did.

    Returns:
        The number of keys that were revoked.

    Raises:
        UnknownPerson: there is no such person.
        NotPossible: they are the last server admin.
    """
    person = _locked(session, name)
    if person.admin:
        _require_another_admin(session, name)
    revoked = tokens.revoke_of(session, name, now=now)
    session.execute(delete(models.SavedViewRecord).where(models.SavedViewRecord.user == name))
    session.execute(delete(models.PersonRecord).where(models.PersonRecord.name == name))
    audit.record(session, who=who, action="person.remove", now=now, before={"name": name, "keys_revoked": revoked})
    return revoked


@transaction
def set_admin(session: Session, name: str, admin: bool, *, who: str, now: float) -> None:
    """Make a person an administrator, or not. Raises UnknownPerson; NotPossible for the last one."""
    person = _locked(session, name)
    if person.admin == admin:
        return
    if not admin:
        _require_another_admin(session, name)
    person.admin = admin
    session.flush()
    revoked = 0
    if not admin:
        revoked = tokens.revoke_above(session, principal_of(session, person), now=now)
    audit.record(
        session, who=who, action="person.admin", now=now, before={"name": name, "admin": not admin},
        after={"name": name, "admin": admin} | keys_revoked(revoked),
    )  # fmt: skip


@transaction
def set_role(session: Session, name: str, project: str, role: Role | None, *, who: str, now: float) -> None:
    """Set or remove (`None`) a person's role in a project, and revoke those of their keys that exceed it.

    Raises:
        UnknownPerson, UnknownProject.
    """
    person = _locked(session, name)
    require_project(session, project)
    before = change_role(session, person, project, role)
    if before == role:
        return
    revoked = tokens.revoke_above(session, principal_of(session, person), now=now)
    audit.record(
        session, who=who, action="person.role", now=now, project=project,
        before={"name": name, "role": before.name if before else None},
        after={"name": name, "role": role.name if role else None} | keys_revoked(revoked),
    )  # fmt: skip


def keys_revoked(count: int) -> dict[str, object]:
    """Return the field of an audit row that says how many keys a change revoked."""
    return {"keys_revoked": count} if count else {}


def change_role(session: Session, person: models.PersonRecord, project: str, role: Role | None) -> Role | None:
    """Store the role and return the previous one."""
    row = session.get(models.MembershipRecord, (person.name, project))
    before = Role[row.role] if row else None
    if row is not None and role is None:
        session.delete(row)
    elif row is not None and role is not None:
        row.role = role.name
    elif role is not None:
        session.add(models.MembershipRecord(person=person.name, project=project, role=role.name))
    session.flush()
    return before


@transaction
def reset_link(session: Session, name: str, *, who: str, now: float) -> str:
    """Return the secret of a link with which the person chooses a new password. It replaces earlier links.

    Raises:
        UnknownPerson: there is no such person.
        NotPossible: they sign in through the identity provider.
    """
    _require_local_password(_locked(session, name))
    link = _new_link(session, name, now=now)
    audit.record(session, who=who, action="person.reset_link", now=now, after={"name": name})
    return link


@transaction
def setup_link(session: Session, *, who: str, now: float) -> str | None:
    """Return the secret of a link that creates the first administrator; `None` if there is one already."""
    if has_admin(session):
        return None
    link = _new_link(session, None, now=now)
    audit.record(session, who=who, action="server.setup_link", now=now)
    return link


def create_first_admin(db: Database, link: str, name: str, password: str, *, now: float) -> str:
    """Create the first administrator with a setup link, and return the name as it is stored.

    Raises:
        LinkExpired, InvalidSetting, WeakPassword, NotPossible.
    """
    name = valid_name(name)
    passwords.check(password, name)
    _owner_of(db, link, now=now)
    hashed = passwords.hashed(password)

    def work(session: Session) -> str:
        if _use(session, link, now=now) is not None or has_admin(session):
            raise LinkExpired
        _insert(session, models.PersonRecord(name=name, password=hashed, admin=True, created_at=now))
        audit.record(session, who=name, action="server.setup", now=now, after={"name": name, "admin": True})
        return name

    return db.write(work)


def choose_password(db: Database, link: str, password: str, *, now: float) -> str:
    """Set the password of a link's owner, sign out all their browsers, and return their name.

    Raises:
        LinkExpired, WeakPassword.
        NotPossible: they sign in through the identity provider.
    """
    owner = _owner_of(db, link, now=now)
    if owner is None:
        raise LinkExpired
    passwords.check(password, owner)
    hashed = passwords.hashed(password)

    def work(session: Session) -> str:
        if _use(session, link, now=now) != owner:
            raise LinkExpired
        person = _locked(session, owner)
        _require_local_password(person)
        person.password = hashed
        session.execute(delete(models.SignInRecord).where(models.SignInRecord.person == owner))
        audit.record(session, who=owner, action="person.password", now=now, after={"by": "link"})
        return owner

    return db.write(work)


def change_password(db: Database, name: str, password: str, *, keep: str | None, now: float) -> None:
    """Set a password and sign out all browsers but the session `keep`. Raises UnknownPerson, WeakPassword."""
    passwords.check(password, name)
    hashed = passwords.hashed(password)

    def work(session: Session) -> None:
        person = _locked(session, name)
        person.password = hashed
        others = delete(models.SignInRecord).where(
            models.SignInRecord.person == name, models.SignInRecord.id != (keep or "")
        )
        session.execute(others)
        session.execute(delete(models.OneTimeLinkRecord).where(models.OneTimeLinkRecord.person == name))
        audit.record(session, who=name, action="person.password", now=now, after={"by": "themselves"})

    db.write(work)


def _insert(session: Session, person: models.PersonRecord) -> None:
    if session.get(models.PersonRecord, person.name) is not None:
        raise NotPossible(f"the name {person.name} is taken")
    session.add(person)
    session.flush()


def _locked(session: Session, name: str) -> models.PersonRecord:
    row = session.get(models.PersonRecord, name, with_for_update=True)
    if row is None:
        raise UnknownPerson(name)
    return row


def _require_local_password(person: models.PersonRecord) -> None:
    """Refuse a password that would outlive the account at the identity provider, with its last roles."""
    if person.issuer is not None:
        raise NotPossible(
            f"{person.name} signs in through the identity provider and has no password here: reset it there"
        )


def _require_another_admin(session: Session, name: str) -> None:
    # Lock all administrators, so that the last two cannot remove each other at the same moment.
    query = (
        select(models.PersonRecord.name)
        .where(models.PersonRecord.admin)
        .order_by(models.PersonRecord.name)
        .with_for_update()
    )
    if set(session.scalars(query)) <= {name}:
        raise NotPossible(f"{name} is the only server admin: give the role to another person first")


def _new_link(session: Session, person: str | None, *, now: float) -> str:
    links, secret = models.OneTimeLinkRecord, new_link()
    session.execute(delete(links).where(links.person == person if person else links.person.is_(None)))
    seconds = RESET_LINK_SECONDS if person else SETUP_LINK_SECONDS
    session.add(
        models.OneTimeLinkRecord(digest=digest(secret), person=person, created_at=now, expires_at=now + seconds)
    )
    session.flush()
    return secret


def _owner_of(db: Database, link: str, *, now: float) -> str | None:
    """Return a valid link's owner, before the server spends time on hashing a password. Raises LinkExpired."""
    with db.read() as session:
        row = session.get(models.OneTimeLinkRecord, digest(link.strip()))
    if row is None or row.expires_at <= now:
        raise LinkExpired
    return row.person


def _use(session: Session, link: str, *, now: float) -> str | None:
    """Delete the link and return its owner. Of two concurrent uses, one raises LinkExpired."""
    links = models.OneTimeLinkRecord
    claim = (
        delete(links).where(links.digest == digest(link.strip()), links.expires_at > now).returning(links.person)
    )
    found = session.execute(claim).one_or_none()
    if found is None:
        raise LinkExpired
    person: str | None = found[0]
    return person
