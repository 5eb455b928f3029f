"""A job that its supervisor restarts: its state, and the one message when the supervisor gives up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from holdfast.protocol.wire import SUPERVISOR_RANK, AttemptFinished, Notice, SupervisorReport
from holdfast_server.alerts import evaluation
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.settings import ServerSettings
from holdfast_server.records.job_status import SUPERVISOR_PATIENCE_SECONDS
from tests.support.clock import FakeClock
from tests.support.server_fixtures import JOB, ScriptedAgent

pytestmark = pytest.mark.usefixtures("no_background_jobs")  # the tests evaluate the rules

OOM = "CUDA out of memory"
CHANNELS = "/api/v1/projects/default/alert-channels"


@pytest.fixture
def settings(empty_database: str) -> ServerSettings:
    alerts = AlertSettings(webhooks=True, webhook_hosts=frozenset(["http://127.0.0.1:9"]))
    return ServerSettings(database=empty_database, alerts=alerts)


@dataclass
class SupervisedJob:
    """A job under a supervisor, with the time of the server."""

    client: TestClient
    clock: FakeClock
    agent: ScriptedAgent
    channel: str
    reports: int = 0

    def report(self, state: str, reason: str = OOM, *, about: ScriptedAgent | None = None, **more: Any) -> None:
        """Report as the supervisor, about the current attempt or another one."""
        agent = about or self.agent
        report = SupervisorReport(at=self.clock.now, state=state, reason=reason, **more)  # type: ignore[arg-type]
        self.reports += 1
        supervisor = replace(agent, rank=SUPERVISOR_RANK, sequence=self.reports, at=self.clock.now)
        supervisor.say(report)

    def crash(self) -> None:
        agent = self.agent
        agent.say(AttemptFinished(at=agent.at, iteration=agent.iteration, lineage=1, reason="RuntimeError"))

    def next_start(self, **started: Any) -> None:
        self.agent = self.agent.restarted(f"attempt-{self.agent.attempt + 1}")
        self.agent.at = self.clock.now
        self.agent.start(**{"supervised": True, "previous_exit": "exit status 1", **started})

    @property
    def status(self) -> tuple[str, str]:
        summary = self.client.get(JOB).json()
        return summary["status"], summary["status_reason"]

    def evaluate(self, seconds: float = 0.0) -> None:
        self.clock.now += seconds
        evaluation.evaluate(self.client.app.state.services.database, self.clock.now)

    @property
    def messages(self) -> list[str]:
        """The events and texts of all messages, oldest first."""
        rows = self.client.get(f"{CHANNELS}/{self.channel}/deliveries").json()["deliveries"]
        return [row["event"] for row in sorted(rows, key=lambda row: row["id"])]

    @property
    def alerts(self) -> list[str]:
        rows = self.client.get("/api/v1/alerts", params={"state": "all"}).json()["alerts"]
        return [row["message"] for row in rows]


@pytest.fixture
def supervised(client: TestClient, clock: FakeClock, agent: ScriptedAgent) -> SupervisedJob:
    added = client.post(CHANNELS, json={"name": "on call", "target": "http://127.0.0.1:9/hook"})
    assert added.status_code == 201, added.text
    agent.at = clock.now
    agent.start(supervised=True)
    agent.train(20)
    agent.checkpoint()
    agent.train(10)
    return SupervisedJob(client, clock, agent, added.json()["id"])


def test_a_delay_that_a_report_names_holds_an_alert_back_for_minutes_at_most(supervised: SupervisedJob) -> None:
    supervised.crash()
    supervised.report("restarting", start=1, limit=5, delay_seconds=1e10)
    supervised.evaluate(1)
    assert supervised.status[0] == "restarting"
    supervised.evaluate(2 * SUPERVISOR_PATIENCE_SECONDS)
    assert supervised.status[0] == "failed"
    assert supervised.alerts


def test_six_starts_of_a_crash_loop_send_one_message(supervised: SupervisedJob) -> None:
    for start in range(1, 6):
        supervised.crash()
        assert supervised.status == ("restarting", "RuntimeError at iteration 30")
        supervised.evaluate(1)
        supervised.report("restarting", start=start, limit=5, delay_seconds=20.0)
        assert supervised.status == ("restarting", f"start {start} of 5, {OOM}")
        supervised.evaluate(20)
        supervised.next_start()
        assert supervised.status == ("restarting", f"start {start} of 5, {OOM}")
        supervised.evaluate(5)
        supervised.agent.train(1)
        assert supervised.status == ("running", "")
        supervised.agent.iteration -= 1
        supervised.evaluate(10)
    assert (supervised.alerts, supervised.messages) == ([], [])
    supervised.crash()
    supervised.evaluate()
    supervised.report("gave_up", start=5, waits=True)
    for _ in range(30):
        supervised.evaluate(10)
    assert supervised.status == ("failed", f"gave up after 5 starts: {OOM}")
    told = "Fix the cause, then restore a checkpoint: holdfast run on node-1 waits for it"
    assert supervised.alerts == [f"gave up after 5 starts: {OOM}. {told}"]
    assert supervised.messages == ["firing"]


def test_what_the_message_offers_follows_the_supervisor(supervised: SupervisedJob) -> None:
    supervised.crash()
    supervised.report("gave_up", start=1, waits=True)
    supervised.evaluate()
    supervised.report("gave_up", start=1, waits=False)
    supervised.evaluate(10)
    assert supervised.alerts == [
        f"gave up after 1 start: {OOM} on node-1. Fix the cause, then start the script again"
    ]
    assert supervised.messages == ["firing"]


def test_a_job_that_trains_after_a_restart_sends_nothing(supervised: SupervisedJob) -> None:
    supervised.crash()
    supervised.report("restarting", start=1, limit=5)
    supervised.next_start()
    supervised.agent.train(20)
    supervised.agent.say(AttemptFinished(at=supervised.clock.now, iteration=50, lineage=1, reason="finished"))
    for _ in range(30):
        supervised.evaluate(10)
    assert supervised.status == ("finished", "at iteration 50")
    assert (supervised.alerts, supervised.messages) == ([], [])


@pytest.mark.parametrize("has_reported", [True, False])
def test_a_supervisor_that_dies_turns_the_restart_into_a_failure(
    supervised: SupervisedJob, has_reported: bool
) -> None:
    supervised.crash()
    if has_reported:
        supervised.report("restarting", start=2, limit=5, delay_seconds=5.0)
    supervised.evaluate(SUPERVISOR_PATIENCE_SECONDS - 1)
    assert supervised.status[0] == "restarting"
    assert supervised.alerts == []
    supervised.evaluate(10)
    assert supervised.status[0] == "failed"
    assert supervised.messages == ["firing"]
    if has_reported:
        assert supervised.status[1] == f"{OOM}; holdfast run on node-1 no longer reports"


def test_a_start_that_imports_for_long_is_no_failure_while_the_supervisor_reports(
    supervised: SupervisedJob,
) -> None:
    supervised.crash()
    for _ in range(12):
        supervised.report("restarting", start=1, limit=5)
        supervised.evaluate(30)
        assert supervised.status == ("restarting", f"start 1 of 5, {OOM}")
    assert supervised.alerts == []


def test_a_killed_trainer_restarts_although_it_reported_no_end(supervised: SupervisedJob) -> None:
    supervised.report("restarting", "killed by SIGKILL", start=1, limit=5)
    assert supervised.status == ("restarting", "start 1 of 5, killed by SIGKILL")
    supervised.evaluate(100)
    assert supervised.status[0] == "restarting"
    assert supervised.alerts == []
    supervised.report("gave_up", "killed by SIGKILL", start=5)
    assert supervised.status == ("failed", "gave up after 5 starts: killed by SIGKILL")


@pytest.mark.parametrize("reason", ["preempted", "finished", "interrupted"])
def test_a_script_that_ended_as_intended_restarts_if_its_supervisor_says_so(
    supervised: SupervisedJob, reason: str
) -> None:
    agent = supervised.agent
    agent.say(AttemptFinished(at=agent.at, iteration=30, lineage=1, reason=reason))
    supervised.report("restarting", "exit status 3", start=1, limit=5)
    assert supervised.status == ("restarting", "start 1 of 5, exit status 3")
    supervised.report("gave_up", "exit status 3", start=5)
    assert supervised.status[0] == "failed"


def test_a_restart_for_a_restore_is_no_failure(supervised: SupervisedJob) -> None:
    agent = supervised.agent
    agent.say(AttemptFinished(at=agent.at, iteration=30, lineage=1, reason="relaunched"))
    assert supervised.status == ("restarting", "to restore a checkpoint")
    supervised.report("restarting", "to restore iteration 20")
    assert supervised.status == ("restarting", "to restore iteration 20")
    assert supervised.client.get(JOB).json()["supervisor"]["failed"] is False


def test_a_second_start_by_hand_is_a_start_of_its_own(supervised: SupervisedJob) -> None:
    supervised.crash()
    supervised.report("restarting", start=3, limit=5, delay_seconds=30.0)
    ended = supervised.agent
    supervised.next_start(supervised=False, previous_exit=None)
    assert supervised.status[0] == "starting"
    supervised.report("restarting", start=3, limit=5, about=ended)  # late, and about an earlier attempt
    assert supervised.status[0] == "starting"
    supervised.agent.train(5)
    assert supervised.status == ("running", "")


def test_a_supervisor_that_a_signal_stopped_has_not_failed(supervised: SupervisedJob) -> None:
    supervised.crash()
    supervised.report("stopped", "holdfast run was stopped by SIGINT")
    supervised.evaluate(300)
    assert supervised.status == ("stopped", "holdfast run was stopped by SIGINT at iteration 30")
    assert supervised.alerts == []


def test_a_script_that_ends_with_status_0_is_not_restarted(supervised: SupervisedJob) -> None:
    supervised.crash()
    supervised.report("ended", "exit status 0")
    assert supervised.status == ("failed", "RuntimeError at iteration 30")


def test_a_report_that_only_arrives_at_the_end_suffices(supervised: SupervisedJob) -> None:
    """No server could be reached while the supervisor restarted the script."""
    supervised.clock.now += 600
    supervised.evaluate()
    before = supervised.messages
    assert supervised.status[0] == "silent"
    last = supervised.agent.restarted("last")
    last.at = supervised.clock.now
    supervised.agent = replace(last, attempt=7)
    supervised.report("gave_up", start=5)
    supervised.evaluate()
    assert supervised.status == ("failed", f"gave up after 5 starts: {OOM}")
    assert supervised.messages[len(before) :] == ["firing"]


def test_a_supervisor_without_these_reports_waits_as_it_did(supervised: SupervisedJob) -> None:
    """An agent of the version before reports the end of an attempt, and later that its supervisor waits."""
    supervised.crash()
    agent = replace(supervised.agent, rank=SUPERVISOR_RANK)
    agent.say(Notice(at=agent.at, iteration=30, lineage=1, level="warning", code="waits", message="waits"))
    supervised.evaluate(SUPERVISOR_PATIENCE_SECONDS + 1)
    assert supervised.status == ("failed", "RuntimeError at iteration 30")
    assert supervised.messages == ["firing"]


def test_an_alert_of_a_failed_job_stays_while_it_is_restarted_for_a_restore(supervised: SupervisedJob) -> None:
    supervised.crash()
    supervised.report("gave_up", start=5, waits=True)
    supervised.evaluate()
    supervised.report("restarting", "to restore iteration 20")
    assert supervised.status == ("restarting", "to restore iteration 20")
    supervised.evaluate(100)
    supervised.next_start()
    supervised.crash()
    supervised.report("gave_up", start=5, waits=True)
    supervised.evaluate(1)
    assert supervised.messages == ["firing"], "it did not train in between"
    supervised.report("restarting", "to restore iteration 20")
    supervised.next_start()
    for _ in range(9):
        supervised.agent.at = supervised.clock.now
        supervised.agent.train(10)
        supervised.evaluate(10)
    assert supervised.messages == ["resolved"], "the message that waits is about the end as well"


def test_the_last_report_of_an_attempt_decides(supervised: SupervisedJob) -> None:
    supervised.report("restarting", start=1, limit=5)
    supervised.next_start()
    supervised.crash()
    assert supervised.status == ("restarting", "RuntimeError at iteration 30")
    supervised.report("restarting", "killed by SIGKILL", start=2, limit=5)
    summary = supervised.client.get(JOB).json()
    assert summary["supervisor"] == {
        "state": "restarting", "host": "node-1", "reason": "killed by SIGKILL", "start": 2, "limit": 5,
        "failed": True, "has_started": False, "waits": False,
    }  # fmt: skip
    assert (summary["alive"], summary["restore_mode"]) == (True, "next_start")
