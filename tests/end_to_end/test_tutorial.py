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
PAUSE = "time.sleep(0.02)"
LOSS = re.compile(r"^iteration (\d+): loss (\S+)$", re.MULTILINE)


def script(folder: Path, pause: str = "time.sleep(0.001)", epochs: int = 10) -> Path:
    """Shorter than on the page. To be killed in the middle, it needs the pause of the page in each iteration."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert PAUSE in block
    folder.mkdir(exist_ok=True)
    path = folder / "train.py"
    path.write_text(block.replace(PAUSE, pause).replace("epochs=1000", f"epochs={epochs}"))
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
    killed = script(tmp_path / "killed", PAUSE)
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
        [sys.executable, script(killed.parent).name],
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
