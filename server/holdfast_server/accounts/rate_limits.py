"""How often somebody may try to sign in: token buckets in the database, shared by all instances.

A bucket is kept as the moment at which it is full again: each try moves that on by the time it takes to earn one,
and is refused where the moment would be further off than the bucket is deep. A bucket that is full needs no row.
"""

from __future__ import annotations

import hashlib
import ipaddress
from dataclasses import dataclass

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_server import models
from holdfast_server.core.errors import TooManyTries
from holdfast_server.db import Database, insert


@dataclass(frozen=True, slots=True)
class _Bucket:
    tries: int
    earned_seconds: float
    """From try to try, once those are used up."""


_FROM_ONE_PLACE = _Bucket(tries=8, earned_seconds=30.0)
"""For one name from one address, and for a browser that signed in to it before: 2,880 tries a day."""
_NAME = _Bucket(tries=100, earned_seconds=10.0)
"""For one name from all addresses. Several addresses that guess together can use it up, but not the tries of the
browsers that its owner has used."""
_ADDRESS = _Bucket(tries=40, earned_seconds=5.0)
"""Many people may come from one address."""


async def take(db: Database, name: str, address: str, *, device: str | None = None, now: float) -> None:
    """Take one try to sign in. Raises TooManyTries when the name, the address or the device has none left.

    Args:
        db: where the tries are counted.
        name: the account.
        address: the client's.
        device: the browser's device cookie, once it is verified to be of this account. Such a browser has tries of
            its own, so that guesses from elsewhere do not lock the owner out.
        now: seconds since the epoch.
    """
    buckets = [(_own_key(name, address, device), _FROM_ONE_PLACE)]
    if device is None:
        buckets += [(_key("name", name), _NAME), (_key("address", network_of(address)), _ADDRESS)]
    # in one order, so that two who take from the same buckets do not wait for each other
    wait = await db.write(lambda session: _take(session, sorted(buckets), now=now))
    if wait > 0:
        raise TooManyTries(wait)


async def take_from_address(db: Database, address: str, *, now: float) -> None:
    """As `take`, for what is asked without a name."""
    bucket = (_key("address", network_of(address)), _ADDRESS)
    wait = await db.write(lambda session: _take(session, [bucket], now=now))
    if wait > 0:
        raise TooManyTries(wait)


async def forgive(db: Database, name: str, address: str, *, device: str | None = None) -> None:
    """Give back all tries of this name from this address, or of this device, after a sign-in."""
    key = _own_key(name, address, device)

    async def work(session: AsyncSession) -> None:
        await session.execute(delete(models.AllowanceRecord).where(models.AllowanceRecord.key == key))

    await db.write(work)


async def tidy(session: AsyncSession, *, now: float) -> None:
    await session.execute(delete(models.AllowanceRecord).where(models.AllowanceRecord.full_at <= now))


async def _take(session: AsyncSession, buckets: list[tuple[bytes, _Bucket]], *, now: float) -> float:
    """Seconds to wait; 0 for a try that was taken. A refused one costs nothing, so that waiting helps."""
    rows = models.AllowanceRecord
    full_at = []
    for key, bucket in buckets:
        fresh = insert(session, rows).values(key=key, full_at=now).on_conflict_do_nothing()
        await session.execute(fresh)
        row = await session.get(rows, key, with_for_update=True)
        assert row is not None
        full_at.append((row, max(row.full_at, now) + bucket.earned_seconds, bucket))
    wait = max(at - now - bucket.tries * bucket.earned_seconds for _, at, bucket in full_at)
    if wait <= 0:
        for row, at, _ in full_at:
            row.full_at = at
        await session.flush()
    return max(0.0, wait)


def _own_key(name: str, address: str, device: str | None) -> bytes:
    return _key("device", device) if device is not None else _key("place", f"{name} {network_of(address)}")


def network_of(address: str) -> str:
    """Whoever has an address of IPv6 has a whole network of them: 2^64 to try from, counted as one."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or ipaddress.IPv6Network((parsed, 64), strict=False))


def _key(kind: str, text: str) -> bytes:
    # a digest, since a password may have been typed into the field of the name
    return hashlib.sha256(f"{kind} {text}".encode("utf-8", "surrogatepass")).digest()
