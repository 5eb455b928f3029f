"""Names that last: what is made, renamed or removed in a directory is durable once that directory is synced."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

from holdfast.store.files import Files
from holdfast.store.writing import Volume, write_durably

NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


def make_durably(files: Files, root: Path, directory: Path, *inside: str) -> None:
    """Make a directory below `root`, those above it that are missing, and those to be inside it.

    Their names are synced even if they were there: whoever made them may have died before that.
    """
    missing = [each for each in (directory, *directory.parents) if not each.is_dir()]
    for each in (*reversed(missing), *(directory / name for name in inside)):
        with contextlib.suppress(FileExistsError):
            files.make_directory(each)
    for each in sorted({each.parent for each in missing} | {root.parent, root, directory}):
        # above the store there may be directories that cannot be opened, and so cannot be synced
        ours = each.is_relative_to(root)
        with contextlib.nullcontext() if ours else contextlib.suppress(PermissionError):
            files.sync_directory(each)


def create_durably(files: Files, path: Path, data: bytes) -> None:
    """Create a small file that is there whole or not at all; FileExistsError when its name is taken."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        write_durably(files, temporary, [data], Volume())
        _publish(files, temporary, path)
    finally:
        with contextlib.suppress(OSError):
            files.unlink(temporary)
    files.sync_directory(path.parent)


def _publish(files: Files, temporary: Path, path: Path) -> None:
    try:
        files.link(temporary, path)  # unlike rename, refuses to replace
    except OSError as error:
        if path.exists():
            if path.samefile(temporary):
                return  # a network file system had done it, lost the answer and tried again
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        if error.errno not in NO_LINKS:
            raise
        files.rename(temporary, path)


def rename(files: Files, source: Path, target: Path) -> None:
    """Rename, taking the word of the directory rather than that of an error."""
    try:
        files.rename(source, target)
    except OSError:
        # a network file system that loses the answer to a rename tries again, and finds nothing to rename
        if os.path.lexists(source) or not os.path.lexists(target):
            raise


def discard(files: Files, directory: Path) -> None:
    """Remove a directory in which other processes may still be making files: they do not find it any more."""
    doomed = directory.with_name(f"{directory.name}-discarded")
    try:
        rename(files, directory, doomed)
    except OSError:  # it is gone, or cannot be renamed and perhaps removed
        doomed = directory
    remove(files, doomed)


def remove(files: Files, directory: Path) -> None:
    """Remove a directory with what is in it, as far as that can be done."""
    for place, _, names in os.walk(directory, topdown=False):
        for name in names:
            with contextlib.suppress(OSError):
                files.unlink(Path(place, name))
        with contextlib.suppress(OSError):
            files.remove_directory(Path(place))
