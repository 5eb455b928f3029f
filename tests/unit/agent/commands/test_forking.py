from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from holdfast.store import open_store
from tests.support.fake_server import FakeServer, Holdfast
from tests.support.handmade_checkpoints import commit


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for iteration in (10, 20):
        commit(tmp_path, {"w": torch.zeros(4)}, job="gpt", iteration=iteration)
    return tmp_path


def alone(holdfast: Holdfast, *arguments: object) -> object:
    """Without a server to tell."""
    return holdfast("fork", *arguments, "--server", "")


def test_a_job_is_forked_and_how_to_start_it_is_said(holdfast: Holdfast, store: Path) -> None:
    made = alone(holdfast, "gpt", 10, "try", "--store", store)
    assert made.exit_code == 0, made.stderr
    assert "try begins at iteration 10 of gpt (000000000010-1) in" in made.stdout
    assert 'holdfast.Session("try", ...)' in made.stdout
    again = alone(holdfast, "gpt", 10, "try", "--store", store)
    assert (again.exit_code, "try is already a fork" in again.stdout) == (0, True)
    assert open_store(store).checkpoints("try") == ["000000000010-1"]


def test_the_answer_for_scripts_says_what_was_made_and_whether_it_is_new(holdfast: Holdfast, store: Path) -> None:
    made, again = (
        json.loads(alone(holdfast, "gpt", "latest", "try", "--store", store, "--json").stdout) for _ in range(2)
    )
    assert (made["job"], made["iteration"], made["lineage"], made["new"]) == ("try", 20, 2, True)
    assert made["origin"]["job"] == "gpt"
    assert made["store"] == str(store)
    assert (again["new"], again["origin"]) == (False, made["origin"])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("gpt", "15", "try"), 1, "the nearest earlier one is at iteration 10"),
        (("nobody", "10", "try"), 1, "has no job 'nobody'; it has: gpt"),
        (("gpt", "10", "gpt"), 1, "gpt is the job itself"),
        (("gpt", "10", "a/b"), 2, "job name 'a/b'"),
        (("gpt", "soon", "try"), 2, "give its name"),
    ],
)
def test_what_cannot_be_forked_is_refused_with_the_reason(
    holdfast: Holdfast, store: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    refused = alone(holdfast, *arguments, "--store", store)
    assert (refused.exit_code, said in refused.stderr) == (code, True), refused.stderr
    assert open_store(store).jobs() == ["gpt"]


def test_a_store_that_is_not_there_is_named(holdfast: Holdfast, store: Path) -> None:
    refused = alone(holdfast, "gpt", "10", "try", "--store", store / "nowhere")
    assert (refused.exit_code, "the directory does not exist" in refused.stderr) == (2, True)


def test_a_server_that_does_not_take_it_in_takes_nothing_away(
    holdfast: Holdfast, store: Path, server: FakeServer
) -> None:
    made = holdfast("fork", "gpt", 10, "try", "--store", store)  # this one takes no reports
    assert (made.exit_code, f"{server.url} could not be reached" in made.stderr) == (0, True)
    assert open_store(store).checkpoints("try") == ["000000000010-1"]
