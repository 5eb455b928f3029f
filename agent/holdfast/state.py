"""The objects of a training loop as named tensors and a JSON tree, and back.

A tree is what `state_dict()` returned, with `{"$tensor": name}` where a tensor was. JSON's gaps are filled by
further tags (`$tuple`, `$pairs`, `$number` …): no pickle, so nothing in a checkpoint can run.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import logging
import math
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from holdfast.capture import ModuleWatch, OptimizerWatch, Watched, watch_of
from holdfast.errors import IncompatibleCheckpoint
from holdfast.format import LINE_BYTES, SMALL_BYTES

logger = logging.getLogger("holdfast")

Tree = Any
RESERVED = ("rng", "session")
"""Entries of a checkpoint that are the session's own."""
ALONE_BYTES = 1 << 30
"""A module of at most this is loaded on one thread: a tenth of a second."""


@runtime_checkable
class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(slots=True)
class Captured:
    """The state of one instant, as references to live tensors."""

    trees: dict[str, Tree] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By name; tensors that share memory (tied weights) once, under the first name met."""
    deferred: set[str] = field(default_factory=set)
    """Names of those that only an optimizer's step changes; the others must be copied at once."""
    frozen: set[str] = field(default_factory=set)
    """Names of those that no optimizer trains: parameters which, as a rule, never change."""
    structure: object = field(default_factory=object)
    """The same object as last time when names, dtypes, shapes and addresses are: what was laid out still fits."""


class Registry:
    """The objects of a session, by the keyword they were given under."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        for keyword, item in objects.items():
            if not isinstance(item, Stateful):
                raise TypeError(
                    f"Session({keyword}=...): {type(item).__name__} has no state_dict() and load_state_dict(). "
                    f"Put plain values into holdfast.Variables, or drop the keyword."
                )
            if keyword in RESERVED:
                raise ValueError(f"Session({keyword}=...): this name is taken in checkpoints; give it another")
        # a compiled module shares everything with the plain one inside, whose names do not depend on compiling
        self.objects: dict[str, Stateful] = {k: getattr(o, "_orig_mod", o) for k, o in objects.items()}
        self.optimizers = {k: o for k, o in self.objects.items() if isinstance(o, torch.optim.Optimizer)}
        self._warned: set[str] = set()
        self._known: _Known | None = None
        self._structure: tuple[object, ...] = ()

    def capture(self, session: Mapping[str, Any]) -> Captured:
        """References to all state, the session's own among it. TypeError names what cannot be stored."""
        known = self._known
        if known is None or not known.watched.unchanged():
            known = self._known = self._walk()
        loose = Captured()
        encoder = _Encoder(loose, known.names, known.step_storages, self._warned)
        for keyword, item in self.objects.items():
            loose.trees[keyword] = known.tree(keyword, item, encoder)
        loose.trees["session"] = encoder.encode("session", session)
        loose.trees["rng"] = encoder.encode("rng", rng_state())
        return Captured(
            trees=loose.trees,
            tensors={**known.tensors, **loose.tensors},
            deferred=known.deferred | loose.deferred,
            frozen=known.frozen,
            structure=self._structured(known, loose),
        )

    def _walk(self) -> _Known:
        """Everything that can be watched from here on, in full."""
        watches = {keyword: watch for keyword, item in self.objects.items() if (watch := watch_of(item))}
        watched = Watched(watches.values())
        if not watched.steady:
            watches, watched = {}, Watched([])
        found, names, step_storages = Captured(), self._parameter_names(), self._step_storages()
        encoder = _Encoder(found, names, step_storages, self._warned)
        for keyword in watches:
            found.trees[keyword] = encoder.encode_object(keyword, self.objects[keyword])
        return _Known(
            watched, watches, found.trees, found.tensors, found.deferred, self._frozen(found), names, step_storages
        )

    def _structured(self, known: _Known, loose: Captured) -> object:
        """The same object as long as `known` and the rest's names, dtypes and shapes are the same."""
        if loose.deferred:
            return object()  # what is copied later must be the same tensors, and these are found anew each time
        signature = known, [(name, t.dtype, t.shape, t.device) for name, t in loose.tensors.items()]
        if not self._structure or self._structure[0] is not known or self._structure[1] != signature[1]:
            self._structure = signature
        return self._structure

    def _frozen(self, captured: Captured) -> set[str]:
        """Parameters that need no gradient, of modules that an optimizer trains in part (an average of weights
        needs none either, but changes)."""
        trained = {id(p) for o in self.optimizers.values() for group in o.param_groups for p in group["params"]}
        still = set()
        for module in self.objects.values():
            if isinstance(module, torch.nn.Module):
                parameters = list(module.parameters())
                if any(id(parameter) in trained for parameter in parameters):
                    still |= {
                        p.untyped_storage().data_ptr()
                        for p in parameters
                        if not p.requires_grad and id(p) not in trained
                    }
        return {name for name, t in captured.tensors.items() if t.untyped_storage().data_ptr() in still}

    def check(self, trees: Mapping[str, Tree], shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """IncompatibleCheckpoint, naming keyword and tensor, when a checkpoint does not fit these objects."""
        for keyword, item in self.objects.items():
            if keyword not in trees:
                raise IncompatibleCheckpoint(f"the checkpoint holds no {keyword!r}; it has {', '.join(trees)}")
            if isinstance(item, torch.nn.Module):
                _check_module(keyword, item, trees[keyword], shapes)
            elif isinstance(item, torch.optim.Optimizer):
                _check_optimizer(keyword, item, trees[keyword])

    def apply(self, trees: Mapping[str, Tree], tensors: Mapping[str, torch.Tensor]) -> None:
        """Put a checkpoint's state into the objects; the random state last, since loading may draw from it."""
        for keyword, item in self.objects.items():
            if isinstance(item, torch.nn.Module):
                _load_module(item, trees[keyword], tensors)
                continue
            if isinstance(item, torch.optim.Optimizer):
                # large moments stay where they were read; what else is kept is copied, or it would keep all
                # that was read beside it
                _load_optimizer(item, decode(trees[keyword], tensors, copy=True, adopt=True))
            else:
                item.load_state_dict(decode(trees[keyword], tensors, copy=True))
        restore_rng(decode(trees["rng"], tensors, copy=True))

    def _parameter_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        modules = [(k, o) for k, o in self.objects.items() if isinstance(o, torch.nn.Module)]
        for keyword, module in modules:
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), name if len(modules) == 1 else f"{keyword}.{name}")
        return names

    def _step_storages(self) -> set[int]:
        """Storages that only `optimizer.step` writes to: parameters of modules, whoever trains them."""
        if not self.optimizers:
            return set()
        return {
            parameter.untyped_storage().data_ptr()
            for item in self.objects.values()
            if isinstance(item, torch.nn.Module)
            for parameter in item.parameters()
        }


@dataclass(eq=False, slots=True)
class _Known:
    """What a walk over the watched objects found; it holds until the watch says otherwise."""

    watched: Watched
    watches: dict[str, ModuleWatch | OptimizerWatch]
    trees: dict[str, Tree]
    tensors: dict[str, torch.Tensor]
    deferred: set[str]
    frozen: set[str]
    names: dict[int, str]
    step_storages: set[int]

    def tree(self, keyword: str, item: Stateful, encoder: _Encoder) -> Tree:
        """The tree of one object: known, but for what may differ each time."""
        watch = self.watches.get(keyword)
        if watch is None:
            return encoder.encode_object(keyword, item)
        if isinstance(watch, OptimizerWatch):
            groups = encoder.encode_pairs(keyword, {"param_groups": watch.groups()})
            return {"$pairs": [self.trees[keyword]["$pairs"][0], *groups]}
        return self.trees[keyword]


class _Encoder:
    def __init__(
        self, captured: Captured, names: dict[int, str], step_storages: set[int], warned: set[str]
    ) -> None:
        self._captured, self._names, self._step_storages, self._warned = (
            captured,
            names,
            step_storages,
            warned,
        )
        self._shared: dict[tuple[Any, ...], str] = {}

    def encode_object(self, keyword: str, item: Stateful) -> Tree:
        if isinstance(item, torch.nn.Module):
            state = item.state_dict()
            buffers = {n: b for n, b in item.named_buffers(remove_duplicate=False) if n not in state}
            return {
                "state": self.encode(keyword, state),
                "metadata": self.encode(keyword, dict(getattr(state, "_metadata", {}))),
                "buffers": self.encode(keyword, buffers),
            }
        if isinstance(item, torch.optim.Optimizer):
            return self._encode_optimizer(keyword, item)
        return self.encode(keyword, item.state_dict())

    def _encode_optimizer(self, keyword: str, optimizer: torch.optim.Optimizer) -> Tree:
        state = optimizer.state_dict()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        per_parameter = []
        for index, values in state["state"].items():
            if not isinstance(index, int) or not isinstance(values, Mapping):
                per_parameter.append([self.encode(keyword, index), self.encode(f"{keyword}.{index}", values)])
                continue
            name = self._names.get(id(parameters[index]), str(index))
            encoded = {
                key: self.encode(f"{keyword}.state.{key}.{name}", value, deferred=True)
                for key, value in values.items()
            }
            per_parameter.append([index, encoded])
        rest = {key: value for key, value in state.items() if key != "state"}
        return {"$pairs": [["state", {"$pairs": per_parameter}], *self.encode_pairs(keyword, rest)]}

    def encode_pairs(self, path: str, mapping: Mapping[Any, Any]) -> list[list[Tree]]:
        return [
            [self.encode(path, key), self.encode(f"{path}.{key}", value)]
            for key, value in mapping.items()
            if self._can_store(f"{path}.{key}", value)
        ]

    def encode(self, path: str, value: Any, *, deferred: bool = False) -> Tree:
        if isinstance(value, torch.Tensor):
            found = {"$tensor": self._add(path, value, deferred)}
            return found if value.device.type == "cpu" else found | {"device": str(value.device)}
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str(value)
        if isinstance(value, int):
            return int(value) if -(2**63) <= value < 2**63 else {"$int": str(int(value))}
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$number": repr(float(value))}
        if isinstance(value, Mapping):
            return self._encode_mapping(path, value)
        if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            return self._encode_sequence(path, value)
        return self._encode_leaf(path, value)

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

    def _add(self, path: str, tensor: torch.Tensor, deferred: bool) -> str:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise TypeError(f"{path}: cannot store a {tensor.layout} tensor; give a dense one")
        tensor = tensor.detach()
        storage = tensor.untyped_storage().data_ptr()
        key = (
            storage,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj(),
        )
        if tensor.numel() and key in self._shared:
            return self._shared[key]
        name, copies = path, 1
        while name in self._captured.tensors:
            copies += 1
            name = f"{path}#{copies}"
        self._shared[key] = name
        self._captured.tensors[name] = tensor
        if deferred or storage in self._step_storages:
            self._captured.deferred.add(name)
        return name


def tensor_names(tree: Tree) -> Iterator[str]:
    """All tensors that a tree refers to."""
    if isinstance(tree, dict):
        if "$tensor" in tree:
            yield tree["$tensor"]
        else:
            for value in tree.values():
                yield from tensor_names(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from tensor_names(value)


def decode(tree: Tree, tensors: Mapping[str, torch.Tensor], *, copy: bool, adopt: bool = False) -> Any:
    """The value a tree was made from.

    With `copy`, its tensors have memory of their own; with `adopt`, that may be the memory of `tensors`, whose
    owner then has no further use for it.
    """
    if isinstance(tree, list):
        return [decode(item, tensors, copy=copy, adopt=adopt) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if (tag := next(iter(tree), "")).startswith("$"):
        return _decode_tag(tag, tree, tensors, copy, adopt)
    return {key: decode(value, tensors, copy=copy, adopt=adopt) for key, value in tree.items()}


def _decode_tag(
    tag: str, tree: dict[str, Tree], tensors: Mapping[str, torch.Tensor], copy: bool, adopt: bool
) -> Any:
    body = tree[tag]
    match tag:
        case "$tensor":
            tensor = tensors[body]
            if "device" in tree and (moved := tensor.to(_device(tree["device"]))) is not tensor:
                return moved
            return tensor.clone() if copy and not (adopt and _can_stay(tensor)) else tensor
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


def rng_state() -> dict[str, Any]:
    """Random state of this process: Python, NumPy's global one where NumPy is in use, torch, each CUDA device."""
    version, keys, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, torch.tensor(keys), gauss],  # 625 numbers, as one tensor
        "torch": torch.get_rng_state(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        kind, words, *rest = state["numpy"]
        numpy.random.set_state((kind, words.numpy().astype("uint32"), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def _numpy_array(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    return value if isinstance(value, numpy.ndarray) else numpy.asarray(value)


def _check_module(
    keyword: str,
    module: torch.nn.Module,
    tree: Tree,
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
) -> None:
    own, saved = module.state_dict(), tree["state"]
    if missing := sorted(own.keys() - saved.keys()) or sorted(saved.keys() - own.keys()):
        raise IncompatibleCheckpoint(
            f"{keyword}: model and checkpoint differ in {len(missing)} entries, {missing[0]!r} among them"
        )
    buffers = {n: b for n, b in module.named_buffers(remove_duplicate=False) if n in tree["buffers"]}
    for name, tensor in {**own, **buffers}.items():
        entry = saved.get(name) or tree["buffers"][name]
        if not isinstance(tensor, torch.Tensor) or not isinstance(entry, dict) or "$tensor" not in entry:
            continue
        here, there = (str(tensor.dtype), tuple(tensor.shape)), shapes[entry["$tensor"]]
        if here != there:
            raise IncompatibleCheckpoint(
                f"{keyword}.{name}: {here[1]} of {here[0]} in the model, "
                f"{there[1]} of {there[0]} in the checkpoint"
            )


def _check_optimizer(keyword: str, optimizer: torch.optim.Optimizer, tree: Tree) -> None:
    saved = dict(tree["$pairs"])["param_groups"]
    here = [len(group["params"]) for group in optimizer.param_groups]
    there = [len(group["params"]) for group in saved]
    if here != there:
        raise IncompatibleCheckpoint(
            f"{keyword}: parameter groups of {here} parameters here, of {there} in the checkpoint"
        )


def _device(name: str) -> torch.device:
    """Where a tensor was; the CPU on a machine that has no such device."""
    device = torch.device(name)
    return device if device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")


def _load_module(module: torch.nn.Module, tree: Tree, tensors: Mapping[str, torch.Tensor]) -> None:
    state = collections.OrderedDict(decode(tree["state"], tensors, copy=False))
    state._metadata = decode(tree["metadata"], tensors, copy=False)  # type: ignore[attr-defined]
    with _one_thread_for(sum(tensor.nbytes for tensor in state.values() if isinstance(tensor, torch.Tensor))):
        module.load_state_dict(state)
    own = dict(module.named_buffers(remove_duplicate=False))
    for name, saved in decode(tree["buffers"], tensors, copy=False).items():  # those with persistent=False
        own[name].copy_(saved)


@contextlib.contextmanager
def _one_thread_for(size_bytes: int) -> Iterator[None]:
    """Copy little on this thread alone: where other cores are busy, torch's threads wait for each other at each
    tensor, which takes longer than the copy."""
    threads = torch.get_num_threads()
    if threads == 1 or size_bytes > ALONE_BYTES:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    optimizer.load_state_dict(state)
    # load_state_dict casts moments to their parameter's dtype; what was saved in float32 goes on in float32
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, saved in state["state"].items():
        if not isinstance(saved, Mapping):
            continue
        own = optimizer.state[parameters[index]]
        for key, value in saved.items():
            if isinstance(value, torch.Tensor) and own[key].dtype != value.dtype:
                own[key] = value.to(own[key].device)
