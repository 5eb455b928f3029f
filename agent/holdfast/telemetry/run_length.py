"""How long a job is to train, and how many samples an iteration takes, as its loader knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

_FAR = 1 << 40
"""Number of an epoch that no loader has reached."""


@runtime_checkable
class SizedLoader(Protocol):
    """A loader that knows its length and its ranks, as `holdfast.DataLoader` does."""

    batch_size: int | None
    """Samples of a batch of one rank; `None` if a batch sampler decides."""
    world_size: int

    def batches_left(self, epochs: int) -> int:
        """Return the batches left of `epochs` epochs in total, on this rank. TypeError if that is not known."""


class RunLength:
    """Answers from the loader that the script draws from. For the training thread; nothing is counted for it."""

    def __init__(self) -> None:
        self._loader: SizedLoader | None = None
        self._epochs: int | None = None
        """Epochs in all; `None` if the script has not said how many."""
        self._batches_per_iteration: Callable[[], int] = lambda: 0

    def follow(
        self, loader: object, epoch: int, epochs: int | None, batches_per_iteration: Callable[[], int]
    ) -> None:
        """Follow the loader of a call of `session.batches`.

        Args:
            epoch: the epoch that the loader is in, from 0.
            epochs: what the call was given. A script that calls it for each epoch gives the number of the next
                one, not how many there are to be: a call for one epoch says nothing about the length of the job.
            batches_per_iteration: returns how many batches each iteration takes; 0 if it is not known.
        """
        self._loader = loader if isinstance(loader, SizedLoader) else None
        self._batches_per_iteration = batches_per_iteration
        if epochs is None or epochs - epoch > 1:
            self._epochs = epochs
        elif epochs != self._epochs:  # not the last epoch of a call that was seen before
            self._epochs = None

    def total_iterations(self, iteration: int) -> int | None:
        """Return the number of the last iteration, at the end of `iteration`; `None` if it is not known."""
        loader, batches = self._loader, self._batches_per_iteration()
        if loader is None or self._epochs is None or not batches:
            return None
        try:
            return iteration + -(-loader.batches_left(self._epochs) // batches)
        except TypeError:  # a dataset or a sampler without a length
            return None

    def epoch_iterations(self) -> int | None:
        """Return the iterations of a whole epoch; `None` if that is not known."""
        loader, batches = self._loader, self._batches_per_iteration()
        if loader is None or not batches:
            return None
        try:
            in_epoch = loader.batches_left(_FAR + 1) - loader.batches_left(_FAR)
        except TypeError:
            return None
        return -(-in_epoch // batches) or None

    def samples_per_iteration(self) -> float | None:
        """Return the samples that an iteration takes on all ranks together; `None` if that is not known."""
        loader, batches = self._loader, self._batches_per_iteration()
        if loader is None or loader.batch_size is None or not batches:
            return None
        return float(loader.batch_size * loader.world_size * batches)
