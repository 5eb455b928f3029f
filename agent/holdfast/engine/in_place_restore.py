"""Restore in place: restore a running script to a checkpoint without restarting it, and tell the script."""

from __future__ import annotations

import contextlib
import functools
import logging
import time

from holdfast.checkpoint.restore import LoadedCheckpoint, explain
from holdfast.checkpoint.retention_queue import Protector
from holdfast.checkpoint.stored_manifest import StoredManifest, read_stored
from holdfast.distributed.ranks import Ranks, RanksLost
from holdfast.engine import left_out_data
from holdfast.engine.coordination import RestoreTarget
from holdfast.engine.lifecycle import WRITE_SECONDS
from holdfast.engine.training import Training
from holdfast.errors import HoldfastError, RestoreFailed
from holdfast.format.manifest import Manifest
from holdfast.protocol.ids import checkpoint_id, parse_checkpoint_id
from holdfast.protocol.wire import LeftOutData, RestoreOrder
from holdfast.save.history import History
from holdfast.save.saver import Saver
from holdfast.store import Lineage
from holdfast.system import supervisor_channel
from holdfast.telemetry.reporter import Reporter

logger = logging.getLogger("holdfast")

RESTART_ADVICE = "restart the script, or run it under `holdfast run`, which does"
ORDER_ADVICE = "run `holdfast restore`, which the next start carries out"


class CheckpointToRestore:
    """The checkpoint to restore. Its manifest is read and checked once on each rank."""

    def __init__(self, history: History, checkpoint: str) -> None:
        self.id, self._history = checkpoint, history

    @property
    def manifest(self) -> Manifest:
        return self.stored.manifest

    @functools.cached_property
    def stored(self) -> StoredManifest:
        return read_stored(self._history.store, self._history.job, self.id)


class InPlaceRestore:
    """Restores training at a boundary, on all ranks of a job or on none."""

    def __init__(self, training: Training, saver: Saver, reporter: Reporter, ranks: Ranks) -> None:
        self._training, self._saver, self._history, self._reporter = training, saver, saver.history, reporter
        self._ranks = ranks
        self._differing: list[str] = []
        """Messages about settings of the checkpoint that differ from those of the script."""
        self.half_applied = False
        """The state may be half of one checkpoint and half of another."""

    def restore(self, wanted: RestoreTarget) -> bool:
        """Save the current state, verify the target, record the new lineage, apply.

        Until the lineage is recorded nothing has changed, and a failure leaves training as it is.

        Returns:
            Whether this process must end now, to be restarted for the restore.

        Raises:
            RestoreFailed: applying failed half-way, and so did going back.
            RanksLost: another rank is gone, and nothing has changed on this one.
        """
        started, checkpoint, order = time.perf_counter(), wanted.checkpoint, wanted.order
        target = CheckpointToRestore(self._history, checkpoint)
        # even if its order is cancelled meanwhile
        self._saver.retention.protect(Protector.RESTORE, checkpoint)
        try:
            reason = self._ranks.decide(lambda: self._why_not_in_place(target), str | None)
            if reason is not None:
                return self._at_next_start(target, wanted, reason)
            self._reporter.order(order, "restoring")
            safety = self._save_current_state(target)
            # read into a free snapshot buffer: a restore then allocates no memory
            with self._saver.snapshots.borrowed_memory() as room:
                loaded, restored = self._take_back(target, safety, wanted, room)
        except (RanksLost, RestoreFailed):  # the order stays open for the next start
            raise
        except Exception as error:  # a failed restore leaves training as it was
            self._refuse(checkpoint, order, error)
            return False
        finally:
            self._saver.retention.protect(Protector.RESTORE, None)
        seconds, position = time.perf_counter() - started, self._reporter.position
        self._reporter.lineage_began(self._history.lineage)
        self._reporter.stall("restore", seconds, position.iteration, position.lineage)
        if restored:
            if self._ranks.leads:
                logger.info(
                    "%s: restored to iteration %d, lineage %d; the previous state is kept as %s",
                    *(self._history.job, position.iteration, position.lineage, safety),
                )
                if wanted.skip is not None:
                    self._reporter.notice(
                        "info", "left_out", left_out_data.describe(self._history.lineage.left_out[-1])
                    )
            self._reporter.trained_elsewhere(loaded.manifest.fingerprint)
            for what in self._differing:
                self._reporter.notice("warning", "settings", what)
            for what in self._training.not_repeated():
                self._reporter.notice("warning", "restore", what)
            self._reporter.order(order, "restored", seconds=seconds, safety=safety)
        return False

    def _take_back(
        self,
        target: CheckpointToRestore,
        safety: str,
        wanted: RestoreTarget,
        room: memoryview | None,
    ) -> tuple[LoadedCheckpoint, bool]:
        """Load, record the new lineage, apply; return whether it was applied, not reverted."""
        loaded = self._ranks.run_on_all(lambda: self._load(target, room, degraded=wanted.degraded))
        left_out = self._left_out(loaded, wanted)
        inexact, before = self._training.inexact(loaded), self._history.lineage
        self._history.begin_lineage(
            loaded.manifest.iteration, target.id, wanted.order, left=safety, inexact=inexact, left_out=left_out,
            trouble=wanted.trouble,
        )  # fmt: skip
        self.half_applied = True  # also where Ctrl-C interrupts it
        restored = self._apply_or_return(loaded, safety, wanted.order, before=before)
        if loaded.repaired or loaded.lost:  # in memory: its files are still damaged
            self._history.mark_damaged(loaded.id)
        self._reporter.repaired(loaded.id, loaded.repaired, loaded.loss)
        self.half_applied = False
        return loaded, restored

    def _left_out(self, loaded: LoadedCheckpoint, wanted: RestoreTarget) -> tuple[LeftOutData, ...]:
        """Return the data that the new lineage leaves out, if all ranks can."""
        current = self._history.lineage.left_out
        training = self._training
        return self._ranks.run_on_all(lambda: training.left_out(loaded, wanted.skip, current, training.counted))

    def _at_next_start(self, target: CheckpointToRestore, wanted: RestoreTarget, reason: str) -> bool:
        """Under a supervisor, save the current state and end; without one, leave the order for the next start."""
        order = wanted.order
        if order is None or wanted.trouble is not None:
            raise HoldfastError(f"{reason}; {ORDER_ADVICE}")
        if not self._ranks.decide(supervisor_channel.is_supervised, bool):
            message = f"the requested restore of {target.id} waits for the next start: {reason}; {RESTART_ADVICE}"
            self._reporter.notice("warning", "restore", message)
            return False
        safety = self._save_current_state(target)
        with self._saver.snapshots.borrowed_memory() as room:
            loaded = self._ranks.run_on_all(lambda: self._load(target, room, degraded=wanted.degraded))
            self._left_out(loaded, wanted)
        noted = RestoreOrder(
            id=order, checkpoint=target.id, fence=self._history.attempt, degraded=wanted.degraded, skip=wanted.skip
        )
        self._ranks.decide(lambda: supervisor_channel.request_relaunch(noted), str)
        message = f"restarting the script to restore {target.id}: {reason}"
        self._reporter.notice("info", "relaunch", f"{message}. The current state is kept as {safety}")
        return True

    def _refuse(self, checkpoint: str, order: str | None, error: Exception) -> None:
        error = explain(self._history.store, self._history.job, checkpoint, error)
        if not self._history.fenced:  # else the newer attempt carries out the order
            self._reporter.order(order, "failed", reason=str(error))
        self._reporter.notice("error", "restore", f"restore of {checkpoint} refused: {error}")

    def _why_not_in_place(self, target: CheckpointToRestore) -> str | None:
        loader = None
        with contextlib.suppress(OSError, HoldfastError):  # loading it will say what is wrong with it
            loader = target.manifest.state["session"]["loader"]
        return self._training.obstacle_to_restore(loader)

    def _save_current_state(self, target: CheckpointToRestore) -> str:
        """Make the current state durable, and return its checkpoint.

        Nothing is written if the target does not fit. Damage of its bytes shows later, when they are read.
        """
        self._differing = self._ranks.run_on_all(lambda: self._training.check(target.manifest))
        self._ranks.run_on_all(self._await_settled)
        self._history.update_lineage()
        position = self._reporter.position
        here = checkpoint_id(position.iteration, position.lineage)
        if self._ranks.decide(lambda: self._history.head == here, bool):  # as while training is paused
            return here
        return self._ranks.run_on_all(self._take_safety)

    def _load(
        self, target: CheckpointToRestore, room: memoryview | None = None, *, degraded: bool = False
    ) -> LoadedCheckpoint:
        history = self._history
        return self._training.load(
            history.store, history.job, target.id, room, degraded=degraded, known=target.stored
        )

    def _await_settled(self) -> None:
        if not self._saver.wait_settled(WRITE_SECONDS):
            raise HoldfastError("the previous checkpoint is still being written")

    def _take_safety(self) -> str:
        """Take a durable safety checkpoint, so that the restore can be undone."""
        run = self._saver.take(self._training.capture, "safety", at_once=True)
        if run is None or not run.wait_settled(WRITE_SECONDS) or run.state != "durable":
            reason = run.result.reason if run is not None else "it could not be taken"
            raise HoldfastError(f"no safety checkpoint of the current state: {reason}")
        return run.id

    def _apply_or_return(
        self, loaded: LoadedCheckpoint, safety: str, order: str | None, *, before: Lineage
    ) -> bool:
        """Apply the checkpoint; if that fails half-way, go back to the safety checkpoint and return `False`."""
        try:
            self._ranks.run_on_all(lambda: self._training.apply(loaded, self._history.lineage.left_out))
        except RanksLost:
            return True  # it is applied on this rank, and the lineage is recorded
        except Exception as error:  # a user's load_state_dict may raise anything
            try:
                iteration, back = parse_checkpoint_id(safety)[0], CheckpointToRestore(self._history, safety)
                self._history.begin_lineage(
                    iteration, safety, left=loaded.id, inexact=before.inexact, left_out=before.left_out
                )
                self._ranks.run_on_all(lambda: self._training.apply(self._load(back), before.left_out))
            except Exception as worse:  # the state is a mixture: no rank may train on it
                raise RestoreFailed(
                    f"restoring {loaded.id} failed ({error}), and so did going back to {safety} ({worse}); "
                    f"restart the script: it resumes from {safety}"
                ) from error
            reason = f"{error}; training went back to {safety}"
            self._reporter.order(order, "failed", reason=reason)
            self._reporter.notice("error", "restore", f"restore of {loaded.id} failed: {reason}")
            return False
        return True
