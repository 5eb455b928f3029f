"""Loaders, optimizers and schedulers that the script uses and that no checkpoint holds."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast.data.loader import DataLoader
from holdfast.engine.missing_state import optimizers_referred_to, unused_keyword
from holdfast.state.registry import Registry
from holdfast.state.rng import is_generator
from holdfast.state.variables import Variables
from holdfast.state.wrappers import is_accelerator, is_optimizer, optimizers_in
from holdfast.torch_internals import has_scheduler

MOST_SEARCHES = 20
"""Most optimizers that are looked for in the given objects, as one per parameter may be used."""
_WITHOUT_SCHEDULER = (torch.nn.Module, torch.amp.GradScaler, Variables)


class UnsavedObjects:
    """Watches what the script uses, until it is closed."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._drawn_from: weakref.WeakSet[DataLoader] = weakref.WeakSet()
        self._reported_loaders: list[DataLoader] = []
        self._stepped: dict[int, weakref.ref[Optimizer]] = {}
        """Optimizers that made a step since the last call of `found`, by identity."""
        self._iterations: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        """Optimizers with the number of iterations in which they made a step, up to 2."""
        self._searches, self._reported = 0, set[str]()
        stepped = self._stepped

        def note(optimizer: Optimizer, *_: object) -> None:
            stepped[id(optimizer)] = weakref.ref(optimizer)

        self._hook = register_optimizer_step_post_hook(note)
        DataLoader.watched_by.append(self._drawn_from)

    def close(self) -> None:
        self._hook.remove()
        DataLoader.watched_by[:] = [each for each in DataLoader.watched_by if each is not self._drawn_from]

    def found(self, loaders: Collection[Any]) -> list[tuple[str, str]]:
        """Describe, once each, what was used since the last call and no checkpoint holds, with notice codes.

        `loaders` are those whose positions are saved.
        """
        messages = [("loader", each) for each in self._unsaved_loaders(loaders)] if self._drawn_from else []
        for optimizer in self._recurring():
            self._searches += 1
            if self._searches > MOST_SEARCHES:
                break
            new = [each for each in self._missing(optimizer) if each not in self._reported]
            self._reported.update(new)
            messages += [("inventory", each) for each in new]
        return messages

    def _unsaved_loaders(self, loaders: Collection[Any]) -> Iterator[str]:
        while self._drawn_from:
            loader = self._drawn_from.pop()
            if not any(each is loader for each in (*loaders, *self._reported_loaders)):
                self._reported_loaders.append(loader)
                keyword = unused_keyword("loader", self._registry.given)
                yield (
                    f"the script uses a holdfast.DataLoader over {type(loader.dataset).__name__} that is in no "
                    "checkpoint: after a resume it starts again at epoch 0. Give it to the session, "
                    f"Session({keyword}=...)"
                )

    def _recurring(self) -> Iterator[Optimizer]:
        """Yield optimizers in their second iteration: those of a single one have nothing to save."""
        while self._stepped:
            key, reference = self._stepped.popitem()
            optimizer, (known, count) = reference(), self._iterations.get(key, (reference, 0))
            if optimizer is None or (known() is optimizer and count == 2):
                continue
            self._iterations = {k: each for k, each in self._iterations.items() if each[0]() is not None}
            self._iterations[key] = reference, 1 if known() is not optimizer else count + 1
            if self._iterations[key][1] == 2:
                yield optimizer

    def _missing(self, optimizer: Optimizer) -> Iterator[str]:
        given, name = self._registry.given, type(optimizer).__name__
        if not any(each is optimizer for each in self._registry.optimizers):
            module = self._trained_module(optimizer)
            if module is None or any(each is optimizer for each in optimizers_referred_to(given)):
                return
            if optimizer.state:  # of SGD without momentum, nothing is lost
                yield (
                    f"{name} trains parameters of {module!r} but is in no checkpoint: a resume resets its moments "
                    f"and learning rate. Give it to the session, Session({unused_keyword('optimizer', given)}=...)"
                )
        if has_scheduler(optimizer) and not any(_may_schedule(each, optimizer) for each in given.values()):
            yield (
                f"an LR scheduler changes the learning rate of {name} but is in no checkpoint: a resume resets "
                f"it. Give it to the session, Session({unused_keyword('scheduler', given)}=...)"
            )

    def _trained_module(self, optimizer: Optimizer) -> str | None:
        """Return the keyword of a module that the optimizer trains."""
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        modules = self._registry.modules.items()
        return next((key for key, each in modules if any(id(p) in trained for p in each.parameters())), None)


def _may_schedule(item: Any, optimizer: Optimizer) -> bool:
    """Whether an object may hold the state of the optimizer's scheduler, as one of another library may."""
    if isinstance(item, (LRScheduler, ReduceLROnPlateau)):
        scheduled = list(optimizers_in(item.optimizer))
        return not scheduled or any(each is optimizer for each in scheduled)
    is_other = isinstance(item, _WITHOUT_SCHEDULER) or is_generator(item) or is_accelerator(item)
    is_loader = inspect.getattr_static(item, "dataset", None) is not None  # runs no property of the script
    return not (is_other or is_optimizer(item) or is_loader)
