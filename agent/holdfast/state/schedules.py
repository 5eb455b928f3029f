"""Schedules of learning rates: comparison with those of a checkpoint, and their position under other settings."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.errors import IncompatibleCheckpoint
from holdfast.state.adapter import StateAdapter
from holdfast.state.construction import (
    DEPTH,
    Construction,
    Groups,
    copied_groups,
    plain_items,
    plain_value,
    schedule_in,
    set_value_at,
    settings_in,
    value_at,
)
from holdfast.state.references import attributes
from holdfast.state.tree import Shapes, Tree, require_readable
from holdfast.state.wrappers import Stateful, require_attributes

_RATES = ("lr", "initial_lr")


class SchedulerAdapter(StateAdapter):
    """A learning-rate schedule. torch's `load_state_dict` sets any attribute, so `check` restricts them."""

    def __init__(self, keyword: str, item: Stateful) -> None:
        super().__init__(keyword, item)
        self.schedule = schedule_in(item)
        self._start: tuple[dict[str, Any], Groups] | None = None
        """State of the schedule and of its groups before training, to replay it from."""
        self._there = Construction()
        """How the schedule of the loaded checkpoint was constructed."""

    @property
    def may_refuse(self) -> bool:
        return not type(self.schedule).load_state_dict.__module__.startswith("torch.")

    def check(self, tree: Tree, shapes: Shapes) -> None:
        state = require_readable(self.keyword, tree, shapes)
        require_attributes(self.keyword, self.schedule, state)
        there = self.saved_construction(tree, shapes)
        require_same_schedule(self.keyword, self.schedule, state, self.construction.kind, there.kind)
        if self._start is not None:
            try:
                self._replayed(state, there, copied_groups(self.schedule.optimizer), base_is_kept=False)
            except Exception as error:  # a schedule of the script may need arguments, for example
                raise IncompatibleCheckpoint(
                    f"{self.keyword}: its steps cannot be repeated under settings to keep: {error}"
                ) from error

    def note_settings(self, tree: Tree, shapes: Shapes) -> None:
        super().note_settings(tree, shapes)
        self._there = self.saved_construction(tree, shapes)

    def keep(self, names: Collection[str]) -> None:
        super().keep(names)
        self.keep_start()

    def keep_start(self) -> None:
        """Note the state before training, to replay the schedule from."""
        if self._start is None and follows_iterations(self.schedule):
            self._start = copy.deepcopy(self.schedule.state_dict()), copied_groups(self.schedule.optimizer)

    def reposition(self, *, base_is_kept: bool) -> None:
        """Go to the position that the schedule has with the settings to keep. Call it after all loads."""
        if self._start is None or not (self._kept or base_is_kept):
            return
        groups = self.schedule.optimizer.param_groups
        saved = self.schedule.state_dict()
        state, moved = self._replayed(saved, self._there, groups, base_is_kept=base_is_kept)
        self.schedule.load_state_dict(state)
        for group, new in zip(groups, moved, strict=True):
            group.update({name: new[name] for name in (*_RATES, *self._cycled()) if name in group})

    def _cycled(self) -> tuple[str, ...]:
        return ("betas", "momentum") if getattr(self.schedule, "cycle_momentum", False) else ()

    def _replayed(
        self,
        saved: dict[str, Any],
        there: Construction,
        groups: Sequence[Mapping[str, Any]],
        *,
        base_is_kept: bool,
    ) -> tuple[dict[str, Any], Groups]:
        assert self._start is not None
        state, start = copy.deepcopy(self._start)
        take_settings(state, saved, there, self.construction, self._kept)
        if not base_is_kept:
            state, start = with_base_rates(state, start, saved)
        reset = [{n: group[n] for n in (*_RATES, *self._cycled()) if n in group} for group in start]
        combined = [{**_without_params(group), **own} for group, own in zip(groups, reset, strict=True)]
        return replayed(self.schedule, state, combined, position_of(saved) - position_of(state))


def construction_of_schedule(schedule: Any) -> Construction:
    """Describe how a schedule was constructed."""
    settings, functions = settings_in(schedule.state_dict(), DEPTH), _functions_of(schedule)
    return Construction(_kind_of(schedule), settings, functions, frozenset(_arguments_of(schedule)))


def _kind_of(schedule: Any) -> str:
    inner = [_kind_of(each) for each in attributes(schedule).get("_schedulers", ())]
    return f"{type(schedule).__name__}({', '.join(inner)})" if inner else type(schedule).__name__


def _arguments_of(schedule: Any) -> Iterator[str]:
    for kind in type(schedule).__mro__[:-1]:
        yield from inspect.signature(kind).parameters
    for inner in attributes(schedule).get("_schedulers", ()):
        yield from _arguments_of(inner)


def _functions_of(item: Any, depth: int = DEPTH) -> dict[str, Any]:
    """Return the values that functions of a schedule use, such as the length of a warm-up, by path."""
    found: dict[str, Any] = {}
    for name, value in attributes(item).items():
        for number, each in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if isinstance(each, (types.FunctionType, types.MethodType, functools.partial)):
                found |= {f"{name}.{number}.{n}": v for n, v in _used_by(each, DEPTH).items()}
            elif name == "_schedulers" and depth:
                found |= {f"{number}.{path}": v for path, v in _functions_of(each, depth - 1).items()}
    return found


def _used_by(function: Any, depth: int) -> dict[str, Any]:
    """Return the plain values that a function uses: arguments of a partial, variables, constants."""
    if not depth:
        return {}
    if isinstance(function, functools.partial):
        named = dict(zip(_arguments(function.func), function.args, strict=False)) | function.keywords
        return _used_by(function.func, depth - 1) | plain_items(named)
    if isinstance(function, types.MethodType):
        return _used_by(function.__func__, depth) | _attributes_used(function.__func__, function.__self__)
    if not isinstance(function, types.FunctionType):
        return {}
    variables = inspect.getclosurevars(function)
    found = plain_items({**variables.globals, **variables.nonlocals})
    for value in (*variables.globals.values(), *variables.nonlocals.values()):
        if isinstance(value, (types.FunctionType, functools.partial)):
            found = _used_by(value, depth - 1) | found
        elif not isinstance(value, (type, types.ModuleType)):
            found = _attributes_used(function, value) | found
    if constants := [each for each in function.__code__.co_consts if isinstance(each, float)]:
        found[f"constants of {function.__name__}"] = constants
    return found


def _arguments(function: Any) -> Collection[str]:
    return inspect.signature(function).parameters if callable(function) else ()


def _attributes_used(function: Any, item: object) -> dict[str, Any]:
    """Return the plain attributes of a namespace or an object that the code of a function names."""
    own = attributes(item)
    return plain_items({name: own[name] for name in function.__code__.co_names if name in own})


def take_settings(state: Any, saved: Any, there: Construction, here: Construction, kept: Collection[str]) -> None:
    """Set arguments of a schedule in its state before training to those of a checkpoint, except those to keep."""
    for path, value in there.settings.items():
        if (
            path in here.settings
            and path not in kept
            and not here.is_derived(path)
            and value != here.settings[path]
        ):
            now = value_at(saved, path)
            set_value_at(state, path, now if plain_value(now) == value else value)


def require_same_schedule(path: str, schedule: Any, state: Mapping[str, Any], kind: str, saved_kind: str) -> None:
    """Raise IncompatibleCheckpoint for the state of another schedule.

    Checkpoints of older versions have no kind. Versions of torch add and drop private attributes.
    """
    own, saved = _public(schedule.state_dict()), _public(state)
    new, gone = sorted(own - saved), sorted(saved - own)
    if saved_kind and saved_kind != kind and (new or gone or (_is_of_torch(kind) and _is_of_torch(saved_kind))):
        raise IncompatibleCheckpoint(f"{path}: a {kind} here, a {saved_kind} in the checkpoint")
    if new and gone:
        raise IncompatibleCheckpoint(
            f"{path}: this {kind} has {', '.join(new)}; the checkpoint has {', '.join(gone)} instead"
        )
    here, there = getattr(schedule, "base_lrs", None), state.get("base_lrs")
    if isinstance(here, list) and isinstance(there, list) and len(here) != len(there):
        raise IncompatibleCheckpoint(
            f"{path}: a schedule of {len(here)} parameter groups here, of {len(there)} in the checkpoint"
        )


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _public(state: Mapping[str, Any]) -> set[str]:
    return {key for key in state if isinstance(key, str) and key[:1] != "_" and key != "verbose"}


def _is_of_torch(kind: str) -> bool:
    return hasattr(lr_scheduler, kind.partition("(")[0])


def follows_iterations(schedule: Any) -> bool:
    """Whether the position of a schedule is the number of its steps, so that it can be reached again."""
    return isinstance(schedule, LRScheduler) and not isinstance(schedule, ReduceLROnPlateau)


def with_base_rates(
    state: dict[str, Any], groups: Groups, saved: Mapping[str, Any]
) -> tuple[dict[str, Any], Groups]:
    """Return the start of a schedule with the base learning rates of a checkpoint's."""
    rates = saved.get("base_lrs")
    state = {**state, "base_lrs": rates} if rates is not None else state
    if isinstance(state.get("_schedulers"), list):
        pairs = zip(state["_schedulers"], saved["_schedulers"], strict=True)
        state["_schedulers"] = [with_base_rates(one, [], other)[0] for one, other in pairs]
        rates = rates if rates is not None else state["_schedulers"][0].get("base_lrs")
    if not groups or rates is None:
        return state, groups
    return state, [_with_base_rate(group, rate) for group, rate in zip(groups, rates, strict=True)]


def _with_base_rate(group: dict[str, Any], rate: Any) -> dict[str, Any]:
    base = group.get("initial_lr", group["lr"])
    return {**group, "initial_lr": rate, "lr": group["lr"] * (rate / base) if base else rate}


def position_of(state: Mapping[str, Any]) -> int:
    """Return the number of steps of a schedule."""
    inner = state.get("_schedulers")
    return int(state["last_epoch"]) if "last_epoch" in state or not inner else position_of(inner[0])


def replayed(
    schedule: Any, state: dict[str, Any], groups: Sequence[Mapping[str, Any]], steps: int
) -> tuple[dict[str, Any], Groups]:
    """Return the state of a schedule, and the groups of its optimizer, `steps` after a state. Changes neither."""
    trained = [{**copy.deepcopy(dict(group)), "params": [torch.zeros(1, device="cpu")]} for group in groups]
    optimizer = torch.optim.SGD(trained, lr=0.0)
    twin = copy.deepcopy(schedule, {id(schedule.optimizer): optimizer})
    twin.load_state_dict(copy.deepcopy(state))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a step of the schedule before one of the optimizer
        for _ in range(steps):
            twin.step()
    return twin.state_dict(), [
        {key: v for key, v in group.items() if key != "params"} for group in optimizer.param_groups
    ]
