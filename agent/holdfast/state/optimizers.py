"""Adapter of optimizers. Their state belongs to the names of parameters, not to their numbers."""

from __future__ import annotations

import collections
import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint
from holdfast.format.manifest import MANIFEST, SMALL_BYTES
from holdfast.format.shards import names_in
from holdfast.state.adapter import Names, StateAdapter
from holdfast.state.capture import OptimizerWatch, Watch, watch_of
from holdfast.state.construction import Construction, copied_groups, name_of
from holdfast.state.encoder import Encoder
from holdfast.state.matching import (
    ParameterMatch,
    count_elements,
    labels_in,
    match_parameters,
    named,
    require_state_by_parameter,
)
from holdfast.state.sharding import is_sharded, local
from holdfast.state.tree import (
    LiveTensors,
    Shapes,
    Tensors,
    Tree,
    decode,
    decode_without_memory,
    has_array,
    require_readable,
)
from holdfast.state.wrappers import Stateful
from holdfast.system.host_memory import copies_of, copy_plain, is_plain
from holdfast.torch_internals import is_loaded_by_torch

logger = logging.getLogger("holdfast")

ParameterIds = Callable[[], Mapping[str, int]]
"""Returns the `id` of each of the script's parameters by all its names, each with the keyword of its module."""


class OptimizerAdapter(StateAdapter):
    """An optimizer: its `state_dict()`, with tensors named after their parameters instead of numbered."""

    _item: torch.optim.Optimizer
    _encoded: tuple[bytes | None, list[list[Tree]]] = (None, [])
    """Settings of the parameter groups when they were last encoded, and their encoding."""

    def __init__(self, keyword: str, item: Stateful, names: ParameterIds = dict) -> None:
        super().__init__(keyword, item)
        self._names = names

    @property
    def may_refuse(self) -> bool:
        return not is_loaded_by_torch(self._item)

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
            "parameters": self.labels(),
            "construction": self._in_force.tree(),
        }

    def encode_again(self, tree: Tree, watch: Watch, encoder: Encoder) -> Tree:
        # the watch does not see changes of plain numbers such as the learning rate
        assert isinstance(watch, OptimizerWatch)
        settings = watch.settings()
        if settings is None or settings != self._encoded[0]:
            groups = encoder.encode_pairs(self.keyword, {"param_groups": watch.groups()})
            self._encoded = settings, groups
        pairs = [tree["$pairs"][0], *self._encoded[1]]
        return {**tree, "$pairs": pairs, "construction": self._in_force.tree()}

    def labels(self) -> list[list[Tree]]:
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
            raise self._of_another_kind("an optimizer")
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
            kept = self._in_own_memory(tree, tensors, match)
            tensors, staying = {**tensors, **kept}, kept.keys()
        state = match.apply(decode(tree, tensors, copy=True, adopt=staying), self._item.param_groups)
        if match.moved:
            logger.warning(
                "%s: %s in another parameter group than in the checkpoint: their moments are those of the "
                "checkpoint, their settings those of the group that they are in now",
                *(self.keyword, named(match.moved)),
            )
        self._item.load_state_dict(state)
        self._set_kept()
        # load_state_dict casts moments to the dtype of their parameter: undo that
        parameters = self._parameters()
        for index, saved in state["state"].items():
            if isinstance(saved, Mapping):
                own = self._item.state[parameters[index]]
                own.update({key: _uncast(own[key], value) for key, value in saved.items() if key in own})

    def reorders(self, tree: Tree, shapes: Shapes) -> bool:
        """Whether parameters are in another order than in a checkpoint that fits."""
        groups = decode_without_memory(_without_state(tree), shapes)["param_groups"]
        return not self._match(tree, groups).is_identity

    def saved_construction(self, tree: Tree, shapes: Shapes) -> Construction:
        found = super().saved_construction(tree, shapes)
        groups = self._match(tree, decode_without_memory(_without_state(tree), shapes)["param_groups"]).groups
        places = {saved: number for number, saved in enumerate(groups)}
        parts = ((path.partition("."), value) for path, value in found.settings.items())
        settings = {f"{places.get(int(g), g)}.{name}": v for (g, _, name), v in parts if g.isdecimal()}
        return Construction(found.kind, settings, found.fixed)

    def _own_values(self, paths: Collection[str]) -> dict[str, Any]:
        groups = copied_groups(self._item)
        return {path: groups[int(number)][name] for path in paths for number, _, name in [path.partition(".")]}

    @property
    def keeps_rate(self) -> bool:
        return any(name_of(path) == "lr" for path in self._kept)

    def _set_kept(self) -> None:
        for path, value in self._kept.items():
            number, _, name = path.partition(".")
            self._item.param_groups[int(number)][name] = copy.deepcopy(value)

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

    def _in_own_memory(self, tree: Tree, tensors: Tensors, match: ParameterMatch) -> dict[str, torch.Tensor]:
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


def _without_state(tree: Tree) -> Tree:
    """Return an optimizer's tree without the state of its parameters."""
    return {"$pairs": [pair for pair in tree["$pairs"] if pair[0] != "state"]}


def _are_groups(saved: Any) -> bool:
    return isinstance(saved, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in saved
    )


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
