"""Stage `hash`: hash trees over the rows of a tensor, on the device and on the host."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.harness import median_seconds
from holdfast.incremental.row_hashes import HashTree, changed_leaves, hash_tree

from .stages import CaseResult, Cases, Context

ROWS, SMALL_ROWS, ROW_BYTES = 8 << 20, 1 << 13, 128
"""1 GB of an embedding with 32 numbers of float32 a row, or 1 MB."""
ROUNDS = 5
GOAL = 10.0


def trees(context: Context) -> CaseResult:
    """Build trees of the same tensor on both; change a row, and find it by both."""
    count = SMALL_ROWS if context.small else ROWS
    host = torch.randint(0, 255, (count * ROW_BYTES,), dtype=torch.uint8)
    device = host.to(context.device, copy=True)
    before = hash_tree(host, ROW_BYTES), hash_tree(device, ROW_BYTES)
    is_equal = _are_equal(*before)

    def tree(data: torch.Tensor) -> None:
        hash_tree(data, ROW_BYTES)
        if context.device == "cuda":
            torch.cuda.synchronize()

    host_seconds, device_seconds = median_seconds(ROUNDS, partial(tree, host), partial(tree, device))
    row = count // 3
    host[row * ROW_BYTES + 5] ^= 1
    device[row * ROW_BYTES + 5] ^= 1
    changed = [
        changed_leaves(old, hash_tree(data, ROW_BYTES)).tolist()
        for old, data in zip(before, (host, device), strict=True)
    ]
    is_exact = is_equal and changed == [[row]] * 2
    ratio = host_seconds / device_seconds
    values = {
        "host_gb_per_second": host.nbytes / host_seconds / 1e9,
        "device_gb_per_second": host.nbytes / device_seconds / 1e9,
        "device_of_host": ratio,
        "equal": is_exact,
    }
    if not is_exact:
        return CaseResult(values, False, "the trees of host and device differ")
    return CaseResult(values, context.judged(ratio >= GOAL))


def _are_equal(first: HashTree, second: HashTree) -> bool:
    pairs = zip(first.levels, second.levels, strict=True)
    return all(torch.equal(one, other.cpu()) for one, other in pairs)


CASES: Cases = {"1 GB": trees}
