"""Signing in through an identity provider: OpenID Connect, code flow with PKCE, by Authlib."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_server import models
from holdfast_server.accounts import people, rate_limits, sign_ins, tokens
from holdfast_server.accounts.secrets import digest
from holdfast_server.accounts.sign_ins import Visitor
from holdfast_server.core.errors import InvalidSetting, NotPermitted, NotPossible, Refused
from holdfast_server.core.oidc_settings import EVERYBODY, Grant, ProviderSettings
from holdfast_server.core.principal import Role
from holdfast_server.db import Database, insert
from holdfast_server.records import audit

HANDSHAKE_SECONDS = 600.0
REQUEST_SECONDS = 10.0
CALLBACK = "/login/provider/back"
SIGNATURES = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519", "EdDSA")
"""Made with a key that only the provider has. `none`, or one that our own secret could make, proves nothing."""


class ProviderFailed(Refused):
    """The identity provider did not answer, or not with what can be believed."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the identity provider did not confirm who you are ({reason}): try again, or ask its admins"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whom the provider vouches for."""

    issuer: str
    subject: str
    name: str
    groups: frozenset[str]


class Provider:
    """One identity provider; its own description of itself is read when it is first needed."""

    def __init__(self, settings: ProviderSettings) -> None:
        self.settings = settings
        self._app: Any = None

    async def begin(self, db: Database, visitor: Visitor, *, back: str, then: str, now: float) -> tuple[str, str]:
        """The address to send the browser to, and the state that it is to bring back: give it that as a cookie.

        Raises:
            TooManyTries, ProviderFailed.
        """
        await rate_limits.take_from_address(db, visitor.address, now=now)
        state, nonce = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        app = await self._described()
        with _Believing():
            made = await app.create_authorization_url(back, state=state, nonce=nonce)
        shake = models.HandshakeRecord(
            digest=digest(state), nonce=nonce, verifier=made["code_verifier"], then=then,
            expires_at=now + HANDSHAKE_SECONDS,
        )  # fmt: skip

        async def work(session: AsyncSession) -> None:
            await session.execute(delete(models.HandshakeRecord).where(models.HandshakeRecord.expires_at <= now))
            await session.merge(shake)

        await db.write(work)
        return made["url"], state

    async def finish(
        self, db: Database, visitor: Visitor, *, back: str, code: str, state: str, kept: str, now: float
    ) -> tuple[str, str]:
        """The secret of a new session, and the path to go on to.

        Args:
            back: the address that the provider was told to send the browser to.
            code: what the provider sent with it.
            state: as the browser brought it in the address.
            kept: as the browser kept it in its cookie: who was lured here with another one's address has none.

        Raises:
            ProviderFailed, NotPermitted, NotPossible, InvalidSetting.
        """
        if not hmac.compare_digest(digest(state), digest(kept)) or not state:
            raise ProviderFailed("the sign-in was begun in another browser")
        shake = await self._claimed(db, state, now=now)
        identity = await self._identity(back, code, shake)
        person = await self._person(db, identity, now=now)
        secret = await sign_ins.begin(db, person, visitor, by="identity provider", now=now)
        return secret, shake.then

    async def _claimed(self, db: Database, state: str, *, now: float) -> models.HandshakeRecord:
        rows = models.HandshakeRecord

        async def work(session: AsyncSession) -> models.HandshakeRecord | None:
            found = await session.get(rows, digest(state), with_for_update=True)
            if found is not None:
                await session.delete(found)
            return found

        shake = await db.write(work)
        if shake is None or shake.expires_at <= now:
            raise ProviderFailed("the sign-in took too long, or was finished already")
        return shake

    async def _identity(self, back: str, code: str, shake: models.HandshakeRecord) -> Identity:
        app = await self._described()
        with _Believing():
            token = await app.fetch_access_token(back, code=code, code_verifier=shake.verifier)
            claims = await app.parse_id_token(token, nonce=shake.nonce)
            if claims is None:
                raise ProviderFailed("it sent no ID token")
            told: dict[str, Any] = dict(claims)
            if self.settings.groups_claim not in told and "userinfo_endpoint" in app.server_metadata:
                more = await app.userinfo(token=token)
                if more.get("sub") == told["sub"]:
                    told = {**more, **told}
        return Identity(
            issuer=self.settings.issuer,
            subject=str(told["sub"]),
            name=self._name(told),
            groups=frozenset(_texts(told.get(self.settings.groups_claim))),
        )

    def _name(self, claims: Mapping[str, Any]) -> str:
        for claim in (self.settings.name_claim, "preferred_username", "email"):
            if isinstance(text := claims.get(claim), str) and text.strip():
                return people.valid_name(text)
        raise InvalidSetting("name", f"the identity provider tells no {self.settings.name_claim} to call you by")

    async def _person(self, db: Database, identity: Identity, *, now: float) -> str:
        """Who that is here, with the rights that the provider's groups give by now."""
        grants = [grant for grant in self.settings.grants if grant.group in (*identity.groups, EVERYBODY)]

        async def work(session: AsyncSession) -> str | None:
            rows = models.PersonRecord
            known = select(rows).where(rows.issuer == identity.issuer, rows.subject == identity.subject)
            person = (await session.scalars(known.with_for_update())).one_or_none()
            if person is None and not grants:
                return None
            if person is None:
                person = await _new(session, identity, now=now)
            await _settle_rights(session, person, grants, now=now)
            return person.name if grants else None

        name = await db.write(work)
        if name is None:
            raise NotPermitted(
                f"{identity.name} is known to the identity provider and has no rights on this server"
            )
        return name

    async def _described(self) -> Any:
        if self._app is None:
            made = _authlib().StarletteOAuth2App(
                None,
                client_id=self.settings.client_id,
                client_secret=self.settings.client_secret,
                server_metadata_url=self.settings.issuer.rstrip("/") + "/.well-known/openid-configuration",
                client_kwargs={
                    "scope": self.settings.scopes,
                    "code_challenge_method": "S256",
                    "timeout": REQUEST_SECONDS,
                },
            )
            with _Believing():
                told = await made.load_server_metadata()
                if told.get("issuer") != self.settings.issuer:
                    raise ProviderFailed(f"it calls itself {told.get('issuer')!r}, not {self.settings.issuer!r}")
                offered = told.get("id_token_signing_alg_values_supported") or ["RS256"]
                told["id_token_signing_alg_values_supported"] = [name for name in offered if name in SIGNATURES]
            self._app = made
        return self._app


class _Believing:
    """Whatever is wrong with an answer of the provider's, it is a `ProviderFailed`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and isinstance(error, Exception) and not isinstance(error, Refused):
            # Authlib, joserfc, the HTTP library and a provider's odd JSON each raise of their own kind.
            raise ProviderFailed(f"{type(error).__name__}: {str(error)[:200]}") from error


async def _new(session: AsyncSession, identity: Identity, *, now: float) -> models.PersonRecord:
    if await session.get(models.PersonRecord, identity.name) is not None:
        raise NotPossible(
            f"{identity.name} has an account here that is not the identity provider's: sign in to it with its "
            "password, or have an admin remove it"
        )
    person = models.PersonRecord(
        name=identity.name, admin=False, issuer=identity.issuer, subject=identity.subject, created_at=now
    )
    session.add(person)
    await session.flush()
    about = {"name": person.name, "by": "identity provider"}
    await audit.record(session, who=person.name, action="person.add", now=now, after=about)
    return person


async def _settle_rights(
    session: AsyncSession, person: models.PersonRecord, grants: Collection[Grant], *, now: float
) -> None:
    """What the groups do not give any more goes, and with it the keys that went beyond what is left."""
    before = await people.principal_of(session, person)
    await _grant(session, person, grants, now=now)
    after = await people.principal_of(session, person)
    revoked = await tokens.revoke_above(session, after, now=now)
    if not grants:
        await session.execute(delete(models.SignInRecord).where(models.SignInRecord.person == person.name))
    if before != after or revoked:
        await audit.record(
            session, who=person.name, action="person.provider_roles", now=now,
            before=_rights(before.admin, before.roles),
            after=_rights(after.admin, after.roles) | ({"keys_revoked": revoked} if revoked else {}),
        )  # fmt: skip


async def _grant(
    session: AsyncSession, person: models.PersonRecord, grants: Iterable[Grant], *, now: float
) -> None:
    roles: dict[str, Role] = {}
    for grant in grants:
        if grant.project is not None:
            roles[grant.project] = max(grant.role, roles.get(grant.project, Role.viewer))
    for project in roles:
        made = insert(session, models.ProjectRecord).values(name=project, created_at=now).on_conflict_do_nothing()
        await session.execute(made)
    held = select(models.MembershipRecord.project).where(models.MembershipRecord.person == person.name)
    for project in {*roles, *await session.scalars(held)}:
        await people.change_role(session, person, project, roles.get(project))
    person.admin = any(grant.project is None for grant in grants)
    await session.flush()


def _rights(admin: bool, roles: Mapping[str, Role]) -> dict[str, object]:
    return {"admin": admin, "roles": {project: role.name for project, role in roles.items()}}


def _texts(value: object) -> Iterable[str]:
    if isinstance(value, str):
        return value.split()
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def check_address(issuer: str) -> None:
    """ValueError for an address over which anybody on the way could say who somebody is."""
    parts = urlsplit(issuer)
    if parts.scheme != "https" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise ValueError(f"HOLDFAST_OIDC_ISSUER {issuer!r}: an identity provider is asked over https")


def _authlib() -> ModuleType:
    try:
        from authlib.integrations import starlette_client  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise NotPossible(
            f"signing in through an identity provider needs {error.name}: install Holdfast with its extra `oidc`"
        ) from None
    return starlette_client  # type: ignore[no-any-return]
