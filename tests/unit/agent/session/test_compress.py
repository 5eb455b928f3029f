"""Sessions that compress their checkpoints."""

import pytest
import torch

from holdfast.checkpoint import restore
from holdfast.protocol.messages import Checkpoint, checkpoint_id
from holdfast.store import open_store
from tests.support.session_fixtures import linked as linked
from tests.support.session_fixtures import store as store
from tests.support.small_session import DurableJob

pytest.importorskip("numpy")


def dense():
    model = torch.nn.Linear(300, 300)
    return model, model.parameters()


class Job(DurableJob):
    def __init__(self, store, **options):
        super().__init__(store, dense, 300, **options)


def is_compressed(place, iteration):
    manifest = restore.manifest(open_store(place), "job", checkpoint_id(iteration, 1))
    return any(file.encoding is not None for file in manifest.files)


def test_a_restart_continues_exactly_from_a_compressed_checkpoint(store, tmp_path, monkeypatch):
    whole = Job(tmp_path / "whole").run(6).close()
    before = Job(store, compress=True).run(2).close()
    plain = Job(store).run(2).close()
    monkeypatch.setenv("HOLDFAST_COMPRESS", "on")
    after = Job(store).run(2).close()
    assert before.losses + plain.losses + after.losses == whole.losses
    assert [is_compressed(store, iteration) for iteration in range(1, 7)] == 2 * [True] + 2 * [False] + 2 * [True]


def test_the_sizes_before_and_after_compression_are_reported(store, linked):
    job = Job(store, compress=True, **linked).run(1).close()
    (found,) = (each for each in job.session._reporter.link.of(Checkpoint) if each.state == "durable")
    assert 0 < found.payload_bytes < 0.95 * found.raw_bytes


def test_compression_needs_a_flag(store):
    with pytest.raises(ValueError, match="compress='a lot'"):
        Job(store, compress="a lot")
