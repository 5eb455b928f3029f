"""Latency from an operator's edit to the waiting agent, with thousands of long polls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

from benchmarks.harness import connected, talking

WAIT_SECONDS = 60


def order_latencies_seconds(
    port: int, token: str, agents: int, orders: int, until_all_wait: Callable[[], None]
) -> list[float]:
    """Change the budget of one job at a time, while the agents of all jobs wait in long polls.

    Args:
        until_all_wait: returns when the server has received all long polls.
    """
    server, choose, versions, latencies = connected(port), random.Random(1), dict.fromkeys(range(agents), 0), []
    with talking(_agents, port, token, agents) as pipe:
        pipe.recv()  # all agents have sent their requests
        until_all_wait()
        for number in range(orders):
            job = choose.randrange(agents)
            headers = {"Authorization": f"Bearer {token}", "If-Match": f'"{versions[job]}"'}
            sent, asked = time.perf_counter(), {"budget": 0.01 + number / 1e5}
            answer = server.ask(f"/api/v1/jobs/{job_name(job)}/desired", "PATCH", json=asked, headers=headers)
            versions[job] = answer.json()["version"]
            heard, at = pipe.recv()
            if heard != job:
                raise RuntimeError(f"job {heard} received an edit of job {job}")
            latencies.append(at - sent)
    return latencies


def job_name(number: int) -> str:
    return f"waiting-{number:05d}"


def _agents(pipe: Connection, port: int, token: str, agents: int) -> None:
    asyncio.run(_wait_all(pipe, port, token, agents))


async def _wait_all(pipe: Connection, port: int, token: str, agents: int) -> None:
    waits = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(_agent(pipe, port, token, number, waits.release)) for number in range(agents)]
    for _ in tasks:
        await waits.acquire()
    pipe.send("waiting")
    closed = asyncio.get_running_loop().run_in_executor(None, _until_closed, pipe)
    await asyncio.wait([closed, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _until_closed(pipe: Connection) -> None:
    with contextlib.suppress(EOFError):
        pipe.recv()


async def _agent(pipe: Connection, port: int, token: str, number: int, waits: Callable[[], None]) -> None:
    version, client = 0, AsyncClient(port, {"Authorization": f"Bearer {token}"})
    while True:
        path = f"/api/v1/jobs/{job_name(number)}/desired?after={version}&wait={WAIT_SECONDS}"
        await client.send(path)
        waits()
        status, body = await client.answer()
        if status == 200:
            at = time.perf_counter()
            version = json.loads(body)["version"]
            pipe.send((number, at))
        elif status != 204:  # the server is busy
            await asyncio.sleep(1.0)


class AsyncClient:
    """A connection that is kept open, of which thousands take little memory."""

    def __init__(self, port: int, headers: Mapping[str, str]) -> None:
        self._port, self._headers = port, {"Host": f"127.0.0.1:{port}", **headers}
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(
        self, path: str, method: str = "GET", body: bytes = b"", **headers: str
    ) -> asyncio.StreamReader:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self._port, limit=2**22)
        fields = self._headers | headers | ({"Content-Length": str(len(body))} if body else {})
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        reader, writer = self.streams
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()
        return reader

    async def answer(self) -> tuple[int, bytes]:
        """Return status and body, which has a length, comes in chunks, or is empty."""
        assert self.streams is not None
        reader, _ = self.streams
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        lengths = [int(line.partition(":")[2]) for line in head if line.startswith("content-length:")]
        body = await reader.readexactly(lengths[0]) if lengths else b""
        if "transfer-encoding: chunked" in head:
            while size := int(await reader.readline(), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        return int(head[0].split()[1]), body

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None
