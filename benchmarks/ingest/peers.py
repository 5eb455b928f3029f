"""The servers of the comparison: how each is started, and what its own clients send.

Every body holds 1,000 samples: ten metrics over a hundred steps, random numbers that do not compress.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.harness import BenchmarkServer, connected, free_port, serving
from holdfast.server_link.event_queue import EventQueue

from .load import PreparedRequests

METRICS = tuple(f"metric_{number}" for number in range(10))
STEPS = 100
SAMPLES = len(METRICS) * STEPS
STARTED_AT = 1_790_000_000.0
STEP_SECONDS = 0.05
JSON = {"Content-Type": "application/json"}


class Peer:
    name: str
    ready: str
    """A path that answers 200 when the server is ready."""
    path: str
    """Where samples are posted."""
    databases: str
    """Pattern of the files of its database."""
    token = "a-secret-of-the-benchmark-only"

    def command(self, folder: Path, port: int) -> Sequence[str]:
        raise NotImplementedError

    def environment(self, folder: Path, port: int) -> Mapping[str, str]:
        raise NotImplementedError

    def headers(self) -> dict[str, str]:
        return JSON

    def begin_run(self, port: int) -> str:
        """Return the name of a new run."""
        return uuid.uuid4().hex[:12]

    def bodies(self, run: str, count: int, chance: random.Random) -> list[bytes]:
        """Return the samples of a run as its clients pack them."""
        return [json.dumps(self.body(run, range(n * STEPS + 1, (n + 1) * STEPS + 1), chance)).encode()
                for n in range(count)]  # fmt: skip

    def body(self, run: str, steps: range, chance: random.Random) -> dict[str, Any]:
        raise NotImplementedError

    def posts(self, port: int, clients: int, bodies: int) -> list[PreparedRequests]:
        """Begin a run for each client and return their requests."""
        runs = [self.begin_run(port) for _ in range(clients)]
        made = [self.bodies(run, bodies, random.Random(run)) for run in runs]
        return [PreparedRequests(port, self.path, self.headers(), each, SAMPLES) for each in made]

    def disk_bytes(self, folder: Path) -> int:
        """Return the bytes of its database, after its end."""
        return sum(file.stat().st_size for file in folder.glob(self.databases))


def started(peer: Peer, folder: Path) -> contextlib.AbstractContextManager[BenchmarkServer]:
    """Start a server."""
    port = free_port()
    return serving(
        peer.command(folder, port), port=port, ready=peer.ready, log=folder / f"{peer.name}.log",
        environment=peer.environment(folder, port),
    )  # fmt: skip


class MeasuredStep(NamedTuple):
    """The measurements of an iteration."""

    iteration: int
    lineage: int
    at: float
    seconds: float
    checkpoint_stall_seconds: float
    data_seconds: float


class HoldfastPeer(Peer):
    """Holdfast, with a token, so that every request is authenticated."""

    name, ready, path, databases = "holdfast", "/readyz", "/api/v1/ingest", "ours.db*"

    def command(self, folder: Path, port: int, database: str = "") -> Sequence[str]:
        database = database or str(folder / "ours.db")
        return [sys.executable, "-m", "holdfast_server", "--port", str(port), "--db", database]

    def environment(self, folder: Path, port: int) -> Mapping[str, str]:
        return {"HOLDFAST_TOKEN": self.token, "HOLDFAST_MAX_JOBS": "1000000"}

    def headers(self) -> dict[str, str]:
        content = "application/msgpack"
        return {"Authorization": f"Bearer {self.token}", "Content-Type": content, "Accept": content}

    def job_of(self, post: PreparedRequests) -> str:
        return str(msgspec.msgpack.decode(post.bodies[0])["job"])

    def bodies(self, run: str, count: int, chance: random.Random) -> list[bytes]:
        outbox = EventQueue(f"run-{run}", run, 1, 0, None)
        made = []
        for number in range(count):
            for step in range(number * STEPS + 1, (number + 1) * STEPS + 1):
                seconds = STEP_SECONDS * chance.uniform(0.95, 1.05)
                measured = MeasuredStep(step, 1, STARTED_AT + step * STEP_SECONDS, seconds, 0.0, 0.01 * seconds)
                outbox.sample((measured, {name: chance.random() for name in METRICS}))
            outbox.seal()
            first = outbox.first()
            assert first is not None
            made.append(first[1])
            outbox.acknowledged(first[0])
        return made


class Rival(Peer):
    def __init__(self, python: Path) -> None:
        self._python = python


class MLflow(Rival):
    """MLflow as `mlflow server` starts it: SQLite, four workers."""

    name, ready, path, databases = "mlflow", "/health", "/api/2.0/mlflow/runs/log-batch", "mlflow.db*"

    def command(self, folder: Path, port: int) -> Sequence[str]:
        store = f"sqlite:///{folder / 'mlflow.db'}"
        return [
            *(str(self._python), "-m", "mlflow", "server", "--backend-store-uri", store),
            *("--artifacts-destination", str(folder / "artifacts"), "--host", "127.0.0.1", "--port", str(port)),
            # else a worker that takes over 5 s to start is killed and restarted forever
            *("--uvicorn-opts", "--timeout-worker-healthcheck 120"),
        ]

    def environment(self, folder: Path, port: int) -> Mapping[str, str]:
        path = f"{self._python.parent}:/usr/local/bin:/usr/bin:/bin"
        return {"PATH": path, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}

    def begin_run(self, port: int) -> str:
        asked = {"experiment_id": "0", "start_time": int(STARTED_AT * 1000)}
        answer = connected(port).ask("/api/2.0/mlflow/runs/create", "POST", json=asked)
        return str(answer.json()["run"]["info"]["run_id"])

    def body(self, run: str, steps: range, chance: random.Random) -> dict[str, Any]:
        metrics = [
            {"key": name, "value": chance.random(), "timestamp": timestamp_ms(step), "step": step}
            for step in steps
            for name in METRICS
        ]
        return {"run_id": run, "metrics": metrics}


def timestamp_ms(step: int) -> int:
    return int(1000 * (STARTED_AT + step * STEP_SECONDS))


class Trackio(Rival):
    """Trackio as `trackio show` starts it, with its write token."""

    name, ready, path, databases = "trackio", "/", "/api/bulk_log", "trackio/*.db*"

    def command(self, folder: Path, port: int) -> Sequence[str]:
        return [str(self._python.parent / "trackio"), "show"]

    def environment(self, folder: Path, port: int) -> Mapping[str, str]:
        settings = {"TRACKIO_DIR": str(folder / "trackio"), "TRACKIO_WRITE_TOKEN": self.token}
        return settings | {"GRADIO_SERVER_PORT": str(port), "HF_HUB_OFFLINE": "1", "BROWSER": "true"}

    def headers(self) -> dict[str, str]:
        return JSON | {"x-trackio-write-token": self.token}

    def body(self, run: str, steps: range, chance: random.Random) -> dict[str, Any]:
        logs = [
            {"project": "benchmark", "run": run[:8], "run_id": run, "step": step, "log_id": f"{run}-{step}",
             "metrics": {name: chance.random() for name in METRICS}}
            for step in steps
        ]  # fmt: skip
        return {"args": [], "kwargs": {"logs": logs, "hf_token": None}}
