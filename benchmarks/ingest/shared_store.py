"""`make bench-capacity ARGS='--shared-store'`: jobs that write to one slow store, with and without a limit.

Real agents train a light model and write real checkpoints. The store is slow by a seam of this benchmark: all
writes of all processes pass in turn through one rate. Without a limit all jobs write all the time, each slowly.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Table, end_group, scratch
from holdfast.client import Client
from holdfast.protocol.jobs import CheckpointInfo
from holdfast.protocol.stores import NewStoreLimit

from .peers import HoldfastPeer, started

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


def compared(seconds: float, folder: Path, jobs: int, writers: int) -> dict[str, Any]:
    """Print a row for a phase without and with a limit; return the figures.

    Rates are those of the whole window. `least_share` is what the job that got least made durable, over an equal
    part of the rate.
    """
    figures = {}
    table = Table({"        ": "", "  MB/s": ".2f", "persist s": ".2f", "longest": ".2f", "unsaved s": ".1f",
                   "longest ": ".1f", "stalls": ".2%", "least share": ".2f"})  # fmt: skip
    for name, limit in ("no limit", None), ("limit", LIMIT_BYTES_PER_SECOND):
        with scratch(folder) as made:
            found = figures[name.replace(" ", "_")] = _phase(made, limit, seconds, job_names(jobs), writers)
        table.row(name, found["bytes_per_second"] / 1e6, *list(found.values())[1:])
    rates = f"limit {LIMIT_BYTES_PER_SECOND / 1e6:g} MB/s, store {STORE_BYTES_PER_SECOND / 1e6:g} MB/s"
    print(f"{rates}, {jobs} jobs, {writers} at a time")
    return figures


def _phase(folder: Path, limit: float | None, seconds: float, names: list[str], writers: int) -> dict[str, float]:
    ours, slow = HoldfastPeer(), SlowStore(folder / "rate")
    with (
        started(ours, folder) as server,
        Client(server.url, ours.token, timeout_seconds=30) as client,
        contextlib.ExitStack() as jobs,
    ):
        if limit is not None:
            store = NewStoreLimit(target=str(folder / "store"), limit=limit, writers=writers)
            client.stores.set_limit(store)
        # children of one process that has imported torch
        with (folder / "jobs.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.ingest.shared_store_job", folder, str(len(names))], stdout=log,
                stderr=log, start_new_session=True, cwd=ROOT, env=os.environ | {
                    "HOLDFAST_SERVER": server.url, "HOLDFAST_TOKEN": ours.token, "OMP_NUM_THREADS": "1",
                },
            )  # fmt: skip
        jobs.callback(end_group, process, at_once=True)
        _await_checkpoints(client, names)
        time.sleep(WARM_UP_SECONDS)
        begins, taken = time.time(), slow.taken_bytes
        time.sleep(seconds)
        rate, ends = (slow.taken_bytes - taken) / seconds, time.time()
        found = {name: client.checkpoints(name, limit=200) for name in names}
    return _measured(found, begins, ends, rate)


def _measured(found: dict[str, list[CheckpointInfo]], begins: float, ends: float, rate: float) -> dict[str, float]:
    persists, unsaved, stalls, sizes = list[float](), list[float](), 0.0, list[int]()
    for rows in found.values():
        durable = sorted(
            (row.persist_started_at + row.persist_seconds, row.snapshot_started_at, row.stall_seconds or 0.0)
            for row in rows
            if row.persist_seconds and row.persist_started_at and row.snapshot_started_at
        )
        inside = [each for each in durable if begins <= each[0] <= ends]
        persists += [at - began for at, began, _ in inside]
        stalls += sum(stall for _, _, stall in inside)
        sizes.append(len(inside) * STATE_BYTES)
        unsaved += _unsaved([(at, began) for at, began, _ in durable], begins, ends)
    return {
        "bytes_per_second": rate,
        "persist_median": statistics.median(persists),
        "persist_longest": max(persists),
        "unsaved_mean": statistics.fmean(unsaved),
        "unsaved_longest": max(unsaved),
        "stall_share": stalls / ((ends - begins) * len(found)),
        "least_share": min(sizes) / (ends - begins) / (rate / len(found)),
    }


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
