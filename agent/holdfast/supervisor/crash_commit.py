"""Make durable what a trainer has left in memory.

    python -m holdfast.supervisor.crash_commit FOLDER TRAINED END UIDS [PID ...]

The supervisor starts it beside the trainer's next start, which does not wait for it: that one reads the memory,
too. When its attempt begins before the rescue has committed, the rescue is fenced and the attempt saves what it
has loaded itself. Imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.checkpoint import restore
from holdfast.errors import DamagedCheckpoint, Fenced, HoldfastError, IncompleteParts
from holdfast.memory_tier.complete_snapshot import CompleteSnapshot, complete_snapshots_in
from holdfast.persist.completion_marker import mapped, verify
from holdfast.persist.task import Task, Written
from holdfast.persist.two_phase_commit import NotPrepared, commit_alone
from holdfast.persist.writer import write_checkpoint
from holdfast.protocol.messages import parse_checkpoint_id
from holdfast.snapshot.shared_buffers import SharedBuffer
from holdfast.store import Attempt, Lineage, Store, open_store
from holdfast.system.processes import become_background_process
from holdfast.system.supervisor_channel import PublishedAttempt, log_line

HELPER_SECONDS = 600.0
"""A helper of the dead trainer is given so long to end: it may be about to commit the same."""


@dataclass(frozen=True, slots=True)
class RescuedCheckpoint:
    """What a rescue made durable."""

    task: Task
    """Of several ranks, rank 0's."""
    size_bytes: int
    """Of all ranks' files."""
    before: int
    """The iteration of the newest durable checkpoint until then, 0 without one."""


def rescue(folder: Path, trained: PublishedAttempt, dead: Collection[str] = ()) -> RescuedCheckpoint | None:
    """Commit the newest whole snapshot in memory, under the attempt that died. None where nothing is to be saved.

    Of several ranks it is whole where all have sealed their parts of it. Nothing is to be saved where it is
    durable already, where something newer is, where training went on from somewhere else, and where another
    attempt has begun.

    Args:
        folder: of the supervisor, with the slots.
        trained: who trained last.
        dead: uids of attempts that have ended too; the last of them may have died before it said anything.

    Raises:
        Fenced: another attempt has begun meanwhile: the trainer's next, as a rule, which saves it itself.
        DamagedCheckpoint: what is there is not what was sealed.
        IncompleteParts, NotPrepared: what ranks have sealed does not belong together.
        OSError: the store cannot take it.
    """
    store, worst = open_store(trained.store), None
    attempts = store.records(trained.job, Attempt)
    if not attempts or attempts[-1].uid not in {trained.uid, *dead}:
        return None
    known = {attempt.uid for attempt in attempts}  # a job by this name may have another store
    for sealed in complete_snapshots_in(folder, trained.job):
        if sealed.task.origin.uid not in known:
            continue
        lineages = store.records(trained.job, Lineage)
        durable = next(iter(restore.lineage_checkpoints(store, trained.job)), None)
        before = parse_checkpoint_id(durable) if durable is not None else (0, 0)
        if not lineages or lineages[-1].number != sealed.position[0] or sealed.position <= before[::-1]:
            return None
        try:
            size_bytes = _save(store, folder, sealed, attempts[-1].number)
        except (DamagedCheckpoint, IncompleteParts, NotPrepared) as error:  # the one before may be sound
            worst = error
            continue
        except FileExistsError:  # a helper of the trainer's was quicker
            return None
        return RescuedCheckpoint(sealed.task, size_bytes, before[0])
    if worst is not None:
        raise worst
    return None


def _save(store: Store, folder: Path, sealed: CompleteSnapshot, attempt: int) -> int:
    """The bytes of all files."""
    with contextlib.ExitStack() as held:
        payloads = []
        for marker in sealed.markers:  # all of them, before a byte of any is written
            payload = held.enter_context(mapped(SharedBuffer(folder, marker.number), marker.size_bytes))
            verify(marker, payload)
            payloads.append(payload)

        def write(task: Task) -> Written:
            rank = task.origin.rank
            known = sealed.markers[rank].part.tensors
            return write_checkpoint(store, task, payloads[rank], known=known)

        tasks = [_of_attempt(marker.task, attempt) for marker in sealed.markers]
        if len(tasks) > 1:
            return commit_alone(store, tasks, write)
        write(tasks[0])
        return sealed.markers[0].part.file.size_bytes


def _of_attempt(task: Task, attempt: int) -> Task:
    origin = msgspec.structs.replace(task.origin, attempt=attempt, folder=None, bytes_per_second=None)
    return msgspec.structs.replace(task, origin=origin, marker=None)


def _report(trained: PublishedAttempt, saved: RescuedCheckpoint, end: str) -> None:
    """On the job's timeline, with the event of any other checkpoint; its log has a line of it."""
    iteration = saved.task.iteration
    gained = f"{iteration - saved.before:,} iterations that no checkpoint held"
    message = f"iteration {iteration:,} was saved out of memory after the trainer ended ({end}): {gained}"
    log_line(message)
    if trained.server:
        from holdfast.supervisor.supervisor_link import report_rescue

        report_rescue(trained, saved.task, saved.size_bytes, message)


def _wait_for_exit(pids: Iterable[int]) -> None:
    """Until these processes have ended."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except OSError:  # it has
            continue
        try:
            select.select([fd], [], [], HELPER_SECONDS)
        finally:
            os.close(fd)


def main(folder: str, trained_json: str, end: str, dead: str, *pids: str) -> None:
    become_background_process()  # a stop signal to all processes of the job must not interrupt the commit
    trained = msgspec.json.decode(trained_json, type=PublishedAttempt)
    _wait_for_exit(map(int, pids))
    try:
        saved = rescue(Path(folder), trained, dead.split(","))
    except Fenced:
        return
    except (OSError, HoldfastError) as error:
        log_line(f"what is in memory was not saved: {error}", logging.WARNING)
        return
    if saved is not None:
        _report(trained, saved, end)


if __name__ == "__main__":
    main(*sys.argv[1:])
