"""What earlier starts under the same supervisor trained, and in which store.

A script may change its working directory with each start, so that a relative store is another directory each time.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from holdfast.distributed.ranks import rank_and_world_size
from holdfast.store import Attempt, Store, is_directory, open_store, open_tiers
from holdfast.system import supervisor_files
from holdfast.system.supervisor_files import StoresOfStart


@dataclass(frozen=True, slots=True)
class EarlierStart:
    """The earlier starts, as one session of this start sees them."""

    job: str
    earlier: StoresOfStart
    store: str | None = None
    """Store of the session of this job at the same place in the script; `None` if there was none."""
    opened: tuple[str, ...] = ()
    """The jobs of the sessions of this start before this one."""
    given: str = ""
    """The store of this session, as the script and its working directory give it."""
    is_moved: bool = False
    """Whether this session uses the store of the earlier one instead."""

    @property
    def iteration(self) -> int:
        """The iteration that the job reached in earlier starts; 0 if that is not known."""
        return self.earlier.reached.get(self.job, 0)

    @property
    def moved(self) -> str | None:
        """Describe the change of the store, if there is one."""
        if not self.is_moved:
            return None
        trained = f"trained to iteration {self.iteration:,}" if self.iteration else "was"
        return (
            f"the last start {trained} in store {self.store}, and this start continues there: its own working "
            f"directory makes the relative store {self.given}. Give the store as an absolute path"
        )

    def missing_history(self, store: Store, uid: str) -> str | None:
        """Return a warning for a start at iteration 0 of a job that an earlier start trained."""
        starts = "training starts at iteration 0"
        if not self.iteration or self.store is None:
            return self._other_job(starts)
        trained = f"the last start trained to iteration {self.iteration:,}"
        if self.store != store.url:
            return (
                f"{starts}, because store {store.url} has no history of the job: {trained} in {self.store}. To "
                "continue it, give that store"
            )
        if all(attempt.uid == uid for attempt in store.records(self.job, Attempt)):
            return f"{starts}: {trained} in store {store.url}, which has no record of it: was the store deleted?"
        return f"{starts}: {trained}, and none of its checkpoints in {store.url} was complete"

    def _other_job(self, starts: str) -> str | None:
        """Return a warning if the last start trained a job of another name that this one has not begun."""
        if self.job in self.earlier.stores or set(self.opened) & self.earlier.stores.keys():
            return None
        others = [(name, iteration) for name, iteration in self.earlier.reached.items() if iteration]
        if not others:
            return None
        name, iteration = others[-1]
        stores = self.earlier.stores.get(name)
        where = f" in {stores[0]}" if stores else ""
        return (
            f"{starts}, and the last start trained job {name} to iteration {iteration:,}{where}: to continue it, "
            "use the same job name in each start"
        )


def open_store_of_start(
    job: str, given: str | os.PathLike[str], drain: str | os.PathLike[str] | None
) -> tuple[Store, EarlierStart]:
    """Open the store of a session, and the one it is copied to; a relative one where the earlier start had it.

    ValueError: one of them is no store.
    """
    store, (rank, _) = open_store(given), rank_and_world_size()
    if drain is not None:
        store = open_tiers(store, drain)
    earlier = supervisor_files.stores_of_earlier_starts(rank)
    place, opened = supervisor_files.opened_stores(job)
    known = earlier.stores.get(job, [])
    before = known[place] if place < len(known) else None
    moved: Store | None = None
    if before is not None and store.url not in known and _is_relative(given):
        with contextlib.suppress(ValueError):  # what is there now is no store: named as missing history
            moved = open_store(before)
    start = EarlierStart(job, earlier, before, opened, store.url, moved is not None)
    store = moved or store
    supervisor_files.publish_store(rank, job, store.url, earlier)
    return store, start


def _is_relative(given: str | os.PathLike[str]) -> bool:
    text = os.fspath(given).removeprefix("file://")
    return is_directory(text) and not Path(text).expanduser().is_absolute()
