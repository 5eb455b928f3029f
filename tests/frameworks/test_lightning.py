"""Lightning's Trainer: exact in the middle of an epoch, with validation, and with what scripts put beside it."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import signal
import sys
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric, MetricTracker
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import MinMaxMetric, Running

import holdfast
from benchmarks.integrations import job, kills
from holdfast.integrations.lightning import Checkpoint, _finished, _require_support, from_environment
from tests.frameworks.lightning_fits import Module, Stream, end_and_resume, fit, torch_loader

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of many things


def test_a_trainer_that_is_killed_resumes_exactly(tmp_path):
    uninterrupted = kills.run("lightning", "holdfast", tmp_path / "uninterrupted")
    killed = kills.run("lightning", "holdfast", tmp_path / "killed", kills=2, seed=1)
    result = kills.compare(uninterrupted, killed)
    assert len(result.kills) == 2
    assert result.exact, result


@pytest.mark.parametrize(
    "end_after",
    [pytest.param(4, id="mid-epoch"), pytest.param(6, id="after a validation"), pytest.param(12, id="epoch end")],
)
def test_a_resume_repeats_neither_validation_nor_epoch_end(tmp_path, end_after):
    assert end_and_resume(tmp_path, [end_after]) == [1, end_after + 1]


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 5), (2, 3)])
def test_a_start_after_any_update_of_an_epoch_continues_exactly(tmp_path, accumulate, updates):
    """Five batches an epoch, the last of which is an update of its own where two are accumulated."""
    arguments = {"accumulate_grad_batches": accumulate, "limit_train_batches": 5, "max_epochs": 2}
    ends = list(range(1, updates + 2))
    assert end_and_resume(tmp_path, ends, **arguments) == [1, *(end + 1 for end in ends)]


def test_a_module_that_asks_for_the_number_of_steps_resumes_exactly(tmp_path):
    """`estimated_stepping_batches` prepares the loaders before any callback is called."""
    assert end_and_resume(tmp_path, [4, 6, 12], module=OneCycle) == [1, 5, 7, 13]


def test_a_fit_after_a_learning_rate_finder_resumes_exactly(tmp_path):
    def callbacks():
        return [LearningRateFinder(num_training_steps=4, early_stop_threshold=None)]

    assert end_and_resume(tmp_path, [5], callbacks=callbacks, module=WithRate) == [1, 6]


def test_epochs_that_are_left_early_resume_exactly(tmp_path):
    assert end_and_resume(tmp_path, [5, 8], limit_train_batches=15) == [1, 6, 9]


def test_a_training_by_steps_resumes_exactly(tmp_path):
    assert end_and_resume(tmp_path, [5, 12, 13], max_epochs=-1, max_steps=20) == [1, 6, 13, 14]


def test_a_loader_without_a_length_resumes_at_the_batch_that_was_trained_on(tmp_path):
    def stream():
        return torch.utils.data.DataLoader(Stream(), batch_size=job.BATCH_SIZE)

    assert end_and_resume(tmp_path, [5, 12], train=stream, val_check_interval=10) == [1, 6, 13]


def test_a_loader_of_holdfast_is_used_as_it_is(tmp_path):
    def loader():
        return holdfast.DataLoader(job.AugmentedSamples(), batch_size=4, shuffle=True, seed=3, num_workers=2)

    assert end_and_resume(tmp_path, [5, 12, 17], train=loader) == [1, 6, 13, 18]


@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4)])
def test_another_batch_size_in_mid_epoch_continues_at_the_same_sample_and_validates(tmp_path, before, after):
    def fit_with(size, end_after=None):
        return fit(
            tmp_path,
            end_after=end_after,
            train=lambda: torch.utils.data.DataLoader(job.AugmentedSamples(), batch_size=size, shuffle=True),
            callbacks=lambda: [EarlyStopping("val_loss", patience=9)],  # raises an error without a validation
            max_epochs=1,
            accumulate_grad_batches=1,
            val_check_interval=1.0,
        )

    started, _ = fit_with(before, end_after=4)
    rest, trainer = fit_with(after)
    batches = [samples for _, seen in started.updates + rest.updates for _, samples in seen]
    assert [len(samples) for samples in batches] == [before] * 4 + [after] * ((job.SAMPLES - 4 * before) // after)
    assert sorted(itertools.chain(*batches)) == list(range(job.SAMPLES))
    assert "val_loss" in trainer.callback_metrics


def test_a_stateful_loader_of_torchdata_keeps_its_own_position(tmp_path):
    def loader():
        return StatefulDataLoader(Plain(), batch_size=4, shuffle=True, num_workers=1)

    assert end_and_resume(tmp_path, [5, 12, 17], train=loader) == [1, 6, 13, 18]


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_two_loaders_resume_exactly(tmp_path, mode):
    def loaders():
        few = torch.utils.data.Subset(job.AugmentedSamples(), range(40))
        second = torch.utils.data.DataLoader(few, batch_size=4, shuffle=True)
        return CombinedLoader([torch_loader(), second], mode)

    assert end_and_resume(tmp_path, [3, 5, 8], train=loaders, module=TwoLoaders) == [1, 4, 6, 9]


def test_two_optimizers_that_the_module_steps_itself_resume_exactly(tmp_path):
    ends = {"module": Manual, "accumulate_grad_batches": 1, "max_epochs": 1}
    assert end_and_resume(tmp_path, [10, 24], **ends) == [2, 12, 26]


def test_metrics_loggers_and_other_callbacks_resume_with_the_trainer(tmp_path):
    def callbacks():
        return [
            EarlyStopping("train_accuracy", mode="max", patience=1, check_on_train_epoch_end=True),
            LearningRateMonitor("step"),
            ModelCheckpoint(tmp_path / "models", monitor="val_loss", save_top_k=2),
        ]

    logger = CSVLogger(tmp_path / "logs")
    arguments: dict[str, Any] = {"callbacks": callbacks, "module": WithMetrics, "max_epochs": 6}
    end_and_resume(tmp_path, [5, 12, 17], **arguments, logger=logger, enable_checkpointing=True)


def test_epochs_and_validations_are_marked(tmp_path, monkeypatch):
    marks = []
    monkeypatch.setattr(
        holdfast.Session,
        "mark",
        lambda self, name, /, **metrics: marks.append((self.iteration, name, sorted(metrics))),
    )
    fit(tmp_path, module=WithMetrics, max_epochs=2)
    assert [mark for mark in marks if mark[1] != "validation"] == [
        (12, "epoch 0 ends", []),
        (24, "epoch 1 ends", []),
    ]
    assert [mark for mark in marks if mark[1] == "validation"] == [
        (iteration, "validation", ["val_loss"]) for iteration in (6, 12, 18, 24)
    ]


def test_a_value_belongs_to_the_iteration_that_logged_it_and_to_no_later_one(tmp_path):
    arguments: dict[str, Any] = {
        "module": Worsening,
        "max_epochs": 2,
        "callbacks": lambda: [EachCheckpointDurable()],
        "settings": {"every": 1, "retention": "best 1 by val_loss, last 1"},
    }
    fit(tmp_path, end_after=8, **arguments)
    fit(tmp_path, **arguments)
    kept = {json.loads(path.read_bytes())["iteration"] for path in tmp_path.rglob("manifest.json")}
    # the first validation, after update 6, had the lowest loss; the second start resumed from update 8
    assert kept == {6, 8, 24}


def test_wrappers_of_torchmetrics_resume_with_the_values_in_their_attributes(tmp_path):
    assert end_and_resume(tmp_path, [5, 12], module=WithWrappers) == [1, 6, 13]


def test_a_tracker_of_metrics_in_the_module_is_refused():
    module = Module([])
    module.tracker = MetricTracker(MeanMetric(), maximize=False)
    with pytest.raises(ValueError, match="create it outside the module"):
        _require_support(trainer_with(SingleDeviceStrategy()), module)


def test_a_hook_finds_the_keys_of_lightning_and_may_not_change_the_saved_module(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "holdfast")
    assert end_and_resume(tmp_path, [5], module=ChangesCheckpoint, max_epochs=1) == [1, 6]
    assert "on_save_checkpoint adds or removes 'extra' in checkpoint['state_dict']" in caplog.text


def test_what_hooks_of_the_module_save_and_change_resumes(tmp_path):
    assert end_and_resume(tmp_path, [5, 12], module=WithHooks) == [1, 6, 13]


def test_a_data_module_keeps_its_state(tmp_path):
    def data():
        return {"datamodule": Data()}

    assert end_and_resume(tmp_path, [5, 12], fit_arguments=data) == [1, 6, 13]


def test_more_steps_continue_as_if_there_had_never_been_fewer(tmp_path):
    arguments: dict[str, Any] = {"max_epochs": -1, "job_name": "long"}
    expected, _ = fit(tmp_path / "at once", max_steps=20, **arguments)
    first, _ = fit(tmp_path / "extended", max_steps=8, **arguments)
    _finished.clear()  # as in another process
    rest, _ = fit(tmp_path / "extended", max_steps=20, **arguments)
    assert first.updates + rest.updates == expected.updates


def test_a_fresh_job_starts_from_ckpt_path_and_a_known_one_from_its_newest_checkpoint(tmp_path, caplog):
    def from_file():
        return {"ckpt_path": tmp_path / "models" / "last.ckpt"}

    def saving():
        return [ModelCheckpoint(tmp_path / "models", every_n_train_steps=2, save_last=True)]

    expected, _ = fit(tmp_path / "source", callbacks=saving, enable_checkpointing=True, max_steps=4)
    first, _ = fit(tmp_path / "store", job_name="tuned", fit_arguments=from_file, end_after=7)
    assert expected.updates[-1][0] == 4
    assert first.updates[0][0] == 5, "Lightning restored update 4"
    caplog.set_level(logging.INFO, "holdfast")
    rest, _ = fit(tmp_path / "store", job_name="tuned", fit_arguments=from_file)
    assert rest.updates[0][0] == 8
    assert "last.ckpt (ckpt_path) is not used" in caplog.text


def test_only_one_callback_acts_where_script_and_environment_name_a_job(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_JOB", "of-the-environment")
    monkeypatch.setenv("HOLDFAST_STORE", str(tmp_path / "store"))
    (added,) = from_environment()
    fit(tmp_path / "store", job_name="of-the-script", callbacks=lambda: [added], max_epochs=1)
    assert {path.name for path in (tmp_path / "store").iterdir()} == {"of-the-script"}


def test_the_environment_alone_adds_no_callback_without_a_job(monkeypatch):
    monkeypatch.delenv("HOLDFAST_JOB", raising=False)
    assert from_environment() == []


def test_a_trainer_without_a_job_works_with_a_lightning_that_lacks_private_names(monkeypatch):
    monkeypatch.delattr("lightning.pytorch.loops.loop._Loop")
    monkeypatch.delitem(sys.modules, "holdfast.integrations.lightning")
    monkeypatch.delenv("HOLDFAST_JOB", raising=False)
    assert not [
        each for each in pl.Trainer(logger=False).callbacks if type(each).__module__.startswith("holdfast")
    ]
    monkeypatch.setenv("HOLDFAST_JOB", "of-the-environment")
    with pytest.raises(ImportError, match=r"cannot import name '_Loop'.*install lightning 2\.5\.6 or 2\.6\.6"):
        pl.Trainer(logger=False)


def test_a_second_module_needs_a_job_of_its_own(tmp_path):
    fit(tmp_path, max_epochs=1)
    with pytest.raises(ValueError, match="a different job name"):
        fit(tmp_path, max_epochs=1)


@pytest.mark.parametrize(
    ("arguments", "way_out"),
    [
        ({"callbacks": lambda: [StochasticWeightAveraging(1e-2)]}, "in a submodule"),
        ({"callbacks": lambda: [Finetuning()]}, "configure_optimizers"),
        (
            {"callbacks": lambda: [Checkpoint("other")]},
            "2 Checkpoint callbacks, for \\['other', 'fit'\\]: keep one",
        ),
        ({"reload_dataloaders_every_n_epochs": 1}, "set_epoch"),
        ({"train": lambda: CombinedLoader([torch_loader(), torch_loader()], "max_size")}, "min_size"),
    ],
)
def test_what_cannot_be_checkpointed_is_refused_before_the_first_batch(tmp_path, arguments, way_out):
    with pytest.raises(ValueError, match=way_out):
        fit(tmp_path, **arguments)
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_training_loader_without_a_position_is_refused(tmp_path):
    with pytest.raises(TypeError, match="define state_dict and load_state_dict"):
        fit(tmp_path, train=lambda: list(torch_loader()))


def test_a_loader_with_its_own_position_and_no_length_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"to holdfast\.DataLoader, or define __len__"):
        fit(tmp_path, val_check_interval=10, train=lambda: StatefulDataLoader(Stream(), batch_size=4))


def test_an_object_under_a_name_of_the_callback_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"state=\{'model': \.\.\.\}: .* use another name"):
        fit(tmp_path, settings={"state": {"model": torch.nn.Linear(2, 2)}})


def test_a_restore_in_place_is_refused():
    with pytest.raises(ValueError, match="cannot go back within a process"):
        Checkpoint("job", restorable_in_place=True)


def test_optimizers_whose_steps_are_not_counted_are_reported(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "holdfast")
    fit(tmp_path, module=Uncounted, accumulate_grad_batches=1, max_epochs=5)
    (message,) = [each.message for each in caplog.records if "global_step" in each.message]
    assert "use_pl_optimizer=False" in message


def test_a_sharded_strategy_is_refused():
    class FSDPStrategy:
        pass

    with pytest.raises(ValueError, match="FSDPStrategy is not supported: use 'auto' or 'ddp'"):
        _require_support(trainer_with(FSDPStrategy()), Module([]))


def test_a_strategy_that_averages_the_weights_now_and_then_is_refused():
    with pytest.raises(ValueError, match="model_averaging_period"):
        _require_support(trainer_with(DDPStrategy(model_averaging_period=4)), Module([]))


def test_a_fit_leaves_the_trainer_and_the_signal_handlers_as_they_were(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    _, trainer = fit(tmp_path, max_epochs=1)
    assert signal.getsignal(signal.SIGTERM) is before
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop):
        assert not [name for name, value in vars(loop).items() if isinstance(value, functools.partial)]


def trainer_with(strategy: Any) -> Any:
    return SimpleNamespace(strategy=strategy, callbacks=[], reload_dataloaders_every_n_epochs=0)


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.model[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        pass


class Plain(torch.utils.data.Dataset):
    """The samples without noise: a StatefulDataLoader seeds its workers anew after a resume."""

    def __len__(self):
        return job.SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(job.FEATURES, generator=generator), index % job.CLASSES, index


class TwoLoaders(Module):
    def training_step(self, batch, batch_idx):
        return self.loss(batch[0]) + self.loss(batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class WithRate(Module):
    def __init__(self, seen):
        super().__init__(seen)
        self.lr = 1e-2

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class OneCycle(Module):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Manual(Module):
    def __init__(self, seen):
        super().__init__(seen)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        halves = list(self.parameters())[:2], list(self.parameters())[2:]
        optimizers = [torch.optim.AdamW(half, lr=1e-2) for half in halves]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 7) for each in optimizers]


class Uncounted(Manual):
    def optimizers(self, use_pl_optimizer=True):
        return super().optimizers(use_pl_optimizer=False)


class EachCheckpointDurable(pl.Callback):
    def on_train_batch_start(self, trainer, *_):
        (checkpoint,) = [each for each in trainer.callbacks if isinstance(each, Checkpoint)]
        if checkpoint.session is not None:
            checkpoint.session.wait(300)


class Worsening(Module):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", float(self.global_step))


class WithWrappers(Module):
    def __init__(self, seen):
        super().__init__(seen)
        self.extremes = MinMaxMetric(MulticlassAccuracy(job.CLASSES))
        self.running = Running(MeanMetric(), window=3)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.extremes.update(self.model(batch[0]), batch[1])
        self.running.update(loss.detach())
        extremes = self.extremes.compute()
        self._seen.append((extremes["min"].item(), extremes["max"].item(), self.running.compute().item()))
        return loss


class ChangesCheckpoint(Module):
    def __init__(self, seen):
        super().__init__(seen)
        self.save_hyperparameters({"width": 3})

    def on_save_checkpoint(self, checkpoint):
        del (
            checkpoint["optimizer_states"],
            checkpoint["lr_schedulers"],
            checkpoint["loops"],
            checkpoint["callbacks"],
        )
        assert checkpoint["hyper_parameters"] == {"width": 3}
        checkpoint["state_dict"]["extra"] = torch.zeros(1)


class WithMetrics(Module):
    def __init__(self, seen):
        super().__init__(seen)
        self.accuracy = MulticlassAccuracy(job.CLASSES)

    def training_step(self, batch, batch_idx):
        self.accuracy(self.model(batch[0]), batch[1])
        self.log("train_accuracy", self.accuracy, on_step=False, on_epoch=True)
        if batch_idx % 9 == 0:
            self.log("sometimes", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="max")
        return super().training_step(batch, batch_idx)


class WithHooks(Module):
    """Keeps a value in its own attribute, and changes a parameter after each batch."""

    def __init__(self, seen):
        super().__init__(seen)
        self.count = 0
        self.average = torch.nn.Parameter(torch.zeros(job.FEATURES), requires_grad=False)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + 0.1 * (self.count % 5)) + self.average.mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.count += 1
        self.average.lerp_(batch[0].mean(dim=0), 0.1)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, checkpoint):
        self.count = checkpoint["count"]


class Data(pl.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.given = 0

    def train_dataloader(self):
        return torch_loader()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.given += self.trainer.training
        return (batch[0] * (1 + self.given % 3), *batch[1:])

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state_dict):
        self.given = state_dict["given"]
