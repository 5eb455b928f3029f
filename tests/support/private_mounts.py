"""File systems mounted in a private mount namespace; they end with the process that mounts them."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

CLONE_NEWNS = 0x00020000
SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
"""Nothing more reaches the disk, not even what the journal holds in memory."""
DISK_BYTES = {"ext4": 48 << 20, "xfs": 320 << 20}


def of_my_own() -> None:
    """Enter a private mount namespace; its mounts end with this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "private mounts are not available here")
    _run("mount", "--make-rprivate", "/")


def why_not(kind: str) -> str | None:
    """Why file systems of a kind cannot be mounted here: tried in a process of its own, as its mounts will be."""
    package = {"xfs": "xfsprogs"}.get(kind, "e2fsprogs")
    if kind != "tmpfs" and shutil.which(f"mkfs.{kind}") is None:
        return f"NO mkfs.{kind} HERE (Debian: apt-get install {package})"
    tried = subprocess.run([sys.executable, __file__, kind], capture_output=True, text=True)
    said = tried.stderr.strip().rpartition("\n")[2]
    return (
        f"NO {kind} CAN BE MOUNTED HERE, which takes root and loop devices ({said})" if tried.returncode else None
    )


@contextlib.contextmanager
def memory(place: Path, size_bytes: int) -> Iterator[Path]:
    """A small file system in memory."""
    place.mkdir(exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(place))
    try:
        yield place
    finally:
        _run("umount", str(place))


def resize(place: Path, size_bytes: int) -> None:
    _run("mount", "-o", f"remount,size={size_bytes}", str(place))


class Disk:
    """A file system in an image, which can lose its power."""

    def __init__(self, folder: Path, kind: str, options: str = "") -> None:
        self._image, self._place, self._kind = folder / "image", folder / "mounted", kind
        self._options = ",".join(filter(None, ("loop", options)))
        self._place.mkdir()
        with open(self._image, "wb") as image:
            image.truncate(DISK_BYTES[kind])
        _run(f"mkfs.{kind}", "-q", str(self._image))

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        """Mount it, which replays the journal."""
        _run("mount", "-t", self._kind, "-o", self._options, str(self._image), str(self._place))
        try:
            yield self._place
        finally:
            _run("umount", str(self._place))

    def cut(self) -> None:
        """Cut the power. The writers must have been killed before: xfs would report a lost rename as durable."""
        fd = os.open(self._place, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(fd)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _try(kind: str) -> None:
    of_my_own()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with memory(place / "memory", 1 << 20) if kind == "tmpfs" else Disk(place, kind).mounted():
            pass


if __name__ == "__main__":
    _try(sys.argv[1])
