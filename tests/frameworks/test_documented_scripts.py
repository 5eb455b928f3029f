"""The script of each framework's page runs as it is printed, and continues when it is started again.

Ray, W&B and MLflow take long to start, so their scripts start once here: `test_ray` and `test_loggers` restart
them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
OFFLINE = {
    "WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db",
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}  # fmt: skip


def blocks(document):
    return re.findall(r"```python\n(.*?)```", (DOCS / f"{document}.md").read_text(), re.DOTALL)


def runs(script, folder, starts):
    (folder / "train.py").write_text(script)
    for expected in ("starts at iteration 0", "resumed from iteration")[:starts]:
        command = [sys.executable, "train.py"]
        environment = os.environ | OFFLINE
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=800
        )
        assert ended.returncode == 0, ended.stderr
        assert expected in ended.stderr


@pytest.mark.parametrize(
    ("document", "number", "starts"),
    [
        ("accelerate", 0, 2), ("transformers", 0, 2), ("lightning", 0, 2), ("lightning", 1, 2), ("ray", 0, 1),
        ("loggers", 0, 2),
    ],
)  # fmt: skip
def test_the_script_of_a_page_runs_and_continues(document, number, starts, tmp_path):
    runs(blocks(document)[number], tmp_path, starts)


@pytest.mark.parametrize(("number", "starts"), [(1, 1), (2, 1), (3, 2)], ids=["wandb", "mlflow", "other"])
def test_the_lines_of_a_logger_run_in_the_loop_of_the_page(number, starts, tmp_path):
    """The lines of another logger replace those of TensorBoard, in fewer iterations."""
    script, lines = blocks("loggers")[0], blocks("loggers")[number].splitlines()
    log = [line for line in lines if line.startswith("run.log")]
    begin = [line for line in lines if line not in log]
    replaced = {
        "from holdfast.integrations.tensorboard import SummaryWriter\n": "",
        'writer = SummaryWriter(session, "runs/regression")\n': "".join(f"{line}\n" for line in begin),
        '    writer.add_scalar("loss", loss.item(), session.iteration + 1)\n': "".join(
            f"    {line}\n" for line in log
        ),
        "< 1000": "< 50",
    }
    for old, new in replaced.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    runs(script, tmp_path, starts)
