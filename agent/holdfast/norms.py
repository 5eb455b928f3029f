"""What the floating-point tensors of a checkpoint come to, summed up from their bytes piece by piece."""

from __future__ import annotations

import dataclasses
import math

import torch

from holdfast import format as fmt
from holdfast.dtypes import DTYPES
from holdfast.protocol import MOST_TENSORS, TensorNorms


@dataclasses.dataclass(slots=True)
class Sums:
    """Of one tensor, over what is finite; and of what another checkpoint has in its place."""

    elements: int = 0
    squares: float = 0.0
    largest: float = 0.0
    nan: int = 0
    inf: int = 0
    other_squares: float = 0.0
    difference_squares: float = 0.0
    comparable: bool = True
    """There is a counterpart to all that was seen of it."""

    def add(self, values: torch.Tensor, other: torch.Tensor | None) -> None:
        """Some elements, in float64, and their counterparts."""
        finite = values.isfinite()
        self.elements += values.numel()
        if not bool(finite.all()):
            self.nan += int(values.isnan().sum())
            self.inf += int(values.isinf().sum())
        here = values[finite]
        self.squares += _squares(here)
        self.largest = max(self.largest, here.abs().max().item() if here.numel() else 0.0)
        self.comparable &= other is not None
        if other is not None:
            self.other_squares += _squares(other[other.isfinite()])
            both = finite & other.isfinite()
            self.difference_squares += _squares(values[both] - other[both])


class Norms:
    """Collects the sums of a checkpoint's tensors."""

    def __init__(self, *, compared: bool) -> None:
        self._compared = compared
        self._sums: dict[str, Sums] = {}

    def add(self, tensor: fmt.Tensor, data: memoryview, other: memoryview | None) -> None:
        """Bytes of a tensor, or of a shard of it, and those in their place in the other checkpoint.

        Of a tensor that holds no floating-point numbers nothing is told.
        """
        dtype = DTYPES[tensor.dtype]
        if not (dtype.is_floating_point or dtype.is_complex):
            return
        name = tensor.name if tensor.rank is None else f"{tensor.name} [rank {tensor.rank}]"
        sums = self._sums.setdefault(name, Sums())
        if len(data):
            sums.add(_values(data, dtype), None if other is None else _values(other, dtype))

    def told(self) -> TensorNorms:
        """Where there are too many: first those that hold what is not finite, then the largest."""
        by_weight = sorted(
            self._sums, key=lambda name: (self._sums[name].nan + self._sums[name].inf, self._sums[name].elements)
        )
        kept = set(by_weight[-MOST_TENSORS:])
        names = [name for name in self._sums if name in kept]
        rows = [self._sums[name] for name in names]
        return TensorNorms(
            name=names,
            elements=[each.elements for each in rows],
            norm=[math.sqrt(each.squares) for each in rows],
            largest=[each.largest for each in rows],
            nan=[each.nan for each in rows],
            inf=[each.inf for each in rows],
            other_norm=[_if(each, each.other_squares) for each in rows] if self._compared else [],
            distance=[_if(each, each.difference_squares) for each in rows] if self._compared else [],
            left_out=len(self._sums) - len(names),
        )


def _values(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    stored = torch.frombuffer(data, dtype=dtype)
    parts = torch.view_as_real(stored).flatten() if dtype.is_complex else stored
    return parts.to(torch.float64)


def _squares(values: torch.Tensor) -> float:
    return torch.dot(values, values).item()


def _if(sums: Sums, squares: float) -> float:
    return math.sqrt(squares) if sums.comparable else math.nan
