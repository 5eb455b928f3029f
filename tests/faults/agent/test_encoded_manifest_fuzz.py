"""Mutated manifests of a compressed checkpoint with parity and reused files: each is refused, or read as written.

Of the file that this checkpoint wrote, a block is damaged in half of the cases, so that parity is needed.
"""

import collections
import contextlib
import copy
import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint import reading, restore
from holdfast.checkpoint.scrub import scrub
from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint, UnknownFormat
from holdfast.format import manifest as fmt
from holdfast.format.parity_file import ParityCode
from holdfast.store import open_store
from holdfast.system.host_memory import bytes_of
from tests.faults.agent.test_manifest_fuzz import FIELDS, VALUES, changed_bytes, nest, places
from tests.support.edited_manifests import MANIFEST_COPIES, fields_of, sealed
from tests.support.persist_job import JOB, running

pytest.importorskip("numpy")

MOST_GROWTH_BYTES = 256 << 20
"""The files have 100 kB: memory of the size that a manifest claims would exceed it."""
NAMES = ["rank-0.parity", "rank-0.planes.parity", "rank-0.planes", "000000000001-1", "000000000002-1", "../1-1"]
SIZES = [0, 1, 4095, 4096, 16 << 20, (16 << 20) + 1, 1 << 31, 1 << 40, 1 << 53, -1]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A store, and the newest of two checkpoints in it, which reuses a file of the first."""
    root = tmp_path_factory.mktemp("encoded") / "s"
    store = open_store(root)
    store.acquire_attempt(JOB, "first")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "base": torch.randn(100, 100, generator=generator),
        "weight": torch.randn(90, 100, generator=generator),
        "half": torch.randn(50, 100, generator=generator).bfloat16(),
        "steps": torch.tensor(3),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.save.reuse.MIN_SHARED_BYTES", 1)
        with running(store, tensors=tensors) as job:
            job.frozen = {"base"}
            first = job.checkpoint(compress=True, parity=ParityCode(10, 2))
            for name in "weight", "half", "steps":
                tensors[name].add_(1)
            second = job.checkpoint(before=first, compress=True, parity=ParityCode(10, 2))
    files = restore.manifest(store, JOB, second.id).files
    assert {file.written_by for file in files} == {None, first.id}
    assert all(file.encoding and file.parity for file in files), files
    return root, second.id


def plain_payloads(store, checkpoint):
    found = {}
    for file in restore.manifest(store, JOB, checkpoint).files:
        with reading.open_whole(store, JOB, checkpoint, file, from_disk=False) as opened:
            data = bytearray(opened.size_bytes)
            opened.read_into(0, memoryview(data))
            found[file.name] = bytes(data)
    return found


def of_files(rng, fields):
    """Change a field of a file, of its parity or of its encoding."""
    file = rng.choice(fields["index"]["files"])
    holder = rng.choice([file, file.get("parity"), file.get("encoding"), file.get("encoding")])
    if isinstance(holder, dict) and isinstance(holder.get("blocks"), list) and rng.random() < 0.6:
        holder = rng.choice(holder["blocks"])
    if isinstance(holder, dict):
        holder[rng.choice([*holder, "written_by"])] = copy.deepcopy(rng.choice([*VALUES, *NAMES, *SIZES]))
    elif isinstance(holder, list):
        holder[rng.randrange(len(holder))] = copy.deepcopy(rng.choice([*VALUES, *SIZES]))


def mutation(rng, fields, data):
    if rng.random() < 0.2:
        return changed_bytes(rng, data)
    mutated = copy.deepcopy(fields)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        # what an earlier one has left may have no place for it
        with contextlib.suppress(LookupError, TypeError, AttributeError, ValueError):
            rng.choice([of_files, of_files, *FIELDS])(rng, mutated)
        if not places(mutated):
            break
    if places(mutated) and rng.random() < 0.05:
        nest(rng, mutated)
    return sealed(mutated)


def outcome(store, checkpoint, payloads):
    """How a load ends; AssertionError for one that gives other bytes than were written."""
    try:
        loaded = restore.load(store, JOB, checkpoint)
    except (DamagedCheckpoint, UnknownFormat, IncompatibleCheckpoint) as error:
        return type(error).__name__
    entries = {tensor.name: tensor for tensor in loaded.manifest.tensors}
    for name, tensor in loaded.tensors.items():
        entry = entries[name]
        found = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        assert bytes(bytes_of(found)) == payloads[entry.file][entry.start : entry.end]
    return "repaired" if loaded.repaired else "loaded"


def peak_bytes():
    """The most memory that the process had since the last reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def fuzz(written, folder, count, seed):
    """Outcomes, and how often each was seen."""
    root, checkpoint = written
    store = open_store(shutil.copytree(root, folder / "s"))
    path = store.root / JOB / checkpoint
    payloads, data = plain_payloads(store, checkpoint), (path / fmt.MANIFEST).read_bytes()
    for name in MANIFEST_COPIES:
        (path / name).unlink()
    own = next(path / each.name for each in restore.manifest(store, JOB, checkpoint).files if not each.written_by)
    sound = own.read_bytes()
    fields, seen = fields_of(data), collections.Counter()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    for number in range(count):
        rng = random.Random(f"{seed}, {number}")
        (path / fmt.MANIFEST).write_bytes(mutation(rng, fields, data))
        damaged = bytearray(sound)
        damaged[rng.randrange(len(sound))] ^= rng.choice([0, 1])
        own.write_bytes(damaged)
        try:
            seen[outcome(store, checkpoint, payloads)] += 1
            if number % 4 == 0:
                seen["scrubbed " + scrub(store, JOB, checkpoint).state] += 1
        except Exception as error:
            raise AssertionError(f"mutation {number} of HOLDFAST_TEST_SEED={seed}: {error!r}") from error
    assert peak_bytes() - before < MOST_GROWTH_BYTES
    return seen


def test_no_mutated_manifest_of_a_compressed_checkpoint_does_more_than_be_refused(written, fast_path):
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", 1))
    print(f"HOLDFAST_TEST_SEED={seed}")
    seen = fuzz(written, fast_path, 2_000, seed)
    print(seen)
    assert min(seen["DamagedCheckpoint"], seen["loaded"], seen["repaired"]) > 50


@pytest.mark.long
def test_none_of_100_000_mutated_manifests_of_a_compressed_checkpoint_does(written, fast_path):
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", time.time_ns() % 2**32))
    print(f"\nHOLDFAST_TEST_SEED={seed}")
    started = time.monotonic()
    seen = fuzz(written, fast_path, 100_000, seed)
    print(f"{dict(seen)} in {time.monotonic() - started:.0f} s")
