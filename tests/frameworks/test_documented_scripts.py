"""The script of each framework's page runs as it is printed, and continues when it is started again."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("document", "number"), [("accelerate", 0), ("transformers", 0), ("lightning", 0), ("lightning", 1)]
)
def test_the_script_of_a_page_runs_twice(document, number, tmp_path):
    script = re.findall(r"```python\n(.*?)```", (DOCS / f"{document}.md").read_text(), re.DOTALL)[number]
    (tmp_path / "train.py").write_text(script)
    for expected in ("starts at iteration 0", "resumed from iteration"):
        command = [sys.executable, "train.py"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert expected in ended.stderr
