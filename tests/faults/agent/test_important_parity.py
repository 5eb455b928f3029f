"""Damage to checkpoints whose parity protects important bytes: repaired to the bit, or refused by name."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.checkpoint import restore
from holdfast.checkpoint.degraded import describe_lost, replace_lost
from holdfast.checkpoint.repair import repair_in_memory
from holdfast.checkpoint.scrub import scrub
from holdfast.checkpoint.verification import reread
from holdfast.errors import DamagedCheckpoint
from holdfast.format.important import IMPORTANT_BYTES
from holdfast.format.parity_file import PARITY_BLOCK_BYTES, ParityCode
from holdfast.store import open_store
from tests.support.persist_job import JOB, running

CODE = ParityCode(10, 2, is_important=True)
FIRST = "000000000001-1"
NUMBERS = 400_000
KINDS = ["float32", "bfloat16", "float16", "float64", "float32 planes", "bfloat16 planes"]


def tensors_of(dtype):
    generator = torch.Generator().manual_seed(1)
    numbers = (torch.randn(NUMBERS, generator=generator, dtype=torch.float32) * 0.02).to(dtype)
    return {
        "w": numbers,
        "tokens": torch.randint(50_000, (30_000,), generator=generator),
        "mask": torch.rand(5000, generator=generator) < 0.5,
        "step": torch.tensor(1234.0),
        "scale": torch.full((16,), 3.0),
    }


class Stored:
    """A copy of a store with one checkpoint, and what its files were before any damage."""

    def __init__(self, source, tensors, place):
        shutil.copytree(source, place)
        self.store, self.tensors = open_store(place), tensors
        self.folder = Path(place) / JOB / FIRST
        self.sound = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        self.manifest = restore.manifest(self.store, JOB, FIRST)
        (self.file,) = self.manifest.files

    @property
    def where(self):
        return self.store, JOB, FIRST

    def damage(self, name, change):
        data = bytearray((self.folder / name).read_bytes())
        change(data)
        (self.folder / name).write_bytes(data)

    def lose_blocks(self, name, blocks):
        def change(data):
            for block in blocks:
                piece = slice(block * PARITY_BLOCK_BYTES, (block + 1) * PARITY_BLOCK_BYTES)
                data[piece] = bytes(len(data[piece]))

        self.damage(name, change)

    def require_exact(self):
        loaded = restore.load(*self.where)
        for name, tensor in self.tensors.items():
            assert torch.equal(loaded.tensors[name], tensor), name
        return loaded

    def require_repaired(self, *names):
        assert scrub(*self.where).state == "repairable"
        found = scrub(*self.where, repair=True)
        assert (found.state, {each.file for each in found.files}) == ("repaired", set(names))
        assert {path.name: path.read_bytes() for path in self.folder.iterdir()} == self.sound
        assert scrub(*self.where).state == "sound"


@pytest.fixture(scope="module", params=KINDS)
def written(request, tmp_path_factory):
    dtype, _, planes = request.param.partition(" ")
    root, tensors = tmp_path_factory.mktemp("store"), tensors_of(getattr(torch, dtype))
    store = open_store(root)
    store.acquire_attempt(JOB, "first")
    with running(store, tensors=tensors) as job:
        assert job.checkpoint(parity=CODE, compress=bool(planes)).state == "durable"
    return root, tensors


@pytest.fixture
def victim(written, tmp_path):
    return Stored(*written, tmp_path / "s")


def important_of(victim):
    return repair_in_memory(*victim.where, victim.file).important.ranges


def test_parity_of_important_bytes_is_small_and_of_the_documented_size(victim):
    assert scrub(*victim.where).state == "sound"
    victim.require_exact()
    assert victim.file.parity.code == CODE
    data = victim.sound[victim.file.name]
    ranges = important_of(victim)
    stream = bytes(ranges.gather(lambda start, end: memoryview(data)[start:end], 0, ranges.size_bytes))
    places = ranges.positions(0, ranges.size_bytes)
    assert stream == bytes(data[place] for place in places)
    assert list(places) == sorted(set(places))
    assert list((ranges.unimportant(0, len(data)) == 0).nonzero()[0]) == list(places)
    rest = {
        t.name: (t.start, t.end) for t in victim.manifest.tensors if t.name in ("tokens", "mask", "step", "scale")
    }
    if victim.file.encoding is None:
        kept = set(places)
        for start, end in rest.values():
            assert kept.issuperset(range(start, end))


def test_a_damaged_important_byte_is_repaired_to_the_bit(victim):
    places = important_of(victim).positions(0, important_of(victim).size_bytes)
    rng = random.Random(2)
    for place in rng.sample(list(places), 5):
        victim.damage(victim.file.name, lambda data, at=place: data.__setitem__(at, data[at] ^ 0x40))
    assert victim.require_exact().repaired
    victim.require_repaired(victim.file.name)


def test_lost_blocks_of_integers_and_the_header_are_repaired_to_the_bit(victim):
    if victim.file.encoding is not None:
        pytest.skip("blocks of planes hold several tensors")
    tokens = next(each for each in victim.manifest.tensors if each.name == "tokens")
    inside = -(-tokens.start // PARITY_BLOCK_BYTES) + 3
    victim.lose_blocks(victim.file.name, [0, inside, inside + 1])
    assert victim.require_exact().repaired
    victim.require_repaired(victim.file.name)


def test_a_lost_block_of_numbers_is_refused_with_the_way_out(victim):
    block = len(victim.sound[victim.file.name]) // 2 // PARITY_BLOCK_BYTES
    victim.lose_blocks(victim.file.name, [block])
    with pytest.raises(DamagedCheckpoint, match="but the other bytes of them are lost"):
        restore.load(*victim.where)
    repaired = repair_in_memory(*victim.where, victim.file)
    assert (repaired.damaged, repaired.important.lost, repaired.is_degradable) == ([block], [block], True)
    found = scrub(*victim.where, repair=True)
    assert found.state == "damaged"
    assert "which only a degraded restore replaces" in found.files[0].damage + found.files[0].reason


def test_every_important_byte_is_known_after_a_lost_tenth(victim):
    blocks = len(victim.sound[victim.file.name]) // PARITY_BLOCK_BYTES
    victim.lose_blocks(victim.file.name, range(blocks // 3, blocks // 3 + blocks // 10))
    repaired = repair_in_memory(*victim.where, victim.file)
    assert repaired.is_degradable
    ranges, read = repaired.important.ranges, bytearray(victim.file.size_bytes)
    with repaired.open() as opened:
        opened.read_into(0, memoryview(read))
    for place in ranges.positions(0, ranges.size_bytes):
        assert read[place] == victim.sound[victim.file.name][place]


def test_more_than_the_strength_is_refused(victim):
    blocks = len(victim.sound[victim.file.name]) // PARITY_BLOCK_BYTES
    victim.lose_blocks(victim.file.name, range(1, blocks // 2))
    with pytest.raises(DamagedCheckpoint, match="cannot repair all important bytes of them"):
        restore.load(*victim.where)
    repaired = repair_in_memory(*victim.where, victim.file)
    assert not repaired.is_degradable
    assert scrub(*victim.where, repair=True).state == "damaged"


@pytest.mark.parametrize("lost", ["guide", "copy of the guide", "all", "cut"])
def test_a_damaged_parity_file_is_computed_again(victim, lost):
    data = victim.sound[victim.file.parity.name]
    if lost == "all":
        (victim.folder / victim.file.parity.name).unlink()
    elif lost == "cut":
        victim.damage(victim.file.parity.name, lambda data: data.__delitem__(slice(len(data) // 2, None)))
    else:
        victim.lose_blocks(victim.file.parity.name, [0 if lost == "guide" else len(data) // PARITY_BLOCK_BYTES])
    victim.require_exact()
    victim.require_repaired(victim.file.parity.name)


@pytest.mark.parametrize("guides", [[0], [-1], [0, -1]])
def test_one_copy_of_the_guide_is_enough(victim, guides):
    end = victim.file.parity.layout(victim.file.size_bytes).end
    for which in guides:
        at = 0 if which == 0 else end
        victim.damage(victim.file.parity.name, lambda data, at=at: data.__setitem__(slice(at, at + 24), bytes(24)))
    place = important_of(victim).positions(10, 11)[0] if guides != [0, -1] else 20
    victim.damage(victim.file.name, lambda data: data.__setitem__(place, data[place] ^ 1))
    if guides == [0, -1]:
        with pytest.raises(DamagedCheckpoint, match=r"both guides of .* are damaged as well"):
            restore.load(*victim.where)
    else:
        assert victim.require_exact().repaired
        victim.require_repaired(victim.file.name, victim.file.parity.name)


def test_important_parity_is_smaller_than_parity_of_all_bytes(tmp_path):
    for dtype, most in ((torch.float32, 0.06), (torch.bfloat16, 0.11)):
        store = open_store(tmp_path / str(dtype))
        store.acquire_attempt(JOB, "first")
        with running(store, tensors={"w": torch.zeros(2_000_000, dtype=dtype)}) as job:
            job.checkpoint(parity=CODE)
        (file,) = restore.manifest(store, JOB, FIRST).files
        assert file.parity.size_bytes <= most * file.size_bytes


RELATIVE_ERROR = {"float32": 2.0, "bfloat16": 2.0, "float16": 0.13, "float64": 0.04}
"""Most by which a replaced number is off: what its less significant bytes can make of it."""


def test_a_degraded_load_replaces_low_bytes_and_keeps_everything_else(victim):
    blocks = len(victim.sound[victim.file.name]) // PARITY_BLOCK_BYTES
    victim.lose_blocks(victim.file.name, range(blocks // 3, blocks // 3 + blocks // 10))
    loaded = restore.load(*victim.where, degraded=True)
    (lost,) = loaded.lost
    assert (lost.tensor, lost.numbers) == ("w", NUMBERS)
    for name in ("tokens", "mask", "step", "scale"):
        assert torch.equal(loaded.tensors[name], victim.tensors[name])
    expected, found = victim.tensors["w"].double(), loaded.tensors["w"].double()
    assert int((expected != found).sum()) <= lost.lost < NUMBERS / 2
    assert int((expected != found).sum()) > 0.9 * lost.lost
    kind = str(victim.tensors["w"].dtype).removeprefix("torch.")
    assert (expected.sign() * found.sign() >= 0).all()
    # fp16 has numbers below its exponents
    assert ((expected - found).abs() <= RELATIVE_ERROR[kind] * expected.abs() + 2.0**-16).all()
    text = describe_lost(loaded.lost)
    assert text.endswith("of those of 1 tensor: w")
    assert text.startswith(
        f"the low {'byte' if lost.low_bytes == 1 else f'{lost.low_bytes} bytes'} of {lost.lost:,}"
    )


def test_a_degraded_load_of_what_can_be_repaired_is_exact(victim):
    assert restore.load(*victim.where, degraded=True).lost == ()
    place = important_of(victim).positions(9000, 9001)[0]
    victim.damage(victim.file.name, lambda data: data.__setitem__(place, data[place] ^ 0x80))
    loaded = restore.load(*victim.where, degraded=True)
    assert loaded.repaired
    assert loaded.lost == ()
    assert torch.equal(loaded.tensors["w"], victim.tensors["w"])


def test_a_verification_names_what_a_degraded_restore_would_replace(victim):
    block = len(victim.sound[victim.file.name]) // 2 // PARITY_BLOCK_BYTES
    victim.lose_blocks(victim.file.name, [block])
    said = describe_lost(restore.load(*victim.where, degraded=True).lost)
    found = reread(*victim.where)
    assert found.verdict == "damaged"
    assert found.reason.endswith(f". A degraded restore would replace {said}")


def test_a_degraded_load_beyond_the_strength_is_refused(victim):
    blocks = len(victim.sound[victim.file.name]) // PARITY_BLOCK_BYTES
    victim.lose_blocks(victim.file.name, range(1, blocks // 2))
    with pytest.raises(DamagedCheckpoint):
        restore.load(*victim.where, degraded=True)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=lambda dtype: str(dtype)
)
def test_lost_bytes_never_turn_infinity_or_a_number_into_something_else(dtype):
    large = torch.finfo(dtype)
    numbers = torch.tensor([1.0, -3.5, 0.0, torch.inf, -torch.inf, large.tiny, torch.nan, 1e-2], dtype=dtype)
    name = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}[str(dtype)[6:]]
    width, kept = IMPORTANT_BYTES[name]
    for which in range(1, 1 << (width - kept)):
        missing = np.zeros((len(numbers), width), np.uint8)
        missing[:, [index for index in range(width - kept) if which >> index & 1]] = 255
        data = bytearray(numbers.view(torch.uint8).numpy().tobytes())
        assert replace_lost(memoryview(data), missing.ravel(), name) == len(numbers)
        found = torch.frombuffer(data, dtype=dtype)
        assert found[3:5].tolist() == [torch.inf, -torch.inf]
        assert found[[0, 1, 2, 5, 7]].isfinite().all()
        assert (found.signbit() == numbers.signbit()).all()
        assert not replace_lost(memoryview(data), np.zeros(width * len(numbers), np.uint8), name)
