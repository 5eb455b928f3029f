import pytest
import torch

from holdfast.incremental.row_hashes import (
    CHILDREN,
    MOST_LEAF_BYTES,
    changed_leaves,
    hash_rows,
    hash_tree,
    leaf_bytes_of,
    leaves_of,
)


def data(size_bytes, seed=0):
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("row_bytes", "leaf_bytes"),
    [(128, 128), (64, 64), (4096, 4096), (4, 64), (6, 72), (12, 72), (100, 200), (5000, 4096), (1 << 20, 4096)],
)
def test_a_leaf_is_a_row_or_several_small_ones(row_bytes, leaf_bytes):
    assert leaf_bytes_of(row_bytes) == leaf_bytes


@pytest.mark.parametrize("row_bytes", range(1, 300))
def test_leaves_have_whole_words_and_limits(row_bytes):
    assert leaf_bytes_of(row_bytes) % 8 == 0
    assert 64 <= leaf_bytes_of(row_bytes) <= MOST_LEAF_BYTES


@pytest.mark.parametrize("size_bytes", [1, 63, 64, 65, 64 * CHILDREN, 64 * CHILDREN + 1, 64 * CHILDREN**2 + 65])
def test_the_tree_finds_each_changed_leaf_and_no_other(size_bytes):
    before = data(size_bytes)
    tree = hash_tree(before, 64)
    count = leaves_of(before, 64)
    assert changed_leaves(tree, hash_tree(before.clone(), 64)).tolist() == []
    for leaves in ({0}, {count - 1}, {0, count // 2, count - 1}, set(range(min(count, 100)))):
        after = before.clone()
        for leaf in leaves:
            after[min(leaf * 64 + 63, size_bytes - 1)] ^= 1
        assert changed_leaves(tree, hash_tree(after, 64)).tolist() == sorted(leaves)


def test_changes_that_cancel_out_in_a_sum_are_found():
    rows = data(1024 * 128).view(1024, 128)
    before = hash_rows(rows)
    numbers = rows.view(torch.int32)
    changes = {
        "all signs": numbers ^ (1 << 31),
        "two signs": torch.cat([numbers[:, :2] ^ (1 << 31), numbers[:, 2:]], dim=1),
        "two words swapped": numbers.roll(2, dims=1),
        "one up, one down": numbers + torch.tensor([1, 0, -1, 0] + 28 * [0], dtype=torch.int32),
        "one bit": numbers ^ torch.tensor([1] + 31 * [0], dtype=torch.int32),
    }
    for name, changed in changes.items():
        found = hash_rows(changed.contiguous().view(torch.uint8))
        assert bool((found != before).all()), name


def test_hashes_are_64_bits_wide():
    rows = torch.zeros(1 << 16, 64, dtype=torch.uint8)
    rows.view(torch.int64)[:, 0] = torch.arange(1 << 16)  # a structured state: counters
    hashes = hash_rows(rows)
    assert len(hashes.unique()) == 1 << 16
    for bit in range(64):
        share = ((hashes >> bit) & 1).double().mean().item()
        assert 0.4 < share < 0.6, bit


def test_rows_are_hashed_alike_wherever_they_are():
    rows = data(5000 * 64).view(5000, 64)
    hashes = hash_rows(rows)
    assert torch.equal(hash_rows(rows[4000:4100]), hashes[4000:4100])
    unaligned = torch.cat([data(3), rows.flatten()])[3:].view(5000, 64)
    assert torch.equal(hash_rows(unaligned), hashes)


def test_the_random_numbers_of_training_stay_as_they_are():
    state = torch.get_rng_state()
    hash_rows(torch.zeros(2, 8 * 1237, dtype=torch.uint8))  # a width that needs new keys
    assert torch.equal(torch.get_rng_state(), state)


def test_a_tree_takes_little_more_than_eight_bytes_for_each_leaf():
    tree = hash_tree(data(128 * 10_000), 128)
    assert 8 * 10_000 <= tree.size_bytes <= 8.2 * 10_000


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_hashes_as_the_host_does():
    rows = data(1000 * 128).view(1000, 128)
    assert torch.equal(hash_rows(rows.cuda()).cpu(), hash_rows(rows))
