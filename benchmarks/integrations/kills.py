"""Run a script, kill it at random updates, and compare its log with that of an uninterrupted run."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.system.processes import descendants

POLL_SECONDS = 0.02
UPDATE_SECONDS = 0.05
"""About what an update takes: a kill comes up to that long after one."""
TIMEOUT_SECONDS = 300.0


@dataclass(kw_only=True)
class Comparison:
    """Outcome of a run with kills, compared with an uninterrupted one."""

    updates: int
    kills: list[int]
    """The update after which each kill came."""
    different: list[int] = field(default_factory=list)
    """Updates with another loss or other samples than in the uninterrupted run."""
    missing: list[int] = field(default_factory=list)
    repeated_samples: int = 0
    """Samples that occur twice in an epoch, in the updates that count in the end."""
    resume_seconds: list[float] = field(default_factory=list)
    """From each restart of the process to the end of its first update."""
    repeated_updates: int = 0
    """Updates run again, since they came after the last checkpoint."""

    @property
    def exact(self) -> bool:
        return not (self.different or self.missing or self.repeated_samples)


def run(
    script: str,
    resume_by: str,
    folder: Path,
    *,
    kills: int = 0,
    seed: int = 0,
    epochs: int = 3,
    ranks: int = 1,
    by: signal.Signals = signal.SIGKILL,
    arguments: Sequence[str] = (),
) -> Path:
    """Run `benchmarks.integrations.jobs.<script>` to its end, killed `kills` times in mid-epoch. Return its log.

    With several `ranks`, torchrun starts them, and the log is that of rank 0. `by` is SIGKILL, or SIGTERM by
    which a scheduler announces the end. `arguments` are those of the script.

    Raises RuntimeError with the output of a run that fails.
    """
    folder.mkdir(parents=True)
    log, rng = folder / "log.jsonl", random.Random(seed)
    command = [
        *(sys.executable, "-m"),
        *(("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m") if ranks > 1 else ()),
        *(f"benchmarks.integrations.jobs.{script}", "--resume-by", resume_by),
        *("--store", str(folder / "store"), "--update-log", str(log)),
        *arguments,
    ]
    per_epoch = 12 // ranks
    mid_epoch = [number for number in range(2, per_epoch * epochs) if number % per_epoch]
    targets = sorted(rng.sample(mid_epoch, kills))
    while True:
        _append(log, "started")
        with (folder / "output.txt").open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            if not targets:
                if process.wait(TIMEOUT_SECONDS):
                    raise RuntimeError(f"{script} ended with {process.returncode}:\n{_tail(folder)}")
                return log
            _wait_for_update(log, targets.pop(0), process, folder)
            time.sleep(rng.uniform(0, UPDATE_SECONDS))
            if by == signal.SIGTERM:
                process.terminate()
                process.wait(TIMEOUT_SECONDS)
        finally:
            _kill(process)
        _append(log, "killed")


def _append(log: Path, event: str) -> None:
    with log.open("a") as file:
        file.write(json.dumps({"event": event, "at": time.time()}) + "\n")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a script and its descendants, and wait until they are gone: torchrun starts ranks in other groups."""
    ranks = descendants(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
            select.select([os.pidfd_open(rank)], [], [], TIMEOUT_SECONDS)
    process.wait()


def compare(uninterrupted: Path, killed: Path, *, updates: int = 36, epoch: int = 12) -> Comparison:
    """Compare two logs update by update: every update that ran counts, repeated ones as well."""
    expected = {entry["number"]: entry for entry in entries(uninterrupted) if entry["event"] == "update"}
    result = Comparison(updates=updates, kills=[])
    final: dict[int, list[int]] = {}
    last, started = 0, None
    for entry in entries(killed):
        if entry["event"] == "started":
            started = entry["at"]
        elif entry["event"] == "killed":
            result.kills.append(last)
        elif entry["event"] == "update":
            if started is not None and result.kills:
                result.resume_seconds.append(entry["at"] - started)
            started, last = None, entry["number"]
            result.repeated_updates += last in final
            final[last] = entry["samples"]
            known = expected.get(last, {})
            if any(entry[what] != known.get(what) for what in ("losses", "samples")):
                result.different.append(last)
    result.missing = [number for number in range(1, updates + 1) if number not in final]
    for first in range(1, updates + 1, epoch):
        seen = collections.Counter(each for n in range(first, first + epoch) for each in final.get(n, ()))
        result.repeated_samples += sum(count - 1 for count in seen.values())
    return result


def entries(log: Path) -> Iterator[dict[str, Any]]:
    for line in log.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the line that was being written at a kill
            yield json.loads(line)


def _wait_for_update(log: Path, number: int, process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until this attempt has logged update `number`, or a later one where it resumed after that."""
    already = len(list(entries(log))) if log.exists() else 0
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        ended = process.poll()  # looked at first: the last updates may be logged just before the end
        new = list(entries(log))[already:] if log.exists() else []
        if any(entry.get("number", 0) >= number for entry in new):
            return
        if ended is not None:
            raise RuntimeError(f"ended with {ended} before update {number}:\n{_tail(folder)}")
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"no update {number} in {TIMEOUT_SECONDS:.0f} s:\n{_tail(folder)}")


def _tail(folder: Path) -> str:
    return "\n".join((folder / "output.txt").read_text(errors="replace").splitlines()[-40:])
