"""Odd folders, names and values in a store neither end a command for other jobs nor reach a terminal raw."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest
import torch

from holdfast import commands
from holdfast.store import open_store
from tests.support import handmade_checkpoints
from tests.support.edited_manifests import reseal
from tests.support.fake_server import Holdfast

FOR_ALL_JOBS = (
    ("ls",),
    ("verify",),
    ("scrub",),
    ("gc", "--while-running", "--dry-run"),
    ("gc", "--while-running", "--yes"),
)
HOSTILE = "\x1b]0;title\x07\x1b[2J\r\nFORGED \x9b31m\u202egpj.exe\u2028FORGED \x7f\udcff"
PRINTED_AS = r"\x1b]0;title\x07\x1b[2J\r\nFORGED \x9b31m\u202egpj.exe\u2028FORGED \x7f\udcff"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for job in ("a", "z"):
        handmade_checkpoints.commit(tmp_path / "store", {"w": torch.zeros(4)}, job=job, iteration=10)
    return tmp_path / "store"


def plant_bad_name(store: Path, outside: Path) -> None:
    for name in ("bad name", "x" * 250, "\x1b[31mred", "ü", "-rf", "..x", "a\nb", "\udcff"):
        (store / name / "attempts").mkdir(parents=True)
    (store / "000000000001-1").mkdir()


def plant_file(store: Path, outside: Path) -> None:
    (store / "m").mkdir()
    (store / "m" / "attempts").touch()


def plant_link(store: Path, outside: Path) -> None:
    (store / "m").symlink_to(outside)


def plant_linked_records(store: Path, outside: Path) -> None:
    (store / "m").mkdir()
    (store / "m" / "attempts").symlink_to(outside / "attempts")


@pytest.mark.parametrize("command", FOR_ALL_JOBS, ids=" ".join)
def test_a_folder_whose_name_no_job_can_have_is_left_out(
    holdfast: Holdfast, store: Path, command: tuple[str]
) -> None:
    plant_bad_name(store, store)
    result = holdfast("store", command[0], store, *command[1:])
    assert (result.exit_code, result.exception) == (0, None), result.stderr
    assert open_store(store).jobs() == ["a", "z"]


@pytest.mark.parametrize(
    ("plant", "command"),
    [
        *((plant_link, command) for command in (*FOR_ALL_JOBS, ("ls", "--json"))),
        # the others read no records
        *((plant, command) for plant in (plant_file, plant_linked_records) for command in FOR_ALL_JOBS[-2:]),
    ],
)
def test_a_job_that_cannot_be_read_is_named_and_the_others_are_read(
    holdfast: Holdfast, store: Path, tmp_path: Path, plant, command: tuple[str]
) -> None:
    outside = tmp_path / "outside" / "m"
    (outside / "attempts").mkdir(parents=True)
    plant(store, outside)
    result = holdfast("store", command[0], store, *command[1:])
    assert result.exit_code == 1
    assert "holdfast: job m cannot be read: " in result.stderr
    if plant is not plant_file:
        assert f"{store}/m" in result.stderr
        assert "is a symbolic link" in result.stderr
    assert "z" in result.stdout or result.stdout == "nothing to remove\n"


def test_a_job_that_is_a_link_is_refused_by_its_name_with_the_way_out(
    holdfast: Holdfast, store: Path, tmp_path: Path
) -> None:
    (store / "a").rename(tmp_path / "a")
    (store / "a").symlink_to(tmp_path / "a")
    result = holdfast("store", "show", store, "a", "latest")
    assert result.exit_code == 1
    assert f"{store}/a: is a symbolic link" in result.stderr
    assert "replace it by its target, or mount that there" in result.stderr


def test_what_cannot_be_removed_is_named_and_the_rest_is_removed(
    holdfast: Holdfast, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job in ("a", "z"):
        for name in (".tmp-00000000-1", ".tmp-00000000-2"):
            (store / job / name).mkdir()
    remove = os.rmdir

    def refuse(name: str, **options: int) -> None:
        if name == ".tmp-00000000-1":
            raise OSError(16, "Device or resource busy", name)
        remove(name, **options)

    monkeypatch.setattr(os, "rmdir", refuse)
    result = holdfast("store", "gc", store, "--yes", "--while-running")
    assert result.exit_code == 1
    assert all(f"{store}/{job}/.tmp-00000000-1: something in it is mounted" in result.stderr for job in ("a", "z"))
    assert "removed 2 items" in result.stderr
    assert not any((store / job / ".tmp-00000000-2").exists() for job in ("a", "z"))


def spoil(store: Path) -> None:
    """Put control characters wherever a store can hold text."""

    def change(fields: dict) -> None:
        text = HOSTILE.removesuffix("\udcff")
        fields["kind"] += text
        fields["versions"] = {f"torch{text}": f"2{text}"}
        fields["timings"] = {f"x{text}": 1.0}
        fields["metrics"] = {f"loss{text}": {"value": 1.0, "iteration": 1}}
        fields["index"]["state"][f"extra{text}"] = {f"value{text}": f"text{text}"}

    (manifest,) = (store / "a").glob("*/manifest.json")
    reseal(manifest, change)
    (store / "a" / f".tmp-00000000-{HOSTILE}").mkdir()


@pytest.mark.parametrize(
    "command",
    [
        *(f"store {command[0]} STORE {' '.join(command[1:])}" for command in FOR_ALL_JOBS),
        "store show STORE a latest",
        "store show STORE a latest w",
        "store ls STORE --json",
        "store show STORE a latest --json",
        "store gc STORE --while-running --dry-run --json",
        "store export STORE a latest TARGET",
        "fork a latest b --store STORE",
    ],
)
def test_control_characters_of_a_store_are_escaped(
    holdfast: Holdfast, store: Path, tmp_path: Path, command: str
) -> None:
    spoil(store)
    words = {"STORE": store, "TARGET": tmp_path / "out.safetensors"}
    result = holdfast(*(words.get(word, word) for word in command.split()))
    assert (result.exit_code, result.exception) == (0, None), result.stderr
    lines = (result.stdout + result.stderr).split("\n")
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("FORGED") for line in lines)
    if "--json" in command:
        json.loads(result.stdout)
    elif "gc" in command and "--json" not in command:
        assert f".tmp-00000000-{PRINTED_AS}  " in result.stdout


def test_json_keeps_the_characters_that_it_escapes(holdfast: Holdfast, store: Path) -> None:
    spoil(store)
    shown = json.loads(holdfast("store", "show", store, "a", "latest", "--json").stdout)
    assert shown["kind"].endswith(HOSTILE.removesuffix("\udcff"))


def test_no_command_prints_in_another_way() -> None:
    for path in Path(commands.__file__).parent.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        printing = [each for each in calls if isinstance(each, ast.Name) and each.id == "print"]
        assert len(printing) == (path.name == "console.py"), path


@pytest.mark.parametrize(
    "tree",
    [
        {"$pairs": 3}, {"$pairs": [1]}, {"$ordered": [[1, 2, 3]]}, {"$counter": None}, {"$complex": "x"},
        {"$complex": [1]}, {"$bytes": 7}, {"$tuple": 3}, {"$set": None}, {"$complex": ["0x1p9999999", "0"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_malformed_state_is_named_as_damage(holdfast: Holdfast, store: Path, tree: object) -> None:
    (manifest,) = (store / "a").glob("*/manifest.json")
    reseal(manifest, lambda fields: fields["index"]["state"].update(extra={"value": tree}))
    result = holdfast("store", "show", store, "a", "latest")
    assert result.exit_code == 1
    assert "manifest.json: its states are malformed" in result.stderr
    assert isinstance(result.exception, SystemExit)
