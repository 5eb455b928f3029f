"""Compressed checkpoints in a bucket."""

import pytest
import torch

from holdfast.checkpoint import restore
from holdfast.checkpoint.scrub import scrub
from holdfast.errors import DamagedCheckpoint
from holdfast.format.parity_file import ParityCode
from holdfast.store import open_store
from tests.support import object_servers
from tests.support.persist_job import JOB, bytes_of, running

pytest.importorskip("numpy")


@pytest.fixture
def store(moto, monkeypatch):
    store = open_store(object_servers.use(monkeypatch, moto.address))
    store.acquire_attempt(JOB, "first")
    return store


@pytest.mark.parametrize("parity", [None, ParityCode(10, 2)], ids=["plain", "parity"])
def test_a_compressed_checkpoint_is_uploaded_read_in_parts_and_repaired(store, monkeypatch, parity):
    uploaded, upload = {}, store.bucket.upload

    def recorded(name, parts, pace):
        uploaded[name] = sum(len(part) for part in parts)
        return upload(name, parts, pace)

    monkeypatch.setattr(store.bucket, "upload", recorded)
    tensors = {"w": torch.randn(600, 1000), "b": torch.randn(10), "m": torch.randn(600, 1000)}
    with running(store, tensors=tensors) as job:
        run = job.checkpoint(compress=True, parity=parity)
    (name,) = (name for name in uploaded if name.endswith("/rank-0.planes"))
    assert uploaded[name] == run.result.stored_bytes < 0.9 * run.result.raw_bytes
    found = restore.load(store, JOB, run.id).tensors
    assert bytes_of(found) == bytes_of(tensors)
    (part,) = restore.load(store, JOB, run.id, only={"m"}).tensors.values()
    assert torch.equal(part, tensors["m"])
    restore.verify(store, JOB, run.id)
    assert scrub(store, JOB, run.id).state == "sound"
    with store.open_file(JOB, run.id, "rank-0.planes") as file:
        data = bytearray(file.size_bytes)
        file.read_into(0, memoryview(data))
    data[len(data) // 2] ^= 1
    upload(name, [bytes(data)], None)
    if parity is None:
        with pytest.raises(DamagedCheckpoint, match=r"rank-0\.planes"):
            restore.load(store, JOB, run.id)
    else:
        assert bytes_of(restore.load(store, JOB, run.id).tensors) == bytes_of(tensors)
        assert scrub(store, JOB, run.id, repair=True).state == "repaired"
        assert scrub(store, JOB, run.id).state == "sound"
