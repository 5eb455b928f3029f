"""Decides what a rank writes of tensors in which few rows change: a base file, or the rows that changed since.

Whether rows changed is decided by hash trees of what was written last, which this process has in memory. So the
first checkpoint of a process, or of a lineage, is written in full. One module, since what is written, linked and
remembered of a tensor must agree.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
import torch

from holdfast.format import manifest as fmt
from holdfast.format.dtypes import stored_as
from holdfast.format.encoding import StoredLayer
from holdfast.format.manifest import TensorRange, lay_out
from holdfast.incremental.region_file import RUN_BYTES, encode_region, runs_of
from holdfast.incremental.row_hashes import (
    HashTree,
    changed_leaves,
    hash_rows,
    hash_tree,
    leaf_bytes_of,
    whole_leaves,
)
from holdfast.protocol.field_types import ChangedTensor
from holdfast.protocol.wire import MAX_CHANGED_TENSORS

logger = logging.getLogger("holdfast")
Mode = Literal["auto", True]
"""`auto`: only tensors of which a sample shows that few rows change. True: all large tensors, at once."""

LEAST_TENSOR_BYTES = fmt.LARGE_BYTES
MOST_SAMPLES, LEAST_SAMPLES, SAMPLED_SHARE = 1024, 16, 1 / 64
"""Leaves of each large tensor that are compared with the checkpoint before."""
MOST_FIRST_SAMPLES = 64
"""The same before the first checkpoint, while training waits."""
MOST_CHANGED_SHARE = 0.1
"""Share of changed leaves above which a tensor is written in full."""
MOST_REGION_SHARE = 0.3
"""Share of the base that region files may reach before a new base is written: it limits what a restore reads."""
MOST_MERGED_SHARE = 0.75
"""A new base is written as well when they are merged and exceed this share of that limit: they soon would."""
LEAST_GROWTH = 1.5
"""A region file that is less than so many times as large as those after it is merged with them, where some are."""
MOST_REGIONS = 16
MOST_COPIED_REGIONS = 3
"""Where a link is a copy by a server, each costs a request: with the base, 3 copies and an upload."""
MOST_REGION_BYTES = 1 << 29
"""Half of the largest header that a reader accepts, to which the table of a region file adds."""
MOST_LINKS = 64
"""So many checkpoints in a row link a base: damage to one file reaches no more, for 1.6 % of the plain bytes."""
MOST_LEAVES = 1 << 32
FIRST_PAUSE, LONGEST_PAUSE = 8, 64
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
    changed: Sequence[ChangedTensor] = ()
    """The tensors whose rows it wrote."""


Places = Mapping[str, tuple[TensorRange, torch.Tensor]]
"""Tensors, and the numbers of their leaves that are hashed."""


ReadLeaves = Callable[[TensorRange, torch.Tensor], Sequence[memoryview]]
"""Returns the bytes of leaves of a tensor, given their numbers in ascending order."""


@dataclass(frozen=True, slots=True)
class _Samples:
    lineage: int
    places: Places
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
    changed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Leaves that differ from the checkpoint to link files from."""

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
        return replace(self, before=None, kept=(), leaves={}, changed={})

    @property
    def changed_tensors(self) -> list[ChangedTensor]:
        """The tensors of which rows are written, those with most bytes first."""
        stored = [(len(leaves) * leaf_bytes_in(self.slots[name]), name) for name, leaves in self.leaves.items()]
        return [
            ChangedTensor(
                name=name,
                rows=len(self.trees[name].levels[0]),
                row_bytes=leaf_bytes_in(self.slots[name]),
                changed_rows=len(self.changed[name]),
                stored_rows=len(self.leaves[name]),
                size_bytes=self.slots[name].end - self.slots[name].start,
            )
            for _, name in sorted(stored, reverse=True)[:MAX_CHANGED_TENSORS]
        ]

    def region_parts(self, read: ReadLeaves, places: Mapping[str, fmt.Tensor]) -> list[Any]:
        """Return the parts of the region file, given the positions of the tensors in the plain file."""
        tensors, rows = [], list[memoryview]()
        for name, leaves in self.leaves.items():
            if len(leaves):
                rows += read(self.slots[name], leaves)
                size = leaf_bytes_in(self.slots[name])
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
        payload: memoryview | Mapping[str, HashTree],
        unchanged: set[str],
        *,
        may_link: bool,
    ) -> LayeredWrite | None:
        """Return how to store the tensors that change in part; None if there are none.

        Args:
            payload: the bytes of the tensors; where all large tensors are taken, their hash trees are enough.
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
        trees = _trees(ours, payload)
        changed = {name: changed_leaves(state.trees[name], tree) for name, tree in trees.items()}
        is_recent = state.links < MOST_LINKS
        if may_link and is_recent and (chosen := self._choose(state, ours, changed)) is not None:
            kept, leaves = chosen
            return LayeredWrite(ours, trees, state, kept, leaves, changed)
        still = {
            name: slot
            for name, slot in ours.items()
            if len(changed[name]) <= MOST_CHANGED_SHARE * len(trees[name].levels[0])
        }
        if not still:
            self._forget()
            return None
        return LayeredWrite(still, {name: trees[name] for name in still})

    def passes(self) -> bool:
        """Return whether there is no need to plan, since all tensors changed as a whole not long ago."""
        with self._lock:
            if self._state is not None or not self._left:
                return False
            self._left -= 1
            return True

    def observe(self, lineage: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sample the live state before the first checkpoint, which then can be a base. On the training thread."""
        with self._lock:
            if self._mode is True or self._state is not None or self._samples is not None:
                return
        try:
            samples = _live_samples(lineage, tensors)
        except Exception as error:  # a tensor of an unusual kind; the first checkpoint is sampled instead
            logger.debug("the state is not sampled before the first checkpoint: %s", error)
            return
        with self._lock:
            self._samples = self._samples or samples

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
        slots, trees, changed = write.slots, write.trees, write.changed_tensors
        state = LayeredState(checkpoint, lineage, slots, trees, base, regions, links, changed)
        with self._lock:
            self._pending[checkpoint] = state

    def settle(self, checkpoint: str, *, is_durable: bool) -> Sequence[ChangedTensor]:
        """Take the state of a checkpoint that is durable as the one to link from; drop that of another.

        Returns:
            The tensors of which the durable one wrote only rows.
        """
        with self._lock:
            state = self._pending.pop(checkpoint, None)
            if not is_durable or state is None:
                return ()
            self._state, self._samples = state, None
            return state.changed

    def begin_anew(self) -> None:
        """Link no file of earlier checkpoints, nor of those that are not settled."""
        with self._lock:
            self._state = self._samples = None
            self._pending.clear()

    def _forget(self) -> None:
        with self._lock:
            self._state = self._samples = None
            self._pause = min(2 * self._pause or FIRST_PAUSE, LONGEST_PAUSE)
            self._left = self._pause

    def _search(
        self,
        lineage: int,
        slots: Sequence[TensorRange],
        payload: memoryview | Mapping[str, HashTree],
        unchanged: set[str],
    ) -> LayeredWrite | None:
        """Choose tensors for a base file; without samples of an earlier checkpoint, take some."""
        with self._lock:
            samples, self._samples, self._state = self._samples, None, None
        if self.passes():
            return None
        large = {slot.name: slot for slot in slots if slot.name not in unchanged and _is_large(slot)}
        if self._mode is True or not isinstance(payload, memoryview):
            chosen = large
        elif samples is None or samples.lineage != lineage or not samples.places.keys() >= large.keys():
            with self._lock:
                self._samples = _sampled(lineage, large, payload)
            return None
        else:
            chosen = _changing_little(samples, large, payload)
        if not chosen:
            self._forget()
            return None
        return LayeredWrite(chosen, _trees(chosen, payload))

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
            merged = len(regions) + 1 - self._most_regions
            # a file is rewritten rarely where each is larger than what is merged into the next one
            while merged < len(regions) and sizes[-merged - 1] < LEAST_GROWTH * (
                sum(sizes[len(sizes) - merged :]) + new_bytes
            ):
                merged += 1
        if sum(sizes) + new_bytes > most_bytes:
            merged, most_bytes = (
                len(regions),
                MOST_MERGED_SHARE * most_bytes,
            )  # what changed repeatedly is stored once
        kept = regions[: len(regions) - merged]
        leaves = _union([*(region.leaves for region in regions[len(kept) :]), changed]) if merged else changed
        is_small = _region_bytes(slots, leaves) <= min(most_bytes, MOST_REGION_BYTES)
        return (kept, leaves) if is_small else None


def rows_in(payload: memoryview, slot: TensorRange, leaves: torch.Tensor) -> list[memoryview]:
    """Return the bytes of leaves of a tensor in the payload."""
    data = _bytes_of(slot, payload)
    whole = whole_leaves(data, leaf_bytes_in(slot))
    inside = leaves[leaves < len(whole)]
    rows = [whole.index_select(0, inside).flatten().numpy().data]
    if len(inside) < len(leaves):
        rows.append(data[whole.numel() :].numpy().data)
    return rows


def layers_of(regions: Sequence[fmt.File]) -> list[StoredLayer]:
    """Return the entries of region files in the encoding of their base file."""
    return [StoredLayer(file.name, file.size_bytes, file.header_digest) for file in regions]


def _has_same(state: LayeredState, slots: Sequence[TensorRange]) -> bool:
    now = {slot.name: (slot.dtype, slot.shape) for slot in slots}
    return all(now.get(name) == (slot.dtype, slot.shape) for name, slot in state.slots.items())


def _trees(slots: Mapping[str, TensorRange], payload: memoryview | Mapping[str, HashTree]) -> dict[str, HashTree]:
    if not isinstance(payload, memoryview):
        return {name: payload[name] for name in slots}
    return {name: hash_tree(_bytes_of(slot, payload), leaf_bytes_in(slot)) for name, slot in slots.items()}


def _bytes_of(slot: TensorRange, payload: memoryview) -> torch.Tensor:
    return torch.frombuffer(payload, dtype=torch.uint8, count=slot.end - slot.start, offset=slot.start)


def leaf_bytes_in(slot: TensorRange) -> int:
    """Return the size of the leaves of a large tensor; its rows are those of the first dimension."""
    return leaf_bytes_of((slot.end - slot.start) // slot.shape[0])


def _size_bytes(slots: Mapping[str, TensorRange]) -> int:
    return sum(slot.end - slot.start for slot in slots.values())


def _region_bytes(slots: Mapping[str, TensorRange], leaves: Mapping[str, torch.Tensor]) -> int:
    """Return about how large a region file is."""
    return sum(
        len(found) * leaf_bytes_in(slots[name]) + RUN_BYTES * len(runs_of(found.numpy()))
        for name, found in leaves.items()
        if len(found)
    )


def _union(regions: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    names = dict.fromkeys(name for leaves in regions for name in leaves)
    return {name: torch.unique(torch.cat([each[name] for each in regions if name in each])) for name in names}


def _is_large(slot: TensorRange) -> bool:
    return LEAST_TENSOR_BYTES <= slot.end - slot.start <= MOST_LEAVES * leaf_bytes_in(slot)


def _places(slots: Mapping[str, TensorRange], most: int = MOST_SAMPLES) -> Places:
    places = {}
    for name, slot in slots.items():
        count = (slot.end - slot.start) // leaf_bytes_in(slot)
        wanted = min(count, max(LEAST_SAMPLES, min(most, int(SAMPLED_SHARE * count))))
        places[name] = slot, torch.arange(wanted, device="cpu") * (count - 1) // max(1, wanted - 1)
    return places


def _sampled(lineage: int, slots: Mapping[str, TensorRange], payload: memoryview) -> _Samples:
    places = _places(slots)
    return _Samples(lineage, places, _sample_hashes(places, lambda name: _leaves_in(payload, *places[name])))


def _leaves_in(payload: memoryview, slot: TensorRange, numbers: torch.Tensor) -> Iterator[memoryview]:
    """Yield leaves of a tensor: torch would use more threads."""
    size = leaf_bytes_in(slot)
    starts = (slot.start + number * size for number in numbers.tolist())
    return (payload[start : start + size] for start in starts)


def _live_samples(lineage: int, tensors: Mapping[str, torch.Tensor]) -> _Samples:
    """Sample large tensors where they are."""
    stored = {name: stored_as(name, tensor) for name, tensor in tensors.items()}
    slots = lay_out((name, dtype, shape) for name, (dtype, shape, _) in stored.items())
    places = _places({slot.name: slot for slot in slots if _is_large(slot)}, MOST_FIRST_SAMPLES)

    def rows(name: str) -> list[memoryview]:
        slot, numbers = places[name]
        data = tensors[name].detach().view(-1).view(torch.uint8)
        found = whole_leaves(data, leaf_bytes_in(slot)).index_select(0, numbers.to(data.device))
        return [found.cpu().numpy().data.cast("B")]

    return _Samples(lineage, places, _sample_hashes(places, rows))


def _sample_hashes(places: Places, rows_of: Callable[[str], Iterable[memoryview]]) -> dict[str, torch.Tensor]:
    """Hash leaves of tensors, those of the same size at once: most of the time goes to the calls."""
    by_size: dict[int, list[str]] = {}
    for name, (slot, _) in places.items():
        by_size.setdefault(leaf_bytes_in(slot), []).append(name)
    found = dict[str, torch.Tensor]()
    for size, names in by_size.items():
        rows = bytearray().join(part for name in names for part in rows_of(name))
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
    now = _sample_hashes(places, lambda name: _leaves_in(payload, *places[name]))
    return {
        name: slots[name]
        for name, hashes in now.items()
        if int((hashes != samples.hashes[name]).sum()) <= MOST_CHANGED_SHARE * len(hashes)
    }
