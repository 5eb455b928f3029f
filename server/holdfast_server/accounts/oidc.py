"""Sign-in through an identity provider: OpenID Connect, code flow with PKCE, by Authlib."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from holdfast_server import models
from holdfast_server.accounts import people, rate_limits, sign_ins, tokens
from holdfast_server.accounts.secrets import digest
from holdfast_server.accounts.sign_ins import Visitor
from holdfast_server.core.errors import InvalidSetting, NotPossible, PermissionDenied, RequestRefused
from holdfast_server.core.oidc_settings import ALL_GROUPS, Grant, ProviderSettings
from holdfast_server.core.principal import Role
from holdfast_server.db import Database, insert
from holdfast_server.records import audit

FLOW_SECONDS = 600.0
REQUEST_SECONDS = 10.0
CALLBACK = "/login/provider/back"
SIGNATURES = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519", "EdDSA")
"""Algorithms with a private key of the provider. `none` and HMAC, which our own secret could make, prove
nothing."""


class ProviderFailed(RequestRefused):
    """The identity provider did not answer, or its answer is not valid."""

    status, code = 403, "provider_failed"
    message = "sign-in through the identity provider failed ({}): try again, or ask its admins"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A person as the provider identifies them."""

    issuer: str
    subject: str
    name: str
    groups: frozenset[str]


class Provider:
    """One identity provider. Its metadata is read when it is first needed."""

    def __init__(self, settings: ProviderSettings) -> None:
        self.settings = settings
        self._app: Any = None

    def begin(self, db: Database, visitor: Visitor, *, back: str, then: str, now: float) -> tuple[str, str]:
        """Begin a sign-in.

        Returns:
            The URL to send the browser to, and the state, which the browser must keep in a cookie.

        Raises:
            TooManySignInAttempts, ProviderFailed.
        """
        rate_limits.take_address_attempt(db, visitor.address, now=now)
        state, nonce = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        made = asyncio.run(self._authorization(back, state=state, nonce=nonce))
        flow = models.OidcFlowRecord(
            digest=digest(state), nonce=nonce, verifier=made["code_verifier"], then=then,
            expires_at=now + FLOW_SECONDS,
        )  # fmt: skip
        db.write(lambda session: session.merge(flow))
        return made["url"], state

    def finish(
        self, db: Database, visitor: Visitor, *, back: str, code: str, state: str, kept: str, now: float
    ) -> tuple[str, str]:
        """Sign in and return the secret of a new session, and the path to continue to.

        Args:
            back: the callback URL that the flow began with.
            state: the state in the callback URL.
            kept: the state in the browser's cookie, which a victim of a forged callback URL does not have.

        Raises:
            ProviderFailed, PermissionDenied, NotPossible, InvalidSetting.
        """
        if not hmac.compare_digest(digest(state), digest(kept)) or not state:
            raise ProviderFailed("it began in another browser")
        flow = self._claimed(db, state, now=now)
        identity = asyncio.run(self._identity(back, code, flow))
        person = self._person(db, identity, now=now)
        secret = sign_ins.begin(db, person, visitor, by="identity provider", now=now)
        return secret, flow.then

    def _claimed(self, db: Database, state: str, *, now: float) -> models.OidcFlowRecord:
        rows = models.OidcFlowRecord

        def work(session: Session) -> models.OidcFlowRecord | None:
            found = session.get(rows, digest(state), with_for_update=True)
            if found is not None:
                session.delete(found)
            return found

        flow = db.write(work)
        if flow is None or flow.expires_at <= now:
            raise ProviderFailed("it took too long, or had finished already")
        return flow

    async def _authorization(self, back: str, *, state: str, nonce: str) -> Mapping[str, str]:
        app = await self._client()
        with _ProviderErrors():
            made: Mapping[str, str] = await app.create_authorization_url(back, state=state, nonce=nonce)
        return made

    async def _identity(self, back: str, code: str, flow: models.OidcFlowRecord) -> Identity:
        app = await self._client()
        with _ProviderErrors():
            token = await app.fetch_access_token(back, code=code, code_verifier=flow.verifier)
            claims = await app.parse_id_token(token, nonce=flow.nonce)
            if claims is None:
                raise ProviderFailed("no ID token")
            known: dict[str, Any] = dict(claims)
            if self.settings.groups_claim not in known and "userinfo_endpoint" in app.server_metadata:
                more = await app.userinfo(token=token)
                if more.get("sub") == known["sub"]:
                    known = {**more, **known}
        return Identity(
            issuer=self.settings.issuer,
            subject=str(known["sub"]),
            name=self._name(known),
            groups=frozenset(_texts(known.get(self.settings.groups_claim))),
        )

    def _name(self, claims: Mapping[str, Any]) -> str:
        for claim in (self.settings.name_claim, "preferred_username", "email"):
            if isinstance(text := claims.get(claim), str) and text.strip():
                return people.valid_name(text)
        raise InvalidSetting(
            "name", f"the identity provider sends no claim {self.settings.name_claim} for your name"
        )

    def _person(self, db: Database, identity: Identity, *, now: float) -> str:
        """Return the person's name on this server, after storing the roles that their groups give now."""
        grants = [grant for grant in self.settings.grants if grant.group in (*identity.groups, ALL_GROUPS)]

        def work(session: Session) -> str | None:
            rows = models.PersonRecord
            known = select(rows).where(rows.issuer == identity.issuer, rows.subject == identity.subject)
            person = session.scalars(known.with_for_update()).one_or_none()
            if person is None and not grants:
                return None
            if person is None:
                person = _new(session, identity, now=now)
            _update_rights(session, person, grants, now=now)
            return person.name if grants else None

        name = db.write(work)
        if name is None:
            raise PermissionDenied(f"{identity.name} has no rights on this server: ask its administrator")
        return name

    async def _client(self) -> Any:
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
            with _ProviderErrors():
                metadata = await made.load_server_metadata()
                if (issuer := metadata.get("issuer")) != self.settings.issuer:
                    raise ProviderFailed(f"its issuer is {issuer!r}, not {self.settings.issuer!r}")
                offered = metadata.get("id_token_signing_alg_values_supported") or ["RS256"]
                metadata["id_token_signing_alg_values_supported"] = [
                    name for name in offered if name in SIGNATURES
                ]
            self._app = made
        return self._app


class _ProviderErrors:
    """Turns every error of a request to the provider into a `ProviderFailed`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and isinstance(error, Exception) and not isinstance(error, RequestRefused):
            # Authlib, joserfc, the HTTP library and JSON decoding each have their own exceptions.
            raise ProviderFailed(f"{type(error).__name__}: {str(error)[:200]}") from error


def _new(session: Session, identity: Identity, *, now: float) -> models.PersonRecord:
    if session.get(models.PersonRecord, identity.name) is not None:
        raise NotPossible(
            f"the name {identity.name} belongs to an account with a password on this server: sign in with that "
            "password, or ask an administrator to remove the account"
        )
    person = models.PersonRecord(
        name=identity.name, admin=False, issuer=identity.issuer, subject=identity.subject, created_at=now
    )
    session.add(person)
    session.flush()
    about = {"name": person.name, "by": "identity provider"}
    audit.record(session, who=person.name, action="person.add", now=now, after=about)
    return person


def _update_rights(
    session: Session, person: models.PersonRecord, grants: Collection[Grant], *, now: float
) -> None:
    """Store the granted roles, and revoke the keys that exceed them."""
    before = people.principal_of(session, person)
    _grant(session, person, grants, now=now)
    after = people.principal_of(session, person)
    revoked = tokens.revoke_above(session, after, now=now)
    if not grants:
        session.execute(delete(models.SignInRecord).where(models.SignInRecord.person == person.name))
    if before != after or revoked:
        audit.record(
            session, who=person.name, action="person.provider_roles", now=now,
            before=_rights(before.admin, before.roles),
            after=_rights(after.admin, after.roles) | people.keys_revoked(revoked),
        )  # fmt: skip


def _grant(session: Session, person: models.PersonRecord, grants: Iterable[Grant], *, now: float) -> None:
    roles: dict[str, Role] = {}
    for grant in grants:
        if grant.project is not None:
            roles[grant.project] = max(grant.role, roles.get(grant.project, Role.viewer))
    for project in roles:
        made = insert(session, models.ProjectRecord).values(name=project, created_at=now).on_conflict_do_nothing()
        session.execute(made)
    held = select(models.MembershipRecord.project).where(models.MembershipRecord.person == person.name)
    for project in {*roles, *session.scalars(held)}:
        people.change_role(session, person, project, roles.get(project))
    person.admin = any(grant.project is None for grant in grants)
    session.flush()


def _rights(admin: bool, roles: Mapping[str, Role]) -> dict[str, object]:
    return {"admin": admin, "roles": {project: role.name for project, role in roles.items()}}


def _texts(value: object) -> Iterable[str]:
    if isinstance(value, str):
        return value.split()
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _authlib() -> ModuleType:
    try:
        from authlib.integrations import starlette_client  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise NotPossible(
            f"sign-in through an identity provider needs {error.name}: install Holdfast with the extra `oidc`"
        ) from None
    return starlette_client  # type: ignore[no-any-return]
