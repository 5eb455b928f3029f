"""Loading of a checkpoint into the objects of a session: names, checks, settings to keep, and order."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint, RestoreFailed
from holdfast.format.manifest import MANIFEST
from holdfast.format.shards import Region, names_in
from holdfast.state.adapter import StateAdapter
from holdfast.state.adapters import adapter_for
from holdfast.state.construction import SettingDifference
from holdfast.state.encoder import Encoder
from holdfast.state.gradients import require_gradients, restore_gradients
from holdfast.state.matching import renamed, unwrapped_names
from holdfast.state.optimizers import OptimizerAdapter
from holdfast.state.rng import StatefulGenerator, branch_rng, require_rng, restore_rng, rng_state
from holdfast.state.sharding import is_sharded, is_sharding_in_use, local
from holdfast.state.tree import LiveTensors, Shapes, Tensors, Tree, decode, require_readable, trained_tensors
from holdfast.state.wrappers import checkpointable, given_modules, optimizers_in, unwrapped

if TYPE_CHECKING:
    from holdfast.state.schedules import SchedulerAdapter
    from holdfast.state.stages import StageLayout

logger = logging.getLogger("holdfast")


class LoadableObjects:
    """The objects of a session by keyword, as a checkpoint is loaded into them."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.objects = {keyword: checkpointable(keyword, item) for keyword, item in objects.items()}
        self.given_stages = {k: item for k, item in objects.items() if given_modules(item) is not None}
        """Stages of a pipeline, in lists or as `PipelineStage`."""
        self.given = dict(objects) | {keyword: self.objects[keyword] for keyword in self.given_stages}
        self.modules = {k: o for k, o in self.objects.items() if isinstance(o, torch.nn.Module)}
        self._adapters = {k: adapter_for(k, item, self._parameter_ids) for k, item in self.objects.items()}
        self.stages: StageLayout | None = None
        """Which ranks have which stages of a pipeline; `None` without one."""
        self._warned: set[str] = set()
        self._kept: set[str] = set()
        """Objects to leave as they are where the checkpoint of a resume does not fit them."""
        self._left: set[str] = set()
        """Those that the last checkpoint to load did not fit."""

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
                messages.append(f"{keyword} starts as the script created it, as session.keep requests: {error}")
        return messages

    def differences(self, trees: Mapping[str, Tree], shapes: Shapes) -> list[SettingDifference]:
        """Compare the settings of the script with those of a checkpoint that fits."""
        trees = self._in_own_names(trees)
        return [each for k in self._loaded() for each in self._adapters[k].differences(trees[k], shapes)]

    def reordered(self, trees: Mapping[str, Tree], shapes: Shapes) -> list[str]:
        """Name objects that may hold tensors by the order of parameters, if that is another one than here."""
        trees, adapters = self._in_own_names(trees), {k: self._adapters[k] for k in self._loaded()}
        optimizers = [each for each in adapters.values() if isinstance(each, OptimizerAdapter)]
        if not any(each.reorders(trees[each.keyword], shapes) for each in optimizers):
            return []
        by_order = [k for k, each in adapters.items() if type(each) is StateAdapter and names_in(trees[k])]
        return [
            f"the parameters are in another order than in the checkpoint: if {keyword} "
            f"({type(self.objects[keyword]).__name__}) holds tensors by their order, it mixes them up. Create "
            "layers and parameter groups in the order of the checkpoint"
            for keyword in by_order
        ]

    def regions(self, trees: Mapping[str, Tree], shapes: Shapes) -> dict[str, Region]:
        """Return the part that this rank needs of each tensor that is sharded here."""
        if not (sharded := self._sharded(self._in_own_names(trees), shapes)):
            return {}
        from holdfast.state.sharded_tensors import place_of

        return {
            name: Region(place_of(name, tensor).offsets, tuple(local(tensor).shape))
            for name, tensor in sharded.items()
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
            from holdfast.state.sharded_tensors import shard_like

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
        loaded = [each for each in self._loaded() if each in trees]
        for keyword in sorted(loaded, key=lambda each: not self._adapters[each].may_refuse):
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
                    logger.warning(
                        "%s starts as the script created it, as session.keep requests: %s", keyword, message
                    )
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
            except Exception as error:  # any error of an object of the script
                raise RestoreFailed(
                    f"{message}; and {keyword} could not be put back ({_text(error)}): start the script again"
                ) from error
        restore_rng(random)

    def _schedules(self) -> list[SchedulerAdapter]:
        if not any(each.schedule is not None for each in self._adapters.values()):
            return []
        from holdfast.state.schedules import SchedulerAdapter

        return [each for each in self._adapters.values() if isinstance(each, SchedulerAdapter)]

    def _optimizer_of(self, schedule: SchedulerAdapter) -> OptimizerAdapter | None:
        trained = unwrapped(getattr(schedule.schedule, "optimizer", None))
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
        if optimizer is not None and optimizer.keyword in self._left:
            rates = schedule.schedule.get_last_lr()
            for group, rate in zip(schedule.schedule.optimizer.param_groups, rates, strict=True):
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


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
