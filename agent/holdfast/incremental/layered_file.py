"""Layered files: a base file, and region files that are laid over it in their order. Does not import torch.

A base file is a safetensors file with another suffix, whose first 8 bytes are replaced: safetensors refuses it,
since its values may be older than the checkpoint. The plain file has the length of the header there. All positions
are those of the plain file.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec

from holdfast.errors import HoldfastError
from holdfast.format import manifest as fmt
from holdfast.format.encoding import LAYERED, EncodedBlock, Encoding, StoredLayer
from holdfast.incremental.region_file import RegionLayer, open_region, read_region, require_memory
from holdfast.store.base import FileReader
from holdfast.system import io_pool
from holdfast.system.host_memory import ThreadMemory

BASE_MAGIC = b"HFbase01"
BASE_SUFFIX = ".base"
READERS = 4
"""Threads that read region files."""


def masked_header(header: bytes) -> bytes:
    """Return the header of a base file, given that of the plain file."""
    return BASE_MAGIC + header[len(BASE_MAGIC) :]


def base_encoding(header: bytes, tensors: Iterable[fmt.Tensor]) -> Encoding:
    """Describe a base file, given its masked header, and its tensors in their order in it."""
    blocks = [EncodedBlock(len(header), len(header), fmt.digest(header))]
    for tensor in tensors:
        blocks += [
            EncodedBlock(each.end - each.start, each.end - each.start, each.digest)
            for each in fmt.tensor_ranges(tensor)
            if each.start < each.end
        ]
    return Encoding(codec=LAYERED, raw_bytes=sum(block.raw_bytes for block in blocks), blocks=blocks, layers=[])


class LayeredReader(FileReader):
    """Reads the plain file that a layered file stands for."""

    def __init__(self, file: fmt.File, base: FileReader, layers: RegionLayers) -> None:
        self._base, self._layers, self.size_bytes = base, layers, file.raw_bytes
        self._length = (file.header_bytes - len(BASE_MAGIC)).to_bytes(len(BASE_MAGIC), "little")

    def read_into(self, start: int, target: memoryview) -> None:
        self._base.read_into(start, target)
        if start < len(self._length):
            end = min(len(self._length), start + len(target))
            target[: end - start] = self._length[start:end]
        for layer in self._layers.opened():
            layer.lay_over(start, target)

    def find_damage(self) -> None:
        self._layers.find_damage()

    def close(self) -> None:
        self._base.close()
        self._layers.close()


class RegionLayers:
    """The region files of a base file. All threads that need them open them, each while others read the base.

    Args:
        in_memory: read and verify each as a whole. Otherwise rows are read when they are laid over.
    """

    def __init__(
        self, layers: Sequence[StoredLayer], open_layer: Callable[[str], FileReader], *, in_memory: bool
    ) -> None:
        self._layers, self._open_layer, self._in_memory = layers, open_layer, in_memory
        self._opened, self._memory = contextlib.ExitStack(), ThreadMemory()
        self._left = collections.deque(layers)
        self._found = dict[str, RegionLayer]()
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._is_begun = False

    def opened(self) -> Sequence[RegionLayer]:
        """Return them in their order, once all are open; raises as `read_region`."""
        with self._changed:
            is_first, self._is_begun = not self._is_begun, True
        if is_first and len(self._layers) > 1:  # it may be the only thread
            io_pool.share(self._read, min(READERS, len(self._layers)))
        else:
            self._read()
        with self._changed:
            self._changed.wait_for(lambda: self._failure or len(self._found) == len(self._layers))
            if self._failure is not None:
                raise self._failure
        return [self._found[layer.name] for layer in self._layers]

    def _read(self) -> None:
        while self._failure is None:
            try:
                layer = self._left.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                found = self._open(layer)
            except BaseException as error:  # raised again where the layers are needed
                with self._changed:
                    self._failure = self._failure or error
                    self._changed.notify_all()
                return
            with self._changed:
                self._found[layer.name] = found
                self._changed.notify_all()

    def find_damage(self) -> None:
        """Raise DamagedCheckpoint for the first one that differs from what was written."""
        for layer in self._layers:
            with self._open_layer(layer.name) as opened:
                read_region(layer, opened)

    def close(self) -> None:
        self._opened.close()

    def _open(self, layer: StoredLayer) -> RegionLayer:
        with contextlib.ExitStack() as undo:
            opened = undo.enter_context(self._open_layer(layer.name))
            if self._in_memory:
                return read_region(layer, opened)
            found = open_region(layer, opened, self._memory)
            with self._changed:
                self._opened.push(undo.pop_all())
            return found


def open_layered(
    file: fmt.File, encoding: Encoding, base: FileReader, open_layer: Callable[[str], FileReader]
) -> LayeredReader:
    """Return a reader of the plain file, which opens the region files once it is read from.

    Where seeking costs time, it takes them into memory, and a read raises DamagedCheckpoint, which names the
    region file that differs from what was written. Otherwise `find_damage` does.

    Raises:
        MemoryError: region files do not fit into free memory.
        HoldfastError: NumPy is missing.
    """
    layers = list(encoding.layers or ())
    if layers and find_spec("numpy") is None:
        raise HoldfastError(f"{file.name} has layers, which need numpy: pip install numpy")
    if not base.seeks_freely:
        require_memory(layers)  # of all at once: it takes as long as to read a small one
    return LayeredReader(file, base, RegionLayers(layers, open_layer, in_memory=not base.seeks_freely))
