"""`holdfast store scrub`, and what `verify` says of damage that parity can repair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from holdfast.format.parity_file import ParityCode
from holdfast.protocol.ids import checkpoint_id
from tests.support import handmade_checkpoints
from tests.support.fake_server import Holdfast

CODE = ParityCode(2, 1)


def payload(root: Path, job: str, iteration: int) -> Path:
    return root / job / checkpoint_id(iteration, 1) / "rank-0.safetensors"


def cut(path: Path, bytes_lost: int = 1) -> bytes:
    data = path.read_bytes()
    path.write_bytes(data[:-bytes_lost])
    return data


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two checkpoints with parity, and one without."""
    for iteration in (10, 20):
        tensors = {"w": torch.arange(5000.0)}
        handmade_checkpoints.commit(tmp_path, tensors, job="gpt", iteration=iteration, parity=CODE)
    handmade_checkpoints.commit(tmp_path, {"w": torch.arange(4.0)}, job="digits", iteration=5)
    return tmp_path


def test_a_sound_store_is_scrubbed_and_the_exit_code_says_so(holdfast: Holdfast, store: Path) -> None:
    result = holdfast("store", "scrub", store)
    assert result.exit_code == 0
    assert [line.split()[-1] for line in result.stdout.splitlines()[1:]] == ["sound"] * 3


def test_damage_is_listed_and_then_repaired(holdfast: Holdfast, store: Path) -> None:
    damaged = payload(store, "gpt", 10)
    data = cut(damaged)
    result = holdfast("store", "scrub", store)
    assert result.exit_code == 1
    assert "gpt 000000000010-1/rank-0.safetensors repairable: 1 block of 4096 bytes damaged (bytes 20,480 to " in (
        result.stdout
    )
    assert f"repair 1 checkpoint with: holdfast store scrub {store} --repair" in result.stdout
    assert damaged.read_bytes() != data
    result = holdfast("store", "scrub", store, "--repair", "--rate", "50MB/s")
    assert result.exit_code == 0
    assert "rank-0.safetensors repaired: 1 block" in result.stdout
    assert damaged.read_bytes() == data
    assert holdfast("store", "scrub", store).exit_code == 0


def test_damage_beyond_the_strength_fails_also_beside_repairs(holdfast: Holdfast, store: Path) -> None:
    cut(payload(store, "digits", 5))
    cut(payload(store, "gpt", 10), 15_000)
    data = cut(payload(store, "gpt", 20))
    result = holdfast("store", "scrub", store, "--repair", "--json")
    assert result.exit_code == 1
    rows = json.loads(result.stdout)
    assert [(row["job"], row["checkpoint"], row["state"]) for row in rows] == [
        ("digits", checkpoint_id(5, 1), "damaged"),
        ("gpt", checkpoint_id(10, 1), "damaged"),
        ("gpt", checkpoint_id(20, 1), "repaired"),
    ]
    assert rows[0]["files"][0]["reason"] == "it has no parity"
    assert "parity 2+1 cannot repair" in rows[1]["files"][0]["reason"]
    assert payload(store, "gpt", 20).read_bytes() == data


def test_one_job_or_checkpoint_is_scrubbed(holdfast: Holdfast, store: Path) -> None:
    rows = json.loads(holdfast("store", "scrub", store, "--job", "gpt", "--json").stdout)
    assert [row["checkpoint"] for row in rows] == [checkpoint_id(10, 1), checkpoint_id(20, 1)]
    rows = json.loads(holdfast("store", "scrub", store, "--job", "gpt", "--checkpoint", "20", "--json").stdout)
    assert [row["checkpoint"] for row in rows] == [checkpoint_id(20, 1)]


def test_wrong_usage_is_explained(holdfast: Holdfast, store: Path) -> None:
    result = holdfast("store", "scrub", store, "--rate", "fast")
    assert result.exit_code == 2
    assert "--rate" in result.stderr
    assert holdfast("store", "scrub", store, "--checkpoint", "20").exit_code == 2


def test_verify_says_that_damage_can_be_repaired_and_how(holdfast: Holdfast, store: Path) -> None:
    cut(payload(store, "gpt", 20))
    result = holdfast("store", "verify", store)
    assert result.exit_code == 1
    assert "repairable: rank-0.safetensors: 1 block" in result.stdout
    assert f"holdfast store scrub {store} --repair" in result.stdout
