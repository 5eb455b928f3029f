from __future__ import annotations

import json

import pytest
from fake_server import FakeServer, Holdfast


def test_a_restore_is_followed_to_its_end(holdfast: Holdfast) -> None:
    result = holdfast("restore", "gpt", "200")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == [
        "requested", "delivered", "restoring", "restored",
    ]  # fmt: skip
    assert "in 0.5 s, on lineage 2; the state left behind is kept as 000000000250-1" in result.stdout


def test_each_command_is_an_order_of_its_own(holdfast: Holdfast, server: FakeServer) -> None:
    holdfast("restore", "gpt", "200")
    holdfast("restore", "gpt", "200")
    keys = [body["key"] for method, _, body in server.requests if method == "POST"]
    assert len(set(keys)) == 2


def test_no_wait_prints_the_order_and_returns(holdfast: Holdfast, server: FakeServer) -> None:
    result = holdfast("restore", "gpt", "200", "--no-wait")
    assert "requested (order order-1)" in result.stdout
    assert [method for method, _, _ in server.requests] == ["POST"]


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


def test_with_nothing_earlier_only_the_servers_reason_is_told(holdfast: Holdfast) -> None:
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
    assert "the order order-1 stays open" in result.stderr


@pytest.mark.parametrize("iteration", ["soon", "-3"])
def test_an_iteration_that_is_none_is_refused(holdfast: Holdfast, server: FakeServer, iteration: str) -> None:
    assert holdfast("restore", "gpt", iteration).exit_code == 2
    assert server.requests == []
