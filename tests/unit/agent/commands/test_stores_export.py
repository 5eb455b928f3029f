from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.fake_server import Holdfast
from tests.support.handmade_checkpoints import commit_objects


@pytest.fixture
def store(tmp_path: Path) -> Path:
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    commit_objects(tmp_path / "store", 5, model=model, optimizer=optimizer)
    return tmp_path / "store"


def test_a_model_is_exported_by_iteration(holdfast: Holdfast, store: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    result = holdfast("store", "export", store, "job", "5", target, "--only", "model")
    assert result.exit_code == 0
    assert result.stdout == f"wrote {target} from job 000000000005-1 (model: 2 tensors, 4.24 kB)\n"
    torch.nn.Linear(8, 4).load_state_dict(load_file(target))


def test_what_safetensors_has_no_room_for_is_said(holdfast: Holdfast, store: Path, tmp_path: Path) -> None:
    result = holdfast("store", "export", store, "job", "latest", tmp_path / "x")
    assert "values that are not tensors: optimizer.param_groups.0.lr" in result.stdout


def test_the_answer_can_be_scripted(holdfast: Holdfast, store: Path, tmp_path: Path) -> None:
    options = ("--format", "torch", "--json")
    found = json.loads(holdfast("store", "export", store, "job", "latest", tmp_path / "x", *options).stdout)
    assert (found["checkpoint"], found["objects"]) == ("000000000005-1", ["model", "optimizer"])
    assert (found["tensors"], found["size_bytes"]) == (8, (tmp_path / "x").stat().st_size)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--only", "modle"], "it has model, optimizer"),
        (["--format", "torch"], "exists; use --force to replace it"),
    ],
)
def test_what_cannot_be_done_is_refused(
    holdfast: Holdfast, store: Path, tmp_path: Path, options: list[str], reason: str
) -> None:
    (tmp_path / "taken").write_text("")
    target = tmp_path / ("taken" if "torch" in options else "free")
    result = holdfast("store", "export", store, "job", "latest", target, *options)
    assert (result.exit_code, reason in result.stderr) == (1, True)


def test_a_target_nobody_can_write_is_named(holdfast: Holdfast, store: Path, tmp_path: Path) -> None:
    result = holdfast("store", "export", store, "job", "latest", tmp_path / "nowhere" / "x")
    assert (result.exit_code, "nowhere" in result.stderr, "does not exist" in result.stderr) == (1, True, True)


def test_damage_is_refused(holdfast: Holdfast, store: Path, tmp_path: Path) -> None:
    payload = store / "job" / "000000000005-1" / "rank-0.safetensors"
    payload.write_bytes(payload.read_bytes()[:-1])
    result = holdfast("store", "export", store, "job", "latest", tmp_path / "x")
    assert (result.exit_code, (tmp_path / "x").exists()) == (1, False)
    assert "damaged: rank-0.safetensors: is 19,583 bytes long" in result.stderr


def test_a_degraded_export_names_what_is_lost(holdfast: Holdfast, store: Path, tmp_path: Path) -> None:
    payload = store / "job" / "000000000005-1" / "rank-0.safetensors"
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    result = holdfast("store", "export", store, "job", "latest", tmp_path / "x", "--degraded", "--json")
    found = json.loads(result.stdout)
    assert (len(found["lost"]), found["tensors"]) == (1, 7)
    again = holdfast("store", "export", store, "job", "latest", tmp_path / "x", "--degraded", "--force")
    assert f"lost 1 damaged tensor: {found['lost'][0]}" in again.stdout


INTERRUPTED = """
import os, sys, torch
real = torch.save
def save(state, path):
    real(state, path)
    os.kill(os.getpid(), {signal})
torch.save = save
from holdfast.cli import main
sys.argv[1:] = {arguments}
main()
"""


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_leaves_nothing(store: Path, tmp_path: Path, number: signal.Signals) -> None:
    arguments = ["store", "export", str(store), "job", "latest", str(tmp_path / "x"), "--format", "torch"]
    script = INTERRUPTED.format(signal=int(number), arguments=arguments)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, f"holdfast: interrupted; {tmp_path / 'x'} was not written\n")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_job_begins_with_an_imported_model(holdfast: Holdfast, store: Path, tmp_path: Path) -> None:
    holdfast("store", "export", store, "job", "latest", tmp_path / "dcp", "--format", "dcp")
    result = holdfast("store", "import", tmp_path / "new", "try", tmp_path / "dcp", "--iteration", "100")
    assert result.exit_code == 0, result.output
    assert "try begins with 000000000100-1: model" in result.output
    again = holdfast("store", "import", tmp_path / "new", "try", tmp_path / "dcp")
    assert again.exit_code == 1
    assert "choose another name for the new job" in again.output
    assert holdfast("store", "verify", tmp_path / "new").exit_code == 0
