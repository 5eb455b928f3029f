"""Compressed checkpoints: smaller files, the same state to the bit, and damage by name."""

import random

import msgspec
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from holdfast.checkpoint import restore
from holdfast.checkpoint.export import export
from holdfast.checkpoint.forking import fork
from holdfast.checkpoint.scrub import scrub
from holdfast.checkpoint.verification import reread
from holdfast.errors import DamagedCheckpoint, UnknownFormat
from holdfast.format import manifest as fmt
from holdfast.format.parity_file import ParityCode
from holdfast.format.shards import Region
from holdfast.save.run import RunState
from holdfast.save.snapshotter import Snapshotter
from holdfast.save.two_phase_commit import commit_alone
from holdfast.save.writer import write_checkpoint
from holdfast.state.registry import CapturedState
from holdfast.store import open_store
from tests.support.edited_manifests import encode_manifest
from tests.support.persist_job import JOB, copied, running

pytest.importorskip("numpy")
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
]  # fmt: skip


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "store")
    store.acquire_attempt(JOB, "first")
    return store


def dense(rows=300):
    """A state of 3.6 MB for 300 rows that compresses by a sixth, as weights do, with numbers of several widths."""
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(rows, 1000, generator=generator),
        "moment": 1e-3 * torch.randn(rows, 1000, generator=generator),
        "half": torch.randn(2 * rows, 1000, generator=generator).bfloat16(),
        "bias": torch.randn(100, generator=generator),
        "steps": torch.tensor(3),
        "noise": torch.randint(256, (5000,), dtype=torch.uint8, generator=generator),
        "empty": torch.empty(0, 4),
    }


def random_state(draw):
    """Tensors of any dtype and shape: of numbers, of random bytes, and constant ones."""
    found = {}
    for number in range(draw.randint(1, 12)):
        dtype = draw.choice(DTYPES)
        shape = [draw.choice([0, 1, 2, 3, 7, 30, 129]) for _ in range(draw.randint(0, 3))]
        count = torch.Size(shape).numel()
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        match draw.randrange(3):
            case 0 if dtype.is_floating_point:
                tensor = torch.randn(count, generator=generator).to(dtype)
            case 1:
                tensor = torch.zeros(count, dtype=dtype)
            case _:
                top = 2 if dtype is torch.bool else 256
                data = torch.randint(top, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
                tensor = data.view(dtype)
        found[f"t{number}"] = tensor.view(shape)
    return found


def bytes_of(tensors):
    return {name: tensor_bytes(tensor) for name, tensor in tensors.items()}


def tensor_bytes(tensor):
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return bytes(plain.contiguous().reshape(-1).view(torch.uint8).numpy())


def loaded(store, checkpoint, job=JOB, **options):
    found = restore.load(store, job, checkpoint, **options).tensors
    return {name: tensor.clone() for name, tensor in found.items()}


def taken(store, tensors, **changes):
    """The id of a compressed checkpoint."""
    with running(store, tensors=tensors) as job:
        run = job.checkpoint(compress=True, **changes)
    assert run.state is RunState.DURABLE, run.result
    return run.id


def files_of(store, checkpoint):
    return {file.name: file for file in restore.manifest(store, JOB, checkpoint).files}


def path_of(store, checkpoint, file="rank-0.planes"):
    return store.root / JOB / checkpoint / file


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def test_a_dense_state_takes_less_room_and_comes_back_to_the_bit(store):
    tensors = dense()
    with running(store, tensors=tensors) as job:
        result = job.checkpoint(compress=True).result
    assert result.stored_bytes < 0.9 * result.raw_bytes
    (checkpoint,) = store.checkpoints(JOB)
    (file,) = files_of(store, checkpoint).values()
    assert (file.size_bytes, file.raw_bytes) == (result.stored_bytes, result.raw_bytes)
    assert path_of(store, checkpoint).stat().st_size == file.size_bytes
    assert bytes_of(loaded(store, checkpoint)) == bytes_of(tensors)
    restore.verify(store, JOB, checkpoint)


def test_safetensors_refuses_a_compressed_file_by_its_first_bytes(store):
    path = path_of(store, taken(store, dense()))
    with pytest.raises(SafetensorError, match=r"(?i)header ?too ?large"):
        load_file(path)


def round_trip(store, seed, monkeypatch):
    draw = random.Random(seed)
    most, own = draw.choice([(4096, 1024), (16384, 16384), (16 << 20, 1 << 20)])
    monkeypatch.setattr("holdfast.format.encoding.MOST_BLOCK_BYTES", most)
    monkeypatch.setattr("holdfast.format.file_transforms.MOST_BLOCK_BYTES", most)
    monkeypatch.setattr("holdfast.format.file_transforms.OWN_BLOCK_BYTES", own)
    monkeypatch.setattr("holdfast.save.writer.ENCODED_FILE_BYTES", draw.choice([1000, 50_000, 256 << 20]))
    monkeypatch.setattr("holdfast.checkpoint.reading.READ_BYTES", draw.choice([4096, 8 << 20]))
    tensors = random_state(draw)
    checkpoint = taken(store, tensors)
    assert bytes_of(loaded(store, checkpoint)) == bytes_of(tensors), seed
    some = set(draw.sample(sorted(tensors), draw.randint(1, len(tensors))))
    assert bytes_of(loaded(store, checkpoint, only=some)) == bytes_of({name: tensors[name] for name in some}), seed
    restore.verify(store, JOB, checkpoint)
    assert scrub(store, JOB, checkpoint).state == "sound"
    encoded = [file.encoding is not None for file in restore.manifest(store, JOB, checkpoint).files]
    store.delete(JOB, checkpoint, 1)
    return any(encoded)


def test_states_of_any_dtype_and_shape_come_back_to_the_bit(store, monkeypatch):
    encoded = [round_trip(store, seed, monkeypatch) for seed in range(20)]
    assert any(encoded)
    assert not all(encoded)


@pytest.mark.long
def test_a_thousand_states_of_any_dtype_and_shape_come_back_to_the_bit(store, monkeypatch):
    assert sum(round_trip(store, seed, monkeypatch) for seed in range(1000, 2000)) > 300


def test_a_state_that_does_not_compress_stays_a_plain_file(store):
    noise = {"noise": torch.randint(256, (2_000_000,), dtype=torch.uint8)}
    checkpoint = taken(store, noise)
    (file,) = files_of(store, checkpoint).values()
    assert (file.name, file.encoding) == ("rank-0.safetensors", None)
    assert torch.equal(load_file(path_of(store, checkpoint, file.name))["noise"], noise["noise"])


def test_blocks_that_gain_less_than_a_tenth_are_stored_as_they_are(store):
    checkpoint = taken(store, dense() | {"noise": torch.randint(256, (2_000_000,), dtype=torch.uint8)})
    blocks = files_of(store, checkpoint)["rank-0.planes"].encoding.blocks
    assert any(block.stored_bytes == block.raw_bytes > 1_900_000 for block in blocks)
    assert all(
        block.stored_bytes == block.raw_bytes or block.stored_bytes <= 0.9 * block.raw_bytes for block in blocks
    )


def test_a_large_state_is_encoded_file_by_file(store, monkeypatch):
    monkeypatch.setattr("holdfast.save.writer.ENCODED_FILE_BYTES", 2_000_000)
    tensors = dense() | {f"noise{n}": torch.randint(256, (2_000_000,), dtype=torch.uint8) for n in range(2)}
    checkpoint = taken(store, tensors)
    files = files_of(store, checkpoint)
    assert {"rank-0.planes", "rank-0.1.planes", "rank-0.2.safetensors"} <= files.keys()
    assert all(file.raw_bytes < 2_100_000 for file in files.values())
    assert bytes_of(loaded(store, checkpoint)) == bytes_of(tensors)


def test_an_unchanged_base_is_compressed_once_and_linked_whether_compression_is_on_or_off(store):
    tensors = {"base": torch.randn(600, 1000), "adapter": torch.zeros(10, 100)}
    with running(store, tensors=tensors) as job:
        job.frozen = {"base"}
        runs = []
        for compress in (True, True, False, True):
            tensors["adapter"].add_(1)
            runs.append(job.checkpoint(before=runs[-1] if runs else None, compress=compress))
        last = bytes_of(tensors)
    shared = f"rank-0.{runs[0].id}.planes"
    for run in runs[1:]:
        assert files_of(store, run.id)[shared].written_by == runs[0].id
        assert run.result.reused_bytes == files_of(store, run.id)[shared].size_bytes < 2.2e6
    for run in runs[:3]:
        store.delete(JOB, run.id, 1)
    assert bytes_of(loaded(store, runs[3].id)) == last
    restore.verify(store, JOB, runs[3].id)


def test_every_block_that_is_damaged_is_named(store):
    checkpoint = taken(store, dense())
    path = path_of(store, checkpoint)
    sound, encoding = path.read_bytes(), files_of(store, checkpoint)["rank-0.planes"].encoding
    for number, block in enumerate(encoding.blocks):
        start = encoding.stored_starts[number]
        for at in (start, start + block.stored_bytes - 1):
            flip(path, at)
            named = rf"rank-0\.planes: encoded block {number}, bytes {start:,} to .* does not match its digest"
            for read in restore.load, restore.verify:
                with pytest.raises(DamagedCheckpoint, match=named):
                    read(store, JOB, checkpoint)
            (found,) = scrub(store, JOB, checkpoint).files
            assert "the encoded block of bytes" in found.damage or "the header" in found.damage
            path.write_bytes(sound)
    path.write_bytes(sound[:-1])
    with pytest.raises(DamagedCheckpoint, match="bytes long, not"):
        restore.load(store, JOB, checkpoint)


def test_damage_is_repaired_in_memory_and_to_the_bit_by_a_scrub(store):
    tensors = dense()
    checkpoint = taken(store, tensors, parity=ParityCode(10, 2))
    path = path_of(store, checkpoint)
    sound = path.read_bytes()
    for at in (0, 5000, 400_000, len(sound) - 1):
        flip(path, at)
        found = restore.load(store, JOB, checkpoint)
        assert [each for each in found.repaired if each.startswith("rank-0.planes: ")]
        assert bytes_of(found.tensors) == bytes_of(tensors)
        assert scrub(store, JOB, checkpoint).state == "repairable"
        assert scrub(store, JOB, checkpoint, repair=True).state == "repaired"
        assert path.read_bytes() == sound
    parity = path_of(store, checkpoint, "rank-0.planes.parity")
    kept = parity.read_bytes()
    parity.unlink()
    assert scrub(store, JOB, checkpoint, repair=True).state == "repaired"
    assert parity.read_bytes() == kept


def with_encoding(store, checkpoint, change):
    """The manifest of a checkpoint in which `change` was made to the encoding of its file."""
    manifest = restore.manifest(store, JOB, checkpoint)
    (file,) = manifest.files
    file = msgspec.structs.replace(file, encoding=change(file.encoding))
    path_of(store, checkpoint, fmt.MANIFEST).write_bytes(
        encode_manifest(msgspec.structs.replace(manifest, files=[file]))
    )


def test_an_unknown_encoding_is_refused_by_name(store):
    checkpoint = taken(store, dense())
    with_encoding(store, checkpoint, lambda encoding: msgspec.structs.replace(encoding, codec="wavelets"))
    with pytest.raises(
        UnknownFormat, match=r"rank-0\.planes has the unknown encoding 'wavelets': upgrade holdfast"
    ):
        restore.load(store, JOB, checkpoint)


@pytest.mark.parametrize("seed", range(30))
def test_an_encoding_that_contradicts_its_file_is_damage(store, seed):
    draw = random.Random(seed)
    checkpoint = taken(store, dense(30))

    def change(encoding):
        blocks = list(encoding.blocks)
        at = draw.randrange(len(blocks))
        value = draw.choice([-1, 0, 1, 1 << 20, 1 << 40, 1 << 62])
        match draw.randrange(4):
            case 0:
                blocks[at] = msgspec.structs.replace(blocks[at], raw_bytes=value)
            case 1:
                blocks[at] = msgspec.structs.replace(blocks[at], stored_bytes=value)
            case 2:
                del blocks[at]
            case _:
                return msgspec.structs.replace(encoding, raw_bytes=value)
        return msgspec.structs.replace(encoding, blocks=blocks)

    with_encoding(store, checkpoint, change)
    with pytest.raises(DamagedCheckpoint):
        restore.load(store, JOB, checkpoint)


def test_blocks_that_decode_to_another_state_are_found_by_the_digests_of_the_tensors(store):
    checkpoint = taken(store, {"w": torch.randn(300, 1000)})
    path = path_of(store, checkpoint)
    other = taken(store_at(store, "other"), {"w": torch.randn(300, 1000)})
    data = path_of(store_at(store, "other"), other).read_bytes()
    path.write_bytes(data)
    there = files_of(store_at(store, "other"), other)["rank-0.planes"]
    manifest = restore.manifest(store, JOB, checkpoint)
    file = msgspec.structs.replace(manifest.files[0], size_bytes=there.size_bytes, encoding=there.encoding)
    path_of(store, checkpoint, fmt.MANIFEST).write_bytes(
        encode_manifest(msgspec.structs.replace(manifest, files=[file]))
    )
    with pytest.raises(DamagedCheckpoint, match="tensor w does not match its digest"):
        restore.load(store, JOB, checkpoint)


def store_at(store, name):
    found = open_store(store.root.with_name(name))
    if not found.latest_attempt(JOB):
        found.acquire_attempt(JOB, "first")
    return found


def test_an_export_is_a_plain_file_and_a_fork_and_a_verification_need_nothing_more(store, tmp_path):
    tensors = dense()
    checkpoint = taken(store, tensors)
    export(store, JOB, checkpoint, tmp_path / "plain.safetensors", "safetensors")
    fork(store, JOB, checkpoint, "fork")
    assert bytes_of(loaded(store, checkpoint, job="fork")) == bytes_of(tensors)
    with running(store, tensors=tensors) as job:
        job.iteration = 1
        plain = job.checkpoint().id
    norms, expected = (reread(store, JOB, each, checkpoint) for each in (checkpoint, plain))
    assert norms.verdict == "sound"
    assert dict(zip(norms.tensors.name, norms.tensors.norm, strict=True)) == dict(
        zip(expected.tensors.name, expected.tensors.norm, strict=True)
    )
    assert set(norms.tensors.distance) == {0.0}


def sharded(store, parts, **changes):
    """Commit what several ranks copied, each a row range of one tensor, as two-phase commit does."""
    from holdfast.format.manifest import Shard

    snapshots = Snapshotter(len(parts))
    whole, at, drafts, payloads = torch.cat(parts), 0, [], {}
    for rank, part in enumerate(parts):
        captured = CapturedState(
            trees={}, tensors={"w": part}, deferred={"w"}, shards={"w": Shard(tuple(whole.shape), (at, 0))}
        )
        run = copied(snapshots, captured, rank=rank, world_size=len(parts), compress=True, **changes)
        drafts.append(run.begin_write())
        payloads[rank] = run.arena.bytes(run.size_bytes)
        at += len(part)
    commit_alone(store, drafts, lambda draft: write_checkpoint(store, draft, payloads[draft.rank]))
    return whole


def test_shards_of_several_ranks_are_compressed_and_any_region_is_restored(store):
    whole = sharded(store, [torch.randn(rows, 700) for rows in (500, 300, 1)])
    (checkpoint,) = store.checkpoints(JOB)
    assert {file.encoding is not None for file in files_of(store, checkpoint).values()} == {True}
    assert torch.equal(loaded(store, checkpoint)["w"], whole)
    for start, end in ((0, 801), (10, 20), (450, 650), (799, 801), (0, 0)):
        region = Region((start, 0), (end - start, 700))
        found = loaded(store, checkpoint, regions=lambda trees, shapes, region=region: {"w": region})
        assert torch.equal(found["w"], whole[start:end])
