"""Decides what a rank writes of tensors in which few rows change: a base file, or the rows that changed since.

Whether rows changed is decided by hash trees of what was written last, which this process has in memory. So the
first checkpoint of a process, or of a lineage, is written in full.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
import torch

from holdfast.format import manifest as fmt
from holdfast.format.encoding import StoredLayer
from holdfast.format.manifest import TensorRange
from holdfast.incremental.region_file import RUN_BYTES, encode_region, runs_of
from holdfast.incremental.row_hashes import (
    HashTree,
    changed_leaves,
    hash_rows,
    hash_tree,
    leaf_bytes_of,
    whole_leaves,
)

Mode = Literal["auto", True]
"""`auto`: only tensors of which a sample shows that few rows change. True: all large tensors, at once."""

LEAST_TENSOR_BYTES = 1 << 20
MOST_SAMPLES, LEAST_SAMPLES, SAMPLED_SHARE = 1024, 16, 1 / 64
"""Leaves of each large tensor that are compared with the checkpoint before."""
MOST_CHANGED_SHARE = 0.1
"""A tensor of which more changes between two checkpoints is written in full."""
MOST_REGION_SHARE = 0.3
"""A new base is written when region files would exceed this share of it: that limits what a restore reads."""
MOST_REGIONS = 16
MOST_COPIED_REGIONS = 2
"""Where a link is a copy by a server, each region file costs requests."""
MOST_REGION_BYTES = 1 << 29
"""Half of the largest header that a reader accepts, to which the table of a region file adds."""
MOST_LINKS = 64
"""So many checkpoints in a row link a base: damage to one file reaches no more, for 1.6 % of the plain bytes."""
MOST_LEAVES = 1 << 32
FIRST_PAUSE, LONGEST_PAUSE = 4, 64
"""Checkpoints between two searches while the samples show only tensors that change as a whole."""


@dataclass(frozen=True, slots=True)
class Region:
    """A region file of a committed checkpoint, and the numbers of its leaves, by tensor."""

    file: fmt.File
    leaves: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayeredState:
    """What a committed checkpoint has: its files with layers, and the hashes of its tensors."""

    checkpoint: str
    lineage: int
    slots: Mapping[str, TensorRange]
    """The layered tensors, in their order in the base file, with their positions in the payload."""
    trees: Mapping[str, HashTree]
    base: fmt.File
    regions: Sequence[Region]
    links: int = 0
    """How many checkpoints in a row have linked the base."""


@dataclass(frozen=True, slots=True)
class _Samples:
    lineage: int
    places: Mapping[str, tuple[TensorRange, torch.Tensor]]
    """The tensor, and the numbers of its leaves that were hashed."""
    hashes: Mapping[str, torch.Tensor]


@dataclass(slots=True)
class LayeredWrite:
    """How a rank stores its layered tensors in one checkpoint."""

    slots: Mapping[str, TensorRange]
    trees: Mapping[str, HashTree]
    before: LayeredState | None = None
    """The checkpoint to link files from; None to write a base file."""
    kept: Sequence[Region] = ()
    """Regions that are linked."""
    leaves: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Leaves to write to a region file."""

    @property
    def linked_files(self) -> list[fmt.File]:
        """The files of the earlier checkpoint that this one has as well."""
        if self.before is None:
            return []
        files = [self.before.base, *(region.file for region in self.kept)]
        source = self.before.checkpoint
        return [msgspec.structs.replace(file, written_by=file.written_by or source) for file in files]

    @property
    def linked_bytes(self) -> int:
        """Bytes of the tensors that need not be written."""
        return 0 if self.before is None else _size_bytes(self.slots) - _region_bytes(self.slots, self.leaves)

    def in_full(self) -> LayeredWrite:
        """Return the same with a base file in place of links."""
        return replace(self, before=None, kept=(), leaves={})

    def region_parts(self, payload: memoryview, places: Mapping[str, fmt.Tensor]) -> list[Any]:
        """Return the parts of the region file, given the positions of the tensors in the plain file."""
        tensors, rows = [], []
        for name, leaves in self.leaves.items():
            if not len(leaves):
                continue
            slot, size = self.slots[name], _leaf_bytes(self.slots[name])
            data = _bytes_of(slot, payload)
            whole = whole_leaves(data, size)
            inside = leaves[leaves < len(whole)]
            rows.append(whole.index_select(0, inside).flatten().numpy().data)
            if len(inside) < len(leaves):
                rows.append(data[whole.numel() :].numpy().data)
            tensors.append((places[name].start, places[name].end, size, leaves.numpy()))
        return encode_region(tensors, rows) if tensors else []


class IncrementalPlanner:
    """Plans the layered files of one rank's checkpoints. For any thread."""

    def __init__(self, mode: Mode = "auto", most_regions: int = MOST_REGIONS) -> None:
        self._mode, self._most_regions = mode, most_regions
        self._lock = threading.Lock()
        self._state: LayeredState | None = None
        """Of the newest durable checkpoint that has layered files."""
        self._samples: _Samples | None = None
        self._pending: dict[str, LayeredState] = {}
        self._pause = self._left = 0
        """Checkpoints that are not sampled: after the last search, and of these those to come."""

    def plan(
        self,
        lineage: int,
        slots: Sequence[TensorRange],
        payload: memoryview,
        unchanged: set[str],
        *,
        may_link: bool,
    ) -> LayeredWrite | None:
        """Return how to store the tensors that change in part; None if there are none.

        Args:
            unchanged: tensors that probably are linked as a whole.
            may_link: whether files of earlier checkpoints may be linked.
        """
        with self._lock:
            state = self._state
            if not may_link:  # its files may be damaged
                self._state = None
        if state is None or state.lineage != lineage or not _has_same(state, slots):
            return self._search(lineage, slots, payload, unchanged)
        now = {slot.name: slot for slot in slots}
        ours = {name: now[name] for name in state.slots}
        trees = {name: hash_tree(_bytes_of(slot, payload), _leaf_bytes(slot)) for name, slot in ours.items()}
        changed = {name: changed_leaves(state.trees[name], tree) for name, tree in trees.items()}
        is_recent = state.links < MOST_LINKS
        if may_link and is_recent and (chosen := self._choose(state, ours, changed)) is not None:
            kept, leaves = chosen
            return LayeredWrite(ours, trees, state, kept, leaves)
        still = {
            name: slot
            for name, slot in ours.items()
            if len(changed[name]) <= MOST_CHANGED_SHARE * len(trees[name].levels[0])
        }
        if not still:
            self._forget()
            return None
        return LayeredWrite(still, {name: trees[name] for name in still})

    def written(
        self, checkpoint: str, lineage: int, write: LayeredWrite, base: fmt.File, region: fmt.File | None
    ) -> None:
        """Remember what was written, until it is settled."""
        regions = [*write.kept]
        if region is not None:
            regions.append(Region(region, write.leaves))
        linked = {file.name: file for file in write.linked_files}
        regions = [replace(each, file=linked.get(each.file.name, each.file)) for each in regions]
        links = 0 if write.before is None else write.before.links + 1
        state = LayeredState(checkpoint, lineage, write.slots, write.trees, base, regions, links)
        with self._lock:
            self._pending[checkpoint] = state

    def settle(self, checkpoint: str, *, is_durable: bool) -> None:
        """Take the state of a checkpoint that is durable as the one to link from; drop that of another."""
        with self._lock:
            state = self._pending.pop(checkpoint, None)
            if is_durable and state is not None:
                self._state, self._samples = state, None

    def _forget(self) -> None:
        with self._lock:
            self._state = self._samples = None
            self._pause = min(2 * self._pause or FIRST_PAUSE, LONGEST_PAUSE)
            self._left = self._pause

    def _search(
        self, lineage: int, slots: Sequence[TensorRange], payload: memoryview, unchanged: set[str]
    ) -> LayeredWrite | None:
        """Choose tensors for a base file; without samples of an earlier checkpoint, take some."""
        with self._lock:
            samples, self._samples, self._state = self._samples, None, None
            if self._left:
                self._left -= 1
                return None
        large = {
            slot.name: slot
            for slot in slots
            if slot.end - slot.start >= LEAST_TENSOR_BYTES
            and slot.name not in unchanged
            and slot.end - slot.start <= MOST_LEAVES * _leaf_bytes(slot)
        }
        if self._mode is True:
            chosen = large
        elif samples is None or samples.lineage != lineage:
            with self._lock:
                self._samples = _sampled(lineage, large, payload)
            return None
        else:
            chosen = _changing_little(samples, large, payload)
        if not chosen:
            self._forget()
            return None
        trees = {name: hash_tree(_bytes_of(slot, payload), _leaf_bytes(slot)) for name, slot in chosen.items()}
        return LayeredWrite(chosen, trees)

    def _choose(
        self, state: LayeredState, slots: Mapping[str, TensorRange], changed: Mapping[str, torch.Tensor]
    ) -> tuple[Sequence[Region], Mapping[str, torch.Tensor]] | None:
        """Return the regions to link, and the leaves to write; None if a base is to be written.

        Region files that are not linked are merged into the new one: it has the present bytes of their leaves.
        """
        regions, new_bytes = state.regions, _region_bytes(slots, changed)
        sizes = [region.file.size_bytes for region in regions]
        most_bytes = MOST_REGION_SHARE * _size_bytes(slots)
        merged = 0
        if new_bytes and len(regions) >= self._most_regions:
            least = len(regions) + 1 - self._most_regions
            costs = {n: (sum(sizes[-n:]) + new_bytes) / n for n in range(least, len(regions) + 1)}
            merged = min(costs, key=lambda n: costs[n])
        if sum(sizes) + new_bytes > most_bytes:
            merged, most_bytes = len(regions), most_bytes / 2  # leaves that changed repeatedly are stored once
        kept = regions[: len(regions) - merged]
        leaves = _union([*(region.leaves for region in regions[len(kept) :]), changed]) if merged else changed
        is_small = _region_bytes(slots, leaves) <= min(most_bytes, MOST_REGION_BYTES)
        return (kept, leaves) if is_small else None


def layers_of(regions: Sequence[fmt.File]) -> list[StoredLayer]:
    """Return the entries of region files in the encoding of their base file."""
    return [StoredLayer(file.name, file.size_bytes, file.header_digest) for file in regions]


def _has_same(state: LayeredState, slots: Sequence[TensorRange]) -> bool:
    now = {slot.name: (slot.dtype, slot.shape) for slot in slots}
    return all(now.get(name) == (slot.dtype, slot.shape) for name, slot in state.slots.items())


def _bytes_of(slot: TensorRange, payload: memoryview) -> torch.Tensor:
    return torch.frombuffer(payload, dtype=torch.uint8, count=slot.end - slot.start, offset=slot.start)


def _leaf_bytes(slot: TensorRange) -> int:
    """Return the size of the leaves of a large tensor; its rows are those of the first dimension."""
    return leaf_bytes_of((slot.end - slot.start) // slot.shape[0])


def _size_bytes(slots: Mapping[str, TensorRange]) -> int:
    return sum(slot.end - slot.start for slot in slots.values())


def _region_bytes(slots: Mapping[str, TensorRange], leaves: Mapping[str, torch.Tensor]) -> int:
    """Return about how large a region file is."""
    return sum(
        len(found) * _leaf_bytes(slots[name]) + RUN_BYTES * len(runs_of(found.numpy()))
        for name, found in leaves.items()
        if len(found)
    )


def _union(regions: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    names = dict.fromkeys(name for leaves in regions for name in leaves)
    return {name: torch.unique(torch.cat([each[name] for each in regions if name in each])) for name in names}


def _sampled(lineage: int, slots: Mapping[str, TensorRange], payload: memoryview) -> _Samples:
    places = {}
    for name, slot in slots.items():
        count = (slot.end - slot.start) // _leaf_bytes(slot)
        wanted = min(count, max(LEAST_SAMPLES, min(MOST_SAMPLES, int(SAMPLED_SHARE * count))))
        places[name] = slot, torch.arange(wanted, device="cpu") * (count - 1) // max(1, wanted - 1)
    return _Samples(lineage, places, _sample_hashes(places, payload))


def _sample_hashes(
    places: Mapping[str, tuple[TensorRange, torch.Tensor]], payload: memoryview
) -> dict[str, torch.Tensor]:
    """Hash leaves of tensors, those of the same size at once: most of the time goes to the calls."""
    by_size: dict[int, list[str]] = {}
    for name, (slot, _) in places.items():
        by_size.setdefault(_leaf_bytes(slot), []).append(name)
    found = dict[str, torch.Tensor]()
    for size, names in by_size.items():
        starts = [
            slot.start + number * size
            for slot, numbers in (places[name] for name in names)
            for number in numbers.tolist()
        ]
        rows = bytearray().join(payload[start : start + size] for start in starts)  # torch would use more threads
        hashes = hash_rows(torch.frombuffer(rows, dtype=torch.uint8).view(-1, size))
        at = 0
        for name in names:
            found[name] = hashes[at : at + len(places[name][1])]
            at += len(places[name][1])
    return found


def _changing_little(
    samples: _Samples, slots: Mapping[str, TensorRange], payload: memoryview
) -> dict[str, TensorRange]:
    """Return the tensors of which few of the sampled leaves changed."""
    places = {}
    for name, slot in slots.items():
        before, numbers = samples.places.get(name, (None, None))
        if before is not None and numbers is not None and (before.dtype, before.shape) == (slot.dtype, slot.shape):
            places[name] = slot, numbers
    now = _sample_hashes(places, payload)
    return {
        name: slots[name]
        for name, hashes in now.items()
        if int((hashes != samples.hashes[name]).sum()) <= MOST_CHANGED_SHARE * len(hashes)
    }
