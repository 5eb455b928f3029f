"""A job of four ranks on three hosts, each with a supervisor, of which a test takes hosts away."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.hosts import Host, Hosts
from tests.support.job_processes import HOLDFAST, environment
from tests.support.restore_faults import HERE, TrainingLedgerLine, read

RANKS_OF_HOSTS = (2, 1, 1)
RANKS = sum(RANKS_OF_HOSTS)
PORT = 29500


class HostsJob:
    """Runs `holdfast run -- torchrun` on each host; a host that was lost starts anew, without memory or disk."""

    def __init__(self, folder: Path, iterations: int, **settings: str) -> None:
        self._folder, self._iterations, self._settings = folder, iterations, settings
        self._hosts = Hosts(folder)
        self._held = contextlib.ExitStack()
        self._running: dict[int, tuple[Host, subprocess.Popen[bytes]]] = {}

    def __enter__(self) -> HostsJob:
        self._held.enter_context(self._hosts)
        for number in range(len(RANKS_OF_HOSTS)):
            self.start(number)
        return self

    def __exit__(self, *error: object) -> None:
        self._held.__exit__(*error)

    def start(self, number: int) -> None:
        host = self._held.enter_context(self._hosts.start(number))
        torchrun = [
            str(Path(sys.executable).with_name("torchrun")), "--nnodes", str(len(RANKS_OF_HOSTS)),
            "--node-rank", str(number), "--nproc-per-node", str(RANKS_OF_HOSTS[number]),
            "--master-addr", "10.77.0.1", "--master-port", str(PORT),
        ]  # fmt: skip
        trainer = [str(HERE / "hosts_trainer.py"), str(self._folder), str(self._iterations)]
        env = environment(self._folder / "store") | {
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "TMPDIR": str(self._hosts.disk),
        }  # fmt: skip
        command = [*HOLDFAST, "run", "--stay", "never", "--", *torchrun, *trainer]
        running = host.spawned(command, self._log(number), env | self._settings)
        self._running[number] = host, self._held.enter_context(running)

    def lose(self, number: int) -> None:
        """Lose a host, and start another one in its place."""
        host, process = self._running.pop(number)
        host.take_away()
        process.wait(PATIENCE_SECONDS)
        self.start(number)

    def wait_for(self, iteration: int, attempt: int) -> None:
        """Wait until every rank has trained so far in this attempt, or a supervisor has ended."""

        def is_there() -> bool:
            ended = [number for number, (_, process) in self._running.items() if process.poll() is not None]
            assert not ended, f"the supervisors of hosts {ended} ended"
            return all(
                any(line.iteration >= iteration and line.attempt >= attempt for line in self.ledger(rank))
                for rank in range(RANKS)
            )

        eventually(is_there, f"iteration {iteration} of attempt {attempt}")

    def wait(self) -> list[int]:
        """Wait for the end, and return the exit statuses by host."""
        return [self._running[number][1].wait(PATIENCE_SECONDS) for number in sorted(self._running)]

    def ledger(self, rank: int) -> list[TrainingLedgerLine]:
        path = self._folder / f"ledger-{rank}"
        return read(path) if path.exists() else []

    def log(self) -> str:
        """The output of the first host, which has rank 0."""
        return self._log(0).read_text()

    def _log(self, number: int) -> Path:
        return self._folder / f"host-{number}.log"
