"""How parity is described: the setting, and the entry of a parity file in the manifest.

`parity_stripes.py` has the layout of the files, and computes them. Does not import torch.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from holdfast.format.parity_stripes import StripeLayout

PARITY_BLOCK_BYTES = 4096
ENTRY_BYTES = 8
"""Size of the digest of a block."""
RANGE_BYTES = 24
"""Size of an entry of the guide, which `important.py` packs."""
MOST_DATA_BLOCKS = 128
MOST_PARITY_BLOCKS = 3
_CODE = re.compile(r"\s*(?:(important)\s+)?([0-9]{1,3})\s*\+\s*([0-9]{1,3})\s*", re.IGNORECASE)


class ParityCode(msgspec.Struct, frozen=True):
    """How many blocks of a stripe hold data, and how many hold parity: as many may be lost."""

    data_blocks: int
    parity_blocks: int
    is_important: bool = False
    """Whether it protects the important bytes of each number, and not all."""

    def __str__(self) -> str:
        return f"{'important ' if self.is_important else ''}{self.data_blocks}+{self.parity_blocks}"

    @property
    def is_valid(self) -> bool:
        return 1 <= self.data_blocks <= MOST_DATA_BLOCKS and 1 <= self.parity_blocks <= MOST_PARITY_BLOCKS


def parse_parity(value: ParityCode | str) -> ParityCode | None:
    """Parse `10+2` or `important 10+2`; None for `off`. ValueError names the setting and what it may be."""
    if isinstance(value, ParityCode):
        return value
    if str(value).strip().lower() == "off":
        return None
    found = _CODE.fullmatch(str(value))
    code = ParityCode(int(found[2]), int(found[3]), found[1] is not None) if found else None
    if code is None or not code.is_valid:
        raise ValueError(
            f"parity={value!r}: give off, or data and parity blocks as in 10+2 or important 10+2, with at most "
            f"{MOST_DATA_BLOCKS} data and {MOST_PARITY_BLOCKS} parity blocks"
        )
    if find_spec("numpy") is None:
        raise ValueError(f"parity={value!r}: parity needs numpy: pip install numpy, or give off")
    return code


class ImportantStream(msgspec.Struct, frozen=True, kw_only=True):
    """The important bytes of a payload file, which its parity file protects."""

    size_bytes: int
    digest: str
    """Digest of the digests of its blocks in the table, which verifies what a degraded restore takes of it."""
    ranges: int
    """Number of ranges in the guide."""
    ranges_digest: str

    def guide_bytes(self, payload_bytes: int) -> int:
        """Return the size of a copy of the guide."""
        return self.ranges * RANGE_BYTES + blocks_of(payload_bytes) * ENTRY_BYTES


class ParityFile(msgspec.Struct, frozen=True, kw_only=True):
    """The parity file of a payload file."""

    name: str
    size_bytes: int
    digest: str
    data_blocks: int
    parity_blocks: int
    block_bytes: int = PARITY_BLOCK_BYTES
    important: ImportantStream | msgspec.UnsetType = msgspec.UNSET
    """What is protected of the payload file; absent if all of it is."""

    @property
    def code(self) -> ParityCode:
        return ParityCode(self.data_blocks, self.parity_blocks, self.important is not msgspec.UNSET)

    def layout(self, payload_bytes: int) -> StripeLayout:
        """Return the layout of the stripes, of a payload file of this size."""
        from holdfast.format.parity_stripes import StripeLayout  # few checkpoints have parity

        if self.important is msgspec.UNSET:
            return StripeLayout(self.code, payload_bytes)
        return StripeLayout(
            self.code, self.important.size_bytes, padded(self.important.guide_bytes(payload_bytes))
        )

    def _size_bytes(self, payload_bytes: int) -> int:
        guide_bytes = 0 if self.important is msgspec.UNSET else self.important.guide_bytes(payload_bytes)
        return self.layout(payload_bytes).end + guide_bytes

    def fault(self, payload: str, payload_bytes: int) -> str | None:
        """Return why this cannot be the parity file of a payload file; None if it can."""
        if self.name != parity_name(payload):
            return f"{self.name!r} is not the name of the parity file of {payload}"
        if not self.code.is_valid or self.block_bytes != PARITY_BLOCK_BYTES:
            return f"{self.name} has the unknown parity {self.code} of blocks of {self.block_bytes} bytes"
        if (stream := self.important) is not msgspec.UNSET and not (
            0 <= stream.size_bytes <= payload_bytes and 0 <= stream.ranges <= payload_bytes
        ):
            return f"{self.name} protects {stream.size_bytes} bytes in {stream.ranges} ranges of {payload_bytes}"
        if self.size_bytes != self._size_bytes(payload_bytes):
            return f"{self.name} has an invalid size of {self.size_bytes} bytes"
        return None


def parity_name(payload: str) -> str:
    """Return the name of the parity file of a payload file."""
    return f"{payload.removesuffix('.safetensors')}.parity"


def blocks_of(size_bytes: int) -> int:
    """Return how many blocks so many bytes take."""
    return -(-size_bytes // PARITY_BLOCK_BYTES)


def padded(size_bytes: int) -> int:
    """Return the size of the blocks that so many bytes take."""
    return blocks_of(size_bytes) * PARITY_BLOCK_BYTES
