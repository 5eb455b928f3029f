"""Copy a checkpoint from a directory to the store behind it, and read the copy back. Does not import torch.

A separate process does it, so that training neither pays for the transfer nor fails with a disk under a mapped
file: `python -m holdfast.checkpoint.draining STORE JOB CHECKPOINT BYTES_PER_SECOND` prints a `DrainResult`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import time
from collections.abc import Iterator

import msgspec

from holdfast.checkpoint import reading, restore
from holdfast.checkpoint.reading import RateLimiter, ranges_to_scrub
from holdfast.checkpoint.stored_manifest import copies_of, read_stored
from holdfast.errors import DamagedCheckpoint, Fenced, HoldfastError
from holdfast.format import manifest as fmt
from holdfast.store import Attempt, CheckpointWriter, open_store
from holdfast.store.base import Pace
from holdfast.store.tiers import TieredStore, TwoHistories
from holdfast.system.io_pool import lower_cpu_priority
from holdfast.system.process_facts import die_with_parent
from holdfast.system.processes import raise_oom_score


class DrainResult(msgspec.Struct, kw_only=True):
    """The outcome of one copy."""

    sent_bytes: int = 0
    """Bytes that went over the network; the storage server copies files that an earlier copy has."""
    seconds: float = 0.0
    problem: str | None = None
    is_final: bool = False
    """No later copy of this attempt can succeed: another machine has begun the job."""


def drain(store: TieredStore, job: str, checkpoint: str, *, pace: Pace | None = None) -> int:
    """Copy a checkpoint of the newest attempt, unless there is a sound copy; return the bytes that were sent.

    Raises:
        DamagedCheckpoint: it differs from what was written, here or behind; no copy of it is left behind.
        Fenced, TwoHistories: another machine has begun the job.
        OSError: one of the stores failed; no copy was made.
    """
    attempt = store.near.records(job, Attempt)[-1]
    if store.far.latest_attempt(job) < attempt.number:
        store.begin_behind(job, attempt.uid, attempt.number, order=attempt.order)
    else:
        store.share_records(job)
    there = store.far.checkpoints(job)
    if checkpoint in there:
        with contextlib.suppress(DamagedCheckpoint):
            restore.verify(store.far, job, checkpoint, pace=pace)
            return 0
    sent_bytes, linked = _copy(store, job, checkpoint, attempt.number, there, pace)
    try:
        _verify_copy(store, job, checkpoint, linked, pace)
    except DamagedCheckpoint:
        store.far.delete(job, checkpoint, attempt.number)
        raise
    return sent_bytes


def _copy(
    store: TieredStore, job: str, checkpoint: str, attempt: int, there: list[str], pace: Pace | None
) -> tuple[int, set[str]]:
    """Return the bytes that were sent, and the files that were not, since the store behind copied them."""
    stored = read_stored(store.near, job, checkpoint)
    if stored.damage:
        raise DamagedCheckpoint(checkpoint, "; ".join(stored.damage))
    found, root = stored.manifest, stored.files[fmt.MANIFEST]
    linkable, linked, sent_bytes = _linkable(store, job, found, checkpoint, there), set[str](), len(root)
    writer = store.far.begin(job, checkpoint, attempt, sum(file.stored_bytes for file in found.files))
    try:
        for each in (part for file in found.files for part in _parts_of(file)):
            if _linked(writer, job, linkable.get(each), each):
                linked.add(each)
            else:
                with _mapped(store, job, checkpoint, each) as whole:
                    writer.write(each, [whole], pace=pace)
                    sent_bytes += len(whole)
        for name, data in stored.files.items():
            for each in (name, *(copies_of(name) if stored.is_copied(name) else ())):
                if each != fmt.MANIFEST:
                    writer.write(each, [data], pace=pace)
                    sent_bytes += len(data)
        writer.commit(root, replace=checkpoint in there)
    except BaseException:  # also on Ctrl-C
        writer.abort()
        raise
    return sent_bytes, linked


def _verify_copy(store: TieredStore, job: str, checkpoint: str, linked: set[str], pace: Pace | None) -> None:
    """Read back what was sent. Compare only sizes for files of the earlier copy, which were read back then.

    Raises DamagedCheckpoint, OSError.
    """
    stored = read_stored(store.far, job, checkpoint)
    for name in stored.damaged:
        raise DamagedCheckpoint(f"{checkpoint}/{name}", "is damaged")
    ranges = []
    for file in stored.manifest.files:
        if linked.issuperset(_parts_of(file)):
            with store.far.open_file(job, checkpoint, file.name, from_disk=True) as opened:
                fmt.check_size(file, opened.size_bytes)
        else:
            ranges += ranges_to_scrub(stored.manifest, file)
    reading.read(store.far, job, checkpoint, ranges, keep=False, pace=pace)


def _parts_of(file: fmt.File) -> list[str]:
    return [file.name, *([file.parity.name] if file.parity is not None else [])]


def _linkable(
    store: TieredStore, job: str, found: fmt.Manifest, checkpoint: str, there: list[str]
) -> dict[str, str]:
    """Return the files that the newest copy in the store behind also has, by digest, and the name of that copy."""
    earlier = next((each for each in reversed(there) if each != checkpoint), None)
    if earlier is None or not any(file.written_by for file in found.files):
        return {}
    with contextlib.suppress(HoldfastError):
        other = restore.manifest(store.far, job, earlier)
        known = {(file.name, file.written_by or earlier): _digests(other, file) for file in other.files}
        shared = [
            file
            for file in found.files
            if known.get((file.name, file.written_by or checkpoint)) == _digests(found, file)
        ]
        return {name: earlier for file in shared for name in _parts_of(file)}
    return {}


def _digests(manifest: fmt.Manifest, file: fmt.File) -> list[str]:
    """Return the digests of all stored bytes of a file."""
    return [covered.digest for each in ranges_to_scrub(manifest, file) for covered in each.digests]


def _linked(writer: CheckpointWriter, job: str, earlier: str | None, file: str) -> bool:
    if earlier is not None:
        with contextlib.suppress(OSError, DamagedCheckpoint):  # it is then sent
            writer.copy_file(job, earlier, file, only_link=True)
            return True
    return False


@contextlib.contextmanager
def _mapped(store: TieredStore, job: str, checkpoint: str, file: str) -> Iterator[memoryview | bytes]:
    near = store.near
    fd = near.files.open(near.path(job, checkpoint) / file)
    try:
        if not os.fstat(fd).st_size:
            yield b""
            return
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as whole:
            yield whole
    finally:
        near.files.close(fd)


def main(url: str, job: str, checkpoint: str, bytes_per_second: str) -> None:
    if sys.platform == "linux":
        die_with_parent()
    lower_cpu_priority()
    raise_oom_score()
    store, started = open_store(url), time.monotonic()
    assert isinstance(store, TieredStore)
    result = DrainResult()
    try:
        result.sent_bytes = drain(store, job, checkpoint, pace=RateLimiter(float(bytes_per_second)))
    except (HoldfastError, OSError) as error:
        result.problem = str(error) or type(error).__name__
        result.is_final = isinstance(error, (Fenced, TwoHistories))
    result.seconds = time.monotonic() - started
    print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
