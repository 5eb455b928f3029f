"""How a server finds out who asks: it does not (loopback), by one shared secret, or by accounts."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from sqlalchemy import delete
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_server import models
from holdfast_server.accounts import people, rate_limits, sign_ins, tokens
from holdfast_server.accounts.secrets import digest, new_session
from holdfast_server.core.errors import TooManyTries
from holdfast_server.core.principal import NOBODY, OPERATOR, Principal
from holdfast_server.core.settings import ServerSettings
from holdfast_server.db import Database, DatabaseBusy, DatabaseClosed, DatabaseUnavailable

REMEMBERED_SECONDS = 2.0
"""How long an instance goes by what it knows of a key: one that was revoked elsewhere works for no longer."""
MOST_REMEMBERED = 10_000
SHARED_SESSION_SECONDS = sign_ins.LASTS_SECONDS
WRONG_SECONDS = 3600.0
"""How long a wrong token is remembered: an agent that repeats it all day guesses nothing, and uses up no tries."""
TRUSTED_SECONDS = 3600.0
"""How long guesses from a network do not lock out its holders of the token, after one of them showed it."""

K = TypeVar("K")
V = TypeVar("V")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shown:
    """What a request shows of who sent it."""

    bearer: str | None
    cookie: str | None
    address: str = "unknown"


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
    """Choose accounts where they are configured, where people exist, and where an exposed server has no token."""
    unguarded = settings.exposed_by if settings.token is None else None
    accounts = settings.accounts
    if accounts is None:
        async with db.read() as session:
            accounts = unguarded is not None or await people.anybody(session)
    if accounts:
        return Accounts(db)
    if settings.token is not None:
        return SharedSecret(settings.token, db)
    if unguarded:
        raise ValueError(f"{unguarded} lets other machines reach this server: it needs accounts")
    return OpenDoor()


class OpenDoor:
    """No authentication: every client of a server on loopback is its operator."""

    accounts = asks = False

    async def who(self, shown: Shown, *, now: float) -> Principal:
        return OPERATOR


class SharedSecret:
    """One secret for agents, the command line and people; who has it may do everything."""

    accounts = False
    asks = True

    def __init__(self, secret: str, db: Database, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._secret = secret.encode()
        self._db = db
        self._wrong: Remembered[bytes, None] = Remembered(WRONG_SECONDS, seconds)
        self._trusted: Remembered[str, None] = Remembered(TRUSTED_SECONDS, seconds)
        """Networks from which the right token came."""
        self._refused_until: dict[str, float] = {}
        """By network, when it may send a token again."""

    async def who(self, shown: Shown, *, now: float) -> Principal:
        """Raises TooManyTries from a network that guesses: there a token works only if it worked lately."""
        if shown.bearer is not None and await self._opens(shown.bearer, shown.address, now=now):
            return OPERATOR
        if shown.cookie is not None and await self._in_session(shown.cookie, now=now):
            return OPERATOR
        return NOBODY

    async def _opens(self, text: str, address: str, *, now: float) -> bool:
        network = rate_limits.network_of(address)
        right = self.is_it(text)
        # All clients of a NAT, or of a proxy that hides them, have one address: a guesser must not lock them out.
        if not (right and network in self._trusted) and (wait := self._refused_until.get(network, now) - now) > 0:
            raise TooManyTries(wait)
        if right:
            self._trusted[network] = None
            return True
        known = digest(text)
        if known not in self._wrong:
            self._wrong[known] = None
            try:
                await rate_limits.take_from_address(self._db, address, now=now)
            except TooManyTries as refusal:
                if len(self._refused_until) >= MOST_REMEMBERED:
                    self._refused_until.clear()
                self._refused_until[network] = now + refusal.retry_seconds
                raise
        return False

    def is_it(self, text: str) -> bool:
        """Whether this is the secret; takes as long for a near miss as for a far one."""
        return hmac.compare_digest(text.strip().encode("utf-8", "surrogatepass"), self._secret)

    async def begin(self, *, now: float) -> str:
        """The cookie of a browser in which somebody has typed the secret."""
        cookie = new_session()
        row = models.SharedSessionRecord(digest=self._digest(cookie), expires_at=now + SHARED_SESSION_SECONDS)

        async def work(session: AsyncSession) -> None:
            session.add(row)

        await self._db.write(work)
        return cookie

    async def end(self, cookie: str) -> None:
        rows = models.SharedSessionRecord

        async def work(session: AsyncSession) -> None:
            await session.execute(delete(rows).where(rows.digest == self._digest(cookie)))

        await self._db.write(work)

    async def _in_session(self, cookie: str, *, now: float) -> bool:
        async with self._db.read() as session:
            row = await session.get(models.SharedSessionRecord, self._digest(cookie))
        return row is not None and row.expires_at > now

    def _digest(self, cookie: str) -> bytes:
        """With the secret as its key: a new secret ends every session."""
        return hmac.new(self._secret, cookie.encode("utf-8", "surrogatepass"), hashlib.sha256).digest()


class Accounts:
    """People with sessions and programs with keys, as the database has them."""

    accounts = asks = True

    def __init__(self, db: Database, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._db = db
        self._keys: Remembered[bytes, models.TokenRecord | None] = Remembered(REMEMBERED_SECONDS, seconds)

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
