"""What a session passes to its policy, when its checkpoints begin, and how it logs the interval."""

import math

import pytest
import torch
from torch.utils.data import TensorDataset

import holdfast
from benchmarks.pacing.paced import PacedJob
from holdfast.pacing import Controller
from holdfast.telemetry.reporter import Reporter, TrainingPosition
from tests.support.clock import FakeClock, train_by
from tests.support.pacing_profiles import CheckfreqSettings

SAMPLES, BATCH, EPOCHS = 20, 4, 3


def begun(store, **options):
    """(model, optimizer, session)."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, holdfast.Session("job", store=store, model=model, optimizer=optimizer, **options)


def train(model, optimizer, session, *, iterations, loader=None):
    if loader is None:
        loader = holdfast.DataLoader(TensorDataset(torch.ones(SAMPLES, 2)), batch_size=BATCH)
    for (batch,) in session.batches(loader, epochs=EPOCHS):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.step()
        if session.iteration == iterations:
            return


def test_a_stated_time_between_failures_reaches_the_policy(tmp_path):
    model, optimizer, session = begun(tmp_path, policy="goodput", mtbf="2h")
    with session:
        train(model, optimizer, session, iterations=2)
        assert session._controller.settings.mtbf_seconds == 7200


@pytest.mark.parametrize(
    ("setting", "value"),
    [("MTBF", "0"), ("MTBF", "soon"), ("POLICY", "often")],
)
def test_a_setting_that_makes_no_sense_is_named(tmp_path, monkeypatch, setting, value):
    monkeypatch.setenv(f"HOLDFAST_{setting}", value)
    with pytest.raises(ValueError, match=setting.lower()):
        begun(tmp_path)


def test_the_log_says_when_checkpoints_are_taken_and_why(tmp_path, caplog):
    caplog.set_level("DEBUG", "holdfast")
    model, optimizer, session = begun(tmp_path, policy="fixed", every=5)
    with session:
        train(model, optimizer, session, iterations=2)
        session.every(6)
        session.every(20)
    logged = [
        (record.levelname, record.message) for record in caplog.records if "interval: every" in record.message
    ]
    assert logged == [
        ("INFO", "job: checkpoint interval: every 5 iterations (policy fixed)"),
        ("DEBUG", "job: checkpoint interval: every 6 iterations (policy fixed)"),
        ("INFO", "job: checkpoint interval: every 20 iterations (policy fixed)"),
    ]
    assert "job: checkpoint interval: set to every 5 iterations; cost not known yet" in caplog.messages


def test_the_log_shows_a_time_interval_as_a_time(tmp_path, caplog):
    caplog.set_level("INFO", "holdfast")
    model, optimizer, session = begun(tmp_path, every="10min")
    with session:
        train(model, optimizer, session, iterations=2)
        session.every("2h30min")
    logged = [record.message for record in caplog.records if "interval: every" in record.message]
    expected = "10 min", "2 h 30 min"
    assert logged == [f"job: checkpoint interval: every {time} (policy fixed)" for time in expected]


@pytest.mark.parametrize("given", ["argument", "environment", "call"])
def test_checkpoints_are_taken_at_the_first_boundary_after_the_time(tmp_path, monkeypatch, given):
    monkeypatch.setenv("HOLDFAST_EVERY", "10min" if given == "environment" else "")
    _, _, session = begun(tmp_path, every="10min" if given == "argument" else None)
    clock, taken = FakeClock(), []
    with session:
        if given == "call":
            session.every("10min")
        session.resume()
        train_by(clock, session, monkeypatch.setattr)
        for _ in range(20):
            clock.now += 130
            session.step()
            session.wait(300)
            if session._saver.history.head != (taken[-1:] or [None])[0]:
                taken.append(session._saver.history.head)
    assert [int(each[:12]) for each in taken] == [5, 10, 15, 20]


def test_a_requested_checkpoint_restarts_the_time(tmp_path, monkeypatch):
    _, _, session = begun(tmp_path, every="10min")
    clock, taken = FakeClock(), set()
    with session:
        session.resume()
        train_by(clock, session, monkeypatch.setattr)
        for iteration in range(1, 15):
            clock.now += 100
            if iteration == 4:
                session.checkpoint()
            session.step()
            session.wait(300)
            taken.add(session._saver.history.head)
        assert [int(each[:12]) for each in sorted(taken - {None})] == [4, 10]


def test_the_log_says_once_what_an_overhead_over_the_budget_waits_for(caplog):
    caplog.set_level("INFO", "holdfast")
    simulated = PacedJob(Controller(CheckfreqSettings(budget=0.035)), stall_seconds=1.0).run(400)
    reporter = Reporter("job", TrainingPosition())
    reporter.report_interval(simulated.controller, changed=True)
    simulated.stall_seconds *= 1.5
    while not simulated.controller.plan.pending:
        simulated.step()
    reporter.report_interval(simulated.controller, changed=True)
    reporter.report_interval(simulated.controller, changed=True)
    [_, message] = caplog.messages
    assert message.startswith(
        "job: checkpoint interval: every 29 iterations (policy checkfreq, predicted overhead"
    )
    assert "over the budget: the interval grows if it still is after 2 more checkpoints)" in message


def first_of(store, *, trained_seconds):
    """The iterations whose checkpoint began within the first two, where memory was ready after the first."""
    model, optimizer, session = begun(store, policy="checkfreq")
    begun_at = []
    with session:
        session.resume()
        session._controller.trained_seconds = trained_seconds
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            session.step()
            if session._saver.under_way or session._saver.history.head:
                begun_at.append(session.iteration)
            session.wait(300)
    return begun_at


def test_the_first_checkpoint_begins_as_soon_as_its_memory_is_ready(tmp_path):
    assert first_of(tmp_path, trained_seconds=0.0) == [2]


def test_after_a_minute_of_training_the_first_checkpoint_waits_for_nothing(tmp_path):
    assert first_of(tmp_path, trained_seconds=60.0)[0] == 1


def test_coci_follows_the_losses_that_a_script_logs_over_a_restart(tmp_path):
    def run(first, last):
        model = torch.nn.Linear(2, 1)
        settings = {
            "policy": "coci",
            "total": 400,
            "write_budget": "1kB/h",
            "budget": 1.0,
            "max_unsaved_work": "10h",
        }
        with holdfast.Session("job", store=tmp_path, model=model, **settings) as session:
            session.resume()
            for iteration in range(first, last + 1):
                if iteration == last - 50:
                    session.wait(60)
                    session.checkpoint()
                session.step(loss=torch.tensor(1 + 3 * math.exp(-iteration / 80)))
            return session._controller.job_history.history.progress

    before = run(1, 200)
    assert before.curve.decay == pytest.approx(1 / 80, rel=0.1)
    progress = run(201, 300)
    assert progress.curve.decay == pytest.approx(1 / 80, rel=0.1)
    assert 200 < progress.iteration <= 300
    assert progress.total_iterations == 400
    assert progress.checkpoints > before.checkpoints >= 1


@pytest.mark.parametrize("policy", ["goodput", "checkfreq"])
def test_other_policies_read_no_losses(tmp_path, policy):
    with holdfast.Session("job", store=tmp_path, policy=policy, model=torch.nn.Linear(2, 1)) as session:
        session.resume()
        session.step(loss=torch.tensor(1.0))
        assert session._controller.job_history.history.progress.why_no_curve == "no loss is logged"
