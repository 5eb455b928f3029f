"""Elements that a codec misses, stored beside its payload: a few of them need not cost a whole state.

A correction is a multiple of the largest error that is allowed, so that half of that error remains. Its bytes are a
Zstandard frame of the distances between corrected elements, as four byte planes, and of the multiples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.codecs.frames import NumberCompressor, decompress

_ELEMENT_BYTES = 5
_COUNT_BYTES = 4
_MOST = 127


def corrections(state: Tensor, decoded: Tensor, limit: float) -> bytes | None:
    """Return what brings each element of `decoded` within `limit` of `state`; `None` if that is no small change."""
    missing = (state - decoded).reshape(-1).div_(limit)
    places = (missing.abs() > 1).nonzero().view(-1)
    multiples = missing[places].round_()
    count = len(places)
    if count * _ELEMENT_BYTES > state.numel() or (count and not bool((multiples.abs() <= _MOST).all())):
        return None
    distances = torch.diff(places, prepend=places.new_zeros(1)).to(torch.int32).cpu()
    planes = distances.view(torch.uint8).view(-1, 4).T.contiguous().numpy().tobytes()
    codes = multiples.to(torch.int8).cpu().numpy().tobytes()
    return count.to_bytes(_COUNT_BYTES, "little") + NumberCompressor().compress(planes + codes)


def apply_corrections(decoded: Tensor, stored: bytes, limit: float) -> Tensor:
    """Correct `decoded` in place, and return it."""
    if not stored:
        return decoded
    count = int.from_bytes(stored[:_COUNT_BYTES], "little")
    content = bytearray(decompress(stored[_COUNT_BYTES:], count * _ELEMENT_BYTES))
    planes = torch.frombuffer(content, dtype=torch.uint8, count=4 * count).view(4, -1)
    distances = planes.T.reshape(-1).view(torch.int32)
    codes = torch.frombuffer(content, dtype=torch.int8, offset=4 * count)
    places = distances.cumsum(0).to(decoded.device)
    decoded.view(-1).index_add_(0, places, codes.to(decoded) * limit)
    return decoded
