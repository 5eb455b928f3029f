"""A job is deleted with all that is stored of it, nothing of another job goes, and a later report begins anew."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy import func, select
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.protocol.orders import HaltReport
from holdfast.protocol.store_shares import StoreReport
from holdfast.protocol.value_rules import define
from holdfast.protocol.values import ValueReport
from holdfast.protocol.wire import (
    AnnotationReport,
    AttemptFinished,
    ConfigurationReport,
    DesiredStateApplied,
    Gap,
    IntervalDecision,
    LineageStarted,
    MachineSample,
    MemoryReport,
    Notice,
    OrderStateChange,
    OutputReport,
    RankPlace,
    RankTotals,
    Stall,
)
from holdfast_server import models
from holdfast_server.control import accounting, deletion
from holdfast_server.core.principal import Role
from holdfast_server.records.job_status import SILENT_AFTER_SECONDS
from tests.support.accounts_server import OURS, OWN

JOBS = "/api/v1/jobs"
JOB = f"{JOBS}/char-gpt"


def report_everything(agent):
    """Something for every table."""
    client, job = agent.client, f"{JOBS}/{agent.job}"
    at = {"at": agent.at, "iteration": 1, "lineage": 1}
    agent.start()
    agent.say(
        ConfigurationReport(at=agent.at, section="configuration", values={"lr": "0.1"}),
        OutputReport(at=agent.at, first=0, lines=["a line"]),
        AnnotationReport(text="epoch 0 ends", **at),
    )
    agent.say(LineageStarted(at=agent.at, lineage=1, iteration=0))
    agent.train(300)
    agent.checkpoint(100)
    agent.checkpoint(200)
    agent.say(
        Stall(kind="snapshot_wait", seconds=2.0, **at),
        Notice(level="info", code="x", message="y", **at),
        IntervalDecision(policy="checkfreq", interval=5, budget=0.03, predicted_overhead=None,
                         measured_overhead=0.01, **at),
        RankTotals(at=agent.at, lineage=1, first_iteration=1, last_iteration=9, iterations=9, seconds=1.0,
                   longest_seconds=0.2),
        MachineSample(cpu_share=0.5, **at),
        MemoryReport(at=agent.at, host="node-1"),
        RankPlace(at=agent.at, host="node-1"),
        HaltReport(state="paused", **at),
        HaltReport(state="continued", **at),
        StoreReport(at=agent.at, address="/checkpoints", host="node-1"),
        ValueReport(definition=define("lr_scale", 1.0, 0.01, 10.0, ()), value=1.0, **at),
    )  # fmt: skip
    client.patch(f"{job}/desired", json={"budget": 0.1}, headers={"If-Match": '"0"'}).raise_for_status()
    client.put(f"{job}/values/lr_scale", json={"value": 0.5}).raise_for_status()
    client.post(f"{job}/checkpoints/100/verification", json={}).raise_for_status()
    placed = client.post(f"{job}/restores", json={"iteration": 100, "key": "k"}).json()
    agent.say(
        OrderStateChange(order=placed["id"], state="failed", reason="z", **at),
        DesiredStateApplied(version=1, **at),
    )
    thinned = {"job": agent.job, "uid": agent.uid, "attempt": 1, "rank": 0, "sequence": 99, "sent_at": agent.at,
               "iteration": agent.iteration, "lineage": 1,
               "gaps": [Gap(lineage=1, first_iteration=1, last_iteration=2, dropped=1)]}  # fmt: skip
    agent.send(msgspec.msgpack.encode(thinned))

    def others(session):
        row = models.AlertRecord(
            project="default", job=agent.job, rule="silent", kind="silent", severity="info", message="",
            since=agent.at,
        )  # fmt: skip
        channel = f"channel-{agent.job}"
        session.add_all([row, models.AlertChannelRecord(
            id=channel, project="default", name="", kind="webhook", target="", secret="", created_by="",
            least_severity="info", created_at=1.0,
        ), models.ApprovalRecord(
            id=f"approval-{agent.job}", job=agent.job, what="", request="", who="", owner="", created_at=1.0,
            expires_at=1.0, state="waiting",
        )])  # fmt: skip
        session.flush()
        told = {"event": "firing", "payload": b"", "state": "failed", "created_at": 1.0, "next_at": 1.0}
        session.add(models.AlertDeliveryRecord(channel=channel, alert=row.id, **told))
        session.add(models.AlertNoteRecord(alert=row.id, at=1.0, who="", kind="comment", text=""))

    client.app.state.services.database.write(others)
    accounting.keep_account(client.app.state.services.database, agent.at)


def finish(agent):
    agent.say(AttemptFinished(at=agent.at, iteration=agent.iteration, lineage=1, reason="finished"))


def rows(client):
    """How many each table has, but for the audit log and what belongs to no job."""

    def count():
        with client.app.state.services.database.read() as session:
            return {
                table.name: session.scalar(select(func.count()).select_from(table))
                for table in [*deletion._tables(), models.table(models.JobRecord)]
            }

    return count()


@pytest.fixture
def finished(agent):
    report_everything(agent)
    finish(agent)
    return agent


def test_nothing_of_a_deleted_job_is_left_and_all_of_another_is(client, fresh_agent, finished):
    alone = rows(client)
    assert {name for name, count in alone.items() if not count} == set(), "a table that this says nothing about"
    other = fresh_agent(client, job="other", uid="other")
    report_everything(other)
    finish(other)
    assert client.delete(JOB).status_code == 204
    assert rows(client) == alone
    assert client.get(JOB).status_code == client.get("/jobs/char-gpt").status_code == 404
    assert [job["job"] for job in client.get(JOBS).json()["jobs"]] == ["other"]
    assert client.delete(JOB).status_code == 404


def test_many_rows_go_a_few_at_a_time(client, finished, monkeypatch):
    monkeypatch.setattr(deletion, "ROWS_AT_ONCE", 2)
    for _ in range(7):
        finished.say(Notice(at=finished.at, iteration=1, lineage=1, level="info", code="x", message="y"))
    database, deleted = client.app.state.services.database, []
    delete_some = deletion._delete_some

    def counted(session, **about):
        deleted.append(delete_some(session, **about))
        return deleted[-1]

    monkeypatch.setattr(deletion, "_delete_some", counted)
    assert client.delete(JOB).status_code == 204
    assert set(rows(client).values()) == {0}
    assert (max(deleted), len(deleted) > 20) == (2, True)
    assert database.writes_waiting == 0


def test_few_rows_go_in_one_transaction(client, finished, monkeypatch):
    database, works = client.app.state.services.database, []
    write = database.write

    def recorded(work, **about):
        works.append(getattr(work, "func", work))
        return write(work, **about)

    monkeypatch.setattr(database, "write", recorded)
    assert client.delete(JOB).status_code == 204
    assert works[-3:] == [deletion._begin, deletion._delete_some, deletion._end]


def test_a_message_about_an_alert_that_comes_meanwhile_does_not_stop_it(client, finished, monkeypatch):
    monkeypatch.setattr(deletion, "ROWS_AT_ONCE", 1)
    delete_some, added = deletion._delete_some, []

    def late(session, **about):
        alert = session.scalar(select(models.AlertRecord.id).where(models.AlertRecord.job == "char-gpt"))
        if not session.scalar(select(func.count()).select_from(models.AlertDeliveryRecord)) and not added:
            added.append(alert)
            session.add(
                models.AlertDeliveryRecord(
                    channel="channel-char-gpt", alert=alert, event="resolved", payload=b"{}", state="waiting",
                    created_at=0.0, next_at=0.0,
                )
            )  # fmt: skip
            session.flush()
        return delete_some(session, **about)

    monkeypatch.setattr(deletion, "_delete_some", late)
    assert client.delete(JOB).status_code == 204
    assert added[0] is not None
    assert set(rows(client).values()) == {0}


def test_a_later_report_begins_the_job_anew(client, finished, fresh_agent):
    client.delete(JOB).raise_for_status()
    again = fresh_agent(client, uid="again")
    again.start()
    again.train(3)
    told = client.get(JOB).json()
    assert (told["status"], told["iteration"], told["desired"]["version"]) == ("running", 3, 0)
    assert client.get(f"{JOB}/desired").json()["latest_attempt"] == 1
    assert client.get(f"{JOB}/checkpoints").json()["checkpoints"] == []


def test_a_running_job_is_refused_and_a_silent_one_is_not(client, clock, agent):
    agent.start()
    agent.train(3)
    reply = client.delete(JOB)
    assert (reply.status_code, reply.json()["error"]) == (409, "not_possible")
    assert "is running, and its next report would create it again" in reply.json()["message"]
    assert client.get(JOB).json()["iteration"] == 3
    clock.now += SILENT_AFTER_SECONDS + 1
    assert client.delete(JOB).status_code == 204


def test_a_job_that_reports_while_it_is_deleted_stays_and_the_one_who_deletes_is_told(
    client, clock, agent, monkeypatch
):
    agent.start()
    agent.train(3)
    clock.now += SILENT_AFTER_SECONDS + 1
    write, database = client.app.state.services.database.write, client.app.state.services.database

    def with_a_report_in_between(work, **about):
        if getattr(work, "func", None) is deletion._end:

            def heard(session):
                session.get(models.JobRecord, "char-gpt").last_contact_at = clock.now

            write(heard)
        return write(work, **about)

    monkeypatch.setattr(database, "write", with_a_report_in_between)
    reply = client.delete(JOB)
    assert (reply.status_code, "reported again" in reply.json()["message"]) == (409, True)
    agent.train(3)
    assert client.get(JOB).json()["iteration"] == 6


def test_a_second_deletion_takes_nothing_of_the_job_that_began_anew(client, clock, finished, monkeypatch):
    database, anew = client.app.state.services.database, []
    write = database.write

    def begun_anew(session):
        at = {"created_at": clock.now, "last_contact_at": clock.now}
        session.add(models.JobRecord(name="char-gpt", project="default", **at))
        session.flush()
        session.add(models.NoticeRecord(
            job="char-gpt", at=1.0, iteration=1, lineage=1, level="info", code="anew", message="",
        ))  # fmt: skip

    def after_the_first(work, **about):
        if getattr(work, "func", None) is deletion._delete_some and not anew:
            anew.append(True)
            deletion.delete_job(database, "char-gpt", who="the first", now=clock.now)
            clock.now += 1
            write(begun_anew)
        return write(work, **about)

    monkeypatch.setattr(database, "write", after_the_first)
    assert client.delete(JOB).status_code == 409
    assert [notice["code"] for notice in client.get(f"{JOB}/notices").json()["notices"]] == ["anew"]


def test_the_audit_log_says_who_deleted_what(client, finished):
    client.delete(JOB).raise_for_status()
    entry = client.get("/api/v1/audit", params={"action": "job"}).json()["entries"][0]
    assert (entry["action"], entry["job"], entry["project"], entry["who"]) == (
        "job.delete", "char-gpt", "default", "operator",
    )  # fmt: skip
    assert msgspec.json.decode(entry["before"])["iteration"] == 300


def test_an_admin_of_the_project_may_and_an_operator_may_not(stage):
    stage.project(OWN, "one", "two")
    operator = stage.cookie(stage.person("operators", Role.operator)) | OURS
    admin = stage.cookie(stage.person("admin", Role.admin)) | OURS
    assert stage.client.delete(f"{JOBS}/one", headers=operator).status_code == 403
    assert stage.client.delete(f"{JOBS}/one", headers=stage.bearer("control")).status_code == 403
    assert stage.client.delete(f"{JOBS}/one", headers=admin).status_code == 204
    assert stage.client.delete(f"{JOBS}/two", headers=stage.bearer("admin")).status_code == 204


def test_an_admin_of_the_server_frees_a_name_that_another_project_took(stage):
    stage.project(OWN)
    stage.project("speech")
    root = stage.cookie(stage.person("root", admin=True)) | OURS

    def report(key, at):
        batch = {"job": "next-gen", "uid": key["Authorization"], "attempt": 1, "rank": 0, "sequence": 0,
                 "sent_at": at, "iteration": 0, "lineage": 1}  # fmt: skip
        return stage.client.post("/api/v1/ingest", json=batch, headers=key).status_code

    squatter, rightful = stage.bearer("report", project="speech"), stage.bearer("report")
    assert (report(squatter, stage.clock()), report(rightful, stage.clock())) == (200, 404)
    (job,) = stage.client.get(JOBS, headers=root).json()["jobs"]
    assert (job["job"], job["project"]) == ("next-gen", "speech")
    stage.clock.now += SILENT_AFTER_SECONDS + 1
    assert stage.client.delete(f"{JOBS}/next-gen", headers=root).status_code == 204
    # what an instance remembers of projects for a moment is not waited for
    stage.client.app.state.services.job_projects._projects._values.clear()
    assert report(rightful, stage.clock()) == 200


# ---- on its page, and on the command line ----------------------------------------------------


def test_the_page_asks_before_it_deletes(client, finished):
    page = client.get("/jobs/char-gpt").text
    assert 'href="/jobs/char-gpt/delete"' in page
    whole, dialog = (client.get("/jobs/char-gpt/delete", headers=headers).text
                     for headers in ({}, {"HX-Request": "true"}))  # fmt: skip
    assert ("<html" in whole, "<html" in dialog) == (True, False)
    for shown in (whole, dialog):
        assert "Delete char-gpt?" in shown
        assert "Checkpoints in the store and the audit log" in shown
    deleted = client.post("/jobs/char-gpt/delete", follow_redirects=False)
    assert (deleted.status_code, deleted.headers["location"]) == (303, "/")
    assert client.get(JOB).status_code == 404


def test_the_dialog_leads_back_to_the_fleet(client, finished):
    deleted = client.post("/jobs/char-gpt/delete", headers={"HX-Request": "true"})
    assert (deleted.status_code, deleted.headers["hx-redirect"]) == (200, "/")


def test_the_page_says_why_a_running_job_is_kept(client, agent):
    agent.start()
    agent.train(3)
    refused = client.post("/jobs/char-gpt/delete")
    assert (refused.status_code, "would create it again" in refused.text) == (409, True)
    assert client.get(JOB).status_code == 200


def test_the_page_offers_it_to_admins_of_the_project(stage):
    stage.project(OWN, "one")
    offered = {}
    for role in (Role.operator, Role.admin):
        browser = stage.cookie(stage.person(f"{role.name}s", role))
        offered[role.name] = "/jobs/one/delete" in stage.client.get("/jobs/one", headers=browser).text
    assert offered == {"operator": False, "admin": True}


@pytest.mark.processes
@pytest.mark.parametrize("database_kind", ["sqlite"])
def test_the_command_asks_first_and_sets_numbers(serve, fresh_agent, monkeypatch):
    server = serve()
    monkeypatch.setenv("HOLDFAST_SERVER", server.url)
    with server.client() as client:
        agent = fresh_agent(client, attempt=40)
        agent.start()
        agent.train(3)
        run = CliRunner()
        numbers = run.invoke(app, ["reset-numbers", "char-gpt", "--attempt", "7"])
        assert (numbers.exit_code, "the next attempt is 8 or later" in numbers.output) == (0, True)
        assert run.invoke(app, ["reset-numbers", "char-gpt"]).exit_code == 2
        refused = run.invoke(app, ["delete", "char-gpt", "--yes"])
        assert (refused.exit_code, "stop it first" in refused.output) == (1, True)
        finish(agent)
        kept = run.invoke(app, ["delete", "char-gpt"], input="n\n")
        assert (kept.exit_code, client.get(JOB).status_code) == (1, 200)
        deleted = run.invoke(app, ["delete", "char-gpt"], input="y\n")
        assert (deleted.exit_code, client.get(JOB).status_code) == (0, 404)
        assert "its checkpoints stay in its store" in deleted.output
        missing = run.invoke(app, ["delete", "char-gpt", "--yes"])
        assert (missing.exit_code, "job 'char-gpt' not found" in missing.output) == (1, True)
