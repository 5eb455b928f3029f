"""Snapshots in memory that a supervisor holds: what is kept, what is trusted, and who may save it."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint import restore
from holdfast.errors import DamagedCheckpoint, Fenced
from holdfast.format import manifest as fmt
from holdfast.save.completion_marker import mapped, markers_of, read_marker, verify
from holdfast.save.host_buffers import Arena
from holdfast.save.shared_buffers import SLOT_COUNT, SharedBuffer, SupervisorMemory, claim, slots_in
from holdfast.save.snapshotter import Snapshotter
from holdfast.save.writer import CheckpointFiles
from holdfast.state.registry import CapturedState
from holdfast.store import open_store
from holdfast.supervisor.crash_commit import rescue
from holdfast.system import io_pool, supervisor_channel, supervisor_files
from holdfast.system.supervisor_channel import PublishedAttempt
from tests.support import persist_job
from tests.support.persist_job import JOB, small_state
from tests.support.supervisor_memory import flip, folder, lineage_of
from tests.support.tiny_job import Trainer

__all__ = ["folder"]


@pytest.fixture
def supervised(folder, monkeypatch):
    monkeypatch.setenv(supervisor_channel.VARIABLE, str(folder))
    monkeypatch.setattr(supervisor_channel, "STACKS_SIGNAL", None)
    return folder


class DeadAttempt:
    """An attempt that has left sealed snapshots in memory, and a store with what it has made durable."""

    def __init__(self, folder, tmp_path, iterations=(3,), lineage=1, **changes):
        self.folder, self.store, self.uid = folder, open_store(tmp_path / "store"), "dead"
        self.attempt = self.store.acquire_attempt(JOB, self.uid).number
        self.store.append(JOB, lineage_of(1, self.attempt))
        self.slots = claim(folder, [], len(iterations))
        self.tensors = small_state()
        snapshots = Snapshotter(arenas=[Arena(slot) for slot in self.slots])
        for iteration in iterations:
            captured = CapturedState(
                trees={"model": {"w": iteration}}, tensors=self.tensors, deferred=set(self.tensors)
            )
            run = persist_job.copied(
                snapshots, captured, iteration, lineage=lineage, attempt=self.attempt, uid="dead", **changes
            )
            _seal(run)
        snapshots.close()

    @property
    def trained(self):
        return PublishedAttempt(
            job=JOB, uid=self.uid, attempt=self.attempt, lineage=1, store=self.store.url, server=None
        )  # fmt: skip

    def rescue(self):
        return rescue(self.folder, self.trained)


def _seal(run):
    """As whoever writes the checkpoint does, when it has the digests."""
    CheckpointFiles(None, run.draft, run.arena.bytes(run.size_bytes), run.marker).tensors.result()


def test_a_rescue_commits_an_ordinary_checkpoint_of_the_dead_attempt(folder, tmp_path):
    dead = DeadAttempt(folder, tmp_path)
    saved = dead.rescue()
    assert (saved.draft.id, saved.before) == ("000000000003-1", 0)
    manifest = restore.verify(dead.store, JOB, "000000000003-1")
    assert (manifest.attempt, manifest.kind, manifest.state) == (dead.attempt, "scheduled", {"model": {"w": 3}})
    assert persist_job.committed_bytes(dead.store, "000000000003-1") == persist_job.bytes_of(dead.tensors)
    assert dead.rescue() is None, "it is durable by now"


def test_a_snapshot_in_memory_is_plain_and_a_rescue_compresses_it(folder, tmp_path):
    pytest.importorskip("numpy")
    dead = DeadAttempt(folder, tmp_path, compress=True)
    (marker,) = markers_of(folder, JOB)
    assert marker.draft.files[0].encoding is None
    dead.rescue()
    found = restore.load(dead.store, JOB, "000000000003-1")
    assert [file.name for file in found.manifest.files] == ["rank-0.planes"]
    assert persist_job.bytes_of(found.tensors) == persist_job.bytes_of(dead.tensors)


def test_of_several_snapshots_the_newest_is_rescued_and_of_a_damaged_one_the_one_before(folder, tmp_path):
    dead = DeadAttempt(folder, tmp_path, iterations=(3, 6))
    newest = next(marker for marker in markers_of(folder, JOB) if marker.draft.iteration == 6)
    flip(SharedBuffer(folder, newest.number), 100)
    assert dead.rescue().draft.iteration == 3


def test_a_job_that_others_took_over_gets_nothing_committed(folder, tmp_path):
    dead = DeadAttempt(folder, tmp_path)
    dead.store.acquire_attempt(JOB, "elsewhere")
    assert dead.rescue() is None
    assert dead.store.checkpoints(JOB) == []


def test_an_attempt_that_begins_while_a_rescue_writes_fences_it(folder, tmp_path, monkeypatch):
    dead = DeadAttempt(folder, tmp_path)
    write = type(dead.store.begin(JOB, "000000000001-1", dead.attempt, 1)).write

    def overtaken(writer, *args, **options):
        write(writer, *args, **options)
        open_store(tmp_path / "store").acquire_attempt(JOB, "next")

    monkeypatch.setattr("holdfast.store.local.LocalWriter.write", overtaken)
    with pytest.raises(Fenced):
        dead.rescue()
    assert dead.store.checkpoints(JOB) == []


@pytest.mark.parametrize("iteration", [3, 4])
def test_a_durable_checkpoint_that_is_as_new_wins(folder, tmp_path, iteration):
    dead = DeadAttempt(folder, tmp_path)
    with persist_job.running(dead.store) as job:
        job.iteration = iteration - 1
        job.checkpoint()
    assert dead.rescue() is None
    assert dead.store.checkpoints(JOB) == [f"{iteration:012d}-1"]


def test_what_training_has_left_behind_is_not_rescued(folder, tmp_path):
    dead = DeadAttempt(folder, tmp_path)
    dead.store.append(JOB, lineage_of(2, dead.attempt))
    assert dead.rescue() is None


@pytest.mark.parametrize("times", [60])
def test_no_flipped_bit_goes_unseen(folder, tmp_path, times):
    dead = DeadAttempt(folder, tmp_path)
    (slot,) = dead.slots
    marker = read_marker(slot)
    random_bytes = random.Random(0)
    for _ in range(times):
        at = random_bytes.randrange(marker.draft.size_bytes)
        flip(slot, at)
        with mapped(slot, marker.draft.size_bytes) as payload, pytest.raises(DamagedCheckpoint):
            verify(marker, payload)
        flip(slot, at)
    with mapped(slot, marker.draft.size_bytes) as payload:
        verify(marker, payload)


def test_a_seal_that_is_not_as_it_was_written_is_none(folder, tmp_path):
    (slot,) = DeadAttempt(folder, tmp_path).slots
    written = slot.marker.read_bytes()
    for at in range(0, len(written), 37):
        slot.marker.write_bytes(written[:at] + bytes([written[at] ^ 4]) + written[at + 1 :])
        assert read_marker(slot) is None
        slot.marker.write_bytes(written[:at])
        assert read_marker(slot) is None


def test_memory_that_was_cut_short_is_refused_before_it_is_touched(folder, tmp_path):
    (slot,) = DeadAttempt(folder, tmp_path).slots
    fd = slot.open()
    os.ftruncate(fd, 4096)
    os.close(fd)
    with pytest.raises(DamagedCheckpoint, match="shorter"), mapped(slot, read_marker(slot).draft.size_bytes):
        pass


def test_the_seal_goes_before_the_memory_changes(folder, tmp_path):
    (slot,) = DeadAttempt(folder, tmp_path).slots
    snapshots, seen = Snapshotter(arenas=[Arena(slot)]), []

    def fit(*_, **__):
        seen.append(slot.marker.exists())
        raise OSError("no room")

    tensors = {"w": torch.ones(5)}
    snapshots._layouts[0].fit = fit
    with pytest.raises(OSError, match="no room"):
        persist_job.copied(snapshots, CapturedState(tensors=tensors), iteration=4)
    assert seen == [False]


def test_where_the_memory_has_no_room_the_process_uses_its_own_and_says_so(tmp_path):
    import fcntl

    fd = os.memfd_create("full", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    slot, told = SharedBuffer(tmp_path, 0), []
    slot.memory.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
    arena = Arena(slot, told.append)
    arena.reserve(1 << 20)
    assert (arena.slot, arena.marker, arena.size_bytes) == (None, None, 2 << 20)
    assert [text[:6] for text in told] == ["2 MB: "]
    arena.tensor(0, 1 << 20).fill_(1)
    arena.close()
    os.close(fd)


def test_no_more_memory_than_the_state_takes(folder):
    (slot,) = claim(folder, [], 1)
    arena = Arena(slot)
    arena.reserve(100 << 20)
    assert os.fstat(arena.fd).st_blocks * 512 <= 1.05 * (100 << 20)
    arena.free_pages()
    assert os.fstat(arena.fd).st_blocks == 0
    arena.close()


def test_a_slot_is_one_sessions_at_a_time_and_one_that_holds_something_is_not_taken_unasked(folder, tmp_path):
    dead = DeadAttempt(folder, tmp_path)
    (sealed,) = dead.slots
    sealed.release()
    others = claim(folder, [], SLOT_COUNT)
    assert len(others) == SLOT_COUNT - 1
    assert sealed not in others
    assert claim(folder, [sealed.number], 2) == [sealed]
    assert claim(folder, [sealed.number], 2) == []


def test_what_a_dead_process_claimed_is_free_and_what_a_living_one_has_is_not(folder):
    program = (
        "import sys, pathlib; from holdfast.save.shared_buffers import claim\n"
        "claim(pathlib.Path(sys.argv[1]), [], 3); print('has them', flush=True); input()\n"
    )
    command = [sys.executable, "-c", program, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "has them\n"
        others = claim(folder, [], SLOT_COUNT)
        assert len(others) == SLOT_COUNT - 3
        other.kill()
        other.wait()
        assert len(claim(folder, [], SLOT_COUNT)) == 3
    assert claim(folder, [], SLOT_COUNT) == []


@pytest.mark.parametrize("told", ["", "?"])
def test_a_claim_of_which_nothing_is_known_holds(folder, told):
    (slot,) = claim(folder, [], 1)
    slot.release()
    Path(folder, f"slot-{slot.number}.claim").write_text(told)
    assert slot not in claim(folder, [slot.number], 1)


def test_slots_take_few_of_the_descriptors_that_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (40, 40))
    held = SupervisorMemory(tmp_path)
    assert len(held) == len(slots_in(tmp_path)) == 10
    held.close()


def test_what_a_dead_start_left_unsealed_is_given_up_and_a_seal_that_comes_late_counts_for_nothing(tmp_path):
    held = SupervisorMemory(tmp_path)
    kept, lost = claim(tmp_path, [], 2)
    arena = Arena(lost)
    arena.reserve(2**21)
    seen = [slot.number for slot in slots_in(tmp_path)]
    kept.marker.touch()
    held.release_claims()
    numbers = [slot.number for slot in slots_in(tmp_path)]
    assert len(numbers) == SLOT_COUNT
    assert set(seen) - set(numbers) == {lost.number}
    lost.marker.touch()
    assert [slot.number for slot in claim(tmp_path, [], SLOT_COUNT)] == [n for n in numbers if n != kept.number]
    arena.close()
    held.close()
    assert slots_in(tmp_path) == []


def test_a_folder_without_room_for_a_claim_leaves_a_session_memory_of_its_own(folder, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", full)
    assert claim(folder, [], 2) == []


def test_where_no_thread_can_be_started_a_snapshot_is_verified_all_the_same(folder, tmp_path, monkeypatch):
    dead = DeadAttempt(folder, tmp_path)

    def none_left(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    monkeypatch.setitem(io_pool._pools, False, io_pool._new_pool(in_background=False))
    monkeypatch.setattr("holdfast.format.manifest.SMALL_BYTES", 1)
    (slot,) = dead.slots
    marker = read_marker(slot)
    with mapped(slot, marker.draft.size_bytes) as payload:
        verify(marker, payload)
        flip(slot, 100)
        with pytest.raises(DamagedCheckpoint):
            verify(marker, payload)


def test_a_start_that_died_before_it_said_anything_takes_no_snapshot_with_it(supervised, tmp_path):
    dead = DeadAttempt(supervised, tmp_path)
    dead.store.acquire_attempt(JOB, "mute")
    assert rescue(supervised, dead.trained) is None
    supervisor_channel.publish_uid("mute")
    assert rescue(supervised, dead.trained, supervisor_files.published_uids(supervised)).draft.iteration == 3


def test_nothing_is_left_of_memory_that_no_supervisor_holds(tmp_path):
    held = SupervisorMemory(tmp_path)
    slot = slots_in(tmp_path)[0]
    held.close()
    with pytest.raises(FileNotFoundError):
        slot.open()
    assert slots_in(tmp_path) == []


def test_what_a_killed_supervisor_has_left_goes_with_the_next_one_and_not_what_a_living_one_uses(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = (
        "from holdfast.system.supervisor_files import supervisor_folder\n"
        "with supervisor_folder() as folder:\n"
        "    print(folder, flush=True); input()\n"
    )
    command = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with (
        subprocess.Popen(command, env=env, **pipes) as living,
        subprocess.Popen(command, env=env, **pipes) as killed,
    ):
        used, abandoned = (Path(each.stdout.readline().strip()) for each in (living, killed))
        killed.kill()
        killed.wait()
        assert abandoned.exists()
        with supervisor_files.supervisor_folder() as own:
            assert {used, own} == set(tmp_path.iterdir())
        living.communicate("\n")
    assert not list(tmp_path.iterdir())


def test_a_session_goes_on_from_memory_to_the_bit(supervised, tmp_path):
    expected = Trainer(tmp_path / "undisturbed").run(18)
    expected.session.close()
    expected = expected.losses
    first = Trainer(tmp_path / "store").run(10).crash()
    second = Trainer(tmp_path / "store", seed=5)
    second.session.resume()
    assert second.session.iteration == 9
    assert second.session._memory._loaded is not None
    second.run(18)
    assert first.losses[:9] + second.losses == expected
    second.session.close()
    assert not [*supervised.glob("*.marker"), *supervised.glob("*.claim")]


def test_what_cannot_be_saved_of_what_a_session_goes_on_from_keeps_no_memory(supervised, tmp_path, monkeypatch):
    Trainer(tmp_path / "store").run(10).crash()
    store = open_store(tmp_path / "store")
    (job,) = store.jobs()
    store.delete(job, store.checkpoints(job)[-1], 1)
    second = Trainer(tmp_path / "store")

    def refuse(*_):
        monkeypatch.undo()
        monkeypatch.setenv(supervisor_channel.VARIABLE, str(supervised))
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(second.session._saver._persister, "submit", refuse)
    second.session.resume()
    assert second.session.iteration == 9
    second.run(18)
    assert restore.verify(store, job, store.checkpoints(job)[-1]).attempt == 2
    second.session.close()


def test_what_another_attempt_went_on_from_is_not_gone_back_to(supervised, tmp_path, monkeypatch):
    Trainer(tmp_path / "store").run(10).crash()
    monkeypatch.delenv(supervisor_channel.VARIABLE)
    Trainer(tmp_path / "store").run(14).crash()
    monkeypatch.setenv(supervisor_channel.VARIABLE, str(supervised))
    third = Trainer(tmp_path / "store")
    third.session.resume()
    assert third.session.iteration == 12
    assert third.session._memory._loaded is None
    third.crash()


def test_the_optimizer_goes_on_in_memory_of_its_own(supervised, tmp_path):
    Trainer(tmp_path / "store").run(10).crash()
    second = Trainer(tmp_path / "store")
    second.session.resume()
    (arena,) = second.session._memory.arenas
    tensors = [*second.model.state_dict().values()]
    tensors += [t for state in second.optimizer.state.values() for t in state.values()]
    for tensor in tensors:
        assert not arena.address <= tensor.data_ptr() < arena.address + arena.size_bytes
    second.crash()


def test_what_is_sealed_is_read_by_the_format_of_any_checkpoint(folder, tmp_path):
    (slot,) = DeadAttempt(folder, tmp_path).slots
    marker = read_marker(slot)
    assert marker.draft.header()[:8] == (marker.draft.files[0].header_bytes - 8).to_bytes(8, "little")
    assert {tensor.name for tensor in marker.draft.tensors} == set(small_state())
    assert all(tensor.digest == fmt.digest(b"") for tensor in marker.draft.tensors if tensor.start == tensor.end)
