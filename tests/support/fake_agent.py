"""A fake agent for pages: it reports over HTTP like a training job and applies the desired state."""

from __future__ import annotations

import math
import random
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.protocol import ids, wire
from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import Batch, Desired, Samples

Ask = Callable[..., bytes]
"""Sends a path, and a body if there is one; answers with the body of the answer."""

ITERATION_SECONDS = 0.24
CHECKPOINT_BYTES = 102_400_000


@dataclass
class FakeAgent:
    ask: Ask
    job: str = "char-gpt"
    started_at: float = 1_790_000_000.0
    seed: int = 7
    attempt: int = 1
    iteration: int = 0
    lineage: int = 1
    interval: int = 40
    budget: float = 0.035
    paused: bool = False
    interval_seconds: float | None = None
    applied: int = 0
    requested: int = 0
    probed: int = 0
    sequence: int = 0
    supervisor_sequence: int = 1000
    at: float = 0.0
    events: list[wire.Event] = field(default_factory=list)
    samples: Samples = field(default_factory=Samples)
    host: str = "node-3"
    measures_machine: bool = False
    """Whether it reports the use of its machine every 20 iterations."""

    def __post_init__(self) -> None:
        self.at = self.started_at
        self.random = random.Random(self.seed)
        self.machine_random = random.Random(self.seed)
        self.last_checkpoint = 0
        self.open: list[tuple[int, wire.Checkpoint]] = []
        self.highest_lineage = self.lineage

    # ---- what an agent says ------------------------------------------------------------------

    def start(self, previous_exit: str | None = None, resumed_from: str | None = None) -> None:
        self.events.append(
            wire.AttemptStarted(
                at=self.at, iteration=self.iteration, lineage=self.lineage, resumed_from=resumed_from,
                host=self.host, pid=4711, supervised=True, previous_exit=previous_exit,
            )
        )  # fmt: skip
        if self.attempt == 1:
            self.events.append(wire.LineageStarted(at=self.at, lineage=1, iteration=0))

    def loss(self) -> float:
        falling = 1.15 + 3.1 * math.exp(-self.iteration / 700) + 0.35 * math.exp(-self.iteration / 3500)
        return falling + self.random.gauss(0, 0.045)

    def train(self, iterations: int, *, nan_at: range = range(0)) -> None:
        for _ in range(iterations):
            self.iteration += 1
            busy = bool(self.open)
            seconds = ITERATION_SECONDS * (1 + abs(self.random.gauss(0, 0.03)) + (0.035 if busy else 0))
            stall = self._move_checkpoints()
            data = 0.002 if self.random.random() > 0.004 else self.random.uniform(0.1, 0.5)
            if data > 0.05:
                self._stall("data_fetch", data)
            self.at += seconds + stall + data
            loss = math.nan if self.iteration in nan_at else self.loss()
            self._sample(seconds + stall + data, stall, data, loss)
            if self.measures_machine and self.iteration % 20 == 0:
                self.events.append(self.machine())
            if not self.paused and self.iteration - self.last_checkpoint >= self.interval:
                self._checkpoint("scheduled")
            if self.iteration % 60 == 0:
                self.pace()

    def _sample(self, seconds: float, stall: float, data: float, loss: float) -> None:
        self.samples.iteration.append(self.iteration)
        self.samples.lineage.append(self.lineage)
        self.samples.at.append(self.at)
        self.samples.seconds.append(seconds)
        self.samples.stall_seconds.append(stall)
        self.samples.data_seconds.append(data)
        self.samples.metrics.setdefault("loss", []).append(loss)
        self.samples.metrics.setdefault("grad_norm", []).append(abs(self.random.gauss(1.2, 0.3)))

    def machine(self) -> wire.MachineSample:
        uniform = self.machine_random.uniform  # the other samples are the same with and without it
        writes = 410e6 if self.open else 2e6
        return wire.MachineSample(
            at=self.at, lineage=self.lineage, iteration=self.iteration, gpu_share=uniform(0.8, 0.98),
            gpu_memory_bytes=61e9, cpu_share=uniform(0.2, 0.5), process_cpu_cores=3.2,
            memory_bytes=120e9 + uniform(0, 5e9), process_memory_bytes=40e9,
            disk_read_bytes_per_second=uniform(0, 30e6), disk_write_bytes_per_second=writes,
            disk_busy_share=0.9 if self.open else 0.05, network_received_bytes_per_second=3e6,
            network_sent_bytes_per_second=uniform(1e6, 2e6),
        )  # fmt: skip

    def _stall(self, kind: wire.StallKind, seconds: float) -> None:
        self.events.append(
            wire.Stall(at=self.at, iteration=self.iteration, lineage=self.lineage, kind=kind, seconds=seconds)
        )

    def _answer_probe(self) -> None:
        found = "a batch takes 42 ms to load: 30 ms fetching and 12 ms preparing (over 50 batches)"
        self.events.append(
            wire.Notice(
                at=self.at, iteration=self.iteration, lineage=self.lineage, level="info", code="data",
                message=found,
            )
        )  # fmt: skip

    def _checkpoint(self, kind: wire.CheckpointKind) -> wire.Checkpoint:
        self.last_checkpoint = self.iteration
        made = wire.Checkpoint(
            at=self.at, id=checkpoint_id(self.iteration, self.lineage), iteration=self.iteration,
            lineage=self.lineage, kind=kind, state="snapshot", payload_bytes=CHECKPOINT_BYTES,
            snapshot_started_at=self.at,
        )  # fmt: skip
        self.open.append((self.iteration, made))
        self.events.append(made)
        return made

    def _move_checkpoints(self) -> float:
        stall = 0.0
        for begun, made in list(self.open):
            age = self.iteration - begun
            if age == 1:
                stall = self.random.uniform(0.006, 0.05) if self.random.random() > 0.06 else 0.22
                copied = msgspec.structs.replace(
                    made, at=self.at, state="persisting", snapshot_seconds=0.14, stall_seconds=stall,
                    persist_started_at=self.at,
                )  # fmt: skip
                self.open[self.open.index((begun, made))] = (begun, copied)
                self.events.append(copied)
                if stall > 0.04:
                    self._stall("snapshot_wait", stall)
            elif age >= 5 + begun % 4:
                self.open.remove((begun, made))
                failed = begun % 29 == 7
                self.events.append(
                    msgspec.structs.replace(
                        made, at=self.at, state="failed" if failed else "durable", persist_seconds=age * 0.2,
                        durable_iteration=None if failed else self.iteration,
                        reason="no space left on device" if failed else None,
                    )
                )  # fmt: skip
        return stall

    def pace(self) -> None:
        cost = 0.32
        overhead = cost / (self.interval * ITERATION_SECONDS)
        self.events.append(
            wire.IntervalDecision(
                at=self.at, iteration=self.iteration, lineage=self.lineage, policy="checkfreq",
                interval=None if self.paused else self.interval, interval_seconds=self.interval_seconds,
                budget=self.budget,
                predicted_overhead=overhead,
                measured_overhead=max(0.001, overhead + self.random.gauss(0, 0.0016)),
                measured_window_iterations=min(240, self.iteration),
                reason=f"a checkpoint costs {cost * 1e3:.0f} ms: every {self.interval} keeps the budget",
                write_bytes_per_second=20e12 / 86400,
                profile={
                    "iteration_seconds": ITERATION_SECONDS, "update_seconds": 0.02, "snapshot_seconds": 0.14,
                    "persist_seconds": 1.2, "checkpoint_bytes": CHECKPOINT_BYTES, "cost_seconds": cost,
                },
            )
        )  # fmt: skip

    def crash(self, lost: int, how: str = "killed by SIGKILL") -> None:
        """Die, and come back from the newest durable checkpoint."""
        self.send()
        self.open.clear()
        self.iteration -= lost
        self.last_checkpoint = self.iteration
        self.attempt += 1
        self.sequence = 0
        self.at += 9.0
        self.start(previous_exit=how, resumed_from=checkpoint_id(self.iteration, self.lineage))
        self.pace()

    def fail(self, reason: str) -> None:
        """End with an exception."""
        self.events.append(
            wire.AttemptFinished(at=self.at, iteration=self.iteration, lineage=self.lineage, reason=reason)
        )
        self.send()

    def supervise(self, state: wire.SupervisorState, reason: str, *more: wire.Event, **fields: Any) -> None:
        """Report as the supervisor of this agent."""
        self.supervisor_sequence += 1
        batch = Batch(
            job=self.job, uid=f"{self.job}-{self.attempt}", attempt=self.attempt, rank=wire.SUPERVISOR_RANK,
            sequence=self.supervisor_sequence, sent_at=self.at, iteration=self.iteration, lineage=self.lineage,
            events=[wire.SupervisorReport(at=self.at, state=state, reason=reason, **fields), *more],
        )  # fmt: skip
        self.ask("/api/v1/ingest", msgspec.msgpack.encode(batch))

    # ---- desired state --------------------------------------------------------------------------

    def obey(self, desired: Desired) -> None:
        """Apply what is new, restore included, at this boundary."""
        if desired.version <= self.applied:
            return
        self.applied = desired.version
        if desired.budget is not None:
            self.budget = desired.budget
            self.interval = max(1, round(0.32 / (self.budget * ITERATION_SECONDS)))
        self.interval_seconds = desired.interval_seconds
        if desired.interval_seconds is not None:
            self.interval = round(desired.interval_seconds / ITERATION_SECONDS)
        if desired.every is not None:
            self.interval = desired.every
        self.paused = desired.paused
        self.events.append(
            wire.DesiredStateApplied(
                at=self.at, version=desired.version, iteration=self.iteration, lineage=self.lineage
            )
        )
        if desired.checkpoint_request > self.requested:
            self.requested = desired.checkpoint_request
            self._checkpoint("requested")
        if desired.probe_request > self.probed:
            self.probed = desired.probe_request
            self._answer_probe()
        self.pace()
        if desired.restore is not None:
            self.report_order(desired.restore.id, "delivered")
            self.restore(desired.restore)

    def report_order(self, order: str, state: wire.OrderState, **details: object) -> None:
        self.events.append(
            wire.OrderStateChange(
                at=self.at, order=order, state=state, iteration=self.iteration, lineage=self.lineage,
                **details,  # type: ignore[arg-type]
            )
        )  # fmt: skip

    def restore(self, order: wire.RestoreOrder) -> None:
        iteration, _ = ids.parse_checkpoint_id(order.checkpoint)
        self.report_order(order.id, "restoring")
        safety = self._checkpoint("safety")
        self.open.clear()
        self.events.append(
            msgspec.structs.replace(
                safety, state="durable", snapshot_seconds=0.14, stall_seconds=0.14, persist_seconds=0.9,
                durable_iteration=self.iteration,
            )
        )  # fmt: skip
        self.at += 1.3
        self.highest_lineage += 1
        self.iteration, self.lineage, self.last_checkpoint = iteration, self.highest_lineage, iteration
        self.events.append(
            wire.LineageStarted(
                at=self.at, lineage=self.lineage, iteration=iteration, parent=order.checkpoint, order=order.id
            )
        )
        self.report_order(order.id, "restored", seconds=1.3, safety_checkpoint=safety.id)
        self.pace()

    # ---- over HTTP ----------------------------------------------------------------------------

    def send(self) -> wire.Ack:
        self.sequence += 1
        batch = Batch(
            job=self.job, uid=f"{self.job}-{self.attempt}", attempt=self.attempt, rank=0, sequence=self.sequence,
            sent_at=self.at, iteration=self.iteration, lineage=self.lineage,
            samples=self.samples if self.samples.iteration else None, events=self.events,
        )  # fmt: skip
        self.events, self.samples = [], Samples()
        body = self.ask("/api/v1/ingest", msgspec.msgpack.encode(batch))
        return msgspec.msgpack.decode(body, type=wire.Ack)

    def desired(self) -> Desired:
        return msgspec.json.decode(self.ask(f"/api/v1/jobs/{self.job}/desired"), type=Desired)


def over_http(server: str) -> Ask:
    """Talk to a server by its address."""

    def ask(path: str, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"} if body else {}
        with urllib.request.urlopen(urllib.request.Request(server + path, body, headers), timeout=300) as answer:
            return bytes(answer.read())

    return ask


def over_client(client: Any) -> Ask:
    """Talk to an application in this process, through its test client."""

    def ask(path: str, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"} if body else {}
        answer = client.request("POST" if body else "GET", path, content=body, headers=headers)
        assert answer.status_code < 300, answer.text
        return bytes(answer.content)

    return ask
