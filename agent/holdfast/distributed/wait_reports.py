"""Find the rank that others wait for, directly or by way of each other.

A rank that waits for long, or gives up, reports whom it waited for in the store that all ranks share. A rank that
waits for this one follows the reports, and names the rank at their end.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta

from holdfast.system.io_pool import DaemonPool
from holdfast.torch_internals import default_store

REPORT_SECONDS = 2.0
"""How long to wait for the report of a rank that began to wait at the same time."""
MOST_SECONDS = 8.0
"""Time in which the store has to answer."""
MOST_REPORTS = 8
"""More than there are ranks between any rank and rank 0."""


class WaitReports:
    """Reports of the ranks of one group.

    Args:
        prefix: of the keys in the store, the same on all ranks.
        workers: threads that may be blocked where the store does not answer.
    """

    def __init__(self, prefix: str, rank: int, workers: DaemonPool) -> None:
        self._prefix, self._rank, self._workers = prefix, rank, workers

    def cause(self, event: str, suspect: int | None, *, is_early: bool = False) -> int | None:
        """Report that this rank waits for `suspect`; return the rank that causes it, None if that is not known.

        Args:
            event: what the ranks wait for.
            suspect: None if this rank does not know.
            is_early: the suspect may report only now whom it waits for.
        """
        try:
            return self._workers.submit(lambda: self._find(event, suspect, is_early)).result(MOST_SECONDS)
        except TimeoutError:
            return None

    def _find(self, event: str, suspect: int | None, is_early: bool) -> int | None:
        cause = suspect
        with contextlib.suppress(RuntimeError, ValueError):  # the store is lost, or the script has closed it
            store = default_store()
            store.set(self._key(event, self._rank), "" if suspect is None else str(suspect))
            for _ in range(MOST_REPORTS):
                if cause is None:
                    break
                key = self._key(event, cause)
                if is_early:
                    store.wait([key], timedelta(seconds=REPORT_SECONDS))
                elif not store.check([key]):
                    break
                reported = store.get(key).decode()
                cause = int(reported) if reported else None
        return cause

    def _key(self, event: str, rank: int) -> str:
        return f"{self._prefix}/{event}/{rank}"
