"""A checkpoint of three ranks with parity, byte planes and linked files: the root covers every byte of it."""

import random
from pathlib import Path

import pytest

from holdfast.checkpoint import restore
from holdfast.checkpoint.scrub import scrub
from holdfast.errors import DamagedCheckpoint
from holdfast.format.parity_file import ParityCode
from holdfast.protocol.ids import checkpoint_id
from tests.unit.agent.save.test_commit import JOB, CommitJob

WORLD_SIZE = 3
NEWEST = checkpoint_id(2, 1)
NUMBERS = 4096
OFFSETS = 12
"""Bytes that are flipped in each file, besides the first and the last."""


def taken(root: Path, monkeypatch: pytest.MonkeyPatch, parity: ParityCode | None) -> CommitJob:
    monkeypatch.setattr("holdfast.save.reuse.MIN_SHARED_BYTES", 1)
    job = CommitJob(root, WORLD_SIZE)
    kind = {"base": True, "compress": True, "parity": parity, "numbers": NUMBERS}
    for iteration in (1, 2):
        at = dict.fromkeys(range(WORLD_SIZE), kind)
        assert job.checkpoint(iteration, number=iteration, at=at) == [None] * WORLD_SIZE
    return job


def loaded(job: CommitJob) -> list[dict[str, bytes]]:
    """What each rank would resume from."""
    found = [restore.load(job.store, JOB, NEWEST, rank=rank) for rank in range(WORLD_SIZE)]
    return [{name: tensor.numpy().tobytes() for name, tensor in each.tensors.items()} for each in found]


def is_redundant(name: str) -> bool:
    return name.endswith(".parity") or "-copy-" in name


@pytest.mark.parametrize("parity", [None, ParityCode(2, 1)], ids=["plain", "parity"])
def test_no_byte_of_a_checkpoint_can_change_unnoticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parity: ParityCode | None
) -> None:
    job = taken(tmp_path, monkeypatch, parity)
    expected, folder = loaded(job), job.store.path(JOB, NEWEST)
    assert scrub(job.store, JOB, NEWEST).state == "sound"
    paths = sorted(folder.iterdir())
    files = restore.manifest(job.store, JOB, NEWEST).files
    assert all(file.encoding for file in files)
    assert {file.written_by for file in files} == {None, checkpoint_id(1, 1)}
    kept = {"manifest.json", "rank-0.index.json", "rank-1.index.json", "rank-2.index.json"}
    assert kept <= {path.name for path in paths}
    for path in paths:
        sound, rng = path.read_bytes(), random.Random(path.name)
        for at in {0, len(sound) - 1, *(rng.randrange(len(sound)) for _ in range(OFFSETS))}:
            path.write_bytes(sound[:at] + bytes([sound[at] ^ 1 << rng.randrange(8)]) + sound[at + 1 :])
            where = f"byte {at} of {path.name}"
            found = scrub(job.store, JOB, NEWEST)
            assert found.state == ("damaged" if parity is None else "repairable"), where
            if not is_redundant(path.name):
                with pytest.raises(DamagedCheckpoint):
                    restore.verify(job.store, JOB, NEWEST)
            try:
                assert loaded(job) == expected, where
                assert parity is not None or path.name.startswith("rank-"), where
            except DamagedCheckpoint:
                assert parity is None, where
        path.write_bytes(sound)
    assert scrub(job.store, JOB, NEWEST).state == "sound"
