from __future__ import annotations

import json

import pytest

from tests.support.fake_server import FakeServer, Holdfast
from tests.support.foreign_servers import PAGE, SILENT, SSH, WEB, other_server


def test_jobs_are_listed_with_what_they_cost(holdfast: Holdfast) -> None:
    result = holdfast("jobs")
    assert result.exit_code == 0
    header, row = result.stdout.splitlines()
    assert header.split() == [
        "JOB",
        "STATUS",
        "ITERATION",
        "PROGRESS",
        "LOSS",
        "OVERHEAD",
        "BUDGET",
        "EVERY",
        "LAST",
        "CHECKPOINT",
        "VERDICT",
    ]
    *columns, verdict = row.split(maxsplit=11)
    assert columns == ["gpt", "running", "250", "-", "nan", "2.1", "%", "3.5", "%", "50", "200"]
    assert verdict == "Healthy: newest checkpoint 4 s old"


def test_jobs_of_a_server_without_verdicts_are_listed_with_the_reason(
    holdfast: Holdfast, server: FakeServer
) -> None:
    server.verdict = None
    server.status, server.status_reason = "restarting", "start 3 of 5, CUDA out of memory"
    row = holdfast("jobs").stdout.splitlines()[1]
    assert "restarting" in row
    assert row.endswith("start 3 of 5, CUDA out of memory")


def test_show_begins_with_the_verdict_and_what_to_do(holdfast: Holdfast, server: FakeServer) -> None:
    assert "verdict          Healthy: newest checkpoint 4 s old" in holdfast("show", "gpt").stdout.splitlines()
    server.verdict = {
        "cause": "paused", "level": "warning", "text": "Checkpoints paused", "next_step": "Resume checkpoints",
    }  # fmt: skip
    assert holdfast("show", "gpt").stdout.splitlines()[1:3] == [
        "verdict          Checkpoints paused",
        "next step        Resume checkpoints",
    ]


def test_jobs_for_scripts(holdfast: Holdfast) -> None:
    (job,) = json.loads(holdfast("jobs", "--json").stdout)
    assert (job["job"], job["loss"], job["last_durable"]["iteration"]) == ("gpt", "nan", 200)


def test_show_tells_one_job_in_full(holdfast: Holdfast) -> None:
    output = holdfast("show", "gpt").stdout
    assert "250 on lineage 1, 4 per second" in output
    assert "2.1 % measured over 120 iterations, budget 3.5 %" in output
    assert "every 50 iterations (checkfreq)" in output
    assert "unsaved work     50 iterations, 12.5 s" in output
    assert "not yet applied" not in output


def test_show_names_the_orders_that_the_job_does_not_act_on_yet(holdfast: Holdfast, server: FakeServer) -> None:
    server.applies = False
    output = holdfast("show", "gpt").stdout.splitlines()
    late = [line.split(maxsplit=3)[3] for line in output if line.startswith("not yet applied")]
    assert late == ["version 3: budget 3.5 % → 2 %, by ann"]


def test_logs_prints_the_lines_of_an_attempt_or_says_that_there_are_none(
    holdfast: Holdfast, server: FakeServer
) -> None:
    result = holdfast("logs", "gpt")
    assert (result.exit_code, result.stdout) == (0, "")
    assert (
        "the server has no output of attempt 3 of gpt: start the script with `holdfast run` to send it"
        in result.stderr
    )
    server.output = ["one", "two"]
    result = holdfast("logs", "gpt", "--attempt", "2")
    assert (result.stdout, result.stderr) == ("one\ntwo\n", "")


def test_show_names_the_restore_that_is_under_way(holdfast: Holdfast, server: FakeServer) -> None:
    server.order = {"id": "o7", "job": "gpt", "checkpoint": "x", "iteration": 200, "state": "delivered"}
    server.order["who"] = "bo"
    assert "to 200: delivered, requested by bo (request o7)" in holdfast("show", "gpt").stdout


def test_config_shows_the_newest_attempt_or_what_differs_from_another(holdfast: Holdfast) -> None:
    rows = [line.split() for line in holdfast("config", "gpt").stdout.splitlines()]
    assert rows == [["NAME", "VALUE"], ["lr", "0.01"], ["torch", "2.9"]]
    rows = [line.split() for line in holdfast("config", "gpt", "--against", "2").stdout.splitlines()]
    assert rows[1:] == [["lr", "0.1", "0.01"]]
    output = holdfast("config", "gpt", "--attempt", "3", "--against", "1").stdout
    assert output == "attempt 3 does not differ from attempt 1 of gpt\n"


def test_a_name_with_odd_characters_stays_one_segment(holdfast: Holdfast, server: FakeServer) -> None:
    assert holdfast("show", "../jobs?x=1").exit_code == 1
    assert server.requests == [("GET", "/api/v1/jobs/..%2Fjobs%3Fx%3D1", None)]


def test_no_server_is_said_in_one_sentence(holdfast: Holdfast) -> None:
    result = holdfast("jobs", "--server", "http://127.0.0.1:9")
    assert result.exit_code == 3
    assert "no server answers at http://127.0.0.1:9" in result.stderr
    assert "holdfast serve" in result.stderr


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("notaurl", "must begin with http:// or https://"),
        ("localhost:7117", "must begin with http:// or https://"),
        ("ftp://host", "must begin with http:// or https://"),
        ("http://", "has no host name"),
        ("http://:7117", "has no host name"),
        ("http://two words", "has no host name"),
        ("http://host:seven", "Port could not be cast"),
        ("http://host:70000", "Port out of range"),
        ("http://host:0", "Port out of range"),
        ("http://[::1", "Invalid IPv6 URL"),
    ],
)
def test_an_address_that_is_none_is_refused_in_one_sentence(holdfast: Holdfast, address: str, reason: str) -> None:
    for command in (["jobs"], ["run"]):
        trainer = ["--", "true"] if command == ["run"] else []
        result = holdfast(*command, "--server", address, *trainer)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"holdfast: invalid server address {address!r} (")
        assert reason in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_a_status_is_told_as_the_server_has_it(holdfast: Holdfast, server: FakeServer) -> None:
    server.alive = False
    assert "stopped" in holdfast("jobs").stdout
    assert "status           stopped\n" in holdfast("show", "gpt").stdout
    assert json.loads(holdfast("show", "gpt", "--json").stdout)["status"] == "stopped"


def test_somebody_else_on_the_port_is_recognised(holdfast: Holdfast, server: FakeServer) -> None:
    server.plain_text = b"<html>It works!</html>"
    result = holdfast("jobs")
    assert result.exit_code == 3
    assert "is not a Holdfast server" in result.stderr


@pytest.mark.parametrize(
    ("answer", "said"),
    [(SILENT, "it closed the connection without a response"), (SSH, "it does not speak HTTP")],
)
def test_what_does_not_answer_as_a_web_server_does_is_recognised_in_one_plain_line(
    holdfast: Holdfast, answer: bytes, said: str
) -> None:
    with other_server(answer) as address:
        result = holdfast("jobs", "--server", address)
    assert result.exit_code == 3
    assert result.stderr == f"holdfast: {address} is not a Holdfast server ({said})\n"


def test_the_address_of_a_page_is_recognised(holdfast: Holdfast) -> None:
    with other_server(PAGE) as address:
        result = holdfast("jobs", "--server", f"{address}/jobs/gpt")
    assert result.exit_code == 3
    assert result.stderr == (
        f"holdfast: {address}/jobs/gpt: no Holdfast API here: give only the server's address, such as "
        "http://127.0.0.1:7117\n"
    )


def test_https_to_a_server_without_it_is_recognised(holdfast: Holdfast) -> None:
    with other_server(WEB) as address:
        secure = address.replace("http:", "https:")
        result = holdfast("jobs", "--server", secure)
    assert result.exit_code == 3
    assert result.stderr == f"holdfast: {secure}: the server does not speak HTTPS: use http://\n"


def test_json_of_another_shape_is_recognised(holdfast: Holdfast, server: FakeServer) -> None:
    server.plain_text = b'[{"name": "gpt"}]'
    result = holdfast("jobs")
    assert result.exit_code == 3
    assert "incompatible version" in result.stderr


def test_a_token_is_asked_for_and_sent(
    holdfast: Holdfast, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.token = "secret"
    refused = holdfast("jobs")
    assert refused.exit_code == 3
    assert "rejected the request: this token is not the right one; set HOLDFAST_TOKEN" in refused.stderr
    assert holdfast("jobs", "--token", "secret").exit_code == 0
    monkeypatch.setenv("HOLDFAST_TOKEN", "secret")
    assert holdfast("jobs").exit_code == 0


def test_goodput_tells_where_the_time_of_a_window_went(holdfast: Holdfast) -> None:
    first, header, *rows = holdfast("goodput", "gpt", "--window", "7d").stdout.splitlines()
    assert first == "goodput 75 % of 3 min 20 s: 150 iterations, 50 iterations lost"
    assert header.split()[:3] == ["CATEGORY", "TIME", "SHARE"]
    assert rows[1].split() == ["lost", "50", "s", "25", "%", "what", "lost", "is"]


def test_goodput_for_scripts_is_what_the_server_says(holdfast: Holdfast) -> None:
    found = json.loads(holdfast("goodput", "gpt", "--json").stdout)
    assert (found["window"], found["buckets"][1]["seconds"]) == ("24h", 50.0)


def test_a_window_that_there_is_not_is_wrong_use(holdfast: Holdfast) -> None:
    assert holdfast("goodput", "gpt", "--window", "2d").exit_code == 2


def test_checkpoints_of_a_job_are_listed_the_newest_first(holdfast: Holdfast, server: FakeServer) -> None:
    server.checkpoints[0] |= {"pinned": True, "label": "before the new data", "payload_bytes": 3_000_000}
    header, *rows = holdfast("checkpoints", "gpt").stdout.splitlines()
    assert header.split() == ["ITERATION", "CHECKPOINT", "KIND", "STATE", "SIZE", "TAKEN", "LABEL"]
    assert [row.split()[:2] for row in rows] == [["200", "000000000200-1"], ["100", "000000000100-1"]]
    assert "3 MB" in rows[1]
    assert rows[1].endswith("pinned, before the new data")
    assert len(holdfast("checkpoints", "gpt", "--limit", "1").stdout.splitlines()) == 2


def test_checkpoints_that_no_restore_can_go_back_to_are_listed_when_asked_for(
    holdfast: Holdfast, server: FakeServer
) -> None:
    server.checkpoints = [row | {"restorable": False, "state": "missing"} for row in server.checkpoints]
    assert holdfast("checkpoints", "gpt").stdout == "gpt has no restorable checkpoint yet\n"
    assert "missing" in holdfast("checkpoints", "gpt", "--all").stdout
    server.checkpoints[0] |= {"reason": "deleted by retention: spaced 12"}
    assert holdfast("checkpoints", "gpt", "--all").stdout.splitlines()[-1].split()[3] == "retired"
    rows = json.loads(holdfast("checkpoints", "gpt", "--all", "--json").stdout)
    assert [row["iteration"] for row in rows] == [200, 100]
