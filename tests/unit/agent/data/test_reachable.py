"""Datasets whose state is known to be incomplete, and loaders that share one iterator."""

import itertools
import sys
import types

import numpy
import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.data.cursor import cursor_over
from holdfast.data.reachable import MOST_OBJECTS, incomplete_state, is_within, reachable, shared_iterator

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Examples:
    """A part of a streaming dataset of Hugging Face, which counts what it has read."""

    def __init__(self, size):
        self.size, self.read = size, 0

    def __iter__(self):
        while self.read < self.size:
            self.read += 1
            yield {"x": torch.tensor([float(self.read)])}


class BufferShuffledExamplesIterable:
    """As in `datasets`: a state restores the examples read, and the buffer is filled again."""

    __module__ = "datasets.iterable_dataset"

    def __init__(self, ex_iterable, buffer_size, seed):
        self.ex_iterable, self.buffer_size, self.seed = ex_iterable, buffer_size, seed

    def __iter__(self):
        rng, buffer = numpy.random.default_rng(self.seed), []
        for example in self.ex_iterable:
            if len(buffer) == self.buffer_size:
                index = rng.integers(self.buffer_size)
                yield buffer[index]
                buffer[index] = example
            else:
                buffer.append(example)
        rng.shuffle(buffer)
        yield from buffer


class StreamingDataset(IterableDataset):
    def __init__(self, shuffled=True, size=30):
        self._examples = Examples(size)
        self._ex_iterable = BufferShuffledExamplesIterable(self._examples, 5, 3) if shuffled else self._examples
        self.loaded = 0

    def __iter__(self):
        self._examples.read, self.loaded = self.loaded, 0
        yield from self._ex_iterable

    def state_dict(self):
        return {"read": self._examples.read}

    def load_state_dict(self, state):
        self.loaded = state["read"]


class Tokenized(IterableDataset):
    """A dataset of the script around another one, whose state it passes on."""

    def __init__(self, source):
        self.source = source

    def __iter__(self):
        for example in self.source:
            yield {"tokens": example["x"] * 2}

    def state_dict(self):
        return self.source.state_dict()

    def load_state_dict(self, state):
        self.source.load_state_dict(state)


LOADERS = [holdfast.DataLoader, StatefulDataLoader]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [StreamingDataset, lambda: Tokenized(StreamingDataset())])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_dataset_that_loses_its_shuffle_buffer_is_read_again(loader, make, workers):
    def cursor():
        return cursor_over(loader(make(), batch_size=4, num_workers=workers))

    def values(batches):
        return [next(iter(batch.values())).flatten().tolist() for batch in batches]

    first = cursor()
    whole = values([*first.batches(), *first.batches()])
    assert "lacks its shuffle buffer" in first.limitation
    for stop in (1, 3):
        before, after = cursor(), cursor()
        source = before.batches()
        seen = values(itertools.islice(source, stop))
        after.load_state_dict(before.state_dict())
        assert seen + values([*after.batches(), *after.batches()]) == whole


@pytest.mark.parametrize("loader", LOADERS)
def test_a_dataset_with_a_complete_state_continues_from_it(loader):
    data = StreamingDataset(shuffled=False)
    assert incomplete_state(data) is None
    cursor, resumed = (cursor_over(loader(each, batch_size=4)) for each in (data, StreamingDataset(False)))
    source = cursor.batches()
    next(source), next(source)
    resumed.load_state_dict(cursor.state_dict())
    assert next(resumed.batches())["x"].flatten().tolist() == [9, 10, 11, 12]


def test_a_loader_that_a_script_gives_and_iterates_itself_is_named(tmp_path, caplog):
    loader = StatefulDataLoader(StreamingDataset(), batch_size=4)
    with holdfast.Session("job", store=tmp_path, model=torch.nn.Linear(1, 1), loader=loader) as session:
        session.resume()
    assert "the state_dict of loader lacks its shuffle buffer: each resume loses the samples in it" in caplog.text


def test_a_stateful_loader_that_gives_a_batch_twice_is_named(caplog):
    class Behind:
        """Its state is that before the last batch."""

        def __init__(self):
            self.given = 0

        def __iter__(self):
            for number in range(self.given, 5):
                self.given = number
                yield torch.arange(64.0) + number

        def state_dict(self):
            return {"given": self.given}

        def load_state_dict(self, state):
            self.given = state["given"]

    before, after = cursor_over(Behind()), cursor_over(Behind())
    source = before.batches()
    next(source), next(source)
    after.load_state_dict(before.state_dict())
    assert next(after.batches())[0] == 1
    assert "Behind gave the same batch before and after the resume" in caplog.text


def test_an_evaluation_on_a_stateful_loader_leaves_its_position_as_it_is():
    loader = StatefulDataLoader(list(range(20)), batch_size=2)
    cursor, resumed = cursor_over(loader), cursor_over(StatefulDataLoader(list(range(20)), batch_size=2))
    source = cursor.batches()
    next(source), next(source)
    next(iter(loader))
    resumed.load_state_dict(cursor.state_dict())
    assert next(resumed.batches()).tolist() == next(source).tolist() == [4, 5]


def test_what_begins_anew_shares_no_iterator():
    class Counted(list):
        ids = itertools.count()  # of the class, not of one loader

    plain = torch.utils.data.DataLoader(range(4), num_workers=0)
    next(iter(plain))
    for loader in ([1], (1,), range(3), plain, Counted()):
        assert shared_iterator(loader) is None
    with open(__file__) as file:
        by_index = torch.utils.data.DataLoader(types.SimpleNamespace(file=file, __len__=lambda: 3))
        assert shared_iterator(by_index) is None
    assert "keeps an iterator (loader.it)" in shared_iterator(types.SimpleNamespace(it=iter([1])))


def test_a_loader_within_an_iterator_of_the_interpreter_is_found():
    loader, other = (StatefulDataLoader(list(range(4))) for _ in range(2))

    def drawing():
        yield from loader

    makes = [
        lambda: zip(loader, [1], strict=False),
        lambda: enumerate(loader),
        lambda: map(str, itertools.cycle(loader)),
        drawing,
        lambda: [loader],
    ]
    for make in makes:
        iterable = make()
        assert is_within(loader, iterable)
        assert not is_within(other, iterable)


def test_the_search_is_bounded():
    deep = current = []
    for _ in range(100):
        current.append([])
        current = current[0]
    assert sum(1 for _ in reachable("", deep)) < 20
    wide = [[[object() for _ in range(200)] for _ in range(200)] for _ in range(3)]
    assert sum(1 for _ in reachable("", wide)) <= MOST_OBJECTS + 201
    assert sum(1 for _ in reachable("", [0] * sys.getrecursionlimit())) == 1
