"""Figures and names that cannot be are refused, or shown as none."""

from __future__ import annotations

import math

import pytest

from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import IntervalDecision, Inventory
from holdfast_server import models
from holdfast_web.shared import filters

JOB = "/api/v1/jobs/char-gpt"
POINT = "000000000010-1"


@pytest.fixture
def job(agent):
    agent.start()
    agent.train(10)
    agent.checkpoint()
    return agent


def test_a_version_or_an_iteration_that_is_no_number_is_refused(job, client):
    for value in ("9" * 5000, "-1", "٣", "nan", "0" * 5000):
        budget = client.post("/jobs/char-gpt/budget", data={"version": value, "budget": "3"})
        asked = client.get("/jobs/char-gpt/restore", params={"iteration": value}, headers={"HX-Request": "true"})
        assert (budget.status_code, asked.status_code) == (422, 422), value


@pytest.mark.parametrize("at", [None, math.nan, math.inf, -math.inf, -1.0, 1e18, 1e300, 253402300800.0])
def test_what_is_no_time_is_shown_as_none(at):
    assert {filters.clock(at), filters.stamp(at), filters.iso(at)} == {filters.NONE}


def test_the_first_and_the_last_time_are_shown():
    assert filters.iso(0) == "1970-01-01T00:00:00+00:00"
    assert filters.stamp(253402300799.9999) == "9999-12-31 23:59:59 UTC"


def test_absurd_figures_are_shown_as_none():
    assert {filters.duration(1e300), filters.size(-1), filters.size(10**400)} == {filters.NONE}


def test_what_an_agent_names_is_stored_as_far_as_a_page_could_show_it(agent, client):
    """A job's newest figures are read with each page of the fleet, be they ever so many."""
    many = {f"{number:>5}" + "x" * 500: 1.0 for number in range(1000)}
    agent.start(versions=dict.fromkeys(many, "v" * 5000))
    agent.say(
        IntervalDecision(
            at=agent.at, iteration=1, lineage=1, policy="checkfreq", interval=5, budget=0.03,
            predicted_overhead=None, measured_overhead=None, profile=many, spread=many,
        )
    )  # fmt: skip

    def stored():
        with client.app.state.services.database.read() as session:
            job = session.get(models.JobRecord, "char-gpt")
            attempt = session.get(models.AttemptRecord, ("char-gpt", "first"))
            return len(job.paced), len(attempt.versions)

    paced_bytes, versions_bytes = stored()
    assert paced_bytes < 200_000
    assert versions_bytes < 1_000_000


def test_an_inventory_that_no_store_can_have_is_left_out(agent, client):
    agent.start()
    agent.train(10)
    agent.checkpoint()
    agent.say(Inventory(at=agent.at, checkpoints=[checkpoint_id(number, 1) for number in range(100_001)]))
    told = client.get(f"{JOB}/checkpoints", params={"limit": 500}).json()["checkpoints"]
    assert [row["id"] for row in told] == [POINT]


def test_an_inventory_with_an_empty_name_is_refused(agent, client):
    agent.start()
    before = client.get(f"{JOB}/checkpoints").json()["checkpoints"]
    agent.say(Inventory(at=agent.at, checkpoints=[""]))
    agent.say(Inventory(at=agent.at, checkpoints=[], deleted=[""]))
    assert client.get(f"{JOB}/checkpoints").json()["checkpoints"] == before


@pytest.mark.parametrize("seconds", [5e-324, 1e-310, 1e-9])
def test_a_checkpoint_written_in_no_time_ends_no_page(agent, client, seconds):
    agent.start()
    agent.train(10)
    agent.checkpoint(persist_seconds=seconds)
    for path in ("/jobs/char-gpt", "/jobs/char-gpt/live", f"/jobs/char-gpt/checkpoints/{POINT}", "/"):
        assert client.get(path, headers={"Accept": "text/html"}).status_code == 200, path
