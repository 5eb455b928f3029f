from __future__ import annotations

import threading
import time

import msgspec
import pytest

from holdfast.protocol.wire import Desired, DesiredStateApplied, IntervalDecision
from holdfast_server.control import control
from holdfast_server.db import DatabaseBusy, DatabaseUnavailable
from tests.support.postgres import ON_SQLITE

JOB = "/api/v1/jobs/char-gpt"


@pytest.fixture
def job(agent):
    agent.start()
    agent.train(5)
    return agent


def edit(client, version, **changes):
    return client.patch(f"{JOB}/desired", json=changes, headers={"If-Match": f'"{version}"'})


def test_nothing_is_desired_of_a_job_that_nobody_knows(client):
    reply = client.get("/api/v1/jobs/not-yet/desired")
    assert (reply.status_code, reply.json()["version"], reply.headers["etag"]) == (200, 0, '"0"')
    assert client.get("/api/v1/jobs/not-yet/desired?after=0").status_code == 204


def test_an_edit_makes_a_version(job, client):
    reply = edit(client, 0, budget="2%", every=50)
    assert reply.status_code == 200
    assert reply.headers["etag"] == '"1"'
    assert (reply.json()["version"], reply.json()["budget"], reply.json()["every"]) == (1, 0.02, 50)


def test_limits_are_edited_as_text_or_numbers(job, client):
    desired = edit(client, 0, write_budget="500GB/h", max_unsaved_work="5min").json()
    assert desired["write_bytes_per_second"] == pytest.approx(5e11 / 3600)
    assert desired["max_unsaved_seconds"] == 300.0
    summary = client.get(f"{JOB}/edits").json()["edits"][0]["summary"]
    assert summary == "write budget script default → 12 TB/day, unsaved work script default → 5 min"
    numbers = edit(client, 1, write_budget=1e9, max_unsaved_work=60).json()
    assert (numbers["write_bytes_per_second"], numbers["max_unsaved_seconds"]) == (1e9, 60.0)
    for field, value in (("write_budget", "lots"), ("write_budget", 0), ("max_unsaved_work", "-1s")):
        refused = edit(client, 2, **{field: value})
        assert (refused.status_code, refused.json()["field"]) == (422, field)


def test_an_edit_that_changes_no_value_makes_no_version(job, client):
    settings = {"budget": "2%", "policy": "goodput", "every": 50, "retention": "last 3", "paused": True}
    for version, (field, value) in enumerate(settings.items()):
        for seen in (version, version + 1):
            reply = edit(client, seen, **{field: value})
            assert (reply.status_code, reply.json()["version"]) == (200, version + 1)
    assert len(client.get(f"{JOB}/edits").json()["edits"]) == len(settings)
    assert len(client.get("/api/v1/audit").json()["entries"]) == len(settings)
    assert edit(client, 5, budget="2%", every=60).json()["version"] == 6
    assert client.get(f"{JOB}/edits").json()["edits"][0]["summary"] == "interval every 50 → every 60"
    for version in (6, 7):
        assert edit(client, version, checkpoint_request=True).json()["version"] == version + 1


def test_an_interval_is_fixed_in_iterations_or_in_time(job, client):
    assert edit(client, 0, every=50).json()["every"] == 50
    timed = edit(client, 1, every="2h30min").json()
    assert (timed["every"], timed["interval_seconds"]) == (None, 9000.0)
    counted = edit(client, 2, every="70").json()
    assert (counted["every"], counted["interval_seconds"]) == (70, None)
    edit(client, 3, every="10min", every_seconds=3600)
    assert client.get(JOB).json()["every_until"] is not None
    reply = edit(client, 4, every=None).json()
    assert (reply["every"], reply["interval_seconds"]) == (None, None)
    assert [one["summary"].split(" until")[0] for one in client.get(f"{JOB}/edits").json()["edits"]] == [
        "interval every 10 min",
        "interval every 70 → every 10 min",
        "interval every 2 h 30 min → every 70",
        "interval every 50 → every 2 h 30 min",
        "interval automatic → every 50",
    ]


@ON_SQLITE
@pytest.mark.parametrize("every", ["10 parsecs", "0s", "", 1.5, 0, "-10min", "1e9 days"])
def test_an_interval_that_is_none_is_refused(job, client, every):
    reply = edit(client, 0, every=every)
    assert (reply.status_code, client.get(f"{JOB}/desired").json()["version"]) == (422, 0)


def test_an_interval_in_time_is_reported_as_one(job, client):
    event = msgspec.structs.replace(paced(), policy="fixed", interval=100, interval_seconds=10.0)
    job.say(event)
    summary = client.get(JOB).json()
    assert (summary["interval"], summary["interval_seconds"]) == (100, 10.0)
    assert summary["interval_reason"].startswith("set to every 10 s")
    assert client.get(f"{JOB}/timeline").json()["paced"][-1]["interval_seconds"] == 10.0
    plan = client.get(f"{JOB}/preview?every=10min").json()["plan"]
    assert (plan["interval"], plan["interval_seconds"]) == (6000, 600.0)
    answer = client.get(f"{JOB}/plan?every=10min").json()["comparison"]
    assert [each["interval"] for each in answer["requested"]] == [6000]


def test_null_goes_back_to_the_scripts_own_setting(job, client):
    edit(client, 0, budget=0.02, policy="fixed")
    reply = edit(client, 1, budget=None)
    assert (reply.json()["budget"], reply.json()["policy"]) == (None, "fixed")


def test_pause_and_checkpoint_now(job, client):
    assert edit(client, 0, paused=True).json()["paused"] is True
    assert edit(client, 1, checkpoint_request=True).json()["checkpoint_request"] == 1
    assert edit(client, 2, checkpoint_request=True).json()["checkpoint_request"] == 2


def test_a_probe_is_asked_for_and_told_in_the_history(job, client):
    assert client.get(f"{JOB}/desired").json()["probe_request"] == 0
    asked = edit(client, 0, probe_request=True).json()
    assert (asked["probe_request"], asked["checkpoint_request"]) == (1, 0)
    assert edit(client, 1, budget=0.02).json()["probe_request"] == 1
    assert edit(client, 2, probe_request=True).json()["probe_request"] == 2
    newest, _, first = client.get(f"{JOB}/edits").json()["edits"]
    assert (newest["who"], newest["summary"], first["summary"]) == ("operator", "data probe now", "data probe now")


def test_an_edit_without_a_version_is_not_taken(job, client):
    reply = client.patch(f"{JOB}/desired", json={"budget": 0.02})
    assert (reply.status_code, reply.json()["error"]) == (428, "version_required")
    assert client.get(f"{JOB}/desired").json()["version"] == 0


def test_an_edit_of_an_old_version_is_told_who_changed_what(job, client):
    edit(client, 0, budget=0.02)
    reply = edit(client, 0, every=10)
    assert reply.status_code == 409
    told = reply.json()
    assert (told["version"], told["who"], told["what"]) == (1, "operator", "budget script default → 2 %")
    assert client.get(f"{JOB}/desired").json()["every"] is None


def test_an_edit_of_a_version_that_is_not_made_yet_is_refused(job, client):
    assert edit(client, 7, budget=0.02).status_code == 409


@ON_SQLITE
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"budget": -1}, "outside"),
        ({"budget": 0}, "outside"),
        ({"budget": 300}, "outside"),
        ({"budget": 3.5}, "did you mean"),
        ({"budget": "abc"}, "not a number"),
        ({"every": 0}, "outside"),
        ({"every": "often"}, "not a whole number"),
        ({"every_seconds": 7200}, "give every as well"),
        ({"budget": 0.02, "every_seconds": 7200}, "give every as well"),
        ({"policy": "astrology"}, "checkfreq"),
        ({"paused": "maybe"}, "paused"),
        ({"retention": "lst 5"}, "'lst 5' is not a rule"),
        ({"retention": "last 5, " * 20}, "longer than 100 characters"),
        ({"bugdet": 0.02}, "bugdet"),
        ({}, "nothing to change"),
        ({"checkpoint_request": False}, "nothing to change"),
        ({"probe_request": False}, "nothing to change"),
        ({"probe_request": 3}, "probe_request"),
    ],
)
def test_what_cannot_be_a_setting_is_refused_with_the_reason(job, client, changes, word):
    reply = edit(client, 0, **changes)
    assert (reply.status_code, reply.json()["error"]) == (422, "invalid_setting")
    assert word in reply.json()["message"]
    assert client.get(f"{JOB}/desired").json()["version"] == 0


def test_rules_of_retention_are_desired_in_the_one_way_in_which_they_are_spelled(job, client):
    reply = edit(client, 0, retention="Size 0.2TB, last 5")
    assert (reply.status_code, reply.json()["retention"]) == (200, "last 5, size 200GB")
    assert edit(client, 1, retention=None).json()["retention"] is None
    told = [each["summary"] for each in client.get(f"{JOB}/edits").json()["edits"]]
    assert told[-1] == "retention script default → last 5, size 200GB"


def test_an_invalid_part_leaves_the_valid_part_undone(job, client):
    assert edit(client, 0, budget=0.02, every=0).status_code == 422
    assert client.get(f"{JOB}/desired").json()["budget"] is None


def test_a_body_that_is_no_json_is_refused(job, client):
    reply = client.patch(f"{JOB}/desired", content=b"{", headers={"If-Match": '"0"'})
    assert reply.status_code == 422
    reply = client.patch(f"{JOB}/desired", json={"budget": 0.1}, headers={"If-Match": "latest"})
    assert reply.status_code == 422


def test_an_edit_of_an_unknown_job_is_not_found(client):
    reply = client.patch("/api/v1/jobs/nobody/desired", json={"budget": 0.1}, headers={"If-Match": '"0"'})
    assert (reply.status_code, reply.json()["error"]) == (404, "unknown_job")


def test_applied_stamps_the_version_with_its_iteration(job, client):
    edit(client, 0, budget=0.02)
    edit(client, 1, every=7)
    job.say(DesiredStateApplied(at=job.at, version=2, iteration=6, lineage=1))
    job.say(DesiredStateApplied(at=job.at, version=1, iteration=9, lineage=1))
    summary = client.get(JOB).json()
    assert (summary["applied_version"], summary["applied_iteration"]) == (2, 6)
    edits = client.get(f"{JOB}/edits").json()["edits"]
    assert [(one["version"], one["summary"], one["applied_iteration"]) for one in edits] == [
        (2, "interval automatic → every 7", 6),
        (1, "budget script default → 2 %", 6),
    ]


def test_only_rank_0_of_the_current_attempt_says_what_is_applied(job, client, fresh_agent):
    edit(client, 0, budget=0.02)
    second = job.restarted()
    second.start()
    other_rank = fresh_agent(client, uid=second.uid, attempt=2, rank=1)
    for outsider in (job, other_rank):
        outsider.say(DesiredStateApplied(at=job.at, version=1, iteration=6, lineage=1))
    assert client.get(JOB).json()["applied_version"] == 0
    second.say(DesiredStateApplied(at=job.at, version=1, iteration=7, lineage=1))
    assert client.get(JOB).json()["applied_iteration"] == 7


def test_a_version_that_was_never_made_is_not_applied(job, client):
    edit(client, 0, budget=0.02)
    job.say(DesiredStateApplied(at=job.at, version=9, iteration=6, lineage=1))
    assert client.get(JOB).json()["applied_version"] == 0
    (only,) = client.get(f"{JOB}/edits").json()["edits"]
    assert only["applied_iteration"] is None


def test_an_edit_that_is_not_applied_says_so(job, client):
    edit(client, 0, budget=0.02)
    (only,) = client.get(f"{JOB}/edits").json()["edits"]
    assert (only["applied_iteration"], only["applied_at"]) == (None, None)


def test_a_paused_job_is_paused_once_its_agent_says_so(job, client):
    edit(client, 0, paused=True)
    assert client.get(JOB).json()["status"] == "running"
    job.say(DesiredStateApplied(at=job.at, version=1, iteration=6, lineage=1))
    assert client.get(JOB).json()["status"] == "paused"


def paced(**fields):
    values = {"at": 1.0, "iteration": 5, "lineage": 1, "policy": "checkfreq", "interval": 40, "budget": 0.035,
              "predicted_overhead": 0.02, "measured_overhead": 0.018, "measured_window_iterations": 200,
              "profile": {"iteration_seconds": 0.1, "snapshot_seconds": 0.05, "persist_seconds": 0.5,
                          "cost_seconds": 0.05, "checkpoint_bytes": 1e8,
                          "device_copy_seconds": float("inf")}}  # fmt: skip
    return IntervalDecision(**(values | fields))


def test_what_is_in_force_comes_from_the_agent(job, client):
    edit(client, 0, budget=0.01)
    job.say(paced())
    summary = client.get(JOB).json()
    assert (summary["budget"], summary["interval"], summary["measured_overhead"]) == (0.035, 40, 0.018)
    assert summary["desired"]["budget"] == 0.01
    assert summary["paced"]["profile"]["iteration_seconds"] == 0.1


def test_a_setting_can_be_looked_at_before_it_is_made(job, client):
    reply = client.get(f"{JOB}/preview?budget=0.02").json()
    assert (reply["plan"], reply["why_none"]) == (None, "the job is still measuring its iterations")
    job.say(paced())
    tight = client.get(f"{JOB}/preview?budget=0.001").json()["plan"]
    loose = client.get(f"{JOB}/preview?budget=0.2").json()["plan"]
    fixed = client.get(f"{JOB}/preview?every=17").json()["plan"]
    assert tight["interval"] > loose["interval"]
    assert fixed["interval"] == 17
    assert tight["unsaved_iterations"] > loose["unsaved_iterations"]
    assert client.get(f"{JOB}/desired").json()["version"] == 0


@pytest.mark.parametrize("field", ["iteration_seconds", "snapshot_seconds", "persist_seconds", "cost_seconds"])
def test_an_odd_profile_breaks_neither_the_preview_nor_the_page(job, client, field):
    for odd in (float("nan"), float("inf"), -1.0, 0.0, 1e308, 5e-324):
        event = paced()
        event.profile[field] = odd
        job.say(event)
        for page in (f"{JOB}/preview?budget=0.02", "/jobs/char-gpt/preview?budget=2", "/jobs/char-gpt"):
            assert client.get(page).status_code == 200, (odd, page)


@ON_SQLITE
@pytest.mark.parametrize("query", ["budget=300", "budget=-1", "budget=0", "every=0", "budget=abc", "every=x"])
def test_a_preview_of_what_cannot_be_a_setting_is_refused(job, client, query):
    assert client.get(f"{JOB}/preview?{query}").status_code == 422


def test_an_answer_names_the_numbers_an_agent_must_not_reuse(job, client):
    job.restarted().start()
    desired = client.get(f"{JOB}/desired").json()
    assert (desired["latest_attempt"], desired["latest_lineage"]) == (2, 1)


@pytest.mark.processes
def test_a_waiting_agent_hears_of_an_edit_at_once(serve, fresh_agent):
    server = serve()
    with server.client() as client, server.client() as waiting:
        fresh_agent(client).start()
        answers = []
        poll = threading.Thread(
            target=lambda: answers.append((waiting.get(f"{JOB}/desired?after=0&wait=60"), time.monotonic()))
        )
        poll.start()
        while "holdfast_listeners 1.0" not in client.get("/metrics").text:
            pass
        assert poll.is_alive()
        edited_at = time.monotonic()
        edit(client, 0, budget=0.02)
        poll.join()
        reply, answered_at = answers[0]
        assert (reply.status_code, reply.json()["budget"]) == (200, 0.02)
        # Not the end of the wait, which is a minute away; promised is a second.
        assert answered_at - edited_at < 55


def test_an_agent_that_waits_is_not_looked_up_for_at_each_of_its_own_reports(job, client, monkeypatch):
    looked, newer_desired = [], control.newer_desired

    def looking(*asked, **options):
        found = newer_desired(*asked, **options)
        looked.append(found and found.version)
        return found

    monkeypatch.setattr(control, "newer_desired", looking)
    poll = threading.Thread(target=lambda: client.get(f"{JOB}/desired?after=0&wait=60"))
    poll.start()
    while not looked:
        assert poll.is_alive()
    for _ in range(5):
        job.train(10)
    edit(client, 0, budget=0.02)
    poll.join()
    assert looked[-1] == 1
    assert len(looked) < 5, "a server with PostgreSQL also looks for edits at other servers now and then"


def test_a_wait_without_an_edit_ends_empty(job, client):
    assert client.get(f"{JOB}/desired?after=0&wait=0.01").status_code == 204


@pytest.mark.parametrize("trouble", [DatabaseBusy, DatabaseUnavailable])
def test_an_agent_is_answered_where_it_cannot_be_noted_what_it_has(job, client, monkeypatch, trouble):
    async def fail(*_):
        raise trouble("not now")

    edit(client, 0, budget=0.02)
    edit(client, 1, budget=0.03)
    monkeypatch.setattr(control, "delivered", fail)
    assert client.get(f"{JOB}/desired?after=1&wait=1").json()["budget"] == 0.03


def test_desired_reads_back_as_the_agents_own_type(job, client):
    edit(client, 0, budget=0.02, paused=True)
    reply = client.get(f"{JOB}/desired")
    assert msgspec.json.decode(reply.content, type=Desired) == Desired(
        version=1, budget=0.02, paused=True, latest_attempt=1, latest_lineage=1, shares=()
    )


def test_a_restore_that_comes_and_goes_takes_no_form_away(job, client):
    job.checkpoint(3)
    placed = client.post(f"{JOB}/restores", json={"iteration": 3}).json()
    assert client.get(f"{JOB}/desired").json()["version"] == 1
    assert edit(client, 0, budget=0.02).status_code == 200
    client.post(f"{JOB}/restores/{placed['id']}/cancel")
    reply = edit(client, 2, every=10)
    assert (reply.status_code, reply.json()["version"]) == (200, 4)


def test_an_edit_between_restores_is_still_a_conflict_and_the_only_thing_told(job, client):
    job.checkpoint(3)
    placed = client.post(f"{JOB}/restores", json={"iteration": 3}).json()
    edit(client, 1, budget=0.02)
    client.post(f"{JOB}/restores/{placed['id']}/cancel")
    reply = edit(client, 1, every=10)
    told = reply.json()
    assert (reply.status_code, told["version"], told["what"]) == (409, 3, "budget script default → 2 %")


@pytest.mark.parametrize("changes", [{"policy": "fixed"}, {"every": 10}, {"max_unsaved_work": "10min"}])
def test_settings_that_decide_the_interval_together_conflict(job, client, changes):
    edit(client, 0, **changes)
    assert edit(client, 0, budget=0.02).status_code == 409


@pytest.mark.parametrize("changes", [{"paused": True}, {"checkpoint_request": True}, {"retention": "last 3"}])
def test_settings_of_their_own_and_requests_are_no_conflict(job, client, changes):
    edit(client, 0, **changes)
    assert edit(client, 0, budget=0.02).status_code == 200
