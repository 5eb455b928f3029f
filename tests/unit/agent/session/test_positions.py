"""One position for what a loop draws: iterables around loaders, iterators that cannot begin again, evaluations.

Each loop is compared with the same loop left alone: iteration, samples and loss, to the bit.
"""

import functools
import itertools
import random

import numpy
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.inventory.draws import WATCHED_ITERATIONS
from holdfast.torch_internals import after_each_batch
from tests.support.recording_datasets import RandomNumberDataset

EPOCHS = 3
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Job:
    """A model with dropout. `log` is what it has trained on."""

    def __init__(self, store, seed=0, dies_after=None, given=True, **loaders):
        torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        for name, loader in loaders.items():
            setattr(self, name, loader)
        self.session = holdfast.Session(
            "job", store=store, model=self.model, optimizer=self.optimizer, every=1, keep=1000,
            **(loaders if given else {}),
        )  # fmt: skip
        self.log, self.dies_after, self.store = [], dies_after, store

    def iterate(self, batch, *seen):
        loss = (self.model(batch[3].float().unsqueeze(1)) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.log.append((self.session.iteration + 1, batch[0].tolist(), loss.item(), *seen))
        self.session.step(loss=loss)
        self.session.wait(300)
        if self.session.iteration == self.dies_after:
            raise KeyboardInterrupt


def run(loop, store, make=dict, **options):
    torch.manual_seed(0)  # the sampler of torchdata takes its seed when it is created
    job = Job(store, **make(), **options)
    try:
        loop(job)
        job.session.close()
    except KeyboardInterrupt:
        job.session._close("SIGKILL")
    return job.log


def assert_exact(loop, path, deaths, **options):
    """Kill the loop after each of these iterations of one job, and compare it with one that is left alone."""
    whole = run(loop, path / "whole", **options)
    seen = []
    for number, death in enumerate((*deaths, None)):
        seen += run(loop, path / "killed", seed=9 if number else 0, dies_after=death, **options)
    assert seen == whole
    assert not run(loop, path / "killed", seed=9, **options)  # a finished job trains nothing more
    return whole


def loader(seed, kind=holdfast.DataLoader, **options):
    if kind is holdfast.DataLoader:
        options["seed"] = seed
    return kind(RandomNumberDataset(20), **{"batch_size": 4, "shuffle": True} | options)


def two_loaders():
    return {"a": loader(1), "b": loader(2)}


def two_plain_loaders():
    return {"a": loader(1, torch.utils.data.DataLoader), "b": loader(2, torch.utils.data.DataLoader)}


def two_stateful_loaders():
    return {"a": loader(1, StatefulDataLoader), "b": loader(2, StatefulDataLoader)}


def zipped(job):
    for number, (first, second) in enumerate(job.session.batches(zip(job.a, job.b, strict=False))):
        job.iterate(first, second[0].tolist())
        assert number < 5


def zipped_in_every_epoch(job):
    for epoch in range(EPOCHS):
        for first, second in job.session.batches(zip(job.a, job.b, strict=False)):
            job.iterate(first, second[0].tolist(), epoch)


def enumerated(job):
    for number, (first, second) in job.session.batches(enumerate(zip(job.a, job.b, strict=False))):
        job.iterate(first, second[0].tolist(), number)


def cycled(job):
    batches = job.session.batches(zip(job.a, itertools.cycle(job.b)))
    for first, second in batches:
        job.iterate(first, second[0].tolist())


def by_a_generator(job):
    def forever():
        for epoch in itertools.count():
            for first, second in zip(job.a, job.b, strict=False):
                yield epoch, first, second

    batches = job.session.batches(forever(), epochs=None)
    while job.session.iteration < 12:
        epoch, first, second = next(batches)
        job.iterate(first, second[0].tolist(), epoch)


class Both:
    def __init__(self, *loaders):
        self.loaders = loaders

    def __iter__(self):
        return zip(*self.loaders, strict=False)


def by_a_class(job):
    for first, second in job.session.batches(Both(job.a, job.b), epochs=EPOCHS):
        job.iterate(first, second[0].tolist())


ENCLOSING = [zipped, zipped_in_every_epoch, enumerated, cycled, by_a_generator, by_a_class]


@pytest.mark.parametrize("loop", ENCLOSING)
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("make", [two_loaders, two_plain_loaders, two_stateful_loaders])
@pytest.mark.parametrize("deaths", [(2,), (1, 3, 4), (5,)])
def test_an_iterable_around_loaders_has_one_position(loop, given, make, deaths, tmp_path, caplog):
    if given and make is two_plain_loaders:
        pytest.skip("a loader of torch has no state to give")
    whole = assert_exact(loop, tmp_path, deaths, make=make, given=given)
    assert len({number for number, *_ in whole}) == len(whole)
    assert "is in no checkpoint" not in caplog.text
    assert "different batches" not in caplog.text


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("at", "to"), [(4, 2), (8, 6), (8, 3), (6, 5)])
def test_an_iterable_that_begins_anew_is_taken_back_with_the_loaders_in_it(given, at, to, tmp_path):
    whole = run(by_a_class, tmp_path / "whole", make=two_loaders, given=given)

    def going_back(job):
        for first, second in job.session.batches(Both(job.a, job.b), epochs=EPOCHS):
            if job.session.iteration + 1 == at and len(job.log) < at:
                job.session.restore(to)
            job.iterate(first, second[0].tolist())

    assert run(going_back, tmp_path / "back", make=two_loaders, given=given) == whole[:at] + whole[to:]


def numbers():
    for number in itertools.count():
        yield torch.tensor([number]), None, None, torch.tensor([number / 100])


class SelfIterator:
    def __init__(self):
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return torch.tensor([self.number]), None, None, torch.tensor([self.number / 100])


class Infinite:
    """As in DomainBed and makemore: every iterator continues from where the last one was."""

    def __init__(self):
        self.iterator = iter(loader(1, torch.utils.data.DataLoader, sampler=endless(), shuffle=False))

    def __iter__(self):
        for _ in range(6):
            yield next(self.iterator)


class SharedStream(torch.utils.data.IterableDataset):
    def __init__(self):
        self.source = numbers()

    def __iter__(self):
        return ((index, 0, 0, value) for index, _, _, value in self.source)


def endless():
    return torch.utils.data.RandomSampler(range(20), replacement=True, num_samples=10**10)


ONE_SHOT = {
    "generator": numbers,
    "map": lambda: map(tuple, numbers()),
    "zip": lambda: (batch for batch, _ in zip(numbers(), itertools.count())),
    "islice": lambda: itertools.islice(numbers(), 100),
    "callable": lambda: iter(SelfIterator().__next__, None),
    "class": SelfIterator,
    "infinite loader": Infinite,
    "dataset of torch": lambda: torch.utils.data.DataLoader(SharedStream(), batch_size=2),
    "dataset": lambda: holdfast.DataLoader(SharedStream(), batch_size=2),
    "sampler": lambda: loader(1, sampler=iter([*range(20)] * 9), shuffle=False),
}


@pytest.mark.parametrize("make", ONE_SHOT.values(), ids=ONE_SHOT)
def test_an_iterator_that_cannot_begin_again_is_read_again_in_a_new_process_and_refused_in_place(
    make, tmp_path, caplog
):
    def counting(job, goes_back=False):
        batches = job.session.batches(make(), epochs=None)
        while job.session.iteration < 12:
            if goes_back and job.session.iteration == 7:
                job.session.restore(4)
            job.iterate(next(batches))

    caplog.set_level("INFO", "holdfast")
    whole = assert_exact(counting, tmp_path, (3, 8))
    assert run(lambda job: counting(job, goes_back=True), tmp_path / "back") == whole
    assert "restore of 000000000004-1 refused: this script draws batches from" in caplog.text
    assert "it cannot go back" in caplog.text


def test_what_begins_anew_is_taken_back_in_place(tmp_path):
    kinds = [lambda: loader(1, torch.utils.data.DataLoader), lambda: list(loader(3)), lambda: loader(1)]
    for number, make in enumerate(kinds):
        session = holdfast.Session("job", store=tmp_path / str(number), model=torch.nn.Linear(1, 1))
        next(session.batches(make()))
        assert session._training.obstacle_to_restore() is None
        session._close("SIGKILL")


def drawing_ahead(job):
    """As nanochat does: the next batch is drawn while the device is busy with this one."""
    batches = job.session.batches(loader(1), epochs=None)
    batch = next(batches)
    while job.session.iteration < 8:
        following = next(batches)
        job.iterate(batch)
        batch = following


def drawing_ahead_into_variables(job):
    batches = job.session.batches(loader(1), epochs=None)
    if job.loop.batch is None:
        job.loop.batch = next(batches)
    while job.session.iteration < 8:
        batch, job.loop.batch = job.loop.batch, next(batches)
        job.iterate(batch)


def test_a_loop_that_keeps_a_batch_for_the_next_iteration_is_named(tmp_path, caplog):
    text = "drew one batch more before its first session.step than in each iteration after it"
    run(drawing_ahead, tmp_path / "ahead", dies_after=3)
    assert text not in caplog.text
    run(drawing_ahead, tmp_path / "ahead")
    assert caplog.text.count(text) == 1
    caplog.clear()
    make = {"make": lambda: {"loop": holdfast.Variables(batch=None)}}
    assert_exact(drawing_ahead_into_variables, tmp_path / "kept", (2, 3), **make)
    assert text not in caplog.text


def prefetching_by_hand(job):
    job.session.resume()
    for _ in range(job.a.epoch, EPOCHS):
        batches = iter(job.a)
        ahead = next(batches, None)
        while ahead is not None:
            batch, ahead = ahead, next(batches, None)
            job.iterate(batch)


def listing_by_hand(job):
    job.session.resume()
    for _ in range(job.a.epoch, EPOCHS):
        for batch in [*job.a]:
            job.iterate(batch)


def chunks_by_hand(job):
    job.session.resume()
    for _ in range(job.a.epoch, EPOCHS):
        batches = iter(job.a)
        while chunk := [*itertools.islice(batches, 2)]:
            job.iterate(chunk[-1])


AHEAD = "drew one batch more before its first session.step than in each iteration after it"
LISTED = "batches before its first session.step and none in the iterations after it"


@pytest.mark.parametrize("dies_after", [1, 2, 6])
@pytest.mark.parametrize(
    ("loop", "text"), [(prefetching_by_hand, AHEAD), (listing_by_hand, LISTED), (chunks_by_hand, None)]
)
def test_a_loop_of_the_script_that_keeps_batches_is_named(loop, text, dies_after, tmp_path, caplog):
    run(loop, tmp_path, two_loaders, dies_after=dies_after)
    assert "after the resume, the loop drew" not in caplog.text
    run(loop, tmp_path, two_loaders)
    assert caplog.text.count("after the resume, the loop drew") == (text is not None)
    assert text is None or text in caplog.text


def cycling_by_hand(job):
    job.session.resume()
    batches = itertools.cycle(job.a)
    while job.session.iteration < 12:
        job.iterate(next(batches))


def one_after_the_other(job):
    job.session.resume()
    for each in (job.a, job.b):
        for _ in range(each.epoch, 2):
            for batch in each:
                job.iterate(batch)


def by_hand_and_then_by_batches(job):
    job.session.resume()
    for _ in range(job.a.epoch, 1):
        for batch in job.a:
            job.iterate(batch)
    for batch in job.session.batches(loader(3), epochs=2):
        job.iterate(batch)


@pytest.mark.parametrize(
    ("loop", "count"), [(cycling_by_hand, 1), (one_after_the_other, 0), (by_hand_and_then_by_batches, 0)]
)
def test_a_loop_that_repeats_batches_that_it_keeps_is_named(loop, count, tmp_path, caplog):
    run(loop, tmp_path, two_loaders)
    assert caplog.text.count("If the loop repeats batches that it keeps") == count


def by_a_loader_of_torch(job):
    job.session.resume()
    for batch in loader(1, torch.utils.data.DataLoader):
        job.iterate(batch)


def by_numbers_and_evaluating(job):
    job.session.resume()
    for _ in range(4):
        job.iterate(next(iter(job.session.batches([[torch.arange(4)] * 4], epochs=None))))
        with torch.no_grad():
            list(loader(1, torch.utils.data.DataLoader))


OWN_NEXT = torch.utils.data.dataloader._BaseDataLoaderIter.__next__


@pytest.mark.parametrize(("loop", "count"), [(by_a_loader_of_torch, 1), (by_numbers_and_evaluating, 0)])
def test_a_loader_of_torch_whose_position_is_in_no_checkpoint_is_named(loop, count, tmp_path, caplog):
    run(loop, tmp_path)
    assert caplog.text.count("the script draws from a DataLoader of torch") == count
    assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is OWN_NEXT


def test_nothing_of_torch_is_replaced_where_the_session_knows_a_loader(tmp_path):
    def watching(job):
        for batch in job.session.batches(job.a):
            job.iterate(batch)
            assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is OWN_NEXT

    run(watching, tmp_path, two_plain_loaders, given=False)


def test_counting_batches_ends_with_the_session_and_after_100_iterations(tmp_path):
    iterators = torch.utils.data.dataloader._BaseDataLoaderIter
    session = holdfast.Session("job", store=tmp_path, model=torch.nn.Linear(1, 1), every=10**6)
    session.resume()
    replaced = []
    for _ in range(WATCHED_ITERATIONS):
        session.step()
        replaced.append(iterators.__next__ is not OWN_NEXT)
    assert replaced == [True] * (WATCHED_ITERATIONS - 1) + [False]
    session._close("SIGKILL")
    other = holdfast.Session("other", store=tmp_path, model=torch.nn.Linear(1, 1), every=10**6)
    other.resume()
    other.step()
    assert iterators.__next__ is not OWN_NEXT
    other._close("SIGKILL")
    assert iterators.__next__ is OWN_NEXT


def test_a_function_that_wraps_that_of_torch_meanwhile_stays(monkeypatch):
    iterators = torch.utils.data.dataloader._BaseDataLoaderIter
    counted, drawn = [], []
    end = after_each_batch(lambda: counted.append(1))
    ours = iterators.__next__

    def others(iterator):
        drawn.append(1)
        return ours(iterator)

    monkeypatch.setattr(iterators, "__next__", others)
    for _ in range(2):
        list(loader(1, torch.utils.data.DataLoader))
        end()
        assert iterators.__next__ is others
        assert len(list(loader(1, torch.utils.data.DataLoader))) == 5
        end = after_each_batch(lambda: counted.append(1))
    assert (len(counted), len(drawn)) == (10, 24)
    end()
    monkeypatch.undo()
    after_each_batch(print)()
    assert iterators.__next__ is OWN_NEXT


def test_a_source_that_is_not_the_same_when_read_again_is_named(tmp_path, caplog):
    def unstable(job):
        for batch in job.session.batches(value for value in SelfIteratorFrom(job.dies_after or 50)):
            job.iterate(batch)

    class SelfIteratorFrom(SelfIterator):
        def __init__(self, first):
            self.number = first

        def __next__(self):
            if self.number > 60:
                raise StopIteration
            return super().__next__()

    run(unstable, tmp_path, dies_after=3)
    assert "different batches" not in caplog.text
    run(unstable, tmp_path, seed=9)
    assert "generator gave different batches when it was read again up to the position" in caplog.text


EMPTY = {
    "empty dataset": (lambda: holdfast.DataLoader([], batch_size=2), "the list of the DataLoader is empty"),
    "drop_last": (lambda: loader(1, batch_size=24, drop_last=True), "has 20 samples, and drop_last=True drops a"),
    "torch": (
        lambda: loader(1, torch.utils.data.DataLoader, batch_size=24, drop_last=True),
        "has 20 samples, and drop_last=True drops a batch of fewer than 24",
    ),
    "sampler": (lambda: loader(1, sampler=[], shuffle=False), "the list of the DataLoader gave no index"),
    "list": (list, "the list gave none"),
    "iterator": (lambda: iter(()), "the tuple_iterator is exhausted: it can be iterated only once"),
}


@pytest.mark.parametrize(("make", "why"), EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("epochs", [None, 1, 4])
def test_an_epoch_without_a_batch_is_an_error_that_names_the_loader_and_the_reason(make, why, epochs, tmp_path):
    session = holdfast.Session("job", store=tmp_path, model=torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"session\.batches: epoch 0 has no batch") as error:
        next(session.batches(make(), epochs=epochs))
    assert why in str(error.value)
    session._close("SIGKILL")


def test_an_iterator_that_has_ended_gives_no_second_epoch(tmp_path):
    session = holdfast.Session("job", store=tmp_path, model=torch.nn.Linear(1, 1))
    assert list(session.batches(iter([1, 2]))) == [1, 2]
    with pytest.raises(ValueError, match="epoch 1 has no batch: the list_iterator is exhausted"):
        list(session.batches(iter([1, 2]), epochs=2))
    session._close("SIGKILL")


def test_a_resume_takes_place_when_batches_is_called(tmp_path):
    def drawing_before_the_first_batch(job):
        batches = job.session.batches(loader(1), epochs=None)
        while job.session.iteration < 6:
            noise = torch.rand(1).item() + job.model[0].bias.sum().item()
            job.iterate(next(batches), noise)

    assert_exact(drawing_before_the_first_batch, tmp_path, (2, 4))


def test_two_loaders_keep_their_positions_in_the_order_of_the_calls(tmp_path):
    def in_turn(job):
        one, other = (job.session.batches(each, epochs=None) for each in (job.a, job.b))
        while job.session.iteration < 9:
            job.iterate(next(other if job.session.iteration % 3 else one))

    assert_exact(in_turn, tmp_path, (1, 5), make=two_loaders, given=False)


def accuracy(job, loader, batches=None, gradients=False):
    with torch.set_grad_enabled(gradients):
        return [batch[0].tolist() for batch in itertools.islice(loader, batches)]


def after_each_epoch(job, gradients):
    job.session.resume()
    for epoch in range(job.a.epoch, EPOCHS):
        for batch in job.a:
            job.iterate(batch, epoch)
        job.log += [("after", epoch, accuracy(job, job.a, gradients=gradients))]


def twice_and_in_part(job, gradients):
    job.session.resume()
    for epoch in range(job.a.epoch, EPOCHS):
        for batch in job.a:
            job.iterate(batch, epoch)
        passes = [accuracy(job, job.a, count, gradients) for count in (None, 2, None, 1)]
        job.log += [("after", epoch, passes)]


def within_an_epoch(job, gradients):
    job.session.resume()
    for epoch in range(job.a.epoch, EPOCHS):
        for batch in job.a:
            found = [accuracy(job, job.a, count, gradients) for count in (None, 2)]
            job.iterate(batch, epoch, found)


def on_two_loaders(job, gradients):
    job.session.resume()
    for epoch in range(job.b.epoch, EPOCHS):
        if job.a.epoch == epoch:
            for batch in job.a:
                job.iterate(batch, epoch)
            job.log += [("after a", epoch, accuracy(job, job.a, gradients=gradients))]
        for batch in job.b:
            job.iterate(batch, epoch)
        job.log += [("after b", epoch, accuracy(job, job.b, gradients=gradients))]
        assert (job.a.epoch, job.b.epoch) == (epoch + 1, epoch + 1)


def before_each_epoch(job, gradients):
    job.session.resume()
    for epoch in range(job.a.epoch, EPOCHS):
        assert len(accuracy(job, job.a, gradients=False)) == len(job.a)
        for batch in job.a:
            job.iterate(batch, epoch)


class Unsized(torch.utils.data.IterableDataset):
    def __iter__(self):
        for number in range(18):
            yield number, 0.0, 0.0, torch.rand(1).item()


def streams():
    return {"a": holdfast.DataLoader(Unsized(), batch_size=4), "b": holdfast.DataLoader(Unsized(), batch_size=3)}


def without_repetitions(log):
    """Without evaluations that were made again, since no checkpoint was taken after them."""
    return [entry for entry, before in zip(log, [None, *log], strict=False) if entry != before]


@pytest.mark.parametrize("make", [two_loaders, streams])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(
    "loop", [after_each_epoch, twice_and_in_part, within_an_epoch, on_two_loaders, before_each_epoch]
)
@pytest.mark.parametrize("deaths", [(3,), (5,), (7, 10), (12,)])
def test_a_pass_without_a_step_moves_no_epoch(loop, gradients, make, deaths, tmp_path):
    if make is streams and loop in (before_each_epoch,):
        pytest.skip("its end is not known until it is reached")

    def of(store, **options):
        return run(lambda job: loop(job, gradients), store, make, **options)

    whole = of(tmp_path / "whole")
    seen = []
    for number, death in enumerate((*deaths, None)):
        seen += of(tmp_path / "killed", seed=9 if number else 0, dies_after=death)
    assert without_repetitions(seen) == whole
    trained = [entry[1] for entry in whole if isinstance(entry[0], int)]
    samples = 20 if make is two_loaders else 18
    per_loader = 2 if loop is on_two_loaders else 1
    assert sorted(itertools.chain(*trained)) == sorted([*range(samples)] * EPOCHS * per_loader)


@pytest.mark.parametrize("make", [two_loaders, streams])
@pytest.mark.parametrize("deaths", [(3,), (5,), (7, 10)])
def test_a_pass_over_the_rest_of_an_epoch_without_a_step_is_named_and_moves_no_epoch(
    make, deaths, tmp_path, caplog
):
    def before_training(job):
        job.session.resume()
        accuracy(job, job.a, gradients=True)
        for epoch in range(job.a.epoch, EPOCHS):
            for batch in job.a:
                job.iterate(batch, epoch)

    assert_exact(before_training, tmp_path, deaths, make=make)
    within = sum(death % 5 > 0 for death in deaths)
    assert caplog.text.count("the first loop over the loader after the resume finished no iteration") == within


def test_a_rest_of_an_epoch_that_is_too_short_for_an_update_is_over_after_the_loop(tmp_path, caplog):
    def accumulating(job):
        job.session.resume()
        drawn = 0
        for epoch in range(job.a.epoch, EPOCHS):
            for batch in job.a:
                drawn += 1
                if drawn % 3 == 0:
                    job.iterate(batch, epoch)

    log = run(accumulating, tmp_path, two_loaders, dies_after=1)  # two of five batches are left
    log += run(accumulating, tmp_path, two_loaders, seed=9)
    assert [entry[:1] + entry[3:] for entry in log] == [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert "finished no iteration" not in caplog.text


def test_a_rest_of_an_epoch_that_is_drawn_ahead_is_over_after_its_iteration(tmp_path, caplog):
    def drawing_ahead(job):
        job.session.resume()
        for epoch in range(job.a.epoch, EPOCHS):
            drawn = [*job.a] if job.session.iteration == 4 else job.a  # the iterator ends before the iteration
            for batch in drawn:
                job.iterate(batch, epoch)

    log = run(drawing_ahead, tmp_path, two_loaders, dies_after=4)
    log += run(drawing_ahead, tmp_path, two_loaders, seed=9)
    assert log == run(drawing_ahead, tmp_path / "whole", two_loaders)
    assert [entry[0] for entry in log] == list(range(1, 5 * EPOCHS + 1))
    assert "finished no iteration" not in caplog.text


def test_a_step_after_the_loop_makes_it_a_pass_of_training():
    each = loader(1)
    each.attach_session()
    orders = []
    for epoch in range(3):
        assert each.epoch == epoch
        orders.append([batch[0].tolist() for batch in each])
        each.iteration_ended()
    assert len({str(order) for order in orders}) == 3


def test_a_restore_of_the_script_names_the_way_out(tmp_path, caplog):
    session = holdfast.Session("job", store=tmp_path, every=1, model=torch.nn.Linear(1, 1))
    next(session.batches(numbers()))
    session.step()
    session.wait(300)
    session.restore(1)
    session.step()
    assert "refused: this script draws batches from a generator, which can be iterated once" in caplog.text
    assert "run `holdfast restore`, which the next start carries out" in caplog.text
    session._close("SIGKILL")


def test_a_restore_in_place_names_the_code_between_calls_for_each_epoch(tmp_path, caplog):
    caplog.set_level("INFO", "holdfast")
    session = holdfast.Session("job", store=tmp_path, every=1, model=torch.nn.Linear(1, 1))
    each, targets = loader(1), {8: 6, 9: 2}
    for epoch in range(2):
        for _ in session.batches(each, epochs=epoch + 1):
            session.step()
            session.wait(300)
            if target := targets.pop(session.iteration, None):
                session.restore(target)
    assert caplog.text.count("the script calls session.batches for one epoch") == 1
    assert "restored to iteration 6" in caplog.text
    assert caplog.text.index("restored to iteration 2") < caplog.text.index("the script calls session.batches")
    session._close("SIGKILL")


def evaluates(job, *loaders):
    job.model.eval()
    with torch.no_grad():
        for each in loaders:
            for batch in each:
                job.model(batch[3].float().unsqueeze(1))
    job.model.train()


def a_call_for_each_epoch(job):
    for epoch in range(EPOCHS):
        for batch in job.session.batches(job.a, epochs=epoch + 1):
            job.iterate(batch, epoch)
        evaluates(job, job.a, loader(3, torch.utils.data.DataLoader))  # which draws random numbers


@pytest.mark.parametrize("make", [two_loaders, two_plain_loaders])
@pytest.mark.parametrize("deaths", [(6,), (3, 10), (12, 14)])
def test_code_between_calls_for_epochs_before_the_resume_changes_no_random_number(make, deaths, tmp_path, caplog):
    assert_exact(a_call_for_each_epoch, tmp_path, deaths, make=make, given=False)
    assert "ran again for epochs before the checkpoint" not in caplog.text


def scheduled(job, *, last_step_in_loop=True):
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 1)
    objects = {"model": job.model, "optimizer": job.optimizer, "schedule": schedule}
    job.session.close()
    job.session = holdfast.Session("scheduled", store=job.store, every=1, **objects)
    for epoch in range(EPOCHS):
        for number, batch in enumerate(job.session.batches(loader(1), epochs=epoch + 1)):
            if number < 4 or last_step_in_loop:
                job.iterate(batch, epoch)
        if job.session.iteration == 5 * epoch + 4:
            job.iterate(batch, epoch)
        schedule.step()


def with_its_last_step_after_the_loop(job):
    for epoch in range(EPOCHS):
        for number, batch in enumerate(job.session.batches(job.a, epochs=epoch + 1)):
            if number < 4:
                job.iterate(batch, epoch)
        if job.session.iteration == 5 * epoch + 4:
            job.iterate(batch, epoch)
        evaluates(job, job.a)
        job.log.append((epoch, torch.rand(1).item()))


STEPS_AGAIN = "ran again for epochs before the checkpoint, and changed a schedule"


def test_a_schedule_that_steps_again_for_epochs_before_the_resume_is_named(tmp_path, caplog):
    run(scheduled, tmp_path, dies_after=8)
    assert STEPS_AGAIN not in caplog.text
    run(scheduled, tmp_path)
    assert caplog.text.count(STEPS_AGAIN) == 1


@pytest.mark.parametrize("make", [two_loaders, two_plain_loaders])
@pytest.mark.parametrize("iteration", [5, 10])
def test_after_a_last_step_that_follows_the_loop_only_the_code_after_it_is_due(make, iteration, tmp_path):
    options = {"make": make, "given": False}
    whole = run(with_its_last_step_after_the_loop, tmp_path / "whole", **options)
    run(with_its_last_step_after_the_loop, tmp_path / "killed", dies_after=iteration, **options)
    resumed = run(with_its_last_step_after_the_loop, tmp_path / "killed", seed=9, **options)
    due = next(number for number, each in enumerate(whole) if each[0] == iteration and len(each) > 2) + 1
    assert resumed[-len(whole[due:]) :] == whole[due:]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("epochs", "count"), [(1, 0), (2, 1)])
def test_a_schedule_that_steps_again_before_a_last_step_after_the_loop_is_named(epochs, count, tmp_path, caplog):
    loop = functools.partial(scheduled, last_step_in_loop=False)
    run(loop, tmp_path, dies_after=5 * epochs)
    run(loop, tmp_path)
    assert caplog.text.count(STEPS_AGAIN) == count
