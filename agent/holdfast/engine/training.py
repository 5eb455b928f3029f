"""The training that a session checkpoints: its objects, its place in the data, its iteration, its pace."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from holdfast.checkpoint import restore
from holdfast.checkpoint.restore import Loaded, Regions
from holdfast.data.cursor import Cursor, cursor_over
from holdfast.data.loader import DataLoader
from holdfast.distributed.ranks import Ranks
from holdfast.engine import missing_state
from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint
from holdfast.format.manifest import MANIFEST, Manifest, saved_rank, state_for
from holdfast.format.shards import names_in
from holdfast.pacing import Controller
from holdfast.state.ddp_buckets import bucket_layout, warm_up
from holdfast.state.registry import Captured, Registry, shapes_of
from holdfast.state.round_trip import RoundTrip, as_stored
from holdfast.state.tree import Shapes, decode
from holdfast.state.variables import Variables
from holdfast.state.wrappers import RESERVED
from holdfast.store import Store
from holdfast.telemetry.reporter import TrainingPosition

logger = logging.getLogger("holdfast")


class Training:
    """Captured at the boundary between two iterations, and put back to one."""

    def __init__(
        self,
        objects: Mapping[str, Any],
        standing: TrainingPosition,
        controller: Controller,
        ranks: Ranks,
        *,
        rewinds: bool | None = None,
    ) -> None:
        self._ranks = ranks
        self._said = rewinds
        """What the script says of whether it can be taken back while it runs."""
        self.registry = Registry(objects, ranks.rank, ranks.world_size)
        self.rewinds = 0
        """How often the state was put back, so that whoever draws batches notices."""
        self._standing, self._controller = standing, controller
        self._loaders: list[tuple[Iterable[Any], Cursor]] = []
        """In the order in which the script first drew from them."""
        self._given_loaders = [item for item in self.registry.objects.values() if isinstance(item, DataLoader)]
        for loader in self._given_loaders:
            loader.follow()
        self._drawn_from: weakref.WeakSet[DataLoader] = weakref.WeakSet()
        self._told_of: list[DataLoader] = []
        """Loaders that the script draws from and that are in no checkpoint."""
        self._current = -1
        """Which of them it draws from."""
        self._loaded: list[dict[str, Any]] = []
        """Positions from a checkpoint, for loaders that the script has not come to yet."""
        self._moved = False
        self._drawn = self._updates = self._ended = 0
        """Batches, steps of optimizers and iterations, since all ranks of the job stood at the same place."""
        self.trained = 0
        """Iterations of this attempt, those included that a restore took back."""
        self._hooks: list[RemovableHandle] = []
        self._unknown_buckets: set[str] = set()
        """DistributedDataParallel modules that were reported as such."""
        self._round_trip: RoundTrip | None = None
        self._start: tuple[dict[str, Any], Shapes] | None = None
        """What a checkpoint of the start of training holds but for numbers, until something else was reported."""
        self._structure: object = None
        """`Captured.structure` of the last capture."""
        self._compared: object = None
        """`Captured.structure` of the last capture that was compared with the start."""
        self.registry.capture({}, gradients=False)  # what cannot be stored shows now, not an hour into training
        DataLoader.watched_by.append(self._drawn_from)

    @property
    def epoch(self) -> int:
        return self._loaders[self._current][1].epoch if self._loaders else 0

    @property
    def at_boundary(self) -> bool:
        """Nothing has been drawn or updated since the last iteration ended: the state is that of an instant."""
        return not self._moved

    def drew(self) -> None:
        """The script has a batch of `session.batches`."""
        self._moved = True
        self._drawn += 1

    def around_updates(
        self,
        before: Callable[[], None],
        after: Callable[[], None],
        may_act_after: Callable[[int], bool | None] = lambda _: None,
    ) -> None:
        """Have each step of an optimizer call these, until `close`.

        `may_act_after` tells whether a checkpoint may be taken after an iteration, where that is not the pacing's.
        """
        gradients, controller = self.registry.gradients, self._controller

        def asked_soon() -> bool:
            following = self._standing.iteration + 1
            if (known := may_act_after(following)) is not None:
                return known
            return controller.plan is None or controller.due(following)

        gradients.asked_soon = asked_soon

        def about_to_update(optimizer: torch.optim.Optimizer, *_: object) -> None:
            before()
            gradients.before_update(optimizer)
            self._moved = True
            self._updates += 1

        def updated(optimizer: torch.optim.Optimizer, *_: object) -> None:
            gradients.after_update(optimizer)
            after()

        for optimizer in self.registry.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(about_to_update))
            self._hooks.append(optimizer.register_step_post_hook(updated))

    def after_gradients(self, note: Callable[[], None]) -> None:
        """Have each DistributedDataParallel in host memory call this, until `close`, at its last gradient.

        The first parameter gets its gradient last. On a device, that is when the work is queued: it says nothing.
        """
        for ddp in self.registry.replicated.values():
            first = next((each for each in ddp.parameters() if each.requires_grad), None)
            if first is not None and first.device.type == "cpu":
                hook = first.register_post_accumulate_grad_hook(lambda _: note())  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def close(self) -> None:
        """Leave the script's objects as they were given."""
        for hook in self._hooks:
            hook.remove()
        DataLoader.watched_by[:] = [each for each in DataLoader.watched_by if each is not self._drawn_from]
        for loader in (*self._given_loaders, *(each for each, _ in self._loaders)):
            if isinstance(loader, DataLoader):
                loader.unfollow()

    def boundary(self) -> None:
        """An iteration has ended here."""
        for loader in self._given_loaders:
            loader.iteration_ended()
        self._moved = False
        self._ended += 1
        self.trained += 1

    def unknown_loaders(self) -> list[str]:
        """In words: what the script draws from, and the session was not given; each loader once."""
        told = []
        while self._drawn_from:
            loader = self._drawn_from.pop()
            known = (*self._given_loaders, *(each for each, _ in self._loaders), *self._told_of)
            if not any(each is loader for each in known):
                self._told_of.append(loader)
                keyword = missing_state.unused_keyword("loader", self.registry.given)
                told.append(
                    f"the script draws from a holdfast.DataLoader over {type(loader.dataset).__name__} that is in "
                    "no checkpoint: after a resume it begins again at epoch 0. Give it to the session, "
                    f"Session({keyword}=...)"
                )
        return told

    @property
    def loader(self) -> Iterable[Any] | None:
        """The one that the script draws from, as far as that can be seen."""
        if self._loaders:
            return self._loaders[self._current][0]
        return self._given_loaders[0] if len(self._given_loaders) == 1 else None

    @property
    def batches_an_iteration(self) -> float | None:
        """As so far; None for a loop that draws its batches itself."""
        return self._drawn / self._ended if self._loaders and self._ended else None

    def enter(self, loader: Iterable[Any]) -> Cursor:
        """The script begins, or goes on, to draw from `loader`."""
        known = [each for each, _ in self._loaders]
        self._current = next((i for i, each in enumerate(known) if each is loader), len(known))
        if self._current == len(known):
            if isinstance(loader, DataLoader):
                loader.follow()
            cursor = cursor_over(loader)
            # where it stood; the start for a new one, which a look at its first batch may have moved
            cursor.load_state_dict(self._loaded[self._current] if self._current < len(self._loaded) else None)
            self._loaders.append((loader, cursor))
        return self._loaders[self._current][1]

    def begin(self) -> None:
        """Training goes on from here: the objects are as a script must make them before it resumes."""
        try:
            start = self.outline()
            self._start, self._compared = (as_stored(start.trees), shapes_of(start)), start.structure
        except Exception as error:  # the first checkpoint meets it, and reports it
            logger.debug("the structure of the state is not known: %s", error)

    def structure_change(self) -> str | None:
        """In words, once: what of the state is no longer as a script that starts again has it.

        Such a checkpoint is refused at a resume. Cheap while the state is made of the same tensors.
        """
        if self._start is None or self._compared is self._structure:
            return None
        self._compared = self._structure
        try:
            self.registry.require_fit(*self._start)
        except (IncompatibleCheckpoint, DamagedCheckpoint) as error:
            self._start = None
            return str(error)
        return None

    def outline(self) -> Captured:
        """What a capture will most likely consist of."""
        return self._capture(gradients=False, reducers={})

    def capture(self) -> Captured:
        """The state of this instant. TypeError names what cannot be stored."""
        captured = self._capture(gradients=True, reducers=self._reducers())
        self._structure = captured.structure
        if self._round_trip is None or not self._round_trip.holds:
            self._round_trip = captured.round_trip = self.registry.round_trip(captured)
        if self._ranks.world_size > 1:
            # two ranks that count iterations differently have states of different moments under the same number
            # a loader that each rank reads whole may be read by some ranks alone, for a validation say
            places = [
                f"sample {each.position.taken} of epoch {each.position.epoch}"
                for each in self._given_loaders
                if each.world_size > 1
            ]
            # ranks that train nothing together may make other updates
            together = captured.shards or self.registry.replicated
            updates = [f"{self._updates} updates"] if together else []
            captured.alike["data"] = ", ".join([f"{self._drawn} batches", *places, *updates])
        return captured

    def _reducers(self) -> dict[str, list[list[int]]]:
        """What each DistributedDataParallel reduces together: it decides on the last bits of a sum."""
        found = {}
        for name, ddp in self.registry.replicated.items():
            try:
                layout = bucket_layout(ddp)
            except Exception as error:  # private API of torch may raise anything
                if name not in self._unknown_buckets:
                    self._unknown_buckets.add(name)
                    logger.warning(
                        "%s: torch %s does not show how it sums up gradients (%s): after a resume the last "
                        "bits of losses may differ",
                        *(name, torch.__version__, error),
                    )
                continue
            if layout is not None:
                found[name] = layout
        return found

    def _capture(self, *, gradients: bool, reducers: dict[str, list[list[int]]]) -> Captured:
        positions = [cursor.state_dict() for _, cursor in self._loaders]
        return self.registry.capture(
            {
                "iteration": self._standing.iteration,
                "lineage": self._standing.lineage,
                "loaders": [*positions, *self._loaded[len(positions) :]],
                "loader": self._current,
                "controller": self._controller.state_dict(),
                "reducers": reducers,
            },
            gradients=gradients,
        )

    @property
    def regions(self) -> Regions | None:
        """What this rank wants of tensors that several of them hold; see `restore.load`."""
        return self.registry.regions if self._ranks.world_size > 1 else None

    def load(self, store: Store, job: str, checkpoint: str, room: memoryview | None = None) -> Loaded:
        """Read and verify what this rank needs of a checkpoint, into `room` if it is given any.

        Raises what `restore.load` does.
        """
        return restore.load(
            *(store, job, checkpoint),
            rank=self._ranks.rank,
            regions=self.regions,
            room=room,
            meanwhile=self.registry.make_room,
        )

    def check(self, manifest: Manifest) -> None:
        """IncompatibleCheckpoint when a checkpoint does not fit the objects, DamagedCheckpoint when no session can
        have written it."""
        rank = saved_rank(manifest, self._ranks.rank)
        trees = state_for(manifest, rank)
        _require_position(trees)
        self.registry.check(trees, restore.shapes(manifest, rank))

    def no_way_back(self, loader: int | None = None) -> str | None:
        """Why the running script cannot be taken back, in words; None where it can.

        `loader`: the one that it drew from when the checkpoint was taken; None: as now.
        """
        if self._said is not None:
            return None if self._said else "the script says so itself (rewinds=False)"
        if any(loader.drawn_directly for loader in self._given_loaders):
            return (
                "this script iterates over its loader itself, and a loop over epochs cannot be taken back from "
                "inside, as one over session.batches(...) can"
            )
        if not self._loaders and not any(isinstance(item, Variables) for item in self.registry.objects.values()):
            return (
                "this script's batches come neither from session.batches(...) nor is its loop's place in a "
                "holdfast.Variables, so a running loop would go on with other data"
            )
        if self._loaders and loader not in (None, self._current):
            return "it was taken while the script drew from another loader, and the loop is past that"
        return None

    def gaps(self) -> list[str]:
        """What loaders that the script draws from itself cannot promise."""
        return [loader.gap for loader in self._given_loaders if loader.gap]

    def missing(self, loaded: Loaded | None) -> list[str]:
        """What changes in training, as far as its objects show it, and is in no checkpoint."""
        there = loaded.state if loaded is not None else {}
        saved = [keyword for keyword in there if keyword not in RESERVED]
        return [*missing_state.missing(self.registry.given, saved), *self.registry.gaps()]

    def warm_up(self, loaded: Loaded) -> list[str]:
        """Have new processes sum up gradients in the order of those that took the checkpoint.

        All ranks do it together. What could not be brought to that, in words: the next losses may differ in their
        last bits.
        """
        told = []
        layouts = loaded.state["session"].get("reducers", {})
        if loaded.manifest.world_size == self._ranks.world_size:  # otherwise the sums are others anyway
            for name, ddp in self.registry.replicated.items():
                if name in layouts and (reason := _warmed_up(ddp, layouts[name])) is not None:
                    told.append(f"gradients may be summed up in another order than before: {reason}")
        return told

    def failed(self, times: int) -> None:
        """So often since the checkpoint that was loaded: how often to take one depends on it."""
        self._controller.life.failed(times)

    def apply(self, loaded: Loaded) -> None:
        """Put everything back to the checkpoint; whatever a load_state_dict raises passes through."""
        trees = _fitting(loaded, self._ranks.world_size)
        self.registry.apply(trees, loaded.tensors, loaded.shapes, adopt=not loaded.borrowed)
        if copy := self._ranks.rank // loaded.manifest.world_size:
            self.registry.branch_rng(copy, _differing(loaded))
        restarted = not self.trained
        self._drawn = self._updates = self._ended = 0
        state = decode(loaded.state["session"], loaded.tensors, copy=True)
        self._standing.iteration = loaded.manifest.iteration
        self._loaded = state["loaders"]
        if restarted:  # in place, what is measured by now is better
            self._controller.load_state_dict(state["controller"])
        self._controller.rewound(self._standing.iteration)
        self.rewinds += 1
        for i, (_, cursor) in enumerate(self._loaders):
            cursor.load_state_dict(self._loaded[i] if i < len(self._loaded) else None)


def _require_position(trees: Mapping[str, Any]) -> None:
    session = trees.get("session")
    kinds = {"loaders": list, "loader": int, "controller": dict}
    if not isinstance(session, dict) or not all(isinstance(session.get(key), kind) for key, kind in kinds.items()):
        raise DamagedCheckpoint(MANIFEST, "says nothing, or what cannot be, of the position in training")
    if not isinstance(trees.get("rng"), dict):
        raise DamagedCheckpoint(MANIFEST, "says nothing, or what cannot be, of the random state")


def left_out(loaded: Loaded, world_size: int) -> str | None:
    """What of a checkpoint cannot go on with so many ranks, in words."""
    if loaded.manifest.world_size == world_size or not _unfitting(loaded):
        return None
    return (
        "gradients that each rank had accumulated by itself are left out, since there are "
        f"{world_size} ranks now, and were {loaded.manifest.world_size}"
    )


def _unfitting(loaded: Loaded) -> set[str]:
    """Gradients that are one rank's own: the mean over another number of ranks would be another."""
    own = {tensor.name for tensor in loaded.manifest.tensors if tensor.rank is not None}
    return own & names_in(loaded.state.get("gradients", {}))


def _fitting(loaded: Loaded, world_size: int) -> dict[str, Any]:
    if loaded.manifest.world_size == world_size or not (gone := _unfitting(loaded)):
        return loaded.state
    gradients = {
        keyword: {name: tree for name, tree in parameters.items() if tree["$tensor"] not in gone}
        for keyword, parameters in loaded.state["gradients"].items()
    }
    return {**loaded.state, "gradients": gradients}


def _differing(loaded: Loaded) -> set[str]:
    """Keywords, and entries of `rng` as `rng.torch`, that were not the same on all ranks of a checkpoint."""
    seen: dict[str, set[str]] = {}
    for tensor in loaded.manifest.tensors:
        if tensor.rank is not None:
            seen.setdefault(tensor.name, set()).add(tensor.digest)
    names = [name.split(".") for name, digests in seen.items() if len(digests) > 1]
    found = {".".join(parts[:2]) if parts[0] == "rng" else parts[0] for parts in names}
    first = loaded.manifest.state
    for trees in loaded.manifest.rank_states.values():
        found |= trees.keys()
        rng = trees.get("rng", {})
        found |= {f"rng.{entry}" for entry, tree in rng.items() if tree != first["rng"].get(entry)}
    return found


def _warmed_up(ddp: DistributedDataParallel, layout: list[list[int]]) -> str | None:
    try:
        return warm_up(ddp, layout)
    except Exception as error:  # it is about the last bits of sums: a job goes on without them
        return f"{type(error).__name__}: {error}"
