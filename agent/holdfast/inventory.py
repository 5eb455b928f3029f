"""What a session was not given, as far as what it was given shows it."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from holdfast.data import DataLoader
from holdfast.rng import is_generator

DEPTH = 4
"""How many lists, dicts and objects deep it is looked for."""
MOST_ENTRIES = 1000
"""A list or dict of more holds data."""
_TOLD_APART = ("_parameters", "_buffers", "_modules")
_LEAVES = (torch.Tensor, str, bytes, int, float, type, types.FunctionType, types.MethodType, types.ModuleType)


def missing(objects: Mapping[str, Any], saved: Collection[str] = ()) -> list[str]:
    """In words: what the objects of a session refer to, or train, that will not be in its checkpoints.

    `saved` are the objects of the checkpoint that training goes on from; one that is not given any more stays
    behind there, and is told as well.
    """
    given = {id(item) for item in objects.values()}
    held = {id(tensor) for item in objects.values() for tensor in _tensors(item)}
    told: dict[int, str] = {}
    for keyword, item in objects.items():
        if isinstance(item, DataLoader):
            continue  # all that is in it follows from its position
        for path, found in _reachable(keyword, item, DEPTH, {id(item)}):
            name = _name_for(found)
            if name is not None and id(found) not in given and not _all_held(found, held):
                told[id(found)] = (
                    f"{path} is a {type(found).__name__} that is in no checkpoint: add it to the session, "
                    f"Session({name}=...), unless it never changes"
                )
    behind = [
        f"the checkpoint holds {keyword!r}, which the session was not given: add it, or it begins anew"
        for keyword in saved
        if keyword not in objects
    ]
    return [*told.values(), *_untrained(objects), *behind]


def _untrained(objects: Mapping[str, Any]) -> Iterator[str]:
    """Optimizers whose parameters lie in no module of the session."""
    held = {id(tensor) for item in objects.values() for tensor in _tensors(item)}
    for keyword, item in objects.items():
        if isinstance(item, torch.optim.Optimizer):
            strange = [p for group in item.param_groups for p in group["params"] if id(p) not in held]
            if strange:
                yield (
                    f"{keyword} trains {len(strange)} tensors, the first of shape {tuple(strange[0].shape)}, that "
                    "are in no module of the session: their values are in no checkpoint. Give their module, "
                    "Session(model=...)"
                )


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    """Parameters and buffers of a module; nothing of anything else."""
    if isinstance(item, torch.nn.Module):
        yield from item.parameters()
        yield from item.buffers()


def _all_held(found: Any, held: Collection[int]) -> bool:
    """A module of which nothing is missing: a part of one that was given, a wrapper of it, or a stateless one."""
    return isinstance(found, torch.nn.Module) and all(id(tensor) in held for tensor in _tensors(found))


def _name_for(found: Any) -> str | None:
    """The keyword to give it under; None for what holds no state of training."""
    if isinstance(found, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(found, torch.nn.Module):
        return "model"
    return "generator" if is_generator(found) else None


def _reachable(path: str, item: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if depth == 0:
        return
    for name, value in _parts(item):
        if value is None or isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        yield f"{path}{name}", value
        if not isinstance(value, (torch.optim.Optimizer, torch.nn.Module)) and not is_generator(value):
            yield from _reachable(f"{path}{name}", value, depth - 1, seen)


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, torch.nn.Module):
        for name, module in item.named_modules():
            own = {key: value for key, value in vars(module).items() if key not in _TOLD_APART}
            yield from _named(f".{name}" if name else "", own)
    elif isinstance(item, torch.optim.Optimizer):
        return  # it holds parameters, which are told of by themselves
    elif isinstance(item, (dict, list, tuple)):
        if len(item) <= MOST_ENTRIES:
            entries = item.items() if isinstance(item, dict) else enumerate(item)
            yield from ((f"[{key!r}]", value) for key, value in entries)
    else:
        yield from _named("", getattr(item, "__dict__", {}))


def _named(prefix: str, attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{prefix}.{name}", value) for name, value in attributes.items())
