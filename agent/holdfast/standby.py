"""A supervisor and its server: what happened to the trainer is told there, and orders are waited for.

Imported when there is something to tell, never while a trainer starts: it opens connections and takes memory.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from holdfast.link.client import Client, NoAnswer, Refused
from holdfast.link.listener import Listener
from holdfast.link.wishes import Wishes
from holdfast.protocol import SUPERVISOR_RANK, Batch, Desired, Notice, RestoreOrder
from holdfast.supervision import Trained

logger = logging.getLogger("holdfast")

TELL_SECONDS = 10.0
MOST_TEXT = 4000
"""Of a notice; the server keeps no more."""


class Told:
    """What a supervisor says to the server, under the name of the attempt that it watched over."""

    def __init__(self) -> None:
        self._sequences: dict[str, int] = {}

    def tell(
        self,
        trained: Trained,
        iteration: int,
        level: Literal["info", "warning", "error"],
        code: str,
        message: str,
    ) -> bool:
        """Whether a server has it. Never raises."""
        if not trained.server:
            return False
        at, sequence = time.time(), self._sequences.get(trained.uid, 0)
        self._sequences[trained.uid] = sequence + 1
        notice = Notice(
            at=at, iteration=iteration, lineage=trained.lineage, level=level, code=code,
            message=message[:MOST_TEXT],
        )  # fmt: skip
        batch = Batch(
            job=trained.job, uid=trained.uid, attempt=trained.attempt, rank=SUPERVISOR_RANK, sequence=sequence,
            sent_at=at, iteration=iteration, lineage=trained.lineage, events=[notice],
        )  # fmt: skip
        client = Client(trained.server, os.environ.get("HOLDFAST_TOKEN"))
        try:
            client.ingest(msgspec.msgpack.encode(batch), sequence, limit_seconds=TELL_SECONDS)
        except (NoAnswer, Refused) as error:
            logger.debug("the server was not told: %s", error)
            return False
        finally:
            client.close()
        return True


class Waiting:
    """Hears of restore orders for a job that is not running.

    Args:
        trained: the job; ValueError for a server whose address is none.
        wake: called by a background thread when an order has come.
        done: orders that starts have been made for already.
    """

    def __init__(self, trained: Trained, wake: Callable[[], None], done: set[str]) -> None:
        assert trained.server is not None
        self._wake, self._done = wake, done
        self.order: RestoreOrder | None = None
        """The one that came."""
        client = Client(trained.server, os.environ.get("HOLDFAST_TOKEN"))
        self._listener = Listener(client, trained.job, Wishes(self._heard))
        self._listener.start()

    def close(self) -> None:
        self._listener.close()
        self._listener.join(TELL_SECONDS)

    def _heard(self, desired: Desired) -> None:
        order = desired.restore
        self.order = None if order is None or order.id in self._done else order
        if self.order is not None:
            self._wake()
