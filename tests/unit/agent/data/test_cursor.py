import functools
import itertools
import random

import numpy
import pytest
import torch
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.data.cursor import cursor_over
from holdfast.state.rng import restore_rng, rng_state
from tests.support.recording_datasets import IndexRecordingDataset, RandomNumberDataset, epoch, random_states


def plain(**options):
    return torch.utils.data.DataLoader(RandomNumberDataset(), **{"batch_size": 4, "shuffle": True} | options)


def numbers(batches):
    return [batch[0].tolist() for batch in batches]


class Remembering:
    """A loader with a position of its own. At an epoch's end it keeps either that end or the next beginning."""

    def __init__(self, keeps_end):
        self.keeps_end, self.given, self.loaded = keeps_end, 0, None

    def __iter__(self):
        self.given = self.loaded or 0
        self.loaded = None
        while self.given < 3:
            self.given += 1
            yield self.given
        if not self.keeps_end:
            self.given = 0

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state_dict):
        self.loaded = state_dict["given"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    "make",
    [
        lambda: holdfast.DataLoader(RandomNumberDataset(10), batch_size=3),
        lambda: holdfast.DataLoader(RandomNumberDataset(10), batch_size=3, drop_last=True),
        lambda: holdfast.DataLoader(RandomNumberDataset(10), batch_sampler=[[0, 1], [2], [3, 4, 5]]),
        lambda: holdfast.DataLoader(RandomNumberDataset(10), sampler=range(7), batch_size=2),
    ],
)
def test_the_batches_that_are_left_are_those_that_come(make):
    cursor, there = make(), make()
    source = cursor.batches()
    next(source), next(source)
    middle = cursor.batches_left(3)
    there.load_state_dict(cursor.state_dict())
    assert there.batches_left(3) == middle
    assert middle == sum(1 for _ in source) + sum(1 for _ in cursor.batches()) + sum(1 for _ in cursor.batches())
    assert (cursor.epoch, cursor.batches_left(3)) == (3, 0)


def test_nobody_knows_what_is_left_of_a_loader_without_a_length():
    with pytest.raises(TypeError):
        holdfast.DataLoader(RandomNumberDataset(8), batch_sampler=iter([[1], [2]])).batches_left(2)


class Infinite(torch.utils.data.DataLoader):
    """Keeps one iterator for all epochs, so that its workers live on."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.iterator = iter(lambda: next(super(Infinite, self).__iter__()), None)

    def __iter__(self):
        return itertools.islice(self.iterator, len(self))


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        (lambda: holdfast.DataLoader(RandomNumberDataset(8), batch_size=2), None),
        (lambda: Infinite(RandomNumberDataset(8), batch_size=2), "from the second on, the order may differ"),
        (lambda: plain(), "read again from the start up to the position. holdfast.DataLoader"),
        (lambda: plain(generator=torch.Generator()), "read again from the start up to the position. holdfast."),
        (lambda: plain(num_workers=1, persistent_workers=True), "random augmentation in its persistent workers"),
        (lambda: [10, 20, 30, 40], "in an order that may differ"),
        (lambda: Remembering(True), "Remembering restores its own position"),
    ],
)
def test_every_loader_goes_on_and_says_what_it_cannot_promise(make, promise):
    cursor = cursor_over(make())
    assert cursor.limitation is None if promise is None else promise in cursor.limitation
    source = cursor.batches()
    next(source), next(source)
    resumed = cursor_over(make())
    resumed.load_state_dict(cursor.state_dict())
    assert len(list(resumed.batches())) == len(list(source))
    assert (cursor.epoch, resumed.epoch) == (1, 1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 3, 6])
def test_a_plain_loader_goes_on_in_the_same_order_with_the_same_noise(stop, workers):
    """Its order comes from the random state in which its epoch began; the training process's is as it was."""
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    cursor = cursor_over(plain(num_workers=workers))
    whole, after = [], []
    for number, batch in enumerate(cursor.batches(), start=1):
        torch.rand(3)  # training draws, too
        whole.append(epoch([batch]))
        if number == stop:
            state, process = cursor.state_dict(), rng_state()
    after.append(torch.rand(1))
    second = numbers(cursor.batches())
    resumed = cursor_over(plain(num_workers=workers))
    resumed.load_state_dict(state)
    torch.manual_seed(99), random.seed(99), numpy.random.seed(99)
    restore_rng(process)
    rest = []
    for batch in resumed.batches():
        torch.rand(3)
        rest.append(epoch([batch]))
    assert rest == whole[stop:]
    assert torch.rand(1) == after[0]
    assert numbers(resumed.batches()) == second


def test_an_epoch_is_told_to_whatever_takes_one():
    data = IndexRecordingDataset(8)
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    cursor = cursor_over(torch.utils.data.DataLoader(data, sampler=sampler))
    first = [batch.item() for batch in cursor.batches()]
    second = [batch.item() for batch in cursor.batches()]
    assert first != second
    assert sampler.epoch == 1


def test_a_session_sets_the_epoch_of_a_sampler_unless_the_script_does():
    def orders(first):
        sampler = DistributedSampler(range(8), num_replicas=1, rank=0)
        cursor, found = cursor_over(holdfast.DataLoader(range(8), sampler=sampler)), []
        for number in range(3):
            if first is not None:
                sampler.set_epoch(first + number)
            found.append([batch.item() for batch in cursor.batches()])
        return found, sampler.epoch

    from_0, last = orders(None)
    assert (from_0, last) == orders(0)
    assert last == 2
    assert orders(1)[0][:2] == from_0[1:]


@pytest.mark.parametrize("keeps_end", [True, False])
@pytest.mark.parametrize("stop", [0, 1, 2, 3, "end"])
def test_a_loader_with_a_position_of_its_own_repeats_and_misses_nothing(keeps_end, stop):
    first = cursor_over(Remembering(keeps_end))
    source = first.batches()
    seen = [next(source) for _ in range(3 if stop == "end" else stop)]
    if stop == "end":
        assert list(source) == []
    second = cursor_over(Remembering(keeps_end))
    second.load_state_dict(first.state_dict())
    while second.epoch < 2:
        seen += second.batches()
    assert seen == [1, 2, 3, 1, 2, 3]


def test_a_loader_that_was_not_drawn_from_is_not_asked_for_its_state():
    class Shy(Remembering):
        def state_dict(self):
            raise AssertionError

    state = cursor_over(Shy(True)).state_dict()
    assert state["loader"] is None


@pytest.mark.parametrize(
    "make", [lambda: [1, 2], lambda: Remembering(False), lambda: holdfast.DataLoader(IndexRecordingDataset(3))]
)
def test_nothing_to_go_on_from_is_the_very_start(make):
    loader = make()
    cursor = cursor_over(loader)
    whole = list(cursor_over(make()).batches())
    source = cursor.batches()
    next(source)
    source.close()
    cursor.load_state_dict(None)
    assert list(cursor.batches()) == whole


def over_torchdatas_loader(workers, seed):
    torch.manual_seed(seed)
    return cursor_over(StatefulDataLoader(RandomNumberDataset(), batch_size=4, shuffle=True, num_workers=workers))


@functools.cache
def three_epochs_of_torchdatas_loader(workers):
    cursor = over_torchdatas_loader(workers, 1)
    return [batch for _ in range(3) for batch in numbers(cursor.batches())]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 5, 6, "end"])
def test_torchdatas_loader_goes_on_in_its_own_order_wherever_it_stopped(stop, workers):
    make = functools.partial(over_torchdatas_loader, workers)
    before = make(1)
    source = before.batches()
    seen = numbers([next(source) for _ in range(6 if stop == "end" else stop)])
    if stop == "end":
        assert next(source, None) is None
    state = before.state_dict()
    source.close()
    after = make(1 if stop == 0 else 99)  # with nothing given out there is no state, and no harm in that
    after.load_state_dict(state)
    while after.epoch < 3:
        seen += numbers(after.batches())
    assert seen == three_epochs_of_torchdatas_loader(workers)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_going_on_within_an_epoch_draws_nothing_that_training_would_have_drawn():
    def make():
        return cursor_over(StatefulDataLoader(IndexRecordingDataset(8), batch_size=2, shuffle=True))

    first, second = make(), make()
    source = first.batches()
    next(source)
    second.load_state_dict(first.state_dict())
    before = random_states()
    next(second.batches())
    assert random_states() == before


class PositionInIterator:
    """An iterator with a position, as those of Grain."""

    def __init__(self, end=4):
        self.given, self.end = 0, end

    def __iter__(self):
        return self

    def __next__(self):
        if self.given == self.end:
            raise StopIteration
        self.given += 1
        return self.given

    def get_state(self):
        return {"next": self.given}

    def set_state(self, state):
        self.given = state["next"]


@pytest.mark.parametrize("stop", [0, 1, 4, "end"])
def test_an_iterator_with_a_position_repeats_and_misses_nothing(stop):
    first = cursor_over(PositionInIterator())
    assert first.limitation is None
    source = first.batches()
    seen = [next(source) for _ in range(4 if stop == "end" else stop)]
    if stop == "end":
        assert list(source) == []
    second = cursor_over(PositionInIterator())
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    while second.epoch < 2:
        seen += second.batches()
    assert seen == [1, 2, 3, 4]


def test_an_iterator_goes_back_to_where_the_script_began_to_use_it():
    iterator = PositionInIterator()
    next(iterator)
    cursor = cursor_over(iterator)
    assert list(cursor.batches()) == [2, 3, 4]
    cursor.load_state_dict(None)
    assert list(cursor.batches()) == [2, 3, 4]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, None),
        ({"num_workers": 2}, "not the random state of its 2 workers"),
        ({"num_workers": 2, "in_order": False}, "in_order=False may repeat or skip batches"),
    ],
)
def test_a_loader_of_torchdata_says_what_it_cannot_promise(options, says):
    limitation = cursor_over(StatefulDataLoader(IndexRecordingDataset(8), **options)).limitation
    assert limitation is None if says is None else says in limitation


def test_a_position_that_is_not_used_yet_is_kept():
    class Forgetful(Remembering):
        def state_dict(self):
            return {"given": self.given}  # what it loaded counts only once it is iterated

    cursor = cursor_over(Forgetful(True))
    state = {"epoch": 3, "given": 2, "loader": {"given": 2}, "generators": {"start": {}, "now": {}}, "last": []}
    cursor.load_state_dict(state)
    assert cursor.state_dict() == state


def test_a_loader_that_has_no_position_after_all_is_an_error():
    class Without(Remembering):
        def state_dict(self):
            return None

    cursor = cursor_over(Without(True))
    next(cursor.batches())
    with pytest.raises(TypeError, match=r"Without\.state_dict\(\) returned None"):
        cursor.state_dict()


class LazyLoader(torch.utils.data.DataLoader):
    """A loader that begins with its first batch, as Mosaic's StreamingDataLoader."""

    given = skipped = 0

    def __iter__(self):
        self.given = self.skipped
        for number, batch in enumerate(super().__iter__()):
            if number >= self.skipped:
                self.given += 1
                yield batch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state_dict):
        self.skipped = state_dict["given"]


def test_a_loader_that_begins_with_its_first_batch_draws_nothing_that_training_would_have_drawn():
    first, second = (cursor_over(LazyLoader(IndexRecordingDataset(8), batch_size=2)) for _ in range(2))
    next(first.batches())
    second.load_state_dict(first.state_dict())
    before = random_states()
    assert next(second.batches()).tolist() == [2, 3]
    assert random_states() == before
