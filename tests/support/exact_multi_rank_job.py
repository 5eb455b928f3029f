"""Jobs of several ranks for tests of exact resume, under each way to split a model.

`MultiRankJob` has all the state that a resume can get wrong. The results of `DeterministicMultiRankJob` do not
depend on the number of ranks: its model has no BatchNorm, dropout only on request, and the same batches for any
number of ranks.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils._pytree import tree_map_only

import holdfast
from tests.support import exact_job
from tests.support.training_log import Log, Record, bits, digest, rng_record

EPOCHS, BATCH = 2, 4
"""No rank of two, three or four ever gets a single sample, which BatchNorm cannot normalize."""
WIDTH = 13
"""No number of ranks divides it, and one row over four leaves three ranks with nothing."""
QUIET_BATCH, QUIET_SAMPLES = 12, 96
"""Of all ranks together: any two, three or four share them evenly."""
BUCKET_MB = 0.0005
"""DistributedDataParallel has about four buckets then."""


def batches_of(world_size: int) -> int:
    return EPOCHS * -(-exact_job.SAMPLES // (BATCH * world_size))


def local(value: Any) -> Any:
    """With this rank's part for every sharded tensor."""
    return tree_map_only(DTensor, lambda tensor: tensor.to_local(), value)


def whole(value: Any) -> Any:
    """With what all ranks have of it together for every sharded tensor."""
    return tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), value)


def seeded(number: int) -> None:
    for each in (random.seed, numpy.random.seed, torch.manual_seed):
        each(number)


class MultiRankJob:
    """One rank of it, under "ddp" or "fsdp"; each rank has random numbers and buffers of its own.

    `accumulation` batches make an update, and each of them is an iteration of its own. Without a store it trains
    without Holdfast.
    """

    def __init__(
        self,
        store: Path | str | None,
        *,
        kind: str = "ddp",
        seed: int = 0,
        accumulation: int = 1,
        syncs_buffers: bool = False,
        own_head: bool = False,
        workers: int = 0,
        **options: Any,
    ) -> None:
        rank = dist.get_rank()
        seeded(seed)
        self.accumulation = accumulation
        self.model = exact_job.ExactJobModel(WIDTH)
        self.ema = AveragedModel(self.model, avg_fn=get_ema_avg_fn(0.9), use_buffers=True)
        self.trained = self._spread(kind, syncs_buffers, own_head)
        body = [p for p in self.model.parameters() if p.dtype == torch.float32]
        self.optimizer = torch.optim.AdamW(body, lr=1e-2)
        self.heavy = exact_job.MomentumInFloat32(self.model.head.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.heavy, factor=0.7, patience=1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        seeded(1000 * seed + rank)
        self.noise = torch.Generator().manual_seed(1000 * seed + rank)
        self.dice = random.Random(1000 * seed + rank)
        self.choice = numpy.random.default_rng(1000 * seed + rank)
        self.loop = holdfast.Variables(batches=0, best=float("inf"))
        self.loader = holdfast.DataLoader(
            exact_job.NoisyPoints(), batch_size=BATCH, shuffle=True, seed=1, num_workers=workers
        )
        self.session: Any = _NoSession() if store is None else holdfast.Session(
            "job", store=store, model=self.trained, optimizer=self.optimizer, heavy=self.heavy,
            schedule=self.schedule, plateau=self.plateau, ema=self.ema, scaler=self.scaler, noise=self.noise,
            dice=self.dice, choice=self.choice, loop=self.loop,
            **{"every": 1, "keep": 1000, "max_in_flight": 2} | options,
        )  # fmt: skip
        self._is_prepared = store is None or options.get("every", 1) == 1
        self.log: Log = {}
        self._samples: list[int] = []
        self._losses: list[float] = []

    def run(self) -> MultiRankJob:
        for _ in self.moments():
            pass
        return self

    def moments(self) -> Iterator[str]:
        """Stops at every moment at which a rank may die: the same in every iteration."""
        for indices, points, targets in self.session.batches(self.loader, epochs=EPOCHS):
            yield "drawn"
            self.loop.batches += 1
            is_whole = self.loop.batches % self.accumulation == 0
            self._backward(indices, points, targets, is_whole)
            yield "backward"
            if is_whole:
                self._update()
                yield "updated"
            self.log[self.session.iteration + 1] = self._record()
            self._samples, self._losses = [], []
            yield "recorded"
            self.session.step(loss=0.0)
            if not self._is_prepared:  # a checkpoint that is due would wait some iterations for its memory
                self.session.wait(300)
                self._is_prepared = True
            yield "stepped"

    def crash(self) -> MultiRankJob:
        """Nothing more is saved or said, as if the process had been killed."""
        self.session._close("SIGKILL")
        return self

    def settle(self) -> None:
        self.session.wait(300)

    def _spread(self, kind: str, syncs_buffers: bool, own_head: bool) -> nn.Module:
        if kind == "ddp":
            ignored = ["head.weight", "head.bias"] if own_head else []
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, ignored)
            return DistributedDataParallel(self.model, bucket_cap_mb=BUCKET_MB, forward_sync_buffers=syncs_buffers)
        for net in (self.model, self.ema.module):
            for part in (net.inner, net.head, net):
                fully_shard(part)
        return self.model

    def _backward(self, indices: Tensor, points: Tensor, targets: Tensor, synchronizes: bool) -> None:
        points = points + 0.1 * torch.randn(points.shape, generator=self.noise)
        points = points * (1 + 0.1 * self.dice.random() + 0.1 * random.random())
        points = points + 0.1 * float(self.choice.random()) + 0.1 * float(numpy.random.rand())
        # now and then one overflows, and the scaler skips that update
        overflow = float("inf") if self.loop.batches % 7 == 0 else 1.0
        with contextlib.nullcontext() if synchronizes else self._alone():
            loss = (self.trained(points) - targets).square().mean() / self.accumulation
            self.scaler.scale(loss * overflow).backward()
        self._samples += indices.tolist()
        self._losses.append(loss.item())

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """Gradients stay on this rank, under FSDP those of its rows."""
        ddp = isinstance(self.trained, DistributedDataParallel)
        return self.trained.no_sync() if ddp else contextlib.nullcontext()

    def _update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.step(self.heavy)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.heavy.zero_grad()
        self.schedule.step()
        mean = torch.tensor(self._losses[-1])
        dist.all_reduce(mean)
        self.plateau.step(mean.item())  # the same on all ranks, or learning rates would part
        self.ema.update_parameters(self.model)
        self.loop.best = min(self.loop.best, self._losses[-1])

    def _record(self) -> Record:
        return {
            "samples": ",".join(map(str, self._samples)),
            "loss": ",".join(map(bits, self._losses)),
            "parameters": digest(local(dict(self.model.named_parameters()))),
            "buffers": digest(dict(self.model.named_buffers())),
            "gradients": digest(local({name: p.grad for name, p in self.model.named_parameters()})),
            "optimizer": digest(local(self.optimizer.state_dict())),
            "heavy": digest(local(self.heavy.state_dict())),
            "schedule": digest(self.schedule.state_dict()),
            "plateau": digest(self.plateau.state_dict()),
            "ema": digest(local(self.ema.state_dict())),
            "scaler": digest(self.scaler.state_dict()),
            "noise": digest(self.noise.get_state()),
            "dice": digest(self.dice.getstate()),
            "choice": digest(self.choice.bit_generator.state),
            "loop": digest(self.loop.state_dict()),
            **rng_record(),
        }


class _NoSession:
    """What a loop has to do itself where there is no session."""

    iteration = 0

    def batches(self, loader: Any, epochs: int) -> Iterator[Any]:
        for _ in range(epochs):
            yield from loader

    def step(self, **metrics: float) -> None:
        self.iteration += 1


class DeterministicModel(nn.Module):
    """Without BatchNorm; `there` and `back` may be split by columns and rows."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH)
        self.there, self.back = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(torch.relu(self.norm(self.inner(x))))
        return self.head(torch.tanh(self.back(torch.relu(self.there(x))))).squeeze(1)


class DeterministicMultiRankJob:
    """One rank of a job under any `kind`: "plain", "ddp", "fsdp", "hsdp", "tensor", or "tensor and fsdp"."""

    def __init__(
        self, store: Path | str, *, kind: str, seed: int = 0, samples: int = QUIET_SAMPLES, tail: Any = "pad",
        dropout: float = 0.0, **options: Any,
    ) -> None:  # fmt: skip
        seeded(seed)
        self.model = DeterministicModel(dropout)
        self.trained, rank, world_size = _split(self.model, kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)
        self.loader = holdfast.DataLoader(
            exact_job.NoisyPoints(samples), batch_size=QUIET_BATCH // world_size, shuffle=True, seed=1,
            rank=rank, world_size=world_size, tail=tail,
        )  # fmt: skip
        self.session = holdfast.Session(
            "job", store=store, model=self.trained, optimizer=self.optimizer, schedule=self.schedule,
            every=1, keep=1000, max_in_flight=2, **options,
        )  # fmt: skip
        self.samples: list[list[int]] = []
        self.losses: list[float] = []

    def run(self, until: int) -> DeterministicMultiRankJob:
        for indices, points, targets in self.session.batches(self.loader, epochs=EPOCHS):
            self.optimizer.zero_grad()
            loss = (self.trained(points) - targets).square().mean()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.samples.append(indices.tolist())
            self.losses.append(loss.item())
            self.session.step(loss=loss)
            if self.session.iteration >= until:
                break
        return self

    def state(self) -> Record:
        """Digests of all there is, as if nothing were split."""
        parameters = dict(self.model.named_parameters())
        moments = [dict(self.optimizer.state.get(parameter, {})) for parameter in parameters.values()]
        return {
            "parameters": digest({name: whole(p.detach()) for name, p in parameters.items()}),
            "moments": digest([{key: whole(value) for key, value in each.items()} for each in moments]),
            "schedule": digest(self.schedule.state_dict()),
        }


def _split(model: nn.Module, kind: str) -> tuple[nn.Module, int, int]:
    """What to train of the model, and which part of the data: (rank, of how many)."""
    count = dist.get_world_size() if kind != "plain" else 1
    across = {"there": ColwiseParallel(), "back": RowwiseParallel()}
    parts = [each for each in model.modules() if isinstance(each, nn.Linear)] + [model]
    if kind == "plain":
        return model, 0, 1
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB), dist.get_rank(), count
    if kind == "tensor":
        parallelize_module(model, init_device_mesh("cpu", (count,)), across)
        return model, 0, 1
    names = {"fsdp": ("shard",), "hsdp": ("replicate", "shard"), "tensor and fsdp": ("shard", "tensor")}[kind]
    shape = (count,) if len(names) == 1 else (2, count // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if "tensor" in names:
        parallelize_module(model, mesh["tensor"], across)
        mesh = mesh["shard"]
    for part in parts:
        fully_shard(part, mesh=mesh)
    if kind == "hsdp":
        return model, dist.get_rank(), count
    return model, mesh.get_local_rank(), mesh.size()
