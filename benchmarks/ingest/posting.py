"""Post prepared batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from holdfast.protocol.messages import Batch

from .load import PreparedRequests, post_all
from .peers import HoldfastPeer


def post_batches(ours: HoldfastPeer, port: int, clients: Iterable[Sequence[Batch]]) -> None:
    """Post with all clients at once; each sends one batch after the other."""
    headers = {**ours.headers(), "Content-Type": "application/msgpack"}
    bodies = [[msgspec.msgpack.encode(batch) for batch in batches] for batches in clients]
    post_all([PreparedRequests("127.0.0.1", port, "/api/v1/ingest", headers, made, 0) for made in bodies], 600)
