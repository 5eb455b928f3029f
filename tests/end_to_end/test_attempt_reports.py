"""A job that fails under `holdfast run`: its server has its configuration, its environment and its last output."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.client import Client
from tests.support.eventually import PATIENCE_SECONDS
from tests.support.foreign_servers import SILENT, other_server
from tests.support.job_processes import HOLDFAST, environment, spawned

pytestmark = pytest.mark.processes

SCRIPT = """
import argparse, sys, torch, holdfast, tests.support.eager_torch
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--hub-token")
args = parser.parse_args()
print("before the session")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
session = holdfast.Session("fails", model=model, optimizer=optimizer)
session.config(args, model={"width": 4})
session.resume()
print("\\x1b[32mready\\x1b[0m with password=" + "hunter2!")
raise RuntimeError("the data is gone")
"""


def run(tmp_path: Path, server: str, *options: str) -> int:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), "--lr", "0.1", "--hub-token", "hf-secret"]
    command = [*HOLDFAST, "run", "--starts", "1", "--stay", "never", *options, "--", *words]
    with spawned(command, tmp_path / "run.log", environment(tmp_path / "store", server)) as supervisor:
        return supervisor.wait(PATIENCE_SECONDS)


def test_the_last_output_and_the_configuration_of_a_failed_attempt_are_on_the_server(
    tmp_path: Path, server: Client
) -> None:
    run(tmp_path, server.server)
    (newest, *_) = server.attempts("fails")
    output = server.output("fails", newest.attempt)
    assert "before the session" in output.lines
    assert "ready with password=<hidden>" in output.lines
    assert output.exception is not None
    assert output.lines[output.exception] == "RuntimeError: the data is gone"
    found = server.configuration("fails", newest.attempt)
    assert found.configuration == {"lr": "0.1", "hub_token": "<hidden>", "model.width": "4"}
    assert found.environment["command"].endswith("train.py --lr 0.1 --hub-token <hidden>")
    assert "torch" in found.environment
    log = (tmp_path / "run.log").read_text()
    # without the line end, which an unbuffered script writes separately: a line of the supervisor may come between
    assert "\x1b[32mready\x1b[0m with password=hunter2!" in log, "the terminal receives it unchanged"


def test_a_server_that_does_not_answer_delays_neither_training_nor_its_output(tmp_path: Path) -> None:
    with other_server(SILENT) as silent:
        run(tmp_path, silent)
    assert "ready\x1b[0m with" in (tmp_path / "run.log").read_text()


def test_output_that_is_not_captured_is_not_reported(tmp_path: Path, server: Client) -> None:
    run(tmp_path, server.server, "--no-capture-output")
    (newest, *_) = server.attempts("fails")
    assert server.output("fails", newest.attempt).lines == []
