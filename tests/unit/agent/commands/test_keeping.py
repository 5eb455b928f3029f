from __future__ import annotations

import json

from tests.support.fake_server import FakeServer, Holdfast


def test_a_pin_is_told_with_the_iteration_at_which_it_holds(holdfast: Holdfast, server: FakeServer) -> None:
    version = server.desired["version"] + 1
    result = holdfast("pin", "gpt", "200")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"000000000200-1 is pinned: version {version}, applied at iteration 251\n"
    assert ("PATCH", "/api/v1/jobs/gpt/checkpoints/200", {"pinned": True}) in server.requests
    result = holdfast("unpin", "gpt", "000000000200-1")
    assert result.stdout.startswith("000000000200-1 is not pinned: ")


def test_a_job_that_is_not_running_is_not_waited_for(holdfast: Holdfast, server: FakeServer) -> None:
    server.alive = server.applies = False
    result = holdfast("pin", "gpt", "200")
    assert (result.exit_code, result.stdout.endswith("not applied yet (gpt is stopped)\n")) == (0, True)


def test_json_is_the_checkpoint_and_whether_the_pin_holds(holdfast: Holdfast) -> None:
    output = json.loads(holdfast("pin", "gpt", "200", "--json").stdout)
    assert (output["checkpoint"]["id"], output["checkpoint"]["pinned"], output["applied"]) == (
        "000000000200-1", True, True,
    )  # fmt: skip


def test_a_label_is_given_and_taken_off(holdfast: Holdfast, server: FakeServer) -> None:
    result = holdfast("label", "gpt", "100", "before the new data")
    assert (result.exit_code, result.stdout) == (0, "000000000100-1 is labeled before the new data\n")
    assert json.loads(holdfast("label", "gpt", "100", "x", "--json").stdout)["label"] == "x"
    assert holdfast("label", "gpt", "100", "").stdout == "000000000100-1 has no label\n"
    assert server.requests[-1] == ("PATCH", "/api/v1/jobs/gpt/checkpoints/100", {"label": None})


def test_the_list_says_for_which_alert_a_checkpoint_is_kept(holdfast: Holdfast, server: FakeServer) -> None:
    server.checkpoints[0] |= {"pinned": True, "pinned_by": "alert 14", "label": "before the new data"}
    server.checkpoints[1] |= {"pinned": True, "pinned_by": "ann"}
    rows = [line for line in holdfast("checkpoints", "gpt").stdout.splitlines() if line.startswith(("100", "200"))]
    assert [row.split("  ")[-1].strip() for row in sorted(rows)] == [
        "kept for alert 14, before the new data", "pinned",
    ]  # fmt: skip


def test_where_there_is_none_the_nearest_earlier_one_is_offered(holdfast: Holdfast) -> None:
    for arguments in (("pin", "gpt", "201"), ("unpin", "gpt", "201"), ("label", "gpt", "201", "x")):
        result = holdfast(*arguments)
        assert result.exit_code == 1
        assert "gpt has no checkpoint 201" in result.stderr
        assert f"holdfast {arguments[0]} gpt 000000000200-1" in result.stderr


def test_a_label_that_cannot_be_is_refused_in_words(holdfast: Holdfast) -> None:
    result = holdfast("label", "gpt", "100", "x" * 65)
    assert result.exit_code != 0
    assert "at most 64 characters" in result.stderr
