"""A start and `gc` over many checkpoints decode no manifest that they do not need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.checkpoint import garbage_collection, restore
from holdfast.format import manifest as fmt
from holdfast.format import manifest_files
from holdfast.retention import Retention
from holdfast.store import open_store
from tests.support import handmade_checkpoints
from tests.support.edited_manifests import fields_of, sealed


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of what is decoded."""
    kinds, decode = list[str](), manifest_files.decode_manifest

    def counted(kind: type, *arguments: object) -> object:
        kinds.append(kind.__name__)
        return decode(kind, *arguments)

    monkeypatch.setattr(manifest_files, "decode_manifest", counted)
    return kinds


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for iteration in range(1, 31):
        kind = "requested" if iteration % 10 == 0 or iteration < 4 else "scheduled"
        handmade_checkpoints.commit(tmp_path, {"w": torch.zeros(4)}, iteration=iteration, kind=kind)
    return tmp_path


def test_only_checkpoints_of_the_kind_are_decoded_and_only_the_last(store: Path, decoded: list[str]) -> None:
    found = restore.of_kind(open_store(store), "job", "requested", 4)
    assert found == [f"{iteration:012d}-1" for iteration in (3, 10, 20, 30)]
    assert len(decoded) == 4


def test_a_manifest_that_is_laid_out_in_another_way_or_damaged_is_read_as_before(store: Path) -> None:
    other, damaged = (store / "job" / f"{iteration:012d}-1" / fmt.MANIFEST for iteration in (10, 20))
    other.write_bytes(sealed(fields_of(other.read_bytes())))
    damaged.write_bytes(damaged.read_bytes().replace(b"scheduled", b"requested")[:-9])
    found = restore.of_kind(open_store(store), "job", "requested", 2)
    assert found == [f"{iteration:012d}-1" for iteration in (10, 30)]


def test_gc_decodes_what_it_compares_once_and_without_tensors(store: Path, decoded: list[str]) -> None:
    garbage_collection.plan(open_store(store), "job", Retention(last=5))
    assert decoded.count("ManifestSummary") == 30
    assert decoded.count("ManifestFile") == 6
