from __future__ import annotations

import gzip
import math
from typing import Any

import msgspec
import pytest

from holdfast.protocol.wire import Ack, AttemptStarted, Batch, Inventory, Notice, Samples, Stall
from holdfast_server.core import compression
from tests.support.postgres import ON_SQLITE, ask

JOB = "/api/v1/jobs/char-gpt"


def rows(client: Any, table: str) -> int:
    ((found,),) = ask(client.app.state.services.settings.database, f"SELECT count(*) FROM {table}")
    return found


def post(client: Any, body: bytes, **headers: str) -> Any:
    kind = {"Content-Type": "application/msgpack"}
    return client.post("/api/v1/ingest", content=body, headers=kind | headers)


def batch(**fields: Any) -> dict[str, Any]:
    whole = {"job": "char-gpt", "uid": "u", "attempt": 1, "rank": 0, "sequence": 0, "sent_at": 1.0,
             "iteration": 0, "lineage": 1}  # fmt: skip
    return whole | fields


def test_a_batch_is_stored_and_acknowledged(agent, client):
    agent.start()
    ack = agent.train(5)
    assert ack == Ack(acked=1, version=0)
    summary = client.get(JOB).json()
    assert (summary["iteration"], summary["status"], summary["loss"]) == (5, "running", 2.5)


def test_a_batch_sent_again_is_acknowledged_and_kept_once(agent, client):
    agent.start()
    stall = Stall(at=1.0, iteration=2, lineage=1, kind="snapshot_wait", seconds=0.3)
    first = agent.train(5, stall)
    again = agent.send(agent.sent[-1])
    assert again == first
    assert (rows(client, "chunks"), rows(client, "stalls"), rows(client, "batches")) == (1, 1, 2)


def test_a_sign_of_life_leaves_no_row_behind(agent, client):
    agent.start()
    before = rows(client, "batches")
    agent.say()
    assert rows(client, "batches") == before


def test_a_sign_of_life_before_the_start_is_said_does_not_take_a_job_back(agent, client, fresh_agent):
    agent.start()
    agent.train(10)
    agent.lineage = 2
    agent.train(1)
    second = fresh_agent(client, uid="second", attempt=2)
    second.say()
    summary = client.get(JOB).json()
    assert (summary["attempt"], summary["iteration"], summary["lineage"]) == (2, 11, 2)


def test_an_event_of_an_unknown_kind_costs_only_itself(agent, client):
    body = batch(
        events=[
            {"type": "telepathy", "at": 1.0},
            msgspec.to_builtins(Notice(at=1.0, iteration=0, lineage=1, level="info", code="x", message="kept")),
        ]
    )
    assert post(client, msgspec.msgpack.encode(body)).status_code == 200
    codes = [notice["code"] for notice in client.get(f"{JOB}/notices").json()["notices"]]
    assert codes == ["unknown_events", "x"]


def test_unknown_fields_of_a_newer_agent_are_ignored(client):
    body = batch(mood="good", events=[{"type": "stall", "at": 1.0, "iteration": 1, "lineage": 1,
                                       "kind": "restore", "seconds": 2.0, "colour": "red"}])  # fmt: skip
    assert post(client, msgspec.msgpack.encode(body)).status_code == 200
    assert rows(client, "stalls") == 1


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_shown_as_what_it_is(agent, client, loss):
    agent.start()
    agent.train(3, loss=loss)
    assert client.get(JOB).json()["loss"] == str(loss)
    (series,) = client.get(f"{JOB}/timeline").json()["series"]
    assert series["metrics"]["loss"]["mean"] == [str(loss)] * 3
    assert client.get("/metrics").status_code == 200


def test_json_is_taken_too_and_answered_as_json(client):
    samples = {"iteration": [1], "lineage": [1], "at": [1.0], "seconds": [0.1], "stall_seconds": [0.0],
               "data_seconds": [0.0], "metrics": {"loss": ["nan"]}}  # fmt: skip
    reply = client.post("/api/v1/ingest", json=batch(samples=samples, iteration=1))
    assert reply.json() == {"acked": 0, "version": 0}
    assert client.get(JOB).json()["loss"] == "nan"


def test_a_compressed_batch_is_taken(client):
    body = gzip.compress(msgspec.msgpack.encode(batch()))
    assert post(client, body, **{"Content-Encoding": "gzip"}).status_code == 200


def zstd(content):
    return compression.compress(content, 3)


def test_a_batch_compressed_with_zstd_is_taken(client):
    body = zstd(msgspec.msgpack.encode(batch()))
    assert post(client, body, **{"Content-Encoding": "zstd"}).status_code == 200


def test_zeros_that_compress_well_are_taken(agent, client):
    agent.start()
    columns = {name: bytes(8 * 10_000) for name in ("seconds", "stall_seconds", "data_seconds")}
    samples = {"iteration": list(range(1, 10_001)), "metrics": {"loss": bytes(80_000)}, **columns}
    body = zstd(msgspec.msgpack.encode(batch(lane="samples", samples=samples, iteration=10_000)))
    assert post(client, body, **{"Content-Encoding": "zstd"}).status_code == 200


@pytest.mark.parametrize(("pack", "name"), [(zstd, "zstd"), (gzip.compress, "gzip")])
@pytest.mark.parametrize("size", [5 * 2**20, 50 * 2**20])
def test_a_bomb_is_refused_by_its_size_or_by_its_ratio(client, pack, name, size):
    reply = post(client, pack(bytes(size)), **{"Content-Encoding": name})
    assert (reply.status_code, reply.json()["error"]) == (413, "too_large")


@pytest.mark.parametrize("body", [b"", b"not zstd", zstd(b"cut short" * 100)[:-3], zstd(b"one") + zstd(b"two")])
def test_what_zstd_did_not_make_is_refused(client, body):
    reply = post(client, body, **{"Content-Encoding": "zstd"})
    assert (reply.status_code, reply.json()["error"]) == (422, "invalid_batch")


def test_a_small_body_that_unpacks_to_a_huge_one_is_refused(client):
    body = gzip.compress(bytes(50 * 2**20))
    assert len(body) < 2**20
    reply = post(client, body, **{"Content-Encoding": "gzip"})
    assert (reply.status_code, reply.json()["error"]) == (413, "too_large")


def test_a_body_over_the_limit_is_refused(client):
    assert post(client, bytes(9 * 2**20)).status_code == 413


@ON_SQLITE
@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"job": "../etc"}, "job name"),
        ({"sequence": -1}, "sequence"),
        ({"iteration": 2**60}, "iteration"),
        ({"uid": ""}, "uid"),
        ({"protocol": 99}, "update the server"),
        ({"rank": "first"}, "rank"),
        ({"samples": {"iteration": [1, 2], "lineage": [1]}}, "columns differ"),
    ],
)  # fmt: skip
def test_what_is_not_a_batch_is_refused_in_words(client, fields, word):
    reply = post(client, msgspec.msgpack.encode(batch(**fields)))
    assert (reply.status_code, reply.json()["error"]) == (422, "invalid_batch")
    assert word in reply.json()["message"]
    assert client.get("/api/v1/jobs").json()["jobs"] == []


@ON_SQLITE
@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\x01", b"{}", bytes(1000)])
def test_garbage_is_refused(client, body):
    assert post(client, body).status_code == 422


def test_another_type_of_body_is_refused(client):
    reply = client.post("/api/v1/ingest", content=b"x", headers={"Content-Type": "text/plain"})
    assert reply.status_code == 415
    assert post(client, b"x", **{"Content-Encoding": "br"}).status_code == 415


def test_numbers_that_no_column_holds_cost_only_their_event(client):
    stall = {"type": "stall", "at": 1.0, "iteration": 2**63, "lineage": 1, "kind": "restore", "seconds": 1.0}
    nan = stall | {"iteration": 1, "seconds": math.nan}
    assert post(client, msgspec.msgpack.encode(batch(events=[stall, nan]))).status_code == 200
    assert rows(client, "stalls") == 0


def test_an_iteration_that_was_not_measured_does_not_hide_how_long_the_others_are(agent, client, clock):
    agent.start()
    agent.train(1, seconds=math.nan)
    agent.train(3, seconds=60.0)
    clock.now += 100
    assert client.get(JOB).json()["status"] == "running"


NO_TIMES = [math.nan, math.inf, -1.0, 1e18, 253402300800.0]


def pages_are_fine(client):
    page = {"Accept": "text/html"}
    for path in ("/", "/jobs/char-gpt", "/jobs/char-gpt/live", f"{JOB}/timeline", JOB, "/metrics"):
        assert client.get(path, headers=page).status_code == 200, path


@pytest.mark.parametrize("at", NO_TIMES)
def test_an_event_at_no_time_is_left_out_and_told(agent, client, at):
    agent.start()
    agent.train(3, Notice(at=at, iteration=1, lineage=1, level="info", code="x", message="y"),
               Stall(at=at, iteration=1, lineage=1, kind="restore", seconds=1.0))  # fmt: skip
    agent.checkpoint(snapshot_started_at=at, persist_seconds=at * 1e9)
    assert (rows(client, "stalls"), notices(client)) == (0, ["unknown_events"])
    (only,) = client.get(f"{JOB}/checkpoints").json()["checkpoints"]
    assert (only["state"], only["snapshot_started_at"], only["persist_seconds"]) == ("durable", None, None)
    pages_are_fine(client)


@pytest.mark.parametrize("at", NO_TIMES)
def test_a_batch_sent_at_no_time_was_sent_when_it_came(agent, client, clock, at):
    agent.at = at
    agent.train(3)
    (attempt,) = client.get(f"{JOB}/timeline").json()["attempts"]
    assert attempt["started_at"] == clock.now
    assert set(client.get(f"{JOB}/timeline").json()["series"][0]["at"]) == {clock.now}
    pages_are_fine(client)


@pytest.mark.parametrize("seconds", [-1.0, 1e300, math.inf])
def test_seconds_that_nothing_takes_were_not_measured(agent, client, seconds):
    agent.start()
    agent.train(3, Stall(at=1.0, iteration=1, lineage=1, kind="restore", seconds=seconds), seconds=seconds)
    assert rows(client, "stalls") == 0
    assert client.get(f"{JOB}/timeline").json()["series"][0]["seconds"]["mean"] == ["nan"] * 3
    assert client.get(JOB).json()["status"] == "running"
    pages_are_fine(client)


def measured(count, rows=1, name="m{}"):
    return Samples(iteration=list(range(1, rows + 1)), lineage=[1] * rows, at=[1.0] * rows, seconds=[0.1] * rows,
                   stall_seconds=[0.0] * rows, data_seconds=[0.0] * rows,
                   metrics={name.format(number): [1.0] * rows for number in range(count)})  # fmt: skip


@pytest.mark.parametrize(
    "samples", [measured(101), measured(1, name="n" * 201), measured(3, name="n" * 300 + "{}")]
)
def test_too_many_metrics_cost_neither_the_batch_nor_its_events(agent, client, samples):
    for _ in range(2):
        agent.say(Stall(at=1.0, iteration=1, lineage=1, kind="restore", seconds=1.0), samples=samples)
    assert (rows(client, "stalls"), notices(client)) == (2, ["metrics_left_out"])
    kept = client.get(JOB).json()["metrics"]
    assert 1 <= len(kept) <= 100
    assert max(map(len, kept)) <= 200
    pages_are_fine(client)


def test_over_many_batches_no_more_metrics_are_summed_up(agent, client):
    agent.say(samples=measured(80))
    agent.say(samples=measured(80, name="other-{}"))
    assert len(client.get(JOB).json()["metrics"]) == 100


def reported(agent, client, losses):
    count = len(losses)
    samples = measured(0, rows=count)
    samples.metrics = {"loss": losses}
    agent.say(samples=samples)
    return client.get(JOB).json()["loss"]


def test_a_loss_that_is_reported_now_and_then_stands_in_between(agent, client):
    for _ in range(30):
        last = reported(agent, client, [math.nan] * 9 + [2.0])
    assert last == 2.0
    assert reported(agent, client, [math.nan] * 7) == 2.0


@pytest.mark.parametrize("batches", [1, 5, 20])
def test_a_loss_that_is_no_number_any_more_is_shown_as_that(agent, client, batches):
    reported(agent, client, [2.0] * 300)
    for _ in range(batches):
        last = reported(agent, client, [math.nan] * 15)
    assert last == "nan"


def test_a_loss_reported_now_and_then_that_becomes_no_number_is_shown_as_that(agent, client):
    reported(agent, client, ([math.nan] * 9 + [2.0]) * 20)
    assert reported(agent, client, [math.nan] * 30) == "nan"


def test_a_replayed_spool_does_not_take_a_job_back(agent, client):
    agent.start()
    agent.train(10)
    second = agent.restarted()
    second.start(previous_exit="killed by SIGKILL")
    second.train(10)
    late = Batch(job="char-gpt", uid="first", attempt=1, rank=0, sequence=99, sent_at=1.0, iteration=11, lineage=1,
                 samples=Samples(iteration=[11], lineage=[1], at=[1.0], seconds=[9.0], stall_seconds=[0.0],
                                 data_seconds=[0.0], metrics={"loss": [9.0]}))  # fmt: skip
    agent.send(msgspec.msgpack.encode(late))
    summary = client.get(JOB).json()
    assert (summary["iteration"], summary["attempt"], summary["loss"], summary["restarts"]) == (20, 2, 2.5, 1)


def test_only_the_current_attempt_is_a_sign_of_life(agent, client, clock):
    agent.start()
    second = agent.restarted()
    second.start()
    clock.now += 100
    agent.train(3)
    assert client.get(JOB).json()["last_contact_seconds"] == 100
    second.say()
    assert client.get(JOB).json()["last_contact_seconds"] == 0


def test_an_attempt_after_a_deleted_store_is_the_current_one_and_told(agent, client, clock, fresh_agent):
    clock.now += 3660
    agent.start()
    agent.train(20)
    newest = agent.restarted()
    newest.start()
    newest.train(5)
    lost = newest.checkpoint()
    fresh = fresh_agent(client, uid="fresh", attempt=1, at=newest.at + 3600)
    fresh.start()
    fresh.train(2)
    fresh.say(Inventory(at=fresh.at, checkpoints=[]))
    newest.train(1)
    summary = client.get(JOB).json()
    assert (summary["attempt"], summary["iteration"], notices(client)) == (1, 2, ["attempts_restarted"])
    (only,) = client.get(f"{JOB}/checkpoints").json()["checkpoints"]
    assert (only["id"], only["state"]) == (lost, "missing")
    assert client.get(f"{JOB}/desired").json()["latest_attempt"] == 2


def test_the_spool_of_an_attempt_that_was_never_heard_is_not_a_newer_one(agent, client):
    second = agent.restarted()
    second.start()
    agent.start()
    agent.train(5)
    assert (client.get(JOB).json()["attempt"], notices(client)) == (2, [])


def test_other_ranks_are_stored_and_do_not_say_where_the_job_is(agent, client, fresh_agent):
    agent.start()
    agent.train(5)
    other = fresh_agent(client, rank=1, uid=agent.uid)
    other.train(2)
    assert client.get(JOB).json()["iteration"] == 5
    assert rows(client, "chunks") == 2


def test_the_acknowledgement_tells_of_a_new_version(agent, client):
    agent.start()
    client.patch(f"{JOB}/desired", json={"budget": 0.02}, headers={"If-Match": '"0"'})
    assert agent.say().version == 1


def test_how_an_attempt_ended_before_is_kept(agent, client):
    agent.start()
    second = agent.restarted()
    second.start(previous_exit="killed by SIGKILL", resumed_from=None)
    attempts = client.get(f"{JOB}/timeline").json()["attempts"]
    assert [one["previous_exit"] for one in attempts] == [None, "killed by SIGKILL"]


def test_an_attempt_whose_start_comes_late_is_known_from_its_first_batch(agent, client):
    agent.train(3)
    agent.say(AttemptStarted(at=5.0, iteration=0, lineage=1, host="late"))
    (attempt,) = client.get(f"{JOB}/timeline").json()["attempts"]
    assert (attempt["host"], attempt["last_iteration"]) == ("late", 3)


def notices(client):
    return [notice["code"] for notice in client.get(f"{JOB}/notices").json()["notices"]]


def test_other_content_under_the_same_name_is_acknowledged_left_out_and_told_once(agent, client):
    agent.start()
    agent.train(5)
    agent.train(5)
    for sequence in (1, 2, 2):
        agent.sequence = sequence
        ack = agent.say(Stall(at=1.0, iteration=2, lineage=1, kind="snapshot_wait", seconds=0.3))
        assert ack.acked == sequence
    assert rows(client, "stalls") == 0
    assert notices(client) == ["batch_conflict"]


def test_the_same_batch_is_the_same_whether_it_comes_compressed_or_not(agent, client):
    agent.start()
    agent.train(5)
    body = agent.sent[-1]
    assert post(client, gzip.compress(body), **{"Content-Encoding": "gzip"}).status_code == 200
    assert notices(client) == []


def names(client):
    found = ask(
        client.app.state.services.settings.database, "SELECT uid, rank, count(*) FROM batches GROUP BY uid, rank"
    )
    return {(uid, rank): count for uid, rank, count in found}


@pytest.fixture
def five_attempts(agent, client, fresh_agent):
    """Of a job that was killed four times; the first one had a second rank."""
    attempts = [agent]
    for number in range(5):
        if number:
            attempts.append(attempts[-1].restarted(f"attempt-{number + 1}"))
        attempts[-1].start()
        attempts[-1].train(2)
        attempts[-1].train(2)
        if not number:
            fresh_agent(client, uid=agent.uid, rank=1).train(1)
    return attempts


def test_of_attempts_before_the_last_three_one_name_a_rank_is_kept(five_attempts, client):
    assert names(client) == {
        ("first", 0): 1, ("first", 1): 1, ("attempt-2", 0): 1,
        ("attempt-3", 0): 3, ("attempt-4", 0): 3, ("attempt-5", 0): 3,
    }  # fmt: skip


def test_a_batch_whose_name_was_pruned_is_still_kept_once(five_attempts, client):
    before = rows(client, "chunks")
    for attempt in five_attempts:
        for body in list(attempt.sent):
            attempt.send(body)
    assert rows(client, "chunks") == before
    assert notices(client) == []


def test_what_a_pruned_attempt_had_not_sent_yet_is_stored(five_attempts, client):
    before = rows(client, "chunks")
    late = five_attempts[0]
    late.train(1)
    late.send(late.sent[-1])
    assert rows(client, "chunks") == before + 1


def nested(field, encoding):
    """A batch with a field that is a list in a list in a list, 100,000 deep."""
    if encoding == "json":
        deep = b"[" * 100_000 + b"]" * 100_000
        return msgspec.json.encode(batch())[:-1] + b',"' + field.encode() + b'":' + deep + b"}"
    whole = msgspec.msgpack.encode(batch())
    deep = bytes([0x91]) * 100_000 + bytes([0xC0])
    return bytes([whole[0] + 1]) + whole[1:] + msgspec.msgpack.encode(field) + deep


@ON_SQLITE
@pytest.mark.parametrize("encoding", ["msgpack", "json"])
@pytest.mark.parametrize("field", ["unheard_of", "events", "samples"])
def test_a_body_nested_without_end_is_refused(client, field, encoding):
    kind = {"Content-Type": f"application/{encoding}"}
    reply = client.post("/api/v1/ingest", content=nested(field, encoding), headers=kind)
    assert (reply.status_code, reply.json()["error"]) == (422, "invalid_batch")


def test_a_body_of_unsaid_length_over_the_limit_is_refused(client):
    parts = (bytes(2**20) for _ in range(9))
    reply = client.post("/api/v1/ingest", content=parts, headers={"Content-Type": "application/msgpack"})
    assert (reply.status_code, reply.json()["error"]) == (413, "too_large")


@pytest.mark.parametrize("body", [b"", b"not gzip", gzip.compress(b"cut short" * 100, mtime=0)[:-10]])
def test_a_body_that_cannot_be_decompressed_is_refused(client, body):
    reply = post(client, body, **{"Content-Encoding": "gzip"})
    assert (reply.status_code, reply.json()["error"]) == (422, "invalid_batch")
