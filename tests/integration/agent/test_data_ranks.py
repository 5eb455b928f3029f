"""The ranks of a job, each with a loader of its own, here all in one process."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from holdfast import DataLoader
from tests.support.recording_datasets import IndexRecordingDataset, RandomNumberDataset, epoch, indices


def loaders(world_size, dataset=None, **options):
    dataset = dataset if dataset is not None else IndexRecordingDataset(23)
    return [
        DataLoader(dataset, **{"shuffle": True, "seed": 3} | options, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]


def iterate(ranks, iterations=None):
    """What the ranks see together, iteration by iteration, in the global order; and the position after it."""
    seen, sources = [], [iter(loader) for loader in ranks]
    for _ in range(iterations) if iterations is not None else itertools.count():
        batches = [batch.tolist() for source in sources if (batch := next(source, None)) is not None]
        if not batches:
            break
        dealt = itertools.zip_longest(*batches)
        seen.append([index for turn in dealt for index in turn if index is not None])
    return seen, ranks[0].state_dict()


def order(size=23, **options):
    return [
        i
        for batch in indices(DataLoader(IndexRecordingDataset(size), **{"shuffle": True, "seed": 3} | options))
        for i in batch
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_global_order_is_that_of_one_rank(world_size):
    seen, _ = iterate(loaders(world_size, batch_size=2, tail="short"))
    assert [i for batch in seen for i in batch] == order()
    assert [len(batch) for batch in seen[:-1]] == [2 * world_size] * (len(seen) - 1)


def test_ranks_that_become_fewer_and_more_go_on_in_the_same_order_and_miss_no_sample():
    whole, seen, state = order(103), [], loaders(4)[0].state_dict()
    for world_size, iterations in ((4, 3), (2, 5), (3, 4), (4, None)):
        ranks = loaders(world_size, IndexRecordingDataset(103), batch_size=3, tail="short")
        for loader in ranks:
            loader.load_state_dict(state)
        found, state = iterate(ranks, iterations)
        seen += [i for batch in found for i in batch]
    assert seen == whole
    assert state["epoch"] == 1


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([1, 2, 7, 23, 40, 103]), st.integers(1, 5), st.data(), st.sampled_from(["pad", "short"]))
def test_wherever_the_number_of_ranks_changes_every_sample_comes_once(size, batch_size, data, tail):
    whole, seen = order(size), []
    state = DataLoader(IndexRecordingDataset(size), shuffle=True, seed=3).state_dict()
    while state["epoch"] == 0:
        ranks = loaders(
            data.draw(st.integers(1, 5)), IndexRecordingDataset(size), batch_size=batch_size, tail=tail
        )
        for loader in ranks:
            loader.load_state_dict(state)
        taken, padded = state["taken"], state["padded"]
        found, state = iterate(ranks, data.draw(st.integers(1, 4)))
        given_out = [i for batch in found for i in batch]
        repeated = state["padded"] - padded
        seen += given_out[: len(given_out) - repeated]
        assert given_out[len(given_out) - repeated :] == [whole[k % size] for k in range(repeated)]
        assert len({loader.position for loader in ranks}) == 1 or tail == "short"
        assert state["epoch"] == 1 or state["taken"] == taken + len(given_out) - repeated
    assert seen == whole


def test_a_worker_more_or_less_on_one_rank_changes_nothing():
    found = [
        [epoch(loader) for loader in loaders(2, RandomNumberDataset(), batch_size=4, num_workers=workers)]
        for workers in (0, 1)
    ]
    assert found[0] == found[1]


def test_padding_gives_all_ranks_equally_many_and_is_counted_and_told():
    ranks = loaders(4, batch_size=3)
    found = [indices(loader) for loader in ranks]
    assert [[len(batch) for batch in batches] for batches in found] == [[3, 3]] * 4
    assert sum(len(batch) for batches in found for batch in batches) == 24
    assert {loader.padded for loader in ranks} == {1}
    assert "23 samples do not divide evenly among 4 ranks: 1 occur twice in an epoch" in ranks[0].limitation
    for loader in ranks:
        indices(loader)
    assert ranks[0].state_dict()["padded"] == 2
    assert loaders(4, IndexRecordingDataset(24))[0].limitation is None
    assert loaders(1)[0].limitation is None


def test_without_padding_ranks_at_the_tail_get_fewer_and_perhaps_none():
    ranks = loaders(4, IndexRecordingDataset(18), batch_size=2, tail="short")
    found = [indices(loader) for loader in ranks]
    assert [[len(batch) for batch in batches] for batches in found] == [[2, 2, 1], [2, 2, 1], [2, 2], [2, 2]]
    assert [len(loader) for loader in ranks] == [3, 3, 2, 2]
    assert (ranks[0].limitation, ranks[0].padded) == (None, 0)


def test_a_dropped_tail_is_dropped_on_all_ranks():
    ranks = loaders(3, batch_size=2, drop_last=True)
    found = [indices(loader) for loader in ranks]
    assert [[len(batch) for batch in batches] for batches in found] == [[2, 2, 2]] * 3
    assert (ranks[0].limitation, len(ranks[0])) == (None, 3)


@pytest.mark.parametrize("size", [1, 3])
def test_fewer_samples_than_ranks(size):
    assert [len(indices(loader)) for loader in loaders(4, IndexRecordingDataset(size), batch_size=2)] == [
        1,
        1,
        1,
        1,
    ]
    short = loaders(4, IndexRecordingDataset(size), batch_size=2, tail="short")
    assert [len(indices(loader)) for loader in short] == [1] * size + [0] * (4 - size)
    assert {loader.epoch for loader in short} == {1}
    assert [len(indices(loader)) for loader in loaders(4, IndexRecordingDataset(size), drop_last=True)] == [
        0,
        0,
        0,
        0,
    ]


def test_no_samples_at_all():
    assert [len(indices(loader)) for loader in loaders(2, IndexRecordingDataset(0))] == [0, 0]


def test_single_samples_are_shared_too():
    found = [
        list(loader)
        for loader in loaders(2, IndexRecordingDataset(5), batch_size=None, shuffle=False, tail="short")
    ]
    assert found == [[0, 2, 4], [1, 3]]


@pytest.mark.parametrize("size", [23, 24, 3])
def test_a_sampler_that_shares_by_itself_is_not_shared_again_and_gives_what_it_gives_torch(size):
    data, found = IndexRecordingDataset(size), []
    for rank in range(4):
        sampler = DistributedSampler(data, num_replicas=4, rank=rank, seed=5)
        ours = DataLoader(data, batch_size=2, sampler=sampler, rank=rank, world_size=4)
        plain = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
        for number in range(2):
            sampler.set_epoch(number)
            expected = indices(plain)
            found.append(indices(ours))
            assert found[-1] == expected
    assert found[0] != found[1] or size == 3
    assert "DistributedSampler splits samples among 4 ranks" in ours.limitation


def test_a_sampler_that_shares_by_itself_goes_on_where_all_ranks_stood():
    data = IndexRecordingDataset(24)

    def make(rank, world_size):
        sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
        return DataLoader(data, batch_size=2, sampler=sampler, rank=rank, world_size=world_size)

    ranks = [make(rank, 4) for rank in range(4)]
    seen, state = iterate(ranks, 2)
    assert state["taken"] == 16
    fewer = [make(rank, 2) for rank in range(2)]
    for loader in fewer:
        loader.load_state_dict(state)
    rest, _ = iterate(fewer)
    assert sorted(i for batch in seen + rest for i in batch) == list(range(24))


def test_our_padding_is_torchs():
    data = IndexRecordingDataset(22)
    for rank in range(4):
        sampler = DistributedSampler(data, num_replicas=4, rank=rank, shuffle=False)
        (ours,) = [loaders(4, data, batch_size=2, shuffle=False)[rank]]
        assert indices(ours) == indices(torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler))


def test_any_other_sampler_gives_a_global_order_that_the_ranks_share():
    def make(world_size):
        return loaders(
            world_size,
            IndexRecordingDataset(23),
            shuffle=False,
            sampler=RandomSampler(range(23)),
            batch_size=2,
            tail="short",
        )

    whole = [i for batch in iterate(make(1))[0] for i in batch]
    first, state = iterate(make(3), 2)
    ranks = make(2)
    for loader in ranks:
        loader.load_state_dict(state)
    rest, _ = iterate(ranks)
    assert [i for batch in first + rest for i in batch] == whole
    assert sorted(whole) == list(range(23))


def test_ranks_take_the_batches_of_a_batch_sampler_in_turn():
    def make(world_size, tail="pad"):
        batches = BatchSampler(SequentialSampler(range(23)), 5, drop_last=False)
        return loaders(world_size, shuffle=False, batch_sampler=batches, tail=tail)

    two = [indices(loader) for loader in make(2, "short")]
    assert two == [[[0, 1, 2, 3, 4], [10, 11, 12, 13, 14], [20, 21, 22]], [[5, 6, 7, 8, 9], [15, 16, 17, 18, 19]]]
    padded = make(2)
    assert [len(indices(loader)) for loader in padded] == [3, 3]
    assert "5 batches do not divide evenly among 2 ranks: 1 occur twice" in padded[0].limitation
    first, one = make(2), make(1)[0]
    for loader in first:
        next(iter(loader))
    one.load_state_dict(first[0].state_dict())
    assert indices(one) == [[10, 11, 12, 13, 14], [15, 16, 17, 18, 19], [20, 21, 22]]


def test_batches_of_a_sampler_that_shares_by_itself_are_not_shared_again():
    data = IndexRecordingDataset(8)
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 2, drop_last=False), rank=1, world_size=2)
    assert indices(loader) == [[1, 3], [5, 7]]


def test_the_place_among_the_ranks_comes_from_the_environment_when_it_is_all_there(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (DataLoader(IndexRecordingDataset(8)).rank, DataLoader(IndexRecordingDataset(8)).world_size) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    loader = DataLoader(IndexRecordingDataset(8))
    assert (loader.rank, loader.world_size, indices(loader)) == (3, 4, [[3], [7]])
    assert indices(DataLoader(IndexRecordingDataset(2), rank=0, world_size=1)) == [[0], [1]]


def test_the_place_among_the_ranks_comes_from_torch_where_it_is_set_up(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    store = torch.distributed.FileStore(str(tmp_path / "ranks"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert (DataLoader(IndexRecordingDataset(8)).rank, DataLoader(IndexRecordingDataset(8)).world_size) == (
            0,
            1,
        )
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "options", [{"rank": 1}, {"world_size": 2}, {"rank": 2, "world_size": 2}, {"rank": -1, "world_size": 2}]
)
def test_half_a_place_or_one_that_does_not_exist_is_refused(options):
    with pytest.raises(ValueError, match="give both, 0 <= rank < world_size"):
        DataLoader(IndexRecordingDataset(8), **options)


def test_another_tail_is_refused_by_name():
    with pytest.raises(ValueError, match=r"tail='long'\): give 'pad' or 'short'"):
        DataLoader(IndexRecordingDataset(8), tail="long")
