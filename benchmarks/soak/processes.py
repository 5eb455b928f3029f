"""The processes of a soak: the server, the bucket, and each job under its supervisors."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from benchmarks.harness import ROOT, free_port, meeting_place
from benchmarks.soak.ledger import Ledger
from tests.support import object_servers
from tests.support.job_processes import HOLDFAST, environment

KINDS = ("ddp", "fsdp", "incremental", "peers", "framework", "loader", "drain", "fork")
RANKS: Mapping[str, int] = {"ddp": 2, "fsdp": 2, "peers": 2}
RESTART_SECONDS = 1.0
"""How long a scheduler takes to start again what has ended."""
END_SECONDS = 180.0


class Supervised:
    """A job under one supervisor, or under two that stand for two hosts."""

    def __init__(self, kind: str, folder: Path, env: dict[str, str], python: str = sys.executable) -> None:
        self.kind, self.folder, self._python = kind, folder, python
        self.store, self.spoken = folder / "store", folder / "output.log"
        self._env, self._port = env, free_port()
        self._supervisors: dict[int, subprocess.Popen[bytes]] = {}
        self._due: dict[int, float] = {}
        self.ledgers = [Ledger(folder / f"ledger-{rank}") for rank in range(RANKS.get(kind, 1))]
        self.struck_at = 0
        """Iterations in the ledger at the last fault."""
        self.ends: list[int] = []
        """Exit statuses of supervisors before the end."""
        self.is_ending = self.is_paused = False
        self.progress_at, self._seen, self.stall_seconds = time.monotonic(), 0, 0.0

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for host in range(2 if self.kind == "peers" else 1):
            self._start(host)

    def tend(self, now: float) -> None:
        """Start ended supervisors again, and note for how long there was no iteration."""
        for ledger in self.ledgers:
            ledger.read()
        if self.is_paused or len(self.ledgers[0].steps) != self._seen:
            self.progress_at, self._seen = now, len(self.ledgers[0].steps)
        self.stall_seconds = max(self.stall_seconds, now - self.progress_at)
        for host, process in self._supervisors.items():
            if self.is_ending or process.poll() is None:
                continue
            if host not in self._due:
                self.ends.append(process.returncode)
                self._due[host] = now + RESTART_SECONDS
            elif now >= self._due[host]:
                del self._due[host]
                self._start(host)

    def supervisors(self) -> list[int]:
        return [process.pid for process in self._supervisors.values() if process.poll() is None]

    def trainers(self) -> list[int]:
        """Process ids of the ranks that run, by rank."""
        found = []
        for ledger in self.ledgers:
            with contextlib.suppress(psutil.Error, IndexError):
                process = psutil.Process(ledger.steps[-1].pid)
                if process.environ().get("SOAK_JOB") == str(self.folder):
                    found.append(process.pid)
        return found

    def helpers(self) -> list[int]:
        """Loader workers, and children that write a forked image."""
        found: list[int] = []
        for pid in self.trainers():
            with contextlib.suppress(psutil.Error):
                found += [child.pid for child in psutil.Process(pid).children()]
        return found

    @property
    def moves(self) -> bool:
        """Whether it has trained since the last fault."""
        return len(self.ledgers[0].steps) >= self.struck_at + 10

    def end(self) -> None:
        self.is_ending = True
        (self.folder / "disk-full").unlink(missing_ok=True)
        (self.folder / "enough").touch()

    def wait(self, seconds: float) -> list[str]:
        """Wait until it has ended, else kill it; return what is wrong."""
        deadline, wrong = time.monotonic() + seconds, []
        for process in self._supervisors.values():
            try:
                if status := process.wait(max(deadline - time.monotonic(), 0.1)):
                    wrong.append(f"a supervisor ended with {status}")
            except subprocess.TimeoutExpired:
                wrong.append("a supervisor did not end")
                process.kill()
                process.wait()
        return wrong

    def _start(self, host: int) -> None:
        trainer = [*("-m", "benchmarks.soak.job"), self.kind, str(self.folder)]
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        launcher = ranks if self.kind in ("ddp", "fsdp") else []
        env = self._env | {"SOAK_JOB": str(self.folder), "HOLDFAST_STORE": str(self.store)}
        if self.kind == "peers":
            env |= meeting_place(host, 2, self._port) | {"SOAK_HOST": f"host-{host}"}
        command = [*HOLDFAST, "run", "--stay", "never", "--", self._python, *launcher, *trainer]
        with self.spoken.open("ab") as output:
            self._supervisors[host] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
            )

    def reference(self, last: int) -> list[dict[int, str]]:
        """Train without faults up to an iteration; return the losses of each rank."""
        folder = self.folder / "reference"
        folder.mkdir(exist_ok=True)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(self.ledgers))]
        trainer = ["-m", "benchmarks.soak.job", self.kind, str(folder), str(last)]
        env = self._env | {"HOLDFAST_STORE": str(folder / "store"), "HOLDFAST_SERVER": ""}
        with (folder / "output.log").open("wb") as output:
            subprocess.run(
                [self._python, *(launch if len(self.ledgers) > 1 else []), *trainer],
                stdout=output, stderr=output, env=env, check=True, timeout=3600,
            )  # fmt: skip
        ledgers = [Ledger(folder / f"ledger-{rank}") for rank in range(len(self.ledgers))]
        return [{step.iteration: step.loss for step in ledger.read()} for ledger in ledgers]


class Servers:
    """The server on one port and one database, and the bucket."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.port, self._folder, self._env = free_port(), folder, env
        self.url = f"http://127.0.0.1:{self.port}"
        self.bucket = object_servers.Rclone(folder / "bucket")
        self._server: subprocess.Popen[bytes] | None = None
        self.wrong: list[str] = []

    def start(self) -> None:
        """Start the server, if it does not run."""
        if self.pid is not None:
            return
        database = str(self._folder / "holdfast.db")
        with (self._folder / "server.log").open("ab") as output:
            self._server = subprocess.Popen(
                [*HOLDFAST, "serve", "--port", str(self.port), "--db", database],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._env, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server is not None and self._server.poll() is None else None

    def stop(self, number: signal.Signals) -> None:
        if self._server is None or self.pid is None:
            return
        self._server.send_signal(number)
        try:
            status = self._server.wait(60)
            if status not in (0, -number):
                self.wrong.append(f"the server ended with {status}")
        except subprocess.TimeoutExpired:
            self.wrong.append(f"the server did not end after {number.name}")
            self._server.kill()
            self._server.wait()


def environment_of(folder: Path, bucket: str, server: str) -> dict[str, str]:
    """Without settings of the caller; all processes of the soak have the mark SOAK_FOLDER."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    return environment(folder, server) | object_servers.variables(bucket) | {
        "SOAK_FOLDER": str(folder), "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "XDG_STATE_HOME": str(folder / "state"),
    }  # fmt: skip


def marked(folder: Path) -> Iterator[psutil.Process]:
    """Yield the processes of a soak that are left."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("SOAK_FOLDER") == str(folder):
                yield process
