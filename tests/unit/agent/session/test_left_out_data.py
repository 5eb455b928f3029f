"""Restores that leave out data: the losses are those of a loop over an order without it."""

import shutil

import pytest
import torch
from torch.utils.data import DataLoader

import holdfast
from holdfast.checkpoint import restore
from holdfast.data.cursor import BatchesAnIteration
from holdfast.errors import IncompatibleCheckpoint
from holdfast.protocol import wire
from holdfast.protocol.orders import skip_of
from holdfast.protocol.wire import DataSkip, Desired, LeftOutData, RestoreOrder
from holdfast.store import Lineage, open_store
from tests.support.fake_server_connection import FakeServerConnection
from tests.support.left_out_workloads import (
    BATCH_SIZE,
    SAMPLES,
    LeavingOutJob,
    NoisyPoints,
    loader_of,
    losses_without,
    restore_once,
)
from tests.support.session_fixtures import linked as linked
from tests.support.session_fixtures import store as store

EPOCH = SAMPLES // BATCH_SIZE
"""Batches of an epoch."""


def lineages(store):
    return open_store(store).records("job", Lineage)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("at", "batches"),
    [(5, 3), (5, EPOCH - 5), (5, EPOCH), (10, 2), (10, EPOCH + 2), (EPOCH, 1), (EPOCH, EPOCH)],
    ids=str,
)
def test_losses_are_those_of_an_order_without_the_data(store, at, batches, workers):
    job = LeavingOutJob(store, every=at, workers=workers)
    job.run(restore_once(at, at + 2, skip_batches=batches))
    assert job.losses == losses_without(range(at, at + batches), workers=workers)


def test_data_is_left_out_up_to_an_iteration_of_several_batches(store):
    job = LeavingOutJob(store, every=2)
    restored = restore_once(2, 4, skip_to=3)
    job.run(restored, accumulate=3)
    (left_out,) = lineages(store)[-1].left_out
    assert (left_out.iteration, left_out.batches) == (2, 3)


def test_iterations_that_take_other_batches_than_those_before_count_as_they_are(store):
    LeavingOutJob(store, every=2).run(until=2, accumulate=3).kill()
    job = LeavingOutJob(store, every=2)
    job.run(restore_once(2, 4, skip_to=4))
    (left_out,) = lineages(store)[-1].left_out
    assert (left_out.iteration, left_out.batches) == (2, 2)


@pytest.mark.parametrize(("accumulates", "batches"), [((1, 2), 6), ((1, 1), 3), ((2, 1), 3)], ids=str)
def test_a_start_counts_the_batches_of_the_iterations_that_it_leaves_out(
    linked, store, accumulates, batches, monkeypatch
):
    for until, accumulate in zip((5, 10), accumulates, strict=True):
        LeavingOutJob(store).run(until=until, accumulate=accumulate).kill()
    order = RestoreOrder(id="o", checkpoint="000000000005-1", fence=1, skip=DataSkip(to_iteration=8))
    monkeypatch.setattr(FakeServerConnection, "first", Desired(version=5, restore=order))
    LeavingOutJob(store, **linked).run(until=6, lineage=2).kill()
    assert lineages(store)[-1].left_out == (LeftOutData(iteration=5, batches=batches),)


def test_iterations_of_differing_batches_have_no_place_to_skip_to(store, caplog):
    job, drawn = LeavingOutJob(store, every=3), []
    for batch in job.session.batches(job.loader, epochs=1):
        drawn.append(batch)
        if len(drawn) in (1, 2, 3, 5, 6):  # iterations of 1, 1, 1, 2 and 1 batches
            job.update(batch)
            job.session.wait()
            if len(drawn) == 6:
                job.session.restore(3, skip_to=5)
            job.session.step()
    job.session.close()
    assert "not all iterations after it have taken the same number of batches" in caplog.text
    assert job.session.lineage == 1


@pytest.mark.parametrize("stops", [(5,), (6,), (7, 8), (11, 13, 20)])
def test_a_job_that_is_killed_leaves_out_the_same_data(store, stops):
    left_out, losses = range(5, 9), {}
    for until in (*stops, None):
        job = LeavingOutJob(store).run(restore_once(5, 8, skip_batches=4), until=until, lineage=2)
        if until is not None:
            job.kill()
        losses |= job.losses
    expected = losses_without(left_out)
    assert {each: losses[each] for each in expected} == expected


def test_a_job_that_is_killed_before_its_next_checkpoint_leaves_the_data_out_again(store):
    LeavingOutJob(store).run(restore_once(5, 8, skip_batches=4), until=5, lineage=2).kill()
    assert [each.parent for each in lineages(store)][-1] == "000000000005-1"
    again = LeavingOutJob(store).run()
    expected = losses_without(range(5, 9))
    assert again.losses == {each: loss for each, loss in expected.items() if each > 5}


def test_a_job_that_starts_on_another_number_of_ranks_trains_on_the_data(store, caplog):
    LeavingOutJob(store).run(restore_once(5, 8, skip_batches=4), until=5, lineage=2).kill()
    record = store / "job" / "lineages" / "000002.json"
    record.write_text(record.read_text().replace('"world_size":1', '"world_size":2'))
    again = LeavingOutJob(store).run(until=8, lineage=3).kill()
    assert "they were counted on 2 ranks, and this job has 1" in caplog.text
    expected = losses_without(())
    assert again.losses == {each: expected[each] for each in (6, 7, 8)}
    assert [len(each.left_out) for each in lineages(store)] == [0, 1, 0]


def test_a_damaged_checkpoint_after_the_one_before_leaves_the_data_out_where_it_was(store):
    LeavingOutJob(store).run(restore_once(10, 12, skip_batches=4), until=11, lineage=2).kill()
    for each in open_store(store).checkpoints("job"):
        if each >= "000000000010":
            shutil.rmtree(store / "job" / each)
    job = LeavingOutJob(store).run()
    expected = losses_without(range(10, 14))
    assert job.losses == {each: loss for each, loss in expected.items() if each > 5}
    marked = {
        each: restore.manifest(open_store(store), "job", each) for each in open_store(store).checkpoints("job")
    }
    assert {each.iteration for each in marked.values() if not each.left_out} >= {5}
    assert all(each.left_out for each in marked.values() if each.iteration > 10)


def test_an_undo_returns_to_the_state_and_the_data_before(store):
    def before_step(job, iteration):
        if iteration == 8 and job.session.lineage == 1:
            job.session.restore(5, skip_batches=4)
        elif iteration == 9 and job.session.lineage == 2:
            job.session.restore(8)

    job = LeavingOutJob(store).run(before_step)
    expected = losses_without(())
    assert {each: job.losses[each] for each in range(9, 37)} == {each: expected[each] for each in range(9, 37)}
    assert [bool(each.left_out) for each in lineages(store)] == [False, True, False]


def test_what_was_left_out_stands_in_lineage_manifest_and_report(linked, store):
    job = LeavingOutJob(store, server="http://server")
    job.run(restore_once(5, 8, skip_batches=4))
    left_out = (LeftOutData(iteration=5, batches=4),)
    assert [each.left_out for each in lineages(store)] == [(), left_out]
    opened = open_store(store)
    marks = {each: restore.manifest(opened, "job", each).left_out for each in opened.checkpoints("job")}
    assert {each[13:]: mark for each, mark in marks.items()} == {"1": (), "2": left_out}
    assert [e.left_out for e in job.session._reporter.link.of(wire.LineageStarted)][-1] == left_out


def test_data_left_out_twice_adds_up(store):
    def before_step(job, iteration):
        if iteration == 8 and job.session.lineage == 1:
            job.session.restore(5, skip_batches=4)
        elif iteration == 12 and job.session.lineage == 2:
            job.session.restore(10, skip_batches=2)

    job = LeavingOutJob(store).run(before_step)
    assert job.losses == losses_without((*range(5, 9), *range(14, 16)))


def test_a_loader_that_is_counted_reads_and_discards(store):
    def plain():
        return DataLoader(Still(), batch_size=BATCH_SIZE, shuffle=True)

    job = LeavingOutJob(store, loader=plain()).run(restore_once(5, 8, skip_batches=3))
    torch.manual_seed(1)
    oracle = LeavingOutJob(store.with_name("oracle"), loader=plain())
    losses, seen = [], 0
    for _ in range(3):
        for batch in oracle.loader:
            seen += 1
            if not 5 < seen <= 8:
                losses.append(oracle.update(batch))
    oracle.kill()
    assert list(job.losses.values()) == losses


class Still(NoisyPoints):
    def __getitem__(self, index):
        return self.points[index]


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from Still()


class WithState(Endless):
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    at = 0


@pytest.mark.parametrize(
    ("loader", "batches", "reason"),
    [
        (lambda: DataLoader(Still(), batch_size=BATCH_SIZE), EPOCH, "only 7 batches of this epoch are left"),
        (lambda: [torch.ones(1, 4)] * 20, 18, "only 15 batches of this epoch are left"),
        (lambda: holdfast.DataLoader(Endless(), batch_size=BATCH_SIZE), 2, "the end of the epoch is unknown"),
        (lambda: holdfast.DataLoader(WithState(), batch_size=BATCH_SIZE), 2, "cannot be advanced"),
        (lambda: loader_of(shuffle=False, sampler=order_without_length()), 2, "has no len()"),
    ],
    ids=["counted", "list", "stream", "stateful stream", "sampler without a length"],
)
def test_what_cannot_be_left_out_is_refused_before_anything_changes(store, loader, batches, reason, caplog):
    job = LeavingOutJob(store, loader=loader())
    job.run(restore_once(5, 8, skip_batches=batches))
    assert reason in caplog.text
    assert [each.number for each in lineages(store)] == [1]
    assert list(job.losses) == list(range(1, len(job.losses) + 1))


@pytest.mark.parametrize(
    ("loader", "batches", "reason"),
    [
        (lambda: DataLoader(Endless(), batch_size=BATCH_SIZE), 2, "has no len()"),
        (lambda: DataLoader(Still(), batch_size=BATCH_SIZE), EPOCH, "only 7 batches of this epoch are left"),
    ],
    ids=["without a length", "too few left"],
)
def test_a_start_whose_loader_cannot_leave_out_trains_on_the_data(
    linked, store, loader, batches, reason, monkeypatch, caplog
):
    LeavingOutJob(store, loader=loader()).run(until=8).kill()
    order = RestoreOrder(id="o", checkpoint="000000000005-1", fence=1, skip=DataSkip(batches=batches))
    monkeypatch.setattr(FakeServerConnection, "first", Desired(version=5, restore=order))
    job = LeavingOutJob(store, loader=loader(), **linked).run(until=7, lineage=3)
    assert list(job.losses) == [6, 7]
    assert f"{batches} batches after iteration 5 cannot be left out, so training uses them" in caplog.text
    assert reason in caplog.text
    job.session.checkpoint()
    job.run(until=10, lineage=3).kill()
    assert [(each.number, len(each.left_out)) for each in lineages(store)] == [(1, 0), (2, 1), (3, 0)]
    found = [each for each in open_store(store).checkpoints("job") if each.endswith("-3")]
    assert found
    assert all(not restore.manifest(open_store(store), "job", each).left_out for each in found)
    monkeypatch.setattr(FakeServerConnection, "first", None)
    again = LeavingOutJob(store, loader=loader(), **linked).run(until=12, lineage=3)
    assert again.session.lineage == 3
    again.kill()


def order_without_length():
    class Order:
        def __iter__(self):
            yield from range(SAMPLES)

    return Order()


def test_one_of_several_loaders_is_named_or_refused(store, caplog):
    job, other = LeavingOutJob(store), loader_of(seed=4)

    def run(**how):
        others = iter(job.session.batches(other, epochs=2))
        for batch in job.session.batches(job.loader, epochs=2):
            job.update(torch.cat([batch, next(others)]))
            job.session.wait()
            if job.session.iteration == 7 and how:
                job.session.restore(5, **how)
                how = {}
            job.session.step()
            if job.session.iteration == 8:
                break

    run(skip_batches=2)
    job.session.close()
    assert "it uses 2 loaders: give the number of one" in caplog.text


@pytest.mark.parametrize(
    ("batches", "to", "loader"), [(1, 9, None), (0, 5, None), (-1, 0, None), (0, 0, 0), (1, 0, -1)], ids=str
)
def test_a_request_that_makes_no_sense_is_refused(batches, to, loader):
    with pytest.raises(ValueError, match="leave out"):
        skip_of(batches, to, 5, loader)


def test_a_request_at_the_start_leaves_out_data(store):
    LeavingOutJob(store).run(until=8).kill()
    job = LeavingOutJob(store)
    loaded = job.session._training.load(open_store(store), "job", "000000000005-1")
    left_out = job.session._training.left_out(loaded, DataSkip(batches=4), (), BatchesAnIteration())
    assert left_out == (LeftOutData(iteration=5, batches=4),)
    with pytest.raises(IncompatibleCheckpoint, match="numbered from 0"):
        job.session._training.left_out(loaded, DataSkip(batches=4, loader=1), (), BatchesAnIteration())
    job.kill()
