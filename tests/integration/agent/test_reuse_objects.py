"""Unchanged tensors in a bucket: the server copies the objects, and each checkpoint stays complete."""

import pytest
import torch

from holdfast.checkpoint import restore
from holdfast.checkpoint.scrub import scrub
from holdfast.format.parity_file import ParityCode
from holdfast.store import open_store
from tests.support import object_servers
from tests.support.persist_job import JOB, bytes_of, running
from tests.unit.agent.save.test_commit import CommitJob


@pytest.fixture
def store(moto, monkeypatch):
    store = open_store(object_servers.use(monkeypatch, moto.address))
    store.acquire_attempt(JOB, "first")
    return store


def checkpoints(store, count, **changes):
    """(ids, bytes of the last) of checkpoints of an adapter on a frozen base."""
    tensors = {"base": torch.randn(600, 1000), "adapter": torch.zeros(10, 100)}
    with running(store, tensors=tensors) as job:
        job.frozen = {"base"}
        runs = []
        for _ in range(count):
            tensors["adapter"].add_(1)
            runs.append(job.checkpoint(before=runs[-1] if runs else None, **changes))
        assert [run.result.reason for run in runs] == [None] * count
        return runs, bytes_of(tensors)


def loaded(store, checkpoint):
    found = restore.load(store, JOB, checkpoint).tensors
    return bytes_of({name: tensor.clone() for name, tensor in found.items()})


@pytest.mark.parametrize("parity", [None, ParityCode(10, 2)], ids=["plain", "parity"])
def test_only_the_first_checkpoint_uploads_the_base_and_the_others_outlive_it(store, monkeypatch, parity):
    uploaded = []
    upload = store.bucket.upload

    def recorded(name, parts, pace):
        uploaded.append((name, sum(len(part) for part in parts)))
        return upload(name, parts, pace)

    monkeypatch.setattr(store.bucket, "upload", recorded)
    runs, last = checkpoints(store, 3, parity=parity)
    assert sum(size > 100_000 for _, size in uploaded) == (1 if parity is None else 2)
    assert [run.result.reused_bytes > 0 for run in runs] == [False, True, True]
    for run in runs[:2]:
        store.delete(JOB, run.id, 1)
    restore.verify(store, JOB, runs[2].id)
    assert scrub(store, JOB, runs[2].id).state == "sound"
    assert loaded(store, runs[2].id) == last


def test_a_server_that_copies_no_objects_gets_the_tensors_again(store, monkeypatch):
    monkeypatch.setattr(store.bucket, "_copied", lambda source, target: False)
    runs, last = checkpoints(store, 2)
    assert runs[1].result.reused_bytes == 0
    assert "cannot copy" in runs[1].draft.not_linked
    assert loaded(store, runs[1].id) == last


def test_the_size_rule_of_retention_counts_each_copy(store):
    runs, _ = checkpoints(store, 3)
    sizes, _ = restore.RetentionFacts(store, JOB).read(store.checkpoints(JOB))
    assert all(sizes[run.id] > 2.4e6 for run in runs)


def test_several_ranks_copy_the_structure_that_does_not_change(moto, monkeypatch, tmp_path):
    store = open_store(object_servers.use(monkeypatch, moto.address))
    job, uploaded = CommitJob(tmp_path, 3, store), []
    upload = store.bucket.upload
    monkeypatch.setattr(
        store.bucket, "upload", lambda name, *rest: (uploaded.append(name), upload(name, *rest))[1]
    )
    at = {rank: {"parity": ParityCode(2, 1), "base": True} for rank in range(3)}
    for iteration in (1, 2):
        assert job.checkpoint(iteration, at=at, number=iteration) == [None] * 3
    assert sum("structure-" in name for name in uploaded) == 3 * 3  # a file of each rank and its copies, once
    store.delete(JOB, job.store.checkpoints(JOB)[0], 1)
    (second,) = store.checkpoints(JOB)
    assert scrub(store, JOB, second).state == "sound"
    for rank in range(3):
        assert restore.load(store, JOB, second, rank=rank).state["place"] == {"rank": rank, "iteration": 2}
