"""Every Python block of README and docs runs as it is printed, here or in a test of its own."""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.support.job_processes import served

ROOT = Path(__file__).resolve().parents[3]
ELSEWHERE = {
    "docs/client.md": "tests/integration/server/test_client.py",
    "docs/accelerate.md": "tests/frameworks/test_documented_scripts.py",
    "docs/data-loaders.md": "tests/frameworks/test_stateful_loaders.py",
    "docs/frameworks.md": "tests/frameworks/test_ignite.py",
    "docs/lightning.md": "tests/frameworks/test_documented_scripts.py",
    "docs/loggers.md": "tests/frameworks/test_documented_scripts.py",
    "docs/metrics.md": "tests/frameworks/test_opentelemetry.py",
    "docs/ray.md": "tests/frameworks/test_documented_scripts.py",
    "docs/systems.md": "tests/integration/agent/test_documented_systems.py",
    "docs/transformers.md": "tests/frameworks/test_documented_scripts.py",
    "docs/tutorial.md": "tests/end_to_end/test_tutorial.py",
    "docs/wire.md": "test_the_report_of_the_wire_page_is_accepted",
}


def blocks(page: str) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [textwrap.dedent(each) for each in found]  # one within a list is indented


def pages() -> list[str]:
    found = ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))]
    return [page for page in found if blocks(page) and page not in ELSEWHERE]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What the blocks take as given: a model, its data, and a folder in which they run."""
    monkeypatch.chdir(tmp_path)
    for name in ("HOLDFAST_STORE", "HOLDFAST_SERVER"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    dataset = [torch.randn(4) for _ in range(96)]
    given = {
        "BATCH": 32, "EPOCHS": 2, "Ring": lambda: dataset,
        "args": argparse.Namespace(lr=1e-3), "artist": nn.Linear(4, 1), "critic": nn.Linear(4, 1),
        "DistributedDataParallel": DistributedDataParallel, "artist_loss": 0.5, "critic_loss": 0.5,
        "dataset": dataset, "dist": dist, "holdfast": holdfast, "loss": 0.5,
        "loss_of": lambda model, batch: model(batch).square().mean(), "math": math,
        "max_iterations": 5, "model": model, "optimizer": optimizer,
        "seed": 0, "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10), "torch": torch,
        "val_loss": 0.5, "z": torch.Generator(),
    }  # fmt: skip
    given["opt_a"] = torch.optim.Adam(given["artist"].parameters())
    given["opt_c"] = torch.optim.Adam(given["critic"].parameters())
    yield given
    if isinstance(session := given.get("session"), holdfast.Session):
        session.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def prepare(block: str, names: dict[str, Any]) -> str:
    """Make what a block refers to and does not make itself; the block, with addresses of this machine."""
    block = block.replace("    ...\n", "    optimizer.step()\n")  # the work of an iteration
    if "accelerator.prepare" in block:
        names["accelerator"] = pytest.importorskip("accelerate").Accelerator()
    if "init_process_group" in block:
        alone = f'init_process_group("gloo", "file://{Path.cwd()}/meeting", rank=0, world_size=1)'
        block = re.sub(r"init_process_group\(.*\)", alone, block)
        block = block.replace("/shared/checkpoints", "checkpoints")
    if "session" in block and "holdfast.Session(" not in block:
        names["session"] = holdfast.Session("job", model=names["model"], optimizer=names["optimizer"])
        names["session"].resume()
    if "loader" in block and "holdfast.DataLoader(" not in block:
        names["loader"] = holdfast.DataLoader(names["dataset"], batch_size=32)
    if "safetensors" in block:
        store = stored(names)
        block = block.replace("000000001200-1", store.name)
    return block


def stored(names: dict[str, Any]) -> Path:
    """A checkpoint of the job my-job in ./checkpoints, and the exports of it that the guide loads."""
    import safetensors.torch

    with holdfast.Session("my-job", model=names["model"], optimizer=names["optimizer"]) as session:
        session.resume()
        session.checkpoint()
        session.step()
    (written,) = (path for path in Path("checkpoints/my-job").iterdir() if (path / "manifest.json").exists())
    names["safetensors"] = safetensors
    safetensors.torch.save_file(names["model"].state_dict(), "model.safetensors")
    torch.save({"model": names["model"].state_dict()}, "all.pt")
    return written


@pytest.mark.parametrize(
    ("source", "number"), [(source, number) for source in pages() for number in range(len(blocks(source)))]
)
def test_a_block_runs(names: dict[str, Any], source: str, number: int) -> None:
    block = prepare(blocks(source)[number], names)
    exec(compile(block, f"{source}, block {number}", "exec"), names)


def test_blocks_that_are_left_to_other_tests_are_there() -> None:
    for page, test in ELSEWHERE.items():
        assert blocks(page)
        assert (ROOT / test).exists() or test in globals()


def test_the_report_of_the_wire_page_is_accepted(tmp_path: Path) -> None:
    (block,) = blocks("docs/wire.md")
    with served(tmp_path) as client:
        block = block.replace("http://127.0.0.1:7117", client.server).replace("Bearer …", "Bearer none")
        exec(compile(block, "docs/wire.md", "exec"), {})
        assert [job.job for job in client.jobs()] == ["char-gpt"]
