"""The recipe for PyTorch Ignite: an engine that ends after any iteration continues with the same losses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/frameworks.md"
START = """
import os
import sys

import torch
from ignite.engine import Engine, Events

import holdfast

stop = int(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(12, 2) / 24)
loader = holdfast.DataLoader(data, batch_size=3, shuffle=True, seed=1)


def update(engine, batch):
    loss = (model(batch[0]) + torch.rand(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


trainer = Engine(update)
"""
EVALUATION = "def evaluate(engine): ..."
STEP = "    session.step(loss=engine.state.output)\n"


def script():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert EVALUATION in block
    assert STEP in block
    block = block.replace(EVALUATION, "def evaluate(engine):\n    print('evaluation', torch.rand(1).item())")
    ends = "    session.wait(60)\n    if session.iteration == stop:\n        sys.stdout.flush()\n"
    ends += "        os._exit(0)\n"
    return START + block.replace(STEP, "    print(session.iteration, engine.state.output)\n" + STEP + ends)


def run(folder, stop):
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script())
    command, environment = [sys.executable, "train.py", str(stop)], os.environ | {"HOLDFAST_EVERY": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    printed = run(tmp_path_factory.mktemp("whole"), 0)
    assert printed.count("evaluation") == 3
    return printed


@pytest.mark.parametrize("stop", [2, 4])
def test_an_engine_continues_with_the_same_losses(stop, uninterrupted, tmp_path):
    assert run(tmp_path, stop) + run(tmp_path, 0) == uninterrupted
