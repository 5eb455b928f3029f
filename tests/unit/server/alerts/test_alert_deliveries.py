"""Messages arrive: signed, again after a failure, and also when the server died in between."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
from dataclasses import replace
from email import message_from_bytes

import msgspec
import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult
from sqlalchemy import select, update
from starlette.testclient import TestClient

from holdfast_server import models
from holdfast_server.accounts import projects
from holdfast_server.alerts import deliveries, evaluation, groups
from holdfast_server.alerts.channel_kinds.webhook import signature
from holdfast_server.alerts.deliveries import RETRY_SECONDS, UPDATE_SECONDS, WAIT_SECONDS, MessageSender
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.settings import ServerSettings
from holdfast_server.http.metrics import ServerMetrics
from holdfast_web import create_app
from tests.support.postgres import ON_SQLITE

pytestmark = pytest.mark.usefixtures("no_background_jobs")  # the tests themselves send what is due

CHANNELS = "/api/v1/projects/default/alert-channels"
BASE_URL = "http://127.0.0.1:7117"


class LoopWebhook:
    """A webhook on this machine, in the event loop of the application."""

    def __init__(self) -> None:
        self.status, self.got, self.paths = 200, [], []
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.listener = listener

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    async def serve(self) -> None:
        self.server = await asyncio.start_server(self._answer, sock=self.listener)

    async def close(self) -> None:
        self.server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.paths.append(head.split()[1])
        headers = dict(re.findall(r"^([A-Za-z-]+): (.*)\r$", head, re.MULTILINE))
        self.got.append((headers, await reader.readexactly(int(headers["Content-Length"]))))
        writer.write(f"HTTP/1.1 {self.status} Whatever\r\n\r\n".encode())
        writer.close()


class Mailbox:
    """What a mail server does with mail."""

    def __init__(self) -> None:
        self.mails: list[tuple[list[str], bytes]] = []

    async def handle_DATA(self, server, session, envelope):  # noqa: N802 - aiosmtpd's name
        self.mails.append((envelope.rcpt_tos, envelope.content))
        return "250 OK"


@pytest.fixture
def hook():
    hook = LoopWebhook()
    yield hook
    hook.listener.close()


@pytest.fixture
def settings(empty_database, hook):
    return ServerSettings(
        database=empty_database,
        alerts=AlertSettings(webhooks=True, webhook_hosts=frozenset([f"http://127.0.0.1:{hook.port}"])),
    )


@pytest.fixture
def post(client, clock, settings, hook):
    """Have the chore send what is due; how many it tried."""
    client.portal.call(hook.serve)
    chore = MessageSender(settings=settings.alerts, address="https://holdfast.example")

    def post(seconds: float = WAIT_SECONDS) -> int:
        clock.now += seconds
        return client.portal.call(chore.send_due, client.app.state.services.database, clock.now)

    yield post
    client.portal.call(hook.close)


def add(client, target, **more):
    reply = client.post(CHANNELS, json={"name": "on call", "target": target, **more})
    assert reply.status_code == 201, reply.text
    return reply.json()


def fall_silent(client, agent, clock):
    agent.start()
    agent.train(10)
    clock.now += 130
    evaluation.evaluate(client.app.state.services.database, clock.now)


def log(client, channel):
    return client.get(f"{CHANNELS}/{channel['id']}/deliveries").json()["deliveries"]


def test_pagerduty_opens_one_incident_for_an_alert_and_resolves_it(client, agent, clock, hook, post):
    channel = add(client, f"{hook.url}#R0123", kind="pagerduty")
    assert (channel["kind"], channel["secret"], "R0123" in channel["target"]) == ("pagerduty", None, False)
    fall_silent(client, agent, clock)
    post()
    report_again(client, clock, [agent])
    post()
    opened, resolved = (json.loads(body) for _, body in hook.got)
    assert [event["event_action"] for event in (opened, resolved)] == ["trigger", "resolve"]
    assert opened["dedup_key"] == resolved["dedup_key"]
    assert [event["routing_key"] for event in (opened, resolved)] == ["R0123"] * 2
    about = opened["payload"]
    assert (about["source"], about["severity"], about["class"]) == ("char-gpt", "critical", "silent")
    assert about["summary"].startswith("[critical] char-gpt: Job silent")
    number = client.get("/api/v1/alerts?state=all").json()["alerts"][0]["id"]
    page = f"https://holdfast.example/alerts/{number}"
    assert opened["client_url"] == page
    assert opened["links"] == [
        {"href": page, "text": "Open alert"}, {"href": f"{page}#acknowledge", "text": "Acknowledge"},
    ]  # fmt: skip
    assert [row["state"] for row in log(client, channel)] == ["delivered"] * 2


@pytest.fixture
def fleet(client, fresh_agent, clock):
    """Twelve jobs that fell silent together."""
    agents = [fresh_agent(client, job=f"job-{letter}") for letter in "abcdefghijkl"]
    for agent in agents:
        agent.start()
        agent.train(10)
    return agents


def evaluate(client, clock, seconds=0.0):
    clock.now += seconds
    evaluation.evaluate(client.app.state.services.database, clock.now)


def report_again(client, clock, agents):
    for _ in range(2):
        for agent in agents:
            agent.at = clock.now
            agent.train(1)
        evaluate(client, clock)
        clock.now += 61


def test_jobs_that_fall_silent_together_are_one_message_on_each_channel(client, fleet, clock, hook, post):
    slack, webhook = add(client, hook.url, kind="slack"), add(client, hook.url)
    evaluate(client, clock, 130)
    assert post() == 2
    assert post() == 0
    text = next(json.loads(body)["text"] for _, body in hook.got if b'"event"' not in body).splitlines()
    assert re.fullmatch(
        r"\[critical\] 12 jobs of default: Job silent since \d\d:\d\d UTC: "
        r"job-a, job-b, job-c, job-d, job-e …",
        text[0],
    )
    assert text[1] == "job-a: no report for 2 min (limit 2 min): the process on node-1 or its network may be down"
    assert text[-2] == "and 2 more"
    assert re.match(r"<https://holdfast.example/alerts/\d+\|Open alert> · ", text[-1])
    body = next(json.loads(body) for _, body in hook.got if b'"event"' in body)
    assert sorted(alert["job"] for alert in body["alerts"]) == [agent.job for agent in fleet]
    assert body["alert"] == body["alerts"][0]
    assert [row["state"] for row in log(client, slack) + log(client, webhook)] == ["delivered"] * 2
    report_again(client, clock, fleet[:3])
    assert post(0) == 2
    update = json.loads(hook.got[-1][1])["text"]
    assert "[critical] 9 jobs of default: Job silent" in update
    assert "Resolved: job-a, job-b, job-c" in update
    report_again(client, clock, fleet)
    assert post() == 2
    assert "[resolved] 12 jobs of default: Job silent" in json.loads(hook.got[-1][1])["text"]
    assert post(1e6) == 0


def test_jobs_that_fall_silent_minutes_later_join_the_incident_and_hours_later_open_another(
    client, fresh_agent, clock, hook, post
):
    add(client, f"{hook.url}#R0123", kind="pagerduty")
    agents = [fresh_agent(client, job=f"job-{letter}") for letter in "abc"]
    for pause, agent in zip((0, 60, groups.WINDOW_SECONDS + 60), agents, strict=True):
        clock.now += pause
        agent.at = clock.now
        agent.start()
        agent.train(10)
        evaluate(client, clock, 130)
        post(UPDATE_SECONDS)
    first, second, third = (json.loads(body) for _, body in hook.got)
    assert first["dedup_key"] == second["dedup_key"] != third["dedup_key"]
    assert second["payload"]["summary"].startswith("[critical] 2 jobs of default: Job silent")
    assert third["payload"]["summary"].startswith("[critical] job-c: Job silent")


def test_a_cause_and_its_effect_are_one_message_whichever_comes_first(client, agent, clock, hook, post):
    add(client, hook.url, kind="slack")
    rules = "/api/v1/projects/default/alert-rules"
    client.put(f"{rules}/durable_age", json={"limit": 590})
    client.put(f"{rules}/no_progress", json={"limit": 600})
    agent.start()
    agent.train(10)
    for _ in range(60):
        clock.now += 10
        agent.say()
    evaluate(client, clock)
    for _ in range(2):
        clock.now += 10
        agent.say()
    clock.now -= 10  # the message about the effect is not due yet
    evaluate(client, clock)
    assert {alert["rule"] for alert in client.get("/api/v1/alerts").json()["alerts"]} == {
        "durable_age", "no_progress",
    }  # fmt: skip
    assert post(60) == 1
    text = json.loads(hook.got[0][1])["text"].splitlines()
    assert text[0] == "[critical] char-gpt: No progress"
    assert text[2].startswith("Effect: Last durable checkpoint too old: no new durable checkpoint for ")


def test_the_end_of_a_silenced_alert_resolves_its_incident_and_tells_no_chat(client, agent, clock, hook, post):
    add(client, f"{hook.url}#R0123", kind="pagerduty")
    add(client, hook.url, kind="slack")
    fall_silent(client, agent, clock)
    assert post() == 2
    (alert,) = client.get("/api/v1/alerts").json()["alerts"]
    client.post(f"/api/v1/jobs/char-gpt/alerts/{alert['id']}/silence", json={"seconds": 86400})
    report_again(client, clock, [agent])
    assert post() == 1
    assert json.loads(hook.got[-1][1])["event_action"] == "resolve"


def test_opsgenie_opens_one_alert_by_its_alias_and_closes_it(client, agent, clock, hook, post):
    channel = add(client, f"{hook.url}#0b9c-key", kind="opsgenie")
    assert "key" not in channel["target"]
    fall_silent(client, agent, clock)
    post()
    report_again(client, clock, [agent])
    post()
    (headers, opened), (_, closed) = ((head, json.loads(body)) for head, body in hook.got)
    assert headers["Authorization"] == "GenieKey 0b9c-key"
    assert (opened["message"], opened["priority"]) == ("[critical] char-gpt: Job silent", "P1")
    assert hook.paths == ["/hook", f"/hook/{opened['alias']}/close?identifierType=alias"]
    assert "[resolved] char-gpt" in closed["note"]


def test_a_channel_receives_the_alerts_of_its_route(client, fresh_agent, clock, hook, post):
    by_label = add(client, hook.url, kind="slack", labels={"team": "nl*"})
    by_owner = add(client, hook.url, kind="slack", owner="ada")
    for job, owner, labels in (("a", "ada", {"team": "vision"}), ("b", "bob", {"team": "nlp"}), ("c", "", {})):
        agent = fresh_agent(client, job=job)
        agent.start(owner=owner, labels=labels)
        agent.train(10)
    evaluate(client, clock, 130)
    assert post() == 2
    heads = {json.loads(body)["text"].splitlines()[0] for _, body in hook.got}
    assert heads == {"[critical] a: Job silent", "[critical] b: Job silent"}
    client.post(f"{CHANNELS}/{by_label['id']}/test")
    assert post() == 1
    assert "alerts of 1 job now: b." in json.loads(hook.got[-1][1])["text"]
    changed = client.patch(f"{CHANNELS}/{by_owner['id']}", json={"owner": "*", "labels": {"team": "vision"}})
    assert (changed.status_code, changed.json()["labels"]) == (200, {"team": "vision"})
    refused = client.patch(f"{CHANNELS}/{by_owner['id']}", json={"labels": {"": "x"}})
    assert (refused.status_code, refused.json()["field"]) == (422, "labels")


def test_a_later_message_about_a_group_waits_for_the_earlier_one(client, agent, clock, hook, post):
    """Otherwise a try of the first one would open an incident again that the second one resolved."""
    add(client, f"{hook.url}#R0123", kind="pagerduty")
    fall_silent(client, agent, clock)
    hook.status = 503
    for pause in (WAIT_SECONDS, *RETRY_SECONDS[:4]):
        assert post(pause) == 1
    report_again(client, clock, [agent])
    assert post() == 0
    hook.status, before = 200, len(hook.got)
    assert (post(RETRY_SECONDS[4]), post(0)) == (1, 1)
    assert [json.loads(body)["event_action"] for _, body in hook.got[before:]] == ["trigger", "resolve"]


def test_a_rule_has_a_runbook_in_its_messages(client, agent, clock, hook, post):
    add(client, hook.url, kind="slack")
    url = "https://wiki.example.org/silent?a=1&b=2"
    rule = "/api/v1/projects/default/alert-rules/silent"
    assert client.put(rule, json={"runbook": url}).json()["runbook"] == url
    for bad in ("javascript:alert(1)", "wiki", "https://x/ y", "https://"):
        assert client.put(rule, json={"runbook": bad}).status_code == 422, bad
    fall_silent(client, agent, clock)
    post()
    assert "<https://wiki.example.org/silent?a=1&amp;b=2|Runbook>" in json.loads(hook.got[0][1])["text"]


def test_a_message_about_one_job_says_the_unsaved_work_and_what_to_do(client, agent, clock, hook, post):
    add(client, hook.url, kind="slack")
    fall_silent(client, agent, clock)
    post()
    assert json.loads(hook.got[0][1])["text"].splitlines()[2] == (
        "Silent for 2 min 25 s: last report from node-1; a crash has cost less than 1 s of training. "
        "If its process has ended, start the script again; otherwise check its network."
    )


def test_a_message_repeats_no_text_of_its_alert(client, agent, clock, hook, post):
    add(client, hook.url, kind="slack")
    agent.start()
    agent.train(10)
    for _ in range(62):
        clock.now += 10
        agent.say()
    evaluate(client, clock)
    post()
    text = json.loads(hook.got[0][1])["text"]
    assert text.count("no new iteration on node-1 for 10 min") == 1
    assert "Read the output of the running attempt, and restart it if it hangs." in text


def test_an_incident_of_several_jobs_is_resolved_by_the_last_of_them(client, fleet, clock, hook, post):
    channel = add(client, f"{hook.url}#R0123", kind="pagerduty")
    evaluate(client, clock, 130)
    assert post() == 1
    report_again(client, clock, fleet[:11])
    post(UPDATE_SECONDS)
    report_again(client, clock, fleet)
    post()
    opened, updated, resolved = (json.loads(body) for _, body in hook.got)
    assert [event["event_action"] for event in (opened, updated, resolved)] == ["trigger", "trigger", "resolve"]
    assert len({event["dedup_key"] for event in (opened, updated, resolved)}) == 1
    assert (opened["payload"]["source"], len(opened["payload"]["custom_details"])) == ("default", 12)
    assert {row["state"] for row in log(client, channel)} == {"delivered"}


@pytest.mark.parametrize("is_migrated", [True, False])
def test_the_incident_of_a_server_without_groups_is_resolved_and_none_is_opened(
    client, agent, clock, hook, post, is_migrated
):
    """Such a server named an incident by its alert, and its messages and alerts have no group."""
    add(client, f"{hook.url}#R0123", kind="pagerduty")
    fall_silent(client, agent, clock)
    post()
    alert = client.get("/api/v1/alerts").json()["alerts"][0]

    def as_before_groups(session):
        (row,) = session.scalars(select(models.AlertDeliveryRecord)).all()
        message = msgspec.msgpack.decode(row.payload)
        row.payload = msgspec.msgpack.encode({name: message[name] for name in ("event", "project", "alert")})
        if not is_migrated:
            row.group_id = session.get_one(models.AlertRecord, alert["id"]).group_id = None

    client.app.state.services.database.write(as_before_groups)
    report_again(client, clock, [agent])
    post()
    _, resolved = (json.loads(body) for _, body in hook.got)
    named = f"https://holdfast.example/default/char-gpt/silent/{alert['id']}"
    key = f"holdfast-{hashlib.sha256(named.encode()).hexdigest()}"
    assert (resolved["event_action"], resolved["dedup_key"]) == ("resolve", key)


def test_a_message_of_a_server_without_groups_that_waits_opens_the_incident_that_it_resolves(
    client, agent, clock, hook, post
):
    add(client, f"{hook.url}#R0123", kind="pagerduty")
    fall_silent(client, agent, clock)
    hook.status = 500
    post()

    def as_before_groups(session):
        (row,) = session.scalars(select(models.AlertDeliveryRecord)).all()
        message = msgspec.msgpack.decode(row.payload)
        row.payload = msgspec.msgpack.encode({name: message[name] for name in ("event", "project", "alert")})

    client.app.state.services.database.write(as_before_groups)
    hook.status = 202
    post(RETRY_SECONDS[0])
    report_again(client, clock, [agent])
    post()
    opened, resolved = (json.loads(body) for _, body in hook.got[1:])
    assert [opened["event_action"], resolved["event_action"]] == ["trigger", "resolve"]
    assert opened["dedup_key"] == resolved["dedup_key"]


def test_a_message_about_several_jobs_that_is_not_taken_is_tried_again_as_one(client, fleet, clock, hook, post):
    channel = add(client, hook.url)
    hook.status = 503
    evaluate(client, clock, 130)
    assert (post(), post(0)) == (1, 0)
    hook.status = 200
    assert (post(RETRY_SECONDS[0]), post()) == (1, 0)
    assert {(row["state"], row["tries"]) for row in log(client, channel)} == {("delivered", 2)}


def test_an_effect_of_an_open_alert_of_the_job_is_no_message(client, agent, clock, hook, post):
    add(client, hook.url, kind="slack")
    client.put("/api/v1/projects/default/alert-rules/durable_age", json={"limit": 600})
    agent.start()
    agent.train(10)
    for _ in range(62):
        clock.now += 10
        agent.say()
    evaluate(client, clock)
    found = client.get("/api/v1/alerts").json()["alerts"]
    assert {alert["rule"] for alert in found} == {"no_progress", "durable_age"}
    assert post() == 1
    assert "No progress" in json.loads(hook.got[0][1])["text"]
    agent.at = clock.now
    agent.train(1)
    agent.checkpoint()
    evaluate(client, clock)
    clock.now += 61
    agent.train(1)
    evaluate(client, clock)
    assert client.get("/api/v1/alerts").json()["alerts"] == []
    assert post(UPDATE_SECONDS) == 1
    assert "[resolved] char-gpt: No progress" in json.loads(hook.got[1][1])["text"]


def stop_without_checkpoints(client, agent, clock):
    """Open an alert about no progress, and one about no checkpoint, which it explains."""
    client.put("/api/v1/projects/default/alert-rules/durable_age", json={"limit": 600, "severity": "critical"})
    client.put("/api/v1/projects/default/alert-rules/no_progress", json={"severity": "warning"})
    agent.start()
    agent.train(10)
    for _ in range(62):
        clock.now += 10
        agent.say()
    evaluate(client, clock)


def go_on_without_checkpoints(client, agent, clock):
    for _ in range(2):
        agent.at = clock.now
        agent.train(1)
        evaluate(client, clock)
        clock.now += 61


def test_an_effect_is_sent_once_its_cause_has_ended_also_to_those_who_heard_of_none(
    client, agent, clock, hook, post
):
    add(client, hook.url, kind="slack", least_severity="critical")
    stop_without_checkpoints(client, agent, clock)
    assert post() == 0
    go_on_without_checkpoints(client, agent, clock)
    (left,) = client.get("/api/v1/alerts").json()["alerts"]
    assert left["rule"] == "durable_age"
    assert post() == 1
    assert "[critical] char-gpt: Last durable checkpoint too old" in json.loads(hook.got[0][1])["text"]


def test_a_channel_learns_nothing_of_a_job_that_was_moved_to_another_project(client, agent, clock, hook, post):
    add(client, hook.url, kind="slack")
    stop_without_checkpoints(client, agent, clock)
    assert post() == 1
    database = client.app.state.services.database
    projects.add(database, "another", who="x", now=clock.now)
    client.put("/api/v1/projects/another/alert-rules/durable_age", json={"limit": 600})
    projects.move_job(database, "char-gpt", "another", who="x", now=clock.now)
    go_on_without_checkpoints(client, agent, clock)
    assert post(UPDATE_SECONDS) == 0
    for _ in range(2):
        agent.at = clock.now
        agent.train(1)
        agent.checkpoint()
        evaluate(client, clock)
        clock.now += 61
    assert client.get("/api/v1/alerts").json()["alerts"] == []
    assert post(UPDATE_SECONDS) == 1
    assert "[resolved]" in json.loads(hook.got[1][1])["text"]


def test_nobody_is_woken_again_by_what_was_acknowledged(client, fleet, clock, hook, post):
    add(client, hook.url, kind="slack")
    evaluate(client, clock, 130)
    assert post() == 1
    for alert in client.get("/api/v1/alerts").json()["alerts"]:
        path = f"/api/v1/jobs/{alert['job']}/alerts/{alert['id']}/acknowledge"
        assert client.post(path).status_code == 200
    report_again(client, clock, fleet[:1])
    assert post(UPDATE_SECONDS) == 0
    report_again(client, clock, fleet)
    assert post(UPDATE_SECONDS) == 1
    assert "[resolved]" in json.loads(hook.got[1][1])["text"]


def test_slack_behind_another_url_receives_its_format(client, agent, clock, hook, post):
    add(client, hook.url, kind="slack")
    fall_silent(client, agent, clock)
    post()
    assert json.loads(hook.got[0][1]).keys() == {"text"}


def test_an_alert_arrives_signed(client, agent, clock, hook, post):
    channel = add(client, hook.url)
    fall_silent(client, agent, clock)
    assert post() == 1
    ((headers, body),) = hook.got
    told = json.loads(body)
    assert (told["event"], told["alert"]["rule"], told["url"]) == (
        "firing", "silent", f"https://holdfast.example/alerts/{told['alert']['id']}",
    )  # fmt: skip
    wanted = signature(body, channel["secret"], headers["X-Holdfast-Timestamp"])
    assert headers["X-Holdfast-Signature"] == f"v1={wanted}"
    assert int(headers["X-Holdfast-Delivery"]) == told["delivery"]
    assert [row["state"] for row in log(client, channel)] == ["delivered"]
    assert post() == 0


def test_the_secret_and_the_path_are_told_once(client, hook):
    made = add(client, hook.url)
    listed = client.get(CHANNELS).json()["channels"]
    assert made["secret"] not in json.dumps(listed)
    assert "/hook" not in json.dumps(listed)


def test_a_channel_shows_the_origin_of_its_address(client, hook):
    shown = [
        add(client, target)["target"]
        for target in (hook.url, "https://hooks.example.org/x", "0123456789abcdef0123456789abcdef")
    ]
    assert shown == [
        f"http://127.0.0.1:{hook.port}/…", "https://hooks.example.org/…", "https://events.pagerduty.com/…",
    ]  # fmt: skip


def test_one_that_is_not_taken_is_tried_again_later_and_given_up_in_the_end(client, agent, clock, hook, post):
    channel = add(client, hook.url)
    hook.status = 503
    fall_silent(client, agent, clock)
    for pause in (WAIT_SECONDS, *RETRY_SECONDS):
        assert post(pause - 1) == 0, "it is not due yet"
        assert post(1) == 1
    (row,) = log(client, channel)
    assert (row["state"], row["tries"]) == ("failed", len(RETRY_SECONDS) + 1)
    assert row["error"] == "127.0.0.1 answered with status 503"
    assert post(1e6) == 0


def test_a_restart_loses_no_message(settings, clock, hook, fresh_agent):
    with TestClient(create_app(settings, clock=clock), base_url=BASE_URL) as first:
        channel = add(first, hook.url)
        fall_silent(first, fresh_agent(first), clock)
    with TestClient(create_app(settings, clock=clock), base_url=BASE_URL) as second:
        second.portal.call(hook.serve)
        chore = MessageSender(settings=settings.alerts)
        clock.now += WAIT_SECONDS
        assert second.portal.call(chore.send_due, second.app.state.services.database, clock.now) == 1
        assert [row["state"] for row in log(second, channel)] == ["delivered"]
        second.portal.call(hook.close)


def test_nobody_is_told_what_is_silenced_or_beneath_their_notice(client, agent, clock, hook, post):
    add(client, hook.url, least_severity="critical")
    client.put("/api/v1/projects/default/alert-rules/silent", json={"severity": "warning"})
    fall_silent(client, agent, clock)
    assert post() == 0


def test_one_that_nobody_answers_at_holds_up_itself_alone(client, agent, clock, hook, post):
    """Its messages came first, and are more than are sent at a time."""
    dead = add(client, hook.url.replace("/hook", "/dead"))
    for _ in range(20):
        client.post(f"{CHANNELS}/{dead['id']}/test")
    clock.now += 1
    living = add(client, hook.url)
    client.post(f"{CHANNELS}/{living['id']}/test")
    hook.status = 500
    assert post() == deliveries.AT_ONCE
    assert [row["tries"] for row in log(client, living)] == [1]


def test_a_test_message_arrives_and_is_in_the_log(client, hook, post):
    channel = add(client, hook.url)
    asked = client.post(f"{CHANNELS}/{channel['id']}/test")
    assert (asked.status_code, asked.json()["state"]) == (202, "waiting")
    assert post() == 1
    assert json.loads(hook.got[0][1])["event"] == "test"
    assert [(row["event"], row["state"]) for row in log(client, channel)] == [("test", "delivered")]


def test_nothing_is_sent_to_a_channel_that_was_removed(client, agent, clock, hook, post):
    channel = add(client, hook.url)
    fall_silent(client, agent, clock)
    assert client.delete(f"{CHANNELS}/{channel['id']}").status_code == 204
    assert post() == 0
    assert client.delete(f"{CHANNELS}/{channel['id']}").status_code == 404


def test_webhooks_and_mail_are_off_until_the_operator_turns_them_on(empty_database, clock):
    app = create_app(ServerSettings(database=empty_database), clock=clock)
    with TestClient(app, base_url=BASE_URL) as client:
        hook = client.post(CHANNELS, json={"name": "x", "target": "https://hooks.slack.com/services/x"})
        mail = client.post(CHANNELS, json={"name": "x", "target": "a@example.org"})
    assert (hook.status_code, hook.json()["error"]) == (409, "webhooks_off")
    assert (mail.status_code, mail.json()["error"]) == (409, "mail_off")


@ON_SQLITE
@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"name": "x", "target": "https://10.0.0.1/"}, "target"),
        ({"name": "x", "target": "https://a:b@hooks.slack.com/"}, "target"),
        ({"name": "", "target": "https://hooks.slack.com/x"}, "name"),
        ({"name": "x", "target": "https://hooks.slack.com/x", "kind": "pigeon"}, "kind"),
        ({"name": "x", "target": "https://events.pagerduty.com/v2/enqueue"}, "target"),
        ({"name": "x", "target": "https://hooks.slack.com/x", "least_severity": "loud"}, "least_severity"),
        ({"name": "x", "target": "a@example.org, nobody"}, "target"),
        ({"name": "x", "target": "a@example.org\r\nBcc: b@example.org"}, "target"),
    ],
)
def test_a_channel_that_cannot_be_is_refused_by_its_field(client, asked, field):
    reply = client.post(CHANNELS, json=asked)
    assert (reply.status_code, reply.json()["field"]) == (422, field)


@pytest.fixture
def mailbox():
    """A mail server that asks for a name and a password."""
    box = Mailbox()

    def authenticate(server, session, envelope, mechanism, data):
        good = (data.login, data.password) == (b"holdfast", b"letter-box")
        return AuthResult(success=good, handled=good)

    controller = Controller(
        box, hostname="127.0.0.1", port=0, authenticator=authenticate, auth_required=True, auth_require_tls=False
    )
    controller.port = _free_port()
    controller.start()
    box.settings = AlertSettings(
        smtp_host="127.0.0.1", smtp_port=controller.port, smtp_user="holdfast", smtp_password="letter-box",
        smtp_from="holdfast@example.org", smtp_security="none",
    )  # fmt: skip
    yield box
    controller.stop()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")
def test_mail_arrives(mailbox, empty_database, clock, fresh_agent):
    app = create_app(ServerSettings(database=empty_database, alerts=mailbox.settings), clock=clock)
    with TestClient(app, base_url=BASE_URL) as client:
        channel = add(client, "a@example.org, b@example.org")
        fall_silent(client, fresh_agent(client), clock)
        chore = MessageSender(settings=mailbox.settings, address="https://holdfast.example")
        clock.now += WAIT_SECONDS
        assert client.portal.call(chore.send_due, client.app.state.services.database, clock.now) == 1
        assert [row["error"] for row in log(client, channel)] == [None]
    ((recipients, content),) = mailbox.mails
    mail = message_from_bytes(content)
    assert recipients == ["a@example.org", "b@example.org"]
    assert mail["Subject"] == "[critical] char-gpt: Job silent"
    assert re.search(r"^Acknowledge: https://holdfast.example/alerts/\d+#acknowledge\r$", mail.get_payload(), re.M)


@pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")
def test_a_message_that_cannot_be_sent_keeps_back_no_other(mailbox, hook, empty_database, clock, caplog):
    """Python's own mail client cannot log in with such a password, and says so in an error of another kind."""
    odd = replace(
        mailbox.settings, smtp_password="schlüssel", webhooks=True,
        webhook_hosts=frozenset([f"http://127.0.0.1:{hook.port}"]),
    )  # fmt: skip
    app = create_app(ServerSettings(database=empty_database, alerts=odd), clock=clock)
    with TestClient(app, base_url=BASE_URL) as client:
        client.portal.call(hook.serve)
        by_mail, by_hook = add(client, "a@example.org"), add(client, hook.url)
        for channel in (by_mail, by_hook):
            client.post(f"{CHANNELS}/{channel['id']}/test")
        sender = MessageSender(settings=odd)
        assert client.portal.call(sender.send_due, client.app.state.services.database, clock.now) == 2
        assert [row["state"] for row in log(client, by_hook)] == ["delivered"]
        (row,) = log(client, by_mail)
        assert (row["state"], row["tries"], row["next_at"]) == ("waiting", 1, clock.now + RETRY_SECONDS[0])
        assert "UnicodeEncodeError" in row["error"]
        assert "schlüssel" not in caplog.text
        client.portal.call(hook.close)


def test_a_password_is_never_shown():
    settings = AlertSettings.from_environment(
        {
            "HOLDFAST_SMTP_HOST": "mail",
            "HOLDFAST_SMTP_FROM": "h@example.org",
            "HOLDFAST_SMTP_PASSWORD": "letter-box",
        }
    )
    assert settings.smtp_password == "letter-box"
    assert "letter-box" not in repr(settings)
    assert (settings.smtp_port, settings.webhooks) == (587, False)


@pytest.mark.parametrize(
    "environment",
    [
        {"HOLDFAST_SMTP_SECURITY": "tls"},
        {"HOLDFAST_SMTP_HOST": "mail"},
        {"HOLDFAST_SMTP_PORT": "mail"},
        {"HOLDFAST_WEBHOOKS": "maybe"},
        {"HOLDFAST_SMTP_PASSWORD": "schlüssel"},
        {"HOLDFAST_WEBHOOK_HOSTS": "https://a/path"},
    ],
)
def test_a_setting_that_cannot_be_is_named(environment):
    with pytest.raises(ValueError, match=next(iter(environment)).replace("HOST", "(HOST|FROM)")):
        AlertSettings.from_environment(environment)


def test_the_chore_is_one_of_the_servers():
    chore = deliveries.chore(AlertSettings(), address="", metrics=ServerMetrics())
    assert (chore.name, chore.every_seconds) == ("alert deliveries", 2.0)


def test_a_channel_of_a_kind_that_the_server_lacks_delays_no_other(client, agent, clock, hook, post):
    missing, other = add(client, f"{hook.url}/secret"), add(client, hook.url)
    rows = models.AlertChannelRecord
    renamed = update(rows).where(rows.id == missing["id"]).values(kind="pigeon")
    client.app.state.services.database.write(lambda session: session.execute(renamed))
    fall_silent(client, agent, clock)
    post()
    assert len(hook.got) == 1
    assert [row["state"] for row in log(client, other)] == ["delivered"]
    (row,) = log(client, missing)
    assert (row["state"], "does not support this kind" in row["error"]) == ("failed", True)
    channels = {each["id"]: each for each in client.get(CHANNELS).json()["channels"]}
    assert channels[missing["id"]]["kind"] == "pigeon"
    page = client.get("/projects/default/alert-channels")
    assert page.status_code == 200
    assert re.search(r"pigeon\s+to …, severity", page.text)
    assert client.delete(f"{CHANNELS}/{missing['id']}").status_code == 204
