from __future__ import annotations

import json

import pytest

from tests.support.fake_server import FakeServer, Holdfast, requested

pytestmark = pytest.mark.usefixtures("no_polling_delay")

FULL = "No space left on device"


def test_a_checkpoint_is_asked_for_and_followed_until_it_is_durable(
    holdfast: Holdfast, server: FakeServer
) -> None:
    server.asked_for = [
        [],
        [requested(252, state="snapshot")],
        [requested(252, state="persisting")],
        [requested(252, payload_bytes=108_000_000, persist_seconds=0.4)],
    ]
    result = holdfast("checkpoint", "gpt")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "checkpoint requested: version 4, applied at iteration 251",
        "durable: 000000000252-1, 108 MB, written in 400 ms",
    ]
    assert [body for method, _, body in server.requests if method == "PATCH"] == [{"checkpoint_request": True}]


def test_one_that_fails_fails_with_its_reason(holdfast: Holdfast, server: FakeServer) -> None:
    server.asked_for = [[requested(251, state="persisting")], [requested(251, state="failed", reason=FULL)]]
    result = holdfast("checkpoint", "gpt")
    assert result.exit_code == 1
    assert result.stderr == f"holdfast: the checkpoint at iteration 251 is failed: {FULL}\n"


def test_what_others_asked_for_before_is_not_taken_for_it(holdfast: Holdfast, server: FakeServer) -> None:
    server.checkpoints += [requested(240), requested(251, state="failed", reason="of an earlier attempt")]
    under_way = requested(250, state="persisting")
    server.checkpoints.append(under_way)
    server.asked_for = [[under_way | {"state": "durable"}], [requested(253)]]
    result = holdfast("checkpoint", "gpt")
    assert result.exit_code == 0
    assert "durable: 000000000253-1" in result.stdout


def test_one_that_repeats_the_name_of_an_earlier_one_is_seen(holdfast: Holdfast, server: FakeServer) -> None:
    server.checkpoints.append(requested(251, state="failed", reason="of an earlier attempt"))
    server.asked_for = [[requested(251)]]
    assert "durable: 000000000251-1" in holdfast("checkpoint", "gpt").stdout


def test_one_taken_after_a_restore_at_the_same_boundary_is_seen(holdfast: Holdfast, server: FakeServer) -> None:
    server.asked_for = [[requested(120, id="000000000120-2", lineage=2)]]
    assert "durable: 000000000120-2" in holdfast("checkpoint", "gpt").stdout


def test_a_torn_one_is_followed_to_the_one_that_replaces_it(holdfast: Holdfast, server: FakeServer) -> None:
    torn = requested(251, state="torn", reason="a weight changed meanwhile")
    server.asked_for = [[torn], [torn, requested(252, kind="scheduled")]]
    assert "durable: 000000000252-1" in holdfast("checkpoint", "gpt").stdout


def test_no_wait_returns_when_the_server_has_it(holdfast: Holdfast, server: FakeServer) -> None:
    server.applies = False
    result = holdfast("checkpoint", "gpt", "--no-wait")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "checkpoint requested: version 4, not applied yet (gpt is running)\n"


def test_a_job_that_is_not_running_takes_none(holdfast: Holdfast, server: FakeServer) -> None:
    server.applies = server.alive = False
    result = holdfast("checkpoint", "gpt")
    assert result.exit_code == 1
    assert "gpt is stopped; repeat the request after its next start" in result.stderr


@pytest.mark.parametrize(
    ("rows", "said"), [([], "not begun after 0 s"), ([requested(251, state="persisting")], "still persisting")]
)
def test_waiting_has_an_end(holdfast: Holdfast, server: FakeServer, rows: list[object], said: str) -> None:
    server.asked_for = [rows]  # type: ignore[list-item]
    result = holdfast("checkpoint", "gpt", "--timeout", "0")
    assert result.exit_code == 1
    assert said in result.stderr


@pytest.mark.parametrize(("state", "status"), [("durable", 0), ("failed", 1)])
def test_json_tells_the_checkpoint_as_it_ended(
    holdfast: Holdfast, server: FakeServer, state: str, status: int
) -> None:
    server.asked_for = [[requested(251, state=state)]]
    result = holdfast("checkpoint", "gpt", "--json")
    output = json.loads(result.stdout)
    assert (result.exit_code, output["applied_iteration"], output["checkpoint"]["state"]) == (status, 251, state)
