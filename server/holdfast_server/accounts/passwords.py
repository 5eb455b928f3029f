"""Passwords: what may be one, and Argon2id, off the event loop and one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files

from pwdlib import PasswordHash

from holdfast_server.core.errors import TooManyTries, WeakPassword

SHORTEST, LONGEST = 8, 1024

_hasher = PasswordHash.recommended()
_one_at_a_time = asyncio.Semaphore(1)
"""A hash takes 64 MiB and a processor for a quarter of a second."""
MOST_QUEUED = 16
"""Passwords being hashed or waiting for it: the last waits some four seconds, and the next is refused."""
BUSY_SECONDS = 4.0
_queued: set[object] = set()


def check(password: str, name: str) -> None:
    """WeakPassword, with the reason, for one that would be guessed first."""
    if not SHORTEST <= len(password) <= LONGEST:
        raise WeakPassword(f"a password has {SHORTEST} to {LONGEST:,} characters; this one has {len(password):,}")
    if password.casefold() in _common():
        raise WeakPassword("this password is among the first that anybody tries: take another one")
    if password.casefold() in (name.casefold(), name.casefold() * 2):
        raise WeakPassword("the password is the name: take another one")
    if len(set(password)) < 3:
        raise WeakPassword("this password is one or two characters again and again: take another one")


def require_room() -> None:
    """TooManyTries while so many passwords are queued that another one would wait too long."""
    if len(_queued) >= MOST_QUEUED:
        raise TooManyTries(BUSY_SECONDS)


@asynccontextmanager
async def _turn() -> AsyncIterator[None]:
    require_room()
    place = object()
    _queued.add(place)
    try:
        async with _one_at_a_time:
            yield
    finally:
        _queued.discard(place)


async def hashed(password: str) -> str:
    """The Argon2id hash to store. Raises TooManyTries."""
    async with _turn():
        return await asyncio.to_thread(_hasher.hash, _bytes(password))


async def verify(password: str, stored: str | None) -> bool:
    """Whether it is the one; where none is stored, it takes as long to say no. Raises TooManyTries."""
    async with _turn():
        against = await asyncio.to_thread(_dummy) if stored is None else stored
        right = await asyncio.to_thread(_hasher.verify, _bytes(password), against)
    return right and stored is not None


@cache
def _dummy() -> str:
    return _hasher.hash("nobody has this password")


def _bytes(password: str) -> bytes:
    # a form can hold half of a surrogate pair, which is no text that UTF-8 knows
    return password.encode("utf-8", "surrogatepass")


@cache
def _common() -> frozenset[str]:
    return frozenset((files("holdfast_server.accounts") / "common_passwords.txt").read_text().split())
