"""The commands of README's quick start and of the tutorial, with what is installed from the wheels alone."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.client import Client
from tests.end_to_end.test_tutorial import script
from tests.support.eventually import eventually
from tests.support.job_processes import address_of, spawned
from tests.support.wheels import ROOT, clean_environment, run
from tests.support.wheels import installed as installed

PAGES = {"README.md": "char-gpt", "docs/tutorial.md": "tutorial"}
COMMAND = re.compile(r"^\s*\$ (.*)$", re.MULTILINE)
LOSS = re.compile(r"^iteration (\d+): loss (\S+)$", re.MULTILINE)
RESUMED = re.compile(r"attempt (\d+) resumed from iteration")


class Terminal:
    """Runs the commands of a page outside of the repository. Each start of a script kills the one before."""

    def __init__(self, python: Path, folder: Path, job: str) -> None:
        self.folder, self.job = folder, job
        self.env = clean_environment() | {"PATH": f"{python.parent}:{os.environ['PATH']}"}
        self.client = Client("http://127.0.0.1:9")
        self.trainer: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self._processes = ExitStack()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self._processes.close()

    @property
    def said(self) -> str:
        """Everything that the script has said, in all of its attempts."""
        return (self.folder / "trainer.log").read_text()

    def run(self, command: str) -> None:
        words = shlex.split(command.removeprefix("export "), comments=True)
        while words and (given := re.match(r"(HOLDFAST_\w+)=(.*)", words[0])):
            self.env[given[1]] = self.client.server if given[1] == "HOLDFAST_SERVER" else given[2]
            words = words[1:]
        match words:
            case []:
                pass
            case ["holdfast", "serve"]:
                self._serve()
            case ["python", *_]:
                self._train(words)
            case ["holdfast", "restore", self.job, _, "--nearest"]:
                self._restore(self.job)
            case ["holdfast", "undo", self.job]:
                assert re.search(r"^restored .*on lineage 3;", self._holdfast("undo", self.job), re.MULTILINE)
            case ["holdfast", *arguments]:
                assert self._holdfast(*arguments)
            case _:
                pytest.fail(f"the page has a command that this test does not know: {command}")

    def _serve(self) -> None:
        log = self.folder / "server.log"
        words = ["holdfast", "serve", "--port", "0", "--db", str(self.folder / "holdfast.db")]
        self._start(words, log)
        eventually(lambda: address_of(log), "the server to say where it is")
        self.client = Client(str(address_of(log)))

    def _train(self, words: list[str]) -> None:
        for _ in range(2 if self.starts == 0 else 1):  # killed once at least, and run again with the same command
            if self.trainer is not None:
                self.trainer.kill()
                assert self.trainer.wait() == -signal.SIGKILL
            self.trainer, self.starts = self._start(words, self.folder / "trainer.log"), self.starts + 1
            self._await_losses(len(LOSS.findall(self.said)))

    def _await_losses(self, before: int) -> None:
        """Wait until the attempt has trained on, and the store has a checkpoint."""

        def has_trained() -> bool:
            assert self.trainer is not None
            assert self.trainer.poll() is None, self.said
            durable = any(self.folder.glob(f"checkpoints/{self.job}/0*/manifest.json"))
            return durable and len(LOSS.findall(self.said)) > before

        eventually(has_trained, "a checkpoint, and a loss of this attempt")

    def _restore(self, job: str) -> None:
        def between() -> list[int]:
            """Return iterations without a checkpoint that follow one."""
            taken = sorted(row.iteration for row in self.client.checkpoints(job) if row.restorable)
            return [earlier + 1 for earlier, later in pairwise(taken) if later > earlier + 1]

        eventually(between, "two checkpoints")
        iteration = between()[-1]
        said = self._holdfast("restore", job, str(iteration), "--nearest")
        assert f"{job} has no checkpoint at iteration {iteration}: restoring the nearest earlier one" in said
        assert re.search(r"^restored .*on lineage 2;", said, re.MULTILINE)

    def _start(self, words: list[str], log: Path) -> subprocess.Popen[bytes]:
        return self._processes.enter_context(spawned(words, log, self.env, cwd=self.folder))

    def _holdfast(self, *arguments: str) -> str:
        return run("holdfast", *arguments, env=self.env, cwd=self.folder, stderr=subprocess.STDOUT)


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def terminal(page: str, installed: Path, tmp_path: Path) -> Iterator[Terminal]:
    script(tmp_path, "time.sleep(0.02)", epochs=100)
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples/char_gpt.py", tmp_path / "examples")
    with Terminal(installed, tmp_path, PAGES[page]) as terminal:
        yield terminal


@pytest.mark.processes
def test_the_commands_of_a_page_do_what_it_says(page: str, terminal: Terminal) -> None:
    commands = COMMAND.findall((ROOT / page).read_text())
    kinds = [shlex.split(command)[:2][-1] for command in commands]
    assert {"serve", "restore", "undo"} <= set(kinds), "the page has the commands that it is tried for"
    for command in commands:
        terminal.run(command)
    attempts = list(map(int, RESUMED.findall(terminal.said)))
    assert attempts == list(range(2, terminal.starts + 1))
    losses: dict[str, str] = {}
    for iteration, loss in LOSS.findall(terminal.said):
        assert losses.setdefault(iteration, loss) == loss, "a repeated iteration has the same loss"
