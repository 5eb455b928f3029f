from __future__ import annotations

import json

import pytest

from tests.support.fake_server import FakeServer, Holdfast, notice

pytestmark = pytest.mark.usefixtures("no_polling_delay")

FOUND = "a batch takes 42 ms to load: 30 ms fetching and 12 ms preparing. An iteration computes for 25 ms"
WHY_NOT = "data loading cannot be measured: Stream is iterable"


def test_a_probe_is_asked_for_and_its_answer_waited_for(holdfast: Holdfast, server: FakeServer) -> None:
    other = notice(2, "a checkpoint is torn")
    answer = notice(3, FOUND, code="data")
    server.answers = [[], [other], [other, answer], [other, answer, notice(4, "another's", code="data")]]
    result = holdfast("probe", "gpt")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "probe requested: version 4, applied at iteration 251",
        "a batch takes 42 ms to load: 30 ms fetching and 12 ms preparing",
        "An iteration computes for 25 ms",
    ]
    assert [body for method, _, body in server.requests if method == "PATCH"] == [{"probe_request": True}]


def test_what_cannot_be_probed_fails_with_the_reason(holdfast: Holdfast, server: FakeServer) -> None:
    server.answers = [[notice(2, WHY_NOT, code="data", level="warning")]]
    result = holdfast("probe", "gpt")
    assert (result.exit_code, result.stderr) == (1, f"holdfast: {WHY_NOT}\n")


def test_no_wait_returns_when_the_server_has_it(holdfast: Holdfast, server: FakeServer) -> None:
    server.applies = False
    result = holdfast("probe", "gpt", "--no-wait")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "probe requested: version 4, not applied yet (gpt is running)\n"


@pytest.mark.parametrize(
    ("applies", "alive", "said"),
    [
        (False, False, "gpt is stopped; repeat the request after its next start"),
        (True, False, "gpt is stopped; it ended before it reported a result"),
        (True, True, "no result after 0 s"),
    ],
)
def test_an_answer_that_does_not_come_is_told(
    holdfast: Holdfast, server: FakeServer, applies: bool, alive: bool, said: str
) -> None:
    server.applies, server.alive = applies, alive
    result = holdfast("probe", "gpt", "--timeout", "0")
    assert result.exit_code == 1
    assert said in result.stderr


def test_an_unknown_job_is_told(holdfast: Holdfast) -> None:
    result = holdfast("probe", "unknown-job")
    assert result.exit_code == 1
    assert "job 'unknown-job' not found" in result.stderr


@pytest.mark.parametrize(("level", "status"), [("info", 0), ("warning", 1)])
def test_json_tells_the_answer(holdfast: Holdfast, server: FakeServer, level: str, status: int) -> None:
    server.answers = [[notice(2, FOUND, code="data", level=level)]]
    result = holdfast("probe", "gpt", "--json")
    said = json.loads(result.stdout)
    assert (result.exit_code, said["applied_iteration"], said["answer"]["message"]) == (status, 251, FOUND)
