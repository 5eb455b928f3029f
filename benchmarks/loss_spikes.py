"""`python -m benchmarks.loss_spikes`: false alarms and delays of the alert rule `loss_spike`.

Small models are trained, some of them without noise, so that their loss converges to zero. Their losses without a
defect give the false alarms, and the false messages: those about spikes that last. Training then goes on from some
iterations with a defect: a learning rate that is 30 times as high for five iterations, or one batch of noise. That
gives the share that is detected within 20 iterations, the delay, and the share of which a message is sent.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.bit_errors import Images
from benchmarks.harness import run
from holdfast.telemetry.loss_watch import LossWatch
from holdfast_server.alerts.conditions import KINDS
from holdfast_server.alerts.loss_spikes import NEWEST_LOSSES, LossHistory, find_spikes
from holdfast_server.samples.limits import START_LOSSES

WINDOW = KINDS["loss_spike"].window
LIMITS = (4.0, KINDS["loss_spike"].limit, 8.0)
DEFECTS = ("learning rate", "batch")
HIGHER_RATE, HIGHER_FOR = 30.0, 5
SEEDS = (1, 2, 3)
AFTERWARDS, DETECTED_WITHIN = 40, 20
Batch = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """A block of a small GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        options = {"dropout": 0.1, "batch_first": True, "norm_first": True}
        self.inner = nn.TransformerEncoderLayer(width, 4, 4 * width, **options)

    def forward(self, inputs: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        return self.inner(inputs, src_mask=mask, is_causal=True)


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.GRU(width, width, batch_first=True)

    def forward(self, inputs: Tensor) -> Any:
        return self.inner(inputs)[0]


def text_batches(count: int, length: int) -> Callable[[torch.Generator], Batch]:
    """Return a function that draws batches of the characters of this documentation."""
    text = "".join(path.read_text() for path in sorted(Path("docs").glob("*.md")))
    tokens = torch.tensor(list(text.encode()))

    def draw(generator: torch.Generator) -> Batch:
        starts = torch.randint(len(tokens) - length - 1, (count,), generator=generator)
        rows = tokens[starts[:, None] + torch.arange(length + 1)]
        return rows[:, :-1], rows[:, 1:]

    return draw


def points(generator: torch.Generator) -> Batch:
    inputs = 4 * torch.rand(64, 2, generator=generator) - 2
    noise = 0.05 * torch.randn(64, 1, generator=generator)
    return inputs, torch.sin(3 * inputs[:, :1]) * inputs[:, 1:] + noise


def sums(count: int) -> Callable[[torch.Generator], Batch]:
    """Return a function that draws numbers and their sum, without noise."""

    def draw(generator: torch.Generator) -> Batch:
        inputs = torch.rand(count, 8, generator=generator)
        return inputs, inputs.sum(1, keepdim=True)

    return draw


def loss_of_rank_0(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of the first 20 samples, with the gradient of all: as rank 0 of four reports it."""
    whole = F.mse_loss(outputs, targets)
    return F.mse_loss(outputs[:20], targets[:20]).detach() + whole - whole.detach()


def language_model(block: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(256, width), block, nn.LayerNorm(width), nn.Linear(width, 256))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))


@dataclass
class Training:
    """A model with its optimizer and its data."""

    model: nn.Module
    draw: Callable[[torch.Generator], Batch]
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    rate: float = 1e-3
    seed: int = 5
    optimizer: torch.optim.Optimizer = field(init=False)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.rate)
        self.generator = torch.Generator().manual_seed(self.seed)

    def iterate(self, *, noise: bool = False, rate: float = 1.0) -> float:
        inputs, targets = self.draw(self.generator)
        if noise:
            inputs, targets = _noise_like(inputs), _noise_like(targets)
        self.optimizer.param_groups[0]["lr"] = self.rate * rate
        self.optimizer.zero_grad()
        loss = self.loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()


def _noise_like(values: Tensor) -> Tensor:
    """Return a tensor of the same kind without meaning: random labels and tokens, or random numbers."""
    if values.is_floating_point():
        return 4 * values.std() * torch.randn_like(values)
    return torch.randint(int(values.max()) + 1, values.shape)


def trainings() -> dict[str, Callable[[], Training]]:
    images = Images()

    def convolutional() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(512, 10),
        )  # fmt: skip

    def regression() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def exact(model: Callable[[], nn.Module], count: int, loss: Any, rate: float, seed: int) -> Training:
        return Training(model(), sums(count), loss, rate, seed)

    linear = partial(nn.Linear, 8, 1)
    kinds = {
        "MLP, sums, 4 ranks of batch 20": (network, 80, loss_of_rank_0, 3e-3),
        "MLP, sums, batch 20": (network, 20, F.mse_loss, 3e-3),
        "MLP, sums, batch 80": (network, 80, F.mse_loss, 1e-3),
        "linear, sums, batch 20": (linear, 20, F.mse_loss, 1e-2),
    }
    return {
        f"{name}, seed {seed}": partial(exact, *kind, seed) for seed in SEEDS for name, kind in kinds.items()
    } | {
        "GPT, text, batch 16": lambda: Training(language_model(Attention(64), 64), text_batches(16, 48)),
        "GPT, text, batch 4": lambda: Training(language_model(Attention(64), 64), text_batches(4, 128)),
        "GRU, text, batch 2": lambda: Training(language_model(Recurrent(64), 64), text_batches(2, 32)),
        "convolutions, images, batch 32": lambda: Training(convolutional(), lambda g: images.draw(g, 32)),
        "convolutions, images, batch 4": lambda: Training(convolutional(), lambda g: images.draw(g, 4)),
        "MLP, regression, batch 64": lambda: Training(regression(), points, F.mse_loss),
    }


@dataclass(frozen=True, slots=True)
class Curves:
    """The losses of a training without a defect, and of ones that continue with a defect, by kind."""

    losses: list[float]
    defective: dict[str, list[list[float]]]


def train(make: Callable[[], Training], iterations: int, defects: int) -> Curves:
    torch.manual_seed(1)
    training, losses = make(), []
    at = {iterations // 3 + number * (2 * iterations // 3) // defects for number in range(defects)}
    defective: dict[str, list[list[float]]] = {defect: [] for defect in DEFECTS}
    for iteration in range(iterations):
        if iteration in at:
            for defect in DEFECTS:
                defective[defect].append([*losses, *_with(defect, copy.deepcopy(training))])
        losses.append(training.iterate())
    return Curves(losses, defective)


def spikes(losses: list[float], limit: float, after: int = 0, *, lasting: bool = False) -> list[int]:
    """Return the first iterations of spikes, counted from 0, after the warm-up and an iteration.

    With `lasting`, only of those of which a message is sent.
    """
    places, values = np.arange(len(losses)), np.array(losses)
    start = statistics.median(losses[:START_LOSSES])
    found = find_spikes(places, values, limit=limit, window=WINDOW, after=after, start=start)
    found = [spike for spike in found if spike.iteration > max(after, WINDOW)]
    if lasting:
        soon = (
            LossHistory(places[:end], values[:end], places[:end].astype(float), 0, start)
            for end in (min(len(losses), spike.iteration + NEWEST_LOSSES) for spike in found)
        )
        found = [spike for spike, history in zip(found, soon, strict=True) if history.lasts(spike, limit)]
    return [spike.iteration for spike in found]


def restores(losses: list[float]) -> int:
    """Count the restores that `on_trouble` would make, each of which goes on from the same iteration."""
    watch, count = LossWatch(), 0
    for iteration, loss in enumerate(losses, start=1):
        watch.add(iteration, loss)
        if watch.trouble is not None:
            count += 1
            watch.restart(iteration)
    return count


def measure(curves: Curves, limit: float) -> dict[str, Any]:
    """Return the false alarms, and by defect the number of detected ones and the delays in iterations."""
    losses = curves.losses
    row: dict[str, Any] = {
        "false_alarms": len(spikes(losses, limit)), "false_messages": len(spikes(losses, limit, lasting=True)),
        "iterations": len(losses), "restores": restores(losses),
    }  # fmt: skip
    for defect, runs in curves.defective.items():

        def first(run: list[float], **options: bool) -> int:
            """Return the delay of the first spike after the defect."""
            begin = len(run) - AFTERWARDS
            return next((at - begin for at in spikes(run, limit, begin - 1, **options)), AFTERWARDS)

        delays = [delay for delay in map(first, runs) if delay <= DETECTED_WITHIN]
        row[defect] = {
            "detected": len(delays), "of": len(runs), "delay": statistics.median(delays) if delays else None,
            "longest": max(delays, default=None),
            "messages": sum(first(run, lasting=True) <= DETECTED_WITHIN for run in runs),
        }  # fmt: skip
    return row


def _with(defect: str, training: Training) -> list[float]:
    """Return the losses of iterations that begin with a defect."""
    if defect == "batch":
        return [training.iterate(noise=step == 0) for step in range(AFTERWARDS)]
    return [training.iterate(rate=HIGHER_RATE if step < HIGHER_FOR else 1.0) for step in range(AFTERWARDS)]


def main(iterations: int = 5000, defects: int = 10) -> dict[str, Any]:
    """Train all models.

    Args:
        iterations: of each model without a defect
        defects: of each kind and model
    """
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for name, make in trainings().items():
        curves = train(make, iterations, defects)
        figures[name] = {f"{limit:g}": measure(curves, limit) for limit in LIMITS}
        for limit, row in figures[name].items():
            print(f"{name:40} limit {limit:>3}: {row}", flush=True)
    chosen = [rows[f"{KINDS['loss_spike'].limit:g}"] for rows in figures.values()]
    total = {name: sum(row[name] for row in chosen) for name in ("false_alarms", "false_messages", "restores")}
    trained = sum(row["iterations"] for row in chosen)
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in total.items())
    print(f"in all: {counts} (false ones, by on_trouble) in {trained:,} iterations")
    return figures


if __name__ == "__main__":
    run(main)
