"""One tensor of a checkpoint: read, verified, summed up."""

from __future__ import annotations

import difflib
import math
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast import restore
from holdfast.commands.bar import progress_bar
from holdfast.commands.console import fail, print_json, size
from holdfast.format import Manifest, tensors_for
from holdfast.store import Store

if TYPE_CHECKING:
    import torch

AT_ONCE = 1 << 22
"""So many elements are looked at in float64 at a time."""
FIRST = 8


class Summary(msgspec.Struct, kw_only=True):
    """A tensor in numbers. Minimum, maximum, mean and norm are of its finite values, or of their magnitudes."""

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
    names = tensors_for(manifest, 0)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        fail(f"{checkpoint} has no tensor {name!r}" + (f"; near it: {', '.join(near)}" if near else ""))
    try:
        with progress_bar(name) as progress:
            tensor = restore.load(store, job, checkpoint, only=[name], progress=progress).tensors[name]
    except ModuleNotFoundError as error:
        fail(f"to look into a tensor, {error.name} is needed: install Holdfast with its extra `torch`")
    found = summary(name, tensor)
    if json:
        print_json(found)
    else:
        _print(found)


def summary(name: str, tensor: torch.Tensor) -> Summary:
    flat = tensor.reshape(-1)
    parts = [_part(flat[at : at + AT_ONCE]) for at in range(0, flat.numel(), AT_ONCE)]
    finite = sum(part["finite"] for part in parts)
    return Summary(
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
    """Of some elements: how many are what, and sums of the finite ones."""
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


def _print(found: Summary) -> None:
    shape = "×".join(map(str, found.shape)) or "scalar"
    print(f"{found.name}: {found.dtype}, {shape}, {size(found.size_bytes)}, as its digest says")
    rows = {
        "minimum": found.minimum,
        "maximum": found.maximum,
        "mean": found.mean,
        "norm": found.norm,
        "NaN": found.nan,
        "infinite": found.infinite,
    }
    for name, value in rows.items():
        print(f"  {name:<9} {'-' if value is None else f'{value:.9g}'}")
    more = ", …" if math.prod(found.shape) > FIRST else ""
    first = (f"{value:.6g}" if isinstance(value, float) else str(value) for value in found.first)
    print(f"  first     {', '.join(first)}{more}")
