"""One budget for several jobs: each takes or refuses it by itself. And who launched a job, with its labels."""

from __future__ import annotations

import re
from html import unescape

import pytest

from holdfast_server.control.control import MOST_JOBS
from tests.support.accounts_server import OWN
from tests.unit.server.accounts.test_policy import cast as cast

OUR_PAGE = {"Sec-Fetch-Site": "same-origin"}


@pytest.fixture
def jobs(client, fresh_agent):
    for name in ("one", "two", "three"):
        fresh_agent(client, job=name).start()
    return client


def words(html):
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html)))


def set_budget(client, *jobs, budget="2", **more):
    return client.post("/fleet/budget", data={"job": list(jobs), "budget": budget}, **more)


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


def test_what_one_refuses_is_told_and_the_others_take_it(jobs):
    done = set_budget(jobs, "one", "nobody", "one")
    assert "1 job changed, 1 job not changed" in words(done.text)
    assert "Not changed: job 'nobody' not found: no agent has reported under this name" in words(done.text)
    assert budget_of(jobs, "one") == 0.02


@pytest.mark.parametrize("budget", ["", "nothing", "-1", "300"])
def test_a_budget_that_cannot_be_changes_none(jobs, budget):
    assert set_budget(jobs, "one", "two", budget=budget).status_code == 422
    assert budget_of(jobs, "one") is None


def test_none_and_too_many_are_refused(jobs):
    assert set_budget(jobs).status_code == 422
    assert set_budget(jobs, *(f"job-{number}" for number in range(MOST_JOBS + 1))).status_code == 422


def test_the_way_back_leads_nowhere_else(jobs):
    data = {"job": "one", "budget": "2", "back": "https://example.org/"}
    assert "example.org" not in jobs.post("/fleet/budget", data=data).text


@pytest.mark.parametrize(
    ("who", "sentence"),
    [
        ("viewer", f"0 jobs changed, 1 job not changed. The page of each job shows when the change applies. "
                   f"Job Result job-of-{OWN} Not changed: you may view job-of-{OWN}, but not change it"),
        ("outsider", f"Not changed: job 'job-of-{OWN}' not found: no agent has reported under this name"),
        ("operator", "1 job changed."),
    ],
)  # fmt: skip
def test_each_is_judged_by_who_asks(stage, cast, who, sentence):
    done = set_budget(stage.client, f"job-of-{OWN}", headers={**cast[who], **OUR_PAGE})
    assert sentence in words(done.text)


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
