"""A sequence classifier trained by the Trainer of Transformers, as in its text classification example."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.integrations import job

VOCABULARY, LENGTH, MASK = 64, 12, 1


class MaskedSentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sentences of random tokens, some of which are masked at every read."""

    def __init__(self, samples: int = job.SAMPLES) -> None:
        generator = torch.Generator().manual_seed(job.SEED)
        self._tokens = torch.randint(2, VOCABULARY, (samples, LENGTH), generator=generator)
        self._labels = torch.randint(job.CLASSES, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[index].clone()
        tokens[torch.rand(LENGTH) < 0.1] = MASK
        tokens[random.randrange(LENGTH)] = MASK
        return {"input_ids": tokens, "labels": self._labels[index], "sample": torch.tensor(index)}


class LoggedTrainer(Trainer):  # type: ignore[misc]  # its class is Any without stubs
    """Logs the loss and the samples of every batch that is trained on."""

    log_file: job.UpdateLog

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        samples = inputs.pop("sample")
        loss = super().compute_loss(model, inputs, *args, **options)
        if model.training:
            value = loss[0] if isinstance(loss, tuple) else loss
            self.log_file.batch(value.item(), samples)
        return loss


class UpdateLogger(TrainerCallback):  # type: ignore[misc]
    def __init__(self, log: job.UpdateLog) -> None:
        self._log = log

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._log.update(state.global_step)


def configuration() -> Any:
    """Return the configuration of a BERT of two small layers."""
    return BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        num_labels=job.CLASSES, max_position_embeddings=LENGTH,
    )  # fmt: skip


def main() -> None:
    args = job.arguments()
    log = job.UpdateLog(args.log)
    set_seed(job.SEED)
    by_framework = args.resume_by == "framework"
    training = TrainingArguments(
        output_dir=str(args.store / "trainer"),
        num_train_epochs=job.EPOCHS,
        per_device_train_batch_size=job.BATCH_SIZE,
        gradient_accumulation_steps=job.ACCUMULATE,
        dataloader_num_workers=args.workers,
        learning_rate=1e-3,
        logging_steps=5,
        eval_strategy="epoch",
        save_strategy="steps" if by_framework else "no",
        save_steps=job.EVERY,
        enable_jit_checkpoint=by_framework and args.preempted,
        seed=job.SEED,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
    )
    trainer = LoggedTrainer(
        model=BertForSequenceClassification(configuration()),
        args=training,
        train_dataset=MaskedSentences(),
        eval_dataset=MaskedSentences(16),
        callbacks=[UpdateLogger(log)],
    )
    trainer.log_file = log
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, JITCheckpointCallback) and callback.jit_manager:
            callback.jit_manager.kill_wait = 0  # its 3 s are longer than this training takes
    newest = None
    if args.resume_by == "holdfast":
        import holdfast.integrations.transformers

        holdfast.integrations.transformers.attach(trainer, "transformers", store=args.store, every=job.EVERY)
    elif by_framework:
        newest = get_last_checkpoint(training.output_dir) if args.store.exists() else None
        job.log_blocked_time(trainer, "_save_checkpoint", log)
    trainer.train(resume_from_checkpoint=newest)
    log.finished()


if __name__ == "__main__":
    main()
