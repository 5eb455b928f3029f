import functools
import random

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from holdfast import DataLoader
from holdfast.data.indexed import DataPosition
from holdfast.state.rng import restore_rng, rng_state
from tests.support.recording_datasets import random_states


class NoisyStream(IterableDataset):
    """Numbers with noise, shared among workers; the noise of one sample depends on all before it."""

    def __init__(self, size=23):
        self.size, self.read = size, []

    def __iter__(self):
        worker = get_worker_info()
        for number in range(worker.id if worker else 0, self.size, worker.num_workers if worker else 1):
            self.read.append(number)
            yield number, random.random() + torch.rand(1).item()

    def __len__(self):
        return self.size


class ResumableStream(NoisyStream):
    """Goes on from where it was, as a dataset of files with an offset does, and begins again after its end."""

    place = 0

    def __iter__(self):
        while self.place < self.size:
            self.place += 1
            self.read.append(self.place - 1)
            yield self.place - 1, random.random()
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state_dict):
        self.place = state_dict["place"]


class Epochs(ResumableStream):
    """As the datasets library does: a state is loaded into the epoch that it is of; iter begins at the start."""

    epoch, loaded = 0, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.place = self.loaded["place"] if self.loaded and self.loaded["epoch"] == self.epoch else 0
        while self.place < self.size:
            self.place += 1
            yield self.place - 1 + 100 * self.epoch, random.random()

    def state_dict(self):
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state_dict):
        self.loaded = dict(state_dict)


def batches(loader):
    return [tuple(map(tuple, (c.tolist() for c in batch))) for batch in loader]


def stopped(make, stop):
    loader = make()
    source = iter(loader)
    for _ in range(stop):
        next(source)
    return loader.state_dict()


def loader_of(kind, workers):  # the others do not share themselves among workers
    return DataLoader(kind(), batch_size=4, seed=3, num_workers=workers if kind is NoisyStream else workers // 2)


@functools.cache
def two_epochs_of(kind, workers):
    uninterrupted = loader_of(kind, workers)
    return [batches(uninterrupted), batches(uninterrupted)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 4, 6])
@pytest.mark.parametrize("kind", [NoisyStream, ResumableStream, Epochs])
def test_a_resumed_stream_goes_on_with_the_next_batch_under_the_same_noise(kind, stop, workers):
    whole = two_epochs_of(kind, workers)
    resumed = loader_of(kind, workers)
    resumed.load_state_dict(stopped(functools.partial(loader_of, kind, workers), stop))
    assert [batches(resumed), batches(resumed)] == [whole[0][stop:], whole[1]]
    assert resumed.epoch == 2
    assert whole[0] != whole[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_noise_of_a_later_epoch_does_not_depend_on_how_many_this_process_has_seen(workers):
    def make():
        return DataLoader(NoisyStream(), batch_size=4, seed=3, num_workers=workers)

    uninterrupted, resumed = make(), make()
    batches(uninterrupted)
    resumed.seek(DataPosition(epoch=1, taken=2))
    assert batches(resumed) == batches(uninterrupted)[2:]


def test_a_stream_with_a_state_of_its_own_is_not_read_again():
    data = ResumableStream()
    loader = DataLoader(data, batch_size=4)
    loader.load_state_dict(stopped(lambda: DataLoader(ResumableStream(), batch_size=4), 3))
    batches(loader)
    assert data.read == list(range(12, 23))
    assert loader.limitation is None


@pytest.mark.parametrize("kind", [NoisyStream, ResumableStream, Epochs])
def test_a_stream_can_be_taken_back_in_the_middle_of_an_epoch(kind):
    def make():
        return DataLoader(kind(), batch_size=4, seed=3)

    whole = batches(make())
    for stop in (0, 2):
        loader, state, seen = make(), stopped(make, stop), []
        for number, batch in enumerate(loader):
            seen.append(tuple(map(tuple, (c.tolist() for c in batch))))
            if number == 3:
                loader.load_state_dict(state)
        assert seen == whole[:4] + whole[stop:]
        assert loader.epoch == 1


def test_a_state_that_was_loaded_and_not_used_is_still_there():
    state = stopped(lambda: DataLoader(ResumableStream(), batch_size=4), 3)
    loader = DataLoader(ResumableStream(), batch_size=4)
    loader.load_state_dict(state)
    assert loader.state_dict() == state


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_a_stream_draws_a_base_seed_from_the_training_process_and_no_more(workers):
    loader = DataLoader(NoisyStream(), batch_size=4, num_workers=workers)
    before = rng_state()
    batches(loader)
    loader.seek(DataPosition(taken=3))
    batches(loader)
    after = random_states()
    restore_rng(before)
    iter(torch.utils.data.DataLoader(NoisyStream()))
    assert random_states() == after


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (NoisyStream, {}, ["NoisyStream is read again from its start"]),
        (NoisyStream, {"num_workers": 1}, ["NoisyStream is read again from its start"]),
        (
            ResumableStream,
            {"num_workers": 1},
            ["read again", "its state_dict is not used with workers: num_workers=0 would"],
        ),
        (
            NoisyStream,
            {"num_workers": 1, "persistent_workers": True},
            ["read again", "persistent workers may differ"],
        ),
        (ResumableStream, {"rank": 0, "world_size": 2}, ["split itself among the 2 ranks"]),
    ],
)
def test_what_a_stream_cannot_promise_is_said(kind, options, words):
    limitation = DataLoader(kind(), batch_size=4, **options).limitation
    assert all(word in limitation for word in words)
    assert limitation.count(";") == len(words) - 1


def test_another_number_of_workers_is_said_to_change_the_order():
    loader = DataLoader(NoisyStream(), batch_size=4)
    loader.load_state_dict(stopped(lambda: DataLoader(NoisyStream(), batch_size=4, num_workers=2), 1))
    assert (
        "taken with batches of 4 from 2 workers, and now there are batches of 4 from 1 workers"
        in loader.limitation
    )


def test_the_length_is_the_streams():
    assert len(DataLoader(NoisyStream(), batch_size=4)) == 6


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": [1]}, {"batch_sampler": [[1]]}])
def test_an_order_cannot_be_given_to_a_stream(options):
    with pytest.raises(ValueError, match="IterableDataset"):
        DataLoader(NoisyStream(), **options)
