"""The adapter of one object of a session, as far as every kind of object has it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch

from holdfast.errors import IncompatibleCheckpoint
from holdfast.state.capture import Watch
from holdfast.state.construction import (
    Construction,
    SettingDifference,
    construction_of,
    differences,
    name_of,
    set_value_at,
    settings_of_state,
    value_at,
)
from holdfast.state.encoder import Encoder
from holdfast.state.tree import LiveTensors, Shapes, Tensors, Tree, decode, decode_without_memory
from holdfast.state.wrappers import Stateful

Names = Mapping[int, str]
"""Names of the script's parameters, by `id`."""


class StateAdapter:
    """Adapter of one object of a session. This base class uses only `state_dict` and `load_state_dict`."""

    schedule: Any = None
    """The learning-rate schedule, if the object is one."""

    def __init__(self, keyword: str, item: Stateful) -> None:
        self.keyword, self._item = keyword, item
        self.construction = self._in_force = construction_of(item)
        """How the script constructed the object; with the settings of a checkpoint once one is loaded."""
        self._kept: dict[str, Any] = {}
        """Settings that no checkpoint replaces, by path."""

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
        return self._described(encoder.encode(self.keyword, state))

    def _described(self, tree: Tree) -> Tree:
        """Add how the object was constructed, which no value is decoded from."""
        if not isinstance(tree, dict) or not (self._in_force.settings or self._in_force.fixed):
            return tree
        tag = next(iter(tree), "")
        if not tag.startswith("$"):
            tree = {"$pairs": [[key, value] for key, value in tree.items()]}
        elif tag not in ("$pairs", "$ordered"):
            return tree
        return {**tree, "construction": self._in_force.tree()}

    def saved_construction(self, tree: Tree, shapes: Shapes) -> Construction:
        """Return how the object of a checkpoint was constructed, as far as that is known."""
        found = Construction.from_tree(tree.get("construction")) if isinstance(tree, dict) else None
        if found is None and self.construction.settings:
            found = Construction(settings=settings_of_state(self._item, decode_without_memory(tree, shapes)))
        return found or Construction()

    def differences(self, tree: Tree, shapes: Shapes) -> list[SettingDifference]:
        """Compare the settings of the script with those of a checkpoint, except those to keep."""
        found = differences(self.keyword, self.saved_construction(tree, shapes), self.construction)
        return [each for each in found if not any(name_of(path) == each.name for path in self._kept)]

    def keep(self, names: Collection[str]) -> None:
        """Keep these settings of the script when a checkpoint is loaded. ValueError names those that there are."""
        for name in names:
            if name not in self.construction.names:
                known = ", ".join(self.construction.names) or "none"
                raise ValueError(f"session.keep({self.keyword}={name!r}): no such setting; there are: {known}")
        self._kept |= self._own_values([path for path in self.construction.settings if name_of(path) in names])

    def _own_values(self, paths: Collection[str]) -> dict[str, Any]:
        """Return the present values of settings."""
        state = self._item.state_dict()
        return {path: copy.deepcopy(value_at(state, path)) for path in paths}

    def note_settings(self, tree: Tree, shapes: Shapes) -> None:
        """Note that the settings of a checkpoint are in force, except those to keep."""
        here, there = self.construction, self.saved_construction(tree, shapes).settings
        replaced = {
            path: value for path, value in there.items() if path in here.settings and path not in self._kept
        }
        self._in_force = Construction(here.kind, here.settings | replaced, here.fixed)

    @property
    def may_refuse(self) -> bool:
        """Whether loading runs code that may raise although `check` has passed."""
        return True

    def copied_state(self) -> Any:
        """Return the state as `put_back` takes it."""
        return copy.deepcopy(self._item.state_dict())

    def put_back(self, state: Any) -> None:
        """Load what `copied_state` returned."""
        self._item.load_state_dict(state)

    def encode_again(self, tree: Tree, watch: Watch, encoder: Encoder) -> Tree:
        """Update an earlier tree, since which `watch` has seen no change."""
        return tree

    def check(self, tree: Tree, shapes: Shapes) -> None:
        """Raise IncompatibleCheckpoint if the object cannot load this tree, as far as that is known."""

    def _of_another_kind(self, own: str) -> IncompatibleCheckpoint:
        """Return the error about a tree of another kind of object; `own` names the kind of this one."""
        return IncompatibleCheckpoint(f"{self.keyword}: {own} here, another kind of object in the checkpoint")

    def sharded(self, tree: Tree, shapes: Shapes) -> dict[str, torch.Tensor]:
        """Return templates for tensors that must be sharded, if `encode` does not show it yet."""
        return {}

    def load(self, tree: Tree, tensors: Tensors, *, live: LiveTensors | None = None, adopt: bool = True) -> None:
        """Load a checkpoint's state into the object. Errors of its `load_state_dict` pass through.

        With `adopt`, the object may keep the memory of `tensors`. `live` has the tensors of the session's other
        objects.
        """
        state = decode(tree, tensors, copy=True)
        for path, value in self._kept.items():
            set_value_at(state, path, value)
        self._item.load_state_dict(state)
