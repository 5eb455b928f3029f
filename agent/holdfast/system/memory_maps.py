"""What a forked child inherits of the memory of this process, as the kernel lists it in /proc. Linux only.

A child has an image of the instant of the fork only of private anonymous memory. Shared memory (tensors after
`share_memory_()`, `MAP_SHARED`) stays common, pages of a file follow the file, and `madvise` can keep memory from
children (MADV_DONTFORK) or give them zeros (MADV_WIPEONFORK).
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

AddressRange = tuple[int, int]
"""(start, end)"""
_HEADER = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ..(.)(.) \S+ \S+ (\d+)", re.MULTILINE)
_FLAGS = re.compile(rb"^VmFlags:(.*)$", re.MULTILINE)
_NOT_INHERITED = {b"sh", b"dc", b"wf", b"io", b"pf"}
"""Flags of shared memory, of memory that children lack or get zeroed, and of memory of devices."""
_ENTRY_BYTES = 8
_PRESENT, _EXCLUSIVE = 0x80, 0x01
"""Bits of the last byte of a page's entry in pagemap: it is in memory, and no other process maps it."""
_ENTRIES_AT_ONCE = 1 << 20
_IS_OWN = bytes(bool(byte & _PRESENT and byte & _EXCLUSIVE) for byte in range(256))
"""1 for the last byte of a page that is in memory and that no other process maps."""


@dataclass(frozen=True, slots=True)
class _Mapping:
    start: int
    end: int
    is_inherited: bool


def are_inherited(ranges: Sequence[AddressRange]) -> list[bool]:
    """Return for each range of this process whether it is private anonymous memory. OSError without /proc."""
    mappings = _mappings(Path("/proc/self/maps").read_bytes())
    return [all(each is not None and each.is_inherited for each in _within(mappings, one)) for one in ranges]


def inherited_image(pid: int, ranges: Sequence[AddressRange]) -> tuple[bool, int]:
    """Return whether a child has an image of all ranges, and how many of their bytes have changed since the fork.

    A page is the child's own once the parent has changed its copy. They count as 0 where the kernel does not tell.
    OSError when the child is gone.
    """
    mappings = _mappings(Path(f"/proc/{pid}/smaps").read_bytes())
    found = [each for one in ranges for each in _within(mappings, one)]
    changed_bytes = 0
    with contextlib.suppress(OSError):  # no pagemap: it only tells what a copy would cost
        changed_bytes = _own_bytes(pid, ranges)
    return all(each is not None and each.is_inherited for each in found), changed_bytes


def _own_bytes(pid: int, ranges: Sequence[AddressRange]) -> int:
    """Return the size of the pages of these ranges that only this process maps, at most that of the ranges."""
    pages = 0
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap:
        for start, end in ranges:
            at, to = start // mmap.PAGESIZE, -(-end // mmap.PAGESIZE)
            pagemap.seek(_ENTRY_BYTES * at)
            while at < to and (entries := pagemap.read(_ENTRY_BYTES * min(to - at, _ENTRIES_AT_ONCE))):
                pages += entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].translate(_IS_OWN).count(1)
                at += len(entries) // _ENTRY_BYTES
    return min(pages * mmap.PAGESIZE, sum(end - start for start, end in ranges))


def _mappings(text: bytes) -> list[_Mapping]:
    headers = list(_HEADER.finditer(text))
    ends = [each.start() for each in headers[1:]] + [len(text)]
    found = []
    for header, end in zip(headers, ends, strict=True):
        flags = _FLAGS.search(text, header.end(), end)
        is_private = header[4] == b"p" and header[5] == b"0"
        is_inherited = is_private and (flags is None or _NOT_INHERITED.isdisjoint(flags[1].split()))
        found.append(_Mapping(int(header[1], 16), int(header[2], 16), is_inherited))
    return found


def _within(mappings: Sequence[_Mapping], one: AddressRange) -> list[_Mapping | None]:
    """Return the mappings that a range is in, and None for a part without one."""
    at, end = one
    found = list[_Mapping | None]()
    index = bisect.bisect(mappings, at, key=lambda each: each.start) - 1
    while at < end:
        here = mappings[index] if 0 <= index < len(mappings) else None
        if here is None or not here.start <= at < here.end:
            return [*found, None]
        found.append(here)
        at, index = here.end, index + 1
    return found
