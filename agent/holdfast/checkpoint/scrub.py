"""Read every byte of a stored checkpoint, and repair in the store what parity allows. Does not import torch."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from holdfast.checkpoint import reading
from holdfast.checkpoint.reading import FileRange, ranges_to_scrub, ranges_to_verify
from holdfast.checkpoint.repair import parity_matches, repair_in_memory
from holdfast.checkpoint.stored_manifest import copies_of, read_stored
from holdfast.errors import DamagedCheckpoint, HoldfastError
from holdfast.format import manifest as fmt
from holdfast.format.encoding import LAYERED
from holdfast.format.important import contents_of
from holdfast.format.parity_stripes import build_parity
from holdfast.protocol.jobs import ScrubState
from holdfast.store import Store, read_manifest
from holdfast.store.base import FileReplacer, Pace

FileState = Literal["repairable", "repaired", "damaged"]
"""`damaged`: it cannot be repaired."""
STATES: tuple[ScrubState, ...] = ("sound", "repaired", "repairable", "damaged")
"""States of a checkpoint, from the best; it has the worst one of its files."""


class DamagedFile(msgspec.Struct, kw_only=True):
    """A damaged file of a checkpoint."""

    file: str
    state: FileState
    damage: str
    """Damaged ranges of the file, in bytes."""
    reason: str | None = None
    """Why it was not repaired, or cannot be."""

    def __str__(self) -> str:
        return f"{self.file} {self.state}: {self.damage}{f'; {self.reason}' if self.reason else ''}"


class ScrubbedCheckpoint(msgspec.Struct, kw_only=True):
    """A checkpoint that was read completely."""

    job: str
    checkpoint: str
    state: ScrubState | Literal["removed", "unreadable"] = "sound"
    """`removed` if retention removed it meanwhile, `unreadable` if the store cannot be read."""
    read_bytes: int = 0
    seconds: float = 0.0
    files: list[DamagedFile] = []
    """The damaged files."""
    reason: str | None = None
    """Why it is unreadable."""


def scrub(
    store: Store,
    job: str,
    checkpoint: str,
    *,
    repair: bool = False,
    pace: Pace | None = None,
    progress: Callable[[int, int], None] = lambda done_bytes, total_bytes: None,
) -> ScrubbedCheckpoint:
    """Read every byte of a checkpoint on its storage device, and list the damage by file.

    Args:
        repair: replace damaged files by what was written, where parity allows it. A repair takes memory of the
            size of the file, and is refused once a newer attempt has begun.
        pace: called with a number of bytes before they are read or written, and may wait.
        progress: called with the bytes read so far and the total.
    """
    work = _Scrub(store, job, checkpoint, repair, pace, progress)
    found = ScrubbedCheckpoint(job=job, checkpoint=checkpoint)
    started = time.monotonic()
    try:
        work.run()
    except (HoldfastError, OSError, MemoryError) as error:
        found.state, found.reason = "unreadable", str(error) or type(error).__name__
    else:
        found.state = max((each.state for each in work.found), key=STATES.index, default="sound")
    found.read_bytes, found.files, found.seconds = work.done_bytes, work.found, time.monotonic() - started
    if found.state != "sound" and checkpoint not in store.checkpoints(job):
        found.state = "removed"
    return found


class _Scrub:
    """One call of `scrub`."""

    def __init__(
        self,
        store: Store,
        job: str,
        checkpoint: str,
        repair: bool,
        pace: Pace | None,
        progress: Callable[[int, int], None],
    ) -> None:
        self._store, self._job, self._checkpoint = store, job, checkpoint
        self._repair, self._pace, self._progress = repair, pace, progress
        self._replacer: FileReplacer | None = None
        self._other: Store | None = None
        """Another store that has a copy of the checkpoint."""
        self.found: list[DamagedFile] = []
        self.done_bytes = self._total_bytes = 0

    def run(self) -> None:
        if self._repair:  # before anything is read: what is read belongs to the checkpoint that it repairs
            self._replacer = self._store.file_replacer(self._job, self._checkpoint)
        try:
            stored = read_stored(self._store, self._job, self._checkpoint)
        except DamagedCheckpoint as error:
            self._add(posixpath.basename(error.file), "damaged", error.reason, "there is no sound copy of it")
            return
        manifest = stored.manifest
        layered = [file for file in manifest.files if file.encoding is not None and file.encoding.codec == LAYERED]
        self._total_bytes = sum(file.stored_bytes for file in manifest.files)
        self._total_bytes += sum(file.raw_bytes for file in layered)
        self._other = self._store.copy_elsewhere(self._job, self._checkpoint)
        for name, data in stored.files.items():
            is_copied = stored.is_copied(name)
            for each in (name, *(copies_of(name) if is_copied else ())):
                self._scrub_manifest(each, data, is_copied=is_copied or self._other is not None)
        for file in manifest.files:
            ranges = ranges_to_scrub(manifest, file)
            is_sound = self._scrub_payload(file, ranges)
            if file.parity is not None:
                self._scrub_parity(manifest, file, ranges, is_payload_known=is_sound)
        if all(each.state == "repaired" for each in self.found):
            for file in layered:
                self._scrub_layered(manifest, file)

    def _scrub_layered(self, manifest: fmt.Manifest, file: fmt.File) -> None:
        """Compare the tensors of a layered file, whose stored files are sound, with their digests."""
        try:
            self._read(list(ranges_to_verify(manifest, file)), keep=False)
        except DamagedCheckpoint as error:
            self._add(file.name, "damaged", error.reason, "its files are as they were written")
        self._advance(file.raw_bytes)

    def _scrub_manifest(self, name: str, data: bytes, *, is_copied: bool) -> None:
        try:
            read = read_manifest(self._store, self._job, self._checkpoint, name, from_disk=True)
        except DamagedCheckpoint as error:
            damage = error.reason
        else:
            if read == data:
                return
            damage = "differs from what was written"
        if is_copied:
            self._replace(name, damage, [data])
        else:
            self._add(name, "damaged", damage, "there is no copy of it")

    def _scrub_payload(self, file: fmt.File, ranges: list[FileRange]) -> bool:
        """Return whether the bytes of a payload file are known: it is sound, or can be repaired."""
        try:
            self._read(ranges, keep=False)
            return True
        except DamagedCheckpoint as error:
            damage = error.reason
        finally:
            self._advance(file.size_bytes)
        if file.parity is None:
            damage = self._damaged_ranges(ranges) or damage
            return self._replace_by_copy(file, ranges, damage, "it has no parity")
        try:
            repaired = repair_in_memory(self._store, self._job, self._checkpoint, file, pace=self._pace)
        except DamagedCheckpoint as error:
            return self._replace_by_copy(file, ranges, damage, error.reason)
        try:
            reading.read(
                *(self._store, self._job, self._checkpoint, ranges),
                open_file=lambda _: repaired.open(), keep=self._repair, threads=1,
            )  # fmt: skip
        except DamagedCheckpoint as error:
            return self._replace_by_copy(file, ranges, repaired.description, repaired.refusal or error.reason)
        self._replace(file.name, repaired.description, _parts(ranges))
        return True

    def _replace_by_copy(self, file: fmt.File, ranges: list[FileRange], damage: str, reason: str) -> bool:
        """Replace a file by its copy elsewhere; without a sound copy, report it as damaged for that reason."""
        if self._other is not None:
            try:
                reading.read(
                    *(self._other, self._job, self._checkpoint, ranges),
                    keep=self._repair, threads=1, pace=self._pace,
                )  # fmt: skip
            except (DamagedCheckpoint, OSError) as error:
                reason = f"{reason}; its copy in {self._other.url} cannot be used: {error}"
            else:
                self._replace(file.name, damage, _parts(ranges))
                return True
        self._add(file.name, "damaged", damage, reason)
        return False

    def _scrub_parity(
        self, manifest: fmt.Manifest, file: fmt.File, ranges: list[FileRange], *, is_payload_known: bool
    ) -> None:
        entry = file.parity
        assert entry is not None
        is_sound = parity_matches(self._store, self._job, self._checkpoint, entry, pace=self._pace)
        self._advance(entry.size_bytes)
        if is_sound:
            return
        damage = "is missing, or differs from what was written"
        if not is_payload_known:
            self._add(entry.name, "damaged", damage, f"{file.name} is damaged as well")
            return
        if not self._repair:
            self._add(entry.name, "repairable", damage)
            return
        if any(each.memory is None for each in ranges):
            self._read(ranges, keep=True)
        rebuilt, now = build_parity(entry.code, file.name, _parts(ranges), contents_of(manifest, file))
        if now != entry:
            self._add(entry.name, "damaged", damage, "this release computes parity differently")
            return
        self._replace(entry.name, damage, [rebuilt])

    def _read(self, ranges: Sequence[FileRange], *, keep: bool) -> None:
        reading.read(
            *(self._store, self._job, self._checkpoint, ranges),
            keep=keep, threads=1, pace=self._pace, progress=lambda done, _: self._show(done),
        )  # fmt: skip

    def _damaged_ranges(self, ranges: Sequence[FileRange]) -> str:
        """Describe the damage to a file without parity, by the ranges that digests cover."""
        found = []
        for each in ranges:
            for covered in each.digests:
                try:
                    self._read([FileRange(each.file, [covered])], keep=False)
                except DamagedCheckpoint as error:
                    found.append(error.reason)
        return "; ".join(dict.fromkeys(found))

    def _replace(self, name: str, damage: str, parts: Sequence[memoryview | bytes]) -> None:
        if self._replacer is None:
            self._add(name, "repairable", damage)
            return
        try:
            self._replacer.replace(name, parts, pace=self._pace)
        except (HoldfastError, OSError) as error:
            self._add(name, "repairable", damage, f"not repaired: {error}")
        else:
            self._add(name, "repaired", damage)

    def _add(self, file: str, state: FileState, damage: str, reason: str | None = None) -> None:
        self.found.append(DamagedFile(file=file, state=state, damage=damage, reason=reason))

    def _advance(self, size_bytes: int) -> None:
        self.done_bytes += size_bytes
        self._show(0)

    def _show(self, more_bytes: int) -> None:
        self._progress(min(self.done_bytes + more_bytes, self._total_bytes), self._total_bytes)


def _parts(ranges: Sequence[FileRange]) -> list[memoryview | bytes]:
    """Return the bytes of a file that was read in `ranges`; nothing if they were not kept."""
    return [each.view(each.digests[0].start, each.digests[-1].end) for each in ranges if each.memory is not None]
