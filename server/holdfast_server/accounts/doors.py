"""How a server finds out who asks: it does not (loopback), by one shared secret, or by accounts."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Protocol, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from holdfast_server import models
from holdfast_server.accounts import people, sign_ins, tokens
from holdfast_server.accounts.principal import NOBODY, OPERATOR, Principal
from holdfast_server.accounts.secrets import digest
from holdfast_server.db import Database, DatabaseBusy, DatabaseClosed, DatabaseUnavailable
from holdfast_server.settings import ServerSettings

REMEMBERED_SECONDS = 2.0
"""How long an instance goes by what it knows of a key: one that was revoked elsewhere works for no longer."""
MOST_REMEMBERED = 10_000
SHARED_SESSION_SECONDS = 30 * 24 * 3600

K = TypeVar("K")
V = TypeVar("V")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shown:
    """What a request shows of who sent it."""

    bearer: str | None
    cookie: str | None


class Door(Protocol):
    """Answers one question; what follows from the answer is the policy's."""

    @property
    def accounts(self) -> bool:
        """Whether there are people, keys and rights to speak of."""

    @property
    def asks(self) -> bool:
        """Whether anybody has to show who they are."""

    async def who(self, shown: Shown, *, now: float) -> Principal: ...


async def door_for(settings: ServerSettings, db: Database) -> Door:
    """Accounts where they are asked for, where there are people already, and where nothing else guards a server
    that other machines reach."""
    exposed = not settings.loopback and settings.token is None
    accounts = settings.accounts
    if accounts is None:
        async with db.read() as session:
            accounts = exposed or await people.anybody(session)
    if accounts:
        return Accounts(db)
    if settings.token is not None:
        return SharedSecret(settings.token)
    if exposed:
        raise ValueError(f"{settings.host} can be reached from other machines: a server there needs accounts")
    return OpenDoor()


class OpenDoor:
    """A server on loopback: whoever reaches it is its operator."""

    accounts = asks = False

    async def who(self, shown: Shown, *, now: float) -> Principal:
        return OPERATOR


@dataclass(frozen=True, slots=True)
class SharedSecret:
    """One secret for agents, the command line and people; who has it may do everything."""

    secret: str = field(repr=False)
    accounts: ClassVar[bool] = False
    asks: ClassVar[bool] = True

    async def who(self, shown: Shown, *, now: float) -> Principal:
        by_key = shown.bearer is not None and self.is_it(shown.bearer)
        by_cookie = shown.cookie is not None and self.valid_session(shown.cookie, now=now)
        return OPERATOR if by_key or by_cookie else NOBODY

    def is_it(self, text: str) -> bool:
        """Whether this is the secret; takes as long for a near miss as for a far one."""
        return hmac.compare_digest(text.strip().encode("utf-8", "surrogatepass"), self.secret.encode())

    def session(self, *, now: float) -> str:
        """The cookie of somebody who has shown the secret, signed with it: a new secret ends every session."""
        expires = int(now + SHARED_SESSION_SECONDS)
        return f"{expires}.{self._signature(expires)}"

    def valid_session(self, value: str, *, now: float) -> bool:
        expires, _, signature = value.partition(".")
        if not (expires.isascii() and expires.isdigit()) or len(expires) > 12 or int(expires) < now:
            return False
        return hmac.compare_digest(signature.encode(), self._signature(int(expires)).encode())

    def _signature(self, expires: int) -> str:
        return hmac.new(self.secret.encode(), f"session {expires}".encode(), hashlib.sha256).hexdigest()


class Accounts:
    """People with sessions and programs with keys, as the database has them."""

    accounts = asks = True

    def __init__(self, db: Database, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._db = db
        self._keys: Remembered[bytes, models.Token | None] = Remembered(REMEMBERED_SECONDS, seconds)

    async def who(self, shown: Shown, *, now: float) -> Principal:
        if shown.bearer is not None:
            return await self._program(shown.bearer, now=now)
        if shown.cookie is not None:
            return await self._person(shown.cookie, now=now)
        return NOBODY

    async def _program(self, secret: str, *, now: float) -> Principal:
        known = digest(secret)
        if known in self._keys:
            row = self._keys[known]
        else:
            async with self._db.read() as session:
                row = await tokens.find(session, secret, now=now)
            self._keys[known] = row
        if row is None or (row.expires_at is not None and row.expires_at <= now):
            return NOBODY
        if now - (row.last_used_at or 0.0) >= tokens.USED_SECONDS:
            row.last_used_at = now
            await self._note(tokens.note_use(self._db, row.prefix, now=now))
        return tokens.principal_of(row)

    async def _person(self, secret: str, *, now: float) -> Principal:
        async with self._db.read() as session:
            found = await sign_ins.find(session, secret, now=now)
        if found is None:
            return NOBODY
        principal, seen_at = found
        if now - seen_at >= sign_ins.SEEN_SECONDS and principal.session is not None:
            await self._note(sign_ins.seen(self._db, principal.session, now=now))
        return principal

    async def _note(self, note: Awaitable[None]) -> None:
        try:
            await note
        except (DatabaseBusy, DatabaseClosed, DatabaseUnavailable, SQLAlchemyError) as error:
            # a server that can be read goes on answering, though it cannot write down who asked
            logger.warning("when a key or a browser was last seen could not be stored: %s", error)


class Remembered(Generic[K, V]):
    """What was looked up a moment ago."""

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
        if len(self._values) >= MOST_REMEMBERED:
            self._values.clear()
        self._values[key] = (self._clock() + self._seconds, value)
