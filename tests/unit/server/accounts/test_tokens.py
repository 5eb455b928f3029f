"""Keys for programs: what they may do, for which jobs, and when they stop."""

from __future__ import annotations

import re

import msgspec
import pytest

from holdfast.client import Client
from holdfast.protocol.wire import AttemptStarted, Batch
from holdfast.server_link.json_client import JsonClient
from holdfast_server import models
from holdfast_server.accounts import auth_backends, people, tokens
from holdfast_server.accounts.secrets import new_token
from holdfast_server.core.errors import InvalidSetting, PermissionDenied, UnknownProject, UnknownToken
from holdfast_server.core.principal import OPERATOR, Principal, Role
from holdfast_server.records import audit
from tests.support.accounts_server import OTHER, OURS, OWN, AccountsServer
from tests.support.postgres import ON_SQLITE

JOBS = "/api/v1/jobs"


@pytest.fixture
def projects(stage: AccountsServer) -> AccountsServer:
    stage.project(OWN, "ours")
    stage.project(OTHER, "theirs")
    return stage


def report(stage: AccountsServer, key: str, job: str, sequence: int = 0):
    """What an agent sends first."""
    started = AttemptStarted(at=stage.clock(), iteration=0, lineage=1)
    batch = Batch(
        job=job, uid="a", attempt=1, rank=0, sequence=sequence, sent_at=stage.clock(), iteration=0, lineage=1,
        events=[started],
    )  # fmt: skip
    return stage.client.post(
        "/api/v1/ingest",
        content=msgspec.msgpack.encode(batch),
        headers={"Content-Type": "application/msgpack", "Authorization": f"Bearer {key}"},
    )


def project_of(stage: AccountsServer, job: str) -> str:
    return stage.read(lambda session: session.get(models.JobRecord, job)).project


# ---- what agents may do ---------------------------------------------------------------------


def test_a_new_job_belongs_to_the_project_of_its_key(projects: AccountsServer):
    assert report(projects, projects.key("report"), "new").status_code == 200
    assert project_of(projects, "new") == OWN


def test_an_agent_reports_of_the_jobs_of_its_project_and_of_no_other(projects: AccountsServer):
    key = projects.key("report")
    assert report(projects, key, "ours").status_code == 200
    refused = report(projects, key, "theirs")
    assert (refused.status_code, refused.json()["error"]) == (404, "unknown_job")
    desired = [projects.client.get(f"{JOBS}/{job}/desired", headers={"Authorization": f"Bearer {key}"}).status_code
               for job in ("ours", "theirs", "not-there-yet")]  # fmt: skip
    assert desired == [200, 200, 200], "an answer that differs would tell that the job is there"


def test_a_key_of_one_job_is_for_that_job(projects: AccountsServer):
    key = projects.key("report", job="mine")
    assert report(projects, key, "mine").status_code == 200
    assert report(projects, key, "ours").status_code == 404
    assert report(projects, key, "new").status_code == 404
    headers = {"Authorization": f"Bearer {key}"}
    assert projects.client.get(f"{JOBS}/mine/desired", headers=headers).status_code == 200
    assert projects.client.get(f"{JOBS}/ours/desired", headers=headers).status_code == 404


def test_two_projects_cannot_report_of_one_job(projects: AccountsServer):
    """The job is there by the time that the second looks, whatever it was told a moment before."""
    assert report(projects, projects.key("report"), "same").status_code == 200
    assert report(projects, projects.key("report", project=OTHER), "same").status_code == 404
    assert project_of(projects, "same") == OWN


def test_a_key_that_may_not_report_is_told_so(projects: AccountsServer):
    assert report(projects, projects.key("read", "control", "admin"), "ours").status_code == 403


# ---- how one is made ------------------------------------------------------------------------


def test_a_key_is_told_once_and_kept_as_a_digest(projects: AccountsServer):
    ada = projects.cookie(projects.person("ada", Role.operator)) | OURS
    made = projects.client.post(
        "/settings/keys",
        data={"name": "my laptop", "project": OWN, "scopes": ["read", "control"], "expires": "30d"},
        headers=ada,
    )  # fmt: skip
    secret = next(word for word in made.text.replace("<", " ").replace(">", " ").split() if word.startswith("hf_"))
    assert len(secret) == len(new_token())
    listed = projects.client.get("/settings/keys", headers=ada).text
    assert "my laptop" in listed
    assert secret not in listed
    assert projects.client.get(f"{JOBS}/ours", headers={"Authorization": f"Bearer {secret}"}).status_code == 200
    row = projects.read(lambda session: session.get(models.TokenRecord, secret[:13]))
    assert row.digest.hex() not in secret
    assert row.expires_at == pytest.approx(projects.clock() + 30 * 86400)


def test_keys_do_not_repeat_themselves():
    made = {new_token() for _ in range(100)}
    assert len(made) == 100
    assert all(len(key) == 3 + 10 + 1 + 64 for key in made)


@ON_SQLITE
@pytest.mark.parametrize(
    ("role", "scopes", "allowed"),
    [
        (Role.viewer, {"read"}, True),
        (Role.viewer, {"report"}, False),
        (Role.viewer, {"read", "control"}, False),
        (Role.operator, {"report", "read", "control"}, True),
        (Role.operator, {"admin"}, False),
        (Role.admin, {"admin", "report"}, True),
    ],
)
def test_nobody_gives_more_than_they_have(projects: AccountsServer, role, scopes, allowed):
    person = Principal(kind="person", name="x", roles={OWN: role})
    wish = tokens.TokenRequest(name="k", scopes=scopes, project=OWN)
    if allowed:
        tokens.create(projects.db, wish, maker=person, now=projects.clock())
        return
    with pytest.raises(PermissionDenied):
        tokens.create(projects.db, wish, maker=person, now=projects.clock())


def test_nor_for_another_project_or_for_all_of_them(projects: AccountsServer):
    person = Principal(kind="person", name="x", roles={OWN: Role.admin})
    for project, refusal in ((OTHER, UnknownProject), (None, PermissionDenied), ("no-such", UnknownProject)):
        wish = tokens.TokenRequest(name="k", scopes={"read"}, project=project)
        with pytest.raises(refusal):
            tokens.create(projects.db, wish, maker=person, now=projects.clock())


def test_a_key_makes_keys_no_stronger_than_itself(projects: AccountsServer):
    admin = projects.bearer("admin")
    asked = {"name": "agents", "scopes": ["report"], "project": OWN}
    made = projects.client.post("/api/v1/tokens", json=asked, headers=admin)
    assert made.status_code == 201
    assert report(projects, made.json()["token"], "ours").status_code == 200
    for wrong in (asked | {"project": None, "scopes": ["read"]}, asked | {"project": OTHER}):
        assert projects.client.post("/api/v1/tokens", json=wrong, headers=admin).status_code in (403, 404)
    reader = projects.bearer("read")
    assert projects.client.post("/api/v1/tokens", json=asked, headers=reader).status_code == 403


@ON_SQLITE
@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""}, {"name": "<script>"}, {"scopes": []}, {"scopes": ["report", "fly"]}, {"job": "two/and"},
        {"seconds": 1.0}, {"seconds": -5.0}, {"project": None, "scopes": ["report"]},
        {"project": None, "job": "x"},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_the_field(projects: AccountsServer, wrong):
    asked = {"name": "k", "scopes": ["read"], "project": OWN} | wrong
    with pytest.raises(InvalidSetting):
        tokens.create(projects.db, tokens.TokenRequest(**asked), maker=OPERATOR, now=projects.clock())


# ---- how one ends ---------------------------------------------------------------------------


def test_a_key_that_is_revoked_works_nowhere_a_moment_later(projects: AccountsServer):
    """Another instance goes by what it knows for `REMEMBERED_SECONDS`, and no longer."""
    assert auth_backends.CACHE_SECONDS <= 5
    passed = [0.0]
    elsewhere = auth_backends.AccountsAuth(projects.db, seconds=lambda: passed[0])
    secret = projects.key("report")
    shown = auth_backends.Credentials(secret, None)

    def kind() -> str:
        return projects.ask(elsewhere.authenticate, shown, now=projects.clock()).kind

    assert kind() == "key"
    tokens.revoke(projects.db, secret[:13], asker=OPERATOR, now=projects.clock())
    passed[0] = auth_backends.CACHE_SECONDS
    assert kind() == "anonymous"


def test_it_ends_by_itself(projects: AccountsServer, clock):
    wish = tokens.TokenRequest(name="k", scopes={"read"}, project=OWN, seconds=3600)
    secret, _ = tokens.create(projects.db, wish, maker=OPERATOR, now=clock())
    headers = {"Authorization": f"Bearer {secret}"}
    assert projects.client.get(JOBS, headers=headers).status_code == 200
    clock.now += 3601
    assert projects.client.get(JOBS, headers=headers).status_code == 401


@pytest.mark.parametrize("shown", ["hf_", "hf_0123456789", "x", "", "hf_0123456789_" + "0" * 64, "Ü", "hf_'; --"])
def test_what_is_no_key_opens_nothing(projects: AccountsServer, shown):
    reply = projects.client.get(JOBS, headers={"Authorization": f"Bearer {shown}".encode()})
    assert (reply.status_code, reply.json()["error"]) == (401, "wrong_token")


def test_the_beginning_of_a_key_is_not_the_key(projects: AccountsServer):
    secret = projects.key("read")
    for near in (secret[:-1], secret + "0", secret[:13] + "_" + "f" * 64, secret.upper()):
        assert projects.client.get(JOBS, headers={"Authorization": f"Bearer {near}"}).status_code == 401


def test_whoever_may_revokes_it_and_others_do_not_learn_of_it(projects: AccountsServer):
    maker = projects.cookie(projects.person("ada", Role.operator)) | OURS
    other = projects.cookie(projects.person("bob", Role.operator)) | OURS
    admin = projects.cookie(projects.person("eve", Role.admin)) | OURS
    asked = {"name": "k", "scopes": ["report"], "project": OWN}
    keys = [projects.client.post("/api/v1/tokens", json=asked, headers=maker).json()["listed"]["prefix"]
            for _ in range(2)]  # fmt: skip
    assert projects.client.post(f"/api/v1/tokens/{keys[0]}/revoke", headers=other).status_code == 404
    assert projects.client.get("/api/v1/tokens", headers=other).json() == {"tokens": []}
    assert projects.client.post(f"/api/v1/tokens/{keys[0]}/revoke", headers=maker).json()["state"] == "revoked"
    assert projects.client.post(f"/settings/keys/{keys[1]}/revoke", headers=admin).status_code == 303
    told = projects.client.get("/api/v1/tokens", headers=maker).json()["tokens"]
    assert {key["state"] for key in told} == {"revoked"}
    with pytest.raises(UnknownToken):
        tokens.revoke(projects.db, "hf_nothing", asker=OPERATOR, now=projects.clock())


def test_who_loses_a_role_loses_the_keys_that_go_beyond_it(projects: AccountsServer):
    projects.person("ada", Role.operator)
    ada = Principal(kind="person", name="ada", roles={OWN: Role.operator})

    def made(*scopes) -> str:
        wish = tokens.TokenRequest(name="k", scopes=scopes, project=OWN)
        return tokens.create(projects.db, wish, maker=ada, now=projects.clock())[1].prefix

    reading, steering = made("read"), made("control")

    def states() -> dict[str, str]:
        rows = tokens.list_tokens(projects.db, asker=OPERATOR, now=projects.clock())
        return {row.prefix: row.state for row in rows}

    people.set_role(projects.db, "ada", OWN, Role.viewer, who="test", now=projects.clock())
    assert states() == {reading: "works", steering: "revoked"}
    assert people.remove(projects.db, "ada", who="test", now=projects.clock()) == 1
    assert states() == {reading: "revoked", steering: "revoked"}


def test_its_last_use_is_known_to_ten_minutes(projects: AccountsServer, clock):
    secret = projects.key("read")

    def used() -> float | None:
        return projects.read(lambda session: session.get(models.TokenRecord, secret[:13])).last_used_at

    assert used() is None
    for seconds, meant in ((0, 0), (300, 0), (599, 0), (601, 601)):
        backend = auth_backends.AccountsAuth(projects.db)
        projects.ask(backend.authenticate, auth_backends.Credentials(secret, None), now=clock.now + seconds)
        assert used() == clock.now + meant


def test_making_and_revoking_are_in_the_log_without_the_key(projects: AccountsServer):
    secret = projects.key("report", job="ours")
    tokens.revoke(projects.db, secret[:13], asker=OPERATOR, now=projects.clock())
    revoked, created = projects.read(
        lambda session: audit.entries(session, audit.AuditQuery(action="key"), limit=9)
    )
    assert (created.action, created.project, created.job) == ("key.create", OWN, "ours")
    assert (revoked.action, revoked.who) == ("key.revoke", "operator")
    assert secret[14:] not in repr((created, revoked))


# ---- keys that keys made ----------------------------------------------------------------------


def test_a_key_that_a_persons_key_made_goes_with_the_person(projects: AccountsServer):
    """Else who is about to be removed makes a key by which they stay."""
    ada = projects.cookie(projects.person("ada", Role.admin)) | OURS
    asked = {"name": "first", "scopes": ["admin"], "project": OWN}
    first = projects.client.post("/api/v1/tokens", json=asked, headers=ada).json()["token"]
    by_key = {"Authorization": f"Bearer {first}"}
    made = projects.client.post("/api/v1/tokens", json=asked | {"name": "second"}, headers=by_key).json()
    second = {"Authorization": f"Bearer {made['token']}"}
    assert made["listed"]["created_by"] == "ada"
    assert projects.client.get(JOBS, headers=second).status_code == 200
    assert people.remove(projects.db, "ada", who="test", now=projects.clock()) == 2
    backend = auth_backends.AccountsAuth(projects.db)
    assert (
        projects.ask(
            backend.authenticate, auth_backends.Credentials(made["token"], None), now=projects.clock()
        ).kind
        == "anonymous"
    )


def test_two_keys_of_one_name_are_not_one(projects: AccountsServer):
    """What a key is called is up to whoever makes it: it neither gives rights nor hides who did something."""
    theirs = projects.key("admin", project=OTHER, name="deploy")
    asked = {"name": "of theirs", "scopes": ["report"], "project": OTHER}
    headers = {"Authorization": f"Bearer {theirs}"}
    prefix = projects.client.post("/api/v1/tokens", json=asked, headers=headers).json()["listed"]["prefix"]
    projects.person("eve", Role.viewer)
    eve = Principal(kind="person", name="eve", roles={OWN: Role.viewer})
    wish = tokens.TokenRequest(name="deploy", scopes=["read"], project=OWN)
    mine, _ = tokens.create(projects.db, wish, maker=eve, now=projects.clock())
    hers = {"Authorization": f"Bearer {mine}"}
    told = projects.client.get("/api/v1/tokens", headers=hers).json()["tokens"]
    assert [key["prefix"] for key in told] == [mine[:13]]
    assert projects.client.post(f"/api/v1/tokens/{prefix}/revoke", headers=hers).status_code == 404
    (created, *_) = projects.read(lambda session: audit.entries(session, audit.AuditQuery(project=OTHER), limit=9))
    assert created.who == f"key deploy ({theirs[:13]})"


def test_a_key_revokes_of_its_owners_those_that_it_could_have_made(projects: AccountsServer):
    projects.person("ada", Role.operator)
    ada = Principal(kind="person", name="ada", roles={OWN: Role.operator})

    def made(*scopes) -> str:
        wish = tokens.TokenRequest(name="k", scopes=scopes, project=OWN)
        return tokens.create(projects.db, wish, maker=ada, now=projects.clock())[0]

    reading, steering, other = made("read"), made("control"), made("read")
    by = {"Authorization": f"Bearer {reading}"}
    assert projects.client.post(f"/api/v1/tokens/{steering[:13]}/revoke", headers=by).status_code == 404
    assert projects.client.post(f"/api/v1/tokens/{other[:13]}/revoke", headers=by).json()["state"] == "revoked"


def test_the_page_of_keys_offers_what_its_reader_may_grant(projects: AccountsServer):
    def offered(role: Role) -> dict[str, bool]:
        name = f"{role.name}-of-keys"
        page = projects.client.get("/settings/keys", headers=projects.cookie(projects.person(name, role))).text
        assert ("Agents need a key" in page) == (role >= Role.operator)
        return {
            scope: bool(checked)
            for scope, checked in re.findall(r'name="scopes" value="(\w+)"\s*(checked)?>', page)
        }

    assert offered(Role.viewer) == {"read": True}
    assert offered(Role.operator) == {"report": True, "read": False, "control": False}
    assert offered(Role.admin) == {"report": True, "read": False, "control": False, "admin": False}


def test_the_rules_are_those_of_the_project_of_a_key(
    projects: AccountsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = projects.key("read")

    asked: list[str] = []

    def send(self: JsonClient, method: str, path: str, *_: object, **__: object) -> object:
        asked.append(path)
        reply = projects.client.request(method, f"/api/v1{path}", headers={"Authorization": f"Bearer {key}"})
        assert reply.is_success, reply.text
        return reply.json()

    monkeypatch.setattr(JsonClient, "send", send)
    assert {rule.project for rule in Client("http://127.0.0.1:1").alerts.rules()} == {OWN}
    assert asked[-1] == f"/projects/{OWN}/alert-rules"
    hidden = projects.client.get(
        "/api/v1/projects/default/alert-rules", headers={"Authorization": f"Bearer {key}"}
    ).json()
    assert (hidden["error"], hidden["message"]) == ("unknown_project", "there is no project 'default'")


def test_a_key_used_since_the_last_update_was_used_in_the_last_10_minutes(projects: AccountsServer) -> None:
    cookie, key = projects.cookie(projects.person("ada", Role.admin)), projects.key("read")

    def shown() -> str:
        page = projects.client.get("/settings/keys", headers=cookie).text
        return " ".join(
            re.sub(r"<[^>]+>", " ", page.split('data-label="Last used">')[1].split("</td>")[0]).split()
        )

    assert shown() == "never"
    assert projects.client.get(JOBS, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    projects.clock.now += 423
    assert shown() == "in the last 10 min"
    projects.clock.now += 200
    assert projects.client.get(JOBS, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert shown() == "in the last 10 min"
    projects.clock.now += 590
    assert projects.client.get(JOBS, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    projects.clock.now += (
        100  # the newest use is not stored, since the stored one was less than 10 minutes ago then
    )
    assert shown() == "in the last hour"
    projects.clock.now += 3000
    assert shown().endswith("ago")
