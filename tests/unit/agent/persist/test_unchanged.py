"""Checkpoints whose unchanged tensors stay in files of earlier checkpoints."""

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
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.persist.unchanged import find_unchanged
from holdfast.snapshot.checkpoint_run import RunState
from holdfast.store import open_store
from tests.support.persist_job import BACKENDS, JOB, PersistJob, bytes_of, running

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


@pytest.mark.parametrize("backend", BACKENDS)
def test_twelve_checkpoints_of_an_adapter_take_the_room_of_one_base_and_twelve_adapters(store, backend):
    with running(store, backend, tensors=lora()) as job:
        checkpoints = chain(job, 12)
        last = bytes_of(job.tensors)
    assert stored(store, checkpoints[-1]) == last
    linked = files_of(store, checkpoints[-1])[f"rank-0.{checkpoints[0]}.safetensors"]
    assert linked.written_by == checkpoints[0]
    base, rest = 2.4e6, 12 * 32e3  # header, adapter and manifest take some blocks each
    assert space_bytes(store.root / JOB) < base + rest
    for checkpoint in checkpoints:
        restore.verify(store, JOB, checkpoint)


def test_a_checkpoint_outlives_the_one_that_wrote_its_base(store):
    with running(store, "thread", tensors=lora()) as job:
        first, second, third = chain(job, 3)
        last = bytes_of(job.tensors)
    store.delete(JOB, first, 1)
    store.delete(JOB, second, 1)
    restore.verify(store, JOB, third)
    assert stored(store, third) == last


def test_unchanged_tensors_in_a_file_of_mostly_changed_ones_get_a_file_that_later_checkpoints_link(store):
    tensors = lora() | {"trained": torch.randn(1200, 1000)}
    with running(store, "thread", tensors=tensors) as job:
        runs = [take(job)]
        for _ in range(3):
            tensors["trained"].add_(1)
            runs.append(take(job, runs[-1]))
        last = bytes_of(tensors)
    apart = "rank-0.unchanged.safetensors"
    assert files_of(store, runs[1].id).keys() == {MAIN, apart}
    linked = f"rank-0.unchanged.{runs[1].id}.safetensors"
    for run in runs[2:]:
        assert files_of(store, run.id).keys() == {MAIN, linked}
    restore.verify(store, JOB, runs[-1].id)
    assert stored(store, runs[-1].id) == last


def test_a_linked_file_may_hold_old_bytes_of_tensors_that_changed(store):
    tensors = {name: torch.randn(400, 1000) for name in "abc"}
    with running(store, "thread", tensors=tensors) as job:
        first = take(job)
        tensors["b"].add_(1)
        second = take(job, first)
        last = bytes_of(tensors)
    manifest = restore.manifest(store, JOB, second.id)
    linked = next(file for file in manifest.files if file.written_by)
    assert sum(t.end - t.start for t in fmt.tensors_of(manifest, linked.name)) < linked.size_bytes - 1.5e6
    assert fmt.logical_bytes(manifest.files, manifest.tensors) < sum(f.size_bytes for f in manifest.files)
    restore.verify(store, JOB, second.id)
    assert stored(store, second.id) == last
    # old bytes belong to no tensor of this checkpoint, live ones do
    dead = next(t for t in restore.manifest(store, JOB, first.id).tensors if t.name == "b")
    live = next(t for t in manifest.tensors if t.name == "a")
    flip(store, first.id, MAIN, dead.start)
    restore.verify(store, JOB, second.id)
    assert stored(store, second.id) == last
    flip(store, first.id, MAIN, live.start)
    with pytest.raises(DamagedCheckpoint, match="tensor a"):
        restore.verify(store, JOB, second.id)
    with pytest.raises(DamagedCheckpoint, match="tensor a"):
        restore.load(store, JOB, second.id)


def flip(store, checkpoint, file, at):
    with (store.path(JOB, checkpoint) / file).open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))


def test_a_write_that_a_version_counter_misses_is_written(store):
    with running(store, "thread", tensors=lora()) as job:
        first = take(job)
        job.tensors["base"].data[5, 5] = 7  # counts nowhere
        second = take(job, first)
        last = bytes_of(job.tensors)
    assert files_of(store, second.id).keys() == {MAIN}
    assert stored(store, second.id) == last


@pytest.mark.parametrize("loss", ["deleted", "damaged manifest", "no links", "file gone"])
def test_without_a_parent_to_link_from_all_is_written(store, loss, monkeypatch):
    with running(store, "thread", tensors=lora()) as job:
        first = take(job)
        if loss == "deleted":
            store.delete(JOB, first.id, 1)
        elif loss == "damaged manifest":
            (store.path(JOB, first.id) / fmt.MANIFEST).write_bytes(b"{")
        elif loss == "file gone":
            (store.path(JOB, first.id) / MAIN).unlink()
        else:

            def refuse(*_):
                raise OSError(errno.EMLINK, "too many links")

            monkeypatch.setattr(store.files, "link", refuse)
        train(job)
        second = take(job, first)
        last = bytes_of(job.tensors)
    found = files_of(store, second.id)
    assert all(file.written_by is None for file in found.values())
    assert stored(store, second.id) == last


def test_a_checkpoint_after_damage_links_nothing(store):
    with running(store, "thread", tensors=lora()) as job:
        first = take(job)
        second = take(job, first, may_link=False)
    assert files_of(store, second.id).keys() == {MAIN}


def test_a_state_without_unchanged_tensors_reads_no_manifest_and_compares_no_digest(store, monkeypatch):
    with running(store, "thread", tensors={"w": torch.randn(600, 1000)}) as job:
        first = take(job)
        job.tensors["w"].add_(1)

        def refuse(*_):
            raise AssertionError

        monkeypatch.setattr("holdfast.persist.unchanged.read_manifest", refuse)
        second = take(job, first)
    assert files_of(store, second.id).keys() == {MAIN}


def test_a_failed_device_makes_the_second_try_write_all(store, monkeypatch):
    commits = []

    def commit_once(directory):
        commits.append(directory)
        if len(commits) == 1:
            raise OSError(errno.EIO, "the device failed")
        return sync(directory)

    with running(store, "thread", tensors=lora()) as job:
        first = take(job)
        train(job)
        sync = store.files.sync_directory
        monkeypatch.setattr(store.files, "sync_directory", commit_once)
        second = take(job, first)
        last = bytes_of(job.tensors)
    assert files_of(store, second.id).keys() == {MAIN}
    assert stored(store, second.id) == last


def test_a_checkpoint_with_links_is_forked_and_exported(store, tmp_path):
    with running(store, "thread", tensors=lora()) as job:
        *_, last = chain(job, 3)
        expected = bytes_of(job.tensors)
    fork(store, JOB, last, "other")
    for checkpoint in store.checkpoints(JOB):
        store.delete(JOB, checkpoint, 1)
    restore.verify(store, "other", last)
    assert stored(store, last, "other") == expected
    written = export(store, "other", last, tmp_path / "out.safetensors", "safetensors")
    assert written.size_bytes


def test_a_manifest_may_have_gaps_only_in_files_of_earlier_checkpoints(store):
    with running(store, "thread", tensors={name: torch.randn(400, 1000) for name in "abc"}) as job:
        first = take(job)
        job.tensors["b"].add_(1)
        second = take(job, first)
    manifest = restore.manifest(store, JOB, second.id)
    fmt.require_sound(manifest)
    replace = msgspec.structs.replace

    def with_files(**changes):
        files = [replace(f, **changes) if f.written_by else f for f in manifest.files]
        return replace(manifest, files=files)

    with pytest.raises(DamagedCheckpoint, match=r"no tensor covers|does not begin"):
        fmt.require_sound(with_files(written_by=None))
    with pytest.raises(DamagedCheckpoint, match="not the name of a checkpoint"):
        fmt.require_sound(with_files(written_by="../x"))
    a = next(t for t in manifest.tensors if t.name == "a")
    twice = [*manifest.tensors, replace(a, name="again", start=a.start, end=a.end)]
    with pytest.raises(DamagedCheckpoint, match="overlaps"):
        fmt.require_sound(replace(manifest, tensors=twice))
    with pytest.raises(DamagedCheckpoint, match="not a file"):
        fmt.require_sound(replace(manifest, tensors=[replace(a, file="rank-9.safetensors")]))


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
        patch.setattr("holdfast.persist.task.MIN_LINKED_BYTES", 1)
        patch.setattr("holdfast.persist.unchanged.MIN_LINKED_BYTES", 1)
        store = open_store(tmp_path_factory.mktemp("store"))
        store.acquire_attempt(JOB, "first")
        tensors = {f"t{n}": random_tensor(*kind, n) for n, kind in enumerate(kinds)}
        job, expected = PersistJob(store, "thread", tensors=tensors), {}
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
            manifest = restore.manifest(store, JOB, checkpoint)
            for file in manifest.files:
                used = sum(t.end - t.start for t in fmt.tensors_of(manifest, file.name))
                assert file.written_by is None or 2 * used >= file.size_bytes


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_task_without_candidates_waits_for_no_digest(store):
    assert find_unchanged(store, _TaskOfNothing, None).names == set()


class _TaskOfNothing:
    class origin:  # noqa: N801
        parent, may_link, job = "000000000001-1", True, JOB

    unchanged: frozenset[str] = frozenset()
