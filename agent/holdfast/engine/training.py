"""The training that a session checkpoints: its objects, its position in the data, and its iteration.

One module, since what is captured and what is restored must agree.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from holdfast import accelerators
from holdfast.checkpoint import restore
from holdfast.checkpoint.restore import LoadedCheckpoint, Regions
from holdfast.checkpoint.stored_manifest import StoredManifest, read_stored
from holdfast.data.cursor import (
    LEAVE_OUT,
    BatchesAnIteration,
    Cursor,
    cursor_over,
    is_dataloader,
    loaders_within,
    require_position,
)
from holdfast.distributed.ranks import Ranks
from holdfast.engine.optional_parts import watch_over
from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint
from holdfast.format.manifest import Manifest
from holdfast.format.shards import saved_rank, state_for
from holdfast.pacing import Controller
from holdfast.protocol.values import ValueInForce, saved_values, values_of
from holdfast.protocol.wire import DataSkip, LeftOutData
from holdfast.state.construction import Construction, describe, differences, loader_settings
from holdfast.state.registry import CapturedState, Registry, shapes_of
from holdfast.state.round_trip import RoundTrip, as_stored
from holdfast.state.tree import Shapes, decode
from holdfast.state.variables import Variables
from holdfast.state.wrappers import RESERVED, StepArguments, StepKeywords, wait_after_closure
from holdfast.store import Store
from holdfast.telemetry.reporter import Reporter, TrainingPosition

if TYPE_CHECKING:
    from holdfast.engine.left_out_data import ToLeaveOut
    from holdfast.engine.skipped_epochs import SkippedEpochs
    from holdfast.save.history import History


logger = logging.getLogger("holdfast")

REPLAY_ITERATIONS = 100
"""After so many iterations without an optimizer step that hooks saw, a CUDA graph replays them."""


class Training:
    """Captures training at the boundary between two iterations, and restores it there."""

    def __init__(
        self,
        objects: Mapping[str, Any],
        position: TrainingPosition,
        controller: Controller,
        ranks: Ranks,
        *,
        restorable_in_place: bool | None = None,
    ) -> None:
        self._ranks = ranks
        self._restorable_in_place = restorable_in_place
        """The script's setting of whether it can be restored in place, if it has one."""
        self.registry = Registry(objects, ranks.rank, ranks.world_size, ranks.gather)
        self.restore_count = 0
        """Number of restores, so that iterators over batches notice one."""
        self._position, self._controller = position, controller
        self._loaders: list[tuple[Iterable[Any], Cursor]] = []
        """Loaders with their cursors, in the order in which the script first used them."""
        self._given_loaders = list(filter(is_dataloader, self.registry.objects.values()))
        for loader in self._given_loaders:
            loader.attach_session()
        self._enclosed: set[str] = set()
        """Keywords of loaders of other libraries that a counted iterable draws from: its count includes them."""
        self._current = -1  # index of the loader in use
        self._loaded: list[dict[str, Any]] = []
        """Positions from a checkpoint, also for loaders that the script has not used yet."""
        self._loaded_settings: list[dict[str, Any]] = []
        """What these loaders were constructed with."""
        self._to_leave_out: ToLeaveOut | None = None
        """Made for a checkpoint after which data is to be left out."""
        self.counted = BatchesAnIteration()
        self.values: dict[str, ValueInForce] = {}  # by name: what operators have set values to
        self.logger_runs: dict[str, tuple[str, int]] = {}  # by logger: run id and the lineage that it logs
        self.unsaved_batches = self.unsaved_updates = 0
        """Batches of `session.batches` and optimizer steps since the last iteration ended."""
        self.replays_updates = False
        """An optimizer step was captured as a CUDA graph, whose replays call no hooks."""
        self._is_replay_reported = False
        self._is_replay_announced = self._was_replay_announced = False
        """Whether the script called `session.wait_copied()` since the last iteration ended, and in that one."""
        self._drawn = self.updates = self._ended = 0
        """Batches, optimizer steps and iterations since all ranks were at the same position."""
        self.trained = 0
        """Iterations of this attempt, including those that a restore undid."""
        self._updates_before_closure = False  # an optimizer may change parameters before that, as SAM does
        self._hooks: list[RemovableHandle] = []
        self._unknown_buckets: set[str] = set()
        """Names of DistributedDataParallel modules whose unknown buckets were reported."""
        self._round_trip: RoundTrip | None = None
        self._outlined: object = None
        """`CapturedState.structure` that `_round_trip` describes; `None` once it is that of a checkpoint."""
        self._start: tuple[dict[str, Any], Shapes] | None = None
        """Trees and shapes at the start of training, until a structural change was reported."""
        self._structure: object = None
        """`CapturedState.structure` of the last capture."""
        self._compared: object = None
        """`CapturedState.structure` of the last capture that was compared with `_start`."""
        self.registry.capture({}, gradients=False)  # raise now for what cannot be stored, not hours later
        self._watch = watch_over(self.registry)

    @property
    def epoch(self) -> int:
        return self._loaders[self._current][1].epoch if self._loaders else 0

    def record_batch(self, number: int) -> None:
        """Record that the script got a batch of `session.batches` from its loader of this number."""
        self._current = number
        self.unsaved_batches += 1
        self._drawn += 1

    def around_updates(
        self,
        before: Callable[[], None],
        after: Callable[[], None],
        on_capture: Callable[[], None],
        may_act_after: Callable[[int], bool],
    ) -> None:
        """Call `before` and `after` around each optimizer step, until `close`.

        `on_capture` is called where a CUDA graph captures a step: it must make no call to a device.
        `may_act_after` returns whether a checkpoint may be taken after an iteration.
        """
        gradients = self.registry.gradients

        def about_to_update(optimizer: torch.optim.Optimizer, args: StepArguments, kwargs: StepKeywords) -> Any:
            if accelerators.is_capturing():
                self.replays_updates = True
                on_capture()
                return None
            self.unsaved_updates += 1
            self.updates += 1

            def gradients_ready() -> None:
                before()
                gradients.before_update(optimizer)

            if self._updates_before_closure:
                before()
            if len(args) < 2 and not kwargs:  # as most optimizers are called: no closure
                gradients_ready()
                return None
            if (with_closure := wait_after_closure(args, kwargs, gradients_ready)) is None:
                gradients_ready()
            return with_closure

        def updated(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if accelerators.is_capturing():
                return
            gradients.after_update(optimizer, lambda: may_act_after(self._position.iteration + 1))
            after()

        for optimizer in self.registry.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(about_to_update))
            self._hooks.append(optimizer.register_step_post_hook(updated))

    def expect_early_updates(self) -> None:
        """Wait for copies before each optimizer step from now on, not when it calls its closure."""
        self._updates_before_closure = True

    def announce_replay(self) -> None:
        """Note that the script replays an update only after it has waited for the copy."""
        self._is_replay_announced = True

    def after_gradients(self, note: Callable[[], None]) -> None:
        """Call this at the last gradient of each DistributedDataParallel in host memory, until `close`.

        The first parameter gets its gradient last. On a device, the hook would run when the work is only queued.
        """
        for ddp in self.registry.replicated.values():
            first = next((each for each in ddp.parameters() if each.requires_grad), None)
            if first is not None and first.device.type == "cpu":
                hook = first.register_post_accumulate_grad_hook(lambda _: note())  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def close(self) -> None:
        """Remove all hooks from the objects of the script."""
        for hook in self._hooks:
            hook.remove()
        if self._watch is not None:
            self._watch.close()
        for loader in filter(is_dataloader, self._loaders_saved()):
            loader.detach_session()

    @functools.cached_property
    def skipped_epochs(self) -> SkippedEpochs:
        """Epochs before a resume, for loops over `session.batches`."""
        from holdfast.engine.skipped_epochs import SkippedEpochs

        return SkippedEpochs(self.registry)

    def boundary(self) -> None:
        """Record the end of an iteration."""
        for loader in self._given_loaders:
            loader.iteration_ended()
        if self._watch is not None:
            self._watch.compare_draws(
                self._given_loaders, self.unsaved_batches, number=self._current if self.unsaved_batches else None,
                is_resumed=self.restore_count > 0, knows_loaders=bool(self._loaders or self._given_loaders),
                epochs=self._epochs,
            )  # fmt: skip
        if self.unsaved_batches != self.counted.batches:
            self.counted = BatchesAnIteration(self.unsaved_batches, self._position.iteration - 1)
        if self._to_leave_out is not None:
            cursors, later = [each for _, each in self._loaders], self._loaded[len(self._loaders) :]
            self.restore_count += self._to_leave_out.reach(self._position.iteration, cursors, later)
        self.unsaved_batches = self.unsaved_updates = 0
        self._was_replay_announced, self._is_replay_announced = self._is_replay_announced, False
        self._ended += 1
        self.trained += 1

    @property
    def may_replay_updates(self) -> bool:
        """Whether a CUDA graph may replay the next update, which calls no hooks."""
        may_replay = self.replays_updates or (not self.updates and self.registry.sees_updates)
        return may_replay and not self._was_replay_announced and accelerators.are_in_use()

    def replay_notice(self) -> str | None:
        """Describe, once, that each checkpoint stalls training because updates may be replayed."""
        is_certain = self.replays_updates or self.trained >= REPLAY_ITERATIONS
        if self._is_replay_reported or not is_certain or not self.may_replay_updates:
            return None
        self._is_replay_reported = True
        return (
            "a CUDA graph replays optimizer steps without calling hooks, so training waits while each checkpoint "
            "is copied. Call session.wait_copied() before each graph.replay() to copy while training continues"
        )

    def unsaved(self) -> list[tuple[str, str]]:
        """Describe what the script uses or changes and no checkpoint holds, each once, with codes."""
        if self._watch is None:
            return []
        return self._watch.found(self.trained, self._loaders_saved)

    def _epochs(self) -> list[int]:
        """Return the epochs of all loaders, also of those that the script has not used since the resume."""
        later = [each.get("epoch", 0) for each in self._loaded[len(self._loaders) :]]
        return [*(each.epoch for each in self._given_loaders), *(each.epoch for _, each in self._loaders), *later]

    def _loaders_saved(self) -> list[Any]:
        return [*self._given_loaders, *(each for each, _ in self._loaders)]

    @property
    def loader(self) -> Iterable[Any] | None:
        """The loader that the script uses, as far as that is known."""
        if self._loaders:
            return self._loaders[self._current][0]
        return self._given_loaders[0] if len(self._given_loaders) == 1 else None

    @property
    def batches_an_iteration(self) -> float | None:
        """Average number so far; `None` for a loop that iterates over its loader itself."""
        return self._drawn / self._ended if self._loaders and self._ended else None

    def cursor_for(self, loader: Iterable[Any]) -> tuple[int, Cursor]:
        """Return the number and the cursor of a loader that the script starts or continues to use."""
        number = next((i for i, (each, _) in enumerate(self._loaders) if each is loader), len(self._loaders))
        if number == len(self._loaders):
            if is_dataloader(loader):
                loader.give_to_session()
            cursor = cursor_over(loader)
            # a new loader starts at the beginning, even if the script has looked at its first batch
            position = self._loaded[number] if number < len(self._loaded) else None
            if self._to_leave_out is None:
                cursor.load_state_dict(position)
            else:
                self._to_leave_out.go_to(number, cursor, position, self._position.iteration)
            self._loaders.append((loader, cursor))
            self._enclosed.update(loaders_within(loader, self.registry.given))
            self._name_loader_differences(loader, number)
        return number, self._loaders[number][1]

    def _name_loader_differences(self, loader: Iterable[Any], number: int) -> None:
        if self._ranks.leads and number < len(self._loaded_settings) and loader not in self._given_loaders:
            there = Construction(fixed=self._loaded_settings[number])
            for what in describe(differences("loader", there, Construction(fixed=loader_settings(loader)))):
                logger.warning(what)

    def begin(self) -> None:
        """Record the structure of the state and the attributes when training starts, to compare them later."""
        if self._watch is not None:
            self._watch.begin()
        try:
            start = self._capture(gradients=False, reducers={})
            self._start, self._compared = (as_stored(start.trees), shapes_of(start)), start.structure
        except Exception as error:  # the first checkpoint reports it
            logger.debug("the structure of the state is not known: %s", error)

    def structure_change(self) -> str | None:
        """Describe, once, how the state differs from that of a script that starts again.

        A resume refuses such a checkpoint. Cheap while the state consists of the same tensors.
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

    def outline(self) -> CapturedState:
        """Return what a capture will most likely consist of, with the check that it can be loaded."""
        captured = self._capture(gradients=False, reducers={})
        self._structure = self._outlined = captured.structure
        self._round_trip = captured.round_trip = self.registry.round_trip(captured)
        return captured

    def capture(self) -> CapturedState:
        """Capture the state of this instant. TypeError names what cannot be stored."""
        captured = self._capture(gradients=True, reducers=self._reducers())
        if self._watch is not None:
            self._watch.captured(captured)
        self._structure = captured.structure
        is_known = self._outlined is None or self._outlined is captured.structure
        if self._round_trip is None or not self._round_trip.holds or not is_known:
            self._round_trip = captured.round_trip = self.registry.round_trip(captured)
            self._outlined = None
        if self._ranks.world_size > 1:
            # ranks that count iterations differently would store different moments under one number. A loader that
            # is not shared among ranks is left out: some ranks alone may read it, for example for a validation
            shared = [each.position for each in self._given_loaders if each.world_size > 1]
            places = [f"sample {each.taken} of epoch {each.epoch}" for each in shared]
            # ranks that train nothing together may update differently
            together = captured.shards or self.registry.replicated
            updates = [f"{self.updates} updates"] if together else []
            captured.must_match["data"] = ", ".join([f"{self._drawn} batches", *places, *updates])
        return captured

    def _reducers(self) -> dict[str, list[list[int]]]:
        """Return the buckets of each DistributedDataParallel: they decide on the last bits of sums."""
        found = {}
        for name, ddp in self.registry.replicated.items():
            from holdfast.state.ddp_buckets import bucket_layout  # only where there is a DistributedDataParallel

            try:
                layout = bucket_layout(ddp)
            except Exception as error:  # private API of torch may raise anything
                if name not in self._unknown_buckets:
                    self._unknown_buckets.add(name)
                    logger.warning(
                        "%s: the gradient buckets of torch %s are unknown (%s): after a resume the last bits of "
                        "losses may differ",
                        *(name, torch.__version__, error),
                    )
                continue
            if layout is not None:
                found[name] = layout
        return found

    def _capture(self, *, gradients: bool, reducers: dict[str, list[list[int]]]) -> CapturedState:
        positions = [cursor.state_dict() for _, cursor in self._loaders]
        settings = [loader_settings(loader) for loader, _ in self._loaders]
        captured = self.registry.capture(
            {
                "iteration": self._position.iteration,
                "lineage": self._position.lineage,
                "loaders": [*positions, *self._loaded[len(positions) :]],
                "loader": self._current,
                "batches_an_iteration": self.counted.batches,
                "batches_counted_from": self.counted.since,
                "loader_settings": [*settings, *self._loaded_settings[len(settings) :]],
                "enclosed": sorted(self._enclosed),
                "controller": self._controller.state_dict(),
                "reducers": reducers,
                "logger_runs": self.logger_runs,
                "values": saved_values(self.values),
                "watch": self._watch.state_dict() if self._watch is not None else {},
            },
            gradients=gradients,
        )
        has_updated = self.updates or self.replays_updates or captured.optimizer_state
        captured.precedes_updates = self.registry.sees_updates and not has_updated
        return captured

    @property
    def regions(self) -> Regions | None:
        """Function that returns this rank's parts of sharded tensors; see `restore.load`."""
        return self.registry.regions if self._ranks.world_size > 1 else None

    def load(
        self,
        store: Store,
        job: str,
        checkpoint: str,
        room: memoryview | None = None,
        *,
        degraded: bool = False,
        known: StoredManifest | None = None,
    ) -> LoadedCheckpoint:
        """Read and verify what this rank needs of a checkpoint, into `room` if given.

        Raises the errors of `restore.load`, which says what the other arguments do.
        """
        known = (known or read_stored(store, job, checkpoint)).seen_as(self.registry.localized)
        return restore.load(
            *(store, job, checkpoint),
            rank=self._ranks.rank,
            regions=self.regions,
            buffer=room,
            degraded=degraded,
            known=known,
        )

    def left_out(
        self,
        loaded: LoadedCheckpoint,
        skip: DataSkip | None,
        current: tuple[LeftOutData, ...],
        counted: BatchesAnIteration,
    ) -> tuple[LeftOutData, ...]:
        """Return the data that was left out before a checkpoint, and what `skip` leaves out after it.

        Args:
            current: what was left out on the way to the current state, whose iterations `skip` may name.
            counted: the batches of its iterations.

        Raises:
            IncompatibleCheckpoint: the data cannot be left out exactly; nothing has changed.
        """
        if skip is None:
            return loaded.manifest.left_out
        from holdfast.engine.left_out_data import of_skip

        before, cursors = loaded.manifest.left_out, [cursor for _, cursor in self._loaders]
        session = decode(loaded.state["session"], loaded.tensors, copy=True)
        since = current[len(before) :] if current[: len(before)] == before else ()
        iteration, world_size = loaded.manifest.iteration, self._ranks.world_size
        return (*before, of_skip(skip, iteration, session, cursors, since, counted, world_size))

    def report_left_out(self, history: History, reporter: Reporter) -> None:
        """Report data that was to be left out and is not, if there is any. Collective over all ranks then."""
        if self._to_leave_out is not None:
            self._to_leave_out.report(history, reporter)

    def inexact(self, loaded: LoadedCheckpoint | None) -> str | None:
        """Return the checkpoint whose degraded restore makes the state of any rank inexact, or None."""
        if loaded is None:
            return None
        if any(self._ranks.gather(b"lost" if loaded.lost else b"")):
            return loaded.id
        return loaded.manifest.inexact

    def check(self, manifest: Manifest) -> list[str]:
        """Check that a checkpoint can be loaded. Return messages about what differs.

        Raises:
            IncompatibleCheckpoint: it does not fit the objects.
            DamagedCheckpoint: no session can have written it.
        """
        rank, manifest = saved_rank(manifest, self._ranks.rank), self.registry.localized(manifest)
        trees, shapes = state_for(manifest, rank), restore.shapes(manifest, rank)
        require_position(trees)
        left = [] if self.trained else self.registry.leave_unfitting(trees, shapes)
        self.registry.check(trees, shapes)
        different = describe(self.registry.differences(trees, shapes))
        return [*left, *different, *self.registry.reordered(trees, shapes)]

    def obstacle_to_restore(self, loader: int | None = None) -> str | None:
        """Say why the running script cannot be restored in place; `None` if it can.

        `loader` is the index of the one in use when the checkpoint was taken; `None` for the current one.
        """
        if self.replays_updates:
            return "a CUDA graph of this script replays an optimizer step in memory that a restore would replace"
        if self._restorable_in_place is not None:
            return None if self._restorable_in_place else "restorable_in_place is False for this script"
        if any(loader.is_iterated_directly for loader in self._given_loaders):
            return "this script iterates over its loader itself: session.batches(...) can be restored in place"
        if not self._loaders and not any(isinstance(item, Variables) for item in self.registry.objects.values()):
            return (
                "this script neither draws batches from session.batches(...) nor keeps its position in "
                "holdfast.Variables, so the running loop would continue with other data: give "
                "loop=holdfast.Variables() if the loop counts session.iteration"
            )
        for _, cursor in self._loaders:
            if cursor.shared_iterator is not None:
                return (
                    f"this script draws batches from {cursor.shared_iterator}: it cannot go back. Give "
                    "session.batches an iterable that begins anew in every epoch"
                )
        if self._loaders and loader not in (None, self._current):
            return "the checkpoint was taken while the script used another loader"
        return None

    def not_repeated(self) -> list[str]:
        """Describe what the restore in place, which was just applied, leaves out."""
        if self._restorable_in_place or not self._loaders:
            return []
        return self.skipped_epochs.not_repeated(self._current, self.epoch)

    def limitations(self) -> list[str]:
        """Describe the limitations of loaders that the session was given."""
        own = [loader.limitation for loader in self._given_loaders if loader.limitation]
        return [*own, *(self._watch.lacking_states() if self._watch is not None else ())]

    def missing(self, loaded: LoadedCheckpoint | None) -> list[str]:
        """Describe what training changes, as far as its objects show it, and no checkpoint holds."""
        there = loaded.state if loaded is not None else {}
        saved = [keyword for keyword in there if keyword not in RESERVED]
        unsaved = self._watch.missing(saved) if self._watch is not None else []
        return [*unsaved, *self.registry.limitations()]

    def restore_buckets(self, loaded: LoadedCheckpoint) -> list[str]:
        """Restore the gradient buckets of the checkpoint in new processes, and describe failures.

        After a failure the next losses may differ in their last bits. Collective over all ranks.
        """
        messages = []
        layouts = loaded.state["session"].get("reducers", {})
        if loaded.manifest.world_size == self._ranks.world_size:  # otherwise the sums are others anyway
            for name in filter(layouts.__contains__, self.registry.replicated):  # in the order of all ranks
                from holdfast.state.ddp_buckets import restore_buckets

                try:
                    reason = restore_buckets(self.registry.replicated[name], layouts[name])
                except Exception as error:  # only the last bits of sums depend on it: the job goes on
                    reason = f"{type(error).__name__}: {error}"
                if reason is not None:
                    messages.append(f"gradients may be summed in another order than before: {reason}")
        return messages

    def failed(self, times: int) -> None:
        """Tell the pacing how many failures there were since the loaded checkpoint."""
        self._controller.job_history.failed(times)

    def apply(self, loaded: LoadedCheckpoint, left_out: Sequence[LeftOutData]) -> None:
        """Restore everything from the checkpoint, and leave out the data that it does not name yet.

        Args:
            left_out: the data that was left out in the lineage that training continues.

        Raises:
            IncompatibleCheckpoint: an object refused its state. At a start, nothing has changed then.
            RestoreFailed: and the objects could not be put back.
        """
        trees = loaded.state
        if loaded.manifest.world_size != self._ranks.world_size:
            from holdfast.format.merged_ranks import fitting_state

            trees = fitting_state(loaded.manifest, trees, self._ranks.world_size)
        self._enclosed.update(decode(loaded.state["session"].get("enclosed", []), {}, copy=True))
        trees = {keyword: tree for keyword, tree in trees.items() if keyword not in self._enclosed}
        restarted = not self.trained
        if restarted and self._watch is not None:
            self._watch.before_resume()
        self.registry.apply(trees, loaded.tensors, loaded.shapes, adopt=not loaded.borrowed, undo=restarted)
        if copy := self._ranks.rank // loaded.manifest.world_size:
            from holdfast.format.merged_ranks import differing_keywords

            self.registry.branch_rng(copy, differing_keywords(loaded.manifest))
        self._drawn = self.updates = self._ended = 0
        state = decode(loaded.state["session"], loaded.tensors, copy=True)
        self._position.iteration = loaded.manifest.iteration
        pending, world_size = left_out[len(loaded.manifest.left_out) :], loaded.manifest.world_size
        self._loaded, self.counted = state["loaders"], BatchesAnIteration(since=self._position.iteration)
        if world_size == self._ranks.world_size:
            self.counted = BatchesAnIteration.saved(state, self._position.iteration)
        self._to_leave_out = None
        if pending or any(LEAVE_OUT in each for each in self._loaded):
            from holdfast.engine.left_out_data import ToLeaveOut  # few restores leave out data

            self._to_leave_out = ToLeaveOut(self._ranks)
            self._to_leave_out.begin(pending, self._position.iteration, self._loaded, world_size)
        self._loaded_settings = state.get("loader_settings", [])
        self.logger_runs = {} if loaded.manifest.origin else state.get("logger_runs", {})  # not a fork's source's
        self.values = values_of(state)
        if restarted:  # in place, the current measurements are better
            self._controller.load_state_dict(state["controller"])
        self._controller.restored(self._position.iteration)
        self.restore_count += 1
        for i, (_, cursor) in enumerate(self._loaders):
            position = self._loaded[i] if i < len(self._loaded) else None
            if self._to_leave_out is None:
                cursor.load_state_dict(position)
            else:
                self._to_leave_out.return_to(cursor, position)
        if self._watch is not None:
            self._watch.restored(state.get("watch", {}), self._epochs(), is_in_place=not restarted)
