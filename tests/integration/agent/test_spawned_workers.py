"""A spawned loader worker outlives a SIGTERM to all processes of the job, from its start to its end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

STARTS = """
import signal
from pathlib import Path

from torch.utils.data import DataLoader

from holdfast.system.preemption import PreemptionHandler, iterate_loader

if __name__ == "__main__":
    handler = PreemptionHandler(30.0)
    batches = iterate_loader(DataLoader([1, 2], num_workers=1, multiprocessing_context="spawn"))
    status = Path(f"/proc/{batches._workers[0].pid}/status").read_text()
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigBlk:", "SigCgt:"))]
    print(any(mask >> (signal.SIGTERM - 1) & 1 for mask in masks))
"""
ENDS = """
import os

from holdfast.system import preemption


class Last:
    def __del__(self):  # while the interpreter is torn down, after its handlers of signals
        os.write(1, b"ending")
        os.read(0, 1)


preemption._begin_worker(None, True, False, 0)
last = Last()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_first_spawned_worker_starts_with_sigterm_blocked(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(STARTS)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "True\n", done.stderr


def test_a_worker_ignores_sigterm_while_its_interpreter_ends():
    command = [sys.executable, "-c", ENDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.read(6) == b"ending"
        worker.send_signal(signal.SIGTERM)
        worker.communicate(b".", timeout=300)
    assert worker.returncode == 0
