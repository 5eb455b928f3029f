"""Protected jobs: a second person approves what is asked of them, within 15 minutes of the server's clock."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from holdfast.protocol.value_rules import define
from holdfast.protocol.values import ValueReport
from holdfast.protocol.wire import Ack
from holdfast_server.accounts import tokens
from holdfast_server.control import approvals
from holdfast_server.core.principal import OPERATOR, Role
from tests.support.accounts_server import OURS, OWN, AccountsServer
from tests.support.server_fixtures import ScriptedAgent, post_batch

JOB = "/api/v1/jobs/char-gpt"


class ReportingAgent(ScriptedAgent):
    """An agent with a key."""

    key = ""

    def send(self, body):
        reply = post_batch(self.client, body, authorization=self.key)
        assert reply.status_code == 200, reply.text
        return msgspec.msgpack.decode(reply.content, type=Ack)


class ProtectedJob:
    """A job that trains and is protected, and the people who may change it."""

    def __init__(self, stage: AccountsServer) -> None:
        self.stage, self.client = stage, stage.client
        stage.project(OWN)
        people = {"ana": Role.operator, "ben": Role.operator, "vic": Role.viewer, "adm": Role.admin}
        self.cookies = {name: {**stage.cookie(stage.person(name, role)), **OURS} for name, role in people.items()}
        self.agent = agent = ReportingAgent(stage.client)
        agent.key = stage.bearer("report")["Authorization"]
        agent.start()
        for _ in range(2):
            agent.train(10)
            agent.checkpoint()
        self.agent = agent
        assert self.protect("adm", True).json()["protected"] is True

    def protect(self, who, protected):
        return self.client.put(f"{JOB}/protection", json={"protected": protected}, headers=self.cookies[who])

    def post(self, who, path, **body):
        """Post as a person, or with the headers of a key."""
        headers = who if isinstance(who, dict) else self.cookies[who]
        return self.client.post(f"{JOB}/{path}", json=body or None, headers=headers)

    def ask(self, who="ana", path="training/pause", **body):
        """Return the id of the request that waits."""
        refused = self.post(who, path, **body)
        assert (refused.status_code, refused.json()["error"]) == (409, "approval_needed"), refused.text
        return refused.json()["approval"]

    def get(self, path=""):
        return self.client.get(f"{JOB}{path}", headers=self.cookies["adm"]).json()

    @property
    def listed(self):
        return [(each["what"], each["state"], each["decided_by"]) for each in self.get("/approvals")["approvals"]]

    @property
    def training(self):
        return self.get("/desired")["training"]

    def key_of(self, person):
        wish = tokens.TokenRequest(name=f"key of {person}", scopes=("control", "read"), project=OWN, job=None)
        maker = replace(OPERATOR, name=person)
        secret, _ = tokens.create(self.stage.db, wish, maker=maker, now=self.stage.clock())
        return {"Authorization": f"Bearer {secret}"}


@pytest.fixture
def protected(stage):
    return ProtectedJob(stage)


def test_a_second_person_approves_what_is_asked(protected):
    waiting = protected.ask()
    assert protected.ask() == waiting  # once, however often it is sent
    assert protected.training is None
    assert protected.post("ben", f"approvals/{waiting}/approve").json()["state"] == "approved"
    assert (protected.training["action"], protected.training["who"]) == ("pause", "ana, approved by ben")
    assert protected.listed == [("pause training", "approved", "ben")]
    again = protected.post("ben", f"approvals/{waiting}/approve")
    assert again.json()["message"] == "the request to pause training is approved by ben"
    assert protected.post("ana", "training/continue").status_code == 200  # needs no approval


def test_a_restore_goes_to_the_checkpoint_that_was_approved(protected):
    waiting = protected.ask(path="restores", iteration=10)
    assert protected.listed == [("restore 000000000010-1", "waiting", None)]
    protected.post("ben", f"approvals/{waiting}/approve")
    assert protected.get("/desired")["restore"]["checkpoint"] == "000000000010-1"
    (order,) = protected.get("/restores")["restores"]
    assert order["who"] == "ana, approved by ben"
    assert protected.post("ana", "restores", iteration=11).json()["error"] == "no_such_checkpoint"


@pytest.mark.parametrize("asks_with_key", [False, True])
@pytest.mark.parametrize("approves_with_key", [False, True])
def test_an_owner_does_not_approve_with_or_without_a_key(protected, asks_with_key, approves_with_key):
    key = protected.key_of("ana")
    waiting = protected.ask(key if asks_with_key else "ana", "training/end")
    refused = protected.post(key if approves_with_key else "ana", f"approvals/{waiting}/approve")
    assert refused.status_code == 403
    assert refused.json()["message"] == "ana asked to end training: a second person must approve it"
    assert protected.training is None
    assert protected.post(protected.key_of("ben"), f"approvals/{waiting}/approve").status_code == 200
    assert protected.training["action"] == "end"


def test_a_viewer_neither_asks_nor_approves(protected):
    waiting = protected.ask()
    for path in ("training/pause", f"approvals/{waiting}/approve", f"approvals/{waiting}/decline"):
        assert protected.post("vic", path).status_code == 403


def test_a_request_expires_by_the_clock_of_the_server(protected, clock):
    waiting = protected.ask()
    clock.wait(approvals.APPROVAL_SECONDS - 1)
    assert protected.listed == [("pause training", "waiting", None)]
    clock.wait(1)
    assert protected.listed == [("pause training", "expired", None)]
    late = protected.post("ben", f"approvals/{waiting}/approve")
    assert (late.status_code, late.json()["message"]) == (
        409,
        "the request to pause training is expired: ask again",
    )
    assert protected.training is None
    assert protected.ask() != waiting


@pytest.mark.parametrize("who", ["ben", "ana"])
def test_a_request_is_declined_or_withdrawn(protected, who):
    waiting = protected.ask()
    assert protected.post(who, f"approvals/{waiting}/decline").json()["decided_by"] == who
    assert protected.post("ben", f"approvals/{waiting}/approve").status_code == 409
    assert protected.training is None


def test_a_value_waits_for_approval_as_well(protected):
    agent = protected.agent
    scale = define("lr_scale", 1.0, 0.01, 10.0, ())
    agent.say(
        ValueReport(
            at=agent.at, iteration=20, lineage=1, definition=scale, is_default=True, value=scale.default
        )
    )  # fmt: skip
    refused = protected.client.put(f"{JOB}/values/lr_scale", json={"value": 0.5}, headers=protected.cookies["ana"])
    assert refused.json()["error"] == "approval_needed"
    assert protected.listed == [("set lr_scale to 0.5", "waiting", None)]
    assert protected.get("/desired")["values"] == []
    protected.post("ben", f"approvals/{refused.json()['approval']}/approve")
    assert [(each["name"], each["value"]) for each in protected.get("/desired")["values"]] == [("lr_scale", 0.5)]


def test_what_can_no_longer_be_done_still_waits(protected):
    waiting = protected.ask(path="restores", iteration=10)
    other = protected.ask("ben", "restores", iteration=20)
    assert protected.post("ana", f"approvals/{other}/approve").status_code == 200
    assert protected.post("ben", f"approvals/{waiting}/approve").json()["error"] == "open_order"
    assert ("restore 000000000010-1", "waiting", None) in protected.listed


def test_two_remove_the_protection(protected):
    assert protected.protect("ana", False).status_code == 403
    waiting = protected.protect("adm", False).json()["approval"]
    assert protected.post("adm", f"approvals/{waiting}/approve").status_code == 403
    assert protected.post("ben", f"approvals/{waiting}/approve").status_code == 200
    assert protected.post("ana", "training/pause").status_code == 200


def test_a_request_of_another_job_is_unknown(protected):
    waiting = protected.ask()
    protected.stage.project("speech", "other")
    root = {**protected.stage.cookie(protected.stage.person("root", admin=True)), **OURS}
    reply = protected.client.post(f"/api/v1/jobs/other/approvals/{waiting}/approve", headers=root)
    assert (reply.status_code, reply.json()["error"]) == (404, "unknown_approval")


def test_the_audit_log_has_both_names(protected):
    protected.post("ben", f"approvals/{protected.ask()}/approve")
    query = {"job": "char-gpt"}
    entries = protected.client.get("/api/v1/audit", params=query, headers=protected.cookies["adm"]).json()[
        "entries"
    ]
    found = {each["action"]: (each["who"], each["after"]) for each in entries}
    assert found["approval.ask"][0] == "ana"
    assert found["approval.approve"][0] == "ben"
    assert msgspec.json.decode(found["approval.approve"][1])["asked_by"] == "ana"
    assert found["training.pause"][0] == "ana, approved by ben"


def test_the_page_has_the_request_and_its_buttons(protected):
    def page(who):
        return protected.client.get("/jobs/char-gpt", headers=protected.cookies[who]).text

    sent = protected.client.post("/jobs/char-gpt/training/pause", headers=protected.cookies["ana"])
    assert sent.headers["location"] == "/jobs/char-gpt#alerts"
    (waiting,) = protected.get("/approvals")["approvals"]
    assert "<bdi>ana</bdi> asks to pause training" in page("ben")
    assert "Approve</button>" in page("ben")
    assert "Approve</button>" not in page("vic")
    where = f"/jobs/char-gpt/approvals/{waiting['id']}/approve"
    assert protected.client.post(where, headers=protected.cookies["ana"]).status_code == 403
    assert protected.client.post(where, headers=protected.cookies["ben"]).status_code == 303
    assert "asks to" not in page("ben")


def test_the_restore_form_waits_for_approval(protected):
    form = {"checkpoint": "000000000010-1", "key": "k"}
    sent = protected.client.post("/jobs/char-gpt/restores", data=form, headers=protected.cookies["ana"])
    assert sent.headers["location"] == "/jobs/char-gpt#alerts"
    assert protected.listed == [("restore 000000000010-1", "waiting", None)]


def test_without_accounts_a_job_cannot_be_protected(job, client):
    refused = client.put(f"{JOB}/protection", json={"protected": True})
    assert (refused.status_code, refused.json()["error"]) == (409, "not_possible")
    assert "add accounts" in refused.json()["message"]
    assert client.get(JOB).json()["protected"] is False


def test_a_value_changes_when_a_second_person_approves_it(protected):
    definition = define("lr_scale", 1.0, 0.01, 10.0, ())
    agent = protected.agent
    here = {"at": agent.at, "iteration": agent.iteration, "lineage": agent.lineage}
    agent.say(ValueReport(**here, definition=definition, value=1.0))

    def put(value):
        path = f"{JOB}/values/lr_scale"
        return protected.client.put(path, json={"value": value}, headers=protected.cookies["ana"])

    assert put(50).status_code == 422
    waits = put(0.5)
    assert (waits.status_code, waits.json()["error"]) == (409, "approval_needed")
    assert protected.get("/desired")["values"] == []
    assert protected.post("ben", f"approvals/{waits.json()['approval']}/approve").status_code == 200
    assert [each["value"] for each in protected.get("/desired")["values"]] == [0.5]
    (change,) = protected.get("/values")["values"][0]["changes"]
    assert change["who"] == "ana, approved by ben"


def test_the_request_says_what_the_restore_leaves_out(protected):
    plain = protected.ask(path="restores", iteration=10)
    less = protected.ask(path="restores", iteration=10, skip={"batches": 1000, "loader": 1})
    upto = protected.ask(path="restores", iteration=10, skip={"to_iteration": 15}, degraded=True)
    assert len({plain, less, upto}) == 3
    assert {what for what, _, _ in protected.listed} == {
        "restore 000000000010-1",
        "restore 000000000010-1, leaving out 1,000 batches of loader 1",
        "restore 000000000010-1, replacing damaged bytes, leaving out the data up to iteration 15",
    }
    refused = protected.post("ana", "restores", iteration=10, skip={"to_iteration": 5})
    assert refused.json()["error"] == "invalid_setting"


def test_a_repeated_key_returns_the_restore_that_was_approved(protected):
    waiting = protected.ask(path="restores", iteration=10, key="once")
    protected.post("ben", f"approvals/{waiting}/approve")
    again = protected.post("ana", "restores", iteration=10, key="once")
    assert (again.status_code, again.json()["who"]) == (200, "ana, approved by ben")


def test_a_protected_job_is_not_deleted(protected, clock):
    clock.wait(86400.0)
    headers = {**protected.stage.cookie("adm"), **OURS}
    refused = protected.client.delete(JOB, headers=headers)
    assert (refused.status_code, refused.json()["error"]) == (409, "not_possible")
    change = {"action": "delete", "jobs": ["char-gpt"]}
    for preview in (True, False):
        body = change | {"preview": preview}
        reply = protected.client.post("/api/v1/jobs/changes", json=body, headers=headers)
        (outcome,) = reply.json()["outcomes"]
        assert "is protected" in outcome["refusal"]
