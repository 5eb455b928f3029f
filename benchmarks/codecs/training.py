"""Small real trainings on the CPU, and their states at given iterations.

The GPT learns the source of Python's standard library, byte by byte; the embeddings learn preferences over
items whose popularity follows Zipf's law.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.checkpoint.scale import TrainingScale
from benchmarks.checkpoint.training import Gpt

SEED = 1
TOKENS = 64
MOMENTS = ("exp_avg", "exp_avg_sq")
DISTANCES = (1, 10, 50)
"""Iterations between a checkpoint and its base."""

Snapshot = dict[str, Tensor]
"""All tensors of a state by name."""
Job = Iterator[Snapshot]
"""Yields the state after every iteration. The tensors are the live ones: copy them."""


@dataclass(frozen=True)
class States:
    """A base, and the states at some distances from it, in iterations."""

    name: str
    base: Snapshot
    later: dict[int, Snapshot]


def train(name: str, job: Job, warm_up: int = 200) -> States:
    """Train, and copy the state after the warm-up and at each distance from it."""
    wanted = {warm_up + distance: distance for distance in (0, *DISTANCES)}
    found = {}
    for iteration, tensors in enumerate(job, start=1):
        if iteration in wanted:
            found[wanted[iteration]] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        if iteration == max(wanted):
            break
    return States(name, found.pop(0), found)


def gpt_fp32() -> Job:
    """A GPT with AdamW, everything fp32."""
    model, batch = _gpt(192, 3), _batches(4, TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    yield from _trained(model, optimizer, batch)


def gpt_bf16(lr: float = 1e-3, start: Snapshot | None = None) -> Job:
    """The same with bf16 weights, and fp32 master weights and moments in the optimizer."""
    model, batch = _gpt(192, 3), _batches(4, TOKENS)
    if start is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(start[f"master.{name}"])
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=lr, fused=True)
    while True:
        with torch.no_grad():
            for name, parameter in model.named_parameters():  # the forward pass uses the values of bf16
                parameter.copy_(masters[name].bfloat16())
        model.zero_grad()
        _loss(model, batch()).backward()
        for name, parameter in model.named_parameters():
            masters[name].grad = parameter.grad
        optimizer.step()
        state = {f"weight.{name}": master.bfloat16() for name, master in masters.items()}
        state |= {f"master.{name}": master for name, master in masters.items()}
        for name, master in masters.items():
            state |= {f"{key}.{name}": optimizer.state[master][key] for key in MOMENTS}
        yield state


class _Lora(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x @ self.down.T @ self.up.T
        return self.frozen(x) + added  # type: ignore[no-any-return]


def lora() -> Job:
    """LoRA of rank 4 on the attention of a frozen GPT in fp32."""
    model, batch = _gpt(512, 3), _batches(1, TOKENS)
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv = _Lora(block.qkv)  # type: ignore[assignment, arg-type]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    yield from _trained(model, optimizer, batch)


def embeddings(sparse: bool) -> Job:
    """An EmbeddingBag with SparseAdam, or with dense AdamW. An iteration touches some 300 of 100,000 rows."""
    torch.manual_seed(SEED)
    rows, width, bags, bag = 100_000, 32, 16, 20
    table = nn.EmbeddingBag(rows, width, mode="mean", sparse=sparse)
    adam = torch.optim.SparseAdam if sparse else functools.partial(torch.optim.AdamW, fused=True)
    optimizer = adam(table.parameters(), lr=1e-2)
    places, taste = torch.randperm(rows), torch.randn(width)
    while True:
        items = places[(rows ** torch.rand(bags, bag)).long() % rows]  # frequent as 1 / rank: Zipf's law
        liked = ((items % 97).float().mean(1) > 48).float()
        loss = F.binary_cross_entropy_with_logits(table(items) @ taste, liked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield _state(table, optimizer)


def _gpt(width: int, layers: int) -> Gpt:
    """Return a GPT for the bytes of the text, without rows of embeddings that no byte uses."""
    torch.manual_seed(SEED)
    model = Gpt(TrainingScale(width=width, layers=layers, tokens=TOKENS, head_width=64))
    model.words, model.head = nn.Embedding(len(_text()[1]), width), nn.Linear(width, len(_text()[1]), bias=False)
    return model


@functools.cache
def _text() -> tuple[Tensor, Tensor]:
    """Return the source of some modules of the standard library as indices of its bytes, and these bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    used, indices = text.unique(return_inverse=True)
    return indices, used


def _batches(batch: int, tokens: int) -> Callable[[], Tensor]:
    """Return a function that draws random pieces of the text."""
    text, _ = _text()
    generator = torch.Generator().manual_seed(SEED)

    def draw() -> Tensor:
        starts = torch.randint(len(text) - tokens - 1, (batch, 1), generator=generator)
        return text[starts + torch.arange(tokens + 1)]

    return draw


def _loss(model: nn.Module, text: Tensor) -> Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Callable[[], Tensor]) -> Job:
    while True:
        optimizer.zero_grad()
        _loss(model, batch()).backward()
        optimizer.step()
        yield _state(model, optimizer)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    trained = [(name, each) for name, each in model.named_parameters() if each in optimizer.state]
    moments = {f"{key}.{name}": optimizer.state[each][key] for name, each in trained for key in MOMENTS}
    return {f"weight.{name}": parameter for name, parameter in model.named_parameters()} | moments
