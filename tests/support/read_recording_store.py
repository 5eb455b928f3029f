"""A store that records its reads."""

import ctypes

from holdfast.store.base import FileReader
from holdfast.store.local import LocalStore


class ReadRecordingStore(LocalStore):
    """A store that notes each read; `before` may hold one back or break it."""

    def __init__(self, root, before=lambda start, size: None, readers=2):
        super().__init__(root)
        self.before, self.read_threads = before, readers
        self.reads, self.open, self.most_open = [], 0, 0

    def open_file(self, job, checkpoint, file, **options):
        found = super().open_file(job, checkpoint, file, **options)
        return found if file.endswith(".json") else RecordedReads(self, found, file)


class RecordedReads(FileReader):
    def __init__(self, store, inner, file):
        self.store, self.inner, self.file, self.size_bytes = store, inner, file, inner.size_bytes
        store.open += 1
        store.most_open = max(store.most_open, store.open)

    def read_into(self, start, target):
        address = ctypes.addressof(ctypes.c_char.from_buffer(target)) if len(target) else 0
        self.store.reads.append((self.file, start, len(target), address))
        self.store.before(start, len(target))
        self.inner.read_into(start, target)

    def close(self):
        self.store.open -= 1
        self.inner.close()
