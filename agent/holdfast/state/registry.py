"""Capture of the objects of a training loop at one instant, and their restore."""

from __future__ import annotations

import difflib
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

from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint, RestoreFailed
from holdfast.format.manifest import MANIFEST, Shard
from holdfast.format.resharding import Region
from holdfast.state.adapter import Names
from holdfast.state.adapters import adapter_for
from holdfast.state.capture import Watch, WatchedState
from holdfast.state.construction import SettingDifference
from holdfast.state.encoder import Encoder, Trained
from holdfast.state.gradients import (
    GradientTracker,
    Parameters,
    fully_sharded,
    require_gradients,
    require_synchronized,
    restore_gradients,
)
from holdfast.state.matching import renamed, unwrapped_names
from holdfast.state.optimizers import OptimizerAdapter
from holdfast.state.rng import StatefulGenerator, branch_rng, require_rng, restore_rng, rng_state
from holdfast.state.round_trip import RoundTrip, as_stored
from holdfast.state.schedules import SchedulerAdapter
from holdfast.state.sharding import (
    ReplicaChecksum,
    assign_to_ranks,
    is_sharded,
    is_sharding_in_use,
    local,
    place_of,
    shard_like,
    storages,
)
from holdfast.state.tree import LiveTensors, Shapes, Tensors, Tree, decode, require_readable, trained_tensors
from holdfast.state.wrappers import checkpointable, has_unseen_steps, optimizers_in, unwrapped
from holdfast.torch_internals import replicated_parameters, unsupported

logger = logging.getLogger("holdfast")


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


class Registry:
    """The objects of a session by keyword, on one rank of a job."""

    def __init__(self, objects: Mapping[str, Any], rank: int = 0, world_size: int = 1) -> None:
        self._rank, self._world_size = rank, world_size
        self.given = dict(objects)
        self.objects = {keyword: checkpointable(keyword, item) for keyword, item in objects.items()}
        self.modules = {k: o for k, o in self.objects.items() if isinstance(o, torch.nn.Module)}
        self.optimizers = list(dict.fromkeys(o for item in self.objects.values() for o in optimizers_in(item)))
        """Optimizers whose step hooks run: given ones, and those inside a given wrapper."""
        self.gradients = GradientTracker()
        self._adapters = {k: adapter_for(k, item, self._parameter_ids) for k, item in self.objects.items()}
        self._kept: set[str] = set()
        """Objects to leave as they are where the checkpoint of a resume does not fit them."""
        self._left: set[str] = set()
        """Those that the last checkpoint to load did not fit."""
        self._warned: set[str] = set()
        self._known: _WatchedEncoding | None = None
        self._structure: tuple[object, ...] = ()
        self.replicated = self._replicated() if world_size > 1 else {}
        """DistributedDataParallel modules that span all ranks, by the name of their first parameter."""

    def limitations(self) -> list[str]:
        """Describe the guarantees that this version of torch does not allow."""
        return unsupported(distributed=self._world_size > 1)

    def stored_by_each_rank(self) -> list[str]:
        """Describe the modules of which every rank stores its own copy."""
        if self._world_size == 1:
            return []
        held = {id(p) for ddp in self.replicated.values() for p in ddp.parameters()}
        trained = {id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]} - held
        found = []
        for keyword, module in self.modules.items():
            parameters = list(module.parameters())
            if any(id(p) in trained for p in parameters) and not any(map(is_sharded, parameters)):
                found.append(
                    f"{keyword}: each of the {self._world_size} ranks stores a full copy, because it is not "
                    "sharded and the session was not given a DistributedDataParallel that contains it. If the "
                    f"script has one, create it before the session and pass it as Session({keyword}=...): then "
                    "its parameters are stored once, and on three ranks or more the losses after a resume are "
                    "equal to the last bit"
                )
        return found

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
        states = {}
        for keyword, adapter in self._adapters.items():
            if (watch := known.watches.get(keyword)) is None:
                states[keyword] = adapter.state()
                trees[keyword] = adapter.encode(states[keyword], encoder, known.names)
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

    def check(self, trees: Mapping[str, Tree], shapes: Shapes) -> None:
        """Check a checkpoint against these objects.

        Raises:
            IncompatibleCheckpoint: it does not fit; names the keyword and the tensor.
            DamagedCheckpoint: its state cannot be decoded.
        """
        readable = {keyword: require_readable(keyword, tree, shapes) for keyword, tree in trees.items()}
        trees = self._in_own_names(trees)
        if "gradients" in trees:
            readable["gradients"] = require_readable("gradients", trees["gradients"], shapes)
        try:
            if "rng" in readable:
                require_rng(readable["rng"])
            require_gradients(self.modules, readable.get("gradients", {}))
        except ValueError as error:
            raise DamagedCheckpoint(MANIFEST, f"invalid random state or gradients: {error}") from error
        self.require_fit(trees, shapes)

    def require_fit(self, trees: Mapping[str, Tree], shapes: Shapes) -> None:
        """Do the same as `check` for trees that are known to decode."""
        trees = self._in_own_names(trees)
        for keyword in self._loaded():
            self._require_fit(keyword, trees, shapes)
        live = LiveTensors({}, self._trained())
        for tree in (each for keyword in self._loaded() for each in trained_tensors(trees[keyword])):
            parameter, name = live.parameter(tree), tree["$tensor"]
            if parameter is not None and (str(parameter.dtype), tuple(parameter.shape)) != shapes[name]:
                raise IncompatibleCheckpoint(
                    f"{name}: {tuple(parameter.shape)} of {parameter.dtype} in the optimizer, "
                    f"{shapes[name][1]} of {shapes[name][0]} in the checkpoint"
                )

    def _require_fit(self, keyword: str, trees: Mapping[str, Tree], shapes: Shapes) -> None:
        """Check one object; the error has its keyword."""
        if keyword not in trees:
            close = difflib.get_close_matches(keyword, trees.keys() - self._adapters.keys(), n=1)
            hint = f". Did you mean Session({close[0]}=...)?" if close else ""
            message = f"the checkpoint holds no {keyword!r}; it has {', '.join(trees)}{hint}"
            raise IncompatibleCheckpoint(message, keyword)
        try:
            self._adapters[keyword].check(trees[keyword], shapes)
        except IncompatibleCheckpoint as error:
            raise IncompatibleCheckpoint(str(error), keyword) from error

    def _loaded(self) -> list[str]:
        """Return the keywords of the objects that checkpoints are loaded into."""
        return [keyword for keyword in self._adapters if keyword not in self._left]

    def keep(self, objects: Collection[str], settings: Mapping[str, Collection[str]]) -> None:
        """Keep objects of the script where a checkpoint does not fit them, and settings that it would replace.

        ValueError: a keyword or a setting is unknown; names those that there are.
        """
        for keyword in (*objects, *settings):
            if keyword not in self._adapters:
                raise ValueError(f"session.keep: the session has no {keyword!r}; it has {', '.join(self.objects)}")
        for keyword, names in settings.items():
            self._adapters[keyword].keep(names)
        self._kept |= set(objects)
        for schedule in self._schedules():
            if self._keeps_rate(schedule):
                schedule.keep_start()

    def leave_unfitting(self, trees: Mapping[str, Tree], shapes: Shapes) -> list[str]:
        """Leave the objects to keep as they are where this checkpoint does not fit them. Return why, in words."""
        trees, self._left, messages = self._in_own_names(trees), set(), []
        for keyword in sorted(self._kept):
            try:
                self._require_fit(keyword, trees, shapes)
            except IncompatibleCheckpoint as error:
                self._left.add(keyword)
                messages.append(f"{keyword} starts as the script made it, as session.keep asks: {error}")
        return messages

    def differences(self, trees: Mapping[str, Tree], shapes: Shapes) -> list[SettingDifference]:
        """Compare the settings of the script with those of a checkpoint that fits."""
        trees = self._in_own_names(trees)
        return [each for k in self._loaded() for each in self._adapters[k].differences(trees[k], shapes)]

    def regions(self, trees: Mapping[str, Tree], shapes: Shapes) -> dict[str, Region]:
        """Return the part that this rank needs of each tensor that is sharded here."""
        trees = self._in_own_names(trees)
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
        undo: bool = False,
    ) -> None:
        """Load a checkpoint's state into the objects; the random state last, since loading may draw from it.

        For tensors that are sharded here, `tensors` has this rank's part as given by `regions`, and `shapes` the
        global shape. With `adopt`, an optimizer may keep the memory of `tensors`. With `undo`, nothing is changed
        if an object refuses its state.

        Raises:
            IncompatibleCheckpoint: the `load_state_dict` of an object raised an error; names its keyword.
            RestoreFailed: and what had been loaded before could not be put back.
        """
        trees = self._in_own_names(trees)
        if sharded := self._sharded(trees, shapes):
            parts = {name: shard_like(tensor, tensors[name]) for name, tensor in sharded.items()}
            tensors = {**tensors, **parts}
        self._load(trees, tensors, shapes, adopt=adopt, undo=undo)
        restore_gradients(self.modules, decode(trees.get("gradients", {}), tensors, copy=True))
        restore_rng(decode(trees["rng"], tensors, copy=True))

    def _load(
        self, trees: Mapping[str, Tree], tensors: Tensors, shapes: Shapes, *, adopt: bool, undo: bool
    ) -> None:
        live = LiveTensors(self._held(trees), self._trained())
        known = {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()} | dict(shapes)
        before, random = list[tuple[str, Any]](), rng_state()
        # first the objects whose code may refuse its state: nothing else needs to be put back then
        for keyword in sorted(self._loaded(), key=lambda each: not self._adapters[each].may_refuse):
            adapter = self._adapters[keyword]
            if undo and adapter.may_refuse:
                before.append((keyword, adapter.copied_state()))
            try:
                adapter.load(trees[keyword], tensors, live=live, adopt=adopt)
                adapter.note_settings(trees[keyword], known)
            except MemoryError:
                raise
            except Exception as error:  # the code of the object may raise anything
                message = f"{keyword}: {type(self.objects[keyword]).__name__} refused its state: {_text(error)}"
                if undo and keyword in self._kept:
                    self._put_back([before.pop()], random, message)
                    logger.warning("%s starts as the script made it, as session.keep asks: %s", keyword, message)
                    continue
                self._put_back(before, random, message)
                raise IncompatibleCheckpoint(message, keyword) from error
        for schedule in self._schedules():
            if schedule.keyword not in self._left:
                schedule.reposition(base_is_kept=self._keeps_rate(schedule))
                self._adopt_rate(schedule)
        self._left = set()  # a restore in place needs all of them

    def _put_back(self, before: list[tuple[str, Any]], random: Any, message: str) -> None:
        for keyword, state in reversed(before):
            try:
                self._adapters[keyword].put_back(state)
            except Exception as error:
                raise RestoreFailed(
                    f"{message}; and {keyword} could not be put back ({_text(error)}): start the script again"
                ) from error
        restore_rng(random)

    def _schedules(self) -> list[SchedulerAdapter]:
        return [each for each in self._adapters.values() if isinstance(each, SchedulerAdapter)]

    def _optimizer_of(self, schedule: SchedulerAdapter) -> OptimizerAdapter | None:
        trained = unwrapped(schedule.schedule.optimizer)
        for keyword, adapter in self._adapters.items():
            if isinstance(adapter, OptimizerAdapter) and self.objects[keyword] is trained:
                return adapter
        return None

    def _keeps_rate(self, schedule: SchedulerAdapter) -> bool:
        optimizer = self._optimizer_of(schedule)
        return optimizer is not None and optimizer.keeps_rate

    def _adopt_rate(self, schedule: SchedulerAdapter) -> None:
        """Give an optimizer that was left as it is the learning rate of its schedule."""
        optimizer = self._optimizer_of(schedule)
        rates = getattr(schedule.schedule, "_last_lr", None)
        if optimizer is not None and optimizer.keyword in self._left and rates:
            for group, rate in zip(schedule.schedule.optimizer.param_groups, rates, strict=False):
                group["lr"] = rate

    def branch_rng(self, key: int, differed: Collection[str]) -> None:
        """Start new random streams on a rank that has no state in the checkpoint.

        Only generators that `differed` among ranks get a new stream. Ranks that drew the same numbers (for a
        common decision under tensor parallelism) must continue to do so.
        """
        branch_rng(key, {name.removeprefix("rng.") for name in differed if name.startswith("rng.")})
        for keyword, item in self.objects.items():
            if keyword in differed and isinstance(item, StatefulGenerator):
                item.branch(key)

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
        """Find the given DistributedDataParallel modules that span all ranks."""
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

        return Encoder(step_storages, self._warned, shared_storages, trained=trained, known=known)

    def _trained(self) -> dict[str, list[torch.Tensor]]:
        """Return the parameters that each optimizer trains, in its order, by its keyword."""
        return {
            keyword: [p for each in optimizers_in(item) for group in each.param_groups for p in group["params"]]
            for keyword, item in self.objects.items()
        }

    def _held(self, trees: Mapping[str, Tree]) -> dict[str, torch.Tensor]:
        """Return the tensors of modules, by the names of the checkpoint tensors that are copied into them."""
        found: dict[str, torch.Tensor] = {}
        for keyword, module in self.modules.items():
            if keyword in self._left:
                continue
            own: dict[str, torch.Tensor] = dict(module.named_buffers(remove_duplicate=False))
            own.update(module.named_parameters(remove_duplicate=False))
            for entries in (trees[keyword]["state"], trees[keyword]["buffers"]):
                for name, tree in entries.items():
                    if name in own and isinstance(tree, dict) and "$tensor" in tree and not is_sharded(own[name]):
                        found[tree["$tensor"]] = own[name]
        return found

    def _stored(self, encoder: Encoder) -> dict[str, torch.Tensor]:
        """Return the encoded tensors that this rank stores."""
        if self._world_size == 1:
            return encoder.tensors
        sizes = [(name, encoder.tensors[name].nbytes) for name in encoder.shared]
        elsewhere = {name for name, rank in assign_to_ranks(sizes, self._world_size).items() if rank != self._rank}
        elsewhere |= encoder.elsewhere
        return {name: t for name, t in encoder.tensors.items() if name not in elsewhere}

    def _sharded(self, trees: Mapping[str, Tree], shapes: Shapes) -> dict[str, torch.Tensor]:
        """Return sharded tensors of the script, by the names of the checkpoint tensors that are sharded alike."""
        if not is_sharding_in_use() or not shapes:
            return {}
        encoder, names = Encoder((), self._warned), self._parameter_names()
        for adapter in self._adapters.values():
            adapter.encode(adapter.state(), encoder, names)
        found = {n: t for n, t in encoder.sharded.items() if n in shapes and shapes[n][1] == tuple(t.shape)}
        for keyword, adapter in self._adapters.items():
            if keyword in trees and keyword not in self._left:
                found |= adapter.sharded(trees[keyword], shapes)
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

    def _parameter_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for keyword, module in self.modules.items():
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), name if len(self.modules) == 1 else f"{keyword}.{name}")
        return names

    def _parameter_ids(self) -> dict[str, int]:
        """Return the `id` of each parameter by all its names, which tied ones have several of."""
        ids = {
            f"{keyword}.{name}": id(parameter)
            for keyword, module in self.modules.items()
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        plain = {plain: ids[name] for plain, name in unwrapped_names(ids).items()}
        return plain or ids

    def _in_own_names(self, trees: Mapping[str, Tree]) -> dict[str, Tree]:
        """Return trees with the names that the script's modules have, which torch.compile and others extend."""
        own = {
            k: self._adapters[k].in_own_names(tree) if k in self._adapters else tree for k, tree in trees.items()
        }
        if isinstance(gradients := own.get("gradients"), dict):
            own["gradients"] = {k: self._gradients_in_own_names(k, each) for k, each in gradients.items()}
        return own

    def _gradients_in_own_names(self, keyword: str, saved: Tree) -> Tree:
        if keyword not in self.modules or not isinstance(saved, dict):
            return saved
        new = renamed(saved, {name for name, _ in self.modules[keyword].named_parameters()})
        return {new.get(name, name): tree for name, tree in saved.items()}

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


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _witness(encoder: Encoder) -> ReplicaChecksum:
    alike = encoder.shared | encoder.repeated
    return ReplicaChecksum({name: encoder.tensors[name] for name in alike}, encoder.places)
