"""What a forked child inherits of the memory of this process, as the kernel lists it in /proc. Linux only.

A child has an image of the instant of the fork only of private anonymous memory. Shared memory (tensors after
`share_memory_()`, `MAP_SHARED`) stays common, pages of a file follow the file, and `madvise` can keep memory from
children (MADV_DONTFORK) or give them zeros (MADV_WIPEONFORK).
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

AddressRange = tuple[int, int]
"""(start, end)"""
_HEADER = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ..(.)(.) \S+ \S+ (\d+)", re.MULTILINE)
_OWN = re.compile(rb"^Private_(?:Clean|Dirty): +(\d+) kB", re.MULTILINE)
_FLAGS = re.compile(rb"^VmFlags:(.*)$", re.MULTILINE)
_NOT_INHERITED = {b"sh", b"dc", b"wf", b"io", b"pf"}
"""Flags of shared memory, of memory that children lack or get zeroed, and of memory of devices."""


@dataclass(frozen=True, slots=True)
class _Mapping:
    start: int
    end: int
    is_inherited: bool
    own_bytes: int
    """Pages that no other process maps."""


def are_inherited(ranges: Sequence[AddressRange]) -> list[bool]:
    """Return for each range of this process whether it is private anonymous memory. OSError without /proc."""
    mappings = _mappings(Path("/proc/self/maps").read_bytes())
    return [all(each is not None and each.is_inherited for each in _within(mappings, one)) for one in ranges]


def inherited_image(pid: int, ranges: Sequence[AddressRange]) -> tuple[bool, int]:
    """Return whether a child has an image of all ranges, and how many of their bytes have changed since the fork.

    A page is the child's own once the parent has changed its copy. OSError when the child is gone.
    """
    mappings = _mappings(Path(f"/proc/{pid}/smaps").read_bytes())
    found = [each for one in ranges for each in _within(mappings, one)]
    own = {each.start: each.own_bytes for each in found if each is not None}
    return all(each is not None and each.is_inherited for each in found), sum(own.values())


def _mappings(text: bytes) -> list[_Mapping]:
    headers = list(_HEADER.finditer(text))
    ends = [each.start() for each in headers[1:]] + [len(text)]
    found = []
    for header, end in zip(headers, ends, strict=True):
        flags = _FLAGS.search(text, header.end(), end)
        is_private = header[4] == b"p" and header[5] == b"0"
        is_inherited = is_private and (flags is None or _NOT_INHERITED.isdisjoint(flags[1].split()))
        own_bytes = 1024 * sum(int(each[1]) for each in _OWN.finditer(text, header.end(), end))
        found.append(_Mapping(int(header[1], 16), int(header[2], 16), is_inherited, own_bytes))
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
