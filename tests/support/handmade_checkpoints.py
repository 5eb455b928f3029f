"""Checkpoints written by hand from tensors, for tests of readers."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from holdfast.format import manifest as fmt
from holdfast.format.dtypes import stored_as
from holdfast.format.important import FileContents, PlacedTensor
from holdfast.format.parity_stripes import build_parity
from holdfast.protocol.ids import checkpoint_id
from holdfast.state.registry import Registry
from holdfast.store import open_store
from tests.support.edited_manifests import commit_manifest


@dataclass
class TensorShard:
    """A rank's part of a larger tensor."""

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass
class CommittedCheckpoint:
    store: Any
    job: str
    id: str
    manifest: fmt.Manifest

    def path(self, file="rank-0.safetensors"):
        return self.store.root / self.job / self.id / file


@dataclass
class _Rank:
    file: fmt.File
    parts: list[bytes]
    tensors: list[fmt.Tensor] = field(default_factory=list)


def commit(root, *ranks, job="job", iteration=1, lineage=1, state=None, kind="scheduled", parity=None, **more):
    """A checkpoint with a file for each of `ranks`, each tensors or shards by name."""
    store = open_store(root)
    attempt = store.latest_attempt(job) or store.acquire_attempt(job, "test").number
    written = [_rank(f"rank-{number}.safetensors", tensors) for number, tensors in enumerate(ranks)]
    parities = {}
    for rank in written if parity is not None else ():
        parities[rank.file.name], entry = build_parity(parity, rank.file.name, rank.parts, _contents(rank))
        rank.file = msgspec.structs.replace(rank.file, parity=entry)
    manifest = fmt.Manifest(
        **{
            "job": job, "iteration": iteration, "lineage": lineage, "attempt": attempt, "kind": kind,
            "created_at": 1790000000.0, "parent": None, "world_size": len(ranks),
            "files": [rank.file for rank in written],
            "tensors": [tensor for rank in written for tensor in rank.tensors],
            "state": state or {},
        } | more
    )  # fmt: skip
    writer = store.begin(job, checkpoint_id(iteration, lineage), attempt, sum(r.file.size_bytes for r in written))
    for rank in written:
        writer.write(rank.file.name, rank.parts)
        if rank.file.parity is not None:
            writer.write(rank.file.parity.name, [parities[rank.file.name]])
    commit_manifest(writer, manifest)
    return CommittedCheckpoint(store, job, checkpoint_id(iteration, lineage), manifest)


def _contents(rank):
    tensors = [PlacedTensor(each.start, each.end, each.dtype) for each in rank.tensors]
    return FileContents(rank.file.header_bytes, tensors, None)


def commit_objects(root, iteration=1, lineage=1, loaders=(), parity=None, **objects):
    """A checkpoint of a session's objects, as its own would be."""
    session = {
        "iteration": iteration, "lineage": lineage, "loaders": list(loaders), "loader": -1, "controller": {},
    }  # fmt: skip
    captured = Registry(objects).capture(session)
    return commit(
        root, captured.tensors, iteration=iteration, lineage=lineage, state=captured.trees, parity=parity
    )


def _rank(name, tensors):
    shards = {
        key: each if isinstance(each, TensorShard) else TensorShard(each, tuple(each.shape), (0,) * each.dim())
        for key, each in tensors.items()
    }
    stored = {key: stored_as(key, shard.tensor) for key, shard in shards.items()}
    slots = fmt.lay_out((key, dtype, shape) for key, (dtype, shape, _) in stored.items())
    header = fmt.payload_header(slots, {})
    data = [_bytes(shards[slot.name].tensor) for slot in slots]
    file = fmt.File(
        name=name,
        size_bytes=len(header) + sum(map(len, data)),
        header_bytes=len(header),
        header_digest=fmt.digest(header),
    )
    found = []
    for slot, part in zip(slots, data, strict=True):
        whole, chunks = fmt.digest_tensor(memoryview(part))
        shard, view = shards[slot.name], stored[slot.name][2]
        is_whole = shard.global_shape == tuple(shard.tensor.shape)
        found.append(
            fmt.Tensor(
                name=slot.name, dtype=slot.dtype, shape=slot.shape,
                global_shape=slot.shape if is_whole else shard.global_shape,
                offsets=(0,) * len(slot.shape) if is_whole else shard.offsets,
                file=name, start=len(header) + slot.start, end=len(header) + slot.end,
                digest=whole, chunks=chunks, view=view,
            )
        )  # fmt: skip
    return _Rank(file, [header, *data], found)


def _bytes(tensor):
    plain = tensor.detach().contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
