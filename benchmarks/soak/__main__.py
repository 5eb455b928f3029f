"""`make soak`: jobs under random faults and operators' orders; ends with 1 if something is wrong.

All is in one new folder, which is removed if nothing is wrong. Ctrl-C ends the run early, with its table.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness import Table, aligned, run
from benchmarks.soak import judging
from benchmarks.soak.disturbances import Agenda, Faults, Orders
from benchmarks.soak.processes import END_SECONDS, KINDS, Servers, Supervised, environment_of
from benchmarks.soak.usage import Usage
from holdfast.client import Client
from tests.support.eventually import eventually

POLL_SECONDS, SAMPLE_SECONDS, PROGRESS_SECONDS = 0.2, 5.0, 30.0
COUNTS = ("iterations", "attempts", "lineages", "durable")
PATIENCE_SECONDS = 300.0
"""How long the jobs may take to start, and to go on after the last fault."""


class Soak:
    pauses: dict[str, float]
    """Mean seconds between two faults, and between two orders."""

    def __init__(
        self, folder: Path, kinds: list[str], pythons: dict[str, str], minutes: float, seed: int, stall: float
    ) -> None:
        self._folder, self._minutes, self._stall_seconds, self._began = folder, minutes, stall, time.monotonic()
        bootstrap = environment_of(folder, "", "")
        self.servers = Servers(folder, bootstrap)
        self.servers.bucket.start()
        env = environment_of(folder, self.servers.bucket.address, self.servers.url)
        self._client = Client(self.servers.url, timeout_seconds=5, retries=0)
        self.jobs = [Supervised(kind, folder / kind, env, pythons.get(kind, sys.executable)) for kind in kinds]
        self._agenda, rng = Agenda(), random.Random(seed)
        self.faults = Faults(self.jobs, self.servers, self._agenda, random.Random(rng.random()))
        self.orders = Orders(self.jobs, self._client, self._agenda, random.Random(rng.random()))
        self._times = random.Random(rng.random())
        self.usage = Usage()
        self._next_sample = self._next_progress = 0.0
        self.wrong: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def run(self) -> None:
        self.servers.start()
        for job in self.jobs:
            job.start()
        try:
            self._wait("all jobs to train", lambda: all(len(job.ledgers[-1].steps) >= 10 for job in self.jobs))
            self._disturb(time.monotonic() + self._minutes * 60)
            self._say("the faults are over")
        except KeyboardInterrupt:
            self._say("interrupted: ending")

    def _disturb(self, end: float) -> None:
        now = time.monotonic()
        self.faults.plan(now, end - now)
        next_fault, next_order = now + self._pause("fault"), now + self._pause("order")
        while now < end:
            if now >= next_fault:
                self._say(self.faults.strike(now))
                next_fault = now + self._pause("fault")
            if now >= next_order:
                self._say(self.orders.give(now))
                next_order = now + self._pause("order")
            now = self._tick()

    def _pause(self, name: str) -> float:
        return self._times.expovariate(1 / self.pauses[name])

    def _tick(self) -> float:
        """Let a moment pass: do what is due, sample, start what has ended."""
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        self._agenda.run(now)
        for job in self.jobs:
            job.tend(now)
        if now >= self._next_sample:
            self._next_sample = now + SAMPLE_SECONDS
            roles = {"server": [] if self.servers.pid is None else [self.servers.pid]}
            for job in self.jobs:
                roles |= {f"trainer of {job.kind}": job.trainers(), f"supervisor of {job.kind}": job.supervisors()}
            for role, pids in roles.items():
                for pid in pids[:1]:
                    self.usage.sample(role, pid)
        if now >= self._next_progress:
            self._next_progress = now + PROGRESS_SECONDS
            self._say_progress()
        return now

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if self._tick() > deadline:
                waiting = ", ".join(f"{job.kind} at {len(job.ledgers[-1].steps)}" for job in self.jobs)
                self.wrong.append(f"waited {PATIENCE_SECONDS:.0f} s for {what}: {waiting}")
                return

    def close(self) -> None:
        """End all faults, let the jobs go on and end, and judge."""
        self._wait("the end of all faults", self._agenda.settle)
        self.servers.bucket.kill()  # Ctrl-C has ended it, too
        self.servers.bucket.start()
        self.servers.start()
        goals = [len(job.ledgers[-1].steps) + 10 for job in self.jobs]
        pairs = list(zip(self.jobs, goals, strict=True))
        self._wait("all jobs to go on", lambda: all(len(job.ledgers[-1].steps) >= goal for job, goal in pairs))
        for job in self.jobs:
            job.end()
        for job in self.jobs:
            self.wrong += [f"{job.kind}: {text}" for text in job.wait(END_SECONDS)]
            job.tend(time.monotonic())
        self._say("all jobs have ended; comparing with undisturbed runs")
        states, wrong = self._judged_restores()
        memory, grown = self.usage.judged()
        self.wrong += wrong + grown
        for job in self.jobs:
            row, wrong = judging.job_row(job, self._client, self._stall_seconds)
            self.rows.append(row)
            self.wrong += wrong
        self.servers.stop(signal.SIGTERM)
        self.servers.bucket.kill()
        self.wrong += [*self.servers.wrong, *judging.left_over(self._folder)]
        self.rows += memory
        counts = {"faults": self.faults.done, "orders": self.orders.done, "restores": states}
        self.rows += [{"what": what, **each} for what, each in counts.items()]

    def _judged_restores(self) -> tuple[dict[str, int], list[str]]:
        with contextlib.suppress(AssertionError):  # the server receives what was not reported yet
            eventually(lambda: not judging.ends_of_restores(self._client, self.orders.restores)[1], seconds=20)
        return judging.ends_of_restores(self._client, self.orders.restores)

    def end_all(self) -> None:
        """Kill what is left, after an error or a second Ctrl-C."""
        self.servers.bucket.kill()
        judging.left_over(self._folder)

    def _say(self, text: str | None) -> None:
        if text is not None:
            print(f"{time.monotonic() - self._began:7.0f} s  {text}", flush=True)

    def _say_progress(self) -> None:
        counts = " ".join(f"{job.kind} {len(job.ledgers[0].steps)}" for job in self.jobs)
        server = self.usage.newest("server")
        size = f"server {server.megabytes:.0f} MB" if server else "no server"
        done = f"{self.faults.done.total()} faults, {self.orders.done.total()} orders"
        self._say(f"iterations: {counts}; {size}; {done}")


def print_table(rows: list[dict[str, Any]]) -> None:
    print()
    table = Table({f"{'job':<12}": ""} | dict.fromkeys(COUNTS, "d") | {"longest stall": ".1f"})
    for row in (each for each in rows if each["what"] == "job"):
        table.row(row["job"], *(row[name] for name in COUNTS), row["stall_seconds"])
    print()
    memory = [each for each in rows if each["what"] == "memory"]
    slopes = [
        f"{row['mb_per_hour']:+.1f} ± {row['error']:.1f}" if "error" in row else "too short" for row in memory
    ]
    names = ("role", "minutes", "first_mb", "last_mb", "descriptors", "threads")
    cells = [[*(str(row[name]) for name in names), slope] for row, slope in zip(memory, slopes, strict=True)]
    print("\n".join(aligned([[*(name.replace("_", " ") for name in names), "MB an hour"], *cells])), "\n")
    for row in (each for each in rows if each["what"] in ("faults", "orders", "restores")):
        print(f"{row['what']}: " + ", ".join(f"{n} {name}" for name, n in sorted(row.items()) if name != "what"))


def main(
    minutes: float = 90,
    seed: int = 1,
    jobs: list[Literal[*KINDS]] = KINDS,
    fault_seconds: float = 20,
    order_seconds: float = 10,
    framework_python: str = sys.executable,
    stall_seconds: float = 120,
    results: Path | None = None,
) -> None:
    """Run a soak.

    Args:
        minutes: time with faults
        fault_seconds: mean time between two faults
        order_seconds: mean time between two orders
        framework_python: one that has Accelerate
        stall_seconds: longest time without an iteration
        results: append one JSON line for each row
    """
    folder = Path(tempfile.mkdtemp(prefix="holdfast-soak-"))
    pythons = {"framework": os.path.abspath(framework_python)}
    soak = Soak(folder, list(jobs), pythons, minutes, seed, stall_seconds)
    soak.pauses = {"fault": fault_seconds, "order": order_seconds}
    try:
        soak.run()
        soak.close()
    except BaseException:  # also on Ctrl-C: no process may be left
        soak.end_all()
        raise
    print_table(soak.rows)
    if results is not None:
        with results.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in (*soak.rows, {"what": "wrong", "found": soak.wrong}))
    for text in soak.wrong:
        print(f"WRONG: {text}")
    if soak.wrong:
        sys.exit(f"logs, ledgers and stores are in {folder}")
    shutil.rmtree(folder)
    print("nothing is wrong")


if __name__ == "__main__":
    run(main)
