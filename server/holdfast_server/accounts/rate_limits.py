"""Rate limits for sign-in attempts: token buckets in the database, shared by all instances.

A row holds the time at which its bucket is full again. Each attempt moves that time forward by the seconds in
which the bucket earns one attempt. An attempt is refused if the time would lie further ahead than the bucket is
deep. A full bucket needs no row.
"""

from __future__ import annotations

import hashlib
import ipaddress
from dataclasses import dataclass
from functools import lru_cache

from sqlalchemy import delete
from sqlalchemy.orm import Session

from holdfast_server import models
from holdfast_server.core.errors import TooManySignInAttempts
from holdfast_server.db import Database, insert, transaction


@dataclass(frozen=True, slots=True)
class _Bucket:
    attempts: int
    seconds_per_attempt: float
    """Time in which a used-up bucket earns one attempt."""


_NAME_AND_ADDRESS = _Bucket(attempts=8, seconds_per_attempt=30.0)
"""For a name from one address, and for a browser with a device cookie of that name: 2,880 attempts a day."""
_NAME = _Bucket(attempts=100, seconds_per_attempt=10.0)
"""For a name from all addresses. A distributed attack can use it up, but not the attempts of the owner's
browsers."""
_ADDRESS = _Bucket(attempts=40, seconds_per_attempt=5.0)
"""For all names from an address, which many people may share."""


def take_attempt(db: Database, name: str, address: str, *, device: str | None = None, now: float) -> None:
    """Count one attempt to sign in.

    Args:
        device: the browser's device cookie, verified for this account. The browser then has a bucket of its own,
            so that guesses from elsewhere do not lock the owner out.

    Raises:
        TooManySignInAttempts: the name, the address or the device has none left.
    """
    buckets = [(_own_key(name, address, device), _NAME_AND_ADDRESS)]
    if device is None:
        buckets += [(_key("name", name), _NAME), (_key("address", network_of(address)), _ADDRESS)]
    # Lock the rows in one order: two attempts with the same buckets must not wait for each other.
    _take(db, sorted(buckets), now=now)


def take_address_attempt(db: Database, address: str, *, now: float) -> None:
    """Count one attempt without a name. Raises TooManySignInAttempts."""
    _take(db, [(_key("address", network_of(address)), _ADDRESS)], now=now)


@transaction
def reset(session: Session, name: str, address: str, *, device: str | None = None) -> None:
    """Refill the bucket of this name and address, or of this device, after a sign-in."""
    key = _own_key(name, address, device)
    session.execute(delete(models.RateLimitRecord).where(models.RateLimitRecord.key == key))


def delete_full(session: Session, *, now: float) -> None:
    session.execute(delete(models.RateLimitRecord).where(models.RateLimitRecord.full_at <= now))


@transaction
def _take(session: Session, buckets: list[tuple[bytes, _Bucket]], *, now: float) -> None:
    rows = models.RateLimitRecord
    full_at = []
    for key, bucket in buckets:
        session.execute(insert(session, rows).values(key=key, full_at=now).on_conflict_do_nothing())
        row = session.get(rows, key, with_for_update=True)
        assert row is not None
        full_at.append((row, max(row.full_at, now) + bucket.seconds_per_attempt, bucket))
    wait = max(at - now - bucket.attempts * bucket.seconds_per_attempt for _, at, bucket in full_at)
    if wait > 0:
        raise TooManySignInAttempts(wait)  # it costs nothing, so that waiting helps
    for row, at, _ in full_at:
        row.full_at = at
    session.flush()


def _own_key(name: str, address: str, device: str | None) -> bytes:
    return _key("device", device) if device is not None else _key("place", f"{name} {network_of(address)}")


@lru_cache(4096)
def network_of(address: str) -> str:
    """Return the address, or for IPv6 its /64 network: one client usually has all 2^64 addresses of it."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or ipaddress.IPv6Network((parsed, 64), strict=False))


def _key(kind: str, text: str) -> bytes:
    # Store a digest: a user may have typed a password into the name field.
    return hashlib.sha256(f"{kind} {text}".encode("utf-8", "surrogatepass")).digest()
