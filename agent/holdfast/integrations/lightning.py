"""Checkpoints of a PyTorch Lightning `Trainer`, by a callback.

    trainer = Trainer(callbacks=[holdfast.integrations.lightning.Checkpoint("job", store="checkpoints")])

With `HOLDFAST_JOB` in the environment Lightning adds the callback itself, through its entry point.

The end of an iteration is the end of `_TrainingEpochLoop.on_advance_end`. `on_train_batch_end` of callbacks comes
before that of the module and before a validation after this batch: a checkpoint taken there resumes without both.
Lightning calls no callback later, so some methods of its loops are replaced while a module is fitted. Checked
with Lightning 2.6.6.

One module, since the callback and the replaced methods share the position in the loops.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torchmetrics import MetricTracker

try:
    from lightning.fabric.utilities.data import sized_len
    from lightning.fabric.utilities.types import _Stateful
    from lightning.pytorch.loops.loop import _Loop
    from lightning.pytorch.loops.utilities import _is_max_limit_reached
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    from holdfast.integrations.lightning_state import ClippedGradients, TrainerState, recount_batches
except ImportError as error:
    raise ImportError(
        f"lightning {pl.__version__} is not supported ({error}): install lightning 2.5.6 or 2.6.6, with which "
        "this adapter is tested, or unset HOLDFAST_JOB to train without checkpoints"
    ) from error

from holdfast.data.loader import DataLoader
from holdfast.data.reachable import incomplete_state
from holdfast.integrations import reject_common_names
from holdfast.learning_rate import scale_all
from holdfast.session import Session
from holdfast.state.rng import restore_rng, rng_state

logger = logging.getLogger("holdfast")

JOB_VARIABLE = "HOLDFAST_JOB"
SEED_VARIABLE = "PL_GLOBAL_SEED"
"""Where Lightning's `seed_everything` leaves the seed."""
_NOT_SUPPORTED = {
    "StochasticWeightAveraging": "average the weights in a submodule of the LightningModule",
    "WeightAveraging": "average the weights in a submodule of the LightningModule",
    "BaseFinetuning": "create all parameter groups in configure_optimizers, with a learning rate of 0 until then",
    "ModelPruning": "prune the module before Trainer.fit",
}
"""Callbacks that change what the state consists of, with what to do instead."""
_BATCHES_UNTIL_AN_UPDATE = 100
"""Number of batches without an update that is reported with manual optimization."""
_finished: dict[tuple[str, str], weakref.ref[pl.LightningModule]] = {}
"""The module that this process has trained to its end, by job and store."""


class Checkpoint(Callback):  # type: ignore[misc]  # its class is Any without Lightning
    """Checkpoints `Trainer.fit` and resumes it where it stopped, also in the middle of an epoch.

    Args:
        job: the job's name, under which its checkpoints and its history are kept.
        **settings: settings and further objects of a `holdfast.Session`: `store`, `server`, `budget`, `state` …
            ValueError for `restorable_in_place=True`: the loops of Lightning cannot go back.

    `session` is the session while the module is fitted, from the setup of the training data on; else `None`. An
    iteration is a batch after which `trainer.global_step` has grown.

    Raises (from `Trainer.fit`, before the first batch):
        ValueError: a strategy, a callback or an option of the Trainer that is not supported, or a name in `state`
            that the callback uses; says what to do.
        TypeError: a training loader without a position, or one with a position of its own and no length; or a
            value in the state of a callback or a hook that cannot be stored.
        IncompatibleCheckpoint: the newest checkpoint does not fit the module.
    """

    def __init__(self, job: str, **settings: Any) -> None:
        if settings.get("restorable_in_place"):
            raise ValueError(
                "restorable_in_place=True: the loops of Lightning cannot go back within a process. Drop it, and "
                "start the script with `holdfast run`, which restarts it for a restore"
            )
        self.job = job
        self.session: Session | None = None
        self.is_from_environment = False
        """Whether Lightning created this callback from its entry point; a callback of the script replaces it."""
        self._settings = {"restorable_in_place": False} | settings
        self._identity = job, str(settings.get("store"))
        self._replaced: list[tuple[Any, str]] = []
        """Methods of Lightning's loops that are replaced, by object and name."""
        self._global_step = 0
        """`trainer.global_step` at the end of the last iteration."""
        self._is_validated = False
        """Whether a validation took place within the current iteration."""
        self._logged: dict[str, Any] = {}
        """Metrics at the end of the last iteration. Lightning keeps each until it is logged again."""
        self._rng: dict[str, Any] | None = None
        """Random state of the checkpoint, between a resume and the first batch."""
        self._clip: ClippedGradients | None = None

    # Hooks of Lightning

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # a learning rate finder runs trial fits in its own on_fit_start, which comes first
        if trainer.fast_dev_run or self._gives_way(trainer, pl_module):
            return
        _require_support(trainer, pl_module)
        loop = trainer.fit_loop
        self._replace(loop, "_load_combined_loader_states", functools.partial(self._begin, trainer))
        if loop._combined_loader is not None:  # by `trainer.estimated_stepping_batches` or a learning rate finder
            self._replace(loop, "setup_data", functools.partial(self._begin_with_loaders, trainer))
        self._replace(loop.epoch_loop, "on_run_start", functools.partial(self._epoch_begins, trainer))
        self._replace(loop.epoch_loop, "on_advance_end", functools.partial(self._batch_ended, trainer))

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._clip is not None:
            self._clip.begin(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # the iteration whose weights were validated has not ended yet
        self._is_validated = self.session is not None and not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.session is not None:
            self.session.mark(f"epoch {trainer.current_epoch} ends")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._replaced:
            _finished[self._identity] = weakref.ref(pl_module)
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close(exception)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._close()

    def _gives_way(self, trainer: pl.Trainer, module: pl.LightningModule) -> bool:
        """Return whether this fit is not the job's. ValueError for a job that trains a second module."""
        if self.is_from_environment and any(
            isinstance(each, Checkpoint) and not each.is_from_environment for each in trainer.callbacks
        ):
            return True
        finished = _finished.get(self._identity)
        if finished is None or finished() is module:
            return False
        message = (
            f"job {self.job!r} has finished training another module in this process: give each module a "
            "holdfast.integrations.lightning.Checkpoint with a different job name"
        )
        if not self.is_from_environment:
            raise ValueError(message)
        logger.warning("%s; this one is not checkpointed", message)
        return True

    def _replace(self, owner: Any, name: str, method: Callable[..., None]) -> None:
        """Let an object call `method` with its own method as the first argument."""
        setattr(owner, name, functools.partial(method, getattr(owner, name)))
        self._replaced.append((owner, name))

    def _close(self, error: BaseException | None = None) -> None:
        while self._replaced:
            owner, name = self._replaced.pop()
            delattr(owner, name)
        self._close_session(error)

    def _close_session(self, error: BaseException | None = None) -> None:
        session, self.session, self._rng, self._is_validated = self.session, None, None, False
        self._clip = None
        if session is not None:
            session.__exit__(type(error) if error is not None else None, error, None)

    # Methods around those of the loops

    def _begin(self, trainer: pl.Trainer, load_loader_states: Callable[[], None]) -> None:
        """Create the session and resume: the loaders are prepared, and nothing iterates over them yet."""
        if self.session is None:
            loaders = _make_resumable(trainer)
            with _SigtermOwner(trainer):
                self.session = Session(self.job, **self._settings | {"state": self._objects(trainer, loaders)})
            scale_all(trainer.optimizers)
            self._clip = ClippedGradients(self.session)
            if self.session.resume():
                self._resumed(trainer, loaders)
            self._global_step, self._logged = trainer.global_step, _metrics(trainer)
        load_loader_states()  # those of a checkpoint of Lightning, if this is a fresh start from one

    def _begin_with_loaders(self, trainer: pl.Trainer, setup_data: Callable[[], None]) -> None:
        """Begin with loaders that were prepared before `on_fit_start`, and iterate over them anew."""
        loop = trainer.fit_loop
        if self.session is None:
            loop._load_combined_loader_states()  # which is `_begin` meanwhile
            loop._data_fetcher.setup(loop._combined_loader)
            iter(loop._data_fetcher)
        setup_data()

    def _objects(self, trainer: pl.Trainer, loaders: list[Any]) -> dict[str, Any]:
        """Return what makes up the state of training, by name."""
        objects: dict[str, Any] = {"model": trainer.model}
        objects |= _numbered("optimizer", trainer.optimizers)
        objects |= _numbered("scheduler", [config.scheduler for config in trainer.lr_scheduler_configs])
        if trainer.precision_plugin.state_dict():
            objects["precision"] = trainer.precision_plugin
        if is_overridden("state_dict", trainer.datamodule, pl.LightningDataModule):
            objects["datamodule"] = trainer.datamodule
        objects |= _numbered("loader", loaders)
        objects["trainer"] = TrainerState(trainer, self)
        further = self._settings.get("state") or {}
        reject_common_names(objects, further)
        return objects | further

    def _resumed(self, trainer: pl.Trainer, loaders: list[Any]) -> None:
        assert self.session is not None
        if trainer.ckpt_path:
            self.session.notice(
                "info",
                "ckpt_path",
                f"resumed from iteration {self.session.iteration:,} of this job; "
                f"{trainer.ckpt_path} (ckpt_path) is not used",
            )
        # Lightning iterates now and again at the start of the next epoch, and random numbers are drawn in between
        self._rng = rng_state()
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            for loader in loaders:
                if isinstance(loader, DataLoader):
                    loader.begin_next_epoch()
        elif len(loaders) == 1:
            recount_batches(trainer, loaders[0])

    def _epoch_begins(self, trainer: pl.Trainer, on_run_start: Callable[[Any], None], fetcher: Any) -> None:
        on_run_start(fetcher)
        if self._rng is not None:
            # Lightning completes a batch in which a checkpoint was taken; this one was taken after a batch
            _Loop.restarting.fset(trainer.fit_loop, False)
            restore_rng(self._rng)
            self._rng = None

    def _batch_ended(self, trainer: pl.Trainer, on_advance_end: Callable[[Any], None], fetcher: Any) -> None:
        try:
            on_advance_end(fetcher)
        except SIGTERMException:  # the script handles SIGTERM itself, and Lightning ends the training
            if self.session is not None:
                self.session.checkpoint()
            self._step(trainer)
            raise
        self._step(trainer)

    def _step(self, trainer: pl.Trainer) -> None:
        if self.session is None:
            return
        if self._clip is not None:
            self._clip.end(trainer)
        if trainer.global_step == self._global_step:
            self._warn_without_updates(trainer)
            return
        before, self._logged, self._global_step = self._logged, _metrics(trainer), trainer.global_step
        # a value that is logged again is in new memory, and `before` keeps the memory of the previous one
        new = {
            name: value
            for name, value in self._logged.items()
            if name not in before or before[name].data_ptr() != value.data_ptr()
        }
        self.session.step(**new)
        if self._is_validated:
            self.session.mark("validation", **{name: each for name, each in new.items() if name.startswith("val")})
            self._is_validated = False
        if _ends(trainer):
            # now: a later state belongs to the end of an epoch, while this one continues if more steps are allowed
            self.session.mark(f"epoch {trainer.current_epoch} ends")
            self._close_session()

    def _warn_without_updates(self, trainer: pl.Trainer) -> None:
        """Warn once if a module with manual optimization does not count its updates."""
        batches = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        if (
            self.session is not None
            and batches == _BATCHES_UNTIL_AN_UPDATE
            and trainer.global_step == 0
            and not trainer.lightning_module.automatic_optimization
        ):
            self.session.notice(
                "warning",
                "no_updates",
                f"trainer.global_step is 0 after {batches} batches, so nothing is saved: call step() on what "
                "self.optimizers() returns; optimizers(use_pl_optimizer=False) does not count updates",
            )


def from_environment() -> list[Callback]:
    """Return the callback for the job in `HOLDFAST_JOB`, for Lightning's entry point; none without it."""
    if not (job := os.environ.get(JOB_VARIABLE)):
        return []
    callback = Checkpoint(job)
    callback.is_from_environment = True
    return [callback]


class _SigtermOwner:
    """Lets a session that is created in this context handle SIGTERM in the place of Lightning.

    Lightning raises an exception before the next batch. The session saves first, and all ranks end at the same
    iteration. A handler of the script stays, and so does Lightning's if the session installs none.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        before = trainer._signal_connector._original_handlers.get(signal.SIGTERM)
        on_main_thread = threading.current_thread() is threading.main_thread()
        self._replaces = on_main_thread and before is signal.SIG_DFL

    def __enter__(self) -> None:
        if self._replaces:
            self._of_lightning = signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        if self._replaces and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._of_lightning)


class _OwnPosition:
    """Position of a loader that has its own, such as torchdata's StatefulDataLoader."""

    def __init__(self, trainer: pl.Trainer, loader: Any) -> None:
        self._fit_loop, self._loader = trainer.fit_loop, loader

    def state_dict(self) -> dict[str, Any]:
        # before Lightning iterates over it, a loader might start its workers to return a position
        begun = self._fit_loop._data_fetcher is not None
        return {"loader": self._loader.state_dict() if begun else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["loader"] is not None:
            self._loader.load_state_dict(state_dict["loader"])


def _require_support(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise ValueError for what cannot be checkpointed."""
    strategy = type(trainer.strategy)
    if strategy not in (SingleDeviceStrategy, DDPStrategy):
        raise ValueError(
            f"Trainer(strategy=...): {strategy.__name__} is not supported: use 'auto' or 'ddp', or a loop of your "
            "own with torch.distributed.fsdp.fully_shard and a holdfast.Session"
        )
    if getattr(trainer.strategy, "_model_averaging_period", None) is not None:
        raise ValueError(
            "DDPStrategy(model_averaging_period=...) is not supported: the weights of the ranks differ between "
            "two averages, and a checkpoint holds those of one rank; drop it"
        )
    for each in module.modules():
        if isinstance(each, MetricTracker):
            raise ValueError(
                "MetricTracker in the module is not supported: it adds metrics while it trains, so that a new "
                "module does not fit the checkpoint; create it outside the module"
            )
    jobs = [
        each.job for each in trainer.callbacks if isinstance(each, Checkpoint) and not each.is_from_environment
    ]
    if len(jobs) > 1:
        raise ValueError(f"Trainer(callbacks=...): {len(jobs)} Checkpoint callbacks, for {jobs}: keep one")
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if (instead := _NOT_SUPPORTED.get(kind.__name__)) is not None:
                raise ValueError(f"Trainer(callbacks=...): {kind.__name__} is not supported: {instead}")
    if trainer.reload_dataloaders_every_n_epochs:
        raise ValueError(
            "Trainer(reload_dataloaders_every_n_epochs=...) is not supported: a new loader has no position; use "
            "one loader whose sampler has set_epoch"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            "training_step(dataloader_iter) is not supported: the module draws batches itself, and their number "
            "is unknown; define training_step(batch, batch_idx)"
        )


def _make_resumable(trainer: pl.Trainer) -> list[Any]:
    """Replace the training loaders of torch by resumable ones. Return what holds the position of each."""
    combined = trainer.fit_loop._combined_loader
    loaders = [_resumable(each) for each in combined.flattened]
    unsized = [each for each in loaders if sized_len(each) is None]
    if len(loaders) > 1 and (unsized or combined._mode == "max_size"):
        raise ValueError(
            f"{len(loaders)} training loaders with mode={combined._mode!r}: use 'min_size' or 'max_size_cycle', "
            "and loaders with a length"
        )
    for loader in unsized:
        if not isinstance(loader, DataLoader):
            raise TypeError(
                f"the training loader, a {type(loader).__name__}, has no length: Lightning draws one batch in "
                "advance, and its position counts that as trained. Give its dataset to holdfast.DataLoader, or "
                "define __len__"
            )
    combined.flattened = loaders
    for loader in loaders:
        if isinstance(loader, DataLoader):
            # to know which batch is the last one, Lightning draws one in advance from a loader without a length
            loader.lookahead = len(unsized)
            # it warns of epochs that are left early; a resume from the end of one begins the next
            loader.mark_warned("left early")
    return [each if isinstance(each, DataLoader) else _OwnPosition(trainer, each) for each in loaders]


def _resumable(loader: Any) -> Any:
    """Return a loader with a position, or `loader` if it has one. TypeError if neither is possible."""
    if isinstance(loader, torch.utils.data.DataLoader) and type(loader).__iter__ is _ITER_OF_TORCH:
        seed = os.environ.get(SEED_VARIABLE)
        is_seeded = seed is not None and loader.generator is None
        return DataLoader.from_torch(loader, **({"seed": int(seed)} if is_seeded and seed else {}))
    if isinstance(loader, _Stateful) and (lacks := incomplete_state(loader)) is not None:
        raise TypeError(
            f"the state_dict of the training loader, a {type(loader).__name__}, lacks {lacks}: return a "
            "torch.utils.data.DataLoader or a holdfast.DataLoader over its dataset, which are read again"
        )
    if isinstance(loader, _Stateful):
        return loader
    raise TypeError(
        f"the training loader, a {type(loader).__name__}, has no position to continue from: return a "
        "torch.utils.data.DataLoader or a holdfast.DataLoader, or define state_dict and load_state_dict"
    )


_ITER_OF_TORCH = torch.utils.data.DataLoader.__iter__


def _ends(trainer: pl.Trainer) -> bool:
    """Return whether training ends after this batch, as far as its limits show."""
    loop = trainer.fit_loop
    if _is_max_limit_reached(trainer.global_step, trainer.max_steps):
        return True
    return bool(
        loop.epoch_loop._is_training_done
        and _is_max_limit_reached(loop.epoch_progress.current.processed + 1, loop.max_epochs)
    )


def _metrics(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the scalars that the module has logged. No error of a metric may end the training."""
    try:
        logged = trainer.callback_metrics.items()
        return {name: value for name, value in logged if value.numel() == 1 and name != "self"}
    except Exception as error:  # the metrics compute their values in code of the user
        logger.debug("the metrics of this iteration are unknown: %s", error)
        return {}


def _numbered(name: str, items: list[Any]) -> dict[str, Any]:
    """Return objects by `name`, with a number from the second one on."""
    return {name + (str(number) if number > 1 else ""): item for number, item in enumerate(items, start=1)}
