"""Keys for programs. A key never has more rights than the person or the key that made it."""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection
from datetime import UTC, datetime

from msgspec import Struct
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from holdfast.protocol.administration import Token
from holdfast.protocol.ids import validate_job
from holdfast_server import models
from holdfast_server.accounts.projects import require_project
from holdfast_server.accounts.secrets import TOKEN_MARK, digest, new_token, prefix_of
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import InvalidSetting, PermissionDenied, UnknownProject, UnknownToken
from holdfast_server.core.principal import SCOPES, Principal, Role, Scope
from holdfast_server.db import Database, transaction
from holdfast_server.records import audit

NEEDED: dict[Scope, Role] = {
    "report": Role.operator,
    "read": Role.viewer,
    "control": Role.operator,
    "admin": Role.admin,
}
"""The role in a project that making a key with the scope requires."""
LAST_USED_SECONDS = 600.0
"""Resolution of the time of last use."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@+-]{0,99}")


class TokenRequest(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The rights of a new key."""

    name: str
    scopes: Collection[Scope]
    project: str | None = None
    """`null` for every project."""
    job: str | None = None
    """`null` for every job of the project."""
    seconds: float | None = None
    """Lifetime; `null` until the key is revoked."""


@transaction
def create(session: Session, request: TokenRequest, *, maker: Principal, now: float) -> tuple[str, Token]:
    """Make a key and return its secret, which is not stored, and its entry in the list of keys.

    Raises:
        InvalidSetting: a field is not valid.
        UnknownProject: there is no such project, or the maker has no rights in it.
        PermissionDenied: the key would have more rights than its maker.
    """
    name, scopes = _checked(request)
    _require_rights(request, maker)
    if request.project is not None:
        require_project(session, request.project)
    secret = new_token()
    row = models.TokenRecord(
        prefix=prefix_of(secret),
        digest=digest(secret),
        name=name,
        scopes=" ".join(scopes),
        project=request.project,
        job=request.job or None,
        created_by=maker.owner,
        created_at=now,
        expires_at=None if request.seconds is None else now + request.seconds,
    )
    session.add(row)
    session.flush()
    until = "revoked" if row.expires_at is None else datetime.fromtimestamp(row.expires_at, UTC).date().isoformat()
    about = {"key": row.prefix, "name": name, "scopes": row.scopes, "until": until}
    audit.record(
        session, who=maker.name, action="key.create", now=now, job=row.job, project=row.project, after=about
    )
    return secret, _listed(row, now)


def list_tokens(db: Database, *, asker: Principal, now: float) -> list[Token]:
    """List the keys that the asker may revoke, newest first."""
    tokens = models.TokenRecord
    with db.read() as session:
        query = select(tokens).order_by(tokens.created_at.desc(), tokens.prefix)
        return [_listed(row, now) for row in session.scalars(query) if _revocable(row, asker)]


@transaction
def revoke(session: Session, prefix: str, *, asker: Principal, now: float) -> Token:
    """Revoke a key. Within seconds, no instance accepts it. Revoking it again has no effect. Raises
    UnknownToken."""
    row = session.get(models.TokenRecord, prefix, with_for_update=True)
    if row is None or not _revocable(row, asker):
        raise UnknownToken(prefix)
    if row.revoked_at is None:
        row.revoked_at = now
        session.flush()
        audit.record(
            session, who=asker.name, action="key.revoke", now=now, job=row.job, project=row.project,
            before={"key": row.prefix, "name": row.name},
        )  # fmt: skip
    return _listed(row, now)


def revoke_of(session: Session, person: str, *, now: float) -> int:
    """Revoke all keys of a person and return their number."""
    tokens = models.TokenRecord
    revoked = update(tokens).where(tokens.created_by == person, tokens.revoked_at.is_(None)).values(revoked_at=now)
    return len(session.execute(revoked.returning(tokens.prefix)).all())


def revoke_above(session: Session, maker: Principal, *, now: float) -> int:
    """Revoke the keys of a person that exceed their current rights, and return the number of these keys."""
    tokens = models.TokenRecord
    query = select(tokens).where(tokens.created_by == maker.name, tokens.revoked_at.is_(None)).with_for_update()
    above = [
        row
        for row in session.scalars(query)
        if any(not _may_grant(maker, row.project, scope) for scope in row.scopes.split())
    ]
    for row in above:
        row.revoked_at = now
    session.flush()
    return len(above)


def find(session: Session, secret: str, *, now: float) -> models.TokenRecord | None:
    """Return the key with this secret if it is valid."""
    if not secret.startswith(TOKEN_MARK):
        return None
    row = session.get(models.TokenRecord, prefix_of(secret))
    if row is None or not hmac.compare_digest(row.digest, digest(secret)):
        return None
    return row if _listed(row, now).state == "works" else None


def principal_of(row: models.TokenRecord) -> Principal:
    scopes = frozenset(scope for scope in SCOPES if scope in row.scopes.split())
    return Principal(
        kind="key",
        # Two keys may have the same name: the prefix tells them apart in the audit log.
        name=f"key {row.name} ({row.prefix})",
        key_owner=row.created_by,
        admin="admin" in scopes and row.project is None and row.job is None,
        scopes=scopes,
        project=row.project,
        job=row.job,
    )


@transaction
def note_use(session: Session, prefix: str, *, now: float) -> None:
    tokens = models.TokenRecord
    session.execute(update(tokens).where(tokens.prefix == prefix).values(last_used_at=now))


def _checked(request: TokenRequest) -> tuple[str, list[Scope]]:
    name = request.name.strip()
    if _NAME.fullmatch(name) is None:
        reason = "use 1 to 100 letters, digits, spaces and . _ @ + - for the name: say what the key is for"
        raise InvalidSetting("name", reason)
    scopes = [scope for scope in SCOPES if scope in request.scopes]
    if not scopes or len(scopes) != len(set(request.scopes)):
        raise InvalidSetting("scopes", f"choose one or more scopes: {', '.join(SCOPES)}")
    if "report" in scopes and request.project is None:
        raise InvalidSetting("project", "a key with the scope report needs a project, to which new jobs belong")
    if request.job:
        if request.project is None:
            raise InvalidSetting("project", "a key for one job needs the project of that job")
        try:
            validate_job(request.job)
        except ValueError as error:
            raise InvalidSetting("job", str(error)) from None
    if request.seconds is not None and not 60 <= request.seconds <= 3650 * 86400:
        raise InvalidSetting("expires", "the lifetime of a key must be 1 minute to 10 years, or unlimited")
    return name, scopes


def _require_rights(request: TokenRequest, maker: Principal) -> None:
    if request.project is not None and maker.role_in(request.project) is None:
        raise UnknownProject(request.project)
    missing = [scope for scope in request.scopes if not _may_grant(maker, request.project, scope)]
    if missing or (maker.job is not None and maker.job != request.job):
        where = "for every project" if request.project is None else f"in {request.project}"
        scopes = " and ".join(sorted(missing)) or "this"
        raise PermissionDenied(f"you may not grant {scopes} {where}: your own rights there are lower")


def _may_grant(maker: Principal, project: str | None, scope: str) -> bool:
    if maker.admin:
        return True
    role = None if project is None else maker.role_in(project)
    return role is not None and role >= NEEDED[scope]  # type: ignore[index]


def grantable(maker: Principal, projects: Collection[str]) -> list[Scope]:
    """Return the scopes that a key of `maker` for at least one of the projects may have."""
    return [scope for scope in SCOPES if any(_may_grant(maker, project, scope) for project in projects)]


def _revocable(row: models.TokenRecord, asker: Principal) -> bool:
    if asker.admin or (asker.kind == "person" and row.created_by == asker.name):
        return True
    if asker.job is None and row.project is not None and asker.role_in(row.project) == Role.admin:
        return True
    # A key may revoke the keys of its owner that it could have made.
    same_owner = row.created_by == asker.owner and asker.job in (None, row.job)
    return same_owner and all(_may_grant(asker, row.project, scope) for scope in row.scopes.split())


def _listed(row: models.TokenRecord, now: float) -> Token:
    expired = row.expires_at is not None and row.expires_at <= now
    state = "revoked" if row.revoked_at is not None else "expired" if expired else "works"
    return answer_from(row, Token, scopes=row.scopes.split(), state=state)
