"""Files and directories that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from holdfast.store.files import Files


@contextlib.contextmanager
def appearing(target: Path, force: bool) -> Iterator[Path]:
    """A temporary name beside `target` that takes its place at the end, and is gone if that is not reached."""
    if not target.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "there is no such directory to write to", str(target.parent))
    temporary = _beside(target)
    try:
        yield temporary
        if not force and os.path.lexists(target):
            raise FileExistsError(f"{target} has come into being meanwhile; --force replaces it")
        if target.is_dir():
            _replace_directory(temporary, target)
        else:
            temporary.rename(target)
        Files().sync_directory(target.parent)
    finally:
        _remove(temporary)


def _replace_directory(temporary: Path, target: Path) -> None:
    old = _beside(target)
    target.rename(old)  # one with files in it cannot be renamed over
    try:
        temporary.rename(target)
    except BaseException:  # even on Ctrl-C what was there comes back
        old.rename(target)
        raise
    _remove(old)


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> int:
    """Make a file, or a directory and the files in it, durable; their bytes."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    for each in files:
        with each.open("rb") as file:
            os.fsync(file.fileno())
    if path.is_dir():
        Files().sync_directory(path)
    return sum(each.stat().st_size for each in files)
