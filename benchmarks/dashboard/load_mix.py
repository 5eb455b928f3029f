"""`make bench-mix`: how long orders and pages take on a busy server.

Pages are open, agents wait in long polls, and exports run, while orders are placed and a page is fetched. With
`--other`, a checkout of another version is measured in turns with this one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.harness import (
    ROOT,
    BenchmarkServer,
    Table,
    connected,
    holdfast_server,
    percentiles_ms,
    run,
    running,
    scratch,
    seconds_of,
    settle,
    talking,
)
from benchmarks.ingest.peers import HoldfastPeer
from benchmarks.ingest.reading import many_jobs
from benchmarks.ingest.waiting import job_name, order_latencies_seconds

from .filling import JOB, fill
from .watching import JOBS as WATCHED_JOBS
from .watching import WARM_SECONDS, open_pages

PACKAGES = ("agent", "series", "server", "web", "migrations")
TOKEN = "not-needed-without-accounts"
KINDS = ("order", "page", "refused")


def main(
    other: Path | None = None,
    folder: Path = ROOT,
    rounds: int = 2,
    iterations: int = 200_000,
    pages: int = 200,
    agents: int = 1000,
    exports: int = 4,
    orders: int = 150,
) -> dict[str, float]:
    """Measure each version in turns.

    Args:
        other: a checkout of another version, which has the same dependencies
        folder: directory of the databases, on the disk to measure
        iterations: of the job that is exported and shown
        pages: open at once
        agents: that hold long polls
        exports: at a time
        orders: per round
    """
    versions = {"this": ROOT} | ({"other": other.resolve()} if other else {})
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(rounds):
        for name in sorted(versions, reverse=number % 2 == 0):
            with scratch(folder) as made, contextlib.ExitStack() as load:
                environment = {"PYTHONPATH": ":".join(str(versions[name] / package) for package in PACKAGES)}
                jobs = agents + WATCHED_JOBS + 1
                server = load.enter_context(holdfast_server(made, "--max-jobs", jobs, **environment))
                measured = _measure(server, load, iterations, pages, agents, exports, orders)
            for kind, latencies in zip(KINDS, measured, strict=True):
                found[name, kind] += latencies
        print(f"  round {number + 1} of {rounds} done", flush=True)
    print(f"{pages} open pages, {agents:,} long polls, {exports} exports:")
    table = Table({"version ": "", "what    ": "", "number": "d", " p50 ms": ".1f", " p99 ms": ".1f"})
    figures: dict[str, float] = {}
    for (name, kind), latencies in sorted(found.items()):
        if len(latencies) > 1:
            p50, p99 = percentiles_ms(latencies)
            table.row(name, kind, len(latencies), p50, p99)
            figures[f"mix_{kind}_p99_ms_{name}"] = round(p99, 1)
    return figures


def _measure(
    server: BenchmarkServer, load: contextlib.ExitStack, iterations: int, pages: int, agents: int, exports: int,
    orders: int,
) -> tuple[list[float], list[float], list[float]]:  # fmt: skip
    """Return the latencies of one version: of orders, of pages, and of refusals in place of pages."""
    taken, refused = list[float](), list[float]()
    fill(server.port, iterations=iterations, checkpoints=iterations // 100, ends_at=time.time())
    many_jobs(HoldfastPeer(), server.port, [job_name(number) for number in range(agents)])

    def until_busy() -> None:
        settle([server])  # all agents wait
        load.enter_context(open_pages(server.port, pages))
        for _ in range(exports):
            load.enter_context(talking(_export, server.port, patience=0))
        time.sleep(WARM_SECONDS)
        load.enter_context(running(_fetch, server.port, taken, refused))

    return order_latencies_seconds(server.port, TOKEN, agents, orders, until_busy), taken, refused


def _fetch(port: int, taken: list[float], refused: list[float], ended: threading.Event) -> None:
    """Fetch a page again and again, and add how long each answer and each refusal took."""
    server = connected(port)
    while not ended.is_set():
        status = 0

        def fetch() -> None:
            nonlocal status
            status = server.http.request("GET", f"/jobs/{JOB}").status  # refused if the server is too busy

        seconds = seconds_of(fetch)
        (taken if status == 200 else refused).append(seconds)


def _export(pipe: Connection, port: int) -> None:
    """Read exports, again and again."""
    while True:
        answer = connected(port).http.request("GET", f"/api/v1/jobs/{JOB}/samples.csv", preload_content=False)
        for _ in answer.stream(2**16):
            pass
        if answer.status >= 500:  # too many at a time
            time.sleep(1.0)


if __name__ == "__main__":
    run(main)
