"""Choose, verify and load checkpoints; `state` applies them to live objects. Only loading imports torch.

One module, since all of it reads a manifest and takes the same steps from there.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from holdfast.checkpoint import reading
from holdfast.checkpoint.reading import FileRange, Progress, assign_buffer, ranges_to_load, ranges_to_verify
from holdfast.checkpoint.stored_manifest import StoredManifest, head_of, read_root, read_stored
from holdfast.errors import DamagedCheckpoint, HoldfastError, NoSuchCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.manifest_files import ManifestFile, ManifestSummary
from holdfast.format.shards import saved_rank, state_for, tensors_for
from holdfast.protocol.ids import checkpoint_id, parse_checkpoint_id
from holdfast.protocol.wire import Checkpoint, CheckpointKind
from holdfast.retention import LoggedMetric
from holdfast.store import Lineage, Store
from holdfast.store.base import FileReader, Pace
from holdfast.store.records import ancestry

if TYPE_CHECKING:
    import mmap

    import torch

    from holdfast.checkpoint.degraded import LostNumbers
    from holdfast.format.resharding import TensorAssembly
    from holdfast.format.shards import Region

logger = logging.getLogger("holdfast")

Tree = Any
Shape = tuple[str, tuple[int, ...]]
"""A torch dtype and a shape."""
Payload = Callable[[fmt.File, Collection[str]], memoryview]
"""Returns the tensor data of a file, after verifying the tensors of these names."""
Localize = Callable[[fmt.Manifest], fmt.Manifest]
"""Returns a manifest as a rank sees it."""
Regions = Callable[[Mapping[str, Tree], Mapping[str, Shape]], "Mapping[str, Region]"]

FIRST_LOG_SECONDS, LOG_SECONDS = 1.0, 5.0
_KIND = re.compile(rb'\n "kind": "([^"\\]*)",\n')
"""The line of a manifest that names the kind of the checkpoint."""


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A verified checkpoint in memory, as one rank sees it; its tensors are views of the data read."""

    id: str
    manifest: fmt.Manifest
    tensors: dict[str, torch.Tensor]
    """Complete tensors, except where a region was requested."""
    rank: int = 0
    """The saved rank that the tensors and trees belong to."""
    borrowed: bool = False
    """Whether the memory of the tensors will be reused, so that they must be copied."""
    repaired: tuple[str, ...] = ()
    """Damage that was repaired in memory, by file."""
    lost: tuple[LostNumbers, ...] = ()
    """Numbers whose less significant bytes are lost and were replaced, by tensor."""

    @property
    def loss(self) -> str | None:
        """What was replaced, in words; None if the state is exactly what was written."""
        if not self.lost:
            return None
        from holdfast.checkpoint.degraded import describe_lost

        return describe_lost(self.lost)

    @property
    def state(self) -> dict[str, Tree]:
        """Trees of this rank."""
        return state_for(self.manifest, self.rank)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Dtypes and global shapes of the tensors, by name."""
        seen = shapes(self.manifest, self.rank)
        return {name: seen[name] for name in self.tensors}


def lineage_checkpoints(store: Store, job: str) -> list[str]:
    """List the committed checkpoints that the current lineage descends from, its own first, newest first."""
    committed = store.checkpoints(job)
    lineages = store.records(job, Lineage)
    trained = [lineage.number for lineage in lineages] or [parse_checkpoint_id(each)[1] for each in committed]
    last = {number: last for number, last, _ in ancestry(lineages, max(trained, default=0))}
    reachable = [each for each in committed if (at := parse_checkpoint_id(each))[0] <= last.get(at[1], -1)]
    return sorted(reachable, key=lambda each: parse_checkpoint_id(each)[::-1], reverse=True)


def candidates(store: Store, job: str) -> Iterator[tuple[str, bool]]:
    """Yield (checkpoint, whether it continues the current lineage) for a restarted job, best first.

    First come the checkpoints of the current lineage and of those it descends from. If all of these are damaged,
    an abandoned lineage is better than none: the others follow, newest trained first.
    """
    descended = lineage_checkpoints(store, job)
    yield from ((checkpoint, True) for checkpoint in descended)
    abandoned = set(store.checkpoints(job)).difference(descended)
    for checkpoint in sorted(abandoned, key=lambda c: parse_checkpoint_id(c)[::-1], reverse=True):
        yield checkpoint, False


def find(store: Store, job: str, iteration: int) -> str:
    """Return the checkpoint at `iteration` that training descends from, or else that of the newest lineage.

    Raises:
        NoSuchCheckpoint: there is none; the error names the nearest earlier one.
    """
    known = [*lineage_checkpoints(store, job), *reversed(store.checkpoints(job))]
    if (at := next((c for c in known if parse_checkpoint_id(c)[0] == iteration), None)) is not None:
        return at
    earlier = [c for c in known if parse_checkpoint_id(c)[0] < iteration]
    nearest = max(earlier, key=lambda c: parse_checkpoint_id(c)[0], default=None)  # the first of equals
    advice = (
        f"the nearest earlier one is at iteration {parse_checkpoint_id(nearest)[0]:,}"
        if nearest
        else "there is no earlier one"
    )
    raise NoSuchCheckpoint(f"{job} has no checkpoint at iteration {iteration:,}; {advice}", nearest)


def explain(store: Store, job: str, checkpoint: str, error: Exception) -> Exception:
    """Return the error of a restore; for a checkpoint that is no longer in the store, say so."""
    if not isinstance(error, DamagedCheckpoint):
        return error
    try:
        left = store.checkpoints(job)
    except OSError:
        return error
    if checkpoint in left:
        return error
    iteration = parse_checkpoint_id(checkpoint)[0]
    iterations = sorted({parse_checkpoint_id(each)[0] for each in left})
    place = bisect.bisect(iterations, iteration)
    near = " or ".join(f"{each:,}" for each in iterations[max(0, place - 1) : place + 1])
    advice = f"restore iteration {near} instead" if near else "no checkpoint is left"
    message = f"{checkpoint} is no longer in store {store.url}: retention removed it; {advice}"
    return NoSuchCheckpoint(message, None)


def manifest(store: Store, job: str, checkpoint: str) -> fmt.Manifest:
    """Return the manifest of a checkpoint; DamagedCheckpoint or UnknownFormat when it cannot be used."""
    return read_stored(store, job, checkpoint).manifest


def shapes(manifest: fmt.Manifest, rank: int) -> dict[str, Shape]:
    """Return the dtypes and global shapes of the tensors of a saved rank, by name."""
    return _shapes(tensors_for(manifest, rank))


def of_kind(store: Store, job: str, kind: CheckpointKind, most: int) -> list[str]:
    """List the last committed checkpoints of a kind, at most `most`, without those with unreadable manifests."""
    found: list[str] = []
    for checkpoint in reversed(store.checkpoints(job)):
        if len(found) == most:
            break
        with contextlib.suppress(HoldfastError):
            if (
                _may_be(store, job, checkpoint, kind)
                and read_root(ManifestFile, store, job, checkpoint).kind == kind
            ):
                found.append(checkpoint)
    return found[::-1]


def _may_be(store: Store, job: str, checkpoint: str, kind: CheckpointKind) -> bool:
    """Return whether a checkpoint may be of a kind, by the first lines of its manifest, which name it."""
    named = _KIND.search(head_of(store, job, checkpoint))
    return named is None or named[1] == kind.encode()


def described(store: Store, job: str, *, most: int) -> Iterator[Checkpoint]:
    """Yield reports of the newest checkpoints of a job from their manifests. OSError: the store is unavailable."""
    for checkpoint in sorted(store.checkpoints(job), key=parse_checkpoint_id, reverse=True)[:most]:
        try:
            read = read_root(ManifestFile, store, job, checkpoint)
        except HoldfastError:  # damaged: a verification reports it
            continue
        yield Checkpoint(
            at=read.created_at, iteration=read.iteration, lineage=read.lineage, id=checkpoint,
            kind=cast("CheckpointKind", read.kind), state="durable",
            payload_bytes=sum(file.stored_bytes for file in read.files), reused_bytes=fmt.reused_bytes(read.files),
            raw_bytes=fmt.raw_bytes(read.files),
        )  # fmt: skip


class RetentionFacts:
    """Sizes and metrics of checkpoints, for retention rules. Each manifest is read once: it does not change."""

    def __init__(self, store: Store, job: str) -> None:
        self._store, self._job = store, job
        self._known: dict[str, tuple[Sequence[fmt.File | fmt.FileSummary], dict[str, LoggedMetric]]] = {}

    def read(self, checkpoints: Iterable[str]) -> tuple[dict[str, int], dict[str, dict[str, LoggedMetric]]]:
        """Return sizes in bytes and metrics of those with a valid manifest. OSError: the store is unavailable.

        A file that several checkpoints share counts for the newest of them, which keeps it when the others are
        removed.
        """
        found = {}
        for checkpoint in checkpoints:
            if checkpoint not in self._known:
                try:
                    read = read_root(ManifestSummary, self._store, self._job, checkpoint)
                except HoldfastError:
                    continue
                self._known[checkpoint] = read.files, read.metrics
            found[checkpoint] = self._known[checkpoint]
        self._known = found
        sizes, counted = {}, set[tuple[str, str]]()
        for checkpoint in sorted(found, key=parse_checkpoint_id, reverse=True):
            files = {(file.name, file.written_by or checkpoint): file for file in found[checkpoint][0]}
            sizes[checkpoint] = sum(file.stored_bytes for key, file in files.items() if key not in counted)
            if self._store.shares_files:
                counted.update(files)
        return sizes, {each: metrics for each, (_, metrics) in found.items()}


def verify(
    store: Store,
    job: str,
    checkpoint: str,
    *,
    threads: int | None = None,
    pace: Pace | None = None,
    sink: Callable[[FileRange], None] | None = None,
    progress: Progress | None = None,
    on_repaired: Callable[[str], None] | None = None,
) -> fmt.Manifest:
    """Read a checkpoint from its storage device and compare every byte with its digests; see `reading.read`.

    With `on_repaired`, damage that can be repaired in memory is passed to it; otherwise it raises as well.

    Raises:
        DamagedCheckpoint: names the file and the range that differs.
        UnknownFormat: a newer Holdfast wrote it.
        OSError: the store cannot be read, which says nothing about the checkpoint.
    """
    stored = read_stored(store, job, checkpoint)
    found = stored.manifest
    ranges = [each for file in found.files for each in ranges_to_verify(found, file)]
    if on_repaired is None:
        for name, copy in stored.damaged.items():
            raise DamagedCheckpoint(f"{checkpoint}/{name}", f"is damaged; {copy} is sound")
        reading.read(
            store, job, checkpoint, ranges, keep=False, threads=threads, pace=pace, sink=sink, progress=progress
        )
        return found
    from holdfast.checkpoint.repair import read_repairing

    for damage in stored.damage + read_repairing(
        store, job, checkpoint, ranges, keep=False, threads=threads, pace=pace, sink=sink, progress=progress
    ):
        on_repaired(damage)
    return found


def load(
    store: Store,
    job: str,
    checkpoint: str,
    *,
    only: Collection[str] | None = None,
    rank: int = 0,
    regions: Regions | None = None,
    buffer: memoryview | None = None,
    known: StoredManifest | None = None,
    from_disk: bool = False,
    pace: Pace | None = None,
    degraded: bool = False,
    progress: Progress | None = None,
) -> LoadedCheckpoint:
    """Read and verify a checkpoint for one rank.

    Raises what `verify` does, and MemoryError.

    Args:
        only: names of the tensors to load; by default all.
        rank: the rank that loads; it takes the rank-local state of `manifest.saved_rank`, and reads only what it
            needs.
        regions: called with the trees of the rank and the dtypes and global shapes of its tensors; returns the
            regions to load. Other tensors are loaded completely.
        buffer: page-aligned memory to read into, as far as it suffices. The result then has `borrowed` set. A load
            that must allocate its memory takes twice as long.
        known: the manifest, if it has been read.
        from_disk: read from the storage device, past any cache.
        pace: called with a number of bytes before they are read, and may wait.
        degraded: replace lost bytes where the important ones are left; the result then has `lost` set.
        progress: called between blocks; by default a long load is logged.
    """
    known = known or read_stored(store, job, checkpoint)
    found, repaired = known.manifest, known.damage
    saved = saved_rank(found, rank)
    wanted = _wanted(found, saved, only, regions)
    ranges = _ranges(found, wanted)
    if buffer is not None:
        assign_buffer(buffer, ranges)
    shown = progress or _log_progress(checkpoint)
    how: dict[str, Any] = {"from_disk": from_disk, "pace": pace, "progress": shown}
    of_files, lost = _read_ranges(store, job, checkpoint, ranges, degraded=degraded, **how)
    repaired += of_files
    for damage in repaired:
        logger.info("%s was repaired in memory: %s", checkpoint, damage)
    stored = [pair for each in ranges for pair in _tensors_in(each.reserve(), each.start, each.tensors)]
    tensors = _assembled(stored, wanted)
    return LoadedCheckpoint(checkpoint, found, tensors, saved, buffer is not None, tuple(repaired), tuple(lost))


def _read_ranges(
    store: Store,
    job: str,
    checkpoint: str,
    ranges: Sequence[FileRange],
    *,
    degraded: bool,
    from_disk: bool,
    **options: Any,
) -> tuple[list[str], list[LostNumbers]]:
    """Read and verify `ranges`; return the repaired damage and the lost numbers."""
    has_parity = any(each.file.parity is not None for each in ranges)
    if not has_parity and store.copy_elsewhere(job, checkpoint) is None:

        def open_file(file: fmt.File) -> FileReader:
            return reading.open_whole(store, job, checkpoint, file, from_disk=from_disk)

        reading.read(store, job, checkpoint, ranges, open_file=open_file, **options)
        return [], []
    from holdfast.checkpoint.degraded import read_degraded
    from holdfast.checkpoint.repair import read_repairing

    if degraded:
        return read_degraded(store, job, checkpoint, ranges, from_disk=from_disk, **options)
    return read_repairing(store, job, checkpoint, ranges, from_disk=from_disk, **options), []


def _wanted(
    manifest: fmt.Manifest, rank: int, only: Collection[str] | None, regions: Regions | None
) -> dict[str, TensorAssembly] | None:
    """Return what a rank needs of each tensor; None when it needs every stored tensor unchanged."""
    if only is None and regions is None and manifest.world_size == 1:
        return None
    from holdfast.format.resharding import plan_assembly

    seen = tensors_for(manifest, rank)
    if only is not None:
        seen = {name: shards for name, shards in seen.items() if name in only}
    asked = regions(state_for(manifest, rank), _shapes(seen)) if regions is not None else {}
    if only is None and not asked and manifest.world_size == 1:
        return None
    return {name: plan_assembly(name, shards, asked.get(name)) for name, shards in seen.items()}


def _ranges(manifest: fmt.Manifest, wanted: Mapping[str, TensorAssembly] | None) -> list[FileRange]:
    """Return the ranges to read for all tensors, or for those `wanted`."""
    if wanted is None:
        return [each for file in manifest.files for each in ranges_to_load(manifest, file)]
    return [each for file, names in _names(manifest, wanted) for each in ranges_to_load(manifest, file, names)]


def _names(
    manifest: fmt.Manifest, wanted: Mapping[str, TensorAssembly] | None
) -> Iterator[tuple[fmt.File, Collection[str]]]:
    """Yield each file to read, and the names of the tensors to read from it."""
    names: dict[str, set[str]] = {}
    shards = (
        manifest.tensors if wanted is None else [copy.shard for each in wanted.values() for copy in each.copies]
    )
    for shard in shards:
        names.setdefault(shard.file, set()).add(shard.name)
    return ((file, names[file.name]) for file in manifest.files if file.name in names)


def _shapes(seen: Mapping[str, Sequence[fmt.Tensor]]) -> dict[str, Shape]:
    from holdfast.format.dtypes import shape_of

    return {name: shape_of(shards[0]) for name, shards in seen.items()}


def _log_progress(checkpoint: str) -> Progress:
    """Return a progress callback that logs, once a load takes longer than FIRST_LOG_SECONDS."""
    started = logged_at = time.monotonic()
    every_seconds = FIRST_LOG_SECONDS

    def log(done_bytes: int, total_bytes: int) -> None:
        nonlocal logged_at, every_seconds
        now = time.monotonic()
        if now - logged_at >= every_seconds and done_bytes < total_bytes:
            logged_at, every_seconds = now, LOG_SECONDS
            logger.info(
                "reading %s: %.0f of %.0f MB, %.0f MB/s",
                *(checkpoint, done_bytes / 1e6, total_bytes / 1e6, done_bytes / 1e6 / (now - started)),
            )

    return log


def load_from_memory(
    found: fmt.Manifest, payload: Payload, *, rank: int = 0, regions: Regions | None = None
) -> LoadedCheckpoint:
    """Load a checkpoint whose files are in memory, as `load` does from a store.

    Raises what `payload` does, and DamagedCheckpoint when the shards of a tensor do not cover it.
    """
    saved = saved_rank(found, rank)
    wanted = _wanted(found, saved, None, regions)
    stored: list[tuple[fmt.Tensor, torch.Tensor]] = []
    for file, names in _names(found, wanted):
        tensors = (tensor for tensor in fmt.tensors_of(found, file.name) if tensor.name in names)
        stored.extend(_tensors_in(payload(file, names), file.header_bytes, tensors))
    checkpoint = checkpoint_id(found.iteration, found.lineage)
    return LoadedCheckpoint(checkpoint, found, _assembled(stored, wanted), saved, borrowed=True)


def _tensors_in(
    memory: mmap.mmap | memoryview, base: int, tensors: Iterable[fmt.Tensor]
) -> Iterator[tuple[fmt.Tensor, torch.Tensor]]:
    import torch

    from holdfast.format.dtypes import DTYPES

    for tensor in tensors:
        dtype, shape = DTYPES[tensor.dtype], tensor.shape
        if tensor.start == tensor.end:
            yield tensor, torch.empty(shape, dtype=dtype, device="cpu")
            continue
        # a separate storage: torch.save writes the whole storage of a tensor
        at, count = tensor.start - base, math.prod(shape)
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=at)
        yield tensor, flat if len(shape) == 1 else flat.view(shape)


def _assembled(
    stored: list[tuple[fmt.Tensor, torch.Tensor]], wanted: Mapping[str, TensorAssembly] | None
) -> dict[str, torch.Tensor]:
    """Return the tensors by name in their torch dtypes, assembled from the shards of several ranks."""
    if wanted is None:
        found = {tensor.name: read for tensor, read in stored}
        views = {tensor.name: tensor.view for tensor, _ in stored if tensor.view is not None}
    else:
        by_entry = {id(tensor): read for tensor, read in stored}
        found = {name: each.build(by_entry) for name, each in wanted.items()}
        views = {name: each.view for name, each in wanted.items() if each.view is not None}
    return found | {name: _with_dtype(found[name], view) for name, view in views.items()}


def _with_dtype(tensor: torch.Tensor, view: str) -> torch.Tensor:
    import torch

    from holdfast.format.dtypes import dtype_of

    dtype = dtype_of("U8", view)
    if dtype.is_complex:  # cloned, since the file is aligned to elements only
        return torch.view_as_complex(tensor.clone())
    return tensor.view(dtype)
