"""Threads of requests by class: a class that is busy does not make another one wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Literal, TypeVar

T = TypeVar("T")

RequestClass = Literal["access", "agents", "answers", "pages", "exports", "accounts", "background"]

THREADS: Mapping[RequestClass, int] = {
    "access": 2,  # who asks, and what they may do: each request needs it
    "agents": 2,  # the desired state that agents wait for
    "answers": 3,  # the API
    "pages": 3,
    "exports": 2,  # parts of files: each keeps a processor busy
    "accounts": 20,  # sign-ins, which wait for their turn to hash a password
    "background": 4,
}
"""Most threads of each class that work at the same time."""
CONNECTIONS = sum(THREADS.values()) - THREADS["accounts"] + 2
"""Connections for reads: a thread reads with one at a time, and those that wait for a password with none."""


class RequestThreads:
    """Runs functions that read or write the database, or compute for long, outside the event loop."""

    def __init__(self) -> None:
        self._pools = {name: ThreadPoolExecutor(count, f"holdfast-{name}") for name, count in THREADS.items()}

    async def run(self, name: RequestClass, work: Callable[[], T]) -> T:
        """Run `work` in a thread of a class, in the caller's context. It continues if the caller is cancelled."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pools[name], copy_context().run, work)

    def close(self) -> None:
        """Give up what has not started."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
