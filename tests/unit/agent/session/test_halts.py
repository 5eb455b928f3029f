"""Pausing, continuing and ending training on request, in one process."""

import threading
import time

import pytest

from holdfast.engine import halting
from holdfast.engine.operator import Operator
from holdfast.protocol import wire
from holdfast.protocol.orders import HaltReport, TrainingOrder
from holdfast.protocol.wire import Desired, RestoreOrder
from holdfast.store import Ending, Lineage, LocalStore, open_store
from holdfast.store.records import HaltNote, newest_halt
from holdfast.system import supervisor_channel
from holdfast.system.preemption import EXIT_SIGTERM
from tests.support.eventually import eventually
from tests.support.fake_server_connection import FakeServerConnection
from tests.support.session_fixtures import linked as linked
from tests.support.session_fixtures import store as store
from tests.support.session_fixtures import uninterrupted as uninterrupted
from tests.support.tiny_job import Trainer
from tests.unit.agent.session.test_session import committed

PAUSE = TrainingOrder(id="p", action="pause", who="ana")
CONTINUE = TrainingOrder(id="c", action="continue", who="ben")
END = TrainingOrder(id="e", action="end", who="ana")


@pytest.fixture(autouse=True)
def quick_rounds(monkeypatch):
    monkeypatch.setattr(halting, "ROUND_SECONDS", 0.005)
    monkeypatch.setattr(halting, "STORE_ROUND_SECONDS", 0.0)


def ordered_at(iteration, order, version=2):
    def operator(trainer):
        if trainer.session.iteration == iteration:
            trainer.link.desired = Desired(version=version, training=order)

    return operator


def states(trainer):
    return [(each.state, each.by, each.iteration) for each in trainer.link.of(HaltReport)]


class InThread:
    """A job that trains on another thread, so that the test can act while it is paused."""

    def __init__(self, trainer, **options):
        self.trainer, self.error = trainer, None
        self._thread = threading.Thread(target=self._run, kwargs=options, daemon=True)
        self._thread.start()

    def _run(self, **options):
        try:
            self.trainer.run(**options)
        except BaseException as error:
            self.error = error

    def is_paused(self, times=1):
        return sum(state == "paused" for state, *_ in states(self.trainer)) == times

    def order(self, order, version=3, **desired):
        self.trainer.link.desired = Desired(version=version, training=order, **desired)

    def join(self):
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self.trainer


def paused(store, linked, at=7, **options):
    job = InThread(Trainer(store, **linked, **options), after=ordered_at(at, PAUSE))
    eventually(job.is_paused)
    return job


def test_a_paused_job_waits_until_it_is_continued_and_trains_the_same(store, linked, uninterrupted):
    job = paused(store, linked)
    assert committed(store)[-1] == 8
    job.order(CONTINUE)
    trainer = job.join()
    assert states(trainer) == [("paused", "ana", 8), ("continued", "ben", 8)]
    assert dict(trainer.losses) == uninterrupted
    trainer.session.close()


def test_an_end_leaves_a_checkpoint_and_a_status(store, linked, uninterrupted):
    trainer = Trainer(store, **linked)
    with pytest.raises(SystemExit) as ended:
        trainer.run(after=ordered_at(7, END))
    trainer.session.close()
    assert ended.value.code == supervisor_channel.EXIT_ENDED
    assert states(trainer) == [("ended", "ana", 8)]
    assert committed(store)[-1] == 8
    assert [each.reason for each in open_store(store).records("job", Ending)] == ["ended"]
    FakeServerConnection.first = Desired(version=2, training=END)
    again = Trainer(store, **linked).run()  # the order was carried out: it does not end this start as well
    assert dict(again.losses) == {each: loss for each, loss in uninterrupted.items() if each > 8}
    again.session.close()


def test_a_paused_job_can_be_ended(store, linked):
    job = paused(store, linked)
    job.order(END)
    trainer = job.join()
    assert job.error.code == supervisor_channel.EXIT_ENDED
    assert [state for state, *_ in states(trainer)] == ["paused", "ended"]
    trainer.session.close()


def test_sigterm_ends_a_paused_job_and_the_next_start_is_paused_until_it_is_continued(
    store, linked, uninterrupted
):
    job = paused(store, linked)
    job.trainer.session._preemption.is_requested = True
    job.join().session.close()
    assert job.error.code == EXIT_SIGTERM
    assert newest_halt(open_store(store), "job").state == "paused"
    FakeServerConnection.first = Desired(version=2, training=PAUSE)
    again = InThread(Trainer(store, **linked))
    eventually(again.is_paused)
    assert again.trainer.losses == []
    again.order(CONTINUE)
    assert dict(again.join().losses) == {each: loss for each, loss in uninterrupted.items() if each > 8}
    assert committed(store).count(8) == 1
    again.trainer.session.close()


def test_a_start_that_is_paused_and_then_ended_trains_no_iteration(store, linked):
    job = paused(store, linked)
    job.trainer.session._preemption.is_requested = True
    job.join().session.close()
    FakeServerConnection.first = Desired(version=2, training=PAUSE)
    again = InThread(Trainer(store, **linked))
    eventually(again.is_paused)
    again.order(END)
    again.join().session.close()
    assert again.error.code == supervisor_channel.EXIT_ENDED
    assert again.trainer.losses == []


def test_without_a_server_a_start_stays_paused_and_is_continued_in_the_store(store, linked, caplog):
    job = paused(store, linked)
    note = newest_halt(open_store(store), "job")
    open_store(store).append(
        "job",
        HaltNote(attempt=1, state="continued", by="a command", order=note.order, iteration=8, at=time.time()),
    )
    trainer = job.join()
    assert states(trainer)[-1] == ("continued", "a command", 8)
    assert f"`holdfast continue job --store {store}`" in caplog.text
    trainer.crash()
    open_store(store).append(
        "job", HaltNote(attempt=1, state="paused", by="ana", order=note.order, iteration=35, at=time.time())
    )
    again = InThread(Trainer(store))
    eventually(lambda: "training is paused by ana after iteration 35" in caplog.text)
    open_store(store).append(
        "job",
        HaltNote(attempt=2, state="continued", by="a command", order=note.order, iteration=35, at=time.time()),
    )
    again.join().session.close()


def test_a_pause_that_cannot_be_noted_is_not_ended_by_the_note_of_an_earlier_one(store, linked, monkeypatch):
    append, due, rounds = LocalStore.append, Operator.training_order, []

    def failing(self, job, record):
        if isinstance(record, HaltNote):
            raise OSError("no space left")
        return append(self, job, record)

    def paused_twice(trainer):
        ordered_at(7, PAUSE)(trainer)
        if trainer.session.iteration == 12:
            monkeypatch.setattr(LocalStore, "append", failing)
            trainer.link.desired = Desired(version=4, training=TrainingOrder(id="p2", action="pause", who="eve"))

    job = InThread(Trainer(store, **linked), after=paused_twice)
    eventually(job.is_paused)
    job.order(CONTINUE)
    eventually(lambda: job.is_paused(2))
    monkeypatch.setattr(Operator, "training_order", lambda self: (rounds.append(1), due(self))[1])
    eventually(lambda: len(rounds) > 3)
    job.order(TrainingOrder(id="c2", action="continue", who="ian"), 5)
    assert [(state, by) for state, by, _ in states(job.join())][-2:] == [("paused", "eve"), ("continued", "ian")]
    job.trainer.session.close()


def test_a_checkpoint_is_restored_while_training_is_paused(store, linked, uninterrupted):
    job = paused(store, linked)
    job.order(PAUSE, restore=RestoreOrder(id="o", checkpoint="000000000006-1", fence=1))
    eventually(lambda: any(each.state == "restored" for each in job.trainer.link.of(wire.OrderStateChange)))
    assert len(job.trainer.losses) == 8
    job.order(CONTINUE, 4)
    trainer = job.join()
    trainer.session.close()
    assert [each.iteration for each in open_store(store).records("job", Lineage)] == [0, 6]
    assert trainer.losses[8:] == [(each, loss) for each, loss in uninterrupted.items() if each > 6]
    told = [each.message for each in trainer.link.of(wire.Notice) if each.message.startswith("training continues")]
    assert told == ["training continues after iteration 6, as requested by ben"]


def test_an_end_without_a_durable_checkpoint_is_refused(store, linked, monkeypatch):
    trainer = Trainer(store, **linked)
    failing = trainer.session._saver.history.store

    def begin(*_, **__):
        raise OSError("no space")

    def operator(trainer):
        if trainer.session.iteration == 7:
            monkeypatch.setattr(failing, "begin", begin, raising=False)
            trainer.link.desired = Desired(version=2, training=END)
        if trainer.session.iteration == 9:
            monkeypatch.undo()

    trainer.run(after=operator, until=12)
    assert states(trainer) == [("failed", "ana", 8)]
    trainer.session.close()


def test_a_pause_counts_neither_as_an_iteration_nor_as_a_stall(store, linked):
    job = paused(store, linked)
    started = time.perf_counter()
    while time.perf_counter() - started < 0.5:  # longer than any iteration of this job
        job.trainer.link.desired = Desired(version=3, training=PAUSE)
    job.order(CONTINUE, 4)
    trainer = job.join()
    assert max(each.seconds for each in trainer.session._meter.recent) < 0.5
    assert not [each for each in trainer.link.of(wire.Stall) if each.seconds >= 0.5]
    trainer.session.close()
