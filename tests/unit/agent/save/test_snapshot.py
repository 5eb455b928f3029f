import ctypes
import errno
import functools
import mmap
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from holdfast.format.manifest import SMALL_BYTES
from holdfast.save import host_buffers as arena_module
from holdfast.save.copying import HostCopies
from holdfast.save.layout import Layout
from holdfast.save.run import WriteResult
from holdfast.save.snapshotter import Snapshotter
from holdfast.state.registry import CapturedState
from holdfast.system import host_memory
from tests.support.persist_job import requested


@pytest.fixture
def snapshotter():
    snapshotter = Snapshotter()
    yield snapshotter
    snapshotter.close()


def captured(deferred=("w",), **tensors):
    return CapturedState(trees={}, tensors=tensors, deferred=set(deferred))


def begin(snapshotter, what, **options):
    run = requested(1, snapshotter, **options)
    snapshotter.begin(run, what)
    snapshotter.copy(run)
    return run


def release(run):
    run.end("failed", WriteResult())


def contents(snapshotter, run):
    """What the arena holds, by name, as the dtype it came as."""
    layout = next(layout for layout in snapshotter._layouts if layout.arena is run.arena)
    return {name: target.clone() for name, target in layout._targets.items()}


@pytest.fixture
def held(monkeypatch):
    """What is copied in the background waits for this event; `reached` tells that it has come to that."""
    go, reached, real = threading.Event(), threading.Event(), HostCopies.run

    def run(copies):
        reached.set()
        assert go.wait(300)
        real(copies)

    monkeypatch.setattr(HostCopies, "run", run)
    go.reached = reached
    yield go
    go.set()


def test_what_forward_changes_is_copied_before_begin_returns(snapshotter, held):
    buffer, weight = torch.ones(4), torch.ones(4)
    snapshot = begin(snapshotter, captured(w=weight, running_mean=buffer))
    buffer.add_(1)
    assert snapshot.state == "copying"
    held.set()
    snapshotter.wait_copied()
    assert contents(snapshotter, snapshot)["running_mean"].tolist() == [1] * 4


def test_an_update_waits_for_the_copy_and_the_copy_is_of_the_instant(snapshotter, held):
    weight = torch.ones(4)
    snapshot = begin(snapshotter, captured(w=weight))
    updated = threading.Event()

    def update():
        snapshotter.wait_copied()
        weight.add_(1)
        updated.set()

    thread = threading.Thread(target=update)
    thread.start()
    assert held.reached.wait(300)
    assert not updated.is_set()
    held.set()
    thread.join()
    assert contents(snapshotter, snapshot)["w"].tolist() == [1] * 4
    assert snapshot.copy.torn == []
    assert snapshot.stall_seconds > 0


def test_a_change_behind_our_back_is_seen(snapshotter, held):
    weight = torch.ones(4)
    snapshot = begin(snapshotter, captured(w=weight))
    assert held.reached.wait(300)
    weight.mul_(3)
    held.set()
    snapshotter.wait_copied()
    assert snapshot.copy.torn == ["w"]


def test_every_tensor_gets_memory_of_its_own(snapshotter):
    tensors = {
        "w": torch.randn(8, 3).t(),
        "step": torch.tensor(3.0),
        "empty": torch.empty(0, 2),
        "half": torch.randn(5).to(torch.float16),
        "complex": torch.randn(3, dtype=torch.complex128),
    }
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    snapshot = begin(snapshotter, captured(deferred=list(tensors), **tensors))
    snapshot.wait_copied()
    for tensor in tensors.values():
        tensor.zero_()
    found = contents(snapshotter, snapshot)
    assert snapshot.draft.views == {"complex": "complex128"}
    assert all(torch.equal(found[name], expected[name]) for name in tensors)


def test_the_arena_is_allocated_once(snapshotter):
    what = captured(w=torch.ones(1000))
    first = begin(snapshotter, what, at_once=True)
    address = first.arena.address
    release(first)
    second = begin(snapshotter, captured(w=torch.ones(1000), late=torch.ones(10)), at_once=True)
    assert second.arena.address == address


def test_preparing_allocates_what_the_first_snapshot_uses(snapshotter):
    snapshotter.prepare(captured(w=torch.ones(1000)))
    assert snapshotter.wait_idle(300)
    address = snapshotter._layouts[0].arena.address
    snapshot = begin(snapshotter, captured(w=torch.ones(1000)), at_once=True)
    assert snapshot.arena.address == address


def test_a_copy_that_fails_lets_the_update_go_on(snapshotter, monkeypatch):
    def fail(copies):
        raise RuntimeError("device lost")

    monkeypatch.setattr(HostCopies, "run", fail)
    snapshot = begin(snapshotter, captured(w=torch.ones(2)))
    snapshotter.wait_copied()
    assert "device lost" in str(snapshot.copy.failure)


def test_no_memory_for_an_arena_is_a_memory_error_and_the_next_snapshot_tries_again(snapshotter, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(arena_module, "_private_memory", refuse)
        with pytest.raises(MemoryError, match=r"no memory for a snapshot of 2 MB: No space left"):
            begin(snapshotter, captured(w=torch.ones(2)))
    assert snapshotter.free
    assert begin(snapshotter, captured(w=torch.ones(2)), at_once=True).copy.torn == []


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),  # since torch 2.7
]  # fmt: skip


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_copied_to_the_bit(snapshotter, dtype, deferred):
    noise = torch.randint(0, 2 if dtype is torch.bool else 256, (6, 64), dtype=torch.uint8)
    tensors = {
        "plain": noise.clone().view(dtype),
        "turned": noise.clone().view(dtype).t(),
        "every other": noise.clone().view(dtype)[:, ::2],
        "scalar": noise.view(dtype)[0, 0].clone(),
        "empty": torch.empty(0, 3, dtype=dtype),
    }
    expected = {name: raw(tensor) for name, tensor in tensors.items()}
    snapshot = begin(snapshotter, captured(deferred=tensors if deferred else (), **tensors))
    snapshot.wait_copied()
    assert (snapshot.copy.failure, snapshot.copy.torn) == (None, [])
    for tensor in tensors.values():
        tensor.zero_()
    assert {name: raw(tensor) for name, tensor in contents(snapshotter, snapshot).items()} == expected


def raw(tensor):
    """A tensor's bytes, in the order of its elements."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def test_conjugated_tensors_are_copied_as_they_read(snapshotter):
    tensor = torch.randn(5, dtype=torch.complex128).conj()
    expected = tensor.resolve_conj().clone()
    snapshot = begin(snapshotter, captured(deferred=["c"], c=tensor), at_once=True)
    assert torch.equal(contents(snapshotter, snapshot)["c"], expected)


@pytest.mark.parametrize("forbidden", [False, True])
def test_hundreds_of_small_tensors_are_copied_to_the_bit(snapshotter, monkeypatch, forbidden):
    """More than one call takes, of odd sizes, between large ones; also where a sandbox forbids that call."""
    calls = []

    def refused(*_):
        calls.append(True)
        return -1

    if forbidden:
        monkeypatch.setattr(host_memory, "_write", refused)
    tensors = {f"t{i}": torch.randn(1 + i % 37) for i in range(2500)} | {"big": torch.randn(50_000)}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    what = captured(deferred=tensors, **tensors)
    for _ in range(2):
        snapshot = begin(snapshotter, what, at_once=True)
        found = contents(snapshotter, snapshot)
        assert all(torch.equal(found[name], expected[name]) for name in tensors)
        release(snapshot)
    assert bool(calls) == forbidden


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux tells it")
def test_private_memory_is_not_for_children(snapshotter):
    """A loader's workers would hold every page of it that a snapshot writes to after they were forked."""
    snapshot = begin(snapshotter, captured(w=torch.ones(1000)), at_once=True)
    assert "wf" in flags_of(snapshot.arena.address)


def flags_of(address):
    """What the kernel has noted of the mapping at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return []


def test_a_second_snapshot_begins_while_the_first_is_held(monkeypatch):
    snapshotter = Snapshotter(max_in_flight=2)
    weight = torch.ones(4)
    what = captured(w=weight)
    first = begin(snapshotter, what, at_once=True)
    weight.add_(1)
    second = begin(snapshotter, what, at_once=True)
    assert not snapshotter.free
    assert [contents(snapshotter, s)["w"][0].item() for s in (first, second)] == [1, 2]
    release(first)
    assert snapshotter.free
    assert not snapshotter.idle
    snapshotter.close()


def test_a_frozen_tensor_is_copied_once_and_again_when_it_changed(snapshotter, monkeypatch):
    frozen = torch.ones(1000)
    what = captured(deferred=("w", "frozen"), w=torch.ones(4), frozen=frozen)
    what.frozen = {"frozen"}
    copied, real = [], HostCopies.run

    def run(copies):
        copied.append(len(copies._large) + sum(len(together._spans) for together in copies._small))
        real(copies)

    monkeypatch.setattr(HostCopies, "run", run)

    def take():
        copied.clear()
        snapshot = begin(snapshotter, what, at_once=True)
        assert torch.equal(contents(snapshotter, snapshot)["frozen"], frozen)
        release(snapshot)
        return sum(copied)

    assert [take(), take()] == [2, 1]
    frozen.add_(1)
    assert [take(), take()] == [2, 1]
    frozen.data[512:].mul_(3)  # past the version counter
    assert [take(), take()] == [2, 1]
    frozen.data[501] = 7.0
    assert [take(), take()] == [2, 1]


def test_in_debug_mode_a_single_element_changed_past_the_version_counter_is_seen(held):
    snapshotter = Snapshotter(debug=True)
    weight = torch.ones(100_000)
    snapshot = begin(snapshotter, captured(w=weight))
    assert held.reached.wait(300)
    weight.data[50_000] = 3
    held.set()
    snapshotter.wait_copied()
    assert snapshot.copy.torn == ["w"]
    snapshotter.close()


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_a_tensor_that_nobody_could_store_is_named(snapshotter):
    with pytest.raises(TypeError, match=r"odd: tensors of torch\.qint32 cannot be stored"):
        begin(snapshotter, captured(odd=torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint32)))
    assert snapshotter.free


def test_weights_swapped_past_the_version_counter_are_seen(snapshotter, held):
    weight = torch.ones(100)
    snapshot = begin(snapshotter, captured(w=weight))
    assert held.reached.wait(300)
    weight.data.mul_(3)
    held.set()
    snapshotter.wait_copied()
    assert snapshot.copy.torn == ["w"]


def test_a_tensor_whose_memory_is_gone_is_not_touched(snapshotter):
    """`share_memory_` gives a storage other memory in place; who looks at the tensor finds another address."""
    memory = mmap.mmap(-1, 1 << 20)
    weight = torch.frombuffer(memory, dtype=torch.float32)
    what = captured(w=weight)
    release(begin(snapshotter, what, at_once=True))
    protect = functools.partial(
        ctypes.CDLL(None, use_errno=True).mprotect, ctypes.c_void_p(weight.data_ptr()), ctypes.c_size_t(1 << 20)
    )
    watchdog = snapshotter._layouts[0]._detector
    assert protect(0) == 0  # as if it were gone: to touch it would end this process
    try:
        watchdog.remember()
        assert watchdog.changed() == ["w"]
    finally:
        assert protect(mmap.PROT_READ | mmap.PROT_WRITE) == 0


@pytest.mark.parametrize("name", ["w", "m"])
def test_what_is_changed_in_place_while_it_is_copied_is_named_whoever_keeps_it(snapshotter, held, name):
    what = captured(("m", "w"), m=torch.ones(100), w=torch.ones(100))
    what.optimizer_state = {"m"}
    snapshot = begin(snapshotter, what)
    what.tensors[name][50] = 3
    held.set()
    snapshotter.wait_copied()
    assert snapshot.copy.torn == [name]


def test_the_last_bytes_of_a_large_tensor_are_looked_at_too(snapshotter, held):
    weight = torch.ones(SMALL_BYTES)
    snapshot = begin(snapshotter, captured(w=weight))
    assert held.reached.wait(300)
    weight.data[-1] = 3
    held.set()
    snapshotter.wait_copied()
    assert snapshot.copy.torn == ["w"]


def test_a_run_that_is_abandoned_before_its_copy_gives_its_memory_back(snapshotter):
    run = requested(1, snapshotter)
    snapshotter.begin(run, captured(w=torch.ones(2)))
    assert not snapshotter.has_room
    run.end("abandoned", WriteResult(reason="interrupted"))
    assert snapshotter.free
    assert snapshotter.wait_copied() == 0.0
    assert begin(snapshotter, captured(w=torch.ones(2)), at_once=True).copy.torn == []


def test_a_copy_that_is_given_up_fails_and_keeps_its_memory_until_the_run_ends(snapshotter):
    run = requested(1, snapshotter)
    snapshotter.begin(run, captured(w=torch.ones(2)))
    snapshotter.fail_copy(run, "KeyboardInterrupt")
    assert run.wait_copied(300)
    assert str(run.copy.failure) == "KeyboardInterrupt before it began"
    assert not snapshotter.has_room
    release(run)
    assert begin(snapshotter, captured(w=torch.ones(2)), at_once=True).copy.torn == []


def test_a_copy_that_was_begun_is_not_given_up(snapshotter):
    run = begin(snapshotter, captured(w=torch.ones(2)), at_once=True)
    snapshotter.fail_copy(run, "KeyboardInterrupt")
    release(run)
    second = begin(snapshotter, captured(w=torch.ones(2)), at_once=True)
    assert (run.copy.failure, second.copy.failure) == (None, None)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_snapshot_that_could_not_begin_leaves_the_arena_for_the_next(snapshotter, monkeypatch, error):
    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Layout, "start", fail)
        with pytest.raises(error):
            begin(snapshotter, captured(buffer=torch.ones(2)))
    assert snapshotter.free
    assert begin(snapshotter, captured(w=torch.ones(2)), at_once=True).copy.torn == []
