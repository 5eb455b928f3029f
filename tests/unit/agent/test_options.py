"""Settings: how they are read, and that every place that lists them agrees with their declaration."""

from __future__ import annotations

import inspect
import itertools
import logging
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from holdfast.config import SETTINGS, Config, misspelled_variables, variable


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
    with pytest.raises(
        ValueError, match=r"HOLDFAST_RETENTION: retention 'lst 3': 'lst 3' is not a rule: use last"
    ):
        stays()


def test_the_session_takes_every_setting_by_keyword_and_nothing_else():
    parameters = inspect.signature(holdfast.Session.__init__).parameters.values()
    taken = [
        each
        for each in parameters
        if each.kind is inspect.Parameter.KEYWORD_ONLY and each.name not in ("state", "keep_settings")
    ]
    assert sorted(each.name for each in taken) == sorted(SETTINGS)
    assert {each.default for each in taken} == {None}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_docstring_of_the_session_describes_a_setting_and_its_variable(name):
    described = re.search(rf"^    {name}: (.*?)(?=^    \S|\Z)", inspect.getdoc(holdfast.Session), re.M | re.S)
    assert described is not None
    assert re.search(rf"\b{variable(name)}\b", described[1])


def test_the_settings_that_run_sets_are_declared():
    said = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output
    sets = re.findall(r"--(\w+) .*Sets (HOLDFAST_\w+)", said)
    assert [(name, variable(name)) for name in ("store", "server", "budget")] == sets


def test_a_variable_that_is_almost_that_of_a_setting_is_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(variable("evry"), "5")
    monkeypatch.setenv(variable("db"), "sqlite:///a")
    with (
        caplog.at_level(logging.WARNING),
        holdfast.Session("job", store=tmp_path, v=holdfast.Variables()) as session,
    ):
        session.resume()
        session.resume()
    (warning,) = [each.getMessage() for each in caplog.records if "HOLDFAST_" in each.getMessage()]
    assert warning.endswith(f"{variable('evry')} is not a setting and has no effect: did you mean HOLDFAST_EVERY?")


def test_no_variable_that_holdfast_reads_is_reported_as_misspelled():
    root = Path(__file__).parents[3]
    found = set()
    for folder, suffix in itertools.product(
        ("agent", "server", "tools", "tests", "benchmarks", "docs", "examples", "deploy"),
        ("py", "md", "yml", "yaml"),
    ):
        for path in (root / folder).rglob(f"*.{suffix}"):
            found.update(re.findall(r"\bHOLDFAST_[A-Z0-9_]+\b", path.read_text()))
    found.update(re.findall(r"\bHOLDFAST_[A-Z0-9_]+\b", (root / "docker-compose.yml").read_text()))
    assert {"HOLDFAST_DB", "HOLDFAST_TEST_SEED", "HOLDFAST_OIDC_ISSUER"} <= found
    assert misspelled_variables(found) == []
