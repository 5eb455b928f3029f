"""One sentence on whether a job is all right: the most severe of what applies."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import msgspec
import pytest

from holdfast.protocol.jobs import CheckpointInfo, JobSummary, Order, RecentFailures, SupervisorInfo
from holdfast.protocol.verdicts import VerdictCause
from holdfast.protocol.wire import AttemptFinished, Desired, RankTotals
from holdfast_server.queries import verdicts
from holdfast_server.queries.ranks import RankFindings
from holdfast_server.queries.verdicts import OpenAlert, VerdictFacts, verdict

JOB = "/api/v1/jobs/char-gpt"
NOW = 1_790_000_000.0
CHECKPOINT = CheckpointInfo(
    at=NOW - 4, id="000000000480-1", iteration=480, lineage=1, kind="scheduled", state="durable", restorable=True
)
ORDER = Order(
    id="1", job="gpt", checkpoint="000000000440-1", iteration=440, state="delivered", created_at=NOW, who="ada",
    fence=1, from_iteration=500, from_lineage=1,
)  # fmt: skip
SUPERVISOR = SupervisorInfo(
    state="restarting", host="gpu-17", reason="CUDA out of memory", start=3, limit=5, failed=True,
    has_started=False, waits=False,
)  # fmt: skip
SUMMARY = JobSummary(
    job="gpt", project="default", owner="", labels={}, status="running", status_reason="", alive=True,
    restore_mode="in_place", restore_reason="", iteration=500, lineage=1, attempt=1, restarts=0, world_size=64,
    iterations_per_second=5.0, last_contact_seconds=1.0, started_at=NOW - 9000, loss=2.5, metrics=["loss"],
    paced=None, measured_overhead=0.02, measured_window_iterations=200, budget=0.035, interval=50,
    interval_seconds=None, policy="checkfreq", interval_reason="", unsaved_iterations=20, unsaved_seconds=4.0,
    unsaved_gpu_hours=0.07, last_durable=CHECKPOINT, failing=None, desired=Desired(), every_until=None,
    delivered_version=0, applied_version=0, applied_iteration=None, applied_at=None, open_order=None,
    checkpoints_total=10, longest_stall=None, sparkline=[], lineages=1,
)  # fmt: skip
HEALTHY = VerdictFacts(job=SUMMARY, now=NOW)


def facts(**fields):
    """The facts of a healthy job, with other fields of its summary."""
    return replace(HEALTHY, job=msgspec.structs.replace(SUMMARY, **fields))


def ended(status, **fields):
    return facts(status=status, alive=False, **fields)


def alert(kind, message, severity="critical"):
    return replace(HEALTHY, alerts=[OpenAlert(kind=kind, severity=severity, message=message)])


def totals(**fields):
    found = {"data_seconds": 1.0, "seconds": 100.0, "iterations": 100} | fields
    return replace(HEALTHY, ranks=RankFindings(**found))


PAUSED = msgspec.structs.replace(SUMMARY.desired, paused=True)
DISK_FULL = RecentFailures(count=247, reason="disk full on /mnt/ckpt", since=NOW - 2000)

EACH = {
    "failed": (
        replace(
            ended("failed", status_reason="ValueError at iteration 500"),
            exception="ValueError: bad batch", ended_seconds=2400.0,
        ),
        "critical", "Failed 40 min ago: ValueError: bad batch at iteration 500",
        "Fix the cause, then start the script again: it resumes from 480",
    ),
    "silent": (
        ended("silent", last_contact_seconds=3060.0, host="gpu-17"), "critical",
        "Silent for 51 min: last report from gpu-17; a crash has cost 0.07 GPU-hours",
        "If its process has ended, start the script again: it resumes from 480; otherwise check its network",
    ),
    "restarting": (
        facts(status="restarting", supervisor=SUPERVISOR), "warning",
        "Restarting on gpu-17, start 3 of 5 (CUDA out of memory)",
        "Nothing to do yet: holdfast run starts the script again: it resumes from 480",
    ),
    "restoring": (facts(open_order=ORDER), "info", "Restoring iteration 440: delivered, requested by ada", ""),
    "failing": (
        facts(failing=DISK_FULL, last_durable=msgspec.structs.replace(CHECKPOINT, at=NOW - 2460)), "critical",
        "Not protected for 41 min: 247 checkpoints failed, disk full on /mnt/ckpt",
        "Fix the store; training continues, and the next checkpoint tries again",
    ),
    "stuck": (
        alert("no_progress", "no new iteration for 12 min (limit 10 min)"), "critical",
        "Stuck: no new iteration for 12 min (limit 10 min)",
        "Read the output of the running attempt, and restart it if it hangs",
    ),
    "loss": (
        facts(loss=float("nan")), "critical", "Loss not finite: the loss is nan",
        "Restore a checkpoint from before it, with a change: the same iterations give the same losses",
    ),
    "damaged": (
        alert("checkpoint_damaged", "checkpoint 000000000440-1 is damaged"), "critical",
        "Damaged checkpoint: checkpoint 000000000440-1 is damaged",
        "Verify the others, and take a new checkpoint",
    ),
    "late": (
        facts(last_durable=msgspec.structs.replace(CHECKPOINT, at=NOW - 90)), "warning",
        "Not protected for 1 min 30 s: no checkpoint became durable, one is due every 10 s",
        "Check under Last durable and Checkpoints whether the store is slow",
    ),
    "alert": (
        alert("overhead", "overhead 6.3 % (limit 1.2 × the budget of 1 %)", "warning"), "warning",
        "Over budget: overhead 6.3 % (limit 1.2 × the budget of 1 %)", "Compare intervals and budgets under Plan",
    ),
    "paused": (
        facts(desired=PAUSED, status="paused"), "warning",
        "Checkpoints paused; a crash now costs 0.07 GPU-hours", "Resume checkpoints",
    ),
    "data": (
        totals(data_seconds=67.0), "warning", "Waiting for data 67 % of the time",
        "Profile data loading on the job's page",
    ),
    "straggler": (
        totals(slowest=3, slower=0.79, why="its own work"), "warning",
        "Rank 3 slows all ranks: it takes 79 % longer because of its own work",
        "See rank 3 under Ranks: its host, its GPU and its data",
    ),
    "starting": (
        facts(status="starting", status_reason="attempt 2 has finished no iteration yet"), "info",
        "Starting: attempt 2 has finished no iteration yet", "",
    ),
    "unprotected": (
        facts(last_durable=None, interval=None), "info", "No checkpoint yet; a crash now costs 0.07 GPU-hours", "",
    ),
    "healthy": (HEALTHY, "good", "Healthy: newest checkpoint 4 s old; a crash now costs 0.07 GPU-hours", ""),
    "stopped": (
        ended("stopped", status_reason="interrupted at iteration 500"), "ended",
        "Stopped: interrupted at iteration 500", "Start the script again to continue: it resumes from 480",
    ),
    "finished": (
        replace(ended("finished"), ended_seconds=60.0), "ended",
        "Finished 1 min ago at iteration 500; newest checkpoint at 480", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("cause", get_args(VerdictCause))
def test_each_cause_has_its_sentence_its_level_and_its_next_step(cause):
    found = verdict(EACH[cause][0])
    assert (found.cause, found.level, found.text, found.next_step) == (cause, *EACH[cause][1:])


def test_the_causes_are_listed_by_severity():
    assert tuple(verdicts.VERDICTS) == get_args(VerdictCause)


def test_the_most_severe_cause_is_the_verdict():
    both = replace(facts(failing=DISK_FULL, desired=PAUSED), ranks=totals(data_seconds=67.0).ranks)
    assert verdict(both).cause == "failing"
    assert verdict(replace(both, job=msgspec.structs.replace(both.job, failing=None))).cause == "paused"


@pytest.mark.parametrize("cause", ["data", "straggler"])
def test_what_makes_a_job_slow_comes_before_that_it_is_slow(cause):
    slow = replace(EACH[cause][0], alerts=alert("throughput_drop", "33 % below", "warning").alerts)
    assert verdict(slow).cause == cause
    assert verdict(replace(slow, ranks=None)).cause == "alert"
    critical = replace(slow, alerts=alert("throughput_drop", "60 % below", "critical").alerts)
    assert verdict(critical).cause == "alert"


def test_a_silent_job_of_an_unknown_host_is_silent_all_the_same():
    found = verdict(ended("silent", last_contact_seconds=3060.0))
    assert found.text.startswith("Silent for 51 min: no report from the agent; ")


def test_one_failed_checkpoint_is_a_warning():
    assert verdict(facts(failing=msgspec.structs.replace(DISK_FULL, count=1))).level == "warning"


def test_a_reason_of_an_agent_stays_in_its_line():
    found = verdict(facts(failing=msgspec.structs.replace(DISK_FULL, reason="disk\nfull \x1b[31m" + "x" * 500)))
    assert found.text.isprintable()
    assert len(found.text) == verdicts.MAX_TEXT


def test_little_unsaved_work_is_given_as_time():
    assert verdict(facts(unsaved_gpu_hours=0.003)).text.endswith("a crash now costs 4 s of training")
    little = verdict(facts(unsaved_gpu_hours=0.0001, unsaved_seconds=0.07))
    assert little.text.endswith("a crash now costs less than 1 s of training")
    assert verdict(facts(unsaved_iterations=0)).text.endswith("a crash now costs nothing")


def test_an_alert_of_training_says_nothing_about_a_job_that_has_ended():
    overhead = alert("overhead", "overhead 6 %").alerts
    assert verdict(replace(ended("finished"), alerts=overhead)).cause == "finished"
    failed = alert("restore_failed", "not restored to iteration 440: expired").alerts
    assert verdict(replace(ended("finished"), alerts=failed)).cause == "alert"


# ---- the whole way


def found_verdict(client):
    return client.get(JOB).json()["verdict"]


def test_a_job_and_the_fleet_have_the_same_verdict(agent, client, clock):
    agent.start()
    agent.train(100)
    assert client.get("/api/v1/jobs").json()["jobs"][0]["verdict"] == found_verdict(client)
    agent.say(AttemptFinished(at=clock.now, iteration=100, lineage=1, reason="ValueError"))
    assert found_verdict(client)["text"].startswith("Failed")


def test_a_job_that_waits_for_data_says_so(agent, client):
    agent.start()
    agent.train(200, seconds=0.5, data_seconds=0.4)
    assert found_verdict(client)["text"] == "Waiting for data 80 % of the time"


def test_a_slow_rank_is_named(agent, client):
    agent.start()
    agent.train(200, seconds=1.0)
    for rank, own in enumerate((0.5, 0.5, 0.5, 0.9)):
        agent.rank, agent.sequence = rank, agent.sequence + 1
        agent.say(
            RankTotals(
                at=agent.at, lineage=1, first_iteration=1, last_iteration=200, iterations=200, seconds=200.0,
                longest_seconds=1.0, barrier_iterations=200, barrier_seconds=200 * (1.0 - own),
            )
        )  # fmt: skip
    assert found_verdict(client)["text"] == "Rank 3 slows all ranks: it takes 80 % longer because of its own work"


def test_the_iteration_of_a_failure_is_not_told_twice():
    facts, *_ = EACH["failed"]
    found = verdict(replace(facts, exception="ValueError: bad batch at iteration 500"))
    assert found.text == "Failed 40 min ago: ValueError: bad batch at iteration 500"
