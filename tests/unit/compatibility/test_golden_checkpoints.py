"""Checkpoints that this format has had since its first release are restored to the bit.

A failure means that a checkpoint of an earlier release can no longer be read. Before the first release,
`python -m tools.golden` makes the files anew; after it, the code has to read them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from holdfast.checkpoint import restore
from holdfast.format import manifest as fmt
from holdfast.store import open_store
from tests.support.golden_job import ITERATIONS, JOBS, GoldenJob, described, differences

GOLDEN = Path(__file__).parents[2] / "golden"
KEPT = json.loads((GOLDEN / "checkpoints.json").read_text())
NEWEST = f"{ITERATIONS:012d}-1"
ALONE = f"{ITERATIONS - 1:012d}-1"

each_job = pytest.mark.parametrize("name", JOBS)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A copy of the store."""
    return Path(shutil.copytree(GOLDEN / "store", tmp_path / "store"))


@each_job
def test_every_byte_of_a_golden_checkpoint_verifies(name: str, place: Path) -> None:
    store = open_store(place)
    assert store.checkpoints(name)[-1] == NEWEST
    for checkpoint in store.checkpoints(name):
        assert restore.verify(store, name, checkpoint).format == fmt.FORMAT


@each_job
def test_a_session_resumes_from_a_golden_checkpoint_to_the_bit(name: str, place: Path) -> None:
    """The job of two ranks resumes on one, with an unsharded model."""
    job = GoldenJob(place, name)
    torch.manual_seed(99)
    job.session.resume()
    try:
        assert differences(KEPT[name]["state"], job.state()) == []
        if name != "ranks":  # one rank has the batches of two
            assert job.next_samples() == KEPT[name]["next_samples"]
    finally:
        job.session.close()


def test_each_rank_loads_its_part_of_the_checkpoint_of_two_ranks(place: Path) -> None:
    store = open_store(place)
    for rank in (0, 1):
        loaded = restore.load(store, "ranks", NEWEST, rank=rank)
        assert loaded.rank == rank
        for name, kept in KEPT["ranks"]["state"]["model"].items():
            if "running" not in name:  # each rank has its own statistics
                assert described(loaded.tensors[f"model.{name}"]) == kept


def test_a_checkpoint_whose_files_others_share_is_restored_without_them(place: Path) -> None:
    manifest = restore.manifest(open_store(place), "linked", NEWEST)
    (shared,) = (file for file in manifest.files if file.written_by is not None)
    assert (place / "linked" / ALONE / shared.name).exists()
    shutil.rmtree(place / "linked" / ALONE)
    loaded = restore.load(open_store(place), "linked", NEWEST)
    assert described(loaded.tensors["model.base.weight"]) == KEPT["linked"]["state"]["model"]["base.weight"]


@pytest.mark.parametrize("file", ["rank-0.safetensors", "manifest.json"])
def test_parity_of_a_golden_checkpoint_repairs_it(file: str, place: Path) -> None:
    path = place / "parity" / NEWEST / file
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 2, len(data) // 2 + 100):
        data[at] ^= 0xFF
    path.write_bytes(data)
    loaded = restore.load(open_store(place), "parity", NEWEST)
    assert loaded.repaired
    for name, kept in KEPT["parity"]["state"]["model"].items():
        assert described(loaded.tensors[f"model.{name}"]) == kept


def test_a_plain_checkpoint_opens_without_holdfast(place: Path) -> None:
    with safe_open(place / "plain" / NEWEST / "rank-0.safetensors", "pt") as file:
        for name, kept in KEPT["plain"]["state"]["model"].items():
            assert described(file.get_tensor(f"model.{name}")) == kept


def test_the_golden_checkpoints_have_what_their_names_say(place: Path) -> None:
    manifests = {name: restore.manifest(open_store(place), name, NEWEST) for name in JOBS}
    assert {name: manifest.world_size for name, manifest in manifests.items()} == {
        **dict.fromkeys(JOBS, 1),
        "ranks": 2,
    }
    assert all(file.encoding is not None for file in manifests["compressed"].files)
    assert all(file.parity is not None for file in manifests["parity"].files)
    assert any(tensor.global_shape != tensor.shape for tensor in manifests["ranks"].tensors)
