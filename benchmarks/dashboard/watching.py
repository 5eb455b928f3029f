"""Open pages, as the server sees them: one stream each, and the requests that its ticks cause."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.ingest.waiting import read_response

from .filling import STEP_SECONDS, JobReporter, SyntheticRun

JOBS = 10
WARM_SECONDS = 6.0
REFRESH_SECONDS = 1.0
"""A page sends requests at most once a second."""


def job_name(number: int) -> str:
    return f"watched-{number:03d}"


def cores(port: int, pid: int, *, pages: int, seconds: float) -> tuple[float, float]:
    """Return CPU use of the server for so many open pages of running jobs, and refreshes per second."""
    with open_pages(port, pages) as answered:
        time.sleep(WARM_SECONDS)
        before, begun, asked = _cpu_seconds(pid), time.perf_counter(), answered()
        time.sleep(seconds)
        spent, took = _cpu_seconds(pid) - before, time.perf_counter() - begun
        return spent / took, (answered() - asked) / took


@contextlib.contextmanager
def open_pages(port: int, pages: int) -> Iterator[Callable[[], int]]:
    """Keep pages of running jobs open; the function returns how many of their requests were answered."""
    ended = threading.Event()
    agents = threading.Thread(target=_train, args=(port, ended), name="agents")
    agents.start()
    here, there = multiprocessing.Pipe()
    readers = multiprocessing.get_context("spawn").Process(target=_readers, args=(there, port, pages))
    readers.start()
    there.close()

    def answered() -> int:
        here.send("count")
        return int(here.recv())

    try:
        here.recv()  # all pages have a stream
        yield answered
    finally:
        ended.set()
        here.close()
        readers.kill()
        readers.join()
        agents.join()


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _train(port: int, ended: threading.Event) -> None:
    """Report once a second for each job."""
    runs = [SyntheticRun(every=100, began_at=time.time() - 60, seed=number) for number in range(JOBS)]
    reporters = [JobReporter(port, job_name(number)) for number in range(JOBS)]
    for run, reporter in zip(runs, reporters, strict=True):
        begun = run.start(None)
        samples, events = run.train(200)
        reporter.send(run.at, run.iteration, samples, begun + events)
    while not ended.wait(1.0):
        for run, reporter in zip(runs, reporters, strict=True):
            samples, events = run.train(round(1 / STEP_SECONDS))
            reporter.send(run.at, run.iteration, samples, events)
    for reporter in reporters:
        reporter.close()


def _readers(pipe: Connection, port: int, pages: int) -> None:
    asyncio.run(_read_all(pipe, port, pages))


class _Page:
    """One open page of a job."""

    answered = 0

    def __init__(self, port: int, job: str) -> None:
        self.port, self.job = port, job
        self.ticked = asyncio.Event()

    async def listen(self, ready: asyncio.Semaphore) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**20)
        writer.write(_request(self.port, f"/api/v1/jobs/{self.job}/stream"))
        with contextlib.closing(writer):
            while line := await reader.readline():
                if line.startswith(b"event: tick"):
                    if not self.ticked.is_set() and not hasattr(self, "begun"):
                        self.begun = True
                        ready.release()
                    self.ticked.set()

    async def refresh(self) -> None:
        """The requests of stream.js and feed.js."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**22)
        terms = "x=iteration&points=960&metric=loss&digits=5&marks=120"
        while True:
            await self.ticked.wait()
            self.ticked.clear()
            began = time.monotonic()
            for path in (f"/jobs/{self.job}/live", f"/api/v1/jobs/{self.job}/timeline?{terms}"):
                writer.write(_request(self.port, path, fragment=path.endswith("/live")))
                status, _ = await read_response(reader)
                if status not in (200, 503):
                    raise RuntimeError(f"the server answered {status}")
                _Page.answered += status == 200
            await asyncio.sleep(max(0.0, REFRESH_SECONDS - (time.monotonic() - began)))


def _request(port: int, path: str, *, fragment: bool = False) -> bytes:
    lines = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Accept-Encoding: gzip"]
    return "\r\n".join([*lines, *(["HX-Request: true"] if fragment else []), "", ""]).encode()


async def _read_all(pipe: Connection, port: int, pages: int) -> None:
    await _until_there(port)
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


async def _until_there(port: int) -> None:
    """Create the jobs by their first report."""
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", f"/api/v1/jobs/{job_name(JOBS - 1)}")
        found = connection.getresponse().status == 200
        connection.close()
        if found:
            return
        await asyncio.sleep(0.2)
