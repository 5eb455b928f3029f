"""Adapter for Hugging Face Accelerate: a session of what an `Accelerator` has prepared.

session = holdfast.integrations.accelerate.session(accelerator, "my-job", store="checkpoints")
for epoch in range(session.epoch, epochs):
    for batch in loader:
        with accelerator.accumulate(model):
            ...
        session.step(loss=loss)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
)
from accelerate.utils import DistributedType, broadcast_object_list
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from holdfast.data.loader import DataLoader
from holdfast.integrations import reject_restore_in_place
from holdfast.inventory.missing_state import unused_keyword
from holdfast.learning_rate import GradientClip, scale_all
from holdfast.session import Session

_WAY_OUT = {
    DistributedType.DEEPSPEED: "DeepSpeed keeps its own state; use FSDP of version 2, or its checkpoints",
    DistributedType.MEGATRON_LM: "Megatron-LM keeps its own state; use its checkpoints",
    DistributedType.XLA: "XLA devices are not supported; use the checkpoints of Accelerate",
}


def session(accelerator: Any, job: str, *, seed: int | None = None, **arguments: Any) -> AcceleratorSession:
    """Create a session of everything that `accelerator.prepare` has returned, and resume it.

    Call it on all processes, after `accelerator.prepare` and `accelerator.register_for_checkpointing`. From then
    on the prepared loaders continue from their position; they place their batches on the device as before.

    Args:
        accelerator: an `accelerate.Accelerator`.
        job: the job's name.
        seed: seed of the order of shuffled loaders, unless Accelerate's seedable sampler shuffles them, and of the
            random numbers that a dataset draws. Default: `data_seed` of the accelerator, else the seed of the
            generator that a loader was given, else 0.
        **arguments: settings of `holdfast.Session`, and further objects to checkpoint, by keyword. With several
            ranks, give the model that `prepare` returned: `model=model`. Accelerate does not keep the
            DistributedDataParallel around it, so otherwise each rank stores a copy.

    Raises:
        ValueError: a kind of training or of loader that cannot be resumed exactly, or nothing is prepared yet;
            the message says what to do.
        The errors of `holdfast.Session` and of its `resume`.
    """
    require_supported(accelerator)
    if not _prepared(accelerator):
        raise ValueError(
            "accelerator.prepare was not called yet, so the session would save no model: create the session after "
            "the call"
        )
    sources = [ResumableSource(accelerator, shard, seed) for shard in accelerator._dataloaders]
    created = AcceleratorSession(accelerator, job, sources, arguments)
    created.resume()
    for source in sources:
        source.resumed()
    return created


class AcceleratorSession(Session):
    """A session whose iterations are the updates of an `Accelerator`."""

    def __init__(
        self, accelerator: Any, job: str, sources: list[ResumableSource], arguments: dict[str, Any]
    ) -> None:
        self._accelerator, self._epochs = accelerator, LoaderEpochs(sources)
        self._counted_updates = 0
        self._prepared_before: set[int] | None = {id(item) for item in _prepared(accelerator)}
        """Identities of what was prepared before the session; `None` after the first update."""
        if sources:
            reject_restore_in_place(arguments, "a loop over the loaders of Accelerate")
        for keyword, item in arguments.items():
            if isinstance(item, DataLoader):
                raise ValueError(
                    f"session({keyword}=...): Accelerate does not place the batches of a holdfast.DataLoader. "
                    "Give accelerator.prepare a torch.utils.data.DataLoader: the session makes it resumable"
                )
        given = {id(item) for item in arguments.values()}
        # Accelerate keeps the modules inside, and not what it returned
        given |= {id(item.module) for item in arguments.values() if isinstance(item, DistributedDataParallel)}
        prepared: list[tuple[str, Iterable[Any]]] = [
            ("model", accelerator._models),
            ("optimizer", [each.optimizer for each in accelerator._optimizers]),
            ("scheduler", [each.scheduler for each in accelerator._schedulers]),
            ("scaler", [accelerator.scaler] if accelerator.scaler is not None else []),
            ("custom", accelerator._custom_objects),
            ("loader", [source.loader for source in sources]),
            ("accelerator", [accelerator]),
            ("dataloaders", [self._epochs] if sources else []),
        ]
        wrappers = {
            id(each.optimizer if hasattr(each, "optimizer") else each.scheduler): id(each)
            for each in (*accelerator._optimizers, *accelerator._schedulers)
        }
        objects: dict[str, Any] = {}
        for name, items in prepared:
            for item in items:
                if not {id(item), wrappers.get(id(item))} & given:
                    objects[unused_keyword(name, objects | arguments)] = item
        super().__init__(job, **{"restorable_in_place": False} | objects | arguments)
        scale_all(each.optimizer for each in accelerator._optimizers)
        accelerator.clip_grad_norm_ = _ClippedGradients(accelerator, self)

    @property
    def epoch(self) -> int:
        """The epoch of the loader that the last update used, from 0."""
        return self._epochs.epoch

    def batches(self, loader: Iterable[Any], epochs: int | None = 1) -> NoReturn:
        """Raise TypeError: Accelerate's loaders are iterated by the script."""
        raise TypeError("iterate over the prepared loader itself: for epoch in range(session.epoch, epochs)")

    def step(self, **metrics: Any) -> None:
        """End an iteration if this batch has updated the weights; otherwise do nothing.

        Gradients that accumulate, under `accelerator.accumulate` or by hand, and a step that the scaler skips are
        no update. Call it after every batch. It raises the errors of `holdfast.Session.step`.
        """
        self._epochs.use_batches()
        updates, counted = self._training.updates, self._counted_updates
        self._counted_updates = updates
        # a closed session does not see updates, nor those of an optimizer that runs no hooks
        if (
            updates == counted
            and (updates or self._training.registry.sees_updates)
            and not self._lifecycle.only_counts
        ):
            return
        if not self._accelerator.sync_gradients or self._accelerator.optimizer_step_was_skipped:
            return
        if self._prepared_before is not None:
            self._report_prepared_later(self._prepared_before)
            self._prepared_before = None
        with self._epochs:
            super().step(**metrics)

    def _report_prepared_later(self, given: set[int]) -> None:
        later = [item for item in _prepared(self._accelerator) if id(item) not in given]
        if later:
            names = ", ".join(sorted({type(item).__name__ for item in later}))
            self.notice(
                "warning",
                "inventory",
                f"accelerator.prepare was called after the session was created: what it returned ({names}) is "
                "in no checkpoint. Create the session after the last call",
            )


class _ClippedGradients:
    """`accelerator.clip_grad_norm_` with the norm that is in force."""

    def __init__(self, accelerator: Any, session: Session) -> None:
        before = accelerator.clip_grad_norm_
        self._own: Any = (
            before._own if isinstance(before, _ClippedGradients) else before
        )  # of a session before this one
        self._clip = GradientClip(session)

    def __call__(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        in_force = self._clip.value(max_norm)
        norm = max_norm if in_force == max_norm else in_force or math.inf
        return self._own(parameters, norm, norm_type=norm_type)


class LoaderEpochs:
    """Epochs of the prepared loaders, as an object with state.

    As a context manager, around the end of an iteration: a loader whose last batch is in use is at the end of its
    epoch, not at the start of the next one, so that a resume runs what the script does after an epoch.
    """

    __slots__ = ("_current", "_sources")

    def __init__(self, sources: list[ResumableSource]) -> None:
        self._sources: list[ResumableSource] = sources
        self._current = 0

    @property
    def epoch(self) -> int:
        if not self._sources:
            return 0
        source = self._sources[self._current]
        return source.loader.epoch - source.is_at_last_batch

    def use_batches(self) -> None:
        """Record that the active loader trains, also where gradients accumulate or the scaler skips a step."""
        active = self._active
        for source in self._sources:
            if source.shard is active:
                source.use_batches()

    @property
    def _active(self) -> Any:
        return self._sources[self._current].shard.gradient_state.active_dataloader if self._sources else None

    def __enter__(self) -> None:
        active = self._active
        for index, source in enumerate(self._sources):
            if source.shard is active:
                self._current = index
            source.stay_at_last_batch()

    def __exit__(self, *_: object) -> None:
        for source in self._sources:
            source.leave_last_batch()

    def state_dict(self) -> dict[str, Any]:
        return {
            "current": self._current,
            "iterations": [source.shard.iteration for source in self._sources],
            "seeds": [getattr(source.seedable, "initial_seed", None) for source in self._sources],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._current = min(state["current"], max(0, len(self._sources) - 1))
        for source, iteration, seed in zip(self._sources, state["iterations"], state["seeds"], strict=False):
            source.shard.iteration = iteration
            if source.seedable is not None and seed is not None:
                source.seedable.initial_seed = seed


class ResumableSource(torch.utils.data.DataLoader[Any]):
    """What a `DataLoaderShard` iterates over: a `holdfast.DataLoader`, with the attributes of the torch loader.

    Creating one puts it into the shard, in place of its `base_dataloader`. It is a loader of torch only because
    Accelerate asks `isinstance`.
    """

    def __init__(self, accelerator: Any, shard: Any, seed: int | None) -> None:
        base: Any = getattr(shard, "base_dataloader", None)
        if isinstance(base, ResumableSource):
            base = base._torch_loader  # a session before this one
        _require_shard(shard, base)
        self.shard, self._rng_types = shard, shard.rng_types
        self._torch_loader: Any = base
        if seed is None:
            seed = getattr(accelerator.dataloader_config, "data_seed", None)
        self.seedable = _seedable_sampler(base)
        """Sampler of Accelerate that shuffles by its own seed and the epoch, if there is one."""
        if self.seedable is not None:  # ranks with unequal seeds would draw overlapping samples
            (self.seedable.initial_seed,) = broadcast_object_list([self.seedable.initial_seed])
        self.loader: DataLoader = DataLoader.from_torch(base, **_arguments(accelerator, shard, base, seed))
        self.loader.lookahead = 1
        self._after: Any = None
        shard.base_dataloader = self

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.shard.rng_types = self._rng_types
        empty = True
        for batch in self.loader:
            empty = False
            yield batch
        if empty:  # an epoch whose batches came before the resume: DataLoaderShard does not count it
            self.shard.iteration += 1

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_torch_loader":  # not set yet
            raise AttributeError(name)
        return getattr(self._torch_loader, name)

    def resumed(self) -> None:
        """Leave the random state as it is at the next start of an iteration, which continues an epoch."""
        if self.loader.position.taken:
            self.shard.rng_types = None

    @property
    def is_at_last_batch(self) -> bool:
        """Whether the last batch of an epoch is in use: the shard has drawn all, and its loop goes on."""
        return bool(self.shard.end_of_dataloader) and any(
            each is self.shard for each in self.shard.gradient_state.dataloader_references
        )

    def use_batches(self) -> None:
        if self.is_at_last_batch:
            self.loader.use_last_batch()
        else:
            self.loader.use_batches()

    def stay_at_last_batch(self) -> None:
        if self.is_at_last_batch and self.loader.last_position is not None:
            self._after, self.loader.position = self.loader.position, self.loader.last_position

    def leave_last_batch(self) -> None:
        if self._after is not None:
            self._after, self.loader.position = None, self._after


def _prepared(accelerator: Any) -> list[Any]:
    """Return what `accelerator.prepare` has returned so far."""
    return [
        *accelerator._models,
        *accelerator._optimizers,
        *accelerator._schedulers,
        *accelerator._dataloaders,
    ]


def require_supported(
    accelerator: Any, *, fsdp_option: str = "FullyShardedDataParallelPlugin(fsdp_version=2)"
) -> None:
    """Raise ValueError for a kind of training that a session cannot checkpoint.

    Args:
        accelerator: an `accelerate.Accelerator`.
        fsdp_option: what selects version 2 of FSDP.
    """
    kind = accelerator.distributed_type
    if reason := _WAY_OUT.get(kind):
        raise ValueError(f"Accelerator with {kind.value}: {reason}")
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(plugin, "fsdp_version", 1) == 1:
        raise ValueError(f"FSDP of version 1 is not supported: set {fsdp_option}")


def _require_shard(shard: Any, base: Any) -> None:
    """Raise ValueError for a prepared loader that cannot be made resumable."""
    if type(shard) is DataLoaderDispatcher:
        raise ValueError(
            "a loader of Accelerate that dispatches batches from the main process (the default for an iterable "
            "dataset) has no position: set DataLoaderConfiguration(dispatch_batches=False), or, for a Trainer of "
            'Transformers, TrainingArguments(accelerator_config={"dispatch_batches": False})'
        )
    if type(shard) is not DataLoaderShard or base is None:
        raise ValueError(
            f"a prepared loader of type {type(shard).__name__} has no position: give accelerator.prepare a "
            "torch.utils.data.DataLoader, with an Accelerator that places its batches. A get_train_dataloader of "
            "a Trainer returns self.accelerator.prepare(loader)"
        )
    if shard.use_stateful_dataloader:
        raise ValueError(
            "DataLoaderConfiguration(use_stateful_dataloader=True): remove it, since the session saves the "
            "position"
        )


def _arguments(accelerator: Any, shard: Any, base: Any, seed: int | None) -> dict[str, Any]:
    """Return what replaces the arguments of the torch loader in the resumable one.

    The resumable loader splits a shuffled order among the ranks, so that a resume may have another number of them.
    Any other order is split by Accelerate, as `gather_for_metrics` expects it in a validation.
    """
    arguments: dict[str, Any] = {} if seed is None else {"seed": seed}
    batches = base.batch_sampler
    sampler = getattr(batches, "sampler", None)
    if isinstance(batches, BatchSamplerShard):
        sampler = getattr(batches.batch_sampler, "sampler", None)
    if type(sampler) is RandomSampler and sampler.generator is shard.synchronized_generator is not base.generator:
        # drop Accelerate's own generator, with another seed at each start: the order follows from `seed`
        sampler.generator = None
    if accelerator.num_processes == 1 or isinstance(base.dataset, torch.utils.data.IterableDataset):
        return arguments
    if (
        not isinstance(batches, BatchSamplerShard)
        or batches.num_processes != accelerator.num_processes
        or type(batches.batch_sampler) is not BatchSampler
        or type(sampler) is SequentialSampler
    ):
        return arguments | {"rank": 0, "world_size": 1}
    size, parts = batches.batch_sampler.batch_size, accelerator.num_processes if batches.split_batches else 1
    plain = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(base.dataset)
    return arguments | {
        "batch_sampler": None,
        "batch_size": size // parts,
        "drop_last": batches.batch_sampler.drop_last,
        "tail": "pad" if batches.even_batches else "short",
        **({"shuffle": True} if plain else {"sampler": sampler}),
    }


def _seedable_sampler(base: Any) -> Any:
    batches = base.batch_sampler
    while batches is not None and not isinstance(batches, SeedableRandomSampler):
        batches = getattr(batches, "batch_sampler", None) or getattr(batches, "sampler", None)
    return batches
