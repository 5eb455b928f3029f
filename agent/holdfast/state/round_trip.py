"""Check that the tree in a checkpoint decodes to the captured state.

Digests cover the bytes of tensors. This compares everything else: types, values, keys, dtypes and shapes.
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


class ValueDescription(NamedTuple):
    """An immutable description of a value."""

    kind: str
    value: object
    """Contents of a leaf; properties of a container that must be equal."""
    parts: tuple[tuple[object, ValueDescription], ...] = ()
    """Items of a container, by key or number."""


class RoundTrip:
    """Descriptions of a session's states at one instant, to compare with what is about to be written.

    Args:
        states: result of `state_dict()` of each object, by keyword.
        shapes: dtype and global shape of every tensor of the trees.
        refusal: why the objects would refuse their own state; `None` if they accept it.
        modules: keywords of modules, whose trees contain more than the state.
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
        """Whether a checkpoint was compared and found equal."""

    def require_same(
        self,
        trees: Mapping[str, Tree],
        slots: Sequence[TensorRange],
        views: Mapping[str, str],
        shards: Mapping[str, Shard],
    ) -> None:
        """Decode what is about to be written and compare it. Runs on any thread: it reads no object of the script.

        Raises:
            HoldfastError: a value differs; names its keyword and path. Errors of the decoder pass through.
        """
        if self._refusal is not None:
            raise HoldfastError(self._refusal)
        shapes = {
            **self._shapes,
            **{slot.name: _read_as(slot, views) for slot in slots if slot.name not in shards},
        }
        for name, (dtype, shape) in shapes.items():
            if (dtype, shape) != self._shapes[name]:
                raise HoldfastError(f"{name} would be restored as {shape} of {dtype}, and is {self._shapes[name]}")
        decoded = {key: decode_without_memory(tree, shapes) for key, tree in as_stored(trees).items()}
        for keyword, captured in self._states.items():
            state = decoded[keyword]
            if keyword in self._modules:
                state = state["state"]
            if (found := difference(keyword, captured, describe(state))) is not None:
                raise HoldfastError(found)
        self._states, self.holds = {}, True  # free the descriptions: the session keeps this object


def as_stored(trees: Mapping[str, Tree]) -> dict[str, Tree]:
    """Return trees as they are read from a manifest."""
    stored: dict[str, Tree] = msgspec.json.decode(msgspec.json.encode(trees))
    return stored


def describe(value: Any) -> ValueDescription:
    """Describe a value as it is now. Functions are left out: no checkpoint holds them."""
    name = type(value).__name__
    if isinstance(value, torch.Tensor):
        return ValueDescription("tensor", _outline(value))
    if isinstance(value, Mapping):
        kind = "dict" if isinstance(value, collections.OrderedDict) else name
        entries = {key: item for key, item in value.items() if not _is_function(item)}
        parts = tuple(
            (key if isinstance(key, str) else _text(key), describe(item)) for key, item in entries.items()
        )
        return ValueDescription(kind, f"({', '.join(map(_text, entries))})", parts)
    if isinstance(value, (set, frozenset)):
        return ValueDescription(name, tuple(sorted(map(_text, value))))
    if isinstance(value, (list, tuple, collections.deque)):
        limit = f", at most {value.maxlen}" if isinstance(value, collections.deque) else ""
        return ValueDescription(name, f"of {len(value)} items{limit}", tuple(enumerate(map(describe, value))))
    if hasattr(value, "dtype") and hasattr(value, "shape"):  # an array or a scalar of NumPy
        return ValueDescription(name, f"of {value.dtype} {tuple(value.shape)}")
    if isinstance(value, (bytes, bytearray)):
        return ValueDescription(name, bytes(value))
    # the repr of a number distinguishes -0.0 and 0.0, and is equal for all NaNs
    return ValueDescription(name, repr(value))


def difference(path: str, was: ValueDescription, found: ValueDescription) -> str | None:
    """Describe the first difference between the captured and the decoded value."""
    if was == found:
        return None
    if was[:2] != found[:2]:
        return f"{path} would be restored as {_text_of(found)}, and is {_text_of(was)}"
    pairs = zip(was.parts, found.parts, strict=True)  # equal values imply equal keys
    return next(filter(None, (difference(f"{path}.{key}", one, other) for (key, one), (_, other) in pairs)), None)


def _text(value: Any) -> str:
    """Return the text of a key or an item of a set; it does not depend on the order of a frozenset."""
    if isinstance(value, frozenset):
        return f"frozenset({', '.join(sorted(map(_text, value)))})"
    if type(value) is tuple:
        return f"({', '.join(map(_text, value))})"
    return f"tensor {_outline(value)}" if isinstance(value, torch.Tensor) else repr(value)


def _outline(tensor: torch.Tensor) -> str:
    return f"of {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _text_of(description: ValueDescription) -> str:
    return f"{description.kind} {str(description.value)[:80]}"


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (torch.Tensor, type))


def _read_as(slot: TensorRange, views: Mapping[str, str]) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape that a reader gives to the bytes of a slot."""
    view = views.get(slot.name)
    if view is None:
        return str(DTYPES[slot.dtype]), slot.shape
    dtype = dtype_of_view(view)
    return str(dtype), slot.shape[:-1] if dtype.is_complex else slot.shape
