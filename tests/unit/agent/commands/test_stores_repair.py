from __future__ import annotations

import json
import os
import socket
import subprocess
import time

import msgspec
import pytest

from holdfast.protocol.messages import MAX_ATTEMPT, MAX_LINEAGE
from holdfast.store import Attempt, Ending, Lineage, Pins, Store, newest_pins, open_store
from holdfast.store.s3_keys import Seen
from tests.support import object_servers
from tests.support.fake_server import Holdfast

JOB = "gpt"
WRONG_ATTEMPTS = [5_000_000, MAX_ATTEMPT, 2**53]
WRONG_LINEAGES = [5_000_000, MAX_LINEAGE, 10**9, 10**9 + 1]


@pytest.fixture(params=["directory", pytest.param("moto", marks=pytest.mark.processes)])
def url(request: pytest.FixtureRequest, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "directory":
        return str(tmp_path)
    return object_servers.use(monkeypatch, request.getfixturevalue("moto").address)


def ended_pid() -> int:
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def put(store: Store, name: str, record: object) -> None:
    data = msgspec.json.encode(record)
    if hasattr(store, "root"):
        path = store.root / JOB / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    else:
        store.bucket.put_new(f"{JOB}/{name}", data)


def put_attempt(store: Store, number: int, **changes: object) -> None:
    attempt = Attempt(number=number, uid="x", host=socket.gethostname(), pid=ended_pid(), started_at=time.time())
    name = f"{number:08d}" if hasattr(store, "root") else f"{number:08d}-x"
    put(store, f"attempts/{name}.json", msgspec.structs.replace(attempt, **changes))
    if not hasattr(store, "root"):
        seen = Seen(checkpoints=[], lineages=[])
        if number > 1:
            survey = store.survey(JOB)
            seen = Seen(
                checkpoints=[each.path for each in survey.counting_folders()], lineages=survey.counting_lineages()
            )
        put(store, f"attempts/{name}.seen.json", seen)


def put_lineage(store: Store, number: int, attempt: int = 1, iteration: int = 0) -> None:
    record = Lineage(number=number, iteration=iteration, parent=None, order=None, attempt=attempt, created_at=0.0)
    name = f"{number:06d}" if hasattr(store, "root") else f"{number:06d}-{attempt:08d}"
    put(store, f"lineages/{name}.json", record)


def commit(store: Store, iteration: int, lineage: int = 1, attempt: int = 1) -> None:
    name = f"{iteration:012d}-{lineage}"
    writer = store.begin(JOB, name, attempt, 100)
    writer.write("rank-0.safetensors", [b"bytes"])
    writer.commit(b"{}")


@pytest.fixture
def store(url: str) -> Store:
    """Of a job that has ended, with two checkpoints."""
    store = open_store(url)
    put_attempt(store, 1)
    put_lineage(store, 1)
    commit(store, 10)
    commit(store, 20)
    return store


def numbers(store: Store) -> tuple[set[int], set[int]]:
    """Of attempts and lineages on record, in range or not."""
    records = open_store(store.url).record_names(JOB)
    return tuple({each.number for each in records if each.kind == kind} for kind in ("attempt", "lineage"))


@pytest.mark.parametrize("number", WRONG_ATTEMPTS)
def test_attempts_with_implausible_numbers_are_removed_after_asking(
    holdfast: Holdfast, store: Store, number: int
) -> None:
    put_attempt(store, number)
    put(store, f"endings/{number:08d}.json", Ending(attempt=number, reason="finished", iterations=1, at=0.0))
    listed = holdfast("store", "repair", store.url, "--dry-run")
    assert (listed.exit_code, numbers(store)[0]) == (0, {1, number})
    assert f"attempts/{number:08d}" in listed.stdout
    refused = holdfast("store", "repair", store.url)  # nobody there to say yes
    assert (refused.exit_code, numbers(store)[0]) == (1, {1, number})
    done = holdfast("store", "repair", store.url, "--yes")
    assert (done.exit_code, numbers(store)) == (0, ({1}, {1}))
    assert [each.kind for each in store.record_names(JOB) if each.kind == "ending"] == []
    store = open_store(store.url)
    assert store.acquire_attempt(JOB, "next").number == 2
    commit(store, 30, attempt=2)
    assert store.checkpoints(JOB) == ["000000000010-1", "000000000020-1", "000000000030-1"]
    store.delete(JOB, "000000000010-1", 2)
    assert "nothing to remove" in holdfast("store", "repair", store.url, "--ended").stdout


@pytest.mark.parametrize("number", WRONG_LINEAGES)
def test_lineages_with_implausible_numbers_are_removed(holdfast: Holdfast, store: Store, number: int) -> None:
    put_lineage(store, number)
    assert holdfast("store", "repair", store.url, "--yes").exit_code == 0
    assert (numbers(store), len(store.checkpoints(JOB))) == (({1}, {1}), 2)
    store.append(JOB, Lineage(number=2, iteration=20, parent=None, order=None, attempt=1, created_at=0.0))
    assert numbers(store)[1] == {1, 2}


@pytest.mark.parametrize("number", [5_000_000, MAX_LINEAGE])
def test_a_lineage_with_checkpoints_stays(holdfast: Holdfast, store: Store, number: int) -> None:
    put_lineage(store, number)
    commit(store, 30, lineage=number)
    put_lineage(store, number - 1)  # not far before one that is needed
    found = holdfast("store", "repair", store.url, "--yes")
    assert found.exit_code == 0
    assert number in numbers(store)[1]
    assert len(store.checkpoints(JOB)) == 3
    assert ("holdfast fork" in found.stdout) == (number == MAX_LINEAGE)


def test_a_sound_store_stays_as_it_is(holdfast: Holdfast, store: Store) -> None:
    for number in (2, 3, 900, 1_900):
        put_attempt(store, number)
        put_lineage(store, number, attempt=number)
    before = store.record_names(JOB)
    found = holdfast("store", "repair", store.url, "--yes")
    assert (found.exit_code, "nothing to remove" in found.stdout) == (0, True)
    assert open_store(store.url).record_names(JOB) == before


def test_numbers_that_begin_high_are_those_of_a_job_whose_store_was_emptied(holdfast: Holdfast, url: str) -> None:
    store = open_store(url)
    for number in (7_000, 7_001):
        put_attempt(store, number)
        put_lineage(store, number, attempt=number)
    holdfast("store", "repair", url, "--yes")
    assert numbers(store) == ({7_000, 7_001}, {7_000, 7_001})


def test_pins_that_are_noted_under_a_removed_attempt_are_noted_again(holdfast: Holdfast, store: Store) -> None:
    put_attempt(store, 5_000_000)
    store.append(JOB, Pins(attempt=5_000_000, checkpoints=("000000000010-1",), at=1.0))
    assert "1 pin to be recorded again by attempt 1" in holdfast("store", "repair", store.url, "--dry-run").stdout
    holdfast("store", "repair", store.url, "--yes")
    store = open_store(store.url)
    assert newest_pins(store, JOB) == Pins(attempt=1, checkpoints=("000000000010-1",), at=1.0)
    store.acquire_attempt(JOB, "next")
    store.append(JOB, Pins(attempt=2, checkpoints=(), at=2.0))
    assert newest_pins(store, JOB).checkpoints == ()


def test_pins_are_noted_again_when_a_repair_was_interrupted_before(holdfast: Holdfast, store: Store) -> None:
    put(store, "pins/05000000-000001.json", Pins(attempt=5_000_000, checkpoints=("000000000010-1",), at=1.0))
    holdfast("store", "repair", store.url, "--yes")
    assert newest_pins(open_store(store.url), JOB).attempt == 1


@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize("number", [5_000_000, 2**53])
def test_a_job_that_may_be_running_is_passed_over(
    holdfast: Holdfast, store: Store, where: str, number: int
) -> None:
    put_attempt(store, number, **({"pid": os.getpid()} if where == "here" else {"host": "another.example"}))
    found = holdfast("store", "repair", store.url, "--yes")
    expected = f"in process {os.getpid()}" if where == "here" else "may still run on another.example"
    assert (found.exit_code, expected in found.stdout, numbers(store)[0]) == (0, True, {1, number})
    holdfast("store", "repair", store.url, "--yes", "--ended")
    assert numbers(store)[0] == ({1, number} if where == "here" else {1})


@pytest.mark.parametrize("record", [{}, {"pid": -1}, {"pid": 10**18}])
def test_a_record_that_nobody_can_have_written_is_that_of_no_running_job(
    holdfast: Holdfast, store: Store, record: dict[str, int]
) -> None:
    put_attempt(store, 5_000_000, **record) if record else put(
        store, "attempts/05000000.json" if hasattr(store, "root") else "attempts/05000000-x.json", {}
    )
    holdfast("store", "repair", store.url, "--yes")
    assert numbers(store)[0] == {1}


def test_an_attempt_that_begins_meanwhile_stops_it(
    holdfast: Holdfast, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_attempt(store, 5_000_000)

    def somebody_starts_the_job(*_: object, **__: object) -> bool:
        open_store(store.url).acquire_attempt(JOB, "meanwhile")
        return True

    monkeypatch.setattr("typer.confirm", somebody_starts_the_job)
    found = holdfast("store", "repair", store.url)
    assert (found.exit_code, "attempt 5000001 of gpt has started" in found.stderr) == (1, True)
    assert numbers(store)[0] == {1, 5_000_000, 5_000_001}


def test_what_a_removed_attempt_left_half_done_is_a_leftover(holdfast: Holdfast, store: Store) -> None:
    put_attempt(store, 5_000_000)
    store.begin(JOB, "000000000030-1", 5_000_000, 100).write("rank-0.safetensors", [b"bytes"])
    holdfast("store", "repair", store.url, "--yes")
    (left,) = open_store(store.url).leftovers(JOB)
    assert left.what == "left unfinished by attempt 5000000"
    holdfast("store", "gc", store.url, "--yes")
    assert open_store(store.url).leftovers(JOB) == []


def test_the_way_out_that_an_exhausted_number_names_is_one(holdfast: Holdfast, store: Store) -> None:
    put_attempt(store, MAX_ATTEMPT)
    with pytest.raises(OSError, match="run holdfast store repair") as caught:
        open_store(store.url).acquire_attempt(JOB, "next")
    command = caught.value.strerror.partition("run holdfast ")[2].split()
    assert holdfast(*command, "--yes").exit_code == 0
    assert open_store(store.url).acquire_attempt(JOB, "next").number == 2


def test_only_the_job_that_was_asked_for_is_repaired(holdfast: Holdfast, store: Store) -> None:
    put_attempt(store, 5_000_000)
    open_store(store.url).acquire_attempt("another", "x")
    assert holdfast("store", "repair", store.url, "--job", "another", "--yes").exit_code == 0
    assert numbers(store)[0] == {1, 5_000_000}


def test_scripts_are_not_asked(holdfast: Holdfast, store: Store) -> None:
    put_attempt(store, 2**53)
    assert holdfast("store", "repair", store.url, "--json").exit_code == 2
    (plan,) = json.loads(holdfast("store", "repair", store.url, "--json", "--dry-run").stdout)
    assert (plan["job"], plan["stays"], plan["running"], plan["newest_left"]) == (JOB, 2, None, 1)
    assert {item["removed"] for item in plan["items"]} == {False}


@pytest.mark.processes
def test_an_attempt_whose_folders_hold_checkpoints_stays_in_a_bucket(
    holdfast: Holdfast, tmp_path: object, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Attempts with lower numbers could neither replace nor delete these."""
    store = open_store(object_servers.use(monkeypatch, request.getfixturevalue("moto").address))
    put_attempt(store, 1)
    put_attempt(store, 5_000_000)
    commit(store, 10, attempt=5_000_000)
    holdfast("store", "repair", store.url, "--yes")
    assert (numbers(store)[0], store.checkpoints(JOB)) == ({1, 5_000_000}, ["000000000010-1"])


@pytest.mark.processes
def test_what_an_attempt_saw_goes_before_the_attempt(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """On its own it would rule out all that attempts with lower numbers write."""
    store = open_store(object_servers.use(monkeypatch, request.getfixturevalue("moto").address))
    put_attempt(store, 1)
    put_attempt(store, 5_000_000)
    assert [each.name for each in store.record_names(JOB) if each.number > 1] == [
        "attempts/05000000-x.seen.json",
        "attempts/05000000-x.json",
    ]
