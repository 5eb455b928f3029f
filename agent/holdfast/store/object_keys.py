"""The layout of a job in a bucket, and which of its objects count.

    <job>/<checkpoint>/<attempt, 8 digits>/rank-0.safetensors, manifest.json    one folder per write
    <job>/attempts/<number, 8 digits>-<uid>.json, and the same with .seen.json
    <job>/endings/<attempt, 8 digits>.json
    <job>/lineages/<number, 6 digits>-<attempt, 8 digits>.json
    <job>/holds/<uid>.json

The server must guarantee only that a PUT is atomic, and that a LIST that begins after a PUT or a DELETE has ended
shows it. Fencing follows from the order of operations:

    a new attempt    puts its record, lists the job, and puts all that counts then in its `seen` record
    a writer         puts its manifest, and only then checks that there is no newer attempt

An object counts when the newest `seen` names it, or when its attempt is not older than that `seen`.

If a writer finds no newer attempt after its manifest was put, any newer attempt puts its record later and lists
the job later still: its `seen` names the manifest, and so does each `seen` after it. What was reported durable
stays. If the writer finds a newer attempt, or stalls before it checks, it reports nothing. Whether its manifest
was in time for the list is recorded in the `seen` permanently, however late the manifest arrives. An attempt that
dies before it puts its `seen` decides nothing: it has fenced earlier attempts, and the next one lists what there
is. An attempt that puts its `seen` after a newer attempt has put its own decides nothing either, because the
newest `seen` names everything that counts, not only what is new. It also removes nothing: it checks for a newer
attempt first, and an attempt that begins after that check finds its `seen`, and agrees on what to remove.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from holdfast.format.manifest import MANIFEST
from holdfast.protocol.field_types import MAX_LINEAGE
from holdfast.protocol.ids import is_checkpoint_id
from holdfast.store.records import FOLDERS, Lineage

SEEN = ".seen.json"
ATTEMPT = re.compile(r"([0-9]{8,})-.+?(\.seen)?\.json")
LINEAGE = re.compile(r"([0-9]{6,})-([0-9]{8,})\.json")
_FOLDER = re.compile(r"([0-9]{8,})(?:-([0-9]+))?")


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that counted when an attempt began."""

    checkpoints: list[str]
    """`<checkpoint>/<folder>` each."""
    lineages: list[str]


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of one write of a checkpoint."""

    checkpoint: str
    name: str
    files: dict[str, int] = field(compare=False)
    """Sizes in bytes by name."""

    @property
    def path(self) -> str:
        return f"{self.checkpoint}/{self.name}"

    @property
    def keys(self) -> list[str]:
        return list(self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes in bytes by key."""
        return {f"{self.path}/{file}": size for file, size in self.files.items()}

    @property
    def order(self) -> tuple[int, int]:
        """(attempt, turn); of two folders that count, the higher is the checkpoint, and the other was damaged."""
        match = _FOLDER.fullmatch(self.name)
        assert match is not None
        return int(match[1]), int(match[2] or 1)


def seen_name(attempt: str) -> str:
    """Return the name of the `seen` record that belongs to the record of an attempt."""
    return attempt.removesuffix(".json") + SEEN


def folder_name(attempt: int, turn: int) -> str:
    return f"{attempt:08d}" if turn == 1 else f"{attempt:08d}-{turn}"


def is_folder_of(name: str, attempt: int) -> bool:
    match = _FOLDER.fullmatch(name)
    return match is not None and name == folder_name(attempt, int(match[2] or 1))


@dataclass(frozen=True, slots=True)
class Survey:
    """The objects of a job at one time."""

    folders: list[Folder]
    lineages: list[str]
    newest: int
    """Number of the newest attempt."""
    decider: int
    """Number of the attempt whose `seen` decides what counts of older attempts."""
    seen: Seen

    def counting_folders(self) -> list[Folder]:
        return [
            folder
            for folder in self.folders
            if MANIFEST in folder.files
            and (folder.order[0] >= self.decider or folder.path in self.seen.checkpoints)
        ]

    def counting_lineages(self) -> list[str]:
        return [n for n in self.lineages if lineage_attempt(n) >= self.decider or n in self.seen.lineages]

    def committed(self) -> dict[str, Folder]:
        """Return the folder of each committed checkpoint."""
        found = sorted(self.counting_folders(), key=lambda folder: folder.order)
        return {folder.checkpoint: folder for folder in found}

    def leftovers(self) -> list[tuple[Folder, str]]:
        """List the folders that can never count, or were replaced, with a description."""
        counting, committed, found = self.counting_folders(), self.committed(), []
        for folder in self.folders:
            by = committed[folder.checkpoint].order[0] if folder.checkpoint in committed else 0
            if folder in counting and folder != committed[folder.checkpoint]:
                found.append((folder, f"set aside as damaged by attempt {by}"))
            elif folder not in counting and not self.decider <= folder.order[0] <= self.newest:
                found.append((folder, f"left unfinished by attempt {folder.order[0]}"))
        return found


def record_number(name: str) -> int:
    """Return the number in the name of the record of a lineage."""
    return int(name.partition("/")[2].removesuffix(".json").partition("-")[0])


def lineage_attempt(name: str) -> int:
    return int(name.removesuffix(".json").rpartition("-")[2])


def folders_of(sizes: Mapping[str, int]) -> list[Folder]:
    """Return the folders among the names below a job, and ignore other names."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for name, size in sizes.items():
        match name.split("/"):
            case [checkpoint, folder, file] if is_checkpoint_id(checkpoint) and _FOLDER.fullmatch(folder):
                found.setdefault((checkpoint, folder), {})[file] = size
    return [Folder(checkpoint, folder, files) for (checkpoint, folder), files in found.items()]


def lineages_of(names: Iterable[str]) -> list[str]:
    """Return the records of lineages among the names below a job."""
    folder = f"{FOLDERS[Lineage]}/"
    found = [name for name in names if name.startswith(folder) and LINEAGE.fullmatch(name.removeprefix(folder))]
    return [name for name in found if record_number(name) <= MAX_LINEAGE]
