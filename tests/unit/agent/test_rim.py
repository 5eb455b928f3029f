"""Packages that a job does without: it trains, reports and resumes while their import fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RIM = (
    "client", "codecs", "commands", "integrations", "simulation", "supervisor", "checkpoint.export",
    "checkpoint.scrub", "pacing.what_if", "store.bucket", "store.object_keys", "store.objects", "store.s3",
    "store.s3_connection",
)  # fmt: skip
TRAINING = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in sys.argv[2:]):
            raise ImportError(f"{name} is imported")

sys.meta_path.insert(0, Blocked())
import torch
import holdfast

for start in (0, 3):
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    with holdfast.Session("rim", store=sys.argv[1], model=model, optimizer=optimizer) as session:
        assert session.resume() == start
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            session.checkpoint()
            session.step(loss=1.0)
            assert all(outcome.is_durable for outcome in session.wait(60))
print("trained")
"""


def test_a_job_trains_reports_and_resumes_without_the_rim(tmp_path: Path) -> None:
    blocked = [f"holdfast.{name}" for name in RIM]
    environment = os.environ | {"HOLDFAST_SERVER": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(tmp_path), *blocked],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "trained"
    assert "is imported" not in done.stderr
