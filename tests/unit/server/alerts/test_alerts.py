"""Alerts: what fires when, what people do about it, and that it ends."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from typer.testing import CliRunner

from holdfast.cli import app as cli
from holdfast.protocol.jobs import RecentFailures
from holdfast.protocol.store_shares import StoreReport
from holdfast.protocol.wire import AttemptFinished, IntervalDecision, OrderStateChange, OutputReport
from holdfast.server_link.json_client import JsonClient
from holdfast_server.accounts import projects
from holdfast_server.alerts import evaluation, incidents, rules
from holdfast_server.alerts import facts as job_facts
from holdfast_server.alerts.conditions import KINDS, RuleResult
from holdfast_server.alerts.facts import EndedRestore, JobFacts
from holdfast_server.alerts.loss_spikes import LossHistory, OpenSpike
from holdfast_server.core.errors import UnknownAlert
from holdfast_server.queries.ranks import RankFindings
from tests.support.postgres import ON_SQLITE

PROJECT = "/api/v1/projects/default"
JOB = "/api/v1/jobs/char-gpt"
GOOD = JobFacts(
    job="a", project="default", status="running", stuck_seconds=1.0, loss=2.5, durable_age_seconds=10.0
)
SPIKING = LossHistory(
    np.arange(1, 502), np.array([*(2.5 + 0.1 * (np.arange(500) % 7)), 9.0]), np.arange(501.0), replayed_until=0
)
SLOW_RANK = RankFindings(
    data_seconds=1.0, seconds=100.0, iterations=300, slowest=3, slower=0.79, slower_seconds=0.2, why="its own work"
)
BROKEN = {
    "no_progress": replace(GOOD, stuck_seconds=601.0),
    "silent": replace(GOOD, status="silent", silent_seconds=121.0),
    "job_failed": replace(GOOD, status="failed", status_reason="OSError at iteration 7"),
    "persist_failing": replace(GOOD, failing=RecentFailures(count=2, reason="No space left on device", since=0.0)),
    "checkpoint_damaged": replace(GOOD, damaged=("000000000010-1",)),
    "durable_age": replace(GOOD, durable_age_seconds=7201.0),
    "unsaved_gpu_hours": replace(GOOD, unsaved_gpu_hours=100.1),
    "unsaved_iterations": replace(GOOD, unsaved_iterations=1001),
    "overhead": replace(GOOD, measured_overhead=0.05, budget=0.035),
    "throughput_drop": replace(GOOD, throughput=79.0, usual_throughput=100.0),
    "iteration_time": replace(GOOD, iteration_seconds=0.27, usual_iteration_seconds=0.21),
    "goodput_low": replace(GOOD, goodput=0.31),
    "data_wait": replace(GOOD, ranks=RankFindings(data_seconds=67.0, seconds=100.0, iterations=300)),
    "straggler": replace(GOOD, ranks=SLOW_RANK),
    "disk_filling": replace(GOOD, store_free_bytes=10**9, room_checkpoints=2.9),
    "loss_nan": replace(GOOD, loss=math.nan),
    "loss_spike": replace(GOOD, losses=SPIKING, window=200),
    "restore_failed": replace(
        GOOD,
        order=EndedRestore(id="o", state="failed", iteration=5, seconds=None, reason="damaged", ago_seconds=1.0),
    ),
    "restore_finished": replace(
        GOOD, order=EndedRestore(id="o", state="restored", iteration=5, seconds=1.5, reason=None, ago_seconds=1.0)
    ),
}
"""The state of a job that each kind of rule, as it comes, is broken by."""


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_broken_by_what_it_is_about_and_by_nothing_else(kind):
    judge, limit = KINDS[kind].judge, KINDS[kind].limit
    assert BROKEN.keys() == KINDS.keys()
    verdict = judge(BROKEN[kind], limit)
    assert verdict is not None
    assert (verdict.broken, bool(verdict.message)) == (True, True)
    for other, facts in BROKEN.items():
        if other != kind:
            said = judge(facts, limit)
            assert said is None or not said.broken, other


TEXTS = [
        ("no_progress", 600, {"stuck_seconds": 3725.0}, 0, "no new iteration for 1 h 2 min (limit 10 min)"),
        (
            "no_progress", 600, {"stuck_seconds": 1100.0, "longest_iteration_seconds": 200.0}, 0,
            "no new iteration for 18 min (limit 16 min, 5 times the longest iteration)",
        ),
        (
            "silent", 120, {"status": "silent", "silent_seconds": 3065.0}, 0,
            "no report for 51 min (limit 2 min): the process or its network may be down",
        ),
        (
            "silent", 120, {"status": "silent", "silent_seconds": 3065.0, "host": "gpu-5"}, 0,
            "no report for 51 min (limit 2 min): the process on gpu-5 or its network may be down",
        ),
        (
            "no_progress", 600, {"stuck_seconds": 3725.0, "host": "gpu-5"}, 0,
            "no new iteration on gpu-5 for 1 h 2 min (limit 10 min)",
        ),
        (
            "persist_failing", 2,
            {"failing": RecentFailures(count=7, reason="disk full", since=0.0), "host": "gpu-5"}, 0,
            "7 checkpoints in a row failed on gpu-5 (limit 2): disk full",
        ),
        (
            "job_failed", 0, {"status": "failed", "status_reason": "OSError at iteration 7", "host": "gpu-5"}, 0,
            "ended on gpu-5 with OSError at iteration 7",
        ),
        (
            "job_failed", 0,
            {"status": "failed", "status_reason": "gave up", "remedy": "Start it again", "host": "gpu-5"}, 0,
            "gave up on gpu-5. Start it again",
        ),
        (
            "persist_failing", 2, {"failing": RecentFailures(count=7, reason="disk full", since=0.0)}, 0,
            "7 checkpoints in a row failed (limit 2): disk full",
        ),
        (
            "durable_age", 7200, {"durable_age_seconds": 10_190.0}, 0,
            "no new durable checkpoint for 2 h 49 min (limit 2 h)",
        ),
        (
            "unsaved_gpu_hours", 100, {"unsaved_gpu_hours": 4321.0}, 130,
            "a crash would cost 4,321 GPU-hours of work for 2 min (limit 100)",
        ),
        (
            "unsaved_iterations", 1000, {"unsaved_iterations": 12_345}, 0,
            "a crash would cost 12,345 iterations (limit 1,000)",
        ),
        (
            "overhead", 1.2, {"measured_overhead": 0.063, "budget": 0.01}, 2400,
            "overhead 6.3 % for 40 min (limit 1.2 × the budget of 1 %)",
        ),
        (
            "disk_filling", 3, {"store_free_bytes": 2_500_000_000, "room_checkpoints": 2.9}, 0,
            "room for 2 further checkpoints (limit 3): the store had 2.5 GB free at the last checkpoint",
        ),
        (
            "disk_filling", 3,
            {"store": "/mnt", "store_free_bytes": 10**9, "store_total_bytes": 10**12, "room_checkpoints": 1.5}, 0,
            "room for 1 further checkpoint (limit 3): /mnt has 1 GB of 1 TB free",
        ),
        (
            "disk_filling", 3, {"store_free_bytes": 119_000, "room_checkpoints": 0.5}, 0,
            "room for 0 further checkpoints (limit 3): the store had 119 kB free at the last checkpoint",
        ),
        (
            "loss_nan", 0, {"loss": math.nan, "finite_loss_iteration": 9, "iteration": 12}, 95.7,
            "the loss is nan for 1 min 36 s; the last finite one was at iteration 9",
        ),
        (
            "loss_spike", 6, {"losses": SPIKING, "window": 200}, 0,
            "the loss was 9 at iteration 501, usually 2.8: 20.9 × the usual noise higher (limit 6)",
        ),
        (
            "throughput_drop", 20, {"throughput": 51_000.0, "usual_throughput": 81_000.0,
            "throughput_unit": "tokens"}, 700,
            "51,000 tokens per second, 37 % below the usual 81,000 for 11 min (limit 20 %)",
        ),
        (
            "iteration_time", 25, {"iteration_seconds": 0.3, "usual_iteration_seconds": 0.2}, 600,
            "an iteration takes 300 ms, 50 % more than the usual 200 ms for 10 min (limit 25 %)",
        ),
        ("goodput_low", 50, {"goodput": 0.31}, 0, "31 % of the last hour advanced training (limit 50 %)"),
        (
            "data_wait", 30, {"ranks": BROKEN["data_wait"].ranks}, 600,
            "waiting for data 67 % of the time for 10 min (limit 30 %)",
        ),
        (
            "straggler", 20, {"ranks": SLOW_RANK}, 0,
            "rank 3 takes 79 % longer than the others because of its own work (limit 20 %)",
        ),
        (
            "job_failed", 0,
            {"status": "failed", "status_reason": "OSError at iteration 7", "exception": "disk"}, 0,
            "ended with OSError at iteration 7: disk",
        ),
        (
            "checkpoint_damaged", 0, {"damaged": ("000000000010-1", "000000000005-1")}, 0,
            "checkpoint 000000000010-1 and 1 more are damaged",
        ),
        (
            "restore_failed", 3600, {"order": BROKEN["restore_failed"].order}, 0,
            "not restored to iteration 5: damaged",
        ),
        (
            "restore_finished", 600, {"order": BROKEN["restore_finished"].order}, 0,
            "restored to iteration 5 in 1.5 s",
        ),
]  # fmt: skip


def test_the_text_of_each_kind_is_tested():
    assert {kind for kind, *_ in TEXTS} == KINDS.keys()


@pytest.mark.parametrize(("kind", "limit", "changes", "held", "text"), TEXTS)
def test_a_message_has_the_value_beside_its_limit(kind, limit, changes, held, text):
    result = KINDS[kind].judge(replace(GOOD, **changes), limit)
    assert (result.broken, result.text(held)) == (True, text)


def test_what_an_agent_reports_is_no_line_of_its_own_in_a_message():
    failing = RecentFailures(count=2, reason="full\n[resolved] other:\u2028\x1b[2J \u202eback", since=0.0)
    result = KINDS["persist_failing"].judge(replace(GOOD, failing=failing), 2)
    assert result.text() == "2 checkpoints in a row failed (limit 2): full [resolved] other: [2J back"


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
@pytest.mark.parametrize("kind", ["no_progress", "persist_failing", "durable_age", "overhead", "loss_nan"])
def test_what_is_said_of_training_does_not_hold_of_a_job_that_has_ended(kind, status):
    verdict = KINDS[kind].judge(replace(BROKEN[kind], status=status), KINDS[kind].limit)
    assert verdict is not None
    assert (verdict.broken, verdict.clear) == (False, True)


def test_while_a_job_is_silent_nobody_knows():
    assert KINDS["no_progress"].judge(replace(BROKEN["no_progress"], status="silent"), 600) is None


def test_a_job_whose_iterations_take_minutes_is_not_stuck_because_it_trains():
    slow = replace(GOOD, stuck_seconds=900.0, longest_iteration_seconds=200.0)
    verdict = KINDS["no_progress"].judge(slow, 600)
    assert verdict is not None
    assert not verdict.broken


# ---- from the first sign to the end --------------------------------------------------------------


@pytest.fixture
def look(client, clock) -> Callable[[float], None]:
    """Let time pass, and have the chore look at every job."""

    def look(seconds: float = 0.0) -> None:
        clock.now += seconds
        evaluation.evaluate(client.app.state.services.database, clock.now)

    return look


@pytest.fixture
def look_at_rest(client, clock) -> Callable[[], None]:
    """The same for jobs that have ended."""
    at_rest = functools.partial(evaluation.evaluate, at_rest=True)
    return lambda: at_rest(client.app.state.services.database, clock.now)


@pytest.fixture
def alive(agent, client):
    agent.start()
    agent.train(10)
    agent.checkpoint()
    return agent


def alerts(client, **query):
    return client.get("/api/v1/alerts", params=query).json()["alerts"]


def only(client, rule, **query):
    found = [alert for alert in alerts(client, **query) if alert["rule"] == rule]
    assert len(found) == 1, alerts(client, **query)
    return found[0]


def change(client, rule, **changes):
    reply = client.put(f"{PROJECT}/alert-rules/{rule}", json=changes)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_healthy_job_raises_nothing(alive, client, look):
    look(10)
    assert alerts(client, state="all") == []


def test_a_silent_agent_fires_and_resolves_when_it_is_back_for_a_while(alive, client, clock, look):
    look(130)
    fired = only(client, "silent")
    assert (fired["state"], fired["severity"], fired["fired_at"]) == ("firing", "critical", clock.now)
    look(10)
    assert only(client, "silent")["id"] == fired["id"], "one incident, however often it is looked at"
    alive.at = clock.now
    alive.train(1)
    look(0)
    assert only(client, "silent")["state"] == "firing", "it might be gone again in a moment"
    clock.now += 61
    alive.train(1)
    look(0)
    assert alerts(client) == []
    over = only(client, "silent", state="all")
    assert (over["state"], over["resolved_why"]) == ("resolved", "back to normal")


def test_an_alert_does_not_flap(alive, client, clock, look):
    """Silent, back for some seconds, silent again: that is one incident."""
    look(130)
    first = only(client, "silent")["id"]
    for _ in range(3):
        for _ in range(5):
            clock.now += 10
            alive.train(1)
            look()
        look(130)
    assert [alert["id"] for alert in alerts(client, state="all") if alert["rule"] == "silent"] == [first]


def test_what_has_to_last_is_told_once_it_has_lasted(alive, client, clock, look):
    def paced(overhead):
        alive.say(
            IntervalDecision(
                at=clock.now, iteration=10, lineage=1, policy="checkfreq", interval=5, budget=0.035,
                predicted_overhead=0.03, measured_overhead=overhead, measured_window_iterations=100,
            )
        )  # fmt: skip

    for other in ("durable_age", "no_progress"):
        change(client, other, enabled=False)
    paced(0.08)
    look(0)
    clock.now += 300
    paced(0.02)
    look(0)
    clock.now += 310
    paced(0.08)
    look(0)
    assert alerts(client, state="all") == [], "it had not lasted"
    for _ in range(61):
        clock.now += 10
        paced(0.08)
        look(0)
    fired = only(client, "overhead")
    assert fired["value"] == pytest.approx(0.08 / 0.035)
    assert fired["fired_at"] - fired["since"] >= 600
    assert fired["message"] == "overhead 8 % for 10 min (limit 1.2 × the budget of 3.5 %)"
    for _ in range(7):
        clock.now += 10
        paced(0.02)
        look(0)
    ended = only(client, "overhead", state="all")
    assert ended["resolved_why"] == "back to normal: overhead 2 % (limit 1.2 × the budget of 3.5 %)"


def test_an_alert_shows_the_newest_value(alive, client, look):
    look(130)
    assert only(client, "silent")["message"].startswith("no report for 2 min (limit 2 min)")
    look(3000)
    found = only(client, "silent")
    assert (found["message"].split(" (")[0], found["value"]) == ("no report for 52 min", 3130)


def test_a_silent_job_raises_no_alert_about_what_it_did_since(alive, client, clock, look):
    """It had no durable checkpoint for almost the limit; what happened after its last report is unknown."""
    clock.now += 7150
    alive.at = clock.now
    alive.train(1)
    for _ in range(14):
        look(10)
    assert {alert["rule"] for alert in alerts(client, state="all")} == {"silent"}


def test_a_figure_just_below_its_limit_keeps_an_alert_alive(alive, client, clock, look):
    change(client, "busy", kind="unsaved_iterations", limit=100, for_seconds=0)

    def after(seconds, *, unsaved):
        clock.now += seconds
        alive.train(200)
        alive.checkpoint(alive.iteration - unsaved)
        look(0)

    after(1, unsaved=101)
    assert only(client, "busy")["message"] == "a crash would cost 101 iterations (limit 100)"
    after(1, unsaved=96)
    after(61, unsaved=96)
    assert only(client, "busy")["state"] == "firing", "96 of 100 is no way to end"
    after(1, unsaved=90)
    after(61, unsaved=90)
    assert alerts(client) == []


def test_no_progress_is_told_of_a_job_that_is_heard_and_does_not_move(alive, client, clock, look):
    for _ in range(61):
        clock.now += 10
        alive.say()
    look(0)
    assert only(client, "no_progress")["message"] == "no new iteration on node-1 for 10 min (limit 10 min)"


def test_a_damaged_checkpoint_and_a_failed_job_are_told(alive, client, look):
    alive.checkpoint(5, state="damaged", reason="digest of rank 0 differs")
    alive.say(AttemptFinished(at=alive.at, iteration=10, lineage=1, reason="OSError: no route to host"))
    look(1)
    assert {alert["rule"] for alert in alerts(client)} == {"checkpoint_damaged", "job_failed"}
    assert "000000000005-1" in only(client, "checkpoint_damaged")["message"]


def test_the_damage_of_one_job_hides_that_of_no_other(alive, client, fresh_agent, look, monkeypatch):
    monkeypatch.setattr(job_facts, "MAX_DAMAGED", 2)
    other = fresh_agent(client, job="other")
    other.start()
    other.train(3)
    other.checkpoint(3, state="damaged")
    for iteration in (7, 8, 9):
        alive.checkpoint(iteration, state="damaged")
    look(1)
    told = {alert["job"]: alert["message"] for alert in alerts(client) if alert["rule"] == "checkpoint_damaged"}
    assert told == {
        "char-gpt": "checkpoint 000000000009-1 and 1 more are damaged",
        "other": "checkpoint 000000000003-1 is damaged",
    }


def test_a_store_that_fills_up_is_told_from_what_the_agent_reports(alive, client, look):
    alive.checkpoint(10, store_free_bytes=2_500)
    look(1)
    assert only(client, "disk_filling")["value"] == 2.5
    assert client.get(f"{JOB}/checkpoints").json()["checkpoints"][0]["store_free_bytes"] == 2500


def test_a_store_fills_up_by_what_another_job_writes_there(alive, client, look):
    """The newest measurement of a store counts, whichever job and path it came from."""
    uid, other = "ab" * 16, replace(alive, job="other", uid="other", sequence=0, sent=[])
    alive.say(StoreReport(at=alive.at, store=uid, address="/mnt/x", free_bytes=100_000, total_bytes=200_000))
    alive.checkpoint(10, store_free_bytes=100_000)
    look(1)
    assert not [alert for alert in alerts(client) if alert["rule"] == "disk_filling"]
    other.start()
    other.say(StoreReport(at=alive.at + 1, store=uid, address="/x", free_bytes=2_500, total_bytes=200_000))
    look(1)
    found = only(client, "disk_filling")
    assert (found["job"], found["value"]) == (JOB.rpartition("/")[2], 2.5)
    assert found["message"].endswith("/mnt/x has 2.5 kB of 200 kB free")


def test_a_store_has_room_for_as_many_checkpoints_as_what_the_next_one_writes(alive, client, look):
    alive.checkpoint(10, payload_bytes=100_000, reused_bytes=99_000, store_free_bytes=2_500)
    look(1)
    assert only(client, "disk_filling")["value"] == 2.5


def test_a_finished_restore_is_told_for_a_while(alive, client, clock, look):
    change(client, "restored", kind="restore_finished")
    order = client.post(f"{JOB}/restores", json={"iteration": 10}).json()
    for state in ("restoring", "restored"):
        alive.say(
            OrderStateChange(at=clock.now, order=order["id"], state=state, iteration=10, lineage=2, seconds=1.5)
        )
    look(1)
    assert [alert["rule"] for alert in alerts(client)] == ["restored"], "by default it raises no alert"
    alert = only(client, "restored")
    assert (alert["severity"], alert["message"]) == ("info", "restored to iteration 10 in 1.5 s")


def test_rules_are_of_a_project_and_can_be_changed_and_put_back(client, clock):
    rules = {rule["name"]: rule for rule in client.get(f"{PROJECT}/alert-rules").json()["rules"]}
    assert rules.keys() == {kind.name for kind in KINDS.values() if kind.built_in}
    assert all(rule["enabled"] and rule["built_in"] for rule in rules.values())
    done = change(client, "silent", limit=30, severity="warning", jobs="llama-*")
    assert (done["limit"], done["severity"], done["jobs"], done["changed_by"]) == (
        30,
        "warning",
        "llama-*",
        "operator",
    )
    assert client.delete(f"{PROJECT}/alert-rules/silent").status_code == 204
    again = {rule["name"]: rule for rule in client.get(f"{PROJECT}/alert-rules").json()["rules"]}
    assert again == rules


@ON_SQLITE
@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("Loud", {"kind": "silent"}, "name"),
        ("own", {}, "kind"),
        ("own", {"kind": "weather"}, "kind"),
        ("silent", {"kind": "overhead"}, "kind"),
        ("silent", {"limit": -1}, "limit"),
        ("silent", {"for_seconds": 1e9}, "for_seconds"),
        ("silent", {"severity": "loud"}, "severity"),
        ("silent", {"jobs": "<script>"}, "jobs"),
        ("silent", {"volume": 11}, "body"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_by_its_field(client, name, changes, field):
    reply = client.put(f"{PROJECT}/alert-rules/{name}", json=changes)
    assert (reply.status_code, reply.json()["field"]) == (422, field)


@ON_SQLITE
def test_rules_of_a_project_have_few_conditions_over_windows(client):
    for number in range(1, rules.MAX_WINDOW_CONDITIONS):  # in addition to that of the built-in rule
        change(client, f"own-{number}", kind="loss_spike", window=20 + number % 2, limit=10 + number)
    for condition in ({"window": 1000}, {"window": 21, "limit": 90}):  # another window, another limit
        reply = client.put(f"{PROJECT}/alert-rules/more", json={"kind": "loss_spike", **condition})
        assert (reply.status_code, reply.json()["field"]) == (422, "window")
        assert "11 over 21" in reply.json()["message"]
    change(client, "more", kind="loss_spike", window=21, limit=11)
    change(client, "own-1", window=20, limit=12)
    change(client, "not-over-a-window", kind="overhead", limit=90)


def test_equal_conditions_are_judged_once(monkeypatch):
    judged = []

    def judge(facts, limit):
        judged.append((facts.window, limit, facts.open_spike))
        return RuleResult(True, f"{limit}", limit)

    monkeypatch.setitem(KINDS, "loss_spike", replace(KINDS["loss_spike"], judge=judge))
    built_in = rules._default("default", KINDS["loss_spike"], "loss_spike")
    many = [structs.replace(built_in, name=f"own-{n}", limit=6 + n % 2) for n in range(100)]
    open_spike = OpenSpike("1-7", "high", 9.0, 7, 1, np.ones(60))
    checks = evaluation._check(GOOD, many, {(GOOD.job, "own-4"): open_spike})
    assert [check.result.value for check in checks] == [6 + n % 2 for n in range(100)]
    assert len(judged) == 3
    assert [spike for *_, spike in judged].count(open_spike) == 1


def test_a_project_that_is_not_there_has_no_rules(client):
    assert client.get("/api/v1/projects/nowhere/alert-rules").status_code == 404
    assert client.put("/api/v1/projects/nowhere/alert-rules/silent", json={}).status_code == 404
    assert client.delete(f"{PROJECT}/alert-rules/own").status_code == 404


def test_switching_a_rule_off_ends_what_it_found(alive, client, look):
    look(130)
    change(client, "silent", enabled=False)
    look(1)
    assert only(client, "silent", state="all")["resolved_why"].startswith("the rule was disabled")


# ---- what people do -------------------------------------------------------------------------------


def test_acknowledging_says_who_and_twice_is_once(alive, client, clock, look):
    look(130)
    alert = only(client, "silent")["id"]
    first = client.post(f"{JOB}/alerts/{alert}/acknowledge").json()
    clock.now += 5
    again = client.post(f"{JOB}/alerts/{alert}/acknowledge").json()
    assert (first["state"], first["acknowledged_by"]) == ("acknowledged", "operator")
    assert again["acknowledged_at"] == first["acknowledged_at"]


def test_the_members_of_a_project_see_its_alerts_and_no_others_do(alive, client, clock, look):
    look(130)
    alert, database = only(client, "silent")["id"], client.app.state.services.database
    seen = incidents.details(database, alert, visible_projects={"default"}, now=clock.now)
    assert (seen.alert.id, [step.state for step in seen.steps]) == (alert, ["fired"])
    with pytest.raises(UnknownAlert):
        incidents.details(database, alert, visible_projects={"vision"}, now=clock.now)


def test_a_silence_holds_for_the_next_incident_of_the_same(alive, client, clock, look):
    look(130)
    alert = only(client, "silent")["id"]
    silenced = client.post(f"{JOB}/alerts/{alert}/silence", json={"seconds": 3600}).json()
    assert (silenced["state"], silenced["silenced_until"]) == ("silenced", clock.now + 3600)
    alive.train(1)
    look(1)
    alive.train(1)
    clock.now += 61
    alive.train(1)
    look(0)
    assert alerts(client) == []
    look(130)
    following = only(client, "silent")
    assert following["id"] != alert
    assert following["state"] == "silenced"
    spoken = client.post(f"{JOB}/alerts/{following['id']}/unsilence").json()
    assert spoken["state"] == "firing"


def test_a_silence_ends_by_itself(alive, client, look):
    look(130)
    alert = only(client, "silent")["id"]
    client.post(f"{JOB}/alerts/{alert}/silence", json={"seconds": 60})
    look(61)
    assert (only(client, "silent")["state"], only(client, "silent")["silenced_until"]) == ("firing", None)


@ON_SQLITE
@pytest.mark.parametrize(
    "asked", [{}, {"seconds": 0}, {"seconds": -5}, {"until": 1}, {"seconds": 1, "until": 2e9}, {"seconds": 1e9}]
)
def test_a_silence_without_an_end_that_makes_sense_is_refused(alive, client, look, asked):
    look(130)
    reply = client.post(f"{JOB}/alerts/{only(client, 'silent')['id']}/silence", json=asked)
    assert (reply.status_code, reply.json()["field"]) == (422, "until")


@pytest.mark.parametrize("act", ["acknowledge", "silence", "unsilence"])
def test_nothing_can_be_done_about_what_is_over_or_never_was(alive, client, look, act):
    look(130)
    alert = only(client, "silent")["id"]
    change(client, "silent", enabled=False)
    look(1)
    body = {"seconds": 60} if act == "silence" else None
    assert client.post(f"{JOB}/alerts/{alert}/{act}", json=body).json()["error"] == "alert_over"
    assert client.post(f"{JOB}/alerts/{alert + 1}/{act}", json=body).status_code == 404
    assert client.post(f"/api/v1/jobs/another/alerts/{alert}/{act}", json=body).json()["error"] == "unknown_job"


def test_a_job_that_is_moved_takes_its_alerts_along(alive, client, clock, look):
    look(130)
    database = client.app.state.services.database
    projects.add(database, "vision", who="test", now=clock.now)
    projects.move_job(database, "char-gpt", "vision", who="test", now=clock.now)
    assert alerts(client, project="default", state="all") == []
    assert [alert["rule"] for alert in alerts(client, project="vision")] == ["silent"]


def test_history_is_paged(alive, client, look):
    change(client, "silent", limit=60)
    for number in range(3):
        change(client, f"own-{number}", kind="silent", limit=60)
    look(130)
    everything = [alert["id"] for alert in alerts(client)]
    assert len(everything) == 4
    first = [alert["id"] for alert in alerts(client, limit=2)]
    rest = [alert["id"] for alert in alerts(client, before=first[-1])]
    assert first + rest == everything
    assert [alert["id"] for alert in client.get(f"{JOB}/alerts").json()["alerts"]] == everything


def test_alerts_are_acknowledged_and_silenced_from_a_terminal(alive, client, look, clock, monkeypatch):
    """With the client of the command line, which here speaks to the application in this process."""
    look(130)
    alert = only(client, "silent")["id"]

    def send(self, method, path, body=None, headers=None, *, idempotent=None):
        reply = client.request(method, f"/api/v1{path}", json=body)
        assert reply.is_success, reply.text
        return reply.json()

    monkeypatch.setattr(JsonClient, "send", send)

    def holdfast(*arguments):
        done = CliRunner().invoke(cli, ["alerts", *map(str, arguments)])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert re.search(rf"{alert} +critical +firing +char-gpt .*Job silent", holdfast())
    assert holdfast("ack", alert) == f"alert {alert} is acknowledged by operator\n"
    assert holdfast("silence", alert, "2h") == f"alert {alert} is silenced for 2 h\n"
    assert only(client, "silent")["silenced_until"] == clock.now + 7200
    assert holdfast("unsilence", alert) == f"alert {alert} is acknowledged\n"
    assert holdfast("--job", "char-gpt", "--json").startswith("[")


def test_a_job_that_has_ended_well_is_looked_at_seldom_and_all_the_same(alive, client, clock, look, look_at_rest):
    look(130)
    assert only(client, "silent")["state"] == "firing"
    alive.at = clock.now
    alive.say(AttemptFinished(at=alive.at, iteration=10, lineage=1, reason="finished"))
    look(0)
    look(70)
    assert alerts(client) == [], "what fired is ended without delay"
    alive.checkpoint(10, state="damaged", reason="digest of rank 0 differs")
    look(0)
    assert alerts(client) == []
    look_at_rest()
    assert only(client, "checkpoint_damaged")["state"] == "firing"


def test_the_alert_of_a_failed_job_has_the_first_line_of_the_exception(job, client, clock):
    lines = [
        "iteration 9: loss 2.1",
        "Traceback (most recent call last):",
        '  File "train.py", line 31, in <module>',
        f"RuntimeError: CUDA out of memory. {'x' * 900}",
        "second line of the message",
    ]
    job.say(AttemptFinished(at=job.at, iteration=30, lineage=1, reason="RuntimeError"))
    job.say(OutputReport(at=job.at, first=0, lines=lines[:2]), OutputReport(at=job.at, first=2, lines=lines[2:]))
    evaluation.evaluate(client.app.state.services.database, clock.now)
    (alert,) = client.get("/api/v1/alerts", params={"rule": "job_failed"}).json()["alerts"]
    begin = "ended on node-1 with RuntimeError at iteration 30: CUDA out of memory. xxx"
    assert alert["message"].startswith(begin)
    assert len(alert["message"]) < len(begin) + 300
