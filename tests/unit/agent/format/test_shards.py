import collections
import itertools
import math
import subprocess
import sys

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import DamagedCheckpoint, HoldfastError, IncompleteParts
from holdfast.format import manifest as fmt
from holdfast.format import merged_ranks
from holdfast.format.merged_ranks import merge_ranks, overlapping
from holdfast.format.shards import Region, names_in, require_complete, shard_error, state_for
from tests.support.edited_manifests import stored_and_read
from tests.support.sharded_checkpoints import (
    RankTensors,
    ReplicatedTensor,
    ShardedTensor,
    by_grid,
    by_rows,
    in_blocks,
    payloads,
)

TENSORS = {
    "w": by_rows(torch.randn(7, 3), 4),
    "grid": by_grid(torch.randn(5, 5), 2, 2),
    "step": ReplicatedTensor(torch.tensor(3), by=2),
    "rng": RankTensors([torch.full((2,), rank) for rank in range(4)]),
}
STATES = [{"model": [{"$tensor": "w"}, {"$tensor": "grid"}], "rng": {"$tensor": "rng"}, "seen": rank} for rank in
          range(4)]  # fmt: skip


def parts(tensors=TENSORS, states=None, world_size=4):
    return [each.part for each in payloads(world_size, tensors, states)]


def changed(told, number, name, **changes):
    """The parts, but for what one rank says of one tensor; without changes it says nothing."""
    part = told[number]
    tensors = [t for t in part.tensors if t.name != name]
    if changes:
        (tensor,) = (t for t in part.tensors if t.name == name)
        tensors.append(msgspec.structs.replace(tensor, **changes))
    return [*told[:number], msgspec.structs.replace(part, tensors=tensors), *told[number + 1 :]]


def refused(told, world_size=4):
    with pytest.raises(IncompleteParts) as raised:
        merge_ranks(told, world_size)
    return str(raised.value)


def test_the_parts_of_all_ranks_make_a_checkpoint_in_whatever_order_they_come():
    told = parts(states=STATES)
    whole = merge_ranks([told[2], told[0], told[3], told[1]], 4)
    assert [file.name for file in whole.files] == [f"rank-{rank}.safetensors" for rank in range(4)]
    assert whole.tensors == [tensor for part in told for tensor in part.tensors]
    assert whole.state == STATES[0]
    assert whole.rank_states == {str(rank): {"seen": rank} for rank in (1, 2, 3)}


def test_one_rank_alone_is_a_whole():
    (part,) = parts(
        {"w": ReplicatedTensor(torch.ones(2)), "none": ReplicatedTensor(torch.empty(0))}, [{"w": 1}], world_size=1
    )
    whole = merge_ranks([part], 1)
    assert (whole.tensors, whole.state, whole.rank_states) == (part.tensors, {"w": 1}, {})


def test_what_is_refused_is_told_to_users_as_any_error_of_ours():
    assert issubclass(IncompleteParts, HoldfastError)


@pytest.mark.parametrize(
    ("ranks", "world_size", "reason"),
    [
        ((0, 1, 3), 4, "the part of rank 2 of 4 is missing"),
        ((0, 1, 2), 4, "the part of rank 3 of 4 is missing"),
        ((), 1, "the part of rank 0 of 1 is missing"),
        ((0, 1, 2, 2, 3), 4, "the part of rank 2 of 4 is present 2 times"),
        ((0, 1, 2, 3), 3, "there is a part of rank 3, but there are 3 ranks"),
    ],
)
def test_every_rank_must_have_told_once(ranks, world_size, reason):
    told = parts()
    assert refused([told[rank] for rank in ranks], world_size) == reason


def test_two_ranks_that_wrote_the_same_file_are_refused():
    told = parts({})
    told[2] = msgspec.structs.replace(told[2], file=told[1].file)
    assert refused(told) == "ranks 1 and 2 both wrote rank-1.safetensors"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"file": "rank-2.safetensors"}, "tensor w: rank 1 reported one in rank-2.safetensors"),
        ({"rank": 3}, "tensor w: rank 1 reported one in rank-1.safetensors, of rank 3"),
    ],
)
def test_a_rank_speaks_of_its_own_file_only(changes, reason):
    assert refused(changed(parts(), 1, "w", **changes)) == reason


def test_what_is_shared_is_stored_by_one_rank_only():
    twice = ShardedTensor(torch.tensor(3), [None, Region((), ()), Region((), ()), None])
    assert (
        refused(parts({"step": twice})) == "tensor step: rank 1 and rank 2 both stored the same shard (() at ())"
    )
    whole = Region((0, 0), (2, 3))
    twice = ShardedTensor(torch.ones(2, 3), [whole, None, None, whole])
    assert "tensor w: rank 0 and rank 3 both stored the same shard ((2, 3) at (0, 0))" in refused(
        parts({"w": twice})
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "F16"}, "it is F32 of shape (7, 3) on rank 0, but F16 of shape (7, 3) on rank 2"),
        ({"view": "complex64"}, "it is F32 of shape (7, 3) on rank 0, but complex64 of shape (7, 3) on rank 2"),
        ({"global_shape": (8, 3)}, "it is F32 of shape (7, 3) on rank 0, but F32 of shape (8, 3) on rank 2"),
        ({"offsets": (6, 0)}, "the shard of rank 2 ((2, 3) at (6, 0)) is outside of (7, 3)"),
        ({"offsets": (-1, 0)}, "the shard of rank 2 ((2, 3) at (-1, 0)) is outside of (7, 3)"),
        ({"shape": (-1, 3)}, "the shard of rank 2 ((-1, 3) at (4, 0)) is outside of (7, 3)"),
        ({"offsets": (4,)}, "the shard of rank 2 ((2, 3) at (4,)) is outside of (7, 3)"),
        ({"offsets": (3, 0)}, "the shards of rank 1 ((2, 3) at (2, 0)) and rank 2 ((2, 3) at (3, 0)) overlap"),
        (
            {"shape": (1, 3)},
            "3 of its 21 elements are missing: only rank 0, rank 1, rank 2, rank 3 stored shards",
        ),
        ({}, "6 of its 21 elements are missing: only rank 0, rank 1, rank 3 stored shards"),
    ],
)
def test_shards_must_be_the_whole_tensor_and_nothing_twice(changes, reason):
    assert refused(changed(parts(), 2, "w", **changes)) == f"tensor w: {reason}"


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("name", ["w", "grid"])
def test_no_shard_may_be_missing(name, rank):
    assert f"tensor {name}: " in refused(changed(parts(), rank, name))


def test_ranks_that_have_no_rows_may_say_so_or_nothing():
    few = by_rows(torch.randn(2, 3), 4)
    assert [region.shape for region in few.regions] == [(1, 3), (1, 3), (0, 3), (0, 3)]
    told = parts({"few": few, "none": by_rows(torch.empty(0, 3), 4)})
    assert len(merge_ranks(told, 4).tensors) == 8
    assert len(merge_ranks(changed(told, 3, "few"), 4).tensors) == 7


def test_what_is_one_ranks_own_may_not_be_shared_as_well():
    told = changed(parts(), 1, "rng", rank=None)
    assert refused(told) == "tensor rng: rank 0 stored it as its own, but another rank as shared"


def test_what_is_a_ranks_own_is_whole():
    told = changed(parts(), 2, "rng", global_shape=(4,))
    assert refused(told) == "tensor rng: 2 of its 4 elements are missing: only rank 2 stored shards"


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (
            {1: {"model": {"a": [1, {"$tensor": "gone"}]}}},
            "tensor gone: 'model' of rank 1 refers to it, but it is not stored",
        ),
        (
            {3: {"loop": {"$pairs": [["k", {"$tensor": "late"}]]}}},
            "tensor late: 'loop' of rank 3 refers to it, but it is not stored",
        ),
    ],
)
def test_a_tree_may_refer_only_to_what_its_rank_can_see(states, reason):
    tensors = TENSORS | {"late": RankTensors([None, torch.ones(1), None, None])}
    told = parts(tensors, [STATES[rank] | states.get(rank, {}) for rank in range(4)])
    assert refused(told).startswith(reason)


def test_a_rank_that_stored_its_own_may_refer_to_it():
    tensors = {"late": RankTensors([None, torch.ones(1)])}
    told = parts(tensors, [{}, {"loop": {"$tensor": "late"}}], world_size=2)
    assert merge_ranks(told, 2).rank_states == {"1": {"loop": {"$tensor": "late"}}}


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ("1", 1), (None, False), ([], {})])
def test_trees_that_only_look_the_same_are_kept_apart(one, other):
    whole = merge_ranks(parts({}, [{"loop": [one]}, {"loop": [other]}, {"loop": [one]}], world_size=3), 3)
    (found,) = whole.rank_states["1"]["loop"]
    assert (type(found), str(found)) == (type(other), str(other))
    assert list(whole.rank_states) == ["1"]


def test_an_entry_that_a_rank_does_not_have_is_not_that_of_the_first():
    states = [{"loop": 1, "gradients": 2}, {"loop": 1}, {"loop": 1, "gradients": 2, "late": 3}]
    whole = merge_ranks(parts({}, states, world_size=3), 3)
    made = fmt.Manifest(
        job="j", iteration=1, lineage=1, attempt=1, kind="final", created_at=0.0, parent=None, world_size=3,
        files=whole.files, tensors=whole.tensors, state=whole.state, rank_states=whole.rank_states,
    )  # fmt: skip
    read = stored_and_read(made)
    assert [state_for(read, rank) for rank in range(3)] == states


def test_a_manifest_is_checked_in_the_same_way():
    told = parts()
    manifest = fmt.Manifest(
        job="j", iteration=1, lineage=1, attempt=1, kind="final", created_at=0.0, parent=None, world_size=4,
        files=[part.file for part in told], tensors=[t for part in told for t in part.tensors], state={},
    )  # fmt: skip
    require_complete(manifest)
    there = [t for t in manifest.tensors if (t.name, t.file) != ("w", "rank-2.safetensors")]
    lacking = msgspec.structs.replace(manifest, tensors=there)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: tensor w: 6 of its 21 elements are missing"):
        require_complete(lacking)


def test_the_names_in_a_tree_are_found_wherever_they_are():
    tree = {"a": [{"$tensor": "x", "device": "cuda"}, 3], "b": {"$pairs": [[{"$tensor": "y"}, {"$tensor": "x"}]]}}
    assert names_in(tree) == {"x", "y"}
    assert names_in({"$bytes": "$tensor"}) == names_in(None) == set()


def test_putting_together_needs_no_torch():
    probe = "import holdfast.format.shards, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0


def shard(rank, global_shape, region, **changes):
    plain = {
        "name": "w", "dtype": "U8", "shape": region.shape, "global_shape": global_shape, "offsets": region.offsets,
        "file": f"rank-{rank}.safetensors", "start": 0, "end": math.prod(region.shape), "digest": "",
    }  # fmt: skip
    return fmt.Tensor(**plain | changes)


PINWHEEL = [Region((0, 0), (1, 2)), Region((0, 2), (2, 1)), Region((2, 1), (1, 2)), Region((1, 0), (2, 1)),
            Region((1, 1), (1, 1))]  # fmt: skip


def test_shards_that_no_straight_cut_separates_are_compared_as_well():
    stored = [shard(rank, (3, 3), region) for rank, region in enumerate(PINWHEEL)]
    assert shard_error(stored) is None
    assert "1 of its 9 elements are missing" in shard_error(stored[:-1])
    wider = shard(4, (3, 3), Region((1, 1), (1, 2)))
    assert overlapping([*stored[:-1], wider]) in itertools.permutations([stored[1], wider], 2)


def test_what_only_lies_between_two_does_not_hide_that_they_overlap():
    across, elsewhere, inside = (
        shard(0, (), Region((0, 0), (9, 1))),
        shard(1, (), Region((1, 5), (1, 1))),
        shard(2, (), Region((3, 0), (1, 1))),
    )
    assert overlapping([across, elsewhere, inside]) == (across, inside)


def test_what_is_sharded_by_rows_or_in_a_grid_is_not_compared_in_pairs(monkeypatch):
    monkeypatch.setattr(merged_ranks, "_overlapping_pair", None)
    assert len(merge_ranks(parts(), 4).files) == 4


@st.composite
def boxes(draw):
    """Blocks of a small tensor: a partition of it as a rule, with up to two of them changed."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    blocks = in_blocks(draw, shape, 5)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(blocks) - 1))
        moved = tuple(tuple(draw(st.integers(-1, 4)) for _ in shape) for _ in range(2))
        blocks[at : at + 1] = draw(st.sampled_from([[], [blocks[at]] * 2, [Region(*moved)]])) or [blocks[0]]
    return shape, blocks


@given(boxes())
@settings(max_examples=300, deadline=None)
def test_shards_are_whole_exactly_when_every_element_is_stored_once(made):
    shape, blocks = made
    stored = [shard(rank, shape, region) for rank, region in enumerate(blocks)]
    times = collections.Counter()
    for offsets, sizes in blocks:
        edges = zip(offsets, sizes, strict=True)
        times.update(itertools.product(*(range(start, start + length) for start, length in edges)))
    everywhere = list(itertools.product(*map(range, shape)))
    inside = all(
        start >= 0 and length >= 0 and start + length <= size
        for region in blocks
        for start, length, size in zip(*region, shape, strict=True)
    )
    assert (shard_error(stored) is None) == (inside and times == collections.Counter(everywhere))


@given(boxes())
@settings(max_examples=150, deadline=None)
def test_overlaps_are_found_whatever_the_shards_are(made):
    _, blocks = made
    filled = [
        shard(rank, (), region) for rank, region in enumerate(blocks) if all(length > 0 for length in region.shape)
    ]
    cells = [
        set(itertools.product(*(range(a, a + n) for a, n in zip(each.offsets, each.shape, strict=True))))
        for each in filled
    ]
    pairs = itertools.combinations(range(len(filled)), 2)
    expected = any(cells[one] & cells[other] for one, other in pairs)
    found = overlapping(filled)
    assert (found is not None) == expected
    if found:
        one, other = (next(i for i, each in enumerate(filled) if each is shard) for shard in found)
        assert cells[one] & cells[other]


def test_a_tensor_that_another_rank_has_as_its_own_is_no_use_to_the_first():
    told = parts({"w": RankTensors([torch.ones(2), torch.ones(2)])}, [{"m": {"$tensor": "w"}}] * 2, world_size=2)
    assert refused(changed(told, 0, "w"), 2) == "tensor w: 'm' of rank 0 refers to it, but it is not stored"
