"""Memory that is registered with CUDA, with a stand-in for the calls of its runtime."""

import ctypes
import os

import pytest
import torch

from holdfast.save.host_buffers import Arena, PinnableMemory

SIZE_BYTES = 1 << 20


class CudaRuntime:
    """Records what is registered; reads the memory of each call, which must be mapped."""

    def __init__(self, error=0):
        self.error, self.registered, self.calls = error, set(), []

    def cudaHostRegister(self, address, size_bytes, flags):  # noqa: N802
        ctypes.string_at(address, size_bytes)
        self.calls.append("register")
        if not self.error:
            self.registered.add(address)
        return self.error

    def cudaGetErrorString(self, error):  # noqa: N802
        return f"error {error}"

    def cudaHostUnregister(self, address):  # noqa: N802
        ctypes.string_at(address, 1)
        self.calls.append("unregister")
        self.registered.remove(address)
        return 0


@pytest.fixture
def cuda(monkeypatch):
    runtime = CudaRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_memory_stays_registered_until_the_last_view_of_it_is_gone(cuda):
    arena = Arena()
    arena.reserve(SIZE_BYTES, pinned=True)
    assert cuda.registered == {arena.address}
    view = arena.tensor(0, 64)
    arena.close()
    assert cuda.registered, "a device may still copy into the view"
    del view
    assert cuda.registered == set()


def test_memory_of_an_arena_that_is_dropped_is_not_left_registered(cuda):
    arena = Arena()
    arena.reserve(SIZE_BYTES, pinned=True)
    del arena
    assert cuda.calls == ["register", "unregister"]


def test_memory_is_registered_once_and_again_after_it_grew(cuda):
    arena = Arena()
    arena.reserve(SIZE_BYTES, pinned=True)
    arena.reserve(SIZE_BYTES, pinned=True)
    assert cuda.calls == ["register"]
    arena.reserve(16 * SIZE_BYTES, pinned=True)
    assert cuda.calls == ["register", "unregister", "register"]
    assert cuda.registered == {arena.address}
    arena.close()
    assert cuda.registered == set()


def test_memory_that_cannot_be_registered_is_used_without(cuda, caplog):
    cuda.error = 2
    arena = Arena()
    arena.reserve(SIZE_BYTES, pinned=True)
    arena.tensor(0, 64).fill_(7)
    assert "cannot be pinned, so copies are slower: error 2" in caplog.text
    arena.close()
    assert cuda.calls == ["register"]


def test_a_forked_process_unregisters_nothing(cuda):
    arena = Arena()
    arena.reserve(SIZE_BYTES, pinned=True)
    if (child := os.fork()) == 0:
        try:
            arena.close()
        finally:
            os._exit(len(cuda.calls))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    arena.close()
    assert cuda.calls == ["register", "unregister"]


@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"), reason="this torch cannot skip a function"
)
def test_the_end_of_memory_in_the_middle_of_a_compiled_function_is_not_traced(cuda):
    arena = Arena()

    def forward(x):
        torch._dynamo.graph_break()
        arena.close()
        return x + 1

    compiled = torch.compile(forward, backend="eager")
    traced = torch._dynamo.convert_frame.input_codes
    for _ in range(2):
        arena.reserve(SIZE_BYTES, pinned=True)
        compiled(torch.ones(2))
    assert cuda.registered == set()
    assert Arena.close.__code__ in traced
    assert PinnableMemory.__del__.__code__ not in traced
