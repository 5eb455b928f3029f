"""Values as a JSON tree and named tensors, and back.

A tree is what `state_dict()` returned, with `{"$tensor": name}` where a tensor was. JSON's gaps are filled by
further tags (`$tuple`, `$pairs`, `$number` …): no pickle, so nothing in a checkpoint can run.
"""

from __future__ import annotations

import base64
import collections
import logging
import math
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch

from holdfast.errors import IncompatibleCheckpoint
from holdfast.format import LINE_BYTES, SMALL_BYTES, Shard
from holdfast.sharding import is_repeated, is_sharded, is_stored_here, local, place_of

logger = logging.getLogger("holdfast")

Tree = Any
_WRITTEN_AS_THEY_ARE = frozenset({type(None), bool, str})


class Encoder:
    """Makes trees of values, and collects the tensors in them: those that share memory (tied weights) once.

    Args:
        step_storages: addresses of storages that only an optimizer's step writes to.
        warned: paths of functions that were told of before; those met are added.
        shared_storages: addresses of storages that hold the same on every rank.
    """

    def __init__(
        self, step_storages: Collection[int], warned: set[str], shared_storages: Collection[int] = ()
    ) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """By name, which is the path under which each was met first; of a sharded one this rank's part."""
        self.deferred: set[str] = set()
        """Names of those that only an optimizer's step changes."""
        self.kept: set[str] = set()
        """Names of those among them that an optimizer keeps beside the parameters."""
        self.sharded: dict[str, torch.Tensor] = {}
        """Those of which this rank has a part, as they are in the script."""
        self.places: dict[str, Shard] = {}
        """Where these parts lie."""
        self.elsewhere: set[str] = set()
        """Names of those whose part another rank stores, which has the same."""
        self.repeated: set[str] = set()
        """Names of those whose part several ranks have."""
        self.shared: set[str] = set()
        """Names of those that are the same on every rank."""
        self._step_storages, self._warned, self._shared_storages = step_storages, warned, shared_storages
        self._known: dict[tuple[Any, ...], str] = {}

    def is_shared(self, parameter: torch.Tensor, kept: object) -> bool:
        """What an optimizer has kept of a parameter is the same on every rank.

        All of it, where the parameter is; of one that is sharded, a count of steps and the like: an optimizer may
        keep more of this rank's part alone.
        """
        if is_sharded(parameter):
            return isinstance(kept, torch.Tensor) and kept.numel() == 1
        return parameter.untyped_storage().data_ptr() in self._shared_storages

    def encode(self, path: str, value: Any, *, deferred: bool = False, shared: bool = False) -> Tree:
        """The tree of a value; TypeError names the path of what it cannot hold.

        A tensor that is `shared`, or in a shared storage, is the same on every rank.
        """
        kind = type(value)
        if kind in _WRITTEN_AS_THEY_ARE:
            return value
        if isinstance(value, torch.Tensor):
            found = {"$tensor": self._add(path, value, deferred, shared)}
            return found if value.device.type == "cpu" else found | {"device": _named(value.device)}
        if isinstance(value, str):
            return str(value)
        if isinstance(value, int):
            return int(value) if -(2**63) <= value < 2**63 else {"$int": str(int(value))}
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$number": repr(float(value))}
        # an abstract class takes its time to tell, and training waits
        if kind is dict or (kind is not list and isinstance(value, Mapping)):
            return self._encode_mapping(path, value)
        if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            return self._encode_sequence(path, value)
        return self._encode_leaf(path, value)

    def encode_pairs(self, path: str, mapping: Mapping[Any, Any]) -> list[list[Tree]]:
        """The entries of a mapping whose keys may be anything, as a `$pairs` holds them."""
        return [
            [self.encode(path, key), self.encode(f"{path}.{key}", value)]
            for key, value in mapping.items()
            if self._can_store(f"{path}.{key}", value)
        ]

    def _encode_mapping(self, path: str, value: Mapping[Any, Any]) -> Tree:
        if isinstance(value, collections.Counter):
            return {"$counter": self.encode_pairs(path, value)}
        if type(value) not in (dict, collections.OrderedDict):
            raise TypeError(f"{path}: a {type(value).__name__} would come back as a plain dict; make it one")
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {
                key: self.encode(f"{path}.{key}", item)
                for key, item in value.items()
                if self._can_store(f"{path}.{key}", item)
            }
        return {"$pairs": self.encode_pairs(path, value)}

    def _encode_sequence(self, path: str, value: Any) -> Tree:
        if type(value) is list and all(type(item) is int and abs(item) < 2**63 for item in value):
            return list(value)  # an optimizer numbers every parameter it has
        items = [self.encode(f"{path}.{i}", item) for i, item in enumerate(value)]
        if hasattr(value, "_fields"):
            raise TypeError(f"{path}: a {type(value).__name__} would come back as a plain tuple; make it one")
        if isinstance(value, list):
            return items
        if isinstance(value, collections.deque):
            return {"$deque": items, "maxlen": value.maxlen}
        for kind in (torch.Size, tuple, frozenset, set):
            if isinstance(value, kind):
                return {f"${kind.__name__.lower()}": items}
        raise AssertionError(type(value))

    def _encode_leaf(self, path: str, value: Any) -> Tree:
        if isinstance(value, (bytes, bytearray)):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, complex):
            return {"$complex": [value.real.hex(), value.imag.hex()]}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if (array := _numpy_array(value)) is not None:
            return {"$ndarray": self.encode(path, torch.from_numpy(array)), "scalar": array is not value}
        raise TypeError(
            f"{path}: cannot store a {type(value).__module__}.{type(value).__qualname__} without pickle. "
            f"Return numbers, strings, tensors, or lists and dicts of them from state_dict()."
        )

    def _can_store(self, path: str, value: Any) -> bool:
        """Code stays code: a scheduler's lr_lambda comes from the script, today's as well as tomorrow's."""
        if not callable(value) or isinstance(value, (torch.Tensor, type)):
            return True
        if path not in self._warned:
            self._warned.add(path)
            logger.warning("%s is a function: it is taken from your script, not from checkpoints", path)
        return False

    def _add(self, path: str, tensor: torch.Tensor, deferred: bool, shared: bool) -> str:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise TypeError(f"{path}: cannot store a {tensor.layout} tensor; give a dense one")
        whole, tensor = tensor, local(tensor).detach()
        storage = tensor.untyped_storage().data_ptr()
        key = (
            storage,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj(),
        )
        # a rank that has no rows of tied weights must name them as the others do
        is_tellable = tensor.numel() or (is_sharded(whole) and storage)
        if is_tellable and key in self._known:
            return self._known[key]
        name, copies = path, 1
        while name in self.tensors:
            copies += 1
            name = f"{path}#{copies}"
        self._known[key] = name
        self.tensors[name] = tensor
        if deferred or storage in self._step_storages:
            self.deferred.add(name)
        if deferred:
            self.kept.add(name)
        if is_sharded(whole):
            self.sharded[name] = whole
            self.places[name] = place_of(name, whole)
            if not is_stored_here(name, whole):
                self.elsewhere.add(name)
            if is_repeated(whole):
                self.repeated.add(name)
        elif shared or storage in self._shared_storages:
            self.shared.add(name)
        return name


def decode(tree: Tree, tensors: Mapping[str, torch.Tensor], *, copy: bool, adopt: Collection[str] = ()) -> Any:
    """The value a tree was made from.

    With `copy`, its tensors have memory of their own; that may be the memory of those among `tensors` whose names
    are in `adopt`, for which their owner then has no further use.
    """
    if isinstance(tree, list):
        return [decode(item, tensors, copy=copy, adopt=adopt) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if (tag := next(iter(tree), "")).startswith("$"):
        return _decode_tag(tag, tree, tensors, copy, adopt)
    return {key: decode(value, tensors, copy=copy, adopt=adopt) for key, value in tree.items()}


def _decode_tag(
    tag: str, tree: dict[str, Tree], tensors: Mapping[str, torch.Tensor], copy: bool, adopt: Collection[str]
) -> Any:
    body = tree[tag]
    match tag:
        case "$tensor":
            tensor = tensors[body]
            if "device" in tree and (moved := tensor.to(_device(tree["device"]))) is not tensor:
                return moved
            return tensor.clone() if copy and not (body in adopt and _can_stay(local(tensor))) else tensor
        case "$int":
            return int(body)
        case "$number":
            return float(body)
        case "$bytes":
            return base64.b64decode(body)
        case "$complex":
            return complex(float.fromhex(body[0]), float.fromhex(body[1]))
        case "$dtype":
            return getattr(torch, body)
        case "$device":
            return torch.device(body)
    value = decode(body, tensors, copy=copy, adopt=adopt)
    match tag:
        case "$pairs":
            return dict(value)
        case "$counter":
            return collections.Counter(dict(value))
        case "$ndarray":
            return value.numpy()[()] if tree["scalar"] else value.numpy()
        case "$tuple":
            return tuple(value)
        case "$size":
            return torch.Size(value)
        case "$set" | "$frozenset":
            return set(value) if tag == "$set" else frozenset(value)
        case "$deque":
            return collections.deque(value, tree["maxlen"])
    raise IncompatibleCheckpoint(f"unknown tag {tag} in a checkpoint's state: a newer Holdfast wrote it")


def _can_stay(tensor: torch.Tensor) -> bool:
    """Large, and aligned as torch's own allocator does it: on other addresses some kernels round otherwise."""
    return tensor.nbytes >= SMALL_BYTES and tensor.data_ptr() % LINE_BYTES == 0


def _device(name: str) -> torch.device:
    """Where a tensor was; the CPU on a machine that has no such device."""
    device = torch.device(name)
    return device if device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")


def _named(device: torch.device) -> str:
    """That of this process without its number, which is another one on each rank."""
    here = device.type == "cuda" and device.index == torch.cuda.current_device()
    return device.type if here else str(device)


def _numpy_array(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    return value if isinstance(value, numpy.ndarray) else numpy.asarray(value)
