"""Host state without a second copy: large arrays that the script changes in place are written from a fork.

These are arrays and tensors of objects that are neither modules nor optimizers, such as `Variables` and replay
buffers. Everything else is copied: an optimizer changes each page of its tensors in the next step, which would
copy them all by page faults, while a thread copies them without.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import psutil
import torch

from holdfast.format import manifest as fmt
from holdfast.format.dtypes import stored_as
from holdfast.format.manifest import TensorRange, lay_out, tensor_digests
from holdfast.protocol.field_types import ChangedTensor
from holdfast.save.draft import Draft
from holdfast.save.forked_image import CannotFork, ForkedImage, ImageLost, fork_image
from holdfast.save.reuse import stem_of
from holdfast.save.writer import PLAIN, closed_up, file_of
from holdfast.state.registry import CapturedState
from holdfast.store.base import CheckpointWriter, Pace, Store
from holdfast.store.local import LocalWriter
from holdfast.store.local_writer import naming
from holdfast.system.files import Files
from holdfast.system.host_memory import available_bytes, bytes_of, is_plain
from holdfast.system.memory_maps import are_inherited
from holdfast.units import format_bytes

if TYPE_CHECKING:
    from holdfast.incremental.planner import IncrementalPlanner
    from holdfast.save.layered_files import LayeredFiles
    from holdfast.save.writer import CheckpointFiles

HostStateMode = Literal["auto", "copy", "fork"]
Warn = Callable[[Literal["info", "warning"], str], None]
Entry = Callable[[TensorRange, str, int, str, list[str] | None], fmt.Tensor]
"""Makes a manifest entry: place of the tensor in the payload, file, size of its header, digests."""
Tensors = Mapping[str, torch.Tensor]

MIN_AUTO_BYTES = 256 << 20
"""Least size of host state that is worth a process."""
PROBE_BYTES = 64 << 20
FORK_SECONDS_PER_BYTE = 20e-12
"""Estimated seconds of a fork per byte of the process until one is measured: the kernel copies the page tables of
the process.
"""
GROWTH = 1.25
"""Factor by which the host state grows before the choice is made again."""
SPARE = 1.1
"""A copy fits if this multiple of its size is free."""
MOST_CHANGED = 0.5
"""Share of the arrays that changed while the child wrote, above which a copy costs training less."""
FAILURES = 3
"""Number of children lost in a row after which forks are no longer used."""


class HostImage:
    """Arrays of one instant in a forked child, and their positions in the file that it writes."""

    def __init__(self, child: ForkedImage, slots: list[TensorRange], views: dict[str, str], forks: HostStateForks):
        self.slots, self.views = slots, views
        self.child, self._forks = child, forks
        self._pace: Pace | None = None

    @property
    def size_bytes(self) -> int:
        return self.slots[-1].end

    def add_to(
        self,
        written: Draft,
        writer: CheckpointWriter,
        files: CheckpointFiles,
        entry: Entry,
        pace: Pace | None = None,
    ) -> Draft:
        """Have the child write its tensors, and add them and their files to what was written.

        Args:
            files: the write of the checkpoint, which links files of earlier ones.
            pace: limits the rate of what is written.

        Raises:
            ImageLost: the child is gone. Fenced, OSError: as `CheckpointWriter.write`.
        """
        self._pace, started = pace, time.perf_counter()
        added, entries = list[fmt.File](), dict[str, fmt.Tensor]()
        try:
            if (layered := self._plan_layers(written, entry)) is not None:
                added, entries, _ = layered.write(files, writer)
            left = [slot for slot in self.slots if slot.name not in entries]
            if left:
                name, (moved, _) = f"{stem_of(written.rank)}.host{PLAIN}", closed_up(left)
                header = written.header(moved)
                digests = self.write(writer, name, header, left)
                added.append(file_of(name, header, len(header) + moved[-1].end))
                entries |= {
                    slot.name: entry(slot, name, len(header), *found)
                    for slot, found in zip(moved, digests, strict=True)
                }
        except ImageLost as error:
            self._forks.note_lost(error)
            raise
        self._forks.note_written(self.size_bytes, self.child.changed_bytes)
        seconds = written.timings["write_seconds"] + time.perf_counter() - started
        return msgspec.structs.replace(
            written,
            files=[*written.files, *added],
            tensors=[*written.tensors, *(entries[slot.name] for slot in self.slots)],
            timings=written.timings | {"write_seconds": seconds},
        )

    def settle(self, checkpoint: str, *, is_durable: bool) -> Sequence[ChangedTensor]:
        """Note whether later checkpoints may link the files of this one; return the arrays written in part."""
        planner = self._forks.planner
        return () if planner is None else planner.settle(checkpoint, is_durable=is_durable)

    def begin_anew(self) -> None:
        """Stop linking files of earlier checkpoints, which may be damaged."""
        if self._forks.planner is not None:
            self._forks.planner.begin_anew()

    def close(self) -> None:
        """End the child."""
        self.child.close()

    def _plan_layers(self, draft: Draft, entry: Entry) -> LayeredFiles | None:
        """Return the arrays that are written in part; None if all are written in full."""
        if (planner := self._forks.planner) is None:
            return None
        from holdfast.save.forked_rows import plan_forked_rows

        return plan_forked_rows(planner, self, draft, entry)

    def write(
        self, writer: CheckpointWriter, name: str, header: bytes, slots: Sequence[TensorRange]
    ) -> list[tuple[str, list[str] | None]]:
        """Have the child write arrays to a file behind its header; return (digest, chunks) of each."""
        numbers = {slot.name: number for number, slot in enumerate(self.slots)}
        which, size_bytes = [numbers[slot.name] for slot in slots], sum(slot.end - slot.start for slot in slots)
        if self._pace is not None:  # the child writes at the speed of the disk: its time is spent before
            self._pace(size_bytes)
        assert isinstance(writer, LocalWriter), "only a directory gives a descriptor to another process"
        found = list[list[str]]()

        def write(files: Files, path: Path) -> None:
            nonlocal found
            with naming(path):
                fd = files.create(path)
                try:
                    files.reserve(fd, len(header) + size_bytes)
                    at = 0
                    while at < len(header):
                        at += files.write(fd, memoryview(header)[at:], at)
                    found = self.child.write(fd, at, which)
                    files.sync(fd)
                    files.forget(fd)
                except BaseException:  # raise the first error, not that of closing the file
                    with contextlib.suppress(OSError):
                        files.close(fd)
                    raise
                files.close(fd)

        writer.write_with(name, write)
        return [tensor_digests(chunks) for chunks in found]


def make_forks(
    mode: HostStateMode,
    store: Store,
    warn: Warn,
    *,
    has_memory_tier: bool = False,
    has_parity: bool = False,
    compresses: bool = False,
    planner: IncrementalPlanner | None = None,
) -> HostStateForks | None:
    """Return the forks of a session with these settings; None if everything is copied.

    `planner` decides which arrays are written in part.
    """
    if mode == "copy" or (compresses and mode == "auto"):
        return None
    reason = None
    if sys.platform != "linux":
        reason = "it needs Linux"
    elif not store.takes_descriptors:
        reason = f"{store.url} is not a directory"
    elif has_parity:
        reason = "checkpoints have parity, which is computed from a copy"
    if reason is None:
        return HostStateForks(mode, warn, has_memory_tier=has_memory_tier, planner=planner)
    if mode == "fork":
        warn("warning", f"host state is copied, not written from a fork: {reason}")
    return None


class HostStateForks:
    """Decides which arrays a fork keeps, and forks. For the training thread, except `note_lost` and
    `note_written`.

    Args:
        mode: "fork" forks whenever it can; "auto" where a copy does not fit, or would block longer.
        warn: reports a notice, given its level and text.
        has_memory_tier: copies survive this process, and forked bytes do not: "auto" forks only for lack of room.
        planner: decides which arrays are written in part.
    """

    def __init__(
        self,
        mode: HostStateMode,
        warn: Warn,
        *,
        has_memory_tier: bool = False,
        planner: IncrementalPlanner | None = None,
    ) -> None:
        self.planner = planner
        self._mode, self._warn, self._has_memory_tier = mode, warn, has_memory_tier
        self._said: str | None = None
        self._is_off = self._has_forked = False
        self._losses = 0
        self._chosen: tuple[int, bool] | None = None
        """Size at the last choice, and whether it was a fork."""
        self._copy_seconds_per_byte, self._fork_seconds = 0.0, 0.0
        self._changed: str | None = None
        """Reason why a copy costs training less, measured with the last child."""
        self._structure: tuple[object, Collection[str], object] = (None, (), None)

    def split(
        self, captured: CapturedState, arena_bytes: int = 0
    ) -> tuple[CapturedState, dict[str, torch.Tensor]]:
        """Return the state that is copied, and the tensors that a fork keeps.

        Args:
            arena_bytes: memory for copies that there is already.
        """
        held = {} if self._is_off else _forkable(captured)
        if not held or not (self._worth_it(held) or self._lacks_room(captured, arena_bytes)):
            return captured, {}
        if self._structure[0] is not captured.structure or self._structure[1] != held.keys():
            self._structure = captured.structure, set(held), object()
        rest = {name: tensor for name, tensor in captured.tensors.items() if name not in held}
        return dataclasses.replace(captured, tensors=rest, structure=self._structure[2]), held

    def take(self, captured: CapturedState, arena_bytes: int = 0) -> tuple[CapturedState, HostImage | None]:
        """Fork if it is worth it; return what is left to copy. Call it at an iteration boundary.

        Raises:
            MemoryError: nothing can be forked any more, and a copy does not fit into free memory.
        """
        rest, held = self.split(captured, arena_bytes)
        if not held:
            self._require_room(captured, arena_bytes)
            return captured, None
        stored = {name: stored_as(name, tensor) for name, tensor in held.items()}
        slots = lay_out((name, dtype, shape) for name, (dtype, shape, _) in stored.items())
        views = [bytes_of(held[slot.name]) for slot in slots]
        started, self._has_forked = time.perf_counter(), True
        try:
            child = fork_image(views, [_range(held[slot.name]) for slot in slots])
        except (OSError, RuntimeError, MemoryError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            self._say("warning", f"the process cannot be forked ({reason}): host state is copied")
            self._require_room(captured, arena_bytes)
            return captured, None
        self._fork_seconds = time.perf_counter() - started
        return rest, HostImage(child, slots, {n: v for n, (_, _, v) in stored.items() if v is not None}, self)

    def note_lost(self, error: ImageLost) -> None:
        """Note that a checkpoint failed because its child was lost."""
        self._losses += 1
        if self._losses >= FAILURES or isinstance(error, CannotFork):
            self._is_off = True
            self._say("warning", f"{error}: host state is copied from now on")

    def note_written(self, size_bytes: int, changed_bytes: int) -> None:
        """Note how much of the arrays changed while a child wrote them."""
        self._losses = 0
        changed = f"{format_bytes(changed_bytes)} of {format_bytes(size_bytes)} changed while a fork was written"
        self._changed = changed if changed_bytes > MOST_CHANGED * size_bytes else None

    def _worth_it(self, held: Tensors) -> bool:
        if self._mode == "fork":
            return True
        size_bytes = sum(tensor.nbytes for tensor in held.values())
        if self._chosen is not None and size_bytes <= GROWTH * self._chosen[0]:
            reason = self._changed
            if self._fork_seconds > self._copy_seconds_per_byte * size_bytes > 0:
                reason = f"a fork blocks training for {self._fork_seconds:.2f} s"
            if self._chosen[1] and reason is not None and _fits(size_bytes):
                self._decide(size_bytes, False, reason)
            return self._chosen[1]
        if size_bytes < MIN_AUTO_BYTES:
            return False
        if not _fits(size_bytes):
            self._decide(size_bytes, True, "a second copy does not fit into free memory")
        elif self._has_memory_tier:
            self._decide(size_bytes, False, "")
        else:
            self._copy_seconds_per_byte = _seconds_per_byte(max(held.values(), key=lambda each: each.nbytes))
            copy_seconds = self._copy_seconds_per_byte * size_bytes
            fork_seconds = self._fork_seconds or FORK_SECONDS_PER_BYTE * psutil.Process().memory_info().rss
            reason = f"a copy would block training for {copy_seconds:.2f} s"
            self._decide(size_bytes, fork_seconds < copy_seconds, reason if fork_seconds < copy_seconds else "")
        assert self._chosen is not None
        return self._chosen[1]

    def _lacks_room(self, captured: CapturedState, arena_bytes: int) -> bool:
        """Return whether a copy in place of a fork would take memory that training may need."""
        if not self._has_forked:
            return False
        missing = sum(tensor.nbytes for tensor in captured.tensors.values()) - arena_bytes
        return missing > 0 and not _fits(missing)

    def _require_room(self, captured: CapturedState, arena_bytes: int) -> None:
        if self._lacks_room(captured, arena_bytes):
            raise MemoryError("host state cannot be forked, and a copy of it does not fit into free memory")

    def _decide(self, size_bytes: int, forks: bool, reason: str) -> None:
        self._chosen, self._changed = (size_bytes, forks), None
        if reason:
            how = "written from a fork" if forks else "copied"
            self._say("info", f"host state of {format_bytes(size_bytes)} is {how}: {reason}")

    def _say(self, level: Literal["info", "warning"], text: str) -> None:
        if text != self._said:
            self._said = text
            self._warn(level, text)


def _forkable(captured: CapturedState) -> dict[str, torch.Tensor]:
    """Return the large tensors of host state that a child can hold."""
    found = {}
    pins = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    for name in captured.host_state:
        tensor = captured.tensors.get(name)
        if tensor is None or not is_plain(tensor):
            continue
        # a device writes to pinned memory by its physical address, and the kernel copies it at a fork
        if name in captured.deferred or (pins and tensor.is_pinned()):
            continue
        found[name] = tensor
    if not found:
        return {}
    try:
        inherited = are_inherited([_range(tensor) for tensor in found.values()])
    except OSError:
        return {}
    return {name: tensor for (name, tensor), yes in zip(found.items(), inherited, strict=True) if yes}


def _fits(size_bytes: int) -> bool:
    return available_bytes() >= SPARE * size_bytes


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _seconds_per_byte(tensor: torch.Tensor) -> float:
    """Measure a copy of a tensor into allocated memory."""
    size_bytes = min(PROBE_BYTES, tensor.nbytes)
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        target = (ctypes.c_char * size_bytes).from_buffer(memory)
        for _ in range(2):
            started = time.perf_counter()
            ctypes.memmove(target, tensor.data_ptr(), size_bytes)
            seconds = time.perf_counter() - started
        del target
    return seconds / size_bytes
