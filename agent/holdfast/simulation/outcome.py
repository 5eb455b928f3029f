"""What became of a simulated job: where its wall time went, and what it had to show for it."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Useful, stalled, lost, restarting and down time are all of the wall time."""

    wall_seconds: float
    useful_seconds: float
    """Iterations that were not taken back."""
    stall_seconds: float
    """What checkpoints cost, those taken back included."""
    lost_seconds: float
    """Iterations that a failure took back, and what it broke off."""
    restart_seconds: float
    down_seconds: float
    failures: int
    checkpoints: int
    """Those that were finished, durable in time or not."""
    iteration: int
    """Where it stands at the end."""
    durable_iteration: int
    """What would be left of it if it were killed for good at the end."""
    loss_lost: float = 0.0
    """Loss that failures put back up, summed over them (COCI's P_r)."""
    loss_delayed: float = 0.0
    """Loss that would have come down in the time of the checkpoints, summed over them (COCI's P_s)."""
    reached_seconds: tuple[float | None, ...] = ()
    """When the loss was first down to each of the job's targets; None: not in this run."""

    @property
    def ettr(self) -> float:
        """Effective training time ratio: useful time over all time."""
        return self.useful_seconds / self.wall_seconds if self.wall_seconds > 0 else 1.0

    @property
    def fault_cost_seconds(self) -> float:
        """All that is not useful."""
        return self.wall_seconds - self.useful_seconds

    def since(self, earlier: Outcome) -> Outcome:
        """What came after an earlier end of the same run."""
        sums = {
            each.name: getattr(self, each.name) - getattr(earlier, each.name)
            for each in fields(self)
            if each.name.endswith("_seconds") and each.name != "reached_seconds"
        }
        return Outcome(
            **sums,
            failures=self.failures - earlier.failures,
            checkpoints=self.checkpoints - earlier.checkpoints,
            iteration=self.iteration,
            durable_iteration=self.durable_iteration,
            loss_lost=self.loss_lost - earlier.loss_lost,
            loss_delayed=self.loss_delayed - earlier.loss_delayed,
            reached_seconds=self.reached_seconds,
        )
