"""Loaders of other libraries that have a position of their own, in a loop that is killed."""

import re
from pathlib import Path

import grain
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from benchmarks.integrations.jobs.stateful_loader import import_streaming
from benchmarks.integrations.kills import compare, run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data-loaders.md"


@pytest.mark.parametrize(
    ("loader", "workers", "kills"),
    [("torchdata", 0, 2), ("mosaic", 0, 2), ("mosaic", 2, 1), ("grain", 1, 1), ("grain-dataset", 0, 2)],
)
def test_a_loader_of_another_library_resumes_exactly(tmp_path, loader, workers, kills):
    arguments = ["--loader", loader, "--workers", str(workers)]
    uninterrupted = run("stateful_loader", "holdfast", tmp_path / "uninterrupted", arguments=arguments)
    killed = run("stateful_loader", "holdfast", tmp_path / "killed", kills=kills, seed=1, arguments=arguments)
    result = compare(uninterrupted, killed)
    assert len(result.kills) == kills
    assert result.exact, result


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_the_blocks_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 1)
    names = {
        "StatefulDataLoader": StatefulDataLoader, "dataset": [torch.randn(4) for _ in range(96)], "grain": grain,
        "holdfast": holdfast, "loss": 0.5, "model": model, "optimizer": torch.optim.AdamW(model.parameters()),
        "source": range(96), "streaming": import_streaming(),
    }  # fmt: skip
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    names["session"].close()
    assert names["session"].iteration == 20
