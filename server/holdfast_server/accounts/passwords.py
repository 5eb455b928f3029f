"""Passwords: rules for new ones, and Argon2id hashing, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from threading import Lock

from pwdlib import PasswordHash

from holdfast_server.core.errors import PasswordQueueFull, WeakPassword

SHORTEST, LONGEST = 8, 1024

hasher = PasswordHash.recommended()
_one_at_a_time = Lock()
"""A hash takes 64 MiB and a CPU core for a quarter of a second."""
MOST_QUEUED = 16
"""Passwords being hashed or waiting for it: the last waits about four seconds, and further ones are refused."""
_queued: set[object] = set()


def check(password: str, name: str) -> None:
    """Raise WeakPassword, with the reason, if the password is easy to guess."""
    if not SHORTEST <= len(password) <= LONGEST:
        raise WeakPassword(
            f"use a passphrase of {SHORTEST} to {LONGEST:,} characters; this one has {len(password):,}"
        )
    if password.casefold() in _common():
        raise WeakPassword("this is one of the most common passwords: choose another one")
    if password.casefold() in (name.casefold(), name.casefold() * 2):
        raise WeakPassword("the password is the user name: choose another one")
    if len(set(password)) < 3:
        raise WeakPassword("the password repeats one or two characters: choose another one")


def require_room() -> None:
    """Raise PasswordQueueFull if another password would wait too long."""
    if len(_queued) >= MOST_QUEUED:
        raise PasswordQueueFull


@contextmanager
def _turn() -> Iterator[None]:
    require_room()
    place = object()
    _queued.add(place)
    try:
        with _one_at_a_time:
            yield
    finally:
        _queued.discard(place)


def hashed(password: str) -> str:
    """Return the Argon2id hash to store. Raises PasswordQueueFull."""
    with _turn():
        return hasher.hash(_bytes(password))


def verify(password: str, stored: str | None) -> bool:
    """Compare with the stored hash; without one, return False after the same time. Raises PasswordQueueFull."""
    with _turn():
        against = _dummy() if stored is None else stored
        right = hasher.verify(_bytes(password), against)
    return right and stored is not None


@cache
def _dummy() -> str:
    return hasher.hash("the hash for accounts without a password")


def _bytes(password: str) -> bytes:
    # a form may contain a lone surrogate, which UTF-8 cannot encode
    return password.encode("utf-8", "surrogatepass")


@cache
def _common() -> frozenset[str]:
    return frozenset((files("holdfast_server.accounts") / "common_passwords.txt").read_text().split())
