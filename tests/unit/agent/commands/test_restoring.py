from __future__ import annotations

import json

import pytest

from holdfast.protocol.analyses import SAME_LOSSES
from tests.support.fake_server import FakeServer, Holdfast


def test_a_restore_is_followed_to_its_end(holdfast: Holdfast) -> None:
    result = holdfast("restore", "gpt", "200")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == [
        "requested", "delivered", "restoring", "restored",
    ]  # fmt: skip
    assert "in 500 ms, on lineage 2; the state before it is kept as 000000000250-1" in result.stdout


def test_each_command_is_an_order_of_its_own(holdfast: Holdfast, server: FakeServer) -> None:
    holdfast("restore", "gpt", "200")
    holdfast("restore", "gpt", "200")
    keys = [body["key"] for method, _, body in server.requests if method == "POST"]
    assert len(set(keys)) == 2


def test_no_wait_prints_the_order_and_returns(holdfast: Holdfast, server: FakeServer) -> None:
    result = holdfast("restore", "gpt", "200", "--no-wait")
    assert "requested (request order-1)" in result.stdout
    assert not [path for _, path, _ in server.requests if "order-1" in path]


def test_json_is_the_order_as_it_ended(holdfast: Holdfast) -> None:
    order = json.loads(holdfast("restore", "gpt", "200", "--json").stdout)
    assert (order["state"], order["new_lineage"]) == ("restored", 2)


@pytest.mark.parametrize(("asked", "nearest"), [(199, 100), (1000, 200)])
def test_the_nearest_earlier_checkpoint_is_offered_and_not_used(
    holdfast: Holdfast, server: FakeServer, asked: int, nearest: int
) -> None:
    result = holdfast("restore", "gpt", asked)
    assert result.exit_code == 1
    assert f"gpt has no checkpoint at iteration {asked}" in result.stderr
    assert f"holdfast restore gpt {nearest}" in result.stderr
    assert server.order is None


def test_the_nearest_earlier_checkpoint_is_taken_on_request(holdfast: Holdfast, server: FakeServer) -> None:
    result = holdfast("restore", "gpt", "199", "--nearest")
    assert result.exit_code == 0
    assert result.stderr == "gpt has no checkpoint at iteration 199: restoring the nearest earlier one, 100\n"
    assert "restored   gpt to iteration 100" in result.stdout


def test_nearest_takes_no_later_checkpoint(holdfast: Holdfast, server: FakeServer) -> None:
    result = holdfast("restore", "gpt", "49", "--nearest")
    assert result.exit_code == 1
    assert "the oldest that exists is at 100: holdfast restore gpt 100\n" in result.stderr
    assert server.order is None


def test_a_restore_whose_time_is_unknown_is_reported_without_one(holdfast: Holdfast, server: FakeServer) -> None:
    server.order_seconds = None
    assert "to iteration 200, on lineage 2" in holdfast("restore", "gpt", "200").stdout.splitlines()[-1]


def test_a_job_that_is_not_running_is_not_waited_for(holdfast: Holdfast, server: FakeServer) -> None:
    server.alive = False
    result = holdfast("restore", "gpt", "200")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "restore of gpt to iteration 200: requested (request order-1); "
        "gpt is stopped: the restore happens at its next start\n"
    )
    assert json.loads(holdfast("restore", "gpt", "200", "--json").stdout)["state"] == "requested"


def test_a_script_that_is_started_again_for_it_is_said_to_be_and_followed(
    holdfast: Holdfast, server: FakeServer
) -> None:
    server.restore_mode = "relaunch"
    result = holdfast("restore", "gpt", "200")
    assert result.exit_code == 0
    assert result.stdout.startswith("gpt restarts for this restore: it draws for itself\n")
    assert result.stdout.splitlines()[-1].startswith("restored")


def test_a_script_that_nobody_starts_again_is_not_waited_for(holdfast: Holdfast, server: FakeServer) -> None:
    server.restore_mode = "next_start"
    result = holdfast("restore", "gpt", "200")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "restore of gpt to iteration 200: requested (request order-1); "
        "the restore happens when you start the script again: it draws for itself\n"
    )


def test_the_last_restore_is_undone(holdfast: Holdfast, server: FakeServer) -> None:
    assert "nothing to undo: gpt has no completed restore" in holdfast("undo", "gpt").stderr
    server.undoable = {"id": "order-9", "job": "gpt", "checkpoint": "000000000100-1", "state": "restored"}
    result = holdfast("undo", "gpt")
    assert (result.exit_code, result.stdout.splitlines()[-1].split()[0]) == (0, "restored")
    assert ("POST", "/api/v1/jobs/gpt/restores/order-9/undo") in [each[:2] for each in server.requests]
    assert json.loads(holdfast("undo", "gpt", "--json").stdout)["state"] == "restored"


def test_with_nothing_earlier_the_oldest_that_exists_is_offered(
    holdfast: Holdfast, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.client.PAGE", 1)
    gone = server.checkpoints[0] | {"id": "000000000050-1", "iteration": 50, "restorable": False}
    server.checkpoints.insert(0, gone)
    result = holdfast("restore", "gpt", "49")
    assert result.exit_code == 1
    assert "gpt has no checkpoint at iteration 49" in result.stderr
    assert "the oldest that exists is at 100: holdfast restore gpt 100" in result.stderr
    assert server.order is None


def test_with_no_checkpoint_at_all_only_the_servers_reason_is_told(holdfast: Holdfast, server: FakeServer) -> None:
    server.checkpoints = [row | {"restorable": False} for row in server.checkpoints]
    result = holdfast("restore", "gpt", "99")
    assert result.exit_code == 1
    assert result.stderr == "holdfast: no checkpoint there\n"


def test_a_restore_that_failed_fails_with_its_reason(holdfast: Holdfast, server: FakeServer) -> None:
    server.last_order_state = "failed"
    result = holdfast("restore", "gpt", "200")
    assert result.exit_code == 1
    assert "ended as failed: a tensor is damaged" in result.stderr


def test_waiting_has_an_end_and_the_order_stays(holdfast: Holdfast) -> None:
    result = holdfast("restore", "gpt", "200", "--timeout", "0")
    assert result.exit_code == 1
    assert "request order-1 stays open" in result.stderr


@pytest.mark.parametrize("iteration", ["soon", "-3"])
def test_an_iteration_that_is_none_is_refused(holdfast: Holdfast, server: FakeServer, iteration: str) -> None:
    assert holdfast("restore", "gpt", iteration).exit_code == 2
    assert server.requests == []


def test_a_restore_to_before_a_wrong_loss_says_that_it_comes_again(holdfast: Holdfast, server: FakeServer) -> None:
    server.repeats = "the spike at 301"
    result = holdfast("restore", "gpt", "200")
    assert result.stderr == f"holdfast: this restore goes back to before the spike at 301: {SAME_LOSSES}\n"
    assert ("GET", "/api/v1/jobs/gpt/restores/preview?checkpoint=000000000200-1") in [
        request[:2] for request in server.requests
    ]
    assert holdfast("restore", "gpt", "200", "--json").stderr == ""
