"""A session leaves the process of the script as it found it."""

import atexit
import gc
import signal
import sys
import threading
import warnings

import pytest
import torch
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

import holdfast
from tests.support.small_session import iterate, session_of

HELD = (
    torch, torch.distributed, torch.nn.functional, torch.utils.data, torch.autograd, torch.random, torch.optim,
    torch.nn.Module, torch.nn.Parameter, torch.Tensor, torch.Generator, torch.optim.Optimizer, torch.optim.AdamW,
    DistributedDataParallel, torch.utils.data.DataLoader,
)  # fmt: skip
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


def process_state():
    """What a library may change for a whole process."""
    hooks = {
        f"{where.__name__}.{name}": dict(held)
        for where in (modules, optimizers)
        for name, held in vars(where).items()
        if name.startswith("_global_") and isinstance(held, dict)
    }
    functions = {
        f"{held.__name__}.{name}": value for held in HELD for name, value in vars(held).items() if callable(value)
    }
    return {
        "hooks": hooks,
        "functions of torch": functions,
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "modes of torch": (
            torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(),
        ),
        "warnings": list(warnings.filters),
        "signals": {number: signal.getsignal(number) for number in HANDLED},
        "hooks of the interpreter": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.gettrace()),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
    }  # fmt: skip


def train(store, loader):
    model, optimizer, session = session_of(store, server="http://127.0.0.1:9")
    with session:
        session.resume()
        for _, _ in zip(session.batches(loader), range(3), strict=False):
            iterate(model, optimizer, session)
    assert not session._saver.active


@pytest.fixture
def loader():
    return holdfast.DataLoader(list(range(16)), batch_size=2, shuffle=True)


def test_a_process_is_left_as_it_was_found(tmp_path, loader, monkeypatch):
    train(tmp_path / "first", loader)  # what is imported on the way may register something once
    before, at_exit = process_state(), []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    train(tmp_path / "store", loader)
    train(tmp_path / "store", loader)  # with a restore
    after = process_state()
    for what, was in before.items():
        assert after[what] == was, what
    assert at_exit == []


def test_a_session_walks_no_heap(tmp_path, loader, monkeypatch):
    def refuse(*_):
        raise AssertionError("a session walks the heap")

    for name in ("get_objects", "get_referrers", "get_referents", "collect", "freeze"):
        monkeypatch.setattr(gc, name, refuse)
    train(tmp_path / "store", loader)


def test_the_one_handler_of_a_session_is_that_of_sigterm(tmp_path):
    before = process_state()["signals"]
    _, _, session = session_of(tmp_path / "store")
    with session:
        during = process_state()["signals"]
        assert {number for number in HANDLED if during[number] != before[number]} <= {signal.SIGTERM}
    _, _, session = session_of(tmp_path / "store", grace=0)
    with session:
        assert process_state()["signals"] == before
