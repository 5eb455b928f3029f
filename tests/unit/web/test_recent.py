"""What changed in the last hour of a job, in one list, and the end of its output."""

from __future__ import annotations

from holdfast.protocol.wire import Notice, OutputReport

JOB = "/jobs/char-gpt"
API = f"/api/v1{JOB}"


def changes(client):
    page = client.get(JOB).text
    panel = page[page.index('id="recent"') : page.index('id="log"')]
    return [part.split("</li>")[0] for part in panel.split("<li ")[1:]]


def test_settings_restores_annotations_notices_and_starts_are_one_list_newest_first(agent, client, clock):
    clock.now += 1
    client.patch(f"{API}/desired", json={"budget": "2%"}, headers={"If-Match": '"0"'})
    clock.now += 1
    client.post(f"{API}/annotations", json={"iteration": 10, "text": "new data"})
    clock.now += 1
    point = client.get(f"{API}/checkpoints").json()["checkpoints"][-1]
    client.post(f"{API}/restores", json={"iteration": point["iteration"], "key": "k"})
    agent.events.append(
        Notice(at=clock.now + 1, iteration=10, lineage=1, level="warning", code="loader", message="slow disk")
    )
    agent.send()
    found = changes(client)
    kinds = [part.split('data-kind="')[1].split('"')[0] for part in found]
    assert kinds == ["notice", "restore", "annotation", "settings", "start"]
    assert "slow disk" in found[0]
    assert "new data" in found[2]


def test_what_is_older_than_an_hour_is_not_in_it(agent, client, clock):
    assert len(changes(client)) == 1
    clock.now += 4000
    agent.at = clock.now
    assert changes(client) == []


def test_a_job_that_is_not_all_right_shows_both_at_once(agent, client, clock):
    assert '<details class="panel" id="recent">' in client.get(JOB).text
    agent.fail("RuntimeError")
    clock.now += 1000
    assert '<details class="panel" id="recent" open>' in client.get(JOB).text


def test_the_log_is_that_of_the_newest_attempt(agent, client):
    assert "No output was reported" in client.get(f"{JOB}/log").text
    agent.supervise("restarting", "", OutputReport(at=agent.at, first=0, lines=["step 1", "step 2"]))
    page = client.get(f"{JOB}/log").text
    assert "step 1\nstep 2" in page or "step 1 step 2" in page
    assert f"{JOB}/attempts/1#output" in page


def test_each_place_of_the_local_navigation_is_on_the_page(agent, client):
    page = client.get(JOB).text
    nav = page[page.index('class="local-nav"') : page.index("</nav>", page.index('class="local-nav"'))]
    places = [part.split('"')[0] for part in nav.split('href="#')[1:]]
    assert len(places) == 11  # no ranks: it has one
    assert [place for place in places if f'id="{place}"' not in page] == []
