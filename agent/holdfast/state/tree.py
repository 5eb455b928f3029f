"""Decoding of values from a JSON tree and named tensors.

A tree is what `state_dict()` returned, with `{"$tensor": name}` in place of each tensor. Further tags (`$tuple`,
`$pairs`, `$number` …) stand for what JSON lacks. There is no pickle, so no code from a checkpoint runs. A decoded
value equals the stored one in value, type, layout and identity; `Encoder.encode` refuses all other values.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast import accelerators
from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint
from holdfast.format.dtypes import dtype_of_view
from holdfast.format.manifest import LINE_BYTES, MANIFEST, SMALL_BYTES
from holdfast.state.sharding import local
from holdfast.torch_internals import with_metadata

logger = logging.getLogger("holdfast")

Tree = Any
Tensors = Mapping[str, torch.Tensor]
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of a checkpoint's tensors, by name."""
NUMPY = frozenset(
    [
        *(f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)),
        *("bool", "float16", "float32", "float64", "complex64", "complex128"),
    ]
)
"""NumPy dtypes of scalars and arrays, as NumPy names them."""
_LARGEST_GAPS = 16
"""Ratio of memory span to elements up to which a view is stored with its strides."""
_DTYPE_NAME = re.compile(r"(b?float|u?int|q?u?int|complex|bits)\d+\w*|bool")


class LiveTensors:
    """Tensors of a session's objects to which its `Variables` may refer.

    Args:
        modules: tensors of modules, by their names in the checkpoint.
        trained: parameters of optimizers, in their order, by the keyword of the optimizer.
    """

    def __init__(self, modules: Mapping[str, torch.Tensor], trained: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self.modules, self.trained = modules, trained
        self.made: dict[str, tuple[Tree, torch.Tensor]] = {}
        """Tensors decoded so far, with their trees: two `Variables` may hold the same one."""

    def parameter(self, tree: Tree) -> torch.Tensor | None:
        """Return the parameter that a tree with `trained` refers to; `None` if this session has none there."""
        match tree.get("trained"):
            case [str(keyword), int(number)] if 0 <= number < len(self.trained.get(keyword, ())):
                return self.trained[keyword][number]
        return None


def decode(
    tree: Tree,
    tensors: Tensors,
    *,
    copy: bool,
    adopt: Collection[str] = (),
    live: LiveTensors | None = None,
) -> Any:
    """Return the value that a tree was made from.

    With `copy`, its tensors do not share memory with `tensors`, except with those named in `adopt`, which the
    caller gives away. With `live`, a tensor of a module or an optimizer is decoded to that of this session.
    """
    return _Decoder(tensors, copy, adopt, live).decode(tree)


def trained_tensors(tree: Tree) -> Iterator[Tree]:
    """Yield the tensors of a tree that are parameters of an optimizer outside all modules."""
    if isinstance(tree, dict) and "trained" in tree and "$tensor" in tree:
        yield tree
    elif isinstance(tree, (dict, list)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from trained_tensors(item)


def decode_without_memory(tree: Tree, shapes: Shapes) -> Any:
    """Decode a tree with stand-in tensors that take no memory.

    Their dtype, shape and type are those that `decode` gives; their device is the CPU, their strides are 0.
    """
    return _StandInDecoder(_StandIns(shapes), copy=False, adopt=(), live=None).decode(tree)


def require_readable(keyword: str, tree: Tree, shapes: Shapes) -> Any:
    """Decode a tree as `decode_without_memory` does.

    Raises:
        DamagedCheckpoint: it cannot be decoded.
        IncompatibleCheckpoint: it needs a newer Holdfast or another torch.
    """
    try:
        return decode_without_memory(tree, shapes)
    except ImportError as error:  # no NumPy here
        raise IncompatibleCheckpoint(f"{keyword}: {error}") from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise DamagedCheckpoint(MANIFEST, f"state.{keyword}: {type(error).__name__}: {error}") from error


class _StandIns(Mapping[str, torch.Tensor]):
    """Tensors made from dtype and shape alone."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes

    def __getitem__(self, name: str) -> torch.Tensor:
        dtype, shape = self._shapes[name]
        return torch.empty((), dtype=dtype_of_view(dtype.removeprefix("torch.")), device="cpu").expand(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class _Decoder:
    def __init__(self, tensors: Tensors, copy: bool, adopt: Collection[str], live: LiveTensors | None) -> None:
        self._tensors, self._copy, self._adopt, self._live = tensors, copy, adopt, live
        self._made: dict[str, tuple[Tree, torch.Tensor]] = live.made if live is not None else {}
        self._shared: dict[str, Any] = {}

    def decode(self, tree: Tree) -> Any:
        if isinstance(tree, list):
            return [self.decode(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if (tag := next(iter(tree), "")).startswith("$"):
            return self._decode_tag(tag, tree)
        return {key: self.decode(value) for key, value in tree.items()}

    def _decode_tag(self, tag: str, tree: dict[str, Tree]) -> Any:
        body = tree[tag]
        match tag:
            case "$tensor":
                return self._decode_tensor(tree)
            case "$shared":
                if "value" in tree:
                    self._shared[body] = self.decode(tree["value"])
                return self._shared[body]
            case "$str":
                return body.encode("ascii").decode("unicode_escape")
            case "$int":
                return int(body)
            case "$number":
                return float(body)
            case "$bytes":
                return base64.b64decode(body)
            case "$bytearray":
                return bytearray(base64.b64decode(body))
            case "$complex":
                return complex(float.fromhex(body[0]), float.fromhex(body[1]))
            case "$dtype":
                return _dtype(body)
            case "$device":
                return _known_device(body)
            case "$ndarray":
                return self._decode_array(tree)
            case "$scalar":
                return _numpy_type(body)(self.decode(tree["value"]))
        value = self.decode(body)
        match tag:
            case "$pairs":
                return dict(value)
            case "$ordered":
                if "metadata" in tree:
                    return with_metadata(value, self.decode(tree["metadata"]))
                return collections.OrderedDict(value)
            case "$counter":
                return collections.Counter(dict(value))
            case "$tuple":
                return tuple(value)
            case "$size":
                return torch.Size(value)
            case "$set" | "$frozenset":
                return set(value) if tag == "$set" else frozenset(value)
            case "$deque":
                return collections.deque(value, tree["maxlen"])
        raise IncompatibleCheckpoint(f"unknown tag {tag} in a checkpoint's state: written by a newer Holdfast")

    def _decode_tensor(self, tree: dict[str, Tree]) -> torch.Tensor:
        name = tree["$tensor"]
        if name in self._made:
            first, tensor = self._made[name]
            return tensor if first == tree else _as_stored(tensor.detach(), tree)
        self._made[name] = tree, self._make(name, tree)
        return self._made[name][1]

    def _make(self, name: str, tree: dict[str, Tree]) -> torch.Tensor:
        if self._live is not None:
            if (held := self._live.modules.get(name)) is not None:
                return _as_held(held, tree)
            if (trained := self._live.parameter(tree)) is not None:
                with torch.no_grad():
                    trained.copy_(self._tensors[name])
                return trained.requires_grad_("requires_grad" in tree)
        tensor = stored = self._tensors[name]
        if "device" in tree:
            tensor = self._on_device(tensor, tree["device"])
        if "strides" in tree:
            tensor = self._laid_out(tensor, tree["strides"])
        if self._copy and tensor is stored and not (name in self._adopt and _can_stay(local(tensor))):
            tensor = tensor.clone()
        return _as_stored(tensor, tree)

    def _decode_array(self, tree: dict[str, Tree]) -> Any:
        import numpy  # noqa: F401  # for an ImportError: torch raises another one

        tensor = self._decode_tensor(tree["$ndarray"]).detach().cpu()
        strides: Any = tree.get("strides")
        backward = [] if strides is None else [axis for axis, stride in enumerate(strides) if stride < 0]
        if strides is not None and (backward or tensor.stride() != tuple(strides)):
            tensor = self._laid_out(tensor, list(map(abs, strides)), backward)
        array: Any = tensor.numpy()
        if backward:
            array = array[tuple(slice(None, None, -1 if stride < 0 else 1) for stride in strides)]
        if "readonly" in tree:
            array.flags.writeable = False
        return array

    def _on_device(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return tensor.to(_device(name))

    def _laid_out(
        self, tensor: torch.Tensor, strides: Sequence[int], backward: list[int] | None = None
    ) -> torch.Tensor:
        """Return a copy with these strides, reversed along the axes `backward`."""
        _require_strides(tensor.shape, strides)
        return _copied(tensor.flip(backward) if backward else tensor, strides)


class _StandInDecoder(_Decoder):
    """Checks devices and strides, and returns the stand-ins unchanged."""

    def _on_device(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        _known_device(name)
        return tensor

    def _laid_out(
        self, tensor: torch.Tensor, strides: Sequence[int], backward: list[int] | None = None
    ) -> torch.Tensor:
        _require_strides(tensor.shape, strides)
        return tensor


def memory_span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Count the elements of memory from the first element to the last, both included."""
    if not math.prod(shape):
        return 0
    return 1 + sum((size - 1) * abs(stride) for size, stride in zip(shape, strides, strict=True))


def largest_span(shape: Sequence[int]) -> int:
    return max(_LARGEST_GAPS * math.prod(shape), 1 << 18)


def _require_strides(shape: Sequence[int], strides: Sequence[int]) -> None:
    """Raise ValueError for strides that are invalid for this shape, or span too much memory."""
    if len(strides) != len(shape) or any(type(stride) is not int or stride < 0 for stride in strides):
        raise ValueError(f"invalid strides {strides} of a tensor of shape {tuple(shape)}")
    if memory_span(shape, strides) > largest_span(shape):
        raise ValueError(f"strides {strides} of a tensor of shape {tuple(shape)} have too large gaps")


def _copied(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a copy with these non-negative strides."""
    shape, count = tensor.shape, memory_span(tensor.shape, strides)
    memory = torch.empty(count, dtype=tensor.dtype, device=tensor.device)
    found = memory.as_strided(shape, strides)
    if _overlaps(shape, strides):  # elements in one place have the same value: the order does not matter
        places = torch.arange(count, device=tensor.device).as_strided(shape, strides)
        memory[places.reshape(-1)] = tensor.reshape(-1)
    else:
        found.copy_(tensor)
    return found


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share a place in memory."""
    end = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride < end:
            return True
        end = stride * (size - 1) + end
    return False


def _as_stored(tensor: torch.Tensor, tree: Tree) -> torch.Tensor:
    """Return the tensor as a Parameter, or requiring a gradient, as its tree says."""
    requires_grad = "requires_grad" in tree
    if "parameter" in tree:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.detach().requires_grad_() if requires_grad else tensor


def _as_held(held: torch.Tensor, tree: Tree) -> torch.Tensor:
    """Return the tensor of a module, or a view of its memory if that was stored."""
    if "parameter" in tree or not (held.requires_grad or isinstance(held, torch.nn.Parameter)):
        return held
    return _as_stored(held.detach(), tree)


def _dtype(name: str) -> torch.dtype:
    try:
        return dtype_of_view(name)
    except ValueError as error:
        if _DTYPE_NAME.fullmatch(name):
            raise IncompatibleCheckpoint(str(error)) from error
        raise ValueError(f"there is no dtype {name!r}") from error


def _numpy_type(name: str) -> Any:
    if name not in NUMPY:
        raise ValueError(f"there is no NumPy scalar {name!r}")
    import numpy

    return numpy.dtype(name).type


def _can_stay(tensor: torch.Tensor) -> bool:
    """Whether a tensor is large, and aligned like those of torch: some kernels round differently otherwise."""
    return tensor.nbytes >= SMALL_BYTES and tensor.data_ptr() % LINE_BYTES == 0


def _known_device(name: str) -> torch.device:
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is not the name of a device")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise IncompatibleCheckpoint(f"this torch has no device {name!r}") from error


def _device(name: str) -> torch.device:
    """Return the device of a stored tensor; the CPU if this machine has no such device."""
    device, is_here = _known_device(name), False
    if accelerators.is_accelerator(device):
        is_here = accelerators.is_here(device)
    elif device.type not in ("cpu", "meta"):
        with contextlib.suppress(Exception):  # each missing backend raises another type
            is_here = torch.empty((), device=device).device.type == device.type
    return device if is_here else torch.device("cpu")


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements share a place in memory, as after `expand`."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def unexpanded(tensor: torch.Tensor, strides: Sequence[int] = ()) -> torch.Tensor:
    """Narrow a tensor to the first of the elements that share a place with these strides."""
    for dimension, stride in enumerate(strides or tensor.stride()):
        if not stride and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def has_array(tree: Tree) -> bool:
    if isinstance(tree, dict):
        return "$ndarray" in tree or any(map(has_array, tree.values()))
    return isinstance(tree, list) and any(map(has_array, tree))
