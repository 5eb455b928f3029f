"""The pages of alerts: without scripts, and as a browser shows them."""

from __future__ import annotations

import re
import time

import msgspec
import pytest
from playwright.sync_api import expect
from starlette.testclient import TestClient

from holdfast.client import Client
from holdfast_server.alerts import deliveries, evaluation
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.settings import ServerSettings
from holdfast_web import create_app
from tests.support.fake_agent import FakeAgent, over_client
from tests.support.web_fixtures import NOW

RULES = "/projects/default/alert-rules"
CHANNELS = "/projects/default/alert-channels"


@pytest.fixture
def silent(client: TestClient, agent: FakeAgent, clock) -> int:
    """The number of an alert: its job has fallen silent."""
    clock.now += 200
    evaluation.evaluate(client.app.state.services.database, clock.now)
    (alert,) = client.get("/api/v1/alerts").json()["alerts"]
    return int(alert["id"])


def test_an_alert_is_on_its_page_on_the_fleet_and_on_the_job(client, silent):
    for path in ("/alerts", "/alerts/live", "/jobs/char-gpt", "/jobs/char-gpt/live"):
        assert "Job silent" in client.get(path).text, path
    for path in ("/", "/fleet/live"):  # the verdict says it
        assert "Silent for" in client.get(path).text, path
    assert f'id="alert-{silent}"' in client.get("/jobs/char-gpt").text


def test_one_that_is_acknowledged_or_silenced_no_longer_asks_for_eyes_on_the_fleet(client, silent):
    reply = client.post(f"/jobs/char-gpt/alerts/{silent}/acknowledge", data={"back": "/jobs/char-gpt"})
    assert (reply.status_code, reply.headers["location"]) == (303, "/jobs/char-gpt")
    assert "acknowledged by operator" in client.get("/alerts").text
    page = client.get("/").text
    assert "data-severity" not in page
    assert re.search(r'<span class="row-alerts"[^>]*>1 alert, acknowledged</span>', page)
    assert client.get("/alerts/count").text == "0"


def test_silencing_works_without_scripts_and_can_be_undone(client, silent):
    assert client.post(f"/jobs/char-gpt/alerts/{silent}/silence", data={"seconds": "3600"}).status_code == 303
    assert "Silenced until" in client.get("/alerts").text
    assert client.post(f"/jobs/char-gpt/alerts/{silent}/unsilence").status_code == 303
    assert "Silenced until" not in client.get("/alerts").text
    refused = client.post(f"/jobs/char-gpt/alerts/{silent}/silence", data={"seconds": "for ever"})
    assert refused.status_code == 422


def test_a_click_on_what_has_just_resolved_shows_what_is_so(client, silent):
    client.put("/api/v1/projects/default/alert-rules/silent", json={"enabled": False})
    evaluation.evaluate(client.app.state.services.database, client.app.state.services.clock())
    assert client.post(f"/jobs/char-gpt/alerts/{silent}/acknowledge").status_code == 303
    assert "No open alerts" in client.get("/alerts").text
    assert "Job silent" in client.get("/alerts?state=all").text


def test_no_one_is_sent_elsewhere_by_a_form(client, silent):
    reply = client.post(f"/jobs/char-gpt/alerts/{silent}/acknowledge", data={"back": "//elsewhere.example/"})
    assert reply.headers["location"] == "/"


def test_an_alert_has_a_page_with_its_course_and_its_comments(client, silent, clock):
    page = client.get(f"/alerts/{silent}")
    assert (page.status_code, f'href="/alerts/{silent}"' in client.get("/alerts").text) == (200, True)
    assert 'id="acknowledge"' in page.text
    reply = client.post(f"/jobs/char-gpt/alerts/{silent}/comment", data={"text": "rack 3 is <down>"})
    assert (reply.status_code, reply.headers["location"]) == (303, f"/alerts/{silent}")
    assert "rack 3 is &lt;down&gt;" in client.get(f"/alerts/{silent}/live").text
    refused = client.post(f"/jobs/char-gpt/alerts/{silent}/comment", data={"text": " "})
    assert (refused.status_code, "a comment has 1 to" in refused.text) == (422, True)
    for action, data in (("silence", {"seconds": "3600"}), ("acknowledge", {})):
        clock.now += 1
        client.post(f"/jobs/char-gpt/alerts/{silent}/{action}", data=data)
    steps = client.get(f"/api/v1/alerts/{silent}").json()["steps"]
    assert [(step["state"], step.get("who"), step["text"]) for step in steps] == [
        ("fired", None, "critical"), ("comment", "operator", "rack 3 is <down>"),
        ("silenced", "operator", "for 1 h"), ("acknowledged", "operator", ""),
    ]  # fmt: skip
    assert client.get("/alerts/999").status_code == 404


def test_alerts_of_a_group_are_on_each_others_pages_and_acknowledged_at_once(client, clock):
    for job in ("a", "b"):
        agent = FakeAgent(over_client(client), job=job, started_at=NOW - 60)
        agent.start()
        agent.train(3)
        agent.send()
    clock.now += 200
    evaluation.evaluate(client.app.state.services.database, clock.now)
    first, second = (alert["id"] for alert in client.get("/api/v1/alerts").json()["alerts"])
    page = client.get(f"/alerts/{first}").text
    assert "Sent in the same messages" in page
    assert f'href="/alerts/{second}"' in page
    client.post("/alerts/acknowledge", data={"alert": [first, second]})
    assert "Acknowledge the group" not in client.get(f"/alerts/{first}").text


def test_a_rule_counts_its_alerts_and_has_a_runbook_on_their_pages(client, silent):
    url = "https://wiki.example.org/silent"
    form = {"severity": "critical", "limit": "2 min", "for_seconds": "0 s", "jobs": "*", "enabled": "on"}
    assert client.post(f"{RULES}/silent", data=form | {"runbook": url}).status_code == 303
    row = re.search(r'<tr class="rule" id="rule-silent".*?</tr>', client.get(RULES).text, re.DOTALL)
    assert row
    assert re.search(r'rule=silent">1</a>', row[0])
    assert f'value="{url}"' in row[0]
    assert f'href="{url}"' in client.get(f"/alerts/{silent}").text
    refused = client.post(f"{RULES}/silent", data=form | {"runbook": "javascript:alert(1)"})
    assert refused.status_code == 422


def test_a_rule_is_changed_and_put_back_on_its_page(client):
    changed = {"enabled": "on", "severity": "info", "limit": "30 min", "for_seconds": "1 min", "jobs": "gpt-*"}
    reply = client.post(f"{RULES}/no_progress", data=changed)
    assert (reply.status_code, reply.headers["location"]) == (303, f"{RULES}#rule-no_progress")
    page = client.get(RULES).text
    assert 'value="30 min"' in page
    assert 'value="gpt-*"' in page
    assert client.post(f"{RULES}/no_progress/remove").status_code == 303
    assert 'value="gpt-*"' not in client.get(RULES).text


def test_saving_each_rule_as_it_is_shown_changes_nothing_but_who_did(client):
    before = client.get("/api/v1/projects/default/alert-rules").json()["rules"]
    page = client.get(RULES).text
    for form in re.findall(
        r'<form class="field-line" method="post" action="([^"]*alert-rules/[^"]*)">(.*?)</form>', page, re.DOTALL
    ):
        path, html = form
        fields = dict(re.findall(r'name="(\w+)"[^>]*?value="([^"]*)"', html))
        fields["severity"] = re.findall(r"<option selected>(\w+)", html)[0]
        assert client.post(path, data=fields).status_code == 303
    after = client.get("/api/v1/projects/default/alert-rules").json()["rules"]
    for old, new in zip(before, after, strict=True):
        assert {**new, "changed_at": None, "changed_by": None} == {**old, "changed_at": None, "changed_by": None}


def test_a_rule_of_ones_own_is_added_or_refused_with_the_reason(client):
    asked = {"name": "long-runs", "kind": "durable_age", "severity": "critical", "limit": "4 h", "jobs": "llama-*"}
    assert client.post(RULES, data=asked).status_code == 303
    assert "long-runs" in client.get(RULES).text
    refused = client.post(RULES, data={**asked, "name": "other", "limit": "a while"})
    assert refused.status_code == 422
    assert "a time" in refused.text


def test_where_alerts_go_is_refused_until_the_operator_allows_it(client):
    assert re.search(r'name="target"[^>]* disabled>', client.get(CHANNELS).text)
    refused = client.post(CHANNELS, data={"name": "chat", "target": "https://hooks.slack.com/services/x"})
    assert refused.status_code == 409
    assert "HOLDFAST_WEBHOOKS=on" in refused.text
    assert 'value="https://hooks.slack.com/services/x"' in refused.text, "the input is lost"


def test_the_channels_show_messages_until_they_are_sent_and_whether_they_have_links(empty_database, clock):
    settings = ServerSettings(database=empty_database, alerts=AlertSettings(webhooks=True))
    with TestClient(create_app(settings, clock=clock), base_url="http://127.0.0.1:7117") as client:
        client.post(CHANNELS, data={"name": "chat", "target": "https://hooks.slack.com/services/x"})
        page = client.get(CHANNELS).text
        assert "(HOLDFAST_ADDRESS)" in page
        assert "hx-trigger" not in page
        (channel,) = client.get("/api/v1/projects/default/alert-channels").json()["channels"]
        deliveries.send_test(client.app.state.services.database, "default", channel["id"], now=clock.now)
        sent_at = clock.now
        for age, seconds in ((0, 2), (4, 4), (16, 16), (7200, 30)):  # each request doubles the wait for the next
            clock.now = sent_at + age
            page = client.get(CHANNELS).text
            assert f'hx-trigger="every {seconds}s"\n        hx-select="#messages-{channel["id"]}"' in page


@pytest.mark.parametrize("path", [RULES.replace("default", "nowhere"), CHANNELS.replace("default", "nowhere")])
def test_a_project_that_is_not_there_has_no_pages(client, path):
    assert client.get(path).status_code == 404


def test_many_alerts_are_grouped_filtered_and_acknowledged_at_once(client, clock):
    for number in range(3):
        agent = FakeAgent(over_client(client), job=f"sweep-{number}", started_at=NOW - 120)
        agent.start()
        agent.train(5)
        agent.send()
    clock.now += 200
    evaluation.evaluate(client.app.state.services.database, clock.now)
    page = client.get("/alerts").text
    assert page.count('class="alert-group"') == 1
    assert "3 alerts" in page
    assert "sweep-1" in client.get("/alerts?search=EEP-1").text
    assert "sweep-2" not in client.get("/alerts?search=EEP-1").text
    assert "No alert matches" in client.get("/alerts?severity=info").text
    numbers = set(re.findall(r'name="alert" value="(\d+)"', page))
    assert len(numbers) == 3
    reply = client.post("/alerts/acknowledge", data={"alert": [*numbers, "999"], "back": "/alerts?state=all"})
    assert (reply.status_code, reply.headers["location"]) == (303, "/alerts?state=all")
    assert client.get("/alerts").text.count("acknowledged by operator") == 3


def alert_of_team(client, clock, teams):
    """Jobs that have fallen silent, by their team."""
    for job, team in teams.items():
        agent = FakeAgent(over_client(client), job=job, started_at=NOW - 120)
        agent.start()
        agent.events[0] = msgspec.structs.replace(agent.events[0], labels={"team": team})
        agent.train(5)
        agent.send()
    clock.now += 200
    evaluation.evaluate(client.app.state.services.database, clock.now)


def test_alerts_are_filtered_by_label_of_the_job(client, clock):
    alert_of_team(client, clock, {"a": "vision", "b": "nlp"})
    for query, jobs in {"team": ["b", "a"], "team: nlp": ["b"], "team: nlp, sweep": []}.items():
        page = client.get("/alerts", params={"label": query}).text
        assert (
            re.findall(r'class="alert-title".{0,60}</a><a href="/jobs/(\w)">', page.replace("> <", "><")) == jobs
        )
    assert 'value="team: nlp"' in client.get("/alerts?label=team:+nlp").text
    assert client.get("/alerts?label=:x").status_code == 422
    found = client.get("/api/v1/alerts?label=team:+vision").json()["alerts"]
    assert [alert["job"] for alert in found] == ["a"]


def test_all_alerts_that_are_shown_are_silenced_at_once_and_again_heard(client, clock):
    alert_of_team(client, clock, {"a": "vision", "b": "nlp", "c": "nlp"})
    page = client.get("/alerts?label=team:+nlp").text
    form = re.search(r'action="/alerts/silence".*?</form>', page)
    assert form
    assert "Silence all 2 shown" in form[0]
    numbers = re.findall(r'name="alert" value="(\d+)"', form[0])
    back = "/alerts?label=team%3A+nlp"
    data = {"alert": [*numbers, "999"], "seconds": "28800", "back": back}
    reply = client.post("/alerts/silence", data=data)
    assert (reply.status_code, reply.headers["location"]) == (303, back)
    states = {alert["job"]: alert["state"] for alert in client.get("/api/v1/alerts").json()["alerts"]}
    assert states == {"a": "firing", "b": "silenced", "c": "silenced"}
    entries = client.get("/api/v1/audit").json()["entries"]
    assert [entry["action"] for entry in entries[:2]] == ["alert.silence"] * 2
    assert "End silence of all 2 shown" in client.get("/alerts?state=silenced").text
    client.post("/alerts/unsilence", data={"alert": numbers})
    assert {alert["state"] for alert in client.get("/api/v1/alerts").json()["alerts"]} == {"firing"}
    assert client.post("/alerts/silence", data=data | {"seconds": "a while"}).status_code == 422


def test_the_list_of_alerts_has_the_last_comment(client, silent, clock):
    assert "last-comment" not in client.get("/alerts").text
    for text in ("rack 3?", "rack 3 is <down>"):
        client.post(f"/jobs/char-gpt/alerts/{silent}/comment", data={"text": text})
    page = client.get("/alerts").text
    assert "2 comments</a>, the last by <bdi>operator</bdi>" in page
    assert "rack 3 is &lt;down&gt;" in page
    (alert,) = client.get("/api/v1/alerts").json()["alerts"]
    assert (alert["comments"], alert["last_comment"]["text"]) == (2, "rack 3 is <down>")


def test_a_restore_of_ones_own_is_no_alert(client, agent, clock):
    agent.ask("/api/v1/jobs/char-gpt/restores", b'{"iteration": 200}')
    agent.obey(agent.desired())
    agent.send()
    evaluation.evaluate(client.app.state.services.database, clock.now)
    assert client.get("/api/v1/alerts?state=all").json()["alerts"] == []
    assert "Restored to" in client.get("/jobs/char-gpt").text


def test_alerts_are_grouped_by_job_and_filtered_by_state_and_rule(client, clock):
    for number in range(2):
        agent = FakeAgent(over_client(client), job=f"sweep-{number}", started_at=NOW - 120)
        agent.start()
        agent.train(5)
        agent.fail("OSError")
        agent.supervise("gave_up", "OSError", start=5)
    evaluation.evaluate(client.app.state.services.database, clock.now)
    client.put("/api/v1/projects/default/alert-rules/failures", json={"kind": "job_failed"})
    evaluation.evaluate(client.app.state.services.database, clock.now)
    by_job = client.get("/alerts?group=job").text
    assert (by_job.count('class="alert-group"'), "<h2>sweep-1</h2>" in by_job) == (2, True)
    numbers = re.findall(r'name="alert" value="(\d+)"', by_job.partition('id="group-sweep-1"')[2])
    back = re.search(r'name="back" value="([^"]*)"', by_job)
    assert back
    assert back[1] == "/alerts?group=job"
    assert client.post("/alerts/acknowledge", data={"alert": numbers, "back": back[1]}).status_code == 303
    assert client.get("/alerts?state=acknowledged").text.count('class="alert"') == 2
    assert client.get("/alerts?state=firing&rule=failures").text.count('class="alert"') == 1
    assert '<option value="failures" selected>' in client.get("/alerts?rule=failures").text
    assert "No alert matches" in client.get("/alerts?state=silenced").text


@pytest.mark.browser
@pytest.mark.parametrize("width", [1440, 1024, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_pages_fit_and_break_no_rule_of_ours(open_page, served, width, theme):
    alerts = Client(served.url).alerts.find(history=True)
    for path in ("/alerts", "/alerts?state=all", RULES, CHANNELS, *(f"/alerts/{row.id}" for row in alerts[:1])):
        page = open_page(path, width=width, theme=theme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path


@pytest.mark.browser
def test_an_alert_appears_and_is_acknowledged_on_an_open_page(open_page, served):
    """The page updates without a reload."""
    agent = served.agent("falls-over", started_at=time.time() - 60)
    agent.start()
    agent.train(20)
    agent.send()
    page = open_page("/jobs/falls-over")
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    expect(page.locator("#alerts .alert")).to_have_count(0)
    agent.fail("RuntimeError: out of memory")
    agent.supervise("gave_up", "out of memory", start=5)
    alert = page.locator("#alerts .alert", has_text="Job failed")
    expect(alert).to_have_attribute("data-state", "firing")
    alert.get_by_role("button", name="Acknowledge").click()
    expect(alert).to_have_attribute("data-state", "acknowledged")


@pytest.mark.browser
def test_from_the_page_of_an_alert_one_acknowledges_comments_and_restores(open_page, served):
    client = Client(served.url)
    client.alerts.change_rule("loss_nan", for_seconds=0)
    agent = served.agent("diverges", started_at=time.time() - 600)
    agent.start()
    agent.train(400, nan_at=range(390, 1000))
    agent.send()
    page = open_page("/jobs/diverges")
    alert = page.locator("#alerts .alert", has_text="Loss not finite")
    expect(alert).to_have_attribute("data-state", "firing")
    alert.get_by_role("link", name="Loss not finite").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Loss not finite")
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    page.get_by_role("button", name="Acknowledge Loss not finite of diverges").click()
    expect(page.locator("#alert > div > .alerts > .alert")).to_have_attribute("data-state", "acknowledged")
    expect(page.locator(".course")).to_contain_text("Acknowledged")
    page.get_by_label("Comment").fill("the data of shard 7 are broken")
    page.get_by_role("button", name="Add comment").click()
    expect(page.locator(".course .comment", has_text="shard 7")).to_be_visible()
    page.get_by_role("link", name=re.compile("^Restore to ")).click()
    expect(page.get_by_role("heading", name=re.compile("Restore"))).to_be_visible()
    (found,) = client.alerts.find(job="diverges")
    assert found.acknowledged_by == "operator"
