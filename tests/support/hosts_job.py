"""A job of four ranks on three hosts, each with a supervisor, of which a test takes hosts away."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.hosts import Host, Hosts
from tests.support.job_processes import HOLDFAST, environment
from tests.support.restore_faults import HERE, TrainingLedgerLine, read

RANKS_OF_HOSTS = (2, 1, 1)
RANKS = sum(RANKS_OF_HOSTS)
PORT = 29500
SECONDS = 120.0
"""Limit of a start and a few iterations on a busy machine."""


class HostsJob:
    """Runs `holdfast run` on each host; a host that was lost starts anew, without memory or disk.

    The store takes no checkpoint from iteration `full_from` on. Without `torchrun` ranks start in half the time.
    """

    def __init__(
        self,
        folder: Path,
        iterations: int,
        full_from: int = sys.maxsize,
        *,
        torchrun: bool = False,
        **settings: str,
    ) -> None:
        self._folder, self._arguments, self._settings = folder, [str(iterations), str(full_from)], settings
        self._torchrun = torchrun
        self._hosts = Hosts(folder)
        self._held = contextlib.ExitStack()
        self._running: dict[int, tuple[Host, subprocess.Popen[bytes]]] = {}

    def __enter__(self) -> Self:
        self._held.enter_context(self._hosts)
        self.train_to(0)
        for number in range(len(RANKS_OF_HOSTS)):
            self.start(number)
        return self

    def __exit__(self, *error: object) -> None:
        self._held.__exit__(*error)

    def start(self, number: int) -> None:
        host = self._held.enter_context(self._hosts.start(number))
        count, first = RANKS_OF_HOSTS[number], sum(RANKS_OF_HOSTS[:number])
        trainer = [str(self._folder), *self._arguments]
        launcher = [
            sys.executable, str(HERE / "host_launcher.py"), str(first), str(count),
        ] if not self._torchrun else [
            str(Path(sys.executable).with_name("torchrun")), "--nnodes", str(len(RANKS_OF_HOSTS)),
            "--node-rank", str(number), "--nproc-per-node", str(count),
            "--master-addr", "10.77.0.1", "--master-port", str(PORT), str(HERE / "hosts_trainer.py"),
        ]  # fmt: skip
        env = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(PORT), "WORLD_SIZE": str(RANKS)}
        env |= environment(self._folder / "store") | {
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "TMPDIR": str(self._hosts.disk),
        }  # fmt: skip
        command = [*HOLDFAST, "run", "--stay", "never", "--", *launcher, *trainer]
        running = host.spawned(command, self._log(number), env | self._settings)
        self._running[number] = host, self._held.enter_context(running)

    def lose(self, number: int) -> None:
        """Lose a host, and start another one in its place."""
        host, process = self._running.pop(number)
        host.take_away()
        process.wait(PATIENCE_SECONDS)
        (self._folder / "strike").unlink(missing_ok=True)
        (self._folder / "struck").unlink(missing_ok=True)
        self.start(number)

    def train_to(self, iteration: int) -> None:
        """Let all ranks train to an iteration, and wait there."""
        written = self._folder / "leash.new"
        written.write_text(str(iteration))
        written.rename(self._folder / "leash")

    def strike(self, rank: int, moment: str, iteration: int = 0) -> None:
        """Have a rank stop at a moment of the first checkpoint from `iteration` on."""
        written = self._folder / "strike.new"
        written.write_text(f"{rank},{moment},{iteration}")
        written.rename(self._folder / "strike")

    def wait_until_struck(self) -> None:
        self._wait((self._folder / "struck").exists, "the moment")

    def wait_for(self, iteration: int, attempt: int) -> None:
        """Wait until every rank has trained so far in this attempt."""
        self._wait(
            lambda: all(
                any(line.iteration >= iteration and line.attempt >= attempt for line in self.ledger(rank))
                for rank in range(RANKS)
            ),
            f"iteration {iteration} of attempt {attempt}",
        )

    def wait(self) -> list[int]:
        """Wait for the end, and return the exit statuses by host."""
        return [self._running[number][1].wait(PATIENCE_SECONDS) for number in sorted(self._running)]

    def ledger(self, rank: int) -> list[TrainingLedgerLine]:
        path = self._folder / f"ledger-{rank}"
        return read(path) if path.exists() else []

    @property
    def attempt(self) -> int:
        """The newest attempt that has trained."""
        return max(line.attempt for line in self.ledger(0))

    def resumed_at(self, attempt: int) -> int:
        """The iteration that all ranks went on from in an attempt."""
        firsts = {
            min(line.iteration for line in self.ledger(rank) if line.attempt == attempt) - 1
            for rank in range(RANKS)
        }
        (first,) = firsts
        return first

    def sent(self) -> int:
        """The newest iteration that every rank has sent to another host; 0 before the first."""
        notes = [self._notes("sent", rank) for rank in range(RANKS)]
        return min(max(each, default=0) for each in notes)

    def store_reads(self) -> int:
        """How often a rank has loaded a checkpoint from the store."""
        return sum(len(self._notes("read", rank)) for rank in range(RANKS))

    def log(self) -> str:
        """The output of the first host, which has rank 0."""
        return self._log(0).read_text()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        def is_fulfilled() -> bool:
            ended = [number for number, (_, process) in self._running.items() if process.poll() is not None]
            assert not ended, f"the supervisors of hosts {ended} ended"
            return condition()

        eventually(is_fulfilled, what, SECONDS)

    def _notes(self, what: str, rank: int) -> list[int]:
        path = self._folder / f"{what}-{rank}"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _log(self, number: int) -> Path:
        return self._folder / f"host-{number}.log"


def host_of(rank: int) -> int:
    return next(number for number in range(len(RANKS_OF_HOSTS)) if rank < sum(RANKS_OF_HOSTS[: number + 1]))
