"""`holdfast store show`: the content of a checkpoint."""

from __future__ import annotations

import difflib
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from holdfast.checkpoint import restore
from holdfast.checkpoint.reading import object_of
from holdfast.commands.console import counted, fail, print_json, print_table, progress_bar, say, seconds
from holdfast.commands.options import Json, StoredCheckpoint, StoreJob, StorePath
from holdfast.commands.stores.arguments import chosen, opened
from holdfast.errors import DamagedCheckpoint, HoldfastError
from holdfast.format.manifest import (
    MANIFEST,
    CheckpointDescription,
    Manifest,
    Tensor,
    description_of,
    raw_bytes,
    reused_bytes,
)
from holdfast.format.shards import is_module, state_for, tensors_for
from holdfast.store import Store
from holdfast.units import format_bytes

if TYPE_CHECKING:
    import torch

MAX_REPORTED_TENSORS, MOST_VALUES = 20, 40
SHOWN_RANK = 0
AT_ONCE = 1 << 22
"""Number of elements that are converted to float64 at a time."""
FIRST = 8
OWN = ("rng", "session")
"""Entries of the session itself, which are not shown as values."""
MOST_ITEMS = 8
"""Of longer lists only the length is shown."""
_WORDS = ("$int", "$number", "$str", "$dtype", "$device")
_ITEMS = ("$tuple", "$size", "$set", "$frozenset", "$deque")

OneTensor = Annotated[
    str | None, typer.Argument(metavar="[TENSOR]", help="Show the statistics and first values of this tensor.")
]


class ShownObject(msgspec.Struct, kw_only=True):
    name: str
    tensors: int
    size_bytes: int


class ShownTensor(msgspec.Struct, kw_only=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    shards: int
    """Number of stored shards."""
    own: bool
    """Whether each rank has a different tensor of this name; this is that of rank 0."""


class ShownRows(msgspec.Struct, kw_only=True):
    """A tensor of which the checkpoint wrote only rows; the others are in files that it links."""

    name: str
    rows: int
    """Rows that it wrote; small rows are grouped, and large ones are cut into parts."""
    written_bytes: int
    linked_bytes: int


class ShownCheckpoint(CheckpointDescription, frozen=True, kw_only=True):
    """The output for a checkpoint, from its manifest."""

    checkpoint: str
    files: dict[str, int]
    """Sizes in bytes by name."""
    reused_bytes: int
    """Size of the files among them that earlier checkpoints wrote."""
    raw_bytes: int
    """Size of the files before compression; 0 without it."""
    objects: list[ShownObject]
    tensors: list[ShownTensor]
    """The tensors of rank 0, largest first."""
    changed: list[ShownRows]
    """The tensors of which it wrote only rows, those with most bytes first."""
    values: dict[str, Any]
    """Numbers and strings in the states of the objects, such as learning rates and counters."""


def show(
    path: StorePath, job: StoreJob, checkpoint: StoredCheckpoint, tensor: OneTensor = None, json: Json = False
) -> None:
    """Show the content of a checkpoint, or of one tensor in it.

    The command reads only what it shows, and compares a tensor with its digest. With several ranks, the tensors
    and values of rank 0 are shown.

    Examples: holdfast store show checkpoints char-gpt latest  ·  holdfast store show checkpoints char-gpt 1200
    model.head.weight
    """
    with opened(path) as store:
        name = chosen(store, job, checkpoint)
        manifest = restore.manifest(store, job, name)
        if tensor is not None:
            show_tensor(store, job, name, manifest, tensor, json=json)
            return
        try:
            shown = _shown(name, manifest, sorted(_changed(store, job, name, manifest), key=_by_bytes))
            print_json(shown) if json else _print(shown)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            # its digest matches, so Holdfast did not write it
            raise DamagedCheckpoint(f"{name}/{MANIFEST}", f"its states are malformed ({error})") from error


def _by_bytes(shown: ShownRows) -> tuple[int, str]:
    return -shown.written_bytes, shown.name


def _changed(store: Store, job: str, checkpoint: str, manifest: Manifest) -> Iterator[ShownRows]:
    """Yield what is in the region files that the checkpoint wrote itself, but for those that cannot be read."""
    written = {file.name for file in manifest.files if file.written_by is None}
    for file in manifest.files:
        layers = (file.encoding.layers if file.encoding is not None else None) or []
        if not layers or layers[-1].name not in written:
            continue
        try:
            from holdfast.incremental.region_file import read_region, require_memory  # needs NumPy

            require_memory(layers[-1:])
            with store.open_file(job, checkpoint, layers[-1].name) as opened:
                rows = read_region(layers[-1], opened).rows
        except (
            HoldfastError,
            OSError,
            MemoryError,
            ImportError,
        ):  # the rest is shown; `verify` says what is wrong
            continue
        for tensor in manifest.tensors:
            if tensor.file == file.name and tensor.start in rows:
                count, size_bytes = rows[tensor.start]
                linked_bytes = tensor.end - tensor.start - size_bytes
                yield ShownRows(name=tensor.name, rows=count, written_bytes=size_bytes, linked_bytes=linked_bytes)


def _shown(checkpoint: str, manifest: Manifest, changed: list[ShownRows]) -> ShownCheckpoint:
    state = state_for(manifest, SHOWN_RANK)
    tensors = [_row(name, shards) for name, shards in tensors_for(manifest, SHOWN_RANK).items()]
    objects: dict[str, list[int]] = {keyword: [] for keyword in state}
    for row in tensors:
        objects.setdefault(object_of(row.name), []).append(row.size_bytes)
    return ShownCheckpoint(
        **description_of(manifest),
        checkpoint=checkpoint,
        files={file.name: file.size_bytes for file in manifest.files},
        reused_bytes=reused_bytes(manifest.files),
        raw_bytes=raw_bytes(manifest.files),
        objects=[ShownObject(name=n, tensors=len(s), size_bytes=sum(s)) for n, s in objects.items()],
        tensors=sorted(tensors, key=lambda row: (-row.size_bytes, row.name)),
        changed=changed,
        values=values_of(state),
    )


def _row(name: str, shards: Sequence[Tensor]) -> ShownTensor:
    first = shards[0]
    return ShownTensor(
        name=name,
        dtype=first.view or first.dtype,
        shape=first.global_shape,
        size_bytes=sum(shard.end - shard.start for shard in shards),
        shards=len(shards),
        own=first.rank is not None,
    )


def _print(shown: ShownCheckpoint) -> None:
    taken = format_bytes(sum(shown.files.values()))
    tensors = counted(len(shown.tensors), "tensor")
    if shown.reused_bytes:
        taken += f", {format_bytes(shown.reused_bytes)} of it from earlier checkpoints"
    if shown.raw_bytes:
        taken += f", {format_bytes(shown.raw_bytes)} before compression"
    say(f"{shown.job} {shown.checkpoint}: {taken}, {tensors}, {counted(len(shown.files), 'file')}")
    after = f", after {shown.parent}" if shown.parent else ""
    say(f"  state     after iteration {shown.iteration} of lineage {shown.lineage}{after}")
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(shown.created_at))
    say(f"  taken     {at}, {shown.kind}, by attempt {shown.attempt} on {counted(shown.world_size, 'rank')}")
    if shown.inexact is not None:
        say(f"  inexact   it descends from the degraded restore of {shown.inexact}")
    for left_out in shown.left_out:
        loader = f" of loader {left_out.loader}" if left_out.loader else ""
        say(f"  left out  {left_out.batches:,} batches{loader} after iteration {left_out.iteration}")
    if shown.versions:
        say(f"  versions  {', '.join(f'{name} {number}' for name, number in shown.versions.items())}")
    if shown.timings:
        timings = (f"{name.removesuffix('_seconds')} {seconds(took)}" for name, took in shown.timings.items())
        say(f"  timings   {', '.join(timings)}")
    if shown.metrics:
        metrics = (f"{name} {each.value:.6g} (iteration {each.iteration})" for name, each in shown.metrics.items())
        say(f"  metrics   {', '.join(metrics)}")
    say()
    print_table(
        ("OBJECT", "TENSORS", "SIZE"),
        [(o.name, str(o.tensors), format_bytes(o.size_bytes)) for o in shown.objects],
    )
    _print_tensors(shown)
    _print_changed(shown)
    _print_values(shown)


def _print_tensors(shown: ShownCheckpoint) -> None:
    rows = shown.tensors[:MAX_REPORTED_TENSORS]
    if rows:
        say()
        cells = [
            (row.name, row.dtype, _shape(row.shape), format_bytes(row.size_bytes), _stored(row)) for row in rows
        ]
        if shown.world_size > 1:
            print_table(("TENSOR", "DTYPE", "SHAPE", "SIZE", "STORED"), cells)
        else:
            print_table(("TENSOR", "DTYPE", "SHAPE", "SIZE"), [each[:-1] for each in cells])
    _print_rest(len(shown.tensors) - len(rows), "smaller one")


def _print_changed(shown: ShownCheckpoint) -> None:
    rows = shown.changed[:MAX_REPORTED_TENSORS]
    if rows:
        say()
        cells = [
            (each.name, f"{each.rows:,}", format_bytes(each.written_bytes), format_bytes(each.linked_bytes))
            for each in rows
        ]
        print_table(("CHANGED", "ROWS", "WRITTEN", "LINKED"), cells)
    _print_rest(len(shown.changed) - len(rows), "more")


def _print_values(shown: ShownCheckpoint) -> None:
    rows = list(shown.values.items())[:MOST_VALUES]
    if rows:
        say()
        print_table(("VALUE", ""), [(name, _value(value)) for name, value in rows])
    _print_rest(len(shown.values) - len(rows), "more")


def _print_rest(count: int, what: str) -> None:
    if count:
        say(f"and {count} {what}{'s' if what.endswith('one') and count > 1 else ''}; use --json to list all")


def _stored(row: ShownTensor) -> str:
    return "by each rank" if row.own else "once" if row.shards == 1 else f"in {row.shards} shards"


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else str(value)


class TensorSummary(msgspec.Struct, kw_only=True):
    """Statistics of a tensor. Minimum, maximum, mean and norm are those of the finite values or magnitudes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    nan: int
    infinite: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    norm: float
    first: list[Any]


def show_tensor(store: Store, job: str, checkpoint: str, manifest: Manifest, name: str, *, json: bool) -> None:
    names = tensors_for(manifest, SHOWN_RANK)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        fail(f"{checkpoint} has no tensor {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    try:
        with progress_bar(name) as progress:
            tensor = restore.load(store, job, checkpoint, only=[name], progress=progress).tensors[name]
    except ModuleNotFoundError as error:
        fail(f"showing a tensor needs {error.name}: install Holdfast with its extra `torch`")
    found = summary(name, tensor)
    if json:
        print_json(found)
    else:
        _print_tensor(found)


def summary(name: str, tensor: torch.Tensor) -> TensorSummary:
    flat = tensor.reshape(-1)
    parts = [_part(flat[at : at + AT_ONCE]) for at in range(0, flat.numel(), AT_ONCE)]
    finite = sum(part["finite"] for part in parts)
    return TensorSummary(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        size_bytes=tensor.nbytes,
        nan=sum(part["nan"] for part in parts),
        infinite=sum(part["infinite"] for part in parts),
        minimum=min((part["minimum"] for part in parts if part["finite"]), default=None),
        maximum=max((part["maximum"] for part in parts if part["finite"]), default=None),
        mean=math.fsum(part["sum"] for part in parts) / finite if finite else None,
        norm=math.sqrt(math.fsum(part["squares"] for part in parts)),
        first=[str(value) if isinstance(value, complex) else value for value in _first(flat)],
    )


def _part(flat: torch.Tensor) -> dict[str, Any]:
    """Return counts and sums over some elements."""
    import torch

    values = (flat.abs() if flat.is_complex() else flat).to(torch.float64)
    finite = values[values.isfinite()]
    some = finite.numel() > 0
    return {
        "nan": int(values.isnan().sum()),
        "infinite": int(values.isinf().sum()),
        "finite": finite.numel(),
        "minimum": finite.min().item() if some else 0.0,
        "maximum": finite.max().item() if some else 0.0,
        "sum": finite.sum().item(),
        "squares": finite.square().sum().item(),
    }


def _first(flat: torch.Tensor) -> list[Any]:
    import torch

    few = flat[:FIRST]
    return few.to(torch.float32).tolist() if few.is_floating_point() and few.itemsize < 4 else few.tolist()


def _print_tensor(found: TensorSummary) -> None:
    shape = "×".join(map(str, found.shape)) or "scalar"
    say(f"{found.name}: {found.dtype}, {shape}, {format_bytes(found.size_bytes)}, matches its digest")
    rows = {
        "minimum": found.minimum,
        "maximum": found.maximum,
        "mean": found.mean,
        "norm": found.norm,
        "NaN": found.nan,
        "infinite": found.infinite,
    }
    for name, value in rows.items():
        say(f"  {name:<9} {'-' if value is None else f'{value:.9g}'}")
    more = ", …" if math.prod(found.shape) > FIRST else ""
    first = (f"{value:.6g}" if isinstance(value, float) else str(value) for value in found.first)
    say(f"  first     {', '.join(first)}{more}")


def values_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers and strings by path, such as `optimizer.param_groups.0.lr`."""
    found: dict[str, Any] = {}
    for keyword, tree in state.items():
        if keyword not in OWN:
            found |= _walk(tree["state"] if is_module(tree) else tree, keyword)
    return found


def _walk(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        tag = next(iter(tree), "")
        if tag.startswith("$"):
            yield from _walk(tree["value"], path) if "value" in tree else _walk_tag(tag, tree[tag], path)
        else:
            for key, item in tree.items():
                yield from _walk(item, f"{path}.{key}")
    elif isinstance(tree, list):
        yield from _walk_items(tree, path)
    else:
        yield path, tree


def _walk_tag(tag: str, body: Any, path: str) -> Iterator[tuple[str, Any]]:
    if tag in ("$pairs", "$ordered", "$counter"):
        for key, item in body:
            yield from _walk(item, f"{path}.{_word(key)}")
    elif tag in _ITEMS:
        yield from _walk_items(body, path)
    elif tag in _WORDS:
        yield path, body
    elif tag == "$complex":
        yield path, str(complex(*map(float.fromhex, body)))
    elif tag in ("$bytes", "$bytearray"):
        yield path, f"{len(body) * 3 // 4} bytes"


def _walk_items(items: list[Any], path: str) -> Iterator[tuple[str, Any]]:
    inside = [list(_walk(item, f"{path}.{number}")) for number, item in enumerate(items)]
    plain = all(len(found) == 1 and found[0][0] == f"{path}.{i}" for i, found in enumerate(inside))
    if not plain:
        yield from itertools.chain.from_iterable(inside)
    elif len(items) > MOST_ITEMS:
        yield path, f"{len(items)} values"
    else:
        yield path, [value for ((_, value),) in inside]


def _word(key: Any) -> str:
    return str(next(iter(key.values()))) if isinstance(key, dict) else str(key)
