"""State adapters: how each kind of object is encoded into a checkpoint and loaded from one."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint
from holdfast.format.manifest import MANIFEST
from holdfast.format.shards import is_module
from holdfast.state.adapter import Names, StateAdapter
from holdfast.state.capture import ModuleWatch, Watch, watch_of
from holdfast.state.construction import (
    Construction,
    schedule_in,
)
from holdfast.state.encoder import Encoder
from holdfast.state.matching import (
    plain_name,
    renamed,
)
from holdfast.state.optimizers import OptimizerAdapter, ParameterIds
from holdfast.state.rng import StatefulGenerator
from holdfast.state.sharding import is_sharded
from holdfast.state.tree import (
    LiveTensors,
    Shapes,
    Tensors,
    Tree,
    decode,
    decode_without_memory,
    is_expanded,
    require_readable,
    unexpanded,
)
from holdfast.state.variables import Variables
from holdfast.state.wrappers import Stateful, has_plain_state
from holdfast.system.host_memory import one_thread_for
from holdfast.torch_internals import is_loaded_by_torch, metadata_of, only_copies, own_buffers, with_metadata

logger = logging.getLogger("holdfast")


class VariablesAdapter(StateAdapter):
    """`Variables`, which may hold tensors of the session's modules and optimizers."""

    @property
    def may_refuse(self) -> bool:
        return type(self._item).load_state_dict is not Variables.load_state_dict

    def check(self, tree: Tree, shapes: Shapes) -> None:
        state = require_readable(self.keyword, tree, shapes)
        if not isinstance(state, dict):
            raise self._of_another_kind("Variables")
        for name in state:
            if name == "_declared" or hasattr(Variables, name):
                raise DamagedCheckpoint(MANIFEST, f"state.{self.keyword}: invalid name {name!r} of a variable")

    def load(self, tree: Tree, tensors: Tensors, *, live: LiveTensors | None = None, adopt: bool = True) -> None:
        self._item.load_state_dict(decode(tree, tensors, copy=True, live=live))


class ModuleAdapter(StateAdapter):
    """A module: its `state`, the `metadata` of that, non-persistent `buffers`, and the names of parameters that
    require no gradient (`frozen`)."""

    _item: torch.nn.Module

    @property
    def may_refuse(self) -> bool:
        return not is_loaded_by_torch(self._item)

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
            raise self._of_another_kind("a module")
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
        found, saved = {}, tree["state"] if is_module(tree) else {}
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
        holder_of = self._holders()
        for name, saved in decode(tree["buffers"], tensors, copy=False).items():
            holder, last = holder_of(name)
            buffers = own_buffers(holder)
            if (own := buffers.get(last)) is None:  # the first forward pass creates it, for example a cache
                holder.register_buffer(last, saved.clone(), persistent=False)
            elif not self._copied(own, saved):
                buffers[last] = saved.to(own.device, copy=True)
        self._freeze(tree["frozen"])

    def _holders(self) -> Callable[[str], tuple[torch.nn.Module, str]]:
        """Return a function from a buffer's name to its module and its name in that."""
        if (holder_of := getattr(self._item, "holder_of", None)) is not None:  # stages of a pipeline
            return holder_of  # type: ignore[no-any-return]
        holders = dict(self._item.named_modules(remove_duplicate=False))

        def holder_in_module(name: str) -> tuple[torch.nn.Module, str]:
            path, _, last = name.rpartition(".")
            return holders[path], last

        return holder_in_module

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


class GradScalerAdapter(StateAdapter):
    """A gradient scaler. The state of a disabled one is empty, and an enabled one refuses it."""

    _item: torch.amp.GradScaler
    may_refuse = False

    def check(self, tree: Tree, shapes: Shapes) -> None:
        state = require_readable(self.keyword, tree, shapes)
        own = self._item.state_dict()
        if not isinstance(state, Mapping) or (own and state and not own.keys() <= state.keys()):
            raise self._of_another_kind("a GradScaler")

    def saved_construction(self, tree: Tree, shapes: Shapes) -> Construction:
        found = super().saved_construction(tree, shapes)
        is_enabled = bool(decode_without_memory(tree, shapes))
        return Construction(found.kind, found.settings, {"enabled": is_enabled})

    def load(self, tree: Tree, tensors: Tensors, *, live: LiveTensors | None = None, adopt: bool = True) -> None:
        if self._item.is_enabled() and decode(tree, tensors, copy=False):  # else it begins with its own scale
            super().load(tree, tensors, live=live, adopt=adopt)


class GeneratorAdapter(StateAdapter):
    """A random generator of the script."""

    _item: StatefulGenerator
    may_refuse = False

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
    if schedule_in(item) is not None:
        from holdfast.state.schedules import SchedulerAdapter  # not every script has a schedule

        return SchedulerAdapter(keyword, item)
    if isinstance(item, torch.amp.GradScaler):
        return GradScalerAdapter(keyword, item)
    if isinstance(item, StatefulGenerator):
        return GeneratorAdapter(keyword, item)
    return StateAdapter(keyword, item)


def _frozen(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> list[str]:
    return [name for name, parameter in parameters if not parameter.requires_grad]
