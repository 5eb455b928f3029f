"""The output of a trainer under `holdfast run`: what its terminal, pipe or file receives, and what a kill does."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.eventually import eventually

pytestmark = pytest.mark.processes

RUN = [sys.executable, "-m", "holdfast.cli", "run", "--starts", "1", "--"]
WRITES = """
import os, sys
out, err = sys.stdout.buffer, sys.stderr.buffer
print(sys.stdout.isatty(), sys.stderr.isatty(), flush=True)
for n in range(2000):
    out.write(b"out %d \\x1b[31m\\xff\\r" % n); out.flush()
    err.write(b"err %d\\n" % n); err.flush()
"""


def expected(name: bytes, end: bytes) -> bytes:
    return b"".join(name + b" %d" % n + end for n in range(2000))


def test_pipes_receive_every_byte_and_in_order(tmp_path: Path) -> None:
    ended = subprocess.run([*RUN, sys.executable, "-c", WRITES], capture_output=True, check=True)
    assert ended.stdout == b"False False\n" + expected(b"out", b" \x1b[31m\xff\r")
    assert expected(b"err", b"\n") in ended.stderr


def test_both_streams_of_one_file_keep_their_order(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        subprocess.run([*RUN, sys.executable, "-c", WRITES], stdout=log, stderr=log, check=True)
    lines = b"".join(b"out %d \x1b[31m\xff\rerr %d\n" % (n, n) for n in range(2000))
    assert lines in (tmp_path / "log").read_bytes()


def test_a_terminal_stays_a_terminal_and_receives_every_byte() -> None:
    master, slave = pty.openpty()
    received = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(master, 65536):
                received.extend(chunk)
        except OSError:  # the end of a pseudo-terminal
            pass

    reader = threading.Thread(target=read)
    reader.start()
    process = subprocess.Popen([*RUN, sys.executable, "-c", WRITES], stdout=slave, stderr=slave)
    os.close(slave)
    assert process.wait() == 0
    reader.join()
    os.close(master)
    assert b"True True\r\n" in received
    lines = b"".join(b"out %d \x1b[31m\xff\rerr %d\r\n" % (n, n) for n in range(2000))
    assert lines in received, "as the terminal translates line ends"


ENDS_ON_SIGTERM = """
import signal, sys, time, pathlib
folder = pathlib.Path(sys.argv[1])
def save(*_):
    for n in range(20_000):
        print("saving", n)
    sys.stdout.flush()
    (folder / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(folder / "ready").touch()
while True:
    signal.pause()
"""


def test_a_trainer_whose_supervisor_is_killed_saves_and_its_output_arrives(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        command = [*RUN, sys.executable, "-c", ENDS_ON_SIGTERM, str(tmp_path)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        eventually((tmp_path / "ready").exists, "the trainer to start")
        process.send_signal(signal.SIGKILL)
        process.wait()
        eventually((tmp_path / "saved").exists, "the trainer to save")
        eventually(lambda: b"saving 19999\n" in (tmp_path / "log").read_bytes(), "the last output")


def test_without_capture_the_trainer_has_the_output_of_the_supervisor(tmp_path: Path) -> None:
    program = "import os; print(os.readlink('/proc/self/fd/1'))"
    command = [*RUN[:-1], "--no-capture-output", "--", sys.executable, "-c", program]
    with (tmp_path / "log").open("wb") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.DEVNULL, check=True)
    assert (tmp_path / "log").read_text() == f"{tmp_path / 'log'}\n"
