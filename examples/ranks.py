"""Training on several ranks that resumes after a kill, with any number of ranks.

    torchrun --nproc-per-node 4 examples/ranks.py           DistributedDataParallel
    torchrun --nproc-per-node 2 examples/ranks.py --fsdp    fully_shard, from the same checkpoints

All ranks must reach the store. The rest is as with one process.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import holdfast


class Sums(Dataset[tuple[Tensor, Tensor]]):
    """Noisy numbers and their sum."""

    def __len__(self) -> int:
        return 4800

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        numbers = torch.rand(8)
        return numbers + 0.1 * torch.randn(8), numbers.sum()


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsdp", action="store_true", help="shard the model instead of repeating it")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(1)
    model = network().to(device)
    if arguments.fsdp:
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + dist.get_rank())  # different dropout on each rank

    with holdfast.Session("ranks", model=model, optimizer=optimizer) as session:
        loader = holdfast.DataLoader(Sums(), batch_size=20, shuffle=True, seed=1)
        for numbers, total in session.batches(loader, epochs=arguments.epochs):
            loss = F.mse_loss(model(numbers.to(device)).squeeze(1), total.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if (iteration := session.iteration + 1) % 100 == 0 and dist.get_rank() == 0:
                print(f"iteration {iteration}: loss {loss.item():.4f}", flush=True)
            session.step(loss=loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
