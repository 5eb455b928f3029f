"""One change of several jobs: which it applies to, and the outcome of each. And owners and labels of jobs."""

from __future__ import annotations

import re
from html import unescape

import pytest

from holdfast.protocol.wire import AttemptFinished
from holdfast_server.control.bulk import MOST_JOBS
from tests.support.accounts_server import OWN
from tests.support.postgres import ON_SQLITE
from tests.unit.server.accounts.test_policy import cast as cast

OUR_PAGE = {"Sec-Fetch-Site": "same-origin"}


@pytest.fixture
def jobs(client, fresh_agent):
    for name in ("one", "two", "three"):
        fresh_agent(client, job=name).start()
    return client


def words(html):
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html)))


def act(client, action, *jobs, budget="", **more):
    data = {"action": action, "jobs": " ".join(jobs), "budget": budget}
    return client.post("/fleet/change", data=data, **more)


def set_budget(client, *jobs, budget="2", **more):
    return act(client, "budget", *jobs, budget=budget, **more)


def ask(client, action, *jobs, **more):
    return client.post("/fleet/confirm", data={"action": action, "job": list(jobs), **more})


def paused(client, job):
    return client.get(f"/api/v1/jobs/{job}/desired").json()["paused"]


def budget_of(client, job):
    return client.get(f"/api/v1/jobs/{job}/desired").json()["budget"]


def test_each_selected_job_takes_it_and_no_other(jobs):
    done = set_budget(jobs, "one", "three")
    assert done.status_code == 200
    assert "2 jobs changed" in words(done.text)
    assert [budget_of(jobs, name) for name in ("one", "two", "three")] == [0.02, None, 0.02]
    entries = jobs.get("/api/v1/audit").json()["entries"]
    assert {(one["action"], one["job"]) for one in entries} == {
        ("settings.edit", "one"),
        ("settings.edit", "three"),
    }


def test_a_write_budget_is_set_for_the_selected_jobs(jobs):
    asked = ask(jobs, "write_budget", "one", "three", write_budget="500GB/h")
    assert "Set the write budget of 2 jobs to 500GB/h?" in words(asked.text)
    data = {"action": "write_budget", "jobs": "one three", "write_budget": "500GB/h"}
    assert "2 jobs changed" in words(jobs.post("/fleet/change", data=data).text)
    rates = [jobs.get(f"/api/v1/jobs/{name}/desired").json()["write_bytes_per_second"] for name in ("one", "two")]
    assert rates == [pytest.approx(5e11 / 3600), None]
    again = ask(jobs, "write_budget", "one", write_budget="500GB/h")
    assert "it has this write budget already" in words(again.text)
    assert ask(jobs, "write_budget", "one", write_budget="lots").status_code == 422


def test_training_of_the_selected_jobs_is_paused_and_continued(jobs):
    asked = ask(jobs, "pause_training", "one", "three")
    assert "Pause training of 2 jobs?" in words(asked.text)
    assert training_order(jobs, "one") is None
    done = act(jobs, "pause_training", "one", "three")
    assert "2 jobs asked to pause" in words(done.text)
    assert "Continue training of 2 jobs…" in words(done.text)
    assert [training_order(jobs, name) for name in ("one", "two", "three")] == ["pause", None, "pause"]
    again = ask(jobs, "pause_training", "one", "two")
    assert "Pause training of 1 job?" in words(again.text)
    assert "training is paused already" in words(again.text)
    act(jobs, "continue_training", "one")
    assert [training_order(jobs, name) for name in ("one", "three")] == ["continue", "pause"]
    assert "training is not paused" in words(ask(jobs, "continue_training", "two").text)


def test_training_that_does_not_run_is_not_paused(jobs, fresh_agent):
    ended = fresh_agent(jobs, job="four")
    ended.start()
    ended.say(AttemptFinished(at=ended.at, iteration=1, lineage=1, reason="finished"))
    asked = ask(jobs, "pause_training", "one", "four")
    assert "the job is finished: its training does not run" in words(asked.text)


def training_order(client, job):
    order = client.get(f"/api/v1/jobs/{job}/desired").json()["training"]
    return order and order["action"]


def test_what_one_refuses_is_told_and_the_others_take_it(jobs):
    done = set_budget(jobs, "one", "missing", "one")
    assert "1 job changed, 1 job not changed" in words(done.text)
    assert "Not changed: job 'missing' not found: no agent has reported under this name" in words(done.text)
    assert budget_of(jobs, "one") == 0.02


@ON_SQLITE
@pytest.mark.parametrize("budget", ["", "nothing", "-1", "300"])
def test_a_budget_that_cannot_be_changes_none(jobs, budget):
    assert set_budget(jobs, "one", "two", budget=budget).status_code == 422
    assert budget_of(jobs, "one") is None


def test_none_and_too_many_are_refused(jobs):
    assert set_budget(jobs).status_code == 422
    assert set_budget(jobs, *(f"job-{number}" for number in range(MOST_JOBS + 1))).status_code == 422


def test_the_way_back_leads_nowhere_else(jobs):
    data = {"action": "budget", "jobs": "one", "budget": "2", "back": "https://example.org/"}
    assert "example.org" not in jobs.post("/fleet/change", data=data).text
    data = {"action": "pause", "job": "one", "back": "https://example.org/"}
    assert "example.org" not in jobs.post("/fleet/confirm", data=data).text


@pytest.mark.parametrize(
    ("who", "sentence"),
    [
        ("viewer", f"0 jobs changed, 1 job not changed. Each job's page shows when the change takes effect. "
                   f"Job Result job-of-{OWN} Not changed: you may view job-of-{OWN}, but not change it"),
        ("outsider", f"Not changed: job 'job-of-{OWN}' not found: no agent has reported under this name"),
        ("operator", "1 job changed."),
    ],
)  # fmt: skip
def test_each_is_judged_by_who_asks(stage, cast, who, sentence):
    done = set_budget(stage.client, f"job-of-{OWN}", headers={**cast[who], **OUR_PAGE})
    assert sentence in words(done.text)


def test_the_confirmation_names_the_number_and_what_is_skipped_and_changes_nothing(jobs):
    act(jobs, "pause", "three")
    page = words(ask(jobs, "pause", "one", "two", "three", "missing").text)
    assert "Pause checkpoints of 2 jobs?" in page
    assert "one, two" in page
    assert "Skipped: 2 jobs" in page
    assert "checkpoints are paused already 1 three" in page
    assert [paused(jobs, name) for name in ("one", "two", "three")] == [False, False, True]


def test_what_is_confirmed_is_changed_and_audited_for_each_job(jobs):
    page = ask(jobs, "pause", "one", "two").text
    confirmed = re.search(r'name="jobs" value="([^"]*)"', page).group(1)
    done = jobs.post("/fleet/change", data={"action": "pause", "jobs": confirmed})
    assert "2 jobs paused" in words(done.text)
    assert [paused(jobs, name) for name in ("one", "two", "three")] == [True, True, False]
    assert {one["job"] for one in jobs.get("/api/v1/audit").json()["entries"]} == {"one", "two"}
    assert "1 job resumed, 1 job not changed" in words(act(jobs, "resume", "one", "three").text)


def test_all_jobs_of_an_owner_are_paused_with_one_form(client, fresh_agent):
    for job, owner in (("a-1", "ada"), ("a-2", "ada"), ("b-1", "bob")):
        fresh_agent(client, job=job).start(owner=owner)
    page = ask(client, "pause", "b-1", all_matching="1", back="/?owner=ada&page=7").text
    assert "Pause checkpoints of 2 jobs?" in words(page)
    assert 'value="a-1 a-2"' in page


def test_a_checkpoint_is_requested_only_of_jobs_that_run(client, fresh_agent):
    fresh_agent(client, job="running").start()
    ended = fresh_agent(client, job="ended")
    ended.start()
    ended.say(AttemptFinished(at=ended.at, iteration=0, lineage=1, reason="finished"))
    page = words(ask(client, "checkpoint", "running", "ended").text)
    assert "Take a checkpoint now of 1 job?" in page
    assert "the job is finished: no agent would take the checkpoint" in page
    act(client, "checkpoint", "running", "ended")
    request = {
        job: client.get(f"/api/v1/jobs/{job}/desired").json()["checkpoint_request"] for job in ("running", "ended")
    }
    assert request["running"] > 0
    assert request["ended"] == 0


def test_an_unknown_action_is_refused(jobs):
    assert ask(jobs, "forget", "one").status_code == 422
    assert act(jobs, "forget", "one").status_code == 422


def test_ticked_jobs_lead_to_their_comparison(jobs):
    answer = jobs.post("/fleet/confirm", data={"action": "compare", "job": ["one", "two"]}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/compare?job=one&job=two")


def test_the_api_changes_jobs_by_a_filter_and_previews_it(client, fresh_agent):
    for job, sweep in (("a", "1"), ("b", "2"), ("c", "1")):
        fresh_agent(client, job=job).start(labels={"sweep": sweep})
    asked = {"action": "pause", "filter": {"labels": ["sweep: 1"]}, "preview": True}
    expected = [{"job": job, "refusal": "", "version": None, "alerts": 0} for job in ("a", "c")]
    assert client.post("/api/v1/jobs/changes", json=asked).json() == {"changed": 2, "outcomes": expected}
    assert not paused(client, "a")
    done = client.post("/api/v1/jobs/changes", json=asked | {"preview": False}).json()
    assert [one["version"] for one in done["outcomes"]] == [1, 1]
    assert [paused(client, job) for job in "abc"] == [True, False, True]


@pytest.mark.parametrize("selection", [{}, {"jobs": ["one"], "filter": {}}, {"jobs": []}])
def test_a_change_needs_one_selection(jobs, selection):
    answer = jobs.post("/api/v1/jobs/changes", json={"action": "pause", **selection})
    assert answer.status_code == 422
    assert "jobs" in answer.json()["message"]


def test_the_fleet_shows_who_launched_a_job_and_its_labels(client, fresh_agent):
    fresh_agent(client, job="told").start(owner="ada", labels={"team": "vision", "dry <run>": ""})
    (job,) = client.get("/api/v1/jobs").json()["jobs"]
    assert (job["owner"], job["labels"]) == ("ada", {"team": "vision", "dry <run>": ""})
    page = client.get("/").text
    assert "team: vision" in page
    assert "dry &lt;run&gt;" in page


def test_too_many_and_too_long_labels_are_cut(client, fresh_agent):
    labels = {f"{number:03d}" + "y" * 99: "z" * 99 for number in range(40)}
    fresh_agent(client, job="told").start(owner="x" * 100, labels=labels)
    (job,) = client.get("/api/v1/jobs").json()["jobs"]
    assert len(job["owner"]) == 64
    assert len(job["labels"]) == 16
    assert all(len(key) == len(value) == 64 for key, value in job["labels"].items())


def test_of_an_attempt_that_says_nothing_nothing_is_shown(client, fresh_agent):
    fresh_agent(client, job="quiet").start()
    (job,) = client.get("/api/v1/jobs").json()["jobs"]
    assert (job["owner"], job["labels"]) == ("", {})
