"""Adapter for the `Trainer` of Hugging Face Transformers: exact resume in the middle of an epoch.

    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    holdfast.integrations.transformers.attach(trainer, "my-job", store="checkpoints")
    trainer.train()

A callback cannot do this: the Trainer decides on the epoch and on the batches to skip before it calls any. Methods
of the trainer are replaced on the instance instead.

One module, since these methods share the position within the Trainer's loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import transformers.trainer
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from holdfast.integrations import reject_common_names, reject_restore_in_place
from holdfast.integrations.accelerate import ResumableSource, require_supported
from holdfast.learning_rate import GradientClip, scale_all
from holdfast.session import Session
from holdfast.state.rng import restore_rng, rng_state

logger = logging.getLogger("holdfast")

_PROGRESS = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
"""Attributes of `TrainerState` that training changes, besides `log_history`. Others follow from the arguments."""
_ROLLOUTS = ("_step", "_buffered_inputs")
"""Attributes of TRL's trainers that generate data for several updates, such as `GRPOTrainer`."""
_TRL_TOKENS = "_total_train_tokens"
"""Attribute of TRL's trainers that counts the tokens so far, to log them."""
_TRL_METRICS = "_metrics"
"""Values since the last log of TRL's trainers, by mode and name."""
_ARGUMENTS = ("max_steps", "num_train_epochs", "gradient_accumulation_steps", "max_grad_norm")
_METHODS = (
    *("get_train_dataloader", "_init_training_state", "_prepare_for_training", "_run_epoch", "_load_rng_state"),
    *("_maybe_log_save_evaluate", "_finalize_training", "_inner_training_loop", "train"),
)


def attach(trainer: Any, job: str, **settings: Any) -> TrainerAdapter:
    """Let a `Trainer` checkpoint its training and resume it exactly. Call it before `trainer.train()`.

    An iteration is an update of the weights: its number is the global step of the Trainer. On SIGTERM the session
    saves at the end of the update, and the script ends with status 143. A restore that an operator requests
    restarts the script, under `holdfast run`.

    Args:
        trainer: a `transformers.Trainer`, or a subclass that keeps its training loop.
        job: the job's name, under which its checkpoints and its history are kept.
        **settings: settings and further objects of a `holdfast.Session`: `store`, `server`, `budget`, `state` …

    Raises:
        ValueError: a kind of training, or an option of the Trainer, that is not supported; the message says what
            to do.
    """
    _require_supported(trainer)
    if isinstance(getattr(trainer.train, "__self__", None), TrainerAdapter):
        raise ValueError("attach was called twice for one Trainer: drop one call")
    reject_restore_in_place(settings, "the Trainer")
    return TrainerAdapter(trainer, job, settings)


class TrainerAdapter:
    """The methods around those of a `Trainer`. `session` is its session while it trains, else `None`."""

    def __init__(self, trainer: Any, job: str, settings: dict[str, Any]) -> None:
        self._trainer, self._job, self._settings = trainer, job, settings
        self.session: Session | None = None
        self._source: Any = None
        """The resumable training loader, within the one of Accelerate."""
        self._loader: Any = None
        self._prepared: Any = None
        """What `_prepare_for_training` has returned, until the Trainer asks for it."""
        self._position = _Position(trainer)
        self._resumed_with: dict[str, Any] | None = None
        """Random state of the checkpoint, until the first epoch begins."""
        self._logs: dict[str, Any] = {}
        self._evaluated: dict[str, Any] | None = None
        """Metrics of evaluations, until the update whose weights they used is counted."""
        self._updates_in_epoch = 0
        """The most updates that the current epoch may have."""
        self._is_epoch_ending = False
        """Whether the Trainer evaluates and saves at the end of an epoch."""
        self._has_begun = False
        """Whether `train` has created a session."""
        self._clip: GradientClip | None = None
        self._own_max_grad_norm: float | None = None
        """The Trainer's setting, while the one in force is in its place."""
        self._own = {name: getattr(trainer, name) for name in _METHODS}
        for name in _METHODS:
            setattr(trainer, name, getattr(self, name.lstrip("_")))
        trainer.add_callback(_LogCollector(self))

    # Methods in place of the Trainer's, in the order in which it calls them

    def train(self, *args: Any, **options: Any) -> Any:
        _reject_checkpoint(args[0] if args else options.get("resume_from_checkpoint"))
        self._has_begun = False
        result = self._own["train"](*args, **options)
        if not self._has_begun:
            logger.warning(
                "%s: nothing was checkpointed: %s.train does not call the training loop of the Trainer",
                self._job,
                type(self._trainer).__name__,
            )
        return result

    def inner_training_loop(self, *args: Any, **options: Any) -> Any:
        if options.get("trial") is not None:
            raise ValueError("hyperparameter_search trains several models: attach to a Trainer of each trial")
        _reject_checkpoint(options.get("resume_from_checkpoint"))
        try:
            return self._own["_inner_training_loop"](*args, **options)
        except BaseException as error:  # also SystemExit and KeyboardInterrupt: the session reports what ended it
            self._close(error)
            raise
        finally:
            self._close()

    def get_train_dataloader(self) -> Any:
        self._loader = self._own["get_train_dataloader"]()
        args = self._trainer.args
        seed = args.data_seed if args.data_seed is not None else args.seed
        self._source = ResumableSource(self._trainer.accelerator, self._loader, seed)
        return self._loader

    def init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        """Resume here: the Trainer asks from where to train, and prepares what it trains right after this."""
        own = self._own["_init_training_state"](max_steps, *args)
        self._prepared = self._own["_prepare_for_training"](max_steps, self._loader, None)
        self._position.begin()
        self._logs, self._evaluated, self._is_epoch_ending = {}, None, False
        settings = self._settings | {"restorable_in_place": False, "state": self._objects()}
        self.session, self._has_begun = Session(self._job, **settings), True
        optimizer = self._trainer.optimizer
        scale_all([getattr(optimizer, "optimizer", optimizer)])
        self._clip = GradientClip(self.session)
        if not self.session.resume():
            return own  # type: ignore[no-any-return]
        self._source.resumed()
        self._resumed_with = rng_state()
        if self._position.has_more_steps(max_steps) and self._position.updates < args[0]:  # updates of an epoch
            self._position.is_epoch_over = False  # the limit had ended it
        return self._position.epoch + self._position.is_epoch_over, 0

    def prepare_for_training(self, *_: Any) -> Any:
        prepared, self._prepared = self._prepared, None
        return prepared

    def run_epoch(self, **options: Any) -> None:
        self._updates_in_epoch = options["num_update_steps_per_epoch"]
        if self._resumed_with is None:
            self._position.begin_epoch(options["epoch"])
            self._own["_run_epoch"](**options)
        else:
            self._run_rest_of_epoch(self._resumed_with, options)
        self._position.is_epoch_over = True

    def _run_rest_of_epoch(self, rng: dict[str, Any], options: dict[str, Any]) -> None:
        # now: the Trainer has reset its sums since the resume, and callbacks may have drawn random numbers
        self._position.restore_sums()
        restore_rng(rng)
        if self._position.is_epoch_over:
            self._resumed_with = None
            if self._trainer.control.should_training_stop:  # a callback has ended the training in that epoch
                return
            self._trainer.control.should_epoch_stop = False  # it ended that epoch, not this one
            self._source.loader.begin_next_epoch()
            self._position.begin_epoch(options["epoch"])
            self._own["_run_epoch"](**options)
            return
        updates = self._position.updates
        if self._has_no_update_left():
            self._source.loader.begin_next_epoch()
            updates = options["num_update_steps_per_epoch"]
        options["steps_trained_in_current_epoch"] = updates * self._trainer.args.gradient_accumulation_steps
        options["resume_from_checkpoint"] = "holdfast"
        with self._loader_in_place():
            self._own["_run_epoch"](**options)
        self._resumed_with = None

    def load_rng_state(self, checkpoint: str | None) -> None:
        """Called when the first batches after a resume were drawn."""
        if self._resumed_with is not None:
            restore_rng(self._resumed_with)
        else:
            self._own["_load_rng_state"](checkpoint)

    def maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        """Called after each update, and once more at the end of an epoch.

        The last update of an epoch is counted at the end of the epoch: its evaluation belongs to it.
        """
        self._own["_maybe_log_save_evaluate"](*args, **options)
        if self.session is None:
            return
        is_epoch_ending, self._is_epoch_ending = self._is_epoch_ending, False
        if self.has_uncounted_update and (is_epoch_ending or not self._is_last_in_epoch()):
            self._position.updates += 1
            self._position.is_epoch_over = is_epoch_ending
            logs, self._logs = self._logs, {}
            self.session.step(**logs)
        if is_epoch_ending and not self._stops_within_epoch():
            self.session.mark(f"epoch {self._position.epoch} ends")
        if self._evaluated is not None and not self.has_uncounted_update:
            evaluated, self._evaluated = self._evaluated, None
            self.session.mark("evaluation", **evaluated)

    def finalize_training(self, *args: Any) -> Any:
        if self._resumed_with is not None:  # no epoch was left
            self._position.restore_sums()
            self._resumed_with = None
        self._close()  # the state of the last update, before the Trainer may load the best model
        return self._own["_finalize_training"](*args)

    # What the Trainer reports

    @property
    def has_uncounted_update(self) -> bool:
        """Whether the Trainer has done an update that is no iteration of the session yet."""
        return self.session is not None and self._trainer.state.global_step > self.session.iteration

    def update_begins(self) -> None:
        """Let the Trainer clip gradients to the norm in force."""
        if self.session is not None and self._clip is not None:
            args = self._trainer.args
            self._own_max_grad_norm = args.max_grad_norm
            args.max_grad_norm = self._clip.value(args.max_grad_norm)

    def gradients_clipped(self) -> None:
        """Put the Trainer's setting back, which checkpoints name."""
        if self._own_max_grad_norm is not None:
            self._trainer.args.max_grad_norm, self._own_max_grad_norm = self._own_max_grad_norm, None

    def epoch_ends(self) -> None:
        self._is_epoch_ending = True

    def logged(self, metrics: dict[str, Any]) -> None:
        """Keep what the Trainer logs, as metrics of the iteration."""
        if self.session is not None:
            numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
            self._logs |= {name: value for name, value in numbers.items() if name != "epoch"}

    def evaluated(self, metrics: dict[str, Any]) -> None:
        """Mark an evaluation at the update whose weights it used."""
        if self.session is None:
            return
        left_out = ("epoch", "_runtime", "_per_second", "_preparation_time")
        found = {name: value for name, value in metrics.items() if not name.endswith(left_out)}
        if self.has_uncounted_update:
            self._evaluated = (self._evaluated or {}) | found
            return
        # that update has its metrics: these must not become those of the next one
        self._logs = {name: value for name, value in self._logs.items() if name not in metrics}
        self.session.mark("evaluation", **found)

    # Parts of these

    def _objects(self) -> dict[str, Any]:
        trainer = self._trainer
        objects = {"model": trainer.model_wrapped, "optimizer": trainer.optimizer, "loader": self._source.loader}
        if trainer.lr_scheduler is not None:
            objects["scheduler"] = trainer.lr_scheduler
        if trainer.accelerator.scaler is not None:
            objects["scaler"] = trainer.accelerator.scaler
        objects["trainer"] = self._position
        state = self._settings.get("state") or {}
        reject_common_names(objects, state)
        return objects | state

    def _is_last_in_epoch(self) -> bool:
        """Whether the epoch ends after the uncounted update; a loader without a length does not show it."""
        control = self._trainer.control
        return bool(
            control.should_epoch_stop
            or control.should_training_stop
            or self._position.updates + 1 >= self._updates_in_epoch
        )

    def _stops_within_epoch(self) -> bool:
        stops = self._trainer.control.should_training_stop
        return bool(stops and self._position.updates < self._updates_in_epoch)

    def _has_no_update_left(self) -> bool:
        """Whether the checkpoint was taken after the last update of the epoch."""
        control = self._trainer.control
        return bool(
            self._source.loader.position.taken == 0 or control.should_epoch_stop or control.should_training_stop
        )

    @contextlib.contextmanager
    def _loader_in_place(self) -> Iterator[None]:
        """Let the Trainer count the batches before the position without reading them: the loader is past them."""
        skip = transformers.trainer.skip_first_batches
        transformers.trainer.skip_first_batches = lambda loader, _: loader
        try:
            yield
        finally:
            transformers.trainer.skip_first_batches = skip

    def _close(self, error: BaseException | None = None) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.__exit__(type(error) if error is not None else None, error, None)


class _Position:
    """The state of a `Trainer` besides the model, the optimizer and the loader: progress, sums, callbacks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        own = vars(trainer).keys()
        self.saved_attributes = (*(_ROLLOUTS if own >= set(_ROLLOUTS) else ()), *(own & {_TRL_TOKENS}))
        """Attributes of the trainer that are in checkpoints as they are."""
        self.epoch = self.updates = 0
        """Epoch, and updates in it."""
        self.is_epoch_over = False
        """Whether the Trainer has also evaluated and saved at the end of `epoch`."""
        self._loaded: dict[str, Any] = {}
        self._encoded: list[bytes] = []
        """The entries of `log_history` that were encoded before."""

    @property
    def script_settings(self) -> dict[str, Any]:
        """The arguments that determine the course of training, to name those that a script changes."""
        return {name: getattr(self._trainer.args, name) for name in _ARGUMENTS}

    def begin(self) -> None:
        """Start at the beginning."""
        self.begin_epoch(0)
        self._loaded, self._encoded = {}, []

    def begin_epoch(self, epoch: int) -> None:
        self.epoch, self.updates, self.is_epoch_over = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "epoch": self.epoch,
            "updates": self.updates,
            "is_epoch_over": self.is_epoch_over,
            "max_steps": trainer.state.max_steps,
            "progress": {name: getattr(trainer.state, name) for name in _PROGRESS},
            "log_history": self._encoded_history(),
            "control": dataclasses.asdict(trainer.control),
            "callbacks": {name: each.state()["attributes"] for name, each in self._callbacks()},
            "loss": getattr(trainer, "_tr_loss", None),
            "total_loss": getattr(trainer, "_total_loss_scalar", 0.0),
            "last_logged": getattr(trainer, "_globalstep_last_logged", 0),
            "first_step": getattr(trainer, "_initial_global_step", 0),
            "floating_point_operations": trainer.current_flos,
            "rollouts": {name: vars(trainer)[name] for name in self.saved_attributes},
            "metrics": {mode: dict(values) for mode, values in self._metrics_by_mode.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state
        self.epoch, self.updates, self.is_epoch_over = state["epoch"], state["updates"], state["is_epoch_over"]
        for name, value in state["progress"].items():
            setattr(self._trainer.state, name, value)
        self._encoded = state["log_history"].splitlines()
        self._trainer.state.log_history = [json.loads(line) for line in self._encoded]
        vars(self._trainer).update(state.get("rollouts", {}))
        own = self._metrics_by_mode
        for mode, values in state.get("metrics", {}).items():
            if mode in own:
                own[mode].update(values)

    @property
    def _metrics_by_mode(self) -> dict[str, dict[str, Any]]:
        """The metrics of a trainer of TRL; empty for others, which may use the name for anything."""
        found = vars(self._trainer).get(_TRL_METRICS)
        is_by_mode = isinstance(found, dict) and all(isinstance(each, dict) for each in found.values())
        return found if is_by_mode else {}

    def has_more_steps(self, max_steps: int) -> bool:
        """Whether the loaded job had reached its limit of updates, which is higher now."""
        return bool(self._loaded["max_steps"] <= self._trainer.state.global_step < max_steps)

    def restore_sums(self) -> None:
        """Restore what the Trainer resets at the start of its loop."""
        trainer, state = self._trainer, self._loaded
        for name, value in state["control"].items():
            setattr(trainer.control, name, value)
        if self.has_more_steps(trainer.state.max_steps):
            trainer.control.should_training_stop = False
        for name, callback in self._callbacks():
            for attribute, value in state["callbacks"].get(name, {}).items():
                setattr(callback, attribute, value)
        if state["loss"] is not None:
            trainer._tr_loss = state["loss"].to(trainer.args.device).clone()
        trainer._total_loss_scalar = state["total_loss"]
        trainer._globalstep_last_logged = state["last_logged"]
        trainer._initial_global_step = state["first_step"]
        trainer.current_flos = state["floating_point_operations"]

    def _callbacks(self) -> Iterator[tuple[str, Any]]:
        """Yield the callbacks that export their state, by class; with a number from the second of a class on."""
        seen: Counter[str] = Counter()
        for each in self._trainer.callback_handler.callbacks:
            if isinstance(each, ExportableState):
                name = type(each).__name__
                seen[name] += 1
                yield (name if seen[name] == 1 else f"{name}{seen[name]}"), each

    def _encoded_history(self) -> bytes:
        """Encode the entries that are new: the history only grows."""
        history = self._trainer.state.log_history
        del self._encoded[len(history) :]
        self._encoded += [json.dumps(entry, default=float).encode() for entry in history[len(self._encoded) :]]
        return b"\n".join(self._encoded)


class _LogCollector(TrainerCallback):  # type: ignore[misc]  # its class is Any without Transformers
    """Passes on what the Trainer reports to its callbacks."""

    def __init__(self, adapter: TrainerAdapter) -> None:
        self._adapter = adapter

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        self._adapter.logged(logs or {})

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._adapter.update_begins()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._adapter.gradients_clipped()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._adapter.epoch_ends()

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float] | None = None, **_: Any
    ) -> None:
        self._adapter.evaluated(metrics or {})


def _reject_checkpoint(resume_from_checkpoint: Any) -> None:
    """Raise ValueError for a checkpoint of the Trainer to resume from."""
    if resume_from_checkpoint:
        raise ValueError(
            "trainer.train(resume_from_checkpoint=...): drop it, the job continues from its newest checkpoint "
            "in the store. To start from a checkpoint of the Trainer, load its model with from_pretrained"
        )


def _require_supported(trainer: Any) -> None:
    """Raise ValueError for what a session cannot checkpoint."""
    if missing := [name for name in _METHODS if not hasattr(trainer, name)]:
        raise ValueError(
            f"transformers {transformers.__version__} is not supported: its Trainer lacks {missing[0]}; "
            "the adapter was tested with 5.3 to 5.24"
        )
    args = trainer.args
    if args.enable_jit_checkpoint:
        raise ValueError(
            "enable_jit_checkpoint=True replaces the handler of SIGTERM: set it to False, Holdfast saves"
        )
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size=True changes the batches: set per_device_train_batch_size")
    if args.n_gpu > 1:
        raise ValueError("DataParallel over several GPUs is not supported: start the script with torchrun")
    if trainer.is_fsdp_xla_enabled:
        raise ValueError("FSDP on XLA devices is not supported")
    require_supported(trainer.accelerator, fsdp_option='TrainingArguments(fsdp_config={"version": 2})')
