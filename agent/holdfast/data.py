"""The resumable loader: the order of samples is a pure function of (seed, epoch), its position a number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch.utils.data import Dataset, IterableDataset

from holdfast.indexed import Indexed, Order, OwnOrder, Position, SamplerOrder
from holdfast.order import Share, hashed
from holdfast.ranks import rank_and_world_size
from holdfast.streams import Streamed

__all__ = ["DataLoader", "Position"]


class DataLoader:
    """Takes what `torch.utils.data.DataLoader` takes, and can go on from any position.

    Args:
        dataset: map-style; or iterable, which goes on by its own state_dict where it is read in this process,
            and is otherwise read again from its start and skipped forward.
        batch_size: samples a batch, on each rank.
        shuffle: a new permutation every epoch, drawn from (seed, epoch).
        seed: of permutations and of the random numbers that reading a sample draws.
        sampler, batch_sampler: as in torch. They are iterated under random numbers that follow from
            (seed, epoch), and `set_epoch(epoch)` is called where they have it.
        rank, world_size: which part of the global order is this loader's. Default: torch.distributed's where
            it is set up, else RANK and WORLD_SIZE, else everything. A sampler with a `rank` and `num_replicas` of
            its own, such as DistributedSampler, has shared the samples already; an iterable dataset must.
        tail: what becomes of a last iteration for which fewer samples are left than the ranks take, unless
            drop_last leaves it out. "pad": all ranks get equally many, and up to world_size - 1 samples come a
            second time, which `padded` counts. "short": every sample comes once. Some ranks get one fewer, and
            where fewer samples than ranks are left, some end the epoch an iteration early: under
            DistributedDataParallel that needs its `join`.
        **options: num_workers, collate_fn, pin_memory, persistent_workers … as in torch.

    An iteration takes the next batch_size × world_size samples of the global order, and the position counts what
    finished iterations took, on all ranks: it holds for any number of ranks and workers and any batch size.
    Iterating gives one epoch after another: each `iter()` goes on where the one before ended. A sample is read
    under random numbers that follow from (seed, epoch, index), in Python, NumPy and torch on the CPU; a batch is
    collated under ones that follow from its first sample, as is one that a dataset's `__getitems__` reads whole.
    Other attributes are those of the torch loader inside.

    Raises:
        ValueError: arguments that exclude each other, as in torch; or `generator`, which `seed` replaces.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Sequence[Any]] | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Literal["pad", "short"] = "pad",
        **options: Any,
    ) -> None:
        _refuse(options, shuffle, sampler, batch_sampler, drop_last, batch_size)
        self.dataset, self.seed, self.position = dataset, seed, Position()
        self.batch_size, self.drop_last = (None if batch_sampler is not None else batch_size), drop_last
        self.rank, self.world_size = _place_among_ranks(rank, world_size)
        if tail not in ("pad", "short"):
            raise ValueError(f"DataLoader(tail={tail!r}): 'pad' or 'short'")
        # a private generator, or every new iterator would draw a number from the training process's own
        options["generator"] = torch.Generator().manual_seed(hashed(seed, "loader") >> 1)
        self._inner: Indexed | Streamed
        if isinstance(dataset, IterableDataset):
            options |= {"batch_size": batch_size, "drop_last": drop_last, "shuffle": shuffle}
            options |= {"sampler": sampler, "batch_sampler": batch_sampler}  # which torch refuses
            self._inner = Streamed(dataset, seed, options, self.world_size)
        else:
            source = sampler if sampler is not None else batch_sampler
            order: Order = SamplerOrder(source, seed) if source is not None else OwnOrder(dataset, seed, shuffle)
            share = Share(
                rank=self.rank,
                world_size=self.world_size,
                batch_size=self.batch_size or 1,
                tail="drop" if drop_last else tail,
            )
            self._inner = Indexed(
                dataset, order, share, seed, options,
                batch_size=self.batch_size, by_batch=batch_sampler is not None,
            )  # fmt: skip
        self.collate_fn = self._inner.collate_fn
        self._placed = self._drawing = 0
        self._misfit: str | None = None

    @property
    def epoch(self) -> int:
        """From 0; the next one once the last batch has been asked for and none was left."""
        return self.position.epoch

    @property
    def padded(self) -> int:
        """Samples that came a second time so far, on all ranks, so that each got equally many; batches with a
        batch_sampler."""
        return self.position.padded

    @property
    def gap(self) -> str | None:
        """What this loader cannot promise, in words."""
        return "; ".join(gap for gap in (self._misfit, self._inner.gap) if gap) or None

    @property
    def drawn_directly(self) -> bool:
        """Whether a loop of the script's own is in the middle of an epoch: `for batch in loader`."""
        return self._drawing > 0

    def __len__(self) -> int:
        """Batches in a whole epoch, on this rank."""
        return len(self._inner)

    def batches_left(self, epochs: int) -> int:
        """Of `epochs` epochs in all, on this rank; TypeError where the dataset or sampler has no length."""
        if self.epoch >= epochs:
            return 0
        return self._inner.left(self.position) + (epochs - self.epoch - 1) * len(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner.loader, name)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch from `position`, which moves on with each batch given out.

        Set to another position meanwhile, by a restore, it goes on from there.
        """
        self._drawing += 1
        try:
            yield from self.rest_of_epoch()
        finally:
            self._drawing -= 1

    def rest_of_epoch(self) -> Iterator[Any]:
        """The same for a loop that can be taken back to another epoch, as `session.batches` can."""
        placed = -1
        while placed != self._placed:
            placed = self._placed
            for position, batch in self._inner.batches(self.position):
                self.position = position
                yield batch
                if placed != self._placed:
                    break
        self.position = Position(epoch=self.position.epoch + 1, padded=self.position.padded)

    def second_loader(
        self, batches: int, around: Callable[[Dataset[Any]], Dataset[Any]], timeout_seconds: float
    ) -> torch.utils.data.DataLoader[Any] | None:
        """Over the next batches that no worker was told to read yet, through workers of its own.

        This loader is left as it is, and gives them out in their turn. `around` wraps the dataset that it reads.
        None for an iterable dataset, which nobody can read ahead of its reader.
        """
        if isinstance(self._inner, Streamed):
            return None
        return self._inner.second_loader(self._inner.upcoming(self.position, batches), around, timeout_seconds)

    def seek(self, position: Position) -> None:
        """Go on from there, in the middle of an epoch as well."""
        self.position, self._misfit = position, None
        self._placed += 1

    def state_dict(self) -> dict[str, Any]:
        """A few numbers, whatever the position and the size of the dataset; an iterable dataset adds its own."""
        state = asdict(self.position) | {
            "seed": self.seed,
            "order": self._inner.order,
            "extent": self._inner.extent,
        }
        if isinstance(self._inner, Streamed):
            state["dataset"] = self._inner.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position; ValueError when it lies within an epoch of another order."""
        if "order" not in state_dict:
            raise ValueError(
                "DataLoader: the checkpoint is of an earlier Holdfast, which gave samples in another order; start "
                "the job anew, under another name"
            )
        position = Position(**{key: state_dict[key] for key in ("epoch", "taken", "padded")})
        for key, here in (("seed", self.seed), ("order", self._inner.order)):
            if position.taken and state_dict[key] != here:
                raise ValueError(
                    f"DataLoader: {key} is {here!r}, but the checkpoint's position was counted with "
                    f"{key} {state_dict[key]!r}"
                )
        self.seek(position)
        if isinstance(self._inner, Streamed):
            self._inner.state = state_dict["dataset"]
        if position.taken and state_dict["extent"] != self._inner.extent:
            self._misfit = (
                f"the position was counted in {state_dict['extent']}, now there are {self._inner.extent}: in this "
                "epoch some may come twice or not at all"
            )


def _refuse(
    options: dict[str, Any],
    shuffle: bool,
    sampler: object,
    batch_sampler: object,
    drop_last: bool,
    batch_size: int | None,
) -> None:
    """ValueError for what cannot be meant."""
    if options.pop("generator", None) is not None:
        raise ValueError("DataLoader(generator=...): the order follows from seed; give seed=... instead")
    if not options.get("in_order", True):
        raise ValueError(
            "DataLoader(in_order=False): batches in the order of their arrival have no position; drop it"
        )
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"DataLoader(batch_size={batch_size}): at least 1, or None for single samples")
    if sampler is not None and shuffle:
        raise ValueError("DataLoader(sampler=..., shuffle=True): the sampler decides the order; drop shuffle")
    if batch_sampler is not None and (sampler is not None or shuffle or drop_last or batch_size != 1):
        raise ValueError(
            "DataLoader(batch_sampler=...) decides on batch_size, shuffle, sampler, drop_last; drop them"
        )


def _place_among_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        return rank_and_world_size()
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ValueError(f"DataLoader(rank={rank}, world_size={world_size}): give both, 0 <= rank < world_size")
    return rank, world_size
