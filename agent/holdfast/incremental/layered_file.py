"""Layered files: a base file, and region files that are laid over it in their order. Does not import torch.

A base file is a safetensors file with another suffix, whose first 8 bytes are replaced: safetensors refuses it,
since its values may be older than the checkpoint. The plain file has the length of the header there. All positions
are those of the plain file.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec

from holdfast.errors import HoldfastError
from holdfast.format import manifest as fmt
from holdfast.format.encoding import LAYERED, EncodedBlock, Encoding
from holdfast.incremental.region_file import RegionLayer, read_region
from holdfast.store.base import FileReader
from holdfast.system import io_pool

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

    def __init__(self, file: fmt.File, base: FileReader, layers: Sequence[RegionLayer]) -> None:
        self._base, self._layers, self.size_bytes = base, layers, file.raw_bytes
        self._length = (file.header_bytes - len(BASE_MAGIC)).to_bytes(len(BASE_MAGIC), "little")

    def read_into(self, start: int, target: memoryview) -> None:
        self._base.read_into(start, target)
        if start < len(self._length):
            end = min(len(self._length), start + len(target))
            target[: end - start] = self._length[start:end]
        for layer in self._layers:
            layer.lay_over(start, target)

    def close(self) -> None:
        self._base.close()


def open_layered(
    file: fmt.File, encoding: Encoding, base: FileReader, open_layer: Callable[[str], FileReader]
) -> LayeredReader:
    """Return a reader of the plain file, with the region files in memory.

    Raises:
        DamagedCheckpoint: names the region file that differs from what was written.
        OSError: the store cannot be read.
        MemoryError: region files do not fit into free memory.
        HoldfastError: NumPy is missing.
    """
    layers = list(encoding.layers or ())
    if layers and find_spec("numpy") is None:
        raise HoldfastError(f"{file.name} has layers, which need numpy: pip install numpy")
    left, found = collections.deque(layers), dict[str, RegionLayer]()

    def read_layers() -> None:
        while True:
            try:
                layer = left.popleft()
            except IndexError:  # another thread took the last one
                return
            with open_layer(layer.name) as opened:
                found[layer.name] = read_region(layer, opened)

    io_pool.share(read_layers, max(1, min(READERS, len(layers))))
    return LayeredReader(file, base, [found[layer.name] for layer in layers])
