"""Batches that no agent has packed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from holdfast.protocol.messages import Batch

from .load import Post, post_all
from .peers import Holdfast


def post_batches(ours: Holdfast, port: int, clients: Iterable[Sequence[Batch]]) -> None:
    """All clients at once; each sends one batch after the other."""
    headers = {**ours.headers(), "Content-Type": "application/msgpack"}
    bodies = [[msgspec.msgpack.encode(batch) for batch in batches] for batches in clients]
    post_all([Post("127.0.0.1", port, "/api/v1/ingest", headers, made, 0) for made in bodies], 600)
