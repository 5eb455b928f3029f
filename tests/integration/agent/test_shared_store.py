"""Processes that write at a share of a store end at any time: nothing is lost, and the last write is not late."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.store import open_store
from tests.support.eventually import eventually

TRAINER = """
import sys, time
import torch
import holdfast
from holdfast.protocol.store_shares import StoreShare
from holdfast.protocol.wire import Desired

store = sys.argv[1]
model = torch.nn.Linear(1_000_000, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with holdfast.Session("job", store=store, model=model, optimizer=optimizer, every=1, grace=60) as session:
    print("resumed", session.resume(), flush=True)
    if "--resume-only" in sys.argv:
        sys.exit()
    for number in range(100_000):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        session.step()
        if number == 0:
            session.wait()
            share = StoreShare(
                address=store, bytes_per_second=1000.0, fallback_bytes_per_second=1000.0, longest_wait_seconds=1.0
            )
            session._saver.shares.follow(Desired(shares=(share,)))
        time.sleep(0.01)
"""


@pytest.fixture
def trainer(tmp_path: Path) -> subprocess.Popen[str]:
    """A job that has a durable checkpoint, and writes the next one for more than an hour."""
    store = tmp_path / "store"
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(store)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "resumed 0\n"
    eventually(lambda: list(store.glob("job/.tmp-*/*.safetensors")) and list(store.glob("job/0*")), "the write")
    return process


def resumed(store: Path) -> str:
    command = [sys.executable, "-c", TRAINER, str(store), "--resume-only"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_job_that_is_killed_resumes_from_the_checkpoint_before(
    trainer: subprocess.Popen[str], tmp_path: Path
) -> None:
    trainer.kill()
    trainer.communicate(timeout=60)
    assert open_store(str(tmp_path / "store")).checkpoints("job") == ["000000000001-1"]
    assert resumed(tmp_path / "store") == "resumed 1\n"


def test_after_sigterm_the_write_under_way_and_the_last_checkpoint_go_at_full_speed(
    trainer: subprocess.Popen[str], tmp_path: Path
) -> None:
    trainer.send_signal(signal.SIGTERM)
    trainer.communicate(timeout=60)
    assert trainer.returncode == 143
    first, under_way, last = open_store(str(tmp_path / "store")).checkpoints("job")
    assert first < under_way < last
    assert resumed(tmp_path / "store") == f"resumed {int(last.partition('-')[0])}\n"
