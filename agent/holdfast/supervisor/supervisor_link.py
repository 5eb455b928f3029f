"""A supervisor and its server: what happened to the trainer is told there, and orders are waited for.

Imported when there is something to tell, never while a trainer starts: it opens connections and takes memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from typing import Literal

from holdfast.persist.task import Task
from holdfast.protocol.messages import (
    RESCUE_RANK,
    SUPERVISOR_RANK,
    Batch,
    Checkpoint,
    Desired,
    Event,
    Notice,
    RestoreOrder,
)
from holdfast.server_link.desired_state_poller import DesiredStatePoller
from holdfast.server_link.http_client import AgentClient, send_once
from holdfast.system.supervisor_channel import Trained

TELL_SECONDS = 10.0
LAST_WORD = 1 << 40
"""A number beyond those of the dead attempt's own reports: what a rescue says of a checkpoint came after them."""
MOST_TEXT = 4000
"""Of a notice; the server keeps no more."""


class Told:
    """What a supervisor says to the server, under the name of the attempt that it watched over."""

    def __init__(self, rank: int = SUPERVISOR_RANK, first: int = 0) -> None:
        self._rank, self._first = rank, first
        self._sequences: dict[str, int] = {}

    def tell(
        self,
        trained: Trained,
        iteration: int,
        level: Literal["info", "warning", "error"],
        code: str,
        *messages: str,
    ) -> bool:
        """Whether a server has them. Never raises."""
        at = time.time()
        notices = (
            Notice(at=at, iteration=iteration, lineage=trained.lineage, level=level, code=code, message=each)
            for each in (message[:MOST_TEXT] for message in messages)
        )
        return self.send(trained, iteration, *notices)

    def send(self, trained: Trained, iteration: int, *events: Event) -> bool:
        """The same, of any events."""
        if not trained.server:
            return False
        sequence = self._sequences.get(trained.uid, self._first)
        self._sequences[trained.uid] = sequence + 1
        batch = Batch(
            job=trained.job, uid=trained.uid, attempt=trained.attempt, rank=self._rank, sequence=sequence,
            sent_at=time.time(), iteration=iteration, lineage=trained.lineage, events=list(events),
        )  # fmt: skip
        return send_once(trained.server, os.environ.get("HOLDFAST_TOKEN"), batch, TELL_SECONDS)


def tell_of_rescue(trained: Trained, task: Task, payload_bytes: int, message: str) -> None:
    """A checkpoint that came out of memory when its attempt was dead. Never raises."""
    Told(RESCUE_RANK, LAST_WORD).send(
        trained,
        task.iteration,
        Checkpoint(
            at=time.time(), id=task.id, iteration=task.iteration, lineage=task.lineage,
            kind=task.kind,
            state="durable", payload_bytes=payload_bytes, durable_iteration=task.iteration,
            snapshot_started_at=task.created_at, snapshot_seconds=task.timings.get("snapshot_seconds"),
            stall_seconds=task.timings.get("stall_seconds"),
        ),
        Notice(
            at=time.time(), iteration=task.iteration, lineage=task.lineage, level="warning", code="rescue",
            message=message,
        ),
    )  # fmt: skip


class Waiting:
    """Hears of restore orders for a job that is not running.

    Args:
        trained: the job; ValueError for a server whose address is none.
        wake: called by a background thread when an order has come.
        done: orders that enough starts have been made for already.
    """

    def __init__(self, trained: Trained, wake: Callable[[], None], done: Collection[str]) -> None:
        assert trained.server is not None
        self._wake, self._done = wake, done
        self.order: RestoreOrder | None = None
        """The one that came."""
        client = AgentClient(trained.server, os.environ.get("HOLDFAST_TOKEN"))
        self._poller = DesiredStatePoller(client, trained.job, self._heard)
        self._poller.start()

    def close(self) -> None:
        self._poller.close()
        self._poller.join(TELL_SECONDS)

    def _heard(self, desired: Desired) -> None:
        order = desired.restore
        self.order = None if order is None or order.id in self._done else order
        if self.order is not None:
            self._wake()
