"""Incremental checkpoints in a bucket: the server copies the base, and each checkpoint stays complete."""

import pytest
import torch

pytest.importorskip("numpy")

from holdfast.checkpoint import restore
from holdfast.checkpoint.scrub import scrub
from holdfast.format.parity_file import ParityCode
from holdfast.incremental.planner import MOST_COPIED_REGIONS, IncrementalPlanner
from holdfast.store import open_store
from tests.support import object_servers
from tests.support.persist_job import JOB, bytes_of, running


@pytest.fixture
def store(moto, monkeypatch):
    store = open_store(object_servers.use(monkeypatch, moto.address))
    store.acquire_attempt(JOB, "first")
    return store


def checkpoints(store, count, **changes):
    """Return runs of checkpoints of a table in which three rows change, and the bytes of each."""
    tensors = {"table": torch.randn(20_000, 32), "step": torch.zeros(1)}
    states = []
    planner = IncrementalPlanner(True, MOST_COPIED_REGIONS)
    with running(store, tensors=tensors, planner=planner) as job:
        runs = []
        for number in range(count):
            tensors["table"][[number, 7 * number, 100 + number]] += 1
            tensors["step"].add_(1)
            runs.append(job.checkpoint(before=runs[-1] if runs else None, **changes))
            states.append(bytes_of(tensors))
        assert [run.result.reason for run in runs] == [None] * count
    return runs, states


def loaded(store, checkpoint):
    found = restore.load(store, JOB, checkpoint).tensors
    return bytes_of({name: tensor.clone() for name, tensor in found.items()})


@pytest.mark.parametrize("parity", [None, ParityCode(10, 2)], ids=["plain", "parity"])
def test_only_the_first_checkpoint_uploads_the_table_and_the_others_outlive_it(store, monkeypatch, parity):
    uploaded, copied = [], []
    upload, copy = store.bucket.upload, store.bucket.copy

    def recorded(name, parts, pace):
        uploaded.append((name, sum(len(part) for part in parts)))
        return upload(name, parts, pace)

    def recorded_copy(source, target, size_bytes, **options):
        copied.append(target)
        return copy(source, target, size_bytes, **options)

    monkeypatch.setattr(store.bucket, "upload", recorded)
    monkeypatch.setattr(store.bucket, "copy", recorded_copy)
    runs, states = checkpoints(store, 6, parity=parity)
    assert sum(size > 100_000 for _, size in uploaded) == (1 if parity is None else 2)
    by_checkpoint = [sum(f"/{run.id}" in name and ".parity" not in name for name in copied) for run in runs]
    assert by_checkpoint[0] == 0
    assert max(by_checkpoint) <= 2, "the base, and one region file"
    for run in runs[:4]:
        store.delete(JOB, run.id, 1)
    for run, state in zip(runs[4:], states[4:], strict=True):
        restore.verify(store, JOB, run.id)
        assert scrub(store, JOB, run.id).state == "sound"
        assert loaded(store, run.id) == state


def test_a_server_that_copies_no_objects_gets_the_tensors_again(store, monkeypatch):
    monkeypatch.setattr(store.bucket, "_copied", lambda source, target: False)
    runs, states = checkpoints(store, 3)
    assert [run.result.reused_bytes for run in runs] == [0, 0, 0]
    for run, state in zip(runs, states, strict=True):
        assert loaded(store, run.id) == state
