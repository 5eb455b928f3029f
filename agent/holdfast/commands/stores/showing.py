"""`holdfast store show`: what is in a checkpoint, as a person reads it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from holdfast import restore
from holdfast.commands.console import Json, counted, print_json, print_table, seconds, size
from holdfast.commands.stores.asking import Job, Named, Where, chosen, opened
from holdfast.commands.stores.tensors import show_tensor
from holdfast.commands.stores.values import values_of
from holdfast.format import Manifest, Tensor, state_for, tensors_for
from holdfast.reading import object_of

MOST_TENSORS, MOST_VALUES = 20, 40
SHOWN_RANK = 0

OneTensor = Annotated[
    str | None, typer.Argument(metavar="[TENSOR]", help="A tensor to read: its statistics and first values.")
]


class ObjectRow(msgspec.Struct, kw_only=True):
    name: str
    tensors: int
    size_bytes: int


class TensorRow(msgspec.Struct, kw_only=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    shards: int
    """In so many parts it is stored."""
    own: bool
    """Every rank has one of its own under this name; this is that of rank 0."""


class Shown(msgspec.Struct, kw_only=True):
    """What a checkpoint's manifest says."""

    job: str
    checkpoint: str
    iteration: int
    lineage: int
    attempt: int
    kind: str
    created_at: float
    parent: str | None
    world_size: int
    files: dict[str, int]
    """Their sizes in bytes."""
    versions: dict[str, str]
    timings: dict[str, float]
    objects: list[ObjectRow]
    tensors: list[TensorRow]
    """As rank 0 sees them, largest first."""
    values: dict[str, Any]
    """Numbers and words of the objects' states: learning rates, counters, what a loop keeps."""


def show(path: Where, job: Job, checkpoint: Named, tensor: OneTensor = None, json: Json = False) -> None:
    """Show what is in a checkpoint, or one tensor of it.

    Only what is shown is read. A tensor's bytes are compared with their digest. Of a job of several ranks, what
    each rank had of its own is shown as rank 0 had it.

    Examples: holdfast store show checkpoints char-gpt latest  ·  holdfast store show checkpoints char-gpt 1200
    model.head.weight
    """
    with opened(path) as store:
        name = chosen(store, job, checkpoint)
        manifest = restore.manifest(store, job, name)
        if tensor is not None:
            show_tensor(store, job, name, manifest, tensor, json=json)
            return
        shown = _shown(name, manifest)
    if json:
        print_json(shown)
    else:
        _print(shown)


def _shown(checkpoint: str, manifest: Manifest) -> Shown:
    state = state_for(manifest, SHOWN_RANK)
    tensors = [_row(name, shards) for name, shards in tensors_for(manifest, SHOWN_RANK).items()]
    objects: dict[str, list[int]] = {keyword: [] for keyword in state}
    for row in tensors:
        objects.setdefault(object_of(row.name), []).append(row.size_bytes)
    return Shown(
        job=manifest.job,
        checkpoint=checkpoint,
        iteration=manifest.iteration,
        lineage=manifest.lineage,
        attempt=manifest.attempt,
        kind=manifest.kind,
        created_at=manifest.created_at,
        parent=manifest.parent,
        world_size=manifest.world_size,
        files={file.name: file.size_bytes for file in manifest.files},
        versions=manifest.versions,
        timings=manifest.timings,
        objects=[ObjectRow(name=n, tensors=len(s), size_bytes=sum(s)) for n, s in objects.items()],
        tensors=sorted(tensors, key=lambda row: (-row.size_bytes, row.name)),
        values=values_of(state),
    )


def _row(name: str, shards: Sequence[Tensor]) -> TensorRow:
    first = shards[0]
    return TensorRow(
        name=name,
        dtype=first.view or first.dtype,
        shape=first.global_shape,
        size_bytes=sum(shard.end - shard.start for shard in shards),
        shards=len(shards),
        own=first.rank is not None,
    )


def _print(shown: Shown) -> None:
    taken = size(sum(shown.files.values()))
    tensors = counted(len(shown.tensors), "tensor")
    print(f"{shown.job} {shown.checkpoint}: {taken}, {tensors}, {counted(len(shown.files), 'file')}")
    after = f", after {shown.parent}" if shown.parent else ""
    print(f"  state     right after iteration {shown.iteration} of lineage {shown.lineage}{after}")
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(shown.created_at))
    print(f"  taken     {at}, {shown.kind}, by attempt {shown.attempt} on {counted(shown.world_size, 'rank')}")
    if shown.versions:
        print(f"  versions  {', '.join(f'{name} {number}' for name, number in shown.versions.items())}")
    if shown.timings:
        told = (f"{name.removesuffix('_seconds')} {seconds(took)}" for name, took in shown.timings.items())
        print(f"  timings   {', '.join(told)}")
    print()
    print_table(
        ("OBJECT", "TENSORS", "SIZE"), [(o.name, str(o.tensors), size(o.size_bytes)) for o in shown.objects]
    )
    _print_tensors(shown)
    _print_values(shown)


def _print_tensors(shown: Shown) -> None:
    rows = shown.tensors[:MOST_TENSORS]
    if rows:
        print()
        cells = [(row.name, row.dtype, _shape(row.shape), size(row.size_bytes), _stored(row)) for row in rows]
        if shown.world_size > 1:
            print_table(("TENSOR", "DTYPE", "SHAPE", "SIZE", "STORED"), cells)
        else:
            print_table(("TENSOR", "DTYPE", "SHAPE", "SIZE"), [each[:-1] for each in cells])
    _print_rest(len(shown.tensors) - len(rows), "smaller one")


def _print_values(shown: Shown) -> None:
    rows = list(shown.values.items())[:MOST_VALUES]
    if rows:
        print()
        print_table(("VALUE", ""), [(name, _value(value)) for name, value in rows])
    _print_rest(len(shown.values) - len(rows), "more")


def _print_rest(count: int, what: str) -> None:
    if count:
        print(f"and {count} {what}{'s' if what.endswith('one') and count > 1 else ''}; --json has them all")


def _stored(row: TensorRow) -> str:
    return "by each rank" if row.own else "once" if row.shards == 1 else f"in {row.shards} shards"


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else str(value)
