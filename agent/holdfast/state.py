"""The objects of a training loop, captured together at one instant, and put back to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.capture import Watch, Watched
from holdfast.errors import IncompatibleCheckpoint
from holdfast.gradients import Gradients, Parameters, put_back
from holdfast.kinds import Names, Shapes, Stateful, part_of
from holdfast.rng import OwnGenerator, is_generator, restore_rng, rng_state
from holdfast.tree import Encoder, Tree, decode

logger = logging.getLogger("holdfast")

RESERVED = ("rng", "session", "gradients")
"""Entries of a checkpoint that are the session's own."""


@dataclass(slots=True)
class Captured:
    """The state of one instant, as references to live tensors."""

    trees: dict[str, Tree] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By name; tensors that share memory (tied weights) once, under the first name met."""
    deferred: set[str] = field(default_factory=set)
    """Names of those that only an optimizer's step changes; the others must be copied at once."""
    frozen: set[str] = field(default_factory=set)
    """Names of those that no optimizer trains: parameters which, as a rule, never change."""
    gradients: Callable[[], list[torch.Tensor]] = list
    """Those that there are, at the time of the call."""
    structure: object = field(default_factory=object)
    """The same object as last time when names, dtypes, shapes and addresses are: what was laid out still fits."""


class Registry:
    """The objects of a session, by the keyword they were given under."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.given = dict(objects)
        self.objects = {keyword: _stateful(keyword, item) for keyword, item in objects.items()}
        self.modules = {k: o for k, o in self.objects.items() if isinstance(o, torch.nn.Module)}
        self.optimizers = {k: o for k, o in self.objects.items() if isinstance(o, torch.optim.Optimizer)}
        self.gradients = Gradients()
        self._parts = {keyword: part_of(keyword, item) for keyword, item in self.objects.items()}
        self._warned: set[str] = set()
        self._known: _Known | None = None
        self._structure: tuple[object, ...] = ()

    def capture(self, session: Mapping[str, Any], *, gradients: bool = True) -> Captured:
        """References to all state, the session's own among it. TypeError names what cannot be stored.

        Without `gradients` it is what a checkpoint of most loops will hold.
        """
        known = self._known
        if known is None or not known.watched.unchanged():
            known = self._known = self._walk()
        encoder, trees = Encoder(known.step_storages, self._warned), {}
        for keyword, part in self._parts.items():
            if (watch := known.watches.get(keyword)) is None:
                trees[keyword] = part.encode(encoder, known.names)
            else:
                trees[keyword] = part.encode_again(known.trees[keyword], watch, encoder)
        trees["session"] = encoder.encode("session", session)
        trees["rng"] = encoder.encode("rng", rng_state())
        if gradients and (pending := self.gradients.pending(known.parameters)):
            trees["gradients"] = self._encode_gradients(encoder, pending)
        return Captured(
            trees=trees,
            tensors={**known.tensors, **encoder.tensors},
            deferred=known.deferred | encoder.deferred,
            frozen=known.frozen,
            gradients=self._gradients,
            structure=self._structured(known, encoder),
        )

    def check(self, trees: Mapping[str, Tree], shapes: Shapes) -> None:
        """IncompatibleCheckpoint, naming keyword and tensor, when a checkpoint does not fit these objects."""
        for keyword, part in self._parts.items():
            if keyword not in trees:
                raise IncompatibleCheckpoint(f"the checkpoint holds no {keyword!r}; it has {', '.join(trees)}")
            part.check(trees[keyword], shapes)

    def apply(self, trees: Mapping[str, Tree], tensors: Mapping[str, torch.Tensor]) -> None:
        """Put a checkpoint's state into the objects; the random state last, since loading may draw from it."""
        for keyword, part in self._parts.items():
            part.load(trees[keyword], tensors)
        put_back(self.modules, decode(trees.get("gradients", {}), tensors, copy=True))
        restore_rng(decode(trees["rng"], tensors, copy=True))

    def make_room(self) -> None:
        """Touch the memory that `apply` will copy into, where that was never used: it can be done before."""
        for part in self._parts.values():
            part.make_room()

    def _walk(self) -> _Known:
        """Everything that can be watched from here on, in full."""
        watches = {keyword: watch for keyword, part in self._parts.items() if (watch := part.watch())}
        watched = Watched(watches.values())
        if not watched.steady:
            watches, watched = {}, Watched([])
        names, step_storages = self._parameter_names(), self._step_storages()
        encoder = Encoder(step_storages, self._warned)
        return _Known(
            watched=watched,
            watches=watches,
            trees={keyword: self._parts[keyword].encode(encoder, names) for keyword in watches},
            tensors=encoder.tensors,
            deferred=encoder.deferred,
            frozen=self._frozen(encoder.tensors),
            names=names,
            step_storages=step_storages,
            parameters=[(k, n, p) for k, module in self.modules.items() for n, p in module.named_parameters()],
        )

    def _encode_gradients(self, encoder: Encoder, pending: Parameters) -> Tree:
        trees: dict[str, dict[str, Tree]] = {}
        for keyword, name, parameter in pending:
            path = f"{keyword}.grad.{name}"
            gradient = parameter.grad
            assert gradient is not None
            if gradient.layout == torch.strided:
                trees.setdefault(keyword, {})[name] = encoder.encode(path, gradient)
            elif path not in self._warned:
                self._warned.add(path)
                logger.warning(
                    "%s is sparse: a resume lacks it, where it is not applied within its iteration", path
                )
        return trees

    def _structured(self, known: _Known, loose: Encoder) -> object:
        """The same object as long as `known` and the rest's names, dtypes and shapes are the same."""
        if loose.deferred:
            return object()  # what is copied later must be the same tensors, and these are found anew each time
        signature = known, [(name, t.dtype, t.shape, t.device) for name, t in loose.tensors.items()]
        if not self._structure or self._structure[0] is not known or self._structure[1] != signature[1]:
            self._structure = signature
        return self._structure

    def _frozen(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Parameters that need no gradient, of modules that an optimizer trains in part (an average of weights
        needs none either, but changes)."""
        trained = {id(p) for o in self.optimizers.values() for group in o.param_groups for p in group["params"]}
        still = set()
        for module in self.modules.values():
            parameters = list(module.parameters())
            if any(id(parameter) in trained for parameter in parameters):
                still |= set(_storages(p for p in parameters if not p.requires_grad and id(p) not in trained))
        return {name for name, t in tensors.items() if t.untyped_storage().data_ptr() in still}

    def _gradients(self) -> list[torch.Tensor]:
        parameters = (parameter for module in self.modules.values() for parameter in module.parameters())
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _parameter_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for keyword, module in self.modules.items():
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), name if len(self.modules) == 1 else f"{keyword}.{name}")
        return names

    def _step_storages(self) -> set[int]:
        """Storages that only `optimizer.step` writes to: parameters of modules, whoever trains them."""
        if not self.optimizers:
            return set()
        return {storage for module in self.modules.values() for storage in _storages(module.parameters())}


@dataclass(eq=False, slots=True, kw_only=True)
class _Known:
    """What a walk over the watched objects found; it holds until the watch says otherwise."""

    watched: Watched
    watches: dict[str, Watch]
    trees: dict[str, Tree]
    tensors: dict[str, torch.Tensor]
    deferred: set[str]
    frozen: set[str]
    names: Names
    step_storages: set[int]
    parameters: Parameters


def _stateful(keyword: str, item: Any) -> Stateful:
    """What a session keeps of an object that it was given. TypeError or ValueError when it cannot."""
    if keyword in RESERVED:
        raise ValueError(f"Session({keyword}=...): this name is taken in checkpoints; give it another")
    if is_generator(item):
        return OwnGenerator(item)
    if not isinstance(item, Stateful):
        raise TypeError(
            f"Session({keyword}=...): {type(item).__name__} has no state_dict() and load_state_dict(). "
            f"Put plain values into holdfast.Variables, or drop the keyword."
        )
    # a compiled module shares everything with the plain one inside, whose names do not depend on compiling
    inside: Stateful = getattr(item, "_orig_mod", item)
    return inside


def _storages(tensors: Iterator[torch.Tensor]) -> Iterator[int]:
    return (tensor.untyped_storage().data_ptr() for tensor in tensors)
