"""`python -m benchmarks.dashboard`: the cost of the pages for their readers and the server, in Chromium."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.ingest.running import free_port, running

from . import job_page, pages
from .filling import JOB, fill, fill_fleet
from .watching import JOBS as WATCHED_JOBS
from .watching import cores

ROOT = Path(__file__).resolve().parents[2]
KB = 1000


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    print(f"machine   {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}", flush=True)
    with tempfile.TemporaryDirectory(prefix=".bench-dashboard-", dir=options.folder) as made:
        folder, port = Path(made), free_port()
        command = [sys.executable, "-m", "holdfast_server", "--port", str(port), "--db", str(folder / "bench.db")]
        command += ["--max-jobs", str(options.jobs + 1 + WATCHED_JOBS)]
        with running(command, port=port, ready="/readyz", log=folder / "log", environment={}) as server:
            began = time.perf_counter()
            run = fill(port, iterations=options.iterations, checkpoints=options.checkpoints, ends_at=time.time())
            took = time.perf_counter() - began
            print(
                f"filled    {options.iterations:,} iterations, {options.checkpoints:,} checkpoints in {took:.0f} s"
            )
            url = f"http://127.0.0.1:{port}/jobs/{JOB}"
            with pages.chromium() as browser:
                print(f"browser   Chromium {browser.version}, headless", flush=True)
                figures = _weights(browser, url) | _times(browser, url)
                if options.hour:
                    growth, answers = pages.heap_growth_mb(browser, url, port, run)
                    figures["heap_growth_mb"] = round(growth, 2)
                    print(
                        f"an hour at {pages.FASTER} times the pace, following live: {answers:,} answers drawn, "
                        f"heap {growth:+.2f} MB",
                        flush=True,
                    )
            figures["job_page_cpu_ms"] = round(job_page.cpu_ms(server, f"/jobs/{JOB}"), 2)
            if options.jobs:
                began = time.perf_counter()
                fill_fleet(port, jobs=options.jobs, ends_at=time.time())
                print(f"filled    {options.jobs:,} jobs in {time.perf_counter() - began:.0f} s", flush=True)
                with pages.chromium() as browser:
                    figures |= _fleet(browser, f"http://127.0.0.1:{port}/")
            used, rate = cores(port, server.process.pid, pages=options.pages, seconds=options.seconds)
            figures[f"cores_for_{options.pages}_pages"] = round(used, 2)
            print(f"{options.pages} open pages, all live: {used:.2f} cores of the server, {rate:.0f} refreshes/s")
        figures["job_page_statements"] = job_page.statements(folder / "bench.db", f"/jobs/{JOB}")
        cost = f"{figures['job_page_statements']} statements, {figures['job_page_cpu_ms']} ms of CPU time"
        print(f"one job page: {cost}")
    print(f"figures: {json.dumps(figures)}")


def _weights(browser: pages.Browser, url: str) -> dict[str, float]:
    first = pages.bytes_of_first_load(browser, url)
    print(f"first load: {first.all / KB:.1f} kB in {first.requests} answers, scripts {first.scripts / KB:.1f} kB")
    answers = pages.timeline_bytes(browser, url)
    for window, (wire, plain, seconds) in answers.items():
        sizes = f"{wire / KB:6.1f} kB, unpacked {plain / KB:5.0f}"
        print(f"  timeline {window or 'whole run':<28} {sizes} {1000 * seconds:6.0f} ms")
    return {
        "js_gzip_kb": round(first.scripts / KB, 1),
        "first_load_kb": round(first.all / KB, 1),
        "timeline_answer_kb": round(max(wire for wire, _, _ in answers.values()) / KB, 1),
    }


def _times(browser: pages.Browser, url: str) -> dict[str, float]:
    paints = pages.first_paint_ms(browser, url)
    hands = pages.interactions_ms(browser, url)
    moving = pages.frames(browser, url)
    print(f"first contentful paint, cold: median {pages.median(paints):.0f} ms, longest {max(paints):.0f} ms")
    longest, inp = max(hands, default=0.0), pages.next_paint_ms(hands)
    print(f"{len(hands)} interactions of 16 ms and more: INP {inp:.0f} ms, longest {longest:.0f} ms")
    slow = f"p95 {moving['p95']:.1f} ms, longest {moving['longest']:.0f} ms"
    print(f"zooming: {moving['perSecond']:.1f} frames/s, {slow}")
    return {
        "first_paint_ms": round(pages.median(paints), 1),
        "interaction_ms": round(inp, 1),
        "frames_per_second": round(moving["perSecond"], 1),
    }


def _fleet(browser: pages.Browser, url: str) -> dict[str, float]:
    paints = pages.first_paint_ms(browser, url, drawn=".jobs")
    first = pages.bytes_of_first_load(browser, url, drawn=".jobs")
    print(
        f"fleet, first contentful paint, cold: median {pages.median(paints):.0f} ms, longest {max(paints):.0f} ms"
    )
    print(f"fleet, first load: {first.all / KB:.1f} kB in {first.requests} answers")
    return {
        "fleet_first_paint_ms": round(pages.median(paints), 1),
        "fleet_first_load_kb": round(first.all / KB, 1),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-dashboard", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--folder", type=Path, default=ROOT, help="where the database is")
    add("--iterations", type=int, default=1_000_000)
    add("--checkpoints", type=int, default=10_000)
    add("--jobs", type=int, default=10_000, help="of the fleet page; 0 leaves it out")
    add("--pages", type=int, default=200, help="open at once")
    add("--seconds", type=float, default=20.0, help="for which they are watched")
    add(
        "--no-hour", dest="hour", action="store_false", help="leave out the hour of a live page, which takes 3 min"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
