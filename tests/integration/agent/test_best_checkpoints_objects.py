"""The retention rule `best` with checkpoints in a bucket."""

from holdfast.store import open_store
from tests.support import object_servers
from tests.unit.agent.checkpoint.test_best_checkpoints import ACCURACIES, begun, iterations, train


def test_the_best_checkpoints_in_a_bucket_stay(moto, monkeypatch):
    url = object_servers.use(monkeypatch, moto.address)
    metrics = {at: {"accuracy": value} for at, value in ACCURACIES.items()}
    for until in (10, 20):  # also after a restart
        session = begun(url, retention="last 1, best 2 by max accuracy")
        train(session, until, metrics)
        session._close("killed")
    assert iterations(open_store(url))[-3:] == [9, 15, 20]
