"""What a session was not given, as far as what it was given shows it."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from holdfast.data.loader import DataLoader
from holdfast.state.references import attributes, entries, entry_name, length, walk
from holdfast.state.rng import is_generator
from holdfast.state.variables import Variables
from holdfast.state.wrappers import has_no_state_dict, has_unseen_steps, is_accelerator, optimizers_in, unwrapped

DEPTH = 4
"""How many lists, dicts and objects deep it is looked for."""
MOST_ENTRIES = 1000
"""A list or dict of more holds data."""
MOST_NAMED = 100
"""So many objects that a function of the script names are entered."""
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_OF_OPTIMIZERS = ("state", "param_groups")
_FUNCTIONS = (types.FunctionType, types.MethodType)
_LISTS = (dict, list, tuple)
_WHOLE = (torch.optim.Optimizer, torch.nn.Module, *_FUNCTIONS)


def missing(objects: Mapping[str, Any], saved: Collection[str] = ()) -> list[str]:
    """In words: what the objects of a session refer to, or train, that will not be in its checkpoints.

    `saved` are the objects of the checkpoint that training resumed from: one that is not given now is reported.
    """
    if not objects:
        return [
            "the session was given no objects: its checkpoints hold random states and the position in the data, "
            "and no model. Give what training changes, Session(model=..., optimizer=...)"
        ]
    behind = [
        f"the checkpoint holds {keyword!r}, which the session was not given: add it, or its state is lost"
        for keyword in saved
        if keyword not in objects
    ]
    return [
        *_referred_to(objects),
        *_untrained(objects),
        *_unseen(objects),
        *_uncounted(objects),
        *_unsaved_metrics(objects),
        *behind,
    ]


def _referred_to(objects: Mapping[str, Any]) -> Iterable[str]:
    """What hides in the attributes of the objects."""
    given = {id(each) for item in objects.values() for each in (item, unwrapped(item), *optimizers_in(item))}
    held = {id(tensor) for item in objects.values() for tensor in _tensors(item)}
    messages: dict[int, str] = {}
    for keyword, item in objects.items():
        for path, found in _reachable(keyword, item):
            inside = unwrapped(found)
            name = _name_for(inside)
            if name is not None and id(inside) not in given and not _all_held(found, held):
                messages[id(inside)] = (
                    f"{path} ({type(found).__name__}) is in no checkpoint: add it to the session, "
                    f"Session({unused_keyword(name, objects)}=...), unless it never changes"
                )
    return messages.values()


def unused_keyword(name: str, objects: Mapping[str, Any]) -> str:
    """`name`, or with a number, so that no object of the session has it."""
    numbered = (f"{name}{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in objects)


def optimizers_referred_to(objects: Mapping[str, Any]) -> Iterator[torch.optim.Optimizer]:
    """Yield optimizers in attributes of the objects: `missing` reports them, or they are a part."""
    for keyword, item in objects.items():
        inside = unwrapped(item)
        if isinstance(inside, torch.optim.Optimizer):
            inside = {name: each for name, each in attributes(inside).items() if name not in _OF_OPTIMIZERS}
        for _, each in _reachable(keyword, inside, item):
            yield from optimizers_in(each)


def optimizers_in_code(objects: Mapping[str, Any]) -> Iterator[torch.optim.Optimizer]:
    """Yield optimizers that the code of a given `state_dict` reaches: it saves them, or only reads from them."""
    for item in objects.values():
        for each in _named_by_state_dict(item):
            yield from optimizers_in(each)


def objects_referred_to(objects: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what the objects refer to: it is saved with them, or `missing` reports it."""
    for keyword, item in objects.items():
        yield from (found for _, found in _reachable(keyword, item))


def generators_referred_to(objects: Mapping[str, Any]) -> Iterator[Any]:
    """Random generators in the attributes of the objects: `missing` reports them."""
    return filter(is_generator, objects_referred_to(objects))


def _untrained(objects: Mapping[str, Any]) -> Iterator[str]:
    """Optimizers whose parameters lie in no module of the session."""
    held = {id(tensor) for item in objects.values() for tensor in _tensors(item)}
    for keyword, item in objects.items():
        groups = [group for optimizer in optimizers_in(unwrapped(item)) for group in optimizer.param_groups]
        strange = [p for group in groups for p in group["params"] if id(p) not in held]
        if strange:
            yield (
                f"{keyword} trains {len(strange)} tensors, the first of shape {tuple(strange[0].shape)}, that "
                "are in no module of the session: their values are in no checkpoint. Give their module, "
                f"Session({unused_keyword('model', objects)}=...), or put them into holdfast.Variables"
            )


def _unseen(objects: Mapping[str, Any]) -> Iterator[str]:
    """Optimizers that run no hooks: nothing can be copied during the next iteration."""
    for keyword, item in objects.items():
        if has_unseen_steps(unwrapped(item)):
            yield (
                f"{keyword} ({type(item).__name__}) runs no hooks around its step: training waits while a "
                "checkpoint is copied. Derive it from torch.optim.Optimizer and call super().__init__"
            )


def _uncounted(objects: Mapping[str, Any]) -> Iterator[str]:
    """The counter of an Accelerator that accumulates gradients, where only a wrapper of its making is given."""
    if any(map(is_accelerator, objects.values())):
        return
    for keyword, item in objects.items():
        steps = getattr(getattr(item, "gradient_state", None), "num_steps", 1)
        if isinstance(steps, int) and steps > 1:
            yield (
                f"{keyword} ({type(item).__name__}) accumulates gradients over {steps} iterations; the counter "
                "of its Accelerator is in no checkpoint: add it to the session, Session(accelerator=...)"
            )
            return


def _unsaved_metrics(objects: Mapping[str, Any]) -> Iterator[str]:
    """The torchmetrics whose `state_dict` leaves out what they have counted, which is the default."""
    kind = getattr(sys.modules.get("torchmetrics"), "Metric", None)
    if kind is None or any(getattr(item, "saves_metrics", False) for item in objects.values()):
        return
    for keyword, item in objects.items():
        modules = item.named_modules() if isinstance(item, torch.nn.Module) else ()
        names = [f"{keyword}.{name}" if name else keyword for name, each in modules if _is_unsaved(each, kind)]
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            yield (
                f"{names[0]}{more} is a torchmetric whose values are in no checkpoint: call its persistent(True) "
                "before the session is created, unless it is reset in every iteration"
            )


def _is_unsaved(module: torch.nn.Module, kind: type) -> bool:
    states = getattr(module, "metric_state", {})
    return isinstance(module, kind) and bool(states.keys() - module.state_dict().keys())


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    """Parameters and buffers of a module, and the tensors in `Variables`; nothing of anything else."""
    if isinstance(item, torch.nn.Module):
        yield from item.parameters()
        yield from item.buffers()
    elif isinstance(item, Variables):
        yield from _tensors_in(item.state_dict())


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _all_held(found: Any, held: Collection[int]) -> bool:
    """A module of which nothing is missing: a part of one that was given, a wrapper of it, or a stateless one."""
    return isinstance(found, torch.nn.Module) and all(id(tensor) in held for tensor in _tensors(found))


def _name_for(found: Any) -> str | None:
    """The keyword to give it under; None for what holds no state of training."""
    if isinstance(found, torch.optim.Optimizer):
        return None if has_no_state_dict(found) else "optimizer"
    if isinstance(found, torch.nn.Module):
        return "model"
    return "generator" if is_generator(found) else None


def _reachable(path: str, item: Any, without: object = None) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to with paths; of what is reported as a whole, only the object itself."""

    def parts(each: Any) -> Iterable[tuple[str, Any]]:
        return _parts(each) if each is item or not (isinstance(each, _WHOLE) or is_generator(each)) else ()

    found = walk(path, item, parts, DEPTH, without=without)
    return ((path, each) for path, each in itertools.islice(found, 1, None) if not isinstance(each, _FUNCTIONS))


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, torch.nn.Module):
        for name, module in item.named_modules():
            own = {key: value for key, value in attributes(module).items() if key not in _OF_MODULES}
            yield from _named(f".{name}" if name else "", own)
    elif isinstance(item, (torch.optim.Optimizer, DataLoader, torch.utils.data.DataLoader)):
        return  # its parameters are reported as such; the state of a loader includes what it reaches
    elif _is_short_list(item):
        yield from ((entry_name(key), value) for key, value in entries(item))
    elif issubclass(type(item), _LISTS):
        return  # it holds data
    else:
        yield from _named("", attributes(item))


def _named_by_state_dict(item: Any) -> Iterator[Any]:
    """Yield what the `state_dict` of an object reaches by the variables and attributes that code names."""
    methods: dict[tuple[int, int], types.MethodType] = {}  # kept, as a walk knows objects by identity

    def members(holder: Any, names: Collection[str]) -> Iterator[tuple[str, Any]]:
        for name in () if isinstance(holder, _WHOLE) else names:
            yield "", attributes(holder).get(name)
            if isinstance(method := inspect.getattr_static(type(holder), name, None), types.FunctionType):
                yield "", methods.setdefault((id(method), id(holder)), types.MethodType(method, holder))

    def variables(code: Any) -> Iterator[tuple[str, Any]]:
        function = getattr(code, "__func__", code) if isinstance(code, _FUNCTIONS) else None
        if isinstance(function, types.FunctionType):
            names = sorted(set(_names_in(function.__code__)))
            held = [getattr(code, "__self__", None), *_enclosed(function), *map(function.__globals__.get, names)]
            found = walk("", held, lambda each: _values(each) or members(each, names), DEPTH, most=MOST_NAMED)
            yield from itertools.islice(found, 1, None)

    found = walk("", item, lambda each: members(each, ["state_dict"]) if each is item else variables(each), DEPTH)
    return (each for _, each in found)


def _enclosed(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            yield cell.cell_contents


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in the code of a function, and of functions inside it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names_in(each)


def _is_short_list(item: Any) -> bool:
    # by the type: a proxy may have the class of a container, and none of its methods
    return issubclass(type(item), _LISTS) and length(item) <= MOST_ENTRIES


def _values(item: Any) -> list[tuple[str, Any]]:
    return [("", value) for _, value in entries(item)] if _is_short_list(item) else []


def _named(prefix: str, found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{prefix}.{name}", value) for name, value in found.items())
