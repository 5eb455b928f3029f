"""Fixtures: a server in this process, one in its own process, and an agent that tests script."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from starlette.testclient import TestClient

from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import Ack, AttemptStarted, Batch, Checkpoint, CheckpointState, Event, Samples
from holdfast_server.core.settings import ServerSettings
from holdfast_web import create_app
from tests.support import compiled_statements
from tests.support.accounts_server import AccountsServer
from tests.support.clock import FakeClock
from tests.support.fork_server import PATIENCE_SECONDS, ForkedProcess, ForkServer

compiled_statements.share()

BASE_URL = "http://127.0.0.1:7117"
JOB = "/api/v1/jobs/char-gpt"


@dataclass
class ScriptedAgent:
    """Agent of rank 0 that sends the events a test scripts."""

    client: Any
    job: str = "char-gpt"
    uid: str = "first"
    attempt: int = 1
    rank: int = 0
    lineage: int = 1
    iteration: int = 0
    sequence: int = 0
    at: float = 1_790_000_000.0
    sent: list[bytes] = field(default_factory=list)

    def start(self, **fields: Any) -> Ack:
        return self.say(
            AttemptStarted(at=self.at, iteration=self.iteration, lineage=self.lineage, host="node-1", **fields)
        )

    def train(
        self,
        iterations: int,
        *events: Event,
        loss: float | list[float] = 2.5,
        seconds: float = 0.1,
        data_seconds: float = 0.002,
    ) -> Ack:
        """Report iterations in one batch, with one loss for all or with one for each."""
        numbers = list(range(self.iteration + 1, self.iteration + iterations + 1))
        self.iteration += iterations
        samples = Samples(
            iteration=numbers,
            lineage=[self.lineage] * iterations,
            at=[self.at + number * seconds for number in numbers],
            seconds=[seconds] * iterations,
            stall_seconds=[0.001] * iterations,
            data_seconds=[data_seconds] * iterations,
            metrics={"loss": loss if isinstance(loss, list) else [loss] * iterations},
        )
        return self.say(*events, samples=samples)

    def checkpoint(self, iteration: int | None = None, state: CheckpointState = "durable", **fields: Any) -> str:
        at = self.iteration if iteration is None else iteration
        name = checkpoint_id(at, self.lineage)
        details = {"kind": "scheduled", "payload_bytes": 1000, "persist_seconds": 0.5, **fields}
        self.say(Checkpoint(at=self.at, id=name, iteration=at, lineage=self.lineage, state=state, **details))
        return name

    def say(self, *events: Event, samples: Samples | None = None) -> Ack:
        batch = Batch(
            job=self.job,
            uid=self.uid,
            attempt=self.attempt,
            rank=self.rank,
            sequence=self.sequence,
            sent_at=self.at,
            iteration=self.iteration,
            lineage=self.lineage,
            samples=samples,
            events=list(events),
        )
        self.sequence += 1
        return self.send(msgspec.msgpack.encode(batch))

    def send(self, body: bytes) -> Ack:
        self.sent.append(body)
        reply = post_batch(self.client, body)
        assert reply.status_code == 200, reply.text
        return msgspec.msgpack.decode(reply.content, type=Ack)

    def restarted(self, uid: str = "second") -> ScriptedAgent:
        """Return the agent of the next attempt of the job, at the same position."""
        return ScriptedAgent(
            self.client,
            uid=uid,
            attempt=self.attempt + 1,
            lineage=self.lineage,
            iteration=self.iteration,
            at=self.at + 60,
        )


def post_batch(client: Any, body: bytes, **headers: str) -> Any:
    return client.post(
        "/api/v1/ingest",
        content=body,
        headers={"Content-Type": "application/msgpack", **{k.replace("_", "-"): v for k, v in headers.items()}},
    )


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_kind(request: pytest.FixtureRequest) -> str:
    """Run a test on SQLite and on PostgreSQL."""
    return str(request.param)


@pytest.fixture(params=["sqlite"], name="database_kind")
def sqlite_unless_marked(request: pytest.FixtureRequest) -> str:
    """For a file of tests in which the kind of database matters to those only that are marked `ON_BOTH`."""
    return str(request.param)


@pytest.fixture
def settings(empty_database: str) -> ServerSettings:
    return ServerSettings(database=empty_database)


@pytest.fixture
def client(settings: ServerSettings, clock: FakeClock) -> Iterator[TestClient]:
    with TestClient(create_app(settings, clock=clock), base_url=BASE_URL) as client:
        yield client


@pytest.fixture
def agent(client: TestClient) -> ScriptedAgent:
    return ScriptedAgent(client)


@pytest.fixture
def job(agent: ScriptedAgent) -> ScriptedAgent:
    """Agent of a job at iteration 30, with durable checkpoints at 10 and 20."""
    agent.start()
    for _ in range(2):
        agent.train(10)
        agent.checkpoint()
    agent.train(10)
    return agent


@pytest.fixture
def no_background_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the server's background jobs from changing what a test compares."""
    monkeypatch.setattr("holdfast_server.app.background_jobs_running", lambda *_: nullcontext())


@pytest.fixture
def stage(settings: ServerSettings, clock: FakeClock) -> Iterator[AccountsServer]:
    """Server with accounts and no users yet."""
    app = create_app(replace(settings, accounts=True), clock=clock)
    with TestClient(app, base_url=BASE_URL, follow_redirects=False) as client:
        yield AccountsServer(client, clock)


class NotStarted(AssertionError):
    """The server ended before it reported its address."""


@dataclass
class ServerProcess:
    """`python -m holdfast_server` as a process, on its own port."""

    process: ForkedProcess
    log: Path
    url: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=PATIENCE_SECONDS)

    def wait_for_address(self) -> None:
        while not self.url:
            ended = self.process.all("exit ")
            if (found := re.search(r"Holdfast is at http://[^ ]*:(\d+)", self.output)) is not None:
                self.url = f"http://127.0.0.1:{found[1]}"
            elif ended:
                raise NotStarted(f"exit status {ended[0]}: {self.output}")
            else:
                self.process.listen(0.01)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        return self.process.wait()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()


@pytest.fixture(scope="session")
def server_processes() -> Iterator[ForkServer]:
    fork_server = ForkServer("tests.support.server_process")
    yield fork_server
    fork_server.close()


@pytest.fixture
def spawn_server(
    server_processes: ForkServer, tmp_path: Path, fast_path: Path
) -> Iterator[Callable[..., ServerProcess]]:
    """Start server processes, without waiting until they serve."""
    numbers = count(1)
    with ExitStack() as running:

        def start(*arguments: str, **environment: str) -> ServerProcess:
            environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **environment}
            log = fast_path / f"server-{next(numbers)}.log"
            birth = server_processes.spawn(
                "tests.support.server_process.live", log, arguments=arguments, environment=environment
            )
            return ServerProcess(running.enter_context(birth), log)

        yield start


@pytest.fixture
def serve(spawn_server: Callable[..., ServerProcess], new_database: str) -> Callable[..., ServerProcess]:
    def start(*arguments: str, **environment: str) -> ServerProcess:
        server = spawn_server("--db", new_database, "--port", "0", *arguments, **environment)
        server.wait_for_address()
        return server

    return start


@pytest.fixture
def fresh_agent() -> type[ScriptedAgent]:
    """Agent type, for tests that report to another client than `client`."""
    return ScriptedAgent
