"""Reduces a screenshot to a PNG of 256 colors: a fifth of the size, with hardly a visible difference."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
from playwright.sync_api import Page

COLOURS = 256
_BITS = 5
"""Bits of each channel by which colors are counted."""
_READ = """async (png) => {
  const picture = await createImageBitmap(await (await fetch(`data:image/png;base64,${png}`)).blob());
  const canvas = new OffscreenCanvas(picture.width, picture.height);
  const pen = canvas.getContext("2d");
  pen.drawImage(picture, 0, 0);
  const { data } = pen.getImageData(0, 0, picture.width, picture.height);
  const parts = [];
  for (let start = 0; start < data.length; start += 32768) {
    parts.push(String.fromCharCode(...data.subarray(start, start + 32768)));
  }
  return [picture.width, picture.height, btoa(parts.join(""))];
}"""


def small(blank: Page, png: bytes) -> bytes:
    """`blank`: an empty page, whose browser decodes the picture."""
    width, height, raw = blank.evaluate(_READ, base64.b64encode(png).decode())
    pixels = np.frombuffer(base64.b64decode(raw), np.uint8).reshape(height * width, 4)[:, :3]
    palette, indices = _reduced(pixels.astype(np.int64))
    rows = np.zeros((height, width + 1), np.uint8)  # each row begins with its filter type: none
    rows[:, 1:] = indices.reshape(height, width)
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = (
        (b"IHDR", head),
        (b"PLTE", palette.tobytes()),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _reduced(pixels: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the most common colors, and the nearest of them for each pixel."""
    key = np.zeros(len(pixels), np.int64)
    for channel in range(3):
        key = (key << _BITS) | (pixels[:, channel] >> (8 - _BITS))
    counts = np.bincount(key, minlength=1 << 3 * _BITS)
    used = np.flatnonzero(counts)
    sums = [np.bincount(key, pixels[:, channel], len(counts))[used] for channel in range(3)]
    means = np.stack(sums, axis=1) / counts[used, None]
    palette = means[np.argsort(-counts[used], kind="stable")[:COLOURS]]
    nearest = np.argmin(((means[:, None] - palette[None]) ** 2).sum(axis=2), axis=1)
    place = np.zeros(len(counts), np.uint8)
    place[used] = nearest
    return palette.round().astype(np.uint8), place[key]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
