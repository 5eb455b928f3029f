"""The three shapes of a training loop, killed and started again, and taken back while they run.

Each is compared with the same loop left alone: iteration, epoch, indices and loss, to the bit.
"""

import functools
import itertools
import math

import pytest
import torch

import holdfast
import holdfast.engine.startup
from holdfast.protocol.wire import Desired, RestoreOrder
from tests.support.recording_datasets import RandomNumberDataset

EPOCHS = 3
pytestmark = pytest.mark.filterwarnings(  # a resume at an epoch's edge does first what comes after the last batch
    "ignore:Detected call of `lr_scheduler.step\\(\\)` before"
)


class LoopKilled(Exception):
    """The process is gone: nothing more is saved or said."""


class LoopJob:
    """A model with dropout and a schedule that moves once an epoch; `log` is what it has done."""

    def __init__(self, store, size=23, seed=0, restorable_in_place=None, **objects):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.loader = holdfast.DataLoader(RandomNumberDataset(size), batch_size=4, shuffle=True, seed=1)
        self.other = holdfast.DataLoader(RandomNumberDataset(size), batch_size=4, shuffle=True, seed=2)
        self.loop = holdfast.Variables(best=math.inf)
        objects = {name: getattr(self, name) for name in ("loop", *objects)}
        self.session = holdfast.Session(
            "job", store=store, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler,
            every=1, keep=1000, restorable_in_place=restorable_in_place, **objects,
        )  # fmt: skip
        self.log, self.dies_in, self.dies_after, self.goes_back = [], None, None, {}

    def iterate(self, batch, epoch, *found):
        iteration = self.session.iteration + 1
        if iteration == self.dies_in:
            raise LoopKilled
        loss = (self.model(batch[3].float().unsqueeze(1)) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loop.best = min(self.loop.best, loss.item())
        self.log.append((iteration, epoch, batch[0].tolist(), loss.item(), self.loop.best, *found))
        if iteration in self.goes_back:
            self.session.restore(self.goes_back.pop(iteration))
        self.session.step(loss=loss)
        self.session.wait(300)
        if iteration == self.dies_after:
            raise LoopKilled

    def end_epoch(self, epoch, *found):
        self.scheduler.step()
        self.log.append(("end of epoch", epoch, self.scheduler.get_last_lr(), *found))


def drawn_by_the_session(job):
    for batch in job.session.batches(job.loader, epochs=EPOCHS):
        job.iterate(batch, job.session.epoch)


def counting_iterations(job):
    job.session.resume()
    batches = job.session.batches(job.loader, epochs=None)
    while job.session.iteration < EPOCHS * len(job.loader):
        job.iterate(next(batches), job.session.epoch)


def choosing_its_own_batches(job):
    """No loader at all: where it is in its data is a variable of the loop."""
    loop, size = job.loop, len(job.loader.dataset)
    if "place" not in loop.state_dict():
        loop.place = 0
    job.session.resume()
    while job.session.iteration < EPOCHS * len(job.loader):
        index = torch.arange(loop.place, loop.place + 4) % size
        loop.place += 4
        job.iterate((index, None, None, torch.rand(4)), loop.place // size)


def nested(job):
    job.session.resume()
    for epoch in range(job.loader.epoch, EPOCHS):
        for batch in job.loader:
            job.iterate(batch, epoch)
        job.end_epoch(epoch)


def counting_to_the_length(job):
    """Never asks for a batch after the last one."""
    job.session.resume()
    for epoch in range(job.loader.epoch, EPOCHS):
        for _, batch in zip(range(len(job.loader)), job.loader, strict=False):
            job.iterate(batch, epoch)
        job.end_epoch(epoch)


def counting_what_is_left(job):
    job.session.resume()
    for epoch in range(job.loader.epoch, EPOCHS):
        batches = iter(job.loader)
        for _ in range(job.loader.batches_left(epoch + 1)):
            job.iterate(next(batches), epoch)
        job.end_epoch(epoch)


def keeping_an_iterator(job):
    job.session.resume()
    batches = iter(job.loader)
    while job.session.iteration < EPOCHS * len(job.loader):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(job.loader)
            batch = next(batches)
        job.iterate(batch, job.loader.epoch)


def one_batch_an_epoch(job):
    job.session.resume()
    while job.session.iteration < EPOCHS * len(job.loader):
        job.iterate(next(iter(job.loader)), None)


def looking(job):
    """At a batch within the loop, and at another one after it."""
    job.session.resume()
    for epoch in range(job.loader.epoch, EPOCHS):
        for batch in job.loader:
            next(iter(job.loader))
            job.iterate(batch, epoch)
        next(iter(job.loader))
        job.end_epoch(epoch)


def evaluating(job):
    """On a loader of its own, which shuffles and is left early."""
    job.session.resume()
    for epoch in range(job.loader.epoch, EPOCHS):
        for batch in job.loader:
            found = [other[0].tolist() for _, other in zip(range(2), job.other, strict=False)]
            job.iterate(batch, epoch, found)
        job.end_epoch(epoch, [batch[0].tolist() for batch in job.other])


BY_HAND = [
    nested, counting_to_the_length, counting_what_is_left, keeping_an_iterator, one_batch_an_epoch, looking,
    evaluating,
]  # fmt: skip
LOOPS = [drawn_by_the_session, counting_iterations, choosing_its_own_batches, *BY_HAND]
REWINDING = LOOPS[:3]
GIVEN = {loop: {"loader": True} for loop in BY_HAND} | {evaluating: {"loader": True, "other": True}}


def run(loop, store, *, size=23, seed=0, restorable_in_place=None, **plans):
    """What the loop did until it ended, or died."""
    job = LoopJob(store, size, seed, restorable_in_place, **GIVEN.get(loop, {}))
    for plan, value in plans.items():
        setattr(job, plan, value)
    try:
        loop(job)
        job.session.close()
    except LoopKilled:
        job.session._close("SIGKILL")
    return job.log


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory):
    @functools.cache
    def log(loop, size):
        return run(loop, tmp_path_factory.mktemp("store"), size=size)

    return log


def test_an_epoch_that_is_left_alone_has_every_sample_once(left_alone):
    for loop in LOOPS:
        if loop in (choosing_its_own_batches, one_batch_an_epoch):
            continue
        for epoch in range(EPOCHS):
            seen = [
                i
                for kind, e, *rest in left_alone(loop, 23)
                if e == epoch and kind != "end of epoch"
                for i in rest[0]
            ]
            assert sorted(seen) == list(range(23))
    assert left_alone(drawn_by_the_session, 23) == left_alone(counting_iterations, 23)


def once(log):
    """Without the ends of epochs that were come to again, since no checkpoint held them."""
    return [entry for entry, before in zip(log, [None, *log], strict=False) if entry != before]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("when", "iteration"), [("dies_in", 2), ("dies_in", 7), ("dies_in", 12), ("dies_after", 6), ("dies_after", 18)]
)
def test_a_loop_goes_on_wherever_it_died(loop, when, iteration, tmp_path, left_alone):
    """Six batches an epoch: in the first and the last of one, at its edge, and in the very last."""
    seen = run(loop, tmp_path, **{when: iteration}) + run(loop, tmp_path, seed=9)
    assert once(seen) == left_alone(loop, 23)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_dies_again_and_again_gets_there_all_the_same(loop, tmp_path, left_alone):
    seen = []
    for number, death in enumerate((1, 2, 3, 6, 7, 7, 13, 18)):
        seen += run(loop, tmp_path, seed=max(number - 1, 0), dies_in=death)
    seen += run(loop, tmp_path, seed=9)
    assert once(seen) == left_alone(loop, 23)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("when", "iteration"), [("dies_in", 2), ("dies_after", 2), ("dies_after", 3)])
def test_a_dataset_smaller_than_a_batch(loop, when, iteration, tmp_path, left_alone):
    seen = run(loop, tmp_path, size=3, **{when: iteration}) + run(loop, tmp_path, size=3, seed=9)
    assert once(seen) == left_alone(loop, 3)


@pytest.mark.parametrize("loop", REWINDING)
@pytest.mark.parametrize(("at", "to"), [(9, 8), (13, 6), (12, 1), (18, 12)])
def test_a_running_loop_is_taken_back_and_trains_the_same_again(loop, at, to, tmp_path, left_alone):
    whole = left_alone(loop, 23)
    assert run(loop, tmp_path, goes_back={at: to}) == whole[:at] + whole[to:]


@pytest.mark.parametrize("to", [8, 3])
def test_a_nested_loop_cannot_be_taken_back_from_inside_and_says_what_can(to, tmp_path, left_alone, caplog):
    assert run(nested, tmp_path, goes_back={9: to}) == left_alone(nested, 23)
    assert f"restore of {to:012d}-1 refused" in caplog.text
    assert "run `holdfast restore`, which the next start carries out" in caplog.text
    assert "session.batches" in caplog.text


class IgnoringConnection:
    """Takes no notice of what is reported to it."""

    has_server = False
    desired = None
    page = None

    def __init__(self, **_): ...

    def start(self): ...
    def event(self, event): ...
    def sample(self, measured, metrics): ...
    def close(self, deadline_seconds=0): ...


class RestoringClient:
    """Answers the first question for the desired state: a restore to iteration 8."""

    def __init__(self, server, token): ...

    def desired(self, job, *, limit_seconds):
        return Desired(version=1, restore=RestoreOrder(id="o", checkpoint="000000000008-1", fence=1))

    def close(self): ...


@pytest.mark.parametrize("loop", LOOPS)
def test_any_loop_is_taken_back_when_it_is_started_again(loop, tmp_path, left_alone, monkeypatch):
    run(loop, tmp_path, dies_after=15)
    monkeypatch.setattr(holdfast.engine.startup, "ServerConnection", IgnoringConnection)
    monkeypatch.setattr(holdfast.engine.startup, "AgentClient", RestoringClient)
    monkeypatch.setenv("HOLDFAST_SERVER", "http://127.0.0.1:1")
    whole = left_alone(loop, 23)
    assert run(loop, tmp_path, seed=9) == whole[[entry[0] for entry in whole].index(9) :]


def test_a_loop_that_nothing_is_known_of_is_not_taken_back_while_it_runs(tmp_path, caplog):
    session = holdfast.Session("job", store=tmp_path, every=1, model=torch.nn.Linear(1, 1))
    for _ in torch.utils.data.DataLoader(RandomNumberDataset(5)):
        session.step()
        session.wait(300)
        if session.iteration == 3:
            session.restore(1)
    assert session.iteration == 5
    assert "give loop=holdfast.Variables() if the loop counts session.iteration" in caplog.text
    session._close("SIGKILL")


def test_what_a_loader_given_by_keyword_cannot_promise_is_said_at_the_start(tmp_path, caplog):
    loader = holdfast.DataLoader(RandomNumberDataset(5), batch_size=2, rank=0, world_size=2)
    with holdfast.Session("job", store=tmp_path, loader=loader) as session:
        session.resume()
    assert "5 samples do not divide evenly among 2 ranks" in caplog.text


def test_one_batch_an_epoch_is_another_one_each_time(left_alone):
    seen = {tuple(indices) for _, _, indices, *_ in left_alone(one_batch_an_epoch, 23)}
    assert len(seen) == EPOCHS * 6


@pytest.mark.parametrize(("at", "to"), [(9, 8), (13, 6), (12, 1), (18, 12)])
def test_an_iterator_of_the_scripts_own_goes_along_where_the_script_says_that_it_can(at, to, tmp_path, left_alone):
    whole = left_alone(keeping_an_iterator, 23)
    assert (
        run(keeping_an_iterator, tmp_path, restorable_in_place=True, goes_back={at: to}) == whole[:at] + whole[to:]
    )


@pytest.mark.parametrize("dies", [2, 6])
def test_a_loop_that_leaves_epochs_early_goes_on_exactly_within_them(dies, tmp_path, caplog):
    def leaving(job):
        job.session.resume()
        for epoch in range(job.loader.epoch, EPOCHS):
            for batch in job.loader:
                if job.session.iteration == 4 * (epoch + 1):
                    break
                job.iterate(batch, epoch)

    GIVEN[leaving] = {"loader": True}
    whole = run(leaving, tmp_path / "whole")
    assert len({tuple(indices) for _, _, indices, *_ in whole}) == 4 * EPOCHS
    assert caplog.text.count("left epoch 0 early") == 1
    cut = tmp_path / "cut"
    assert run(leaving, cut, dies_in=dies) + run(leaving, cut, seed=9) == whole


LINE = torch.utils.data.TensorDataset(torch.linspace(0, 1, 23).unsqueeze(1))


def line_loader(kind, how, sampled):
    sampler = torch.utils.data.DistributedSampler(LINE, num_replicas=1, rank=0) if sampled else None
    return kind(LINE, batch_size=4, sampler=sampler, **how)


def dropping_out(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model, optimizer, batch):
    loss = (model(batch) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def plain_script(loader):
    model, optimizer = dropping_out(0)
    losses = [model(next(iter(loader))[0]).sum().item()]
    for epoch in range(EPOCHS):
        if isinstance(loader.sampler, torch.utils.data.DistributedSampler):
            loader.sampler.set_epoch(epoch)
        losses += [loss_of(model, optimizer, batch) for (batch,) in loader]
    return losses


def batches_by_hand(session, loader):
    session.resume()
    for epoch in range(loader.epoch, EPOCHS):
        if isinstance(loader.sampler, torch.utils.data.DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader


def batches_by_session(session, loader):
    yield from session.batches(loader, epochs=EPOCHS)


def same_script(batches, loader, store, dies_after=None, seed=0):
    model, optimizer = dropping_out(seed)
    losses = [model(next(iter(loader))[0]).sum().item()]
    session = holdfast.Session(
        "job", store=store, every=1, keep=1000, model=model, optimizer=optimizer, loader=loader
    )
    for (batch,) in batches(session, loader):
        losses.append(loss_of(model, optimizer, batch))
        session.step()
        session.wait(300)
        if session.iteration == dies_after:
            break
    session._close("SIGKILL")
    return losses


PERSISTENT = {"num_workers": 2, "persistent_workers": True}


@pytest.mark.parametrize("how", [{}, {"num_workers": 2}, PERSISTENT], ids=str)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_plain_script_has_the_same_losses_with_holdfasts_loader(how, sampled):
    expected = plain_script(line_loader(torch.utils.data.DataLoader, how, sampled))
    assert plain_script(line_loader(holdfast.DataLoader, how, sampled)) == expected


@pytest.mark.parametrize(("how", "sampled"), [({}, True), (PERSISTENT, False)], ids=str)
@pytest.mark.parametrize("batches", [batches_by_hand, batches_by_session])
def test_a_plain_script_has_the_same_losses_with_a_session_wherever_it_is_killed(how, sampled, batches, tmp_path):
    expected = plain_script(line_loader(torch.utils.data.DataLoader, how, sampled))
    losses = []
    for number, dies_after in enumerate((2, 6, None)):
        loader = line_loader(holdfast.DataLoader, how, sampled)
        found = same_script(batches, loader, tmp_path, dies_after, seed=number)
        losses += found[1:] if number else found
    assert losses == expected


def test_a_loader_that_is_in_no_checkpoint_is_named_once_and_with_the_keyword_to_add(tmp_path, caplog):
    job = LoopJob(tmp_path, loader=True)
    job.session.resume()
    next(iter(job.other))
    for batch in job.loader:
        list(job.other)
        job.iterate(batch, 0)
    assert caplog.text.count("a holdfast.DataLoader over RandomNumberDataset that is in no checkpoint") == 1
    assert "Session(loader2=...)" in caplog.text
    job.session._close("SIGKILL")


def noisy(samples):
    return torch.stack([sample + torch.rand(1) for (sample,) in samples])


@pytest.mark.parametrize(
    ("data", "options", "gradients", "stops_early", "count"),
    [
        (LINE, {}, False, False, 0),
        (LINE, {}, False, True, 0),
        (LINE, {}, True, False, 1),
        (LINE, {"shuffle": True}, False, False, 1),
        (LINE, {"sampler": range(8)}, False, False, 1),
        (LINE, {"collate_fn": noisy}, False, False, 1),
        (RandomNumberDataset(8), {}, False, False, 1),
        ([*range(8)], {"num_workers": 1}, False, False, 1),
    ],
)
def test_an_evaluation_that_repeats_itself_needs_no_position(
    data, options, gradients, stops_early, count, tmp_path, caplog
):
    job = LoopJob(tmp_path, loader=True)
    other = holdfast.DataLoader(data, batch_size=4, **options)
    for batch in itertools.islice(job.session.batches(job.loader), 3):
        with torch.set_grad_enabled(gradients):
            list(itertools.islice(other, 1 if stops_early else None))
        job.iterate(batch, 0)
    assert caplog.text.count("that is in no checkpoint") == count
    job.session._close("SIGKILL")


def test_a_loader_that_trains_is_named_though_an_evaluation_of_it_was_not(tmp_path, caplog):
    job = LoopJob(tmp_path)
    job.session.resume()
    loader = line_loader(holdfast.DataLoader, {}, sampled=False)
    with torch.no_grad():
        list(loader)
    job.session.step()
    assert "that is in no checkpoint" not in caplog.text
    for _ in loader:
        job.session.step()
    assert caplog.text.count("a holdfast.DataLoader over TensorDataset that is in no checkpoint") == 1
    job.session._close("SIGKILL")


@pytest.mark.parametrize("loop", [drawn_by_the_session, evaluating])
def test_a_loader_that_the_session_knows_is_not_named(loop, tmp_path, caplog):
    run(loop, tmp_path)
    assert "in no checkpoint: after a resume" not in caplog.text


def test_a_loader_looked_at_before_the_session_draws_from_it_is_not_named(tmp_path, caplog):
    job = LoopJob(tmp_path)
    next(iter(job.loader))
    drawn_by_the_session(job)
    job.session.close()
    assert "in no checkpoint: after a resume" not in caplog.text


def test_a_look_at_the_loader_that_the_session_draws_from_changes_nothing(tmp_path, left_alone):
    job, seen = LoopJob(tmp_path), []
    for batch in job.session.batches(job.loader, epochs=EPOCHS):
        place = job.loader.position
        next(iter(job.loader))
        assert job.loader.position == place
        job.session.step()
        seen.append(batch[0].tolist())
    job.session._close("SIGKILL")
    assert seen == [indices for _, _, indices, *_ in left_alone(drawn_by_the_session, 23)]
