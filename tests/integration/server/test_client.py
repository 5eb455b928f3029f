"""The typed client against a real server: it covers the API, reads its answers, and asks again when it may."""

from __future__ import annotations

import inspect
import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import get_args

import httpx2
import msgspec
import pytest
import torch
import uvicorn
from typer.testing import CliRunner

from holdfast import client as client_module
from holdfast.cli import app as cli
from holdfast.client import (
    Client,
    Conflict,
    Invalid,
    NotFound,
    NotPermitted,
    ServerBusy,
    ServerError,
    UnreachableError,
)
from holdfast.format.parity_file import ParityCode
from holdfast.protocol.administration import AlertChannel
from holdfast.protocol.fleet import BulkChange, Fleet
from holdfast.protocol.jobs import Order
from holdfast.protocol.orders import HaltAction
from holdfast.protocol.value_rules import define
from holdfast.protocol.values import ValueReport
from holdfast.protocol.wire import AttemptStarted, Batch, Checkpoint, Samples
from holdfast.server_link import administration
from holdfast.server_link.http_client import FIRST_BACKOFF_SECONDS
from holdfast_server.core.settings import ServerSettings
from holdfast_web import create_app
from tests.support import handmade_checkpoints

ROOT = Path(__file__).resolve().parents[3]
FOR_AGENTS = {("POST", "/ingest")}
FILES = ("/jobs/{job}/export/", "/account.csv")
"""To be downloaded, by a browser or with curl."""


def test_every_operation_that_is_not_for_agents_has_a_method(client):
    source = inspect.getsource(client_module) + inspect.getsource(administration)
    said = set(re.findall(r'"(/[a-z{][^"?]*)"', source))
    said |= {path.replace("{action}", action) for path in said for action in get_args(HaltAction)}
    for path, methods in client.app.openapi()["paths"].items():
        for method in methods:
            asked = (method.upper(), path.removeprefix("/api/v1"))
            if path.startswith("/api/v1") and asked not in FOR_AGENTS and not asked[1].startswith(FILES):
                assert asked[1] in said, (method, path)


# ---- against a real server --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    """Of a server that knows a job with a checkpoint at 10."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(ServerSettings(database=str(tmp_path_factory.mktemp("client") / "holdfast.db")))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    place = {"iteration": 20, "lineage": 1}
    numbers = list(range(1, 21))
    batch = Batch(
        job="char-gpt", uid="first", attempt=1, rank=0, sequence=0, sent_at=1.79e9, **place,
        samples=Samples(
            iteration=numbers, lineage=[1] * 20, at=[1.79e9 + number for number in numbers], seconds=[1.0] * 20,
            stall_seconds=[0.0] * 20, data_seconds=[0.0] * 20, metrics={"loss": [2.0] * 19 + [float("nan")]},
        ),
        events=[
            AttemptStarted(at=1.79e9, iteration=0, lineage=1, owner="ada", labels={"team": "nlp"}, host="gpu-5"),
            Checkpoint(
                at=1.79e9, id="000000000010-1", iteration=10, lineage=1, kind="scheduled", state="durable",
                payload_bytes=1000,
            ),
            ValueReport(at=1.79e9, **place, definition=define("lr_scale", 1.0, 0.01, 10.0, ()), value=1.0),
        ],
    )  # fmt: skip
    httpx2.post(
        f"{url}/api/v1/ingest",
        content=msgspec.msgpack.encode(batch),
        headers={"Content-Type": "application/msgpack"},
    ).raise_for_status()
    for rule in ("durable_age", "silent"):  # its agent has said all that it ever will
        Client(url).alerts.change_rule(rule, enabled=False)
    yield url
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--label", "team=nlp", "--owner", "ada", "--search", "GPU-5"], True),
        (["--label", "team: nlp", "--label", "team", "--project", "default"], True),
        (["--label", "team=vision"], False),
        (["--search", "gpu-6"], False),
    ],
)
def test_jobs_are_found_by_label_owner_and_host(address, options, found):
    run = CliRunner().invoke(cli, ["jobs", *options, "--server", address], env={"COLUMNS": "200"})
    assert (run.exit_code, "char-gpt" in run.stdout, "no job matches" in run.stdout) == (0, found, not found)


def test_alerts_are_listed_by_label(address, monkeypatch):
    asked = []
    monkeypatch.setattr(administration.Alerts, "find", lambda _, **query: asked.append(query["labels"]) or [])

    def alerts(*options):
        return CliRunner().invoke(cli, ["alerts", *options, "--server", address]).exit_code

    assert (alerts("--label", "team=nlp", "--label", "sweep"), alerts("--label", "team: nlp")) == (0, 0)
    assert asked == [["team: nlp", "sweep"], ["team: nlp"]]
    assert alerts("--job", "char-gpt", "--label", "team") == 2


def test_a_channel_is_routed_by_its_name_or_id(address, monkeypatch):
    channel = AlertChannel(
        id="5f0c", project="default", name="oncall", kind="slack", target="", least_severity="info",
        enabled=True, created_at=0.0, created_by="ada",
    )  # fmt: skip

    def route_channel(_, found, *, labels, **about):
        assert found == "5f0c"
        return msgspec.structs.replace(channel, labels=labels)

    monkeypatch.setattr(administration.Alerts, "channels", lambda *_: [channel])
    monkeypatch.setattr(administration.Alerts, "route_channel", route_channel)

    def route(*arguments):
        return CliRunner().invoke(cli, ["alerts", "route", *arguments, "--server", address])

    assert "labels team: nlp" in route("oncall", "--label", "team=nlp").stdout
    assert "labels team: nlp" in route("5f0c", "--label", "team: nlp").stdout
    assert route("night", "--label", "").stderr.startswith("holdfast: no channels are named 'night'")


def test_a_value_is_listed_and_changed_from_the_command_line(address):
    def run(*arguments):
        return CliRunner().invoke(cli, ["value", "char-gpt", *arguments, "--server", address])

    client = Client(address)
    assert run().stdout == "lr_scale 1, allowed 0.01 to 10\n"
    assert run("lr_scale", "0.5").stdout == "lr_scale 0.5: not delivered yet\n"
    assert run("lr_scale").stdout == "lr_scale 1, allowed 0.01 to 10; 0.5 requested\n"
    (value,) = json.loads(run("--json").stdout)
    assert value["changes"][0]["value"] == 0.5
    refused = run("lr_scale", "20")
    assert (refused.exit_code, "lr_scale is 0.01 to 10, not 20" in refused.stderr) == (2, True)
    assert run("other").exit_code == run("other", "1").exit_code == 1
    assert client.set_value("char-gpt", "lr_scale", 2).changes == client.values("char-gpt")[0].changes
    assert run("lr_scale", "default").stdout == "lr_scale 1 (script): not delivered yet\n"


def test_each_method_reads_what_the_server_answers(address):
    client = Client(address)
    assert [job.job for job in client.jobs()] == ["char-gpt"]
    assert client.fleet(size=1).total == 1
    assert next(client.watch("char-gpt")).job == "char-gpt"
    assert client.job("char-gpt").last_durable == client.checkpoints("char-gpt")[0]
    assert client.timeline("char-gpt").checkpoints_total == 1
    drawn = client.timeline("char-gpt", axis="time", metrics=["loss", "grad"]).series[0]
    assert list(drawn.metrics) == ["loss"]
    assert client.goodput("char-gpt").job == client.ranks("char-gpt").job == client.plan("char-gpt").job
    assert client.notices("char-gpt", limit=5) == []
    assert client.edit("char-gpt", every=50).version == client.edits("char-gpt")[0].version
    assert client.preview_settings("char-gpt", budget=0.02).plan is None
    assert client.preview_restore("char-gpt", "000000000010-1").to_iteration == 10
    order = client.restore("char-gpt", checkpoint="000000000010-1", key="once")
    assert client.restore("char-gpt", checkpoint="000000000010-1", key="once").id == order.id
    assert [row.id for row in client.orders("char-gpt")] == [client.order("char-gpt", order.id).id]
    assert client.cancel_restore("char-gpt", order.id).state == "cancelled"
    assert client.jobs(labels=["team: other"]) == client.jobs(owner="other") == client.jobs(search="other") == []
    assert client.alerts.find(labels=["team: other"], history=True) == []
    assert client.alerts.find(history=True) == client.alerts.find(job="char-gpt", history=True)
    assert len(client.alerts.rules()) >= 10
    assert client.alerts.change_rule("mine", kind="silent", limit=30.0).limit == 30
    client.alerts.remove_rule("mine")
    assert client.alerts.channels() == []
    assert client.accounts.people() == client.accounts.keys() == []
    assert client.reports.change_retention(reports_seconds=None) == client.reports.retention()
    assert {"alert.rule.change", "alert.rule.remove"} <= {
        entry.action for entry in client.accounts.audit(action="alert")
    }
    with pytest.raises(NotFound):
        client.alerts.acknowledge("char-gpt", 99)
    with pytest.raises(Conflict, match="webhooks are off"):
        client.alerts.add_channel("x", "https://hooks.slack.com/x")
    with pytest.raises(NotFound):
        client.alerts.test_channel("none")


def test_the_examples_of_the_documentation_run(address, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "client.md").read_text(), re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(block.replace("http://127.0.0.1:7117", address), names)
    said = capsys.readouterr().out
    assert "char-gpt" in said
    assert "changed by another user:" in said


def test_the_command_line_tells_what_fires_and_what_there_are_rules_for(address, monkeypatch):
    monkeypatch.setenv("HOLDFAST_SERVER", address)

    def holdfast(*arguments):
        return CliRunner().invoke(cli, ["alerts", *arguments])

    assert holdfast().stdout == "no open alerts\n"
    assert json.loads(holdfast("--all", "--json").stdout) == []
    output = holdfast("rules").stdout.splitlines()
    assert re.match(r"no_progress +yes +critical +10 min +0 s +\*", output[1])
    for command in (("ack", "99"), ("silence", "99", "2h"), ("unsilence", "99")):
        refused = holdfast(*command)
        assert (refused.exit_code, "there is no alert 99" in refused.stderr) == (1, True)
    assert holdfast("silence", "1", "for ever").exit_code == 2


def test_notes_are_added_changed_and_deleted(address):
    with Client(address) as client:
        note = client.annotate("char-gpt", "new data", iteration=10)
        assert (note.iteration, note.text) == (10, "new data")
        assert client.edit_annotation("char-gpt", note.id, "other data").text == "other data"
        assert [each.text for each in client.annotations("char-gpt")] == ["other data"]
        client.delete_annotation("char-gpt", note.id)
        assert client.annotations("char-gpt") == []


def test_many_jobs_are_changed_and_compared(address):
    with Client(address) as client:
        preview = client.change_jobs(BulkChange(action="budget", budget="2%", jobs=["char-gpt"], preview=True))
        assert (preview.changed, [each.job for each in preview.outcomes]) == (1, ["char-gpt"])
        compared = client.compare(["char-gpt"], axis="iteration", start=5)
        assert [each.job for each in compared.jobs] == ["char-gpt"]
        with pytest.raises(NotFound):
            client.compare(["char-gpt", "no-such-job"])


def test_a_scrub_reports_damage_and_its_repair(address, tmp_path):
    def scrub(*options):
        return CliRunner().invoke(cli, ["store", "scrub", str(tmp_path), "--server", address, *options])

    tensors = {"w": torch.arange(5000.0)}
    written = handmade_checkpoints.commit(
        tmp_path, tensors, job="char-gpt", iteration=10, parity=ParityCode(data_blocks=2, parity_blocks=1)
    )
    handmade_checkpoints.commit(tmp_path, tensors, job="another", iteration=5)
    payload = written.path("rank-0.safetensors")
    payload.write_bytes(payload.read_bytes()[:-1])
    with Client(address) as client:
        damaged = scrub()
        assert damaged.exit_code == 1
        assert f"{address} does not know another 000000000005-1" in damaged.stderr
        found = client.verification("char-gpt", written.id)
        assert found.verdict == "damaged"
        assert "rank-0.safetensors repairable: 1 block of 4096 bytes damaged" in found.reason
        assert scrub("--repair").exit_code == 0
        assert client.verification("char-gpt", written.id).verdict == "sound"
        assert [point.state for point in client.checkpoints("char-gpt")] == ["durable"]


def test_a_scrub_whose_server_does_not_answer_says_so_after_the_result(tmp_path):
    handmade_checkpoints.commit(tmp_path, {"w": torch.arange(4.0)}, job="char-gpt", iteration=10)
    result = CliRunner().invoke(cli, ["store", "scrub", str(tmp_path), "--server", "http://127.0.0.1:9"])
    assert result.exit_code == 3
    assert "sound" in result.stdout
    assert "no server answers at http://127.0.0.1:9" in result.stderr


# ---- when it does not go well -----------------------------------------------------------------------


class Moody(ThreadingHTTPServer):
    """Sends the given responses, one after the other."""

    daemon_threads = True

    def __init__(self, *replies: tuple[int, bytes, dict[str, str]]) -> None:
        super().__init__(("127.0.0.1", 0), _MoodyHandler)
        self.replies, self.asked = list(replies), []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _MoodyHandler(BaseHTTPRequestHandler):
    server: Moody

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.command, self.path))
        status, body, headers = self.server.replies.pop(0)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _answer  # noqa: N815

    def log_message(self, *_: object) -> None: ...


BUSY = (503, b'{"error": "unavailable", "message": "busy"}', {"Retry-After": "1"})
NO_JOBS = Fleet(jobs=[], page=1, pages=1, size=50, total=0, counts={}, projects=[], archived=0)
JOBS = (200, msgspec.json.encode(NO_JOBS), {})


@pytest.fixture
def moody(monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr("holdfast.server_link.json_client.sleep", pauses.append)
    servers: list[Moody] = []

    def start(*replies):
        servers.append(Moody(*replies))
        return Client(servers[-1].url), servers[-1], pauses

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_what_may_be_asked_twice_is_asked_again_when_the_server_says(moody):
    client, server, pauses = moody(BUSY, BUSY, JOBS)
    assert client.jobs() == []
    assert len(server.asked) == 3
    first, second = pauses
    assert 1.0 <= first <= 1.0 + FIRST_BACKOFF_SECONDS
    assert 1.0 <= second <= 1.0 + 2 * FIRST_BACKOFF_SECONDS


def test_it_gives_up_in_the_end(moody):
    client, server, _ = moody(BUSY, BUSY, BUSY)
    with pytest.raises(ServerBusy) as refused:
        client.jobs()
    assert (refused.value.status, refused.value.code, len(server.asked)) == (503, "unavailable", 3)


def test_an_edit_is_not_sent_twice_and_a_restore_with_its_key_is(moody):
    client, server, _ = moody(BUSY)
    with pytest.raises(ServerBusy):
        client.edit("a", version=0, paused=True)
    assert len(server.asked) == 1
    order = Order(
        id="o", job="a", checkpoint="c", iteration=1, state="requested", created_at=1.0, who="", fence=1,
        from_iteration=2, from_lineage=1,
    )  # fmt: skip
    client, server, _ = moody(BUSY, (201, msgspec.json.encode(order), {}))
    assert client.restore("a", 1).id == "o"
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("status", "kind"),
    [(403, NotPermitted), (404, NotFound), (409, Conflict), (422, Invalid), (507, ServerBusy), (418, ServerError)],
)
def test_refusals_have_a_kind_each(moody, status, kind):
    client, _, _ = moody((status, b'{"error": "x", "message": "why", "field": "f"}', {}))
    with pytest.raises(kind, match="why") as refused:
        client.job("a")
    assert type(refused.value) is kind
    assert (refused.value.code, refused.value.body["field"]) == ("x", "f")


@pytest.mark.parametrize(
    "reply", [(200, b"<html>", {}), (401, b"{}", {}), (200, b"[1]", {}), (200, b'{"job": 1}', {})]
)
def test_who_is_no_server_of_ours_or_wants_a_key_is_not_asked_on(moody, reply):
    client, _, _ = moody(reply)
    with pytest.raises(UnreachableError):
        client.job("a")


def test_names_are_segments_whatever_is_in_them(moody):
    client, server, _ = moody((404, b"{}", {}))
    with pytest.raises(NotFound):
        client.job("../../x?y#z")
    assert server.asked == [("GET", "/api/v1/jobs/..%2F..%2Fx%3Fy%23z")]


def test_nobody_there_is_said_with_the_way_out():
    with pytest.raises(UnreachableError, match="holdfast serve"):
        Client("http://127.0.0.1:9", retries=0).jobs()
