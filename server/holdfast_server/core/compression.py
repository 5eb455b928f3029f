"""zstd, and how much of a compressed body may be unpacked."""

from __future__ import annotations

import sys
import zlib
from typing import Any

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

RATIO = 200
RATIO_BYTES = 2**20
"""A body that unpacks to more than this may not be RATIO times smaller: no report compresses so well."""


class TooLarge(ValueError):
    """It unpacks to more than is taken."""


class Broken(ValueError):
    """It cannot be unpacked."""


def compress(content: bytes, level: int) -> bytes:
    return zstd.compress(content, level)


def decompress(content: bytes, limit_bytes: int) -> bytes:
    """One zstd frame. Never more than the limit in memory, whatever a small body claims to become."""
    inflater = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 23})
    return _inflated(inflater, content, limit_bytes, zstd.ZstdError)


def gunzip(content: bytes, limit_bytes: int) -> bytes:
    return _inflated(zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), content, limit_bytes, zlib.error)


def _inflated(inflater: Any, content: bytes, limit_bytes: int, broken: type[Exception]) -> bytes:
    try:
        plain: bytes = inflater.decompress(content, limit_bytes + 1)
    except broken as error:
        raise Broken(str(error)) from None
    if len(plain) > limit_bytes:
        raise TooLarge(f"it unpacks to more than {limit_bytes} bytes")
    if not inflater.eof or inflater.unused_data:
        raise Broken("it ends too early, or too late")
    return plain


def plausible(content: bytes, plain: bytes) -> bool:
    return len(plain) <= max(RATIO_BYTES, RATIO * len(content))
