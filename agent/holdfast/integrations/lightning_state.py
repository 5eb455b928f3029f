"""State of a Lightning `Trainer` besides the model, the optimizers and the loaders: loops, callbacks, metrics.

Checked with Lightning 2.6.6.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from torchmetrics import Metric

from holdfast.data.loader import DataLoader
from holdfast.learning_rate import GradientClip
from holdfast.session import Session

_CONNECTOR = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter", "_current_fx")
"""Attributes of the logger connector: the values logged last, and its position in the epoch."""
_META = {field.name for field in dataclasses.fields(_Metadata)} - {"reduce_fx", "_sync"}
logger = logging.getLogger("holdfast")


class TrainerState:
    """Gives a `Trainer` that fits a module `state_dict` and `load_state_dict`, for the end of a batch."""

    saves_metrics = True
    """Whether the values of the module's torchmetrics are saved here, not in its `state_dict`."""

    def __init__(self, trainer: pl.Trainer, left_out: Callback) -> None:
        self._trainer, self._left_out = trainer, left_out
        """`left_out` is the callback that creates the session, which has no state."""
        self._has_warned = False

    @property
    def script_settings(self) -> dict[str, Any]:
        """The arguments that determine the course of training, to name those that a script changes."""
        return {name: getattr(self._trainer, name) for name in ("max_epochs", "max_steps", "gradient_clip_val")}

    @property
    def replaced_settings(self) -> dict[str, Any]:
        """Arguments that a checkpoint replaces."""
        return {"accumulate_grad_batches": self._trainer.accumulate_grad_batches}

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        callbacks = {each.state_key: each.state_dict() for each in self._callbacks()}
        return {
            "loops": _without_loaders(trainer.fit_loop),
            "callbacks": {key: state for key, state in callbacks.items() if state},
            "hooks": self._saved_by_hooks(),
            "logged": {name: _plain(getattr(trainer._logger_connector, name)) for name in _CONNECTOR},
            "results": {key: _result_state(each) for key, each in trainer.fit_loop.epoch_loop._results.items()},
            "metrics": {name: _metric_state(metric) for name, metric in self._metrics().items()},
            "should_stop": trainer.should_stop,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(state_dict["loops"])
        for callback in self._callbacks():
            if (state := state_dict["callbacks"].get(callback.state_key)) is not None:
                callback.load_state_dict(state)
        self._load_by_hooks(state_dict["hooks"])
        device = trainer.strategy.root_device
        for name in _CONNECTOR:
            setattr(trainer._logger_connector, name, _on_device(state_dict["logged"][name], device))
        metrics = self._metrics()
        for name, state in state_dict["metrics"].items():
            if name in metrics:
                _load_metric(metrics[name], state, device)
        trainer.fit_loop.epoch_loop._results = _RestoredResults(trainer, state_dict["results"])
        trainer.should_stop = state_dict["should_stop"]
        trainer.accumulate_grad_batches = state_dict["accumulate_grad_batches"]

    def _callbacks(self) -> list[Callback]:
        return [each for each in self._trainer.callbacks if each is not self._left_out]

    def _metrics(self) -> dict[str, Metric]:
        """Return the torchmetrics of the module by name: what they have counted is in no `state_dict`."""
        named = self._trainer.lightning_module.named_modules()
        return {name: each for name, each in named if isinstance(each, Metric)}

    def _saved_by_hooks(self) -> dict[str, Any]:
        """Return what `on_save_checkpoint` of the module and the callbacks adds to a checkpoint of Lightning."""
        trainer, module = self._trainer, self._trainer.lightning_module
        callbacks = [each for each in self._callbacks() if is_overridden("on_save_checkpoint", each, Callback)]
        if not callbacks and not is_overridden("on_save_checkpoint", module):
            return {}
        checkpoint = self._checkpoint()
        own, names = set(checkpoint), set(checkpoint["state_dict"])
        for callback in callbacks:
            callback.on_save_checkpoint(trainer, module, checkpoint)
        module.on_save_checkpoint(checkpoint)
        if not self._has_warned and (changed := names ^ set(checkpoint.get("state_dict", ()))):
            self._has_warned = True
            logger.warning(
                "on_save_checkpoint adds or removes %r in checkpoint['state_dict']: that has no effect, since the "
                "whole module is saved; add your own values under new keys of checkpoint",
                min(changed),
            )
        return {key: value for key, value in checkpoint.items() if key not in own}

    def _load_by_hooks(self, saved: Mapping[str, Any]) -> None:
        trainer, module = self._trainer, self._trainer.lightning_module
        if not saved:
            return
        checkpoint = {**self._checkpoint(), **saved}
        for callback in self._callbacks():
            callback.on_load_checkpoint(trainer, module, checkpoint)
        module.on_load_checkpoint(checkpoint)

    def _checkpoint(self) -> dict[str, Any]:
        """Return the entries of a checkpoint of Lightning that its hooks may read."""
        trainer, module = self._trainer, self._trainer.lightning_module
        checkpoint = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": pl.__version__,
            "state_dict": module.state_dict(),
            # empty: the session saves these itself
            "loops": {},
            "callbacks": {},
            "optimizer_states": [],
            "lr_schedulers": [],
        }
        for each in (module, trainer.datamodule):
            if each is not None and each.hparams:
                checkpoint[each.CHECKPOINT_HYPER_PARAMS_NAME] = getattr(each, "_hparams_name", None)
                checkpoint[each.CHECKPOINT_HYPER_PARAMS_KEY] = dict(each.hparams)
        return checkpoint


class _RestoredResults(_ResultCollection):  # type: ignore[misc]  # its class is Any without Lightning
    """Values that `self.log` accumulates in an epoch, with those of a checkpoint.

    A key counts as missing until it is logged again: then Lightning makes a metric with the arguments of this
    process, such as a process group, and that metric takes over the restored values.
    """

    def __init__(self, trainer: pl.Trainer, states: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(training=True)
        self._unconfirmed: set[str] = set()
        for key, state in states.items():
            if (metric := _result_metric(trainer, state)) is not None:
                super().__setitem__(key, metric)
                self._unconfirmed.add(key)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) and key not in self._unconfirmed

    def __setitem__(self, key: str, metric: _ResultMetric) -> None:
        if key in self._unconfirmed:
            self._unconfirmed.discard(key)
            restored = self[key]
            if restored.is_tensor and metric.is_tensor:
                for name in metric._defaults:
                    setattr(metric, name, getattr(restored, name, getattr(metric, name)))
            metric._update_count, metric.has_reset = restored._update_count, restored.has_reset
            metric._forward_cache = restored._forward_cache
        super().__setitem__(key, metric)


def recount_batches(trainer: pl.Trainer, loader: Any) -> None:
    """Count the finished batches of this epoch in those of the script, which may have another size than before.

    Lightning compares this count with the length of the loader to find the end of the epoch and its validation.
    """
    if not isinstance(loader, DataLoader):
        return
    with contextlib.suppress(TypeError):  # no length: Lightning does not compare either
        finished = len(loader) - loader.batches_left(loader.epoch + 1)
        current = trainer.fit_loop.epoch_loop.batch_progress.current
        for field in dataclasses.fields(current):
            setattr(current, field.name, finished)


def _without_loaders(fit_loop: Any) -> Any:
    """Return the state of the loops alone. The session saves the loaders, and asking one may start its workers."""
    loader, fit_loop._combined_loader = fit_loop._combined_loader, None
    try:
        return fit_loop.state_dict()
    finally:
        fit_loop._combined_loader = loader


def _result_state(metric: _ResultMetric) -> dict[str, Any]:
    meta = metric.meta
    return {
        "meta": {name: getattr(meta, name) for name in _META} | {"reduce_fx": meta.reduce_fx.__name__},
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only, "_op": meta.sync.op},
        "is_tensor": metric.is_tensor,
        "values": {name: getattr(metric, name) for name in metric._defaults},
        "update_count": metric._update_count,
        "has_reset": metric.has_reset,
        "forward_cache": metric._forward_cache if isinstance(metric._forward_cache, torch.Tensor) else None,
    }


def _result_metric(trainer: pl.Trainer, state: Mapping[str, Any]) -> _ResultMetric | None:
    """Return the metric of a saved state; `None` if it belongs to a torchmetric that the module lacks now."""
    device = trainer.strategy.root_device
    meta = _Metadata(**state["meta"])
    meta.sync = _Sync(fn=trainer.strategy.reduce, **state["sync"])
    metric = _ResultMetric(meta, state["is_tensor"])
    if not metric.is_tensor:
        found = dict(trainer.lightning_module.named_modules()).get(meta.metric_attribute or "")
        if not isinstance(found, Metric):
            return None
        metric.value = found
    for name, value in state["values"].items():
        setattr(metric, name, _on_device(value, device))
    metric._update_count, metric.has_reset = state["update_count"], state["has_reset"]
    metric._forward_cache = _on_device(state["forward_cache"], device)
    return metric


def _metric_state(metric: Metric) -> dict[str, Any]:
    """Return the states of a metric, and the numbers that a wrapper such as `Running` counts in its attributes."""
    left_out = {*inspect.signature(type(metric).__init__).parameters, "_computed", "_forward_cache"}
    return {
        name: value
        for name, value in vars(metric).items()
        if name in metric._defaults or (type(value) in (int, float, bool, torch.Tensor) and name not in left_out)
    }


def _load_metric(metric: Metric, state: Mapping[str, Any], device: torch.device) -> None:
    for name in vars(metric).keys() & state.keys():
        setattr(metric, name, _on_device(state[name], device))
    metric._computed = None


def _plain(value: Any) -> Any:
    """Return a copy of a dict, which Lightning changes in place."""
    return dict(value) if isinstance(value, dict) else value


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: _on_device(each, device) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(functools.partial(_on_device, device=device), value))
    return value


class ClippedGradients:
    """Lets a `Trainer` clip gradients to the norm in force, during an optimizer step."""

    def __init__(self, session: Session) -> None:
        self._clip = GradientClip(session)
        self._own: tuple[Any] | None = None
        """The setting of the Trainer, while the one in force is in its place."""

    def begin(self, trainer: pl.Trainer) -> None:
        """Put the norm in force in the place of the Trainer's, which checkpoints name."""
        if self._own is not None:
            return
        own = trainer.gradient_clip_val
        in_force = self._clip.value(own or 0.0)
        if in_force != (own or 0.0):
            self._own, trainer.gradient_clip_val = (own,), in_force or None

    def end(self, trainer: pl.Trainer) -> None:
        if self._own is not None:
            (trainer.gradient_clip_val,), self._own = self._own, None
