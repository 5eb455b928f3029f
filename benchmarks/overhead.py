"""What checkpoints cost on this machine: nothing, torch.save in the loop, and Holdfast, side by side.

The three take turns in short rounds, in an order that rotates, each on a model of its own: what else the
machine does falls on all of them alike. Each round is compared with the plain one beside it, and the median
over the rounds is told, with the noise that plain rounds have among themselves. All save every `--every`
iterations, so that the same work is done for the same money, and Holdfast's rounds end only when its last
checkpoint is durable: nothing is hidden in the background. torch.save is followed by fsync for the same
reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import holdfast
from holdfast.protocol import checkpoint_id
from holdfast.store import open_store

WIDTH, LAYERS, BATCH = 1024, 8, 256
Loop = Callable[[int], None]


class Training:
    """A plain loop over one fixed batch: 8.4 million parameters, 101 MB with Adam's moments."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(BATCH, WIDTH)
        self.iteration = 0

    def iterate(self) -> Tensor:
        loss = F.mse_loss(self.model(self.batch), self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.iteration += 1
        return loss

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def plain(folder: Path, every: int) -> tuple[Training, Loop, Callable[[], None]]:
    training = Training()

    def loop(iterations: int) -> None:
        for _ in range(iterations):
            training.iterate()

    return training, loop, lambda: None


def torch_save(folder: Path, every: int) -> tuple[Training, Loop, Callable[[], None]]:
    training = Training()

    def loop(iterations: int) -> None:
        for _ in range(iterations):
            training.iterate()
            if training.iteration % every == 0:
                with open(folder / "checkpoint.tmp", "wb") as file:
                    torch.save(training.state(), file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")

    return training, loop, lambda: None


def with_holdfast(folder: Path, every: int) -> tuple[Training, Loop, Callable[[], None]]:
    training = Training()
    objects = {"model": training.model, "optimizer": training.optimizer}
    session = holdfast.Session("overhead", store=folder, every=every, keep=3, server="", **objects)
    session.resume()

    def loop(iterations: int) -> None:
        for _ in range(iterations):
            session.step(loss=training.iterate())
        # the background's work is part of the price
        _wait_until_durable(folder, training.iteration)

    return training, loop, session.close


def _wait_until_durable(folder: Path, iteration: int) -> None:
    newest, deadline = checkpoint_id(iteration, 1), time.monotonic() + 120
    store = open_store(folder)
    while newest not in store.checkpoints("overhead"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"checkpoint {newest} did not become durable; is there room in {folder}?")
        time.sleep(0.002)


CONTENDERS = {"plain": plain, "torch.save": torch_save, "holdfast": with_holdfast}


def measure(every: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per iteration of each round, by contender."""
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with contextlib.ExitStack() as stack:
        loops = {}
        for name, start in CONTENDERS.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".")))
            _, loops[name], close = start(folder, every)
            stack.callback(close)
            loops[name](every)  # warm up: allocate, create optimizer state, fill caches
        for number in range(rounds):
            turn = number % len(loops)
            for name in [*list(loops)[turn:], *list(loops)[:turn]]:
                began = time.perf_counter()
                loops[name](2 * every)
                seconds[name].append((time.perf_counter() - began) / (2 * every))
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=20, help="iterations between checkpoints")
    parser.add_argument("--rounds", type=int, default=12, help="at least 3")
    options = parser.parse_args()
    seconds = measure(options.every, options.rounds)
    figures = report(seconds, options.every)
    print(f"\nfigures: {json.dumps(figures)}")


def report(seconds: dict[str, list[float]], every: int) -> dict[str, float]:
    rounds = len(seconds["plain"])
    print(f"\nA checkpoint of 101 MB every {every} iterations, medians of {rounds} rounds\n")
    print(f"{'':12}{'per iteration':>16}{'overhead':>12}{'a checkpoint':>16}")
    figures = {}
    for name, values in seconds.items():
        overheads = [mine / plain - 1 for mine, plain in zip(values, seconds["plain"], strict=True)]
        overhead, median = statistics.median(overheads), statistics.median(values)
        cost = overhead * statistics.median(seconds["plain"]) * every
        print(f"{name:12}{median * 1e3:13.1f} ms{overhead:12.1%}{cost * 1e3:13.0f} ms")
        key = name.replace(".", "_")
        figures[f"{key}_iteration_seconds"] = round(median, 5)
        if name != "plain":
            figures[f"{key}_overhead"] = round(overhead, 4)
    low, _, high = statistics.quantiles(seconds["plain"], n=4)
    figures["noise"] = round((high - low) / statistics.median(seconds["plain"]), 4)
    print(f"\nHalf of the plain rounds lie within {figures['noise']:.1%}: smaller differences mean nothing here.")
    return figures


if __name__ == "__main__":
    main()
