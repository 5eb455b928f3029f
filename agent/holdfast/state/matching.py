"""Matching of names and optimizer parameters in a checkpoint with those of the script."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint
from holdfast.format.manifest import MANIFEST

Label = str | tuple[int, ...] | None
"""What identifies a parameter: its name, or the shape of one without a name, or nothing in older checkpoints."""
_WRAPPERS = ("_orig_mod", "module")
"""Attributes in which torch.compile and DataParallel hold the module that they wrap."""
_NAMED = 3
"""Number of names in a message."""


def plain_name(name: str) -> str:
    """Return the name of a parameter or module without the wrappers on its path."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrapped_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names by their plain names; empty if two of them have the same."""
    known = list(names)
    found = {plain_name(name): name for name in known}
    return found if len(found) == len(known) else {}


def renamed(saved: Collection[str], own: Collection[str]) -> dict[str, str]:
    """Return the script's name for each saved name that differs from it only by wrappers."""
    if set(saved) <= set(own):
        return {}
    here, there = unwrapped_names(own), unwrapped_names(saved)
    return {name: here[plain] for plain, name in there.items() if plain in here and here[plain] != name}


@dataclass(frozen=True, slots=True)
class ParameterMatch:
    """The place of each parameter of a checkpoint's optimizer in that of the script."""

    numbers: dict[int, int]
    """The script's number of each saved number."""
    groups: list[int]
    """For each group of the script, the saved one with its settings."""
    moved: list[str]
    """Names of parameters that are in another group than in the checkpoint."""

    @property
    def is_identity(self) -> bool:
        in_place = self.groups == list(range(len(self.groups))) and not self.moved
        return in_place and all(one == other for one, other in self.numbers.items())

    def apply(self, state: dict[str, Any], own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return an optimizer's saved `state_dict()` with the numbers and groups of the script."""
        if self.is_identity:
            return state
        numbered = state["state"].items()
        entries = {self.numbers[n] if isinstance(n, int) else n: values for n, values in numbered}
        groups, start = [], 0
        for group, number in zip(own, self.groups, strict=True):
            end = start + len(group["params"])
            changed = {"params": list(range(start, end))}
            if "param_names" in group:
                changed["param_names"] = group["param_names"]
            groups.append({**state["param_groups"][number], **changed})
            start = end
        return {**state, "state": entries, "param_groups": groups}


def match_parameters(
    keyword: str,
    saved: Sequence[Sequence[Label]],
    own: Sequence[Sequence[torch.Tensor]],
    names: Mapping[str, int],
) -> ParameterMatch:
    """Match parameters by name, and those without one by their order.

    Args:
        saved: labels of the checkpoint's parameters by group.
        own: the parameters of the script by group.
        names: ids of the script's parameters by all their names.

    Raises:
        IncompatibleCheckpoint: a parameter is only on one side; names it.
    """
    here, there = _numbered(own), _numbered(saved)
    numbers_here = {id(parameter): number for number, (parameter, _) in here.items()}
    by_name = {name: numbers_here[i] for name, i in names.items() if i in numbers_here}
    own_names = {number: name for name, number in reversed(list(by_name.items()))}
    labels = {number: label for number, (label, _) in there.items() if isinstance(label, str)}
    found: dict[int, int] = {}
    if own_names and labels:
        found = {number: by_name[label] for number, label in labels.items() if label in by_name}
        matched = set(found.values())
        gone = [label for number, label in labels.items() if number not in found]
        new = [name for number, name in sorted(own_names.items()) if number not in matched]
        # a module that only one of the scripts gave to its session: the order decides
        is_known = len(gone) > len(here) - len(own_names) or len(new) > len(there) - len(labels)
        if is_known or len(matched) != len(found):
            raise IncompatibleCheckpoint(f"{keyword}: {_sizes(own, saved)}{_only_on_one_side(new, gone)}")
    if len(own) != len(saved) or len(here) != len(there):
        raise IncompatibleCheckpoint(f"{keyword}: {_sizes(own, saved)}")
    groups = _matching_groups(keyword, found, here, there, own, saved)
    for number, saved_number in enumerate(groups):
        _match_by_order(keyword, number, saved_number, found, here, there)
    moved = [own_names.get(h, str(h)) for s, h in sorted(found.items()) if groups[here[h][1]] != there[s][1]]
    return ParameterMatch(found, groups, moved)


def _numbered(groups: Sequence[Sequence[Any]]) -> dict[int, tuple[Any, int]]:
    """Return the items of all groups by number, each with the number of its group."""
    items = [(item, group) for group, members in enumerate(groups) for item in members]
    return dict(enumerate(items))


def _sizes(own: Sequence[Sequence[Any]], saved: Sequence[Sequence[Any]]) -> str:
    here, there = [len(group) for group in own], [len(group) for group in saved]
    if here == there:
        return "other parameters here than in the checkpoint"
    return f"{here} parameters by group here, {there} in the checkpoint"


def _only_on_one_side(new: Sequence[str], gone: Sequence[str]) -> str:
    sides = ((new, "only here"), (gone, "only in the checkpoint"))
    return "".join(f"; {named(names)} {where}" for names, where in sides if names)


def named(names: Sequence[str]) -> str:
    """Return the first of these names, with the number of the others."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _matching_groups(
    keyword: str,
    found: Mapping[int, int],
    here: Mapping[int, tuple[Any, int]],
    there: Mapping[int, tuple[Any, int]],
    own: Sequence[Sequence[Any]],
    saved: Sequence[Sequence[Any]],
) -> list[int]:
    """Return the saved group for each of the script's: the one with most of its parameters."""
    common = [Counter[int]() for _ in own]
    for saved_number, number in found.items():
        common[here[number][1]][there[saved_number][1]] += 1
    same = list(range(len(own)))
    if all(counts.keys() <= {group} for group, counts in enumerate(common)):
        return same
    best = [max(counts, key=lambda s: (counts[s], s == g)) if counts else None for g, counts in enumerate(common)]
    free = [group for group in same if group not in best]
    groups = [free.pop(0) if each is None and free else each for each in best]
    if sorted(each for each in groups if each is not None) != same:
        raise IncompatibleCheckpoint(
            f"{keyword}: {_sizes(own, saved)}, and the parameters are in other groups: it is not known which "
            "settings belong to which group"
        )
    return [each for each in groups if each is not None]


def _match_by_order(
    keyword: str,
    group: int,
    saved_group: int,
    found: dict[int, int],
    here: Mapping[int, tuple[Any, int]],
    there: Mapping[int, tuple[Any, int]],
) -> None:
    """Add the parameters of a group that no name has matched."""
    taken = set(found.values())
    ours = [number for number, (_, g) in here.items() if g == group and number not in taken]
    theirs = [number for number, (_, g) in there.items() if g == saved_group and number not in found]
    if len(ours) != len(theirs):
        raise IncompatibleCheckpoint(
            f"{keyword}: group {group} has {len(ours)} parameters without a known name here, {len(theirs)} in the "
            "checkpoint"
        )
    for number, saved_number in zip(ours, theirs, strict=True):
        label, shape = there[saved_number][0], tuple(here[number][0].shape)
        if isinstance(label, tuple) and label != shape:
            raise IncompatibleCheckpoint(
                f"{keyword}: parameter {number} has the shape {shape} here, {label} in the checkpoint"
            )
        found[saved_number] = number


def labels_in(keyword: str, tree: Any, groups: Sequence[Mapping[str, Any]]) -> list[list[Label]]:
    """Return the labels of an optimizer's saved parameters by group.

    Checkpoints without labels have names in those of their tensors, without a keyword if there was one module.
    """
    numbers = [number for group in groups for number in group["params"]]
    if numbers != list(range(len(numbers))):  # numbered by a custom state_dict()
        return [[None] * len(group["params"]) for group in groups]
    if "parameters" in tree:
        stored = tree["parameters"]
        if not _are_labels(stored) or list(map(len, stored)) != [len(group["params"]) for group in groups]:
            raise DamagedCheckpoint(MANIFEST, f"state.{keyword}.parameters are not those of its groups")
        return [[tuple(each) if isinstance(each, list) else each for each in group] for group in stored]
    names: dict[Any, str] = {}
    for number, values in dict(tree["$pairs"])["state"]["$pairs"]:
        if isinstance(number, int) and (name := _name_in_tensors(keyword, number, values)) is not None:
            names[number] = plain_name(name)
    return [[names.get(number) for number in group["params"]] for group in groups]


def _are_labels(stored: Any) -> bool:
    return isinstance(stored, list) and all(
        isinstance(group, list)
        and all(
            isinstance(each, str) or (isinstance(each, list) and all(type(n) is int for n in each))
            for each in group
        )
        for group in stored
    )


def _name_in_tensors(keyword: str, number: int, values: Any) -> str | None:
    """Return the name of a parameter on which the names of its state's tensors agree."""
    found = set()
    for key, value in values.items() if isinstance(values, dict) else ():
        tensor = value.get("$tensor") if isinstance(value, dict) else None
        prefix = f"{keyword}.state.{key}."
        if isinstance(tensor, str) and tensor.startswith(prefix):
            found.add(tensor.removeprefix(prefix))
    name = found.pop() if len(found) == 1 else None
    return None if name == str(number) or (name and "#" in name) else name


def require_state_by_parameter(keyword: str, match: ParameterMatch, state: Mapping[Any, Any], total: int) -> None:
    """Raise IncompatibleCheckpoint if parameters are in another order and a vector over all of them is saved."""
    order = [match.numbers[number] for number in sorted(match.numbers)]
    if order == sorted(order):
        return
    for values in state.values():
        for value in values.values() if isinstance(values, Mapping) else ():
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, torch.Tensor) and tuple(each.shape) == (total,):
                    raise IncompatibleCheckpoint(
                        f"{keyword}: its parameters are in another order than in the checkpoint, which holds one "
                        "vector over all of them: create them in the same order"
                    )


def count_elements(parameters: Iterable[torch.Tensor]) -> int:
    return sum(math.prod(parameter.shape) for parameter in parameters)
