"""The round trip of a state: whether the tree that a checkpoint stores decodes to what was captured.

Digests prove the bytes of tensors. Everything else is compared here: types, values, keys, dtypes and shapes.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from holdfast.errors import HoldfastError
from holdfast.format.dtypes import DTYPES, dtype_of_view
from holdfast.format.manifest import Shard, TensorRange
from holdfast.state.tree import Shapes, Tree, decode_without_memory


class Description(NamedTuple):
    """A value of which no part can change."""

    kind: str
    value: object
    """All that there is of a leaf; what a container of this kind must agree in."""
    parts: tuple[tuple[object, Description], ...] = ()
    """What a container holds, by key or number."""


class RoundTrip:
    """The states of a session's objects at one instant, described so that training cannot change them.

    Args:
        states: what `state_dict()` of each object returns, by keyword.
        shapes: dtype and global shape of every tensor of the trees.
        refusal: why the objects would refuse their own state, if they would.
        modules: keywords of modules, whose trees have more than their state.
    """

    def __init__(
        self,
        states: Mapping[str, Any],
        shapes: Shapes,
        refusal: str | None = None,
        *,
        modules: Collection[str] = (),
    ) -> None:
        self._states = {keyword: describe(state) for keyword, state in states.items()}
        self._shapes, self._refusal, self._modules = shapes, refusal, modules
        self.holds = False
        """A checkpoint was compared, and gives back what was captured."""

    def require_same(
        self,
        trees: Mapping[str, Tree],
        slots: Sequence[TensorRange],
        views: Mapping[str, str],
        shards: Mapping[str, Shard],
    ) -> None:
        """Decode what is about to be written; for any thread, since it reads no object of the script's.

        HoldfastError names the keyword and the path of what would come back otherwise. What the decoder raises
        passes through.
        """
        if self._refusal is not None:
            raise HoldfastError(self._refusal)
        shapes = {
            **self._shapes,
            **{slot.name: _read_as(slot, views) for slot in slots if slot.name not in shards},
        }
        for name, (dtype, shape) in shapes.items():
            if (dtype, shape) != self._shapes[name]:
                raise HoldfastError(f"{name} would come back as {shape} of {dtype}, and is {self._shapes[name]}")
        decoded = {key: decode_without_memory(tree, shapes) for key, tree in as_stored(trees).items()}
        for keyword, captured in self._states.items():
            state = decoded[keyword]
            if keyword in self._modules:
                state = state["state"]
            if (found := difference(keyword, captured, describe(state))) is not None:
                raise HoldfastError(found)
        self._states, self.holds = {}, True  # the session keeps this for as long as it trains


def as_stored(trees: Mapping[str, Tree]) -> dict[str, Tree]:
    """Trees as a manifest gives them back."""
    stored: dict[str, Tree] = msgspec.json.decode(msgspec.json.encode(trees))
    return stored


def describe(value: Any) -> Description:
    """A value that training goes on to change, as it is now. Functions are left out: no checkpoint holds them."""
    name = type(value).__name__
    if isinstance(value, torch.Tensor):
        return Description("tensor", _outline(value))
    if isinstance(value, Mapping):
        kind = "dict" if isinstance(value, collections.OrderedDict) else name
        entries = {key: item for key, item in value.items() if not _is_function(item)}
        parts = tuple(
            (key if isinstance(key, str) else _text(key), describe(item)) for key, item in entries.items()
        )
        return Description(kind, f"({', '.join(map(_text, entries))})", parts)
    if isinstance(value, (set, frozenset)):
        return Description(name, tuple(sorted(map(_text, value))))
    if isinstance(value, (list, tuple, collections.deque)):
        limit = f", at most {value.maxlen}" if isinstance(value, collections.deque) else ""
        return Description(name, f"of {len(value)} items{limit}", tuple(enumerate(map(describe, value))))
    if hasattr(value, "dtype") and hasattr(value, "shape"):  # an array or a scalar of NumPy
        return Description(name, f"of {value.dtype} {tuple(value.shape)}")
    if isinstance(value, (bytes, bytearray)):
        return Description(name, bytes(value))
    # the text of a number tells -0.0 from 0.0, and equals that of another NaN
    return Description(name, repr(value))


def difference(path: str, was: Description, found: Description) -> str | None:
    """In words: the first place at which what was decoded is not what was captured."""
    if was == found:
        return None
    if was[:2] != found[:2]:
        return f"{path} would come back as {_told(found)}, and is {_told(was)}"
    pairs = zip(was.parts, found.parts, strict=True)  # their keys are alike, or their values would not be
    return next(filter(None, (difference(f"{path}.{key}", one, other) for (key, one), (_, other) in pairs)), None)


def _text(value: Any) -> str:
    """The text of a key, or of what is in a set: the order of what is in a frozenset is not part of it."""
    if isinstance(value, frozenset):
        return f"frozenset({', '.join(sorted(map(_text, value)))})"
    if type(value) is tuple:
        return f"({', '.join(map(_text, value))})"
    return f"tensor {_outline(value)}" if isinstance(value, torch.Tensor) else repr(value)


def _outline(tensor: torch.Tensor) -> str:
    return f"of {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _told(description: Description) -> str:
    return f"{description.kind} {str(description.value)[:80]}"


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (torch.Tensor, type))


def _read_as(slot: TensorRange, views: Mapping[str, str]) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape that a reader gives the bytes of a slot."""
    view = views.get(slot.name)
    if view is None:
        return str(DTYPES[slot.dtype]), slot.shape
    dtype = dtype_of_view(view)
    return str(dtype), slot.shape[:-1] if dtype.is_complex else slot.shape
