import random

import numpy
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler

from holdfast import DataLoader
from holdfast.data import cursor_over


class Noisy(Dataset):
    """Samples that carry their index and random numbers from every generator in use."""

    def __init__(self, size=23):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index, random.random(), numpy.random.rand(), torch.rand(1).item()


def epoch(loader):
    return [tuple(map(tuple, (c.tolist() for c in batch))) for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_are_the_same_for_any_number_of_workers(workers):
    plain = DataLoader(Noisy(), batch_size=4, shuffle=True, seed=3)
    other = DataLoader(Noisy(), batch_size=4, shuffle=True, seed=3, num_workers=workers)
    first = epoch(plain)
    assert first == epoch(other)
    second = epoch(plain)
    assert second == epoch(other)
    assert first != second
    assert sorted(i for batch in second for i in batch[0]) == list(range(23))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 3, 6])
def test_a_resumed_epoch_goes_on_with_the_next_sample(workers, stop):
    whole = epoch(DataLoader(Noisy(), batch_size=4, shuffle=True, seed=3))
    before = DataLoader(Noisy(), batch_size=4, shuffle=True, seed=3, num_workers=workers)
    batches = iter(before)
    for _ in range(stop):
        next(batches)
    after = DataLoader(Noisy(), batch_size=4, shuffle=True, seed=3, num_workers=workers)
    after.load_state_dict(before.state_dict())
    assert epoch(after) == whole[stop:]
    assert after.position.epoch == 1


def test_a_position_holds_under_another_batch_size_and_other_workers():
    before = DataLoader(Noisy(), batch_size=4, shuffle=True, seed=3)
    batches = iter(before)
    seen = [next(batches)[0].tolist() for _ in range(3)]
    after = DataLoader(Noisy(), batch_size=5, shuffle=True, seed=3, num_workers=1)
    after.load_state_dict(before.state_dict())
    seen += [batch[0].tolist() for batch in after]
    assert sorted(i for batch in seen for i in batch) == list(range(23))


def test_the_training_process_keeps_its_random_state():
    def states():
        return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    for options in ({}, {"num_workers": 1}):
        before = states()
        epoch(DataLoader(Noisy(), batch_size=4, shuffle=True, seed=3, **options))
        assert states() == before


def test_workers_that_persist_follow_a_rewind():
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, seed=3, num_workers=2, persistent_workers=True)
    first = epoch(loader)
    batches = iter(loader)
    next(batches)
    loader.load_state_dict({"seed": 3, "epoch": 0, "samples": 8, "batches": 2})
    batches.close()
    assert epoch(loader) == first[2:]
    assert loader.position.epoch == 1


def test_a_set_that_reads_whole_batches_is_asked_for_them():
    class Batched(Noisy):
        def __getitems__(self, indices):
            return [self[i] for i in indices]

    loader = DataLoader(Batched(), batch_size=4, shuffle=True, seed=3)
    assert epoch(loader) == epoch(DataLoader(Batched(), batch_size=4, shuffle=True, seed=3, num_workers=1))


def test_samplers_of_ones_own_are_skipped_forward():
    order = list(range(22, -1, -1))
    for options in ({"sampler": order, "batch_size": 4}, {"batch_sampler": [order[:7], order[7:11], order[11:]]}):
        whole = [b[0].tolist() for b in DataLoader(Noisy(), **options)]
        before, after = DataLoader(Noisy(), **options), DataLoader(Noisy(), **options)
        next(iter(before))
        after.load_state_dict(before.state_dict())
        assert [b[0].tolist() for b in after] == whole[1:]


def test_the_length_is_that_of_a_whole_epoch():
    assert len(DataLoader(Noisy(), batch_size=4)) == 6
    assert len(DataLoader(Noisy(), batch_size=4, drop_last=True)) == 5
    assert len(epoch(DataLoader(Noisy(), batch_size=4, drop_last=True))) == 5
    assert len(DataLoader(Noisy(), batch_size=None)) == 23


def test_another_seed_is_refused_as_another_order():
    with pytest.raises(ValueError, match=r"seed=3.*counted with seed=4"):
        DataLoader(Noisy(), seed=3).load_state_dict({"seed": 4, "epoch": 0, "samples": 0, "batches": 0})


def test_a_generator_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="give seed="):
        DataLoader(Noisy(), generator=torch.Generator())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        (lambda: DataLoader(Noisy(), batch_size=4), None),
        (lambda: DataLoader(Stream(), batch_size=2), "read again from its start"),
        (lambda: torch.utils.data.DataLoader(Noisy(8), batch_size=2), "cannot go on from a position"),
        (lambda: [10, 20, 30], "cannot go on from a position"),
    ],
)
def test_every_loader_goes_on_and_says_what_it_cannot_promise(make, promise):
    cursor = cursor_over(make())
    assert (cursor.gap is None) if promise is None else (promise in cursor.gap)
    source = cursor.batches()
    next(source), next(source)
    resumed = cursor_over(make())
    resumed.load_state_dict(cursor.state_dict())
    assert len(list(resumed.batches())) == len(list(source))
    assert (cursor.epoch, resumed.epoch) == (1, 1)


def test_torchs_random_samplers_resume_exactly_although_they_know_no_epoch():
    def make():
        data = Noisy()
        return DataLoader(data, sampler=RandomSampler(data), batch_size=4, seed=3)

    whole = epoch(make())
    before, after = make(), make()
    batches = iter(before)
    next(batches), next(batches)
    torch.rand(7)  # whatever training draws meanwhile
    after.load_state_dict(before.state_dict())
    assert epoch(after) == whole[2:]
    assert before.gap is None
    own = RandomSampler(Noisy(), generator=torch.Generator())
    assert "generator of its own" in DataLoader(Noisy(), sampler=own).gap


def test_a_subset_is_seeded_by_sample_like_any_other_set():
    subset = torch.utils.data.Subset(Noisy(), range(5, 17))

    def samples(size):
        return [s for b in epoch(DataLoader(subset, batch_size=size)) for s in zip(*b, strict=True)]

    assert samples(2) == samples(4)


def test_a_loader_set_elsewhere_in_the_middle_of_an_epoch_goes_on_from_there():
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, seed=3)
    whole = [b[0].tolist() for b in DataLoader(Noisy(), batch_size=4, shuffle=True, seed=3)]
    seen = []
    for batch in loader:
        seen.append(batch[0].tolist())
        if len(seen) == 3:
            loader.load_state_dict({"seed": 3, "epoch": 0, "samples": 4, "batches": 1})
    assert seen == [*whole[:3], *whole[1:]]
    assert loader.position.epoch == 1


def test_it_answers_like_torchs_loader():
    data = Noisy()
    loader = DataLoader(data, batch_size=4, num_workers=0, drop_last=True)
    assert (loader.dataset, loader.batch_size, loader.num_workers, loader.drop_last) == (data, 4, 0, True)
    with pytest.raises(AttributeError):
        loader.no_such_thing  # noqa: B018


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": [1, 2], "shuffle": True},
        {"batch_sampler": [[1]], "batch_size": 4},
        {"batch_sampler": [[1]], "drop_last": True},
    ],
)
def test_arguments_that_exclude_each_other_are_refused(options):
    with pytest.raises(ValueError, match="drop"):
        DataLoader(Noisy(), **options)


def test_one_sample_at_a_time_with_a_numpy_sampler():
    loader = DataLoader(Noisy(), batch_size=None, sampler=numpy.arange(5))
    assert [sample[0] for sample in loader] == [0, 1, 2, 3, 4]
