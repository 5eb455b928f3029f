"""Epochs before a resume, for which a script calls `session.batches` again."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.state.registry import Registry
from holdfast.state.rng import restore_rng, rng_state
from holdfast.torch_internals import version_of


class SkippedEpochs:
    """Follows a loop that calls `session.batches` for one more epoch each time, and runs other code in between.

    After a resume, the calls for earlier epochs give no batch, but that code runs again.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._is_over, self._is_reported = False, False
        self._before: tuple[dict[str, Any], list[Any]] | None = None
        """Random state and `_changes` at the first call that gave nothing."""
        self._called_in: dict[int, int] = {}
        """By loader, the epoch of its last call, of those that gave one epoch."""

    def called(self, loader: int, epoch: int, epochs: int | None) -> None:
        """Record a call of `session.batches` in an epoch of a loader, by number, up to so many epochs in all."""
        if epochs is not None and epochs - epoch <= 1:
            self._called_in[loader] = epoch

    def not_repeated(self, loader: int, epoch: int) -> list[str]:
        """Describe what a restore in place to an epoch of a loader leaves out."""
        if epoch >= self._called_in.get(loader, 0):
            return []
        return [
            "the script calls session.batches for one epoch, and the restore went back to an earlier one within "
            "the same call: what the script does between calls for each epoch, such as a step of a schedule, is "
            "not repeated. Restart the script for an exact continuation, or draw all epochs from one call"
        ]

    def skip(self) -> str | None:
        """Record that a call gives no batch, since its epochs are over. Returns the same as `end`.

        Code that ran since the call before is that of an earlier epoch: only what follows the last one is due.
        """
        if self._is_over:
            return None
        if self._before is not None:
            return self._go_back(self._before)
        self._before = rng_state(), self._changes()
        return None

    def end(self, *, is_within_epoch: bool) -> str | None:
        """Go back to the random state of the resume where the rest of an epoch follows.

        Returns:
            A description, once, if the code of the skipped epochs has changed what the checkpoint holds.
        """
        before, self._before, self._is_over = self._before, None, True
        return None if before is None or not is_within_epoch else self._go_back(before)

    def _go_back(self, before: tuple[dict[str, Any], list[Any]]) -> str | None:
        restore_rng(before[0])
        if self._is_reported or before[1] == self._changes():
            return None
        self._is_reported = True
        return (
            "after the resume, the code that follows the loop over session.batches ran again for epochs before "
            "the checkpoint, and changed a schedule or a model: training is not what it was without the "
            "interruption. Run that code only for epochs that are trained: loop over range(loader.epoch, epochs) "
            "with a holdfast.DataLoader that the session has, or call session.batches once for all epochs"
        )

    def _changes(self) -> list[Any]:
        modules = self._registry.modules.values()
        versions = [version_of(each) for module in modules for each in (*module.parameters(), *module.buffers())]
        schedules = [
            repr(each.state_dict())
            for each in self._registry.objects.values()
            if isinstance(each, (LRScheduler, ReduceLROnPlateau))
        ]
        return [*versions, *schedules]
