"""Commit the newest snapshot that a dead trainer left in shared memory.

    python -m holdfast.supervisor.crash_commit FOLDER ATTEMPT END UIDS

The supervisor runs this process while it restarts the trainer, which reads the same memory and does not wait for
the commit. If the new attempt begins first, this process is fenced, and that attempt saves the state that it
loaded. Imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.checkpoint import restore
from holdfast.errors import DamagedCheckpoint, Fenced, HoldfastError, IncompleteParts
from holdfast.memory_tier.complete_snapshot import CompleteSnapshot, complete_snapshots_in
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.save.completion_marker import mapped, verify
from holdfast.save.draft import Draft
from holdfast.save.run import NotPrepared
from holdfast.save.shared_buffers import SharedBuffer
from holdfast.save.two_phase_commit import commit_alone
from holdfast.save.writer import write_checkpoint
from holdfast.store import Attempt, Lineage, Store, open_store
from holdfast.system.processes import become_background_process
from holdfast.system.supervisor_channel import PublishedAttempt
from holdfast.system.supervisor_files import log_line


@dataclass(frozen=True, slots=True)
class RescuedCheckpoint:
    """A checkpoint committed from memory."""

    draft: Draft
    """The draft of rank 0."""
    size_bytes: int
    """Size of the files of all ranks."""
    before: int
    """Iteration of the newest durable checkpoint before this one, 0 if there was none."""


def rescue(folder: Path, trained: PublishedAttempt, dead: Collection[str] = ()) -> RescuedCheckpoint | None:
    """Commit the newest complete snapshot in memory, under the attempt that died.

    A snapshot of several ranks is complete if each rank has written a completion marker.

    Args:
        folder: folder of the supervisor, which contains the shared buffers.
        trained: the attempt that trained last.
        dead: uids of further attempts that have ended; the last one may have died before it published itself.

    Returns:
        The committed checkpoint, or `None` if it or a newer one is durable, training has continued on another
        lineage, or another attempt has begun.

    Raises:
        Fenced: another attempt began, usually that of the restarted trainer, which saves the state itself.
        DamagedCheckpoint: the memory does not match the digests of its marker.
        IncompleteParts, NotPrepared: the parts do not belong to one checkpoint.
        OSError: the store cannot be written to.
    """
    store, worst = open_store(trained.store), None
    attempts = store.records(trained.job, Attempt)
    if not attempts or attempts[-1].uid not in {trained.uid, *dead}:
        return None
    known = {attempt.uid for attempt in attempts}  # a job by this name may have another store
    for sealed in complete_snapshots_in(folder, trained.job):
        if sealed.draft.uid not in known:
            continue
        lineages = store.records(trained.job, Lineage)
        durable = next(iter(restore.lineage_checkpoints(store, trained.job)), None)
        before = parse_checkpoint_id(durable) if durable is not None else (0, 0)
        if not lineages or lineages[-1].number != sealed.position[0] or sealed.position <= before[::-1]:
            return None
        try:
            size_bytes = _save(store, folder, sealed, attempts[-1].number)
        except (DamagedCheckpoint, IncompleteParts, NotPrepared) as error:  # try the next older one
            worst = error
            continue
        except FileExistsError:  # the rescue of an earlier start committed it first
            return None
        return RescuedCheckpoint(sealed.draft, size_bytes, before[0])
    if worst is not None:
        raise worst
    return None


def _save(store: Store, folder: Path, sealed: CompleteSnapshot, attempt: int) -> int:
    """Verify and commit the parts of all ranks. Return the size of all files."""
    with contextlib.ExitStack() as held:
        payloads = []
        for marker in sealed.markers:  # verify all before writing any
            payload = held.enter_context(mapped(SharedBuffer(folder, marker.number), marker.draft.size_bytes))
            verify(marker, payload)
            payloads.append(payload)

        def write(draft: Draft) -> Draft:
            return write_checkpoint(store, draft, payloads[draft.rank])

        drafts = [msgspec.structs.replace(marker.draft, attempt=attempt, folder=None) for marker in sealed.markers]
        files = commit_alone(store, drafts, write) if len(drafts) > 1 else write(drafts[0]).files
        return sum(file.size_bytes for file in files)


def _report(trained: PublishedAttempt, saved: RescuedCheckpoint, end: str) -> None:
    """Log the checkpoint, and report it to the server for the job's timeline."""
    iteration = saved.draft.iteration
    gained = f"{iteration - saved.before:,} iterations that were in no checkpoint"
    message = f"saved iteration {iteration:,} from memory after the trainer ended ({end}): {gained}"
    log_line(message)
    if trained.server:
        from holdfast.supervisor.supervisor_link import report_rescue

        report_rescue(trained, saved.draft, saved.size_bytes, message)


def main(folder: str, attempt_json: str, end: str, dead: str) -> None:
    become_background_process()  # a stop signal to all processes of the job must not interrupt the commit
    trained = msgspec.json.decode(attempt_json, type=PublishedAttempt)
    try:
        saved = rescue(Path(folder), trained, dead.split(","))
    except Fenced:
        return
    except (OSError, ValueError, HoldfastError) as error:  # ValueError: what is there now is no store
        log_line(f"the snapshot in memory was not saved: {error}", logging.WARNING)
        return
    if saved is not None:
        _report(trained, saved, end)


if __name__ == "__main__":
    main(*sys.argv[1:])
