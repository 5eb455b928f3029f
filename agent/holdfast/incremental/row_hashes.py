"""Hash trees over the rows of a tensor, in integer arithmetic of torch, with equal results on every device.

A leaf is one row, or several small ones. Inner nodes hash 64 children each. A tree takes 8.2 bytes for each leaf,
and hashing 1 MB, or 128 MB on an accelerator. Hashes are 64 bits wide, with random keys for each process, and only
choose what is written: the digest of the whole tensor in the manifest is what readers verify.
"""

from __future__ import annotations

import functools
import secrets
from dataclasses import dataclass

import torch

LEAST_LEAF_BYTES, MOST_LEAF_BYTES = 64, 4096
CHILDREN = 64
"""Children of an inner node."""
WORD_BYTES = 8
BLOCK_WORDS = 31 << 10
"""Words that are hashed at once: torch uses no other threads for less than 32 Ki, and they fit into the cache."""
DEVICE_BLOCK_WORDS = 8 << 20
"""The same on an accelerator, where each block costs some launches of kernels; it takes 128 MB meanwhile."""
_LOW = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class HashTree:
    """The hashes of a tensor's leaves, and of the nodes above them."""

    levels: tuple[torch.Tensor, ...]
    """From the leaves to the root."""

    @property
    def size_bytes(self) -> int:
        return sum(level.nbytes for level in self.levels)


def leaf_bytes_of(row_bytes: int) -> int:
    """Return the size of a leaf for rows of that size.

    It is a row of 64 to 4096 bytes that consists of whole words, several smaller rows, or 4096 bytes of larger
    ones.
    """
    size = row_bytes
    while 0 < size <= MOST_LEAF_BYTES:
        if size >= LEAST_LEAF_BYTES and size % WORD_BYTES == 0:
            return size
        size += row_bytes
    return MOST_LEAF_BYTES


def leaves_of(data: torch.Tensor, leaf_bytes: int) -> int:
    """Return the number of leaves of a tensor, given its bytes; the last one may be shorter."""
    return -(-len(data) // leaf_bytes)


def whole_leaves(data: torch.Tensor, leaf_bytes: int) -> torch.Tensor:
    """Return the bytes by leaf, without a shorter last one."""
    count = len(data) // leaf_bytes
    return data[: count * leaf_bytes].view(count, leaf_bytes)


def hash_tree(data: torch.Tensor, leaf_bytes: int) -> HashTree:
    """Build the tree of a tensor, given its bytes."""
    whole = whole_leaves(data, leaf_bytes)
    hashes = hash_rows(whole)
    if len(rest := data[whole.numel() :]):
        hashes = torch.cat([hashes, hash_rows(_padded(rest, leaf_bytes).view(1, leaf_bytes))])
    return tree_over(hashes)


def tree_over(hashes: torch.Tensor) -> HashTree:
    """Build the tree over the hashes of leaves, of 64 bits each."""
    levels = [hashes]
    while len(levels[-1]) > 1:
        below = _padded(levels[-1], CHILDREN)
        levels.append(hash_rows(below.view(torch.uint8).view(-1, CHILDREN * WORD_BYTES)))
    return HashTree(tuple(levels))


def changed_leaves(before: HashTree, after: HashTree) -> torch.Tensor:
    """Return the numbers of the leaves that differ, in ascending order, from the root down."""
    nodes = torch.zeros(1, dtype=torch.int64, device=after.levels[0].device)
    children = torch.arange(CHILDREN, device=nodes.device)
    for number, (old, new) in enumerate(zip(reversed(before.levels), reversed(after.levels), strict=True)):
        if number:
            nodes = (nodes[:, None] * CHILDREN + children).flatten()
        nodes = nodes[nodes < len(new)]
        nodes = nodes[old[nodes] != new[nodes]]
    return nodes


def hash_rows(rows: torch.Tensor) -> torch.Tensor:
    """Hash rows of bytes, whose length is a multiple of a word.

    A word is multiplied and shifted such that different words stay different, and any bit reaches all others; the
    sum of the words is the hash.
    """
    count, words = len(rows), rows.shape[1] // WORD_BYTES
    first, second, third = _keys(words).to(rows.device)
    at_once = max(1, (BLOCK_WORDS if rows.device.type == "cpu" else DEVICE_BLOCK_WORDS) // words)
    found = torch.empty(count, dtype=torch.int64, device=rows.device)
    buffer = torch.empty(min(count, at_once), words, dtype=torch.int64, device=rows.device)
    shifted = torch.empty_like(buffer)
    is_aligned = rows.is_contiguous() and rows.data_ptr() % WORD_BYTES == 0
    source, target = (rows.view(torch.int64), buffer) if is_aligned else (rows, buffer.view(torch.uint8))
    for start in range(0, count, at_once):
        end = min(start + at_once, count)
        mixed, high = buffer[: end - start], shifted[: end - start]
        target[: end - start].copy_(source[start:end])
        mixed.mul_(first)
        _fold(mixed, high)
        mixed.mul_(second)
        _fold(mixed, high)
        mixed.mul_(third)
        torch.sum(mixed, 1, out=found[start:end])
    return found


def _fold(words: torch.Tensor, high: torch.Tensor) -> None:
    """Combine the low half of each word with its high half, which stays."""
    torch.bitwise_right_shift(words, 32, out=high)
    high.bitwise_and_(_LOW)
    words.bitwise_xor_(high)


@functools.cache
def _keys(words: int) -> torch.Tensor:
    """Return odd factors: they map different words to different products."""
    generator = torch.Generator("cpu").manual_seed(secrets.randbits(63))  # not that of training
    return torch.randint(-(2**63), 2**63 - 1, (3, words), generator=generator, device="cpu") | 1


def _padded(values: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -len(values) % multiple
    return torch.cat([values, values.new_zeros(missing)]) if missing else values
