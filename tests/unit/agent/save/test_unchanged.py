"""Checkpoints whose unchanged tensors stay in files of earlier checkpoints."""

import ctypes
import errno
import os

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import restore
from holdfast.checkpoint.export import export
from holdfast.checkpoint.forking import fork
from holdfast.checkpoint.scrub import scrub
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format import soundness
from holdfast.format.parity_file import ParityCode
from holdfast.save.run import RunState
from holdfast.store import open_store
from tests.support.persist_job import JOB, PersistJob, bytes_of, running

MAIN = "rank-0.safetensors"


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "store")
    store.acquire_attempt(JOB, "first")
    return store


def lora(rows=600):
    """2.4 MB that does not change, and an adapter that does."""
    return {"base": torch.randn(rows, 1000), "adapter": torch.zeros(10, 100), "head": torch.zeros(3)}


def train(job):
    job.tensors["adapter"].add_(1)
    job.tensors["head"].add_(1)


def take(job, before=None, **changes):
    run = job.checkpoint(before=before, **changes)
    assert run.state is RunState.DURABLE, run.result
    return run


def chain(job, length):
    """Take checkpoints, each of which may link files of the one before; return their ids."""
    runs = [take(job)]
    while len(runs) < length:
        train(job)
        runs.append(take(job, runs[-1]))
    return [run.id for run in runs]


def files_of(store, checkpoint):
    return {file.name: file for file in restore.manifest(store, JOB, checkpoint).files}


def stored(store, checkpoint, job=JOB):
    found = restore.load(store, job, checkpoint).tensors
    return bytes_of({name: tensor.clone() for name, tensor in found.items()})


def space_bytes(root):
    """The room on disk: every inode once."""
    found = [os.stat(os.path.join(place, name)) for place, _, names in os.walk(root) for name in names]
    return sum(blocks for _, blocks in {(each.st_ino, each.st_blocks) for each in found}) * 512


def shared_by(checkpoint, rank=0):
    return f"rank-{rank}.{checkpoint}.safetensors"


def test_twelve_checkpoints_of_an_adapter_take_the_room_of_one_base_and_twelve_adapters(store):
    with running(store, tensors=lora()) as job:
        job.frozen = {"base"}
        checkpoints = chain(job, 12)
        last, results = bytes_of(job.tensors), [run.result for run in job.settled]
    assert stored(store, checkpoints[-1]) == last
    shared = shared_by(checkpoints[0])
    assert files_of(store, checkpoints[0])[shared].written_by is None
    assert files_of(store, checkpoints[-1])[shared].written_by == checkpoints[0]
    base, rest = 2.4e6, 12 * 32e3  # header, adapter and manifest take some blocks each
    assert space_bytes(store.root / JOB) < base + rest
    for checkpoint in checkpoints:
        restore.verify(store, JOB, checkpoint)
    assert [result.reused_bytes > 0 for result in results] == [False] + 11 * [True]
    assert all(0 < result.stored_bytes - result.reused_bytes < 10e3 for result in results[1:])


def test_a_tensor_that_turns_out_to_be_unchanged_is_written_once_more(store):
    with running(store, tensors=lora()) as job:
        first, second, third = chain(job, 3)
        last = bytes_of(job.tensors)
    assert files_of(store, first).keys() == {MAIN}
    assert files_of(store, second).keys() == files_of(store, third).keys() == {MAIN, shared_by(second)}
    assert stored(store, third) == last


def test_a_checkpoint_outlives_the_one_that_wrote_its_base(store):
    with running(store, tensors=lora()) as job:
        job.frozen = {"base"}
        first, second, third = chain(job, 3)
        last = bytes_of(job.tensors)
    store.delete(JOB, first, 1)
    store.delete(JOB, second, 1)
    restore.verify(store, JOB, third)
    assert stored(store, third) == last


def test_a_file_with_a_tensor_that_changed_is_not_shared_any_more(store):
    tensors = {name: torch.randn(400, 1000) for name in "abc"} | {"d": torch.zeros(3)}
    with running(store, tensors=tensors) as job:
        job.frozen = {"a", "b", "c"}
        first = take(job)
        tensors["d"].add_(1)
        second = take(job, first)
        tensors["b"].add_(1)
        third = take(job, second)
        fourth = take(job, third)
        last = bytes_of(tensors)
    assert files_of(store, second.id).keys() == {MAIN, shared_by(first.id)}
    assert files_of(store, third.id).keys() == {MAIN, shared_by(third.id)}
    entries = {each.name: each.file for each in restore.manifest(store, JOB, third.id).tensors}
    assert entries == dict.fromkeys("acd", shared_by(third.id)) | {"b": MAIN}
    assert files_of(store, fourth.id).keys() == {MAIN, shared_by(third.id), shared_by(fourth.id)}
    for run in first, second, third, fourth:
        restore.verify(store, JOB, run.id)
    assert stored(store, fourth.id) == last


def flip(store, checkpoint, file, at):
    with (store.path(JOB, checkpoint) / file).open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))


def through_data(tensor):
    tensor.data[5, 5] = 7


def through_numpy(tensor):
    tensor.numpy()[5, 5] = 7


def through_a_raw_pointer(tensor):
    ctypes.memset(tensor.data_ptr() + 40_000, 7, 4)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "by version"])
@pytest.mark.parametrize("write", [through_data, through_numpy, through_a_raw_pointer])
def test_a_write_that_a_version_counter_misses_is_written(store, write, frozen):
    with running(store, tensors=lora()) as job:
        job.frozen = {"base"} if frozen else set()
        first = take(job)
        second = take(job, first)
        version = job.tensors["base"]._version
        write(job.tensors["base"])
        assert job.tensors["base"]._version == version
        third = take(job, second)
        last = bytes_of(job.tensors)
    assert shared_by(first.id if frozen else second.id) in files_of(store, second.id)
    assert files_of(store, third.id).keys() == {MAIN}
    assert stored(store, third.id) == last
    assert stored(store, second.id) != last


def test_another_tensor_of_the_same_name_and_version_is_written(store):
    with running(store, tensors=lora()) as job:
        job.frozen = {"base"}
        first = take(job)
        job.tensors = lora()
        assert job.tensors["base"]._version == first.copy.versions["base"]
        second = take(job, first)
        last = bytes_of(job.tensors)
    assert files_of(store, second.id).keys() == {MAIN}
    assert stored(store, second.id) == last


LOSSES = {
    "deleted": lambda store, first, patch: store.delete(JOB, first, 1),
    "damaged manifest": lambda store, first, patch: (store.path(JOB, first) / fmt.MANIFEST).write_bytes(b"{"),
    "file gone": lambda store, first, patch: (store.path(JOB, first) / shared_by(first)).unlink(),
    "truncated": lambda store, first, patch: os.truncate(store.path(JOB, first) / shared_by(first), 1000),
    "no links": lambda store, first, patch: patch.setattr(store.files, "link", refuse_link),
}


def refuse_link(*_):
    raise OSError(errno.EPERM, "no links here")


@pytest.mark.parametrize("loss", LOSSES)
def test_without_a_file_to_link_all_is_written(store, loss, monkeypatch):
    with running(store, tensors=lora()) as job:
        job.frozen = {"base"}
        first = take(job)
        LOSSES[loss](store, first.id, monkeypatch)
        train(job)
        second = take(job, first)
        last = bytes_of(job.tensors)
    found = files_of(store, second.id)
    assert found.keys() == {MAIN, shared_by(second.id)}
    assert all(file.written_by is None for file in found.values())
    assert stored(store, second.id) == last
    assert second.result.reused_bytes == 0
    if loss in ("no links", "truncated"):
        assert "could not be linked" in second.draft.not_linked


def test_a_parent_that_retention_removes_during_the_write_is_not_missed(store, monkeypatch):
    link = store.files.link

    def remove_first(source, target):
        if source.name == shared_by(first.id):
            store.delete(JOB, first.id, 1)
        return link(source, target)

    with running(store, tensors=lora()) as job:
        job.frozen = {"base"}
        first = take(job)
        monkeypatch.setattr(store.files, "link", remove_first)
        second = take(job, first)
        last = bytes_of(job.tensors)
    assert store.checkpoints(JOB) == [second.id]
    assert stored(store, second.id) == last


def test_a_checkpoint_after_damage_links_nothing(store):
    with running(store, tensors=lora()) as job:
        job.frozen = {"base"}
        first = take(job)
        second = take(job, first, may_link=False)
        third = take(job, second)
    assert files_of(store, second.id).keys() == {MAIN, shared_by(second.id)}
    assert files_of(store, third.id).keys() == {MAIN, shared_by(second.id)}


def test_a_state_without_unchanged_tensors_reads_no_manifest_and_compares_no_digest(store, monkeypatch):
    with running(store, tensors={"w": torch.randn(600, 1000)}) as job:
        first = take(job)
        job.tensors["w"].add_(1)

        def refuse(*_):
            raise AssertionError

        monkeypatch.setattr("holdfast.save.reuse.read_stored", refuse)
        second = take(job, first)
    assert files_of(store, second.id).keys() == {MAIN}


def test_a_failed_device_makes_the_second_try_write_all(store, monkeypatch):
    commits = []

    def commit_once(directory):
        commits.append(directory)
        if len(commits) == 1:
            raise OSError(errno.EIO, "the device failed")
        return sync(directory)

    with running(store, tensors=lora()) as job:
        first = take(job)
        train(job)
        sync = store.files.sync_directory
        monkeypatch.setattr(store.files, "sync_directory", commit_once)
        second = take(job, first)
        last = bytes_of(job.tensors)
    assert files_of(store, second.id).keys() == {MAIN}
    assert stored(store, second.id) == last


def test_a_checkpoint_with_links_is_forked_and_exported(store, tmp_path):
    with running(store, tensors=lora()) as job:
        *_, last = chain(job, 3)
        expected = bytes_of(job.tensors)
    fork(store, JOB, last, "other")
    for checkpoint in store.checkpoints(JOB):
        store.delete(JOB, checkpoint, 1)
    restore.verify(store, "other", last)
    assert stored(store, last, "other") == expected
    written = export(store, "other", last, tmp_path / "out.safetensors", "safetensors")
    assert written.size_bytes


def test_a_manifest_names_only_checkpoints_as_writers(store):
    with running(store, tensors=lora()) as job:
        job.frozen = {"base"}
        _, second = chain(job, 2)
    manifest = restore.manifest(store, JOB, second)
    files = [msgspec.structs.replace(file, written_by="../x") for file in manifest.files]
    with pytest.raises(DamagedCheckpoint, match="not the name of a checkpoint"):
        soundness.require_sound(msgspec.structs.replace(manifest, files=files))


def test_the_size_rule_of_retention_counts_shared_files_once(store):
    with running(store, tensors=lora()) as job:
        job.frozen = {"base"}
        checkpoints = chain(job, 4)
    facts = restore.RetentionFacts(store, JOB)
    for kept in checkpoints, checkpoints[2:]:
        sizes, _ = facts.read(kept)
        assert sizes[kept[-1]] > 2.4e6
        assert sum(sizes.values()) < 2.4e6 + 4 * 32e3


PARITY = ParityCode(10, 2)


@pytest.fixture
def protected(store):
    """Three checkpoints that share a file with parity, and their state."""
    pytest.importorskip("numpy")
    with running(store, tensors=lora()) as job:
        job.frozen = {"base"}
        runs = [take(job, parity=PARITY)]
        for _ in range(2):
            train(job)
            runs.append(take(job, runs[-1], parity=PARITY))
        return [run.id for run in runs], bytes_of(job.tensors)


def inodes(store, checkpoints, name):
    return {(store.path(JOB, each) / name).stat().st_ino for each in checkpoints}


def test_a_shared_file_brings_its_parity_file_along(store, protected):
    checkpoints, last = protected
    shared = files_of(store, checkpoints[-1])[shared_by(checkpoints[0])]
    assert shared.parity.code == PARITY
    for name in shared.name, shared.parity.name:
        assert len(inodes(store, checkpoints, name)) == 1
    for checkpoint in checkpoints[:2]:
        store.delete(JOB, checkpoint, 1)
    flip(store, checkpoints[2], shared.name, 1_000_000)
    assert scrub(store, JOB, checkpoints[2]).state == "repairable"
    repairs = []
    restore.verify(store, JOB, checkpoints[2], on_repaired=repairs.append)
    assert shared.name in repairs[0]
    assert scrub(store, JOB, checkpoints[2], repair=True).state == "repaired"
    assert scrub(store, JOB, checkpoints[2]).state == "sound"
    assert stored(store, checkpoints[2]) == last


@pytest.mark.parametrize("which", ["payload", "parity"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_repair_of_a_shared_file_repairs_all_checkpoints_that_share_it(store, protected, at, which):
    checkpoints, last = protected
    entry = files_of(store, checkpoints[0])[shared_by(checkpoints[0])]
    name = entry.name if which == "payload" else entry.parity.name
    flip(store, checkpoints[at], name, 300_000)
    assert {scrub(store, JOB, each).state for each in checkpoints} == {"repairable"}
    room = space_bytes(store.root / JOB)
    assert scrub(store, JOB, checkpoints[at], repair=True).state == "repaired"
    assert {scrub(store, JOB, each).state for each in checkpoints} == {"sound"}
    assert len(inodes(store, checkpoints, name)) == 1
    assert space_bytes(store.root / JOB) == room
    assert stored(store, checkpoints[-1]) == last


def test_a_repair_leaves_a_fork_with_the_old_file_which_is_repaired_there(store, protected):
    checkpoints, last = protected
    fork(store, JOB, checkpoints[-1], "other")
    shared = shared_by(checkpoints[0])
    flip(store, checkpoints[0], shared, 300_000)
    assert scrub(store, JOB, checkpoints[0], repair=True).state == "repaired"
    assert scrub(store, "other", checkpoints[-1]).state == "repairable"
    assert scrub(store, "other", checkpoints[-1], repair=True).state == "repaired"
    assert stored(store, checkpoints[-1], "other") == stored(store, checkpoints[-1]) == last


def test_a_link_that_was_removed_is_repaired_without_touching_the_others(store, protected):
    checkpoints, last = protected
    shared = shared_by(checkpoints[0])
    (store.path(JOB, checkpoints[1]) / shared).unlink()
    assert [scrub(store, JOB, each).state for each in checkpoints] == ["sound", "damaged", "sound"]
    assert stored(store, checkpoints[2]) == last


def test_a_file_without_the_parity_that_is_now_required_is_written_again(store):
    pytest.importorskip("numpy")
    with running(store, tensors=lora()) as job:
        job.frozen = {"base"}
        first = take(job)
        second = take(job, first, parity=PARITY)
        third = take(job, second, parity=PARITY)
        fourth = take(job, third)
    assert files_of(store, second.id).keys() == {MAIN, shared_by(second.id)}
    assert files_of(store, third.id)[shared_by(second.id)].parity.code == PARITY
    assert files_of(store, fourth.id)[shared_by(second.id)].parity.code == PARITY
    assert files_of(store, fourth.id)[MAIN].parity is None
    for run in first, second, third, fourth:
        assert scrub(store, JOB, run.id).state == "sound"


DTYPES = [
    torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
]  # fmt: skip
SHAPES = [(), (0,), (3,), (0, 4), (17, 5), (64, 16), (333,)]
ONE = st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES))


def random_tensor(dtype, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    found = torch.empty(shape, dtype=dtype)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (found.nbytes,), generator=generator)
    return raw.to(torch.uint8).view(dtype).reshape(shape) if found.numel() else found


@settings(max_examples=30, deadline=None)
@given(kinds=st.lists(ONE, min_size=1, max_size=8), steps=st.lists(st.sets(st.integers(0, 7)), max_size=4))
def test_every_state_is_restored_bit_for_bit_whatever_changed(tmp_path_factory, kinds, steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.save.reuse.MIN_SHARED_BYTES", 1)
        patch.setattr("holdfast.save.reuse.MIN_SHARED_BYTES", 1)
        store = open_store(tmp_path_factory.mktemp("store"))
        store.acquire_attempt(JOB, "first")
        tensors = {f"t{n}": random_tensor(*kind, n) for n, kind in enumerate(kinds)}
        job, expected = PersistJob(store, tensors=tensors), {}
        try:
            run = None
            for turn, changed in enumerate([set(), *steps]):
                for name in (f"t{n}" for n in changed if n < len(kinds)):
                    old = tensors[name]
                    fresh = random_tensor(old.dtype, old.shape, 1000 + turn)
                    old.view(torch.uint8).copy_(fresh.view(torch.uint8)) if old.dim() else old.copy_(fresh)
                run = take(job, run)
                expected[run.id] = {name: raw(tensor) for name, tensor in tensors.items()}
        finally:
            assert job.close()
        for checkpoint, state in expected.items():
            restore.verify(store, JOB, checkpoint)
            loaded = restore.load(store, JOB, checkpoint).tensors
            assert {name: raw(tensor) for name, tensor in loaded.items()} == state


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
