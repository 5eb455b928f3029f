"""The job whose checkpoints are kept under tests/golden; to change it, run `python -m tools.golden`."""

from __future__ import annotations

import collections
import hashlib
import math
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

import holdfast

ITERATIONS = 3
BATCH_SIZE = 4
JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compressed": {"compress": True},
    "parity": {"parity": "4+2"},
    "linked": {},
    "ranks": {},
}
"""The jobs by name, with the options of their sessions; `ranks` runs on two ranks, with a sharded model."""


class Indices(Dataset):
    """Samples that are their own index."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class GoldenModel(torch.nn.Module):
    """A frozen base, which later checkpoints share, and layers with buffers and several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(32, 32).requires_grad_(False)
        self.head, self.norm = torch.nn.Linear(32, 6), torch.nn.BatchNorm1d(6)
        self.drop = torch.nn.Dropout(0.2)
        self.register_buffer("coarse", torch.linspace(-2, 2, 9).to(torch.bfloat16))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("empty", torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.head(self.base(x.unsqueeze(1).expand(-1, 32)))))


class GoldenJob:
    """Three iterations, each with a durable checkpoint."""

    def __init__(self, store: Path, name: str, shard: Any = id, **options: Any) -> None:
        torch.manual_seed(7)
        self.model = GoldenModel()
        shard(self.model)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.loop = holdfast.Variables(
            best_loss=math.inf, text="naïve ☃", raw=b"\x00\xff", large=2**70, pair=(1, 2.5), missing=math.nan,
            recent=collections.deque([1, 2], maxlen=3), names={"b", "a"}, by_number={1: "one"},
            wave=torch.tensor([1 + 2j, -0.0j]), wide=torch.arange(6, dtype=torch.int64).reshape(2, 3),
        )  # fmt: skip
        self.session = holdfast.Session(
            name, store=store, every=1, keep=100, model=self.model, optimizer=self.optimizer,
            scheduler=self.scheduler, loop=self.loop, **JOBS[name] | options,
        )  # fmt: skip
        self.loader = holdfast.DataLoader(Indices(), batch_size=BATCH_SIZE, shuffle=True, seed=3)

    def run(self) -> GoldenJob:
        for x in self.session.batches(self.loader, epochs=1):
            self.iterate(x)
            if self.session.iteration == ITERATIONS:
                break
        return self

    def iterate(self, x: torch.Tensor) -> None:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.loop.best_loss = min(self.loop.best_loss, loss.item())
        self.session.step(loss=loss)
        self.session.wait(60)

    def state(self) -> dict[str, Any]:
        """Describe what the live objects hold, without the code that stores it."""
        objects = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler", "loop")}
        return described({**objects, "iteration": self.session.iteration, "rng": torch.get_rng_state()})

    def next_samples(self) -> list[float]:
        """The batch that follows the checkpoint."""
        return next(iter(self.session.batches(self.loader, epochs=1))).tolist()


def described(value: Any) -> Any:
    """A value as JSON: a tensor as its dtype, shape and the SHA-256 of its bytes."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous()
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(data).hexdigest()}"
    if isinstance(value, dict):
        return {str(key): described(each) for key, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return [type(value).__name__, *sorted(map(repr, value))]
    if isinstance(value, (list, tuple, collections.deque)):
        return [type(value).__name__, *map(described, value)]
    return repr(value)


def differences(kept: Any, now: Any, path: str = "") -> list[str]:
    """Name what was kept and is not there now, or is another value. What is new is no difference.

    Neither is the last bit of a float: Python 3.12 and later add with less rounding.
    """
    if isinstance(kept, dict) and isinstance(now, dict):
        gone = [f"{path}.{key} is gone" for key in kept.keys() - now.keys()]
        both = sorted(kept.keys() & now.keys())
        return gone + [each for key in both for each in differences(kept[key], now[key], f"{path}.{key}")]
    if isinstance(kept, list) and isinstance(now, list) and len(kept) == len(now):
        pairs = enumerate(zip(kept, now, strict=True))
        return [each for number, pair in pairs for each in differences(*pair, f"{path}[{number}]")]
    if isinstance(kept, float) and isinstance(now, float):
        is_same = math.isclose(kept, now, rel_tol=1e-9, abs_tol=1e-9)
    else:
        is_same = kept == now
    return [] if is_same else [f"{path} was {kept!r} and is {now!r}"]
