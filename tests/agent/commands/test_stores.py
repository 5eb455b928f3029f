from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_server import Holdfast

from holdfast import format as fmt
from holdfast.commands.console import size
from holdfast.protocol import checkpoint_id
from holdfast.store import open_store


def commit(root: Path, job: str, *iterations: int) -> None:
    """Checkpoints with one tensor of four bytes each."""
    store = open_store(root)
    attempt = store.acquire_attempt(job, "test").number
    for iteration in iterations:
        data = iteration.to_bytes(4, "little")
        header = fmt.payload_header(slots := fmt.lay_out([("w", "U8", (4,))]), {})
        tensor = fmt.Tensor(
            name="w",
            dtype="U8",
            shape=(4,),
            global_shape=(4,),
            offsets=(0,),
            file="rank-0.safetensors",
            start=len(header) + slots[0].start,
            end=len(header) + slots[0].end,
            digest=fmt.digest(data),
        )
        file = fmt.File(
            name=tensor.file,
            size_bytes=len(header) + len(data),
            header_bytes=len(header),
            header_digest=fmt.digest(header),
        )
        manifest = fmt.Manifest(
            job=job,
            iteration=iteration,
            lineage=1,
            attempt=attempt,
            kind="scheduled",
            created_at=1790000000.0,
            parent=None,
            world_size=1,
            files=[file],
            tensors=[tensor],
            state={},
        )
        writer = store.begin(job, checkpoint_id(iteration, 1), attempt, file.size_bytes)
        writer.write(file.name, [header, data])
        writer.commit(fmt.encode_manifest(manifest))


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
    size_bytes = payload(store, "gpt", 10).stat().st_size
    assert 0 < size_bytes < 1000
    assert f"  {size_bytes} B  " in holdfast("store", "ls", store, "--job", "gpt").stdout


@pytest.mark.parametrize(
    ("size_bytes", "told"),
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
def test_a_size_has_the_unit_that_suits_it(size_bytes: int, told: str) -> None:
    assert size(size_bytes) == told


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


def test_a_missing_file_is_found(holdfast: Holdfast, store: Path) -> None:
    payload(store, "gpt", 10).unlink()
    result = holdfast("store", "verify", store, "--job", "gpt")
    assert result.exit_code == 1
    assert "damaged: " in result.stdout


def test_a_manifest_that_is_none_is_listed_as_damaged(holdfast: Holdfast, store: Path) -> None:
    payload(store, "gpt", 10).with_name("manifest.json").write_text("{")
    (row,) = [row for row in json.loads(holdfast("store", "ls", store, "--json").stdout) if row["reason"]]
    assert (row["job"], row["state"]) == ("gpt", "damaged")


def test_an_empty_store_is_said_to_be_empty(holdfast: Holdfast, tmp_path: Path) -> None:
    assert holdfast("store", "ls", tmp_path).stdout == f"no checkpoints in {tmp_path}\n"


def test_a_directory_that_is_not_there_is_refused(holdfast: Holdfast, tmp_path: Path) -> None:
    result = holdfast("store", "ls", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "there is no such directory" in result.stderr


def test_a_job_that_is_not_there_is_refused_with_those_that_are(holdfast: Holdfast, store: Path) -> None:
    result = holdfast("store", "verify", store, "--job", "gtp")
    assert result.exit_code == 1
    assert "it has: digits, gpt" in result.stderr


def test_an_address_of_another_kind_is_refused(holdfast: Holdfast) -> None:
    assert holdfast("store", "ls", "s3://bucket/prefix").exit_code == 2
