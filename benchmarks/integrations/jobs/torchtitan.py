"""torchtitan's trainer and its llama3 debug model, on CPUs with gloo.

torchtitan knows accelerators only: `on_cpu` gives it the CPU as its device. The model draws no random numbers, so
the script masks random tokens of the input, except with `--no-masks`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from benchmarks.harness import meeting_place
from benchmarks.integrations import job

STEPS, SEQUENCE, ROWS = 36, 32, 2
DOCUMENTS, WORDS = 16, 47
"""Each document is one and a half rows of the loader; all together are 12 updates, and no word occurs twice."""
OVERRIDE = "holdfast.integrations.torchtitan.checkpointer"


def on_cpu() -> None:
    """Let torchtitan find a CPU where it looks for an accelerator. Call this before importing it."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda *_: "cpu"  # type: ignore[attr-defined]
    torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1)  # type: ignore[attr-defined]
    for name in ("reset_peak_memory_stats", "empty_cache"):
        setattr(torch.cpu, name, lambda *_: None)
    torch.cpu.current_device = lambda: 0  # type: ignore[assignment, return-value]
    torch.cpu.memory_stats = lambda *_: {}  # type: ignore[attr-defined]
    torch.distributed.set_timeout = lambda *_: None  # type: ignore[attr-defined]  # later than torch 2.13


def write_inputs(folder: Path) -> None:
    """Write a tokenizer and documents, in the form of torchtitan's test assets."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    (folder / "tokenizer").mkdir(parents=True)
    (folder / "c4").mkdir()
    words = [f"word{number}" for number in range(DOCUMENTS * WORDS)]
    random.Random(job.SEED).shuffle(words)
    vocabulary = {word: number for number, word in enumerate(["<s>", "</s>", "<unk>", *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    documents = [" ".join(words[first : first + WORDS]) for first in range(0, len(words), WORDS)]
    (folder / "c4" / "data.json").write_text("\n".join(json.dumps({"text": text}) for text in documents))


def configuration(args: argparse.Namespace, inputs: Path) -> Any:
    """Return the configuration of the debug model, made small, from a command line of torchtitan."""
    from torchtitan.config import ConfigManager
    from torchtitan.models.common.attention import ScaledDotProductAttention

    ranks = int(os.environ["WORLD_SIZE"])
    command = [
        *("--module", "llama3", "--config", "llama3_debugmodel"),
        *("--hf-assets-path", str(inputs / "tokenizer"), "--dump-folder", str(args.store / "outputs")),
        *("--dataloader.dataset-path", str(inputs / "c4"), "--training.local-batch-size", str(ROWS)),
        *("--training.seq-len", str(SEQUENCE), "--training.steps", str(STEPS // ranks)),
        *("--training.mixed-precision-param", "float32", "--optimizer.implementation", "for-loop"),
        *("--debug.seed", str(job.SEED), "--debug.deterministic"),
        # with the default, torchtitan needs a later torch than 2.13 for several ranks
        *(("--parallelism.spmd-backend", "partial_dtensor") if ranks > 1 else ()),
        *(() if args.cuda_graphs else ("--training.disable-cuda-graphs",)),
    ]
    if args.resume_by == "holdfast":
        settings = {"every": job.EVERY, "store": str(args.store)}
        command += ["--override.imports", f"{OVERRIDE}={json.dumps(settings)}"]
    elif args.resume_by == "framework":
        command += ["--checkpoint.enable", "--checkpoint.interval", str(job.EVERY)]
    config: Any = ConfigManager().parse_args(command)
    config.activation_checkpoint = None
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:  # the backward pass of flex attention has no kernel for CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--no-masks", action="store_true")
    args = job.arguments(parser)
    on_cpu()
    for name, value in meeting_place(0).items():
        os.environ.setdefault(name, value)
    inputs = args.log.parent / f"inputs-{os.environ['RANK']}"
    if not (inputs / "c4" / "data.json").exists():
        write_inputs(inputs)

    from torchtitan.tools.logging import init_logger

    init_logger()
    log = job.UpdateLog(args.log)
    trainer = trainer_class(args, log)(configuration(args, inputs))
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    if args.resume_by == "framework":
        job.log_blocked_time(trainer.checkpointer, "save", log, where=lambda step, last_step=False: not last_step)
    try:
        trainer.train()
    except Exception:  # torchtitan closes its trainer after an error as well
        trainer.close()
        raise
    trainer.close()
    torch.distributed.destroy_process_group()
    log.finished()


def trainer_class(args: argparse.Namespace, log: job.UpdateLog) -> Any:
    """Return torchtitan's trainer, which logs each step and masks tokens."""
    from torchtitan.trainer import Trainer

    class LoggedTrainer(Trainer):  # type: ignore[misc]
        def post_dataloading_process(self, inputs: Any, labels: torch.Tensor) -> Any:
            if not args.no_masks:
                tokens = inputs["input"]
                inputs["input"] = torch.where(torch.rand(tokens.shape) < 0.1, 0, tokens)
            return super().post_dataloading_process(inputs, labels)

        def forward_backward_step(self, **arguments: Any) -> Any:
            loss = super().forward_backward_step(**arguments)
            log.batch(loss.item(), arguments["labels"][:, 0])
            return loss

        def train_step(self, data: Any) -> None:
            super().train_step(data)
            log.update(self.step)

    return LoggedTrainer


if __name__ == "__main__":
    main()
