"""`make bench-capacity`: what a server needs for a number of agents that report as in training.

Each agent trains an iteration every half second, reports its samples in a batch every few seconds, takes a
checkpoint every minute, and waits for orders in a long poll. CPU seconds, memory and bytes are measured. Latencies
are not: agents and server share this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import resource
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.harness import (
    ROOT,
    BenchmarkServer,
    Table,
    cpu_seconds,
    free_port,
    run,
    scratch,
    serving,
    settle,
    talking,
)
from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import AttemptStarted, Batch, Checkpoint, Event, LineageStarted, Samples
from holdfast.server_link.batch_sender import ReportInterval
from holdfast.server_link.desired_state_poller import WAIT_SECONDS
from holdfast.server_link.http_client import REQUEST_SECONDS, Backoff

from .memory import SAMPLE_SECONDS, append_sample
from .peers import HoldfastPeer
from .shared_store import compared
from .waiting import AsyncClient

ITERATION_SECONDS = 0.5
CHECKPOINT_SECONDS = 60.0
METRICS = ("loss", "learning_rate", "grad_norm")
CHECKPOINT_BYTES = 1_500_000_000
STARTS_AT_ONCE = 32
KEPT_SECONDS = 5
"""An agent that reports less often closes its connection in between, so that 10,000 need fewer open files."""
NO_ANSWER, TOO_MANY_REQUESTS = 0, 429
PUT_OFF = (TOO_MANY_REQUESTS, 503, NO_ANSWER)
"""Statuses of batches that an agent sends again, because the server is overloaded or does not answer."""
RETRY_SECONDS = 2.0
COLUMNS = {
    "agents": ",", "every s": "g", "batches/s": ",", "samples/s": ",", "CPU cores": ".2f", "PostgreSQL's": ".2f",
    "ms a batch": "", "memory MB": ",", "bytes a sample": "",
}  # fmt: skip
SHOWN = (
    "every_seconds", "batches_per_second", "samples_per_second", "server_cores", "database_cores",
    "cpu_ms_per_batch", "server_mb", "bytes_per_sample",
)  # fmt: skip


class Reported(NamedTuple):
    """What the agents reported while it was measured."""

    seconds: float
    batches: int
    samples: int
    put_off: int


class Usage(NamedTuple):
    """CPU seconds, memory and stored bytes of server and database."""

    server_cpu_seconds: float
    database_cpu_seconds: float
    server_bytes: int
    stored_bytes: int


class Store:
    """The database of a measured server: a file, or a PostgreSQL of its own."""

    def __init__(self, folder: Path, cluster: Any) -> None:
        self._folder, self._cluster = folder, cluster
        self.url = str(folder / "ours.db")
        if cluster is not None:
            self._name = cluster.create()
            self.url = cluster.url(self._name)

    def cpu_seconds(self) -> float:
        """0 for SQLite, which runs in the server."""
        return 0.0 if self._cluster is None else cpu_seconds(self._cluster._process.pid)

    def stored_bytes(self) -> int:
        if self._cluster is None:
            return HoldfastPeer().disk_bytes(self._folder)
        ((size,),) = self._cluster.execute(f"SELECT pg_database_size('{self._name}')")
        return int(size)


def main(
    agents: list[int] = [100, 1000, 10_000],  # noqa: B006 - not changed
    periods: list[int] = [1, 5, 60],  # noqa: B006
    shared_store: bool = False,
    jobs: int = 20,
    writers: int = 4,
    seconds: float = 60.0,
    postgresql: bool = False,
    servers: int = 1,
    memory: Path | None = None,
    folder: Path = ROOT,
) -> dict[str, Any]:
    """Measure each number of agents.

    Args:
        agents: numbers of agents, one after the other
        periods: seconds between the batches of an agent, for each
        shared_store: jobs that write to one slow store, with and without a limit
        jobs: with --shared-store: how many
        writers: with --shared-store: checkpoints that are written at a time
        seconds: to measure
        postgresql: on a separate PostgreSQL, instead of SQLite
        servers: servers that share the PostgreSQL and the agents
        memory: a file for a sample of the servers' memory every ten seconds
        folder: directory of the databases, on the disk to measure
    """
    if len(agents) != len(periods):
        sys.exit("--agents and --periods: give as many periods as numbers of agents")
    if servers < 1 or (servers > 1 and not postgresql):
        sys.exit("--servers: at least 1, and several need --postgresql")
    if shared_store:
        return compared(seconds, folder, jobs, writers)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    figures, table = {}, Table(COLUMNS)
    with _cluster(postgresql) as cluster:
        for count, period in zip(agents, periods, strict=True):
            with scratch(folder) as made:
                found = _measure(made, cluster, servers, count, period, seconds, memory)
            table.row(count, *(found[name] for name in SHOWN))
            figures[str(count)] = found
    return figures


def _measure(
    folder: Path, cluster: Any, count: int, agents: int, period: float, seconds: float, memory: Path | None
) -> dict[str, float]:
    ours, store = HoldfastPeer(), Store(folder, cluster)
    with contextlib.ExitStack() as stack:
        servers = []
        for _ in range(count):
            port = free_port()
            command, environment = ours.command(folder, port, store.url), ours.environment(folder, port)
            started = serving(command, port=port, log=folder / f"log-{port}", environment=environment)
            servers.append(stack.enter_context(started))
        ports = [server.port for server in servers]
        pipe = stack.enter_context(talking(_agents, ports, ours.token, agents, period, patience=30))
        pipe.recv()  # all have started
        settle(servers)
        pipe.send(seconds)
        pipe.recv()  # all report
        before = _usage(servers, store)
        if memory is not None:
            _record_memory(memory, servers, pipe)
        reported: Reported = pipe.recv()
        after = _usage(servers, store)
    return _figures(period, reported, before, after)


def _record_memory(file: Path, servers: list[BenchmarkServer], pipe: Connection) -> None:
    """Record the memory of the servers until the agents are done, and view two pages before each sample."""
    ours, began = HoldfastPeer(), time.monotonic()
    while not pipe.poll(SAMPLE_SECONDS):
        for server in servers:
            for path in ("/", "/jobs/job-00000"):
                server.ask(path, headers=ours.headers())
        append_sample(file, began, sum(server.pss_bytes() for server in servers))


def _figures(period: float, reported: Reported, before: Usage, after: Usage) -> dict[str, float]:
    """Bytes are those before the server merges small chunks, ten minutes after they came."""
    server, database = ((now - then) / reported.seconds for now, then in zip(after[:2], before[:2], strict=True))
    stored = after.stored_bytes - before.stored_bytes
    return {
        "every_seconds": period,
        "batches_per_second": round(reported.batches / reported.seconds, 1),
        "samples_per_second": round(reported.samples / reported.seconds),
        "put_off": reported.put_off,
        "server_cores": round(server, 3),
        "database_cores": round(database, 3),
        "cpu_ms_per_batch": round(1000 * (server + database) * reported.seconds / max(1, reported.batches), 2),
        "server_mb": round(after.server_bytes / 1e6),
        "bytes_per_sample": round(stored / max(1, reported.samples), 1),
    }


def _usage(servers: list[BenchmarkServer], store: Store) -> Usage:
    seconds = sum(server.cpu_seconds() for server in servers)
    return Usage(seconds, store.cpu_seconds(), sum(server.pss_bytes() for server in servers), store.stored_bytes())


@contextlib.contextmanager
def _cluster(wanted: bool) -> Iterator[Any]:
    if not wanted:
        yield None
        return
    from tests.support.postgres import Cluster

    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


# ---------------------------------------------------------------- the agents, in a process of their own


def _agents(pipe: Connection, ports: list[int], token: str, agents: int, period: float) -> None:
    asyncio.run(_Fleet(ports, token, agents, period).run(pipe))


class _Fleet:
    def __init__(self, ports: list[int], token: str, agents: int, period: float) -> None:
        self.token, self.period = token, period
        self._agents = [_Agent(self, number, ports[number % len(ports)]) for number in range(agents)]
        self.batches = self.samples = self.put_off = 0
        self.starting = asyncio.Semaphore(STARTS_AT_ONCE)

    async def run(self, pipe: Connection) -> None:
        await asyncio.gather(*(agent.start() for agent in self._agents))
        pipe.send("all have started")
        seconds = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        tasks = [asyncio.create_task(agent.report()) for agent in self._agents]
        await asyncio.sleep(self.period + 1)  # until all have begun
        pipe.send("all report")
        began, batches, samples, put_off = time.monotonic(), self.batches, self.samples, self.put_off
        await asyncio.sleep(seconds)
        for task in (*tasks, *(poll for agent in self._agents for poll in agent.tasks)):
            if task.done():
                task.result()  # it ended with an error
        counted = self.batches - batches, self.samples - samples, self.put_off - put_off
        pipe.send(Reported(time.monotonic() - began, *counted))
        for task in tasks:
            task.cancel()


class _Agent:
    """An agent with two connections, one of which waits for orders."""

    def __init__(self, fleet: _Fleet, number: int, port: int) -> None:
        self._fleet, self._job = fleet, f"job-{number:05d}"
        self._iteration = self._sequence = 0
        self._random = random.Random(number)
        self._checkpointed_at = 0.0
        self._interval = ReportInterval(fleet.period)
        self.tasks: list[asyncio.Task[None]] = []
        self._backoff = Backoff()
        headers = {
            "Authorization": f"Bearer {fleet.token}", "Content-Type": "application/msgpack", "Accept": "*/*"
        }  # fmt: skip
        self._clients = {method: AsyncClient(port, headers) for method in ("GET", "POST")}

    async def start(self) -> None:
        async with self._fleet.starting:
            now = time.time()
            begun = AttemptStarted(at=now, iteration=0, lineage=1, host=self._job, pid=1)
            await self._post("control", [begun, LineageStarted(at=now, iteration=0, lineage=1)])
            self.tasks.append(asyncio.create_task(self._poll()))

    async def report(self) -> None:
        """Report every `period` seconds, or less often if the server is slow: the next batch has more samples."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._random.uniform(0, self._fleet.period)
        reported_to = loop.time()
        self._checkpointed_at = loop.time() - self._random.uniform(0, CHECKPOINT_SECONDS)
        while True:
            await asyncio.sleep(max(0.0, due - loop.time()))
            steps = int((loop.time() - reported_to) / ITERATION_SECONDS)
            reported_to += steps * ITERATION_SECONDS
            await self._post("samples", [], self._samples(steps))
            due = loop.time() + self._interval.seconds
            if loop.time() - self._checkpointed_at >= CHECKPOINT_SECONDS:
                self._checkpointed_at += CHECKPOINT_SECONDS
                await self._post("control", self._checkpoint())

    def _samples(self, steps: int) -> Samples:
        numbers = list(range(self._iteration + 1, self._iteration + steps + 1))
        self._iteration += steps
        now, draw = time.time(), self._random.random
        return Samples(
            iteration=numbers,
            lineage=[1] * steps,
            at=[now - (steps - each) * ITERATION_SECONDS for each in range(steps)],
            seconds=[ITERATION_SECONDS * (0.95 + 0.1 * draw()) for _ in numbers],
            stall_seconds=[0.0] * steps,
            data_seconds=[0.01 * draw() for _ in numbers],
            metrics={name: [draw() for _ in numbers] for name in METRICS},
        )

    def _checkpoint(self) -> list[Event]:
        now, at = time.time(), max(1, self._iteration)
        return [
            Checkpoint(
                at=now, id=checkpoint_id(at, 1), iteration=at, lineage=1, kind="scheduled", state=state,
                payload_bytes=CHECKPOINT_BYTES, snapshot_seconds=0.2, persist_seconds=3.0,
            )
            for state in ("snapshot", "persisting", "durable")
        ]  # fmt: skip

    async def _post(self, lane: str, events: list[Event], samples: Samples | None = None) -> None:
        self._sequence += 1
        body = msgspec.msgpack.encode(
            Batch(
                job=self._job, uid=self._job, attempt=1, rank=0, lane=lane, sequence=self._sequence,
                sent_at=time.time(), iteration=self._iteration, lineage=1, samples=samples, events=events,
            )
        )  # fmt: skip
        asked_at = time.monotonic()
        while (status := await self._ask("POST", "/api/v1/ingest", body)) in PUT_OFF:
            self._fleet.put_off += 1
            self._close_if_rare()
            if status == TOO_MANY_REQUESTS:
                self._interval.note_answer(None)
                await asyncio.sleep(max(RETRY_SECONDS, self._interval.seconds))
            else:
                await asyncio.sleep(self._backoff.next_seconds(RETRY_SECONDS))
            asked_at = time.monotonic()
        self._interval.note_answer(time.monotonic() - asked_at)
        self._backoff.reset()
        self._close_if_rare()
        if status != 200:
            raise RuntimeError(f"the server refused a batch with status {status}")
        self._fleet.batches += 1
        self._fleet.samples += 0 if samples is None else len(samples.iteration) * len(METRICS)

    async def _poll(self) -> None:
        while True:
            path = f"/api/v1/jobs/{self._job}/desired?after=0&wait={WAIT_SECONDS:g}"
            if (status := await self._ask("GET", path)) in PUT_OFF:
                await asyncio.sleep(RETRY_SECONDS)
            elif status not in (200, 204):
                raise RuntimeError(f"the server answered a long poll with status {status}")

    async def _ask(self, method: str, path: str, body: bytes = b"") -> int:
        """Return the status of the answer. Each method has a connection, made anew if the server closed it."""
        client = self._clients[method]
        for _ in range(2 if client.streams else 1):
            try:
                async with asyncio.timeout(REQUEST_SECONDS + (WAIT_SECONDS if method == "GET" else 0)):
                    await client.send(path, method, body)
                    status, _ = await client.answer()
                    return status
            except (asyncio.IncompleteReadError, OSError) as error:  # TimeoutError is an OSError
                if getattr(error, "errno", None) == errno.EMFILE:
                    raise  # too few open files are allowed here: see `ulimit -Hn`
                client.close()
        return NO_ANSWER

    def _close_if_rare(self) -> None:
        if self._fleet.period > KEPT_SECONDS:
            self._clients["POST"].close()


if __name__ == "__main__":
    run(main)
