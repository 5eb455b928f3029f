"""The account agrees with a fixture that was computed by hand, to the second and the byte.

The scene begins at 14:13:20 UTC, 800 s into an hour. Job `big` has 4 ranks, an iteration a second, of which each
waits 1 ms for a snapshot and 100 ms for data, and epochs of 1,000 iterations:

    seconds    event
    0          attempt 1 starts
    100        its first iteration begins
    2100       iteration 2000 ends: the end of an epoch
    3300       iteration 3200 ends, and the process dies; the last checkpoint is 2900
    3900       attempt 2 starts from 2900
    4000       its first iteration begins
    5000       iteration 3900 ends
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import msgspec
import pytest
from sqlalchemy import select
from starlette.testclient import TestClient
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.protocol.field_types import MAX_INTEGER
from holdfast.protocol.store_shares import StoreReport
from holdfast.protocol.wire import AttemptFinished, IntervalDecision, Inventory, LineageStarted, Origin, Stall
from holdfast.server_link.json_client import JsonClient
from holdfast_server import models
from holdfast_server.control import accounting
from holdfast_server.core.principal import Role
from holdfast_server.core.settings import Prices
from holdfast_web import create_app
from tests.support import database_queries
from tests.support.accounts_server import OTHER, OWN
from tests.support.clock import FakeClock
from tests.support.server_fixtures import BASE_URL, ScriptedAgent

T = 1_790_000_000.0
HOUR_BEGIN = T - 800
VERSIONS = {"torch": "2"}
STORE, ID = "/mnt/ckpt", "ab" * 16

pytestmark = pytest.mark.usefixtures("no_background_jobs")


def bring_up_to_date(client, clock):
    accounting.keep_account(database_queries.of(client), clock.now)


def account(client, **query):
    answer = client.get("/api/v1/account", params=query)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    for row in (found["total"], *found["rows"]):
        assert sum(row["categories"].values()) == pytest.approx(row["gpu_hours"])
        assert row["productive_gpu_hours"] + sum(row["lost_gpu_hours"].values()) == pytest.approx(row["gpu_hours"])
    return found


def seconds(row):
    """GPU-seconds by category, without zeros."""
    return {name: round(hours * 3600, 6) for name, hours in row["categories"].items() if hours}


def train(agent, clock, upto, *, start, iterations_from, data_seconds=0.1):
    """Train an iteration a second up to an iteration, in batches of at most 500, from a time on."""
    done = iterations_from
    while done < upto:
        count = min(500, upto - done)
        agent.iteration, agent.at = done, start - iterations_from  # to which it adds the number of an iteration
        clock.now = start + done + count - iterations_from
        agent.train(count, seconds=1.0, data_seconds=data_seconds)
        done += count
    agent.at = clock.now


def epoch_of(agent, iterations):
    agent.say(
        IntervalDecision(
            at=agent.at, iteration=agent.iteration, lineage=agent.lineage, policy="goodput", interval=100,
            budget=0.03, predicted_overhead=None, measured_overhead=None, epoch_iterations=iterations,
        )
    )  # fmt: skip


def checkpoint(agent, clock, iteration, at, *, payload=1_000_003, reused=0, free=None, state="durable"):
    agent.at = clock.now = at
    if free is not None:
        agent.say(
            StoreReport(at=at, store=ID, address=STORE, host="node", free_bytes=free, total_bytes=2 * 10**12)
        )
    return agent.checkpoint(
        iteration, state, payload_bytes=payload, reused_bytes=reused, snapshot_started_at=at - 1
    )


@pytest.fixture
def big(client, agent, clock):
    return replace(agent, job="big", uid="big-1", sequence=0, sent=[])


def first_attempt(big, clock):
    clock.now = big.at = T
    big.start(world_size=4, versions=VERSIONS, owner="ada", labels={"team": "vision"}, stores=[STORE])
    big.say(LineageStarted(at=T, lineage=1, iteration=0))
    epoch_of(big, 1000)
    train(big, clock, 2900, start=T + 100, iterations_from=0)
    checkpoint(big, clock, 1000, T + 1100, free=10**12)
    checkpoint(big, clock, 2900, T + 3000, payload=1_000_000, reused=400_000, free=9 * 10**11)
    train(big, clock, 3200, start=T + 3000, iterations_from=2900)


def second_attempt(big, clock):
    second = big.restarted("big-2")
    second.job, second.iteration = "big", 2900
    clock.now = second.at = T + 3900
    second.start(
        world_size=4, versions=VERSIONS, owner="ada", labels={"team": "vision"}, stores=[STORE],
        previous_exit="killed by SIGKILL",
    )  # fmt: skip
    epoch_of(second, 1000)
    train(second, clock, 3900, start=T + 4000, iterations_from=2900)
    return second


BY_HAND = {
    # 2,900 iterations of the first attempt and 1,000 of the second stand; each has 0.899 s of work
    "productive": 4 * 3900 * 0.899,
    "snapshot_wait": 4 * 3900 * 0.001,
    "data_fetch": 4 * 3900 * 0.1,
    "lost": 4 * 300.0,
    "starting": 4 * (100.0 + 100.0),
    "down": 4 * 600.0,
}


def by_hand():
    """To the millisecond, since each hour is rounded to microseconds."""
    return pytest.approx(BY_HAND, abs=1e-3)


def test_the_account_is_that_of_the_hand(big, client, clock):
    first_attempt(big, clock)
    second_attempt(big, clock)
    bring_up_to_date(client, clock)
    found = account(client)
    (row,) = found["rows"]
    assert row["name"] == "default"
    assert seconds(row) == by_hand()
    assert row["gpu_hours"] * 3600 == pytest.approx(4 * 5000)
    assert {name: round(hours * 3600, 3) for name, hours in row["lost_gpu_hours"].items()} == {
        "failures": 1200.0,
        "restarts": 800.0,
        "checkpoints": 15.6,
        "data": 1560.0,
        "ranks": 0.0,
        "idle": 2400.0,
    }
    # of the first attempt, 2,900 iterations were kept, those up to 2,000 by the end of an epoch
    assert row["saved_gpu_hours"] * 3600 == pytest.approx(4 * 900)
    assert (row["failures"], row["uncompared_failures"], row["jobs"]) == (1, 0, 1)
    assert row["written_bytes"] == row["stored_bytes"] == 1_000_003 + 600_000
    # 1,000 iterations since the newest checkpoint
    assert row["unsaved_gpu_hours"] * 3600 == pytest.approx(4 * 1000)


def test_hours_hold_what_happened_in_them(big, client, clock):
    first_attempt(big, clock)
    second_attempt(big, clock)
    bring_up_to_date(client, clock)
    clock.now = HOUR_BEGIN + 86400 + 3600  # the window begins with the second hour
    (row,) = account(client)["rows"]
    # It begins 2,800 s after the start, when iteration 2,700 ends. This one is summed with the 500 after it, so
    # that one of 501 parts of them is in the first hour.
    part = 500 / 501
    assert seconds(row)["lost"] == pytest.approx(4 * 300 * part, abs=1e-3)
    assert seconds(row)["starting"] == 4 * 100
    assert seconds(row)["productive"] == pytest.approx(4 * (201 * part + 1000) * 0.899, abs=1e-3)
    assert row["written_bytes"] == 600_000
    clock.now += 3600
    (row,) = account(client)["rows"]
    assert (seconds(row), row["written_bytes"], row["stored_bytes"]) == ({}, 0, 1_600_003)


@pytest.mark.parametrize("at", [[T + 3300], [T + 1700, T + 3300, T + 3950], [T + 400 * n for n in range(12)]])
def test_it_does_not_matter_when_it_is_computed(big, client, clock, at):
    """Iterations that counted as productive become lost when the job goes on from an earlier one."""
    due = sorted(at)
    say = big.say

    def accounted(*events, samples=None):
        while due and due[0] <= clock.now:
            due.pop(0)
            bring_up_to_date(client, clock)
        return say(*events, samples=samples)

    big.say = accounted
    first_attempt(big, clock)
    bring_up_to_date(client, clock)
    second_attempt(big, clock)
    bring_up_to_date(client, clock)
    for window in ("24h", "7d", "30d"):
        (row,) = account(client, since=window)["rows"]
        assert seconds(row) == by_hand(), window
        assert row["saved_gpu_hours"] * 3600 == pytest.approx(4 * 900)
        assert (row["failures"], row["written_bytes"]) == (1, 1_600_003)


def test_reports_that_arrive_late_are_added_to_their_hours(big, client, clock):
    """A server that was away for five hours gets all reports afterwards, in any order of the lanes."""
    first_attempt(big, clock)
    bring_up_to_date(client, clock)
    train(big, clock, 3300, start=T + 3300, iterations_from=3200)
    clock.now = T + 3400 + 5 * 3600
    bring_up_to_date(client, clock)
    late = clock.now
    train(big, FakeClock(), 3300 + 5 * 3600, start=T + 3400, iterations_from=3300)
    bring_up_to_date(client, clock)
    clock.now = late + 60
    checkpoint(big, FakeClock(), 4000, T + 4100, payload=77)
    bring_up_to_date(client, clock)
    (row,) = account(client)["rows"]
    iterations = 3300 + 5 * 3600
    assert seconds(row)["productive"] == pytest.approx(4 * 0.899 * iterations)
    assert row["written_bytes"] == 1_600_003 + 77
    assert "down" not in seconds(row)


def test_the_account_is_the_same_after_a_restart_of_the_server(clock, settings):
    with TestClient(create_app(settings, clock=clock), base_url=BASE_URL) as client:
        big = ScriptedAgent(client, job="big", uid="big-1")
        first_attempt(big, clock)
        bring_up_to_date(client, clock)
    with TestClient(create_app(settings, clock=clock), base_url=BASE_URL) as client:
        second_attempt(replace(big, client=client), clock)
        bring_up_to_date(client, clock)
        (row,) = account(client)["rows"]
    assert seconds(row) == by_hand()


def test_a_restore_takes_back_what_was_productive(big, client, clock):
    """In place, after days: also what was summed by day."""
    clock.now = big.at = T
    big.start(world_size=1, versions=VERSIONS, stores=[STORE])
    big.say(LineageStarted(at=T, lineage=1, iteration=0))
    for hour in range(5 * 24):
        clock.now = T + (hour + 1) * 3600
        big.train(10, seconds=360.0)
        if hour % 7 == 0:
            bring_up_to_date(client, clock)
    bring_up_to_date(client, clock)
    end = clock.now
    (before,) = account(client, since="30d")["rows"]
    big.at = end + 30
    big.say(
        Stall(at=end + 30, iteration=100, lineage=1, kind="restore", seconds=30.0),
        LineageStarted(at=end + 30, lineage=2, iteration=100, parent="000000000100-1"),
    )
    big.lineage, big.iteration, big.at = 2, 100, end + 30 - 100 * 360
    clock.now = end + 390
    big.train(1, seconds=360.0)
    bring_up_to_date(client, clock)
    (after,) = account(client, since="30d")["rows"]
    work = 360 - 0.003  # of an iteration, without its waits
    assert seconds(before)["productive"] == pytest.approx(1200 * work)
    assert seconds(after)["lost"] == pytest.approx(1100 * 360)
    assert seconds(after)["productive"] == pytest.approx(101 * work, abs=1e-3)
    assert seconds(after)["restoring"] == 30
    (recent,) = account(client, since="24h")["rows"]
    assert seconds(recent)["lost"] == pytest.approx(24 * 3600 + 800)


def test_a_deleted_job_keeps_its_account_and_has_nothing_stored(big, client, clock):
    first_attempt(big, clock)
    second = second_attempt(big, clock)
    second.say(AttemptFinished(at=T + 5000, iteration=3900, lineage=1, reason="finished"))
    clock.now = T + 5100
    client.delete("/api/v1/jobs/big").raise_for_status()
    bring_up_to_date(client, clock)
    found = account(client, by="job")
    (row,) = found["rows"]
    assert (row["name"], seconds(row)) == ("big", by_hand())
    assert (row["written_bytes"], row["stored_bytes"], row["unsaved_gpu_hours"]) == (1_600_003, 0, 0)
    assert [(store["store"], store["jobs"], store["stored_bytes"]) for store in found["stores"]] == [(STORE, 0, 0)]
    # a new job of the same name is another one
    again = replace(big, uid="again", sequence=0, iteration=0, attempt=1)
    again.at = clock.now = T + 6000
    again.start(versions=VERSIONS, owner="bob", stores=[STORE])
    train(again, clock, 100, start=T + 6000, iterations_from=0)
    bring_up_to_date(client, clock)
    by_owner = {row["name"]: seconds(row) for row in account(client, by="owner")["rows"]}
    assert by_owner["ada"] == by_hand()
    assert sum(by_owner["bob"].values()) == pytest.approx(100)


def test_an_interrupted_deletion_changes_no_account(big, client, clock, monkeypatch):
    first_attempt(big, clock)
    clock.now = T + 9000
    bring_up_to_date(client, clock)
    (before,) = account(client)["rows"]
    monkeypatch.setattr("holdfast_server.control.deletion._end", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        client.delete("/api/v1/jobs/big")
    bring_up_to_date(client, clock)
    monkeypatch.undo()
    client.delete("/api/v1/jobs/big").raise_for_status()
    (after,) = account(client)["rows"]
    assert seconds(after) == seconds(before)


def test_a_fork_has_none_of_the_work_of_its_origin(big, client, clock):
    first_attempt(big, clock)
    fork = replace(big, job="fork", uid="forked", sequence=0, iteration=2900, attempt=1, sent=[])
    origin = Origin(job="big", checkpoint="000000002900-1", digest="x")
    clock.now = fork.at = T + 3300
    fork.start(world_size=4, stores=[STORE], versions=VERSIONS)
    fork.say(
        LineageStarted(at=fork.at, lineage=1, iteration=2900, parent="000000002900-1", origin=origin),
        Inventory(at=fork.at, checkpoints=["000000002900-1"]),
        AttemptFinished(at=fork.at, iteration=2900, lineage=1, reason="forked"),
    )
    own = fork.restarted("fork-1")
    own.job, own.iteration = "fork", 2900
    clock.now = own.at = T + 20_000
    own.start(world_size=2, stores=[STORE], versions=VERSIONS)
    train(own, clock, 3000, start=T + 20_010, iterations_from=2900)
    bring_up_to_date(client, clock)
    rows = {row["name"]: row for row in account(client, by="job")["rows"]}
    assert seconds(rows["fork"]) == {
        "productive": pytest.approx(2 * 100 * 0.899),
        "snapshot_wait": pytest.approx(2 * 100 * 0.001),
        "data_fetch": pytest.approx(2 * 10),
        "starting": pytest.approx(20),
    }
    assert (rows["fork"]["written_bytes"], rows["fork"]["failures"]) == (0, 0)
    assert seconds(rows["big"])["down"] == 4 * 3600  # it died, and nothing started again: an hour counts


def test_of_an_unknown_epoch_nothing_is_claimed_to_be_saved(big, client, clock):
    first_attempt(big, clock)
    second = big.restarted("big-2")
    second.job, second.iteration = "big", 2900
    clock.now = second.at = T + 3900
    second.start(world_size=4, versions=VERSIONS, stores=[STORE], previous_exit="killed by SIGKILL")
    epoch_of(second, None)
    train(second, clock, 2910, start=T + 4000, iterations_from=2900)
    bring_up_to_date(client, clock)
    total = account(client)["total"]
    assert (total["saved_gpu_hours"], total["failures"], total["uncompared_failures"]) == (0, 1, 1)


def test_a_planned_end_leaves_no_idle_time(big, client, clock):
    first_attempt(big, clock)
    big.say(AttemptFinished(at=T + 3300, iteration=3200, lineage=1, reason="preempted"))
    clock.now = T + 30_000
    bring_up_to_date(client, clock)
    (row,) = account(client)["rows"]
    assert seconds(row)["productive"] == pytest.approx(4 * 3200 * 0.899)
    assert not {"down", "lost"} & seconds(row).keys()
    assert row["failures"] == 0


def test_bytes_by_store(big, client, clock):
    first_attempt(big, clock)
    big.say(Inventory(at=clock.now, checkpoints=["000000002900-1"], copies={"000000002900-1": "both"}))
    bring_up_to_date(client, clock)
    (store,) = account(client)["stores"]
    # retention deleted the oldest one: the rest of its files are those of the next one
    assert (store["stored_bytes"], store["is_estimate"], store["written_bytes"]) == (1_000_000, True, 1_600_003)
    assert (store["free_bytes"], store["free_at"], store["days_until_full"]) == (9 * 10**11, T + 3000, None)
    assert (store["id"], store["host"], store["total_bytes"]) == (ID, "node", 2 * 10**12)
    # the first hour of the window with a checkpoint began 800 s before the scene
    assert store["written_bytes_per_hour"] == pytest.approx(1_600_003 / ((clock.now - HOUR_BEGIN) / 3600))
    later = T + 2 * 86400
    train(big, clock, 3300, start=later - 100, iterations_from=3200)
    checkpoint(big, clock, 3300, later + 3000, payload=5, free=5 * 10**11)
    bring_up_to_date(client, clock)
    (store,) = account(client)["stores"]
    assert store["days_until_full"] == pytest.approx(5 / (9 - 5) * 2)


def test_rows_by_owner_label_and_store_and_filters(big, client, clock):
    first_attempt(big, clock)
    other = replace(big, job="small", uid="small", sequence=0, iteration=0, sent=[])
    clock.now = other.at = T
    other.start(versions=VERSIONS, owner="bob", labels={"team": "nlp", "sweep": ""}, stores=["s3://bucket/x"])
    train(other, clock, 600, start=T + 10, iterations_from=0)
    clock.now = T + 3300
    bring_up_to_date(client, clock)

    def names(**query):
        return sorted(row["name"] for row in account(client, **query)["rows"])

    assert names(by="owner") == ["ada", "bob"]
    assert names(by="label") == ["sweep", "team: nlp", "team: vision"]
    assert names(by="store") == [STORE, "s3://bucket/x"]
    assert names(by="job", owner="ada") == names(by="job", label="team: vision") == ["big"]
    assert names(by="job", label="team") == ["big", "small"]
    assert names(by="job", store="s3://bucket/x") == ["small"]
    assert names(project="nothing") == []
    assert account(client, by="label")["total"]["jobs"] == 2
    for wrong in ({"since": "3d"}, {"by": "host"}, {"label": ": x"}):
        assert client.get("/api/v1/account", params=wrong).status_code == 422


def test_a_store_is_known_by_its_id_whatever_the_path(agent, client, clock):
    """Two hosts mount one file system at different paths, and have private disks at the same path."""
    for number, (host, shared) in enumerate((("node-1", "/lustre"), ("node-2", "/mnt/lustre"))):
        for name, store, address in (("shared", "cd" * 16, shared), ("private", f"{number}" * 32, "/scratch")):
            one = replace(agent, job=f"{name}-{number}", uid=f"{name}-{number}", sequence=0, iteration=0, sent=[])
            one.at = clock.now = T
            one.start(stores=[address])
            for day, free in ((0, 900 + number), (2, 300 - 100 * number)):
                at = one.at = clock.now = T + day * 86400 + number
                one.say(StoreReport(at=at, store=store, address=address, host=host, free_bytes=free))
                one.checkpoint(10 + day, payload_bytes=1000)
    bring_up_to_date(client, clock)
    found = {store["id"]: store for store in account(client, since="7d")["stores"]}
    figures = {name: (store["jobs"], store["written_bytes"], store["free_bytes"]) for name, store in found.items()}
    assert figures == {"cd" * 16: (2, 4000, 200), "0" * 32: (1, 2000, 300), "1" * 32: (1, 2000, 200)}
    assert {found["0" * 32]["host"], found["1" * 32]["host"]} == {"node-1", "node-2"}
    assert found["0" * 32]["days_until_full"] == pytest.approx(300 / 600 * 2)
    # the first measurement of the shared one is that of the other host, a second later, and the last one as well
    assert found["cd" * 16]["days_until_full"] == pytest.approx(200 / 701 * 2)
    page = client.get("/account").text
    assert page.count("/scratch") == 2
    assert f'href="/stores/{"cd" * 16}"' in page


def test_a_measurement_that_arrives_late_replaces_no_newer_one(agent, client, clock):
    clock.now = T
    agent.start(stores=[STORE])
    for at, free in ((T + 100, 5), (T + 50, 7)):
        clock.now = T + 100
        agent.say(StoreReport(at=at, store=ID, address=STORE, host="node", free_bytes=free))
    (store,) = client.get("/api/v1/stores").json()["stores"]
    assert (store["free_bytes"], store["free_at"]) == (5, T + 100)


def test_prices_turn_both_into_money(big, client, clock):
    first_attempt(big, clock)
    bring_up_to_date(client, clock)
    services = client.app.state.services
    client.app.state.services = replace(
        services, settings=replace(services.settings, prices=Prices(2.5, 20.0, "EUR"))
    )
    found = account(client)
    total = found["total"]
    assert (found["gpu_hour_price"], found["tb_month_price"], found["currency"]) == (2.5, 20.0, "EUR")
    assert total["cost"] == pytest.approx(2.5 * total["gpu_hours"])
    assert total["lost_cost"] == pytest.approx(2.5 * (total["gpu_hours"] - total["productive_gpu_hours"]))
    assert total["stored_cost"] == pytest.approx(20 * 1_600_003 / 1e12)


def test_the_table_has_all_rows(big, client, clock):
    first_attempt(big, clock)
    bring_up_to_date(client, clock)
    answer = client.get("/api/v1/account.csv", params={"by": "owner"})
    (line,) = csv.DictReader(io.StringIO(answer.text))
    total = account(client)["total"]
    assert line["owner"] == "ada"
    assert float(line["gpu_hours"]) == total["gpu_hours"]
    assert float(line["lost_to_data_gpu_hours"]) == total["lost_gpu_hours"]["data"]
    assert (line["written_bytes"], line["cost"]) == ("1600003", "")


def test_a_person_sees_the_projects_that_they_may_see(stage):
    for project in (OWN, OTHER):
        stage.project(project, f"job-of-{project}")
    stage.person("eve", Role.viewer)
    accounting.keep_account(stage.client.app.state.services.database, stage.clock.now)
    eve = stage.cookie("eve")
    for query in ({"by": "project"}, {"by": "job"}, {"project": OTHER}):
        text = stage.client.get("/api/v1/account", params=query, headers=eve).text
        assert OTHER not in text
    assert OWN in stage.client.get("/api/v1/account", headers=eve).text


def test_the_page_shows_what_counts_and_estimates_look_like_estimates(big, client, clock):
    assert "No data yet" in client.get("/account").text
    first_attempt(big, clock)
    second_attempt(big, clock)
    bring_up_to_date(client, clock)
    page = client.get("/account?by=owner&since=7d").text
    assert "<b>5.56</b>" in page  # of the 20,000 GPU-seconds
    assert '<b class="predicted">1.00</b>' in page
    assert 'href="/api/v1/account.csv?since=7d&amp;by=owner"' in page
    assert STORE in page
    assert "--gpu-hour-price" in page


def test_the_fleet_has_the_account_of_the_jobs_that_it_lists(big, client, clock):
    first_attempt(big, clock)
    bring_up_to_date(client, clock)
    assert 'hx-get="/fleet/account"' in client.get("/").text
    assert "<b>3.67 GPU-h</b>" in client.get("/fleet/account").text
    assert "<b>3.67 GPU-h</b>" in client.get("/fleet/account?search=bi&label=team").text
    for other in ("search=other", "owner=bob", "label=team: nlp", "archived=1", "status=finished"):
        assert "no GPU-hours yet" in client.get(f"/fleet/account?{other}").text, other


def test_metrics_have_the_account_by_project_and_the_stores(big, client, clock):
    first_attempt(big, clock)
    bring_up_to_date(client, clock)
    lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if "{" in line)
    hours = lines['holdfast_account_gpu_hours{category="data_fetch",project="default"}']
    assert float(hours) * 3600 == pytest.approx(4 * 320)
    assert float(lines[f'holdfast_account_store_stored_bytes{{address="{STORE}",store="{ID}"}}']) == 1_600_003


def test_sums_and_the_page_take_as_many_statements_for_many_jobs_as_for_few(agent, client, clock):
    def statements_of(jobs):
        for number in range(jobs):
            one = replace(agent, job=f"job-{number}", uid=f"job-{number}", sequence=0, iteration=0, at=T, sent=[])
            clock.now = T
            one.start(stores=[f"/mnt/{number}"], owner=f"owner-{number}")
            train(one, clock, 10, start=T, iterations_from=0)
            checkpoint(one, clock, 10, T + 20, free=100)
        with database_queries.statements() as sums:
            bring_up_to_date(client, clock)
        with database_queries.statements() as read:
            account(client)
        return len(sums), len(read)

    statements_of(1)  # later, its hours are a part of their own
    assert statements_of(3) == statements_of(9)


def test_a_report_out_of_all_bounds_ends_nobodys_account(big, agent, client, clock):
    first_attempt(big, clock)
    absurd = replace(agent, job="absurd", uid="absurd", sequence=0, sent=[])
    absurd.at = clock.now = T + 100
    absurd.start(world_size=MAX_INTEGER, stores=[STORE])
    train(absurd, clock, 10, start=T + 100, iterations_from=0)
    checkpoint(absurd, clock, 10, T + 3400, payload=MAX_INTEGER)
    clock.now = T + 3600
    bring_up_to_date(client, clock)
    rows = {row["name"]: row for row in account(client, by="job")["rows"]}
    assert rows["big"]["productive_gpu_hours"] == pytest.approx(4 * 3200 * 0.899 / 3600)
    assert client.get("/account").status_code == client.get("/fleet/account").status_code == 200
    assert "holdfast_account_gpu_hours" in client.get("/metrics").text


def test_old_hours_and_days_are_deleted(big, client, clock):
    first_attempt(big, clock)
    bring_up_to_date(client, clock)
    for days, kept in ((3, {3600, 86400}), (5, {86400}), (42, set())):
        clock.now = T + days * 86400
        bring_up_to_date(client, clock)
        with database_queries.of(client).read() as session:
            assert set(session.scalars(select(models.AccountPeriodRecord.seconds))) == kept
    with database_queries.of(client).read() as session:
        assert not session.scalars(select(models.AccountGroupRecord)).all()
        assert not session.scalars(select(models.StoreDiskRecord)).all()


def test_the_command_has_the_same_in_words(big, client, clock, monkeypatch):
    first_attempt(big, clock)
    second_attempt(big, clock)
    bring_up_to_date(client, clock)

    def fetch(_, kind, method, path, *, query):
        asked = {name: value for name, value in query.items() if value is not None}
        return msgspec.json.decode(client.request(method, f"/api/v1{path}", params=asked).content, type=kind)

    monkeypatch.setattr(JsonClient, "fetch", fetch)
    shown = CliRunner().invoke(app, ["account", "--since", "7d", "--by", "owner", "--label", "team: vision"])
    assert shown.exit_code == 0, shown.output
    assert "5.56 GPU-hours; 70.1 % productive; lost to idle 0.667 GPU-hours" in shown.output
    assert "about 1 GPU-hour saved by checkpoints" in shown.output
    assert ["ada", "1", "5.6", "70.1", "%"] in [line.split()[:5] for line in shown.output.splitlines()]
    assert [line.split()[0] for line in shown.output.splitlines() if "1.6 MB" in line] == [STORE]
    as_json = CliRunner().invoke(app, ["account", "--json"])
    assert json.loads(as_json.output)["total"]["written_bytes"] == 1_600_003
