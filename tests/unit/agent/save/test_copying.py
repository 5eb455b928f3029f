"""Copies from a device beside training, on a model of a device whose streams finish as late as the waits allow.

Each defect that is planted here, two of which a session on a real device had, is found by the same checks.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import holdfast
from holdfast import cuda
from holdfast.checkpoint import restore
from holdfast.engine.training import Training
from holdfast.format.manifest import digest_tensor
from holdfast.save.copying import DeviceCopies, UnchangedTensorCache
from holdfast.save.run import RunState
from holdfast.store import open_store
from holdfast.system.host_memory import bytes_of
from tests.support.fake_device import FakeDevice, FakeStream, install

ITERATIONS, NUMBERS = 4, 5000
KINDS = ("cuda", "xpu")


class Mixed(AssertionError):
    """A checkpoint that holds anything but the state of its iteration."""


class DeviceJob:
    """A training on the device, and the same on the host, which says what each checkpoint must hold."""

    def __init__(self, device, store, numbers=NUMBERS):
        self.device, self._store = device, store
        start = torch.linspace(0, 1, numbers)
        self.model = nn.ParameterList([nn.Parameter(device.tensor(start))])
        self.host = [nn.Parameter(start.clone())]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self._host_optimizer = torch.optim.SGD(self.host, lr=0.1, momentum=0.9)
        self.model[0].grad = device.tensor(torch.ones(numbers))
        self.host[0].grad = torch.ones(numbers)
        self.expected, self.durable, self.torn, self.at_once = {}, [], [], []
        self.loop = holdfast.Variables(more=None)
        self.session = holdfast.Session(
            "job", store=store, every=1, keep=1000, model=self.model, optimizer=self.optimizer, loop=self.loop
        )
        self.session.observe(self)

    def run_changed(self, run, state):
        if state is RunState.TORN:
            self.torn.append(run)
        elif state is RunState.DURABLE:
            self.durable.append(run)
            self.at_once.append(run.at_once)

    def update(self):
        """Queue an update, and have the device execute what nothing prevents; then let copies end."""
        self.optimizer.step()
        self.updated()

    def updated(self):
        self._host_optimizer.step()
        self.device.run_training()
        self.device.release_copies()

    def end_iteration(self, *, hold=True):
        """End an iteration with a checkpoint, whose copies are held until the next update is queued."""
        self.session.wait(60)
        if hold:
            self.device.hold_copies()
        self.expected[self.session.iteration + 1] = digest_tensor(bytes_of(self.host[0].detach()))[0]
        self.session.step()

    def check(self):
        """Raise Mixed for a checkpoint of another state, AssertionError for a fault or a missing checkpoint."""
        self.device.release_copies()
        self.session.close()
        self.device.read(self.model[0].detach())
        assert self.device.faults == []
        assert [run.draft.iteration for run in self.durable] == list(self.expected)
        for run in self.durable:
            manifest = restore.verify(open_store(self._store), "job", run.id)
            (saved,) = (each.digest for each in manifest.tensors if each.name == "model.0")
            if saved != self.expected[run.draft.iteration]:
                raise Mixed(f"the checkpoint of iteration {run.draft.iteration}")


@pytest.fixture(params=KINDS)
def device(request, monkeypatch):
    device = FakeDevice(request.param)
    install(device, monkeypatch)
    return device


@pytest.fixture
def cuda_device(monkeypatch):
    device = FakeDevice("cuda")
    install(device, monkeypatch)
    return device


def train(device, store):
    """Update right after each checkpoint, while nothing but the product's own waits delays the update."""
    job = DeviceJob(device, store)
    for _ in range(ITERATIONS):
        job.update()
        job.end_iteration()
    return job


def test_updates_that_follow_at_once_are_in_no_checkpoint_before_them(device, tmp_path):
    job = train(device, tmp_path)
    job.check()
    assert job.torn == []
    assert any(run.copy.device_copy_seconds for run in job.durable), "none was first copied on the device"


def test_no_event_before_the_update_is_found(device, tmp_path, monkeypatch):
    monkeypatch.setattr(DeviceCopies, "hold_update", DeviceCopies._compare_versions)
    with pytest.raises(Mixed):
        train(device, tmp_path).check()


def test_a_copy_that_does_not_wait_for_the_iteration_is_found(device, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeStream, "wait_event", lambda stream, event: None)
    with pytest.raises(Mixed):
        train(device, tmp_path).check()


def test_copies_within_the_device_that_are_freed_too_early_are_found(device, tmp_path, monkeypatch):
    queue = DeviceCopies.queue

    def queue_and_free(copies):
        queue(copies)
        copies._sources = []

    monkeypatch.setattr(DeviceCopies, "queue", queue_and_free)
    with pytest.raises(Mixed):
        train(device, tmp_path).check()


def train_on_own_stream(device, store):
    with device.stream(device.stream_of_script()):
        return train(device, store)


def test_a_stream_of_the_script_is_waited_for_and_held(device, tmp_path):
    train_on_own_stream(device, tmp_path).check()


@pytest.mark.parametrize("method", ["start", "hold_update"])
def test_a_stream_of_the_script_that_is_not_waited_for_is_found(method, device, tmp_path, monkeypatch):
    real = getattr(DeviceCopies, method)

    def on_default_stream(copies, *arguments):
        with device.stream(device.default_stream):
            return real(copies, *arguments)

    monkeypatch.setattr(DeviceCopies, method, on_default_stream)
    with pytest.raises(Mixed):
        train_on_own_stream(device, tmp_path).check()


def train_by_replays(device, store, *, waits, hold):
    """A job whose update a graph replays: no hook is called, and no version counter changes."""
    job = DeviceJob(device, store)
    job.update()
    job.end_iteration(hold=False)
    job.session.wait(60)
    with device.capture() as graph:
        job.optimizer.step()
    for _ in range(ITERATIONS):
        if waits:
            job.session.wait_copied()
        device.replay(graph)
        job.updated()
        job.end_iteration(hold=hold)
    return job


@pytest.mark.parametrize("waits", [False, True])
def test_updates_that_a_graph_replays_are_in_no_checkpoint_before_them(waits, device, tmp_path):
    job = train_by_replays(device, tmp_path, waits=waits, hold=waits)
    job.check()
    assert job.at_once == [False] + [not waits] * ITERATIONS


def test_a_replay_that_no_copy_is_completed_before_is_found(device, tmp_path, monkeypatch):
    """The first defect that a real device showed."""
    monkeypatch.setattr(Training, "may_replay_updates", False)
    with pytest.raises(Mixed):
        train_by_replays(device, tmp_path, waits=False, hold=True).check()


def train_twice(device, store):
    """Two sessions of one process, one after the other."""
    for name in ("first", "second"):
        job = train(device, store / name)
        job.check()
        del job
        gc.collect()


def test_a_second_session_of_a_process_has_pinned_memory_of_its_own(cuda_device, tmp_path):
    train_twice(cuda_device, tmp_path)
    assert cuda_device.host.registered == {}


def test_memory_that_is_unmapped_while_it_is_pinned_is_found(cuda_device, tmp_path, monkeypatch):
    """The second defect that a real device showed."""
    monkeypatch.setattr(cuda, "unregister", lambda address: None)
    with pytest.raises(AssertionError, match="was unmapped while it was pinned"):
        train_twice(cuda_device, tmp_path)


def fail_and_grow(device, store, monkeypatch):
    """Have a copy fail after its copies from the device were queued; then replace the memory by a larger one."""
    with monkeypatch.context() as patch:
        patch.setattr(UnchangedTensorCache, "run", fail)
        job = DeviceJob(device, store)
        job.update()
        job.end_iteration(hold=False)
        job.session.wait(60)
    job.expected.clear()
    job.loop.more = torch.ones(1 << 20)
    job.end_iteration(hold=False)
    job.session.wait(60)
    gc.collect()  # the traceback of the failure refers to the memory
    return job


def fail(_):
    raise OSError("a copy failed")


def test_memory_is_not_freed_while_the_device_copies_to_it(device, tmp_path, monkeypatch):
    fail_and_grow(device, tmp_path, monkeypatch).check()


def test_memory_that_is_freed_while_the_device_copies_to_it_is_found(device, tmp_path, monkeypatch):
    monkeypatch.setattr(DeviceCopies, "quiesce", lambda copies: None)
    with pytest.raises(AssertionError, match="memory that is no longer mapped"):
        fail_and_grow(device, tmp_path, monkeypatch).check()
