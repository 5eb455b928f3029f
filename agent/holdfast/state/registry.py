"""Capture of the objects of a training loop at one instant, and their restore."""

from __future__ import annotations

import functools
import itertools
import logging
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from holdfast.format.manifest import Manifest, Shard
from holdfast.format.shards import is_module
from holdfast.state.adapter import Names
from holdfast.state.capture import Watch, WatchedState
from holdfast.state.encoder import Encoder, Trained
from holdfast.state.gradients import (
    GradientTracker,
    Parameters,
    fully_sharded,
    require_synchronized,
)
from holdfast.state.loading import LoadableObjects
from holdfast.state.rng import rng_state
from holdfast.state.round_trip import RoundTrip, as_stored
from holdfast.state.sharding import (
    ReplicaChecksum,
    assign_to_ranks,
    is_sharded,
    is_sharding_in_use,
    storages,
)
from holdfast.state.tree import Shapes, Tree
from holdfast.state.wrappers import (
    given_modules,
    has_unseen_steps,
    is_optimizer,
    is_unaware_of_ranks,
    optimizers_in,
)
from holdfast.torch_internals import replicated_parameters, unsupported

logger = logging.getLogger("holdfast")
LARGE_BYTES = 4 << 20
"""A smaller tensor of host state is copied in a millisecond."""


@dataclass(slots=True)
class CapturedState:
    """The state of one instant, as references to live tensors."""

    trees: dict[str, Tree] = field(default_factory=dict)
    states: Mapping[str, Any] = field(default_factory=dict)
    """The `state_dict()` of each object that is encoded in full every time, by keyword."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that this rank stores, by name; those that share memory (tied weights) once, by their first name."""
    deferred: set[str] = field(default_factory=set)
    """Names of tensors that only an optimizer step changes. The others must be copied at the boundary."""
    optimizer_state: set[str] = field(default_factory=set)
    """Names of the `deferred` tensors that are an optimizer's own state, such as moments."""
    host_state: Collection[str] = ()
    """Names of the large tensors of objects that are neither modules nor optimizers."""
    frozen: set[str] = field(default_factory=set)
    """Names of parameters that no optimizer trains. They rarely change."""
    structure: object = field(default_factory=object)
    """Identity of the names, dtypes, shapes and addresses: the same object while an existing layout fits."""
    shards: dict[str, Shard] = field(default_factory=dict)
    """Place of this rank's part within each sharded tensor, by name."""
    whole: ChainMap[str, torch.Tensor] = field(default_factory=ChainMap)
    """All tensors of the trees by name, also what another rank stores; sharded ones as the script has them."""
    round_trip: RoundTrip | None = None
    """Check for the writer thread to run on what it is about to write; `None` once one check has passed."""
    rank_local: set[str] = field(default_factory=set)
    """Names of tensors that every rank stores for itself under the same name."""
    must_match: dict[str, str] = field(default_factory=dict)
    """Values that must be equal on all ranks that report the same key."""
    precedes_updates: bool = False
    """No optimizer has made an update yet. Most create their state in the first one."""


class Registry(LoadableObjects):
    """The objects of a session by keyword, on one rank of a job."""

    def __init__(
        self,
        objects: Mapping[str, Any],
        rank: int = 0,
        world_size: int = 1,
        gather: Callable[[bytes], list[bytes]] | None = None,
    ) -> None:
        super().__init__(objects)
        self._rank, self._world_size = rank, world_size
        if gather is not None and world_size > 1 and any(gather(b"stages" if self.given_stages else b"")):
            from holdfast.state.stages import agree_on_stages  # only for pipelines

            self.stages = agree_on_stages(self.given_stages, self._adapters, rank, gather)
        self._sharing: Sequence[int] = range(world_size) if self.stages is None else self.stages.group
        """The ranks that share tensors with this one: all, or those with the same stages of a pipeline."""
        self.optimizers = list(dict.fromkeys(o for item in self.objects.values() for o in optimizers_in(item)))
        """Optimizers whose step hooks run: given ones, and those inside a given wrapper."""
        self._updated = {k for k, item in self.objects.items() if k in self.modules or is_optimizer(item)}
        """Keywords of the objects that a forward pass or an optimizer's step changes."""
        self.gradients = GradientTracker()
        self._known: _WatchedEncoding | None = None
        self._structure: tuple[object, ...] = ()
        self.replicated = self._replicated() if world_size > 1 else {}
        """DistributedDataParallel modules that span all ranks, by the name of their first parameter."""

    def limitations(self) -> list[str]:
        """Describe the guarantees that this version of torch does not allow."""
        return [*unsupported(distributed=self._world_size > 1), *(self.stages.limitations if self.stages else ())]

    def stored_by_each_rank(self) -> Iterator[tuple[Literal["info", "warning"], str]]:
        """Describe the modules of which every rank stores its own copy."""
        if self._world_size == 1:
            return
        held = {id(p) for ddp in self.replicated.values() for p in ddp.parameters()}
        trained = {id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]} - held
        for keyword, module in self.modules.items():
            parameters = list(module.parameters())
            if self.stages is not None and keyword in self.stages.keywords:
                continue
            if any(id(p) in trained for p in parameters) and not any(map(is_sharded, parameters)):
                copies = f"{keyword}: each of the {self._world_size} ranks stores a full copy"
                if is_unaware_of_ranks():
                    yield (
                        "warning",
                        f"{copies} and trains it alone, unless the script averages gradients: Accelerate runs as "
                        "one process, so it does not wrap models in DistributedDataParallel. On CPUs, set "
                        "ACCELERATE_USE_CPU=1 before the start (or Accelerator(cpu=True), for a Trainer of "
                        "Transformers TrainingArguments(use_cpu=True))",
                    )
                    continue
                yield (
                    "info",
                    f"{copies}, because it is not sharded and the session was not given a "
                    "DistributedDataParallel that contains it. If the script has one, create it before the "
                    f"session and pass it as Session({keyword}=...): then its parameters are stored once, and on "
                    "three ranks or more the losses after a resume are equal to the last bit. If it has none, "
                    "the ranks train separate models, unless the script averages gradients",
                )

    @property
    def sees_updates(self) -> bool:
        """Whether there are optimizers, and all of their steps run hooks."""
        return bool(self.optimizers) and not any(map(has_unseen_steps, self.objects.values()))

    def capture(self, session: Mapping[str, Any], *, gradients: bool = True) -> CapturedState:
        """Return references to all state, including the session's own.

        Without `gradients`, it is what a checkpoint of most loops holds.

        Raises:
            TypeError: an object cannot be stored; names its path.
        """
        if self._known is None or not self._known.watched.unchanged():
            self._known = self._walk()
        known = self._known
        encoder, trees = self._encoder(known.step_storages, known.shared_storages, known.encoder), {}
        states, host_state = {}, list[str]()
        for keyword, adapter in self._adapters.items():
            if (watch := known.watches.get(keyword)) is None:
                states[keyword], count = adapter.state(), len(encoder.tensors)
                trees[keyword] = adapter.encode(states[keyword], encoder, known.names)
                if keyword not in self._updated:
                    host_state += itertools.islice(encoder.tensors, count, None)
            else:
                trees[keyword] = adapter.encode_again(known.trees[keyword], watch, encoder)
        trees["session"] = encoder.encode("session", session)
        trees["rng"] = encoder.encode("rng", rng_state())
        if gradients and (pending := self.gradients.pending(known.parameters)):
            trees["gradients"] = self._encode_gradients(encoder, pending)
        if gradients and is_sharding_in_use():
            watched = known.watches.keys() >= self.modules.keys()
            require_synchronized(known.fully_sharded if watched else fully_sharded(self.modules))
        captured = CapturedState(
            trees=trees,
            states=states,
            tensors=ChainMap(self._stored(encoder), known.tensors),
            deferred=known.encoder.deferred | encoder.deferred if encoder.deferred else known.encoder.deferred,
            optimizer_state=(
                known.encoder.optimizer_state | encoder.optimizer_state
                if encoder.optimizer_state
                else known.encoder.optimizer_state
            ),
            host_state=[name for name in host_state if encoder.tensors[name].nbytes >= LARGE_BYTES],
            frozen=known.frozen,
            structure=self._structured(known, encoder),
            shards={**known.encoder.places, **encoder.places},
            whole=ChainMap(encoder.sharded, known.encoder.sharded, encoder.tensors, known.encoder.tensors),
        )
        if self._world_size > 1:
            names = known.encoder.shared | known.encoder.sharded.keys() | encoder.shared | encoder.sharded.keys()
            captured.rank_local = {name for name in captured.tensors if name not in names}
            witnesses = [known.witness, _witness(encoder)] if gradients else []
            captured.must_match = {f"replicas {each.key}": each.current_digest() for each in witnesses}
        return captured

    def localized(self, manifest: Manifest) -> Manifest:
        """Return a manifest as this rank sees it: of ranks with different stages, the entries that it has here.

        Raises:
            IncompatibleCheckpoint: no rank of this job has an entry of the checkpoint.
        """
        if self.stages is None and not self._has_parts(manifest):
            return manifest
        from holdfast.state.stage_selection import localized  # only where ranks hold different names

        return localized(manifest, self._rank, self.modules, self._adapters, self.stages)

    def _has_parts(self, manifest: Manifest) -> bool:
        """Return whether ranks hold modules with other entries than rank 0, as stages of a pipeline have."""
        for trees in manifest.rank_states.values():
            for keyword in self.modules.keys() & trees.keys():
                first: Any = manifest.state.get(keyword)
                other: Any = trees[keyword]
                if not (is_module(first) and is_module(other)) or first["state"].keys() != other["state"].keys():
                    return True
        return False

    def round_trip(self, captured: CapturedState) -> RoundTrip:
        """Return a check that the objects would get back what `captured` holds."""
        shapes, refusal = shapes_of(captured), None
        try:
            self.require_fit(as_stored(captured.trees), shapes)  # `RoundTrip` checks that they decode
        except Exception as error:  # a resume would fail with this error
            refusal = f"{type(error).__name__}: {error}"
        # a second call of state_dict() may differ, for example in elapsed time
        states = {
            k: captured.states[k] if k in captured.states else adapter.state()
            for k, adapter in self._adapters.items()
        }
        return RoundTrip(states, shapes, refusal, modules=self.modules)

    def _walk(self) -> _WatchedEncoding:
        """Encode in full all objects that can be watched from here on."""
        if is_sharding_in_use():
            for module in self.modules.values():
                module.state_dict()  # makes `fully_shard` reshard parameters that an evaluation left gathered
        watches = {keyword: watch for keyword, adapter in self._adapters.items() if (watch := adapter.watch())}
        watched = WatchedState(watches.values())
        if not watched.is_watchable:
            watches, watched = {}, WatchedState([])
        names, step_storages = self._parameter_names(), self._step_storages()
        shared_storages = {
            each for ddp in self.replicated.values() for each in storages(replicated_parameters(ddp))
        }
        if self.stages is not None:
            shared_storages.update(self.stages.storages(self.modules))
        encoder = self._encoder(step_storages, shared_storages)
        trees = {k: self._adapters[k].encode(self._adapters[k].state(), encoder, names) for k in watches}
        tensors = self._stored(encoder)
        return _WatchedEncoding(
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
        """Find the given DistributedDataParallel modules that span all ranks, or all with the same stages."""
        if not torch.distributed.is_initialized():
            return {}
        names, ranks = self._parameter_names(), list(self._sharing)
        parts = [part for item in self.given_stages.values() for part in given_modules(item) or ()]
        parts += [item for item in self.given.values() if isinstance(item, torch.nn.Module)]
        given = (part.modules() for part in parts)
        found = {
            names[id(first)]: each
            for each in itertools.chain.from_iterable(given)
            if isinstance(each, DistributedDataParallel)
            and torch.distributed.get_process_group_ranks(each.process_group) == ranks
            and (first := next(each.parameters(), None)) is not None
        }
        return dict(sorted(found.items()))  # the same order on all ranks: queries of buckets are collective

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

        group = self.stages.group if self.stages is not None else ()
        return Encoder(
            step_storages, self._warned, shared_storages, stage_ranks=group, trained=trained, known=known
        )

    def _stored(self, encoder: Encoder) -> dict[str, torch.Tensor]:
        """Return the encoded tensors that this rank stores."""
        if self._world_size == 1:
            return encoder.tensors
        sizes = [(name, encoder.tensors[name].nbytes) for name in encoder.shared]
        ranks, assigned = self._sharing, assign_to_ranks(sizes, len(self._sharing))
        elsewhere = {name for name, number in assigned.items() if ranks[number] != self._rank}
        elsewhere |= encoder.elsewhere
        return {name: t for name, t in encoder.tensors.items() if name not in elsewhere}

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
                    "%s is sparse and is not stored: apply it within its iteration, or a resume lacks it", path
                )
        return trees

    def _structured(self, known: _WatchedEncoding, loose: Encoder) -> object:
        """Return the same object while `known` and the names, dtypes and shapes of the rest stay the same."""
        if loose.deferred:
            return object()  # deferred copies need the same tensor objects, and these are found anew each time
        signature = known, [(name, t.dtype, t.shape, t.device) for name, t in loose.tensors.items()]
        if not self._structure or self._structure[0] is not known or self._structure[1] != signature[1]:
            self._structure = signature
        return self._structure

    def _frozen(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Return names of parameters that require no gradient, in modules that an optimizer trains in part.

        Averaged weights require none either, but change.
        """
        trained = {id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]}
        still = set()
        for module in self.modules.values():
            parameters = list(module.parameters())
            if any(id(parameter) in trained for parameter in parameters):
                still |= set(storages(p for p in parameters if not p.requires_grad and id(p) not in trained))
        return {name for name, t in tensors.items() if t.untyped_storage().data_ptr() in still}

    def _step_storages(self) -> set[int]:
        """Return storages that only `optimizer.step` writes to: those of parameters, if all steps run hooks."""
        modules = self.modules.values() if self.sees_updates else ()
        return {storage for module in modules for storage in storages(module.parameters())}


@dataclass(eq=False, slots=True, kw_only=True)
class _WatchedEncoding:
    """The full encoding of the watched objects; valid until the watch reports a change."""

    watched: WatchedState
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


def shapes_of(captured: CapturedState) -> Shapes:
    """Return dtype and global shape of each tensor of the trees, as `restore.shapes` does for a checkpoint."""
    return {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in captured.whole.items()}


def _witness(encoder: Encoder) -> ReplicaChecksum:
    alike = encoder.shared | encoder.repeated
    return ReplicaChecksum({name: encoder.tensors[name] for name in alike}, encoder.places)
