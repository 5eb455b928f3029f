"""What becomes of a field with an odd value: the event is left out, the value is, or it is cut."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import msgspec
import pytest

from holdfast_server.ingest import batches

NOW = 1_790_000_000.0
POINT = {"at": NOW - 5, "iteration": 3, "lineage": 1}
CHECKPOINT = {"type": "checkpoint", **POINT, "id": "000000000003-1", "kind": "scheduled", "state": "durable"}
STALL = {"type": "stall", **POINT, "kind": "restore", "seconds": 1.0}
PACED = {
    "type": "paced", **POINT, "policy": "goodput", "interval": 5, "budget": 0.01,
    "predicted_overhead": 0.1, "measured_overhead": 0.1,
}  # fmt: skip
MACHINE = {"type": "machine", **POINT}
INVENTORY = {"type": "inventory", "at": NOW, "checkpoints": ["000000000003-1"]}
LINEAGE = {"type": "lineage_started", **POINT}
ORIGIN = {"job": "a", "checkpoint": "000000000003-1", "digest": "d"}
RANK_TIMES = {"rank": 0, "snapshot_seconds": 1.0, "stall_seconds": 1.0, "persist_seconds": 1.0}
STARTED = {"type": "attempt_started", **POINT}
BATCH = {
    "protocol": 2, "job": "j", "uid": "u", "attempt": 1, "rank": 0, "sequence": 1, "sent_at": NOW,
    "iteration": 3, "lineage": 1,
}  # fmt: skip
GAP = {"lineage": 1, "first_iteration": 1, "last_iteration": 2, "dropped": 1}
NOT_FINITE = (math.nan, math.inf, -math.inf)
LONG = "x" * 5000
LATEST = NOW + 300

Encoding = Literal["msgpack", "json"]


def encode(batch: dict[str, Any], encoding: Encoding) -> bytes:
    if encoding == "msgpack":
        return msgspec.msgpack.encode(batch)
    return json.dumps(batch).encode()


def received(event: dict[str, Any], encoding: Encoding = "msgpack", **changes: Any) -> Any:
    """Return the event as it is taken in, from a batch with another event, which no odd value takes along."""
    batch = {**BATCH, **changes, "events": [event, STALL]}
    taken = batches.decode(encode(batch, encoding), encoding, now=NOW).batch.events
    assert taken[-1].__struct_config__.tag == "stall"
    assert len(taken) in (1, 2)
    return taken[0] if len(taken) == 2 else None


@pytest.mark.parametrize(
    ("event", "field", "values"),
    [
        (STALL, "iteration", [-1, 10**12, 2**64 - 1, "3", 3.5, None, True]),
        (STALL, "lineage", [-1, 10**9]),
        (STALL, "at", [-1.0, 253402300800.0, None, "x", *NOT_FINITE]),
        (STALL, "seconds", [-0.5, 1.1e10, *NOT_FINITE, None, "x"]),
        (STALL, "kind", ["x", None]),
        (CHECKPOINT, "payload_bytes", [-1, 2**53 + 1, 1.5]),
        (CHECKPOINT, "store_free_bytes", [-1, 2**53 + 1]),
        (CHECKPOINT, "durable_iteration", [-1, 10**12]),
        (CHECKPOINT, "id", ["", "3-1", "000000000004-1", "000000000003-2", "000000000003-1\n"]),
        (CHECKPOINT, "snapshot_seconds", ["x", []]),
        (PACED, "budget", [*NOT_FINITE, None]),
        (PACED, "interval", [-1, 2**53 + 1, 1.5]),
        (PACED, "profile", [{"a": "b"}, []]),
        (INVENTORY, "checkpoints", [["000000000003-1", ""], "000000000003-1", ["000000000003-1"] * 100_001]),
        (INVENTORY, "pinned", [["x"]]),
        (INVENTORY, "deleted", [{"x": "old"}, {"000000000003-1": 1}]),
        (LINEAGE, "parent", ["", "x"]),
        (LINEAGE, "origin", [{**ORIGIN, "job": "a b"}, {**ORIGIN, "checkpoint": "3"}]),
        (STARTED, "pid", [-1, 2**53 + 1]),
        (STARTED, "versions", [{"torch": 2}]),
    ],
)
def test_an_event_with_a_required_field_that_cannot_be_is_left_out(event, field, values):
    assert received(event) is not None
    for value in values:
        assert received({**event, field: value}) is None, value


@pytest.mark.parametrize(
    ("event", "field", "values"),
    [
        (CHECKPOINT, "snapshot_seconds", [-0.5, 1.1e10, *NOT_FINITE]),
        (CHECKPOINT, "snapshot_started_at", [-1.0, 1e300, *NOT_FINITE]),
        (PACED, "measured_overhead", NOT_FINITE),
        (PACED, "write_bytes_per_second", NOT_FINITE),
        (MACHINE, "gpu_share", NOT_FINITE),
    ],
)
def test_a_measurement_that_cannot_be_is_left_out_of_its_event(event, field, values):
    for value in values:
        assert getattr(received({**event, field: value}), field) is None, value
        if not math.isfinite(value):
            assert getattr(received({**event, field: str(value)}, "json"), field) is None


def test_a_number_without_limits_may_be_negative():
    assert received({**MACHINE, "gpu_share": -2.0}).gpu_share == -2.0
    assert received({**PACED, "budget": -1.0}).budget == -1.0


def test_texts_and_mappings_are_cut():
    assert received({**CHECKPOINT, "reason": LONG}).reason == LONG[:4000]
    started = received({**STARTED, "host": LONG, "versions": {str(number): "v" for number in range(300)}})
    assert (len(started.host), len(started.versions)) == (4000, 200)
    assert received({**STARTED, "versions": {LONG: LONG}}).versions == {LONG[:200]: LONG[:4000]}
    many = {str(number): LONG for number in range(600)}
    report = received({"type": "configuration", "at": NOW, "section": "environment", "values": many})
    assert (len(report.values), set(map(len, report.values.values()))) == (500, {4000})


def test_figures_of_a_profile_that_were_not_measured_are_left_out():
    figures = {"a": 1.0, "b": -1.0, "c": math.nan, "d": math.inf}
    paced = received({**PACED, "profile": figures, "spread": figures})
    assert paced.profile == {"a": 1.0}
    assert list(paced.spread) == list(figures)


def test_times_of_a_rank_that_cannot_be_are_left_out():
    odd = [
        {"rank": -1}, {"rank": 2**53 + 1}, {"stall_seconds": math.nan}, {"persist_seconds": 1e11},
        {"snapshot_seconds": -1.0},
    ]  # fmt: skip
    ranks = [RANK_TIMES, *({**RANK_TIMES, **change} for change in odd)]
    assert [times.rank for times in received({**CHECKPOINT, "ranks": ranks}).ranks] == [0]


def test_times_are_corrected_by_the_clock_of_the_sender():
    event = {**CHECKPOINT, "at": NOW + 1e6, "snapshot_started_at": NOW + 990, "persist_started_at": 5.0}
    checkpoint = received(event, sent_at=NOW + 1000)
    assert (checkpoint.at, checkpoint.snapshot_started_at, checkpoint.persist_started_at) == (
        LATEST,
        NOW - 10,
        0.0,
    )
    assert received({**STALL, "at": NOW + 301}).at == LATEST
    assert received({**STALL, "at": NOW + 299}).at == NOW + 299


@pytest.mark.parametrize("sent_at", [math.nan, math.inf, -1.0, 1e300])
def test_a_batch_whose_time_cannot_be_is_of_now(sent_at):
    assert (
        batches.decode(encode({**BATCH, "sent_at": sent_at}, "msgpack"), "msgpack", now=NOW).batch.sent_at == NOW
    )


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("job", ["", "a b", "x" * 101, 1]),
        ("uid", ["", "u" * 101]),
        ("attempt", [-1, 2**31]),
        ("rank", [-1, 2**53 + 1]),
        ("sequence", [-1, 2**53 + 1, "1"]),
        ("iteration", [-1, 10**12]),
        ("lineage", [-1, 10**9]),
        ("lane", ["x"]),
        ("protocol", [3]),
        ("events", [[STALL] * 5001]),
        ("gaps", [[GAP] * 1001, *([{**GAP, name: -1}] for name in GAP), [{**GAP, "last_iteration": 10**12}]]),
    ],
)
def test_a_batch_with_a_field_that_cannot_be_is_invalid_and_the_answer_names_the_field(field, values):
    for value in values:
        with pytest.raises(batches.InvalidBatch) as refused:
            batches.decode(encode({**BATCH, field: value}, "msgpack"), "msgpack", now=NOW)
        assert (refused.value.status, refused.value.code) == (422, "invalid_batch")
        assert field in str(refused.value), str(refused.value)
