"""Restore in place: take a running script back to a checkpoint, without restarting it."""

from __future__ import annotations

import contextlib
import logging
import time

from holdfast.checkpoint import restore
from holdfast.checkpoint.restore import Loaded
from holdfast.checkpoint.retention_queue import Protector
from holdfast.distributed.ranks import Ranks, RanksLost
from holdfast.engine.checkpointer import Checkpointer
from holdfast.engine.training import Training
from holdfast.errors import HoldfastError, RestoreFailed
from holdfast.format.manifest import Manifest
from holdfast.protocol.messages import RestoreMode, RestoreOrder, parse_checkpoint_id
from holdfast.system import supervisor_channel
from holdfast.telemetry.reporter import Reporter

logger = logging.getLogger("holdfast")

LOOK_SECONDS = 5.0
"""A loop shows what it is by its first iteration as a rule; one that begins to draw otherwise is seen so soon."""
WAY_OUT = "start the script again, or have `holdfast run` do that by itself"
FROM_OUTSIDE = (
    "order it by `holdfast restore`, which the next start carries out, or give loop=holdfast.Variables() when the "
    "loop counts session.iteration"
)
WRITE_SECONDS = 600.0
"""How long a restore waits for the checkpoint of the state it leaves."""


class InPlaceRestore:
    """Takes training back at the boundary between two iterations, on all ranks of a job or on none."""

    def __init__(self, training: Training, checkpoints: Checkpointer, reporter: Reporter, ranks: Ranks) -> None:
        self._training, self._checkpoints, self._reporter = training, checkpoints, reporter
        self._ranks = ranks
        self._told: RestoreMode | None = None
        self._start_seconds: float | None = None
        self._look_at = 0.0
        self.half_applied = False
        """The state may be half of one checkpoint and half of another."""

    def tell_mode(self) -> None:
        """How an order would be carried out, at the first boundary and when it is another way than before."""
        now = time.monotonic()
        if not self._reporter.heard or now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        reason = self._training.no_way_back()
        way: RestoreMode = "relaunch" if supervisor_channel.is_supervised() else "next_start"
        mode = "in_place" if reason is None else way
        if mode != self._told:
            start_seconds = supervisor_channel.age_seconds() if self._told is None else self._start_seconds
            self._told, self._start_seconds = mode, start_seconds
            self._reporter.restores(mode, reason or "", start_seconds)

    def rewind(self, checkpoint: str, order: str | None) -> bool:
        """Save what is left, verify, note the new lineage, apply.

        Until the lineage is noted nothing has changed, and a failure leaves training as it is.

        Returns:
            Whether this process is to end now: it cannot be taken back, and is started again for the order.

        Raises:
            RestoreFailed: applying broke half-way, and so did putting the state back.
            RanksLost: another rank is gone, and nothing has changed on this one.
        """
        started = time.perf_counter()
        self._checkpoints.want(Protector.RESTORE, checkpoint)  # also where its order is cancelled meanwhile
        try:
            reason = self._ranks.decide(lambda: self._no_way_back(checkpoint), str | None)
            if reason is not None:
                return self._at_next_start(checkpoint, order, reason)
            self._reporter.order(order, "restoring")
            safety = self._leave_durable(checkpoint)
            # what is written by now leaves memory to read into, and a restore needs none beyond it
            with self._checkpoints.snapshots.lent() as room:
                loaded, restored = self._take_back(checkpoint, safety, order, room)
        except (RanksLost, RestoreFailed):  # the order stays open: the next start carries it out
            raise
        except Exception as error:  # training goes on as it was, whatever is wrong with a restore
            self._refuse(checkpoint, order, error)
            return False
        finally:
            self._checkpoints.want(Protector.RESTORE, None)
        seconds, position = time.perf_counter() - started, self._reporter.standing
        self._reporter.lineage_began(self._checkpoints.lineage)
        self._reporter.stall("restore", seconds, position.iteration, position.lineage)
        if restored:
            if self._ranks.leads:
                logger.info(
                    "%s: restored to iteration %d, lineage %d; the state that was left is kept as %s",
                    *(self._checkpoints.job, position.iteration, position.lineage, safety),
                )
            self._reporter.trained_elsewhere(loaded.manifest.fingerprint)
            self._reporter.order(order, "restored", seconds=seconds, safety=safety)
        return False

    def _take_back(
        self, checkpoint: str, safety: str, order: str | None, room: memoryview | None
    ) -> tuple[Loaded, bool]:
        """Load, note the new lineage, apply; whether it was applied, or the state put back."""
        loaded = self._ranks.together(lambda: self._load(checkpoint, room))
        self._checkpoints.begin_lineage(loaded.manifest.iteration, checkpoint, order, left=safety)
        self.half_applied = True  # whatever ends what follows, Ctrl-C included
        restored = self._apply_or_return(loaded, safety, order)
        self.half_applied = False
        return loaded, restored

    def _at_next_start(self, checkpoint: str, order: str | None, reason: str) -> bool:
        """Not while it runs. Under a supervisor it saves what is left and ends; without one the order waits."""
        if order is None:
            raise HoldfastError(f"{reason}; {FROM_OUTSIDE}")
        if not self._ranks.decide(supervisor_channel.is_supervised, bool):
            told = f"the order to restore {checkpoint} waits for the next start: {reason}; {WAY_OUT}"
            self._reporter.notice("warning", "restore", told)
            return False
        safety = self._leave_durable(checkpoint)
        with self._checkpoints.snapshots.lent() as room:
            self._ranks.together(lambda: self._load(checkpoint, room))
        wanted = RestoreOrder(id=order, checkpoint=checkpoint, fence=self._checkpoints.attempt)
        self._ranks.decide(lambda: supervisor_channel.ask_relaunch(wanted), str)
        told = f"the script ends here, and is started again at {checkpoint}: {reason}"
        self._reporter.notice("info", "relaunch", f"{told}. The state that is left is kept as {safety}")
        return True

    def _refuse(self, checkpoint: str, order: str | None, error: Exception) -> None:
        if not self._checkpoints.fenced:  # else the order is the newer attempt's
            self._reporter.order(order, "failed", reason=str(error))
        self._reporter.notice("error", "restore", f"restore of {checkpoint} refused: {error}")

    def _no_way_back(self, checkpoint: str) -> str | None:
        loader = None
        with contextlib.suppress(OSError, HoldfastError):  # loading it will say what is wrong with it
            loader = self._manifest(checkpoint).state["session"]["loader"]
        return self._training.no_way_back(loader)

    def _leave_durable(self, checkpoint: str) -> str:
        """The checkpoint of the state about to be left.

        Nothing is written for a target that does not fit; that its bytes are damaged shows later, when there is
        memory to read them into.
        """
        self._ranks.together(lambda: self._training.check(self._manifest(checkpoint)))
        self._ranks.together(self._await_settled)
        self._checkpoints.find_lineage()
        return self._ranks.together(self._take_safety)

    def _manifest(self, checkpoint: str) -> Manifest:
        return restore.manifest(self._checkpoints.store, self._checkpoints.job, checkpoint)

    def _load(self, checkpoint: str, room: memoryview | None = None) -> Loaded:
        return self._training.load(self._checkpoints.store, self._checkpoints.job, checkpoint, room)

    def _await_settled(self) -> None:
        if not self._checkpoints.wait_settled(WRITE_SECONDS):
            raise HoldfastError("the checkpoint before is still being written")

    def _take_safety(self) -> str:
        """The state about to be left, durable, so that the restore can be undone."""
        run = self._checkpoints.take(self._training.capture, "safety", at_once=True)
        if run is None or not run.wait_settled(WRITE_SECONDS) or run.state != "durable":
            reason = run.result.reason if run is not None else "it could not be taken"
            raise HoldfastError(f"no safety checkpoint of the state to be left: {reason}")
        return run.id

    def _apply_or_return(self, loaded: Loaded, safety: str, order: str | None) -> bool:
        """False when it broke half-way: such a state must not be trained on, so the one before is put back."""
        try:
            self._ranks.together(lambda: self._training.apply(loaded))
        except RanksLost:
            return True  # on this rank it is in place, and the lineage is noted
        except Exception as error:  # a user's load_state_dict may raise anything
            try:
                self._checkpoints.begin_lineage(parse_checkpoint_id(safety)[0], safety, None, left=loaded.id)
                self._ranks.together(lambda: self._training.apply(self._load(safety)))
            except Exception as worse:  # the state is half of either: no rank may train on it
                raise RestoreFailed(
                    f"restoring {loaded.id} failed ({error}), and so did going back to {safety} ({worse}); "
                    f"start the script again: it goes on from {safety}"
                ) from error
            self._reporter.order(order, "failed", reason=f"{error}; training went back to {safety}")
            return False
        return True
