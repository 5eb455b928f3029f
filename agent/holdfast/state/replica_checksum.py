"""A checksum that shows whether replicated tensors are equal on all ranks.

Each replicated tensor is stored by one rank. Ranks that have diverged (by local steps), or pipeline stages whose
parameters have the same names, would be restored as a mixture. So each rank sends a digest of the first bytes of
all replicated tensors with its part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch

from holdfast.format.manifest import Shard, digest
from holdfast.system.host_memory import bytes_of, is_plain

EDGE_BYTES = 64


class ReplicaChecksum:
    """Covers tensors in host memory: reading those on a device would make training wait."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], places: Mapping[str, Shard]) -> None:
        """`places` gives the place of each sharded tensor's local part."""
        found = [(name, t) for name, t in sorted(tensors.items()) if is_plain(t) and t.numel()]
        listed = [(name, places.get(name)) for name, _ in found]
        self.key = digest(msgspec.json.encode(listed))
        """Digest of names and places: equal on ranks that hold the same tensors or the same parts."""
        self._edges = [bytes_of(t.detach().reshape(-1).view(torch.uint8)[:EDGE_BYTES]) for _, t in found]

    def current_digest(self) -> str:
        """Return a digest of the current contents."""
        return digest(b"".join(self._edges))
