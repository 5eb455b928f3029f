"""The Trainer of Transformers with Holdfast: exactness after kills, errors and stops, and what is refused."""

import collections
import contextlib
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from transformers import BertForSequenceClassification, EarlyStoppingCallback, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import set_seed

import holdfast
import holdfast.integrations.transformers
from benchmarks.integrations import job
from benchmarks.integrations.jobs.transformers import LoggedTrainer, MaskedSentences, UpdateLogger, configuration
from benchmarks.integrations.kills import compare, entries, run
from tests.support.eventually import PATIENCE_SECONDS, eventually

TIMES = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "train_runtime")
SPEEDS = ("train_samples_per_second", "train_steps_per_second")


@pytest.mark.parametrize(("ranks", "kills"), [(1, 2), (2, 1)])
def test_a_trainer_that_is_killed_in_the_middle_of_epochs_resumes_exactly(tmp_path, ranks, kills):
    updates = 36 // ranks
    uninterrupted = run("transformers", "holdfast", tmp_path / "uninterrupted", ranks=ranks)
    killed = run("transformers", "holdfast", tmp_path / "killed", kills=kills, seed=1, ranks=ranks)
    result = compare(uninterrupted, killed, updates=updates, epoch=12 // ranks)
    assert len(result.kills) == kills
    assert result.exact, result


def test_sigterm_saves_at_the_end_of_the_update(tmp_path):
    log = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "benchmarks.integrations.jobs.transformers", "--resume-by", "holdfast"]
    command += ["--store", tmp_path / "store", "--update-log", log]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: log.exists() and '"number": 4' in log.read_text(), "four updates")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 143, errors
    last = [entry["number"] for entry in entries(log) if entry["event"] == "update"][-1]
    assert f"ending after iteration {last}: saved as {last:012}-1" in errors


@pytest.fixture
def seen(monkeypatch):
    """Metrics of each iteration, in order."""
    found, step = [], holdfast.Session.step
    monkeypatch.setattr(
        holdfast.Session, "step", lambda self, **metrics: (found.append(metrics), step(self, **metrics))
    )
    return found


def test_the_evaluation_of_an_epoch_has_the_iteration_of_its_last_update(tmp_path, seen):
    trainer, _ = Fit(tmp_path).train()
    evaluations = {entry["step"]: entry["eval_loss"] for entry in history(trainer) if "eval_loss" in entry}
    assert sorted(evaluations) == [12, 24]
    found = {number: each["eval_loss"] for number, each in enumerate(seen, 1) if "eval_loss" in each}
    assert found == evaluations


def test_an_evaluation_outside_of_updates_is_no_metric_of_one(tmp_path, seen, marks):
    fit = Fit(tmp_path, max_steps=3, eval_strategy="no", eval_on_start=True)
    fit.before_training = lambda trainer: trainer.evaluate()
    fit.train()
    fit.options["max_steps"] = 4
    fit.train()
    assert len(seen) == 4
    assert not [name for each in seen for name in each if name.startswith("eval_")]
    assert marks == [(0, "evaluation", ["eval_loss"]), (3, "evaluation", ["eval_loss"])]


def test_what_the_trainer_logs_becomes_metrics_of_the_iteration(tmp_path, seen):
    Fit(tmp_path, max_steps=6, eval_strategy="steps", eval_steps=3).train()
    assert [sorted(metrics) for metrics in seen] == [
        [],
        [],
        ["eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"],
        [],
        ["grad_norm", "learning_rate", "loss"],
        ["eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"],
    ]


@pytest.fixture
def marks(monkeypatch):
    """Marks of the timeline: (iteration, name, names of metrics)."""
    found = []

    def mark(self, name, /, **metrics):
        found.append((self.iteration, name, sorted(metrics)))

    monkeypatch.setattr(holdfast.Session, "mark", mark)
    return found


def test_an_evaluation_within_an_epoch_is_marked_at_its_update(tmp_path, marks):
    Fit(tmp_path, max_steps=6, eval_strategy="steps", eval_steps=3).train()
    assert [mark for mark in marks if mark[1] == "evaluation"] == [
        (3, "evaluation", ["eval_loss"]), (6, "evaluation", ["eval_loss"]),
    ]  # fmt: skip


def test_epochs_and_evaluations_are_marked(tmp_path, marks):
    trainer, _ = Fit(tmp_path).train()
    last = trainer.state.global_step
    assert marks == [
        (last // 2, "epoch 0 ends", []),
        (last // 2, "evaluation", ["eval_loss"]),
        (last, "epoch 1 ends", []),
        (last, "evaluation", ["eval_loss"]),
    ]


def test_an_epoch_that_training_stops_in_has_no_end(tmp_path, marks):
    Fit(tmp_path, max_steps=5, eval_strategy="no").train()
    assert marks == []


class Broken(Exception):
    pass


class BreakAfter(TrainerCallback):
    def __init__(self, step):
        self._step = step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self._step:
            raise Broken

    def on_epoch_end(self, args, state, control, **_):
        if state.global_step == self._step:
            raise Broken


class StopEpochAfter(TrainerCallback):
    """Ends each epoch after its seventh update."""

    def on_step_end(self, args, state, control, **_):
        control.should_epoch_stop = state.global_step % 7 == 0


class Fit:
    """Trains in this process, and keeps the log of every update."""

    def __init__(self, folder, samples=job.SAMPLES, **options):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.samples, self.options, self.starts = folder, samples, options, 0
        self.settings, self.kind, self.before_training = {}, LoggedTrainer, lambda trainer: None

    def train(self, *callbacks):
        self.starts += 1
        path = self.folder / f"log-{self.starts}"
        with contextlib.closing(job.UpdateLog(path)) as log:
            trainer = self._trained(log, callbacks)
        return trainer, [entry for entry in entries(path) if entry["event"] == "update"]

    def _trained(self, log, callbacks):
        set_seed(job.SEED if self.starts == 1 else 99)
        model = BertForSequenceClassification(configuration())
        arguments = {
            "num_train_epochs": 2,
            "gradient_accumulation_steps": 2,
            "per_device_train_batch_size": job.BATCH_SIZE,
            "logging_steps": 5,
            "eval_strategy": "epoch",
            "save_strategy": "no",
        }
        trainer = self.kind(
            model=model,
            args=TrainingArguments(
                output_dir=str(self.folder / "output"), seed=job.SEED, remove_unused_columns=False,
                disable_tqdm=True, report_to="none", use_cpu=True, **(arguments | self.options),
            ),
            train_dataset=MaskedSentences(self.samples),
            eval_dataset=MaskedSentences(8),
            callbacks=[UpdateLogger(log), *callbacks],
        )  # fmt: skip
        trainer.log_file = log
        settings = {"store": self.folder / "store", "every": 3} | self.settings
        holdfast.integrations.transformers.attach(trainer, "fit", **settings)
        self.before_training(trainer)
        try:
            trainer.train()
        except Broken:
            return None
        return trainer


def what_counts(updates):
    return {entry["number"]: (entry["losses"], entry["samples"]) for entry in updates}


def history(trainer):
    return [
        {name: value for name, value in entry.items() if name not in (*TIMES, *SPEEDS)}
        for entry in trainer.state.log_history
    ]


@pytest.mark.parametrize("after", [4, 11, 12, 13, 17])
@pytest.mark.parametrize("samples", [96, 91], ids=["whole", "with a remainder"])
def test_losses_and_the_log_history_continue_as_if_nothing_had_happened(tmp_path, after, samples):
    whole, expected = Fit(tmp_path / "whole", samples).train()
    fit = Fit(tmp_path / "broken", samples)
    broken, before = fit.train(BreakAfter(after))
    assert broken is None
    assert before[-1]["number"] == after
    resumed, rest = fit.train()
    assert 1 < rest[0]["number"] <= after + 1
    expected = what_counts(expected)
    assert what_counts(before) == {number: expected[number] for number in what_counts(before)}
    assert what_counts(rest) == {number: expected[number] for number in range(rest[0]["number"], 25)}
    assert history(resumed) == history(whole)
    assert {name: value.tolist() for name, value in resumed.model.state_dict().items()} == {
        name: value.tolist() for name, value in whole.model.state_dict().items()
    }


class SaveAndBreakAfter(BreakAfter):
    """Waits until each update is durable, and breaks."""

    def __init__(self, step):
        super().__init__(step)
        self.adapter = None

    def on_step_begin(self, args, state, control, **options):
        self.adapter.session.wait(PATIENCE_SECONDS)
        super().on_step_begin(args, state, control, **options)


@pytest.mark.parametrize("samples", [96, 91], ids=["whole", "with a remainder"])
@pytest.mark.parametrize("after", [10, 11])
def test_a_resume_with_a_last_update_left_of_the_epoch_is_exact(tmp_path, samples, after, caplog):
    _, expected = Fit(tmp_path / "whole", samples).train()
    fit = Fit(tmp_path / "broken", samples)
    fit.settings, ending = {"every": 1}, SaveAndBreakAfter(after)
    fit.before_training = lambda trainer: setattr(ending, "adapter", trainer.train.__self__)
    fit.train(ending)
    _, rest = fit.train()
    assert [entry["number"] for entry in rest] == list(range(after + 1, 25))
    assert what_counts(rest) == {number: what_counts(expected)[number] for number in range(after + 1, 25)}
    assert "finished no iteration" not in caplog.text


@pytest.mark.parametrize("after", [7, 9])
def test_an_epoch_that_a_callback_ends_early_stays_ended(tmp_path, after):
    _, expected = Fit(tmp_path / "whole").train(StopEpochAfter())
    assert [entry["number"] for entry in expected] == list(range(1, 15))
    fit = Fit(tmp_path / "broken")
    fit.train(StopEpochAfter(), BreakAfter(after))
    _, rest = fit.train(StopEpochAfter())
    expected = what_counts(expected)
    assert what_counts(rest) == {number: expected[number] for number in range(rest[0]["number"], 15)}


def test_a_finished_job_trains_nothing_more(tmp_path):
    fit = Fit(tmp_path, max_steps=10)
    first, _ = fit.train()
    again, updates = fit.train()
    assert updates == []
    assert again.state.global_step == 10
    assert history(again) == history(first)


def test_more_epochs_continue_a_finished_job(tmp_path):
    fit = Fit(tmp_path, num_train_epochs=1)
    fit.train()
    fit.options["num_train_epochs"] = 2
    trainer, updates = fit.train()
    assert [entry["number"] for entry in updates] == list(range(13, 25))
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [12, 24]


@pytest.mark.parametrize("steps", [9, 10])
def test_more_steps_continue_within_the_epoch(tmp_path, steps):
    options = {"lr_scheduler_type": "constant", "eval_strategy": "no"}
    _, expected = Fit(tmp_path / "whole", max_steps=24, **options).train()
    fit = Fit(tmp_path / "more", max_steps=steps, **options)
    fit.train()
    fit.options["max_steps"] = 24
    _, rest = fit.train()
    expected = what_counts(expected)
    assert what_counts(rest) == {number: expected[number] for number in range(steps + 1, 25)}


def test_a_job_that_a_callback_has_ended_trains_nothing_more(tmp_path):
    options = {
        "learning_rate": 0.0, "save_strategy": "epoch", "load_best_model_at_end": True,
        "metric_for_best_model": "loss", "num_train_epochs": 4,
    }  # fmt: skip
    fit = Fit(tmp_path, **options)
    _, updates = fit.train(EarlyStoppingCallback(1))
    assert len(updates) == 24
    fit.kind = NoStep
    again, _ = fit.train(EarlyStoppingCallback(1))
    assert again.state.global_step == 24


class NoStep(LoggedTrainer):
    def training_step(self, *args, **options):
        raise AssertionError("a finished job trains")


class First(TrainerCallback, ExportableState):
    def __init__(self, value):
        self.value = value

    def state(self):
        return {"args": {}, "attributes": {"value": self.value}}


class Second(First):
    pass


class Generating(LoggedTrainer):
    """Uses what it has generated in three calls of the model, as the trainers of TRL do."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._step, self._buffered_inputs, self._total_train_tokens = 0, None, 0
        self._metrics = {"train": collections.defaultdict(list)}

    def training_step(self, model, inputs, *args, **options):
        if self._step % 3 == 0 or self._buffered_inputs is None:
            self._buffered_inputs = [{"noise": torch.rand(4), "of": self._step} for _ in range(3)]
        self._metrics["train"]["noise"].append(self._buffered_inputs[self._step % 3]["noise"].sum().item())
        self._step += 1
        self._total_train_tokens += 12
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return super().training_step(model, inputs, *args, **options)

    def log(self, logs, *args, **options):
        found, self._metrics["train"] = self._metrics["train"], collections.defaultdict(list)
        super().log(logs | {name: sum(values) for name, values in found.items()}, *args, **options)


def test_what_a_trainer_has_generated_for_several_updates_is_used_after_a_resume(tmp_path, caplog):
    reference, fit = Fit(tmp_path / "whole"), Fit(tmp_path / "broken")
    reference.kind = fit.kind = Generating
    whole, _ = reference.train()
    assert fit.train(BreakAfter(11))[0] is None
    resumed, _ = fit.train()
    assert any("noise" in entry for entry in history(whole))
    assert history(resumed) == history(whole)
    assert "which no checkpoint holds" not in caplog.text


class WithOwnMetrics(LoggedTrainer):
    """Keeps values under a name that the trainers of TRL use for others."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._metrics = {"accuracy": 0.5}


def test_a_trainer_with_metrics_of_its_own_kind_resumes(tmp_path):
    fit = Fit(tmp_path, num_train_epochs=1, max_steps=4)
    fit.kind = WithOwnMetrics
    fit.train()
    fit.options["max_steps"] = 6
    trainer, updates = fit.train()
    assert [each["number"] for each in updates] == [5, 6]
    assert trainer._metrics == {"accuracy": 0.5}


def test_callbacks_get_their_own_state_in_any_order(tmp_path):
    fit = Fit(tmp_path, num_train_epochs=1)
    fit.train(First(1), Second(2), Second(3))
    fit.options["num_train_epochs"] = 2
    again = Second(0), First(0), Second(0)
    fit.train(*again)
    assert [each.value for each in again] == [2, 1, 3]


def test_the_patience_of_early_stopping_continues(tmp_path):
    options = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.0,
        "load_best_model_at_end": True, "metric_for_best_model": "loss",
    }  # fmt: skip
    patience = 4
    _, expected = Fit(tmp_path / "whole", **options).train(EarlyStoppingCallback(patience))
    fit = Fit(tmp_path / "broken", **options)
    fit.train(EarlyStoppingCallback(patience), BreakAfter(7))
    _, rest = fit.train(EarlyStoppingCallback(patience))
    assert expected[-1]["number"] == 2 * (patience + 1)
    assert rest[-1]["number"] == expected[-1]["number"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
        ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_way_out(tmp_path, option, message):
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match=message):
        Fit(tmp_path, **option).train()
    signal.signal(signal.SIGTERM, handler)  # the Trainer has replaced it


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"state": {"model": torch.nn.Linear(1, 1)}}, "'model'.*use another name"),
        ({"restorable_in_place": True}, "the Trainer cannot go back"),
    ],
)
def test_a_setting_that_the_adapter_cannot_follow_is_refused(tmp_path, settings, message):
    fit = Fit(tmp_path)
    fit.settings = settings
    with pytest.raises(ValueError, match=message):
        fit.train()


def test_a_second_attach_is_refused(tmp_path):
    fit = Fit(tmp_path)
    fit.before_training = lambda trainer: holdfast.integrations.transformers.attach(trainer, "other")
    with pytest.raises(ValueError, match="attach was called twice"):
        fit.train()


def test_a_checkpoint_of_the_trainer_is_refused_where_there_is_none(tmp_path):
    fit = Fit(tmp_path)
    fit.before_training = lambda trainer: trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=\.\.\.\): drop it"):
        fit.train()


class OwnLoop(LoggedTrainer):
    def train(self):
        return None


def test_a_trainer_with_a_loop_of_its_own_is_reported(tmp_path, caplog):
    fit = Fit(tmp_path)
    fit.kind = OwnLoop
    fit.train()
    assert "nothing was checkpointed: OwnLoop.train does not call the training loop" in caplog.text


def test_the_refusal_of_fsdp_names_the_option_of_the_trainer():
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.FSDP, state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
    )
    trainer = SimpleNamespace(
        args=SimpleNamespace(enable_jit_checkpoint=False, auto_find_batch_size=False, n_gpu=1),
        is_fsdp_xla_enabled=False,
        accelerator=accelerator,
        **dict.fromkeys(holdfast.integrations.transformers._METHODS),
    )
    with pytest.raises(ValueError, match=re.escape('fsdp_config={"version": 2}')):
        holdfast.integrations.transformers.attach(trainer, "fit")


def test_a_trainer_of_another_version_is_refused_with_the_tested_ones():
    with pytest.raises(ValueError, match=r"lacks get_train_dataloader; .* tested with 5\.3 to 5\.24"):
        holdfast.integrations.transformers.attach(SimpleNamespace(), "fit")
