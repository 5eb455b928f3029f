"""Values that operators change while the script trains."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

import holdfast
from holdfast.checkpoint.forking import fork
from holdfast.engine import live_values
from holdfast.engine.coordination import ValueSetting
from holdfast.engine.live_values import INTEGER, LiveValues, _key
from holdfast.protocol.values import ValueChange, ValueReport
from holdfast.protocol.wire import Desired, RestoreOrder
from holdfast.store import RecordedValue, open_store
from tests.support.fake_server_connection import FakeServerConnection
from tests.support.session_fixtures import linked as linked
from tests.support.session_fixtures import store as store

ENOUGH = 200_000
"""Iterations within which every change is applied."""


class ValueJob:
    """A job that uses a value, and notes which one in every iteration."""

    def __init__(self, store, default=1.0, *, job="job", low=0.01, high=10.0, choices=(), **options):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(2, 2)
        self.session = holdfast.Session(job, store=store, every=10_000_000, model=self.model, **options)
        self.session.on_restored(lambda *_: None)
        self._asks = lambda: self.session.value("scale", default, low=low, high=high, choices=choices)
        self.session.resume()
        self.used = {}
        self.version = 0
        self.before_step = lambda: None

    @property
    def server(self):
        return self.session._reporter.link

    def wants(self, *values, lineage=1, name="scale"):
        """Have operators want these values, the newest last."""
        self.version += 1
        changes = tuple(
            ValueChange(id=f"{self.version}-{i}", name=name, value=value, lineage=lineage)
            for i, value in enumerate(values)
        )
        self.server.desired = Desired(version=self.version, values=changes)

    def step(self):
        self.before_step()
        value = self._asks()
        self.used[self.session.iteration + 1] = value
        self.session.step()
        return value

    def until(self, value):
        """Train until a value is in force, and return from which iteration on."""
        for _ in range(ENOUGH):
            if self.step() == value:
                return self.session.iteration
        raise AssertionError(f"{value} is not in force after {ENOUGH} iterations")

    def run(self, iterations):
        for _ in range(iterations):
            self.step()
        return self

    def checkpoint(self):
        """Take one, which may wait some iterations for memory, and return its iteration."""
        self.session.checkpoint()
        self.step()
        while not (taken := self.session.wait(60)):
            self.step()
        return taken[-1].iteration

    def kill(self):
        """End as a killed process does: without a last checkpoint."""
        self.session._close("killed")


@pytest.fixture
def start(linked, store):
    """Start the job once more; all starts end with the test."""
    jobs = []

    def started(*arguments, **options):
        jobs.append(ValueJob(store, *arguments, **options, **linked))
        return jobs[-1]

    yield started
    for job in jobs:
        job.kill()


def values_on(session, *, leads):
    """Return the values of one of several ranks, whose other parts are those of the session."""
    history, ranks = session._saver.history, SimpleNamespace(leads=leads)
    return LiveValues(session._training, history, session._operator, session._reporter, ranks)


def records(store):
    return open_store(store).records("job", RecordedValue)


def test_a_value_is_the_scripts_own_until_an_operator_changes_it(start, store):
    session = start().session
    assert session.value("scale", 1.0) == 1.0
    assert session.value("scale", 2.0) == 2.0


def test_a_change_is_recorded_before_it_is_in_force(start, store):
    job = start()
    job.run(3).wants(0.5)
    first = job.until(0.5)
    (record,) = records(store)
    assert (record.value, record.name, record.iteration) == (0.5, "scale", first - 1)
    applied = job.server.of(ValueReport)[-1]
    assert (applied.change, applied.value, applied.iteration) == ("1-0", 0.5, first - 1)


@pytest.mark.parametrize(
    ("default", "value", "options"),
    [
        (3, 7, {}),
        (False, True, {"low": None, "high": None}),
        ("adam", "sgd", {"low": None, "high": None, "choices": ("adam", "sgd")}),
        (1, 4, {"low": None, "high": None, "choices": (1, 2, 4)}),
    ],
    ids=str,
)
def test_values_are_of_the_type_of_their_default(start, store, default, value, options):
    job = start(default, **options)
    job.run(1).wants(value)
    job.until(value)
    assert type(job.step()) is type(default)


@pytest.mark.parametrize("value", [20.0, "much", True, float("nan")], ids=str)
def test_a_change_that_the_script_does_not_allow_is_refused(start, store, value):
    job = start()
    job.run(1).wants(value, 0.5)
    job.until(0.5)
    refused = [each for each in job.server.of(ValueReport) if each.refused]
    assert [each.change for each in refused] == ["1-0"]
    assert "scale" in refused[0].refused
    assert len(records(store)) == 1


def test_a_change_back_to_the_script_ends_the_one_before(start, store):
    job = start()
    job.run(1).wants(0.5)
    job.until(0.5)
    job.wants(None)
    job.until(1.0)
    assert job.server.of(ValueReport)[-1].is_default


def test_a_value_is_in_the_checkpoint(start, store):
    job = start()
    job.run(1).wants(0.5)
    job.until(0.5)
    job.checkpoint()
    job.kill()
    again = start()
    assert again.step() == 0.5
    again.wants(0.5)  # its id is that of the change that is in force
    again.run(100)
    assert len(records(store)) == 1


def test_a_start_repeats_each_change_at_its_iteration(start, store):
    job = start()
    at = job.checkpoint()
    for value in (0.5, 2.0, 4.0):
        job.wants(value)
        job.until(value)
    job.run(5).kill()
    again = start()
    assert again.session.iteration == at
    again.run(len(job.used) - at)
    assert again.used == {iteration: value for iteration, value in job.used.items() if iteration > at}


def test_a_start_without_a_checkpoint_repeats_the_changes(start, store):
    job = start()
    job.run(1).wants(0.5)
    job.until(0.5)
    job.kill()
    again = start().run(len(job.used))
    assert again.used == job.used


def test_a_change_that_was_recorded_and_not_reached_is_repeated(start, store):
    job = start()
    job.run(1).wants(0.5)
    while not records(store):
        job.step()
    job.kill()
    (record,) = records(store)
    again = start()
    assert again.until(0.5) == record.iteration + 1


def test_a_restore_takes_the_value_of_the_checkpoint_and_discards_what_was_wanted(start, store):
    job = start(restorable_in_place=True)
    at = job.checkpoint()
    job.wants(0.5)
    job.until(0.5)
    job.version += 1
    later = ValueChange(id="later", name="scale", value=4.0, lineage=1)
    order = RestoreOrder(id="o", checkpoint=f"{at:012d}-1", fence=1)
    job.server.desired = Desired(version=job.version, restore=order, values=(later,))
    while job.session.lineage == 1:
        job.step()
    job.run(200)
    assert {value for iteration, value in job.used.items() if iteration > at} == {1.0}
    report = job.server.of(ValueReport)[-1]
    assert (report.value, report.lineage, report.is_default) == (1.0, 2, True)
    job.wants(8.0, lineage=2)
    job.until(8.0)
    job.kill()
    again = start()
    last = records(store)[-1]
    assert again.session.iteration == at
    assert again.until(8.0) == last.iteration + 1


def test_a_change_from_before_a_restore_is_discarded_by_the_start_after_it(start, store):
    job = start(restorable_in_place=True)
    at = job.checkpoint()
    job.session.restore(at)
    job.step()
    job.kill()
    again = start()
    again.wants(0.5, lineage=1)
    again.run(200)
    again.wants(2.0, lineage=2)
    again.until(2.0)
    assert [each.value for each in records(store)] == [2.0]


def test_a_change_that_a_restore_discarded_stays_discarded_after_a_start_at_iteration_0(start, store, monkeypatch):
    monkeypatch.setattr("holdfast.engine.live_values.RATE_ITERATIONS", 1000)  # far ahead of the checkpoint
    job = start()
    job.run(1).wants(0.5)
    while not records(store):
        job.step()
    job.kill()  # without a checkpoint: the next start is another lineage, and repeats this one
    again = start(restorable_in_place=True)
    at = again.checkpoint()
    again.session.restore(at)
    again.step()
    again.kill()
    (record,) = records(store)
    assert at < record.iteration
    last = start()
    assert last.session.lineage == 3
    last.run(record.iteration + 20 - at)
    assert set(last.used.values()) == {1.0}
    assert records(store) == [record]


def test_a_change_that_was_recorded_too_late_and_then_discarded_stays_discarded(start, store, monkeypatch):
    monkeypatch.setattr("holdfast.engine.live_values.RECORD_SECONDS", 0.0)
    job, is_passed, is_written = start(restorable_in_place=True), threading.Event(), threading.Event()
    append, number = type(job.session._saver.history.store).append, []

    def late(self, job, record):
        if isinstance(record, RecordedValue):
            number.append(record)
            is_passed.wait(60)
        append(self, job, record)
        if isinstance(record, RecordedValue):
            is_written.set()

    monkeypatch.setattr(type(job.session._saver.history.store), "append", late)
    job.run(1).wants(0.5)
    while not number or job.session.iteration <= number[0].iteration:
        job.step()
    job.session.restore(job.checkpoint())
    job.step()
    is_passed.set()
    assert is_written.wait(60)
    job.kill()
    monkeypatch.setattr("holdfast.engine.live_values.RECORD_SECONDS", 60.0)
    again = start()
    assert again.session.lineage == 2
    again.run(200)
    assert set(again.used.values()) == {1.0}
    assert len(records(store)) == 1


def test_a_restore_discards_changes_although_the_store_cannot_record_it(start, store, monkeypatch):
    job = start()
    at = job.checkpoint()
    job.wants(0.5)
    while not records(store):
        job.step()
    job.kill()
    (record,) = records(store)

    def unwritable(*_, **__):
        raise OSError("read-only")

    monkeypatch.setattr(type(open_store(store)), "acquire_attempt", unwritable)
    order = RestoreOrder(id="o", checkpoint=f"{at:012d}-1", fence=1)
    monkeypatch.setattr(FakeServerConnection, "first", Desired(version=1, restore=order))
    again = start()
    assert (again.session.attempt, again.session.lineage, again.session.iteration) == (0, 2, at)
    again.run(record.iteration + 20 - at)
    assert set(again.used.values()) == {1.0}


def test_a_fork_repeats_its_own_changes(start, store):
    job = start()
    for value in (0.5, 2.0):
        job.wants(value)
        job.until(value)
    at = job.checkpoint()
    job.kill()
    fork(open_store(store), "job", f"{at:012d}-1", "branch")
    branch = start(job="branch")
    branch.wants(4.0)
    branch.until(4.0)
    branch.kill()
    again = start(job="branch")
    assert again.session.iteration == at
    again.run(len(branch.used))
    assert again.used == branch.used


def test_a_change_after_a_restore_to_a_later_iteration_comes_as_soon_as_before(start, monkeypatch):
    """An undo takes the job forward without training: that way says nothing about how long an iteration takes."""
    now = [0.0]
    monkeypatch.setattr(live_values, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    job = start(restorable_in_place=True)
    job.before_step = lambda: now.__setitem__(0, now[0] + 0.001)
    early = job.run(50).checkpoint()
    late = job.run(5_000).checkpoint()
    for lineage, iteration in enumerate((early, late), start=2):
        job.session.restore(iteration)
        while job.session.lineage != lineage:
            job.step()
    job.wants(2.0, lineage=lineage)
    assert job.until(2.0) - late < 1_000


def test_a_change_waits_until_a_boundary_is_decided_on(start, store):
    """Ranks agree many boundaries ahead, so that the first value of a script comes between them."""
    session = start().session
    values = values_on(session, leads=True)
    values.value("scale", 1.0, 0.01, 10.0, ())
    change = ValueChange(id="1", name="scale", value=0.5, lineage=1)
    session._operator.receive(Desired(version=1, values=(change,)))
    session._operator.follow()
    values.end_iteration(may_change=True)
    values.due(50, may_wait=False)
    values.end_iteration(may_change=True)
    while not records(store):
        values.end_iteration(may_change=True)
    assert [each.iteration > 50 for each in records(store)] == [True]


def test_a_restore_ends_what_was_announced_before_the_script_asked(start):
    values = values_on(start().session, leads=False)
    values.apply(ValueSetting(_key("scale"), INTEGER, 7))
    values.restored()
    assert values.value("scale", 1, 1, 10, ()) == 1


def test_a_value_that_a_new_script_does_not_allow_is_the_scripts_own(start, store, caplog):
    job = start()
    job.run(1).wants(8.0)
    job.until(8.0)
    job.checkpoint()
    job.kill()
    again = start(high=2.0)
    assert again.step() == 1.0
    assert "the script's 1.0 applies" in caplog.text


def test_a_change_waits_while_it_cannot_be_recorded(start, store, monkeypatch, caplog):
    job = start()
    monkeypatch.setattr("holdfast.engine.live_values.RETRY_SECONDS", 0.0)
    append, fails = type(job.session._saver.history.store).append, [True]

    def failing(self, job, record):
        if fails and isinstance(record, RecordedValue):
            raise OSError("no space left")
        return append(self, job, record)

    monkeypatch.setattr(type(job.session._saver.history.store), "append", failing)
    job.run(1).wants(0.5)
    while "no space left" not in caplog.text:
        job.step()
    job.run(100)
    assert set(job.used.values()) == {1.0}
    fails.clear()
    assert records(store) == []
    assert job.until(0.5) == records(store)[0].iteration + 1
    assert caplog.text.count("no space left") == 1


def test_a_change_that_was_durable_too_late_is_recorded_again_until_that_succeeds(start, store, monkeypatch):
    job = start()
    for name in ("RECORD_SECONDS", "RETRY_SECONDS"):
        monkeypatch.setattr(f"holdfast.engine.live_values.{name}", 0.0)
    append, begun, go = type(job.session._saver.history.store).append, [], threading.Event()

    def late(self, job, record):
        if isinstance(record, RecordedValue):
            begun.append(record)
            if len(begun) == 1:
                go.wait(60)
            if len(begun) == 2:
                raise OSError("no space left")
        return append(self, job, record)

    monkeypatch.setattr(type(job.session._saver.history.store), "append", late)
    job.run(1).wants(0.5)
    while not begun or job.session.iteration <= begun[0].iteration:
        job.step()
    go.set()
    first = job.until(0.5)
    assert len(begun) == 3
    assert records(store)[-1].iteration == job.server.of(ValueReport)[-1].iteration == first - 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("scale", 20.0, 0.0, 10.0), "0 to 10"),
        (("scale", 1.0, 10.0, 0.0), "not below"),
        (("1st", 1.0, None, None), "a letter first"),
        (("scale", "text", None, None), "choices"),
        (("scale", True, 0.0, 1.0), "no bounds"),
        (("scale", [1], None, None), "list"),
        (("scale", float("inf"), None, None), "a number"),
    ],
    ids=str,
)
def test_a_definition_that_makes_no_sense_is_refused(store, arguments, reason):
    name, default, low, high = arguments
    with (
        holdfast.Session("job", store=store, model=torch.nn.Linear(1, 1)) as session,
        pytest.raises(ValueError, match=reason),
    ):
        session.value(name, default, low=low, high=high)
