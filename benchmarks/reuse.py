"""`python -m benchmarks.reuse`: how much smaller checkpoints are when unchanged tensors are stored once.

Two trainings with AdamW, 12 checkpoints each: adapters (LoRA) on a frozen base, and the same model with all
weights trained, in which nothing can be reused. Figures:

- `lora_reuse_ratio`: bytes of state per byte stored, of the checkpoints after the first.
- `lora_space_ratio`: the same for all 12, as the file system counts them.
- `off_overhead`: time of the search for unchanged tensors where there are none, divided by the time of writing.
- `restore_slowdown`: time to read and verify a checkpoint that shares a file, divided by that without reuse.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.codecs.incremental import Update, load, stored
from benchmarks.disk import space_bytes
from benchmarks.harness import median_seconds, print_figures, record_calls, run, scratch
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


def main(width: int = 2048, layers: int = 8, rounds: int = 5, folder: Path | None = None) -> dict[str, float]:
    """Measure both trainings; return the figures.

    Args:
        folder: where the stores are; by default the folder for temporary files
    """
    with scratch(folder) as place:
        store = trained(place / "lora", width, layers, is_frozen=True)
        manifests = [restore.manifest(store, "job", each) for each in store.checkpoints("job")]
        logical_bytes = [sum(file.size_bytes for file in each.files) for each in manifests]
        reused = [reused_bytes(each.files) for each in manifests]
        written_bytes = sum(logical_bytes[1:]) - sum(reused[1:])
        with mock.patch.object(snapshotter, "_unchanged", return_value=set()):  # write every tensor again
            trained(place / "plain", width, layers, is_frozen=True)
        seconds, plain_seconds = median_seconds(
            rounds, *(partial(load, place / each) for each in ("lora", "plain"))
        )
        figures = {
            "state_mb": logical_bytes[-1] / 1e6,
            "lora_reuse_ratio": sum(logical_bytes[1:]) / written_bytes,
            "lora_space_ratio": sum(logical_bytes) / space_bytes(place / "lora" / "job"),
            "lora_reused_share": reused[-1] / logical_bytes[-1],
            "restore_slowdown": seconds / plain_seconds,
            "off_overhead": off_overhead(place, width, layers // 2),
        }
    print_figures(figures)
    return figures


def trained(place: Path, width: int, layers: int, *, is_frozen: bool) -> Store:
    """Train with a checkpoint after each iteration, each durable before the next."""

    def job() -> tuple[dict[str, Any], Update]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(*(Adapted(width) for _ in range(layers)))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not is_frozen or "base" not in name)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)

        def update(_: int) -> None:
            optimizer.zero_grad()
            model(torch.randn(4, width)).square().mean().backward()
            optimizer.step()

        return {"model": model, "optimizer": optimizer}, update

    stored(job, place, CHECKPOINTS)
    return open_store(place)


def off_overhead(place: Path, width: int, layers: int) -> float:
    """Return the time of the search for unchanged tensors, divided by that of writing, where all are trained."""
    seconds, layout = list[float](), SimpleNamespace(versions=Layout.versions.fget)  # type: ignore[attr-defined]
    for owner, name in ((snapshotter, "_unchanged"), (writer, "find_unchanged"), (layout, "versions")):
        record_calls(owner, name, seconds)
    with mock.patch.object(Layout, "versions", property(layout.versions)):
        store = trained(place / "dense", width, layers, is_frozen=False)
    manifests = [restore.manifest(store, "job", each) for each in store.checkpoints("job")]
    return sum(seconds) / sum(each.timings["write_seconds"] for each in manifests)


if __name__ == "__main__":
    run(main)
