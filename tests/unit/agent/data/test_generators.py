"""Random generators in datasets, transforms, collate functions and samplers."""

import functools
import itertools
import random

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.data.cursor import cursor_over
from holdfast.data.generators import GeneratorStates

KINDS = {
    "torch": (lambda: torch.Generator().manual_seed(7), lambda g: torch.rand(1, generator=g).item()),
    "numpy": (lambda: numpy.random.default_rng(7), lambda g: g.normal()),
    "old numpy": (lambda: numpy.random.RandomState(7), lambda g: g.normal()),
    "python": (lambda: random.Random(7), lambda g: g.gauss(0, 1)),
}
GLOBAL = random.Random(5)


class Numbers(Dataset):
    def __init__(self, noise=lambda: 0.0):
        self.noise = noise

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return index, self.noise()


class Stream(IterableDataset):
    def __init__(self, noise):
        self.noise = noise

    def __iter__(self):
        for number in range(16):
            yield number, self.noise()


class Slotted:
    __slots__ = ("_source",)

    def __init__(self, source):
        self._source = source


def collated(noise, samples, scale=1.0):
    return [*default_collate(samples), scale * noise()]


def helper():
    return GLOBAL.random()


def collate_with_a_global(samples):
    return [*default_collate(samples), helper()]


def collate_with_a_global_in_a_comprehension(samples):
    return [*default_collate(samples), [GLOBAL.random() for _ in range(2)]]


def in_closure(make, draw):
    own = make()
    return Numbers(lambda: draw(own)), {}


def in_containers(make, draw):
    own = {"transforms": [(Slotted(make()),)]}
    return Numbers(functools.partial(lambda held: draw(held["transforms"][0][0]._source), own)), {}


def in_collate_function(make, draw):
    own = make()
    return Numbers(), {"collate_fn": functools.partial(collated, lambda: draw(own), scale=2.0)}


def in_sampler(make, draw):
    class Drawing(torch.utils.data.Sampler):
        own = None

        def __init__(self):
            self.source = make()

        def __len__(self):
            return 16

        def __iter__(self):
            yield from sorted(range(16), key=lambda _: draw(self.source))

    return Numbers(), {"sampler": Drawing(), "shuffle": False}


def in_stream(make, draw):
    own = make()
    return Stream(lambda: draw(own)), {"shuffle": False}


def values(batches):
    return [[column.tolist() if hasattr(column, "tolist") else column for column in batch] for batch in batches]


def in_cached_function(make, draw):
    @functools.lru_cache
    def source(number):
        return make()

    source(0)
    return Numbers(lambda: draw(source(0))), {}


def in_class(make, draw):
    class Transform:
        source = make()

        def __call__(self):
            return draw(self.source)

    return Numbers(Transform()), {}


PLACES = [in_closure, in_containers, in_collate_function, in_sampler, in_stream]
PLACES += [in_cached_function, in_class]


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_hand", [True, False])
def test_generators_of_a_loader_continue_after_a_resume(kind, place, stop, by_hand):
    def make():
        dataset, options = place(*KINDS[kind])
        return holdfast.DataLoader(dataset, **{"batch_size": 4, "shuffle": True, "seed": 1} | options)

    def epochs(loader, count):
        for _ in range(loader.epoch, count):
            yield from loader if by_hand else loader.batches()

    whole = values(epochs(make(), 3))
    before, after = make(), make()
    source = epochs(before, 3)
    seen = [next(source) for _ in range(stop)]
    after.load_state_dict(before.state_dict())
    assert values(seen) + values(epochs(after, 3)) == whole
    assert after.limitation is None or "generator" not in after.limitation


@pytest.mark.parametrize("stop", [1, 4, 6])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loader", [torch.utils.data.DataLoader, StatefulDataLoader])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_generators_of_other_loaders_continue_after_a_resume(loader, kind, place, stop):
    def make():
        torch.manual_seed(3)
        dataset, options = place(*KINDS[kind])
        return cursor_over(loader(dataset, **{"batch_size": 4, "shuffle": True} | options))

    def epochs(cursor):
        while cursor.epoch < 3:
            yield from cursor.batches()

    whole = values(epochs(make()))
    before, after = make(), make()
    source = epochs(before)
    seen = [next(source) for _ in range(stop)]
    state, now = before.state_dict(), torch.get_rng_state()
    after.load_state_dict(state)
    torch.set_rng_state(now)
    assert values(seen) + values(epochs(after)) == whole


class Counting(torch.utils.data.Sampler):
    """Derives its order from the number of its iterations, which it counts at their start or at their end."""

    def __init__(self, size=16, at_start=True):
        self.size, self.at_start, self.epoch = size, at_start, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        order = random.Random(self.epoch).sample(range(self.size), self.size)
        self.epoch += self.at_start
        yield from order
        self.epoch += not self.at_start


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize("loader", [holdfast.DataLoader, torch.utils.data.DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("as_batch_sampler", [True, False])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_sampler_that_counts_its_iterations_resumes_exactly(loader, at_start, stop, as_batch_sampler):
    def make():
        sampler = Counting(at_start=at_start)
        if as_batch_sampler:
            options = {"batch_sampler": BatchSampler(sampler, 4, drop_last=False)}
        else:
            options = {"batch_size": 4, "sampler": sampler}
        return cursor_over(loader(Numbers(), **options))

    def epochs(cursor, count):
        while cursor.epoch < count:
            yield from cursor.batches()

    whole = values(epochs(make(), 4))
    cursor, seen = make(), []
    for count in (stop, stop, None):  # three starts
        source = epochs(cursor, 4)
        seen += [next(source) for _ in range(count)] if count else source
        state, cursor = cursor.state_dict(), make()
        cursor.load_state_dict(state)
    assert values(seen) == whole


def test_a_setting_of_a_sampler_is_that_of_the_script():
    before, after = (holdfast.DataLoader(Numbers(), batch_size=4, sampler=Counting(size)) for size in (16, 12))
    seen = len(list(before))
    after.load_state_dict(before.state_dict())
    assert (seen, len(list(after)), after.sampler.epoch) == (4, 3, 2)


def test_a_generator_argument_of_a_loader_of_torch_is_part_of_its_position():
    def make():
        own = torch.Generator().manual_seed(4)
        return cursor_over(torch.utils.data.DataLoader(Numbers(), batch_size=4, shuffle=True, generator=own))

    whole = values([*(cursor := make()).batches(), *cursor.batches()])
    before, after = make(), make()
    source = before.batches()
    seen = values([next(source), next(source)])
    after.load_state_dict(before.state_dict())
    assert seen + values([*after.batches(), *after.batches()]) == whole


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_torchs_random_samplers_with_a_generator_resume_exactly(batches, stop):
    def make():
        sampler = RandomSampler(range(16), generator=torch.Generator().manual_seed(1))
        options = {"batch_sampler": BatchSampler(sampler, 4, False)} if batches else {"sampler": sampler}
        return holdfast.DataLoader(Numbers(), **options if batches else options | {"batch_size": 4})

    def epochs(loader):
        while loader.epoch < 3:
            yield from loader

    whole = values(epochs(make()))
    assert whole[:4] != whole[4:8]
    before, after = make(), make()
    source = epochs(before)
    seen = [next(source) for _ in range(stop)]
    after.load_state_dict(before.state_dict())
    assert values(seen) + values(epochs(after)) == whole


@pytest.mark.parametrize("collate", [collate_with_a_global, collate_with_a_global_in_a_comprehension])
def test_a_generator_that_a_function_finds_by_its_name_is_known(collate):
    loader = holdfast.DataLoader(Numbers(), batch_size=4, collate_fn=collate)
    source = iter(loader)
    next(source)
    state, following = loader.state_dict(), values([next(source)])
    loader.load_state_dict(state)
    assert values([next(iter(loader))]) == following


def test_the_generators_of_the_process_are_no_state_of_a_loader():
    held = [torch.default_generator, random._inst, numpy.random.mtrand._rand, random.SystemRandom()]
    assert GeneratorStates(dataset=Numbers(held)).paths == []


@pytest.mark.parametrize("workers", [0, 1])
def test_generators_in_workers_are_named(workers):
    own = random.Random(1)
    dataset = Numbers(lambda: own.random())
    loader = holdfast.DataLoader(dataset, batch_size=4, num_workers=workers)
    text = "dataset.noise.own: every worker has its own copy of this generator, and no checkpoint has its state"
    assert (text in (loader.limitation or "")) == bool(workers)


def test_a_batch_drawn_in_advance_draws_its_noise_again():
    def make():
        loader = holdfast.DataLoader(in_collate_function(*KINDS["torch"])[0], batch_size=4, **options())
        loader.attach_session()
        loader.lookahead = 1
        return loader

    def options():
        return in_collate_function(*KINDS["torch"])[1]

    whole = values(make())
    before, after = make(), make()
    source = iter(before)
    next(source), next(source)  # the second one in advance
    before.iteration_ended()
    after.load_state_dict(before.state_dict())
    assert values(after) == whole[1:]


def test_a_restore_to_the_start_resets_the_generators():
    loader = holdfast.DataLoader(in_closure(*KINDS["numpy"])[0], batch_size=4)
    whole = values(loader)
    loader.load_state_dict(None)
    assert values(loader) == whole


def test_a_checkpoint_without_generators_is_loaded():
    loader = holdfast.DataLoader(in_closure(*KINDS["numpy"])[0], batch_size=4)
    next(iter(loader))
    state = loader.state_dict()
    del state["generators"], state["gradients"]
    loader.load_state_dict(state)
    assert len(list(loader)) == 3


def test_a_generator_that_the_loader_does_not_have_yet_is_named(caplog):
    loader = holdfast.DataLoader(in_closure(*KINDS["numpy"])[0], batch_size=4)
    next(iter(loader))
    holdfast.DataLoader(Numbers(), batch_size=4).load_state_dict(loader.state_dict())
    assert "the checkpoint holds the state of dataset.noise.own, which this loader does not have" in caplog.text


class CreatingLate(Numbers):
    """Creates its generator when it reads its first sample, once or for each sample."""

    def __init__(self, once=True):
        self.source, self.once = None, once

    def __getitem__(self, index):
        if self.source is None or not self.once:
            self.source = random.Random(7)
        return index, self.source.random()


def cached_late():
    source = functools.lru_cache(lambda: random.Random(7))
    return Numbers(lambda: source().random())


@pytest.mark.parametrize("make", [CreatingLate, cached_late])
def test_a_generator_that_is_created_with_the_first_sample_is_named(make, caplog):
    loader = holdfast.DataLoader(make(), batch_size=4)
    source = iter(loader)
    for _ in range(3):
        next(source)
        state = loader.state_dict()
    assert state["generators"]["continued"]
    restored = holdfast.DataLoader(make(), batch_size=4)
    restored.load_state_dict(state)
    assert caplog.text.count("which this loader does not have") == 1
    before = values([next(source)])
    loader.load_state_dict(state)  # in place, the generator is there
    assert values([next(iter(loader))]) == before
    assert caplog.text.count("which this loader does not have") == 1


def many_cached():
    source = functools.lru_cache(None)(random.Random)
    for number in range(100):
        source(number)
    return Numbers(lambda: source(0).seed(0))


@pytest.mark.parametrize("make", [lambda: CreatingLate(once=False), many_cached])
def test_a_generator_for_each_sample_is_no_state(make, caplog):
    loader = holdfast.DataLoader(make(), batch_size=4, collate_fn=len)
    for _ in loader:
        state = loader.state_dict()
    assert "generators" not in state
    holdfast.DataLoader(make(), batch_size=4, collate_fn=len).load_state_dict(state)
    assert not caplog.records


@pytest.mark.parametrize("stop", [1, 3, 5, 6])
@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("loader", [holdfast.DataLoader, torch.utils.data.DataLoader])
def test_a_generator_of_a_sampler_from_which_training_draws_is_not_set_back(loader, by_hand, stop):
    def train(count, state=None):
        source = torch.Generator().manual_seed(1)
        cursor = cursor_over(loader(Numbers(), batch_size=4, sampler=RandomSampler(range(16), generator=source)))
        if state is not None:
            cursor.load_state_dict(state)
        seen = []
        while len(seen) < count:
            for index, _ in cursor if by_hand and loader is holdfast.DataLoader else cursor.batches():
                seen.append((index.tolist(), torch.rand(1, generator=source).item()))
                state = cursor.state_dict()
                if len(seen) == count:
                    break
        return seen, state

    whole, _ = train(8)
    seen, state = train(stop)
    assert seen + train(8 - stop, state)[0] == whole


@pytest.mark.parametrize("leave", [True, False])
def test_a_loop_that_goes_on_in_an_epoch_sets_no_generator_of_training_back(leave):
    source = torch.Generator().manual_seed(1)
    loader = holdfast.DataLoader(Numbers(), batch_size=4, sampler=RandomSampler(range(16), generator=source))
    seen = []
    while len(seen) < 4:
        for index, _ in loader.batches():
            seen.append((index.tolist(), torch.rand(1, generator=source).item()))
            if leave:
                break
    assert len({noise for _, noise in seen}) == 4
    assert sorted(itertools.chain(*(index for index, _ in seen))) == list(range(16))
