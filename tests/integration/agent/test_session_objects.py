"""Training whose checkpoints go to a bucket: killed, resumed, fenced, without a server that answers."""

import logging
import os

import pytest

from holdfast.store import Lineage, bucket, http_place, open_store
from tests.support import object_servers
from tests.support.object_servers import Rclone, running
from tests.support.tiny_job import Trainer, killed_in_process


@pytest.fixture
def url(rclone, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return object_servers.use(monkeypatch, rclone.address)


def test_a_killed_job_goes_on_from_its_bucket_as_if_it_had_never_stopped(url, tmp_path):
    whole = Trainer(tmp_path / "whole").run(until=16).crash().losses
    assert killed_in_process(url, 13) == whole[:13]
    store = open_store(url)
    assert int(store.checkpoints("job")[-1][:12]) == 12
    resumed = Trainer(url, seed=5).run(until=16)
    assert resumed.losses == whole[12:]
    assert resumed.session.attempt == store.latest_attempt("job") == 2
    resumed.session.close()
    assert int(store.checkpoints("job")[-1][:12]) == 16
    assert store.leftovers("job") == []


def test_an_attempt_that_another_machine_has_replaced_commits_no_more_and_trains_on(url, caplog):
    replaced = Trainer(url).run(until=4)
    newer = open_store(url)
    newer.acquire_attempt("job", "elsewhere")
    before = newer.checkpoints("job")
    replaced.run(until=9)
    assert replaced.session.iteration == 9
    assert newer.checkpoints("job") == before
    assert caplog.text.count("another process has started this job (attempt 2, process ") == 1
    replaced.crash()


def test_a_restore_in_place_takes_its_bytes_from_the_bucket(url):
    def restore_once(trainer):
        if len(trainer.losses) == 7:
            trainer.session.restore(3)

    trainer = Trainer(url).run(until=9, after=restore_once)
    assert trainer.losses[8:12] == trainer.losses[3:7]
    assert [lineage.parent for lineage in open_store(url).records("job", Lineage)] == [None, "000000000003-1"]
    trainer.crash()


def test_training_goes_on_while_the_bucket_is_away_and_uses_it_when_it_is_back(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(http_place, "REQUESTS_RETRIED_SECONDS", 0.2)
    monkeypatch.setattr(bucket, "PATIENCE_SECONDS", 0.2)
    with running(Rclone(tmp_path)) as server:
        url = object_servers.use(monkeypatch, server.address)
        trainer = Trainer(url).run(until=4)
        server.kill()
        trainer.run(until=8)
        assert "refuses connections: check that it runs, and its port" in caplog.text
        server.start()
        trainer.run(until=12)
        assert "checkpoints are durable again, from 000000000009-1" in caplog.text
        assert [int(c[:12]) for c in open_store(url).checkpoints("job")] == [3, 9, 12]
        trainer.crash()


def test_reports_that_no_server_takes_wait_on_this_machine(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(url, server="http://127.0.0.1:9").run(until=4).crash()
    kept = list((tmp_path / "state" / "holdfast").rglob("*.batch"))
    assert kept
    assert {path.parent.parent.name for path in kept} == {"job"}
    assert not any(name.startswith("s3:") for name in os.listdir(tmp_path))
    assert trainer.session.iteration == 4
