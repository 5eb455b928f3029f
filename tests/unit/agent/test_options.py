"""Settings: how they are read, and that every place that lists them agrees with their declaration."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from holdfast.config import SETTINGS, Config, variable

DOCS = Path(__file__).resolve().parents[3] / "docs" / "training.md"


def read(**given):
    return Config.from_arguments_and_environment(**dict.fromkeys(SETTINGS) | given)


@pytest.fixture(autouse=True)
def a_user(monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    for name in ("SLURM_JOB_USER", "HOLDFAST_OWNER", "HOLDFAST_LABELS"):
        monkeypatch.delenv(name, raising=False)


def test_a_job_is_owned_by_whoever_it_runs_as_unless_somebody_says_otherwise(monkeypatch):
    assert read().owner == "ada"
    monkeypatch.setenv("SLURM_JOB_USER", "grace")
    assert read().owner == "grace"
    monkeypatch.setenv("HOLDFAST_OWNER", "the night shift")
    assert read().owner == "the night shift"
    assert read(owner="me").owner == "me"


def test_a_user_without_a_name_owns_nothing(monkeypatch):
    def unknown():
        raise KeyError("getpwuid(): uid not found: 1000")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert read().owner == ""


def test_labels_are_given_as_they_are_or_as_text(monkeypatch):
    assert read().labels == {}
    assert read(labels={"team": "vision", "shots": 3}).labels == {"team": "vision", "shots": "3"}
    monkeypatch.setenv("HOLDFAST_LABELS", "team = vision, data=v3=final,dry-run, ")
    assert read().labels == {"team": "vision", "data": "v3=final", "dry-run": ""}


@pytest.mark.parametrize("labels", [{"x" * 65: "a"}, {"a": "x" * 65}, {"": "a"}, {str(n): "" for n in range(17)}])
def test_labels_that_cannot_be_are_refused_in_words(labels):
    with pytest.raises(ValueError, match="give at most 16, as in team=vision"):
        read(labels=labels)


def test_keep_is_a_rule_of_retention_and_a_rule_comes_before_it(monkeypatch):
    def stays(**given):
        return str(read(**given).retention_rules)

    assert stays() == "spaced 12"
    monkeypatch.setenv("HOLDFAST_KEEP", "5")
    assert (stays(), stays(keep=7), stays(retention="last 3")) == ("spaced 5", "spaced 7", "last 3")
    monkeypatch.setenv("HOLDFAST_RETENTION", "every 100, size 2GB")
    assert (stays(), stays(keep=7)) == ("every 100, size 2GB", "spaced 7")
    with pytest.raises(ValueError, match="keep=7 and retention='last 3': give one of them"):
        stays(keep=7, retention="last 3")
    monkeypatch.setenv("HOLDFAST_RETENTION", "lst 3")
    with pytest.raises(ValueError, match=r"HOLDFAST_RETENTION: retention 'lst 3': 'lst 3' is no rule: write last"):
        stays()


def test_the_session_takes_every_setting_by_keyword_and_nothing_else():
    parameters = inspect.signature(holdfast.Session.__init__).parameters.values()
    taken = [each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY and each.name != "state"]
    assert sorted(each.name for each in taken) == sorted(SETTINGS)
    assert {each.default for each in taken} == {None}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_docstring_of_the_session_describes_a_setting_and_its_variable(name):
    described = re.search(rf"^    {name}: (.*?)(?=^    \S|\Z)", inspect.getdoc(holdfast.Session), re.M | re.S)
    assert described is not None
    assert re.search(rf"\b{variable(name)}\b", described[1])


def test_the_documentation_lists_the_settings_as_they_are_declared():
    table = DOCS.read_text().partition("## Settings")[2].partition("\n\n`session.checkpoint")[0]
    assert [line for line in table.splitlines() if line.startswith("| `")] == [
        f"| `{each.name}` | `{variable(each.name)}` | {each.metadata['shown']} | {each.metadata['meaning']} |"
        for each in dataclasses.fields(Config)
    ]


def test_the_settings_that_run_sets_are_declared():
    said = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output
    sets = re.findall(r"--(\w+) .*Sets (HOLDFAST_\w+)", said)
    assert [(name, variable(name)) for name in ("store", "server", "budget")] == sets
