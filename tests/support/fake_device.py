"""A model of an accelerator on the CPU, for the code that copies from devices beside training.

What a thread queues on a stream is executed as late as the waits allow: when a thread waits for it, or when a
test says so. Streams that the product creates can be held, so that their copies end after everything that
nothing delays. Copies read the memory of the device, and write that of the host, when they are executed. Freed
memory of the device is overwritten in the order of its stream, as if an allocator had given it to the next
operation there. Pinned host memory keeps the pages that were mapped when it was registered.

Tensors of the model are `DeviceTensor`: for torch, and for the product, they are on a device. Autograd needs a
device that exists; a test assigns gradients itself.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from holdfast import accelerators
from holdfast.save import host_buffers
from holdfast.save.host_buffers import PinnableMemory
from holdfast.state import encoder

POISON = 0xA5
ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered"""
TIMEOUT_SECONDS = 60.0


class Moment:
    """A place in the queue of a stream; `None` as its stream where it is before everything."""

    def __init__(self, stream: FakeStream | None) -> None:
        self.stream, self.is_reached = stream, stream is None


class FakeStream:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.queue: collections.deque[Callable[[], object] | Moment] = collections.deque()
        """Operations, moments of this stream to be reached, and moments of others to be waited for."""
        self.is_held = False

    def wait_event(self, event: FakeEvent) -> None:
        self._device.enqueue(self, event.moment)

    def wait_stream(self, other: FakeStream) -> None:
        self._device.enqueue(self, self._device.mark(other))

    def synchronize(self) -> None:
        self._device.reach(self._device.mark(self))


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device, self.moment = device, Moment(None)

    def record(self, stream: FakeStream | None = None) -> None:
        self.moment = self._device.mark(stream or self._device.current_stream())

    def synchronize(self) -> None:
        self._device.reach(self.moment)

    def query(self) -> bool:
        return self.moment.is_reached

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1.0


class Block:
    """Memory of the device; the last tensor in it frees it."""

    def __init__(self, device: FakeDevice, content: torch.Tensor) -> None:
        self.content = content
        weakref.finalize(self, device.freed, device.current_stream(), content.untyped_storage())


class DeviceTensor(torch.Tensor):
    """A tensor in the memory of the device."""

    inner: torch.Tensor
    block: Block
    device_model: FakeDevice

    @staticmethod
    def of(device: FakeDevice, inner: torch.Tensor, block: Block | None = None) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            DeviceTensor,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(device.kind, 0),
        )
        made.inner, made.device_model, made.block = inner, device, block or Block(device, inner)
        return made

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def __repr__(self) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        device = next(leaf.device_model for leaf in leaves if isinstance(leaf, DeviceTensor))
        return device.call(function, args, kwargs or {})


class FakeDevice:
    """One device, of a kind that torch knows; `install` puts it in the place of that kind's module."""

    def __init__(self, kind: str = "cuda") -> None:
        self.kind = kind
        self.default_stream = FakeStream(self)
        self.faults: list[str] = []
        """What a device would end the process for, or do without a word: writes to memory that is not mapped."""
        self.holds_new_streams = False
        self.graph: list[Callable[[], object]] | None = None
        """The operations of the graph that is being captured."""
        self.host = HostMemory(self)
        self._progress = threading.Condition(threading.RLock())
        self._here = threading.local()
        self._trained_on, self._created = [self.default_stream], list[FakeStream]()

    # what a test does

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        return DeviceTensor.of(self, values.detach().clone())

    def stream_of_script(self) -> FakeStream:
        """Return a new stream that `hold_copies` does not hold."""
        stream = FakeStream(self)
        self._trained_on.append(stream)
        return stream

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values after everything that was queued."""
        assert isinstance(tensor, DeviceTensor)
        for stream in [*self._trained_on, *self._created]:
            stream.synchronize()
        return tensor.inner.clone()

    def run_training(self) -> None:
        """Execute what streams that are not held have queued, up to what waits for a stream that is held."""
        with self._progress:
            while any(self._advance(stream) for stream in [*self._trained_on, *self._created]):
                pass

    def hold_copies(self) -> None:
        """Hold the streams that the product has created, and will create."""
        self.holds_new_streams = True
        for stream in self._created:
            stream.is_held = True

    def release_copies(self) -> None:
        with self._progress:
            self.holds_new_streams = False
            for stream in self._created:
                stream.is_held = False
            self._progress.notify_all()

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Callable[[], object]]]:
        """Collect operations instead of executing them, as a CUDA graph does; `replay` executes them."""
        self.graph = []
        try:
            yield self.graph
        finally:
            self.graph = None

    def replay(self, graph: list[Callable[[], object]]) -> None:
        for operation in graph:
            self.enqueue(self.current_stream(), operation)

    # the names of torch's module

    def Stream(self, device: Any = None) -> FakeStream:  # noqa: N802
        stream = FakeStream(self)
        stream.is_held = self.holds_new_streams
        self._created.append(stream)
        return stream

    def Event(self, **options: bool) -> FakeEvent:  # noqa: N802
        return FakeEvent(self)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self, device: Any = None) -> FakeStream:
        return getattr(self._here, "stream", self.default_stream)

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def is_current_stream_capturing(self) -> bool:
        return self.graph is not None

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 1 << 36, 1 << 36

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        return {"reserved_bytes": {"all": {"current": 0}}, "allocated_bytes": {"all": {"peak": 0}}}

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return []

    # execution

    def enqueue(self, stream: FakeStream, operation: Callable[[], object] | Moment) -> None:
        with self._progress:
            if self.graph is not None and callable(operation):
                self.graph.append(operation)
            else:
                stream.queue.append(operation)
            self._progress.notify_all()

    def mark(self, stream: FakeStream) -> Moment:
        moment = Moment(stream)
        self.enqueue(stream, moment)
        return moment

    def reach(self, moment: Moment) -> None:
        """Execute what a moment needs, and nothing else; wait where that needs a stream that is held."""
        with self._progress:
            while not moment.is_reached:
                if not self._go_towards(moment) and not self._progress.wait(TIMEOUT_SECONDS):
                    raise TimeoutError("a stream is held for ever")

    def freed(self, stream: FakeStream, storage: torch.UntypedStorage) -> None:
        self.enqueue(stream, lambda: ctypes.memset(storage.data_ptr(), POISON, storage.nbytes()))

    def _go_towards(self, moment: Moment) -> bool:
        stream = moment.stream
        assert stream is not None
        moved = self._advance(stream, until=moment)
        if moment.is_reached or stream.is_held or not stream.queue:
            return moved
        blocking = stream.queue[0]
        return (isinstance(blocking, Moment) and self._go_towards(blocking)) or moved

    def _advance(self, stream: FakeStream, until: Moment | None = None) -> bool:
        """Execute what may be executed now; return whether anything was."""
        moved = False
        while stream.queue and not stream.is_held:
            head = stream.queue[0]
            if isinstance(head, Moment) and head.stream is not stream and not head.is_reached:
                break
            stream.queue.popleft()
            moved = True
            if not isinstance(head, Moment):
                head()
            elif head.stream is stream:
                head.is_reached = True
            if head is until:
                break
        if moved:
            self._progress.notify_all()
        return moved

    # operations of torch

    def call(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        packet = function.overloadpacket
        aten = torch.ops.aten
        if packet is aten._foreach_copy_:
            for target, source in zip(args[0], args[1], strict=True):
                self._copy(target, source, is_asynchronous=(*args, False)[2])
            return None
        if packet is aten.copy_:
            return self._copy(args[0], args[1], is_asynchronous=(*args, False)[2])
        if packet is aten._local_scalar_dense or packet is aten.equal:
            self.current_stream().synchronize()
            return function(*_inner(args))
        if packet is aten._to_copy and kwargs.get("device") == torch.device("cpu"):
            self.current_stream().synchronize()
            return function(*_inner(args), **kwargs)
        if any(each.alias_info is not None and each.alias_info.is_write for each in function._schema.arguments):
            inner = _inner((args, kwargs))
            self.enqueue(self.current_stream(), lambda: function(*inner[0], **inner[1]))
            return args[0]
        kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        if any(each.alias_info is not None for each in function._schema.returns):
            return self._wrapped(function(*_inner(args), **kwargs), args[0].block)
        return self._queued(function, args, kwargs)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, *, is_asynchronous: bool) -> torch.Tensor:
        if isinstance(target, DeviceTensor):
            written = target.inner
            read = source.inner if isinstance(source, DeviceTensor) else source.clone()
            self.enqueue(self.current_stream(), lambda: written.copy_(read))
            return target
        assert isinstance(source, DeviceTensor)
        self.enqueue(self.current_stream(), self.host.write(target, source.inner))
        if not is_asynchronous:
            self.current_stream().synchronize()
        return target

    def _queued(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Queue an operation, with new memory for what it returns."""
        inner = _inner(args)
        shapes = function(*pytree.tree_map_only(torch.Tensor, lambda each: each.to("meta"), inner), **kwargs)
        made = pytree.tree_map_only(torch.Tensor, lambda each: torch.empty_like(each, device="cpu"), shapes)

        def execute() -> None:
            results = function(*inner, **kwargs)
            for target, result in zip(pytree.tree_leaves(made), pytree.tree_leaves(results), strict=True):
                target.copy_(result)

        self.enqueue(self.current_stream(), execute)
        return self._wrapped(made)

    def _wrapped(self, made: Any, block: Block | None = None) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda each: DeviceTensor.of(self, each, block), made)


class HostMemory:
    """The memory of the host as the device sees it, and the part of CUDA's runtime that pins it."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._numbers = itertools.count(1)
        self.mapped: dict[int, tuple[int, int]] = {}
        """Address → (size, number of the mapping) of memory for snapshots."""
        self.registered: dict[int, tuple[int, int]] = {}
        """Address → (size, number of the mapping at the time) of what is pinned."""

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        if any(address < at + size and at < address + size_bytes for at, (size, _) in self.registered.items()):
            return ALREADY_REGISTERED
        self.registered[address] = size_bytes, self._mapping(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return f"error {error}"

    def map(self, address: int, size_bytes: int) -> None:
        self.mapped[address] = size_bytes, next(self._numbers)

    def unmap(self, address: int) -> None:
        self.mapped.pop(address, None)
        if address in self.registered:
            self._device.faults.append("memory was unmapped while it was pinned")

    def write(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        """Return a copy to the host; a device knows addresses, and keeps no memory alive."""
        address, shape, dtype = target.data_ptr(), target.shape, target.dtype
        size, number = target.nbytes, self._mapping(address)
        if not number:
            return lambda: target.copy_(source)  # memory of torch's own

        def execute() -> None:
            if self._mapping(address) != number:
                self._device.faults.append(f"{size} bytes were copied to memory that is no longer mapped")
                return
            if self._pages(address) != number:
                return  # to the pages that were mapped there when it was registered
            content = torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=dtype)
            content.view(shape).copy_(source)

        return execute if size else lambda: None

    def _mapping(self, address: int) -> int:
        found = (number for at, (size, number) in self.mapped.items() if at <= address < at + size)
        return next(found, 0)

    def _pages(self, address: int) -> int:
        found = (number for at, (size, number) in self.registered.items() if at <= address < at + size)
        return next(found, self._mapping(address))


def _inner(args: Any) -> Any:
    return pytree.tree_map_only(DeviceTensor, lambda each: each.inner, args)


def install(device: FakeDevice, patch: pytest.MonkeyPatch) -> None:
    """Have the product find this device, and no other of its kind."""
    real = accelerators.module_of

    class TrackedMemory(PinnableMemory):
        """Memory whose mapping and end the device knows."""

        def __del__(self) -> None:
            super().__del__()
            device.host.unmap(self.address)

    def hold(arena: host_buffers.Arena, memory: PinnableMemory) -> None:
        real_hold(arena, memory)
        device.host.map(arena.address, len(memory))

    real_hold = host_buffers.Arena._hold
    patch.setattr(accelerators, "module_of", lambda kind: device if kind == device.kind else real(kind))
    patch.setattr(torch.cuda, "cudart", lambda: device.host)
    patch.setattr(host_buffers, "PinnableMemory", TrackedMemory)
    patch.setattr(host_buffers.Arena, "_hold", hold)
    patch.setattr(encoder, "RESTORED_TENSORS", encoder.RESTORED_TENSORS | {DeviceTensor})
