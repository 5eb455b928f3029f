"""Keys for programs: made, listed, revoked. What one may do never exceeds what whoever made it may."""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.administration import TokenRow
from holdfast.protocol.messages import validate_job
from holdfast_server import models
from holdfast_server.accounts.secrets import TOKEN_MARK, digest, new_token, prefix_of
from holdfast_server.core.errors import InvalidSetting, NotPermitted, UnknownProject, UnknownToken
from holdfast_server.core.principal import SCOPES, Principal, Role, Scope
from holdfast_server.db import Database
from holdfast_server.records import audit

NEEDED: dict[Scope, Role] = {
    "report": Role.operator,
    "read": Role.viewer,
    "control": Role.operator,
    "admin": Role.admin,
}
"""What somebody must be in a project to make a key with the scope."""
USED_SECONDS = 600.0
"""How exactly it is known when a key was last used."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@+-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a new key is to be for."""

    name: str
    scopes: Collection[Scope]
    project: str | None
    job: str | None = None
    seconds: float | None = None
    """How long it works; None: until it is revoked."""


async def create(db: Database, wish: Wish, *, maker: Principal, now: float) -> tuple[str, TokenRow]:
    """The key, which is told here and never again, and how it is listed.

    Raises:
        InvalidSetting: what cannot be asked for.
        UnknownProject: there is none of this name, or the maker has no right in it.
        NotPermitted: it would do more than its maker may.
    """
    name, scopes = _checked(wish)
    _permitted(wish, maker)

    async def work(session: AsyncSession) -> tuple[str, models.TokenRecord]:
        if wish.project is not None and await session.get(models.ProjectRecord, wish.project) is None:
            raise UnknownProject(wish.project)
        secret = new_token()
        row = models.TokenRecord(
            prefix=prefix_of(secret),
            digest=digest(secret),
            name=name,
            scopes=" ".join(scopes),
            project=wish.project,
            job=wish.job or None,
            created_by=maker.owner,
            created_at=now,
            expires_at=None if wish.seconds is None else now + wish.seconds,
        )
        session.add(row)
        await session.flush()
        about = {"key": row.prefix, "name": name, "scopes": row.scopes, "until": _day(row.expires_at)}
        await audit.record(
            session, who=maker.name, action="key.create", now=now, job=row.job, project=row.project, after=about
        )
        return secret, row

    secret, row = await db.write(work)
    return secret, _listed(row, now)


async def rows(db: Database, *, asker: Principal, now: float) -> list[TokenRow]:
    """Those that the asker may revoke, the newest first."""
    tokens = models.TokenRecord
    async with db.read() as session:
        query = select(tokens).order_by(tokens.created_at.desc(), tokens.prefix)
        return [_listed(row, now) for row in await session.scalars(query) if _revocable(row, asker)]


async def revoke(db: Database, prefix: str, *, asker: Principal, now: float) -> TokenRow:
    """No instance takes it any more, within seconds; revoked twice is revoked. Raises UnknownToken."""

    async def work(session: AsyncSession) -> models.TokenRecord:
        row = await session.get(models.TokenRecord, prefix, with_for_update=True)
        if row is None or not _revocable(row, asker):
            raise UnknownToken(prefix)
        if row.revoked_at is None:
            row.revoked_at = now
            await session.flush()
            about = {"key": row.prefix, "name": row.name}
            await audit.record(
                session,
                who=asker.name,
                action="key.revoke",
                now=now,
                job=row.job,
                project=row.project,
                before=about,
            )
        return row

    return _listed(await db.write(work), now)


async def revoke_of(session: AsyncSession, person: str, *, now: float) -> int:
    """All of somebody's; how many those were."""
    tokens = models.TokenRecord
    made = update(tokens).where(tokens.created_by == person, tokens.revoked_at.is_(None)).values(revoked_at=now)
    return len((await session.execute(made.returning(tokens.prefix))).all())


async def revoke_above(session: AsyncSession, maker: Principal, *, now: float) -> int:
    """Of somebody's, the ones that may do more than they may by now; how many those were."""
    tokens = models.TokenRecord
    query = select(tokens).where(tokens.created_by == maker.name, tokens.revoked_at.is_(None)).with_for_update()
    above = [
        row
        for row in await session.scalars(query)
        if any(not _may_give(maker, row.project, scope) for scope in row.scopes.split())
    ]
    for row in above:
        row.revoked_at = now
    await session.flush()
    return len(above)


async def find(session: AsyncSession, secret: str, *, now: float) -> models.TokenRecord | None:
    """The key that this is, while it works."""
    if not secret.startswith(TOKEN_MARK):
        return None
    row = await session.get(models.TokenRecord, prefix_of(secret))
    # The digest of a near miss is as far off as any other; it is compared in constant time all the same.
    if row is None or not hmac.compare_digest(row.digest, digest(secret)):
        return None
    return row if _listed(row, now).state == "works" else None


def principal_of(row: models.TokenRecord) -> Principal:
    scopes = frozenset(scope for scope in SCOPES if scope in row.scopes.split())
    return Principal(
        kind="agent",
        # Two keys may be called the same; the log is to tell them apart.
        name=f"key {row.name} ({row.prefix})",
        belongs_to=row.created_by,
        admin="admin" in scopes and row.project is None and row.job is None,
        scopes=scopes,
        project=row.project,
        job=row.job,
    )


async def note_use(db: Database, prefix: str, *, now: float) -> None:
    async def work(session: AsyncSession) -> None:
        tokens = models.TokenRecord
        await session.execute(update(tokens).where(tokens.prefix == prefix).values(last_used_at=now))

    await db.write(work)


def _day(at: float | None) -> str:
    return "revoked" if at is None else datetime.fromtimestamp(at, UTC).date().isoformat()


def _checked(wish: Wish) -> tuple[str, list[Scope]]:
    name = wish.name.strip()
    if _NAME.fullmatch(name) is None:
        reason = "a key's name has 1 to 100 letters, digits, blanks and . _ @ + -: say what it is for"
        raise InvalidSetting("name", reason)
    scopes = [scope for scope in SCOPES if scope in wish.scopes]
    if not scopes or len(scopes) != len(set(wish.scopes)):
        raise InvalidSetting("scopes", f"say what the key may do: one or more of {', '.join(SCOPES)}")
    if "report" in scopes and wish.project is None:
        raise InvalidSetting("project", "a key that reports is for one project: its new jobs belong there")
    if wish.job is not None and wish.job:
        if wish.project is None:
            raise InvalidSetting("project", "a key for one job needs the project of that job")
        try:
            validate_job(wish.job)
        except ValueError as error:
            raise InvalidSetting("job", str(error)) from None
    if wish.seconds is not None and not 60 <= wish.seconds <= 3650 * 86400:
        raise InvalidSetting("expires", "a key works for a minute to ten years, or until it is revoked")
    return name, scopes


def _permitted(wish: Wish, maker: Principal) -> None:
    if wish.project is not None and maker.role_in(wish.project) is None:
        raise UnknownProject(wish.project)
    missing = [scope for scope in wish.scopes if not _may_give(maker, wish.project, scope)]
    if missing or (maker.job is not None and maker.job != wish.job):
        where = "for every project" if wish.project is None else f"in {wish.project}"
        raise NotPermitted(
            f"you may not give {' and '.join(sorted(missing)) or 'that'} {where}: you have less yourself"
        )


def _may_give(maker: Principal, project: str | None, scope: str) -> bool:
    if maker.admin:
        return True
    role = None if project is None else maker.role_in(project)
    return role is not None and role >= NEEDED[scope]  # type: ignore[index]


def _revocable(row: models.TokenRecord, asker: Principal) -> bool:
    if asker.admin or (asker.kind == "person" and row.created_by == asker.name):
        return True
    if asker.job is None and row.project is not None and asker.role_in(row.project) == Role.admin:
        return True
    # A key sees to those of its owner that it could have made, and to none that may do more.
    mine = row.created_by == asker.owner and asker.job in (None, row.job)
    return mine and all(_may_give(asker, row.project, scope) for scope in row.scopes.split())


def _listed(row: models.TokenRecord, now: float) -> TokenRow:
    expired = row.expires_at is not None and row.expires_at <= now
    return TokenRow(
        prefix=row.prefix,
        name=row.name,
        scopes=row.scopes.split(),
        project=row.project,
        job=row.job,
        created_by=row.created_by,
        created_at=row.created_at,
        expires_at=row.expires_at,
        last_used_at=row.last_used_at,
        revoked_at=row.revoked_at,
        state="revoked" if row.revoked_at is not None else "expired" if expired else "works",
    )
