"""Checkpoints of several ranks, written by hand from tensors."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from holdfast.format import manifest as fmt
from holdfast.format.dtypes import stored_as
from holdfast.format.merged_ranks import RankShard, merge_ranks
from holdfast.format.shards import Region
from holdfast.protocol.ids import checkpoint_id
from holdfast.store import open_store
from tests.support import edited_manifests
from tests.support.handmade_checkpoints import CommittedCheckpoint


class ReplicatedTensor(NamedTuple):
    """The same on all ranks; one of them stores it."""

    tensor: torch.Tensor
    by: int = 0


class ShardedTensor(NamedTuple):
    """Each rank stores its region, or nothing."""

    tensor: torch.Tensor
    regions: Sequence[Region | None]


class RankTensors(NamedTuple):
    """Each rank stores its own, or has none."""

    tensors: Sequence[torch.Tensor | None]


def by_rows(tensor, world_size, dimension=0):
    """As FSDP does it: the last ranks may have fewer rows, or none."""
    size = tensor.shape[dimension]
    length = -(-size // world_size)
    regions = []
    for rank in range(world_size):
        start = min(rank * length, size)
        offsets, shape = [0] * tensor.dim(), list(tensor.shape)
        offsets[dimension], shape[dimension] = start, min(length, size - start)
        regions.append(Region(tuple(offsets), tuple(shape)))
    return ShardedTensor(tensor, regions)


def by_grid(tensor, rows, columns):
    """As FSDP and tensor parallelism together do it."""
    return ShardedTensor(
        tensor,
        [
            Region((top, left), (height, width))
            for top, height in _cuts(tensor.shape[0], rows)
            for left, width in _cuts(tensor.shape[1], columns)
        ],
    )


def in_blocks(draw, shape, most_cuts):
    """Regions that a tensor of `shape` is cut into, as a hypothesis strategy draws them."""
    blocks = [Region((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, most_cuts)) if shape else 0):
        offsets, sizes = blocks.pop(draw(st.integers(0, len(blocks) - 1)))
        dimension = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[dimension]))
        for start, length in ((0, cut), (cut, sizes[dimension] - cut)):
            left, size = list(offsets), list(sizes)
            left[dimension], size[dimension] = left[dimension] + start, length
            blocks.append(Region(tuple(left), tuple(size)))
    return blocks


def part_of(tensor, region):
    for dimension, (start, length) in enumerate(zip(*region, strict=True)):
        tensor = tensor.narrow(dimension, start, length)
    return tensor


@dataclass
class RankPayload:
    """What one rank writes."""

    part: RankShard
    data: list[Any]


def payloads(world_size, tensors, states=None):
    """For each rank, what it writes of `tensors`, by name; `states` are its trees, by rank."""
    return [_payload(rank, tensors, (states or [{}] * world_size)[rank]) for rank in range(world_size)]


def commit(root, world_size, tensors, states=None, *, job="job", iteration=1):
    """A checkpoint that `world_size` ranks wrote."""
    store = open_store(root)
    attempt = store.latest_attempt(job) or store.acquire_attempt(job, "test").number
    written = payloads(world_size, tensors, states)
    whole = merge_ranks([each.part for each in written], world_size)
    manifest = fmt.Manifest(
        job=job, iteration=iteration, lineage=1, attempt=attempt, kind="scheduled", created_at=1790000000.0,
        parent=None, world_size=world_size, files=whole.files, tensors=whole.tensors, state=whole.state,
        rank_states=whole.rank_states,
    )  # fmt: skip
    commit_manifest(store, manifest, written)
    return CommittedCheckpoint(store, job, checkpoint_id(iteration, 1), manifest)


def commit_manifest(store, manifest, written):
    """The files of all ranks, and whatever the manifest says of them."""
    size_bytes = sum(file.size_bytes for file in manifest.files)
    checkpoint = checkpoint_id(manifest.iteration, manifest.lineage)
    writer = store.begin(manifest.job, checkpoint, manifest.attempt, size_bytes)
    for each in written:
        writer.write(each.part.file.name, each.data)
    edited_manifests.commit_manifest(writer, manifest)


def flip(written, tensor, at=0):
    """One bit of a stored shard."""
    path = written.path(tensor.file)
    data = bytearray(path.read_bytes())
    data[tensor.start + at] ^= 16
    path.write_bytes(data)


def _cuts(size, count):
    edges = [size * number // count for number in range(count + 1)]
    return [(start, end - start) for start, end in itertools.pairwise(edges)]


def _payload(rank, tensors, state):
    pieces = {name: piece for name, each in tensors.items() if (piece := _piece(each, rank)) is not None}
    stored = {name: stored_as(name, tensor) for name, (tensor, *_) in pieces.items()}
    slots = fmt.lay_out((name, dtype, shape) for name, (dtype, shape, _) in stored.items())
    header = fmt.payload_header(slots, {"rank": str(rank)})
    data = [_bytes(pieces[slot.name][0]) for slot in slots]
    file = fmt.File(
        name=f"rank-{rank}.safetensors",
        size_bytes=len(header) + sum(map(len, data)),
        header_bytes=len(header),
        header_digest=fmt.digest(header),
    )
    found = []
    for slot, each in zip(slots, data, strict=True):
        tensor, global_shape, offsets, owner = pieces[slot.name]
        pair = slot.shape[tensor.dim() :]
        whole, chunks = fmt.digest_tensor(memoryview(each))
        found.append(
            fmt.Tensor(
                name=slot.name, dtype=slot.dtype, shape=slot.shape, global_shape=(*global_shape, *pair),
                offsets=(*offsets, *(0 for _ in pair)), file=file.name, start=len(header) + slot.start,
                end=len(header) + slot.end, digest=whole, chunks=chunks, view=stored[slot.name][2], rank=owner,
            )
        )  # fmt: skip
    return RankPayload(RankShard(rank=rank, file=file, tensors=found, state=state), [header, *data])


def _piece(each, rank):
    """(what this rank stores, the shape of the whole, where in it, whose own)"""
    match each:
        case ReplicatedTensor(tensor, by):
            return (tensor, tuple(tensor.shape), (0,) * tensor.dim(), None) if rank == by else None
        case ShardedTensor(tensor, regions):
            region = regions[rank]
            return region and (part_of(tensor, region), tuple(tensor.shape), region.offsets, None)
        case RankTensors(tensors):
            tensor = tensors[rank]
            return None if tensor is None else (tensor, tuple(tensor.shape), (0,) * tensor.dim(), rank)


def _bytes(tensor):
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
