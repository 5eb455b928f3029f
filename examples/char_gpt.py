"""A small GPT that learns to write Python, one byte at a time, from the sources of the standard library.

    holdfast run --server http://127.0.0.1:7117 -- python examples/char_gpt.py

Nine million parameters with Adam's moments: 108 MB of state, and an iteration of about half a second on two idle
cores. On a slower or busier machine choose a smaller model and fewer threads, as `make demo` does:
`--width 192 --layers 3 --batch-size 4 --threads 1` takes less than a tenth of a second on one core. Start a job
with the same options each time: a checkpoint fits only the model that it was taken from.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset

import holdfast

BYTES, CONTEXT, HEAD_WIDTH = 256, 64, 64


def python_files(folder: str) -> Iterator[Path]:
    """Return the text in the same order on every start, so that a resumed job trains on the same data."""
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "__pycache__"})
        yield from (Path(path, name) for name in sorted(names) if name.endswith(".py"))


class Sources(Dataset[Tensor]):
    """Windows of text; each starts at a random byte of its section, which changes every epoch."""

    def __init__(self, size_bytes: int = 8_000_000) -> None:
        text = bytearray()
        for file in python_files(sysconfig.get_path("stdlib")):
            text += file.read_bytes() + b"\n"
            if len(text) >= size_bytes:
                break
        self.text = torch.frombuffer(text, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.text) // CONTEXT - 2

    def __getitem__(self, index: int) -> Tensor:
        start = index * CONTEXT + int(torch.randint(CONTEXT, ()))
        return self.text[start : start + CONTEXT + 1].long()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.attention_norm(x)).view(batch, length, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm(x)))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))
        return self.head(self.norm(self.blocks(x)))


def learning_rate(step: int) -> float:
    """Warm up over 50 iterations, then decay along a cosine to a tenth."""
    return min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * min(step, 5000) / 5000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=384, help=f"a multiple of {HEAD_WIDTH} (384)")
    parser.add_argument("--layers", type=int, default=5, help="transformer blocks (5)")
    parser.add_argument("--batch-size", type=int, default=12, help="samples per iteration (12)")
    parser.add_argument("--threads", type=int, help="compute threads (torch's default)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--store", help="where checkpoints go (HOLDFAST_STORE, or ./checkpoints)")
    options = parser.parse_args()

    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    model = GPT(options.width, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    session = holdfast.Session(
        "char-gpt", model=model, optimizer=optimizer, scheduler=scheduler, store=options.store
    )
    loader = holdfast.DataLoader(
        Sources(), batch_size=options.batch_size, shuffle=True, seed=1, num_workers=1, drop_last=True
    )

    for batch in session.batches(loader, epochs=options.epochs):
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (iteration := session.iteration + 1) % 20 == 0:  # before step(), which may restore another iteration
            print(f"iteration {iteration}: loss {loss.item():.4f}", flush=True)
        session.step(loss=loss, learning_rate=scheduler.get_last_lr()[0])


if __name__ == "__main__":
    main()
