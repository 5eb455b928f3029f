from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.format.parity_file import ParityCode
from holdfast.protocol.ids import checkpoint_id
from holdfast.store.local import LocalStore
from holdfast.store.local_reader import LocalReader
from holdfast.units import format_bytes
from tests.support import handmade_checkpoints, sharded_checkpoints
from tests.support.fake_server import Holdfast


def commit(root: Path, job: str, *iterations: int) -> None:
    """Checkpoints with one tensor of four bytes each."""
    for iteration in iterations:
        data = torch.tensor([iteration, 0, 0, 0], dtype=torch.uint8)
        handmade_checkpoints.commit(root, {"w": data}, job=job, iteration=iteration)


def payload(root: Path, job: str, iteration: int) -> Path:
    return root / job / checkpoint_id(iteration, 1) / "rank-0.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    commit(tmp_path, "gpt", 10, 20)
    commit(tmp_path, "digits", 5)
    return tmp_path


def test_a_store_is_listed_job_by_job(holdfast: Holdfast, store: Path) -> None:
    result = holdfast("store", "ls", store)
    assert result.exit_code == 0
    named = [line.split()[:3] for line in result.stdout.splitlines()[1:]]
    assert named == [
        ["digits", "000000000005-1", "5"],
        ["gpt", "000000000010-1", "10"],
        ["gpt", "000000000020-1", "20"],
    ]


def test_one_job_can_be_picked_and_the_list_scripted(holdfast: Holdfast, store: Path) -> None:
    rows = json.loads(holdfast("store", "ls", store, "--job", "gpt", "--json").stdout)
    assert [row["iteration"] for row in rows] == [10, 20]
    assert rows[0]["payload_bytes"] == payload(store, "gpt", 10).stat().st_size


def test_small_checkpoints_have_sizes_as_well(holdfast: Holdfast, store: Path) -> None:
    assert payload(store, "gpt", 10).stat().st_size == 4096 + 4
    assert "  4.1 kB  " in holdfast("store", "ls", store, "--job", "gpt").stdout


def test_the_listed_size_includes_parity(holdfast: Holdfast, tmp_path: Path) -> None:
    made = handmade_checkpoints.commit(tmp_path, {"w": torch.zeros(64 << 10)}, parity=ParityCode(2, 1))
    (row,) = json.loads(holdfast("store", "ls", tmp_path, "--json").stdout)
    files = [made.path().stat().st_size, made.path(made.manifest.files[0].parity.name).stat().st_size]
    assert [row["payload_bytes"], row["stored_bytes"]] == [files[0], sum(files)]
    assert f"  {format_bytes(sum(files))}  " in holdfast("store", "ls", tmp_path).stdout


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (34_560, "34.6 kB"),
        (999_700, "1 MB"),
        (108_200_000, "108 MB"),
        (5_260_000_000, "5.26 GB"),
        (7_000_000_000_000, "7 TB"),
    ],
)
def test_a_size_has_the_unit_that_suits_it(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_a_sound_store_verifies(holdfast: Holdfast, store: Path) -> None:
    result = holdfast("store", "verify", store)
    assert result.exit_code == 0
    assert result.stdout.count("verified") == 3


def test_a_flipped_bit_is_found_and_named(holdfast: Holdfast, store: Path) -> None:
    damaged = payload(store, "gpt", 20)
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    result = holdfast("store", "verify", store, "--json")
    assert result.exit_code == 1
    by_iteration = {row["iteration"]: row for row in json.loads(result.stdout)}
    assert by_iteration[10]["state"] == "verified"
    assert by_iteration[20]["state"] == "damaged"
    assert "tensor w" in by_iteration[20]["reason"]


def test_a_flipped_bit_in_any_ranks_file_is_found(holdfast: Holdfast, tmp_path: Path) -> None:
    made = sharded_checkpoints.commit(
        tmp_path, 3, {"w": sharded_checkpoints.RankTensors([torch.ones(4)] * 3)}, job="gpt", iteration=10
    )
    assert holdfast("store", "verify", tmp_path).exit_code == 0
    sharded_checkpoints.flip(made, made.manifest.tensors[2])
    result = holdfast("store", "verify", tmp_path)
    assert (result.exit_code, "rank-2.safetensors: tensor w does not match" in result.stdout) == (1, True)


def test_a_missing_file_is_found(holdfast: Holdfast, store: Path) -> None:
    payload(store, "gpt", 10).unlink()
    result = holdfast("store", "verify", store, "--job", "gpt")
    assert result.exit_code == 1
    assert "damaged: " in result.stdout


def test_a_manifest_that_is_none_is_listed_as_damaged(holdfast: Holdfast, store: Path) -> None:
    payload(store, "gpt", 10).with_name("manifest.json").write_text("{")
    (row,) = [row for row in json.loads(holdfast("store", "ls", store, "--json").stdout) if row["reason"]]
    assert (row["job"], row["state"]) == ("gpt", "damaged")


def damage(root: Path, job: str, iteration: int) -> None:
    path = payload(root, job, iteration)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def test_what_to_do_about_the_newest_being_damaged_is_said(holdfast: Holdfast, store: Path) -> None:
    damage(store, "gpt", 20)
    told = holdfast("store", "verify", store).stdout
    assert "gpt 000000000020-1 is damaged. A restart resumes from the newest sound checkpoint" in told
    assert "sound checkpoint, 000000000010-1" in told
    assert "the next checkpoint of iteration 20 replaces it" in told
    assert f"holdfast store gc {store} --job gpt --drop 000000000020-1" in told
    assert "digits" not in told.partition("is damaged")[2]


def test_a_manifest_that_cannot_be_read_is_named_by_the_iteration_of_its_checkpoint(
    holdfast: Holdfast, store: Path
) -> None:
    payload(store, "gpt", 20).with_name("manifest.json").write_text("{")
    assert "the next checkpoint of iteration 20 replaces it" in holdfast("store", "verify", store).stdout


def test_an_older_damaged_one_is_no_reason_to_worry(holdfast: Holdfast, store: Path) -> None:
    damage(store, "gpt", 10)
    told = holdfast("store", "verify", store).stdout
    assert "A restart does not need it: gpt resumes from 000000000020-1, which is sound" in told
    assert "it remains until retention removes it" in told


def test_that_nothing_sound_is_left_is_said_as_it_is(holdfast: Holdfast, store: Path) -> None:
    damage(store, "digits", 5)
    result = holdfast("store", "verify", store, "--job", "digits")
    assert "No checkpoint of digits is sound: a restart begins at iteration 0" in result.stdout


def test_a_newer_format_is_not_called_damage(holdfast: Holdfast, store: Path) -> None:
    payload(store, "gpt", 20).with_name("manifest.json").write_text('{"format": 3}')
    result = holdfast("store", "verify", store, "--json")
    assert result.exit_code == 1
    (row,) = [row for row in json.loads(result.stdout) if row["reason"]]
    assert (row["checkpoint"], row["state"]) == ("000000000020-1", "unreadable")
    assert "upgrade holdfast" in row["reason"]


def test_a_store_that_does_not_answer_is_not_called_damage(
    holdfast: Holdfast, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise TimeoutError(110, "Connection timed out")

    monkeypatch.setattr(LocalReader, "read_into", away)
    for command in ("ls", "verify"):
        rows = json.loads(holdfast("store", command, store, "--json").stdout)
        assert {(row["state"], row["reason"]) for row in rows} == {("unreadable", "Connection timed out")}
    shown = holdfast("store", "show", store, "gpt", "latest")
    assert (shown.exit_code, shown.stderr) == (1, "holdfast: Connection timed out\n")


@pytest.mark.parametrize("file", ["manifest.json", "rank-0.safetensors"])
def test_a_checkpoint_that_retention_removes_meanwhile_is_not_called_damage(
    holdfast: Holdfast, store: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    real = LocalStore.open_file

    def open_file(self: LocalStore, job: str, checkpoint: str, name: str, **options: bool) -> object:
        if (checkpoint, name) == (checkpoint_id(10, 1), file):
            shutil.rmtree(store / job / checkpoint)
        return real(self, job, checkpoint, name, **options)

    monkeypatch.setattr(LocalStore, "open_file", open_file)
    result = holdfast("store", "verify" if file != "manifest.json" else "ls", store, "--json")
    assert result.exit_code == 0
    states = {row["checkpoint"]: row["state"] for row in json.loads(result.stdout) if row["job"] == "gpt"}
    if file == "manifest.json":
        assert states == {checkpoint_id(20, 1): "committed"}
    else:
        assert states == {checkpoint_id(10, 1): "removed", checkpoint_id(20, 1): "verified"}


def test_verifying_reads_from_the_disk(holdfast: Holdfast, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = LocalStore.open_file

    def open_file(self: LocalStore, job: str, checkpoint: str, file: str, **options: bool) -> object:
        asked.append((file, options.get("from_disk", False)))
        return real(self, job, checkpoint, file, **options)

    monkeypatch.setattr(LocalStore, "open_file", open_file)
    holdfast("store", "verify", store, "--job", "digits")
    assert set(asked) == {("manifest.json", False), ("rank-0.safetensors", True)}


@pytest.mark.processes
def test_progress_is_shown_to_a_person_and_to_nobody_else(store: Path) -> None:
    command = [sys.executable, "-m", "holdfast.cli", "store", "verify", str(store)]
    alone = subprocess.run(command, capture_output=True, text=True, check=True)
    assert alone.stderr == ""
    terminal, behind = pty.openpty()
    watched = subprocess.run(command, stdout=subprocess.PIPE, stderr=behind, text=True, check=True)
    os.close(behind)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal that nobody writes to any more
        while part := os.read(terminal, 4096):
            shown += part
    os.close(terminal)
    assert b"gpt 000000000020-1 (3 of 3)" in shown
    assert watched.stdout == alone.stdout


def test_an_empty_store_is_said_to_be_empty(holdfast: Holdfast, tmp_path: Path) -> None:
    assert holdfast("store", "ls", tmp_path).stdout == f"no checkpoints in {tmp_path}\n"


def test_the_directory_of_a_job_is_no_store(holdfast: Holdfast, store: Path) -> None:
    refused = holdfast("store", "ls", store / "gpt")
    assert refused.exit_code == 2
    assert f"'{store / 'gpt'}' is one job of the store '{store}': give that, and --job gpt" in refused.stderr


def test_a_directory_that_is_not_there_is_refused(holdfast: Holdfast, tmp_path: Path) -> None:
    result = holdfast("store", "ls", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "the directory does not exist" in result.stderr


def test_a_job_that_is_not_there_is_refused_with_those_that_are(holdfast: Holdfast, store: Path) -> None:
    result = holdfast("store", "verify", store, "--job", "gtp")
    assert result.exit_code == 1
    assert "it has: digits, gpt" in result.stderr


def test_an_address_of_another_kind_is_refused(holdfast: Holdfast) -> None:
    assert holdfast("store", "ls", "ftp://host/prefix").exit_code == 2
