"""Many open pages of one job ask the same at the same moment: it is found out once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Any, TypeVar, cast

from holdfast_server.core.bus import LocalBus

T = TypeVar("T")


class Shared:
    """Answers under way, by job and question, of each at most one, and one that waits for its end.

    Who asks while an answer is under way is told that one as long as the job has not changed since it was begun.
    Otherwise it may lack what they know already: they share the next one, which begins when it has ended. However
    many ask and however often the job changes, nobody waits for more than these two.

    What an answer depends on must be in the question; who asks is not, so no answer may depend on that.
    """

    def __init__(self, changes: LocalBus) -> None:
        self._changes = changes
        self._newest: dict[tuple[str, Hashable], _Run] = {}

    async def answer(self, job: str, question: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` finds; all who wait for it are told the same, or raised what it raises."""
        key = (job, question)
        run = self._newest.get(key)
        if run is None or run.told not in (None, self._changes.told(job)):
            run = self._newest[key] = _Run(self._changes, job, ask, after=run)
            run.task.add_done_callback(partial(self._forget, key, run))
        # One who leaves does not take the answer from the others.
        return cast("T", await asyncio.shield(run.task))

    def _forget(self, key: tuple[str, Hashable], run: _Run, _: asyncio.Task[Any]) -> None:
        if self._newest.get(key) is run:
            del self._newest[key]


class _Run:
    """One finding out, which begins when another has ended."""

    def __init__(
        self, changes: LocalBus, job: str, ask: Callable[[], Awaitable[Any]], *, after: _Run | None
    ) -> None:
        self.told: int | None = None
        """How often the job had changed when it began; None: it has not begun."""
        before = after.task if after else None
        self.task: asyncio.Task[Any] = asyncio.create_task(self._answer(changes, job, ask, before))

    async def _answer(
        self, changes: LocalBus, job: str, ask: Callable[[], Awaitable[Any]], after: asyncio.Task[Any] | None
    ) -> Any:
        if after is not None:
            await asyncio.wait([after])
        self.told = changes.told(job)
        return await ask()
