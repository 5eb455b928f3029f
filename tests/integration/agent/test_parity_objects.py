"""Parity in a bucket: damaged objects are repaired, and fences hold."""

import pytest
import torch

from holdfast.checkpoint import restore
from holdfast.checkpoint.scrub import scrub
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.parity_file import ParityCode
from holdfast.store import open_store
from tests.support import handmade_checkpoints, object_servers
from tests.support.edited_manifests import MANIFEST_COPIES

JOB, FIRST, FILE, PARITY = "job", "000000000001-1", "rank-0.safetensors", "rank-0.parity"
TENSOR = torch.randn(100_000, generator=torch.Generator().manual_seed(1))


class Bucket:
    """A store with one checkpoint with parity in a bucket, and its objects as they were put."""

    def __init__(self, address, monkeypatch):
        url = object_servers.use(monkeypatch, address)
        handmade_checkpoints.commit(url, {"w": TENSOR}, parity=ParityCode(4, 2))
        self.store = open_store(url)
        (folder,) = (each for each in self.store.survey(JOB).folders if each.checkpoint == FIRST)
        self.folder = f"{JOB}/{folder.path}"
        self.sound = {name: self.read(name) for name in folder.files}

    def read(self, name):
        with self.store.open_file(JOB, FIRST, name) as file:
            data = bytearray(file.size_bytes)
            file.read_into(0, memoryview(data))
        return bytes(data)

    def put(self, name, data):
        self.store.bucket.upload(f"{self.folder}/{name}", [data], None)

    def delete(self, name):
        self.store.bucket.delete([f"{self.folder}/{name}"])


@pytest.fixture
def bucket(moto, monkeypatch):
    return Bucket(moto.address, monkeypatch)


@pytest.mark.parametrize("name", [FILE, PARITY, fmt.MANIFEST, *MANIFEST_COPIES])
@pytest.mark.parametrize("how", ["changed", "cut"])
def test_a_damaged_object_is_repaired_to_the_bit(bucket, name, how):
    data = bucket.sound[name]
    bucket.put(name, data[:-1] if how == "cut" else data[: len(data) // 2] + b"?" + data[len(data) // 2 + 1 :])
    assert torch.equal(restore.load(bucket.store, JOB, FIRST).tensors["w"], TENSOR)
    assert scrub(bucket.store, JOB, FIRST).state == "repairable"
    found = scrub(bucket.store, JOB, FIRST, repair=True)
    assert [(each.file, each.state) for each in found.files] == [(name, "repaired")]
    assert {each: bucket.read(each) for each in bucket.sound} == bucket.sound
    assert scrub(bucket.store, JOB, FIRST).state == "sound"


@pytest.mark.parametrize("name", [PARITY, *MANIFEST_COPIES])
def test_a_missing_object_of_the_parity_is_put_again(bucket, name):
    bucket.delete(name)
    assert scrub(bucket.store, JOB, FIRST, repair=True).state == "repaired"
    assert bucket.read(name) == bucket.sound[name]


def test_a_missing_payload_is_refused_by_name(bucket):
    bucket.delete(FILE)
    found = scrub(bucket.store, JOB, FIRST, repair=True)
    assert [(each.file, each.state) for each in found.files] == [(FILE, "damaged")]
    with pytest.raises(DamagedCheckpoint, match=FILE):
        restore.load(bucket.store, JOB, FIRST)


def test_a_repair_is_fenced_by_a_newer_attempt(bucket):
    bucket.put(FILE, damaged := bucket.sound[FILE][:-1] + b"?")
    begun = []

    def pace(size_bytes):
        if not begun:
            begun.append(bucket.store.acquire_attempt(JOB, "newer"))

    found = scrub(bucket.store, JOB, FIRST, repair=True, pace=pace)
    assert found.files[0].reason == "not repaired: attempt 2 of job has started; attempt 1 can no longer commit"
    assert bucket.read(FILE) == damaged
    assert scrub(bucket.store, JOB, FIRST, repair=True).state == "repaired"
