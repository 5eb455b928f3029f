"""Groups of ranks find out together what one that sees all shards finds."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import IncompleteParts
from holdfast.format.group_structure import GroupStructure, merge_groups, structure_of_rank
from holdfast.format.manifest_files import TensorStructure
from holdfast.format.shards import shard_error
from holdfast.save.rank_tree import FAN_IN, children_of, parent_of
from tests.support.sharded_checkpoints import in_blocks

SIZES = [1, 2, 3, 7, 8, 9, 63, 64, 65, 100, 513, 4096]


def shard(name, shape, global_shape=None, offsets=None, *, is_own=False, dtype="F32"):
    return TensorStructure(name, dtype, shape, global_shape, offsets, None, is_own)


def merged(stored, refers=None):
    """What all ranks store, merged along the tree, with what each message says."""

    def of(rank):
        own = structure_of_rank(rank, stored[rank], (refers or {}).get(rank, {}))
        found = merge_groups([own, *(of(child) for child in children_of(rank, len(stored)))])
        return msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=GroupStructure)

    return of(0)


def refused(stored, refers=None):
    with pytest.raises(IncompleteParts) as raised:
        merged(stored, refers).require_complete()
    return str(raised.value)


@pytest.mark.parametrize("world_size", SIZES)
def test_the_tree_has_every_rank_once_and_in_order(world_size):
    def below(rank):
        for child in children_of(rank, world_size):
            assert parent_of(child) == rank
        return [rank, *(each for child in children_of(rank, world_size) for each in below(child))]

    assert below(0) == list(range(world_size))
    assert len(children_of(0, world_size)) <= (FAN_IN - 1) * 4


@st.composite
def shards_of_ranks(draw):
    world_size = draw(st.sampled_from([1, 2, 9, 20, 70]))
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    blocks = [tuple(block) for block in in_blocks(draw, shape, 2 * min(world_size, 20))]
    change = draw(st.sampled_from(["none", "none", "missing", "twice", "moved"]))
    picked = draw(st.sampled_from(blocks))
    if change in ("missing", "moved"):
        blocks.remove(picked)
    if change == "twice":
        blocks.append(picked)
    if change == "moved":
        blocks.append((tuple(start + 1 for start in picked[0]), picked[1]))
    stored = [[] for _ in range(world_size)]
    for offsets, side in blocks:
        stored[draw(st.integers(0, world_size - 1))].append(shard("w", side, shape, offsets))
    return stored


@settings(max_examples=200, deadline=None)
@given(shards_of_ranks())
def test_groups_find_the_same_gaps_and_overlaps_as_one_rank_that_sees_all(stored):
    flat = [
        tensor.placed(rank, f"rank {rank}", 0, 0, "", None) for rank, own in enumerate(stored) for tensor in own
    ]
    if not flat or shard_error(flat) is None:
        merged(stored).require_complete()
    else:
        refused(stored)


@pytest.mark.parametrize("world_size", [8, 64, 512])
def test_rows_and_grids_of_a_group_become_one_region(world_size):
    rows = [[shard("w", (2, 3), (2 * world_size, 3), (2 * rank, 0))] for rank in range(world_size)]
    grid = [[shard("w", (1, 2), (world_size // 8, 16), (rank // 8, 2 * (rank % 8)))] for rank in range(world_size)]
    for stored in (rows, grid):
        found = merged(stored)
        assert [(each.first, each.last) for each in found.shared["w"].regions] == [(0, world_size - 1)]
        found.require_complete()
        assert len(msgspec.msgpack.encode(found)) < 60


def test_what_is_wrong_names_the_ranks():
    rows = [[shard("w", (1,), (20,), (rank,))] for rank in range(20)]
    assert refused([*rows[:19], []]) == (
        "tensor w: 1 of its 20 elements are missing: only ranks 0 to 18 stored shards"
    )
    assert refused([*rows[:19], rows[3]]) == (
        "tensor w: rank 19 and rank 3 both stored the same shard ((1,) at (3,))"
    )
    assert refused([*rows[:19], rows[11]]) == (
        "tensor w: the shards of rank 19 ((1,) at (11,)) and ranks 8 to 15 ((8,) at (8,)) overlap"
    )
    assert refused([*rows[:19], [shard("w", (1,), (20,), (19,), dtype="F16")]]) == (
        "tensor w: it is F32 of shape (20,) on rank 16, but F16 of shape (20,) on rank 19"
    )
    assert refused([[shard("w", (2,))], *[[]] * 9, [shard("w", (2,), is_own=True)]]) == (
        "tensor w: rank 10 stored it as its own, but another rank as shared"
    )
    half = shard("w", (1,), (2,), (0,), is_own=True)
    assert refused([[], [half]]) == "tensor w: rank 1 has not stored one whole tensor of its own"


def test_a_tree_may_refer_to_what_another_group_stores():
    stored = [[], *[[]] * 18, [shard("w", (2,)), shard("mine", (1,), is_own=True)]]
    merged(stored, {0: {"model": ["w"]}, 9: {"model": ["w"]}, 19: {"rng": ["mine"]}}).require_complete()
    assert refused(stored, {9: {"rng": ["mine"]}, 3: {"model": ["w", "rng"]}}) == (
        "tensor rng: 'model' of rank 3 refers to it, but it is not stored"
    )
    assert refused(stored, {9: {"rng": ["mine"]}}) == (
        "tensor mine: 'rng' of rank 9 refers to it, but it is not stored"
    )
