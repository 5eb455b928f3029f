"""Open pages, as the server sees them: one stream each, and the requests that its ticks cause."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

from benchmarks.harness import BenchmarkServer, connected, running, talking
from benchmarks.ingest.waiting import AsyncClient

from .filling import STEP_SECONDS, JobReporter, SyntheticRun

JOBS = 10
WARM_SECONDS = 6.0
GZIP = {"Accept-Encoding": "gzip"}
REFRESH_SECONDS = 1.0
"""A page sends requests at most once a second."""


def job_name(number: int) -> str:
    return f"watched-{number:03d}"


def cores(server: BenchmarkServer, *, pages: int, seconds: float) -> tuple[float, float]:
    """Return CPU use of the server for so many open pages of running jobs, and refreshes per second."""
    with open_pages(server.port, pages) as answered:
        time.sleep(WARM_SECONDS)
        before, begun, asked = server.cpu_seconds(), time.perf_counter(), answered()
        time.sleep(seconds)
        spent, took = server.cpu_seconds() - before, time.perf_counter() - begun
        return spent / took, (answered() - asked) / took


@contextlib.contextmanager
def open_pages(port: int, pages: int) -> Iterator[Callable[[], int]]:
    """Keep pages of running jobs open; the function returns how many of their requests were answered."""
    with running(_train, port), talking(_readers, port, pages, patience=0) as pipe:

        def answered() -> int:
            pipe.send("count")
            return int(pipe.recv())

        pipe.recv()  # all pages have a stream
        yield answered


def _train(port: int, ended: threading.Event) -> None:
    """Report once a second for each job."""
    runs = {
        JobReporter(port, job_name(number)): SyntheticRun(every=100, began_at=time.time() - 60, seed=number)
        for number in range(JOBS)
    }
    for reporter, run in runs.items():
        reporter.report(run, 200, *run.start(None))
    while not ended.wait(1.0):
        for reporter, run in runs.items():
            reporter.report(run, round(1 / STEP_SECONDS))


def _readers(pipe: Connection, port: int, pages: int) -> None:
    while connected(port).http.request("GET", f"/api/v1/jobs/{job_name(JOBS - 1)}").status != 200:
        time.sleep(0.2)  # until its first report
    asyncio.run(_read_all(pipe, port, pages))


class _Page:
    """One open page of a job."""

    answered = 0

    def __init__(self, port: int, job: str) -> None:
        self.port, self.job, self.begun, self.ticked = port, job, False, asyncio.Event()

    async def listen(self, ready: asyncio.Semaphore) -> None:
        client = AsyncClient(self.port, GZIP)
        reader = await client.send(f"/api/v1/jobs/{self.job}/stream")
        with contextlib.closing(client):
            while line := await reader.readline():
                if line.startswith(b"event: tick"):
                    if not self.begun:
                        self.begun = True
                        ready.release()
                    self.ticked.set()

    async def refresh(self) -> None:
        """The requests of stream.js and feed.js."""
        client, terms = AsyncClient(self.port, GZIP), "x=iteration&points=960&metric=loss&digits=5&marks=120"
        while True:
            await self.ticked.wait()
            self.ticked.clear()
            began = time.monotonic()
            for path, headers in (
                (f"/jobs/{self.job}/live", {"HX-Request": "true"}),
                (f"/api/v1/jobs/{self.job}/timeline?{terms}", {}),
            ):
                await client.send(path, **headers)
                status, _ = await client.answer()
                if status not in (200, 503):
                    raise RuntimeError(f"the server answered {status}")
                _Page.answered += status == 200
            await asyncio.sleep(max(0.0, REFRESH_SECONDS - (time.monotonic() - began)))


async def _read_all(pipe: Connection, port: int, pages: int) -> None:
    ready, loop = asyncio.Semaphore(0), asyncio.get_running_loop()
    open_pages = [_Page(port, job_name(number % JOBS)) for number in range(pages)]
    tasks = [asyncio.create_task(page.listen(ready)) for page in open_pages]
    for _ in open_pages:
        await ready.acquire()
    tasks += [asyncio.create_task(page.refresh()) for page in open_pages]
    pipe.send("ready")
    while True:
        for task in tasks:
            if task.done():
                task.result()
        if await loop.run_in_executor(None, pipe.poll, 0.5):
            pipe.recv()
            pipe.send(_Page.answered)
