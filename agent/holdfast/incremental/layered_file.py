"""Layered files: a base file, and region files that are laid over it in their order. Does not import torch.

A base file is a safetensors file with another suffix, whose first 8 bytes are replaced: safetensors refuses it,
since its values may be older than the checkpoint. The plain file has the length of the header there. All positions
are those of the plain file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast.format import manifest as fmt
from holdfast.format.encoding import LAYERED, EncodedBlock, Encoding
from holdfast.incremental.region_file import RegionLayer
from holdfast.store.base import FileReader

BASE_MAGIC = b"HFbase01"
BASE_SUFFIX = ".base"


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
    """Reads the plain file that a layered file stands for. It has the region files in memory."""

    def __init__(
        self, file: fmt.File, encoding: Encoding, base: FileReader, open_layer: Callable[[str], FileReader]
    ) -> None:
        self._base, self.size_bytes = base, encoding.raw_bytes
        self._length = (file.header_bytes - len(BASE_MAGIC)).to_bytes(len(BASE_MAGIC), "little")
        self._layers: list[RegionLayer] = []
        for layer in encoding.layers or ():
            with open_layer(layer.name) as opened:
                self._layers.append(RegionLayer(layer, opened))

    def read_into(self, start: int, target: memoryview) -> None:
        self._base.read_into(start, target)
        if start < len(self._length):
            end = min(len(self._length), start + len(target))
            target[: end - start] = self._length[start:end]
        for layer in self._layers:
            layer.lay_over(start, target)

    def close(self) -> None:
        self._base.close()
