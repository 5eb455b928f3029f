"""Latency from an operator's edit to the waiting agent, with thousands of long polls."""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

WAIT_SECONDS = 60


def order_latencies_seconds(
    port: int, token: str, agents: int, orders: int, until_all_wait: Callable[[], None]
) -> list[float]:
    """Change the budget of one job at a time, while the agents of all jobs wait in long polls.

    Args:
        until_all_wait: returns when the server has received all long polls.
    """
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_agents, args=(there, port, token, agents))
    process.start()
    there.close()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    choose, versions, latencies = random.Random(1), dict.fromkeys(range(agents), 0), []
    try:
        here.recv()  # all agents have sent their requests
        until_all_wait()
        for number in range(orders):
            job = choose.randrange(agents)
            body = json.dumps({"budget": 0.01 + number / 1e5})
            sent = time.perf_counter()
            path = f"/api/v1/jobs/{job_name(job)}/desired"
            connection.request("PATCH", path, body, {**headers, "If-Match": f'"{versions[job]}"'})
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200:
                raise RuntimeError(f"the edit was answered {response.status}: {answer[:300]!r}")
            versions[job] = json.loads(answer)["version"]
            heard, at = here.recv()
            if heard != job:
                raise RuntimeError(f"job {heard} received an edit of job {job}")
            latencies.append(at - sent)
    finally:
        connection.close()
        here.close()
        process.join(10)
        process.kill()
    return latencies


def job_name(number: int) -> str:
    return f"waiting-{number:05d}"


def _agents(pipe: Connection, port: int, token: str, agents: int) -> None:
    asyncio.run(_wait_all(pipe, port, token, agents))


async def _wait_all(pipe: Connection, port: int, token: str, agents: int) -> None:
    waiting = asyncio.Event()
    left = agents

    def waits() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            waiting.set()

    tasks = [asyncio.create_task(_agent(pipe, port, token, number, waits)) for number in range(agents)]
    await waiting.wait()
    pipe.send("waiting")
    closed = asyncio.get_running_loop().run_in_executor(None, _until_closed, pipe)
    await asyncio.wait([closed, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _until_closed(pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        return


async def _agent(pipe: Connection, port: int, token: str, number: int, waits: Callable[[], None]) -> None:
    version = 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        path = f"/api/v1/jobs/{job_name(number)}/desired?after={version}&wait={WAIT_SECONDS}"
        request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n\r\n"
        writer.write(request.encode())
        await writer.drain()
        waits()
        status, body = await read_response(reader)
        if status == 200:
            at = time.perf_counter()
            version = json.loads(body)["version"]
            pipe.send((number, at))
        elif status != 204:  # the server is busy
            await asyncio.sleep(1.0)


async def read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return status and body, which has a length, comes in chunks, or is empty."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    lengths = [int(line.partition(":")[2]) for line in head if line.startswith("content-length:")]
    body = await reader.readexactly(lengths[0]) if lengths else b""
    if "transfer-encoding: chunked" in head:
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    return int(head[0].split()[1]), body
