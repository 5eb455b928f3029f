import threading

import pytest
import torch

from holdfast import snapshot as module
from holdfast.snapshot import Snapshotter
from holdfast.state import Captured


@pytest.fixture
def snapshotter():
    snapshotter = Snapshotter()
    yield snapshotter
    snapshotter.close()


def captured(deferred=("w",), **tensors):
    return Captured(trees={}, tensors=tensors, deferred=set(deferred))


def begin(snapshotter, what, **options):
    return snapshotter.begin(what, iteration=1, lineage=1, kind="scheduled", **options)


def contents(snapshot):
    return {slot.name: snapshot.arena.slot(slot).clone() for slot in snapshot.slots}


@pytest.fixture
def held(monkeypatch):
    """Copies of tensors called "w" wait for this event; `reached` tells that one is there."""
    go, reached, real = threading.Event(), threading.Event(), module._copy

    def copy(target, source):
        if threading.current_thread().name == "holdfast-snapshot":
            reached.set()
            assert go.wait(10)
        real(target, source)

    monkeypatch.setattr(module, "_copy", copy)
    go.reached = reached
    yield go
    go.set()


def test_what_forward_changes_is_copied_before_begin_returns(snapshotter, held):
    buffer, weight = torch.ones(4), torch.ones(4)
    snapshot = begin(snapshotter, captured(w=weight, running_mean=buffer))
    buffer.add_(1)
    assert not snapshot.copied.is_set()
    held.set()
    snapshotter.wait_copied()
    assert contents(snapshot)["running_mean"].tolist() == [1] * 4


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
    assert held.reached.wait(10)
    assert not updated.is_set()
    held.set()
    thread.join()
    assert contents(snapshot)["w"].tolist() == [1] * 4
    assert snapshot.torn == []
    assert snapshot.stall_seconds > 0


def test_a_change_behind_our_back_is_seen(snapshotter, held):
    weight = torch.ones(4)
    snapshot = begin(snapshotter, captured(w=weight))
    assert held.reached.wait(10)
    weight.mul_(3)
    held.set()
    snapshotter.wait_copied()
    assert snapshot.torn == ["w"]


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
    snapshot.copied.wait()
    for tensor in tensors.values():
        tensor.zero_()
    found = contents(snapshot)
    assert snapshot.views == {"complex": "complex128"}
    found["complex"] = torch.view_as_complex(found["complex"].contiguous())
    assert all(torch.equal(found[name], expected[name]) for name in tensors)


def test_the_arena_is_allocated_once(snapshotter):
    what = captured(w=torch.ones(1000))
    first = begin(snapshotter, what, at_once=True)
    address = first.arena.slot(first.slots[0]).data_ptr()
    snapshotter.release()
    second = begin(snapshotter, what, at_once=True)
    assert second.arena.slot(second.slots[0]).data_ptr() == address


def test_preparing_allocates_what_the_first_snapshot_uses(snapshotter):
    snapshotter.prepare(captured(w=torch.ones(1000)))
    assert snapshotter.wait_free(10)
    address = snapshotter._arena._memory.data_ptr()
    snapshot = begin(snapshotter, captured(w=torch.ones(1000)), at_once=True)
    assert snapshot.arena.slot(snapshot.slots[0]).data_ptr() == address


def test_a_copy_that_fails_lets_the_update_go_on(snapshotter, monkeypatch):
    def fail(target, source):
        raise RuntimeError("device lost")

    monkeypatch.setattr(module, "_copy", fail)
    snapshot = begin(snapshotter, captured(w=torch.ones(2)))
    snapshotter.wait_copied()
    assert "device lost" in str(snapshot.failure)


def test_no_memory_for_an_arena_is_a_memory_error(snapshotter, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(MemoryError, match="can't allocate"):
        begin(snapshotter, captured(w=torch.ones(2)))
    assert snapshotter.free


def test_a_dtype_that_cannot_be_stored_is_named(snapshotter):
    with pytest.raises(TypeError, match=r"odd: tensors of torch\.float8_e4m3fnuz"):
        begin(snapshotter, captured(odd=torch.zeros(2).to(torch.float8_e4m3fnuz)))


def test_weights_swapped_past_the_version_counter_are_seen(snapshotter, held):
    weight = torch.ones(100)
    snapshot = begin(snapshotter, captured(w=weight))
    assert held.reached.wait(10)
    weight.data.mul_(3)
    held.set()
    snapshotter.wait_copied()
    assert snapshot.torn == ["w"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_snapshot_that_could_not_begin_leaves_the_arena_for_the_next(snapshotter, monkeypatch, error):
    def fail(target, source):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, "_copy", fail)
        with pytest.raises(error):
            begin(snapshotter, captured(buffer=torch.ones(2)))
    assert snapshotter.free
    assert begin(snapshotter, captured(w=torch.ones(2)), at_once=True).torn == []
