"""Encoding of values as a JSON tree and named tensors. Values that would not decode to equal ones are refused."""

from __future__ import annotations

import base64
import bisect
import collections
import enum
import functools
import itertools
import logging
import math
import operator
import sys
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from holdfast.accelerators import is_current
from holdfast.format.manifest import Shard
from holdfast.state.sharding import is_sharded, local
from holdfast.state.tree import NUMPY, Tree, largest_span, memory_span

logger = logging.getLogger("holdfast")
RESTORED_TENSORS = {torch.Tensor, torch.nn.Parameter}
"""Types of tensors that a restore makes anew; others are restored in place or refused."""

Trained = Mapping[int, tuple[str, int]]
"""Parameters outside all modules, by `id`: the keyword of their optimizer and their number in it."""

_MAPPINGS = (dict, collections.OrderedDict, collections.Counter)
_SEQUENCES: dict[type, str] = {
    list: "", tuple: "$tuple", torch.Size: "$size", set: "$set", frozenset: "$frozenset",
    collections.deque: "$deque",
}  # fmt: skip
_WITH_ITEMS = frozenset((*_MAPPINGS, list, tuple, collections.deque))
_MUTABLE = frozenset((*_MAPPINGS, list, set, collections.deque, bytearray))
_PLAIN = (str, int, float, complex, bytes, bytearray, list, tuple, set, frozenset, collections.deque)
"""Types whose subclasses would decode to the type itself."""
_INSTEAD_OF_ARRAY = {
    "O": "array.tolist()", "U": "array.tolist()", "S": "array.tolist()", "M": 'array.astype("int64")',
    "m": 'array.astype("int64")', "f": 'array.astype("float64")', "c": 'array.astype("complex128")',
    "V": "one array for each field",
}  # fmt: skip


class Encoder:
    """Encodes values as trees and collects their tensors. Tensors that share memory (tied weights) occur once.

    Args:
        step_storages: addresses of storages that only an optimizer's step writes to.
        warned: paths that were warned of; each new one is added.
        shared_storages: addresses of storages whose contents are the same on all ranks.
        stage_ranks: the ranks with the same stages of a pipeline as this one, if there are others.
        trained: called when a tensor may be a parameter outside all modules.
        known: an earlier encoder, whose names of tensors stay valid.
    """

    def __init__(
        self,
        step_storages: Collection[int],
        warned: set[str],
        shared_storages: Collection[int] = (),
        *,
        stage_ranks: Collection[int] = (),
        trained: Callable[[], Trained] = dict,
        known: Encoder | None = None,
    ) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """Local tensors by name: the path under which each was met first."""
        self.deferred: set[str] = set()
        """Names of tensors that only an optimizer step changes."""
        self.optimizer_state: set[str] = set()
        """Names of the `deferred` tensors that are an optimizer's own state."""
        self.sharded: dict[str, torch.Tensor] = {}
        """Sharded tensors as they are in the script, by name."""
        self.places: dict[str, Shard] = {}
        """Place of the local part in each sharded tensor."""
        self.elsewhere: set[str] = set()
        """Names of sharded tensors whose local part another rank, which has the same, stores."""
        self.repeated: set[str] = set()
        """Names of sharded tensors whose local part other ranks have as well."""
        self.shared: set[str] = set()
        """Names of tensors that are the same on all ranks."""
        self._step_storages, self._warned, self._shared_storages = step_storages, warned, shared_storages
        self._trained, self._stage_ranks = trained, stage_ranks
        self._known: ChainMap[tuple[Any, ...], str] = ChainMap({}, *([known._known] if known else []))
        self._spans: ChainMap[int, list[tuple[int, int, str, bool]]]
        self._spans = ChainMap({}, *([known._spans] if known else []))
        """Ranges of bytes that tensors cover in each storage, in order: start, end, path, whether in place."""
        self._known_optimizer_state: Collection[str] = known.optimizer_state if known else ()
        self._met_twice: Collection[int] = ()
        self._names: dict[int, str] = {}
        """Names of values met twice in the current call of `encode`, by `id`."""
        self._taken: set[str] = set()

    def is_shared(self, parameter: torch.Tensor, kept: object) -> bool:
        """Whether an optimizer's state `kept` for a parameter is the same on all ranks.

        For a sharded parameter that holds only for scalars, such as a count of steps.
        """
        if is_sharded(parameter):
            return isinstance(kept, torch.Tensor) and kept.numel() == 1
        return parameter.untyped_storage().data_ptr() in self._shared_storages

    def encode(
        self, path: str, value: Any, *, deferred: bool = False, shared: bool = False, in_place: bool = False
    ) -> Tree:
        """Encode a value.

        A tensor that is `shared`, or in a shared storage, is the same on all ranks. One that is loaded `in_place`
        takes its layout and its type from the tensor that it is copied into.

        Raises:
            TypeError: a part of the value cannot be stored; names its path.
        """
        self._met_twice, self._names = _met_twice(path, value), {}
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(path, value, deferred, shared, in_place)
        return self._encode(path, value)

    def encode_pairs(self, path: str, mapping: Mapping[Any, Any]) -> list[list[Tree]]:
        """Encode the entries of a mapping with any keys, as the contents of a `$pairs`."""
        self._met_twice, self._names = _met_twice(path, mapping), {}
        return self._encode_pairs(path, mapping)

    def _encode(self, path: str, value: Any) -> Tree:
        kind = type(value)
        if kind is str:
            return value if _is_unicode(value) else {"$str": value.encode("unicode_escape").decode()}
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"$int": str(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$number": repr(value)}
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(path, value)
        if id(value) not in self._met_twice:
            return self._encode_object(path, value)
        if (name := self._names.get(id(value))) is not None:
            return {"$shared": name}
        name = self._names[id(value)] = _unused(path, self._taken)
        self._taken.add(name)
        return {"$shared": name, "value": self._encode_object(path, value)}

    def _encode_object(self, path: str, value: Any) -> Tree:
        kind = type(value)
        if kind in _MAPPINGS:
            return self._encode_mapping(path, value)
        if kind in _SEQUENCES:
            return self._encode_sequence(path, value)
        return self._encode_leaf(path, value)

    def _encode_pairs(self, path: str, mapping: Mapping[Any, Any]) -> list[list[Tree]]:
        return [
            [self._encode(f"{path}: the key {key!r}", key), self._encode(f"{path}.{key}", value)]
            for key, value in mapping.items()
            if self._can_store(f"{path}.{key}", value)
        ]

    def _encode_mapping(self, path: str, value: Mapping[Any, Any]) -> Tree:
        if type(value) is collections.OrderedDict:
            return self._encode_ordered(path, value)
        if type(value) is collections.Counter:
            return {"$counter": self._encode_pairs(path, value)}
        if all(type(key) is str and not key.startswith("$") and _is_unicode(key) for key in value):
            return {
                key: self._encode(f"{path}.{key}", item)
                for key, item in value.items()
                if self._can_store(f"{path}.{key}", item)
            }
        return {"$pairs": self._encode_pairs(path, value)}

    def _encode_ordered(self, path: str, value: collections.OrderedDict[Any, Any]) -> Tree:
        tree: dict[str, Tree] = {"$ordered": self._encode_pairs(path, value)}
        # a module's state_dict() has the versions of modules in an attribute
        if unknown := vars(value).keys() - {"_metadata"}:
            raise TypeError(f"{path}: cannot store the attribute {min(unknown)!r} of an OrderedDict")
        if "_metadata" in vars(value):
            tree["metadata"] = self._encode(f"{path}._metadata", vars(value)["_metadata"])
        return tree

    def _encode_sequence(self, path: str, value: Any) -> Tree:
        if type(value) is list and all(type(item) is int and abs(item) < 2**63 for item in value):
            return list(value)  # fast path for the numbers of an optimizer's parameters
        items = [self._encode(f"{path}.{i}", item) for i, item in enumerate(value)]
        if type(value) is collections.deque:
            return {"$deque": items, "maxlen": value.maxlen}
        return {tag: items} if (tag := _SEQUENCES[type(value)]) else items

    def _encode_leaf(self, path: str, value: Any) -> Tree:
        kind = type(value)
        if kind in (bytes, bytearray):
            return {f"${kind.__name__}": base64.b64encode(value).decode()}
        if kind is complex:
            return {"$complex": [value.real.hex(), value.imag.hex()]}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if (numpy := sys.modules.get("numpy")) is not None:
            if isinstance(value, numpy.ndarray):
                return self._encode_array(path, value, numpy)
            if isinstance(value, numpy.generic) and value.dtype.name in NUMPY and value.dtype.isnative:
                return {"$scalar": value.dtype.name, "value": self._encode(path, value.item())}
        raise TypeError(f"{path}: {_refusal(value)}")

    def _encode_array(self, path: str, array: Any, numpy: Any) -> Tree:
        dtype = array.dtype
        if type(array) is not numpy.ndarray:
            raise TypeError(
                f"{path}: a {type(array).__name__} would be restored as a plain array; convert it to one"
            )
        if dtype.name not in NUMPY or not dtype.isnative:
            instead = _INSTEAD_OF_ARRAY.get(dtype.kind, "array.tolist()")
            if dtype.name in NUMPY:
                instead = 'array.astype(array.dtype.newbyteorder("="))'
            raise TypeError(f"{path}: cannot store a NumPy array of dtype {dtype}; store {instead}")
        if any(stride % dtype.itemsize for stride in array.strides):
            raise TypeError(f"{path}: cannot store an array with gaps within its elements; store array.copy()")
        # torch can share memory only with a writable, aligned array in ascending order
        flags = array.flags
        is_view = flags.writeable and flags.aligned and all(stride >= 0 for stride in array.strides)
        plain = array if is_view else numpy.array(array, order="C", subok=False)
        tree: dict[str, Tree] = {"$ndarray": {"$tensor": self._add(path, torch.from_numpy(plain))}}
        strides = tuple(stride // dtype.itemsize for stride in array.strides)
        if self._keeps_strides(path, array.shape, strides):
            tree["strides"] = list(strides)
        return tree if flags.writeable else tree | {"readonly": True}

    def _can_store(self, path: str, value: Any) -> bool:
        """Whether the value is no function. Functions, such as a scheduler's lr_lambda, come from the script."""
        if not callable(value) or isinstance(value, (torch.Tensor, type)):
            return True
        self._warn(path, "%s is a function and is not stored: a resume uses the one in your script")
        return False

    def _encode_tensor(
        self, path: str, value: torch.Tensor, deferred: bool = False, shared: bool = False, in_place: bool = False
    ) -> Tree:
        tree: dict[str, Tree] = {"$tensor": self._add(path, value, deferred, shared, in_place)}
        if value.device.type != "cpu":
            tree["device"] = _named(value.device)
        if in_place or is_sharded(value):
            return tree
        kind = type(value)
        if kind not in RESTORED_TENSORS:
            raise TypeError(f"{path}: a {kind.__name__} would be restored as a plain tensor; convert it to one")
        if self._keeps_strides(path, value.shape, value.stride()):
            tree["strides"] = list(value.stride())
        if value.requires_grad and not value.is_leaf:
            self._warn(path, "%s has a gradient graph, which is not stored: give its detach()")
        elif value.requires_grad:
            tree["requires_grad"] = True
        if kind is torch.nn.Parameter:
            tree["parameter"] = True
        if len(tree) > 1 and (place := self._trained().get(id(value))) is not None:
            tree["trained"] = list(place)
        return tree

    def _keeps_strides(self, path: str, shape: Sequence[int], strides: Sequence[int]) -> bool:
        """Whether the strides differ from those of a new tensor and can be restored."""
        if tuple(strides) == _contiguous(tuple(shape)):
            return False
        if memory_span(shape, strides) <= largest_span(shape):
            return True
        self._warn(
            path, "%s is a view of a much larger tensor: it is restored without the gaps between its elements"
        )
        return False

    def _warn(self, path: str, message: str, *more: str) -> None:
        """Log a warning once for each path."""
        if path not in self._warned:
            self._warned.add(path)
            logger.warning(message, path, *more)

    def _add(
        self,
        path: str,
        tensor: torch.Tensor,
        deferred: bool = False,
        shared: bool = False,
        in_place: bool = False,
    ) -> str:
        _require_dense(path, tensor)
        whole, is_shard, tensor = tensor, is_sharded(tensor), local(tensor).detach()
        storage = tensor.untyped_storage().data_ptr()
        key = (
            storage,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        # a rank that has no rows of tied weights must give them the same names as the others
        is_tellable = tensor.numel() or (is_shard and storage)
        if is_tellable and key in self._known:
            name = self._known[key]
            if not (deferred or in_place) and (
                name in self.optimizer_state or name in self._known_optimizer_state
            ):
                self._warn(path, "%s is part of an optimizer's state (%s): it is restored as a copy of that", name)
            return name
        printable = path if path.isascii() else path.encode(errors="backslashreplace").decode()
        name = _unused(printable, self.tensors)
        if is_tellable:
            self._note_overlap(path, storage, tensor, in_place)
        self._known[key] = name
        self.tensors[name] = tensor
        if deferred or storage in self._step_storages:
            self.deferred.add(name)
        if deferred:
            self.optimizer_state.add(name)
        if is_shard:
            from holdfast.state.sharded_tensors import is_repeated, is_stored_here, place_of

            self.sharded[name] = whole
            self.places[name] = place_of(name, whole)
            if not is_stored_here(name, whole, self._stage_ranks):
                self.elsewhere.add(name)
            if is_repeated(whole):
                self.repeated.add(name)
        elif shared or storage in self._shared_storages:
            self.shared.add(name)
        return name

    def _note_overlap(self, path: str, storage: int, tensor: torch.Tensor, in_place: bool) -> None:
        """Warn if a tensor shares memory with another one: each is restored with its own memory."""
        start = int(tensor.storage_offset() * tensor.itemsize)
        count = tensor.numel() if tensor.is_contiguous() else memory_span(tensor.shape, tensor.stride())
        end = start + count * tensor.itemsize
        spans = self._spans.maps[0].setdefault(storage, list(self._spans.get(storage, ())))
        at = bisect.bisect(spans, (start, end))
        for other_start, other_end, other, other_in_place in spans[max(0, at - 1) : at + 1]:
            if start < other_end and other_start < end and not (in_place and other_in_place):
                self._warn(path, "%s shares memory with %s: they are restored as two separate tensors", other)
                break
        spans.insert(at, (start, end, path, in_place))


def _met_twice(path: str, value: Any) -> Collection[int]:
    """Return the ids of mutable objects that occur more than once. TypeError: an object contains itself."""
    if type(value) not in _WITH_ITEMS:
        return ()
    numpy = sys.modules.get("numpy")
    mutable = _MUTABLE | {numpy.ndarray} if numpy is not None else _MUTABLE
    looked_into = mutable | _WITH_ITEMS
    met, twice, open_ = set[int](), set[int](), set[int]()

    def look(path: str, value: Any) -> None:
        kind = type(value)
        if kind in mutable:
            if id(value) in open_:
                raise TypeError(f"{path}: cannot store a {kind.__name__} that contains itself")
            if id(value) in met:
                twice.add(id(value))
                return
            met.add(id(value))
        if kind not in _WITH_ITEMS:
            return
        items = value.values() if kind in _MAPPINGS else value
        if looked_into.isdisjoint(map(type, items)):  # the common case: numbers, strings, tensors
            return
        open_.add(id(value))
        for key, item in value.items() if kind in _MAPPINGS else enumerate(value):
            look(f"{path}.{key}", item)
        open_.discard(id(value))

    look(path, value)
    return twice


def _refusal(value: Any) -> str:
    """Say why a value cannot be stored, and what to store instead."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return (
            f"cannot store the enum member {kind.__name__}.{value.name}: a checkpoint refers to no class of a "
            f"script. Store its value, and convert that where it is used: {kind.__name__}(value)"
        )
    if isinstance(value, Mapping):
        return f"a {kind.__name__} would be restored as a plain dict; convert it to one"
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return f"cannot store a NumPy scalar of dtype {value.dtype}; store value.item()"
    plain = next((each.__name__ for each in _PLAIN if isinstance(value, each)), None)
    if plain is not None:
        return f"a {kind.__name__} would be restored as a plain {plain}; convert it: {plain}(value)"
    return (
        f"cannot store a {kind.__module__}.{kind.__qualname__} without pickle. "
        "Return numbers, strings, tensors, or lists and dicts of them from state_dict()."
    )


def _require_dense(path: str, tensor: torch.Tensor) -> None:
    """Raise TypeError for a tensor that is not dense memory of numbers."""
    if tensor.is_quantized:
        raise TypeError(
            f"{path}: cannot store a quantized tensor; give the module before quantization, or tensor.dequantize()"
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise TypeError(f"{path}: cannot store a {kind} tensor; give a dense one, such as tensor.to_dense()")
    if tensor.is_meta:
        raise TypeError(f"{path}: a tensor on the meta device has no values; move it to a device first")


def _unused(path: str, taken: Collection[str]) -> str:
    if path not in taken:
        return path
    return next(name for number in itertools.count(2) if (name := f"{path}#{number}") not in taken)


def _is_unicode(text: str) -> bool:
    """Whether a text can be encoded as UTF-8: half of a surrogate pair cannot."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@functools.lru_cache(1024)
def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a new tensor of this shape."""
    sizes = itertools.accumulate((max(1, size) for size in shape[:0:-1]), operator.mul, initial=1)
    return tuple(sizes)[::-1] if shape else ()


def _named(device: torch.device) -> str:
    """Return the name of a device, without the number for the current one, which differs by rank."""
    return device.type if is_current(device) else str(device)
