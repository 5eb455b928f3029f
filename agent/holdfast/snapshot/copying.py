"""Copies tensors into an arena so that training hardly notices: in few calls, without the interpreter lock.

Everything that depends on names, shapes and addresses alone is worked out once (`HostCopies`) and used for every
snapshot of the same structure.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from holdfast.format.manifest import SMALL_BYTES, TensorRange, digest
from holdfast.system.host_memory import MOST_SPANS, Gather, SafeMemoryReader, bytes_of, is_plain
from holdfast.torch_internals import version_of

EDGE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Pair:
    """A live tensor and its place in the arena."""

    slot: TensorRange
    source: torch.Tensor
    target: torch.Tensor


class HostCopies:
    """Tensors that lie in host memory one element behind the other, copied as bytes.

    Large ones go with one memmove each. Small ones, which lie together in the arena, go with one call for
    hundreds of them: a call each would hand the interpreter lock to and fro as often, and hold up the thread
    that trains. `Tensor.copy_` would call up a second team of compute threads, which fights with the one that
    runs forward.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._large = [_span(pair) for pair in pairs if _size(pair) >= SMALL_BYTES]
        small = [pair for pair in pairs if 0 < _size(pair) < SMALL_BYTES]
        self._small = [Gather([_span(pair) for pair in run]) for run in _runs(small)]

    def run(self) -> None:
        for target, source, size in self._large:
            ctypes.memmove(target, source, size)
        for together in self._small:
            together.run()


class TornCopyDetector:
    """Sees whether somebody else changes tensors while they are copied.

    The version counter sees every in-place operation, but not those through `.data`, nor on memory shared
    with NumPy. So the first bytes of parameters are remembered, too, and of large ones the last: weights that are
    swapped or scaled as a whole show there. A change of a few other elements through `.data` would go unseen;
    `digests` see it all. What an optimizer `kept` beside them asks for no gradient, and nobody needs a way past
    the counter to change it.
    """

    def __init__(self, pairs: Sequence[Pair], kept: Collection[str] = ()) -> None:
        self._pairs = pairs
        self._sources = [pair.source for pair in pairs]
        edged = [p for p in pairs if p.slot.name not in kept and is_plain(p.source) and p.source.numel()]
        # an address may have gone to others, where it is not known yet whether the tensor is still the same
        self._live = SafeMemoryReader([_place(edge) for pair in edged for edge in _edges(pair.source)])
        self._copied = SafeMemoryReader([_place(edge) for pair in edged for edge in _edges(pair.target)])
        self._edged = edged
        self._versions: list[int] = []
        self._before = b""
        self._digests: list[str] | None = None

    def remember(self, *, digests: bool = False) -> None:
        """How things are now, before the copy."""
        self._versions = list(map(version_of, self._sources))
        self._before = self._live.read() or b""
        self._digests = [digest_of(source) for source in self._sources] if digests else None

    def changed(self) -> list[str]:
        """Names of the tensors whose copies are not what `remember` saw."""
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
    """Tensors that no optimizer trains: copied into an arena once, and again when they have changed.

    Digests tell, since a change through `.data` shows nowhere else: to read is cheaper than to copy.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs
        self._copies = HostCopies(pairs)
        self._held: list[str] = []
        """Digests of what the arena holds."""

    def run(self) -> bool:
        """Copy unless the arena holds them as they are; whether it did."""
        if self._held and self._held == [digest_of(pair.source) for pair in self._pairs]:
            return False
        self._held = []  # should the copy fail half-way
        self._copies.run()
        self._held = [digest_of(pair.target) for pair in self._pairs]
        return True

    def forget(self) -> None:
        self._held = []


def digest_of(tensor: torch.Tensor) -> str:
    whole = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return digest(bytes_of(whole)) if whole.numel() else ""


def _edges(tensor: torch.Tensor) -> list[torch.Tensor]:
    raw = _raw(tensor)
    ends = [raw[:EDGE_BYTES]]
    return ends if raw.numel() < SMALL_BYTES else [*ends, raw[raw.numel() - EDGE_BYTES :]]


def _place(edge: torch.Tensor) -> tuple[int, int]:
    return edge.data_ptr(), edge.numel()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _size(pair: Pair) -> int:
    return pair.slot.end - pair.slot.start


def _span(pair: Pair) -> tuple[int, int, int]:
    return pair.target.data_ptr(), pair.source.data_ptr(), _size(pair)


def _runs(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Pairs whose slots lie back to back, together, as many at a time as one call takes."""
    runs: list[list[Pair]] = []
    for pair in sorted(pairs, key=lambda pair: pair.slot.start):
        if runs and runs[-1][-1].slot.end == pair.slot.start and len(runs[-1]) < MOST_SPANS:
            runs[-1].append(pair)
        else:
            runs.append([pair])
    return runs
