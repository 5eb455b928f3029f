"""Samplers whose weights, lists and numbers training changes: their order is the same after a resume."""

import numpy
import pytest
import torch
from torch.utils.data import Dataset, Sampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.data.cursor import cursor_over
from holdfast.data.sampler_values import SamplerValues

SIZE, BATCH, EPOCHS = 16, 4, 4


class Numbers(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index


class Curriculum(Sampler):
    """Gives samples up to a difficulty, which the script raises."""

    def __init__(self):
        self.difficulty, self.stage = 0.2, 1

    def __len__(self):
        return SIZE

    def __iter__(self):
        most = max(1, int(SIZE * min(1.0, self.difficulty * self.stage)))
        return iter(torch.randint(most, (SIZE,)).tolist())


class Mining(Sampler):
    """Repeats the samples that the script adds."""

    def __init__(self):
        self.hard, self.weights, self.seen = [], numpy.ones(SIZE), {}

    def __len__(self):
        return SIZE

    def __iter__(self):
        hard = list(self.hard)
        order = numpy.argsort(-self.weights, kind="stable").tolist()
        yield from (hard + [each for each in order if each not in self.seen] + order)[:SIZE]


class Lazy(Mining):
    def __iter__(self):
        for number in range(SIZE):
            yield self.hard[number % len(self.hard)] if self.hard else number


def weigh(sampler, batch):
    sampler.weights[batch] += 3.0


def harden(sampler, batch):
    sampler.difficulty += 0.05
    sampler.stage += int(batch[0]) % 3 == 0


def mine(sampler, batch):
    sampler.hard.append(int(batch[0]))
    del sampler.hard[:-3]
    sampler.weights[batch.numpy()] += 1
    sampler.seen[int(batch[1])] = True


def weighted(generator=None):
    return WeightedRandomSampler(torch.ones(SIZE, dtype=torch.double), SIZE, generator=generator)


def weighted_with_generator():
    return weighted(torch.Generator().manual_seed(2))


KINDS = {
    "weighted": (weighted, weigh),
    "weighted with a generator": (weighted_with_generator, weigh),
    "curriculum": (Curriculum, harden),
    "mining": (Mining, mine),
}
CASES = [
    (loader, kind)
    for loader in (holdfast.DataLoader, torch.utils.data.DataLoader, StatefulDataLoader)
    for kind in KINDS
    # which draws an order anew after a resume, from the global generator
    if not (loader is StatefulDataLoader and kind in ("weighted", "curriculum"))
]


def make(loader, sampler):
    torch.manual_seed(3)
    return cursor_over(loader(Numbers(), batch_size=BATCH, sampler=sampler))


def train(cursor, sampler, change, most=1000):
    """Return the batches until the process dies after so many."""
    seen = []
    while cursor.epoch < EPOCHS:
        for batch in cursor.batches():
            seen.append(batch.tolist())
            change(sampler, batch)
            if len(seen) == most:
                return seen
    return seen


@pytest.mark.parametrize("stops", [(1, 2), (4, 1), (6, 5), (9, 4)])
@pytest.mark.parametrize(("loader", "kind"), CASES)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_the_order_of_a_sampler_that_training_changes_is_the_same_after_a_resume(loader, kind, stops, caplog):
    create, change = KINDS[kind]
    whole = train(make(loader, sampler := create()), sampler, change)
    cursor, seen = make(loader, sampler := create()), []
    for stop in stops:
        seen += train(cursor, sampler, change, stop)
        state, now = cursor.state_dict(), torch.get_rng_state()
        cursor = make(loader, sampler := create())
        cursor.load_state_dict(state)
        torch.set_rng_state(now)
    assert seen + train(cursor, sampler, change) == whole
    assert "while it gives indices" not in caplog.text


def test_a_tensor_that_the_script_has_another_name_for_stays_the_same_one():
    weights = torch.ones(SIZE, dtype=torch.double)
    values = SamplerValues(sampler := WeightedRandomSampler(weights, SIZE))
    weights[3] = 5
    state = values.state_dict()
    weights[3] = 7
    values.load_state_dict(state)
    assert sampler.weights is weights
    assert weights[3] == 5
    values.load_state_dict({"numbers": {}})
    assert weights[3] == 1


def test_what_does_not_change_is_not_saved():
    sampler = Mining()
    values = SamplerValues(sampler)
    sampler.seen[1] = True
    assert values.state_dict()["numbers"] == {"seen": {1: True}}


def test_a_value_that_an_iteration_reads_while_it_gives_indices_is_named_once(caplog):
    values = SamplerValues(sampler := Lazy())
    assert values.state_dict()["numbers"] == {}
    assert caplog.text == ""
    sampler.hard.append(3)
    values.state_dict()
    values.state_dict()
    assert caplog.text.count("training changes hard of the sampler Lazy, whose __iter__ reads it") == 1


def test_indices_that_training_changes_while_torchs_sampler_gives_them_are_named(caplog):
    values = SamplerValues(sampler := SubsetRandomSampler([1, 2, 3]))
    sampler.indices[0] = 5
    assert values.state_dict()["numbers"] == {"indices": [5, 2, 3]}
    assert "training changes indices of the sampler SubsetRandomSampler" in caplog.text


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_sampler_that_a_stateful_loader_reads_again_with_other_numbers_is_named():
    text = "the WeightedRandomSampler of StatefulDataLoader draws from the global generator"
    assert text in cursor_over(StatefulDataLoader(Numbers(), sampler=weighted())).limitation
    assert cursor_over(StatefulDataLoader(Numbers(), sampler=weighted_with_generator())).limitation is None
    assert cursor_over(StatefulDataLoader(Numbers(), shuffle=True)).limitation is None
    assert cursor_over(StatefulDataLoader(Numbers())).limitation is None


def test_batches_of_a_sampler_that_has_not_changed_can_be_left_out():
    loader = holdfast.DataLoader(Numbers(), batch_size=BATCH, sampler=Curriculum())
    next(loader.batches())
    assert loader.leave_out(loader.state_dict(), 6)["epoch"] == 1
    loader.sampler.stage = 2
    with pytest.raises(ValueError, match="its sampler continues from epoch to epoch"):
        next(iter(loader)), loader.leave_out(loader.state_dict(), 6)


@pytest.mark.parametrize("plan", [(0, torch.arange(8)), [None, numpy.arange(8)], {"of": (1, [torch.ones(3)])}])
def test_tensors_within_lists_are_compared_as_well(plan):
    sampler = Mining()
    sampler.plan = plan
    values = SamplerValues(sampler)
    assert values.state_dict()["numbers"] == {}
    parts = plan if isinstance(plan, (tuple, list)) else plan["of"][1]
    parts[-1][0] += 5
    assert list(values.state_dict()["numbers"]) == ["plan"]


def test_one_entry_of_a_long_list_is_seen_to_change():
    sampler = Mining()
    sampler.weights = [1.0] * 250_001
    values = SamplerValues(sampler)
    sampler.weights[1234] = 3.0
    assert values.state_dict()["numbers"]["weights"][1234] == 3.0
