"""zstd and gzip, with limits on the decompressed size."""

from __future__ import annotations

import sys
import zlib
from functools import cache
from typing import Any

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

RATIO = 200
RATIO_BYTES = 2**20
"""Decompressed size from which a compression ratio above RATIO is refused: no report compresses so well."""


class ContentTooLarge(ValueError):
    """The decompressed content exceeds the limit."""


class CorruptContent(ValueError):
    """The content cannot be decompressed."""


@cache
def _compressor(level: int) -> zstd.ZstdCompressor:
    """A compressor to be used again: making one takes as long as compressing a batch."""
    return zstd.ZstdCompressor(level)


def compress(content: bytes, level: int) -> bytes:
    return _compressor(level).compress(content, zstd.ZstdCompressor.FLUSH_FRAME)


def decompress(content: bytes, limit_bytes: int) -> bytes:
    """Decompress one zstd frame, with at most `limit_bytes` of output in memory."""
    inflater = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 23})
    return _inflated(inflater, content, limit_bytes, zstd.ZstdError)


def gunzip(content: bytes, limit_bytes: int) -> bytes:
    return _inflated(zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), content, limit_bytes, zlib.error)


def _inflated(inflater: Any, content: bytes, limit_bytes: int, broken: type[Exception]) -> bytes:
    try:
        plain: bytes = inflater.decompress(content, limit_bytes + 1)
    except broken as error:
        raise CorruptContent(str(error)) from None
    if len(plain) > limit_bytes:
        raise ContentTooLarge(f"the decompressed content exceeds {limit_bytes} bytes")
    if not inflater.eof or inflater.unused_data:
        raise CorruptContent("the compressed data is truncated or followed by other data")
    return plain


def plausible(content: bytes, plain: bytes) -> bool:
    return len(plain) <= max(RATIO_BYTES, RATIO * len(content))
