"""The loops of docs/training.md, run as they are printed there."""

import contextlib
from pathlib import Path

import pytest
import torch

from holdfast.store import open_store

PAGE = Path(__file__).resolve().parents[3] / "docs" / "training.md"


@pytest.fixture
def settings(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("HOLDFAST_EVERY", "5")
    return monkeypatch


def code_under(heading):
    return PAGE.read_text().split(f"## {heading}\n", 1)[1].split("```python\n", 1)[1].split("```", 1)[0]


def run(code, ending):
    namespace = execute(code, ending)
    return namespace["session"].iteration, namespace["loop"].history, namespace["loop"].loss_sum


def execute(code, ending):
    namespace = {}
    with contextlib.suppress(KeyboardInterrupt):
        exec(compile(code, str(PAGE), "exec"), namespace)
    namespace["session"]._close(ending)
    return namespace


def test_state_carried_between_iterations_resumes_exactly(settings, tmp_path):
    code = code_under("State carried between iterations")
    settings.setenv("HOLDFAST_STORE", str(tmp_path / "whole"))
    whole = run(code, "finished")
    assert len(whole[1]) == whole[0] == 100
    settings.setenv("HOLDFAST_STORE", str(tmp_path / "cut"))
    for last in (23, 64):
        run(code.replace("< 100", f"< {last}"), "SIGKILL")
    resumed = run(code.replace("manual_seed(0)", "manual_seed(1)"), "finished")
    assert resumed == whole
    assert run(code, "finished") == whole, "a finished job trains no further iteration"


@pytest.mark.parametrize("killed_at", [7, 12, 29])  # an epoch has twelve iterations
def test_a_loop_over_epochs_of_its_own_resumes_exactly(settings, tmp_path, killed_at):
    code = code_under("Iterating over a loader yourself")
    settings.setenv("HOLDFAST_EVERY", "1")
    settings.setenv("HOLDFAST_STORE", str(tmp_path / "whole"))
    whole = execute(code, "finished")
    settings.setenv("HOLDFAST_STORE", str(tmp_path / "cut"))
    step = "        session.step(loss=loss)\n"
    killed = f"{step}        if session.iteration == {killed_at}: raise KeyboardInterrupt\n"
    assert execute(code.replace(step, killed), "SIGKILL")["session"].iteration == killed_at
    other = code.replace(
        "model = torch", "torch.rand(5)\nmodel = torch"
    )  # its weights are those of the checkpoint
    resumed = execute(other, "finished")
    assert resumed["session"].iteration == whole["session"].iteration == 36
    assert resumed["sums"].loss == whole["sums"].loss


@pytest.mark.parametrize("killed_at", [4, 21])
def test_gradient_accumulation_ends_and_resumes_exactly_with_batches_left(settings, tmp_path, killed_at):
    code = code_under("Gradient accumulation").replace("session.close()\n", "")
    settings.setenv("HOLDFAST_EVERY", "1")
    settings.setenv("HOLDFAST_STORE", str(tmp_path / "whole"))
    whole = execute(code, "finished")
    assert whole["session"].iteration == 23, "90 batches, 4 per update"
    assert open_store(str(tmp_path / "whole")).checkpoints("accumulation")[-1] == "000000000023-1"
    settings.setenv("HOLDFAST_STORE", str(tmp_path / "cut"))
    step = "        session.step(loss=loss)\n"
    killed = f"{step}        if session.iteration == {killed_at}: raise KeyboardInterrupt\n"
    assert execute(code.replace(step, killed), "SIGKILL")["session"].iteration == killed_at
    resumed = execute(code.replace("model = torch", "torch.rand(5)\nmodel = torch"), "finished")
    assert resumed["session"].iteration == 23
    assert torch.equal(resumed["model"].weight, whole["model"].weight)
