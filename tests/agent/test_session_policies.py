"""What a session tells its policy: losses, how long the job will be, what somebody stated of it."""

import pytest
import torch
from torch.utils.data import TensorDataset

import holdfast

SAMPLES, BATCH, EPOCHS = 20, 4, 3


def begun(store, **options):
    """(model, optimizer, session) of a job whose policy looks at the loss."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"policy": "convergence", "checkpoints": 3} | options
    return model, optimizer, holdfast.Session("job", store=store, model=model, optimizer=optimizer, **options)


def train(model, optimizer, session, *, iterations, loader=None, accumulation=1):
    if loader is None:
        loader = holdfast.DataLoader(TensorDataset(torch.ones(SAMPLES, 2)), batch_size=BATCH)
    for number, (batch,) in enumerate(session.batches(loader, epochs=EPOCHS), start=1):
        (model(batch).square().mean() / accumulation).backward()
        if number % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
            session.step(loss=float(number))
        if session.iteration == iterations:
            return


def test_losses_reach_a_policy_that_looks_at_them_without_a_server(tmp_path):
    model, optimizer, session = begun(tmp_path)
    with session:
        train(model, optimizer, session, iterations=7)
        session._meter.send_samples(wait=True)
        assert session._controller.life.progress._losses.values == [1, 2, 3, 4, 5, 6, 7]


def test_nobody_reads_losses_for_a_policy_that_does_not(tmp_path):
    model, optimizer, session = begun(tmp_path, policy="goodput")
    with session:
        train(model, optimizer, session, iterations=7)
        session._meter.send_samples(wait=True)
        assert session._controller.life.progress._losses.values == []


@pytest.mark.parametrize(("accumulation", "total"), [(1, EPOCHS * SAMPLES // BATCH), (2, 7)])
def test_the_length_of_the_job_follows_from_its_data(tmp_path, accumulation, total):
    model, optimizer, session = begun(tmp_path)
    with session:
        train(model, optimizer, session, iterations=4, accumulation=accumulation)
        assert session._training.total_iterations == total


def test_a_resumed_job_comes_to_the_same_length(tmp_path):
    model, optimizer, session = begun(tmp_path)
    with session:
        train(model, optimizer, session, iterations=7)
    model, optimizer, session = begun(tmp_path)
    with session:
        train(model, optimizer, session, iterations=9)
        assert session.iteration == 9
        assert session._training.total_iterations == EPOCHS * SAMPLES // BATCH


def test_a_loader_without_a_length_leaves_it_open(tmp_path):
    model, optimizer, session = begun(tmp_path)
    with session:
        train(model, optimizer, session, iterations=2, loader=([torch.ones(BATCH, 2)] for _ in range(9)))
        assert session._training.total_iterations is None


def test_what_the_script_states_goes_before(tmp_path):
    model, optimizer, session = begun(tmp_path, iterations=500, mtbf="2h")
    with session:
        train(model, optimizer, session, iterations=2)
        assert session._controller.life.total_iterations == 500
        assert session._controller.settings.mtbf_seconds == 7200


@pytest.mark.parametrize(
    ("setting", "value"),
    [("MTBF", "0"), ("MTBF", "soon"), ("CHECKPOINTS", "0"), ("ITERATIONS", "-3"), ("POLICY", "often")],
)
def test_a_setting_that_makes_no_sense_is_named(tmp_path, monkeypatch, setting, value):
    monkeypatch.setenv(f"HOLDFAST_{setting}", value)
    with pytest.raises(ValueError, match=setting.lower()):
        begun(tmp_path, policy=None, checkpoints=None)


class Unmeasured(list):
    """Batches that raise when they are counted."""

    def __len__(self):
        raise NotImplementedError


def test_a_loader_that_cannot_be_counted_leaves_the_interval_as_it_is(tmp_path, caplog):
    model, optimizer, session = begun(tmp_path, policy="fixed", every=10)
    with session:
        for _ in range(30):
            loader = Unmeasured([[torch.ones(BATCH, 2)]])
            train(model, optimizer, session, iterations=session.iteration + 1, loader=loader)
            assert session._checkpoints.wait_settled(300)
        started = session._controller.life.checkpoints
    assert started <= 3
    assert "was not recorded" not in caplog.text


def test_the_log_says_when_checkpoints_are_taken_and_why(tmp_path, caplog):
    caplog.set_level("DEBUG", "holdfast")
    model, optimizer, session = begun(tmp_path, policy="fixed", every=5)
    with session:
        train(model, optimizer, session, iterations=2)
        session.every(7)
        session.every(20)
    told = [(record.levelname, record.message) for record in caplog.records if "interval: every" in record.message]
    assert told == [
        ("INFO", "job: checkpoint interval: every 5 iterations (policy fixed)"),
        ("DEBUG", "job: checkpoint interval: every 7 iterations (policy fixed)"),
        ("INFO", "job: checkpoint interval: every 20 iterations (policy fixed)"),
    ]
    assert "job: checkpoint interval: set to every 5 iterations; cost not known yet" in caplog.messages


def first_of(store, *, trained_seconds):
    """The iterations whose checkpoint began within the first two, where memory was ready after the first."""
    model, optimizer, session = begun(store, policy="checkfreq", checkpoints=None, backend="thread")
    begun_at = []
    with session:
        session.resume()
        session._controller.trained_seconds = trained_seconds
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            session.step()
            if session._checkpoints.under_way or session._checkpoints.head:
                begun_at.append(session.iteration)
            assert session._checkpoints.wait_settled(60)
    return begun_at


def test_the_first_checkpoint_begins_as_soon_as_its_memory_is_ready(tmp_path):
    assert first_of(tmp_path, trained_seconds=0.0) == [2]


def test_after_a_minute_of_training_the_first_checkpoint_waits_for_nothing(tmp_path):
    assert first_of(tmp_path, trained_seconds=60.0)[0] == 1
