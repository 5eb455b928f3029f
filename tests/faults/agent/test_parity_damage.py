"""Damage to checkpoints with parity: all of it is found, what the code can repair is repaired to the bit."""

import errno
import os
import random
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from holdfast.checkpoint import restore
from holdfast.checkpoint.repair import repair_in_memory
from holdfast.checkpoint.scrub import scrub
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.parity_file import PARITY_BLOCK_BYTES, ParityCode, parse_parity
from holdfast.format.parity_stripes import StripeLayout
from holdfast.protocol.wire import Notice
from holdfast.store import LocalStore, open_store
from holdfast.system.files import Files
from holdfast.telemetry.reporter import Reporter
from tests.support.edited_manifests import MANIFEST_COPIES, decode_manifest
from tests.support.persist_job import JOB, faulty, running
from tests.support.tiny_job import Trainer

CODE = ParityCode(10, 2)
PAYLOAD, PARITY, FIRST = "rank-0.safetensors", "rank-0.parity", "000000000001-1"
ELEMENTS = 700_000
"""2.8 MB: 69 stripes."""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    store = open_store(root)
    store.acquire_attempt(JOB, "first")
    generator = torch.Generator().manual_seed(1)
    tensors = {"w": torch.randn(ELEMENTS, generator=generator), "b": torch.randn(7, generator=generator)}
    with running(store, tensors=tensors) as job:
        assert job.checkpoint(parity=CODE).state == "durable"
    return root, tensors


class DamagedStore:
    """A copy of a store with one checkpoint, and what its files were before any damage."""

    def __init__(self, written, place):
        source, self.tensors = written
        shutil.copytree(source, place)
        self.store = open_store(place)
        self.folder = Path(place) / JOB / FIRST
        self.sound = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        self.layout = StripeLayout(CODE, len(self.sound[PAYLOAD]))

    def damage(self, name, change):
        data = bytearray((self.folder / name).read_bytes())
        change(data)
        (self.folder / name).write_bytes(data)

    def flip(self, name, error_rate, rng):
        """Flip independent bits, and return how many blocks they are in."""
        bits = 8 * len(self.sound[name])
        count = max(1, round(bits * error_rate))
        flipped = rng.sample(range(bits), count)

        def change(data):
            for bit in flipped:
                data[bit // 8] ^= 1 << bit % 8

        self.damage(name, change)
        return {bit // 8 // PARITY_BLOCK_BYTES for bit in flipped}

    def spoil_blocks(self, name, blocks, rng, start=0):
        def change(data):
            for block in blocks:
                at = start + block * PARITY_BLOCK_BYTES
                size = min(PARITY_BLOCK_BYTES, len(data) - at)
                data[at : at + size] = rng.randbytes(size)

        self.damage(name, change)

    def is_within_strength(self, blocks, parity_blocks=()):
        """Whether no stripe lost more blocks than it has parity blocks."""
        lost = [block % self.layout.stripes for block in (*blocks, *parity_blocks)]
        return max(map(lost.count, lost)) <= CODE.parity_blocks

    def scrub(self, repair=True):
        return scrub(self.store, JOB, FIRST, repair=repair)

    def require_as_written(self):
        assert {path.name: path.read_bytes() for path in self.folder.iterdir()} == self.sound

    def require_restorable(self):
        loaded = restore.load(self.store, JOB, FIRST)
        assert loaded.repaired
        for name, tensor in self.tensors.items():
            assert torch.equal(loaded.tensors[name], tensor)
        return loaded

    def require_repaired(self, *names):
        """Restores are exact before the repair, and the files are those that were written after it."""
        before = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        found = self.scrub(repair=False)
        assert (found.state, {each.file for each in found.files}) == ("repairable", set(names))
        assert {path.name: path.read_bytes() for path in self.folder.iterdir()} == before
        found = self.scrub()
        assert (found.state, {each.file for each in found.files}) == ("repaired", set(names))
        self.require_as_written()
        assert self.scrub().state == "sound"

    def require_refused(self, name, reason):
        with pytest.raises(DamagedCheckpoint, match=name):
            restore.load(self.store, JOB, FIRST)
        before = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        found = self.scrub()
        assert found.state == "damaged"
        assert reason in {each.file: each.reason for each in found.files}[name]
        assert (self.folder / name).exists() == (name in before)
        if name in before:
            assert (self.folder / name).read_bytes() == before[name]


@pytest.fixture
def victim(written, tmp_path):
    return DamagedStore(written, tmp_path / "s")


def test_a_checkpoint_with_parity_has_a_parity_file_and_copies_of_its_manifest(victim):
    assert sorted(victim.sound) == [
        "manifest-copy-1.json", "manifest-copy-2.json", "manifest.json", PARITY, PAYLOAD,
    ]  # fmt: skip
    assert victim.scrub().state == "sound"
    assert len(victim.sound[PARITY]) < 0.21 * len(victim.sound[PAYLOAD])
    assert restore.load(victim.store, JOB, FIRST).repaired == ()


@pytest.mark.parametrize("error_rate", [1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
def test_flipped_bits_are_all_found_and_repaired_within_the_strength(written, tmp_path, error_rate):
    outcomes = set()
    for seed in range(4):
        victim = DamagedStore(written, tmp_path / f"{seed}")
        blocks = victim.flip(PAYLOAD, error_rate, random.Random(f"{error_rate}, {seed}"))
        is_within = victim.is_within_strength(blocks)
        outcomes.add(is_within)
        if is_within:
            victim.require_restorable()
            victim.require_repaired(PAYLOAD)
        else:
            victim.require_refused(PAYLOAD, "parity 10+2 cannot repair" if error_rate < 1e-3 else "")
    assert outcomes == {error_rate < 3e-6} or error_rate == 1e-6


def test_flipped_bits_in_all_files_at_once_are_repaired(written, tmp_path):
    for seed in range(5):
        victim, rng = DamagedStore(written, tmp_path / f"{seed}"), random.Random(seed)
        names = [PAYLOAD, PARITY, rng.choice([fmt.MANIFEST, *MANIFEST_COPIES])]
        for name in names:
            victim.flip(name, 1e-8, rng)
        victim.require_repaired(*names)


def test_lost_sectors_are_repaired_within_the_strength(written, tmp_path):
    for seed in range(20):
        victim, rng = DamagedStore(written, tmp_path / f"{seed}"), random.Random(seed)
        blocks = rng.sample(range(victim.layout.blocks), rng.choice([1, 2, 5, 10, 30]))
        victim.spoil_blocks(PAYLOAD, blocks, rng)
        if victim.is_within_strength(blocks):
            victim.require_restorable()
            victim.require_repaired(PAYLOAD)
        else:
            victim.require_refused(PAYLOAD, "parity 10+2 cannot repair")


def test_two_sectors_of_every_stripe_may_be_lost(victim):
    rng = random.Random(5)
    rows = [rng.sample(range(9), 2) for _ in range(victim.layout.stripes)]  # the last row may be shorter
    blocks = [row * victim.layout.stripes + stripe for stripe, two in enumerate(rows) for row in two]
    victim.spoil_blocks(PAYLOAD, blocks, rng)
    loaded = victim.require_restorable()
    assert f"{2 * victim.layout.stripes} blocks of 4096 bytes damaged" in loaded.repaired[0]
    victim.require_repaired(PAYLOAD)


def test_a_third_lost_sector_of_one_stripe_is_refused_by_name(victim):
    victim.spoil_blocks(PAYLOAD, [7, 7 + victim.layout.stripes, 7 + 2 * victim.layout.stripes], random.Random(6))
    found = victim.scrub(repair=False)
    assert found.state == "damaged"
    assert found.files[0].damage == (
        "3 blocks of 4096 bytes damaged (bytes 28,672 to 32,768, 311,296 to 315,392, 593,920 to 598,016)"
    )
    victim.require_refused(PAYLOAD, "parity 10+2 cannot repair 3 blocks")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.19])
def test_a_cut_tail_is_repaired_up_to_the_share_of_parity(victim, share):
    length = len(victim.sound[PAYLOAD]) - max(1, int(share * len(victim.sound[PAYLOAD])))
    victim.damage(PAYLOAD, lambda data: data.__delitem__(slice(length, None)))
    victim.require_restorable()
    victim.require_repaired(PAYLOAD)


def test_a_cut_tail_beyond_the_share_of_parity_is_refused(victim):
    victim.damage(PAYLOAD, lambda data: data.__delitem__(slice(len(data) * 3 // 4, None)))
    victim.require_refused(PAYLOAD, "parity 10+2 cannot repair")


def test_bytes_behind_the_end_are_removed(victim):
    victim.damage(PAYLOAD, lambda data: data.extend(b"more"))
    victim.require_restorable()
    victim.require_repaired(PAYLOAD)


def test_a_missing_payload_file_is_refused(victim):
    (victim.folder / PAYLOAD).unlink()
    victim.require_refused(PAYLOAD, "parity 10+2 cannot repair a file of which that much is missing")


@pytest.mark.parametrize("change", ["missing", "empty", "cut", "flipped", "extended"])
def test_a_damaged_parity_file_is_computed_again(victim, change):
    if change == "missing":
        (victim.folder / PARITY).unlink()
    elif change == "flipped":
        victim.flip(PARITY, 1e-5, random.Random(8))
    elif change == "extended":
        victim.damage(PARITY, lambda data: data.extend(b"."))
    else:
        victim.damage(PARITY, lambda data: data.__delitem__(slice(0 if change == "empty" else 99_999, None)))
    assert restore.load(victim.store, JOB, FIRST).repaired == ()
    victim.require_repaired(PARITY)


def test_without_its_parity_file_damage_is_refused_by_name(victim):
    victim.spoil_blocks(PAYLOAD, [3], random.Random(9))
    (victim.folder / PARITY).unlink()
    victim.require_refused(PAYLOAD, "rank-0.parity is missing or empty as well")
    reasons = {each.file: each.reason for each in victim.scrub().files}
    assert reasons[PARITY] == f"{PAYLOAD} is damaged as well"


def test_the_parity_file_of_another_checkpoint_repairs_nothing(victim):
    victim.spoil_blocks(PAYLOAD, [3], random.Random(9))
    victim.damage(PARITY, lambda data: data.__setitem__(slice(None), random.Random(1).randbytes(len(data))))
    victim.require_refused(PAYLOAD, "no block of it matches its parity file")


class BadSectors(Files):
    """A disk that cannot read some blocks of payload files, until they are written again."""

    def __init__(self, blocks):
        self.blocks, self.refused = set(blocks), 0
        self._payloads = set()

    def open(self, path):
        fd = super().open(path)
        self._payloads.discard(fd)
        if path.name == PAYLOAD:
            self._payloads.add(fd)
        return fd

    def rename(self, source, target):
        super().rename(source, target)
        self.blocks = set()

    def read(self, fd, target, at):
        blocks = range(at // PARITY_BLOCK_BYTES, -(-(at + len(target)) // PARITY_BLOCK_BYTES))
        if fd in self._payloads and self.blocks.intersection(blocks):
            self.refused += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(fd, target, at)


def test_sectors_that_the_disk_cannot_read_are_repaired(victim):
    files = BadSectors([10, 11, 300])
    victim.store = LocalStore(victim.store.root, files)
    loaded = victim.require_restorable()
    assert "3 blocks of 4096 bytes damaged (bytes 40,960 to 49,152, 1,228,800 to 1,232,896)" in loaded.repaired[0]
    assert scrub(victim.store, JOB, FIRST).state == "repairable"
    assert files.refused
    assert scrub(victim.store, JOB, FIRST, repair=True).state == "repaired"
    assert scrub(victim.store, JOB, FIRST).state == "sound"
    victim.require_as_written()


def test_impossible_sizes_in_a_manifest_are_refused_without_reading_that_much(victim):
    manifest = decode_manifest(victim.sound[fmt.MANIFEST])
    (file,), size = manifest.files, 1 << 50
    parity = msgspec.structs.replace(file.parity, size_bytes=StripeLayout(CODE, size).end)
    large = msgspec.structs.replace(file, size_bytes=size, parity=parity)
    assert parity.fault(PAYLOAD, size) is None
    with pytest.raises(DamagedCheckpoint, match="that much is missing"):
        repair_in_memory(victim.store, JOB, FIRST, large)


@pytest.mark.parametrize("copy", [0, 1])
def test_one_copy_of_the_table_of_digests_is_enough(victim, copy):
    start = (0, victim.layout.copy_start)[copy]
    table = slice(start, start + victim.layout.table_bytes)
    victim.damage(PARITY, lambda data: data.__setitem__(table, bytes(victim.layout.table_bytes)))
    victim.spoil_blocks(PAYLOAD, [2, 500], random.Random(10))
    victim.require_restorable()
    victim.require_repaired(PAYLOAD, PARITY)


def test_a_damaged_entry_of_both_tables_costs_a_block_of_its_stripe(victim):
    entry = slice(8 * 20, 8 * 21)  # block 20 is sound, and nothing shows that
    at = victim.layout.copy_start + 8 * 20

    def change(data):
        data[entry] = bytes(8)
        data[at : at + 8] = bytes(8)

    victim.damage(PARITY, change)
    victim.spoil_blocks(PAYLOAD, [20 + victim.layout.stripes], random.Random(11))
    victim.require_restorable()
    victim.require_repaired(PAYLOAD, PARITY)


def test_parity_blocks_count_as_lost_blocks_of_their_stripe(written, tmp_path):
    for lost in (1, 2):
        victim, rng = DamagedStore(written, tmp_path / f"{lost}"), random.Random(lost)
        victim.spoil_blocks(PAYLOAD, [4], rng)
        rows = [row * victim.layout.stripes + 4 for row in range(lost)]
        victim.spoil_blocks(PARITY, rows, rng, start=victim.layout.parity_start)
        if lost == 1:
            victim.require_restorable()
            victim.require_repaired(PAYLOAD, PARITY)
        else:
            victim.require_refused(PAYLOAD, "parity 10+2 cannot repair 1 block")


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_manifest_is_read_from_a_copy(victim, damaged):
    names = (fmt.MANIFEST, *MANIFEST_COPIES)[:damaged]
    for name in names:
        victim.flip(name, 1e-4, random.Random(12))
    assert victim.require_restorable().repaired[0].startswith("manifest.json: it is damaged, and manifest-copy-")
    assert victim.store.checkpoints(JOB) == [FIRST]
    victim.require_repaired(*names)


def test_a_manifest_without_a_sound_copy_is_refused(victim):
    for name in (fmt.MANIFEST, *MANIFEST_COPIES):
        victim.damage(name, lambda data: data.__setitem__(slice(100, 110), bytes(10)))
    victim.require_refused(fmt.MANIFEST, "there is no sound copy of it")


def test_damage_without_parity_is_listed_by_range(written, tmp_path):
    store = open_store(tmp_path / "s")
    store.acquire_attempt(JOB, "first")
    with running(store, tensors=written[1]) as job:
        job.checkpoint()
    path = store.path(JOB, FIRST) / PAYLOAD
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    data[-1] ^= 1
    path.write_bytes(data)
    found = scrub(store, JOB, FIRST, repair=True)
    assert found.state == "damaged"
    assert [each.damage for each in found.files] == [
        "the header does not match its digest; tensor b does not match its digest"
    ]
    assert found.files[0].reason == "it has no parity"
    assert path.read_bytes() == data


def test_a_payload_that_is_cut_off_is_repaired(tmp_path):
    store = open_store(tmp_path)
    store.acquire_attempt(JOB, "first")
    with running(store) as job:
        run = job.checkpoint(parity=ParityCode(3, 2))
        assert run.state == "durable"
    assert scrub(store, JOB, FIRST).state == "sound"
    path = store.path(JOB, FIRST) / PAYLOAD
    path.write_bytes(path.read_bytes()[:-50_000])
    assert restore.load(store, JOB, FIRST).repaired


def test_a_store_that_fails_while_parity_is_written_keeps_no_part_of_the_checkpoint(tmp_path):
    store = faulty(tmp_path, "errno", number=28)
    with running(store) as job:
        assert job.checkpoint(parity=CODE).state == "failed"
    assert open_store(tmp_path).checkpoints(JOB) == []
    assert list((tmp_path / JOB).glob(".tmp-*")) == []


class DamagedTraining:
    """A job that trained with parity until iteration 10; its newest checkpoint is damaged."""

    NEWEST = "000000000009-1"

    def __init__(self, store, monkeypatch):
        self.events = []
        monkeypatch.setattr(Reporter, "event", lambda reporter, event: self.events.append(event))
        monkeypatch.setenv("HOLDFAST_PARITY", "4+2")
        self.store = store
        Trainer(store).run(until=10).crash()
        path = Path(store) / "job" / self.NEWEST / PAYLOAD
        data = bytearray(path.read_bytes())
        data[5000] ^= 4
        path.write_bytes(data)

    @property
    def notices(self):
        found = [each.message for each in self.events if isinstance(each, Notice) and each.code == "repaired"]
        assert all(each.startswith(f"checkpoint {self.NEWEST} is damaged and was repaired") for each in found)
        return found


def test_a_start_resumes_exactly_from_a_damaged_checkpoint_and_says_so(tmp_path, monkeypatch, caplog):
    expected = Trainer(tmp_path / "other").run(until=20).crash().losses
    job = DamagedTraining(tmp_path / "s", monkeypatch)
    trainer = Trainer(tmp_path / "s")
    assert trainer.session.resume() == 9
    trainer.run(until=20).crash()
    assert trainer.losses == expected[9:]
    (notice,) = job.notices
    assert f"{PAYLOAD}: 1 block of 4096 bytes damaged (bytes 4,096 to 8,192)" in notice
    assert "holdfast store scrub --repair" in caplog.text
    assert scrub(open_store(tmp_path / "s"), "job", job.NEWEST, repair=True).state == "repaired"


def test_a_restore_in_place_repairs_in_memory_as_well(tmp_path, monkeypatch):
    job = DamagedTraining(tmp_path / "s", monkeypatch)
    trainer = Trainer(tmp_path / "s")
    trainer.session.resume()
    wanted = [9]

    def go_back(trainer):
        if trainer.session.iteration == 12 and wanted:
            trainer.session.restore(wanted.pop())

    trainer.run(until=15, after=go_back).crash()
    assert [iteration for iteration, _ in trainer.losses] == [10, 11, 12, 13, 10, 11, 12, 13, 14, 15]
    assert len(job.notices) == 2


def test_a_wrong_setting_names_itself(tmp_path):
    with pytest.raises(ValueError, match=r"parity='10': give off, or data and parity blocks as in 10\+2"):
        Trainer(tmp_path, parity="10")


def test_parity_without_numpy_says_what_to_install(monkeypatch):
    monkeypatch.setattr("holdfast.format.parity_file.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="parity needs numpy: pip install numpy, or give off"):
        parse_parity("10+2")
    assert parse_parity("off") is None
