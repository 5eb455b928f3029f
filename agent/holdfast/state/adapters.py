"""State adapters: how each kind of object is encoded into a checkpoint and loaded from one."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint
from holdfast.format.manifest import MANIFEST, SMALL_BYTES
from holdfast.format.shards import is_module, names_in
from holdfast.state.capture import ModuleWatch, OptimizerWatch, Watch, watch_of
from holdfast.state.encoder import Encoder
from holdfast.state.matching import (
    ParameterMatch,
    count_elements,
    labels_in,
    match_parameters,
    named,
    plain_name,
    renamed,
    require_state_by_parameter,
)
from holdfast.state.rng import StatefulGenerator
from holdfast.state.sharding import is_sharded, local
from holdfast.state.tree import (
    LiveTensors,
    Shapes,
    Tensors,
    Tree,
    decode,
    decode_without_memory,
    has_array,
    is_expanded,
    require_readable,
    unexpanded,
)
from holdfast.state.variables import Variables
from holdfast.state.wrappers import Stateful, has_plain_state, require_attributes
from holdfast.system.host_memory import copies_of, copy_plain, is_plain, one_thread_for
from holdfast.torch_internals import metadata_of, only_copies, own_buffers, with_metadata

logger = logging.getLogger("holdfast")

Names = Mapping[int, str]
"""Names of the script's parameters, by `id`."""
ParameterIds = Callable[[], Mapping[str, int]]
"""Returns the `id` of each of the script's parameters by all its names, each with the keyword of its module."""


class StateAdapter:
    """Adapter of one object of a session. This base class uses only `state_dict` and `load_state_dict`."""

    def __init__(self, keyword: str, item: Stateful) -> None:
        self.keyword, self._item = keyword, item

    def watch(self) -> Watch | None:
        """Return a watch for `encode_again`; `None` if the object must be encoded in full each time."""
        return None

    def in_own_names(self, tree: Tree) -> Tree:
        """Return a checkpoint's tree with the names that this object has for its parts."""
        return tree

    def state(self) -> Any:
        """Return the object's `state_dict()`, in the order of its tree."""
        return self._item.state_dict()

    def encode(self, state: Any, encoder: Encoder, names: Names) -> Tree:
        """Encode what `state` returned."""
        return encoder.encode(self.keyword, state)

    def encode_again(self, tree: Tree, watch: Watch, encoder: Encoder) -> Tree:
        """Update an earlier tree, since which `watch` has seen no change."""
        return tree

    def check(self, tree: Tree, shapes: Shapes) -> None:
        """Raise IncompatibleCheckpoint if the object cannot load this tree, as far as that is known."""

    def sharded(self, tree: Tree, shapes: Shapes) -> dict[str, torch.Tensor]:
        """Return templates for tensors that must be sharded, if `encode` does not show it yet."""
        return {}

    def load(self, tree: Tree, tensors: Tensors, *, live: LiveTensors | None = None, adopt: bool = True) -> None:
        """Load a checkpoint's state into the object. Errors of its `load_state_dict` pass through.

        With `adopt`, the object may keep the memory of `tensors`. `live` has the tensors of the session's other
        objects.
        """
        self._item.load_state_dict(decode(tree, tensors, copy=True))


class VariablesAdapter(StateAdapter):
    """`Variables`, which may hold tensors of the session's modules and optimizers."""

    def check(self, tree: Tree, shapes: Shapes) -> None:
        state = require_readable(self.keyword, tree, shapes)
        if not isinstance(state, dict):
            raise IncompatibleCheckpoint(
                f"{self.keyword}: Variables here, another kind of object in the checkpoint"
            )
        for name in state:
            if name == "_declared" or hasattr(Variables, name):
                raise DamagedCheckpoint(MANIFEST, f"state.{self.keyword}: invalid name {name!r} of a variable")

    def load(self, tree: Tree, tensors: Tensors, *, live: LiveTensors | None = None, adopt: bool = True) -> None:
        self._item.load_state_dict(decode(tree, tensors, copy=True, live=live))


class SchedulerAdapter(StateAdapter):
    """A learning-rate scheduler of torch. Its `load_state_dict` sets any attribute, so `check` restricts them."""

    def check(self, tree: Tree, shapes: Shapes) -> None:
        require_attributes(self.keyword, self._item, require_readable(self.keyword, tree, shapes))


class ModuleAdapter(StateAdapter):
    """A module: its `state`, the `metadata` of that, non-persistent `buffers`, and the names of parameters that
    require no gradient (`frozen`)."""

    _item: torch.nn.Module

    def watch(self) -> Watch | None:
        return watch_of(self._item)

    def encode(self, state: Any, encoder: Encoder, names: Names) -> Tree:
        buffers = {n: b for n, b in self._buffers().items() if n not in state}
        return {
            "state": {name: self._encode_entry(encoder, name, value) for name, value in state.items()},
            "metadata": encoder.encode(self.keyword, metadata_of(state)),
            "buffers": {
                name: encoder.encode(f"{self.keyword}.{name}", buffer, in_place=True)
                for name, buffer in buffers.items()
            },
            "frozen": _frozen(self._item.named_parameters()),
        }

    def encode_again(self, tree: Tree, watch: Watch, encoder: Encoder) -> Tree:
        assert isinstance(watch, ModuleWatch)
        return {**tree, "frozen": _frozen(watch.parameters)}

    def in_own_names(self, tree: Tree) -> Tree:
        if not is_module(tree) or not all(
            isinstance(tree[part], dict) for part in ("state", "metadata", "buffers")
        ):
            return tree
        own = [*self._item.state_dict(), *self._buffers(), *(n for n, _ in self._item.named_parameters())]
        new = renamed([*tree["state"], *tree["buffers"]], dict.fromkeys(own))
        if not new:
            return tree
        within = {name.rpartition(".")[0]: own_name.rpartition(".")[0] for name, own_name in new.items()}
        for name in tree["buffers"]:  # the first forward pass creates some of them
            holder, _, last = name.rpartition(".")
            if name not in new and holder in within:
                new[name] = ".".join(filter(None, (within[holder], last)))
        versions = {plain_name(holder): version for holder, version in tree["metadata"].items()}
        holders = [name for name, _ in self._item.named_modules(remove_duplicate=False)]
        return {
            "state": {new.get(name, name): value for name, value in tree["state"].items()},
            "metadata": {name: versions[plain] for name in holders if (plain := plain_name(name)) in versions},
            "buffers": {new.get(name, name): value for name, value in tree["buffers"].items()},
            "frozen": [new.get(name, name) for name in tree["frozen"]],
        }

    def _encode_entry(self, encoder: Encoder, name: str, value: Any) -> Tree:
        path = f"{self.keyword}.{name}"
        if isinstance(value, torch.Tensor) and not is_sharded(value) and is_expanded(value):
            raise TypeError(
                f"{path}: torch cannot load a state_dict() into an expanded tensor, whose elements share memory. "
                "Register its clone(), or register it with persistent=False"
            )
        return encoder.encode(path, value, in_place=True)

    def check(self, tree: Tree, shapes: Shapes) -> None:
        if not is_module(tree):
            raise IncompatibleCheckpoint(
                f"{self.keyword}: a module here, another kind of object in the checkpoint"
            )
        parts = require_readable(self.keyword, tree, shapes)
        kinds = {"state": Mapping, "metadata": Mapping, "buffers": Mapping, "frozen": list}
        if not all(isinstance(parts[name], kind) for name, kind in kinds.items()):
            raise DamagedCheckpoint(MANIFEST, f"state.{self.keyword} is not a module's state")
        if not all(isinstance(name, str) for name in parts["frozen"]):
            raise DamagedCheckpoint(MANIFEST, f"state.{self.keyword}.frozen is not a list of names")
        own, saved = self._item.state_dict(), tree["state"]
        if missing := sorted(own.keys() - saved.keys()) or sorted(saved.keys() - own.keys()):
            raise IncompatibleCheckpoint(
                f"{self.keyword}: model and checkpoint differ in {len(missing)} entries, such as {missing[0]!r}"
            )
        holders = {name for name, _ in self._item.named_modules(remove_duplicate=False)}
        for holder, name in ((name.rpartition(".")[0], name) for name in tree["buffers"]):
            if holder not in holders:
                raise IncompatibleCheckpoint(f"{self.keyword}.{name}: the model has no module {holder!r}")
        if not all(isinstance(parts["metadata"].get(holder, {}), Mapping) for holder in holders):
            raise DamagedCheckpoint(MANIFEST, f"state.{self.keyword}.metadata is not a module's metadata")
        buffers = {n: b for n, b in self._buffers().items() if n in tree["buffers"]}
        copied_into = {n for n, _ in self._item.named_parameters(remove_duplicate=False)} | self._buffers().keys()
        for name, value in {**parts["state"], **parts["buffers"]}.items():
            is_tensor = name not in saved or (name in copied_into and isinstance(own[name], torch.Tensor))
            if is_tensor and not isinstance(value, torch.Tensor):
                raise DamagedCheckpoint(MANIFEST, f"state.{self.keyword}.{name} is not a tensor")
        for name, tensor in {**own, **buffers}.items():
            entry = saved[name] if name in saved else tree["buffers"][name]
            if not isinstance(tensor, torch.Tensor) or not isinstance(entry, dict) or "$tensor" not in entry:
                continue
            here, there = (str(tensor.dtype), tuple(tensor.shape)), shapes[entry["$tensor"]]
            if here != there:
                raise IncompatibleCheckpoint(
                    f"{self.keyword}.{name}: {here[1]} of {here[0]} in the model, "
                    f"{there[1]} of {there[0]} in the checkpoint"
                )

    def sharded(self, tree: Tree, shapes: Shapes) -> dict[str, torch.Tensor]:
        # the names of its tensors in the checkpoint may have other wrappers on their path
        found, saved = {}, tree["state"]
        for name, own in self._item.state_dict().items():
            if isinstance(own, torch.Tensor) and is_sharded(own):
                entry = saved.get(name)
                there = entry.get("$tensor", "") if isinstance(entry, dict) else ""
                if there in shapes and shapes[there][1] == tuple(own.shape):
                    found[there] = own
        return found

    def load(self, tree: Tree, tensors: Tensors, *, live: LiveTensors | None = None, adopt: bool = True) -> None:
        # custom loading code may keep a reference to an entry
        copy = not adopt and not all(map(only_copies, self._item.modules()))
        state = with_metadata(
            decode(tree["state"], tensors, copy=copy), decode(tree["metadata"], tensors, copy=False)
        )
        size_bytes = sum(t.nbytes for t in state.values() if isinstance(t, torch.Tensor))
        with one_thread_for(size_bytes), self._writable():
            self._item.load_state_dict(state)
        holders = dict(self._item.named_modules(remove_duplicate=False))
        for name, saved in decode(tree["buffers"], tensors, copy=False).items():
            holder, _, last = name.rpartition(".")
            buffers = own_buffers(holders[holder])
            if (own := buffers.get(last)) is None:  # the first forward pass creates it, for example a cache
                holders[holder].register_buffer(last, saved.clone(), persistent=False)
            elif not self._copied(own, saved):
                buffers[last] = saved.to(own.device, copy=True)
        self._freeze(tree["frozen"])

    def _copied(self, own: torch.Tensor, saved: torch.Tensor) -> bool:
        """Copy into a buffer. Return False if elements that share memory have different values in `saved`."""
        if not is_sharded(own) and is_expanded(own):
            own, first = unexpanded(own), unexpanded(saved, own.stride())
            if not torch.equal(first.expand_as(saved), saved):
                return False
            saved = first
        with self._writable(), torch.no_grad():
            own.copy_(saved)
        return True

    def _writable(self) -> contextlib.AbstractContextManager[Any]:
        """Allow writing to tensors that were created under `inference_mode`, which torch allows only there."""
        tensors = itertools.chain(self._item.parameters(), self._item.buffers())
        return torch.inference_mode() if any(map(torch.is_inference, tensors)) else contextlib.nullcontext()

    def _freeze(self, frozen: Collection[str]) -> None:
        """Set `requires_grad` of all parameters as in the checkpoint."""
        frozen = set(frozen)
        changed = [n for n, p in self._item.named_parameters() if p.requires_grad is (n in frozen)]
        for name in changed:
            self._item.get_parameter(name).requires_grad_(name not in frozen)
        if changed:
            logger.info(
                "%s: restored requires_grad of %d parameters (such as %s) from the checkpoint; to change "
                "it, set it after session.resume()",
                *(self.keyword, len(changed), changed[0]),
            )

    def _buffers(self) -> dict[str, torch.Tensor]:
        return dict(self._item.named_buffers(remove_duplicate=False))


class OptimizerAdapter(StateAdapter):
    """An optimizer: its `state_dict()`, with tensors named after their parameters instead of numbered."""

    _item: torch.optim.Optimizer
    _encoded: tuple[bytes | None, list[list[Tree]]] = (None, [])
    """Settings of the parameter groups when they were last encoded, and their encoding."""

    def __init__(self, keyword: str, item: Stateful, names: ParameterIds = dict) -> None:
        super().__init__(keyword, item)
        self._names = names

    def watch(self) -> Watch | None:
        return watch_of(self._item)

    def state(self) -> Any:
        state = self._item.state_dict()
        return {"state": state["state"], **state}

    def encode(self, state: Any, encoder: Encoder, names: Names) -> Tree:
        keyword, parameters = self.keyword, self._parameters()
        per_parameter = []
        for index, values in state["state"].items():
            # torch loads both as a dict; other mappings are refused
            if not isinstance(index, int) or type(values) not in (dict, collections.OrderedDict):
                per_parameter.append(
                    [encoder.encode(keyword, index), encoder.encode(f"{keyword}.{index}", values)]
                )
                continue
            name = names.get(id(parameters[index]), str(index))
            encoded = {
                key: encoder.encode(
                    f"{keyword}.state.{key}.{name}",
                    value,
                    deferred=True,
                    shared=encoder.is_shared(parameters[index], value),
                )
                for key, value in values.items()
            }
            if type(self._item).load_state_dict is torch.optim.Optimizer.load_state_dict and has_array(encoded):
                raise TypeError(
                    f"{keyword}: torch cannot load a NumPy array into an optimizer's state; use a tensor"
                )
            per_parameter.append([index, encoded])
        rest = {key: value for key, value in state.items() if key != "state"}
        return {
            "$pairs": [["state", {"$pairs": per_parameter}], *encoder.encode_pairs(keyword, rest)],
            "parameters": self._labels(),
        }

    def encode_again(self, tree: Tree, watch: Watch, encoder: Encoder) -> Tree:
        # the watch does not see changes of plain numbers such as the learning rate
        assert isinstance(watch, OptimizerWatch)
        settings = watch.settings()
        if settings is None or settings != self._encoded[0]:
            groups = encoder.encode_pairs(self.keyword, {"param_groups": watch.groups()})
            self._encoded = settings, groups
        return {**tree, "$pairs": [tree["$pairs"][0], *self._encoded[1]]}

    def _labels(self) -> list[list[Tree]]:
        """Return the name of each parameter by group, or the shape of one that is in no module."""
        named: dict[int, str] = {}
        for name, parameter in self._names().items():
            named.setdefault(parameter, name)
        return [[named.get(id(p), list(p.shape)) for p in group["params"]] for group in self._item.param_groups]

    def _match(self, tree: Tree, groups: list[dict[str, Any]]) -> ParameterMatch:
        """Find the parameters of a checkpoint, whose groups are decoded, among those of the script."""
        names = dict(self._names())
        for name, parameter in list(names.items()):  # without a keyword, as in older checkpoints
            names.setdefault(name.partition(".")[2], parameter)
        own = [group["params"] for group in self._item.param_groups]
        return match_parameters(self.keyword, labels_in(self.keyword, tree, groups), own, names)

    def check(self, tree: Tree, shapes: Shapes) -> None:
        if not isinstance(tree, dict) or "$pairs" not in tree:
            raise IncompatibleCheckpoint(
                f"{self.keyword}: an optimizer here, another kind of object in the checkpoint"
            )
        state = require_readable(self.keyword, tree, shapes)
        saved = state.get("param_groups")
        if not _are_groups(saved) or not isinstance(state.get("state"), Mapping):
            raise DamagedCheckpoint(MANIFEST, f"state.{self.keyword} is not an optimizer's state")
        numbers = [number for group in saved for number in group["params"]]
        entries = [number for number in state["state"] if isinstance(number, int)]
        if not all(isinstance(number, int) and 0 <= number < len(numbers) for number in numbers + entries):
            raise DamagedCheckpoint(MANIFEST, f"state.{self.keyword} has an invalid parameter number")
        match = self._match(tree, saved)
        require_state_by_parameter(self.keyword, match, state["state"], count_elements(self._parameters()))
        for group, before in zip(self._item.param_groups, (saved[number] for number in match.groups), strict=True):
            new, gone = sorted(group.keys() - before.keys()), sorted(before.keys() - group.keys())
            if new and gone:  # another optimizer; a newer torch or a schedule only adds settings
                raise IncompatibleCheckpoint(
                    f"{self.keyword}: this {type(self._item).__name__} has {', '.join(new)}; "
                    f"the checkpoint has {', '.join(gone)} instead"
                )

    def load(self, tree: Tree, tensors: Tensors, *, live: LiveTensors | None = None, adopt: bool = True) -> None:
        # large moments stay in the memory they were read into. The rest is copied: a small tensor would keep that
        # whole memory alive
        staying: Collection[str] = tensors.keys() if adopt else ()
        match = self._match(tree, decode(_without_state(tree), tensors, copy=False)["param_groups"])
        if not adopt and self._on_host():
            kept = self._kept(tree, tensors, match)
            tensors, staying = {**tensors, **kept}, kept.keys()
        state = match.apply(decode(tree, tensors, copy=True, adopt=staying), self._item.param_groups)
        if match.moved:
            logger.warning(
                "%s: %s in another parameter group than in the checkpoint: their moments are those of the "
                "checkpoint, their settings those of the group that they are in now",
                *(self.keyword, named(match.moved)),
            )
        self._log_settings(state["param_groups"])
        self._item.load_state_dict(state)
        # load_state_dict casts moments to the dtype of their parameter: undo that
        parameters = self._parameters()
        for index, saved in state["state"].items():
            if isinstance(saved, Mapping):
                own = self._item.state[parameters[index]]
                own.update({key: _uncast(own[key], value) for key, value in saved.items() if key in own})

    def _log_settings(self, saved: list[dict[str, Any]]) -> None:
        """Name the settings that differ from the script's, unless a schedule changes them anyway."""
        changed = {
            f"{name} {before[name]!r} (here {value!r})": None
            for group, before in zip(self._item.param_groups, saved, strict=True)
            for name, value in group.items()
            if "initial_lr" not in group and isinstance(value, (float, tuple))
            if isinstance(before.get(name), (int, float, tuple)) and before[name] != value
        }
        if changed:
            text = "%s: restored %s from the checkpoint; to change it, set it after session.resume()"
            logger.info(text, self.keyword, ", ".join(changed))

    def sharded(self, tree: Tree, shapes: Shapes) -> dict[str, torch.Tensor]:
        # before its first step an optimizer has no state: shard what has the shape of its parameter like it
        found = {}
        try:
            match = self._match(tree, decode_without_memory(_without_state(tree), shapes)["param_groups"])
        except IncompatibleCheckpoint:  # `check` reports it
            return {}
        for parameter, values in self._saved_entries(tree, match):
            if is_sharded(parameter):
                for name in names_in(values):
                    if name in shapes and shapes[name][1] == tuple(parameter.shape):
                        found[name] = parameter
        return found

    def _kept(self, tree: Tree, tensors: Tensors, match: ParameterMatch) -> dict[str, torch.Tensor]:
        """Return the large tensors in memory that this optimizer may keep.

        That of its own moments is reused where they match: touching new memory takes longer than filling it.
        """
        large = {name: tensors[name] for name in names_in(tree) if _is_large(local(tensors[name]))}
        refilled: dict[str, torch.Tensor] = {}
        taken: set[int] = set()
        for name, own in self._moments(tree, match):
            if name in large and _is_alike(own, large[name]) and (at := local(own).data_ptr()) not in taken:
                taken.add(at)
                refilled.setdefault(name, own)
        copy_plain([(local(own), local(large.pop(name))) for name, own in refilled.items()])
        sharded = {name: large.pop(name).clone() for name in list(large) if is_sharded(large[name])}
        return {**refilled, **sharded, **copies_of(large)}

    def _saved_entries(self, tree: Tree, match: ParameterMatch) -> Iterator[tuple[torch.Tensor, Tree]]:
        """Yield parameters with the trees of their state."""
        parameters = self._parameters()
        for index, values in dict(tree["$pairs"])["state"]["$pairs"]:
            if isinstance(index, int) and index in match.numbers:
                yield parameters[match.numbers[index]], values

    def _moments(self, tree: Tree, match: ParameterMatch) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this optimizer's own tensors, with the names of the checkpoint tensors that replace them."""
        for parameter, values in self._saved_entries(tree, match):
            own = self._item.state.get(parameter)
            if isinstance(own, Mapping) and isinstance(values, Mapping):
                for key, value in values.items():
                    if (
                        isinstance(value, Mapping)
                        and "$tensor" in value
                        and isinstance(own.get(key), torch.Tensor)
                    ):
                        yield value["$tensor"], own[key]

    def _on_host(self) -> bool:
        return all(parameter.device.type == "cpu" for parameter in self._parameters())

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._item.param_groups for parameter in group["params"]]


class GeneratorAdapter(StateAdapter):
    """A random generator of the script."""

    _item: StatefulGenerator

    def check(self, tree: Tree, shapes: Shapes) -> None:
        there = tree.get("kind") if isinstance(tree, dict) else None
        if there != self._item.kind:
            raise IncompatibleCheckpoint(
                f"{self.keyword}: {self._item.kind} here, {there or 'another kind of object'} in the checkpoint"
            )


def adapter_for(keyword: str, item: Stateful, names: ParameterIds = dict) -> StateAdapter:
    if isinstance(item, torch.nn.Module):
        return ModuleAdapter(keyword, item)
    if has_plain_state(item):
        return OptimizerAdapter(keyword, item, names)
    if isinstance(item, Variables):
        return VariablesAdapter(keyword, item)
    if isinstance(item, (LRScheduler, ReduceLROnPlateau)):
        return SchedulerAdapter(keyword, item)
    if isinstance(item, StatefulGenerator):
        return GeneratorAdapter(keyword, item)
    return StateAdapter(keyword, item)


def _without_state(tree: Tree) -> Tree:
    """Return an optimizer's tree without the state of its parameters."""
    return {"$pairs": [pair for pair in tree["$pairs"] if pair[0] != "state"]}


def _are_groups(saved: Any) -> bool:
    return isinstance(saved, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in saved
    )


def _frozen(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> list[str]:
    return [name for name, parameter in parameters if not parameter.requires_grad]


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.nbytes >= SMALL_BYTES and is_plain(tensor)


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and local shape are equal, and memory can be copied directly."""
    return (
        (one.dtype, one.shape, local(one).shape) == (other.dtype, other.shape, local(other).shape)
        and is_sharded(one) == is_sharded(other)
        and is_plain(local(one))
    )


def _uncast(own: Any, saved: Any) -> Any:
    """Return `own`, which torch made from `saved`, with the dtypes and types of `saved`.

    torch rebuilds every iterable from its items: a deque loses its `maxlen`, a str its value.
    """
    if isinstance(saved, torch.Tensor):
        return saved.to(own.device) if own.dtype != saved.dtype else own
    if isinstance(saved, dict) and isinstance(own, dict):
        items = [(key, _uncast(own[key], value)) for key, value in saved.items()]
        return collections.Counter(dict(items)) if type(saved) is collections.Counter else type(saved)(items)
    if type(saved) in (list, tuple, collections.deque) and type(own) is type(saved):
        items = [_uncast(*pair) for pair in zip(own, saved, strict=False)]
        return collections.deque(items, saved.maxlen) if type(saved) is collections.deque else type(saved)(items)
    return saved if isinstance(saved, str) and isinstance(own, str) else own
