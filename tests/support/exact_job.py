"""A small training job for tests of exact resume, with all the state that a resume can get wrong."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

import holdfast
from holdfast.store import open_store
from tests.support.training_log import Log, Record, bits, digest, rng_record

DEVICE = os.environ.get("HOLDFAST_TEST_DEVICE", "cpu")
"""Where the jobs of these tests train; `make cuda-check` sets it."""
if DEVICE == "cuda":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA is initialized
    torch.use_deterministic_algorithms(True)
SAMPLES, BATCH, EPOCHS = 59, 4, 3
BATCHES = EPOCHS * -(-SAMPLES // BATCH)


def seed_of_start(store: Path | str, number: int) -> int:
    """Another random state at each start, so that nothing comes out right by chance; but a start from nothing
    is the first one again."""
    return 100 + number if open_store(str(store)).checkpoints("job") else 0


class ScriptError(Exception):
    """An error of the script's own."""


class NoisyPoints(Dataset[tuple[int, Tensor, Tensor]]):
    """Each sample with its index and random disturbances from every global generator."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        noise = torch.randn(6) + random.random() + float(numpy.random.rand())
        return index, noise + index / self._samples, torch.tensor(float(index % 5))


class ExactJobModel(nn.Module):
    """BatchNorm, dropout, tied weights, a buffer that no state_dict has, and a head in bfloat16."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.inner, self.norm, self.dropout = nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.there, self.back = nn.Linear(width, width), nn.Linear(width, width)
        self.back.weight = self.there.weight
        self.head = nn.Linear(width, 1, dtype=torch.bfloat16)
        self.register_buffer("drift", torch.zeros(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(torch.relu(self.norm(self.inner(x))))
        if self.training:
            self.drift.mul_(0.9).add_(0.1 * x.detach().mean(0))
        x = torch.tanh(self.back(self.there(x))) + 0.1 * self.drift
        return self.head(x.bfloat16()).float().squeeze(1)


class MomentumInFloat32(torch.optim.Optimizer):
    """Momentum in float32 beside parameters in bfloat16, and a count that is a plain number."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(count=0.0, momentum=torch.zeros_like(parameter, dtype=torch.float32))
                state["count"] += 1.0
                state["momentum"].mul_(0.9).add_(parameter.grad.float())
                parameter.sub_((group["lr"] / (1 + 0.01 * state["count"]) * state["momentum"]).bfloat16())


class ExactJob:
    """`accumulation` batches make an update; with `across`, each of them is an iteration of its own."""

    def __init__(
        self,
        store: Path | str,
        *,
        seed: int = 0,
        accumulation: int = 1,
        across: bool = False,
        workers: int = 0,
        **options: Any,
    ) -> None:
        for each in (random.seed, numpy.random.seed, torch.manual_seed):
            each(seed)
        self.accumulation, self.across = accumulation, across
        self.model = ExactJobModel().to(DEVICE)
        body = [p for p in self.model.parameters() if p.dtype == torch.float32]
        self.optimizer = torch.optim.AdamW(body, lr=1e-2)
        self.heavy = MomentumInFloat32(self.model.head.parameters(), lr=1e-3)
        schedules = torch.optim.lr_scheduler
        warm_up = schedules.LinearLR(self.optimizer, 0.1, total_iters=4)
        fade = schedules.CosineAnnealingLR(self.optimizer, T_max=50)
        self.schedule = schedules.SequentialLR(self.optimizer, [warm_up, fade], milestones=[4])
        self.plateau = schedules.ReduceLROnPlateau(self.heavy, factor=0.7, patience=1)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0, growth_interval=3)
        self.noise = torch.Generator().manual_seed(seed)
        self.dice = random.Random(seed)
        self.choice = numpy.random.default_rng(seed)
        self.loop = holdfast.Variables(batches=0, best=float("inf"))
        self.loader = holdfast.DataLoader(
            NoisyPoints(), batch_size=BATCH, shuffle=True, seed=1, num_workers=workers
        )
        self.session = holdfast.Session(
            "job", store=store, model=self.model, optimizer=self.optimizer, heavy=self.heavy,
            schedule=self.schedule, plateau=self.plateau, ema=self.ema, scaler=self.scaler, noise=self.noise,
            dice=self.dice, choice=self.choice, loop=self.loop,
            # No grace: SIGTERM is a death here like any other.
            **{"every": 1, "keep": 1000, "grace": 0} | options,
        )  # fmt: skip
        self._is_prepared = options.get("every", 1) == 1
        self.log: Log = {}
        self._samples: list[int] = []
        self._losses: list[float] = []

    def run(self, until: int = BATCHES) -> ExactJob:
        """Train up to that many iterations, or to the end of the data."""
        for _ in self.moments(until):
            pass
        return self

    def moments(self, until: int = BATCHES) -> Iterator[str]:
        """Stops at every moment at which a process may die: the same in every iteration."""
        for indices, points, targets in self.session.batches(self.loader, epochs=EPOCHS):
            yield "drawn"
            self._backward(indices, points, targets)
            yield "backward"
            whole = self.loop.batches % self.accumulation == 0
            if whole:
                self._update()
                yield "updated"
            if whole or self.across:
                self.log[self.session.iteration + 1] = self._record()
                self._samples, self._losses = [], []
                self.session.step(loss=0.0)
                if not self._is_prepared:  # a checkpoint that is due would wait some iterations for its memory
                    self.session.wait(300)
                    self._is_prepared = True
                yield "stepped"
            if self.session.iteration >= until:
                return

    def crash(self) -> ExactJob:
        """Nothing more is saved or said, as if the process had been killed."""
        self.session._close("SIGKILL")
        return self

    def settle(self) -> None:
        self.session.wait(300)

    def _backward(self, indices: Tensor, points: Tensor, targets: Tensor) -> None:
        points = points + 0.1 * torch.randn(points.shape, generator=self.noise)
        points = points * (1 + 0.1 * self.dice.random() + 0.1 * random.random())
        points = points + 0.1 * float(self.choice.random()) + 0.1 * float(numpy.random.rand())
        points, targets = points.to(DEVICE), targets.to(DEVICE)
        loss = (self.model(points) - targets).square().mean() / self.accumulation
        self.loop.batches += 1
        # now and then one overflows, and the scaler skips that update
        overflow = float("inf") if self.loop.batches % 11 == 0 else 1.0
        self.scaler.scale(loss * overflow).backward()
        self._samples += indices.tolist()
        self._losses.append(loss.item())

    def _update(self) -> None:
        self.scaler.step(self.optimizer)
        if DEVICE == "cpu":
            self.scaler.step(self.heavy)
        else:  # torch unscales no bfloat16 there
            self._step_unscaled()
        self.scaler.update()
        self.optimizer.zero_grad()
        self.heavy.zero_grad()
        self.schedule.step()
        self.plateau.step(sum(self._losses))
        self.ema.update_parameters(self.model)
        self.loop.best = min(self.loop.best, sum(self._losses))

    def _step_unscaled(self) -> None:
        gradients = [parameter.grad for parameter in self.model.head.parameters()]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            for gradient in gradients:
                gradient.div_(self.scaler.get_scale())
            self.heavy.step()

    def _record(self) -> Record:
        buffers = dict(self.model.named_buffers())
        return {
            "samples": ",".join(map(str, self._samples)),
            "loss": ",".join(map(bits, self._losses)),
            "parameters": digest(dict(self.model.named_parameters())),
            "buffers": digest(buffers),
            "gradients": digest({name: p.grad for name, p in self.model.named_parameters()}),
            "optimizer": digest(self.optimizer.state_dict()),
            "heavy": digest(self.heavy.state_dict()),
            "schedule": digest(self.schedule.state_dict()),
            "plateau": digest(self.plateau.state_dict()),
            "ema": digest(self.ema.state_dict()),
            "scaler": digest(self.scaler.state_dict()),
            "noise": digest(self.noise.get_state()),
            "dice": digest(self.dice.getstate()),
            "choice": digest(self.choice.bit_generator.state),
            "loop": digest(self.loop.state_dict()),
            **rng_record(),
        }
