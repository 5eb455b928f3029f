"""Replacement of damaged files of checkpoints in a directory."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from holdfast.errors import DamagedCheckpoint, Fenced
from holdfast.store.base import Pace
from holdfast.store.local import REPLACEMENT, LocalStore
from holdfast.store.local_writer import rename, write_durably
from holdfast.system.files import LINK

logger = logging.getLogger("holdfast")


class LocalReplacer:
    """Replaces files of a checkpoint, and the links that other checkpoints of the job have to the same files."""

    def __init__(self, store: LocalStore, job: str, checkpoint: str) -> None:
        self._store, self._job, self._directory = store, job, store.path(job, checkpoint)
        self._attempt = store.latest_attempt(job)
        self._inode = self._found_inode()
        for name in store.files.names(self._directory):
            if name.startswith(REPLACEMENT):  # what an interrupted repair left
                with contextlib.suppress(OSError):
                    store.files.unlink(self._directory / name)

    def replace(self, file: str, parts: Sequence[memoryview | bytes], *, pace: Pace | None = None) -> None:
        files, target = self._store.files, self._directory / Path(file).name
        temporary = self._directory / f"{REPLACEMENT}{secrets.token_hex(4)}"
        try:
            write_durably(files, temporary, parts, self._store.volume(self._directory.parent), pace=pace)
            with self._store.fenced(self._job, self._attempt):
                if self._found_inode() != self._inode:
                    raise Fenced(f"{self._directory} was replaced during its repair")
                others = self._other_links(target)
                rename(files, temporary, target)
                for other in others:
                    self._relink(target, other)
        except BaseException:  # also on Ctrl-C
            with contextlib.suppress(OSError):
                files.unlink(temporary)
            raise
        files.sync_directory(self._directory)

    def _other_links(self, target: Path) -> list[Path]:
        """Return the files of other checkpoints that are the same file: they have the same damage."""
        found = self._store.files.stat(target)
        if found is None or found.st_nlink < 2:
            return []
        names = (path / target.name for path in self._committed())
        known = ((path, self._store.files.stat(path)) for path in names if path != target)
        return [path for path, each in known if each is not None and os.path.samestat(each, found)]

    def _committed(self) -> list[Path]:
        return [self._store.path(self._job, each) for each in self._store.checkpoints(self._job)]

    def _relink(self, target: Path, other: Path) -> None:
        files, temporary = self._store.files, other.with_name(f"{REPLACEMENT}{secrets.token_hex(4)}")
        try:
            files.link(target, temporary)
            rename(files, temporary, other)
            files.sync_directory(other.parent)
        except OSError as error:  # it keeps the damaged file, and is repaired in its turn
            logger.debug("%s is not replaced by the repaired file: %s", other, error)

    def _found_inode(self) -> int:
        if (found := self._store.files.stat(self._directory)) is None:
            raise DamagedCheckpoint(str(self._directory), "there is no such checkpoint")
        if not stat.S_ISDIR(found.st_mode):
            raise DamagedCheckpoint(str(self._directory), LINK)
        return found.st_ino
