"""Large arrays outside of models and optimizers: written from a fork, or copied, and always exact."""

import errno
import mmap
import os
import signal

import numpy as np
import pytest
import torch

import holdfast
from holdfast.checkpoint.stored_manifest import read_stored
from holdfast.disabled import VARIABLE
from holdfast.save import forked_image, host_state
from holdfast.save.host_state import HostStateForks
from holdfast.state.registry import Registry
from holdfast.store import open_store
from tests.support.process_inspection import children

MB = 1 << 20


class Buffer:
    """A replay buffer: an object with a `state_dict`."""

    def __init__(self, rows=8 * MB // 4096):
        self.data, self.at = np.zeros((rows, 1024), np.float32), 0

    def add(self, value):
        self.data[self.at % len(self.data)] = value
        self.at += 1

    def state_dict(self):
        return {"data": self.data, "at": self.at}

    def load_state_dict(self, state):
        self.data, self.at = state["data"], state["at"]


class Job:
    """A job with a replay buffer and a tensor in `Variables`."""

    def __init__(self, store, **options):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.buffer = options.pop("buffer", None) or Buffer()
        self.variables = holdfast.Variables(table=torch.zeros(2 * MB), small=np.zeros(3))
        options = {"host_state": "fork"} | options
        self.session = holdfast.Session(
            "job", store=store, every=10**6, model=self.model, optimizer=self.optimizer, buffer=self.buffer,
            variables=self.variables, **options,
        )  # fmt: skip

    def step(self, *, checkpoint=True):
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()
        self.buffer.add(self.session.iteration + 1)
        self.variables.table[self.session.iteration] = 5.0
        self.variables.small += 1
        if checkpoint:
            self.session.checkpoint()
        self.session.step()

    def content(self):
        return [
            self.buffer.data.tobytes(), self.buffer.at, self.variables.table.numpy().tobytes(),
            self.variables.small.tobytes(), *[p.detach().numpy().tobytes() for p in self.model.parameters()],
        ]  # fmt: skip

    def disturb(self):
        """Change all arrays: a checkpoint under way must not have it."""
        self.buffer.data += 100
        self.variables.table -= 3


def files_of(store, checkpoint):
    return {file.name for file in read_stored(open_store(store), "job", checkpoint).manifest.files}


def resumed(store, **options):
    job = Job(store, **options)
    job.buffer.data[:] = -1
    job.session.resume()
    return job


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def job(store):
    found = Job(store)
    found.session.resume()
    yield found
    found.session.close()


def notices(caplog):
    return [record.getMessage() for record in caplog.records if "host state" in record.getMessage()]


@pytest.mark.parametrize("incremental", [False, "auto"])
def test_it_holds_the_state_of_the_boundary(store, incremental):
    job = Job(store, incremental=incremental)
    job.session.resume()
    for _ in range(3):
        job.step()
        content = job.content()
        job.disturb()
        (outcome,) = job.session.wait(60)
        assert outcome.is_durable
        job.buffer.data -= 100
        job.variables.table += 3
    first, second, third = open_store(store).checkpoints("job")
    layers = {f"rank-0.{first}.host.base", f"rank-0.{second}.host.rows", f"rank-0.{third}.host.rows"}
    expected = layers if incremental else {"rank-0.host.safetensors"}
    assert files_of(store, outcome.checkpoint) == {"rank-0.safetensors", *expected}
    job.session.close()
    assert not children()
    again = resumed(store)
    assert again.content() == content
    assert again.session.iteration == 3
    again.session.close()


def test_only_arrays_outside_of_models_and_optimizers_are_forked():
    model = torch.nn.Linear(2048, 2048)
    model.register_buffer("statistics", torch.zeros(2 * MB))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    buffer = Buffer()
    objects = {
        "model": model,
        "optimizer": optimizer,
        "buffer": buffer,
        "twice": holdfast.Variables(w=model.weight),
    }
    captured = Registry(objects).capture({})
    assert captured.host_state == ["buffer.data"]
    rest, held = HostStateForks("fork", lambda *_: None).split(captured)
    assert held.keys() == {"buffer.data"}
    assert rest.tensors.keys() == captured.tensors.keys() - held.keys()
    assert rest.structure is not captured.structure
    assert HostStateForks("fork", lambda *_: None).split(captured)[0].structure is not rest.structure


def stored_bytes(store, checkpoint, file):
    return (store / "job" / checkpoint / file).stat().st_size


def test_a_ring_buffer_costs_what_was_written_to_it(store):
    buffer = Buffer(rows=4000)
    job = Job(store, buffer=buffer)
    job.session.resume()
    for number in range(6):
        for _ in range(10):
            buffer.add(number + 0.5)
        job.step()
        content = job.content()
        (outcome,) = job.session.wait(60)
        assert outcome.is_durable
    for each in open_store(store).checkpoints("job")[1:]:
        pages = stored_bytes(store, each, f"rank-0.{each}.host.rows") / 4096
        assert 11 <= pages < 20, "11 rows of the buffer, which may begin within a page, and one page of the table"
    job.session.close()
    again = resumed(store, buffer=Buffer(rows=4000))
    assert again.content() == content
    again.session.close()


def test_arrays_that_change_as_a_whole_are_written_in_full_and_others_in_part(store):
    job = Job(store)
    job.session.resume()
    for number in range(4):
        job.buffer.data[:] = number
        job.step()
        content = job.content()
        assert all(outcome.is_durable for outcome in job.session.wait(60))
    first, second, *_, last = open_store(store).checkpoints("job")
    assert f"rank-0.{first}.host.base" in files_of(store, first)
    assert files_of(store, second) == {
        "rank-0.safetensors", "rank-0.host.safetensors", f"rank-0.{second}.host.base",
    }  # fmt: skip
    manifest = read_stored(open_store(store), "job", last).manifest
    places = {tensor.name: tensor.file for tensor in manifest.tensors}
    assert places["buffer.data"] == "rank-0.host.safetensors"
    assert places["variables.table"] == f"rank-0.{second}.host.base"
    job.session.close()
    again = resumed(store)
    assert again.content() == content
    again.session.close()


@pytest.mark.parametrize("kind", ["shared tensor", "memmap", "shared map", "not contiguous", "small"])
def test_what_a_child_has_no_image_of_is_copied(store, tmp_path, kind):
    rows = 2048
    data = {
        "shared tensor": lambda: torch.zeros(rows, 1024).share_memory_().numpy(),
        "memmap": lambda: np.memmap(tmp_path / "map", np.float32, "w+", shape=(rows, 1024)).view(np.ndarray),
        "shared map": lambda: np.frombuffer(mmap.mmap(-1, rows * 4096), np.float32).reshape(rows, 1024),
        "not contiguous": lambda: np.zeros((rows, 2048), np.float32)[:, ::2],
        "small": lambda: np.zeros((3, 1024), np.float32),
    }[kind]()
    buffer = Buffer(1)
    buffer.data = data
    job = Job(store, buffer=buffer, incremental=False)
    job.session.resume()
    job.step()
    content = job.content()
    job.disturb()
    (outcome,) = job.session.wait(60)
    manifest = read_stored(open_store(store), "job", outcome.checkpoint).manifest
    places = {tensor.name: tensor.file for tensor in manifest.tensors}
    assert places["buffer.data"] == "rank-0.safetensors"
    assert places["variables.table"] == "rank-0.host.safetensors"
    job.session.close()
    again = resumed(store)
    assert again.content() == content
    again.session.close()


@pytest.mark.parametrize("advice", [10, 18], ids=["MADV_DONTFORK", "MADV_WIPEONFORK"])
def test_memory_that_is_kept_from_children_fails_a_checkpoint_by_name_and_is_then_copied(store, caplog, advice):
    memory = mmap.mmap(-1, 8 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    buffer = Buffer(1)
    buffer.data = np.frombuffer(memory, np.float32).reshape(-1, 1024)
    job = Job(store, buffer=buffer)
    job.session.resume()
    outcomes = []
    for _ in range(5):
        job.step()
        outcomes += job.session.wait(60)
    failed = [each for each in outcomes if not each.is_durable]
    assert 1 <= len(failed) <= host_state.FAILURES
    assert all("forked process" in each.reason for each in failed)
    assert any("host state is copied from now on" in each for each in notices(caplog))
    assert open_store(store).checkpoints("job") == [each.checkpoint for each in outcomes if each.is_durable]
    content = job.content()
    job.session.close()
    again = resumed(store)
    assert again.content() == content
    again.session.close()


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("at exit")])
def test_without_memory_for_a_child_the_same_checkpoint_is_copied(job, store, caplog, monkeypatch, error):
    def fail():
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(os, "fork", fail)
        job.step()
    content = job.content()
    job.disturb()
    (outcome,) = job.session.wait(60)
    assert outcome.is_durable
    assert files_of(store, outcome.checkpoint) == {"rank-0.safetensors"}
    assert any("cannot be forked" in each for each in notices(caplog))
    job.session.close()
    again = resumed(store)
    assert again.content() == content
    again.session.close()


def test_a_killed_child_fails_its_checkpoint_alone(job, store, monkeypatch):
    fork = forked_image.fork_image

    def killed(*args):
        image = fork(*args)
        os.kill(image.pid, signal.SIGKILL)
        return image

    job.step()
    (first,) = job.session.wait(60)
    with monkeypatch.context() as patched:
        patched.setattr(host_state, "fork_image", killed)
        job.step()
        (second,) = job.session.wait(60)
    job.step()
    (third,) = job.session.wait(60)
    assert [first.is_durable, second.is_durable, third.is_durable] == [True, False, True]
    assert "killed by SIGKILL" in second.reason
    assert open_store(store).checkpoints("job") == [first.checkpoint, third.checkpoint]
    assert not list(store.glob("job/.tmp-*"))
    linked = {f"rank-0.{first.checkpoint}.host.base", f"rank-0.{third.checkpoint}.host.rows"}
    assert files_of(store, third.checkpoint) == {"rank-0.safetensors", *linked}


def test_children_that_are_killed_again_and_again_end_the_forks(job, store, monkeypatch, caplog):
    fork = forked_image.fork_image

    def killed(*args):
        image = fork(*args)
        os.kill(image.pid, signal.SIGKILL)
        return image

    monkeypatch.setattr(host_state, "fork_image", killed)
    states = []
    for _ in range(host_state.FAILURES + 1):
        job.step()
        states += [outcome.is_durable for outcome in job.session.wait(60)]
    assert states == [False] * host_state.FAILURES + [True]
    assert any("copied from now on" in each for each in notices(caplog))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_leaves_no_checkpoint_and_no_child(job, store, monkeypatch, number):
    """After EIO the same child writes a second file."""
    write, count = forked_image.ForkedImage.write, 0

    def fail(self, *args):
        nonlocal count
        count += 1
        write(self, *args)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(forked_image.ForkedImage, "write", fail)
        job.step()
        (outcome,) = job.session.wait(60)
    assert not outcome.is_durable
    assert os.strerror(number) in outcome.reason
    assert count == (2 if number == errno.EIO else 1)
    assert not children()
    assert not open_store(store).checkpoints("job")
    job.step()
    assert all(each.is_durable for each in job.session.wait(60))


def test_a_checkpoint_that_cannot_begin_ends_its_child(job, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("no copy")

    with monkeypatch.context() as patched:
        patched.setattr("holdfast.save.layout.Layout.start", fail)
        job.step()
        (outcome,) = job.session.wait(60)
    assert "no copy" in outcome.reason
    assert not children()
    job.step()
    assert all(each.is_durable for each in job.session.wait(60))


def test_settings_that_need_a_copy(store, tmp_path, caplog, monkeypatch):
    cases = [{"parity": "4+1"}, {"host_state": "copy"}]
    for number, options in enumerate(cases):
        job = Job(tmp_path / str(number), **options)
        job.session.resume()
        job.step()
        (outcome,) = job.session.wait(60)
        assert "rank-0.host.safetensors" not in files_of(tmp_path / str(number), outcome.checkpoint)
        job.session.close()
    assert any(
        "host state is copied, not written from a fork: checkpoints have parity" in m for m in notices(caplog)
    )
    monkeypatch.setenv(VARIABLE, "fork")
    job = Job(store)
    job.session.resume()
    job.step()
    (outcome,) = job.session.wait(60)
    assert files_of(store, outcome.checkpoint) == {"rank-0.safetensors"}
    job.session.close()


def test_a_mode_that_does_not_exist_is_refused(store):
    with pytest.raises(ValueError, match="host_state='clone': give one of auto, copy, fork"):
        Job(store, host_state="clone")


class Choice:
    """The choice of "auto" for one array, with the machine that it is given."""

    def __init__(self, monkeypatch, *, free=1 << 40, copy_seconds=1e-9, has_memory_tier=False):
        self.said = []
        monkeypatch.setattr(host_state, "MIN_AUTO_BYTES", 8 * MB)
        monkeypatch.setattr(host_state, "available_bytes", lambda: free)
        monkeypatch.setattr(host_state, "_seconds_per_byte", lambda tensor: copy_seconds)
        self.forks = HostStateForks(
            "auto", lambda level, text: self.said.append(text), has_memory_tier=has_memory_tier
        )

    def forks_for(self, size_bytes):
        registry = Registry({"buffer": holdfast.Variables(data=np.ones(size_bytes, np.uint8))})
        return bool(self.forks.split(registry.capture({}))[1])


def test_auto_copies_little(monkeypatch):
    assert not Choice(monkeypatch).forks_for(7 * MB)


def test_auto_forks_where_a_copy_blocks_longer(monkeypatch):
    assert Choice(monkeypatch, copy_seconds=1.0).forks_for(16 * MB)
    assert not Choice(monkeypatch, copy_seconds=0.0).forks_for(16 * MB)


def test_auto_keeps_the_memory_tier_unless_the_copy_does_not_fit(monkeypatch):
    assert not Choice(monkeypatch, copy_seconds=1.0, has_memory_tier=True).forks_for(16 * MB)
    choice = Choice(monkeypatch, free=MB, has_memory_tier=True)
    assert choice.forks_for(16 * MB)
    assert "does not fit" in choice.said[0]


def test_auto_copies_what_changes_while_it_is_written(monkeypatch):
    choice = Choice(monkeypatch, copy_seconds=1.0)
    assert choice.forks_for(16 * MB)
    choice.forks.note_written(16 * MB, 2 * MB)
    assert choice.forks_for(16 * MB)
    choice.forks.note_written(16 * MB, 15 * MB)
    assert not choice.forks_for(16 * MB)
    assert choice.forks_for(64 * MB)  # the state has grown: chosen again


def test_auto_goes_on_forking_while_a_copy_does_not_fit(monkeypatch):
    choice = Choice(monkeypatch, free=MB)
    assert choice.forks_for(16 * MB)
    choice.forks.note_written(16 * MB, 15 * MB)
    assert choice.forks_for(16 * MB)
    monkeypatch.setattr(host_state, "available_bytes", lambda: 1 << 40)
    assert not choice.forks_for(16 * MB)


@pytest.mark.parametrize("reason", ["children are lost", "no process for a child"])
def test_a_checkpoint_fails_that_can_neither_be_forked_nor_copied(job, monkeypatch, reason):
    def fail(*arguments):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(host_state, "available_bytes", lambda: 0)
    if reason == "children are lost":
        monkeypatch.setattr(host_state, "FAILURES", 1)
        monkeypatch.setattr(forked_image, "WRITE_BYTES", "none")  # the child fails
        job.step()
        (outcome,) = job.session.wait(60)
        assert "the forked process ended" in outcome.reason
    else:
        monkeypatch.setattr(host_state, "fork_image", fail)
    job.step()
    (outcome,) = job.session.wait(60)
    assert not outcome.is_durable
    assert "a copy of it does not fit into free memory" in outcome.reason
    monkeypatch.setattr(host_state, "available_bytes", lambda: 1 << 40)
    job.step()
    assert all(each.is_durable for each in job.session.wait(60))


def test_auto_copies_where_a_measured_fork_blocks_longer(monkeypatch, store):
    choice = Choice(monkeypatch, copy_seconds=1.0)
    registry = Registry({"buffer": holdfast.Variables(data=np.ones(16 * MB, np.uint8))})
    clock = iter([0.0, 1e12, 1e12])
    monkeypatch.setattr(host_state.time, "perf_counter", lambda: next(clock))
    _, image = choice.forks.take(registry.capture({}))
    image.close()
    assert not choice.forks_for(16 * MB)
    assert "blocks training" in choice.said[-1]
