"""The archive of ended jobs, their deletion at once, and saved views of the fleet."""

from __future__ import annotations

import pytest

from holdfast_server.accounts import people
from holdfast_server.control.saved_views import MOST_NAME, MOST_VIEWS
from holdfast_server.core import access
from holdfast_server.core.principal import Role
from tests.support.accounts_server import OURS, OWN, AccountsServer
from tests.support.fake_agent import FakeAgent, over_client
from tests.support.web_fixtures import NOW

JOBS = "/api/v1/jobs"


@pytest.fixture
def jobs(client):
    """One job that runs and two that have ended."""
    agents = {name: FakeAgent(over_client(client), job=name, started_at=NOW - 60) for name in ("a", "b", "runs")}
    for name, agent in agents.items():
        agent.start()
        agent.train(2)
        if name != "runs":
            agent.fail("RuntimeError: no data")
            agent.supervise("gave_up", "no data", start=5)
        agent.send()
    return agents


def listed(client, **query):
    answer = client.get(JOBS, params=query).json()
    return sorted(job["job"] for job in answer["jobs"]), answer["archived"], answer["total"]


def change(client, action, *names, **more):
    return client.post(f"{JOBS}/changes", json={"action": action, "jobs": list(names), **more}).json()


def refusals(answer):
    return {one["job"]: one["refusal"] for one in answer["outcomes"]}


def test_lists_leave_out_archived_jobs_until_they_are_asked_for(client, jobs):
    answer = change(client, "archive", "a", "runs")
    assert refusals(answer) == {"a": "", "runs": "the job is running: stop it first"}
    assert listed(client) == (["b", "runs"], 1, 2)
    assert listed(client, archived=True) == (["a"], 1, 1)
    assert listed(client, archived=True, status="running") == ([], 1, 0)
    assert refusals(change(client, "archive", "a"))["a"] == "the job is archived already"
    page = client.get("/").text
    assert 'id="job-a"' not in page
    assert "1 archived" in page
    assert 'id="job-a"' in client.get("/?archived=1").text
    assert client.get(f"{JOBS}/a").status_code == 200
    assert {"job.archive"} == {entry["action"] for entry in client.get("/api/v1/audit").json()["entries"]}


def test_all_that_match_in_the_archive_are_taken_out(client, jobs):
    change(client, "archive", "a", "b")
    everything = {"action": "unarchive", "filter": {"archived": True}}
    assert client.post(f"{JOBS}/changes", json=everything).json()["changed"] == 2
    assert listed(client)[:2] == (["a", "b", "runs"], 0)


def test_a_job_that_starts_again_is_no_longer_archived(client, jobs, clock):
    change(client, "archive", "a")
    clock.now += 10
    again = FakeAgent(over_client(client), job="a", started_at=clock.now, attempt=2)
    again.start()
    again.train(1)
    again.send()
    assert listed(client)[:2] == (["a", "b", "runs"], 0)


def test_ended_jobs_are_deleted_at_once_after_a_question(client, jobs):
    asked = client.post("/fleet/confirm", data={"action": "delete", "job": ["a", "b", "runs"]}).text
    assert "Delete 2 jobs" in asked
    assert "deleted permanently" in asked
    answer = client.post("/fleet/change", data={"action": "delete", "jobs": "a b runs"}).text
    assert "2 jobs deleted" in answer
    assert listed(client) == (["runs"], 0, 1)
    assert client.get(f"{JOBS}/a").status_code == 404


def test_only_administrators_with_a_recent_password_delete(stage: AccountsServer, clock):
    stage.project(OWN, f"job-of-{OWN}")
    operator = stage.cookie(stage.person("olga", Role.operator)) | OURS
    wanted = {"action": "delete", "jobs": [f"job-of-{OWN}"], "preview": True}
    refused = stage.client.post(f"{JOBS}/changes", json=wanted, headers=operator).json()
    assert "only an administrator" in refused["outcomes"][0]["refusal"]
    ada = stage.cookie(stage.person_with_password("ada", Role.admin)) | OURS
    assert stage.client.post(f"{JOBS}/changes", json=wanted, headers=ada).status_code == 200
    clock.now += access.RECENT_PASSWORD_SECONDS + 1
    form = {"action": "delete", "jobs": f"job-of-{OWN}", "job": f"job-of-{OWN}"}
    for path, body in (
        (f"{JOBS}/changes", {"json": wanted}),
        *((path, {"data": form}) for path in ("/fleet/confirm", "/fleet/change")),
    ):
        late = stage.client.post(path, headers=ada, **body)
        assert (late.status_code, late.json()["error"]) == (401, "sign_in_again"), path


def save(client, name, headers=None, **question):
    return client.post("/fleet/views", data={"view": name, **question}, headers=headers, follow_redirects=False)


def test_a_saved_view_stands_above_the_list_of_who_saved_it(stage: AccountsServer):
    stage.project(OWN, f"job-of-{OWN}")
    ada, bob = (stage.cookie(stage.person(name, Role.viewer)) | OURS for name in ("ada", "bob"))
    saved = save(stage.client, " mine  only ", ada, owner="ada", sort="loss", hide=["loss", "owner"], label="")
    query = "owner=ada&sort=loss&hide=owner&hide=loss"
    assert (saved.status_code, saved.headers["location"]) == (303, f"/?{query}")
    page = stage.client.get(saved.headers["location"], headers=ada).text
    assert 'aria-current="true">mine only</a>' in page
    assert "mine only" not in stage.client.get("/", headers=bob).text
    save(stage.client, "mine only", ada, search="gpt")
    page = stage.client.get("/", headers=ada).text
    assert 'href="/?search=gpt">mine only' in page
    stage.client.post("/fleet/views/delete", data={"name": "mine only"}, headers=ada)
    assert "mine only" not in stage.client.get("/", headers=ada).text


def test_another_person_of_the_same_name_has_none_of_the_views(stage: AccountsServer):
    ada = stage.cookie(stage.person("ada")) | OURS
    save(stage.client, "mine only", ada, search="secret")
    people.remove(stage.db, "ada", who="test", now=stage.clock())
    ada = stage.cookie(stage.person("ada")) | OURS
    assert "mine only" not in stage.client.get("/", headers=ada).text


def test_views_have_names_and_an_end(client):
    assert save(client, " ").status_code == 422
    assert save(client, "x" * (MOST_NAME + 1)).status_code == 422
    assert save(client, "odd", sort="no-such-order").status_code == 422
    for number in range(MOST_VIEWS):
        assert save(client, f"view {number}", search="x").status_code == 303
    assert save(client, "one more", search="x").status_code == 422
    assert save(client, "view 3", search="y").status_code == 303
    assert client.post("/fleet/views/delete", data={"name": "never was"}).status_code == 200
