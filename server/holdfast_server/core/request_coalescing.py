"""Coalescing of identical requests: many open pages of a job share one query."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Any, TypeVar, cast

from holdfast_server.core.bus import ChangeBus

T = TypeVar("T")


class RequestCoalescer:
    """Queries in progress by job and question: at most one of each, and one that waits for its end.

    A request joins the query in progress if the job has not changed since that started. Otherwise its result might
    lack changes that the client knows of: the request joins the next query, which starts when the current one has
    ended. So a request waits for at most two queries.

    The question must contain everything that the result depends on. It does not contain the user, so the result
    must not depend on the user.
    """

    def __init__(self, changes: ChangeBus) -> None:
        self._changes = changes
        self._newest: dict[tuple[str, Hashable], _Run] = {}

    async def answer(self, job: str, question: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `ask`; all who wait for it get the same result or exception."""
        key = (job, question)
        run = self._newest.get(key)
        if run is None or run.change_count not in (None, self._changes.count(job)):
            run = self._newest[key] = _Run(self._changes, job, ask, after=run)
            run.task.add_done_callback(partial(self._forget, key, run))
        # A cancelled request must not cancel the query of the others.
        return cast("T", await asyncio.shield(run.task))

    def _forget(self, key: tuple[str, Hashable], run: _Run, _: asyncio.Task[Any]) -> None:
        if self._newest.get(key) is run:
            del self._newest[key]


class _Run:
    """One query, which starts when an earlier one has ended."""

    def __init__(
        self, changes: ChangeBus, job: str, ask: Callable[[], Awaitable[Any]], *, after: _Run | None
    ) -> None:
        self.change_count: int | None = None
        """Number of changes of the job when the query started; `None` before."""
        before = after.task if after else None
        self.task: asyncio.Task[Any] = asyncio.create_task(self._answer(changes, job, ask, before))

    async def _answer(
        self, changes: ChangeBus, job: str, ask: Callable[[], Awaitable[Any]], after: asyncio.Task[Any] | None
    ) -> Any:
        if after is not None:
            await asyncio.wait([after])
        self.change_count = changes.count(job)
        return await ask()
