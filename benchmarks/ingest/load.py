"""Load: one process per client posts prepared bodies over a kept-alive connection as fast as it gets answers."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.harness import talking


@dataclass(frozen=True, slots=True)
class PreparedRequests:
    """The headers of a client's requests, and their bodies."""

    port: int
    path: str
    headers: dict[str, str]
    bodies: Sequence[bytes]
    samples: int
    """Number of samples in each body."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    samples: int
    seconds: float
    latencies_seconds: list[float]

    @property
    def rate(self) -> float:
        """Acknowledged samples per second."""
        return self.samples / self.seconds


def percentile_ms(loads: Iterable[LoadResult], percent: int) -> float:
    """Latencies of all requests."""
    latencies = sorted(latency for load in loads for latency in load.latencies_seconds)
    return 1000 * latencies[min(len(latencies) - 1, len(latencies) * percent // 100)]


def post_all(clients: Sequence[PreparedRequests], seconds: float) -> LoadResult:
    """Run all clients until each has posted its bodies or the time is over.

    Raises:
        RuntimeError: a server refused a request or closed the connection.
    """
    with contextlib.ExitStack() as started:
        pipes = [started.enter_context(talking(_client, client, seconds)) for client in clients]
        for pipe in pipes:
            pipe.recv()  # connected
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send("go")
        answers = [pipe.recv() for pipe in pipes]
        lasted = time.perf_counter() - began
    if refused := [answer for answer in answers if isinstance(answer, str)]:
        raise RuntimeError(refused[0])
    samples = sum(len(answer) * client.samples for answer, client in zip(answers, clients, strict=True))
    return LoadResult(samples, lasted, [latency for answer in answers for latency in answer])


def _client(pipe: Connection, post: PreparedRequests, seconds: float) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", post.port, timeout=120)
    connection.connect()
    pipe.send("connected")
    pipe.recv()
    latencies: list[float] = []
    end = time.perf_counter() + seconds
    for body in post.bodies:
        before = time.perf_counter()
        if before > end:
            break
        connection.request("POST", post.path, body, post.headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status >= 300:
            pipe.send(f"{post.path} answered {response.status}: {answer[:300]!r}")
            return
        latencies.append(time.perf_counter() - before)
    pipe.send(latencies)
