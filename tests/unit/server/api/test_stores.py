"""The API of stores: reports arrive, limits are set, and shares reach an agent that waits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sqlalchemy import select

from holdfast.protocol.store_shares import StoreReport
from holdfast.protocol.stores import NewStoreLimit
from holdfast.protocol.wire import AttemptFinished
from holdfast_server import models
from holdfast_server.control import stores as control
from holdfast_server.core.principal import Role
from holdfast_server.queries.stores import StoreQuery
from holdfast_server.records import store_shares
from tests.support import database_queries
from tests.support.accounts_server import OTHER, OWN

NOW = 1_790_000_000.0
STORE = "ab" * 16
JOB = "/api/v1/jobs/char-gpt"


def report(agent, **values):
    facts = {"store": STORE, "address": "s3://bucket/runs", "host": "node", "checkpoint_bytes": 10**9}
    agent.say(StoreReport(at=NOW, **facts | values))


def test_a_limit_reaches_the_job_that_asks_for_a_start(agent, client):
    report(agent, wants=1, free_bytes=5)
    (store,) = client.get("/api/v1/stores").json()["stores"]
    assert (store["id"], store["free_bytes"], store["limit"]) == (STORE, 5, None)
    before = client.get(f"{JOB}/desired").json()
    poll = {"after": before["version"], "share_number": before["share_number"]}
    assert (before["shares"], client.get(f"{JOB}/desired", params=poll).status_code) == ([], 204)
    asked = {"target": "s3://bucket", "limit": "200MB/s"}
    assert client.put("/api/v1/store-limits", json=asked).json()["bytes_per_second"] == 200e6
    after = client.get(f"{JOB}/desired", params=poll).json()
    (share,) = after["shares"]
    assert (share["address"], share["bytes_per_second"], share["granted"]) == ("s3://bucket/runs", 200e6, 1)
    assert after["version"] == before["version"]
    report(agent, wants=2, started=1)  # the division follows the report
    assert client.get(f"{JOB}/desired").json()["shares"][0]["granted"] == 2
    assert client.delete("/api/v1/store-limits", params={"target": "s3://bucket"}).status_code == 204
    assert client.get(f"{JOB}/desired").json()["shares"] == []
    acts = [row["action"] for row in client.get("/api/v1/audit").json()["entries"]]
    assert acts.count("store.limit") == 2


def test_weights_and_what_is_refused(agent, client):
    report(agent)
    weights = f"/api/v1/stores/{STORE}/weights"
    assert client.put(weights, json={"job": "char-gpt", "weight": 2}).json()["writers"][0]["weight"] == 2
    assert client.put(weights, json={"job": "other", "weight": 2}).status_code == 404
    assert client.put(weights, json={"job": "char-gpt", "weight": 0}).status_code == 422
    assert client.get("/api/v1/stores/x").status_code == 404
    for bad in (
        {"target": "", "limit": 1},
        {"target": "/x", "limit": "fast"},
        {"target": "/x", "limit": 1, "writers": 0},
    ):
        assert client.put("/api/v1/store-limits", json=bad).status_code == 422, bad
    assert client.get("/api/v1/store-limits").json() == {"limits": []}


def test_the_metrics_have_the_stores(agent, client):
    report(agent, waiting_bytes=7)
    assert (
        f'holdfast_store_waiting_bytes{{address="s3://bucket/runs",store="{STORE}"}} 7.0'
        in client.get("/metrics").text
    )


def many_stores(agent, count=5):
    """Stores `s3://bucket/0` and so on; the job of each writes faster than the one before."""
    for number in range(count):
        one = replace(agent, job=f"job-{number}", uid=f"job-{number}", sequence=0, sent=[])
        facts = {"store": f"{number:032}", "address": f"s3://bucket/{number}", "writing": True}
        report(one, bytes_per_second=float(number), written_bytes=2**53, **facts)


def test_stores_are_listed_in_pages(agent, client):
    many_stores(agent)
    report(replace(agent, job="more", uid="more", sequence=0, sent=[]), store=f"{3:032}", address="s3://bucket/3")

    def page(**query):
        found = client.get("/api/v1/stores", params=query).json()
        return (
            [store["address"][-1] for store in found["stores"]],
            found["page"],
            found["pages"],
            found["total"],
        )

    assert page(size=2) == (["4", "3"], 1, 3, 5)
    assert page(size=2, page=3) == page(size=2, page=9) == (["0"], 3, 3, 5)
    assert page(sort="address")[0] == list("01234")
    assert page(search="ET/2")[0] == page(search=f"{2:032}")[0] == ["2"]
    assert page(job="more") == (["3"], 1, 1, 1)
    assert client.get("/api/v1/stores", params={"sort": "host"}).status_code == 422
    (first, *_) = client.get("/api/v1/stores", params={"search": "bucket/3"}).json()["stores"]
    assert (first["active_writers"], first["written_bytes"], "writers" in first) == (2, 2**53, False)
    assert [each["job"] for each in client.get(f"/api/v1/stores/{3:032}").json()["writers"]] == ["job-3", "more"]


def test_a_job_that_stopped_reporting_is_no_active_writer(agent, client, clock):
    report(agent, writing=True, bytes_per_second=5.0, waiting_bytes=7)
    clock.now += store_shares.ACTIVE_SECONDS
    (store,) = client.get("/api/v1/stores").json()["stores"]
    assert (store["active_writers"], store["bytes_per_second"], store["waiting_bytes"]) == (0, 0.0, 0)


def test_the_page_of_stores_leads_to_the_next_one(agent, client, monkeypatch):
    many_stores(agent)
    monkeypatch.setattr("holdfast_web.stores.routes.StoreQuery", partial(StoreQuery, size=2))
    page = client.get("/stores?search=bucket&page=2").text
    assert "3 to 4 of 5 stores" in page
    for number, rel in ((1, "prev"), (3, "next")):
        assert f'rel="{rel}" href="/stores?search=bucket&amp;sort=load&amp;page={number}"' in page
    assert "No store has “x”" in client.get("/stores?search=x").text
    assert client.get("/stores?job=job-2", follow_redirects=False).headers["location"] == f"/stores/{2:032}"


def test_the_listing_takes_as_many_statements_for_many_stores_as_for_few(agent, client):
    def statements_of(count):
        many_stores(agent, count)
        with database_queries.statements() as noted:
            assert len(client.get("/api/v1/stores").json()["stores"]) == count
        return len(noted)

    assert statements_of(2) == statements_of(9)


def test_a_store_ends_with_its_last_job(agent, client, clock):
    report(agent)
    agent.say(AttemptFinished(at=agent.at, iteration=0, lineage=1, reason="finished"))
    clock.now += 3600
    assert client.delete(JOB).status_code == 204
    assert client.get(f"/api/v1/stores/{STORE}").status_code == 404
    with database_queries.of(client).read() as session:
        assert session.scalars(select(models.StoreRecord.id)).all() == []


def test_an_id_that_no_address_can_have_is_replaced(agent, client):
    report(agent, store="a/b?c")
    (store,) = client.get("/api/v1/stores").json()["stores"]
    assert "/" not in store["id"]
    assert client.get(f"/api/v1/stores/{store['id']}").status_code == 200


def test_limits_of_stores_that_one_does_not_see_are_not_listed(stage):
    for project, target in ((OWN, "s3://ours"), (OTHER, "s3://theirs")):
        stage.project(project, f"job-of-{project}")
        event = StoreReport(at=NOW, address=f"{target}/runs", host="node")
        reported = partial(store_shares.record, job=f"job-of-{project}", uid="u", event=event, now=stage.clock.now)
        stage.write(reported)
        limit = NewStoreLimit(target=target, limit="200MB/s")
        control.set_limit(stage.client.app.state.services.database, limit, who="x", now=stage.clock.now)
    stage.person("eve", Role.viewer)
    stage.person("root", admin=True)

    def targets(person):
        answer = stage.client.get("/api/v1/store-limits", headers=stage.cookie(person))
        return [limit["target"] for limit in answer.json()["limits"]]

    assert (targets("eve"), targets("root")) == (["s3://ours"], ["s3://ours", "s3://theirs"])
