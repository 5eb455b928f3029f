"""`holdfast run` as the first process of a container, with no init beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.eventually import eventually

CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc"]
"""A container is, for this, a process namespace and its own /proc."""
if subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode:
    pytest.skip("no process namespace can be made here, which takes root", allow_module_level=True)

TRAINER = """
import os, signal, subprocess, sys, time

received = []
signal.signal(signal.SIGTERM, lambda signum, frame: received.append(signum))
subprocess.run(["sh", "-c", "sleep 0.01 & echo $! > orphan"], check=True)
orphan = open("orphan").read().strip()
while os.path.exists(f"/proc/{orphan}"):  # also as a zombie
    time.sleep(0.01)
open("reaped", "w").close()
while "wait" in sys.argv and not received:
    time.sleep(0.01)
sys.exit(5)
"""


@pytest.fixture
def container(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "trainer.py").write_text(TRAINER)
    command = [sys.executable, "-m", "holdfast.cli", "run", "--starts", "1", "--", sys.executable, "trainer.py"]
    with subprocess.Popen([*CONTAINER, *command, *getattr(request, "param", [])], cwd=tmp_path) as process:
        yield process
        process.kill()


def _first_process(container: subprocess.Popen[bytes]) -> int:
    """Return its process number outside the container, where it is 1 inside."""
    return int(Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text())


def test_it_reaps_what_others_leave_behind_and_passes_the_exit_status_on(
    container: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert container.wait(300) == 5
    assert (tmp_path / "reaped").exists()


@pytest.mark.parametrize("container", [["wait"]], indirect=True)
def test_a_signal_to_the_first_process_reaches_the_trainer(
    container: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    eventually((tmp_path / "reaped").exists, "the trainer")
    os.kill(_first_process(container), signal.SIGTERM)
    assert container.wait(300) == 5
