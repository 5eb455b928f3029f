"""A loader of torch, made resumable."""

import itertools

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from holdfast import DataLoader
from tests.support.recording_datasets import IndexRecordingDataset


def torch_loader(**options):
    return torch.utils.data.DataLoader(IndexRecordingDataset(23), **options)


def batches_of(loader):
    return [torch.as_tensor(batch).tolist() for batch in loader]


def reversed_samples(samples):
    return samples[::-1]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"batch_size": 4, "drop_last": True},
        {"batch_size": None},
        {"batch_size": 3, "num_workers": 2, "persistent_workers": True},
        {"batch_sampler": [[3, 1], [2], [22, 0, 7]]},
        {"batch_size": 5, "sampler": SequentialSampler(range(12))},
        {"batch_size": 2, "collate_fn": reversed_samples},
    ],
    ids=lambda options: ", ".join(options),
)
def test_it_gives_the_samples_in_the_order_of_the_torch_loader(options):
    plain = torch_loader(**options)
    resumable = DataLoader.from_torch(plain)
    assert batches_of(resumable) == batches_of(plain)
    assert len(resumable) == len(plain)
    assert resumable.num_workers == plain.num_workers


def test_a_shuffled_loader_gives_every_sample_once_in_the_order_of_its_seed():
    seeded = torch.Generator().manual_seed(11)
    loaders = (
        DataLoader.from_torch(torch_loader(batch_size=4, shuffle=True, generator=seeded)),
        DataLoader.from_torch(torch_loader(batch_size=4, shuffle=True), seed=11),
        DataLoader(IndexRecordingDataset(23), batch_size=4, shuffle=True, seed=11),
    )
    first, *others = map(batches_of, loaders)
    assert sorted(itertools.chain(*first)) == list(range(23))
    assert others == [first, first]


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler(numpy.ones(23), 10),
        RandomSampler(range(23), replacement=True),
        RandomSampler(range(23), num_samples=7),
    ],
)
def test_any_other_sampler_is_kept(sampler):
    loader = DataLoader.from_torch(torch_loader(batch_size=4, sampler=sampler))
    assert loader.sampler is sampler
    assert len(list(itertools.chain(*batches_of(loader)))) == len(sampler)


def test_a_batch_sampler_of_its_own_class_is_kept():
    class Batches(BatchSampler):
        pass

    batches = Batches(SequentialSampler(range(23)), 4, drop_last=False)
    assert DataLoader.from_torch(torch_loader(batch_sampler=batches)).batch_sampler is batches


def test_an_iterable_dataset_keeps_its_batches():
    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(7))

    loader = DataLoader.from_torch(torch.utils.data.DataLoader(Numbers(), batch_size=3, drop_last=True))
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


def test_what_cannot_continue_from_a_position_is_refused():
    class Endless(torch.utils.data.DataLoader):
        def __iter__(self):
            while True:
                yield from super().__iter__()

    with pytest.raises(TypeError, match="Endless has its own __iter__"):
        DataLoader.from_torch(Endless(IndexRecordingDataset(23)))
    with pytest.raises(TypeError, match="list is not a"):
        DataLoader.from_torch([1])
