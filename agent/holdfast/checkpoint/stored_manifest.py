"""Read the manifest of a checkpoint from its files and their copies, and write them. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format import manifest_files, soundness
from holdfast.format.manifest_files import M, ManifestFile, ManifestSummary, StoredPart
from holdfast.format.shards import require_complete
from holdfast.protocol.ids import checkpoint_id
from holdfast.store import CheckpointWriter, Store, read_manifest
from holdfast.system import io_pool

T = TypeVar("T")
HEAD_BYTES = 1 << 10
_FORMAT = re.compile(rb'\A\{\s*"format":\s*([0-9]{1,9})\b')
"""The first line of a manifest."""


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A manifest, and the files that it was read from."""

    manifest: fmt.Manifest
    root: ManifestFile
    files: dict[str, bytes]
    """Their bytes by name."""
    damaged: dict[str, str]
    """Files that are damaged, each with the sound copy that was read instead."""

    @property
    def digest(self) -> str:
        """Digest that identifies the content of the checkpoint."""
        return manifest_files.manifest_digest(self.files[fmt.MANIFEST])

    def seen_as(self, change: Callable[[fmt.Manifest], fmt.Manifest]) -> StoredManifest:
        """Return a copy with another manifest, such as the part of a state that one rank holds."""
        return replace(self, manifest=change(self.manifest))

    def is_copied(self, name: str) -> bool:
        """Return whether a file of the manifest has copies; one of a rank has them if its payload has parity."""
        rank = name.partition(".")[0] + "." if name.startswith("rank-") else ""
        return has_copies(file for file in self.manifest.files if file.name.startswith(rank))

    @property
    def damage(self) -> list[str]:
        """A description of the damage to each file that has a sound copy."""
        return [f"{name}: it is damaged, and {copy} is sound" for name, copy in self.damaged.items()]


def copies_of(name: str) -> tuple[str, str]:
    """Return the names of the copies of a file of the manifest, in a checkpoint with parity."""
    stem = name.removesuffix(".json")
    return f"{stem}-copy-1.json", f"{stem}-copy-2.json"


def has_copies(files: Iterable[fmt.File | fmt.FileSummary]) -> bool:
    """Return whether the manifest files of these files have copies, which is so if one of them has parity."""
    return any(file.stored_bytes != file.size_bytes for file in files)


def write_part(writer: CheckpointWriter, name: str, data: bytes, *, copied: bool) -> None:
    """Write a file of the manifest, and its copies. Raises what `CheckpointWriter.write` does."""
    for each in (name, *(copies_of(name) if copied else ())):
        writer.write(each, [data])


def commit(writer: CheckpointWriter, root: ManifestFile, *, replace: bool = False) -> None:
    """Write the copies of a manifest, and commit. Raises what `CheckpointWriter.commit` does."""
    data = manifest_files.encode_manifest(root)
    for name in copies_of(fmt.MANIFEST) if has_copies(root.files) else ():
        writer.write(name, [data])
    writer.commit(data, replace=replace)


def read_stored(store: Store, job: str, checkpoint: str, only: int | None = None) -> StoredManifest:
    """Read and check the manifest of a checkpoint; read a copy of each damaged file.

    Args:
        only: a rank; files and tensors of others, and all states, are then left out.

    Raises:
        UnknownFormat: another version of Holdfast wrote it.
        DamagedCheckpoint: a file has no sound copy, or the manifest contradicts itself.
        OSError: the store cannot be read.
    """
    files, damaged = dict[str, bytes](), dict[str, str]()

    def read(name: str, check: Callable[[bytes, str], T]) -> T:
        source, files[name], found = _read_sound(store, job, checkpoint, name, check)
        if source != name:
            damaged[name] = source
        return found

    root = read(fmt.MANIFEST, partial(_decode, ManifestFile, job, checkpoint))
    parts = manifest_files.parts_of(root, only)
    io_pool.share_out(lambda name: read(name, partial(_require_same, parts[name])), parts, store.read_threads)
    manifest = manifest_files.assemble(root, files, only)
    soundness.require_sound(manifest)
    if only is None:
        require_complete(manifest)
    return StoredManifest(manifest, root, files, damaged)


def read_root(kind: type[M], store: Store, job: str, checkpoint: str) -> M:
    """Read only the manifest's first file, or a copy of it. Raises what `read_stored` does."""
    return _read_sound(store, job, checkpoint, fmt.MANIFEST, partial(_decode, kind, job, checkpoint))[2]


def head_of(store: Store, job: str, checkpoint: str) -> bytes:
    """Read the first lines of a manifest. Raises DamagedCheckpoint when there is none, and OSError."""
    with store.open_file(job, checkpoint, fmt.MANIFEST) as file:
        head = bytearray(min(file.size_bytes, HEAD_BYTES))
        file.read_into(0, memoryview(head))
    return bytes(head)


def has_other_format(store: Store, job: str, checkpoint: str) -> bool:
    """Return whether another version of Holdfast wrote a checkpoint, which is kept. OSError: cannot be read."""
    try:
        named = _FORMAT.match(head_of(store, job, checkpoint))
    except DamagedCheckpoint:
        return False
    return named is not None and int(named[1]) != fmt.FORMAT


def _read_sound(
    store: Store, job: str, checkpoint: str, name: str, check: Callable[[bytes, str], T]
) -> tuple[str, bytes, T]:
    """Return the first of a file and its copies that passes `check`: its name, its bytes, what `check` returns.

    The last copy is that in another store, if there is one.
    """
    damage: DamagedCheckpoint | None = None
    for each in (name, *copies_of(name)):
        try:
            data = read_manifest(store, job, checkpoint, each)
            return each, data, check(data, f"{checkpoint}/{each}")
        except DamagedCheckpoint as error:
            damage = damage or error
    if (other := store.copy_elsewhere(job, checkpoint)) is not None:
        _, data, found = _read_sound(other, job, checkpoint, name, check)
        return f"the copy in {other.url}", data, found
    assert damage is not None
    raise damage


def _require_same(part: StoredPart, data: bytes, file: str) -> None:
    if (len(data), fmt.digest(data)) != (part.size_bytes, part.digest):
        raise DamagedCheckpoint(file, "does not match its digest")


def _decode(kind: type[M], job: str, checkpoint: str, data: bytes, file: str) -> M:
    found = manifest_files.decode_manifest(kind, data, file)
    if (found.job, checkpoint_id(found.iteration, found.lineage)) != (job, checkpoint):
        reason = f"belongs to {found.job}, iteration {found.iteration}, lineage {found.lineage}"
        raise DamagedCheckpoint(file, reason)
    if isinstance(found, ManifestSummary):
        soundness.require_sound_files(found.files)
    return found
