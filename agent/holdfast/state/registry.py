"""The objects of a training loop, captured together at one instant, and put back to it."""

from __future__ import annotations

import functools
import itertools
import logging
from collections import ChainMap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint
from holdfast.format.manifest import MANIFEST, Shard
from holdfast.format.resharding import Region
from holdfast.state.adapters import Names, part_of
from holdfast.state.capture import Watch, Watched
from holdfast.state.encoder import Encoder, Trained
from holdfast.state.gradients import (
    Gradients,
    Parameters,
    fully_sharded,
    put_back,
    require_gradients,
    require_synchronized,
)
from holdfast.state.replica_checksum import ReplicaChecksum
from holdfast.state.rng import OwnGenerator, branch_rng, require_rng, restore_rng, rng_state
from holdfast.state.round_trip import RoundTrip, as_stored
from holdfast.state.sharding import is_possible, is_sharded, like, local, place_of, shared_out, storages
from holdfast.state.tree import Live, Shapes, Tree, decode, require_readable, trained_in
from holdfast.state.wrappers import accepted, has_unseen_steps, optimizers_in
from holdfast.torch_internals import kept_the_same, unsupported

logger = logging.getLogger("holdfast")


@dataclass(slots=True)
class Captured:
    """The state of one instant, as references to live tensors."""

    trees: dict[str, Tree] = field(default_factory=dict)
    states: Mapping[str, Any] = field(default_factory=dict)
    """What the trees of objects that are walked in full were made of, by keyword."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """By name; tensors that share memory (tied weights) once, under the first name met. Of what several ranks
    have, those that this rank stores."""
    deferred: set[str] = field(default_factory=set)
    """Names of those that only an optimizer's step changes; the others must be copied at once."""
    kept: set[str] = field(default_factory=set)
    """Names of those among them that an optimizer keeps beside the parameters."""
    frozen: set[str] = field(default_factory=set)
    """Names of those that no optimizer trains: parameters which, as a rule, never change."""
    structure: object = field(default_factory=object)
    """The same object as last time when names, dtypes, shapes and addresses are: what was laid out still fits."""
    shards: dict[str, Shard] = field(default_factory=dict)
    """Of those that are this rank's part of a larger one: where they lie in it."""
    whole: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """By name all that the trees refer to: those that another rank stores as well, sharded ones as the script has
    them."""
    round_trip: RoundTrip | None = None
    """What the persisting thread compares with what is about to be written; None once one comparison has held."""
    own: set[str] = field(default_factory=set)
    """Names of those that may be otherwise on other ranks, which store theirs under the same names."""
    alike: dict[str, str] = field(default_factory=dict)
    """What other ranks that know it, too, must say the same of."""


class Registry:
    """The objects of a session, by the keyword they were given under, on one rank of a job."""

    def __init__(self, objects: Mapping[str, Any], rank: int = 0, world_size: int = 1) -> None:
        self._rank, self._world_size = rank, world_size
        self.given = dict(objects)
        self.objects = {keyword: accepted(keyword, item) for keyword, item in objects.items()}
        self.modules = {k: o for k, o in self.objects.items() if isinstance(o, torch.nn.Module)}
        self.optimizers = list(dict.fromkeys(o for item in self.objects.values() for o in optimizers_in(item)))
        """Those whose steps it sees: given ones, and those inside a given wrapper."""
        self.gradients = Gradients()
        self._parts = {keyword: part_of(keyword, item) for keyword, item in self.objects.items()}
        self._warned: set[str] = set()
        self._known: _Known | None = None
        self._structure: tuple[object, ...] = ()
        self.replicated = self._replicated() if world_size > 1 else {}
        """What keeps modules among them the same on all ranks, by the name of its first parameter."""

    def gaps(self) -> list[str]:
        """In words: what of the promises to the script this torch does not allow for."""
        return unsupported(distributed=self._world_size > 1)

    def stored_by_each_rank(self) -> list[str]:
        """In words: the modules of which each of several ranks stores a copy of its own."""
        if self._world_size == 1:
            return []
        held = {id(p) for ddp in self.replicated.values() for p in ddp.parameters()}
        trained = {id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]} - held
        found = []
        for keyword, module in self.modules.items():
            parameters = list(module.parameters())
            if any(id(p) in trained for p in parameters) and not any(map(is_sharded, parameters)):
                found.append(
                    f"{keyword}: each of the {self._world_size} ranks stores all of it, since it is not sharded "
                    "and not in a DistributedDataParallel that the session was given. Where the script has one, "
                    f"make it before the session and give it, Session({keyword}=...): its parameters are then "
                    "stored once, and on three ranks or more the losses after a resume are the same to the last "
                    "bit"
                )
        return found

    def capture(self, session: Mapping[str, Any], *, gradients: bool = True) -> Captured:
        """References to all state, the session's own among it. TypeError names what cannot be stored.

        Without `gradients` it is what a checkpoint of most loops will hold.
        """
        if self._known is None or not self._known.watched.unchanged():
            self._known = self._walk()
        known = self._known
        encoder, trees = self._encoder(known.step_storages, known.shared_storages, known.encoder), {}
        states = {}
        for keyword, part in self._parts.items():
            if (watch := known.watches.get(keyword)) is None:
                states[keyword] = part.state()
                trees[keyword] = part.encode(states[keyword], encoder, known.names)
            else:
                trees[keyword] = part.encode_again(known.trees[keyword], watch, encoder)
        trees["session"] = encoder.encode("session", session)
        trees["rng"] = encoder.encode("rng", rng_state())
        if gradients and (pending := self.gradients.pending(known.parameters)):
            trees["gradients"] = self._encode_gradients(encoder, pending)
        if gradients and is_possible():
            watched = known.watches.keys() >= self.modules.keys()
            require_synchronized(known.fully_sharded if watched else fully_sharded(self.modules))
        captured = Captured(
            trees=trees,
            states=states,
            tensors=ChainMap(self._stored(encoder), known.tensors),
            deferred=known.encoder.deferred | encoder.deferred if encoder.deferred else known.encoder.deferred,
            kept=known.encoder.kept | encoder.kept if encoder.kept else known.encoder.kept,
            frozen=known.frozen,
            structure=self._structured(known, encoder),
            shards={**known.encoder.places, **encoder.places},
            whole=ChainMap(
                encoder.sharded, known.encoder.sharded, encoder.tensors, known.encoder.tensors
            ),  # the first that has a name gives the tensor
        )
        if self._world_size > 1:
            names = known.encoder.shared | known.encoder.sharded.keys() | encoder.shared | encoder.sharded.keys()
            captured.own = {name for name in captured.tensors if name not in names}
            witnesses = [known.witness, _witness(encoder)] if gradients else []
            captured.alike = {f"replicas {each.key}": each.seen() for each in witnesses}
        return captured

    def round_trip(self, captured: Captured) -> RoundTrip:
        """What tells whether these objects get back what was just captured of them."""
        shapes, refusal = shapes_of(captured), None
        try:
            self.require_fit(as_stored(captured.trees), shapes)  # that they decode is shown by `RoundTrip`
        except Exception as error:  # a resume would end with it
            refusal = f"{type(error).__name__}: {error}"
        # asked again, an object may say something else: the time that has passed
        states = {
            k: captured.states[k] if k in captured.states else part.state() for k, part in self._parts.items()
        }
        return RoundTrip(states, shapes, refusal, modules=self.modules)

    def check(self, trees: Mapping[str, Tree], shapes: Shapes) -> None:
        """IncompatibleCheckpoint, naming keyword and tensor, when a checkpoint does not fit these objects.

        DamagedCheckpoint when its state cannot be decoded.
        """
        readable = {keyword: require_readable(keyword, tree, shapes) for keyword, tree in trees.items()}
        try:
            if "rng" in readable:
                require_rng(readable["rng"])
            require_gradients(self.modules, readable.get("gradients", {}))
        except ValueError as error:
            raise DamagedCheckpoint(MANIFEST, f"of the random state or the gradients: {error}") from error
        self.require_fit(trees, shapes)

    def require_fit(self, trees: Mapping[str, Tree], shapes: Shapes) -> None:
        """The same of trees that are known to decode: those of this session itself."""
        for keyword, part in self._parts.items():
            if keyword not in trees:
                raise IncompatibleCheckpoint(f"the checkpoint holds no {keyword!r}; it has {', '.join(trees)}")
            part.check(trees[keyword], shapes)
        live = Live({}, self._trained())
        for tree in (each for keyword in self.objects for each in trained_in(trees[keyword])):
            parameter, name = live.parameter(tree), tree["$tensor"]
            if parameter is not None and (str(parameter.dtype), tuple(parameter.shape)) != shapes[name]:
                raise IncompatibleCheckpoint(
                    f"{name}: {tuple(parameter.shape)} of {parameter.dtype} in the optimizer, "
                    f"{shapes[name][1]} of {shapes[name][0]} in the checkpoint"
                )

    def regions(self, trees: Mapping[str, Tree], shapes: Shapes) -> dict[str, Region]:
        """What this rank needs of those tensors of a checkpoint that are sharded here."""
        return {
            name: Region(place_of(name, tensor).offsets, tuple(local(tensor).shape))
            for name, tensor in self._sharded(trees, shapes).items()
        }

    def apply(
        self,
        trees: Mapping[str, Tree],
        tensors: Mapping[str, torch.Tensor],
        shapes: Shapes = MappingProxyType({}),
        *,
        adopt: bool = True,
    ) -> None:
        """Put a checkpoint's state into the objects; the random state last, since loading may draw from it.

        Of what is sharded here `tensors` has this rank's part, as `regions` gave it, and `shapes` the whole. With
        `adopt` an optimizer may go on with their memory.
        """
        if sharded := self._sharded(trees, shapes):
            parts = {name: like(tensor, tensors[name]) for name, tensor in sharded.items()}
            tensors = {**tensors, **parts}
        live = Live(self._held(trees), self._trained())
        for keyword, part in self._parts.items():
            part.load(trees[keyword], tensors, live=live, adopt=adopt)
        put_back(self.modules, decode(trees.get("gradients", {}), tensors, copy=True))
        restore_rng(decode(trees["rng"], tensors, copy=True))

    def branch_rng(self, key: int, differed: Collection[str]) -> None:
        """Begin random numbers of its own on a rank that the checkpoint had none for.

        Of what `differed` among ranks alone, entries of `rng` and keywords: what all ranks drew alike (under
        tensor parallelism, for a decision in common) they must go on drawing alike.
        """
        branch_rng(key, {name.removeprefix("rng.") for name in differed if name.startswith("rng.")})
        for keyword, item in self.objects.items():
            if keyword in differed and isinstance(item, OwnGenerator):
                item.branch(key)

    def make_room(self) -> None:
        """Touch the memory that `apply` will copy into, where that was never used: it can be done before."""
        for part in self._parts.values():
            part.make_room()

    def _walk(self) -> _Known:
        """Everything that can be watched from here on, in full."""
        if is_possible():
            for module in self.modules.values():
                module.state_dict()  # `fully_shard` puts its parameters back, which an evaluation leaves gathered
        watches = {keyword: watch for keyword, part in self._parts.items() if (watch := part.watch())}
        watched = Watched(watches.values())
        if not watched.steady:
            watches, watched = {}, Watched([])
        names, step_storages = self._parameter_names(), self._step_storages()
        shared_storages = {each for ddp in self.replicated.values() for each in storages(kept_the_same(ddp))}
        encoder = self._encoder(step_storages, shared_storages)
        trees = {k: self._parts[k].encode(self._parts[k].state(), encoder, names) for k in watches}
        tensors = self._stored(encoder)
        return _Known(
            watched=watched,
            watches=watches,
            trees=trees,
            encoder=encoder,
            tensors=tensors,
            witness=_witness(encoder),
            frozen=self._frozen(tensors),
            names=names,
            step_storages=step_storages,
            shared_storages=shared_storages,
            parameters=[(k, n, p) for k, module in self.modules.items() for n, p in module.named_parameters()],
            fully_sharded=fully_sharded(self.modules),
        )

    def _replicated(self) -> dict[str, DistributedDataParallel]:
        """Those among the given modules that span all ranks."""
        if not torch.distributed.is_initialized():
            return {}
        names, world_size = self._parameter_names(), torch.distributed.get_world_size()
        given = (item.modules() for item in self.given.values() if isinstance(item, torch.nn.Module))
        found = {
            names[id(first)]: each
            for each in itertools.chain.from_iterable(given)
            if isinstance(each, DistributedDataParallel)
            and each.process_group.size() == world_size
            and (first := next(each.parameters(), None)) is not None
        }
        return dict(sorted(found.items()))  # all ranks ask them for the same things, in the same order

    def _encoder(
        self, step_storages: Collection[int], shared_storages: Collection[int], known: Encoder | None = None
    ) -> Encoder:
        @functools.cache
        def trained() -> Trained:
            within = {id(parameter) for module in self.modules.values() for parameter in module.parameters()}
            places = (
                (id(p), (key, number)) for key, found in self._trained().items() for number, p in enumerate(found)
            )
            return {each: place for each, place in places if each not in within}

        return Encoder(step_storages, self._warned, shared_storages, trained=trained, known=known)

    def _trained(self) -> dict[str, list[torch.Tensor]]:
        """What optimizers train, in their order, by their keyword."""
        return {
            keyword: [p for each in optimizers_in(item) for group in each.param_groups for p in group["params"]]
            for keyword, item in self.objects.items()
        }

    def _held(self, trees: Mapping[str, Tree]) -> dict[str, torch.Tensor]:
        """The tensors of modules, by the names of those of a checkpoint that are copied into them."""
        found: dict[str, torch.Tensor] = {}
        for keyword, module in self.modules.items():
            own: dict[str, torch.Tensor] = dict(module.named_buffers(remove_duplicate=False))
            own.update(module.named_parameters(remove_duplicate=False))
            for entries in (trees[keyword]["state"], trees[keyword]["buffers"]):
                for name, tree in entries.items():
                    if name in own and isinstance(tree, dict) and "$tensor" in tree and not is_sharded(own[name]):
                        found[tree["$tensor"]] = own[name]
        return found

    def _stored(self, encoder: Encoder) -> dict[str, torch.Tensor]:
        """Of what was encoded, what this rank stores."""
        if self._world_size == 1:
            return encoder.tensors
        sizes = [(name, encoder.tensors[name].nbytes) for name in encoder.shared]
        elsewhere = {name for name, rank in shared_out(sizes, self._world_size).items() if rank != self._rank}
        elsewhere |= encoder.elsewhere
        return {name: t for name, t in encoder.tensors.items() if name not in elsewhere}

    def _sharded(self, trees: Mapping[str, Tree], shapes: Shapes) -> dict[str, torch.Tensor]:
        """Tensors of the script's that are sharded, by the names of those in a checkpoint that go the same way."""
        if not is_possible():
            return {}
        encoder, names = Encoder((), self._warned), self._parameter_names()
        for part in self._parts.values():
            part.encode(part.state(), encoder, names)
        found = {n: t for n, t in encoder.sharded.items() if n in shapes and shapes[n][1] == tuple(t.shape)}
        for keyword, part in self._parts.items():
            if keyword in trees:
                found |= part.sharded(trees[keyword], shapes)
        for keyword, gradients in trees.get("gradients", {}).items():
            parameters = dict(self.modules[keyword].named_parameters()) if keyword in self.modules else {}
            for name, tree in gradients.items():
                if name in parameters and is_sharded(parameters[name]) and "$tensor" in tree:
                    found[tree["$tensor"]] = parameters[name]
        return found

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
        trained = {id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]}
        still = set()
        for module in self.modules.values():
            parameters = list(module.parameters())
            if any(id(parameter) in trained for parameter in parameters):
                still |= set(storages(p for p in parameters if not p.requires_grad and id(p) not in trained))
        return {name for name, t in tensors.items() if t.untyped_storage().data_ptr() in still}

    def _parameter_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for keyword, module in self.modules.items():
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), name if len(self.modules) == 1 else f"{keyword}.{name}")
        return names

    def _step_storages(self) -> set[int]:
        """Storages that only `optimizer.step` writes to: the parameters of modules, where all steps are seen."""
        if not self.optimizers or any(map(has_unseen_steps, self.objects.values())):
            return set()
        return {storage for module in self.modules.values() for storage in storages(module.parameters())}


@dataclass(eq=False, slots=True, kw_only=True)
class _Known:
    """What a walk over the watched objects found; it holds until the watch says otherwise."""

    watched: Watched
    watches: dict[str, Watch]
    trees: dict[str, Tree]
    encoder: Encoder
    tensors: dict[str, torch.Tensor]
    witness: ReplicaChecksum
    frozen: set[str]
    names: Names
    step_storages: set[int]
    shared_storages: set[int]
    parameters: Parameters
    fully_sharded: list[tuple[str, torch.nn.Module]]


def shapes_of(captured: Captured) -> Shapes:
    """Dtype and global shape of the tensors of its trees, as `restore.shapes` has them of a checkpoint."""
    return {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in captured.whole.items()}


def _witness(encoder: Encoder) -> ReplicaChecksum:
    alike = encoder.shared | encoder.repeated
    return ReplicaChecksum({name: encoder.tensors[name] for name in alike}, encoder.places)
