"""`make bench-dashboard`: the cost of the pages for their readers and the server, in Chromium."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from benchmarks.harness import ROOT, holdfast_server, run, scratch, seconds_of

from . import job_page, pages
from .filling import JOB, fill, fill_fleet
from .watching import JOBS as WATCHED_JOBS
from .watching import cores

KB = 1000


def main(
    folder: Path = ROOT,
    iterations: int = 1_000_000,
    checkpoints: int = 10_000,
    jobs: int = 10_000,
    pages: int = 200,
    seconds: float = 20.0,
    hour: bool = True,
) -> dict[str, float]:
    """Measure the page of a long job, and that of a fleet.

    Args:
        folder: where the database is
        jobs: of the fleet page; 0 leaves it out
        pages: open at once
        seconds: for which they are watched
        hour: leave out the hour of a live page, which takes 3 min
    """
    with scratch(folder) as made:
        with holdfast_server(made, "--max-jobs", jobs + 1 + WATCHED_JOBS) as server:
            began = time.perf_counter()
            job = fill(server.port, iterations=iterations, checkpoints=checkpoints, ends_at=time.time())
            took = time.perf_counter() - began
            print(f"filled    {iterations:,} iterations, {checkpoints:,} checkpoints in {took:.0f} s", flush=True)
            figures = _job(f"{server.url}/jobs/{JOB}", server.port, job, hour)
            figures["job_page_cpu_ms"] = round(job_page.cpu_ms(server, f"/jobs/{JOB}"), 2)
            if jobs:
                took = seconds_of(lambda: fill_fleet(server.port, jobs=jobs, ends_at=time.time()))
                print(f"filled    {jobs:,} jobs in {took:.0f} s", flush=True)
                figures |= _fleet(f"{server.url}/")
            used, rate = cores(server, pages=pages, seconds=seconds)
            figures[f"cores_for_{pages}_pages"] = round(used, 2)
            print(f"{pages} open pages, all live: {used:.2f} cores of the server, {rate:.0f} refreshes/s")
        figures["job_page_statements"] = job_page.statements(made / "bench.db", f"/jobs/{JOB}")
    cost = f"{figures['job_page_statements']} statements, {figures['job_page_cpu_ms']} ms of CPU time"
    print(f"one job page: {cost}")
    return figures


def _job(url: str, port: int, job: pages.SyntheticRun, hour: bool) -> dict[str, float]:
    with pages.chromium() as browser:
        print(f"browser   Chromium {browser.version}, headless", flush=True)
        figures = _weights(browser, url) | _times(browser, url)
        if hour:
            growth, answers = pages.heap_growth_mb(browser, url, port, job)
            figures["heap_growth_mb"] = round(growth, 2)
            pace = f"an hour at {pages.FASTER} times the pace, following live"
            print(f"{pace}: {answers:,} answers drawn, heap {growth:+.2f} MB", flush=True)
    return figures


def _weights(browser: pages.Browser, url: str) -> dict[str, float]:
    first = pages.bytes_of_first_load(browser, url)
    print(f"first load: {first.all / KB:.1f} kB in {first.requests} answers, scripts {first.scripts / KB:.1f} kB")
    answers = pages.timeline_bytes(browser, url)
    for window, (wire, plain, seconds) in answers.items():
        sizes = f"{wire / KB:6.1f} kB, unpacked {plain / KB:5.0f}"
        print(f"  timeline {window or 'whole run':<28} {sizes} {1000 * seconds:6.0f} ms")
    timeline = max(wire for wire, _, _ in answers.values())
    sizes = {"js_gzip_kb": first.scripts, "first_load_kb": first.all, "timeline_answer_kb": timeline}
    return {name: round(size / KB, 1) for name, size in sizes.items()}


def _times(browser: pages.Browser, url: str) -> dict[str, float]:
    paints = pages.first_paint_ms(browser, url)
    hands = pages.interactions_ms(browser, url)
    moving = pages.frames(browser, url)
    print(f"first contentful paint, cold: median {median(paints):.0f} ms, longest {max(paints):.0f} ms")
    longest, inp = max(hands, default=0.0), pages.next_paint_ms(hands)
    print(f"{len(hands)} interactions of 16 ms and more: INP {inp:.0f} ms, longest {longest:.0f} ms")
    slow = f"p95 {moving['p95']:.1f} ms, longest {moving['longest']:.0f} ms"
    print(f"zooming: {moving['perSecond']:.1f} frames/s, {slow}")
    times = {"first_paint_ms": median(paints), "interaction_ms": inp, "frames_per_second": moving["perSecond"]}
    return {name: round(time, 1) for name, time in times.items()}


def _fleet(url: str) -> dict[str, float]:
    with pages.chromium() as browser:
        paints = pages.first_paint_ms(browser, url, drawn=".jobs")
        first = pages.bytes_of_first_load(browser, url, drawn=".jobs")
    print(f"fleet, first contentful paint, cold: median {median(paints):.0f} ms, longest {max(paints):.0f} ms")
    print(f"fleet, first load: {first.all / KB:.1f} kB in {first.requests} answers")
    return {"fleet_first_paint_ms": round(median(paints), 1), "fleet_first_load_kb": round(first.all / KB, 1)}


if __name__ == "__main__":
    run(main)
