"""`python -m benchmarks.dashboard.load_mix`: how long orders and pages take on a busy server.

Pages are open, agents wait in long polls, and exports run, while orders are placed and a page is fetched. With
`--other`, a checkout of another version is measured in turns with this one.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.ingest.peers import HoldfastPeer, timed
from benchmarks.ingest.reading import many_jobs
from benchmarks.ingest.running import free_port, running, settle
from benchmarks.ingest.waiting import job_name, order_latencies_seconds

from .filling import JOB, fill
from .watching import JOBS as WATCHED_JOBS
from .watching import WARM_SECONDS, open_pages

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("agent", "series", "server", "web", "migrations")
TOKEN = "not-needed-without-accounts"
KINDS = ("order", "page", "refused")


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    print(f"machine   {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}", flush=True)
    versions = {"this": ROOT} | ({"other": options.other.resolve()} if options.other else {})
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(options.rounds):
        for name in sorted(versions, reverse=number % 2 == 0):
            for kind, latencies in zip(KINDS, _measure(versions[name], options), strict=True):
                found[name, kind] += latencies
        print(f"  round {number + 1} of {options.rounds} done", flush=True)
    print(
        f"{options.pages} open pages, {options.agents:,} long polls, {options.exports} exports:\n"
        "  version  what     number    p50 ms    p99 ms"
    )
    figures: dict[str, float] = {}
    for (name, kind), latencies in sorted(found.items()):
        if len(latencies) < 2:
            continue
        cuts = [1000 * cut for cut in statistics.quantiles(latencies, n=100)]
        print(f"  {name:<8} {kind:<8} {len(latencies):>6}   {cuts[49]:>7.1f}   {cuts[98]:>7.1f}")
        figures[f"mix_{kind}_p99_ms_{name}"] = round(cuts[98], 1)
    print(f"figures: {json.dumps(figures)}")


def _measure(root: Path, options: argparse.Namespace) -> tuple[list[float], list[float], list[float]]:
    """Return the latencies of one version: of orders, of pages, and of refusals in place of pages."""
    port, pages, refused = free_port(), list[float](), list[float]()
    with contextlib.ExitStack() as load:
        folder = Path(load.enter_context(tempfile.TemporaryDirectory(prefix=".bench-mix-", dir=options.folder)))
        command = [sys.executable, "-m", "holdfast_server", "--port", str(port), "--db", str(folder / "bench.db")]
        command += ["--max-jobs", str(options.agents + WATCHED_JOBS + 1)]
        environment = {"PYTHONPATH": ":".join(str(root / package) for package in PACKAGES)}
        server = load.enter_context(
            running(command, port=port, ready="/readyz", log=folder / "log", environment=environment)
        )
        fill(port, iterations=options.iterations, checkpoints=options.iterations // 100, ends_at=time.time())
        many_jobs(HoldfastPeer(), port, [job_name(number) for number in range(options.agents)])

        def until_busy() -> None:
            settle([server])  # all agents wait
            load.enter_context(open_pages(port, options.pages))
            load.enter_context(_exporting(port, options.exports))
            time.sleep(WARM_SECONDS)
            load.enter_context(_fetching(port, f"/jobs/{JOB}", pages, refused))

        orders = order_latencies_seconds(port, TOKEN, options.agents, options.orders, until_busy)
    return orders, pages, refused


@contextlib.contextmanager
def _fetching(port: int, path: str, latencies: list[float], refused: list[float]) -> Iterator[None]:
    """Fetch a page again and again, and add how long each answer and each refusal took."""
    ended = threading.Event()

    def fetch() -> None:
        while not ended.is_set():
            began = time.perf_counter()
            try:
                latencies.append(timed(port, path))
            except RuntimeError:  # refused by a server that is too busy
                refused.append(time.perf_counter() - began)

    thread = threading.Thread(target=fetch, name="page")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def _exporting(port: int, count: int) -> Iterator[None]:
    """Read so many exports at a time, again and again."""
    context = multiprocessing.get_context("spawn")
    readers = [context.Process(target=_export, args=(port,), daemon=True) for _ in range(count)]
    for reader in readers:
        reader.start()
    try:
        yield
    finally:
        for reader in readers:
            reader.kill()
            reader.join()


def _export(port: int) -> None:
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        connection.request("GET", f"/api/v1/jobs/{JOB}/samples.csv")
        answer = connection.getresponse()
        while answer.read(2**16):
            pass
        connection.close()
        if answer.status >= 500:  # too many at a time
            time.sleep(1.0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-mix", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--other", type=Path, help="a checkout of another version, which has the same dependencies")
    add("--folder", type=Path, default=ROOT, help="directory of the databases, on the disk to measure")
    add("--rounds", type=int, default=2)
    add("--iterations", type=int, default=200_000, help="of the job that is exported and shown")
    add("--pages", type=int, default=200, help="open at once")
    add("--agents", type=int, default=1000, help="that hold long polls")
    add("--exports", type=int, default=4, help="at a time")
    add("--orders", type=int, default=150, help="per round")
    return parser.parse_args()


if __name__ == "__main__":
    main()
