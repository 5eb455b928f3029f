"""The bytes that a Merkle-tree incremental checkpoint stores, after Tan et al. (ICPP 2023).

A complete binary tree over the chunk digests of a block: node v has the children 2v + 1 and 2v + 2, and leaf i
of n is node n - 1 + i. Unchanged leaves are fixed; a leaf whose digest is known from the base or from elsewhere
in the block is shifted, any other is first. Equal neighbors are merged upwards, so that a region is the root of
a subtree. Unlike the published code, a shifted root is stored. Only sizes are computed here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .chunks import CHUNK_BYTES, Digests, digests, mixed

HEADER_BYTES, FIRST_BYTES, SHIFTED_BYTES = 48, 4, 8
_FIXED, _FIRST, _SHIFTED, _DONE = range(4)


class BaseTree:
    """Digests of all nodes of a base, and the same sorted."""

    def __init__(self, data: Any) -> None:
        leaves = digests(data)
        self.leaves = len(leaves)
        self.nodes = np.zeros((max(1, 2 * self.leaves - 1), 2), np.uint64)
        if self.leaves:
            self.nodes[self.leaves - 1 :] = leaves
        for nodes in _levels(self.leaves):
            self.nodes[nodes] = _parents(self.nodes, nodes)
        self.ordered = np.sort(self.nodes[:, 0])


def stored_bytes(data: Any, base: BaseTree) -> tuple[int, int]:
    """Return the bytes of new chunks, and those of the metadata."""
    leaves = digests(data)
    count = len(leaves)
    if not count:
        return 0, HEADER_BYTES
    tree = np.zeros((2 * count - 1, 2), np.uint64)
    tree[count - 1 :] = leaves
    labels = np.full(2 * count - 1, _DONE, np.uint8)
    labels[count - 1 :] = _FIRST
    _, first = np.unique(leaves[:, 0], return_index=True)
    duplicate = np.ones(count, bool)
    duplicate[first] = False
    labels[count - 1 :][duplicate | _contains(base.ordered, leaves)] = _SHIFTED
    if count == base.leaves:
        labels[count - 1 :][(leaves == base.nodes[count - 1 :]).all(axis=1)] = _FIXED
    new = np.flatnonzero(labels[count - 1 :] == _FIRST)
    sizes = np.full(count, CHUNK_BYTES)
    sizes[-1] = len(memoryview(data).cast("B")) - (count - 1) * CHUNK_BYTES
    roots = {_FIRST: 0, _SHIFTED: 0}
    known = [base.ordered, np.sort(leaves[new, 0])]
    for nodes in _levels(count):
        left, right = labels[2 * nodes + 1], labels[2 * nodes + 2]
        tree[nodes] = _parents(tree, nodes)
        merged = (left == right) & ((left == _FIXED) | (left == _FIRST))
        shifted = (left == _SHIFTED) & (right == _SHIFTED)
        shifted[shifted] = np.any([_contains(each, tree[nodes[shifted]]) for each in known], axis=0)
        labels[nodes] = np.where(merged | shifted, left, _DONE)
        emitted = np.concatenate([left[~merged & ~shifted], right[~merged & ~shifted]])
        for label in roots:
            roots[label] += int((emitted == label).sum())
    if labels[0] in roots:
        roots[int(labels[0])] += 1
    metadata = HEADER_BYTES + FIRST_BYTES * roots[_FIRST] + SHIFTED_BYTES * roots[_SHIFTED]
    return int(sizes[new].sum()), metadata


def _levels(leaves: int) -> list[Any]:
    """Return the inner nodes of each level, the deepest first."""
    found, first = [], 0
    while first < leaves - 1:
        found.append(np.arange(first, min(2 * first + 1, leaves - 1)))
        first = 2 * first + 1
    return found[::-1]


def _parents(tree: Digests, nodes: Any) -> Digests:
    return mixed(np.concatenate([tree[2 * nodes + 1], tree[2 * nodes + 2]], axis=1), 0)


def _contains(ordered: Any, wanted: Digests) -> Any:
    if not len(ordered):
        return np.zeros(len(wanted), bool)
    places = np.minimum(np.searchsorted(ordered, wanted[:, 0]), len(ordered) - 1)
    return ordered[places] == wanted[:, 0]
