"""Samplers are read as their order is needed."""

import itertools
import random

import numpy
import pytest
import torch
from torch.utils.data import RandomSampler

import holdfast.data.sampled
from holdfast import DataLoader
from holdfast.data.order import RankShare
from holdfast.data.sampled import FIRST_BLOCK, LARGEST_BLOCK, SampledOrder

SHARES = [
    RankShare(rank=rank, world_size=world_size, batch_size=batch_size, tail=tail)
    for world_size in (1, 2, 5)
    for rank in range(world_size)
    for batch_size in (1, 3)
    for tail in ("pad", "short", "drop")
]


class Drawing:
    """Draws from all three global generators, and counts how many items were asked for."""

    def __init__(self, size):
        self.size, self.read = size, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        for number in range(self.size):
            self.read += 1
            yield number, random.random(), numpy.random.rand(), torch.rand(1).item()


def order(source, epoch=0):
    return SampledOrder(source, 1, epoch)


@pytest.mark.parametrize("size", [1, 7, FIRST_BLOCK, FIRST_BLOCK + 1, 3 * FIRST_BLOCK, 100])
def test_a_rank_gets_the_same_items_as_of_a_list(size):
    for share, start in itertools.product(SHARES, {0, min(5, size), size}):
        expected = [place % size for place in share.places(start, size)]
        if share.tail == "drop" and share.world_size == 1:
            expected = list(range(start, size))  # torch's BatchSampler drops the last batch
        sampled = order(range(size))
        sampled.begin(start)
        assert list(sampled.items(start, share)) == expected, (share, start)
        assert sampled.size == size


def test_the_numbers_of_a_sampler_do_not_depend_on_what_training_draws_meanwhile():
    whole = list(order(Drawing(3000)).items(0, RankShare()))
    seen = []
    for item in order(Drawing(3000)).items(0, RankShare()):
        torch.rand(3), random.random(), numpy.random.rand()
        seen.append(item)
    assert seen == whole
    resumed = order(Drawing(3000))
    resumed.begin(2500)
    assert list(resumed.items(2500, RankShare())) == whole[2500:]
    assert next(order(Drawing(3000), epoch=1).items(0, RankShare())) != whole[0]


def test_reading_leaves_the_generators_of_training_as_they_are():
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    expected = torch.rand(1).item(), random.random(), numpy.random.rand()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    sampled = order(Drawing(100))
    sampled.begin(50)
    list(sampled.items(50, RankShare()))
    assert (torch.rand(1).item(), random.random(), numpy.random.rand()) == expected


def test_no_more_is_read_than_a_block_ahead():
    source = Drawing(10**6)
    items = order(source).items(0, RankShare())
    next(items)
    assert source.read == FIRST_BLOCK
    for _ in range(5000):
        next(items)
    assert 5001 <= source.read <= 5001 + 2 * LARGEST_BLOCK


def test_an_epoch_of_1e10_samples_begins_at_once():
    def make():
        sampler = RandomSampler(range(1000), replacement=True, num_samples=10**10)
        return DataLoader(range(1000), batch_size=8, sampler=sampler)

    whole, before, after = iter(make()), make(), make()
    expected = [next(whole).tolist() for _ in range(300)]
    source = iter(before)
    for _ in range(200):
        next(source)
    after.load_state_dict(before.state_dict())
    assert [next(source).tolist() for _ in range(100)] == expected[200:]
    rest = iter(after)
    assert [next(rest).tolist() for _ in range(100)] == expected[200:]


@pytest.mark.parametrize(("limit", "says"), [(0.0, True), (1e9, False)])
def test_a_resume_that_takes_long_to_get_through_a_sampler_is_reported(limit, says, monkeypatch, caplog):
    monkeypatch.setattr(holdfast.data.sampled, "SLOW_SECONDS", limit)
    loader = DataLoader(range(1000), batch_size=8, sampler=RandomSampler(range(1000)))
    next(iter(loader))
    assert not caplog.text  # a start is no resume
    resumed = DataLoader(range(1000), batch_size=8, sampler=RandomSampler(range(1000)))
    resumed.load_state_dict(loader.state_dict())
    next(iter(resumed))
    assert ("RandomSampler gives its order one by one" in caplog.text) == says


def test_a_sampler_with_fewer_items_than_its_length_ends_its_epoch():
    class Overestimated(Drawing):
        def __iter__(self):
            yield from range(6)

    loader = DataLoader(range(10), batch_size=4, sampler=Overestimated(10))
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]
    assert loader.epoch == 1
