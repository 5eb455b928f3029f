"""Job with a small state whose checkpoints are persisted, and helpers to inspect them."""

import contextlib
import os
import signal

import torch

from holdfast.format import manifest as fmt
from holdfast.format import soundness
from holdfast.save.draft import Draft
from holdfast.save.host_buffers import Arena
from holdfast.save.persister import Persister
from holdfast.save.run import SETTLED, CopyResult, Run
from holdfast.save.snapshotter import Snapshotter
from holdfast.state.registry import CapturedState
from holdfast.store import open_store, read_manifest
from tests.support.edited_manifests import decode_manifest
from tests.support.faulty_store import FaultyStore
from tests.support.process_inspection import children

JOB = "job"


OF_RUN = ("number", "mode", "at_once", "read_metrics", "survived")


def draft(iteration=1, **changes):
    plain = {
        "job": JOB, "iteration": iteration, "lineage": 1, "attempt": 1, "kind": "scheduled", "created_at": 1.0,
        "parent": None, "world_size": 1, "versions": {"torch": "x"},
    }  # fmt: skip
    return Draft(**plain | changes)


def requested(iteration=1, *listeners, **changes):
    """A run that has not begun; `changes` are arguments of `Run`, or fields of its draft."""
    options = {"number": iteration} | {name: changes.pop(name) for name in OF_RUN if name in changes}
    return Run(draft(iteration, **changes), listeners, **options)


def copied(snapshotter, captured, iteration=1, **changes):
    """A run whose copy is over."""
    run = requested(iteration, snapshotter, **changes, at_once=True)
    snapshotter.begin(run, captured)
    snapshotter.copy(run)
    return run


def empty_run(iteration, *listeners, **copied):
    """One whose copy is over and holds nothing, for tests of what becomes of it."""
    run = requested(iteration, *listeners)
    run.begin_copy(Arena(), run.draft)
    run.end_copy(CopyResult(**copied))
    return run


class SettledRuns:
    """Listens to runs, and keeps those that have settled, in their order."""

    def __init__(self):
        self.runs = []

    def run_changed(self, run, state):
        if state in SETTLED:
            self.runs.append(run)


class PersistJob:
    """Live tensors, a store, and what takes checkpoints of the ones to the other."""

    def __init__(self, store, *, max_in_flight=1, tensors=None, planner=None):
        self.store, self.iteration = store, 0
        self.tensors = tensors if tensors is not None else small_state()
        self.frozen = set()
        self.snapshots = Snapshotter(max_in_flight)
        self._settled = SettledRuns()
        self.persister = Persister(store, max_in_flight=max_in_flight, make_planner=lambda: planner)

    @property
    def settled(self):
        return self._settled.runs

    def take(self, *, before=None, **changes):
        """A checkpoint of this instant, on its way to the store; it may link files of the run `before`."""
        if before is not None:
            changes = {"parent": before.id} | changes
        self.iteration += 1
        assert self.snapshots.wait_free(30)
        captured = CapturedState(
            trees={"model": {"w": 1}}, tensors=self.tensors, deferred=set(self.tensors), frozen=self.frozen
        )
        run = requested(self.iteration, self.snapshots, self._settled, **changes, at_once=True)
        self.snapshots.begin(run, captured)
        self.persister.submit(run)
        self.snapshots.copy(run)
        return run

    def checkpoint(self, **changes):
        """One that has settled."""
        run = self.take(**changes)
        assert run.wait_settled(300)
        return run

    def close(self):
        closed = self.persister.close(60)
        self.snapshots.close()
        return closed


@contextlib.contextmanager
def running(*args, **options):
    job = PersistJob(*args, **options)
    try:
        yield job
    except BaseException:  # even on Ctrl-C: closing would wait for them
        for pid in children():  # they may wait for a word that never comes
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        assert job.close()


def small_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(300, 100, generator=generator),
        "b": torch.randn(7, generator=generator),
        "steps": torch.tensor(3),
        "c": torch.ones(2, dtype=torch.complex128),
        "none": torch.empty(0, 4),
    }


def committed_bytes(store, checkpoint):
    """name -> bytes of a committed checkpoint, each compared with its digest first."""
    manifest = decode_manifest(read_manifest(store, JOB, checkpoint))
    (file,) = manifest.files
    with store.open_file(JOB, checkpoint, file.name) as opened:
        data = bytearray(opened.size_bytes)
        opened.read_into(0, memoryview(data))
    soundness.require_sound(manifest)
    fmt.check_size(file, len(data))
    for piece in fmt.digest_ranges(manifest, file):
        assert fmt.digest(memoryview(data)[piece.start : piece.end]) == piece.digest, str(piece)
    return {tensor.name: bytes(data[tensor.start : tensor.end]) for tensor in manifest.tensors}


def bytes_of(tensors):
    return {name: torch.view_as_real(t).numpy().tobytes() if t.is_complex() else t.numpy().tobytes()
            for name, t in tensors.items()}  # fmt: skip


def faulty(tmp_path, fault, **details):
    """Such a store, ready for attempt 1."""
    open_store(tmp_path).acquire_attempt(JOB, "first")
    if fault == "wait":
        os.mkfifo(tmp_path / "reached")
        os.mkfifo(tmp_path / "go")
    return FaultyStore(tmp_path, fault, **details)
