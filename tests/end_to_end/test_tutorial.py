"""The script of docs/tutorial.md is killed and resumes with the losses of an undisturbed run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from holdfast.store import open_store

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
LOSS = re.compile(r"^iteration (\d+): loss (\S+)$", re.MULTILINE)


def script(folder: Path) -> Path:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    folder.mkdir()
    path = folder / "train.py"
    # as long as it takes to be killed in the middle, and shorter than on the page
    path.write_text(block.replace("time.sleep(0.02)", "time.sleep(0.001)").replace("epochs=100", "epochs=10"))
    return path


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}


def test_the_script_of_the_tutorial_resumes_with_the_same_losses(tmp_path: Path) -> None:
    plain = script(tmp_path / "plain")
    expected = subprocess.run(
        [sys.executable, plain.name],
        cwd=plain.parent,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    killed = script(tmp_path / "killed")
    with subprocess.Popen(
        [sys.executable, killed.name], cwd=killed.parent, env=environment(), stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        before = []
        for line in trainer.stdout:
            before.append(line)
            if open_store(killed.parent / "checkpoints").checkpoints("tutorial"):
                trainer.send_signal(signal.SIGKILL)
                break
        assert len(before) < len(LOSS.findall(expected)), "it was killed in the middle"
    resumed = subprocess.run(
        [sys.executable, killed.name],
        cwd=killed.parent,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "attempt 2 resumed from iteration" in resumed.stderr
    losses, after = dict(LOSS.findall(expected)), dict(LOSS.findall(resumed.stdout))
    assert dict(LOSS.findall("".join(before))).items() <= losses.items()
    assert after
    assert after.items() <= losses.items()
    assert max(map(int, after)) == max(map(int, losses)) == 600
