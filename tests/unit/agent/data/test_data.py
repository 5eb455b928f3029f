import functools
import pickle
import random

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, default_collate

from holdfast import DataLoader
from holdfast.data.indexed import DataPosition
from holdfast.state.rng import restore_rng, rng_state
from tests.support.recording_datasets import (
    IndexRecordingDataset,
    RandomNumberDataset,
    epoch,
    indices,
    random_states,
)

shuffled = functools.partial(DataLoader, RandomNumberDataset(), batch_size=4, shuffle=True, seed=3)
PERSISTENT = {"num_workers": 2, "persistent_workers": True}


@pytest.fixture(scope="module")
def two_epochs():
    loader = shuffled()
    return epoch(loader), epoch(loader)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize("how", [*({"num_workers": n} for n in (0, 1, 2, 4)), PERSISTENT], ids=str)
def test_epochs_are_the_same_for_any_number_of_workers(how, two_epochs):
    loader = shuffled(**how)
    assert (epoch(loader), epoch(loader)) == two_epochs


def test_an_epoch_has_every_sample_once_and_an_order_and_noise_of_its_own(two_epochs):
    first, second = two_epochs
    for batches in two_epochs:
        assert sorted(i for batch in batches for i in batch[0]) == list(range(23))
    assert [b[0] for b in first] != [b[0] for b in second]
    noise = [
        {batch[0][k]: batch[1:][0][k] for batch in batches for k in range(len(batch[0]))} for batches in two_epochs
    ]
    assert all(noise[0][index] != noise[1][index] for index in range(23))


@pytest.mark.parametrize("how", [{"num_workers": 0}, {"num_workers": 2}, PERSISTENT], ids=str)
@pytest.mark.parametrize("stop", [0, 1, 3, 6])
def test_a_resumed_epoch_goes_on_with_the_next_sample_although_workers_had_read_ahead(how, stop, two_epochs):
    before, after = shuffled(**how), shuffled(**how)
    batches = iter(before)
    for _ in range(stop):
        next(batches)
    after.load_state_dict(before.state_dict())
    assert epoch(after) == two_epochs[0][stop:]
    assert after.position.epoch == 1
    assert epoch(after) == two_epochs[1]


def test_a_loop_that_asks_for_more_than_a_resumed_epoch_has_left_is_told_why():
    loader = shuffled()
    loader.load_state_dict({**loader.state_dict(), "taken": 20})
    batches = iter(loader)
    next(batches)
    with pytest.raises(StopIteration, match="epoch 0 had fewer batches left after the resume than a whole epoch"):
        next(batches)
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "taken": 23})
    with pytest.raises(StopIteration, match=r"epoch 0 had no batch left .* range\(loader\.batches_left"):
        next(iter(loader))


def test_a_run_that_is_resumed_again_and_again_sees_what_one_run_sees(two_epochs):
    seen, state = [], shuffled().state_dict()
    while state["epoch"] < 2:
        loader = shuffled(num_workers=len(seen) % 2)
        loader.load_state_dict(state)
        seen += [tuple(map(tuple, (c.tolist() for c in batch))) for batch in [next(iter(loader), None)] if batch]
        state = loader.state_dict()
    assert seen == two_epochs[0] + two_epochs[1]


def test_a_position_holds_under_another_batch_size_and_other_workers():
    before = DataLoader(RandomNumberDataset(), batch_size=4, shuffle=True, seed=3)
    batches = iter(before)
    seen = [next(batches)[0].tolist() for _ in range(3)]
    after = DataLoader(RandomNumberDataset(), batch_size=5, shuffle=True, seed=3, num_workers=1)
    after.load_state_dict(before.state_dict())
    seen += [batch[0].tolist() for batch in after]
    assert sorted(i for batch in seen for i in batch) == list(range(23))


class NestedReadingDataset(IndexRecordingDataset):
    """Draws after it has read another loader."""

    def __init__(self, size, noise):
        super().__init__(size)
        self.noise = noise

    def __getitem__(self, index):
        if self.noise is not None:
            list(self.noise)
        return numpy.random.normal()


@pytest.mark.parametrize("drawn", [0, 1])
def test_normals_that_numpy_holds_are_kept_while_samples_are_read(drawn):
    numpy.random.seed(drawn)
    numpy.random.normal(size=drawn)
    before = random_states()
    read = list(DataLoader(NestedReadingDataset(6, None), batch_size=3))
    numpy.random.seed(drawn)
    numpy.random.normal(size=drawn)
    nested = list(DataLoader(NestedReadingDataset(6, DataLoader(RandomNumberDataset(4))), batch_size=3))
    assert random_states()[:3] == before[:3]
    assert torch.equal(torch.stack(read), torch.stack(nested))


def draws(samples):
    random.random(), numpy.random.rand(), torch.rand(1)
    return default_collate(samples)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1}, {"collate_fn": draws}, {"batch_size": None}],
    ids=["as it is", "a worker", "collate_fn", "no batches"],
)
def test_an_epoch_draws_a_base_seed_from_the_training_process_and_no_more(options):
    before = rng_state()
    iter(torch.utils.data.DataLoader(RandomNumberDataset()))
    expected = random_states()
    own_sampler = DataLoader(
        RandomNumberDataset(), sampler=RandomSampler(RandomNumberDataset()), **{"batch_size": 4} | options
    )
    for loader in (shuffled(**options), own_sampler):
        restore_rng(before)
        for _ in loader:
            pass
        assert random_states() == expected


def test_workers_that_persist_follow_a_rewind():
    loader = DataLoader(
        RandomNumberDataset(), batch_size=4, shuffle=True, seed=3, num_workers=2, persistent_workers=True
    )
    first = epoch(loader)
    batches = iter(loader)
    next(batches)
    loader.seek(DataPosition(taken=8))
    batches.close()
    assert epoch(loader) == first[2:]
    assert loader.position.epoch == 1


def test_a_set_that_reads_whole_batches_is_asked_for_them():
    class Batched(RandomNumberDataset):
        def __getitems__(self, indices):
            return [self[i] for i in indices]

    loader = DataLoader(Batched(), batch_size=4, shuffle=True, seed=3)
    assert epoch(loader) == epoch(DataLoader(Batched(), batch_size=4, shuffle=True, seed=3, num_workers=1))


def test_samplers_of_ones_own_are_skipped_forward():
    order = list(range(22, -1, -1))
    for options in ({"sampler": order, "batch_size": 4}, {"batch_sampler": [order[:7], order[7:11], order[11:]]}):
        whole = [b[0].tolist() for b in DataLoader(RandomNumberDataset(), **options)]
        before, after = DataLoader(RandomNumberDataset(), **options), DataLoader(RandomNumberDataset(), **options)
        next(iter(before))
        after.load_state_dict(before.state_dict())
        assert [b[0].tolist() for b in after] == whole[1:]


def test_the_length_is_that_of_a_whole_epoch():
    assert len(DataLoader(RandomNumberDataset(), batch_size=4)) == 6
    assert len(DataLoader(RandomNumberDataset(), batch_size=4, drop_last=True)) == 5
    assert len(epoch(DataLoader(RandomNumberDataset(), batch_size=4, drop_last=True))) == 5
    assert len(DataLoader(RandomNumberDataset(), batch_size=None)) == 23


def within_an_epoch(**options):
    loader = DataLoader(**{"dataset": IndexRecordingDataset(10), "batch_size": 4} | options)
    next(iter(loader))
    return loader.state_dict()


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        ({"seed": 4}, {"seed": 3}, "seed is 3, but .* position is for seed 4"),
        ({"shuffle": True}, {}, "order is 'sequential', but .* position is for order 'shuffled'"),
        ({"batch_size": 1, "batch_sampler": [[1, 2], [3]]}, {}, "order is 'sequential', but .* 'list'"),
    ],
)
def test_a_position_within_an_epoch_of_another_order_is_refused(then, now, message):
    with pytest.raises(ValueError, match=message):
        DataLoader(IndexRecordingDataset(10), batch_size=4, **now).load_state_dict(within_an_epoch(**then))
    edge = DataLoader(IndexRecordingDataset(10), **{"batch_size": 4} | then).state_dict()
    DataLoader(IndexRecordingDataset(10), batch_size=4, **now).load_state_dict(edge)  # nothing is counted yet


def test_a_dataset_that_has_grown_is_said_so_in_the_middle_of_an_epoch_alone():
    loader = DataLoader(IndexRecordingDataset(12), batch_size=4)
    loader.load_state_dict(within_an_epoch())
    assert "taken with 10 samples, and now there are 12 samples" in loader.limitation
    loader.load_state_dict(DataLoader(IndexRecordingDataset(10), batch_size=4).state_dict())
    assert loader.limitation is None


def test_nothing_that_was_passed_over_is_read_and_the_position_is_a_few_numbers():
    size = 3_000_000_000
    before, after = IndexRecordingDataset(size), IndexRecordingDataset(size)
    loader = DataLoader(before, batch_size=4, shuffle=True, seed=1)
    loader.seek(DataPosition(taken=1_000_000_000))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    resumed = DataLoader(after, batch_size=4, shuffle=True, seed=1)
    resumed.load_state_dict(state)
    assert next(iter(resumed)).tolist() == next(batches).tolist() == after.read
    assert len(pickle.dumps(state)) <= len(pickle.dumps(within_an_epoch())) + 20


def test_a_sampler_is_drawn_again_but_no_sample_that_it_named_is_read():
    data = IndexRecordingDataset(100)
    loader = DataLoader(data, sampler=RandomSampler(range(100)), batch_size=4, seed=1)
    loader.seek(DataPosition(taken=92))
    assert len(indices(loader)) == 2
    assert len(data.read) == 8


def test_a_generator_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="give seed="):
        DataLoader(RandomNumberDataset(), generator=torch.Generator())


def test_torchs_random_samplers_resume_exactly_although_they_know_no_epoch():
    def make():
        data = RandomNumberDataset()
        return DataLoader(data, sampler=RandomSampler(data), batch_size=4, seed=3)

    whole = epoch(make())
    before, after = make(), make()
    batches = iter(before)
    next(batches), next(batches)
    torch.rand(7)  # whatever training draws meanwhile
    after.load_state_dict(before.state_dict())
    assert epoch(after) == whole[2:]
    assert before.limitation is None


def test_a_subset_is_seeded_by_sample_like_any_other_set():
    subset = torch.utils.data.Subset(RandomNumberDataset(), range(5, 17))

    def samples(size):
        return [s for b in epoch(DataLoader(subset, batch_size=size)) for s in zip(*b, strict=True)]

    assert samples(2) == samples(4)


@pytest.mark.parametrize("how", [{}, {"num_workers": 2}, PERSISTENT], ids=str)
def test_a_loader_set_elsewhere_in_the_middle_of_an_epoch_goes_on_from_there(how):
    loader = DataLoader(RandomNumberDataset(), batch_size=4, shuffle=True, seed=3, **how)
    whole = [b[0].tolist() for b in DataLoader(RandomNumberDataset(), batch_size=4, shuffle=True, seed=3)]
    seen = []
    for batch in loader:
        seen.append(batch[0].tolist())
        if len(seen) == 3:
            loader.seek(DataPosition(taken=4))
    assert seen == [*whole[:3], *whole[1:]]
    assert loader.position.epoch == 1


def test_it_answers_like_torchs_loader():
    data = RandomNumberDataset()
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
        {"in_order": False},
        {"batch_size": 0},
    ],
)
def test_arguments_that_exclude_each_other_or_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=r"drop|at least 1"):
        DataLoader(RandomNumberDataset(), **options)


def test_one_sample_at_a_time_with_a_numpy_sampler():
    loader = DataLoader(RandomNumberDataset(), batch_size=None, sampler=numpy.arange(5))
    assert [sample[0] for sample in loader] == [0, 1, 2, 3, 4]


def noise_of(samples):
    return samples, random.random()


def test_a_collate_function_draws_the_same_for_any_number_of_workers():
    found = [list(shuffled(collate_fn=noise_of, num_workers=n)) for n in (0, 2)]
    assert found[0] == found[1]
    assert len({noise for _, noise in found[0]}) == 6


class Lazy(IndexRecordingDataset):
    """Draws a number when a process first reads from it."""

    def __getitem__(self, index):
        if not self.read:
            random.random()
        return super().__getitem__(index)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_nor_do_its_numbers_depend_on_what_else_a_process_has_read(batch_size):
    found = [list(DataLoader(Lazy(8), batch_size, collate_fn=noise_of, num_workers=workers)) for workers in (0, 2)]
    assert found[0] == found[1]


def test_a_sampler_of_whole_batches_and_keys_that_are_no_numbers_reach_the_dataset_as_they_are():
    class Keyed(RandomNumberDataset):
        def __getitem__(self, key):
            return key

    batches = BatchSampler(SequentialSampler(range(5)), 2, False)
    assert [b.tolist() if hasattr(b, "tolist") else b for b in DataLoader(Keyed(), None, sampler=batches)] == [
        [0, 1], [2, 3], [4]
    ]  # fmt: skip
    assert list(DataLoader(Keyed(), sampler=["a", "b", "c"], batch_size=2)) == [["a", "b"], ["c"]]


class Opened(IndexRecordingDataset):
    handle = None

    def open(self):
        return 7

    def __getitem__(self, index):
        return self.handle


def open_in_worker(_):
    data = torch.utils.data.get_worker_info().dataset
    data.handle = data.open()


def test_a_worker_init_fn_reaches_the_dataset():
    loader = DataLoader(Opened(4), batch_size=2, num_workers=1, worker_init_fn=open_in_worker)
    assert [b.tolist() for b in loader] == [[7, 7], [7, 7]]


@pytest.mark.processes
def test_workers_may_be_spawned():
    loader = shuffled(num_workers=1, multiprocessing_context="spawn")
    assert epoch(loader) == epoch(shuffled())


class Keys:
    """Samples by name, and nobody knows how many."""

    def __getitem__(self, key):
        return key


def test_a_dataset_without_a_length_needs_a_sampler():
    with pytest.raises(TypeError, match=r"Keys has no len\(\); give a sampler"):
        DataLoader(Keys())
    assert list(DataLoader(Keys(), sampler=["a", "b"])) == [["a"], ["b"]]


def test_a_sampler_without_a_length_is_read_as_training_goes():
    class EndlessSampler:
        def __iter__(self):
            yield from range(100, 123)

    loader = DataLoader(Keys(), batch_size=4, sampler=EndlessSampler())
    assert loader.limitation is None
    source = iter(loader)
    next(source)
    resumed = DataLoader(Keys(), batch_size=4, sampler=EndlessSampler())
    resumed.load_state_dict(loader.state_dict())
    assert indices(resumed) == [b.tolist() for b in source]
    with pytest.raises(TypeError, match="EndlessSampler has no len"):
        len(loader)


def test_it_knows_whether_a_loop_of_the_scripts_own_is_drawing_from_it():
    loader = shuffled()
    assert not loader.is_iterated_directly
    for _ in loader:
        assert loader.is_iterated_directly
    assert not loader.is_iterated_directly
    next(iter(loader))
    assert not loader.is_iterated_directly
    source = loader.batches()
    next(source)
    assert not loader.is_iterated_directly


def test_the_end_of_an_epoch_is_where_the_loop_finds_no_more():
    loader = shuffled()
    seen = [loader.epoch for _ in loader]
    assert seen == [0] * 6
    assert (loader.epoch, loader.position) == (1, DataPosition(epoch=1))


def by_for(loader):
    return [batch[0].tolist() for batch in loader]


def by_next(loader):
    batches = iter(loader)
    return [next(batches)[0].tolist() for _ in range(len(loader))]


def by_zip(loader):
    return [batch[0].tolist() for _, batch in zip(range(len(loader)), loader, strict=False)]


def as_lightning_does(loader):
    """Its fetcher asks for no batch after the last one, and keeps the iterator until it makes the next."""
    loader.fetcher, found = iter(loader), []
    while len(found) < len(loader):
        found.append(next(loader.fetcher)[0].tolist())
    return found


@pytest.mark.parametrize("how", [{}, {"num_workers": 2}, PERSISTENT], ids=str)
@pytest.mark.parametrize("epoch_of", [by_for, by_next, by_zip, as_lightning_does])
def test_every_epoch_is_whole_however_a_loop_ends_it(epoch_of, how):
    loader, expected = shuffled(**how), shuffled()
    assert [epoch_of(loader) for _ in range(4)] == [by_for(expected) for _ in range(4)]


def test_an_epoch_of_an_iterable_dataset_is_whole_although_its_end_was_never_met():
    class SizedIterable(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(8))

        def __len__(self):
            return 8

    loader = DataLoader(SizedIterable(), batch_size=4)
    for epoch_number in range(3):
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert loader.epoch == epoch_number


def test_each_iterator_takes_a_new_epoch_as_long_as_no_session_counts_iterations(two_epochs):
    loader = shuffled()
    for batches in two_epochs:
        assert epoch([next(iter(loader))]) == batches[:1]
    for _, batch in zip(range(2), loader, strict=False):
        assert epoch([batch]) != two_epochs[1][:1]
    assert loader.epoch == 2


def followed(**options):
    loader = shuffled(**options)
    loader.attach_session()
    return loader


def test_what_is_only_looked_at_comes_again(two_epochs):
    loader = shuffled()
    next(iter(loader))
    loader.attach_session()
    assert loader.position == DataPosition()
    kept = iter(loader)  # as in images, labels = next(dataiter)
    next(kept)
    assert epoch([next(iter(loader))]) == two_epochs[0][:1]
    for batches in two_epochs:
        assert epoch([next(iter(loader))]) == batches[:1]
        assert epoch(trained(loader)) == batches
    assert loader.epoch == 2


def trained(loader):
    for batch in loader:
        yield batch
        loader.iteration_ended()


def test_a_pass_before_the_session_costs_no_epoch(two_epochs):
    loader = shuffled()
    assert epoch(loader) == two_epochs[0]
    loader.attach_session()
    assert (loader.epoch, epoch(trained(loader))) == (0, two_epochs[0])
    loader.detach_session()
    loader.attach_session()
    assert (loader.epoch, epoch(trained(loader))) == (1, two_epochs[1])


def test_a_batch_fetched_ahead_before_the_session_does_not_come_again(two_epochs):
    loader = shuffled()
    batches = iter(loader)
    ahead = next(batches)
    loader.attach_session()
    assert epoch([ahead, *batches]) == two_epochs[0]


def test_an_epoch_that_is_left_after_training_on_it_is_over_and_that_is_said_once(two_epochs, caplog):
    loader, seen = followed(), []
    for _ in range(3):
        for batch in loader:
            seen += epoch([batch])
            loader.iteration_ended()
            break
    assert seen[:2] == [two_epochs[0][0], two_epochs[1][0]]
    assert loader.epoch == 2
    assert caplog.text.count("left epoch") == 1
    assert "left epoch 0 early, and the next one begins epoch 1" in caplog.text


def test_a_loop_that_was_left_before_an_iteration_ended_begins_with_the_next_epoch_after_a_resume(two_epochs):
    loader, resumed = followed(), followed()
    next(iter(loader))
    assert loader.position == DataPosition()
    loader.iteration_ended()
    resumed.load_state_dict(loader.state_dict())
    assert epoch(resumed) == epoch(loader) == two_epochs[1]


def test_a_position_is_kept_where_a_loop_may_be_made_longer(two_epochs):
    """A job that ends in the middle of an epoch and is then given more iterations."""
    loader, longer = followed(), followed()
    for number, _ in enumerate(loader):
        loader.iteration_ended()
        if number == 1:
            break
    longer.load_state_dict(loader.state_dict())
    assert epoch(longer) == two_epochs[0][2:]


@pytest.mark.parametrize("how", [{}, {"num_workers": 2}, PERSISTENT], ids=str)
@pytest.mark.parametrize("keeps", [True, False])
def test_a_look_within_a_loop_changes_nothing_of_it(how, keeps, two_epochs, caplog):
    loader, seen, kept = followed(**how), [], []
    for batch in loader:
        seen += epoch([batch])
        place = loader.position
        looking = iter(loader)
        next(looking)
        if keeps:
            kept.append(looking)
        else:
            looking.close()
            assert loader.position == place
        loader.iteration_ended()
    assert seen == two_epochs[0]
    assert loader.position == DataPosition(epoch=1)
    assert ("two loops use one" in caplog.text) == keeps


def test_a_whole_pass_within_a_loop_changes_nothing_of_it(two_epochs):
    loader, seen = followed(), []
    for batch in trained(loader):
        seen += epoch([batch])
        place = loader.position
        assert len(epoch(loader)) == 6
        assert loader.position == place
    assert seen == two_epochs[0]
    assert epoch(loader) == two_epochs[1]


def test_a_resumed_epoch_without_a_batch_left_is_over_for_a_loop_that_asks_for_none(two_epochs, caplog):
    caplog.set_level("INFO", "holdfast")
    before, after = followed(), followed()
    batches = iter(before)
    for _ in range(6):
        next(batches)
        before.iteration_ended()
    after.load_state_dict(before.state_dict())
    assert after.batches_left(1) == 0
    iter(after)
    assert (after.epoch, epoch(after)) == (1, two_epochs[1])
    assert "taken after the last batch of epoch 0" in caplog.text


def test_a_look_after_a_resume_leaves_the_rest_of_the_epoch_as_it_is(two_epochs):
    before, after = followed(), followed()
    batches = iter(before)
    next(batches), next(batches)
    after.load_state_dict(before.state_dict())
    for _ in range(2):
        assert epoch([next(iter(after))]) == two_epochs[0][2:3]
    assert epoch(trained(after)) == two_epochs[0][2:]
    assert epoch(trained(after)) == two_epochs[1]


class Distributed(torch.utils.data.DistributedSampler):
    def __init__(self, **options):
        super().__init__(range(23), num_replicas=1, rank=0, **options)


def torchs_order(number):
    sampler = Distributed()
    sampler.set_epoch(number)
    return [batch.tolist() for batch in torch.utils.data.DataLoader(range(23), 4, sampler=sampler)]


def over_distributed(**options):
    return DataLoader(range(23), batch_size=4, **{"sampler": Distributed()} | options)


def test_what_was_given_is_given_back():
    sampler = Distributed()
    assert over_distributed(sampler=sampler).sampler is sampler
    batches = BatchSampler(sampler, 2, drop_last=False)
    loader = DataLoader(range(23), batch_sampler=batches)
    assert loader.batch_sampler is batches
    assert isinstance(loader.sampler, SequentialSampler)
    plain = DataLoader(range(23), batch_size=4, drop_last=True)
    assert (type(plain.sampler), len(plain.sampler), len(plain.batch_sampler)) == (SequentialSampler, 23, 5)
    assert isinstance(shuffled().sampler, RandomSampler)
    assert DataLoader(range(23), batch_size=None).batch_sampler is None


def test_a_sampler_whose_epoch_the_script_never_sets_gives_one_order_as_in_torch_and_that_is_said_once(caplog):
    loader = over_distributed()
    assert [indices(loader) for _ in range(3)] == [torchs_order(0)] * 3
    assert caplog.text.count("Distributed.set_epoch was not called: epoch 1 has the order") == 1
    caplog.clear()
    loader = over_distributed(sampler=Distributed(shuffle=False))
    assert indices(loader) == indices(loader)
    assert not caplog.text


@pytest.mark.parametrize(("unset", "count"), [("trains", 1), ("evaluates", 0)])
def test_an_evaluation_may_leave_the_order_of_a_sampler_as_it_is(caplog, unset, count):
    loaders = {"trains": over_distributed(), "evaluates": over_distributed()}
    for each in loaders.values():
        each.attach_session()
    for number in range(3):
        for name, loader in loaders.items():
            if name != unset:
                loader.sampler.set_epoch(number)
        for _ in loaders["trains"]:
            for each in loaders.values():
                each.iteration_ended()
        indices(loaders["evaluates"])
    assert caplog.text.count("set_epoch was not called") == count


@pytest.mark.parametrize("numbers", [[0, 1, 2], [1, 2, 3], [5, 5, 5], [0, 0, 7]], ids=str)
@pytest.mark.parametrize("stop", [0, 2, 6])
def test_the_epoch_that_a_script_sets_decides_on_the_order_also_after_a_resume(numbers, stop):
    def begin(loader, number):
        loader.sampler.set_epoch(number)
        return iter(loader)

    loader, whole = over_distributed(), [torchs_order(number) for number in numbers]
    seen = [[batch.tolist() for batch in begin(loader, number)] for number in numbers[:2]]
    batches = begin(loader, numbers[2])
    last = [next(batches).tolist() for _ in range(stop)]
    resumed = over_distributed()
    resumed.load_state_dict(loader.state_dict())
    assert [*seen, last + [batch.tolist() for batch in begin(resumed, numbers[2])]] == whole
    assert [batch.tolist() for batch in begin(resumed, 9)] == torchs_order(9)


def test_a_resume_within_an_epoch_goes_on_in_the_order_of_the_checkpoint_whatever_the_script_sets():
    loader = over_distributed()
    indices(loader)
    loader.sampler.set_epoch(6)
    next(iter(loader))
    resumed = over_distributed()
    resumed.load_state_dict(loader.state_dict())
    resumed.sampler.set_epoch(1)
    assert indices(resumed) == torchs_order(6)[1:]


def ahead_by_one(loader):
    """The batches, each given after the next one was drawn, as by a framework that wants to know the last one."""
    batches = iter(loader)
    current = next(batches, None)
    while current is not None:
        following = next(batches, None)
        yield current
        current = following


@pytest.mark.parametrize("how", [{}, {"num_workers": 2}], ids=str)
@pytest.mark.parametrize("stop", range(7))
def test_a_batch_that_a_framework_drew_in_advance_is_given_again_after_a_resume(how, stop, two_epochs):
    before, after = shuffled(**how), shuffled(**how)
    for loader in (before, after):
        loader.attach_session()
        loader.lookahead = 1
    batches = ahead_by_one(before)
    for _ in range(stop):
        next(batches)
        before.iteration_ended()
    after.load_state_dict(before.state_dict())
    given = [tuple(map(tuple, (column.tolist() for column in batch))) for batch in ahead_by_one(after)]
    assert given == (two_epochs[0][stop:] or two_epochs[1])


def test_the_state_of_a_dataset_is_that_of_the_batch_before_one_drawn_in_advance():
    before, after = (DataLoader(StatefulStream(), batch_size=2) for _ in range(2))
    for loader in (before, after):
        loader.attach_session()
        loader.lookahead = 1
    batches = ahead_by_one(before)
    assert next(batches).tolist() == [0, 1]
    before.iteration_ended()
    assert next(batches).tolist() == [2, 3]
    before.iteration_ended()
    after.load_state_dict(before.state_dict())
    assert next(ahead_by_one(after)).tolist() == [4, 5]
    assert after.dataset.first == 4


class StatefulStream(torch.utils.data.IterableDataset):
    def __init__(self):
        self.next = self.first = 0

    def __iter__(self):
        self.first = self.next
        while self.next < 10:
            self.next += 1
            yield self.next - 1

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def test_a_dataset_cannot_be_replaced_in_a_loader():
    loader = DataLoader([1, 2, 3], batch_size=1)
    with pytest.raises(ValueError, match="construct another loader"):
        loader.dataset = [4, 5, 6]
    assert [batch.tolist() for batch in loader] == [[1], [2], [3]]
