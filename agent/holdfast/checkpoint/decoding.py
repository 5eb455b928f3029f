"""Read encoded payload files as plain files. Does not import torch."""

from __future__ import annotations

import bisect
import ctypes
import weakref
from collections.abc import Callable

from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.encoding import LAYERED, Encoding
from holdfast.format.file_transforms import decode_block
from holdfast.store.base import FileReader
from holdfast.system.host_memory import ThreadMemory, populate


def decoded(file: fmt.File, reader: FileReader, open_layer: Callable[[str], FileReader]) -> FileReader:
    """Return a reader of the plain file, given one of the stored file and a function that opens its layers."""
    if (encoding := file.encoding) is None:
        return reader
    if encoding.codec == LAYERED:
        from holdfast.incremental.layered_file import open_layered

        return open_layered(file, encoding, reader, open_layer)
    return _DecodingReader(file, encoding, reader)


def _shared_memory() -> ThreadMemory:
    """Return the memory that all open files share; it is freed with the last of them."""
    global _memory_of_files
    memory = _memory_of_files() or ThreadMemory()
    _memory_of_files = weakref.ref(memory)
    return memory


_memory_of_files = weakref.ref(ThreadMemory())


class _DecodingReader(FileReader):
    """Reads a plain file. Each read decodes all blocks that it touches."""

    def __init__(self, file: fmt.File, encoding: Encoding, reader: FileReader) -> None:
        self._file, self._encoding, self._reader = file, encoding, reader
        self.size_bytes = encoding.raw_bytes
        self._memory = _shared_memory()

    def read_into(self, start: int, target: memoryview) -> None:
        if not len(target):
            return
        end, raw, places = start + len(target), self._encoding.raw_starts, self._encoding.stored_starts
        first, last = bisect.bisect_right(raw, start) - 1, bisect.bisect_left(raw, end)
        aligned = places[first] // fmt.BLOCK_BYTES * fmt.BLOCK_BYTES
        stored = self._memory.of_thread(places[last] - aligned)
        self._reader.read_into(aligned, stored)
        populate(ctypes.addressof(ctypes.c_char.from_buffer(target)), len(target))  # fewer page faults
        for number in range(first, last):
            data = stored[places[number] - aligned : places[number + 1] - aligned]
            opens, closes = raw[number] - start, raw[number + 1] - start
            if opens >= 0 and closes <= len(target):
                self._decode(number, data, target[opens:closes])
            else:  # of a block of several tensors, only some are read
                out = memoryview(bytearray(closes - opens))
                self._decode(number, data, out)
                at, to = max(0, opens), min(closes, len(target))
                target[at:to] = out[at - opens : to - opens]

    def _decode(self, number: int, data: memoryview, out: memoryview) -> None:
        if reason := decode_block(self._encoding.codec, self._encoding.blocks[number], data, out):
            start, end = self._encoding.stored_starts[number : number + 2]
            where = f"encoded block {number}, bytes {start:,} to {end:,} of the file,"
            raise DamagedCheckpoint(self._file.name, f"{where} {reason}")

    def close(self) -> None:
        self._reader.close()
