"""What a state was trained with is noted, and told where it is another at a resume."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint import restore
from holdfast.store import open_store
from holdfast.telemetry import fingerprint as module
from holdfast.telemetry.fingerprint import difference, fingerprint
from tests.support.tiny_job import Trainer


def test_it_holds_versions_threads_and_flags_as_they_are_now(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = fingerprint()
    assert found["torch"] == torch.__version__
    assert found["threads"] == str(torch.get_num_threads())
    assert (found["OMP_NUM_THREADS"], found["ranks"]) == ("3", "1")
    assert found["deterministic algorithms"] == "False"
    torch.use_deterministic_algorithms(True)
    try:
        assert fingerprint()["deterministic algorithms"] == "True"
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_difference_is_told_in_one_sentence():
    then = {"torch": "2.12.0", "threads": "8", "python": "3.11.2"}
    now = {"torch": "2.13.0", "threads": "2", "python": "3.11.2", "OMP_NUM_THREADS": "2"}
    assert difference(then, now) == (
        "resume is valid, bit-exactness is not promised: "
        "torch 2.12.0 → 2.13.0; threads 8 → 2; OMP_NUM_THREADS unset → 2"
    )
    assert difference(then, dict(then)) is None
    assert difference({}, now) is None  # an earlier Holdfast noted nothing


def test_a_resume_under_other_conditions_says_so_and_one_under_the_same_does_not(tmp_path, caplog, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    Trainer(tmp_path).run(until=3).crash()
    store = open_store(tmp_path)
    saved = restore.manifest(store, "job", store.checkpoints("job")[-1])
    assert saved.fingerprint == fingerprint()
    Trainer(tmp_path).run(until=6).crash()
    assert "bit-exactness" not in caplog.text
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        trainer = Trainer(tmp_path)
        trainer.session.resume()
        trainer.crash()
    finally:
        torch.set_num_threads(before)
    assert caplog.text.count("resume is valid, bit-exactness is not promised: ") == 1
    assert f"threads {before} → {before + 1}; OMP_NUM_THREADS unset → 77" in caplog.text


def test_the_scripts_commit_is_read_from_its_repository(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    (tmp_path / "in").mkdir()
    script = tmp_path / "in" / "train.py"
    script.write_text("")
    assert module._commit(None) is None
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert module._commit(str(script)) == head[:12]
    subprocess.run([*git, "pack-refs", "--all"], check=True)
    assert module._commit(str(script)) == head[:12]
    subprocess.run([*git, "worktree", "add", "-q", str(tmp_path / "tree"), "-b", "other"], check=True)
    assert module._commit(str(tmp_path / "tree" / "train.py")) == head[:12]
    subprocess.run([*git, "checkout", "-q", "--detach"], check=True)
    assert module._commit(str(script)) == head[:12]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release", "570.124.06"),
        ("something else", "unknown"),
    ],
)
def test_the_driver_is_read_from_the_kernels_own_account(text, version, tmp_path, monkeypatch):
    file = tmp_path / "version"
    file.write_text(text)
    monkeypatch.setattr(module, "DRIVER", Path(file))
    assert module._driver() == version


@pytest.mark.processes
def test_a_script_that_sets_precision_the_new_way_is_no_trouble():
    program = (
        "import torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "from holdfast.telemetry.fingerprint import fingerprint; print(fingerprint()['threads'])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
