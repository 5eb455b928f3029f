"""The one description of a checkpoint: what of it reaches the manifest, and how often its fields are copied."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec

import holdfast
from holdfast.format.manifest import CheckpointDescription
from holdfast.format.merged_ranks import MergedRanks
from holdfast.retention import LoggedMetric
from holdfast.save.draft import Draft, manifest_of

SAVE = Path(holdfast.__file__).parent / "save"
DRAFT = Draft(
    job="job", iteration=7, lineage=2, attempt=3, kind="requested", created_at=1.5, parent="000000000006-2",
    world_size=4, timings={"write_seconds": 0.5}, versions={"torch": "x"}, fingerprint={"ranks": "4"},
    metrics={"loss": LoggedMetric(value=0.25, iteration=7)}, rank=1, folder="folder", inexact="a reason",
)  # fmt: skip


def test_a_manifest_says_what_the_draft_says() -> None:
    shared = CheckpointDescription.__struct_fields__
    assert {name for name in shared if getattr(DRAFT, name) in ({}, None, 0, "")} == set()
    manifest = manifest_of(DRAFT, MergedRanks([], [], {"model": {}}, {"1": {}}))
    assert {name: getattr(manifest, name) for name in shared} == {name: getattr(DRAFT, name) for name in shared}
    assert (manifest.state, manifest.rank_states) == ({"model": {}}, {"1": {}})


def test_a_draft_is_read_back_as_it_was_written() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(DRAFT), type=Draft) == DRAFT


MOST_COPIED = {
    "saver: Draft": 4,  # the decision: where the attempt stands
    "snapshotter: replace": 5,  # the copy completes the draft: what was captured
    "snapshotter: CopyResult": 3,
    "writer: Tensor": 3,
    "two_phase_commit: _Begin": 7,  # from rank 0 to the others
    "two_phase_commit: replace": 5,  # what rank 0 decides
    "run: Profile": 4,  # to pacing
    "reports: Checkpoint": 5,  # to the server
}
"""Calls that take over three or more fields of other objects, and how many."""


def copied_fields() -> Iterator[tuple[str, int]]:
    for path in sorted(SAVE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            taken = [keyword for keyword in node.keywords if keyword.arg and is_field(keyword.value)]
            if len(taken) >= 3:
                yield f"{path.stem}: {ast.unparse(node.func).rpartition('.')[2]}", len(taken)


def is_field(value: ast.expr) -> bool:
    """Return whether an expression is a field of another object."""
    is_attribute = isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name)
    return is_attribute and value.value.id != "self"  # type: ignore[attr-defined]


def test_fields_are_copied_one_by_one_only_where_a_checkpoint_changes_hands() -> None:
    """Another description of a checkpoint would add a line: complete the draft instead."""
    assert sorted(copied_fields()) == sorted(MOST_COPIED.items())
