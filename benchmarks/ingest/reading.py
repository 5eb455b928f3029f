"""Query times of a long run and of a large fleet."""

from __future__ import annotations

import random
import sqlite3
from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks.harness import BenchmarkServer
from holdfast.protocol.wire import AttemptFinished, AttemptStarted, Batch

from .load import PreparedRequests, post_all
from .peers import METRICS, STARTED_AT, STEPS, HoldfastPeer, MLflow, timestamp_ms

POINTS = 1200
"""Points across a wide screen."""
AT_ONCE = 4
MLFLOW_POINTS = 2500
"""The number of points that MLflow's page requests."""


def long_run(ours: HoldfastPeer, server: BenchmarkServer, iterations: int) -> tuple[str, list[int]]:
    """Send a job of so many iterations and ten metrics, as its agent does.

    Return its name, and the memory of the server before and after each tenth of it.
    """
    (whole,) = ours.posts(server.port, 1, iterations // STEPS)
    memory, tenth = [server.pss_bytes()], len(whole.bodies) // 10
    for start in range(0, len(whole.bodies), tenth):
        post_all([replace(whole, bodies=whole.bodies[start : start + tenth])], 600)
        memory.append(server.pss_bytes())
    return ours.job_of(whole), memory


def mlflow_run(mlflow: MLflow, port: int, folder: Path, iterations: int) -> str:
    """Create a run with one metric of so many steps in the database: to send them would take minutes."""
    run, chance = mlflow.begin_run(port), random.Random(1)
    rows = ((METRICS[0], chance.random(), timestamp_ms(n), n, 0, run) for n in range(1, iterations + 1))
    into = sqlite3.connect(folder / "mlflow.db", timeout=60)
    with into:
        columns = "key, value, timestamp, step, is_nan, run_uuid"
        into.executemany(f"INSERT INTO metrics ({columns}) VALUES (?, ?, ?, ?, ?, ?)", rows)
        last = (METRICS[0], 0.5, int(1000 * STARTED_AT), iterations, 0, run)
        into.execute(f"INSERT INTO latest_metrics ({columns}) VALUES (?, ?, ?, ?, ?, ?)", last)
    into.close()
    return run


def timeline_path(job: str, *, metric: str | None) -> str:
    """`None`: all metrics."""
    only = "" if metric is None else f"&metric={metric}"
    return f"/api/v1/jobs/{job}/timeline?points={POINTS}{only}"


def mlflow_path(run: str) -> str:
    asked = f"run_ids={run}&metric_key={METRICS[0]}&max_results={MLFLOW_POINTS}"
    return f"/ajax-api/2.0/mlflow/metrics/get-history-bulk-interval?{asked}"


def many_jobs(ours: HoldfastPeer, port: int, names: list[str]) -> None:
    """Create a job for each name: one in ten trains, the others have ended, as in an old fleet.

    Several are sent at a time, so that they share commits.
    """
    begun = AttemptStarted(at=STARTED_AT, iteration=0, lineage=1)
    ended = AttemptFinished(at=STARTED_AT, iteration=0, lineage=1, reason="finished")
    bodies = [
        msgspec.msgpack.encode(
            Batch(
                job=name, uid=f"uid-{name}", attempt=1, rank=0, sequence=0, sent_at=STARTED_AT, iteration=0,
                lineage=1, events=[begun, ended] if number % 10 else [begun],
            )
        )
        for number, name in enumerate(names)
    ]  # fmt: skip
    clients = [bodies[start::AT_ONCE] for start in range(AT_ONCE)]
    post_all([PreparedRequests(port, ours.path, ours.headers(), made, 0) for made in clients], 600)
