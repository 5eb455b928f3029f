"""The report of what the memory of a host holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.memory_tier.held_snapshots import LOOK_SECONDS, REPEAT_SECONDS, HeldSnapshots
from holdfast.protocol.field_types import HeldSnapshot
from holdfast.save.completion_marker import write_marker
from holdfast.save.draft import Draft
from holdfast.save.shared_buffers import SharedBuffer
from tests.support.clock import FakeClock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(6):
        SharedBuffer(tmp_path, number).memory.touch()
    return tmp_path


@pytest.fixture
def held(folder: Path, clock: FakeClock) -> HeldSnapshots:
    return HeldSnapshots(folder, "job", clock)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def put(folder: Path, number: int, iteration: int, rank: int = 0, job: str = "job", begun: str = "a") -> None:
    draft = Draft(
        job=job, iteration=iteration, lineage=1, attempt=1, created_at=0.0, versions={}, world_size=2, parent=None,
        kind="scheduled", uid="first", rank=rank, folder=begun,
    )  # fmt: skip
    write_marker(SharedBuffer(folder, number).marker, draft)


def snapshots(held: HeldSnapshots, clock: FakeClock) -> list[HeldSnapshot] | None:
    clock.now += LOOK_SECONDS
    report = held.sample()
    return None if report is None else report.snapshots


def test_parts_of_one_snapshot_are_reported_together(held, folder, clock):
    put(folder, 0, 40, rank=0)
    put(folder, 1, 40, rank=1)
    put(folder, 2, 30, rank=1)
    put(folder, 3, 40, rank=0, begun="b")
    put(folder, 4, 90, job="another")
    found = snapshots(held, clock)
    assert sorted((one.id, one.world_size, one.ranks) for one in found) == [
        ("000000000030-1", 2, [1]),
        ("000000000040-1", 2, [0]),
        ("000000000040-1", 2, [0, 1]),
    ]
    assert len({one.origin for one in found if one.id == "000000000040-1"}) == 2


def test_it_is_reported_once_and_again_after_a_change_or_a_while(held, folder, clock):
    assert snapshots(held, clock) == []
    assert held.sample() is None
    assert snapshots(held, clock) is None
    put(folder, 0, 40)
    assert [one.id for one in snapshots(held, clock)] == ["000000000040-1"]
    SharedBuffer(folder, 0).remove_marker()
    assert snapshots(held, clock) == []
    clock.now += REPEAT_SECONDS
    assert snapshots(held, clock) == []


def test_a_slot_that_is_overwritten_or_damaged_holds_nothing(held, folder, clock):
    put(folder, 0, 40)
    assert snapshots(held, clock)
    put(folder, 0, 41)
    assert [one.id for one in snapshots(held, clock)] == ["000000000041-1"]
    marker = SharedBuffer(folder, 0).marker
    content = bytearray(marker.read_bytes())
    content[-1] ^= 1
    marker.unlink()
    marker.write_bytes(content)
    assert snapshots(held, clock) == []
