"""The training that all contenders checkpoint: a small seeded GPT with fused AdamW and one fixed batch."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.harness import seconds_of

from .scale import VOCABULARY, TrainingScale

SEED = 1


class GptBlock(nn.Module):
    def __init__(self, scale: TrainingScale) -> None:
        super().__init__()
        width = scale.width
        self.heads = width // scale.head_width
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_in(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_out(x))))


class Gpt(nn.Module):
    def __init__(self, scale: TrainingScale) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, scale.width)
        self.places = nn.Embedding(scale.tokens, scale.width)
        self.blocks = nn.ModuleList(GptBlock(scale) for _ in range(scale.layers))
        self.norm = nn.LayerNorm(scale.width)
        self.head = nn.Linear(scale.width, VOCABULARY, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class BenchmarkTraining:
    def __init__(self, scale: TrainingScale, *, blank: bool = False) -> None:
        """`blank`: fill the model with zeros, which is fast, for a restore."""
        torch.manual_seed(SEED)
        if scale.device == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32, as most train
        self.scale = scale
        with torch.device("meta" if blank else scale.device):
            self.model = Gpt(scale)
        if blank:
            self.model.to_empty(device=scale.device)
            for parameter in self.model.parameters():
                parameter.detach().zero_()
        self.batch = torch.randint(VOCABULARY, (scale.batch, scale.tokens), device=scale.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def iterate(
        self, before_step: Callable[[], None] = lambda: None, after_step: Callable[[], None] = lambda: None
    ) -> float:
        """Run one iteration; return the seconds that `before_step` took."""
        logits = self.model(self.batch)
        F.cross_entropy(logits.flatten(0, 1), self.batch.flatten()).backward()
        waited = seconds_of(before_step)
        self.optimizer.step()
        after_step()
        self.optimizer.zero_grad()
        return waited

    def seconds(self, count: int, act: Callable[[], object] | None = None) -> float:
        """Return the seconds of so many iterations, or calls."""
        self.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            (act or self.iterate)()
        self.synchronize()
        return time.perf_counter() - started

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Return all that a checkpoint must hold; optimizer state by parameter."""
        yield from self.model.state_dict().items()
        for name, parameter in self.model.named_parameters():
            yield from ((f"{name}.{key}", tensor) for key, tensor in self.optimizer.state[parameter].items())

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def fill_optimizer(self) -> None:
        """Create the optimizer's moments, for libraries that read in place."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def touch(self) -> None:
        """Rewrite a byte of every page, so that pages that a library only mapped are read and copied."""
        for _, tensor in self.tensors():
            if tensor.device.type == "cpu":
                tensor.detach().view(-1).view(torch.uint8)[:: mmap.PAGESIZE].bitwise_or_(0)
        self.synchronize()

    def give_back(self) -> None:
        """Release cached GPU memory for the other contenders."""
        if self.scale.device == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.scale.device == "cuda":
            torch.cuda.synchronize()


def pinned_copy_seconds(size_bytes: int, device: str, *, to_device: bool = False) -> list[float]:
    """Return the seconds of copies between a device and pinned memory that nothing overlaps."""
    there = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    here = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device == "cuda")

    def copy() -> None:
        there.copy_(here, non_blocking=True) if to_device else here.copy_(there, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()

    return [seconds_of(copy) for _ in range(6)][1:]


def differing(one: BenchmarkTraining, other: BenchmarkTraining) -> list[str]:
    """Return the names of tensors whose bytes differ."""
    ours, theirs = dict(one.tensors()), dict(other.tensors())
    if ours.keys() != theirs.keys():
        return sorted(ours.keys() ^ theirs.keys())
    return [name for name, tensor in ours.items() if not torch.equal(tensor.cpu(), theirs[name].cpu())]
