"""Begin a new job from a checkpoint of another job. Does not import torch.

The checkpoint is copied before the fork is recorded, so that the new job does not depend on the other job, which
may continue, be restored or be deleted. In a directory the copy consists of hard links and takes no space; in a
bucket the storage server makes it.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator

import msgspec

from holdfast.checkpoint import restore
from holdfast.checkpoint.reading import Progress
from holdfast.checkpoint.stored_manifest import StoredManifest, commit, read_stored, write_part
from holdfast.errors import DamagedCheckpoint, Fenced, HoldfastError
from holdfast.format import manifest as fmt
from holdfast.protocol.ids import checkpoint_id, parse_checkpoint_id, validate_job
from holdfast.protocol.wire import Origin
from holdfast.store import Attempt, Ending, Hold, Lineage, Store
from holdfast.store.records import FORK_UID

"""Prefix of the uids of attempts that create a fork and do not train."""
FORKED = "forked"
"""The reason with which these attempts end."""


class ForkRefused(HoldfastError):
    """The name of a fork is taken or invalid."""


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """A job that begins with a checkpoint of another job."""

    job: str
    checkpoint: str
    """The copy of the checkpoint in the new job."""
    iteration: int
    lineage: int
    """The lineage that begins with it."""
    origin: Origin
    attempt: int
    uid: str
    """The uid of the attempt that made the fork."""
    new: bool
    """This call made it; False if it existed."""


def existing_fork(store: Store, job: str, new: str) -> Fork | None:
    """Return the fork of `job` named `new`, or None when the name is free. Raises ForkRefused and OSError."""
    if validate_job(new) == validate_job(job):
        raise ForkRefused(f"{new} is the job itself: choose another name for the fork")
    lineages = store.records(new, Lineage)
    first = next((each for each in lineages if each.origin is not None), None)
    if first is not None and first.origin is not None and first.parent is not None:
        if first.origin.job != job:
            raise ForkRefused(f"{new} is already a fork of {first.origin.job}: choose another name")
        return _fork(new, first.parent, first.number, first.origin, first.attempt, "", new=False)
    trained = [each for each in store.records(new, Attempt) if not each.uid.startswith(FORK_UID)]
    if trained or lineages:
        raise ForkRefused(
            f"{new} is another job in {store.url}, started on {trained[0].host}: choose another name"
            if trained
            else f"{new} is another job in {store.url}: choose another name"
        )
    return None


def fork(store: Store, job: str, checkpoint: str, new: str, *, progress: Progress | None = None) -> Fork:
    """Begin the job `new` at a checkpoint of `job`, from which its first start resumes. Idempotent.

    Raises:
        ForkRefused: the name is taken.
        DamagedCheckpoint: the checkpoint differs from what was written, or retention has removed it.
        UnknownFormat: a newer Holdfast wrote it.
        Fenced: another process begins a job of this name.
        OSError: the store failed; no fork was made.
    """
    if (known := _made_from(store, job, checkpoint, new)) is not None:
        return known
    uid = f"{FORK_UID}{uuid.uuid4().hex}"
    with _held(store, job, checkpoint, uid):
        found = restore.verify(store, job, checkpoint, progress=progress)
        stored = read_stored(store, job, checkpoint)
        origin = Origin(job=job, checkpoint=checkpoint, digest=stored.digest)
        # verification takes minutes: do not fence a job that has taken the name since
        if (known := _made_from(store, job, checkpoint, new)) is not None:
            return known
        attempt = store.acquire_attempt(new, uid)
        _copy(store, stored, origin, new, attempt)
    lineage = parse_checkpoint_id(checkpoint)[1] + 1
    store.append(
        new,
        Lineage(
            number=lineage, iteration=found.iteration, parent=checkpoint, order=None, attempt=attempt.number,
            created_at=time.time(), origin=origin, inexact=found.inexact, left_out=found.left_out,
        ),
    )  # fmt: skip
    with contextlib.suppress(OSError, Fenced):  # optional: the uid identifies the attempt of a fork
        store.append(new, Ending(attempt=attempt.number, reason=FORKED, iterations=0, at=time.time()))
    return _fork(new, checkpoint, lineage, origin, attempt.number, uid, new=True)


def _made_from(store: Store, job: str, checkpoint: str, new: str) -> Fork | None:
    """Return the existing fork from this checkpoint. ForkRefused when the name is taken."""
    known = existing_fork(store, job, new)
    if known is not None and known.origin.checkpoint != checkpoint:
        raise ForkRefused(f"{new} is already a fork of {job}, from {known.origin.checkpoint}: choose another name")
    return known


def _copy(store: Store, stored: StoredManifest, origin: Origin, new: str, attempt: Attempt) -> None:
    """Copy the checkpoint, unless an earlier try has copied it."""
    found = stored.manifest
    name = checkpoint_id(found.iteration, found.lineage)
    for there in store.checkpoints(new):
        if there != name or restore.manifest(store, new, there).origin != origin:
            raise ForkRefused(f"a fork named {new} from another checkpoint was begun before: choose another name")
        return
    writer = store.begin(new, name, attempt.number, 0)
    try:
        for file in found.files:
            writer.copy_file(origin.job, origin.checkpoint, file.name)
            if file.parity is not None:
                writer.copy_file(origin.job, origin.checkpoint, file.parity.name)
        for part, data in stored.files.items():
            if part != fmt.MANIFEST:
                write_part(writer, part, data, copied=stored.is_copied(part))
        # its parent is in the other job
        commit(
            writer,
            msgspec.structs.replace(stored.root, job=new, attempt=attempt.number, parent=None, origin=origin),
        )
    except BaseException:  # also on Ctrl-C
        writer.abort()
        raise


@contextlib.contextmanager
def _held(store: Store, job: str, checkpoint: str, uid: str) -> Iterator[None]:
    """Keep retention from removing the checkpoint, where the store is writable."""
    if checkpoint not in store.checkpoints(job):
        raise DamagedCheckpoint(f"{checkpoint}/{fmt.MANIFEST}", "there is no such checkpoint")
    hold = Hold(uid=uid, checkpoint=checkpoint, at=time.time())
    with contextlib.suppress(PermissionError):  # a read-only job of another user
        store.append(job, hold)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            store.remove_record(job, hold.name)


def _fork(job: str, checkpoint: str, lineage: int, origin: Origin, attempt: int, uid: str, *, new: bool) -> Fork:
    return Fork(
        job=job, checkpoint=checkpoint, iteration=parse_checkpoint_id(checkpoint)[0], lineage=lineage,
        origin=origin, attempt=attempt, uid=uid, new=new,
    )  # fmt: skip
