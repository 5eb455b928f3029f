"""A commit with parity, and a repair, cut at every point by a power cut, a kill, an error or a newer attempt."""

import errno
import itertools
import mmap
import random
import shutil

import pytest

from holdfast.checkpoint import restore
from holdfast.checkpoint.scrub import scrub
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.parity_file import PARITY_BLOCK_BYTES, ParityCode
from holdfast.format.parity_stripes import build_parity
from holdfast.store.local import LocalStore
from tests.support.edited_manifests import MANIFEST_COPIES, encode_manifest
from tests.support.simulated_files import (
    FailingFiles,
    SimulatedProcessDeath,
    crash_states,
    plant,
)

JOB, FILE, PARITY, FIRST = "job", "rank-0.safetensors", "rank-0.parity", "000000000001-1"
COPY = MANIFEST_COPIES[0]
CODE = ParityCode(2, 1)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """As many kinds of write in a file of a few blocks as there are in one of a gigabyte."""
    monkeypatch.setattr("holdfast.store.local_writer.WRITE_BYTES", fmt.BLOCK_BYTES)
    monkeypatch.setattr("holdfast.store.local_writer.DIRECT_BYTES", fmt.BLOCK_BYTES)


class Written:
    """The files of a checkpoint as they should be, and as the disk has them."""

    def __init__(self, seed=1):
        payload = memoryview(mmap.mmap(-1, PARITY_BLOCK_BYTES + 100))
        payload[:] = random.Random(seed).randbytes(len(payload))
        header = fmt.payload_header(fmt.lay_out([("w", "U8", (len(payload),))]), {})
        parity, entry = build_parity(CODE, FILE, [header, payload])
        size, shape = len(header) + len(payload), (len(payload),)
        file = fmt.File(
            name=FILE, size_bytes=size, header_bytes=len(header), header_digest=fmt.digest(header), parity=entry
        )
        tensor = fmt.Tensor(
            name="w", dtype="U8", shape=shape, global_shape=shape, offsets=(0,), file=FILE, start=len(header),
            end=size, digest=fmt.digest(payload),
        )  # fmt: skip
        self.manifest = fmt.Manifest(
            job=JOB, iteration=1, lineage=1, attempt=1, kind="scheduled", created_at=float(seed), parent=None,
            world_size=1, files=[file], tensors=[tensor], state={},
        )  # fmt: skip
        data = encode_manifest(self.manifest)
        self.sound = {FILE: bytes(header) + bytes(payload), PARITY: bytes(parity), fmt.MANIFEST: data}
        self.sound |= dict.fromkeys(MANIFEST_COPIES, data)

    def commit(self, store, attempt, *damaged, **options):
        """Commit it, with the last byte of the files `damaged` changed."""
        files = {name: self._flipped(data) if name in damaged else data for name, data in self.sound.items()}
        writer = store.begin(JOB, FIRST, attempt, 0)
        for name in (FILE, PARITY):
            writer.write(name, [files[name]])
        for name in MANIFEST_COPIES:
            writer.write(name, [files[COPY]])
        writer.commit(files[fmt.MANIFEST], **options)

    def _flipped(self, data):
        return data[:-1] + bytes([data[-1] ^ 1])


WRITTEN = Written()


def outcome(store):
    """What a start would find: no checkpoint, a sound one, or one that is restored to the bit all the same."""
    if FIRST not in store.checkpoints(JOB):
        return None
    try:
        found = restore.load(store, JOB, FIRST)
    except DamagedCheckpoint:
        return "torn"
    assert bytes(found.tensors["w"].numpy()) == WRITTEN.sound[FILE][-len(found.tensors["w"]) :]
    return scrub(store, JOB, FIRST).state


class Judge:
    """Plants states of a disk and reads them; what was read of one is remembered."""

    def __init__(self, place):
        self.place, self.seen = place, {}

    def plant(self, tree):
        shutil.rmtree(self.place, ignore_errors=True)
        plant(tree, self.place)
        return LocalStore(self.place / "store")

    def outcomes(self, files, point):
        found = set()
        for tree in crash_states(files, point):
            key = repr(tree)
            if key not in self.seen:
                self.seen[key] = outcome(self.plant(tree))
            found.add(self.seen[key])
        return found


def test_no_power_cut_lists_a_checkpoint_without_its_parity(begun, memory):
    store, files = begun()
    before = len(files.log)
    WRITTEN.commit(store, 1)
    judge = Judge(memory / "after")
    for point in range(before, len(files.log)):
        assert judge.outcomes(files, point) <= {None, "sound"}
    assert judge.outcomes(files, len(files.log)) == {"sound"}
    assert len(judge.seen) > 30


def test_no_power_cut_during_a_repair_loses_what_could_be_repaired(begun, memory):
    store, files = begun()
    WRITTEN.commit(store, 1, FILE, PARITY, COPY)
    before = len(files.log)
    assert outcome(store) == "repairable"
    found = scrub(store, JOB, FIRST, repair=True)
    assert {each.file: each.state for each in found.files} == dict.fromkeys(
        (*MANIFEST_COPIES, FILE, PARITY), "repaired"
    )
    judge = Judge(memory / "after")
    for point in range(before, len(files.log)):
        assert judge.outcomes(files, point) <= {"repairable", "sound"}
    assert judge.outcomes(files, len(files.log)) == {"sound"}
    assert len(judge.seen) > 50


def test_a_repair_that_is_killed_is_made_up_for_by_the_next(begun):
    for number in itertools.count(1):
        store, files = begun()
        WRITTEN.commit(store, 1, FILE, PARITY, COPY)
        files.dies_at, files.changes = number, 0
        try:
            scrub(store, JOB, FIRST, repair=True)
        except SimulatedProcessDeath:
            files.revive()
        else:
            break
        assert outcome(store) in ("repairable", "sound")
        assert scrub(store, JOB, FIRST, repair=True).state in ("repaired", "sound")
        there = {path.name: path.read_bytes() for path in store.path(JOB, FIRST).iterdir()}
        assert there == WRITTEN.sound
    assert number > 15


@pytest.mark.parametrize(
    "call", ["create", "reserve", "write", "sync", "close", "rename", "sync_directory", "lock"]
)
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_an_error_during_a_repair_harms_nothing_and_is_reported(memory, call, error):
    for nth in itertools.count(1):
        sound = LocalStore(memory / f"{nth}")
        attempt = sound.acquire_attempt(JOB, "uid").number
        WRITTEN.commit(sound, attempt, FILE, COPY)
        files = FailingFiles((call,), nth, error)
        found = scrub(LocalStore(memory / f"{nth}", files), JOB, FIRST, repair=True)
        assert outcome(sound) in ("repairable", "sound")
        assert scrub(sound, JOB, FIRST, repair=True).state in ("repaired", "sound")
        assert {path.name: path.read_bytes() for path in sound.path(JOB, FIRST).iterdir()} == WRITTEN.sound
        if found.state == "repaired":
            break
        if found.state == "unreadable":  # the error came while a file was read
            assert call == "close"
            continue
        refused = [each.reason for each in found.files if each.state == "repairable"]
        assert len(refused) == 1
        assert refused[0].startswith("not repaired: ")
    assert nth > (call != "reserve")


@pytest.fixture
def during(memory):
    """Scrubs a store while something happens once, as soon as the scrub reads the payload."""

    def scrubbed(happens):
        store, done = LocalStore(memory / "store"), []
        store.acquire_attempt(JOB, "uid")
        WRITTEN.commit(store, 1, FILE)

        def pace(size_bytes):
            if not done:
                done.append(True)
                happens(store)

        return store, scrub(store, JOB, FIRST, repair=True, pace=pace)

    return scrubbed


def test_a_repair_is_fenced_by_a_newer_attempt(during):
    store, found = during(lambda store: store.acquire_attempt(JOB, "newer"))
    assert found.state == "repairable"
    assert found.files[0].reason == ("not repaired: attempt 2 of job has started; attempt 1 can no longer commit")
    assert outcome(store) == "repairable"


def test_a_repair_does_not_touch_a_newer_checkpoint_of_the_same_name(during):
    other = Written(seed=2)
    store, found = during(lambda store: other.commit(store, 1, replace=True))
    assert found.state != "sound"
    assert not any(each.state == "repaired" for each in found.files)
    assert {path.name: path.read_bytes() for path in store.path(JOB, FIRST).iterdir()} == other.sound


def test_a_checkpoint_that_retention_removes_meanwhile_is_no_damage(during):
    _, found = during(lambda store: store.delete(JOB, FIRST, 1))
    assert found.state == "removed"
