"""How a job lies in a bucket, and which of its objects count.

    <job>/<checkpoint>/<attempt, 8 digits>/rank-0.safetensors, manifest.json    one folder each time it is written
    <job>/attempts/<number, 8 digits>-<uid>.json, and the same with .seen.json
    <job>/endings/<attempt, 8 digits>.json
    <job>/lineages/<number, 6 digits>-<attempt, 8 digits>.json
    <job>/holds/<uid>.json

No server is asked for more than this: a PUT appears whole or not at all, and a LIST that begins after a PUT or a
DELETE has ended shows it. Fencing follows from the order in which things are done:

    a new attempt    puts its record, lists the job, and notes all that counts then in its `seen`
    a writer         puts its manifest, and only then looks that there is no newer attempt

What an attempt has put counts when the newest `seen` names it, or when its attempt is not older than that `seen`.

If a writer found no newer attempt after its manifest was there, the record of any newer one came later, and that
one's list later still: it names the manifest, and so does each `seen` after it. What was reported durable stays.
If the writer did find a newer attempt, or stalled before it looked, it reports nothing. Its manifest may have
been in time for the list or not; the `seen` says which, for good, however late the manifest arrives.
An attempt that died before it wrote its `seen` decides nothing: it has fenced those before it, and the next one
notes what there is. One that wrote it late, when a newer attempt had noted what it saw, decides nothing either,
since the newest `seen` holds all that counts and not only what is new. It removes nothing: it looks for a newer
attempt first, and one that comes after that finds its `seen`, and agrees on what is to go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from holdfast.format.manifest import MANIFEST
from holdfast.protocol.messages import MAX_LINEAGE, is_checkpoint_id
from holdfast.store.records import FOLDERS, Lineage

SEEN = ".seen.json"
ATTEMPT = re.compile(r"([0-9]{8,})-.+?(\.seen)?\.json")
LINEAGE = re.compile(r"([0-9]{6,})-([0-9]{8,})\.json")
_FOLDER = re.compile(r"([0-9]{8,})(?:-([0-9]+))?")


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """All that counted when an attempt began."""

    checkpoints: list[str]
    """`<checkpoint>/<folder>` each."""
    lineages: list[str]


@dataclass(frozen=True, slots=True)
class Folder:
    """One writing of a checkpoint."""

    checkpoint: str
    name: str
    files: dict[str, int] = field(compare=False)
    """And their sizes in bytes."""

    @property
    def path(self) -> str:
        return f"{self.checkpoint}/{self.name}"

    @property
    def keys(self) -> list[str]:
        return [f"{self.path}/{file}" for file in self.files]

    @property
    def order(self) -> tuple[int, int]:
        """(attempt, turn): of two that count the higher is the checkpoint, the other was damaged."""
        match = _FOLDER.fullmatch(self.name)
        assert match is not None
        return int(match[1]), int(match[2] or 1)


def seen_name(attempt: str) -> str:
    """Where what an attempt saw is noted, by the name of its record."""
    return attempt.removesuffix(".json") + SEEN


def folder_name(attempt: int, turn: int) -> str:
    return f"{attempt:08d}" if turn == 1 else f"{attempt:08d}-{turn}"


def is_folder_of(name: str, attempt: int) -> bool:
    match = _FOLDER.fullmatch(name)
    return match is not None and name == folder_name(attempt, int(match[2] or 1))


@dataclass(frozen=True, slots=True)
class Survey:
    """A job as one look at the bucket found it."""

    folders: list[Folder]
    lineages: list[str]
    newest: int
    """The highest number of an attempt."""
    decider: int
    """The attempt whose `seen` decides what of older ones counts."""
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
        """By checkpoint."""
        found = sorted(self.counting_folders(), key=lambda folder: folder.order)
        return {folder.checkpoint: folder for folder in found}

    def leftovers(self) -> list[tuple[Folder, str]]:
        """What has been ruled out for good, or was replaced, and which it is, for people."""
        counting, committed, found = self.counting_folders(), self.committed(), []
        for folder in self.folders:
            by = committed[folder.checkpoint].order[0] if folder.checkpoint in committed else 0
            if folder in counting and folder != committed[folder.checkpoint]:
                found.append((folder, f"set aside as damaged by attempt {by}"))
            elif folder not in counting and not self.decider <= folder.order[0] <= self.newest:
                found.append((folder, f"left half-done by attempt {folder.order[0]}"))
        return found


def record_number(name: str) -> int:
    """Of a lineage's."""
    return int(name.partition("/")[2].removesuffix(".json").partition("-")[0])


def lineage_attempt(name: str) -> int:
    return int(name.removesuffix(".json").rpartition("-")[2])


def folders_of(sizes: Mapping[str, int]) -> list[Folder]:
    """The folders among the names below a job; whatever else was put there is none of ours."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for name, size in sizes.items():
        match name.split("/"):
            case [checkpoint, folder, file] if is_checkpoint_id(checkpoint) and _FOLDER.fullmatch(folder):
                found.setdefault((checkpoint, folder), {})[file] = size
    return [Folder(checkpoint, folder, files) for (checkpoint, folder), files in found.items()]


def lineages_of(names: Iterable[str]) -> list[str]:
    """The records of lineages among the names below a job."""
    folder = f"{FOLDERS[Lineage]}/"
    found = [name for name in names if name.startswith(folder) and LINEAGE.fullmatch(name.removeprefix(folder))]
    return [name for name in found if record_number(name) <= MAX_LINEAGE]
