"""The values that objects were constructed with, and how they differ from those of a checkpoint.

A checkpoint stores them as they were before training, so that values that training changes (a scheduled learning
rate, the counters of an optimizer) do not count as settings.
"""

from __future__ import annotations

import collections
import copy
import inspect
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.state.references import attributes
from holdfast.torch_internals import runs_step_hooks

logger = logging.getLogger("holdfast")

_NO_SETTINGS = frozenset(["params", "param_names", "initial_lr", "last_epoch", "base_lrs", "optimizer", "verbose"])
_PROGRESS = frozenset(
    [
        "_step_count",
        "_last_lr",
        "_get_lr_called_within_step",
        "_is_initial",
        "_schedulers",
        "_milestones",
        "lr_lambdas",
    ]
)
_OF_LOADERS = ("batch_size", "drop_last", "seed", "_shuffle")
_MOST_ITEMS, _MOST_CHARACTERS, DEPTH = 100, 200, 3
_ABSENT = object()
Groups = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Construction:
    """What an object was constructed with."""

    kind: str = ""
    """Names of its class and of those that it combines."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Values that a checkpoint replaces, by path."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Values of functions and other objects that no checkpoint replaces, by path."""
    arguments: frozenset[str] = frozenset()
    """Names of the arguments of its class; other settings follow from them. Empty if unknown, and not stored."""

    def tree(self) -> dict[str, Any]:
        """Return it as a checkpoint stores it: values are plain already."""
        return {"kind": self.kind, "settings": self.settings, "fixed": self.fixed}

    @classmethod
    def from_tree(cls, tree: Any) -> Construction | None:
        """Return what a checkpoint stores; `None` if it has none that can be read."""
        match tree:
            case {"kind": str(kind), "settings": dict(settings), "fixed": dict(fixed)}:
                return cls(kind, settings, fixed)
        return None

    @property
    def names(self) -> list[str]:
        """The names of settings, without the groups or parts that they are of; arguments of its class first."""
        names = dict.fromkeys(map(name_of, self.settings))
        return sorted(names, key=lambda name: name not in self.arguments)

    def is_derived(self, path: str) -> bool:
        """Whether a setting seems to follow from arguments."""
        return bool(self.arguments) and name_of(path) not in self.arguments


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A value that differs between a checkpoint and the script."""

    keyword: str
    name: str
    there: Any
    here: Any
    is_fixed: bool = False
    """The script's is in force, as no checkpoint replaces it."""

    def __str__(self) -> str:
        return f"{self.name} {_text(self.there)} (here {_text(self.here)})"


def name_of(path: str) -> str:
    return path.rpartition(".")[2]


def construction_of(item: object) -> Construction:
    """Describe how an object was constructed, before it trains. Never raises: it is for messages."""
    try:
        return _construction_of(item)
    except Exception as error:  # code of other libraries
        logger.debug(
            "the settings of a %s are not known: %s: %s", type(item).__name__, type(error).__name__, error
        )
        return Construction()


def _construction_of(item: Any) -> Construction:
    if runs_step_hooks(item):
        groups = enumerate(item.param_groups)
        settings = {f"{number}.{name}": v for number, group in groups for name, v in group_settings(group).items()}
        return Construction(type(item).__name__, settings)
    if isinstance(item, torch.amp.GradScaler):
        return Construction("GradScaler", settings_in(item.state_dict(), 1), {"enabled": item.is_enabled()})
    schedule = schedule_in(item)
    if schedule is None and isinstance(getattr(item, "optimizer", None), Optimizer):
        schedule = item  # a schedule of another library, or of the script
    if schedule is not None:
        from holdfast.state.schedules import construction_of_schedule

        return construction_of_schedule(schedule)
    fixed = loader_settings(item) | plain_items(getattr(item, "script_settings", {}))
    return Construction(type(item).__name__, plain_items(getattr(item, "replaced_settings", {})), fixed)


def loader_settings(item: Any) -> dict[str, Any]:
    """Return what a loader of torch or of Holdfast was constructed with; nothing for other objects."""
    own = attributes(item)
    if "dataset" not in own:
        return {}
    found = {name.lstrip("_"): own[name] for name in _OF_LOADERS if name in own}
    indices = attributes(own["dataset"]).get("indices")
    if isinstance(own["dataset"], torch.utils.data.Subset) and isinstance(indices, (list, tuple, range)):
        # of `random_split`, perhaps without a seed; a position within an epoch names another number of samples
        found[f"indices of {len(indices)} samples"] = list(indices[:: len(indices) // 8 + 1])
    return plain_items(found)


def schedule_in(item: Any) -> LRScheduler | None:
    """Return the schedule that an object is, or that it wraps without a state of its own, as Accelerate does."""
    if isinstance(item, LRScheduler):
        return item
    inside = attributes(item).get("scheduler")
    is_wrapper = isinstance(inside, LRScheduler) and item.state_dict().keys() == inside.state_dict().keys()
    return inside if is_wrapper else None


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group; the learning rate without what a schedule made of it."""
    found = plain_items({name: value for name, value in group.items() if name not in _NO_SETTINGS})
    if "initial_lr" in group and "lr" in found:
        found["lr"] = plain_value(group["initial_lr"])
    return found


def copied_groups(optimizer: Any) -> Groups:
    """Return the parameter groups of an optimizer without parameters, with copies of their values."""
    return [
        {name: copy.deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def settings_of_state(item: object, state: Any) -> dict[str, Any]:
    """Return the settings in the state of an older checkpoint, which has values as training left them."""
    if runs_step_hooks(item):
        arguments = inspect.signature(type(item).__init__).parameters.keys()
        groups = state["param_groups"]
        cycled = {"betas", "momentum"} if any("max_momentum" in group for group in groups) else set()
        return {
            f"{number}.{name}": value
            for number, group in enumerate(groups)
            for name, value in group_settings(group).items()
            if name in arguments and name not in cycled
        }
    if (schedule := schedule_in(item)) is not None:
        arguments = inspect.signature(type(schedule).__init__).parameters.keys()
        return {name: value for name, value in settings_in(state, 1).items() if name in arguments}
    return settings_in(state, 1) if isinstance(item, torch.amp.GradScaler) and state else {}


def settings_in(state: Any, depth: int) -> dict[str, Any]:
    """Return the plain values of a state by path, also of schedules within a schedule."""
    if not isinstance(state, Mapping):
        return {}
    found = plain_items({key: v for key, v in state.items() if key not in _NO_SETTINGS | _PROGRESS})
    inner = state.get("_schedulers")
    if depth > 1 and isinstance(inner, (list, tuple)):
        for number, each in enumerate(inner):
            found |= {f"{number}.{path}": value for path, value in settings_in(each, depth - 1).items()}
        if isinstance(milestones := state.get("_milestones"), list):
            found |= plain_items({"milestones": milestones})
    functions = state.get("lr_lambdas")
    for number, each in enumerate(functions if isinstance(functions, (list, tuple)) else ()):
        if isinstance(each, Mapping):  # an object with attributes
            found |= {f"lr_lambdas.{number}.{name}": value for name, value in plain_items(each).items()}
    return found


def plain_items(values: Mapping[Any, Any]) -> dict[str, Any]:
    plain = ((name, plain_value(value)) for name, value in values.items() if isinstance(name, str))
    return {name: value for name, value in plain if value is not _ABSENT}


def plain_value(value: Any) -> Any:
    """Return a value as JSON has it; `_ABSENT` for what is no setting."""
    if value is None or isinstance(value, (bool, int, float)):
        is_exact = not isinstance(value, float) or value - value == 0
        return value if is_exact and not (type(value) is int and abs(value) >= 2**63) else repr(value)
    if isinstance(value, str):
        return value if len(value) <= _MOST_CHARACTERS and value.isprintable() else _ABSENT
    if isinstance(value, torch.Tensor) or hasattr(value, "dtype"):
        return plain_value(value.item()) if getattr(value, "ndim", 1) == 0 and not _is_remote(value) else _ABSENT
    if isinstance(value, collections.Counter):
        return plain_value(sorted(value.elements()))
    if isinstance(value, dict) and len(value) <= _MOST_ITEMS:
        entries = plain_items(value)
        return entries if len(entries) == len(value) else _ABSENT
    if isinstance(value, (list, tuple)) and len(value) <= _MOST_ITEMS:
        items = [plain_value(item) for item in value]
        return items if _ABSENT not in items else _ABSENT
    return _ABSENT


def _is_remote(value: Any) -> bool:
    """Whether reading a value may need other ranks, or is impossible."""
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta
    return isinstance(value, torch.Tensor) and not is_plain


def value_at(state: Any, path: str) -> Any:
    """Return the value of a setting in a `state_dict()`."""
    holder, name = _holder_of(state, path)
    return holder[name]


def set_value_at(state: Any, path: str, value: Any) -> None:
    """Set the value of a setting in a `state_dict()`."""
    holder, name = _holder_of(state, path)
    holder[name] = value


def _holder_of(state: Any, path: str) -> tuple[Any, str]:
    """Return the dict of a setting, and its key there. A number is that of a schedule or of a function."""
    *parts, name = path.split(".")
    for part in parts:
        if part.isdecimal():
            state = state["_schedulers"] if isinstance(state, Mapping) else state
            state = state[int(part)]
        else:
            state = state[part]
    return state, name if name in state or f"_{name}" not in state else f"_{name}"


def differences(keyword: str, there: Construction, here: Construction) -> Iterator[SettingDifference]:
    """Yield what differs, each name and pair of values once."""
    if there.kind and there.kind != here.kind:
        yield SettingDifference(keyword, "type", there.kind, here.kind, is_fixed=True)
    for before, now, is_fixed in ((there.settings, here.settings, False), (there.fixed, here.fixed, True)):
        paths = [path for path in now if path in before and now[path] != before[path]]
        paths = [path for path in paths if is_fixed or not here.is_derived(path)] or paths
        found = [SettingDifference(keyword, name_of(p), before[p], now[p], is_fixed) for p in paths]
        yield from {str(each): each for each in found}.values()


def describe(found: Iterable[SettingDifference]) -> list[str]:
    """Return messages about differing settings: those that a checkpoint replaces, and the others."""
    replaced: list[SettingDifference] = []
    fixed: list[SettingDifference] = []
    for each in found:
        (fixed if each.is_fixed else replaced).append(each)
    messages = []
    if replaced:
        names: dict[str, list[str]] = {}
        for each in replaced:
            names.setdefault(each.keyword, []).append(each.name)
        arguments = ", ".join(f"{keyword}={_argument(dict.fromkeys(each))}" for keyword, each in names.items())
        pairs = ", ".join(f'"{keyword}": {_argument(dict.fromkeys(each))}' for keyword, each in names.items())
        messages.append(
            f"settings of the checkpoint replace those of the script: {_listed(replaced)}. To use the script's, "
            f"call session.keep({arguments}) before session.resume(), or give an adapter keep_settings={{{pairs}}}"
        )
    if fixed:
        messages.append(
            "the checkpoint was trained with other settings than those of the script; the script's are in force: "
            f"{_listed(fixed)}"
        )
    return messages


def _argument(names: Collection[str]) -> str:
    quoted = ", ".join(f'"{name}"' for name in names)
    return quoted if len(names) == 1 else f"[{quoted}]"


def _listed(found: Iterable[SettingDifference]) -> str:
    by_keyword: dict[str, list[str]] = {}
    for each in found:
        by_keyword.setdefault(each.keyword, []).append(str(each))
    return "; ".join(f"{keyword} {', '.join(texts)}" for keyword, texts in by_keyword.items())


def _text(value: Any) -> str:
    return f"({', '.join(map(_text, value))})" if isinstance(value, list) else repr(value)
