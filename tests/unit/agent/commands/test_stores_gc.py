from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
import torch

from holdfast.store import Attempt, Lineage, Pins, open_store
from tests.support.fake_server import FakeServer, Holdfast
from tests.support.handmade_checkpoints import commit

JOB = "gpt"


def checkpoint(iteration: int, lineage: int = 1) -> str:
    return f"{iteration:012d}-{lineage}"


def committed(root: Path, job: str = JOB) -> list[int]:
    return [int(each[:12]) for each in open_store(root).checkpoints(job)]


def write_attempt(root: Path, **changes: object) -> None:
    """Let the newest attempt be one of another process, by default one that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    attempt = Attempt(number=1, uid="x", host=socket.gethostname(), pid=ended.pid, started_at=time.time())
    path = root / JOB / "attempts" / "00000001.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(attempt, **changes)))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Ten checkpoints of a job that has ended."""
    for iteration in range(10, 110, 10):
        commit(tmp_path, {"w": torch.zeros(4)}, job=JOB, iteration=iteration)
    write_attempt(tmp_path)
    return tmp_path


def test_what_retention_no_longer_wants_is_removed_after_asking(holdfast: Holdfast, store: Path) -> None:
    listed = holdfast("store", "gc", store, "--keep", "4", "--dry-run")
    assert (listed.exit_code, len(committed(store))) == (0, 10)
    assert "6 items, 24.7 kB would be removed; gpt keeps 4 checkpoints" in listed.stdout
    refused = holdfast("store", "gc", store, "--keep", "4")  # nobody there to say yes
    assert (refused.exit_code, len(committed(store))) == (1, 10)
    done = holdfast("store", "gc", store, "--keep", "4", "--yes")
    assert (done.exit_code, committed(store)[-2:], len(committed(store))) == (0, [90, 100], 4)
    assert "removed 6 items, 24.7 kB" in done.stderr
    assert "nothing to remove" in holdfast("store", "gc", store, "--keep", "4").stdout


def test_what_is_pinned_stays_unless_it_is_named(holdfast: Holdfast, store: Path) -> None:
    pins = (checkpoint(20), checkpoint(30))
    open_store(store).append(JOB, Pins(attempt=1, checkpoints=pins, at=0.0))
    holdfast("store", "gc", store, "--keep", "2", "--yes")
    assert (committed(store)[:2], len(committed(store))) == ([20, 30], 4)
    named = holdfast("store", "gc", store, "--keep", "2", "--job", JOB, "--drop", checkpoint(20), "--yes")
    assert "selected with --drop, although pinned" in named.stdout
    assert (committed(store)[0], len(committed(store))) == (30, 3)


def test_rules_of_retention_are_followed_and_each_item_says_why_it_goes(holdfast: Holdfast, store: Path) -> None:
    rules = ("--retention", "last 2, every 50", "--yes")
    done = holdfast("store", "gc", store, *rules)
    assert "not kept by 'last 2, every 50'" in done.stdout
    assert committed(store) == [10, 50, 90, 100]
    small = holdfast("store", "gc", store, "--retention", "size 9kB", "--yes", "--json")
    assert [item["why"] for item in json.loads(small.stdout)[0]["items"]] == ["the total exceeds 9kB"] * 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--retention", "lst 2"), "'lst 2' is not a rule: use last 5"),
        (("--retention", "last 2", "--keep", "3"), "give one of them"),
    ],
)
def test_rules_that_are_none_remove_nothing(
    holdfast: Holdfast, store: Path, options: tuple[str, ...], why: str
) -> None:
    refused = holdfast("store", "gc", store, *options, "--yes")
    assert (refused.exit_code, why in refused.stderr, len(committed(store))) == (2, True, 10)


def test_what_an_open_order_of_the_server_names_stays(holdfast: Holdfast, store: Path, server: FakeServer) -> None:
    server.order = {"id": "a", "job": JOB, "checkpoint": checkpoint(30), "state": "requested"}
    holdfast("store", "gc", store, "--keep", "2", "--yes", "--server", server.url)
    assert committed(store) == [30, 100]
    gone = holdfast("store", "gc", store, "--keep", "1", "--yes", "--server", "http://127.0.0.1:1")
    assert (gone.exit_code, committed(store)) == (3, [30, 100])


def test_a_session_would_have_removed_the_same(holdfast: Holdfast, store: Path) -> None:
    job = open_store(store)
    for number, parent, left in ((1, None, None), (2, checkpoint(20), checkpoint(50))):
        lineage = Lineage(
            number=number, iteration=0, parent=parent, order=None, attempt=1, created_at=0.0, left=left
        )
        job.append(JOB, lineage)
    commit(store, {"w": torch.zeros(4)}, job=JOB, iteration=30, lineage=2, kind="requested")
    commit(store, {"w": torch.zeros(4)}, job=JOB, iteration=40, lineage=2)
    holdfast("store", "gc", store, "--keep", "1", "--yes")
    # where the lineage began, the way back, what was asked for, what a restart goes on from
    assert job.checkpoints(JOB) == [checkpoint(20), checkpoint(30, 2), checkpoint(40, 2), checkpoint(50)]


def test_what_a_restart_goes_on_from_stays_even_if_others_were_trained_later(
    holdfast: Holdfast, store: Path
) -> None:
    lineage = Lineage(number=2, iteration=20, parent=checkpoint(20), order=None, attempt=1, created_at=0.0)
    job = open_store(store)
    job.append(JOB, lineage)
    job.delete(JOB, checkpoint(20), 1)
    holdfast("store", "gc", store, "--keep", "1", "--yes")
    assert committed(store) == [10, 100]


def test_leftovers_of_crashes_and_damage_go_as_well(holdfast: Holdfast, store: Path) -> None:
    open_store(store).acquire_attempt(JOB, "another")
    names = (
        ".tmp-00000001-000000000110-1-abcd", ".tmp-00000002-000000000110-1-abcd",
        "000000000010-1.damaged-00000002-abcd",
    )  # fmt: skip
    for name in names:
        (store / JOB / name).mkdir()
        (store / JOB / name / "rank-0.safetensors").write_bytes(bytes(1000))
    (store / JOB / "notes").mkdir()
    found = json.loads(holdfast("store", "gc", store, "--yes", "--while-running", "--json").stdout)
    assert [(item["name"], item["why"], item["size_bytes"], item["removed"]) for item in found[0]["items"]] == [
        (".tmp-00000001-000000000110-1-abcd", "left unfinished by attempt 1", 1000, True),
        ("000000000010-1.damaged-00000002-abcd", "set aside as damaged by attempt 2", 1000, True),
    ]
    assert (store / JOB / names[1]).exists()  # a helper of the newest attempt may be writing it
    assert sorted(path.name for path in (store / JOB).iterdir() if "0000" not in path.name) == [
        ".lock", "attempts", "endings", "lineages", "notes",
    ]  # fmt: skip
    assert len(committed(store)) == 10


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_job_that_may_be_running_is_passed_over_and_its_writing_left_alone(
    holdfast: Holdfast, store: Path, where: str
) -> None:
    if where == "here":
        write_attempt(store, pid=os.getpid())
    else:
        write_attempt(store, host="another.example")
    being_written = store / JOB / ".tmp-00000001-000000000110-1-abcd"
    being_written.mkdir()
    told = holdfast("store", "gc", store, "--keep", "4", "--yes")
    expected = f"runs here, as attempt 1 in process {os.getpid()}" if where == "here" else "run on another.example"
    assert (told.exit_code, expected in told.stdout, len(committed(store))) == (0, True, 10)
    holdfast("store", "gc", store, "--keep", "4", "--yes", "--while-running")
    assert (len(committed(store)), being_written.exists()) == (4, True)


def test_a_process_that_only_got_the_number_is_not_the_job(holdfast: Holdfast, store: Path) -> None:
    write_attempt(store, pid=os.getpid(), started_at=time.time() - 86400 * 365)
    holdfast("store", "gc", store, "--keep", "4", "--yes")
    assert len(committed(store)) == 4


def test_a_named_checkpoint_goes_whatever_retention_says(holdfast: Holdfast, store: Path) -> None:
    result = holdfast("store", "gc", store, "--job", JOB, "--drop", checkpoint(100), "--yes")
    assert (result.exit_code, committed(store)) == (0, list(range(10, 100, 10)))
    unknown = holdfast("store", "gc", store, "--job", JOB, "--drop", checkpoint(5), "--yes")
    assert (unknown.exit_code, "has no checkpoint 000000000005-1" in unknown.stderr) == (1, True)
    assert holdfast("store", "gc", store, "--drop", checkpoint(90)).exit_code == 2


def test_an_attempt_that_begins_meanwhile_stops_it(
    holdfast: Holdfast, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def somebody_starts_the_job(*_: object, **__: object) -> bool:
        open_store(store).acquire_attempt(JOB, "meanwhile")
        return True

    monkeypatch.setattr("typer.confirm", somebody_starts_the_job)
    result = holdfast("store", "gc", store, "--keep", "4")
    assert (result.exit_code, len(committed(store))) == (1, 10)
    assert "attempt 2 of gpt has started" in result.stderr


def test_scripts_are_not_asked(holdfast: Holdfast, store: Path) -> None:
    assert holdfast("store", "gc", store, "--json").exit_code == 2
    (plan,) = json.loads(holdfast("store", "gc", store, "--json", "--dry-run", "--keep", "4").stdout)
    assert (plan["job"], plan["stays"], plan["running"]) == (JOB, 4, None)
    assert [item["removed"] for item in plan["items"]] == [False] * 6
