"""Selection of this rank's stages from a checkpoint whose ranks hold disjoint parts of the state.

The entries of all ranks are one state. A rank takes those whose names its own objects have: from the rank whose
state it continues, else from the first one that has them. Imported only where ranks hold different names.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import nn

from holdfast.errors import IncompatibleCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.shards import is_module, names_in, saved_rank, state_for
from holdfast.state.adapter import StateAdapter
from holdfast.state.matching import Label, named, plain_name
from holdfast.state.stages import StageLayout, parameters_of

logger = logging.getLogger("holdfast")
Tree = Any
_OF_PARAMETERS = ("params", "param_names")
"""Entries of a parameter group with one item for each parameter."""


@dataclass(frozen=True, slots=True)
class OwnNames:
    """The names that the objects of this rank have."""

    modules: Mapping[str, tuple[Sequence[str], Sequence[str]]]
    """Names of entries of the state and of buffers, by keyword."""
    optimizers: Mapping[str, Sequence[Sequence[Label]]]
    """Names of the parameters by group, by keyword."""
    everywhere: Mapping[str, Iterable[str]] | None
    """The names that any rank of this job has; `None` if each rank has all."""


def localized(
    manifest: fmt.Manifest,
    rank: int,
    modules: Mapping[str, nn.Module],
    adapters: Mapping[str, StateAdapter],
    stages: StageLayout | None,
) -> fmt.Manifest:
    """Return a manifest as a rank with these objects sees it. Raises what `select` does."""
    names = {
        k: (list(each.state_dict()), [name for name, _ in each.named_buffers()]) for k, each in modules.items()
    }
    labels = {
        keyword: [[tuple(each) if isinstance(each, list) else each for each in group] for group in groups]
        for keyword, groups in parameters_of(adapters).items()
    }
    return select(manifest, rank, OwnNames(names, labels, stages.names if stages is not None else None))


def select(manifest: fmt.Manifest, rank: int, own: OwnNames) -> fmt.Manifest:
    """Return the manifest with the entries for the objects of this rank in the place of those of the saved rank.

    Raises:
        IncompatibleCheckpoint: no rank of this job has an entry of the checkpoint; or a parameter group has
            parameters with different settings.
    """
    selection = _Selection(manifest, saved_rank(manifest, rank))
    trees = dict(selection.states[selection.saved])
    for keyword, (state, buffers) in own.modules.items():
        selected = selection.module(keyword, state, buffers)
        if selected is not None:
            trees[keyword] = selected
        if selected is not None or own.everywhere is not None:
            everywhere = state if own.everywhere is None else own.everywhere.get(keyword, state)
            _require_all(keyword, selection.entries(keyword), everywhere)
    for keyword, labels in own.optimizers.items():
        selected = selection.optimizer(keyword, labels)
        if selected is not None:
            trees[keyword] = selected
        if selected is not None or own.everywhere is not None:
            flat = [label for group in labels for label in group if isinstance(label, str)]
            family = [each for each in own.everywhere or () if _stem(each) == _stem(keyword)]
            known: list[Any] = (
                list(flat) if own.everywhere is None else [n for each in family for n in own.everywhere[each]]
            )
            alike = (groups for other, groups in own.optimizers.items() if _stem(other) == _stem(keyword))
            known += [label for groups in alike for group in groups for label in group if isinstance(label, str)]
            _require_all(keyword, selection.labels(keyword), known)
    if selection.sources and "gradients" in trees:
        logger.warning("gradients in accumulation are left out: the stages are on other ranks than before")
        trees["gradients"] = fmt.ABSENT
    return selection.manifest_with(trees)


def whole(manifest: fmt.Manifest) -> fmt.Manifest:
    """Return the manifest with the entries of all ranks as those of rank 0."""
    selection = _Selection(manifest, 0)
    keywords = {keyword for trees in manifest.rank_states.values() for keyword in trees}
    modules, optimizers = {}, {}
    for keyword in sorted(keywords):
        trees: list[Tree] = [state.get(keyword) for state in selection.states]
        if all(map(is_module, trees)):
            parts = ([name for tree in trees for name in tree[part]] for part in ("state", "buffers"))
            state, buffers = (list(dict.fromkeys(each)) for each in parts)
            modules[keyword] = state, buffers
        elif all(_is_optimizer(tree) for tree in trees):
            optimizers[keyword] = selection.merged_labels(keyword)
    return select(manifest, 0, OwnNames(modules, optimizers, None)) if modules else manifest


class _Selection:
    """Selects entries of all ranks of a checkpoint for one that continues the rank `saved`."""

    def __init__(self, manifest: fmt.Manifest, saved: int) -> None:
        self._manifest, self.saved = manifest, saved
        self.states = [state_for(manifest, rank) for rank in range(manifest.world_size)]
        self._order = [saved, *(rank for rank in range(manifest.world_size) if rank != saved)]
        self.sources: dict[str, int] = {}
        """The rank from which each tensor of a selected entry is, by name."""

    def entries(self, keyword: str) -> set[str]:
        """Return the plain names of all entries of a module."""
        trees: list[Tree] = [state.get(keyword) for state in self.states]
        return {plain_name(name) for tree in trees if is_module(tree) for name in tree["state"]}

    def labels(self, keyword: str) -> set[str]:
        """Return the names of all parameters of an optimizer, and of those whose keywords differ by a number."""
        trees: list[Tree] = [state.get(each) for each in self._family(keyword) for state in self.states]
        groups = itertools.chain.from_iterable(tree["parameters"] for tree in trees if _is_optimizer(tree))
        return {label for group in groups for label in group if isinstance(label, str)}

    def module(self, keyword: str, state: Sequence[str], buffers: Sequence[str]) -> Tree | None:
        """Return a module's tree with these names; `None` if the one of the saved rank has them."""
        trees: dict[int, Tree] = {rank: self.states[rank].get(keyword) for rank in self._order}
        trees = {rank: tree for rank, tree in trees.items() if is_module(tree)}
        wanted = set(map(plain_name, state))
        if self.saved not in trees or set(map(plain_name, trees[self.saved]["state"])) == wanted:
            return None
        parts: dict[str, dict[str, Tree]] = {}
        for part, names in (("state", wanted), ("buffers", {_without_stage(each) for each in buffers})):
            taken = parts[part] = dict[str, Tree]()
            seen = set[str]()
            for rank, tree in trees.items():
                for name, entry in tree[part].items():
                    plain = _without_stage(name)
                    if plain in names and plain not in seen:
                        seen.add(plain)
                        taken[name.partition("@")[0]] = self._from(rank, entry)
        metadata: dict[str, Tree] = {}
        for tree in trees.values():
            metadata = {**tree["metadata"], **metadata}
        frozen = {name for tree in trees.values() for name in tree["frozen"] if plain_name(name) in wanted}
        return {**parts, "metadata": metadata, "frozen": sorted(frozen)}

    def optimizer(self, keyword: str, labels: Sequence[Sequence[Label]]) -> Tree | None:
        """Return an optimizer's tree for these parameters; `None` if the one of the saved rank has them."""
        own: Tree = self.states[self.saved].get(keyword)
        is_saved = own is not None
        if not is_saved:
            states = (self.states[rank] for rank in self._order)
            own = next((each[k] for each in states for k in self._family(keyword) if k in each), None)
        flat = [label for group in labels for label in group]
        if not _is_optimizer(own) or not all(isinstance(label, str) for label in flat):
            return None
        named_here = {label for group in own["parameters"] for label in group if isinstance(label, str)}
        if is_saved and set(flat) == named_here:
            return None
        saved = self._saved_parameters(keyword)
        for other in self._family(keyword):
            saved = self._saved_parameters(other) | saved
        groups, state, settings, found_labels, number = [], [], {}, [], 0
        for at, group in enumerate(labels):
            members = [saved[label] for label in group if isinstance(label, str) and label in saved]
            tree = self._common_group(keyword, at, members) or _group(own, at)
            if tree is None:
                raise IncompatibleCheckpoint(f"{keyword}: the checkpoint has no parameter of group {at}", keyword)
            of_group: dict[str, Tree] = {"params": list(range(number, number + len(members)))}
            if "param_names" in tree:
                of_group["param_names"] = [each.name for each in members]
            groups.append({**tree, **of_group})
            for each in members:
                if each.state is not None:
                    state.append([number, self._from(each.rank, each.state)])
                number += 1
            for path, value in members[0].construction.items() if members else ():
                settings[f"{at}.{path}"] = value
            found_labels.append([each.label for each in members])
        rest = [pair for pair in own["$pairs"] if pair[0] not in ("state", "param_groups")]
        construction = own.get("construction")
        if isinstance(construction, dict):
            construction = {**construction, "settings": settings}
        return {
            "$pairs": [["state", {"$pairs": state}], ["param_groups", groups], *rest],
            "parameters": found_labels,
            "construction": construction,
        }

    def merged_labels(self, keyword: str) -> list[list[str]]:
        """Return the names of all parameters of an optimizer, grouped by their settings."""
        groups: dict[bytes, list[str]] = {}
        for each in self._saved_parameters(keyword).values():
            groups.setdefault(_settings_of(each.group), []).append(each.label)
        return list(groups.values())

    def manifest_with(self, trees: Mapping[str, Tree]) -> fmt.Manifest:
        """Return the manifest with these trees of the saved rank, and without shared tensors that they lack."""
        names = names_in([tree for tree in trees.values() if tree != fmt.ABSENT])
        tensors = []
        for tensor in self._manifest.tensors:
            source = self.sources.get(tensor.name)
            if tensor.rank is None:
                if tensor.name in names:
                    tensors.append(tensor)
            elif source is None or tensor.rank not in (source, self.saved):
                tensors.append(tensor)
            elif tensor.rank == source:
                tensors.append(msgspec.structs.replace(tensor, rank=self.saved))
        states = {**self._manifest.rank_states, str(self.saved): dict(trees)}
        return msgspec.structs.replace(self._manifest, tensors=tensors, rank_states=states)

    def _family(self, keyword: str) -> list[str]:
        """Return the keywords of optimizers that differ from this one by a number, as for parts of a model."""
        known = {each for state in self.states for each, tree in state.items() if _is_optimizer(tree)}
        return [keyword, *sorted(each for each in known - {keyword} if _stem(each) == _stem(keyword))]

    def _from(self, rank: int, tree: Tree) -> Tree:
        self.sources.update(dict.fromkeys(names_in(tree), rank))
        return tree

    def _saved_parameters(self, keyword: str) -> dict[str, _SavedParameter]:
        found: dict[str, _SavedParameter] = {}
        for rank in self._order:
            tree: Tree = self.states[rank].get(keyword)
            if not _is_optimizer(tree):
                continue
            pairs = dict(tree["$pairs"])
            state = {number: values for number, values in pairs["state"]["$pairs"] if isinstance(number, int)}
            construction = tree.get("construction") or {}
            settings = construction.get("settings", {}) if isinstance(construction, dict) else {}
            number = 0
            for at, (labels, group) in enumerate(zip(tree["parameters"], pairs["param_groups"], strict=True)):
                own = {
                    path.partition(".")[2]: v for path, v in settings.items() if path.partition(".")[0] == str(at)
                }
                names = group.get("param_names") or labels
                for place, label in enumerate(labels):
                    if isinstance(label, str):
                        new = _SavedParameter(label, names[place], rank, group, state.get(number), own)
                        found.setdefault(label, new)
                    number += 1
        return found

    def _common_group(self, keyword: str, at: int, members: Sequence[_SavedParameter]) -> dict[str, Tree] | None:
        """Return the settings of a group. IncompatibleCheckpoint: its parameters have different ones."""
        if not members:
            return None
        first = members[0]
        for each in members:
            if _settings_of(each.group) != _settings_of(first.group):
                names = [
                    name for name in first.group
                    if name not in _OF_PARAMETERS and each.group.get(name) != first.group[name]
                ]  # fmt: skip
                raise IncompatibleCheckpoint(
                    f"{keyword}: {first.label} and {each.label} are in one parameter group here, and have "
                    f"different settings in the checkpoint ({', '.join(names) or 'other names'}): give each its "
                    f"own group, as group {at} of the checkpoint's ranks has them",
                    keyword,
                )
        return dict(first.group)


@dataclass(frozen=True, slots=True)
class _SavedParameter:
    label: str
    name: str
    """In `param_names` of its group, else the label."""
    rank: int
    group: Tree
    state: Tree | None
    construction: Mapping[str, Any]
    """The settings that its group was constructed with."""


def _require_all(keyword: str, saved: Iterable[str], everywhere: Iterable[str]) -> None:
    """Raise IncompatibleCheckpoint if no rank of this job would load an entry of the checkpoint."""
    if left := sorted(set(saved) - set(map(plain_name, everywhere))):
        raise IncompatibleCheckpoint(
            f"{keyword}: no stage of any rank has {named(left)} of the checkpoint: the stages of all ranks "
            "together must be the whole model",
            keyword,
        )


def _is_optimizer(tree: Tree) -> bool:
    if not isinstance(tree, dict) or "parameters" not in tree or not isinstance(tree.get("$pairs"), list):
        return False
    pairs = {pair[0]: pair[1] for pair in tree["$pairs"] if isinstance(pair, list) and isinstance(pair[0], str)}
    groups, state = pairs.get("param_groups"), pairs.get("state")
    return (
        isinstance(groups, list)
        and all(isinstance(group, dict) and "params" in group for group in groups)
        and isinstance(state, dict)
        and isinstance(state.get("$pairs"), list)
        and len(groups) == len(tree["parameters"])
    )


def _stem(keyword: str) -> str:
    return keyword.rstrip("0123456789")


def _group(tree: Tree, at: int) -> dict[str, Tree] | None:
    groups = dict(tree["$pairs"])["param_groups"]
    return {**groups[at]} if at < len(groups) else None


def _settings_of(group: Mapping[str, Tree]) -> bytes:
    return msgspec.json.encode({name: value for name, value in group.items() if name not in _OF_PARAMETERS})


def _without_stage(name: str) -> str:
    """Return the plain name of an entry, without the number of a stage that a buffer may have."""
    return plain_name(name.partition("@")[0])
