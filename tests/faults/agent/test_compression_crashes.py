"""Compressed checkpoints with parity, cut at every point by a power cut, a kill or an error."""

import contextlib
import errno
import itertools
import mmap
import random
import shutil
import struct

import pytest

from holdfast.checkpoint import restore
from holdfast.checkpoint.scrub import scrub
from holdfast.errors import HoldfastError
from holdfast.format import manifest as fmt
from holdfast.format.parity_file import ParityCode
from holdfast.protocol.ids import checkpoint_id
from holdfast.save.draft import Draft
from holdfast.save.writer import write_checkpoint
from holdfast.store.local import LocalStore
from tests.support.simulated_files import FailingFiles, SimulatedProcessDeath, crash_states, plant

pytest.importorskip("numpy")

JOB = "job"
COUNT = 1100
CODE = ParityCode(2, 1)
FIRST, SECOND, THIRD = (checkpoint_id(iteration, 1) for iteration in (1, 2, 3))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """As many kinds of write in a file of a few blocks as there are in one of a gigabyte."""
    monkeypatch.setattr("holdfast.store.local_writer.WRITE_BYTES", fmt.BLOCK_BYTES)
    monkeypatch.setattr("holdfast.store.local_writer.DIRECT_BYTES", fmt.BLOCK_BYTES)
    monkeypatch.setattr("holdfast.save.reuse.MIN_SHARED_BYTES", 1)
    monkeypatch.setattr("holdfast.format.encoding.OWN_BLOCK_BYTES", 1024)


def numbers(seed):
    draw = random.Random(seed)
    return struct.pack(f"<{COUNT}f", *(draw.gauss(0, 1) for _ in range(COUNT)))


BASE = numbers(0)


def commit(store, iteration, parent=None, attempt=1, parity=CODE):
    """Commit a base and an adapter as it is after `iteration`."""
    slots = fmt.lay_out([("base", "F32", (COUNT,)), ("adapter", "F32", (COUNT,))])
    payload = memoryview(mmap.mmap(-1, slots[-1].end))
    for slot in slots:
        payload[slot.start : slot.end] = BASE if slot.name == "base" else numbers(iteration)
    draft = Draft(
        job=JOB, iteration=iteration, lineage=1, attempt=attempt, kind="scheduled", created_at=0.0, parent=parent,
        world_size=1, parity=parity, compress=True, slots=slots, unchanged={"base"},
    )  # fmt: skip
    return write_checkpoint(store, draft, payload)


def require_sound(store):
    """Load every listed checkpoint; return the list."""
    there = store.checkpoints(JOB)
    for checkpoint in there:
        found = restore.load(store, JOB, checkpoint)
        assert bytes(found.tensors["base"].numpy()) == BASE
        assert bytes(found.tensors["adapter"].numpy()) == numbers(int(checkpoint.partition("-")[0]))
        assert all(file.encoding is not None for file in found.manifest.files)
        assert scrub(store, JOB, checkpoint).state == "sound"
    return there


def train(store, acknowledged=lambda listed: None, parity=CODE):
    """Two checkpoints that share the compressed base of the first, which retention removes meanwhile."""
    commit(store, 1, parity=parity)
    acknowledged([FIRST])
    commit(store, 2, FIRST, parity=parity)
    acknowledged([FIRST, SECOND])
    acknowledged([SECOND])  # from here on the first may be gone
    store.delete(JOB, FIRST, 1)
    commit(store, 3, SECOND, parity=parity)
    acknowledged([SECOND, THIRD])


def test_no_power_cut_lists_a_compressed_checkpoint_that_is_not_whole_or_loses_one(begun, memory):
    store, files = begun()
    promised = [(len(files.log), set())]
    train(store, lambda listed: promised.append((len(files.log), set(listed))), parity=None)
    seen, place = {}, memory / "after"
    for point in range(promised[0][0], len(files.log) + 1):
        kept = [listed for at, listed in promised if at <= point][-1]
        for tree in crash_states(files, point):
            if (key := repr(tree)) not in seen:
                shutil.rmtree(place, ignore_errors=True)
                plant(tree, place)
                seen[key] = set(require_sound(LocalStore(place / "store")))
            assert kept <= seen[key]
    assert len(seen) > 40


def test_a_killed_commit_leaves_sound_checkpoints_and_the_next_attempt_goes_on(begun):
    for number in itertools.count(1):
        store, files = begun()
        promised = [set()]
        files.dies_at, files.changes = number, 0
        try:
            train(store, lambda listed, promised=promised: promised.append(set(listed)))
        except SimulatedProcessDeath:
            files.revive()
        else:
            break
        there = require_sound(store)
        assert promised[-1] <= set(there)
        attempt = store.acquire_attempt(JOB, "next").number
        commit(store, 4, max(there, default=None), attempt)
        assert require_sound(store) == [*there, checkpoint_id(4, 1)]
        assert not list((store.root / JOB).glob(".tmp-*"))
    assert number > 30


@pytest.mark.parametrize("call", ["link", "create", "write", "sync", "rename"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_an_error_of_any_call_leaves_sound_checkpoints(memory, call, error):
    for nth in itertools.count(1):
        root = memory / f"{nth}"
        sound = LocalStore(root)
        sound.acquire_attempt(JOB, "uid")
        files = FailingFiles((call,), nth, error)
        with contextlib.suppress(OSError, HoldfastError):
            train(LocalStore(root, files))
        require_sound(sound)
        if not files.failed:
            break
    assert nth > 2
