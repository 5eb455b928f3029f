"""The configuration of an attempt: flattened, bounded, masked, and reported."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from holdfast.protocol.wire import MAX_CONFIGURATION_ENTRIES, MAX_CONFIGURATION_VALUE, ConfigurationReport
from holdfast.system.masking import MASK
from holdfast.telemetry import configuration
from holdfast.telemetry.configuration import code_changes, environment, flatten
from holdfast.telemetry.reporter import Reporter, TrainingPosition


@dataclass
class ModelConfig:
    depth: int = 12
    activation: object = torch.nn.functional.gelu


@dataclass
class TrainConfig:
    lr: float = 3e-4
    model: ModelConfig = field(default_factory=ModelConfig)


class Unresolvable(Mapping[str, object]):
    """A mapping with a value that cannot be read, as an interpolation of OmegaConf."""

    def __getitem__(self, key: str) -> object:
        if key == "bad":
            raise LookupError(key)
        return 1

    def __iter__(self) -> Iterator[str]:
        return iter(("good", "bad"))

    def __len__(self) -> int:
        return 2


def test_nested_values_are_flattened_with_dots() -> None:
    found = flatten(TrainConfig())
    assert found["lr"] == "0.0003"
    assert found["model.depth"] == "12"
    assert "0x" not in found["model.activation"], "an address would differ in each attempt"
    assert flatten(argparse.Namespace(a=1, b={"c": [1, 2]})) == {"a": "1", "b.c": "[1, 2]"}


def test_a_value_that_cannot_be_read_does_not_prevent_the_others() -> None:
    assert flatten(Unresolvable()) == {"good": "1", "bad": "unreadable: LookupError"}


def test_values_of_secret_names_are_masked() -> None:
    assert flatten({"hub": {"token": "abc"}, "max_tokens": 5, "password": ""}) == {
        "hub.token": MASK, "max_tokens": "5", "password": "",
    }  # fmt: skip


def test_a_configuration_is_bounded() -> None:
    found = flatten({f"n{number}": "x" * 10_000 for number in range(2_000)})
    assert len(found) == MAX_CONFIGURATION_ENTRIES
    assert {len(value) for value in found.values()} == {MAX_CONFIGURATION_VALUE}
    assert flatten({"weights": torch.zeros(1000, 10)}) == {"weights": "Tensor (1000, 10)"}
    endless: dict[str, object] = {}
    endless["again"] = endless
    assert len(flatten(endless)) == 1


def test_what_has_no_names_is_refused() -> None:
    with pytest.raises(TypeError, match=r"config\(int\): give keywords, a mapping"):
        flatten(3)


def test_the_environment_has_the_fingerprint_and_the_command() -> None:
    found = environment()
    assert found["torch"] == torch.__version__
    assert {"host", "system", "command", "directory", "ranks", "holdfast"} <= found.keys()


def test_uncommitted_changes_of_the_script_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    script = tmp_path / "train.py"
    script.write_text("pass\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(script)))  # type: ignore[arg-type]
    assert code_changes() == {"code changes": "none"}
    script.write_text("pass  # changed\n")
    assert code_changes() == {"code changes": "1 file: train.py"}


def test_without_a_repository_or_an_answer_in_time_nothing_is_said_of_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(tmp_path / "x.py")))  # type: ignore[arg-type]
    assert code_changes() == {}
    monkeypatch.setattr(configuration, "GIT_SECONDS", 0.0)
    assert code_changes() == {}


class Events:
    has_server = True

    def __init__(self) -> None:
        self.events: list[object] = []

    def event(self, event: object) -> None:
        self.events.append(event)


def test_values_from_before_and_after_the_start_are_reported_together() -> None:
    reporter, link = Reporter("job", TrainingPosition()), Events()
    reporter.configure({"lr": "1"})
    reporter.connect(link)  # type: ignore[arg-type]
    reporter.attempt_began(None, {}, [], 1)
    reporter.configure({"depth": "12"})
    reporter.configure({"depth": "12"})
    reports = [event for event in link.events if isinstance(event, ConfigurationReport)]
    assert [report.values for report in reports if report.section == "configuration"] == [
        {"lr": "1"},
        {"lr": "1", "depth": "12"},
    ], "what does not change is not reported again"
    assert any(report.section == "environment" and "torch" in report.values for report in reports)
