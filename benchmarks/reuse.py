"""`python -m benchmarks.reuse`: how much smaller checkpoints are when unchanged tensors are stored once.

Two trainings with AdamW, 12 checkpoints each: adapters (LoRA) on a frozen base, and the same model with all
weights trained, in which nothing can be reused. Figures:

- `lora_reuse_ratio`: bytes of state per byte stored, of the checkpoints after the first.
- `lora_space_ratio`: the same for all 12, as the file system counts them.
- `off_overhead`: time of the search for unchanged tensors where there are none, divided by the time of writing.
- `restore_slowdown`: time to read and verify a checkpoint that shares a file, divided by that without reuse.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

import holdfast
from holdfast.checkpoint import restore
from holdfast.format.manifest import reused_bytes
from holdfast.save import snapshotter, writer
from holdfast.save.layout import Layout
from holdfast.store import Store, open_store

CHECKPOINTS = 12
RANK = 4


class Adapted(torch.nn.Module):
    """A linear layer with a low-rank adapter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = torch.nn.Linear(width, width)
        self.down = torch.nn.Linear(width, RANK, bias=False)
        self.up = torch.nn.Linear(RANK, width, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.base(batch) + self.up(self.down(batch)))


def run(width: int = 2048, layers: int = 8, rounds: int = 5, folder: str | None = None) -> dict[str, float]:
    """Measure both trainings; return the figures."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        store = trained(Path(place) / "lora", width, layers, is_frozen=True)
        logical_bytes, written_bytes, reused = sizes(store)
        later = slice(1, None)
        figures["state_mb"] = logical_bytes[-1] / 1e6
        figures["lora_reuse_ratio"] = sum(logical_bytes[later]) / sum(written_bytes[later])
        figures["lora_space_ratio"] = sum(logical_bytes) / space_bytes(Path(place) / "lora" / "job")
        figures["lora_reused_share"] = reused[-1] / logical_bytes[-1]
        with never_reused():
            plain = trained(Path(place) / "plain", width, layers, is_frozen=True)
        figures["restore_slowdown"] = in_turn(rounds, lambda: load(store), lambda: load(plain))
        figures["off_overhead"] = off_overhead(Path(place), width, layers // 2)
    return figures


def trained(place: Path, width: int, layers: int, *, is_frozen: bool, count: int = CHECKPOINTS) -> Store:
    """Train with a checkpoint after each iteration, each durable before the next."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(Adapted(width) for _ in range(layers)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen or "base" not in name)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    session = holdfast.Session("job", model=model, optimizer=optimizer, store=place, keep=CHECKPOINTS, every=10**6)
    store = open_store(place)
    for number in range(count):
        optimizer.zero_grad()
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        session.checkpoint()
        session.step()
        while len(store.checkpoints("job")) <= number:
            time.sleep(0.005)
    session.close()
    return store


def sizes(store: Store) -> tuple[list[int], list[int], list[int]]:
    """Return the bytes of state, written and reused, by checkpoint."""
    manifests = [restore.manifest(store, "job", each) for each in store.checkpoints("job")]
    logical_bytes = [sum(file.size_bytes for file in each.files) for each in manifests]
    reused = [reused_bytes(each.files) for each in manifests]
    written_bytes = [whole - part for whole, part in zip(logical_bytes, reused, strict=True)]
    return logical_bytes, written_bytes, reused


def space_bytes(place: Path) -> int:
    """Return the space that files take, those with several names once."""
    found = [os.stat(os.path.join(folder, name)) for folder, _, names in os.walk(place) for name in names]
    return sum(blocks * 512 for _, blocks in {(each.st_ino, each.st_blocks) for each in found})


def off_overhead(place: Path, width: int, layers: int) -> float:
    """Return the time of the search for unchanged tensors, divided by that of writing, where all are trained."""
    seconds: list[float] = []

    def timed(search: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            started = time.perf_counter()
            found = search(*args)
            seconds.append(time.perf_counter() - started)
            return found

        return call

    with (
        mock.patch.object(snapshotter, "_unchanged", timed(snapshotter._unchanged)),
        mock.patch.object(writer, "find_unchanged", timed(writer.find_unchanged)),
        mock.patch.object(Layout, "versions", property(timed(Layout.versions.fget))),  # type: ignore[attr-defined]
    ):
        store = trained(place / "dense", width, layers, is_frozen=False)
    manifests = [restore.manifest(store, "job", each) for each in store.checkpoints("job")]
    return sum(seconds) / sum(each.timings["write_seconds"] for each in manifests)


def load(store: Store) -> None:
    restore.load(store, "job", store.checkpoints("job")[-1])


def in_turn(rounds: int, first: Callable[[], object], second: Callable[[], object]) -> float:
    """Return the median time of `first` divided by that of `second`, run in turn."""
    took: list[list[float]] = [[], []]
    for _ in range(rounds):
        for act, times in zip((first, second), took, strict=True):
            started = time.perf_counter()
            act()
            times.append(time.perf_counter() - started)
    return statistics.median(took[0]) / statistics.median(took[1])


@contextmanager
def never_reused() -> Iterator[None]:
    """Write every tensor again."""
    with mock.patch.object(snapshotter, "_unchanged", return_value=set()):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where the stores are; by default the folder for temporary files")
    options = parser.parse_args()
    print(
        f"machine   {platform.machine()}, {platform.system()} {platform.release()}, {os.cpu_count()} cores",
        flush=True,
    )
    figures = run(options.width, options.layers, options.rounds, options.folder)
    for name, value in figures.items():
        print(f"{name:<20} {value:10.4g}")
    print(f"figures: {json.dumps({name: round(value, 4) for name, value in figures.items()})}")


if __name__ == "__main__":
    main()
