"""torchtitan: a checkpoint manager that leaves saving and resuming to Holdfast.

Select it on the command line of torchtitan; no code changes:

    --override.imports holdfast.integrations.torchtitan.checkpointer
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config.override import derive, override

from holdfast.integrations import reject_common_names, reject_restore_in_place
from holdfast.session import Session


class HoldfastCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """Checkpoint manager of torchtitan whose checkpoints are those of a `holdfast.Session`.

    torchtitan's own code loads the initial weights and exports the model after the last step. Training waits for a
    running copy in `maybe_wait_for_staging`, which torchtitan calls before each update.

    Raises:
        ValueError: CUDA graphs, or an option of torchtitan that Holdfast cannot follow; the message names the
            option. Or different stages of a pipeline have parameters of the same name.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        settings: dict[str, Any] = field(default_factory=dict)
        """Arguments of `holdfast.Session`, in addition to HOLDFAST_* variables."""

    def __init__(
        self,
        config: Any,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        trainer = states.get("train_state")
        _require_supported(config, trainer)
        objects: dict[str, Any] = {name: _Stateful(each) for name, each in states.items()}
        # of a pipeline, each rank gives its stages, which keep the names of the full model
        is_pipeline = _pipeline_degree(trainer) > 1 or len(model_parts) > 1
        objects |= {"model": model_parts if is_pipeline else model_parts[0], "lr_scheduler": lr_schedulers}
        super().__init__(
            config,
            dataloader=dataloader,
            model_parts=model_parts,
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            states=states,
            sd_adapter=sd_adapter,
            base_folder=base_folder,
        )
        if dataloader is not None:
            is_torchtitans = isinstance(dataloader, ParallelAwareDataloader)
            objects["dataloader"] = _Stateful(_LoaderPosition(dataloader) if is_torchtitans else dataloader)
        objects |= {f"optimizer{number or ''}": each for number, each in enumerate(optimizers)}
        settings = dict(config.settings)
        settings.setdefault("store", os.environ.get("HOLDFAST_STORE") or os.path.join(base_folder, "holdfast"))
        job = settings.pop("job", None) or os.environ.get("HOLDFAST_JOB") or "torchtitan"
        self._session = Session(job, **_with_objects(settings, objects))
        self._metrics: dict[str, Any] = {}
        if (processor := getattr(trainer, "metrics_processor", None)) is not None:
            self._observe(processor, trainer)

    def _observe(self, processor: Any, trainer: Any) -> None:
        """Keep what torchtitan logs: the metrics of a step for its end, a validation as a mark."""
        log, log_validation = processor.log, processor.log_validation

        def observed(
            step: int, loss: float, max_loss: float, grad_norm: float, *args: Any, **options: Any
        ) -> None:
            more = options.get("extra_metrics") or {}
            # ranks without the last stage of a pipeline log a loss of -1: that of the last stage reaches rank 0
            known = {"loss": loss} if getattr(trainer, "pp_has_last_stage", True) else {}
            self._metrics = {**known, "grad_norm": grad_norm, **more}
            log(step, loss, max_loss, grad_norm, *args, **options)

        def observed_validation(loss: float, step: int, **options: Any) -> None:
            self._session.mark("validation", loss=loss)
            log_validation(loss, step, **options)

        processor.log, processor.log_validation = observed, observed_validation

    def _load(self, step: int = -1) -> bool:
        if step != -1:
            raise ValueError(
                f"checkpoint.load_step={step}: Holdfast resumes from the newest checkpoint; leave load_step at "
                "-1, and use `holdfast restore` or `holdfast fork` to continue from another one"
            )
        return self._session.resume() > 0 or bool(super()._load(step))

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """End a step; Holdfast decides whether to checkpoint it.

        Returns:
            Whether this call exported the model after the last step.
        """
        metrics, self._metrics = self._metrics, {}
        self._session.step(**metrics)
        exports = last_step and self.last_save_model_only
        if exports:
            self._save_last_step(curr_step)
        return exports

    def _maybe_wait_for_staging(self) -> None:
        self._session.wait_copied()

    def _close(self) -> None:
        if (session := getattr(self, "_session", None)) is not None:
            session.__exit__(*sys.exc_info())  # the trainer closes in an `except` as well
        super()._close()


class _Stateful:
    """The state of an object, without attributes: the session would search them for state that is not saved."""

    def __init__(self, item: Any) -> None:
        self.state_dict, self.load_state_dict = item.state_dict, item.load_state_dict


class _LoaderPosition:
    """Position of torchtitan's loader as plain values; its own `state_dict` contains a pickle."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        loader = self._loader
        position = StatefulDataLoader.state_dict(loader)
        return {"degree": loader.dp_world_size, "rank": loader.dp_rank, "position": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loader = self._loader
        if state["degree"] != loader.dp_world_size:
            raise ValueError(
                f"the checkpoint has a data-parallel degree of {state['degree']}, this job has "
                f"{loader.dp_world_size}: torchtitan's loader cannot split its position; start with the same "
                "degree"
            )
        if (rank := state.get("rank", loader.dp_rank)) != loader.dp_rank:
            raise ValueError(
                f"this rank reads the data of data-parallel rank {loader.dp_rank}, and would continue at the "
                f"position of {rank}: the other degrees of parallelism arrange ranks differently than in the "
                "checkpoint; start with the same context and tensor parallel degrees"
            )
        StatefulDataLoader.load_state_dict(loader, state["position"])
        # the iterator draws a seed for workers: a draw from the restored random state would change training
        loader.generator = torch.Generator()


def _with_objects(settings: dict[str, Any], objects: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a session, with the objects that torchtitan trains. ValueError: they do not fit."""
    # its loop and its iterator over the data cannot go back
    reject_restore_in_place(settings, "the trainer of torchtitan")
    state = settings.get("state") or {}
    reject_common_names(objects, state)
    return settings | {"restorable_in_place": False, "state": objects | state}


def _pipeline_degree(trainer: Any) -> int:
    options = getattr(trainer, "config", None)
    return int(getattr(getattr(options, "parallelism", None), "pipeline_parallel_degree", 1))


def _require_supported(config: Any, trainer: Any) -> None:
    """Raise ValueError for what Holdfast cannot checkpoint."""
    options = getattr(trainer, "config", None)
    if not getattr(getattr(options, "training", None), "disable_cuda_graphs", True):
        raise ValueError(
            "training.disable_cuda_graphs=False: Holdfast does not support CUDA graphs; set "
            "--training.disable_cuda_graphs"
        )
    for name in ("load_only", "create_seed_checkpoint"):
        if getattr(config, name):
            raise ValueError(
                f"checkpoint.{name}=True: Holdfast saves and resumes; for this run, remove "
                "holdfast.integrations.torchtitan.checkpointer from override.imports"
            )


@override(target=BaseCheckpointManager.Config, description="checkpoints by Holdfast")  # type: ignore[untyped-decorator]
def checkpointer(config: Any, **settings: Any) -> Any:
    """Replace torchtitan's checkpoint manager.

    Args:
        config: torchtitan's configuration of checkpoints, of which the initial load and the last save stay.
        **settings: the job's name and other arguments of `holdfast.Session`, from `checkpointer={"job": "llama"}`.
    """
    return derive(
        config,
        HoldfastCheckpointManager.Config,
        enable=True,
        async_mode="disabled",
        interval=1,  # torchdata's loader keeps a position at these steps only
        keep_latest_k=0,
        settings=settings,
    )
