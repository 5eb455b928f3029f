"""Choose a checkpoint, verify it, load it. Applying it to live objects is the session's, through `state`.

torch is imported by `load` alone: to choose and to verify, a machine without it will do.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint import reading
from holdfast.checkpoint.reading import Progress, Run, lay_into, runs_to_keep, runs_to_verify
from holdfast.errors import DamagedCheckpoint, HoldfastError, NoSuchCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.shards import require_whole
from holdfast.protocol.messages import CheckpointKind, checkpoint_id, parse_checkpoint_id
from holdfast.store import Lineage, Store, read_manifest
from holdfast.store.records import descent

if TYPE_CHECKING:
    import mmap

    import torch

    from holdfast.format.resharding import Region, Wanted

logger = logging.getLogger("holdfast")

Tree = Any
Shape = tuple[str, tuple[int, ...]]
"""A dtype and a shape as torch says them."""
Payload = Callable[[fmt.File, Collection[str]], memoryview]
"""Gives the tensors of a file, with those of these names verified."""
Regions = Callable[[Mapping[str, Tree], Mapping[str, Shape]], "Mapping[str, Region]"]

FIRST_TOLD_SECONDS, TOLD_EVERY_SECONDS = 1.0, 5.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A verified checkpoint in memory, as one rank sees it; its tensors are views into the files read."""

    id: str
    manifest: fmt.Manifest
    tensors: dict[str, torch.Tensor]
    """Whole ones, but for those of which a region was asked for."""
    rank: int = 0
    """The saved rank whose own tensors and trees these are."""
    borrowed: bool = False
    """Their memory will be used for something else: whatever is to stay must be copied."""

    @property
    def state(self) -> dict[str, Tree]:
        """The trees of this rank."""
        return fmt.state_for(self.manifest, self.rank)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Dtype and global shape of the tensors, by name."""
        seen = shapes(self.manifest, self.rank)
        return {name: seen[name] for name in self.tensors}


def chain(store: Store, job: str) -> list[str]:
    """The committed checkpoints that the current lineage descends from, its own first, newest first."""
    committed = store.checkpoints(job)
    lineages = store.records(job, Lineage)
    trained = [lineage.number for lineage in lineages] or [parse_checkpoint_id(each)[1] for each in committed]
    last = {number: last for number, last, _ in descent(lineages, max(trained, default=0))}
    standing = [each for each in committed if (at := parse_checkpoint_id(each))[0] <= last.get(at[1], -1)]
    return sorted(standing, key=lambda each: parse_checkpoint_id(each)[::-1], reverse=True)


def candidates(store: Store, job: str) -> Iterator[tuple[str, bool]]:
    """(checkpoint, whether it continues the current lineage) that a restarted job may go on from, best first.

    Back along the current lineage and those it descends from; only when none of these is sound, what else
    there is, newest trained first: better an abandoned branch than to start from nothing.
    """
    descent = chain(store, job)
    yield from ((checkpoint, True) for checkpoint in descent)
    strays = (c for c in store.checkpoints(job) if c not in descent)
    for checkpoint in sorted(strays, key=lambda c: parse_checkpoint_id(c)[::-1], reverse=True):
        yield checkpoint, False


def find(store: Store, job: str, iteration: int) -> str:
    """The checkpoint at `iteration`: the one that training descends from, else of the newest lineage.

    Raises:
        NoSuchCheckpoint: there is none; it names the nearest earlier one, which is never used unasked.
    """
    known = [*chain(store, job), *reversed(store.checkpoints(job))]
    at = next((c for c in known if parse_checkpoint_id(c)[0] == iteration), None)
    if at is not None:
        return at
    earlier = [c for c in known if parse_checkpoint_id(c)[0] < iteration]
    nearest = max(earlier, key=lambda c: parse_checkpoint_id(c)[0], default=None)  # the first of equals
    advice = (
        f"the nearest earlier one is at iteration {parse_checkpoint_id(nearest)[0]:,}"
        if nearest
        else "there is no earlier one either"
    )
    raise NoSuchCheckpoint(f"{job} has no checkpoint at iteration {iteration:,}; {advice}", nearest)


def manifest(store: Store, job: str, checkpoint: str) -> fmt.Manifest:
    """The manifest of a checkpoint; DamagedCheckpoint or UnknownFormat when it cannot be used."""
    found = fmt.decode_manifest(read_manifest(store, job, checkpoint), f"{checkpoint}/{fmt.MANIFEST}")
    if (found.job, checkpoint_id(found.iteration, found.lineage)) != (job, checkpoint):
        raise DamagedCheckpoint(
            f"{checkpoint}/{fmt.MANIFEST}",
            f"is that of {found.job}, iteration {found.iteration}, lineage {found.lineage}",
        )
    fmt.require_sound(found)
    require_whole(found)
    return found


def shapes(manifest: fmt.Manifest, rank: int) -> dict[str, Shape]:
    """Dtype and global shape of the tensors that a saved rank had, by name."""
    return _shapes(fmt.tensors_for(manifest, rank))


def of_kind(store: Store, job: str, kind: CheckpointKind) -> list[str]:
    """The committed checkpoints of a kind, as their manifests say; one that cannot be read is of none."""
    found = []
    for checkpoint in store.checkpoints(job):
        with contextlib.suppress(HoldfastError):
            if manifest(store, job, checkpoint).kind == kind:
                found.append(checkpoint)
    return found


class Sizes:
    """Of one job. A committed checkpoint does not change: each manifest is read once."""

    def __init__(self, store: Store, job: str) -> None:
        self._store, self._job = store, job
        self._known: dict[str, int] = {}

    def of(self, checkpoints: Iterable[str]) -> dict[str, int]:
        """In bytes, by checkpoint; without those whose manifest cannot be used. OSError: the store is away."""
        found = {}
        for checkpoint in checkpoints:
            if checkpoint not in self._known:
                try:
                    files = manifest(self._store, self._job, checkpoint).files
                except HoldfastError:
                    continue
                self._known[checkpoint] = sum(file.size_bytes for file in files)
            found[checkpoint] = self._known[checkpoint]
        self._known = {each: self._known[each] for each in found}
        return found


def verify(store: Store, job: str, checkpoint: str, *, progress: Progress | None = None) -> fmt.Manifest:
    """Read a checkpoint and compare every byte with its digests.

    Raises:
        DamagedCheckpoint: names file and reason.
        UnknownFormat: a newer Holdfast wrote it.
        OSError: the store cannot be read, which says nothing about the checkpoint.
    """
    found = manifest(store, job, checkpoint)
    runs = [run for file in found.files for run in runs_to_verify(found, file)]
    reading.read(store, job, checkpoint, found, runs, keep=False, progress=progress)
    return found


def load(
    store: Store,
    job: str,
    checkpoint: str,
    *,
    only: Collection[str] | None = None,
    rank: int = 0,
    regions: Regions | None = None,
    room: memoryview | None = None,
    progress: Progress | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Loaded:
    """Read and verify a checkpoint, or `only` the tensors of these names; nothing comes back that is not whole.

    Without `progress` a long one is told in the log. `meanwhile` is called while threads read. Raises what
    `verify` does, and MemoryError.

    Args:
        rank: for which rank: what each had of its own is that of `format.saved_rank`. What of several ranks this
            one has no use for is not read.
        regions: asked, with the trees of this rank and the dtypes and global shapes of its tensors, of which
            tensors it wants a region only. All others are put together whole.
        room: memory to read into, from the start of a page, as far as it goes: what is loaded is borrowed then.
            A load that has to ask for memory of its own takes twice as long.
    """
    found = manifest(store, job, checkpoint)
    saved = fmt.saved_rank(found, rank)
    wanted = _wanted(found, saved, only, regions)
    runs = _runs(found, wanted)
    if room is not None:
        lay_into(room, runs)
    stored: list[tuple[fmt.Tensor, torch.Tensor]] = []

    def prepare() -> None:
        stored.extend(pair for run in runs for pair in _stored(run))
        meanwhile()

    reading.read(
        *(store, job, checkpoint, found, runs),
        progress=progress or _log_progress(checkpoint),
        meanwhile=prepare,
    )
    return Loaded(checkpoint, found, _placed(stored, wanted), saved, borrowed=room is not None)


def _wanted(
    manifest: fmt.Manifest, rank: int, only: Collection[str] | None, regions: Regions | None
) -> dict[str, Wanted] | None:
    """What a rank has a use for; None where that is all there is, as it is."""
    if only is None and regions is None and manifest.world_size == 1:
        return None
    from holdfast.format.resharding import wanted

    seen = fmt.tensors_for(manifest, rank)
    if only is not None:
        seen = {name: shards for name, shards in seen.items() if name in only}
    asked = regions(fmt.state_for(manifest, rank), _shapes(seen)) if regions is not None else {}
    if only is None and not asked and manifest.world_size == 1:
        return None
    return {name: wanted(name, shards, asked.get(name)) for name, shards in seen.items()}


def _runs(manifest: fmt.Manifest, wanted: Mapping[str, Wanted] | None) -> list[Run]:
    """What to read: all there is, or what is `wanted`."""
    if wanted is None:
        return [run for file in manifest.files for run in runs_to_keep(manifest, file)]
    return [run for file, names in _names(manifest, wanted) for run in runs_to_keep(manifest, file, names)]


def _names(
    manifest: fmt.Manifest, wanted: Mapping[str, Wanted] | None
) -> Iterator[tuple[fmt.File, Collection[str]]]:
    """The tensors to read of each file that has any of them: all there are, or what is `wanted`."""
    names: dict[str, set[str]] = {}
    shards = (
        manifest.tensors if wanted is None else [copy.shard for each in wanted.values() for copy in each.copies]
    )
    for shard in shards:
        names.setdefault(shard.file, set()).add(shard.name)
    return ((file, names[file.name]) for file in manifest.files if file.name in names)


def _shapes(seen: Mapping[str, Sequence[fmt.Tensor]]) -> dict[str, Shape]:
    from holdfast.format.resharding import shape_of

    return {name: shape_of(shards[0]) for name, shards in seen.items()}


def _log_progress(checkpoint: str) -> Progress:
    """Says how far a load is, once it takes longer than a person waits without wondering."""
    started = told_at = time.monotonic()
    every_seconds = FIRST_TOLD_SECONDS

    def tell(done_bytes: int, total_bytes: int) -> None:
        nonlocal told_at, every_seconds
        now = time.monotonic()
        if now - told_at >= every_seconds and done_bytes < total_bytes:
            told_at, every_seconds = now, TOLD_EVERY_SECONDS
            logger.info(
                "reading %s: %.0f of %.0f MB, %.0f MB/s",
                *(checkpoint, done_bytes / 1e6, total_bytes / 1e6, done_bytes / 1e6 / (now - started)),
            )

    return tell


def in_memory(found: fmt.Manifest, payload: Payload, *, rank: int = 0, regions: Regions | None = None) -> Loaded:
    """A checkpoint that is in memory as it would lie in its files, as `load` has it from a store.

    Raises what `payload` does, and DamagedCheckpoint when the shards of a tensor do not make all of it.
    """
    saved = fmt.saved_rank(found, rank)
    wanted = _wanted(found, saved, None, regions)
    stored: list[tuple[fmt.Tensor, torch.Tensor]] = []
    for file, names in _names(found, wanted):
        tensors = (tensor for tensor in fmt.tensors_of(found, file.name) if tensor.name in names)
        stored.extend(_in(payload(file, names), file.header_bytes, tensors))
    checkpoint = checkpoint_id(found.iteration, found.lineage)
    return Loaded(checkpoint, found, _placed(stored, wanted), saved, borrowed=True)


def _stored(run: Run) -> Iterator[tuple[fmt.Tensor, torch.Tensor]]:
    """The tensors in the memory that is read, all of which stays for as long as one of them does."""
    return _in(run.reserve(), run.base, run.tensors)


def _in(
    memory: mmap.mmap | memoryview, base: int, tensors: Iterable[fmt.Tensor]
) -> Iterator[tuple[fmt.Tensor, torch.Tensor]]:
    import torch

    from holdfast.format.dtypes import DTYPES

    for tensor in tensors:
        dtype, shape = DTYPES[tensor.dtype], tensor.shape
        if tensor.start == tensor.end:
            yield tensor, torch.empty(shape, dtype=dtype, device="cpu")
            continue
        # a storage of its own, which torch.save writes alone, rather than a view of all that was read
        at, count = tensor.start - base, math.prod(shape)
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=at)
        yield tensor, flat if len(shape) == 1 else flat.view(shape)


def _placed(
    stored: list[tuple[fmt.Tensor, torch.Tensor]], wanted: Mapping[str, Wanted] | None
) -> dict[str, torch.Tensor]:
    """By name, as torch's own dtypes, put together of what several ranks stored."""
    if wanted is None:
        found = {tensor.name: read for tensor, read in stored}
        views = {tensor.name: tensor.view for tensor, _ in stored if tensor.view is not None}
    else:
        by_entry = {id(tensor): read for tensor, read in stored}
        found = {name: each.made_of(by_entry) for name, each in wanted.items()}
        views = {name: each.view for name, each in wanted.items() if each.view is not None}
    return found | {name: _viewed(found[name], view) for name, view in views.items()}


def _viewed(tensor: torch.Tensor, view: str) -> torch.Tensor:
    import torch

    from holdfast.format.resharding import dtype_of

    dtype = dtype_of("U8", view)
    if dtype.is_complex:  # a clone, since the file aligns to elements only
        return torch.view_as_complex(tensor.clone())
    return tensor.view(dtype)
