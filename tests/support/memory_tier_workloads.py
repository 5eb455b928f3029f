"""Workloads for tests of the memory tier with several ranks: a job that ends, and one that resumes from it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from holdfast.memory_tier.complete_snapshot import complete_snapshots_in
from holdfast.save.shared_buffers import SharedBuffer
from holdfast.store.local import LocalWriter
from holdfast.system import supervisor_channel
from tests.support.exact_multi_rank_job import MultiRankJob

EVERY, FULL_FROM, ENDS_AT = 3, 6, 8
"""A checkpoint at 3 is durable, the one at 6 lies in memory alone."""


def undisturbed(stage: Any, **options: Any) -> Any:
    return MultiRankJob(None, **options).run().log


def ends_and_goes_on(
    stage: Any, store: str, folder: str, *, damage: int | None = None, fails: int | None = None, **options: Any
) -> dict[str, Any]:
    """Both under one supervisor, the one of `folder`, which no rescue is started by.

    `damage`: of this rank's bytes of the newest in memory, one bit is another before the second start.
    `fails`: this rank cannot save its part of it.
    """
    os.environ[supervisor_channel.VARIABLE] = folder
    supervisor_channel.STACKS_SIGNAL = None
    first = MultiRankJob(store, every=EVERY, **options)
    with _full_disk(FULL_FROM):
        for now in first.moments():
            if now == "stepped" and first.session.iteration % EVERY == 0:
                first.session.wait(300)
            if now == "stepped" and first.session.iteration == ENDS_AT:
                break
        first.crash()
    if damage is not None and dist.get_rank() == 0:
        newest, *_ = complete_snapshots_in(Path(folder), "job")
        flip(SharedBuffer(Path(folder), newest.numbers[damage]))
    dist.barrier()
    told: list[str] = []
    second = MultiRankJob(store, every=EVERY, seed=5, **options)
    if fails == dist.get_rank():
        second.session._memory.survivor = _refuse
    second.session._reporter.notice = lambda level, code, text: told.append(f"{code}: {text}")
    start = second.session.resume()
    second.session.wait(300)
    saved = second.session._saver.history.head
    claimed = [arena.slot is not None for arena in second.session._memory.arenas]
    second.run()
    second.session.close()
    return {
        "before": first.log, "log": second.log, "start": start, "told": told, "saved": saved, "claimed": claimed,
    }  # fmt: skip


def apart(stage: Any, store: str, folders: list[str]) -> tuple[list[str], list[bool]]:
    """Run a job whose ranks have different supervisors, or none; return its notices and whether it has memory."""
    told: list[str] = []
    os.environ[supervisor_channel.VARIABLE] = folders[dist.get_rank()]
    supervisor_channel.STACKS_SIGNAL = None
    job = MultiRankJob(store, every=EVERY)
    job.session._reporter.notice = lambda level, code, text: told.append(f"{code}: {text}")
    job.run()
    job.session.close()
    return told, [arena.slot is not None for arena in job.session._memory.arenas]


def _refuse() -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def flip(slot: SharedBuffer) -> None:
    """One bit of what is in memory."""
    fd = slot.open()
    (found,) = os.pread(fd, 1, 0)
    os.pwrite(fd, bytes([found ^ 16]), 0)
    os.close(fd)


@contextlib.contextmanager
def _full_disk(iteration: int) -> Iterator[None]:
    """For checkpoints from `iteration` on."""
    write = LocalWriter.write

    def refuse(writer: LocalWriter, *args: Any, **options: Any) -> None:
        if int(writer._final.name.partition("-")[0]) >= iteration:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(writer, *args, **options)

    with mock.patch.object(LocalWriter, "write", refuse):
        yield
