"""Simulation of restore orders with a real database and store, and agents that can be killed, stopped and cut off.

The server's handling of orders, the agent's `Operator` and the store are real. The clock, the network and the
steps of a training loop are simulated: between any two steps, a kill, a stop or another agent may come.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from holdfast.engine.coordination import Requests
from holdfast.engine.operator import Operator
from holdfast.engine.startup import ordered
from holdfast.errors import Fenced
from holdfast.pacing import Controller, PacingSettings
from holdfast.protocol.ids import checkpoint_id, parse_checkpoint_id
from holdfast.protocol.jobs import Order
from holdfast.protocol.wire import (
    AttemptStarted,
    Batch,
    Checkpoint,
    Desired,
    Event,
    LineageStarted,
    RestoreOrder,
)
from holdfast.retention import Retention
from holdfast.store import Lineage
from holdfast.store.local import LocalStore
from holdfast.system.files import Files
from holdfast.telemetry.reporter import Reporter, TrainingPosition
from holdfast_server import models
from holdfast_server.control import control
from holdfast_server.core.errors import NotCancellable, OpenOrder
from holdfast_server.db import Database
from holdfast_server.ingest import batches, transaction
from holdfast_server.records import restore_orders
from tests.support import ram_disk

ITERATIONS = (10, 20, 30)
"""Iterations of the checkpoints that orders restore."""
START = 1_790_000_000.0


class NoSyncFiles(Files):
    """Files without fsync of directories: the simulation has no power cuts."""

    def sync_directory(self, path: Path) -> None: ...


class SimulationEnvironment:
    """A database, shared by many simulations."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="holdfast-", dir=ram_disk.place(256 << 20))
        self.db = Database(str(Path(self.folder.name, "holdfast.db")))
        self.db.prepare()
        self.db.open()
        self.worlds = 0

    def close(self) -> None:
        self.db.close()
        self.folder.cleanup()


@dataclass
class PendingBatches:
    """Batches of an agent that are not delivered yet."""

    job: str
    uid: str
    number: int
    batches: list[bytes] = field(default_factory=list)
    written: int = 0

    def write(self, event: Event, standing: TrainingPosition, at: float) -> None:
        batch = Batch(
            job=self.job, uid=self.uid, attempt=self.number, rank=0, sequence=self.written, sent_at=at,
            iteration=standing.iteration, lineage=standing.lineage, events=[event],
        )  # fmt: skip
        self.written += 1
        self.batches.append(msgspec.msgpack.encode(batch))


class PendingBatchReporter(Reporter):
    """Reporter that puts events into `PendingBatches`, at the simulated time."""

    def __init__(
        self, world: RestoreOrderSimulation, standing: TrainingPosition, outgoing: PendingBatches
    ) -> None:
        super().__init__(world.job, standing, quiet=True)
        self._world, self._outgoing = world, outgoing

    def event(self, event: Event) -> None:
        self._outgoing.write(event, self.position, self._world.now)


class SimulatedAgent:
    """One attempt. `doing` is the current step of its training thread; without one it trains."""

    def __init__(self, world: RestoreOrderSimulation) -> None:
        self.world = world
        first = world.desired() if world.connected else None
        self.uid = f"uid-{len(world.agents)}"
        at_least = first.latest_attempt + 1 if first else 1
        wanted = first.restore.id if first and first.restore else None
        self.number = world.store.acquire_attempt(world.job, self.uid, at_least, order=wanted).number
        self.standing = TrainingPosition(iteration=0, lineage=0)
        self.outgoing = PendingBatches(world.job, self.uid, self.number)
        self.reporter = PendingBatchReporter(world, self.standing, self.outgoing)
        history: Any = SimpleNamespace(store=world.store, job=world.job, attempt=self.number)
        retention: Any = SimpleNamespace(
            protect=lambda *_: None, follow=lambda *_: None, change=lambda _: None
        )  # fmt: skip
        shares: Any = SimpleNamespace(follow=lambda _: None)
        controller = Controller(PacingSettings())
        self.operator = Operator(
            history, retention, controller, self.reporter, Requests(), PacingSettings(), shares,
            rules=Retention.keeping(12), clock=lambda: world.now,
        )  # fmt: skip
        self.operator.start(first)
        self.alive, self.awake = True, True
        self.doing: Iterator[None] | None = self._starts()

    @property
    def acts(self) -> bool:
        return self.alive and self.awake

    def hear(self) -> None:
        """Receive the desired state, as the answer to a long poll."""
        self.operator.receive(self.world.desired())

    def step(self) -> None:
        """Continue the current step, or run to the next iteration boundary."""
        if self.doing is None:
            self.doing = self._boundary()
        if next(self.doing, "done") == "done":
            self.doing = None

    def _starts(self) -> Iterator[None]:
        order = self.operator.restore_at_start()
        if order is not None:
            self.world.taken(order)
            yield
            self.reporter.order(order.id, "restoring")
            yield
            if not self._begins_lineage(order):
                return
        else:
            lineages = self.world.store.records(self.world.job, Lineage)
            if lineages:  # it goes on along the newest one, from where that began at least
                self.standing.lineage, self.standing.iteration = lineages[-1].number, lineages[-1].iteration
            elif not self._begins_lineage(None):
                return
        for lineage in ordered(self.world.store, self.world.job):
            self._tell(lineage)
        yield
        self.reporter.event(
            AttemptStarted(at=self.world.now, iteration=self.standing.iteration, lineage=self.standing.lineage)
        )
        if order is not None:
            yield
            self.reporter.order(order.id, "restored")

    def _boundary(self) -> Iterator[None]:
        self.standing.iteration += 1
        self.operator.follow()
        order = self.operator.restore()
        if order is None:
            return
        self.operator.accept(order.id)
        self.world.taken(order)
        self.reporter.order(order.id, "restoring")
        yield
        try:
            with self.world.store.fenced(self.world.job, self.number):
                safety = checkpoint_id(self.standing.iteration, self.standing.lineage)
        except Fenced:
            return
        yield
        if self.world.breaks:
            self.reporter.order(order.id, "failed", reason="a digest is wrong")
            return
        if not self._begins_lineage(order):
            return
        yield
        self.reporter.order(order.id, "restored", seconds=1.0, safety=safety)

    def _begins_lineage(self, order: RestoreOrder | None) -> bool:
        """Append the lineage record. The restore takes effect with it."""
        store, job = self.world.store, self.world.job
        number = max((lineage.number for lineage in store.records(job, Lineage)), default=0) + 1
        iteration = parse_checkpoint_id(order.checkpoint)[0] if order is not None else 0
        lineage = Lineage(
            number=number, iteration=iteration, parent=order.checkpoint if order is not None else None,
            order=order.id if order is not None else None, attempt=self.number, created_at=self.world.now,
        )  # fmt: skip
        try:
            store.append(job, lineage)
        except Fenced:
            return False
        if order is not None:
            self.world.noted.append((order, self.number))
        self.standing.lineage, self.standing.iteration = number, iteration
        self._tell(lineage)
        return True

    def _tell(self, lineage: Lineage) -> None:
        self.reporter.event(
            LineageStarted(
                at=self.world.now, lineage=lineage.number, iteration=lineage.iteration, parent=lineage.parent,
                order=lineage.order,
            )
        )  # fmt: skip


class RestoreOrderSimulation:
    """One job on a server, the operators who place orders, and all its attempts."""

    def __init__(self, ground: SimulationEnvironment) -> None:
        ground.worlds += 1
        self.ground, self.db = ground, ground.db
        self.job = f"job-{ground.worlds}"
        self.store = LocalStore(Path(ground.folder.name, "store"), NoSyncFiles())
        self.now = START
        self.connected = True
        self.breaks = False
        """Checkpoints cannot be verified."""
        self.agents: list[SimulatedAgent] = []
        self.noted: list[tuple[RestoreOrder, int]] = []
        """Which orders were carried out, by which attempt."""
        self.placed: list[Order] = []
        self.ways: dict[str, list[str]] = {}
        """The states that each order was seen to have gone through."""
        self._introduce()

    def _introduce(self) -> None:
        """The server learns of the checkpoints from an attempt that is over."""
        outgoing, standing = PendingBatches(self.job, "before", 0), TrainingPosition(iteration=30, lineage=0)
        for iteration in ITERATIONS:
            known = Checkpoint(
                at=START, id=checkpoint_id(iteration, 0), iteration=iteration, lineage=0, kind="scheduled",
                state="durable",
            )  # fmt: skip
            outgoing.write(known, standing, START)
        for body in outgoing.batches:
            self.ingest(body)

    # ---- operators

    def click(self, iteration: int, key: str, expires_seconds: float | None) -> None:
        self.attempted(
            control.order_restore, checkpoint=checkpoint_id(iteration, 0), iteration=None, key=key, who="alice",
            expires_seconds=expires_seconds,
        )  # fmt: skip

    def attempted(self, what: Callable[..., Any], **wish: Any) -> None:
        try:
            order, new = what(self.db, self.job, now=self.now, **wish)
        except OpenOrder:
            return
        assert new is all(order.id != known.id for known in self.placed)
        if new:
            self.placed.append(order)

    def cancel(self, order: Order) -> None:
        try:
            control.cancel_restore(self.db, self.job, order.id, who="bob", now=self.now)
        except NotCancellable:
            return

    # ---- server

    def desired(self) -> Desired:
        return control.desired(self.db, self.job, now=self.now)

    def ingest(self, body: bytes) -> None:
        received = batches.decode(body, "msgpack", now=self.now)
        with contextlib.suppress(transaction.Superseded):  # a newer attempt has replaced the agent
            asyncio.run(transaction.store(self.db, received, now=self.now))

    def watch(self) -> None:
        restore_orders.check_timeouts(self.db, self.now)

    def orders(self) -> list[Order]:
        from holdfast_server.queries import timeline
        from holdfast_server.queries.job_view import view_job

        with view_job(self.db, self.job, now=self.now) as view:
            return timeline.orders(view, limit=200)

    def state_of(self, order: str) -> str:
        with self.db.read() as session:
            return session.get_one(models.RestoreOrderRecord, order).state

    # ---- agents

    def start(self) -> SimulatedAgent:
        self.agents.append(SimulatedAgent(self))
        return self.agents[-1]

    def taken(self, order: RestoreOrder) -> None:
        """An agent is about to carry it out."""
        known = next(known for known in self.orders() if known.id == order.id)
        assert known.expires_at is not None
        if self.now >= known.expires_at:
            before = {step.state for step in known.transitions}
            assert before & {"restoring", "unknown"}, "an expired order was taken up for the first time"

    def deliver(self, agent: SimulatedAgent, *, twice: bool = False) -> None:
        """The next of what an agent, or the spool of a dead one, has to say."""
        body = agent.outgoing.batches[0]
        self.ingest(body)
        if twice:
            self.ingest(body)
        agent.outgoing.batches.pop(0)
