"""`make bench-protection`: what bit errors and lost blocks of a checkpoint do to training that resumes from it.

A small convolutional network is trained on synthetic images. Bits of its weights, or of AdamW's moments, are
then flipped at random at some rate, and training resumes. Compared are no protection, protection of the top
byte of each number (the sign and seven of eight exponent bits), and of all bytes. In a second table, runs of
numbers are lost: their low three bytes, or all bytes. The last tables are those of `important_bytes.py`, through
files with parity. The tables are printed; `--plot` names an SVG file.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks import svg
from benchmarks.harness import Table, run

RATES = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
PROTECTED_BITS = {"none": 0, "top byte": 8, "all bytes": 32}
TARGETS = ("weights", "moments")
CLASSES, SIDE = 10, 16
SHARES = (0.01, 0.1, 0.5, 1.0)
"""Of the numbers, that are lost in runs."""
RUN_NUMBERS = 256
LOST = {
    "all bytes, zeros": (-1, 0),
    "low 3 bytes, zeros": (0xFFFFFF, 0),
    "low 3 bytes, middle": (0xFFFFFF, 0x800000),
}
"""The bits of a number that are lost, and what replaces them: the middle is that of the logarithms."""
TRAIN_ITERATIONS, RESUMED_ITERATIONS = 300, 50
OUTCOMES = dict.fromkeys((f"{'accuracy':>16}", f"{'resumed':>16}", f"{'resumed loss':>18}", "not finite"), ">")


class Outcome(NamedTuple):
    """Of a restore: at once, and after the resumed iterations. The loss is infinite after a NaN."""

    accuracy: float
    resumed_accuracy: float
    resumed_loss: float


class Images:
    """Shifted and noisy patterns of ten classes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        coarse = torch.randn(CLASSES, 1, 4, 4, generator=generator)
        self.patterns = F.interpolate(coarse, SIDE, mode="bicubic")
        self.test = self.draw(torch.Generator().manual_seed(2), 1000)

    def draw(self, generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
        classes = torch.randint(CLASSES, (count,), generator=generator)
        rows, columns = torch.randint(SIDE, (2, count, 1), generator=generator) // 3
        places = torch.arange(SIDE)
        shifted = self.patterns[classes[:, None, None], 0, (places + rows)[:, :, None] % SIDE,
                                (places + columns)[:, None, :] % SIDE]  # fmt: skip
        noise = 1.5 * torch.randn(shifted.shape, generator=generator)
        return (shifted + noise)[:, None], classes


class Training:
    def __init__(self, images: Images) -> None:
        torch.manual_seed(3)
        self.images = images
        self.model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, CLASSES),
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.generator = torch.Generator().manual_seed(4)

    def iterate(self, count: int) -> float:
        """Return the mean loss of the last ten iterations; infinite if it is no number."""
        losses = []
        for _ in range(count):
            data, classes = self.images.draw(self.generator, 64)
            loss = F.cross_entropy(self.model(data), classes)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        mean = statistics.fmean(losses[-10:])
        return mean if math.isfinite(mean) else math.inf

    @torch.no_grad()
    def accuracy(self) -> float:
        data, classes = self.images.test
        return float((self.model(data).argmax(1) == classes).float().mean())

    def tensors(self, target: str) -> list[Tensor]:
        parameters = list(self.model.parameters())
        if target == "weights":
            return [parameter.detach() for parameter in parameters]
        return [self.optimizer.state[each][key] for each in parameters for key in ("exp_avg", "exp_avg_sq")]


def flip_bits(tensor: Tensor, rate: float, protected_bits: int, generator: torch.Generator) -> None:
    """Flip each bit below the protected ones with the probability `rate`."""
    bits = 32 - protected_bits
    if not bits:
        return
    numbers = tensor.view(-1).view(torch.int32)
    count = int(torch.poisson(torch.tensor(rate * bits * len(numbers)), generator=generator))
    places = torch.randint(len(numbers), (count,), generator=generator).tolist()
    for place, bit in zip(places, torch.randint(bits, (count,), generator=generator).tolist(), strict=True):
        numbers[place] ^= torch.tensor(1, dtype=torch.int32) << bit


def lose_runs(tensor: Tensor, share: float, lost: str, generator: torch.Generator) -> None:
    """Replace bits of the numbers in a share of all runs."""
    bits, replacement = LOST[lost]
    numbers = tensor.view(-1).view(torch.int32)
    runs = torch.rand(-(-len(numbers) // RUN_NUMBERS), generator=generator) < share
    places = runs.repeat_interleave(RUN_NUMBERS)[: len(numbers)]
    numbers[places] = numbers[places] & ~bits | replacement


def restored(trained: Training, target: str, seed: int, damage: Callable[..., None]) -> Outcome:
    training, generator = copied(trained), torch.Generator().manual_seed(seed)
    for tensor in training.tensors(target):
        damage(tensor, generator=generator)
    return resume(training)


def resumed(trained: Training, tensors: Mapping[str, Sequence[Tensor]]) -> Outcome:
    """Resume with these weights and moments."""
    training = copied(trained)
    for target, values in tensors.items():
        for tensor, value in zip(training.tensors(target), values, strict=True):
            tensor.copy_(value)
    return resume(training)


def copied(trained: Training) -> Training:
    training = copy.copy(trained)
    training.model = copy.deepcopy(trained.model)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3)
    training.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))
    training.generator = torch.Generator()
    training.generator.set_state(trained.generator.get_state())
    return training


def resume(training: Training) -> Outcome:
    accuracy = training.accuracy()
    loss = training.iterate(RESUMED_ITERATIONS)
    return Outcome(accuracy, training.accuracy(), loss)


def main(seeds: int = 10, plot: Path | None = None) -> dict[str, float]:
    """Damage and resume.

    Args:
        plot: write a plot there
    """
    torch.set_num_threads(1)
    trained = Training(Images())
    trained.iterate(TRAIN_ITERATIONS)
    parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    print(f"{parameters:,} parameters in fp32, {TRAIN_ITERATIONS} iterations, accuracy {trained.accuracy():.3f}")
    print(f"medians of {seeds} restores, and the worst; resumed: after {RESUMED_ITERATIONS} iterations\n")
    table = Table({"errors in": "", "protected ": "", "  rate": ".0e"} | OUTCOMES)
    found: dict[tuple[str, str], list[list[Outcome]]] = {}
    for target, (protection, bits) in itertools.product(TARGETS, PROTECTED_BITS.items()):
        rows = found[target, protection] = []
        for rate in RATES:
            tried = range(1 if protection == "all bytes" else seeds)
            damage = partial(flip_bits, rate=rate, protected_bits=bits)
            rows.append([restored(trained, target, seed, damage) for seed in tried])
            table.row(target, protection, rate, *_summary(rows[-1]))
    print()
    table = Table({"lost of  ": "", f"{'lost':<20}": "", " share": ".0%"} | OUTCOMES)
    for target, lost, share in itertools.product(TARGETS, LOST, SHARES):
        damage = partial(lose_runs, share=share, lost=lost)
        row = [restored(trained, target, seed, damage) for seed in range(seeds)]
        table.row(target, lost, share, *_summary(row))
    from benchmarks import important_bytes

    through_files = important_bytes.measure(trained, seeds)
    if plot is not None:
        plot.write_text(drawn(found))
    return {
        f"{target}_{protection}_{rate:.0e}".replace(" ", "_"): round(_median(rows, "resumed_accuracy"), 3)
        for (target, protection), of_rates in found.items()
        for rate, rows in zip(RATES, of_rates, strict=True)
    } | through_files


def _summary(rows: list[Outcome]) -> list[str]:
    """Return the cells of OUTCOMES."""
    names = ("accuracy", "resumed_accuracy")
    cells = [f"{_median(rows, name):.3f} ({min(_values(rows, name)):.3f})" for name in names]
    loss = f"{_median(rows, 'resumed_loss'):.3g} ({max(_values(rows, 'resumed_loss')):.3g})"
    infinite = sum(math.isinf(value) for value in _values(rows, "resumed_loss"))
    return [*cells, loss, f"{infinite} of {len(rows)}"]


def _values(rows: list[Outcome], name: str) -> list[float]:
    return [getattr(row, name) for row in rows]


def _median(rows: list[Outcome], name: str) -> float:
    return statistics.median(_values(rows, name))


WIDTH, HEIGHT, LEFT, TOP = 340, 200, 56, 44
LINES = {"all bytes": ("#8fcbb4", 6), "top byte": ("#8a5a00", 2), "none": ("#c0392b", 2)}
"""Color and width, from the back to the front: two of them coincide."""
PANELS = (
    ("weights", "accuracy", "errors in weights: accuracy after the restore"),
    ("weights", "resumed_accuracy", f"errors in weights: after {RESUMED_ITERATIONS} more iterations"),
    ("moments", "resumed_accuracy", f"errors in moments: after {RESUMED_ITERATIONS} more iterations"),
)


def drawn(found: dict[tuple[str, str], list[list[Outcome]]]) -> str:
    """Return an SVG of the medians, with the worst restore as a dashed line."""
    parts = []
    for number, (target, name, title) in enumerate(PANELS):
        left = LEFT + number * (WIDTH + LEFT + 16)
        xs = [left + 20 + place * (WIDTH - 40) / (len(RATES) - 1) for place in range(len(RATES))]
        across = {x: f"{rate:.0e}" for x, rate in zip(xs, RATES, strict=True)}
        up = {_up(tick): str(tick) for tick in (0.0, 0.25, 0.5, 0.75, 1.0)}
        parts += svg.panel((left, TOP, WIDTH, HEIGHT), title, "errors per bit", across, up)
        for protection, (color, width) in LINES.items():
            rows = found[target, protection]
            medians, worst = [_median(row, name) for row in rows], [min(_values(row, name)) for row in rows]
            parts.append(svg.line(zip(xs, map(_up, medians), strict=True), color, width))
            parts.append(svg.line(zip(xs, map(_up, worst), strict=True), color, width, "4 4"))
    y = HEIGHT + TOP + 56
    for number, (protection, (color, width)) in enumerate(LINES.items()):
        x = LEFT + 170 * number
        parts += [svg.line([(x, y - 4), (x + 24, y - 4)], color, width)]
        parts.append(svg.text(x + 30, y, f"protected: {protection}"))
    parts.append(svg.text(LEFT + 540, y, "solid: median, dashed: worst"))
    return svg.picture(len(PANELS) * (WIDTH + LEFT + 16), HEIGHT + TOP + 66, parts)


def _up(value: float) -> float:
    return TOP + HEIGHT * (1 - value)


if __name__ == "__main__":
    run(main)
