"""Zstandard frames of a known size, which a hostile frame cannot exceed. Compressing releases the GIL."""

from __future__ import annotations

import sys
from typing import Any

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Buffer = Any
"""A contiguous buffer."""

_WINDOW_LOG = 17
# Mostly Huffman coding: repetitions are rare in the planes of numbers, and short ones do not pay.
_OPTIONS = {
    int(zstd.CompressionParameter.strategy): int(zstd.Strategy.fast),
    int(zstd.CompressionParameter.window_log): _WINDOW_LOG,
    int(zstd.CompressionParameter.hash_log): 10,
    int(zstd.CompressionParameter.min_match): 7,
}
_LIMITS = {int(zstd.DecompressionParameter.window_log_max): _WINDOW_LOG}


class DamagedEncoding(ValueError):
    """Encoded bytes are damaged, or belong to another block."""


class NumberCompressor:
    """Fast compression of bytes that hardly repeat. Its memory is used again for each frame."""

    def __init__(self) -> None:
        self._compressor = zstd.ZstdCompressor(options=_OPTIONS)

    def compress(self, data: Buffer) -> bytes:
        """Return a frame."""
        return bytes(self._compressor.compress(data, self._compressor.FLUSH_FRAME))


def decompress(frame: Buffer, size_bytes: int) -> bytes:
    """Return the content of a frame of `size_bytes`. Never takes much more memory than that.

    Raises:
        DamagedEncoding: this is no frame, or its content has another size.
    """
    decompressor = zstd.ZstdDecompressor(options=_LIMITS)
    try:
        content = bytes(decompressor.decompress(frame, max_length=size_bytes))
    except zstd.ZstdError as error:
        raise DamagedEncoding(f"a frame cannot be decompressed: {error}") from None
    if len(content) != size_bytes or not decompressor.eof or decompressor.unused_data:
        raise DamagedEncoding(f"a frame does not have the content of {size_bytes} bytes that the header names")
    return content
