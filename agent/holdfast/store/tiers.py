"""A directory for new checkpoints, and a store behind it that gets copies of some of them.

A checkpoint is durable once it is in the directory. `holdfast.checkpoint.draining` copies it later. A reader takes
the directory's copy where there is one, and else the one behind.

Records are those of the directory. A start takes over the records that only the store behind has, and becomes the
newest attempt there as well, so that it fences other machines. Where the store behind does not answer, it does so
before the first copy.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from typing import Any, NoReturn

import msgspec

from holdfast.errors import HoldfastError
from holdfast.format.manifest import MANIFEST
from holdfast.format.manifest_files import ManifestSummary, decode_manifest
from holdfast.protocol.field_types import MAX_ATTEMPT
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.protocol.wire import CopyPlace
from holdfast.store.base import CheckpointWriter, FileReader, FileReplacer, Leftover, Store, read_manifest
from holdfast.store.local import LocalStore
from holdfast.store.records import FOLDERS, LAST_COUNTS, Attempt, Ending, Lineage, R, RecordedValue

logger = logging.getLogger("holdfast")

RETRY_SECONDS = 60.0
"""How long a store behind that did not answer is not asked again for a list."""


class TwoHistories(HoldfastError):
    """The directory and the store behind it hold different histories of a job."""


class TieredStore(Store):
    """A `Store` of two: new checkpoints go to `near`, and `far` has copies. For any thread."""

    takes_descriptors = True

    def __init__(self, near: LocalStore, far: Store) -> None:
        self.near, self.far = near, far
        self.url = f"{near.url}+{far.url if '://' in far.url else f'file://{far.url}'}"
        self.read_threads, self.shares_files = near.read_threads, near.shares_files
        self._copied: dict[str, set[str]] = {}
        """The checkpoints of a job that `far` has, once they have been listed."""
        self._silence: tuple[float, OSError] | None = None
        """Why `far` did not answer, and until when it is not asked again."""
        self._without_history: set[str] = set()
        """Jobs of which `near` had no record when this process began an attempt while `far` did not answer."""

    # What is where

    @property
    def addresses(self) -> list[str]:
        return [self.near.url, self.far.url]

    def resident(self, job: str) -> list[str]:
        return self.near.checkpoints(job)

    def copies(self, job: str) -> dict[str, CopyPlace]:
        try:
            copied, resident = self.copied(job), set(self.resident(job))
        except OSError:
            return {}
        return {each: "both" if each in resident else "behind" for each in copied}

    def copied(self, job: str) -> set[str]:
        """Return the checkpoints that `far` has. OSError when it does not answer."""
        if job not in self._copied:
            if self._silence is not None and time.monotonic() < self._silence[0] and not self._is_unknown(job):
                raise self._silence[1]
            try:
                self._copied[job] = set(self.far.checkpoints(job))
            except OSError as error:
                self._silence = time.monotonic() + RETRY_SECONDS, error
                raise
        return self._copied[job]

    def note_copied(self, job: str, checkpoint: str, *, copied: bool = True) -> None:
        """Note that another process has copied a checkpoint, or that a copy is gone."""
        if job in self._copied:
            (self._copied[job].add if copied else self._copied[job].discard)(checkpoint)

    def checkpoints(self, job: str) -> list[str]:
        found = set(self.near.checkpoints(job))
        try:
            found |= self.copied(job)
        except OSError:
            if self._is_unknown(job):
                raise  # the job may have been trained on another machine
        return sorted(found, key=parse_checkpoint_id)

    def _is_unknown(self, job: str) -> bool:
        """Return whether only the store behind can tell if the job has been trained."""
        return job in self._without_history or not self.near.latest_attempt(job)

    def jobs(self) -> list[str]:
        return sorted({*self.near.jobs(), *self.far.jobs()})

    def places(self, job: str, checkpoint: str) -> list[str]:
        is_far, is_near = checkpoint in self.copies(job), checkpoint in self.resident(job)
        return [store.url for store, holds in ((self.near, is_near), (self.far, is_far)) if holds]

    def copy_elsewhere(self, job: str, checkpoint: str) -> Store | None:
        with contextlib.suppress(OSError):
            if self._holder(job, checkpoint) is self.near and checkpoint in self.copied(job):
                return self.far
        return None

    def _holder(self, job: str, checkpoint: str) -> Store:
        if self.near.files.stat(self.near.path(job, checkpoint) / MANIFEST) is not None:
            return self.near
        try:
            return self.far if checkpoint in self.copied(job) else self.near
        except OSError:
            if self.near.files.stat(self.near.path(job, checkpoint)) is not None:
                return self.near
            raise

    # Checkpoints

    def free_bytes(self) -> int | None:
        return self.near.free_bytes()

    def total_bytes(self) -> int | None:
        return self.near.total_bytes()

    def open_file(self, job: str, checkpoint: str, file: str, *, from_disk: bool = False) -> FileReader:
        return self._holder(job, checkpoint).open_file(job, checkpoint, file, from_disk=from_disk)

    def begin(self, job: str, checkpoint: str, attempt: int, size_bytes: int) -> CheckpointWriter:
        return self.near.begin(job, checkpoint, attempt, size_bytes)

    def join(self, job: str, checkpoint: str, attempt: int, folder: str, size_bytes: int) -> CheckpointWriter:
        try:
            return self.near.join(job, checkpoint, attempt, folder, size_bytes)
        except FileNotFoundError as error:
            reason = (
                f"{error.strerror}. The local disk of each host cannot be drained: give a directory that all "
                "hosts share"
            )
            raise OSError(errno.ENOENT, reason, error.filename) from error

    def file_replacer(self, job: str, checkpoint: str) -> FileReplacer:
        return self._holder(job, checkpoint).file_replacer(job, checkpoint)

    def delete(self, job: str, checkpoint: str, attempt: int) -> None:
        """Remove the copy in the directory; one that is only behind is removed there."""
        holder = self._holder(job, checkpoint)
        holder.delete(job, checkpoint, attempt)
        if holder is self.far:
            self.note_copied(job, checkpoint, copied=False)

    def leftovers(self, job: str) -> list[Leftover]:
        return self.near.leftovers(job)

    def remove_leftover(self, job: str, name: str) -> None:
        self.near.remove_leftover(job, name)

    # Attempts and records

    def acquire_attempt(self, job: str, uid: str, at_least: int = 1, *, order: str | None = None) -> Attempt:
        is_known = bool(self.near.latest_attempt(job))
        number = max(at_least, self.near.latest_attempt(job) + 1)
        try:
            number = self.begin_behind(job, uid, number, order=order)
        except OSError as error:
            if not is_known:
                self._without_history.add(job)
            logger.warning(
                "%s: %s does not answer (%s): checkpoints stay in %s until it does",
                *(job, self.far.url, error.strerror or error, self.near.url),
            )
        else:
            self._without_history.discard(job)
            self._copied.pop(job, None)
        return self.near.acquire_attempt(job, uid, number, order=order)

    def begin_behind(self, job: str, uid: str, number: int, *, order: str | None = None) -> int:
        """Make the two histories one, and become the newest attempt behind; return its number, at least `number`.

        Raises:
            TwoHistories: another machine has trained the job since they were one, and so has this one.
            OSError: one of the stores failed.
        """
        self._join_histories(job)
        self.share_records(job)
        return self.far.acquire_attempt(job, uid, number, order=order).number

    def share_records(self, job: str) -> None:
        """Add the records of the directory that are missing behind. OSError when one of the stores fails."""
        there = {each.number for each in self.far.records(job, Lineage)}
        for lineage in self.near.records(job, Lineage):
            if lineage.number not in there:
                self._create(self.far, job, f"{FOLDERS[Lineage]}/{self.far.record_name(lineage)}", lineage)
        ended = {each.attempt for each in self.far.records(job, Ending)}
        for ending in self.near.records(job, Ending):
            if ending.attempt not in ended:
                self._create(self.far, job, f"{FOLDERS[Ending]}/{ending.attempt:08d}.json", ending)
        self._share_values(job, self.near, self.far)
        for kind in LAST_COUNTS:
            here, there = _newest(self.near, job, kind), _newest(self.far, job, kind)
            if here not in (None, there) and here.attempt >= self.far.latest_attempt(job):
                self.far.append(job, here)

    def _join_histories(self, job: str) -> None:
        mine = {each.number: each.uid for each in self.near.records(job, Attempt)}
        theirs = self.far.records(job, Attempt)
        common = max((each.number for each in theirs if mine.get(each.number) == each.uid), default=0)
        newer = [each for each in theirs if each.number > common]
        lineages = self.far.records(job, Lineage)
        own = [each for each in self.near.records(job, Lineage) if each not in lineages]
        if newer:
            for checkpoint in reversed(self.near.checkpoints(job)):
                if self._attempt_of(job, checkpoint) > common:
                    self._refuse(job, newer[-1], checkpoint)
            names = {f"{FOLDERS[Lineage]}/{self.near.record_name(each)}" for each in own}
            self.near.remove_records(job, names)  # of starts from which no checkpoint is left
        for attempt in newer:
            self._create(self.near, job, f"{FOLDERS[Attempt]}/{self.near.record_name(attempt)}", attempt)
        known = {each.number for each in self.near.records(job, Lineage)}
        for lineage in lineages:
            if lineage.number not in known:
                self._create(self.near, job, f"{FOLDERS[Lineage]}/{self.near.record_name(lineage)}", lineage)
        ended = {each.attempt for each in self.near.records(job, Ending)}
        for ending in self.far.records(job, Ending):
            if ending.attempt not in ended:
                self._create(self.near, job, f"{FOLDERS[Ending]}/{ending.attempt:08d}.json", ending)
        self._share_values(job, self.far, self.near)
        for kind in LAST_COUNTS:
            here, there = _newest(self.near, job, kind), _newest(self.far, job, kind)
            if there is not None and (here is None or here.attempt < there.attempt):
                self._create(self.near, job, f"{FOLDERS[kind]}/{there.attempt:08d}-000001.json", there)

    def _share_values(self, job: str, source: Store, target: Store) -> None:
        """Add the recorded changes of values that are missing in a store; those of the newest attempt count."""
        there = {each.number: each.attempt for each in target.records(job, RecordedValue)}
        for value in source.records(job, RecordedValue):
            name = f"{FOLDERS[RecordedValue]}/{value.number:08d}.json"
            if there.get(value.number, value.attempt) < value.attempt:
                target.remove_records(job, [name])
            if there.get(value.number, -1) < value.attempt:
                self._create(target, job, name, value)

    def _attempt_of(self, job: str, checkpoint: str) -> int:
        """Return the attempt that wrote a checkpoint in the directory; a damaged one may be of any."""
        try:
            data = read_manifest(self.near, job, checkpoint)
            return decode_manifest(ManifestSummary, data, f"{checkpoint}/{MANIFEST}").attempt
        except HoldfastError:
            return MAX_ATTEMPT

    def _refuse(self, job: str, other: Attempt, newest: str) -> NoReturn:
        raise TwoHistories(
            f"{job} was trained on {other.host} (attempt {other.number} in {self.far.url}) and, since they last "
            f"agreed, here (to {newest} in {self.near.url}): the two histories conflict. To continue from "
            f"{self.far.url}, move {self.near.root / job} away; to continue from here, give the job another name, "
            "or drain it to another address"
        )

    def _create(self, store: Store, job: str, name: str, record: msgspec.Struct) -> None:
        store.prepare(job)
        with contextlib.suppress(FileExistsError):
            store.create_record(job, name, msgspec.json.encode(record))

    def latest_attempt(self, job: str) -> int:
        return self._records_of(job).latest_attempt(job)

    def records(self, job: str, kind: type[R], since: int = 0) -> list[R]:
        return self._records_of(job).records(job, kind, since)

    def append(self, job: str, record: Any) -> None:
        self.near.append(job, record)

    def read_record(self, job: str, name: str) -> bytes:
        return self.near.read_record(job, name)

    def fenced(self, job: str, attempt: int) -> contextlib.AbstractContextManager[None]:
        return self.near.fenced(job, attempt)

    def record_files(self, job: str, folder: str) -> list[str]:
        return list(self.near.record_files(job, folder))

    def create_record(self, job: str, name: str, data: bytes) -> None:
        self.near.create_record(job, name, data)

    def remove_records(self, job: str, names: Any) -> None:
        self.near.remove_records(job, names)

    def prepare(self, job: str) -> None:
        self.near.prepare(job)

    def _records_of(self, job: str) -> Store:
        """Return the store whose records of a job count: that behind where the job has never run here."""
        if self.near.latest_attempt(job):
            return self.near
        try:
            return self.far if self.far.latest_attempt(job) else self.near
        except OSError:
            return self.near


def _newest(store: Store, job: str, kind: type[Any]) -> Any:
    """Return the only record of a kind that counts, or `None`."""
    return next(iter(store.records(job, kind)), None)
