"""A directory store that fails on request."""

import errno
import os
from pathlib import Path

from holdfast.store import LocalStore


class FaultyStore(LocalStore):
    """Directory store that injects `fault`."""

    def __init__(self, root, fault, **details):
        super().__init__(Path(root))
        self.fault, self.details = fault, details

    @property
    def begun(self):
        """Number of writers so far."""
        return (self.root / "begun").stat().st_size

    def begin(self, *args):
        with open(self.root / "begun", "a") as file:
            file.write(".")
        return FaultyWriter(self, super().begin(*args))


class FaultyWriter:
    def __init__(self, store, writer):
        self.store, self.writer = store, writer
        self.folder, self.make_durable, self.abort = writer.folder, writer.make_durable, writer.abort

    def write(self, file, parts, *, pace=None):
        getattr(self, f"before_{self.store.fault}", lambda: None)()
        self.writer.write(file, parts, pace=pace)

    def commit(self, manifest, **options):
        self.writer.commit(manifest, **options)
        if self.store.fault == "unsure" and self.store.begun == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "the directory, after the rename")

    def before_errno(self):
        if self.store.begun <= self.store.details.get("times", 99):
            number = self.store.details["number"]
            raise OSError(number, os.strerror(number), self.store.details.get("place", "somewhere"))

    def before_no_memory(self):
        raise MemoryError("no room")

    def before_bug(self):
        raise KeyError("typo")

    def before_wait(self):
        """Report the process id of the writer, then wait for permission to continue."""
        if self.store.begun == 1:
            tell(self.store.root / "reached", str(os.getpid()))
            hear(self.store.root / "go")


def tell(fifo, text):
    """Write text to a FIFO; block until a reader opens it."""
    with open(fifo, "w") as file:
        file.write(text)


def hear(fifo):
    with open(fifo) as file:
        return file.read()
