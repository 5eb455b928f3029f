"""The stages of `make cuda-check` on the CPU, and the driver that runs them."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
import torch

from benchmarks.cuda import driver
from benchmarks.cuda.driver import Driver, DriverOptions
from benchmarks.cuda.exact_job import JOB, ExactTraining
from benchmarks.cuda.results import ResultFile, figures_of, status_of, table_of
from benchmarks.cuda.stages import STAGES, Stage
from holdfast.store import open_store

ROOT = Path(__file__).resolve().parents[3]
KNOWN_LIMIT = "writes through .data"
"""A case that shows a limit that the documentation names."""


BY_NAME = ("host", "hash", "managed")


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[ResultFile, list[str]]:
    """The results of all stages on the CPU, and the output of the second of two runs that add up."""
    folder = tmp_path_factory.mktemp("cuda")
    results = folder / "cuda.jsonl"
    for more in (["--results", str(results)], ["--resume", str(results), *(f"--only={name}" for name in BY_NAME)]):
        command = [
            sys.executable, "-m", "benchmarks.cuda", "--device", "cpu", "--small", "--minutes", "14", *more,
            "--folder", str(folder / "memory"), "--disk", str(folder / "disk"),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        table = done.stdout.partition("figures: ")[0]
        assert done.returncode == 0, f"{table[-3000:]}{done.stderr[-3000:]}"
    assert list((folder / "memory").iterdir()) == []
    return ResultFile.read(results), done.stdout.splitlines()


@pytest.mark.processes
@pytest.mark.parametrize("stage", [each.name for each in STAGES if each.name != "tests"])
def test_a_stage_runs_on_the_cpu_and_misses_no_goal(stage: str, small_run: tuple[ResultFile, list[str]]) -> None:
    results, output = small_run
    cases = results.cases(stage)
    assert cases
    missed = {name for name, row in cases.items() if "error" in row or row["met"] is False}
    assert missed <= {KNOWN_LIMIT}
    assert any(line.startswith(stage) for line in output)
    assert f"{stage}.{next(iter(cases))}.met".replace(" ", "_") in output[-1]


def test_the_stages_take_less_than_nine_minutes_by_their_estimates() -> None:
    chosen = [stage for stage in STAGES if not stage.by_name]
    assert sum(stage.estimate_seconds for stage in chosen) < 9 * 60
    assert all(stage.estimate_seconds < stage.limit_seconds for stage in STAGES)


def test_a_job_that_is_killed_before_its_first_checkpoint_begins_as_it_did(tmp_path: Path) -> None:
    open_store(tmp_path / "killed").acquire_attempt(JOB, "killed")
    found = []
    for start, name in enumerate(("undisturbed", "killed")):
        training = ExactTraining(tmp_path / name, "cpu", start=start, workers=0)
        records = training.records()
        found.append(next(records))
        records.close()
        training.session.close()
    assert found[0] == found[1]


SCRIPTS = {
    "exact": """
        import json, time
        print(json.dumps({"case": "first", "values": {"count": 1}, "met": True, "note": ""}), flush=True)
        time.sleep(600)
        """,
    "torn": """
        import json, os
        print("output of a library")
        print(json.dumps({"case": "first", "values": {}, "met": False, "note": "why"}), flush=True)
        os.abort()
        """,
    "copy": """
        import json
        print(json.dumps({"case": "first", "error": "RuntimeError: broken"}), flush=True)
        """,
    "many": """
        import json
        print(json.dumps({"case": "first", "values": {"count": 2}, "met": True, "note": ""}), flush=True)
        """,
}


class ScriptedDriver(Driver):
    """Runs a script in the place of each stage."""

    scripts = SCRIPTS

    def _command(self, stage: Stage, folder: Path, disk: Path) -> list[str]:
        return [sys.executable, "-c", textwrap.dedent(self.scripts[stage.name])]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs the scripts, each with a limit of a second, over the results of earlier runs."""
    monkeypatch.setattr(driver, "by_name", lambda name: Stage(name, "", "", 0, 1, module=name))
    monkeypatch.setattr(driver, "facts", lambda *_: {"name": "none"})

    def run(minutes: float = 9.0, **scripts: str) -> tuple[int, ResultFile]:
        monkeypatch.setattr(ScriptedDriver, "scripts", SCRIPTS | scripts)
        options = DriverOptions(
            device="cpu", small=False, minutes=minutes, names=list(SCRIPTS), folder=tmp_path / "memory",
            disk=tmp_path / "disk",
        )  # fmt: skip
        status = ScriptedDriver(options, ResultFile.read(tmp_path / "cuda.jsonl")).run()
        return status, ResultFile.read(tmp_path / "cuda.jsonl")

    return run


def test_the_next_stage_runs_whatever_happened_before(scripted, capsys: pytest.CaptureFixture[str]) -> None:
    status, results = scripted()
    assert status == 1
    ends = {name: (results.end(name) or {})["end"] for name in SCRIPTS}
    assert ends == {"exact": "time limit", "torn": "exit status -6", "copy": "failed", "many": "complete"}
    assert status_of(results, "exact") == "met, incomplete"
    assert status_of(results, "torn") == "MISSED, incomplete"
    figures = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("figures: "))
    assert figures == figures_of(results)
    assert figures["exact.first.count"] == 1
    assert figures["copy.first.met"] is False


def test_a_second_run_adds_what_is_missing(scripted) -> None:
    scripted()
    mended = 'import json; print(json.dumps({"case": "second", "values": {}, "met": True, "note": ""}))'
    status, results = scripted(exact=mended, torn=mended, copy=SCRIPTS["many"], many="raise AssertionError")
    assert status == 0
    assert [status_of(results, name) for name in SCRIPTS] == ["met", "MISSED", "met", "met"]
    assert list(results.cases("exact")) == ["first", "second"]
    assert "error" not in results.cases("copy")["first"]


def test_the_table_is_printed_when_no_time_is_left(scripted, capsys: pytest.CaptureFixture[str]) -> None:
    status, results = scripted(minutes=0.1)
    assert status == 1
    assert status_of(results, "many") == "not run: no time was left"
    assert all(f"\n{stage.name}" in "\n" + "\n".join(table_of(results)) for stage in STAGES)
    assert "figures: " in capsys.readouterr().out


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "cuda.jsonl"
    file.write_text('{"stage": "copy", "case": "1 GB", "values": {}, "met": null}\n{"stage": "copy", "ca')
    assert ResultFile.read(file).done("copy") == ["1 GB"]


def test_the_source_tree_runs_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    environment = driver.environment_of(tmp_path, "cpu")
    program = (
        "import holdfast, importlib.metadata; print(importlib.metadata.version('holdfast'), holdfast.__file__)"
    )
    said = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert said.split() == ["0", str(ROOT / "agent/holdfast/__init__.py")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_machine_without_a_device_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.cuda", "--results", str(tmp_path / "cuda.jsonl")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "torch finds no CUDA device here" in done.stderr
