"""The servers that are compared: how each is started, and what its own clients would send it.

Every body holds 1,000 samples: ten metrics over a hundred steps, random numbers that no compression shortens.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from holdfast.server_link.event_queue import EventQueue

from .load import Post

METRICS = tuple(f"metric_{number}" for number in range(10))
STEPS = 100
SAMPLES = len(METRICS) * STEPS
STARTED_AT = 1_790_000_000.0
STEP_SECONDS = 0.05


class Peer(Protocol):
    name: str
    ready: str
    """A path that answers 200 once it is up."""

    def command(self, folder: Path, port: int) -> Sequence[str]: ...

    def environment(self, folder: Path, port: int) -> Mapping[str, str]: ...

    def posts(self, port: int, clients: int, bodies: int) -> list[Post]:
        """What so many clients send, each to a run of its own that is begun here."""

    def disk_bytes(self, folder: Path) -> int:
        """Of its database, once it has ended."""


class Step(NamedTuple):
    """An iteration as measured."""

    iteration: int
    lineage: int
    at: float
    seconds: float
    checkpoint_stall_seconds: float
    data_seconds: float


class Holdfast:
    """With its token, so that every request is authenticated."""

    name = "holdfast"
    ready = "/readyz"
    token = "a-secret-of-the-benchmark-only"

    def command(self, folder: Path, port: int) -> Sequence[str]:
        return [sys.executable, "-m", "holdfast_server", "--port", str(port), "--db", str(folder / "ours.db")]

    def environment(self, folder: Path, port: int) -> Mapping[str, str]:
        return {"HOLDFAST_TOKEN": self.token, "HOLDFAST_MAX_JOBS": "1000000"}

    def posts(self, port: int, clients: int, bodies: int) -> list[Post]:
        return [self._post(port, uuid.uuid4().hex[:12], bodies) for _ in range(clients)]

    def job_of(self, post: Post) -> str:
        return str(msgspec.msgpack.decode(post.bodies[0])["job"])

    def disk_bytes(self, folder: Path) -> int:
        return sum(file.stat().st_size for file in folder.glob("ours.db*"))

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def _post(self, port: int, name: str, bodies: int) -> Post:
        """As an agent packs them."""
        outbox = EventQueue(f"run-{name}", name, 1, 0, None)
        chance = random.Random(name)
        made = []
        for number in range(bodies):
            for step in range(number * STEPS + 1, (number + 1) * STEPS + 1):
                seconds = STEP_SECONDS * chance.uniform(0.95, 1.05)
                measured = Step(step, 1, STARTED_AT + step * STEP_SECONDS, seconds, 0.0, 0.01 * seconds)
                outbox.sample((measured, {name: chance.random() for name in METRICS}))
            outbox.seal()
            first = outbox.first()
            assert first is not None
            made.append(first[1])
            outbox.acknowledged(first[0])
        headers = {**self.headers(), "Content-Type": "application/msgpack", "Accept": "application/msgpack"}
        return Post("127.0.0.1", port, "/api/v1/ingest", headers, made, SAMPLES)


class MLflow:
    """As `mlflow server` starts it: SQLite, four workers."""

    name = "mlflow"
    ready = "/health"

    def __init__(self, python: Path) -> None:
        self._python = python

    def command(self, folder: Path, port: int) -> Sequence[str]:
        store = f"sqlite:///{folder / 'mlflow.db'}"
        return [
            *(str(self._python), "-m", "mlflow", "server", "--backend-store-uri", store),
            *("--artifacts-destination", str(folder / "artifacts"), "--host", "127.0.0.1", "--port", str(port)),
            # its workers are killed and begun anew, for ever, where one takes over 5 s to start
            *("--uvicorn-opts", "--timeout-worker-healthcheck 120"),
        ]

    def environment(self, folder: Path, port: int) -> Mapping[str, str]:
        path = f"{self._python.parent}:/usr/local/bin:/usr/bin:/bin"
        return {"PATH": path, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}

    def posts(self, port: int, clients: int, bodies: int) -> list[Post]:
        return [self._post(port, self.begin_run(port), bodies) for _ in range(clients)]

    def begin_run(self, port: int) -> str:
        asked = {"experiment_id": "0", "start_time": int(STARTED_AT * 1000)}
        answer = ask(port, "POST", "/api/2.0/mlflow/runs/create", asked)
        return str(answer["run"]["info"]["run_id"])

    def disk_bytes(self, folder: Path) -> int:
        return sum(file.stat().st_size for file in folder.glob("mlflow.db*"))

    def _post(self, port: int, run: str, bodies: int) -> Post:
        chance = random.Random(run)
        made = []
        for number in range(bodies):
            metrics = [
                {
                    "key": name,
                    "value": chance.random(),
                    "timestamp": int(1000 * (STARTED_AT + step * STEP_SECONDS)),
                    "step": step,
                }
                for step in range(number * STEPS + 1, (number + 1) * STEPS + 1)
                for name in METRICS
            ]
            made.append(json.dumps({"run_id": run, "metrics": metrics}).encode())
        headers = {"Content-Type": "application/json"}
        return Post("127.0.0.1", port, "/api/2.0/mlflow/runs/log-batch", headers, made, SAMPLES)


class Trackio:
    """As `trackio show` starts it, with its write token."""

    name = "trackio"
    ready = "/"
    token = "a-secret-of-the-benchmark-only"

    def __init__(self, python: Path) -> None:
        self._python = python

    def command(self, folder: Path, port: int) -> Sequence[str]:
        return [str(self._python.parent / "trackio"), "show"]

    def environment(self, folder: Path, port: int) -> Mapping[str, str]:
        return {
            "TRACKIO_DIR": str(folder / "trackio"),
            "TRACKIO_WRITE_TOKEN": self.token,
            "GRADIO_SERVER_PORT": str(port),
            "HF_HUB_OFFLINE": "1",
            "BROWSER": "true",
        }

    def posts(self, port: int, clients: int, bodies: int) -> list[Post]:
        return [self._post(port, uuid.uuid4().hex, bodies) for _ in range(clients)]

    def disk_bytes(self, folder: Path) -> int:
        return sum(file.stat().st_size for file in (folder / "trackio").glob("*.db*"))

    def _post(self, port: int, run: str, bodies: int) -> Post:
        chance = random.Random(run)
        made = []
        for number in range(bodies):
            logs = [
                {
                    "project": "benchmark",
                    "run": run[:8],
                    "run_id": run,
                    "metrics": {name: chance.random() for name in METRICS},
                    "step": step,
                    "log_id": f"{run}-{step}",
                }
                for step in range(number * STEPS + 1, (number + 1) * STEPS + 1)
            ]
            made.append(json.dumps({"args": [], "kwargs": {"logs": logs, "hf_token": None}}).encode())
        headers = {"Content-Type": "application/json", "x-trackio-write-token": self.token}
        return Post("127.0.0.1", port, "/api/bulk_log", headers, made, SAMPLES)


def ask(port: int, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Any:
    """The answer's JSON; RuntimeError for one that is none, or no success."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request(method, path, sent, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        content = response.read()
        if response.status >= 300:
            raise RuntimeError(f"{path} answered {response.status}: {content[:500]!r}")
        return json.loads(content) if content else None
    finally:
        connection.close()


def timed(port: int, path: str, headers: Mapping[str, str] | None = None) -> float:
    """Seconds until the whole answer is here."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.connect()
        started = time.perf_counter()
        connection.request("GET", path, headers=dict(headers or {}))
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RuntimeError(f"{path} answered {response.status}: {content[:500]!r}")
        return time.perf_counter() - started
    finally:
        connection.close()
