from __future__ import annotations

import pytest

from holdfast.options import Options

NOTHING = dict.fromkeys(
    ("store", "server", "token", "budget", "policy", "every", "mtbf", "checkpoints", "iterations", "keep", "slots",
     "retention", "rewinds",     "backend", "spread", "debug", "owner", "labels", "grace")
)  # fmt: skip


@pytest.fixture(autouse=True)
def a_user(monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    for name in ("SLURM_JOB_USER", "HOLDFAST_OWNER", "HOLDFAST_LABELS"):
        monkeypatch.delenv(name, raising=False)


def test_a_job_is_owned_by_whoever_it_runs_as_unless_somebody_says_otherwise(monkeypatch):
    assert Options.weigh(**NOTHING).owner == "ada"
    monkeypatch.setenv("SLURM_JOB_USER", "grace")
    assert Options.weigh(**NOTHING).owner == "grace"
    monkeypatch.setenv("HOLDFAST_OWNER", "the night shift")
    assert Options.weigh(**NOTHING).owner == "the night shift"
    assert Options.weigh(**NOTHING | {"owner": "me"}).owner == "me"


def test_a_user_without_a_name_owns_nothing(monkeypatch):
    def unknown():
        raise KeyError("getpwuid(): uid not found: 1000")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert Options.weigh(**NOTHING).owner == ""


def test_labels_are_given_as_they_are_or_as_text(monkeypatch):
    assert Options.weigh(**NOTHING).labels == {}
    assert Options.weigh(**NOTHING | {"labels": {"team": "vision", "shots": 3}}).labels == {
        "team": "vision", "shots": "3",
    }  # fmt: skip
    monkeypatch.setenv("HOLDFAST_LABELS", "team = vision, data=v3=final,dry-run, ")
    assert Options.weigh(**NOTHING).labels == {"team": "vision", "data": "v3=final", "dry-run": ""}


@pytest.mark.parametrize("labels", [{"x" * 65: "a"}, {"a": "x" * 65}, {"": "a"}, {str(n): "" for n in range(17)}])
def test_labels_that_cannot_be_are_refused_in_words(labels):
    with pytest.raises(ValueError, match="give at most 16, as in team=vision"):
        Options.weigh(**NOTHING | {"labels": labels})


def test_keep_is_a_rule_of_retention_and_a_rule_comes_before_it(monkeypatch):
    def stays(**given):
        return str(Options.weigh(**NOTHING | given).retention)

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
