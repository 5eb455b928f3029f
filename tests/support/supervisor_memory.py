"""Memory that a supervisor holds, for tests of the memory tier."""

import os

import pytest

from holdfast.save.shared_buffers import SLOT_COUNT, SupervisorMemory
from holdfast.store import Lineage


@pytest.fixture
def folder(tmp_path):
    """Of a supervisor that holds memory."""
    made = tmp_path / "supervision"
    made.mkdir()
    held = SupervisorMemory(made)
    assert len(held) == SLOT_COUNT
    yield made
    held.close()


def lineage_of(number, attempt, iteration=0):
    return Lineage(number=number, iteration=iteration, parent=None, order=None, attempt=attempt, created_at=0.0)


def flip(slot, at):
    """One bit of what is in memory."""
    fd = slot.open()
    (found,) = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([found ^ 16]), at)
    os.close(fd)
