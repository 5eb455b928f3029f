"""Whether what several ranks take for the same is the same.

Of tensors that ranks hold alike each is stored by one of them. Ranks that have drifted apart (in local steps), or
pipeline stages whose parameters have the same names, would come back as a mixture. So each rank tells a digest of
the first bytes of all such tensors with its part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch

from holdfast.format.manifest import Shard, digest
from holdfast.system.host_memory import bytes_of, is_plain

EDGE_BYTES = 64


class ReplicaChecksum:
    """Of tensors in host memory; to look at those on a device, training would have to wait for it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], places: Mapping[str, Shard]) -> None:
        """`places` are where in a larger tensor those lie that are a part of one."""
        found = [(name, t) for name, t in sorted(tensors.items()) if is_plain(t) and t.numel()]
        listed = [(name, places.get(name)) for name, _ in found]
        self.key = digest(msgspec.json.encode(listed))
        """The same on ranks that hold the same tensors, or the same parts of them."""
        self._edges = [bytes_of(t.detach().reshape(-1).view(torch.uint8)[:EDGE_BYTES]) for _, t in found]

    def seen(self) -> str:
        """A digest of what they hold now."""
        return digest(b"".join(self._edges))
