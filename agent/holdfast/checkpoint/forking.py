"""Begin a job with a checkpoint of another one. Knows no torch.

The checkpoint is copied when the fork is made, before anything says that there is one: the new job needs nothing
of the other any more, which may go on, be taken back, or be deleted. In a directory the copy is another name for
the same files and takes no room; in a bucket the server makes it.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator

import msgspec

from holdfast.checkpoint import restore
from holdfast.checkpoint.reading import Progress
from holdfast.errors import DamagedCheckpoint, Fenced, HoldfastError
from holdfast.format import manifest as fmt
from holdfast.protocol.messages import Origin, checkpoint_id, parse_checkpoint_id, validate_job
from holdfast.store import Attempt, Ending, Hold, Lineage, Store, read_manifest

FORK_UID = "fork-"
"""How the attempts are named under which forks are made, and nothing is trained."""
FORKED = "forked"
"""How these end."""


class ForkRefused(HoldfastError):
    """The name is taken, or cannot be one; says why."""


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """A job that begins with a checkpoint of another."""

    job: str
    checkpoint: str
    """Its own copy."""
    iteration: int
    lineage: int
    """That it begins there."""
    origin: Origin
    attempt: int
    uid: str
    """Of the attempt under which it was made."""
    new: bool
    """False: it had been made before."""


def made_before(store: Store, job: str, new: str) -> Fork | None:
    """The fork that `new` is of `job`; None where the name is free.

    Raises:
        ForkRefused: it is another job's.
        OSError: the store cannot be read.
    """
    if validate_job(new) == validate_job(job):
        raise ForkRefused(f"{new} is the job itself: a fork has a name of its own")
    lineages = store.records(new, Lineage)
    first = next((each for each in lineages if each.origin is not None), None)
    if first is not None and first.origin is not None and first.parent is not None:
        if first.origin.job != job:
            raise ForkRefused(f"{new} is a fork already, of {first.origin.job}: choose another name")
        return _fork(new, first.parent, first.number, first.origin, first.attempt, "", new=False)
    trained = [each for each in store.records(new, Attempt) if not each.uid.startswith(FORK_UID)]
    if trained or lineages:
        raise ForkRefused(
            f"{new} is a job of its own in {store.url}, started on {trained[0].host}: choose another name"
            if trained
            else f"{new} is a job of its own in {store.url}: choose another name"
        )
    return None


def fork(store: Store, job: str, checkpoint: str, new: str, *, progress: Progress | None = None) -> Fork:
    """Begin the job `new` at a checkpoint of `job`: its first start goes on from there. Done twice, it is done
    once.

    Raises:
        ForkRefused: the name is taken.
        DamagedCheckpoint: the checkpoint is not what was written, or retention was quicker.
        UnknownFormat: a newer Holdfast wrote it.
        Fenced: somebody else begins a job of this name just now.
        OSError: the store cannot; there is no fork then.
    """
    if (known := _made_from(store, job, checkpoint, new)) is not None:
        return known
    uid = f"{FORK_UID}{uuid.uuid4().hex}"
    with _held(store, job, checkpoint, uid):
        found = restore.verify(store, job, checkpoint, progress=progress)
        digest = fmt.manifest_digest(read_manifest(store, job, checkpoint))
        origin = Origin(job=job, checkpoint=checkpoint, digest=digest)
        # to read it whole takes minutes: a job that took the name meanwhile is not to be fenced
        if (known := _made_from(store, job, checkpoint, new)) is not None:
            return known
        attempt = store.acquire_attempt(new, uid)
        _copy(store, found, origin, new, attempt)
    lineage = parse_checkpoint_id(checkpoint)[1] + 1
    store.append(
        new,
        Lineage(
            number=lineage, iteration=found.iteration, parent=checkpoint, order=None, attempt=attempt.number,
            created_at=time.time(), origin=origin,
        ),
    )  # fmt: skip
    with contextlib.suppress(OSError, Fenced):  # what follows knows it for a fork without
        store.append(new, Ending(attempt=attempt.number, reason=FORKED, iterations=0, at=time.time()))
    return _fork(new, checkpoint, lineage, origin, attempt.number, uid, new=True)


def _made_from(store: Store, job: str, checkpoint: str, new: str) -> Fork | None:
    """`made_before`, from this checkpoint. ForkRefused: the name is taken."""
    known = made_before(store, job, new)
    if known is not None and known.origin.checkpoint != checkpoint:
        raise ForkRefused(f"{new} is a fork of {job} already, from {known.origin.checkpoint}: choose another name")
    return known


def _copy(store: Store, found: fmt.Manifest, origin: Origin, new: str, attempt: Attempt) -> None:
    """Unless an earlier try came so far."""
    name = checkpoint_id(found.iteration, found.lineage)
    for there in store.checkpoints(new):
        if there != name or restore.manifest(store, new, there).origin != origin:
            raise ForkRefused(
                f"a fork from another checkpoint was begun under the name {new}: choose another name"
            )
        return
    writer = store.begin(new, name, attempt.number, 0)
    try:
        for file in found.files:
            writer.adopt(origin.job, origin.checkpoint, file.name)
        # what came before it on its lineage is in the other job
        own = msgspec.structs.replace(found, job=new, attempt=attempt.number, parent=None, origin=origin)
        writer.commit(fmt.encode_manifest(own))
    except BaseException:  # on Ctrl-C, too, nothing half-made stays
        writer.abort()
        raise


@contextlib.contextmanager
def _held(store: Store, job: str, checkpoint: str, uid: str) -> Iterator[None]:
    """Retention of a job that goes on meanwhile leaves the checkpoint, where its note can be made."""
    if checkpoint not in store.checkpoints(job):
        raise DamagedCheckpoint(f"{checkpoint}/{fmt.MANIFEST}", "there is no such checkpoint")
    hold = Hold(uid=uid, checkpoint=checkpoint, at=time.time())
    with contextlib.suppress(PermissionError):  # somebody else's job, which may be read: it is tried all the same
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
