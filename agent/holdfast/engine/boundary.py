"""The boundary between two iterations: settle finished checkpoints, measure the iteration, decide, act.

One module, since all that acts on training acts here, and in one order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.retention_queue import Protector
from holdfast.distributed.ranks import Ranks, RanksLost
from holdfast.engine import optional_parts
from holdfast.engine.coordination import (
    AGREE_EVERY_SECONDS,
    CollectiveCall,
    Decision,
    DetachedCoordinator,
    Halt,
    Requests,
    RestoreTarget,
    Situation,
    coordinator_for,
    decide,
)
from holdfast.engine.lifecycle import WRITE_SECONDS, Life, Lifecycle, RestoreCallbacks
from holdfast.engine.operator import MAX_WITHHELD_SECONDS, Operator, RestoreModeReport
from holdfast.engine.startup import Start, Startup, publish_attempt
from holdfast.engine.training import Training
from holdfast.engine.unsaved_work import UNCOUNTED_UPDATES, UnsavedWork
from holdfast.errors import RestoreFailed
from holdfast.pacing import FIRST_SECONDS, Controller
from holdfast.protocol.ids import checkpoint_id
from holdfast.save.run import Run, RunState
from holdfast.save.saver import Saver
from holdfast.store.records import record_ending
from holdfast.system.preemption import PreemptionHandler
from holdfast.system.supervisor_channel import ProgressFile
from holdfast.telemetry.iteration_metrics import IterationMetrics
from holdfast.telemetry.reporter import Reporter

if TYPE_CHECKING:
    from holdfast.engine.in_place_restore import InPlaceRestore
    from holdfast.engine.live_values import LiveValues
    from holdfast.engine.probing import Prober
    from holdfast.save.compression import Compression

ASK_STORE_SECONDS = 60.0
"""Least time between two checks in the store whether a newer attempt has begun."""


class Boundary:
    """Ends iterations, on all ranks of a job at the same one. For the training thread only."""

    def __init__(
        self,
        *,
        training: Training,
        controller: Controller,
        saver: Saver,
        reporter: Reporter,
        ranks: Ranks,
        operator: Operator,
        requests: Requests,
        startup: Startup,
        meter: IterationMetrics,
        preemption: PreemptionHandler,
        lifecycle: Lifecycle,
        compression: Compression | None,
        progress: ProgressFile | None,
        server: str | None,
    ) -> None:
        self._training, self._controller, self._saver, self._history = training, controller, saver, saver.history
        self._reporter, self._ranks, self._operator, self._requests = reporter, ranks, operator, requests
        self._meter, self._preemption, self._lifecycle = meter, preemption, lifecycle
        self._position, self._on_trouble = reporter.position, operator.on_trouble
        self._trouble = optional_parts.trouble_rule(self._on_trouble, meter, saver, reporter, ranks)
        self._compression, self._progress, self._server = compression, progress, server
        self._startup: Startup | None = startup
        """Until training begins."""
        self.unsaved_work = UnsavedWork(training, saver.history, reporter, ranks)
        self.restore_callbacks = RestoreCallbacks(self._position)
        self._collective_call: CollectiveCall | None = None
        """Of an integration; the same on all ranks."""
        self._restore_mode = RestoreModeReport(training, reporter)
        self._in_place: InPlaceRestore | None = None
        """Made for the first restore."""
        self._prober: Prober | None = None
        """Measures data loading, as an operator requested."""
        self._values: LiveValues | None = None
        """Made for the first value of the script, or for one that was recorded."""
        self._coordinator = coordinator_for(ranks, self._choose)
        self._taken_at = time.monotonic()
        """When training began, or began its last checkpoint."""
        self._ranks_asked_at, self._store_asked_at = 0.0, -ASK_STORE_SECONDS
        self._torn = 0
        """Number of copies that were discarded because tensors changed meanwhile."""

    def attach(self) -> None:
        """Take part in the optimizer steps of the script, until the training closes."""
        ends = self._meter.clock.update_ends, self._saver.snapshots.wait_copy_ended
        self._training.around_updates(self.before_update, *ends, self._may_act_after)

    def call_together(self, call: CollectiveCall) -> None:
        """Make a call on all ranks whenever it is due."""
        self._collective_call = call

    @property
    def values(self) -> LiveValues:
        """Values of the script that operators change."""
        if self._values is None:
            from holdfast.engine.live_values import LiveValues  # few scripts have them

            parts = self._training, self._history, self._operator, self._reporter, self._ranks
            self._values = LiveValues(*parts)
        return self._values

    @property
    def in_place_restore(self) -> InPlaceRestore:
        """Restores the running script."""
        if self._in_place is None:
            from holdfast.engine.in_place_restore import InPlaceRestore  # few attempts are restored

            self._in_place = InPlaceRestore(self._training, self._saver, self._reporter, self._ranks)
        return self._in_place

    def resume(self) -> None:
        """Resume from the checkpoint that an open request names, else from the best one."""
        assert self._startup is not None
        self.restore_callbacks.begin()
        self._begin(self._startup, self._startup.choose())

    def _begin(self, startup: Startup, start: Start) -> None:
        """Begin training from what is in place; after an interruption the session can still resume."""
        startup.begin(start)
        self._training.report_left_out(self._history, self._reporter)
        self._startup = None
        if self._ranks.leads and self._history.has_values:
            self.values.begin()
        self._lifecycle.enter(Life.TRAINING)
        if start.loaded is not None:
            self.restore_callbacks.run()
        if (pause := self._ranks.decide(self._standing_halt, Halt | None)) is not None:
            self._halt(pause)
            if (status := self._lifecycle.exit_status) is not None:
                raise SystemExit(status)
        self._coordinator.begin(self._position.iteration)
        self._taken_at = time.monotonic()
        self._meter.clock.begin()

    def run(self, metrics: dict[str, Any]) -> None:
        """End an iteration: begin a checkpoint and carry out requests, if any."""
        self._training.boundary()
        self._report_unsaved()
        if self._lifecycle.state is Life.STARTING:
            self._begin_afresh()
        try:
            self._training.report_left_out(self._history, self._reporter)
            self.settle()
            self._measure(metrics)
        finally:  # even after an error here: the other ranks reach the same boundary and wait for this one
            self._act_with_other_ranks()
        if self._prober is not None and self._prober.at_boundary(busy=self._saver.active):
            self._prober = None

    def take_final(self) -> None:
        """Checkpoint the end of training, so that a restarted job does not repeat work."""
        self._send_metrics()
        if not self._position.iteration or not self._saver.wait_settled(WRITE_SECONDS):
            return
        if self._training.unsaved_batches or self._training.unsaved_updates:
            self.unsaved_work.report_no_final(requested=self._requests.checkpoint)
            return
        try:
            if not self._coordinator.end(self._position.iteration):
                return
            self.settle()
            self._history.update_lineage()
            if self._ranks.decide(lambda: self._history.head != self._here, bool):
                self._take(Decision(checkpoint="final", at_once=True))
                self._report_unsaved()
            if (call := self._collective_call) is not None:
                self._saver.wait_settled(WRITE_SECONDS)
                if self._ranks.decide(lambda: call.is_due(at_end=True), bool):
                    call()
        except RanksLost as error:
            self._reporter.notice("warning", "ranks", f"no final checkpoint: {error}")

    def note_ending(self, reason: str) -> None:
        """Record in the store how the attempt ends."""
        history = self._history
        if self._ranks.leads and history.attempt:
            record_ending(history.store, history.job, history.attempt, reason, self._training.trained)

    # The steps of `run`

    def _report_unsaved(self) -> None:
        for code, what in self._training.unsaved():
            self._reporter.notice("warning", code, what)

    def settle(self) -> None:
        """Process the checkpoints that settled since the last iteration."""
        for run in self._saver.settle():
            self._meter.checkpoint_settled(run.cost)
            if self._compression is not None:
                self._compression.settled(run)
            if run.result.fenced:
                self._give_way()
            if run.state is RunState.TORN:
                self._requests.retry = True
                self._training.expect_early_updates()
                self._report_torn(run)

    def _report_torn(self, run: Run) -> None:
        """Report a discarded copy. After the second one, training waits for copies: a third would be torn, too."""
        self._torn += 1
        what = "taken again at once"
        if self._torn == 2:
            what = (
                "from now on training waits while a checkpoint is copied, because something other than an "
                "optimizer step changes tensors, such as a swap of weights around an evaluation, an average, or a "
                "write after session.step. Make the change before session.step to copy while training continues"
            )
        if self._torn <= 2:
            self._reporter.notice("warning", "torn", f"{run.result.reason}; {what}")

    def _measure(self, metrics: dict[str, Any]) -> None:
        """Measure the iteration, and read the settings of operators."""
        self._request_exit()
        if self._reporter.has_server and self._reporter.is_fenced and self._is_replaced():
            self._give_way()
        if self._preemption.is_requested and self._lifecycle.state in (Life.DETACHED, Life.REPLACED):
            self._lifecycle.enter(Life.PREEMPTED)  # there is no decision to wait for
        self._meter.end_iteration(metrics)
        if self._trouble is not None:
            self._trouble.report()
        if self._values is not None:
            self._values.end_iteration(may_change=self._lifecycle.state is Life.TRAINING)
        if self._reporter.has_server:
            self._operator.follow()
            if self._on_trouble != self._operator.on_trouble:
                self._follow_rule()
            if self._requests.probe:
                from holdfast.engine.probing import Prober  # few jobs are asked for it

                self._requests.probe, self._prober = False, Prober(self._training, self._meter, self._reporter)
            self._restore_mode.update(self._on_trouble)
        if self._progress is not None:
            self._progress.update(self._position.iteration)

    def _follow_rule(self) -> None:
        """Follow the rule about wrong losses that an operator has set; other ranks watch as the script says."""
        self._on_trouble = self._operator.on_trouble
        if self._trouble is not None:
            self._trouble.change(self._on_trouble)
        else:
            self._trouble = optional_parts.trouble_rule(
                self._on_trouble, self._meter, self._saver, self._reporter, self._ranks
            )

    def _act(self, decision: Decision) -> None:
        if decision.value is not None:
            self.values.apply(decision.value)
        if decision.end:
            self._end(decision)
        elif decision.restore is not None:
            self._restore(decision.restore)
            self._coordinator.begin(self._position.iteration)
        elif decision.halt is not None:
            if self._halt(decision.halt):
                self._coordinator.begin(self._position.iteration)
        elif decision.checkpoint is not None:
            self._take(decision)
        if decision.call and self._collective_call is not None:
            self._collective_call()
        if self._saver.unprepared:
            self._saver.prepare(self._training.outline)
            self._report_structure()
        self._meter.begin_iteration(in_flight=self._saver.active)

    # Reading what a decision depends on

    def _choose(self, iteration: int) -> Decision:
        """Decide for the boundary after `iteration`, this one or a later one, and clear what was decided on."""
        situation = self._situation(iteration)
        decision = decide(situation)
        if decision.restore is not None:
            self._accept_restore(decision.restore)
        elif decision.halt is not None:
            self._operator.accept(decision.halt.order)
            if self._trouble is not None:
                self._trouble.accept_halt()
        elif decision.checkpoint is not None and not decision.end:
            if situation.withheld and not (situation.requested or situation.retry):
                self._operator.report_withheld()
            self._requests.checkpoint = self._requests.retry = False
        value = self._values.due(iteration, may_wait=not decision.end) if self._values is not None else None
        return decision if value is None else replace(decision, value=value)

    def _accept_restore(self, target: RestoreTarget) -> None:
        self._requests.restore = None
        self._operator.accept(target.order)
        if self._trouble is not None:
            self._trouble.accept()

    def _situation(self, iteration: int) -> Situation:
        lineage = self._position.lineage
        if self._is_exit_requested():  # what else there is need not be read: a fault there must not delay the end
            profile = self._controller.profile if not self._saver.shares.has_limited else None
            return Situation(
                lineage=lineage,
                end_requested=True,
                grace_left_seconds=self._preemption.grace_left_seconds,
                checkpoint_seconds=profile.snapshot_seconds + profile.persist_seconds if profile else None,
            )
        saver, controller, plan = self._saver, self._controller, self._controller.plan
        snapshots = saver.snapshots
        is_early = plan is None and controller.trained_seconds < FIRST_SECONDS
        return Situation(
            lineage=lineage,
            restore=self._restore_target(),
            halt=self._due_halt(),
            requested=self._requests.checkpoint,
            retry=self._requests.retry,
            due=not (self._trouble is not None and self._trouble.withholds) and self._is_due(iteration),
            withheld=time.monotonic() - self._taken_at >= MAX_WITHHELD_SECONDS and self._operator.withholds,
            memory_ready=not (saver.unprepared and is_early),
            has_room=(snapshots.free if iteration == self._position.iteration else snapshots.has_room)
            and not saver.is_sending,
            in_flight=saver.under_way,
            max_in_flight=controller.max_in_flight,
            mode=controller.mode,
            call_due=self._collective_call is not None and self._collective_call.is_due(at_end=False),
        )

    def _restore_target(self) -> RestoreTarget | None:
        if self._requests.restore is not None:
            return self._requests.restore
        order = self._operator.restore() if self._reporter.has_server else None
        if order is not None:
            return RestoreTarget(order.checkpoint, order.id, order.degraded, order.skip)
        return self._trouble.target() if self._trouble is not None else None

    def _due_halt(self) -> Halt | None:
        order = self._operator.training_order()
        if order is not None and order.action == "continue":  # training goes on already
            self._operator.accept(order.id)
        elif order is not None:
            return Halt(order.action, order.who, order.id)
        return self._trouble.halt if self._trouble is not None else None

    def _is_due(self, iteration: int) -> bool:
        if not self._is_interval_over(iteration) or not self._saver.shares.may_begin():
            return False
        self._meter.update_controller()  # after which it may not be
        return self._is_interval_over(iteration)

    def _is_interval_over(self, iteration: int) -> bool:
        """Return whether the interval ends with this iteration, which may be a later one."""
        ahead = iteration - self._position.iteration
        return self._controller.due(iteration, time.monotonic() - self._taken_at, ahead=ahead)

    def _may_act_after(self, iteration: int) -> bool:
        """Return whether that boundary is likely to take a checkpoint."""
        known = self._coordinator.may_act_after(iteration)
        return known if known is not None else self._controller.plan is None or self._is_interval_over(iteration)

    def _is_exit_requested(self) -> bool:
        if self._preemption.is_requested or self._ranks.world_size == 1:
            return self._preemption.is_requested
        now = time.monotonic()
        if now - self._ranks_asked_at < AGREE_EVERY_SECONDS:
            return False
        self._ranks_asked_at = now
        return self._ranks.is_exit_requested

    def _request_exit(self) -> None:
        """Have rank 0 learn that this rank has received SIGTERM."""
        if self._preemption.is_requested and not self._ranks.leads:
            self._ranks.request_exit()

    # Acting on a decision

    def _take(self, decision: Decision) -> None:
        assert decision.checkpoint is not None
        started = time.perf_counter()
        if decision.lineage:
            self._history.follow_lineage(decision.lineage)
        try:
            self._meter.update_controller()  # what came before belongs to the time before
        finally:  # the other ranks count on this one
            self._saver.take(
                self._training.capture,
                decision.checkpoint,
                mode=decision.mode,
                at_once=decision.at_once or self._torn >= 2 or self._training.may_replay_updates,
            )
            self._controller.started(self._position.iteration)
            self._taken_at = time.monotonic()
        self._report_structure()
        if (what := self._training.replay_notice()) is not None:
            self._reporter.notice("warning", "cuda_graph", what)
        self._meter.clock.stall("snapshot_wait", time.perf_counter() - started)

    def _report_structure(self) -> None:
        """Report a change of the objects after which this script could not resume when it starts again."""
        if (change := self._training.structure_change()) is not None:
            self._reporter.notice(
                "warning",
                "structure",
                "the objects have changed since training began: checkpoints from iteration "
                f"{self._position.iteration:,} on cannot be loaded when this script restarts. Compared with a "
                f"checkpoint of the start: {change}. Have the script make this change before session.resume()",
            )

    def _restore(self, target: RestoreTarget) -> None:
        self._meter.update_controller()
        relaunches, restores, in_place = False, self._training.restore_count, self.in_place_restore
        self._lifecycle.enter(Life.RESTORING)
        self.restore_callbacks.begin()
        try:
            relaunches = in_place.restore(self._ranks.decide(lambda: target, RestoreTarget))
        finally:
            after = Life.RELAUNCHED if relaunches else Life.TRAINING
            self._lifecycle.enter(Life.HALF_RESTORED if in_place.half_applied else after)
        self._saver.retention.protect(Protector.SCRIPT, None)
        if self._ranks.leads:
            publish_attempt(self._history, self._server)
        is_restored = self._training.restore_count != restores
        if self._values is not None and is_restored:
            self._values.restored()
        if self._trouble is not None and is_restored:  # before the first decision about the new lineage
            self._trouble.restarted(self._position.iteration)
        if is_restored:
            self.restore_callbacks.run()
        self._meter.clock.restart()

    def _send_metrics(self) -> None:
        """Send the last metrics to rank 0 before the ranks end: it waits for them in the final checkpoint."""
        if not self._ranks.leads:
            self._meter.send_samples(wait=True)

    def _end(self, decision: Decision) -> None:
        """Take the final checkpoint after SIGTERM, if there is time."""
        saved = "no time for a checkpoint"
        try:
            self._send_metrics()
            if decision.checkpoint is not None:
                is_saved = self._save(decision, lambda: self._preemption.grace_left_seconds)
                saved = f"saved as {self._here}" if is_saved else "the checkpoint was not durable in time"
            message = f"SIGTERM received; ending after iteration {self._position.iteration:,}: {saved}"
            self._reporter.notice("warning", "preempted", message)
        finally:
            self._lifecycle.enter(Life.PREEMPTED)

    def _save(self, decision: Decision, seconds_left: Callable[[], float]) -> bool:
        """Take a checkpoint and wait until it is durable; return whether it is."""
        if self._saver.wait_settled(seconds_left()):
            self.settle()
            self._take(decision)
        return self._saver.wait_settled(seconds_left()) and self._history.head == self._here

    def _halt(self, halt: Halt) -> bool:
        """Pause or end training; return whether a checkpoint was restored while it was paused."""
        from holdfast.engine.halting import Halting  # few jobs are halted

        restores = self._training.restore_count
        Halting(
            self._history, self._operator, self._reporter, self._ranks, self._lifecycle, self._progress,
            save=self._save_here, restore=self._restore_while_paused,
            is_restore_due=lambda: self._restore_target() is not None,
            is_exit_requested=self._is_exit_requested, request_exit=self._request_exit,
        ).act(self._ranks.decide(lambda: halt, Halt))  # fmt: skip
        self._meter.clock.restart()
        self._taken_at = time.monotonic()
        return self._training.restore_count != restores

    def _standing_halt(self) -> Halt | None:
        """Return the pause that the attempt before this one was in."""
        if not self._history.has_halts:
            return None
        from holdfast.engine.halting import standing_halt

        return standing_halt(self._history, self._operator)

    def _save_here(self) -> bool:
        """Make the current state durable, unless it is; return on all ranks whether it is."""
        if not self._position.iteration:
            return True
        if not self._ranks.decide(lambda: self._history.head == self._here, bool):
            lineage = self._history.lineage.number
            decision = Decision(checkpoint="requested", at_once=True, lineage=lineage)
            self._save(decision, lambda: WRITE_SECONDS)
        return self._ranks.decide(lambda: self._history.head == self._here, bool)

    def _restore_while_paused(self) -> None:
        target = self._restore_target() if self._ranks.leads else None
        if target is not None:
            self._accept_restore(target)
        self._restore(target or RestoreTarget())

    # Beginning, and ending together with the other ranks

    @property
    def _here(self) -> str:
        return checkpoint_id(self._position.iteration, self._position.lineage)

    def _begin_afresh(self) -> None:
        """Begin at iteration 0: the loop has neither resumed nor drawn batches from the session."""
        assert self._startup is not None
        try:
            unused = self._startup.unused_checkpoints()
            self._begin(self._startup, Start())
        except RanksLost as error:
            self._detach(error)
            return
        if unused:
            self._reporter.notice("warning", "afresh", unused)

    def _act_with_other_ranks(self) -> None:
        """Act at this boundary, and let the ranks agree on the next."""
        iteration = self._position.iteration
        try:
            try:
                self._act(self._coordinator.decision(iteration))
            except RestoreFailed:  # no rank goes on
                raise
            except BaseException:  # the other ranks wait for what comes next
                self._coordinator.look_ahead(self._position.iteration)
                raise
            self._coordinator.look_ahead(self._position.iteration)
        except RanksLost as error:
            self._detach(error)

    def _detach(self, error: RanksLost) -> None:
        """Stop coordinating with the other ranks: one of them is lost. The others notice when the group closes."""
        self._stop_coordinating()
        if self._lifecycle.state in (Life.STARTING, Life.TRAINING):
            self._lifecycle.enter(Life.DETACHED)
        self._reporter.notice("error", "ranks", f"{error}; checkpoints stop, training continues as far as it can")

    def _is_replaced(self) -> bool:
        """Check in the store whether a newer attempt has begun, as the server reports; rarely, since it may be
        slow.
        """
        now = time.monotonic()
        if self._lifecycle.state is Life.REPLACED or now < self._store_asked_at + ASK_STORE_SECONDS:
            return False
        self._store_asked_at = now
        return self._history.fenced

    def _give_way(self) -> None:
        """Stop saving and reporting: a newer attempt of the job has begun."""
        if self._lifecycle.state is Life.REPLACED:
            return
        self._lifecycle.enter(Life.REPLACED)
        self.unsaved_work.report_replaced()
        self._reporter.stop()
        self._stop_coordinating()

    def _stop_coordinating(self) -> None:
        self._coordinator = DetachedCoordinator()
        self._ranks.close()

    def before_update(self) -> None:
        """Before an optimizer step: wait until the copy under way allows it."""
        if self._lifecycle.state is Life.FORKED:  # this process has no copying thread
            return
        if self._training.updates == UNCOUNTED_UPDATES and not self._training.trained:
            self.unsaved_work.report_first_updates()
        waited = self._saver.snapshots.wait_copied()
        if waited:
            self._meter.clock.stall("snapshot_wait", waited)
        self._meter.clock.update_begins()
