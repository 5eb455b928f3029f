"""What each rank stores of a model: its shards, its share of what all have, and what is its own."""

import math
from collections import Counter

import pytest
import torch

from holdfast.state.sharding import assign_to_ranks, is_sharded, local

SHAPES = {"one.weight": (5, 6), "one.bias": (5,), "two.weight": (6, 5), "two.bias": (6,)}
NORM = {"norm.weight": (6,), "norm.bias": (6,)}


def names(shapes):
    kept = [f"optimizer.state.{moment}" for moment in ("exp_avg", "exp_avg_sq")]
    return {f"{of}.{name}": shape for name, shape in shapes.items() for of in ("model", *kept)}


@pytest.mark.parametrize("kind", ["ddp", "compiled ddp"])
def test_what_is_replicated_is_stored_once_and_shared_out(launcher, kind):
    found = launcher.run(3, "tests.support.sharding_workloads.stored", kind=kind)
    shared = Counter(name for rank in found for name, what in rank.items() if what != "own")
    expected = names(SHAPES | NORM)
    assert expected.keys() <= shared.keys()
    assert set(shared.values()) == {1}
    sizes = [sum(math.prod(what[0]) for what in rank.values() if what != "own") for rank in found]
    assert max(sizes) - min(sizes) <= 30  # the largest of them


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_buffers_and_random_states_are_each_ranks_own(launcher, kind):
    for rank in launcher.run(2, "tests.support.sharding_workloads.stored", kind=kind):
        own = {name for name, what in rank.items() if what == "own"}
        assert {"model.norm.running_mean", "model.norm.num_batches_tracked", "rng.torch"} <= own
        assert not any(name.startswith("optimizer") for name in own)


@pytest.mark.parametrize(("kind", "world_size"), [("fsdp", 2), ("fsdp", 4), ("fsdp", 7), ("hsdp", 4)])
def test_every_element_of_what_is_sharded_is_stored_once(launcher, kind, world_size):
    found = launcher.run(world_size, "tests.support.sharding_workloads.stored", kind=kind)
    for name, shape in names(SHAPES | NORM).items():
        shards = [rank[name] for rank in found if name in rank]
        rows = [row for taken, offsets in shards for row in range(offsets[0], offsets[0] + taken[0])]
        assert sorted(rows) == list(range(shape[0])), name
        assert all(taken[1:] == shape[1:] for taken, _ in shards), name
    steps = Counter(name for rank in found for name in rank if ".step." in name)
    assert set(steps.values()) == {1}


def test_tied_weights_have_one_name_where_a_rank_has_no_rows_of_them(launcher):
    found = launcher.run(7, "tests.support.sharding_workloads.stored", kind="fsdp")  # of 5 rows
    assert not any("tied" in name for rank in found for name in rank)


def test_replicas_of_shards_share_the_work(launcher):
    found = launcher.run(4, "tests.support.sharding_workloads.stored", kind="hsdp")
    stored = [{name for name, what in rank.items() if what != "own"} for rank in found]
    by_replica = [stored[0] | stored[1], stored[2] | stored[3]]
    assert all(any("exp_avg" in name for name in names) for names in by_replica)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_was_captured_once_is_found_again(launcher, kind):
    for first, *later in launcher.run(2, "tests.support.sharding_workloads.structures", kind=kind):
        assert first[:2] == (True, True)
        assert [(same, equal) for same, equal, _ in later] == [(True, True)] * 3
        assert [steps for *_, steps in later] in ([[2.0], [3.0], [4.0]], [[], [], []])


def test_addends_of_a_tensor_are_refused(launcher):
    for said in launcher.run(2, "tests.support.sharding_workloads.refusal"):
        assert "loop.sum: the ranks hold partial sums of it" in said
        assert "redistribute it" in said


def test_an_average_of_a_replicated_model_is_each_ranks_own(launcher):
    for own in launcher.run(2, "tests.support.sharding_workloads.averaged"):
        assert "average.module.one.weight" in own


def test_replicas_among_some_of_the_ranks_are_each_ranks_own(launcher):
    assert launcher.run(4, "tests.support.sharding_workloads.subgroup") == [
        (0.0, True),
        (0.0, True),
        (1.0, True),
        (1.0, True),
    ]


def test_a_sharded_tensor_of_the_scripts_own_comes_back(launcher):
    assert launcher.run(3, "tests.support.sharding_workloads.plain_sharded") == [[float(i) for i in range(10)]] * 3


def test_a_plain_tensor_is_all_here():
    tensor = torch.ones(3)
    assert local(tensor) is tensor
    assert not is_sharded(tensor)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_shares_are_alike_and_follow_from_names_and_sizes_alone(world_size):
    sizes = [(f"t{i}", (i * 7919) % 1000 + 1) for i in range(200)]
    owners = assign_to_ranks(sizes, world_size)
    assert owners == assign_to_ranks(sizes[::-1], world_size)
    loads = Counter()
    for name, size in sizes:
        loads[owners[name]] += size
    assert len(loads) == world_size
    assert max(loads.values()) - min(loads.values()) <= max(size for _, size in sizes)


@pytest.mark.parametrize("rows", [100, 768, 2000])
def test_moments_do_not_stay_in_memory_that_is_lent(launcher, rows):
    """Of 16 numbers a row: small on a rank and as a whole, small on a rank alone, large on each."""
    expected = dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), True)
    assert (
        launcher.run(2, "tests.support.sharding_workloads.moments_after_their_source_is_overwritten", rows=rows)
        == [expected] * 2
    )
