"""Sends a long job to a server, as its agent does."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from benchmarks.harness import connected
from holdfast.protocol import wire
from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import Batch, Samples

JOB = "million"
STEP_SECONDS = 0.25
BATCH_ITERATIONS = 2000
PACED_EVERY = 500
RESTARTS = 6
CHECKPOINT_BYTES = 3_400_000_000
FAILED_EVERY = 97
STALL_SHARE = 0.004
FLEET_ITERATIONS = 60
FLEET_OWNERS = 100
FLEET_SENDERS = 32


class JobReporter:
    """Sends the reports of a job in batches."""

    def __init__(self, port: int, job: str) -> None:
        self.job, self.sequence, self.attempt, self._server = job, 0, 1, connected(port)

    def send(self, at: float, iteration: int, samples: Samples | None, events: list[wire.Event]) -> None:
        self.sequence += 1
        batch = Batch(
            job=self.job, uid=f"{self.job}-{self.attempt}", attempt=self.attempt, rank=0, sequence=self.sequence,
            sent_at=at, iteration=iteration, lineage=1, samples=samples, events=events,
        )  # fmt: skip
        headers = {"Content-Type": "application/msgpack"}
        self._server.ask("/api/v1/ingest", "POST", body=msgspec.msgpack.encode(batch), headers=headers)

    def report(self, run: SyntheticRun, iterations: int, *begun: wire.Event) -> None:
        """Train so many iterations, and send what they report."""
        samples, events = run.train(iterations)
        self.send(run.at, run.iteration, samples, [*begun, *events])


class SyntheticRun:
    """A synthetic training: a falling loss, periodic checkpoints, some waits."""

    def __init__(self, *, every: int, began_at: float, seed: int = 7) -> None:
        self.every, self.at, self.began_at = every, began_at, began_at
        self.iteration, self.attempt = 0, 0
        self._chance = random.Random(seed)

    def start(self, previous_exit: str | None) -> list[wire.Event]:
        self.attempt += 1
        resumed = checkpoint_id(self.iteration, 1) if self.iteration else None
        started = wire.AttemptStarted(
            at=self.at, iteration=self.iteration, lineage=1, previous_exit=previous_exit, resumed_from=resumed
        )
        begun = wire.LineageStarted(at=self.at, lineage=1, iteration=0)
        return [started] if previous_exit else [started, begun]

    def train(self, iterations: int) -> tuple[Samples, list[wire.Event]]:
        samples = Samples()
        events: list[wire.Event] = []
        loss, norm = samples.metrics.setdefault("loss", []), samples.metrics.setdefault("grad_norm", [])
        for _ in range(iterations):
            self.iteration += 1
            stall = self._stalled(events)
            seconds = STEP_SECONDS * self._chance.uniform(0.97, 1.06) + stall
            self.at += seconds
            samples.iteration.append(self.iteration)
            samples.lineage.append(1)
            samples.at.append(self.at)
            samples.seconds.append(seconds)
            samples.stall_seconds.append(stall)
            samples.data_seconds.append(0.002)
            loss.append(1.1 + 3 * math.exp(-self.iteration / 120_000) + self._chance.gauss(0, 0.04))
            norm.append(abs(self._chance.gauss(1.2, 0.3)))
            if self.iteration % self.every == 0:
                events.append(self._checkpoint())
            if self.iteration % PACED_EVERY == 0:
                events.append(self.decision())
        return samples, events

    def _stalled(self, events: list[wire.Event]) -> float:
        if self._chance.random() >= STALL_SHARE:
            return 0.0
        kinds: tuple[wire.StallKind, ...] = ("snapshot_wait", "data_fetch")
        kind, seconds = self._chance.choice(kinds), self._chance.expovariate(4.0)
        events.append(wire.Stall(at=self.at, iteration=self.iteration, lineage=1, kind=kind, seconds=seconds))
        return seconds

    def _checkpoint(self) -> wire.Checkpoint:
        failed = self.iteration // self.every % FAILED_EVERY == 0
        persist = self._chance.uniform(6, 9)
        return wire.Checkpoint(
            at=self.at, id=checkpoint_id(self.iteration, 1), iteration=self.iteration, lineage=1, kind="scheduled",
            state="failed" if failed else "durable", payload_bytes=CHECKPOINT_BYTES, snapshot_started_at=self.at,
            snapshot_seconds=self._chance.uniform(0.3, 0.5), stall_seconds=self._chance.uniform(0.0, 0.05),
            persist_started_at=self.at + 0.5, persist_seconds=persist,
            durable_iteration=None if failed else self.iteration + round(persist / STEP_SECONDS),
            reason="No space left on device" if failed else None,
        )  # fmt: skip

    def decision(self) -> wire.IntervalDecision:
        return wire.IntervalDecision(
            at=self.at, iteration=self.iteration, lineage=1, policy="checkfreq", interval=self.every, budget=0.035,
            predicted_overhead=0.02, measured_overhead=max(0.0, self._chance.gauss(0.02, 0.003)),
            measured_window_iterations=500, reason=f"every {self.every} keeps the budget",
            profile={"iteration_seconds": STEP_SECONDS, "cost_seconds": 0.5, "persist_seconds": 7.5},
        )  # fmt: skip


def fill_fleet(port: int, *, jobs: int, ends_at: float) -> None:
    """Create jobs that have just reported, each with an owner, labels and some checkpoints."""
    with ThreadPoolExecutor(FLEET_SENDERS, "fill") as senders:  # reports of many share a commit
        list(senders.map(partial(_fill_one, port, ends_at), range(jobs)))


def _fill_one(port: int, ends_at: float, number: int) -> None:
    began_at = ends_at - FLEET_ITERATIONS * STEP_SECONDS
    run = SyntheticRun(every=FLEET_ITERATIONS // 3, began_at=began_at, seed=number)
    started, begun = run.start(None)
    assert isinstance(started, wire.AttemptStarted)
    started.owner = f"owner-{number % FLEET_OWNERS}"
    started.labels = {"team": f"team-{number % 7}", "seed": str(number)}
    samples, events = run.train(FLEET_ITERATIONS)
    reporter = JobReporter(port, f"fleet-{number:05d}")
    reporter.send(run.at, run.iteration, samples, [started, begun, *events, run.decision()])


def fill(port: int, *, iterations: int, checkpoints: int, ends_at: float, job: str = JOB) -> SyntheticRun:
    """Create a job of so many iterations with some restarts, which ends about now."""
    began_at = ends_at - iterations * STEP_SECONDS * 1.02
    run, reporter = (
        SyntheticRun(every=max(1, iterations // checkpoints), began_at=began_at),
        JobReporter(port, job),
    )
    restart = max(1, iterations // (RESTARTS + 1) // BATCH_ITERATIONS)
    for number, first in enumerate(range(0, iterations, BATCH_ITERATIONS)):
        begun: list[wire.Event] = []
        if number % restart == 0:
            begun = run.start("killed by SIGKILL" if number else None)
            reporter.attempt, reporter.sequence = run.attempt, 0
        reporter.report(run, min(BATCH_ITERATIONS, iterations - first), *begun)
    return run
