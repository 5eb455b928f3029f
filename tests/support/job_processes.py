"""Real servers, supervisors and trainers as processes, and the ledgers that trainers write."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.client import Client, JobSummary, ServerError
from tests.support.eventually import PATIENCE_SECONDS, eventually

TRAINER = Path(__file__).with_name("ledger_trainer.py")
SAMPLES = 211
HOLDFAST = [sys.executable, "-m", "holdfast.cli"]


@dataclass(frozen=True)
class LedgerStep:
    """One line of a ledger."""

    pid: int
    lineage: int
    iteration: int
    loss: str
    samples: tuple[int, ...]

    @property
    def outcome(self) -> tuple[str, tuple[int, ...]]:
        return self.loss, self.samples


def read_ledger(path: Path) -> list[LedgerStep]:
    """The whole lines of a ledger; a kill may have cut the last one of an attempt short."""
    if not path.exists():
        return []
    steps = []
    for line in path.read_text().splitlines(keepends=True):
        words = line.split()
        if line.endswith("\n") and len(words) == 5:
            samples = tuple(map(int, words[4].split(",")))
            steps.append(LedgerStep(int(words[0]), int(words[1]), int(words[2]), words[3], samples))
    return steps


def environment(store: Path, server: str = "") -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return kept | {"HOLDFAST_STORE": str(store), "HOLDFAST_SERVER": server, "PYTHONFAULTHANDLER": "1"}


@contextmanager
def spawned(
    command: Sequence[str], log: Path, env: dict[str, str], *, group: int | None = None, cwd: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes to `log`; terminated, and its log shown on failure, at the end.

    `group`: its process group, 0 for one of its own. Where a test fails while it still runs, its log ends with the
    stacks of all threads of the group.
    """
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=env, process_group=group, cwd=cwd
        )
    try:
        yield process
    except BaseException:  # whatever went wrong, what the process said explains it
        if process.poll() is None and group == 0:
            os.killpg(process.pid, signal.SIGABRT)  # PYTHONFAULTHANDLER
            process.wait(PATIENCE_SECONDS)
        print(f"--- {log.name}\n{log.read_text()[-12000:]}")
        raise
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def served(folder: Path) -> Iterator[Client]:
    """A client of a server that is up."""
    command, log = [*HOLDFAST, "serve", "--port", "0", "--db", str(folder / "holdfast.db")], folder / "server.log"
    with spawned(command, log, environment(folder)) as process:

        def is_up() -> bool:
            assert process.poll() is None, "the server ended"
            return address_of(log) is not None

        eventually(is_up, "the server to say where it is")
        address = address_of(log)
        assert address is not None
        yield Client(address)


def address_of(log: Path) -> str | None:
    found = re.search(r"Holdfast is at (http://\S+:\d+) ", log.read_text())
    return found[1] if found else None


def known(client: Client, job: str) -> JobSummary | None:
    try:
        return client.job(job)
    except ServerError:
        return None
