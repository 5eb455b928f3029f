"""Loaders, optimizers and schedulers that the script uses and that no checkpoint holds."""

from __future__ import annotations

import inspect
import math
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.data.loader import DataLoader
from holdfast.inventory.missing_state import optimizers_in_code, optimizers_referred_to, unused_keyword
from holdfast.state.capture import PLAIN
from holdfast.state.registry import CapturedState, Registry
from holdfast.state.rng import is_generator
from holdfast.state.sharding import local
from holdfast.state.variables import Variables
from holdfast.state.wrappers import is_accelerator, is_optimizer, optimizers_in
from holdfast.torch_internals import has_scheduler, version_of

MOST_SEARCHES = 20
"""Most optimizers that are looked for in the given objects, as one per parameter may be used."""
MOST_ITERATIONS = 100
"""So many without a step of a given optimizer are more than an accumulation of gradients takes."""
MOST_READ = 0.1
"""Number of values in a state, as a share of those of an optimizer, below which the state does not hold them."""
_WITHOUT_SCHEDULER = (torch.nn.Module, torch.amp.GradScaler, Variables)


class UnsavedObjects:
    """Examines what the script uses.

    Args:
        stepped: optimizers that made a step since the last call of `found`, by identity.
        drawn_from: loaders that gave a batch since then.
        known: receives the optimizers of which nothing more is to be found.
        known_loaders: receives the loaders that were examined.
    """

    def __init__(
        self,
        registry: Registry,
        stepped: dict[int, weakref.ref[Optimizer]],
        drawn_from: weakref.WeakSet[DataLoader],
        known: weakref.WeakSet[Optimizer],
        known_loaders: weakref.WeakSet[DataLoader],
    ) -> None:
        self._registry = registry
        self._stepped, self._drawn_from, self._known = stepped, drawn_from, known
        self._known_loaders = known_loaders
        self._reported_loaders: list[DataLoader] = []
        self._iterations: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        """Optimizers with the number of iterations in which they made a step, up to 2."""
        self.named_in_code: list[weakref.ref[Optimizer]] = []
        """Optimizers that the code of a given `state_dict` reaches, until the next capture shows its values."""
        self._searches, self._reported = 0, set[str]()
        self.untrained = UntrainedObjects(registry)

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
        if (what := self.untrained.found()) is not None:
            messages.append(("inventory", what))
        return messages

    def captured(self, state: CapturedState) -> list[str]:
        """Describe, once each, the optimizers that a `state_dict` only reads from: it holds far fewer values."""
        named, self.named_in_code = [reference() for reference in self.named_in_code], []
        held = {each.untyped_storage().data_ptr() for each in state.whole.values() if type(each) in PLAIN}
        room, messages = _values_in(state.states), list[str]()
        for optimizer in filter(None, named):
            kept = [each for values in optimizer.state.values() for each in _tensors_of(values)]
            is_held = any(type(each) in PLAIN and each.untyped_storage().data_ptr() in held for each in kept)
            if not is_held and room < MOST_READ * sum(local(each).numel() for each in kept if each.dim()):
                messages += self._unsaved(optimizer)
        new = [each for each in dict.fromkeys(messages) if each not in self._reported]
        self._reported.update(new)
        return new

    def _unsaved_loaders(self, loaders: Collection[Any]) -> Iterator[str]:
        while self._drawn_from:
            loader = self._drawn_from.pop()
            if loader.repeats_evaluation:
                continue
            self._known_loaders.add(loader)
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
            self.untrained.stepped(optimizer)
            self._iterations = {k: each for k, each in self._iterations.items() if each[0]() is not None}
            self._iterations[key] = reference, 1 if known() is not optimizer else count + 1
            if self._iterations[key][1] == 2:
                self._known.add(optimizer)
                yield optimizer

    def _missing(self, optimizer: Optimizer) -> Iterator[str]:
        given, name = self._registry.given, type(optimizer).__name__
        if not any(each is optimizer for each in self._registry.optimizers):
            if any(each is optimizer for each in optimizers_referred_to(given)):
                return
            if any(each is optimizer for each in optimizers_in_code(given)):
                self.named_in_code.append(weakref.ref(optimizer))
                return
            self.untrained.follow(optimizer)
            if self._trained_module(optimizer) is None:
                return
            yield from self._unsaved(optimizer)
        if has_scheduler(optimizer) and not any(_may_schedule(each, optimizer) for each in given.values()):
            yield (
                f"an LR scheduler changes the learning rate of {name} but is in no checkpoint: a resume resets "
                f"it. Give it to the session, Session({unused_keyword('scheduler', given)}=...)"
            )

    def _unsaved(self, optimizer: Optimizer) -> Iterator[str]:
        module = self._trained_module(optimizer)
        if module is not None and optimizer.state:  # of SGD without momentum, nothing is lost
            keyword = unused_keyword("optimizer", self._registry.given)
            yield (
                f"{type(optimizer).__name__} trains parameters of {module!r} but is in no checkpoint: a resume "
                f"resets its moments and learning rate. Give it to the session, Session({keyword}=...)"
            )

    def _trained_module(self, optimizer: Optimizer) -> str | None:
        """Return the keyword of a module that the optimizer trains."""
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        modules = self._registry.modules.items()
        return next((key for key, each in modules if any(id(p) in trained for p in each.parameters())), None)


class UntrainedObjects:
    """Finds given objects that nothing trains, while an optimizer trains that the session was not given."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._active: set[int] = set()
        """Identities of the given optimizers that made a step."""
        self.other: weakref.ref[Optimizer] | None = None
        """An optimizer that makes steps and was not given, until something is reported."""
        self._iterations = 0
        """Number of boundaries since `other` is known."""
        self._before: dict[int, list[Any]] = {}
        """Samples of the trainable parameters at the first of them, by `id`."""

    def stepped(self, optimizer: Optimizer) -> None:
        if any(each is optimizer for each in self._registry.optimizers):
            self._active.add(id(optimizer))

    def follow(self, other: Optimizer) -> None:
        """Compare from here on, because `other` makes steps and was not given."""
        if self.other is None and not self._before:
            self.other = weakref.ref(other)

    def found(self) -> str | None:
        """Describe, once, what was given and is not trained."""
        other = self.other() if self.other is not None else None
        if other is None:
            return None
        self._iterations += 1
        if self._iterations == 1:
            self._before = {id(p): _sample(p) for p in self._trainable()}
        if self._iterations not in (2, MOST_ITERATIONS):
            return None
        trained = {id(p): tuple(p.shape) for group in other.param_groups for p in group["params"]}
        is_last = self._iterations == MOST_ITERATIONS
        wholly = is_last and not self._active
        optimizers = [k for k, item in self._registry.objects.items() if self._is_idle(item, trained, wholly)]
        modules = [k for k, item in self._registry.modules.items() if self._is_unchanged(item, trained, wholly)]
        if not optimizers and not (modules and not self._registry.optimizers):
            self.other = None if is_last else self.other
            return None
        self.other = None
        idle = [f"{each} has made no step" for each in optimizers]
        idle += [f"no parameter of {each} has changed" for each in modules]
        return (
            f"{' and '.join(idle)}, but {type(other).__name__}, which the session was not given, trains "
            f"{len(trained)} tensors: checkpoints hold objects that are not trained. Give the session those that "
            "are: create it after the model was copied or wrapped and the optimizer was created"
        )

    def _trainable(self) -> Iterator[torch.Tensor]:
        for module in self._registry.modules.values():
            yield from (each for each in module.parameters() if each.requires_grad)
        for optimizer in self._registry.optimizers:
            yield from (each for group in optimizer.param_groups for each in group["params"])

    def _is_idle(self, item: Any, trained: Mapping[int, tuple[int, ...]], wholly: bool) -> bool:
        """Whether an optimizer is replaced by one that trains the same parameters, or copies of them."""
        optimizers = list(optimizers_in(item))
        if any(id(each) in self._active for each in optimizers):
            return False
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        parameters = [each for group in groups for each in group["params"]]
        if any(id(each) in trained for each in parameters):
            return True
        return self._have_not_changed(parameters) and (wholly or _have_copies(parameters, trained))

    def _is_unchanged(self, module: torch.nn.Module, trained: Mapping[int, tuple[int, ...]], wholly: bool) -> bool:
        parameters = [each for each in module.parameters() if each.requires_grad]
        return self._have_not_changed(parameters) and (wholly or _have_copies(parameters, trained))

    def _have_not_changed(self, parameters: Collection[torch.Tensor]) -> bool:
        return bool(parameters) and all(self._before.get(id(each)) == _sample(each) for each in parameters)


def _tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an optimizer keeps for a parameter."""
    if isinstance(values, Mapping):
        yield from (each for each in values.values() if isinstance(each, torch.Tensor))


def _values_in(state: Any) -> float:
    """Return how many values a state holds at most; infinite if it holds objects of unknown size."""
    if isinstance(state, torch.Tensor):
        return local(state).numel()
    if isinstance(state, Mapping):
        return sum(map(_values_in, state.values()))
    if isinstance(state, (list, tuple)):
        return sum(map(_values_in, state))
    if isinstance(state, (str, bytes, bytearray)):  # perhaps an encoded state
        return len(state)
    if state is None or isinstance(state, (bool, int, float)):
        return 1
    return getattr(state, "size", math.inf) if hasattr(state, "dtype") else math.inf


def _have_copies(parameters: Collection[torch.Tensor], trained: Mapping[int, tuple[int, ...]]) -> bool:
    """Whether `trained` has shapes as those of all parameters."""
    return not Counter(tuple(each.shape) for each in parameters) - Counter(trained.values())


def _sample(parameter: torch.Tensor) -> list[Any]:
    """Return the version and, in host memory, a value: a replayed graph and `.data` do not change the version."""
    values = local(parameter).detach()
    first = values[(0,) * values.ndim].item() if values.numel() and values.device.type == "cpu" else None
    return [version_of(parameter), repr(first)]


def _may_schedule(item: Any, optimizer: Optimizer) -> bool:
    """Whether an object may hold the state of the optimizer's scheduler, as one of another library may."""
    if isinstance(item, (LRScheduler, ReduceLROnPlateau)):
        scheduled = list(optimizers_in(item.optimizer))
        return not scheduled or any(each is optimizer for each in scheduled)
    is_other = isinstance(item, _WITHOUT_SCHEDULER) or is_generator(item) or is_accelerator(item)
    is_loader = inspect.getattr_static(item, "dataset", None) is not None  # runs no property of the script
    return not (is_other or is_optimizer(item) or is_loader)
