"""How each question of the pages and the API finds its rows: by an index, however many there are of other jobs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from holdfast.protocol.wire import IntervalDecision, LineageStarted, Notice, OrderStateChange, Stall
from holdfast_server import models
from holdfast_server.api.endpoints import table_of
from holdfast_server.control import report_retention
from holdfast_server.records import desired_state
from tests.support import database_queries

JOB = "char-gpt"
READ_WHOLE = {
    "alembic_version": "one row",
    "audit_head": "one row",
    "jobs": "ten thousand are few; how the fleet page is fast with them is tested with it",
    "projects": "a handful",
    "account_groups": "one or a few for each job; the account sums all of them",
    "alert_rules": "a handful",
    "store_limits": "a handful",
    "stores": "hundreds",
    "store_writers": "one for each job that writes; the page of the stores sums all of them",
    "channels": "a handful",
    "people": "hundreds",
    "memberships": "a few for each of them",
    "tokens": "hundreds; a page shows all",
}
"""Every other table grows for as long as the server lives."""
OF_THE_OPEN = {"uq_alerts_open", "uq_orders_open"}
"""Indexes that hold no row that has ended."""
T = 1_790_000_000
IN_TIME = f"?x=time&from={T}&to={T + 600}&points=10&marks=10"
WITH = {
    "/restores/preview": ["?checkpoint=000000000010-1"],
    "/timeline": ["?from=5&to=15&points=10", IN_TIME],
}
"""What some ask for."""
NOT_ASKED = ("stream", "login", "oidc", "/static", "/docs", "openapi.json")
"""Streams, which do not end, and what asks nothing of the tables."""


@pytest.fixture(autouse=True)
def _no_chores(monkeypatch):
    """They ask questions of their own, at times of their own."""
    monkeypatch.setattr("holdfast_server.app.background_jobs_running", lambda *_: nullcontext())


@pytest.fixture
def questions(client, agent):
    """The address of every page, fragment and answer, for a job of which there is something in every table."""
    agent.start()
    stalls = [Stall(at=T + 3, iteration=3, lineage=1, kind="snapshot_wait", seconds=0.2) for _ in range(12)]
    agent.train(20, *stalls)
    agent.checkpoint(10)
    agent.checkpoint(20)
    agent.say(
        Notice(at=agent.at, iteration=20, lineage=1, level="info", code="example", message="something"),
        IntervalDecision(
            at=agent.at,
            iteration=20,
            lineage=1,
            interval=10,
            budget=0.035,
            policy="checkfreq",
            predicted_overhead=0.01,
            measured_overhead=0.01,
            profile={"iteration": 0.1},
        ),
    )
    client.patch(f"/api/v1/jobs/{JOB}/desired", json={"budget": "2%"}, headers={"If-Match": '"0"'})
    order = client.post(f"/api/v1/jobs/{JOB}/restores", json={"iteration": 10}).json()["id"]
    agent.say(OrderStateChange(at=agent.at, order=order, state="restoring", iteration=20, lineage=1))
    parts = {"job": JOB, "checkpoint": "000000000010-1", "order": order, "iteration": "10"}
    found = set()
    for path in [path for method, path in table_of(client.app).access if method == "GET"]:
        names = re.findall(r"{(\w+)[^}]*}", path)
        if set(names) <= parts.keys() and not any(part in path for part in NOT_ASKED):
            found.add(re.sub(r"{(\w+)[^}]*}", lambda name: parts[name[1]], path))
    assert found >= {"/", f"/jobs/{JOB}", f"/api/v1/jobs/{JOB}/timeline", f"/api/v1/jobs/{JOB}/checkpoints"}
    return [
        url + query
        for url in sorted(found)
        for query in next((queries for end, queries in WITH.items() if url.endswith(end)), [""])
    ]


@pytest.mark.parametrize("path", [f"/jobs/{JOB}", f"/jobs/{JOB}/live"])
@pytest.mark.parametrize("state", ["restoring", "restored"])
def test_a_job_page_finds_its_job_once_and_takes_few_statements(client, agent, questions, path, state):
    if state == "restored":
        order = client.get(f"/api/v1/jobs/{JOB}/restores").json()["restores"][0]["id"]
        began = LineageStarted(at=agent.at, iteration=10, lineage=2, parent="000000000010-1", order=order)
        agent.say(began, OrderStateChange(at=agent.at, order=order, state="restored", iteration=10, lineage=2))
    with database_queries.statements() as noted:
        assert client.get(path).status_code == 200
    assert len([sql for sql, _ in noted if re.match(r"SELECT jobs\..*\sFROM jobs\b", sql, re.DOTALL)]) == 1
    assert len(noted) <= 30


def sqlite_plan(database: Any, sql: str, values: Any) -> list[str]:
    """The tables of which rows are gone through that no index has chosen."""
    with database.read() as session:
        connection = session.connection()
        plan = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", values).all()]
    if is_first_few(sql) and not any("TEMP B-TREE" in step for step in plan):
        return []
    aliases = {alias: table for table, alias in re.findall(r"\b(\w+) AS (\w+)\b", sql)}
    scans = [re.match(r"SCAN (\w+)", step) for step in plan]
    return [aliases.get(scan[1], scan[1]) for scan in scans if scan]


def postgres_plan(database: Any, sql: str, values: Any) -> list[str]:
    """The same. Of small tables it would read all rows, and put them side by side in memory, where it may."""
    with database.read() as session:
        connection = session.connection()
        for way in ("seqscan", "hashjoin", "mergejoin"):
            connection.exec_driver_sql(f"SET LOCAL enable_{way} = off")
        ((plan,),) = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {sql}", values).all()
    steps = list(steps_of((json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]))
    if is_first_few(sql) and not any(step["Node Type"] == "Sort" for step in steps):
        return []
    scans = [step for step in steps if "Relation Name" in step and step.get("Index Name") not in OF_THE_OPEN]
    return [scan["Relation Name"] for scan in scans if not {"Index Cond", "Recheck Cond"} & scan.keys()]


def steps_of(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield step
    for inner in step.get("Plans", ()):
        yield from steps_of(inner)


def is_first_few(sql: str) -> bool:
    """Of all rows: an index in their order ends with the last of them."""
    return "LIMIT" in sql and "WHERE" not in sql and "JOIN" not in sql


def test_every_question_finds_its_rows_by_an_index(client, questions, database_kind):
    with database_queries.statements() as noted:
        for url in questions:
            # Without accounts, the pages about people refuse in words.
            assert client.get(url).status_code < (400 if JOB in url else 500), url
    plan = sqlite_plan if database_kind == "sqlite" else postgres_plan
    database = database_queries.of(client)
    statements = {sql: values for sql, values in noted if sql.lstrip().startswith(("SELECT", "WITH"))}
    assert len(statements) > 20
    whole = {
        (table, sql)
        for sql, values in statements.items()
        for table in plan(database, sql, values)
        if table in models.Base.metadata.tables.keys() - READ_WHOLE.keys()
    }
    assert not whole, "\n\n".join(f"{table} is gone through by {sql}" for table, sql in sorted(whole))


@pytest.mark.parametrize("database_kind", ["sqlite"])
def test_of_a_window_in_time_only_what_lies_in_it_is_read(client, questions):
    with database_queries.statements() as noted:
        assert client.get(f"/api/v1/jobs/{JOB}/timeline{IN_TIME}").json()["stalls_total"] == 12
    found = [
        database_queries.plan(database_queries.of(client), one)
        for one in noted
        if re.search(r"FROM (stalls|interval_decisions)\b", one[0])
    ]
    assert len(found) >= 4
    assert all("_job_at (job=? AND at" in plan for plan in found), found


@pytest.mark.parametrize("database_kind", ["sqlite"])
def test_what_is_over_is_found_by_an_index(client, questions):
    assert client.patch("/api/v1/projects/default/retention", json={"reports_seconds": 1e7}).status_code == 200
    database, now = database_queries.of(client), T + 1e8
    for chore, index in (
        (desired_state.end_overrides, "ix_jobs_every_until"),
        (report_retention.apply_all, "ix_alert_deliveries_alert"),
    ):
        with database_queries.statements() as noted:
            chore(database, now)
        plans = [database_queries.plan(database, one) for one in noted if one[0].startswith("SELECT")]
        assert any(index in plan for plan in plans), plans


@pytest.mark.parametrize("database_kind", ["sqlite"])
def test_the_newest_checkpoints_are_listed_without_sorting_all(client, questions):
    """Of a job with ten thousand of them, a page of which shows twelve, and asks again every second."""
    with database_queries.statements() as noted:
        assert client.get(f"/jobs/{JOB}").status_code == 200
    listed = [one for one in noted if re.search(r"FROM checkpoints\b.*ORDER BY coalesce", one[0], re.DOTALL)]
    plans = [database_queries.plan(database_queries.of(client), one) for one in listed]
    assert plans
    assert all("ix_checkpoints_taken" in plan and "FOR ORDER BY" not in plan for plan in plans), plans
