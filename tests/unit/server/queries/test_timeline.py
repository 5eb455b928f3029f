from __future__ import annotations

import gzip
import itertools
import json
import math

import pytest

from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import (
    AnnotationReport,
    AttemptFinished,
    Checkpoint,
    IntervalDecision,
    Inventory,
    LineageStarted,
    MachineSample,
    Notice,
    Samples,
    Stall,
)
from holdfast_server.core.compression import decompress
from holdfast_server.queries import timeline
from holdfast_server.queries.job_view import view_job
from tests.support.postgres import ON_SQLITE

JOB = "/api/v1/jobs/char-gpt"


@pytest.fixture
def job(agent):
    agent.start()
    return agent


def back_to(agent, iteration, lineage):
    parent = f"{iteration:012d}-{agent.lineage}"
    agent.iteration, agent.lineage = iteration, lineage
    agent.say(LineageStarted(at=agent.at, lineage=lineage, iteration=iteration, parent=parent))


def test_a_job_without_iterations_has_an_empty_timeline(job, client):
    timeline = client.get(f"{JOB}/timeline").json()
    assert (timeline["extent"], timeline["window"], timeline["series"]) == (None, None, [])


def test_an_unknown_job_has_no_timeline(client):
    assert client.get(f"{JOB}/timeline").status_code == 404


def test_every_iteration_of_a_short_run_is_there(job, client):
    job.train(3)
    job.train(2, loss=1.5)
    timeline = client.get(f"{JOB}/timeline").json()
    (series,) = timeline["series"]
    assert (timeline["extent"], timeline["window"], timeline["bucketed"]) == ([1, 5], [1, 5], False)
    assert series["iteration"] == [1, 2, 3, 4, 5]
    assert series["metrics"]["loss"]["mean"] == [2.5, 2.5, 2.5, 1.5, 1.5]
    assert series["seconds"]["mean"] == series["seconds"]["max"] == [0.1] * 5


def test_a_window_holds_what_lies_in_it(job, client):
    for _ in range(4):
        job.train(5)
        job.checkpoint()
    timeline = client.get(f"{JOB}/timeline?from=7&to=12").json()
    assert timeline["series"][0]["iteration"] == [7, 8, 9, 10, 11, 12]
    assert timeline["extent"] == [1, 20]
    assert [one["iteration"] for one in timeline["checkpoints"]] == [10]


@ON_SQLITE
@pytest.mark.parametrize(
    ("accepted", "sent"),
    [
        ("gzip, deflate, br, zstd", "zstd"),
        ("GZIP;q=0.5, zstd;q=0", "gzip"),
        ("identity", None),
        ("br", None),
        ("", None),
    ],
)
def test_a_timeline_comes_in_an_encoding_that_was_asked_for(job, client, accepted, sent):
    job.train(1000)
    plain = client.get(f"{JOB}/timeline", headers={"Accept-Encoding": "identity"})
    with client.stream("GET", f"{JOB}/timeline", headers={"Accept-Encoding": accepted}) as reply:
        content = b"".join(reply.iter_raw())
    assert reply.headers.get("Content-Encoding") == sent
    assert "Accept-Encoding" in reply.headers["Vary"]
    unpacked = {"zstd": lambda packed: decompress(packed, 2**24), "gzip": gzip.decompress, None: bytes}[sent](
        content
    )
    assert json.loads(unpacked) == plain.json()
    assert (len(content) < len(unpacked) / 2) == (sent is not None)


@pytest.mark.parametrize("points", [2, 3, 10, 97, 500])
def test_a_long_run_is_read_in_no_more_points_than_asked(job, client, points):
    for _ in range(5):
        job.train(100)
        job.train(100, loss=0.5, seconds=0.3)
    timeline = client.get(f"{JOB}/timeline?points={points}").json()
    (series,) = timeline["series"]
    assert timeline["bucketed"] is True
    assert points / 4 <= len(series["iteration"]) <= points
    assert series["iteration"][-1] == 1000
    loss = series["metrics"]["loss"]
    assert (min(loss["min"]), max(loss["max"])) == (0.5, 2.5)
    assert all(low <= mean <= high for low, mean, high in zip(loss["min"], loss["mean"], loss["max"], strict=True))
    assert sum(series["stall_seconds"]) == pytest.approx(1.0)


def test_the_newest_attempt_counts_where_iterations_were_repeated(job, client):
    job.train(10)
    second = job.restarted()
    second.iteration = 6
    second.start(resumed_from="000000000006-1", previous_exit="killed by SIGKILL")
    second.train(6, loss=1.0)
    (series,) = client.get(f"{JOB}/timeline").json()["series"]
    assert series["iteration"] == list(range(1, 13))
    assert series["metrics"]["loss"]["mean"] == [2.5] * 6 + [1.0] * 6


def test_what_the_next_attempt_has_not_repeated_yet_is_lost(job, client):
    job.train(50)
    second = job.restarted()
    second.iteration = 20
    second.start(resumed_from="000000000020-1", previous_exit="killed by SIGKILL")
    second.train(2, loss=1.0)
    standing, lost = client.get(f"{JOB}/timeline").json()["series"]
    assert (standing["iteration"], standing["lost"], standing["abandoned"]) == (list(range(1, 23)), False, False)
    assert (lost["iteration"], lost["lost"], lost["abandoned"]) == (list(range(23, 51)), True, True)
    assert standing["metrics"]["loss"]["mean"][-3:] == [2.5, 1.0, 1.0]
    (only,) = client.get(f"{JOB}/timeline?from=30&to=40").json()["series"]
    assert (only["iteration"], only["lost"]) == (list(range(30, 41)), True)
    second.train(40)
    (whole,) = client.get(f"{JOB}/timeline").json()["series"]
    assert (whole["iteration"][-1], whole["lost"]) == (62, False)


def test_iterations_that_come_after_a_deleted_store_count_as_the_newest(job, client, clock, fresh_agent):
    clock.now += 3660
    second = job.restarted()
    second.start()
    second.train(3, loss=9.0)
    fresh = fresh_agent(client, uid="fresh", attempt=1, at=second.at + 3600)
    fresh.start()
    fresh.train(3, loss=1.0)
    (series,) = client.get(f"{JOB}/timeline").json()["series"]
    assert series["metrics"]["loss"]["mean"] == [1.0] * 3


def test_a_metric_that_begins_later_is_missing_before(job, client):
    job.train(2)
    job.iteration = 3
    job.say(samples=Samples(iteration=[3], lineage=[1], at=[job.at], seconds=[0.1], stall_seconds=[0.0],
                            data_seconds=[0.0], metrics={"accuracy": [0.5]}))  # fmt: skip
    (series,) = client.get(f"{JOB}/timeline").json()["series"]
    assert series["metrics"]["accuracy"]["mean"] == ["nan", "nan", 0.5]
    assert series["metrics"]["loss"]["mean"] == [2.5, 2.5, "nan"]


def test_a_batch_that_spans_a_restore_is_split_between_its_lineages(job, client):
    job.lineage, job.iteration = 2, 2
    job.say(samples=Samples(iteration=[1, 2, 2], lineage=[1, 1, 2], at=[job.at] * 3, seconds=[0.1] * 3,
                            stall_seconds=[0.0] * 3, data_seconds=[0.0] * 3,
                            metrics={"loss": [3.0, 2.0, 2.0]}))  # fmt: skip
    series = client.get(f"{JOB}/timeline").json()["series"]
    assert [(one["lineage"], one["iteration"]) for one in series] == [(1, [1, 2]), (2, [2])]


def test_an_abandoned_lineage_stays_visible_and_is_marked(job, client):
    job.train(10)
    job.checkpoint(5)
    job.checkpoint(10)
    back_to(job, 5, 2)
    job.train(3)
    timeline = client.get(f"{JOB}/timeline").json()
    lineages = timeline["lineages"]
    assert [(one["lineage"], one["iteration"], one["last_iteration"]) for one in lineages] == [
        (1, 0, 10),
        (2, 5, 8),
    ]
    assert [one["abandoned"] for one in timeline["series"]] == [True, False]
    # The first lineage is left, and still the way to where the job is, up to where it was left at.
    assert {one["iteration"]: one["abandoned"] for one in timeline["checkpoints"]} == {5: False, 10: True}


def test_a_lineage_is_abandoned_once_it_is_not_on_the_way_to_the_job(job, client):
    job.train(10)
    job.checkpoint(5)
    back_to(job, 5, 2)
    job.train(1)
    job.lineage = 1
    back_to(job, 5, 3)
    job.train(1)
    timeline = client.get(f"{JOB}/timeline").json()
    assert {one["lineage"]: one["abandoned"] for one in timeline["lineages"]} == {1: False, 2: True, 3: False}
    assert {one["lineage"]: one["abandoned"] for one in timeline["series"]} == {1: True, 2: True, 3: False}


def test_stalls_orders_edits_and_attempts_are_on_the_timeline(job, client):
    job.train(10, Stall(at=job.at, iteration=4, lineage=1, kind="snapshot_wait", seconds=1.25))
    client.patch(f"{JOB}/desired", json={"budget": 0.02}, headers={"If-Match": '"0"'})
    job.checkpoint(10)
    client.post(f"{JOB}/restores", json={"iteration": 10})
    job.say(AttemptFinished(at=job.at, iteration=10, lineage=1, reason="finished"))
    timeline = client.get(f"{JOB}/timeline").json()
    assert timeline["stalls"] == [
        {
            "iteration": 4,
            "lineage": 1,
            "kind": "snapshot_wait",
            "seconds": 1.25,
            "at": job.at,
            "abandoned": False,
        }
    ]  # fmt: skip
    assert [one["summary"] for one in timeline["edits"]] == ["restore to 10", "budget script default → 2 %"]
    assert [one["state"] for one in timeline["orders"]] == ["requested"]
    assert [(one["attempt"], one["finished"]) for one in timeline["attempts"]] == [(1, "finished")]


def test_of_very_many_checkpoints_an_even_selection_with_the_newest_is_drawn(job, client):
    job.train(1300)
    job.say(*[Checkpoint(at=job.at, id=checkpoint_id(number, 1), iteration=number, lineage=1, kind="scheduled",
                         state="durable") for number in range(1, 1301)])  # fmt: skip
    timeline = client.get(f"{JOB}/timeline").json()
    drawn = [one["iteration"] for one in timeline["checkpoints"]]
    assert (timeline["checkpoints_total"], drawn[-1]) == (1300, 1300)
    assert 250 < len(drawn) <= 500
    assert len({second - first for first, second in itertools.pairwise(drawn[:-1])}) == 1


def many(job, iterations=900, every=3):
    """A checkpoint every three iterations, one of them failed, and waits."""
    job.train(iterations)
    taken = [
        Checkpoint(at=job.at, id=checkpoint_id(number, 1), iteration=number, lineage=1, kind="scheduled",
                   state="durable" if number != 300 else "failed", snapshot_seconds=0.25,
                   persist_seconds=number / 100)
        for number in range(every, iterations + 1, every)
    ]  # fmt: skip
    waits = [
        Stall(at=job.at, iteration=number, lineage=1, kind="data_fetch", seconds=number / 1000)
        for number in range(1, iterations + 1, 2)
    ]
    job.say(*taken, *waits)


def test_checkpoints_too_dense_for_a_bar_each_are_counted_by_bar(job, client):
    many(job)
    timeline = client.get(f"{JOB}/timeline?points=120&marks=50").json()
    dense = timeline["checkpoint_density"]
    assert timeline["checkpoints_total"] == sum(dense["count"]) == 300
    assert (sum(dense["durable"]), sum(dense["failed"])) == (299, 1)
    assert len(dense["start"]) <= 120 / 3 + 1
    assert (dense["persist_seconds"][-1], max(dense["snapshot_seconds"])) == (9.0, 0.25)
    failed = dense["failed"].index(1)
    assert dense["start"][failed] <= 300 < dense["start"][failed] + dense["width"]


def test_what_is_not_simply_durable_is_drawn_however_dense_the_others_are(job, client):
    many(job)
    drawn = client.get(f"{JOB}/timeline?points=120&marks=50").json()["checkpoints"]
    assert len(drawn) <= 50 + 25
    assert [one["iteration"] for one in drawn if one["state"] == "failed"] == [300]
    assert client.get(f"{JOB}/timeline?from=1&to=60&marks=50").json()["checkpoint_density"] is None


def test_durable_checkpoints_among_very_many_retired_ones_all_come_one_by_one(job, client):
    job.train(900)
    durable = {40, 41, 42, 300, 899}
    job.say(*(
        Checkpoint(at=job.at, id=checkpoint_id(number, 1), iteration=number, lineage=1, kind="scheduled",
                   state="durable" if number in durable else "missing")
        for number in range(1, 901)
    ))  # fmt: skip
    timeline = client.get(f"{JOB}/timeline?points=120&marks=50").json()
    drawn = timeline["checkpoints"]
    assert {one["iteration"] for one in drawn if one["state"] == "durable"} == durable
    assert len(drawn) <= 50 + len(durable)
    assert sum(timeline["checkpoint_density"]["durable"]) == len(durable)


def test_of_too_many_durable_checkpoints_each_bar_has_one_even_where_the_newest_is_retired(job, client):
    job.train(900)
    job.say(*(
        Checkpoint(at=job.at, id=checkpoint_id(number, 1), iteration=number, lineage=1, kind="scheduled",
                   state="missing" if number % 2 else "durable")
        for number in range(1, 902)
    ))  # fmt: skip
    drawn = client.get(f"{JOB}/timeline?points=120&marks=50").json()["checkpoints"]
    places = [one["iteration"] for one in drawn if one["state"] == "durable"]
    assert len(drawn) <= 2 * 50
    assert max(later - earlier for earlier, later in itertools.pairwise([0, *places])) <= 2 * 900 / 50


def test_up_to_a_thousand_checkpoints_come_one_by_one_if_asked_for(job, client):
    many(job)
    timeline = client.get(f"{JOB}/timeline?points=120&marks=50&checkpoints=1000").json()
    assert (len(timeline["checkpoints"]), timeline["checkpoint_density"]) == (300, None)
    assert client.get(f"{JOB}/timeline?marks=50&checkpoints=299").json()["checkpoint_density"] is not None
    assert client.get(f"{JOB}/timeline?checkpoints=1001").status_code == 422


def test_waits_too_many_for_one_each_are_counted_by_bar_and_kind(job, client):
    many(job)
    timeline = client.get(f"{JOB}/timeline?points=120&marks=50&digits=3").json()
    (dense,) = timeline["stall_density"]
    assert (dense["kind"], timeline["stalls_total"], sum(dense["count"])) == ("data_fetch", 450, 450)
    assert (len(timeline["stalls"]), max(dense["longest_seconds"])) == (50, 0.899)


def test_only_the_metrics_asked_for_come_and_all_names_are_told(job, client):
    columns = {"at": [1.0, 2.0, 3.0], "seconds": [0.1] * 3, "stall_seconds": [0.0] * 3, "data_seconds": [0.0] * 3}
    metrics = {"loss": [1 / 3] * 3, "grad_norm": [2.0] * 3}
    job.say(samples=Samples(iteration=[1, 2, 3], lineage=[1] * 3, metrics=metrics, **columns))
    timeline = client.get(f"{JOB}/timeline?metric=loss&digits=4").json()
    assert timeline["metrics"] == ["loss", "grad_norm"]
    assert timeline["series"][0]["metrics"] == {"loss": {name: [0.3333] * 3 for name in ("mean", "min", "max")}}


def test_digits_round_values_and_times_that_are_shown_one_by_one(job, client):
    job.at = at = 1_790_000_000.123456
    job.train(4)
    job.checkpoint(snapshot_seconds=1 / 3, persist_started_at=at + 1 / 3)
    job.say(
        Stall(at=at, iteration=2, lineage=1, kind="data_fetch", seconds=2 / 3),
        IntervalDecision(at=at, iteration=4, lineage=1, interval=4, policy="budget", budget=0.01,
                         predicted_overhead=None, measured_overhead=1 / 30),
    )  # fmt: skip

    def shown(query):
        timeline = client.get(f"{JOB}/timeline{query}").json()
        (checkpoint,), (stall,), (paced,) = timeline["checkpoints"], timeline["stalls"], timeline["paced"]
        times = checkpoint["at"], checkpoint["persist_started_at"], stall["at"], paced["at"]
        return times, (checkpoint["snapshot_seconds"], stall["seconds"], paced["measured_overhead"])

    assert shown("") == ((at, at + 1 / 3, at, at), (1 / 3, 2 / 3, 1 / 30))
    times = 1_790_000_000.123, 1_790_000_000.457, 1_790_000_000.123, 1_790_000_000.123
    assert shown("?digits=3") == (times, (0.333, 0.667, 0.0333))


def test_a_window_of_time_holds_the_iterations_and_checkpoints_that_ended_in_it(job, client):
    for _ in range(4):
        job.train(5)
        job.checkpoint()
    whole = client.get(f"{JOB}/timeline?x=time").json()
    at = whole["series"][0]["at"]
    assert whole["time_window"] == whole["times"] == [whole["attempts"][0]["started_at"], at[-1]]
    some = client.get(f"{JOB}/timeline?x=time&from={at[6]}&to={at[11]}").json()
    (series,) = some["series"]
    assert (some["window"], some["time_window"]) == (None, [at[6], at[11]])
    assert series["iteration"] == [6, 7, 8, 9, 10, 11, 12, 13]


def test_a_job_that_is_not_heard_any_more_says_since_when(job, client, clock):
    job.train(5)
    heard = clock.now
    assert client.get(f"{JOB}/timeline").json()["silent_since"] is None
    clock.now += 120
    told = client.get(f"{JOB}/timeline?x=time").json()
    assert (told["silent_since"], told["now"]) == (heard, heard + 120)
    job.train(1)
    assert client.get(f"{JOB}/timeline").json()["silent_since"] is None


def test_in_time_what_was_repeated_lies_beside_what_repeats_it(job, client):
    job.train(10)
    again = job.restarted()
    again.iteration = 6
    again.start()
    again.train(8)
    standing, repeated = client.get(f"{JOB}/timeline?x=time").json()["series"]
    assert standing["iteration"] == [*range(1, 15)]
    assert (repeated["iteration"], repeated["lost"], repeated["abandoned"]) == ([7, 8, 9, 10], True, True)
    assert standing["at"] == sorted(standing["at"])


def test_a_time_far_into_a_long_run_is_found_in_its_rollups(job, client, clock):
    clock.now += 500
    job.train(5000)
    at = client.get(f"{JOB}/timeline?from=3000&to=3001").json()["series"][0]["at"]
    (series,) = client.get(f"{JOB}/timeline?x=time&from={at[0]}&to={at[1]}").json()["series"]
    assert series["iteration"] == [2999, 3000, 3001, 3002]


def test_restore_points_can_be_asked_for_without_what_is_not_in_the_store(job, client):
    job.train(10)
    for number, state in enumerate(("durable", "failed", "torn", "damaged", "missing", "persisting"), start=1):
        job.checkpoint(number, state)

    def asked(**options):
        with view_job(client.app.state.services.database, "char-gpt", now=0.0) as view:
            return [row.state for row in timeline.restore_points(view, **options)]

    assert asked(in_store=True) == ["persisting", "damaged", "durable"]
    assert len(asked()) == 6


def test_restore_points_come_newest_first_and_page_by_page(job, client):
    for _ in range(5):
        job.train(1)
        job.checkpoint()
    first = client.get(f"{JOB}/checkpoints?limit=3").json()["checkpoints"]
    rest = client.get(f"{JOB}/checkpoints?limit=3&before={first[-1]['id']}").json()["checkpoints"]
    assert [one["iteration"] for one in first + rest] == [5, 4, 3, 2, 1]


def test_the_newest_word_on_a_checkpoint_wins_whatever_comes_last(job, client):
    job.train(5)
    name = job.checkpoint(state="snapshot")
    early = job.sent[-1]
    job.checkpoint(state="durable", snapshot_seconds=0.2)
    job.uid = "replay"
    body = early.replace(b"\xa5first", b"\xa6replay")
    assert body != early
    job.send(body)
    (only,) = client.get(f"{JOB}/checkpoints").json()["checkpoints"]
    assert (only["id"], only["state"], only["restorable"]) == (name, "durable", True)


def test_what_the_store_no_longer_holds_is_missing(job, client):
    job.train(10)
    kept, gone = job.checkpoint(5), job.checkpoint(8)
    job.checkpoint(10, state="persisting")
    job.say(Inventory(at=job.at, checkpoints=[kept, "000000000002-1"]))
    states = {one["iteration"]: one["state"] for one in client.get(f"{JOB}/checkpoints").json()["checkpoints"]}
    assert states == {5: "durable", 8: "missing", 10: "persisting", 2: "durable"}
    job.say(Inventory(at=job.at, checkpoints=[kept, gone]))
    states = {one["iteration"]: one["state"] for one in client.get(f"{JOB}/checkpoints").json()["checkpoints"]}
    assert (states[8], states[2]) == ("durable", "missing")


def test_a_checkpoint_that_retention_deleted_says_why(job, client):
    job.train(10)
    deleted, kept = job.checkpoint(5), job.checkpoint(8)
    job.say(Inventory(at=job.at, checkpoints=[kept], deleted={deleted: "not kept by 'last 1'"}))
    found = {one["id"]: one for one in client.get(f"{JOB}/checkpoints").json()["checkpoints"]}
    assert (found[deleted]["state"], found[deleted]["reason"]) == (
        "missing",
        "deleted by retention: not kept by 'last 1'",
    )
    assert "deleted by retention" in client.get(f"/jobs/char-gpt/checkpoints/{deleted}").text


def test_what_was_on_its_way_when_the_attempt_died_never_arrives(job, client):
    job.train(10)
    job.checkpoint(10, state="persisting")
    second = job.restarted()
    second.start()
    second.say(Inventory(at=second.at, checkpoints=[]))
    (only,) = client.get(f"{JOB}/checkpoints").json()["checkpoints"]
    assert (only["state"], only["reason"]) == ("failed", "the attempt ended before it was durable")


@ON_SQLITE
@pytest.mark.parametrize("query", ["points=1", "points=100000", "points=x", "from=-1", "to=x"])
def test_a_window_that_is_none_is_refused(job, client, query):
    reply = client.get(f"{JOB}/timeline?{query}")
    assert (reply.status_code, reply.json()["error"]) == (422, "invalid_request")


def losses(job, values, name="loss"):
    first, job.iteration = job.iteration + 1, job.iteration + len(values)
    rows = len(values)
    job.say(samples=Samples(iteration=list(range(first, first + rows)), lineage=[1] * rows, at=[job.at] * rows,
                            seconds=[0.1] * rows, stall_seconds=[0.0] * rows, data_seconds=[0.0] * rows,
                            metrics={name: values}))  # fmt: skip


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_one_loss_that_is_no_number_is_seen_in_an_overview(job, client, odd):
    losses(job, [odd if number == 2500 else 2.0 for number in range(1, 5001)])
    timeline = client.get(f"{JOB}/timeline?points=400").json()
    (series,) = timeline["series"]
    means = dict(zip(series["iteration"], series["metrics"]["loss"]["mean"], strict=True))
    (seen,) = [iteration for iteration, mean in means.items() if mean != 2.0]
    assert (means[seen], timeline["bucketed"]) == (str(odd), True)
    assert 2500 <= seen < 2500 + 5000 / 100
    if math.isnan(odd):
        assert set(series["metrics"]["loss"]["max"]) == {2.0}


def test_what_is_measured_now_and_then_keeps_its_mean_between_iterations_without_one(job, client):
    losses(job, [1.5 if number % 50 == 0 else math.nan for number in range(1, 5001)], "val_loss")
    (series,) = client.get(f"{JOB}/timeline?points=100").json()["series"]
    assert set(series["metrics"]["val_loss"]["mean"]) == {1.5}


def test_restore_points_are_told_by_the_time_they_were_taken_across_pages(job, client):
    for at, iteration, lineage in ((10, 5, 1), (20, 10, 1), (30, 15, 1), (40, 7, 2), (50, 12, 2)):
        job.lineage = lineage
        job.checkpoint(iteration, snapshot_started_at=float(at))
    pages, before = [], ""
    while page := client.get(f"{JOB}/checkpoints?limit=2{before}").json()["checkpoints"]:
        pages.append([(one["iteration"], one["lineage"]) for one in page])
        before = f"&before={page[-1]['id']}"
    assert pages == [[(12, 2), (7, 2)], [(15, 1), (10, 1)], [(5, 1)]]


def test_points_of_the_same_moment_are_each_on_one_page(job, client):
    job.say(Inventory(at=job.at, checkpoints=[checkpoint_id(number, 1) for number in range(1, 8)]))
    first = client.get(f"{JOB}/checkpoints?limit=4").json()["checkpoints"]
    rest = client.get(f"{JOB}/checkpoints?limit=4&before={first[-1]['id']}").json()["checkpoints"]
    assert [one["iteration"] for one in first + rest] == [7, 6, 5, 4, 3, 2, 1]


def test_a_page_after_a_checkpoint_that_nobody_took_is_refused(job, client):
    reply = client.get(f"{JOB}/checkpoints?before=000000000099-1")
    assert (reply.status_code, reply.json()["field"]) == (422, "before")


def test_a_damaged_checkpoint_is_still_the_one_that_was_taken(job, client):
    job.train(10)
    name = job.checkpoint(4, kind="safety", snapshot_started_at=3.0)
    job.checkpoint(8, snapshot_started_at=7.0)
    job.say(
        Checkpoint(at=99.0, id=name, iteration=4, lineage=1, kind="scheduled", state="damaged", reason="digest")
    )
    newest, damaged = client.get(f"{JOB}/checkpoints").json()["checkpoints"]
    assert (newest["iteration"], damaged["state"], damaged["reason"]) == (8, "damaged", "digest")
    assert (damaged["kind"], damaged["payload_bytes"], damaged["snapshot_started_at"]) == ("safety", 1000, 3.0)


def test_the_newest_point_of_the_lineage_that_stands_is_drawn_however_dense_others_lie(job, client):
    many(job, iterations=1800)
    back_to(job, 300, 2)
    job.train(200)
    job.checkpoint(403)
    job.checkpoint(404, "failed")
    drawn = client.get(f"{JOB}/timeline?points=120&marks=50").json()["checkpoints"]
    assert [(one["iteration"], one["state"]) for one in drawn if one["lineage"] == 2] == [
        (403, "durable"), (404, "failed"),
    ]  # fmt: skip
    assert len(drawn) <= 2 * 50 + 25 + 1


def test_decisions_of_pacing_are_no_more_than_can_be_drawn(job, client):
    job.train(1)
    job.say(*[
        IntervalDecision(at=job.at + number, iteration=number, lineage=1, interval=number, policy="budget",
              budget=0.01, predicted_overhead=None, measured_overhead=None) for number in range(1, 301)
    ])  # fmt: skip
    told = client.get(f"{JOB}/timeline?from=1&to=300&marks=20").json()["paced"]
    assert 10 < len(told) <= 2 * 20 + 1
    assert told[-1]["iteration"] == 300
    assert [one["iteration"] for one in told] == sorted(one["iteration"] for one in told)


def test_time_goes_back_to_the_first_attempt_however_many_there_were(job, client, monkeypatch):
    monkeypatch.setattr(timeline, "MAX_ROWS", 1)
    monkeypatch.setattr(timeline, "_STARTS", timeline._STARTS.limit(1))
    job.train(2)
    second = job.restarted()
    second.start()
    second.train(10)
    told = client.get(f"{JOB}/timeline?x=time").json()
    assert (told["times"], len(told["attempts"])) == ([job.at, second.at + 1.2], 1)


def marked(agent, text):
    agent.say(AnnotationReport(at=agent.at, iteration=agent.iteration, lineage=agent.lineage, text=text))


def shown_annotations(client, window=""):
    rows = client.get(f"{JOB}/timeline{window}").json()["annotations"]
    return [(row["iteration"], row["text"]) for row in rows]


def test_annotations_of_the_script_are_on_the_timeline_and_not_among_the_notices(job, client):
    job.train(10)
    marked(job, "epoch 1")
    where = {"at": job.at, "iteration": job.iteration, "lineage": job.lineage}
    job.say(Notice(**where, level="info", code="data", message="a batch takes 42 ms"))
    job.train(10)
    marked(job, "epoch 2")
    assert shown_annotations(client) == [(10, "epoch 1"), (20, "epoch 2")]
    assert shown_annotations(client, "?from=15&to=20") == [(20, "epoch 2")]
    assert [notice["code"] for notice in client.get(f"{JOB}/notices").json()["notices"]] == ["data"]


def test_annotations_that_a_restore_left_behind_are_of_the_abandoned_lineage(job, client):
    job.train(10)
    marked(job, "epoch 1")
    job.train(10)
    marked(job, "epoch 2")
    back_to(job, 15, 2)
    rows = client.get(f"{JOB}/timeline").json()["annotations"]
    assert [(row["text"], row["abandoned"]) for row in rows] == [("epoch 1", False), ("epoch 2", True)]


def machine(agent, iteration, **values):
    at = agent.at + 0.1 * iteration
    return MachineSample(at=at, lineage=agent.lineage, iteration=iteration, **values)


def test_the_machine_of_a_rank_is_returned_only_where_it_is_requested(job, client, fresh_agent):
    job.train(30)
    other = fresh_agent(client, rank=3)
    for rank, cpu in ((job, 0.25), (other, 0.5)):
        rank.say(*(machine(job, iteration, cpu_share=cpu, memory_bytes=8e9) for iteration in (5, 15, 25)))
    plain = client.get(f"{JOB}/timeline").json()
    assert (plain["machine"], plain["metrics"]) == (None, ["loss"])
    found = client.get(f"{JOB}/timeline?machine=3").json()["machine"]
    (series,) = found["series"]
    assert (found["rank"], found["ranks"]) == (3, [0, 3])
    assert (series["lineage"], series["stands_until"], series["iteration"]) == (1, 30, [5, 15, 25])
    assert series["metrics"]["cpu_share"]["mean"] == [0.5] * 3
    assert series["metrics"]["memory_bytes"]["max"] == [8e9] * 3
    window = client.get(f"{JOB}/timeline?machine=0&from=10&to=20").json()["machine"]["series"][0]
    assert (window["iteration"], window["metrics"]["cpu_share"]["mean"]) == ([15], [0.25])
    assert client.get(f"{JOB}/timeline?machine=1").json()["machine"] == {"rank": 1, "ranks": [0, 3], "series": []}
    assert client.get(f"{JOB}/timeline?machine=-1").status_code == 422


def test_the_machine_is_returned_by_time_and_in_buckets(job, client):
    job.train(600)
    job.say(
        *(machine(job, iteration, disk_write_bytes_per_second=float(iteration)) for iteration in range(1, 600))
    )
    times = client.get(f"{JOB}/timeline?x=time&machine=0&points=20").json()
    (series,) = times["machine"]["series"]
    written = series["metrics"]["disk_write_bytes_per_second"]
    assert len(series["at"]) <= 40
    assert written["min"][0] <= written["mean"][0] <= written["max"][0]
    assert written["max"][-1] == 599


def test_the_machine_is_no_part_of_exports_ranks_and_summaries(job, client):
    job.train(10)
    before = [
        client.get(f"{JOB}{path}").content for path in ("/export/samples.csv", "/ranks", "/goodput?window=all")
    ]
    metrics = client.get(JOB).json()["metrics"]
    job.say(machine(job, 5, cpu_share=0.5))
    after = [
        client.get(f"{JOB}{path}").content for path in ("/export/samples.csv", "/ranks", "/goodput?window=all")
    ]
    assert after == before
    assert client.get(JOB).json()["metrics"] == metrics
