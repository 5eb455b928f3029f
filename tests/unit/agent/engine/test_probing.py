"""An order to probe the data: carried out between two iterations, and of no consequence for training."""

import types

import pytest
import torch
from torch.utils.data import IterableDataset

import holdfast
from holdfast.data import loading_probe
from holdfast.data.loading_probe import LoadingTimes
from holdfast.engine import probing
from holdfast.engine.probing import PATIENCE_SECONDS, Prober
from holdfast.errors import NoProbe
from holdfast.protocol import wire
from holdfast.protocol.wire import Desired
from holdfast.telemetry.iteration_metrics import IterationClock, IterationMetrics
from holdfast.telemetry.reporter import Reporter, TrainingPosition
from tests.support.clock import FakeClock
from tests.support.fake_server_connection import FakeServerConnection
from tests.support.session_fixtures import linked as linked
from tests.support.session_fixtures import store as store
from tests.support.session_fixtures import uninterrupted as uninterrupted
from tests.support.tiny_job import Trainer

FOUND = LoadingTimes(fetch_seconds=0.03, prep_seconds=0.01, batches=50, workers=0)


def click(at=10, **changes):
    def operator(trainer):
        if trainer.session.iteration == at:
            trainer.link.desired = Desired(version=1, probe_request=1, **changes)

    return operator


def notices(trainer):
    return [(e.level, e.message, e.iteration) for e in trainer.link.of(wire.Notice) if e.code == "data"]


def test_a_click_has_the_data_probed_once_and_training_goes_on_as_if_it_had_not(store, linked, uninterrupted):
    trainer = Trainer(store, **linked).run(after=click()).crash()
    [(level, message, iteration)] = notices(trainer)
    assert level == "info"
    assert message.startswith("a batch takes ")
    assert "An iteration computes for " in message
    assert 11 <= iteration <= 13  # at the first boundary without a checkpoint under way
    assert dict(trainer.losses) == uninterrupted
    assert [(e.version, e.iteration) for e in trainer.link.of(wire.DesiredStateApplied)] == [(1, 11)]


def test_a_job_that_was_probed_resumes_exactly(store, linked, uninterrupted):
    Trainer(store, **linked).run(until=20, after=click(at=13)).crash()
    trainer = Trainer(store, seed=5).run()
    assert trainer.losses == [(i, uninterrupted[i]) for i in range(19, 37)]
    trainer.crash()


def test_a_click_from_before_a_start_is_not_for_it(store, linked):
    FakeServerConnection.first = Desired(version=3, probe_request=2)
    trainer = Trainer(store, **linked)
    trainer.link.desired = FakeServerConnection.first
    trainer.run(until=3).crash()
    assert notices(trainer) == []


def test_another_order_is_no_second_click(store, linked):
    def operator(trainer):
        click(at=4)(trainer)
        if trainer.session.iteration == 8:
            trainer.link.desired = Desired(version=2, probe_request=1, every=5)

    trainer = Trainer(store, **linked).run(until=12, after=operator).crash()
    assert len(notices(trainer)) == 1


@pytest.mark.parametrize("error", [NoProbe("of the weather"), ZeroDivisionError("by nought")])
def test_whatever_fails_is_told_and_training_goes_on(store, linked, uninterrupted, monkeypatch, error):
    def fail(_):
        raise error

    monkeypatch.setattr(loading_probe, "probe", fail)
    trainer = Trainer(store, **linked).run(after=click()).crash()
    [(level, message, _)] = notices(trainer)
    assert (level, dict(trainer.losses)) == ("warning", uninterrupted)
    assert message.startswith("data loading cannot be measured: ")
    assert str(error) in message


def test_ctrl_c_ends_a_probe_and_the_loop(store, linked, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(loading_probe, "probe", interrupt)
    trainer = Trainer(store, **linked)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(after=click())
    trainer.crash()
    assert notices(trainer) == []


def test_a_probe_at_the_boundary_of_a_restore_reads_on_from_where_that_led(store, linked, monkeypatch):
    places = []
    monkeypatch.setattr(loading_probe, "probe", lambda loader: places.append(loader.position) or FOUND)
    order = wire.RestoreOrder(id="o", checkpoint="000000000003-1", fence=1)
    trainer = Trainer(store, **linked).run(until=12, after=click(at=7, restore=order)).crash()
    assert len(notices(trainer)) == len(places) == 1
    assert places[0].taken == 8 * notices(trainer)[0][2]
    assert 4 <= notices(trainer)[0][2] <= 6


class Script:
    """A prober of a script that draws from `loader`, whose clock a test moves."""

    def __init__(self, monkeypatch, loader=None, batches=1.0, takes=0.0):
        self.clock, self.told = FakeClock(100.0), []
        monkeypatch.setattr(probing, "time", types.SimpleNamespace(perf_counter=self.clock, monotonic=self.clock))
        monkeypatch.setattr(loading_probe, "probe", lambda _: self.clock.wait(takes) or FOUND)
        self.training = types.SimpleNamespace(restore_count=0, loader=loader or [1], batches_an_iteration=batches)
        controller = types.SimpleNamespace(plan=None, observe=lambda _: None, follows_losses=False)
        reporter = Reporter("job", TrainingPosition())
        monkeypatch.setattr(reporter, "report_interval", lambda *_, **__: None)
        monkeypatch.setattr(reporter, "notice", lambda *said: self.told.append(said))
        self.meter = IterationMetrics(controller, reporter)
        self.meter.clock = IterationClock(self.clock)
        self.meter.clock.begin()
        self._reporter = reporter

    def request(self):
        """Return a prober for one request of an operator."""
        return Prober(self.training, self.meter, self._reporter)

    def iterate(self, seconds, **stalls):
        self.clock.wait(seconds)
        for kind, waited in stalls.items():
            self.meter.clock.stall(kind, waited)
        self.meter.end_iteration({})


def test_the_time_of_a_probe_is_no_iterations_and_no_stall(monkeypatch):
    script = Script(monkeypatch, takes=7.0)
    script.meter.clock.stall("snapshot_wait", 0.001)  # of a checkpoint begun at the same boundary
    prober = script.request()
    prober.at_boundary(busy=False)
    script.iterate(0.05, data_fetch=0.04)
    [measured] = script.meter.recent
    assert measured.seconds == pytest.approx(0.05)
    assert measured.checkpoint_stall_seconds == 0.001
    assert measured.data_seconds == 0.04


def test_what_an_iteration_computes_and_waits_for_is_told_of_the_last_ones(monkeypatch):
    script = Script(monkeypatch)
    for _ in range(70):
        script.iterate(0.1, data_fetch=0.04, snapshot_wait=0.01)
    prober = script.request()
    prober.at_boundary(busy=False)
    [(level, code, message)] = script.told
    assert (level, code) == ("info", "data")
    assert "An iteration computes for 50 ms and should wait 40 ms for data" in message
    assert "the last 64 waited 40 ms each" in message


def test_a_loop_that_draws_its_own_batches_is_told_what_loading_takes(monkeypatch):
    script = Script(monkeypatch, batches=None)
    script.iterate(0.1)
    prober = script.request()
    prober.at_boundary(busy=False)
    assert script.told[0][2].endswith("(over 50 batches)")


def test_it_waits_for_checkpoints_under_way_but_not_for_ever(monkeypatch):
    script = Script(monkeypatch)
    prober = script.request()
    assert not prober.at_boundary(busy=True)
    script.clock.wait(PATIENCE_SECONDS - 1)
    assert not prober.at_boundary(busy=True)
    assert script.told == []
    script.clock.wait(2)
    assert prober.at_boundary(busy=True)
    [(_, _, message)] = script.told
    assert "A checkpoint was being written" in message


def stream_of(**_):
    class ZeroStream(IterableDataset):
        def __iter__(self):
            return iter(torch.zeros(40, 4))

    return holdfast.DataLoader(ZeroStream())


@pytest.mark.parametrize(
    ("loader_of", "why"),
    [
        (stream_of, "is iterable"),
        (lambda: torch.utils.data.DataLoader(torch.zeros(40, 4)), r"holdfast.DataLoader, which takes the same"),
        (lambda: [torch.zeros(4)] * 40, "list cannot be read ahead"),
    ],
    ids=["iterable", "torch", "list"],
)
def test_a_loader_that_cannot_be_probed_says_why(store, linked, loader_of, why):
    trainer = Trainer(store, **linked)
    for number, _ in enumerate(trainer.session.batches(loader_of())):
        trainer.session.step()
        trainer.settle()
        click(at=2)(trainer)
        if number == 8:
            break
    trainer.crash()
    [(level, message, _)] = notices(trainer)
    assert level == "warning"
    assert why in message


def test_a_script_whose_loader_is_not_known_is_told_how_to_name_it(store, linked):
    trainer = Trainer(store, **linked)
    for _ in range(8):
        trainer.session.step()
        trainer.settle()
        click(at=2)(trainer)
    trainer.crash()
    assert "give the loader to the session by keyword" in notices(trainer)[0][1]


def test_a_loader_given_by_keyword_is_probed(store, linked):
    loader = holdfast.DataLoader(torch.zeros(40, 4))
    trainer = Trainer(store, loader=loader, **linked)
    for _ in loader:
        trainer.session.step()
        trainer.settle()
        click(at=2)(trainer)
    trainer.crash()
    assert notices(trainer)[0][1].startswith("a batch takes ")
