"""The audit log: written with what it tells of, sealed row by row, and changed by nobody."""

from __future__ import annotations

import csv
import io
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from holdfast_server.core.principal import Role
from holdfast_server.records import audit
from holdfast_web.audit import routes as audit_routes
from tests.support.accounts_server import OTHER, OWN, AccountsServer
from tests.support.postgres import ON_SQLITE


def record(stage: AccountsServer, number: int, **fields):
    def work(session):
        audit.record(session, who=f"person {number}", action="thing.do", now=stage.clock(), **fields)

    stage.write(work)


def verdict(stage: AccountsServer, **named):
    return stage.read(lambda session: audit.verify(session, **named))


def entries(stage: AccountsServer, **asked):
    return stage.read(lambda session: audit.entries(session, audit.AuditQuery(**asked), limit=100))


@pytest.fixture
def ten(stage: AccountsServer) -> AccountsServer:
    for number in range(1, 11):
        record(stage, number, job=f"job {number}", project=OWN, before={"a": number}, after={"b": [number, None]})
    return stage


def tampered(stage: AccountsServer, *statements: str) -> None:
    """What somebody does who has the database to themselves, triggers and all."""

    def work(session):
        on_postgres = session.get_bind().dialect.name == "postgresql"
        if on_postgres:
            session.execute(text("ALTER TABLE audit DISABLE TRIGGER ALL"))
        else:
            for verb in ("update", "delete", "replace"):
                session.execute(text(f"DROP TRIGGER audit_no_{verb}"))
        for statement in statements:
            session.execute(text(statement), {"empty": b""} if ":empty" in statement else {})

    stage.write(work)


def test_a_log_as_it_was_written_fits(ten: AccountsServer):
    found = verdict(ten)
    assert (found.rows, found.broken, len(found.head)) == (10, None, 64)
    assert verdict(ten, known=(10, bytes.fromhex(found.head))).broken is None


def test_an_empty_log_fits(stage: AccountsServer):
    assert (verdict(stage).rows, verdict(stage).broken) == (0, None)


@pytest.mark.parametrize(
    ("statements", "broken"),
    [
        (["UPDATE audit SET who = 'mallory' WHERE id = 4"], 4),
        (["UPDATE audit SET at = at + 1 WHERE id = 1"], 1),
        (["UPDATE audit SET after = NULL WHERE id = 10"], 10),
        (["UPDATE audit SET project = 'speech' WHERE id = 7"], 7),
        (["DELETE FROM audit WHERE id = 1"], 1),
        (["DELETE FROM audit WHERE id = 5"], 5),
        (["DELETE FROM audit WHERE id = 10"], 10),
        (["DELETE FROM audit"], 1),
        (["UPDATE audit SET id = 100 WHERE id = 3", "UPDATE audit SET id = 3 WHERE id = 4",
          "UPDATE audit SET id = 4 WHERE id = 100"], 3),
        (["DELETE FROM audit WHERE id = 6", "UPDATE audit SET id = id - 1 WHERE id > 6"], 6),
        (["UPDATE audit SET digest = (SELECT digest FROM audit AS other WHERE other.id = 1) WHERE id = 2"], 2),
    ],
)  # fmt: skip
def test_whatever_is_changed_is_named(ten: AccountsServer, statements, broken):
    tampered(ten, *statements)
    assert verdict(ten).broken == broken


def test_a_log_that_was_written_anew_is_told_by_a_digest_that_was_kept(ten: AccountsServer):
    kept = bytes.fromhex(verdict(ten).head)
    tampered(ten, "DELETE FROM audit", "UPDATE audit_head SET id = 0, digest = :empty")
    for number in range(12):
        record(ten, number)
    assert verdict(ten).broken is None
    assert verdict(ten, known=(10, kept)).broken == 10
    assert verdict(ten, known=(99, kept)).broken == 13


@pytest.mark.parametrize(
    "statement", ["UPDATE audit SET who = 'x'", "DELETE FROM audit", "DELETE FROM audit WHERE id = 3"]
)
def test_the_database_itself_refuses_changes(ten: AccountsServer, statement):
    with pytest.raises(DBAPIError, match="append-only"):
        execute(ten, statement)
    assert verdict(ten).rows == 10


OTHER_ROW = "INTO audit (id, at, who, action, request_id, digest) VALUES (3, 0, 'x', 'thing.do', '', '')"
REPLACING = {
    "sqlite": [
        f"INSERT OR REPLACE {OTHER_ROW}",
        f"REPLACE {OTHER_ROW}",
        f"INSERT {OTHER_ROW} ON CONFLICT (id) DO UPDATE SET who = 'x'",
        "UPDATE OR REPLACE audit SET id = 3 WHERE id = 4",
    ],
    "postgresql": [f"INSERT {OTHER_ROW} ON CONFLICT (id) DO UPDATE SET who = 'x'", "TRUNCATE audit"],
}


def test_it_also_refuses_to_replace_a_row(ten: AccountsServer, database_kind):
    for statement in REPLACING[database_kind]:
        with pytest.raises(DBAPIError, match="append-only"):
            execute(ten, statement)
    assert (verdict(ten).rows, verdict(ten).broken) == (10, None)


def execute(stage: AccountsServer, statement: str) -> None:
    def work(session):
        session.execute(text(statement))

    stage.write(work)


def test_what_is_taken_back_was_never_written_down(ten: AccountsServer):
    def work(session):
        audit.record(session, who="x", action="thing.do", now=1.0)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        ten.write(work)
    record(ten, 11)
    assert (verdict(ten).rows, verdict(ten).broken) == (11, None)


def test_many_at_once_follow_one_another(stage: AccountsServer):
    def one(number: int) -> None:
        def work(session):
            audit.record(session, who=str(number), action="thing.do", now=1.0)

        stage.db.write(work)

    with ThreadPoolExecutor(30) as threads:
        list(threads.map(one, range(30)))
    found = verdict(stage)
    assert (found.rows, found.broken) == (30, None)


def test_a_job_says_the_project(stage: AccountsServer):
    stage.project(OWN, "a-job")
    record(stage, 1, job="a-job")
    assert entries(stage, job="a-job")[0].project == OWN


def test_it_is_asked_by_what_and_by_whom(stage: AccountsServer):
    record(stage, 1, project=OWN)
    record(stage, 2, project=OTHER, job="x")
    assert [entry.who for entry in entries(stage)] == ["person 2", "person 1"]
    assert [entry.id for entry in entries(stage, who="person 1")] == [1]
    assert [entry.id for entry in entries(stage, job="x")] == [2]
    assert [entry.id for entry in entries(stage, action="thing")] == [2, 1]
    assert entries(stage, action="thin") == []
    assert entries(stage, action="th%g") == []
    assert [entry.id for entry in entries(stage, older_than=2)] == [1]
    assert [entry.id for entry in entries(stage, visible_projects={OWN})] == [1]
    assert entries(stage, visible_projects=set()) == []


def test_edits_and_orders_are_in_it(client, agent, clock):
    stage = AccountsServer(client, clock)
    agent.start()
    agent.train(4)
    point = agent.checkpoint()
    edited = client.patch(
        "/api/v1/jobs/char-gpt/desired",
        json={"budget": 0.02},
        headers={"If-Match": '"0"', "X-Request-ID": "request-1"},
    )
    assert edited.status_code == 200
    order = client.post("/api/v1/jobs/char-gpt/restores", json={"checkpoint": point, "key": "k"}).json()
    assert client.post("/api/v1/jobs/char-gpt/restores", json={"checkpoint": point, "key": "k"}).status_code == 200
    for _ in range(2):
        client.post(f"/api/v1/jobs/char-gpt/restores/{order['id']}/cancel")
    cancelled, ordered, edit = entries(stage)
    assert (edit.action, edit.who, edit.job, edit.project) == ("settings.edit", "operator", "char-gpt", "default")
    assert edit.request_id == "request-1"
    assert '"budget":"2 %"' in edit.after
    assert (ordered.action, cancelled.action) == ("restore.order", "restore.cancel")
    assert point in ordered.after


def test_a_conflict_leaves_no_trace(client, agent, clock):
    agent.start()
    headers = {"If-Match": '"7"'}
    assert client.patch("/api/v1/jobs/char-gpt/desired", json={"budget": 0.02}, headers=headers).status_code == 409
    assert entries(AccountsServer(client, clock)) == []


# ---- as pages and files ---------------------------------------------------------------------


@pytest.fixture
def admin(stage: AccountsServer) -> dict[str, str]:
    return stage.cookie(stage.person("root", admin=True))


def test_its_page_shows_what_the_address_asks_for(stage: AccountsServer, admin):
    record(stage, 1, job="first-job", before={"budget": "2%"}, after={"budget": "3%"})
    record(stage, 2, job="second-job")
    page = stage.client.get("/audit?job=first-job", headers=admin).text
    assert "first-job" in page
    assert "second-job" not in page
    assert "budget 3%" in page
    assert 'href="/audit/export?form=csv&amp;job=first-job"' in page


def test_older_rows_are_a_page_further(stage: AccountsServer, admin):
    for number in range(110):
        record(stage, number)
    first = stage.client.get("/audit?action=thing", headers=admin).text
    assert "person 109<" in first
    assert "person 3<" not in first
    older = re.search(r'href="(/audit\?[^"]*older_than=[^"]*)"', first)[1].replace("&amp;", "&")
    assert "person 3<" in stage.client.get(older, headers=admin).text


@ON_SQLITE
@pytest.mark.parametrize("cell", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx"])
def test_no_cell_is_a_formula(stage: AccountsServer, admin, cell):
    def work(session):
        audit.record(session, who=cell, action="thing.do", now=1.0)

    stage.write(work)
    exported = stage.client.get("/audit/export?form=csv&action=thing", headers=admin)
    assert exported.headers["content-type"].startswith("text/csv")
    assert "attachment" in exported.headers["content-disposition"]
    (row,) = list(csv.DictReader(io.StringIO(exported.text, newline="")))
    assert row["who"] == f"'{cell}"


def test_both_files_hold_every_row(stage: AccountsServer, admin, monkeypatch):
    monkeypatch.setattr(audit_routes, "EXPORTED_AT_ONCE", 4)
    for number in range(10):
        record(stage, number)
    rows = list(csv.DictReader(io.StringIO(stage.client.get("/audit/export", headers=admin).text)))
    told = stage.client.get("/audit/export?form=json", headers=admin).json()
    assert [int(row["id"]) for row in rows] == [row["id"] for row in told] == list(range(len(rows), 0, -1))
    assert stage.client.get("/audit/export?form=json&who=nobody+at+all", headers=admin).json() == []


def test_an_admin_of_a_project_sees_what_is_about_it(stage: AccountsServer):
    stage.project(OWN)
    stage.project(OTHER)
    record(stage, 1, project=OWN)
    record(stage, 2, project=OTHER)
    ada = stage.cookie(stage.person("ada", Role.admin))
    for path in ("/audit", "/audit/export", "/audit/export?form=json", "/api/v1/audit"):
        told = stage.client.get(path, headers=ada)
        assert told.status_code == 200
        assert "person 1" in told.text
        assert "person 2" not in told.text
    told = stage.client.get(f"/api/v1/audit?project={OTHER}", headers=ada).json()
    assert told == {"entries": []}
