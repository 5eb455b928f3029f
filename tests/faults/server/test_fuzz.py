"""Mutated batches and edits: none breaks the server or the job, and nothing is stored that is out of bounds."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter

import msgspec
import numpy as np
import pytest
from sqlalchemy import Float, Integer, select

from holdfast.protocol import ids
from holdfast.protocol.field_types import MAX_ATTEMPT, MAX_INTEGER, MAX_ITERATION, MAX_LINEAGE, RankCheckpointTimes
from holdfast.protocol.wire import (
    AttemptFinished,
    AttemptStarted,
    Batch,
    Checkpoint,
    DesiredStateApplied,
    Gap,
    IntervalDecision,
    Inventory,
    LineageStarted,
    Notice,
    OrderStateChange,
    Origin,
    RankTotals,
    RestoreModeReport,
    Samples,
    Stall,
    TensorNorms,
    VerificationReport,
)
from holdfast_server import models
from holdfast_server.control import deletion
from holdfast_server.samples.limits import MAX_AHEAD_SECONDS

JOB = "/api/v1/jobs/char-gpt"
T = 1_790_000_000.0
POINT = "000000000010-1"
REFUSALS = {"ingest": {200, 409, 413, 415, 422}, "desired": {200, 409, 413, 422}}

INTEGERS = [-1, 0, 1, 7, 999, 1001, 1002, 1003, 2**31 - 1, 2**31, MAX_LINEAGE, MAX_LINEAGE + 1, 10**12 - 1, 10**12,
            2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1]  # fmt: skip
FLOATS = [
    -1.0,
    0.0,
    -0.0,
    1e-320,
    0.5,
    1e10,
    1e11,
    1.8e9,
    4e9,
    2.6e11,
    1e300,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
]
WORDS = ["", " ", "\0", "x" * 5000, "é" * 300, "🙂", "../..", "'; --", POINT, "000000000010-999999999",
         "9" * 12 + "-1", "000000000010-1000000000", "10-1", "٣" * 12 + "-1", "durable", "nan"]  # fmt: skip
ODD = [None, True, [], {}, [[]], {"x": 1}, b"", b"1234567", bytes(16)]


def events():
    place = {"at": T, "iteration": 10, "lineage": 1}
    return [
        AttemptStarted(host="node-1", versions={"torch": "2"}, owner="ada", labels={"team": "x"}, **place),
        LineageStarted(parent=POINT, origin=Origin(job="other", checkpoint=POINT, digest="d"), **place),
        Checkpoint(id=POINT, kind="scheduled", state="durable", payload_bytes=10, persist_seconds=1.0,
                   snapshot_started_at=T, ranks=[RankCheckpointTimes(
                       rank=1, snapshot_seconds=1.0, stall_seconds=0.1, persist_seconds=2.0)], **place),
        Stall(kind="snapshot_wait", seconds=2.0, **place),
        IntervalDecision(policy="goodput", interval=5, budget=0.03, predicted_overhead=0.02,
                         measured_overhead=0.01, profile={"iteration_seconds": 1.0}, **place),
        DesiredStateApplied(version=0, **place),
        OrderStateChange(order="o", state="restored", seconds=1.0, safety_checkpoint=POINT, **place),
        RestoreModeReport(mode="relaunch", reason="r", start_seconds=3.0, **place),
        Inventory(at=T, checkpoints=[POINT], pinned=[POINT]),
        VerificationReport(at=T, request=1, checkpoint=POINT, verdict="sound", seconds=1.0,
                 tensors=TensorNorms(name=["w"], elements=[3], norm=[1.0], largest=[1.0], nan=[0], inf=[0])),
        RankTotals(at=T, lineage=1, first_iteration=1, last_iteration=9, iterations=9, seconds=1.0,
                 longest_seconds=0.5),
        Notice(level="warning", code="c", message="m", **place),
        AttemptFinished(reason="finished", **place),
    ]  # fmt: skip


def samples(luck, as_bytes):
    count = luck.randrange(1, 6)
    first = luck.randrange(1, 2000)
    numbers, times = np.arange(first, first + count), T + np.arange(count, dtype=float)
    seconds = np.full(count, 0.5)
    if not as_bytes:
        numbers, times, seconds = numbers.tolist(), times.tolist(), seconds.tolist()
        return Samples(
            iteration=numbers, lineage=[1] * count, at=times, seconds=seconds, metrics={"loss": seconds}
        )
    spans = seconds.astype("<f8").tobytes()
    return Samples(
        iteration=numbers.astype("<i8").tobytes(), at=times.astype("<f8").tobytes(), seconds=spans,
        metrics={"loss": spans},
    )  # fmt: skip


def batch(luck, number):
    """A sound one, of the attempt that runs or of another."""
    known = luck.random() < 0.7
    made = Batch(
        job=luck.choice(["char-gpt"] * 9 + ["another"]),
        uid="first" if known else f"uid-{luck.randrange(20)}",
        attempt=1 if known else luck.randrange(1, 5),
        rank=luck.choice([0, 0, 0, 1, 7]),
        lane=luck.choice(["control", "samples"]),
        sequence=1000 + number,
        sent_at=T,
        iteration=luck.randrange(100),
        lineage=luck.choice([1, 1, 2]),
        samples=samples(luck, as_bytes=luck.random() < 0.5) if luck.random() < 0.6 else None,
        events=luck.sample(events(), luck.randrange(3)),
        gaps=[Gap(lineage=1, first_iteration=1, last_iteration=5, dropped=3)] * luck.randrange(2),
    )
    return msgspec.to_builtins(made, builtin_types=(bytes,))


def places(tree, found=()):
    """Every (container, key) of a tree."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    out = []
    for key, child in children:
        out += [(tree, key), *places(child)]
    return out


def odd_value(luck, value):
    """Another value: mostly of the same type, at a bound of it or beyond."""
    if luck.random() < 0.15:
        return copy.deepcopy(luck.choice([*ODD, *INTEGERS, *FLOATS, *WORDS]))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return luck.choice(INTEGERS)
    if isinstance(value, float):
        return luck.choice(FLOATS)
    if isinstance(value, str):
        return luck.choice(WORDS)
    if isinstance(value, bytes):
        longer = value + luck.randbytes(8)
        return luck.choice([value[:-1], value[8:], longer, luck.randbytes(len(value)), b"\xff" * len(value)])
    if isinstance(value, list):
        return luck.choice([value * 2, value[1:], value[::-1], [luck.choice(INTEGERS)] * max(1, len(value))])
    return luck.choice(ODD)


def mutate(luck, tree):
    for _ in range(luck.randrange(1, 4)):
        found = places(tree)
        if not found:
            return
        container, key = luck.choice(found)
        how = luck.random()
        if how < 0.1:
            del container[key]
        elif how < 0.2 and isinstance(container, dict):
            container[luck.choice(WORDS)] = copy.deepcopy(container[key])
        elif how < 0.2:
            container.append(copy.deepcopy(container[key]))
        else:
            container[key] = odd_value(luck, container[key])


def finite(value):
    """As JSON has it: what it has no number for is a word."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(child) for key, child in value.items()}
    return [finite(child) for child in value] if isinstance(value, list) else value


def report(client, luck, number):
    tree = batch(luck, number)
    if luck.random() < 0.95:
        mutate(luck, tree)
    if luck.random() < 0.5:
        body, kind = msgspec.json.encode(finite(tree)), "application/json"
    else:
        body, kind = msgspec.msgpack.encode(tree), "application/msgpack"
    return client.post("/api/v1/ingest", content=body, headers={"Content-Type": kind})


EDITS = {
    "budget": 0.03, "policy": "goodput", "every": 50, "every_seconds": 600.0, "paused": False,
    "retention": "last 5, every 1000", "checkpoint_request": True, "probe_request": True,
}  # fmt: skip


def edit(client, luck):
    changes = {name: EDITS[name] for name in luck.sample(list(EDITS), luck.randrange(1, 4))}
    mutate(luck, changes)
    version = client.get(f"{JOB}/desired").json()["version"]
    held = luck.choice([str(version)] * 8 + ["-1", "9" * 15])
    body = msgspec.json.encode(finite(changes))
    return client.patch(f"{JOB}/desired", content=body, headers={"If-Match": f'"{held}"'})


# ---- what may be stored ----------------------------------------------------------------------

MAY_LIE_AHEAD = {"every_until", "expires_at", "next_at"}


def out_of_bounds(client):
    """(table, column, value) of everything stored of jobs that is beyond its bounds."""

    def look():
        wrong = []
        with client.app.state.services.database.read() as session:
            for table in [*deletion._tables(), models.table(models.JobRecord)]:
                for column in table.columns:
                    values = session.scalars(select(column).where(column.is_not(None)).distinct())
                    judge = judge_of(column)
                    wrong += [(table.name, column.name, value) for value in values if not judge(value)]
        return wrong

    def judge_of(column):
        name = column.name
        if isinstance(column.type, Float):
            if (name == "at" or name.endswith("_at")) and name not in MAY_LIE_AHEAD:
                return lambda value: 0 <= value <= T + MAX_AHEAD_SECONDS
            return math.isfinite
        if isinstance(column.type, Integer):
            least = -1 if "sequence" in name else 0
            most = MAX_INTEGER + 2**20  # sums of what is reported, bytes for one
            for part, largest in (
                ("attempt", MAX_ATTEMPT),
                ("lineage", MAX_LINEAGE),
                ("iteration", MAX_ITERATION),
            ):
                if name in (part, f"first_{part}", f"last_{part}", f"latest_{part}", f"from_{part}"):
                    most = largest
            return lambda value: least <= value <= most
        if name in ("checkpoint", "parent", "against", "from_checkpoint"):
            return ids.is_checkpoint_id
        return lambda _: True

    return look()


READ = ["", "/timeline", "/timeline?x=time", "/goodput", "/ranks", "/forks", "/plan", "/checkpoints", "/edits",
        "/notices", "/restores", "/alerts", "/export/samples.csv", "/export/checkpoints.csv", "/export/trace.json",
        "/desired", "/preview"]  # fmt: skip
PAGES = ["/", "/jobs/char-gpt", "/jobs/char-gpt/live", "/jobs/char-gpt/stalls", "/jobs/char-gpt/ranks", "/alerts",
         f"/jobs/char-gpt/checkpoints/{POINT}", "/metrics"]  # fmt: skip


def fuzz(client, agent, requests, seed):
    luck, answered = random.Random(seed), Counter()
    agent.start()
    agent.train(20)
    agent.checkpoint(10)
    for number in range(requests):
        kind = "desired" if number % 5 == 4 else "ingest"
        reply = edit(client, luck) if kind == "desired" else report(client, luck, number)
        assert reply.status_code in REFUSALS[kind], (seed, number, kind, reply.status_code, reply.text)
        answered[kind, reply.status_code] += 1
    return answered


def judged(client, fresh_agent):
    """The job can be read, and its next attempt, numbered as an agent numbers it, trains and takes orders."""
    assert out_of_bounds(client) == []
    for path in [*(JOB + path for path in READ), *PAGES]:
        reply = client.get(path)
        assert reply.status_code < 500, (path, reply.text)
    wanted = client.get(f"{JOB}/desired").json()
    numbers = {"attempt": wanted["latest_attempt"] + 1, "lineage": wanted["latest_lineage"] + 1}
    later = fresh_agent(client, uid="later", at=T + MAX_AHEAD_SECONDS, iteration=3000, **numbers)
    later.start()
    later.train(20)
    point = later.checkpoint()
    told = client.get(JOB).json()
    assert (told["attempt"], told["lineage"], told["iteration"]) == (*numbers.values(), 3020)
    assert told["status"] in ("running", "paused")
    if told["open_order"]:
        client.post(f"{JOB}/restores/{told['open_order']['id']}/cancel").raise_for_status()
    placed = client.post(f"{JOB}/restores", json={"checkpoint": point, "key": "afterwards"})
    assert placed.status_code == 201, placed.text


def test_mutated_reports_and_edits_break_nothing(client, agent, fresh_agent):
    answered = fuzz(client, agent, 250, seed=1)
    judged(client, fresh_agent)
    assert answered["ingest", 200] > 20  # it is not all refused at the door
    assert answered["ingest", 422] > 20


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 4))
def test_thousands_of_mutated_reports_and_edits_break_nothing(client, agent, fresh_agent, seed):
    answered = fuzz(client, agent, 2500, seed)
    judged(client, fresh_agent)
    print(
        f"\n{answered.total()} requests: " + ", ".join(f"{n} × {k} {s}" for (k, s), n in sorted(answered.items()))
    )
