"""Metrics of the last stage of a pipeline reach the iterations of rank 0."""

import pytest

from holdfast.telemetry import metrics_relay
from holdfast.telemetry.iteration_metrics import Iteration
from holdfast.telemetry.metrics_relay import PATIENCE_SECONDS, SEND_SECONDS, MetricsReceiver, MetricsSender


class FakeStore(dict):
    """As the store of torch.distributed."""

    def add(self, key, number):
        self[key] = self.get(key, 0) + number
        return self[key]

    def set(self, key, value):
        self[key] = value

    def get(self, key, default=None):
        return self[key] if default is None else super().get(key, default)

    def check(self, keys):
        return all(key in self for key in keys)

    def delete_key(self, key):
        del self[key]


class Job:
    """Rank 0 and the rank with the last stage."""

    def __init__(self):
        self.now = 0.0
        self.sender = MetricsSender("key", lambda: self.now)
        self.receiver = MetricsReceiver("key", lambda: self.now)

    def train(self, iteration, lineage=1, **metrics):
        measured = Iteration(iteration, lineage, self.now, 1.0, None)
        self.sender.relay([(measured, metrics)], wait=False)
        return shown(self.receiver.relay([(measured, {})], wait=False))


def shown(measured):
    return [(each.iteration, metrics) for each, metrics in measured]


@pytest.fixture
def store(monkeypatch):
    store = FakeStore()
    monkeypatch.setattr(metrics_relay, "default_store", lambda: store)
    return store


def test_rank_0_reports_the_metrics_of_the_last_stage(store):
    job = Job()
    assert job.train(1, loss=2.0) == [(1, {"loss": 2.0})]
    assert job.train(2, loss=1.5) == []  # sent with the next one
    job.now += SEND_SECONDS
    assert job.train(3, loss=1.0) == [(2, {"loss": 1.5}), (3, {"loss": 1.0})]
    assert [key for key in store if key != "key"] == []


def test_iterations_without_metrics_are_not_kept_for_long(store):
    job = Job()
    assert job.train(1) == []
    job.now += PATIENCE_SECONDS
    assert job.train(2) == [(1, {})]
    job.now += SEND_SECONDS
    assert job.train(3, loss=1.0) == [(2, {}), (3, {"loss": 1.0})]
    assert shown(job.receiver.relay([], wait=True)) == []


def test_the_end_of_training_sends_and_reports_all(store):
    job = Job()
    job.train(1, loss=2.0)
    job.train(2, loss=1.0)
    job.sender.relay([], wait=True)
    assert shown(job.receiver.relay([], wait=True)) == [(2, {"loss": 1.0})]


def test_a_checkpoint_has_the_newest_metrics_up_to_its_iteration(store):
    job = Job()
    for iteration, loss in [(1, 3.0), (2, 2.0), (3, 1.0)]:
        job.now += SEND_SECONDS
        job.train(iteration, loss=loss, **({"score": 0.5} if iteration == 1 else {}))
    newest = job.receiver.newest(1, 2)
    assert {name: (each.value, each.iteration) for name, each in newest.items()} == {
        "loss": (2.0, 2),
        "score": (0.5, 1),
    }
    assert job.receiver.newest(2, 2) == {}


@pytest.mark.parametrize("error", [RuntimeError("the store is lost"), ValueError("the script has closed it")])
def test_a_store_that_is_lost_ends_no_training(monkeypatch, error):
    def lost():
        raise error

    monkeypatch.setattr(metrics_relay, "default_store", lost)
    job = Job()
    assert job.train(1, loss=2.0) == []
    assert shown(job.receiver.relay([], wait=True)) == [(1, {})]
