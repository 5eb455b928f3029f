from __future__ import annotations

import re

import msgspec
from starlette.testclient import TestClient

from holdfast.protocol.wire import AttemptFinished, AttemptStarted, IntervalDecision
from holdfast_server.alerts import evaluation
from holdfast_web.shared.filters import share
from tests.support.clock import FakeClock
from tests.support.fake_agent import FakeAgent, over_client
from tests.support.web_fixtures import NOW

HEAD = re.compile(r"<thead>.*?</thead>")


def test_a_first_run_gives_the_lines_to_paste(client: TestClient) -> None:
    page = client.get("/").text
    assert "No job has reported yet" in page
    assert "http://127.0.0.1:7117" in page
    assert "session.step(loss=loss)" in page


def test_a_job_is_shown_with_its_figures_and_their_windows(client: TestClient, agent: FakeAgent) -> None:
    page = client.get("/").text
    assert 'href="/jobs/char-gpt"' in page
    assert 'title="Last 240 iterations"' in page
    assert "every 40" in page
    assert "checkfreq" in page
    assert "No job has reported yet" not in page


def test_a_job_is_shown_with_its_host_which_the_search_finds(client: TestClient, agent: FakeAgent) -> None:
    page = client.get("/?search=node-3").text
    assert 'title="char-gpt on node-3"' in page
    assert "<small><bdi>node-3</bdi></small>" in page
    assert "from <b><bdi>node-3</bdi></b>" in client.get("/jobs/char-gpt").text


def test_the_search_keeps_what_it_was_asked_for(client: TestClient, agent: FakeAgent) -> None:
    assert 'id="job-char-gpt"' in client.get("/?search=gpt").text
    page = client.get('/?search=<b>"other').text
    assert "No job matches “&lt;b&gt;&#34;other”" in page
    assert 'id="job-char-gpt"' not in page


def test_the_live_part_is_the_same_rows(client: TestClient, agent: FakeAgent) -> None:
    answer = client.get("/fleet/live", headers={"HX-Request": "true"})
    assert answer.text.count("<hx-partial") == 1
    assert 'id="job-char-gpt"' in answer.text
    assert "<html" not in answer.text


def test_living_jobs_keep_their_place(client: TestClient, agent: FakeAgent) -> None:
    other = FakeAgent(over_client(client), job="a-second", started_at=agent.at)
    other.start()
    other.train(3)
    other.send()
    for speaker in (agent, other, agent):
        speaker.train(1)
        speaker.send()
        page = client.get("/").text
        assert page.index('id="job-a-second"') < page.index('id="job-char-gpt"')


def test_a_page_is_never_taken_from_a_cache(client: TestClient) -> None:
    headers = client.get("/").headers
    assert headers["cache-control"] == "no-store"
    assert "HX-Request" in headers["vary"]


def many(client: TestClient, jobs: int) -> None:
    for number in range(jobs):
        other = FakeAgent(over_client(client), job=f"job-{number:02d}", started_at=NOW - 60)
        other.start()
        other.train(2)
        other.send()


def test_jobs_come_a_page_at_a_time_and_the_address_says_which(client: TestClient) -> None:
    many(client, 30)
    page = client.get("/?size=25&page=2&sort=name").text
    assert page.count('<tr id="job-') == 5
    assert "26 to 30 of 30 jobs" in page
    assert 'href="/?sort=name&amp;size=25"' in page
    assert 'aria-current="page">2</a>' in page
    assert client.get("/").text.count('<tr id="job-') == 30


def test_the_live_part_stays_on_its_page(client: TestClient) -> None:
    many(client, 30)
    answer = client.get("/fleet/live?search=&status=&project=&sort=name&size=25&page=2").text
    assert answer.count('<tr id="job-') == 5
    assert '<input type="hidden" id="fleet-page" name="page" value="2">' in answer


def test_jobs_of_one_status_are_a_link_away(client: TestClient, agent: FakeAgent) -> None:
    page = client.get("/").text
    assert 'href="/?status=running"' in page
    assert 'id="job-char-gpt"' in client.get("/?status=running").text
    nothing = client.get("/?status=failed").text
    assert "No failed job" in nothing
    assert "No job has reported yet" not in nothing


def test_a_question_that_cannot_be_is_a_page_that_says_so(client: TestClient) -> None:
    for query in ("sort=weight", "hide=job", "label=:x", "status=asleep", "page=0", "size=-1", "size=ten"):
        assert client.get(f"/?{query}").status_code == 422, query


def test_each_column_sorts(client: TestClient, agent: FakeAgent) -> None:
    links = re.findall(r'href="(/\?sort=[^"]*)"', client.get("/").text)
    assert len(links) >= 10
    for link in links:
        assert client.get(link).status_code == 200, link


def order_in(page: str) -> list[str]:
    return re.findall(r'<tr id="job-([^"]+)"', page)


def test_what_is_worst_comes_first_when_asked_for(client: TestClient, agent: FakeAgent, clock: FakeClock) -> None:
    """`agent` risks 40 iterations; `rushed` is over its budget; `bare` has no checkpoint at all."""
    rushed = FakeAgent(over_client(client), job="rushed", started_at=NOW - 60, budget=0.005)
    rushed.start()
    rushed.train(125)
    rushed.send()
    bare = FakeAgent(over_client(client), job="bare", started_at=NOW - 300)
    bare.interval = 1000
    bare.start()
    bare.train(200)
    bare.send()
    clock.now = agent.at
    assert order_in(client.get("/?sort=unsaved").text)[0] == "bare"
    assert order_in(client.get("/?sort=overhead").text)[0] == "rushed"
    assert order_in(client.get("/?sort=durable").text)[0] == "bare"
    assert (
        order_in(client.get("/?sort=unsaved&size=2&page=2").text)
        == order_in(client.get("/?sort=unsaved").text)[2:]
    )


def test_a_header_sorts_and_sorts_the_other_way_when_it_is_followed_again(client: TestClient) -> None:
    many(client, 3)
    header = HEAD.findall(client.get("/").text)[0]
    assert "aria-sort" not in header
    assert 'href="/?sort=name"' in header
    page = client.get("/?sort=name").text
    assert re.search(r'aria-sort="ascending"><a href="/\?sort=-name">', page)
    assert order_in(page) == ["job-00", "job-01", "job-02"]
    reversed_page = client.get("/?sort=-name").text
    assert 'aria-sort="descending"' in reversed_page
    assert order_in(reversed_page) == ["job-02", "job-01", "job-00"]
    assert '<option value="-name" selected>Name, reversed</option>' in reversed_page


def test_every_order_can_be_turned_around(client: TestClient, agent: FakeAgent) -> None:
    slow = FakeAgent(over_client(client), job="slow", started_at=NOW - 300)
    slow.start()
    slow.train(60)
    slow.samples.seconds = [4.0] * 60
    slow.send()
    for order in ("attention", "name", "heard", "iteration", "status", "owner", "unsaved", "overhead", "durable",
                  "loss", "interval", "iteration_time"):  # fmt: skip
        there, back = (order_in(client.get(f"/?sort={sign}{order}").text) for sign in ("", "-"))
        assert sorted(there) == sorted(back) == ["char-gpt", "slow"], order
    assert order_in(client.get("/?sort=iteration_time").text) == ["slow", "char-gpt"]
    assert order_in(client.get("/?sort=-iteration_time").text) == ["char-gpt", "slow"]


def labelled(client: TestClient) -> None:
    for job, owner, labels in (
        ("a", "ada", {"team": "vision", "seed": "1"}),
        ("b", "ada", {"team": "vision", "seed": "2"}),
        ("c", "bob", {"vision": "team"}),
        ("d", "bob", {"say": '"team":"vision"'}),
    ):
        launched = FakeAgent(over_client(client), job=job, started_at=NOW - 60)
        launched.start()
        started = launched.events[0]
        assert isinstance(started, AttemptStarted)
        started.owner, started.labels = owner, labels
        launched.send()


def test_jobs_are_filtered_by_owner_and_by_labels(client: TestClient) -> None:
    labelled(client)
    for query, expected in (
        ("owner=ada", "ab"), ("owner=Ada", ""), ("label=team", "ab"), ("label=team:vision", "ab"),
        ("label=team: vision, seed: 2", "b"), ("label=vision", "c"), ("label=Team", ""), ("label=tea", ""),
        ("owner=bob&label=team", ""),
    ):  # fmt: skip
        assert order_in(client.get(f"/?sort=name&{query}").text) == list(expected), query
    answer = client.get("/api/v1/jobs?label=team&label=seed:1&owner=ada").json()
    assert [job["job"] for job in answer["jobs"]] == ["a"]


def test_owners_and_labels_of_a_row_are_filters_which_can_be_removed(client: TestClient) -> None:
    labelled(client)
    page = client.get("/?owner=ada&sort=name").text
    assert 'href="/?owner=ada&amp;label=seed%3A+1&amp;sort=name">seed: 1</a>' in page
    assert 'href="/?sort=name" aria-label="Remove the filter: owner ada"' in page
    assert "Select all 2 jobs that match" in page


def test_hidden_columns_stay_hidden_on_every_link_of_the_page(client: TestClient, agent: FakeAgent) -> None:
    page = client.get("/?hide=loss&hide=owner").text
    assert "Loss</" not in HEAD.findall(page)[0]
    assert 'data-label="Owner"' not in page
    assert 'data-label="Iteration"' in page
    assert 'href="/?status=running&amp;hide=owner&amp;hide=loss"' in page
    grouped = client.get("/?hide=loss&group=project").text
    assert 'colspan="10"' in grouped


def test_a_row_restores_the_newest_durable_checkpoint_after_a_confirmation(
    client: TestClient, agent: FakeAgent
) -> None:
    page = client.get("/").text
    (link,) = re.findall(r'href="(/jobs/char-gpt/restore[^"]*)"', page)
    newest = client.get("/api/v1/jobs/char-gpt").json()["last_durable"]["id"]
    assert link == f"/jobs/char-gpt/restore?checkpoint={newest}"
    assert "Restore char-gpt to" in client.get(link).text


def ended(client: TestClient, name: str) -> None:
    other = FakeAgent(over_client(client), job=name, started_at=NOW - 60)
    other.start()
    other.train(2)
    other.fail("RuntimeError: no data")
    other.supervise("gave_up", "no data", start=5)


def test_a_bulk_pause_names_the_jobs_that_do_not_run_and_their_rows_show_it(
    client: TestClient, agent: FakeAgent
) -> None:
    ended(client, "broken")
    chip = '<span class="chip">checkpoints paused</span>'
    assert chip not in client.get("/").text + client.get("/jobs/broken").text
    asked = client.post("/fleet/confirm", data={"action": "pause", "all_matching": "1", "back": "/"}).text
    assert (
        "<p>char-gpt</p><p><strong>Not running; applies at the next start:</strong> broken</p>"
        in asked.replace("</p> <p>", "</p><p>")
    )
    answer = client.post("/fleet/change", data={"action": "pause", "jobs": "broken char-gpt", "back": "/"}).text
    assert "2 jobs paused" in answer
    # the verdict says it of the job that runs
    assert client.get("/").text.count(chip) == 1
    assert chip in client.get("/jobs/broken").text
    assert "Checkpoints paused; a crash now costs" in client.get("/jobs/char-gpt").text
    agent.obey(agent.desired())
    agent.send()
    assert client.get("/").text.count("<bdi>Checkpoints paused") == 1
    again = dict(
        re.findall(r'<(?:input type="hidden"|button class="button") name="(\w+)" value="([^"]+)"', answer)
    )
    assert again == {"back": "/", "job": "char-gpt", "action": "resume"}
    assert "Resume checkpoints of 2 jobs…" in answer
    assert (
        "Resume checkpoints of 2 jobs?"
        in client.post(
            "/fleet/confirm", data={"action": "resume", "job": ["broken", "char-gpt"], "back": "/"}
        ).text
    )
    acknowledged = client.post("/fleet/change", data={"action": "checkpoint", "jobs": "char-gpt"}).text
    assert "Resume" not in acknowledged


def test_jobs_that_need_attention_come_first_when_asked_for(
    client: TestClient, agent: FakeAgent, clock: FakeClock
) -> None:
    """`char-gpt` was silent and reports again, before its alert has resolved."""
    quiet, healthy = (FakeAgent(over_client(client), job=name, started_at=NOW) for name in ("quiet", "a-healthy"))
    quiet.start()
    quiet.train(2)
    quiet.send()
    ended(client, "broken")
    clock.now += 200
    evaluation.evaluate(client.app.state.services.database, clock.now)
    healthy.start()
    for running in (agent, healthy):
        running.train(1)
        running.send()
    assert order_in(client.get("/?sort=attention").text) == ["broken", "quiet", "char-gpt", "a-healthy"]
    warned = FakeAgent(over_client(client), job="a-warned", started_at=clock.now)
    warned.start()
    warned.train(5)
    warned.send()
    rule = {"kind": "unsaved_iterations", "severity": "warning", "limit": 1, "for_seconds": 0, "jobs": "a-warned"}
    assert client.put("/api/v1/projects/default/alert-rules/unsaved", json=rule).status_code == 200
    evaluation.evaluate(client.app.state.services.database, clock.now)
    # an alert of char-gpt is critical
    assert order_in(client.get("/?sort=attention").text) == [
        "broken",
        "quiet",
        "char-gpt",
        "a-warned",
        "a-healthy",
    ]
    alerts = client.get("/api/v1/alerts").json()["alerts"]
    (fires,) = (alert["id"] for alert in alerts if alert["job"] == "char-gpt")
    client.post(f"/jobs/char-gpt/alerts/{fires}/acknowledge")
    assert order_in(client.get("/?sort=attention").text) == [
        "broken",
        "quiet",
        "a-warned",
        "a-healthy",
        "char-gpt",
    ]


def test_jobs_of_a_project_stand_together(client: TestClient, agent: FakeAgent) -> None:
    client.get("/?group=project")
    page = client.get("/?group=project&sort=name").text
    assert re.search(r'<tr class="group-row"><th scope="rowgroup" colspan="11">default <small>1 job, ', page)
    assert "group=project" in re.findall(r'href="(/\?[^"]*status=running[^"]*)"', page)[0]
    assert client.get("/?group=colour").status_code == 422


def test_an_overhead_that_was_not_measured_yet_is_shown_to_be_so(client: TestClient) -> None:
    young = FakeAgent(over_client(client), job="young", started_at=NOW)
    young.start()
    young.train(3)
    young.pace()
    paced = young.events[-1]
    assert isinstance(paced, IntervalDecision)
    paced.measured_overhead, paced.measured_window_iterations = None, 0
    young.send()
    page = client.get("/").text
    assert 'title="Not measured yet"' in page
    assert "last 0 iterations" not in page


def test_the_reason_is_next_to_the_status_and_says_it_once(
    client: TestClient, agent: FakeAgent, clock: FakeClock
) -> None:
    agent.events.append(AttemptFinished(at=agent.at, iteration=400, lineage=1, reason="RuntimeError: boom"))
    agent.send()
    clock.now = agent.at
    page = client.get("/").text
    assert re.search(r'data-level="warning">.{0,120}<bdi>Restarting [^<]*boom', page)
    clock.now += 3600
    evaluation.evaluate(client.app.state.services.database, clock.now)
    page = client.get("/").text
    assert re.search(r'data-level="critical">.{0,120}<bdi>Failed [^<]*boom', page)
    assert "data-says-status" in page
    assert "row-alerts" not in page


def test_a_job_that_runs_has_its_verdict_without_its_status(client: TestClient, agent: FakeAgent) -> None:
    for _ in range(3):
        agent.train(12)
        made = agent._checkpoint("scheduled")
        agent.open.clear()
        agent.events.append(msgspec.structs.replace(made, state="failed", reason="no space left on device"))
    agent.send()
    row = client.get("/").text.partition("<tbody>")[2]
    assert "3 checkpoints failed, no space left on device" in row
    assert "data-says-status" in row


def test_a_checkpoint_that_is_long_overdue_is_late(client: TestClient, agent: FakeAgent, clock: FakeClock) -> None:
    clock.now = agent.at
    assert "late" not in client.get("/").text
    agent.interval = 20
    agent.pace()
    agent.open.clear()
    agent.interval = 1000
    agent.train(19)
    agent.send()
    clock.now = agent.at
    assert ", late<" in client.get("/").text
    agent.fail("OutOfMemoryError")
    agent.supervise("restarting", "CUDA out of memory", start=1, limit=5)
    assert "late" not in client.get("/").text  # the script takes no checkpoint until it runs again


def test_the_goodput_of_the_fleet_is_that_of_each_job(
    client: TestClient, agent: FakeAgent, clock: FakeClock
) -> None:
    agent.crash(7)
    agent.train(30)
    agent.send()
    clock.now = agent.at + 5
    expected = client.get(f"/api/v1/jobs/{agent.job}/goodput?window=1h").json()["goodput"]
    assert re.search(rf'data-label="Goodput, 1 h">{share(expected)}<small><span>of \d min', client.get("/").text)


def test_the_first_job_takes_the_place_of_the_lines_to_paste(client: TestClient, agent: FakeAgent) -> None:
    live = client.get("/fleet/live").text
    assert 'id="job-char-gpt"' in live
    assert "No job has reported yet" not in live


def test_the_live_part_of_an_empty_fleet_is_the_lines_to_paste(client: TestClient) -> None:
    assert "No job has reported yet" in client.get("/fleet/live").text
