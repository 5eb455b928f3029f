"""Training in the stages of a pipeline that resumes after a kill, with any number of stages.

    torchrun --nproc-per-node 4 examples/pipeline.py                four stages, schedule 1F1B
    torchrun --nproc-per-node 2 examples/pipeline.py --per-rank 2   interleaved, from the same checkpoints
    python examples/pipeline.py                                     the whole model in one process

A stage is the model without the layers of other stages, so that its parameters keep their names.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset

import holdfast

WIDTH, LAYERS, BATCH, MICROBATCHES = 32, 8, 32, 4


class Sums(Dataset[tuple[Tensor, Tensor]]):
    """Noisy numbers and their sum."""

    def __len__(self) -> int:
        return 4800

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        numbers = torch.rand(WIDTH, generator=torch.Generator().manual_seed(index))
        return numbers, numbers.sum()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(WIDTH, WIDTH) for number in range(LAYERS)})
        self.dropout = nn.Dropout(0.05)
        self.head: nn.Module | None = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = x + self.dropout(torch.relu(layer(x)))
        return x if self.head is None else self.head(x).squeeze(1)


def stage_of(model: Network, number: int, count: int) -> Network:
    """Return the model without the layers of other stages."""
    stage = copy.deepcopy(model)
    for layer in range(LAYERS):
        if layer * count // LAYERS != number:
            del stage.layers[str(layer)]
    if number < count - 1:
        stage.head = None
    return stage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-rank", type=int, default=1, help="stages on each rank")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    is_pipeline = "RANK" in os.environ
    if is_pipeline:
        dist.init_process_group("gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if is_pipeline else (0, 1)
    count = ranks * arguments.per_rank
    numbers = [rank + ranks * each for each in range(arguments.per_rank)]
    torch.manual_seed(1)
    model = Network()
    modules = [stage_of(model, number, count) for number in numbers]
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=1e-3)
    torch.manual_seed(1 + rank)  # different dropout on each rank

    given: list[nn.Module] | list[PipelineStage] = modules
    if is_pipeline:
        size, device = BATCH // MICROBATCHES, torch.device("cpu")
        stages = []
        for module, number in zip(modules, numbers, strict=True):
            # without these examples, torch runs each stage once more in the first iteration of a process
            inputs = torch.empty(size, WIDTH, requires_grad=number > 0)
            outputs = torch.empty(*((size,) if number == count - 1 else (size, WIDTH)), requires_grad=True)
            stages.append(PipelineStage(module, number, count, device, input_args=inputs, output_args=outputs))
        if len(stages) == 1:
            schedule = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=F.mse_loss)
        else:
            schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=F.mse_loss)
        given = stages

    with holdfast.Session("pipeline", model=given, optimizer=optimizer) as session:
        loader = holdfast.DataLoader(
            Sums(), batch_size=BATCH, shuffle=True, seed=1, drop_last=True, rank=0, world_size=1
        )
        for batch, total in session.batches(loader, epochs=arguments.epochs):
            optimizer.zero_grad()
            loss = None
            if not is_pipeline:
                output = batch
                for module in modules:
                    output = module(output)
                loss = F.mse_loss(output, total)
                loss.backward()
            elif count - 1 in numbers:  # this rank has the last stage, and with it the loss
                losses: list[Tensor] = []
                schedule.step(*((batch,) if 0 in numbers else ()), target=total, losses=losses)
                loss = torch.stack(losses).mean()
            else:
                schedule.step(*((batch,) if 0 in numbers else ()))
            optimizer.step()
            if loss is None:
                session.step()
                continue
            if (iteration := session.iteration + 1) % 100 == 0:
                print(f"iteration {iteration}: loss {loss.item():.4f}", flush=True)
            session.step(loss=loss)
    if is_pipeline:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
