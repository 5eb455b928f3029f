"""`make bench-capacity ARGS='--shared-store'`: jobs that write to one slow store, with and without a limit.

Real agents train a light model and write real checkpoints. The store is slow by a seam of this benchmark: all
writes of all processes pass in turn through one rate. Without a limit all jobs write all the time, each slowly.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.client import Client
from holdfast.protocol.jobs import CheckpointInfo
from holdfast.protocol.stores import NewStoreLimit

from .peers import HoldfastPeer
from .running import free_port, running

STORE_BYTES_PER_SECOND, LIMIT_BYTES_PER_SECOND = 22e6, 20e6
STATE_BYTES = 16_000_000
INTERVAL = "1s"
"""Interval that every job wants: together several times what the store takes."""
ITERATION_SECONDS = 0.4
PIECE_BYTES = 128 * 1024
START_SECONDS = 240.0
WARM_UP_SECONDS = 25.0
STATE = struct.Struct("dd")
"""When the store is free again, on the monotonic clock, and how many bytes it has taken."""


class SlowStore:
    """A store that takes bytes at one rate, shared by processes through a file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(self._fd, mmap.PAGESIZE)
        self._memory = mmap.mmap(self._fd, mmap.PAGESIZE)

    @property
    def taken_bytes(self) -> float:
        return float(STATE.unpack_from(self._memory)[1])

    def take(self, size_bytes: int) -> None:
        """Wait for the turn of these bytes, behind those of all processes."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        free_at, taken = STATE.unpack_from(self._memory)
        free_at = max(time.monotonic(), free_at) + size_bytes / STORE_BYTES_PER_SECOND
        STATE.pack_into(self._memory, 0, free_at, taken + size_bytes)
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
        time.sleep(max(0.0, free_at - time.monotonic()))


@dataclass(frozen=True, slots=True)
class Measured:
    """What one phase showed, in seconds, and in bytes per second of the whole window."""

    bytes_per_second: float
    persist_longest: float
    persist_median: float
    unsaved_mean: float
    unsaved_longest: float
    stall_share: float
    least_share: float
    """Durable bytes of the job that got least, over an equal part of the rate."""


def main(seconds: float, folder: Path, jobs: int, writers: int) -> None:
    figures = {}
    print("               MB/s  persist s (median, longest)  unsaved s (mean, longest)  stalls  least share")
    for name, limit in ("no limit", None), ("limit", LIMIT_BYTES_PER_SECOND):
        with tempfile.TemporaryDirectory(prefix=".bench-shared-store-", dir=folder) as made:
            found = _phase(Path(made), limit, seconds, job_names(jobs), writers)
        print(
            f"{name:12} {found.bytes_per_second / 1e6:7.2f}  {found.persist_median:10.2f}  "
            f"{found.persist_longest:14.2f}  {found.unsaved_mean:12.1f}  {found.unsaved_longest:11.1f}  "
            f"{found.stall_share:6.2%}  {found.least_share:10.2f}",
            flush=True,
        )
        figures[name.replace(" ", "_")] = {
            field: round(getattr(found, field), 4) for field in Measured.__dataclass_fields__
        }
    rates = f"limit {LIMIT_BYTES_PER_SECOND / 1e6:g} MB/s, store {STORE_BYTES_PER_SECOND / 1e6:g} MB/s"
    print(f"{rates}, {jobs} jobs, {writers} at a time")
    print(f"figures: {json.dumps(figures)}")


def _phase(folder: Path, limit: float | None, seconds: float, names: list[str], writers: int) -> Measured:
    ours, port = HoldfastPeer(), free_port()
    slow = SlowStore(folder / "rate")
    environment = ours.environment(folder, port)
    with (
        running(
            ours.command(folder, port), port=port, ready=ours.ready, log=folder / "log", environment=environment
        ),
        Client(f"http://127.0.0.1:{port}", ours.token, timeout_seconds=30) as client,
    ):
        if limit is not None:
            store = NewStoreLimit(target=str(folder / "store"), limit=limit, writers=writers)
            client.stores.set_limit(store)
        with _jobs(folder, f"http://127.0.0.1:{port}", ours.token, len(names)):
            _await_checkpoints(client, names)
            time.sleep(WARM_UP_SECONDS)
            begins, taken = time.time(), slow.taken_bytes
            time.sleep(seconds)
            rate, ends = (slow.taken_bytes - taken) / seconds, time.time()
            found = {name: client.checkpoints(name, limit=200) for name in names}
    return _measured(found, begins, ends, rate)


def _measured(found: dict[str, list[CheckpointInfo]], begins: float, ends: float, rate: float) -> Measured:
    persists, unsaved, stalls, sizes = [], [], 0.0, []
    for rows in found.values():
        durable = sorted(
            (row.persist_started_at + row.persist_seconds, row.snapshot_started_at, row)
            for row in rows
            if row.persist_seconds and row.persist_started_at and row.snapshot_started_at
        )
        inside = [each for each in durable if begins <= each[0] <= ends]
        persists += [at - began for at, began, _ in inside]
        stalls += sum(row.stall_seconds or 0.0 for _, _, row in inside)
        sizes.append(len(inside) * STATE_BYTES)
        unsaved.append(list(_unsaved([(at, began) for at, began, _ in durable], begins, ends)))
    every = [seconds for one in unsaved for seconds in one]
    return Measured(
        bytes_per_second=rate,
        persist_longest=max(persists),
        persist_median=statistics.median(persists),
        unsaved_mean=statistics.fmean(every),
        unsaved_longest=max(every),
        stall_share=stalls / ((ends - begins) * len(found)),
        least_share=min(sizes) / (ends - begins) / (rate / len(found)),
    )


def _unsaved(durable: Sequence[tuple[float, float]], begins: float, ends: float) -> Iterator[float]:
    """Yield the age of the newest durable state, ten times a second."""
    at, newest, left = begins, None, list(durable)
    while at < ends:
        while left and left[0][0] <= at:
            newest = max(newest or 0.0, left.pop(0)[1])
        if newest is not None:
            yield at - newest
        at += 0.1


def job_names(jobs: int) -> list[str]:
    return [f"shared-{number:02}" for number in range(jobs)]


def _await_checkpoints(client: Client, names: list[str]) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(Exception):
            if all(any(row.state == "durable" for row in client.checkpoints(name)) for name in names):
                return
        time.sleep(1)
    raise RuntimeError(f"not every job has a durable checkpoint after {START_SECONDS:g} s")


@contextlib.contextmanager
def _jobs(folder: Path, server: str, token: str, count: int) -> Iterator[None]:
    """Train all jobs, as children of one process that has imported torch."""
    if not (parent := os.fork()):
        status = 1
        try:
            os.setsid()
            with (folder / "jobs.log").open("wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            environment = os.environ | {
                "HOLDFAST_SERVER": server, "HOLDFAST_TOKEN": token, "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            command = [sys.executable, "-m", "benchmarks.ingest.shared_store_job", str(folder), str(count)]
            os.execve(sys.executable, command, environment)
        finally:
            os._exit(status)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent, 9)
        os.waitpid(parent, 0)
