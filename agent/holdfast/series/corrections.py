"""Elements that a codec misses, stored beside its payload: a few of them need not cost a whole state.

A correction is a multiple of the largest error that is allowed, so that half of that error remains. Stored are the
number of bytes of a distance, the distances between corrected elements, and the multiples.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_DISTANCES = (np.uint8, np.uint16, np.uint32, np.uint64)
_MOST = 127


def corrections(error: Tensor, limit: float) -> bytes:
    """Return what brings each element of an error within `limit`; nothing if that takes too much space."""
    found = error.reshape(-1).cpu().numpy()
    places = np.flatnonzero(np.abs(found) > limit)
    multiples = np.rint(found[places] / limit)
    if 5 * len(places) > len(found) or not (np.abs(multiples) <= _MOST).all():
        return b""
    distances = np.diff(places, prepend=0)
    width = next(kind for kind in _DISTANCES if int(distances.max()) <= np.iinfo(kind).max)
    stored = distances.astype(width)
    return bytes([stored.itemsize]) + stored.tobytes() + multiples.astype(np.int8).tobytes()


def apply_corrections(decoded: Tensor, stored: bytes, limit: float) -> Tensor:
    """Return the corrected state; it may be `decoded`, changed in place."""
    if not stored:
        return decoded
    decoded = decoded.contiguous()
    width = stored[0]
    count = (len(stored) - 1) // (width + 1)
    distances = np.frombuffer(stored, dtype=f"u{width}", count=count, offset=1)
    multiples = np.frombuffer(stored, dtype=np.int8, offset=1 + count * width)
    places = torch.from_numpy(np.cumsum(distances, dtype=np.int64)).to(decoded.device)
    decoded.view(-1).index_add_(0, places, torch.from_numpy(multiples * limit).to(decoded))
    return decoded
