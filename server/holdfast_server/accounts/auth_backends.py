"""Authentication backends: none (on loopback), a shared secret, or accounts."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from sqlalchemy import delete
from sqlalchemy.exc import SQLAlchemyError

from holdfast_server import models
from holdfast_server.accounts import people, rate_limits, sign_ins, tokens
from holdfast_server.accounts.secrets import digest, new_session
from holdfast_server.core.errors import TooManySignInAttempts
from holdfast_server.core.principal import ANONYMOUS, OPERATOR, Principal
from holdfast_server.core.settings import ServerSettings
from holdfast_server.db import Database, DatabaseBusy, DatabaseClosed, DatabaseUnavailable

CACHE_SECONDS = 2.0
"""How long an instance trusts a cached key: a key that another instance revoked works no longer than this."""
MAX_CACHED = 10_000
WRONG_SECRET_SECONDS = 3600.0
"""How long a wrong secret is remembered: a misconfigured agent that repeats it all day guesses nothing."""
TRUSTED_NETWORK_SECONDS = 3600.0
"""After the right secret came from a network, how long guesses from there do not lock its other clients out."""

K = TypeVar("K")
V = TypeVar("V")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The parts of a request that authenticate it."""

    bearer: str | None
    cookie: str | None
    address: str = "unknown"


class AuthBackend(Protocol):
    """Identifies clients. The access policy decides what they may do."""

    @property
    def has_accounts(self) -> bool:
        """Whether there are people, keys and roles."""

    @property
    def requires_authentication(self) -> bool: ...

    async def authenticate(self, credentials: Credentials, *, now: float) -> Principal: ...


def choose_backend(settings: ServerSettings, db: Database) -> AuthBackend:
    """Choose accounts if they are configured, if people exist, or if the server is exposed without a secret."""
    exposed_by = settings.exposed_by if settings.token is None else None
    accounts = settings.accounts
    if accounts is None:
        with db.read() as session:
            accounts = exposed_by is not None or people.has_people(session)
    if accounts:
        return AccountsAuth(db)
    if settings.token is not None:
        return SharedSecretAuth(settings.token, db)
    if exposed_by:
        raise ValueError(f"{exposed_by} lets other machines reach this server: it needs accounts")
    return NoAuth()


class NoAuth:
    """Treats every client as the operator: only this machine can reach the server."""

    has_accounts = requires_authentication = False

    async def authenticate(self, credentials: Credentials, *, now: float) -> Principal:
        return OPERATOR


class SharedSecretAuth:
    """Treats every client that knows the secret as the operator."""

    has_accounts = False
    requires_authentication = True

    def __init__(self, secret: str, db: Database, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._secret = secret.encode()
        self._db = db
        self._wrong: ExpiringCache[bytes, None] = ExpiringCache(WRONG_SECRET_SECONDS, seconds)
        self._trusted: ExpiringCache[str, None] = ExpiringCache(TRUSTED_NETWORK_SECONDS, seconds)
        self._blocked_until: dict[str, float] = {}
        """By network."""

    async def authenticate(self, credentials: Credentials, *, now: float) -> Principal:
        """Raises TooManySignInAttempts for a blocked network that has not sent the right secret recently."""
        if credentials.bearer is not None and await self._accepts(
            credentials.bearer, credentials.address, now=now
        ):
            return OPERATOR
        if credentials.cookie is not None and await self._db.ask(
            "access", partial(self._has_session, credentials.cookie, now=now)
        ):
            return OPERATOR
        return ANONYMOUS

    async def _accepts(self, secret: str, address: str, *, now: float) -> bool:
        network = rate_limits.network_of(address)
        right = self.matches(secret)
        # All clients behind a NAT or a proxy may share one address: a client that guesses must not lock them out.
        if not (right and network in self._trusted) and (wait := self._blocked_until.get(network, now) - now) > 0:
            raise TooManySignInAttempts(wait)
        if right:
            self._trusted[network] = None
            return True
        known = digest(secret)
        if known not in self._wrong:
            self._wrong[known] = None
            try:
                await self._db.ask(
                    "accounts", partial(rate_limits.take_address_attempt, self._db, address, now=now)
                )
            except TooManySignInAttempts as refusal:
                if len(self._blocked_until) >= MAX_CACHED:
                    self._blocked_until.clear()
                self._blocked_until[network] = now + (refusal.retry_seconds or 0.0)
                raise
        return False

    def matches(self, text: str) -> bool:
        """Compare with the secret in constant time."""
        return hmac.compare_digest(text.strip().encode("utf-8", "surrogatepass"), self._secret)

    def begin_session(self, *, now: float) -> str:
        """Return the cookie for a browser in which a user has entered the secret."""
        cookie = new_session()
        row = models.SharedSessionRecord(digest=self._digest(cookie), expires_at=now + sign_ins.LASTS_SECONDS)
        self._db.write(lambda session: session.merge(row))
        return cookie

    def end_session(self, cookie: str) -> None:
        rows = models.SharedSessionRecord
        ended = delete(rows).where(rows.digest == self._digest(cookie))
        self._db.write(lambda session: session.execute(ended))

    def _has_session(self, cookie: str, *, now: float) -> bool:
        with self._db.read() as session:
            row = session.get(models.SharedSessionRecord, self._digest(cookie))
        return row is not None and row.expires_at > now

    def _digest(self, cookie: str) -> bytes:
        """Return the digest, keyed with the secret: a new secret ends every session."""
        return hmac.new(self._secret, cookie.encode("utf-8", "surrogatepass"), hashlib.sha256).digest()


class AccountsAuth:
    """Identifies people by their browser sessions, and programs by their keys."""

    has_accounts = requires_authentication = True

    def __init__(self, db: Database, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._db = db
        self._keys: ExpiringCache[bytes, models.TokenRecord | None] = ExpiringCache(CACHE_SECONDS, seconds)

    async def authenticate(self, credentials: Credentials, *, now: float) -> Principal:
        if credentials.bearer is not None:
            return await self._key(credentials.bearer, now=now)
        if credentials.cookie is not None:
            return await self._person(credentials.cookie, now=now)
        return ANONYMOUS

    async def _key(self, secret: str, *, now: float) -> Principal:
        known = digest(secret)
        if known in self._keys:
            row = self._keys[known]
        else:
            row = self._keys[known] = await self._db.ask("access", partial(self._find, secret, now=now))
        if row is None or (row.expires_at is not None and row.expires_at <= now):
            return ANONYMOUS
        if now - (row.last_used_at or 0.0) >= tokens.LAST_USED_SECONDS:
            row.last_used_at = now
            note = partial(tokens.note_use, self._db, row.prefix, now=now)
            await self._try_to_note(note)
        return tokens.principal_of(row)

    def _find(self, secret: str, *, now: float) -> models.TokenRecord | None:
        with self._db.read() as session:
            return tokens.find(session, secret, now=now)

    async def _person(self, secret: str, *, now: float) -> Principal:
        found = await self._db.ask("access", partial(self._find_sign_in, secret, now=now))
        if found is None:
            return ANONYMOUS
        principal, seen_at = found
        if now - seen_at >= sign_ins.SEEN_SECONDS and principal.sign_in_id is not None:
            await self._try_to_note(partial(sign_ins.note_seen, self._db, principal.sign_in_id, now=now))
        return principal

    def _find_sign_in(self, secret: str, *, now: float) -> tuple[Principal, float] | None:
        with self._db.read() as session:
            return sign_ins.find(session, secret, now=now)

    async def _try_to_note(self, note: Callable[[], None]) -> None:
        """Store when a client was last seen. A database that is read-only for now must not refuse the request.

        Not in a thread of the class `access`, which every request needs: a write may wait.
        """
        try:
            await self._db.ask("accounts", note)
        except (DatabaseBusy, DatabaseClosed, DatabaseUnavailable, SQLAlchemyError) as error:
            logger.warning("could not store the last use of a key or a browser: %s", error)


class ExpiringCache(Generic[K, V]):
    """A mapping that forgets an entry after a while, and everything when it is full."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._values: dict[K, tuple[float, V]] = {}

    def __contains__(self, key: K) -> bool:
        found = self._values.get(key)
        return found is not None and found[0] > self._clock()

    def __getitem__(self, key: K) -> V:
        return self._values[key][1]

    def __setitem__(self, key: K, value: V) -> None:
        if len(self._values) >= MAX_CACHED:
            self._values.clear()
        self._values[key] = (self._clock() + self._seconds, value)
