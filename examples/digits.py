"""A complete training script that resumes after a kill: start it, kill it, start it again.

    python examples/digits.py

It learns to read a seven-segment display with broken segments. No download.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset

import holdfast

SEGMENTS = [
    "1110111",
    "0010010",
    "1011101",
    "1011011",
    "0111010",
    "1101011",
    "1101111",
    "1010010",
    "1111111",
    "1111011",
]


class Display(Dataset[tuple[Tensor, int]]):
    """Digits with each segment wrong at a probability of 10 %, redrawn every epoch."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        digit = index % 10
        lit = torch.tensor([float(segment) for segment in SEGMENTS[digit]])
        broken = torch.rand(7) < 0.1
        return torch.where(broken, 1 - lit, lit), digit


def main() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    session = holdfast.Session("digits", model=model, optimizer=optimizer)
    loader = holdfast.DataLoader(Display(), batch_size=50, shuffle=True, seed=1)

    for lit, digit in session.batches(loader, epochs=20):
        loss = F.cross_entropy(model(lit), digit)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (iteration := session.iteration + 1) % 100 == 0:  # before step(), which may restore another iteration
            print(f"iteration {iteration}: loss {loss.item():.3f}", flush=True)
        session.step(loss=loss)

    print(f"finished at iteration {session.iteration}; run it again and there is nothing left to do")


if __name__ == "__main__":
    main()
