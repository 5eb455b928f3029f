"""Copy tensors into an arena in few calls and without the interpreter lock, so that training is not slowed down.

What depends only on names, shapes and addresses is computed once per structure of the state, not per snapshot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from holdfast.format.manifest import SMALL_BYTES, TensorRange, digest
from holdfast.system.host_memory import MAX_SPANS, Gather, SafeMemoryReader, bytes_of, is_plain
from holdfast.torch_internals import version_of

EDGE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Pair:
    """A live tensor and its view of the arena."""

    slot: TensorRange
    source: torch.Tensor
    target: torch.Tensor


class HostCopies:
    """Copies contiguous tensors in host memory as bytes.

    Large tensors take one memmove each. Small tensors, which are adjacent in the arena, are copied by the hundred
    in one call: a call per tensor would release and retake the interpreter lock each time, and delay the training
    thread. `Tensor.copy_` is not used: it starts a second set of OpenMP threads, which compete with those of the
    forward pass.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._large = [_span(pair) for pair in pairs if _size(pair) >= SMALL_BYTES]
        small = [pair for pair in pairs if 0 < _size(pair) < SMALL_BYTES]
        self._small = [Gather([_span(pair) for pair in run]) for run in _runs(small)]

    def run(self) -> None:
        for target, source, size in self._large:
            ctypes.memmove(target, source, size)
        for gather in self._small:
            gather.run()


class TornCopyDetector:
    """Detects tensors that change while they are copied.

    The version counter of a tensor counts in-place operations, but not writes through `.data` or through memory
    shared with NumPy. So the first and, for a large tensor, the last 64 bytes are compared as well, which shows
    weights that are swapped or scaled. A write of a few other elements through `.data` is detected by `digests`
    only. For tensors in `optimizer_state` the version counter suffices: code that updates tensors without
    gradients has no reason to use `.data`.
    """

    def __init__(self, pairs: Sequence[Pair], optimizer_state: Collection[str] = ()) -> None:
        self._pairs = pairs
        self._sources = [pair.source for pair in pairs]
        compared = [p for p in pairs if p.slot.name not in optimizer_state]
        edged = [p for p in compared if is_plain(p.source) and p.source.numel()]
        # safe read: the memory may have been freed if the script replaced the tensor
        self._live = SafeMemoryReader([_address_and_size(edge) for pair in edged for edge in _edges(pair.source)])
        self._copied = SafeMemoryReader(
            [_address_and_size(edge) for pair in edged for edge in _edges(pair.target)]
        )
        self._edged = edged
        self._versions: list[int] = []
        self._before = b""
        self._digests: list[str] | None = None

    def remember(self, *, digests: bool = False) -> None:
        """Record versions and edges before the copy, and digests of all tensors if `digests`."""
        self._versions = list(map(version_of, self._sources))
        self._before = self._live.read() or b""
        self._digests = [digest_of(source) for source in self._sources] if digests else None

    @property
    def versions(self) -> dict[str, int]:
        """Version counters that `remember` recorded, by name."""
        return dict(zip((pair.slot.name for pair in self._pairs), self._versions, strict=True))

    def changed(self) -> list[str]:
        """Return the names of tensors whose copy differs from what `remember` recorded."""
        counters = zip(self._pairs, map(version_of, self._sources), self._versions, strict=True)
        found = [pair.slot.name for pair, now, then in counters if now != then]
        if (after := self._copied.read() or b"") != self._before:
            found += self._edges_that_differ(after)
        if self._digests is not None:
            targets = [digest_of(pair.target) for pair in self._pairs]
            pairs = zip(self._pairs, targets, self._digests, strict=True)
            found += [pair.slot.name for pair, now, then in pairs if now != then]
        return list(dict.fromkeys(found))

    def _edges_that_differ(self, after: bytes) -> list[str]:
        names, at = [], 0
        for pair in self._edged:
            size = sum(edge.numel() for edge in _edges(pair.source))
            if self._before[at : at + size] != after[at : at + size]:
                names.append(pair.slot.name)
            at += size
        return names


class UnchangedTensorCache:
    """Copies tensors that no optimizer trains, only if they have changed since the last copy into the arena.

    Changes are detected by digest, because version counters miss writes through `.data`. Reading a tensor is
    cheaper than copying it.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs
        self._copies = HostCopies(pairs)
        self._digests: list[str] = []
        """Digests of the copies in the arena; empty when they are invalid."""

    def run(self) -> bool:
        """Copy the tensors if they changed; return whether they did."""
        if self._digests and self._digests == [digest_of(pair.source) for pair in self._pairs]:
            return False
        self._digests = []  # the copy may fail half-way
        self._copies.run()
        self._digests = [digest_of(pair.target) for pair in self._pairs]
        return True

    def forget(self) -> None:
        self._digests = []


def digest_of(tensor: torch.Tensor) -> str:
    whole = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return digest(bytes_of(whole)) if whole.numel() else ""


def _edges(tensor: torch.Tensor) -> list[torch.Tensor]:
    raw = _raw(tensor)
    ends = [raw[:EDGE_BYTES]]
    return ends if raw.numel() < SMALL_BYTES else [*ends, raw[raw.numel() - EDGE_BYTES :]]


def _address_and_size(edge: torch.Tensor) -> tuple[int, int]:
    return edge.data_ptr(), edge.numel()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _size(pair: Pair) -> int:
    return pair.slot.end - pair.slot.start


def _span(pair: Pair) -> tuple[int, int, int]:
    return pair.target.data_ptr(), pair.source.data_ptr(), _size(pair)


def _runs(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Group pairs with adjacent ranges, at most MAX_SPANS per group: the limit of one system call."""
    runs: list[list[Pair]] = []
    for pair in sorted(pairs, key=lambda pair: pair.slot.start):
        if runs and runs[-1][-1].slot.end == pair.slot.start and len(runs[-1]) < MAX_SPANS:
            runs[-1].append(pair)
        else:
            runs.append([pair])
    return runs
