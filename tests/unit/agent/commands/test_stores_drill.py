"""`holdfast store drill`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from holdfast.format.parity_file import ParityCode
from holdfast.protocol.ids import checkpoint_id
from tests.support import handmade_checkpoints, sharded_checkpoints
from tests.support.fake_server import FakeServer, Holdfast
from tests.support.sharded_checkpoints import RankTensors, by_rows

FIRST, NEWEST = checkpoint_id(10, 1), checkpoint_id(20, 1)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))


@pytest.fixture
def store(tmp_path: Path, model: torch.nn.Module) -> Path:
    """Two checkpoints of a model and its optimizer."""
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    for iteration in (10, 20):
        handmade_checkpoints.commit_objects(tmp_path, iteration=iteration, model=model, optimizer=optimizer)
    return tmp_path


def test_the_newest_checkpoint_is_loaded_and_its_state_decoded(holdfast: Holdfast, store: Path) -> None:
    result = holdfast("store", "drill", store, "job", "--json")
    assert result.exit_code == 0
    (row,) = json.loads(result.stdout)
    assert (row["checkpoint"], row["state"], row["ranks"]) == (NEWEST, "loads", 1)
    assert row["tensors"] > 10  # parameters, buffers, moments and the random state
    assert row["read_bytes"] == (store / "job" / NEWEST / "rank-0.safetensors").stat().st_size


def test_all_checkpoints_or_a_named_one_are_loaded(holdfast: Holdfast, store: Path) -> None:
    rows = json.loads(holdfast("store", "drill", store, "--all", "--json").stdout)
    assert [row["checkpoint"] for row in rows] == [NEWEST, FIRST]
    rows = json.loads(holdfast("store", "drill", store, "job", "--checkpoint", "10", "--json").stdout)
    assert [row["checkpoint"] for row in rows] == [FIRST]
    assert holdfast("store", "drill", store, "--checkpoint", "10").exit_code == 2


def test_a_damaged_newest_checkpoint_fails_and_the_one_of_a_start_is_named(
    holdfast: Holdfast, store: Path
) -> None:
    cut(store / "job" / NEWEST / "rank-0.safetensors")
    result = holdfast("store", "drill", store, "job")
    assert result.exit_code == 1
    assert f"job {NEWEST} is damaged: " in result.stdout
    assert f"A start of job resumes from {FIRST}" in result.stdout
    cut(store / "job" / FIRST / "rank-0.safetensors")
    result = holdfast("store", "drill", store, "job")
    assert result.exit_code == 1
    assert "A start of job begins at iteration 0: no other checkpoint loads" in result.stdout


def test_damage_that_parity_repairs_does_not_fail(holdfast: Holdfast, tmp_path: Path) -> None:
    committed = handmade_checkpoints.commit(tmp_path, {"w": torch.arange(5000.0)}, parity=ParityCode(2, 1))
    cut(committed.path())
    result = holdfast("store", "drill", tmp_path)
    assert result.exit_code == 0
    assert "is repairable: rank-0.safetensors: 1 block" in result.stdout


def test_sound_bytes_whose_state_does_not_decode_fail(holdfast: Holdfast, tmp_path: Path) -> None:
    handmade_checkpoints.commit(tmp_path, {"w": torch.arange(4.0)}, state={"rng": {"torch": 1}})
    assert holdfast("store", "verify", tmp_path).exit_code == 0
    result = holdfast("store", "drill", tmp_path)
    assert result.exit_code == 1
    assert "is damaged: manifest.json: state.rng" in result.stdout


@pytest.fixture
def of_ranks(tmp_path: Path) -> handmade_checkpoints.CommittedCheckpoint:
    """A checkpoint of three ranks: a tensor in shards, and one of each rank."""
    own = RankTensors([torch.arange(3.0) + rank for rank in range(3)])
    trees = [{"own": {"$tensor": "own"}, "model": {"$tensor": "w"}}] * 3
    tensors = {"w": by_rows(torch.arange(12.0).reshape(6, 2), 3), "own": own}
    return sharded_checkpoints.commit(tmp_path, 3, tensors, trees)


def test_the_state_of_every_rank_is_loaded(
    holdfast: Holdfast, of_ranks: handmade_checkpoints.CommittedCheckpoint
) -> None:
    (row,) = json.loads(holdfast("store", "drill", of_ranks.store.root, "--json").stdout)
    assert (row["state"], row["ranks"], row["tensors"]) == ("loads", 3, 4)


@pytest.mark.parametrize("position", range(6))
def test_damage_to_a_tensor_of_any_rank_is_found(
    holdfast: Holdfast, of_ranks: handmade_checkpoints.CommittedCheckpoint, position: int
) -> None:
    sharded_checkpoints.flip(of_ranks, of_ranks.manifest.tensors[position])
    result = holdfast("store", "drill", of_ranks.store.root)
    assert result.exit_code == 1
    assert "does not match its digest" in result.stdout


def test_damage_to_the_header_of_a_rank_is_found(
    holdfast: Holdfast, of_ranks: handmade_checkpoints.CommittedCheckpoint
) -> None:
    path = of_ranks.path("rank-2.safetensors")
    path.write_bytes(path.read_bytes().replace(b"F32", b"I32", 1))
    assert holdfast("store", "drill", of_ranks.store.root).exit_code == 1


def test_too_little_memory_is_named_and_says_nothing_about_the_checkpoint(
    holdfast: Holdfast, store: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.checkpoint.drill.available_bytes", lambda: 100)
    result = holdfast("store", "drill", store, "job", "--server", server.url)
    assert result.exit_code == 1
    assert f"{NEWEST} is unreadable: it takes " in result.stdout
    assert "this host has 100 B available" in result.stdout
    assert FIRST not in result.stdout
    assert server.requests == []


def test_the_outcome_is_reported_to_the_server_as_a_scrub(
    holdfast: Holdfast, store: Path, server: FakeServer
) -> None:
    cut(store / "job" / NEWEST / "rank-0.safetensors")
    holdfast("store", "drill", store, "job", "--server", server.url)
    reports = {path: body for method, path, body in server.requests if method == "PUT"}
    assert {path.split("/")[-2]: body["state"] for path, body in reports.items()} == {
        NEWEST: "damaged", FIRST: "sound",
    }  # fmt: skip
    assert all(path.endswith("/scrub") for path in reports)
