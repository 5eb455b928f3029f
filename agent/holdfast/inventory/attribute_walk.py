"""Values of plain attributes below the given objects, read without running any code of the script.

Not even `.grad` is read. Left out are the attributes of libraries, and names for logs, caches, times and results
of the last batch.
"""

from __future__ import annotations

import collections
import dis
import enum
import functools
import inspect
import itertools
import random
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import IterableDataset

from holdfast.accelerators import is_accelerator
from holdfast.state.references import CONTAINERS, attributes, container_type, entries, entry_name, length, slots

T = TypeVar("T")

DEPTH = 16
"""How many objects deep values are looked for."""
CONTAINER_DEPTH = 4
"""How many lists and dicts deep the value of one attribute is described."""
MOST_ENTRIES = 64
"""Of a longer list or dict, the length and the entries at both ends are compared."""
MOST_ATTRIBUTES = 20_000
MOST_PARTS = 500
"""Most values of one attribute that are compared."""
MOST_OF_A_TYPE = 200
"""Most objects of one type whose attributes are compared: those of a large model are alike."""
MOST_TEXT = 1000
CACHED = 4096
"""Number of types and names whose properties are remembered."""
SAMPLE = 32
"""Number of elements of a large tensor or array that are compared, at its start and spread over it."""


def split_names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LIBRARIES = split_names("""
    holdfast torch torchvision torchaudio torchdata torchmetrics functorch triton lightning lightning_fabric
    lightning_utilities pytorch_lightning accelerate transformers diffusers tokenizers datasets huggingface_hub
    safetensors ignite deepspeed wandb mlflow tensorboard tensorboardX comet_ml neptune aim clearml tqdm rich numpy
    scipy sklearn pandas pyarrow polars matplotlib PIL cv2 omegaconf hydra ray webdataset streaming opentelemetry
    loguru prometheus_client structlog absl sqlalchemy requests urllib3 httpx pydantic fsspec jax msgspec zmq
""")
"""Packages whose attributes are their own affair: their `state_dict()` has what matters."""
IGNORED_WORDS = split_names("""
    cache cached caches logs logged logger loggers logging history histories timer timers
    timestamp elapsed clock t0 tic fps throughput lock thread pbar tqdm writer
    warned warn warning warnings printed verbose debug hook hooks handle handles profiler
    dataset datasets dataloader dataloaders loader loaders sampler samplers device dtype mode training
    compiled pid closed radam
""")
"""`radam_buffer`: optimizers of the script with rectified Adam keep factors there that follow from the step."""
RESULT_WORDS = split_names("""
    loss losses acc accuracy perplexity metric metrics output outputs logits attn
    attention attentions activation activations feature features grad grads pred preds prediction
    predictions score scores batch batches shape size bsz time times
""")
"""Names for results of the last batch, unless another word says that they are carried on."""
CARRIED_WORDS = split_names(
    "best prev previous ema avg average mean running sum total count moving buffered step steps"
)
NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_NAMESPACES = ("SimpleNamespace", "Namespace")
_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module())) | {"_is_hf_initialized", "forward"}
_OPTIMIZER_ATTRIBUTES = split_names("""
    state param_groups defaults _step_count _opt_called _step_supports_amp_scaling grad_scale found_inf step
    _need_device_dtype_check_for_fused _warned_capturable_if_run_uncaptured
""")


OF_LOADERS = "loader"
"""Path of the datasets and collate functions of loaders, which begins with it."""
_SETTINGS = split_names("p momentum dropout drop_prob")
"""Attributes of modules of libraries that only a script changes, such as a dropout that it anneals."""


def _cached(function: Callable[[type], T]) -> Callable[[type], T]:
    return functools.lru_cache(CACHED)(function)


class Attribute(NamedTuple):
    """An attribute at one instant."""

    holder: Callable[[], Any]
    """Returns the object, unless it was freed: a capture must not keep memory of the script."""
    type_name: str
    name: str
    parts: dict[str, Any]
    """Descriptions of its values, by their path within the attribute."""


class AttributeWalk:
    """Iterates over the attributes below `roots`, in steps that take microseconds each.

    Args:
        roots: the objects, by the path to report.
        known: identities of objects that are left out, because they are saved or reported.
    """

    def __init__(self, roots: Mapping[str, Any], known: set[int]) -> None:
        self.found: dict[str, Attribute] = {}
        self._known, self._seen = known, set(known)
        self._visited: collections.Counter[type] = collections.Counter()
        self._steps = itertools.chain.from_iterable(
            self._object(path, item, DEPTH) for path, item in list(roots.items())
        )

    def advance(self, is_over: Callable[[], bool]) -> bool:
        """Go on until `is_over`, at least one step; return whether everything was visited."""
        for _ in self._steps:
            if len(self.found) >= MOST_ATTRIBUTES:
                return True
            if is_over():
                return False
        return True

    def _object(self, path: str, item: Any, depth: int) -> Iterator[None]:
        self._seen.add(id(item))
        if any(_package(base) == "torchmetrics" for base in type(item).__mro__):
            return  # what it has counted is reported or saved as a whole
        left_out = names_of_libraries(type(item))
        self._visited[type(item)] += 1
        try:
            for name, value in _attributes(item) if self._visited[type(item)] <= MOST_OF_A_TYPE else ():
                if name not in left_out and not is_ignored(name):
                    yield from self._attribute(path, item, name, value, depth)
                yield
            yield
            if issubclass(type(item), torch.nn.Module):
                for name, part in attributes(item).get("_modules", {}).items():
                    if part is not None and id(part) not in self._seen:
                        yield from self._object(f"{path}.{name}", part, DEPTH)
        except RuntimeError:  # a dict has changed since the last step: the next walk sees the rest
            return

    def _attribute(self, path: str, holder: Any, name: str, value: Any, depth: int) -> Iterator[None]:
        parts: dict[str, Any] = {}
        yield from self._value(f"{path}.{name}", "", value, parts, depth, CONTAINER_DEPTH)
        if parts:
            self.found[f"{path}.{name}"] = Attribute(_reference(holder), type(holder).__qualname__, name, parts)

    def _value(
        self, path: str, within: str, value: Any, parts: dict[str, Any], depth: int, levels: int
    ) -> Iterator[None]:
        kind = type(value)
        if (describe := describer_of(kind)) is not None:
            if id(value) not in self._known and (described := describe(value)) is not None:
                parts[within] = described
        elif issubclass(kind, CONTAINERS):
            count = length(value)
            parts[within] = kind.__name__, count
            if levels and not issubclass(kind, (set, frozenset)):
                for key, entry in _entries(value, count):
                    if len(parts) >= MOST_PARTS:
                        return
                    yield from self._value(path, f"{within}{entry_name(key)}", entry, parts, depth, levels - 1)
                    yield
        elif depth and is_walked(kind) and id(value) not in self._seen:
            if within == "":
                parts[within] = kind.__name__, None
            yield from self._object(path + within, value, depth - 1)


def _reference(holder: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(holder)
    except TypeError:  # its slots have no place for one
        return lambda: None


@functools.lru_cache(CACHED)
def is_ignored(name: str) -> bool:
    """Whether a name is one for logs, caches, times or results of the last batch."""
    words = words_of(name)
    return (
        name.strip("_") == "log"
        or bool(words & IGNORED_WORDS)
        or bool(words & RESULT_WORDS and not words & CARRIED_WORDS)
    )


def words_of(name: str) -> frozenset[str]:
    return frozenset(re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_"))


@_cached
def is_walked(kind: type) -> bool:
    """Whether objects of a type may hold state of the script."""
    if issubclass(kind, torch.nn.Module):
        return True
    if issubclass(kind, (type, torch.optim.Optimizer, torch.utils.data.Dataset, torch.utils.data.DataLoader)):
        return False
    if issubclass(kind, (torch.utils.data.Sampler, torch.Tensor, BaseException, enum.Enum)):
        return False
    if any(_package(base) == "holdfast" for base in kind.__mro__):
        return False  # a subclass of an adapter
    package = _package(kind)
    return kind.__name__ in _NAMESPACES or (package not in LIBRARIES and package not in sys.stdlib_module_names)


@_cached
def names_of_libraries(kind: type) -> frozenset[str]:
    """Return the attributes of a type's instances that its bases in libraries use."""
    names: set[str] = set()
    for base in kind.__mro__:
        if base is torch.nn.Module:
            names |= _MODULE_ATTRIBUTES
            continue
        if base is torch.optim.Optimizer:
            names |= _OPTIMIZER_ATTRIBUTES
        if _package(base) in LIBRARIES:
            names.update(vars(base))
            for member in vars(base).values():
                names.update(_names_in(member))
    return frozenset(names - _SETTINGS if issubclass(kind, torch.nn.Module) else names)


def _names_in(member: Any) -> Iterator[str]:
    function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    function = inspect.unwrap(function) if callable(function) else function
    codes = [code] if (code := getattr(function, "__code__", None)) is not None else []
    while codes:
        code = codes.pop()
        yield from code.co_names
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]


def _package(kind: type) -> str:
    module = kind.__module__
    return module.partition(".")[0] if isinstance(module, str) else ""


def _attributes(item: Any) -> Iterator[tuple[str, Any]]:
    return itertools.chain(attributes(item).items(), slots(item))


def _entries(value: Any, count: int) -> Iterator[tuple[Any, Any]]:
    """Yield the entries of a container, or those at the ends of a long one, without code of a subclass."""
    kind, found = container_type(value), entries(value)
    if kind is dict:
        found = found if count <= MOST_ENTRIES else itertools.islice(found, 4)
        return ((key if type(key) in NUMBERS else type(key).__name__, entry) for key, entry in found)
    if count <= MOST_ENTRIES:
        return found
    return ((number, kind.__getitem__(value, number)) for number in (0, 1, count - 2, count - 1))


@_cached
def describer_of(kind: type) -> Callable[[Any], Any] | None:
    """Return a function that describes values of a type; `None` for containers and other objects."""
    if kind in NUMBERS:
        return _number
    if kind in _TENSORS:
        return _tensor
    if issubclass(kind, enum.Enum):
        return lambda value: (kind.__name__, value.name)
    if issubclass(kind, torch.Tensor):
        return lambda value: None
    if issubclass(kind, torch.Generator):
        return lambda value: ("generator", hash(bytes(torch.Generator.get_state(value).numpy())))
    if issubclass(kind, random.Random):
        return lambda value: (
            None if kind is random.SystemRandom else ("generator", hash(random.Random.getstate(value)))
        )
    if (numpy := sys.modules.get("numpy")) is not None:
        if issubclass(kind, numpy.ndarray):
            return _array
        if issubclass(kind, numpy.generic):
            return lambda value: (kind.__name__, repr(value.item()))
        if issubclass(kind, numpy.random.Generator):
            return lambda value: ("generator", repr(value.bit_generator.state))
        if issubclass(kind, numpy.random.RandomState):
            return lambda value: ("generator", hash(str(value.get_state(legacy=False))))
    return None


def _number(value: Any) -> Any:
    if type(value) in (str, bytes):
        return type(value).__name__, value[:MOST_TEXT], len(value)
    return type(value).__name__, value if value == value else "nan"


def _tensor(value: torch.Tensor) -> Any:
    """Describe a tensor; `None` for a parameter, and for a result of autograd, which a forward pass replaces."""
    on_device = is_accelerator(value.device)
    if value.requires_grad or value.layout is not torch.strided or not (on_device or value.device.type == "cpu"):
        return None
    sample = _sample(value.detach())
    outline = "tensor", str(value.dtype), tuple(value.shape)
    if on_device:  # the copy is queued, and read by another thread
        return *outline, [each.clone() for each in sample]
    return *outline, repr([each.tolist() for each in sample])


def _array(value: Any) -> Any:
    sample = _sample(value) if value.dtype.kind in "biufc" else []
    return "array", str(value.dtype), value.shape, repr([each.tolist() for each in sample])


def _sample(value: Any) -> list[Any]:
    """Return views of some elements: the first ones, and others spread over the first dimension."""
    while len(value.shape) > 1:
        if not value.shape[0]:
            return []
        last, value = value[-1], value[0]
        if len(last.shape) == 1 and value.shape[0] > SAMPLE:
            return [value[:SAMPLE], last[-SAMPLE:]]
        if len(last.shape) <= 1:
            return [value, last]
    if not len(value.shape) or value.shape[0] <= 2 * SAMPLE:
        return [value]
    return [value[:SAMPLE], value[:: value.shape[0] // SAMPLE]]


def settled(described: Any) -> Any:
    """Return a description with its samples in host memory."""
    if type(described) is tuple and described and type(described[-1]) is list:
        return *described[:-1], repr([each.tolist() for each in described[-1]])
    return described


def children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the entries of a dict, list, tuple or deque; of a long one, those at its ends."""
    if issubclass(type(value), CONTAINERS) and not issubclass(type(value), (set, frozenset)):
        yield from _entries(value, length(value))


def current_value(attribute: Attribute) -> Any:
    """Return the value that an attribute has now; `None` if it was removed."""
    return dict(_attributes(attribute.holder())).get(attribute.name)


def parts_of_loaders(loaders: Iterable[Any]) -> dict[str, Any]:
    """Return the datasets, also those within others, and collate functions that are objects of the script."""
    found: dict[str, Any] = {}
    for number, loader in enumerate(loaders, start=1):
        if getattr(loader, "num_workers", 0):
            continue  # the objects of this process do not change
        root = f"{OF_LOADERS}{number if number > 1 else ''}"
        parts: list[tuple[str, Any]] = [
            (f"{root}.{name}", attributes(loader).get(name)) for name in ("dataset", "collate_fn")
        ]
        while parts and len(found) < MOST_OF_A_TYPE:
            path, part = parts.pop(0)
            if any(part is each for each in found.values()):
                continue
            package = _package(type(part))
            if package == "torch":  # such as Subset and ConcatDataset
                within = [(f"{path}.{name}", attributes(part).get(name)) for name in ("dataset", "datasets")]
                parts += [each for each in within if each[1] is not None]
            elif type(part) in (list, tuple) and path.endswith(".datasets") and len(part) <= MOST_ENTRIES:
                parts += [(f"{path}[{place}]", each) for place, each in enumerate(part)]
            elif isinstance(part, IterableDataset) or hasattr(type(part), "state_dict"):
                continue  # its position is saved, or it is read again
            elif package not in LIBRARIES and package not in sys.stdlib_module_names:
                found[path] = part
    return found


@_cached
def read_by(kind: type) -> frozenset[str]:
    """Return the attributes that the methods of a type read, apart from where they change them."""
    read: collections.Counter[str] = collections.Counter()
    for base in kind.__mro__:
        if _package(base) in LIBRARIES:
            continue
        for name, member in vars(base).items():
            code = getattr(member, "__code__", None)
            if name == "__init__" or code is None:
                continue
            for each in dis.get_instructions(code):
                if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                    read[each.argval] += 1
                elif each.opname == "STORE_ATTR":
                    read[each.argval] -= 1
    return frozenset(name for name, count in read.items() if count > 0)
