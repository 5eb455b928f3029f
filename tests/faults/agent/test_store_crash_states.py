"""Every state that a power cut can leave of what the store really does, judged by what really reads it."""

import itertools
import mmap
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from holdfast.checkpoint import restore
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.store import Attempt, Lineage
from holdfast.store.local import LocalStore
from tests.support.edited_manifests import encode_manifest
from tests.support.simulated_files import (
    RecordedFiles,
    SimulatedProcessDeath,
    Tree,
    crash_states,
    plant,
)

JOB, FILE = "job", "rank-0.safetensors"
FIRST, SECOND, THIRD, NEXT = "000000000001-1", "000000000002-1", "000000000003-2", "000000000004-9"
TORN = "torn"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """As many kinds of write in a file of three blocks as there are in one of a gigabyte."""
    monkeypatch.setattr("holdfast.store.local_writer.WRITE_BYTES", fmt.BLOCK_BYTES)
    monkeypatch.setattr("holdfast.store.local_writer.DIRECT_BYTES", fmt.BLOCK_BYTES)


class Expectation(NamedTuple):
    """From this place in the log on, `what` must be one of `allowed`."""

    place: int
    what: tuple
    allowed: tuple


class StoreUser:
    """What a job asks of its store, and what it may rely on after each answer."""

    def __init__(self, files: RecordedFiles) -> None:
        self.files = files
        self.expectations: list[Expectation] = []
        self.attempt = 0

    def start(self):
        self.store = LocalStore(self.files.base / "store", self.files)
        self.attempt = self.store.acquire_attempt(JOB, "uid").number
        self.expect(("attempt", self.attempt), True)

    def begin_lineage(self, number):
        lineage = Lineage(
            number=number, iteration=0, parent=None, order=None, attempt=self.attempt, created_at=0.0
        )
        self.allow(("lineage", number), None, lineage)
        self.store.append(JOB, lineage)
        self.expect(("lineage", number), lineage)

    def save(self, checkpoint, value, *, instead_of=None, by_another=False):
        self.allow((checkpoint,), instead_of, None, value)
        writer = joined if by_another else None
        write(self.store, checkpoint, self.attempt, value, replace=instead_of is not None, through=writer)
        self.expect((checkpoint,), value)

    def delete(self, checkpoint, value):
        self.allow((checkpoint,), value, None)
        self.store.delete(JOB, checkpoint, self.attempt)
        self.expect((checkpoint,), None)

    @property
    def answers(self):
        """Places in the log right after something was acknowledged: where a missing sync shows."""
        return sorted({each.place for each in self.expectations if len(each.allowed) == 1})

    def expect(self, what, *allowed):
        self.expectations.append(Expectation(len(self.files.log), what, allowed))

    def allow(self, what, *allowed):
        """As soon as something is done, and not before."""
        self.expectations.append(Expectation(len(self.files.log) + 1, what, allowed))


def joined(store, checkpoint, attempt, place):
    """What another process writes with."""
    return LocalStore(store.root, store.files).join(JOB, checkpoint, attempt, place, 0)


def write(store, checkpoint, attempt, value, *, replace=False, through=None):
    payload = memoryview(mmap.mmap(-1, fmt.BLOCK_BYTES + 904))
    payload[:] = bytes([value]) * len(payload)
    header, manifest = described(checkpoint, payload)
    writer = store.begin(JOB, checkpoint, attempt, len(payload))
    part = through(store, checkpoint, attempt, writer.folder) if through else writer
    part.write(FILE, [header, payload])
    writer.commit(manifest, replace=replace)


def described(checkpoint, payload):
    slots = fmt.lay_out([("weights", "U8", (len(payload),))])
    header = fmt.payload_header(slots, {})
    iteration, lineage = parse_checkpoint_id(checkpoint)
    size = len(header) + len(payload)
    shape = (len(payload),)
    tensor = fmt.Tensor(
        name="weights", dtype="U8", shape=shape, global_shape=shape, offsets=(0,), file=FILE,
        start=len(header), end=size, digest=fmt.digest(payload),
    )  # fmt: skip
    file = fmt.File(name=FILE, size_bytes=size, header_bytes=len(header), header_digest=fmt.digest(header))
    manifest = fmt.Manifest(
        job=JOB, iteration=iteration, lineage=lineage, attempt=1, kind="scheduled", created_at=0.0,
        parent=None, world_size=1, files=[file], tensors=[tensor], state={},
    )  # fmt: skip
    return header, encode_manifest(manifest)


def a_jobs_life(life: StoreUser):
    life.start()
    life.begin_lineage(1)
    life.save(FIRST, 1)
    life.save(SECOND, 2)
    life.begin_lineage(2)
    life.save(THIRD, 4)
    life.save(SECOND, 3, instead_of=2)
    life.delete(FIRST, 1)


class Judge:
    """Plants states and reads them; what was read of one is remembered."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.seen: dict[tuple, tuple[Tree, dict]] = {}

    def violations(self, life: StoreUser, points=None):
        """(place in the log, what was expected, what was read), state by state."""
        for point in points or range(len(life.files.log) + 1):
            expected = {e.what: e.allowed for e in life.expectations if e.place <= point}
            for tree in crash_states(life.files, point):
                found = self.read(tree)
                for what in found.keys() | expected.keys():
                    if found.get(what) not in expected.get(what, (True, None)):
                        yield point, what, expected.get(what), found.get(what)

    def read(self, tree) -> dict:
        key = frozen(tree)
        if key not in self.seen:
            self.seen[key] = tree, read(self.plant(tree))
        return self.seen[key][1]

    def plant(self, tree) -> LocalStore:
        shutil.rmtree(self.place, ignore_errors=True)
        plant(tree, self.place)
        return LocalStore(self.place / "store")


def frozen(tree):
    return tuple((name, frozen(what) if isinstance(what, dict) else what) for name, what in tree.items())


def read(store) -> dict:
    """What a job that starts now would find: checkpoints that are listed and what is in them, records."""
    found = {(checkpoint,): value_of(store, checkpoint) for checkpoint in store.checkpoints(JOB)}
    found |= {("lineage", lineage.number): lineage for lineage in store.records(JOB, Lineage)}
    for number in range(1, store.latest_attempt(JOB) + 1):
        record = store.root / JOB / "attempts" / f"{number:08d}.json"
        found["attempt", number] = record.exists() and is_whole(record)
    return found


def is_whole(record):
    try:
        return msgspec.json.decode(record.read_bytes(), type=Attempt).number == int(record.stem)
    except msgspec.DecodeError:
        return TORN


def value_of(store, checkpoint):
    try:
        manifest = restore.verify(store, JOB, checkpoint)
    except DamagedCheckpoint:
        return TORN
    data = (store.path(JOB, checkpoint) / FILE).read_bytes()[manifest.files[0].header_bytes :]
    assert len(set(data)) == 1, "verified, and yet not what was written"
    return data[0]


@pytest.fixture
def judge(memory):
    return Judge(memory / "after-the-cut")


@pytest.fixture
def begin(memory, monkeypatch):
    """Lives, each on a disk of its own, alike down to their temporary names."""
    numbers = itertools.count()

    def begin(**options):
        tokens = itertools.count()
        monkeypatch.setattr("secrets.token_hex", lambda size: f"{next(tokens):0{2 * size}x}")
        base = memory / f"disk-{next(numbers)}"
        base.mkdir()
        return StoreUser(RecordedFiles(base, **options))

    return begin


def test_no_power_cut_loses_what_was_acknowledged_or_lists_what_is_torn(begin, judge):
    life = begin()
    a_jobs_life(life)
    assert list(judge.violations(life)) == []
    assert sum(1 for point in range(len(life.files.log) + 1) for _ in crash_states(life.files, point)) > 3000


def a_life_in_which_others_write(life: StoreUser):
    life.start()
    life.save(FIRST, 1, by_another=True)
    life.save(SECOND, 2, by_another=True)
    life.save(SECOND, 3, instead_of=2, by_another=True)
    life.delete(FIRST, 1)


def test_what_another_process_wrote_is_as_durable(begin, judge):
    life = begin()
    a_life_in_which_others_write(life)
    assert list(judge.violations(life)) == []


def test_every_sync_is_needed_and_its_absence_seen(begin, judge):
    whole = begin()
    a_jobs_life(whole)
    for number in range(1, whole.files.syncs + 1):
        life = begin(without_sync=number)
        a_jobs_life(life)
        assert any(judge.violations(life, life.answers)), f"nothing is lost without sync {number}"


def test_a_job_carries_on_after_any_power_cut_and_leaves_nothing_lying_about(begin, judge):
    life = begin()
    a_jobs_life(life)
    assert list(judge.violations(life)) == []
    for tree, found in list(judge.seen.values()):
        store = judge.plant(tree)
        attempt = store.acquire_attempt(JOB, "next").number
        write(store, NEXT, attempt, 9)
        assert read(store).items() >= {(NEXT,): 9, ("attempt", attempt): True, **found}.items()
        assert [
            path for path in store.root.rglob("*") if re.search(r"/\.tmp|/\.\d+\.json|damaged", str(path))
        ] == []


def died_at(life, script):
    """Whether it did not get through."""
    try:
        script(life)
    except SimulatedProcessDeath:
        return True
    return False


def taken_over(life, **options):
    """The life of the process that was started after another died, up to what it can rely on."""
    life.files.revive(**options)
    beginning = len(life.files.log)
    life.start()
    life.save(NEXT, 9)
    return [place for place in life.answers if place >= beginning]


def test_what_a_process_left_unsynced_as_it_died_harms_none_after_it(begin, judge):
    for number in itertools.count(1):
        life = begin(dies_at=number)
        if not died_at(life, a_jobs_life):
            break
        assert list(judge.violations(life, taken_over(life))) == []
    assert number > 80


def test_the_next_process_syncs_names_that_one_left_unsynced_as_it_died(begin, judge):
    for without_sync in (1, 2, 3):  # of the store, the job, and what is in it
        lives = [begin(dies_at=number) for number in range(1, 10)]
        assert all(died_at(life, StoreUser.start) for life in lives)
        assert any(any(judge.violations(life, taken_over(life, without_sync=without_sync))) for life in lives), (
            f"nothing is lost without sync {without_sync}"
        )
