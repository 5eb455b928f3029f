"""Restore in place: take a running script back to a checkpoint, without restarting it."""

from __future__ import annotations

import logging
import time

from holdfast.checkpoints import Checkpointer
from holdfast.errors import HoldfastError, RestoreFailed
from holdfast.protocol import parse_checkpoint_id
from holdfast.ranks import Ranks, RanksLost
from holdfast.reports import Reporter
from holdfast.restore import Loaded
from holdfast.training import Training

logger = logging.getLogger("holdfast")

WRITE_SECONDS = 600.0
"""How long a restore waits for the checkpoint of the state it leaves."""


class Rewinder:
    """Takes training back at the boundary between two iterations, on all ranks of a job or on none."""

    def __init__(self, training: Training, checkpoints: Checkpointer, reporter: Reporter, ranks: Ranks) -> None:
        self._training, self._checkpoints, self._reporter = training, checkpoints, reporter
        self._ranks = ranks

    def rewind(self, checkpoint: str, order: str | None) -> None:
        """Verify, save what is left, note the new lineage, apply.

        Until the lineage is noted nothing has changed, and a failure leaves training as it is.

        Raises:
            RestoreFailed: applying broke half-way, and so did putting the state back.
            RanksLost: another rank is gone, and nothing has changed on this one.
        """
        started = time.perf_counter()
        self._reporter.order(order, "restoring")
        try:
            loaded = self._ranks.together(lambda: self._verified(checkpoint))
            self._ranks.together(self._await_settled)
            self._checkpoints.find_lineage()
            safety = self._ranks.together(self._take_safety)
            self._checkpoints.begin_lineage(loaded.manifest.iteration, checkpoint, order, left=safety)
        except RanksLost:  # the order stays open: the next start carries it out
            raise
        except Exception as error:  # the loop's edge: whatever is wrong with a restore, training goes on
            if not self._checkpoints.fenced:  # else the order is the newer attempt's
                self._reporter.order(order, "failed", reason=str(error))
            self._reporter.notice("error", "restore", f"restore of {checkpoint} refused: {error}")
            return
        restored = self._apply_or_return(loaded, safety, order)
        seconds = time.perf_counter() - started
        standing = self._reporter.standing
        self._reporter.lineage_began(self._checkpoints.lineage)
        self._reporter.stall("restore", seconds, standing.iteration, standing.lineage)
        if restored:
            if self._ranks.leads:
                logger.info(
                    "%s: restored to iteration %d, lineage %d; the state that was left is kept as %s",
                    *(self._checkpoints.job, standing.iteration, standing.lineage, safety),
                )
            self._reporter.trained_elsewhere(loaded.manifest.fingerprint)
            self._reporter.order(order, "restored", seconds=seconds, safety=safety)

    def _load(self, checkpoint: str) -> Loaded:
        return self._training.load(self._checkpoints.store, self._checkpoints.job, checkpoint)

    def _verified(self, checkpoint: str) -> Loaded:
        loaded = self._load(checkpoint)
        self._training.check(loaded)
        self._training.require_way_back()
        return loaded

    def _await_settled(self) -> None:
        if not self._checkpoints.wait_settled(WRITE_SECONDS):
            raise HoldfastError("the checkpoint before is still being written")

    def _take_safety(self) -> str:
        """The state about to be left, durable, so that the restore can be undone."""
        snapshot = self._checkpoints.take(self._training.capture, "safety", at_once=True)
        if snapshot is None or not snapshot.settled.wait(WRITE_SECONDS) or snapshot.outcome != "durable":
            reason = snapshot.reason if snapshot is not None else "it could not be taken"
            raise HoldfastError(f"no safety checkpoint of the state to be left: {reason}")
        return snapshot.id

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
            except Exception as worse:  # as above
                raise RestoreFailed(
                    f"restoring {loaded.id} failed ({error}), and so did going back to {safety} ({worse}); "
                    f"start the script again: it goes on from {safety}"
                ) from error
            self._reporter.order(order, "failed", reason=f"{error}; training went back to {safety}")
            return False
        return True
