"""A plain script of somebody else's shape becomes resumable by a handful of lines, and then is exact."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import holdfast
from tests.support.exact_job import ScriptError
from tests.support.training_log import digest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
EPOCHS, BATCHES = 2, 32


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("HOLDFAST_STORE", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_EVERY", "1")
    return load("gan")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.EPOCHS = EPOCHS
    return module


def test_six_lines_make_it_resumable() -> None:
    plain, resumable = (
        [
            line
            for line in (EXAMPLES / name).read_text().partition("from __future__")[2].splitlines()
            if line.strip()
        ]
        for name in ("gan_plain.py", "gan.py")
    )
    difference = list(difflib.ndiff(plain, resumable))
    written = [line for line in difference if line.startswith("+ ")]
    deleted = [line for line in difference if line.startswith("- ")]
    assert len(written) <= 6
    assert len(deleted) <= 2  # a line that is changed is one of each


def test_it_ends_with_the_same_weights_whatever_kills_it(script, tmp_path, monkeypatch, capsys):
    step, begin = holdfast.Session.step, holdfast.Session.__init__
    deaths: list[int] = []
    sessions: list[holdfast.Session] = []

    def noted(session: holdfast.Session, *args: object, **options: object) -> None:
        begin(session, *args, **options)
        sessions.append(session)

    def dying(session: holdfast.Session, **metrics: object) -> None:
        step(session, **metrics)
        session.wait(300)
        if deaths and session.iteration == deaths[0]:
            del deaths[0]
            raise ScriptError

    monkeypatch.setattr(holdfast.Session, "__init__", noted)
    monkeypatch.setattr(holdfast.Session, "step", dying)

    def weights() -> str:
        try:
            return digest(script.train().state_dict())
        finally:
            sessions.pop()._close("SIGKILL")

    monkeypatch.setenv("HOLDFAST_STORE", str(tmp_path / "alone"))
    expected, told = weights(), capsys.readouterr().out
    monkeypatch.setenv("HOLDFAST_STORE", str(tmp_path / "killed"))
    deaths += [1, 5, BATCHES, BATCHES + 1, 2 * BATCHES]
    for _ in range(5):
        with pytest.raises(ScriptError):
            weights()
    assert (weights(), capsys.readouterr().out) == (expected, told)


def test_the_plain_script_runs_as_it_is(capsys):
    load("gan_plain").train()
    assert capsys.readouterr().out.count("away from the ring") == EPOCHS
