"""What a store guarantees for records, including those that another program wrote."""

from __future__ import annotations

import json

import msgspec
import pytest

from holdfast.errors import Fenced
from holdfast.store import Attempt, Ending, Hold, Lineage, Pins, Store, newest_attempt, newest_pins, open_store
from holdfast.testing.contract import Contract
from holdfast.testing.small_checkpoints import FIRST, JOB, SECOND, commit, lineage


def attempt_name(store: Store, number: int) -> str:
    record = Attempt(number=number, uid="uid", host="h", pid=1, started_at=1.0)
    return f"attempts/{store.record_name(record)}"


def put_lineage(store: Store, number: int, /, **changes: object) -> None:
    """Create the record of lineage `number`, with `changes` that Holdfast would not write."""
    record = msgspec.to_builtins(lineage()) | {"number": number} | changes
    name = f"lineages/{store.record_name(lineage(number))}"
    store.create_record(JOB, name, json.dumps(record).encode())


class RecordContract(Contract):
    """Tests of records."""

    def test_a_record_that_does_not_exist_cannot_be_read(self, store: Store) -> None:
        with pytest.raises(FileNotFoundError):
            store.read_record(JOB, "endings/00000001.json")

    def test_a_lineage_is_recorded_once(self, store: Store) -> None:
        store.append(JOB, lineage(2))
        store.append(JOB, lineage(1))
        with pytest.raises(FileExistsError):
            store.append(JOB, lineage(2))
        assert store.records(JOB, Lineage) == [lineage(1), lineage(2)]
        store.acquire_attempt(JOB, "second")
        with pytest.raises(FileExistsError):
            store.append(JOB, lineage(2, attempt=2))
        store.append(JOB, lineage(3, attempt=2))
        assert store.records(JOB, Lineage) == [lineage(1), lineage(2), lineage(3, attempt=2)]

    @pytest.mark.parametrize("number", [2**31, 2**53, 10**40])
    def test_an_attempt_with_an_impossible_number_is_ignored(self, store: Store, number: int) -> None:
        record = {"number": number, "uid": "uid", "host": "h", "pid": 1, "started_at": 1.0}
        store.create_record(JOB, attempt_name(store, number), json.dumps(record).encode())
        assert store.latest_attempt(JOB) == 1
        assert [each.number for each in store.records(JOB, Attempt)] == [1]
        newest = newest_attempt(store, JOB)
        assert newest is not None
        assert newest.number == 1
        assert store.acquire_attempt(JOB, "second").number == 2
        commit(store, attempt=2)
        assert store.checkpoints(JOB) == [FIRST]

    @pytest.mark.parametrize("number", [10**9, 10**9 + 1, 10**40])
    def test_a_lineage_with_an_impossible_number_is_ignored(self, store: Store, number: int) -> None:
        put_lineage(store, number)
        store.append(JOB, lineage())
        assert store.records(JOB, Lineage) == [lineage()]

    @pytest.mark.parametrize(
        "change",
        [{"number": 3}, {"number": 10**9}, {"iteration": -1}, {"iteration": 10**12}, {"iteration": 2**70}],
    )
    def test_a_lineage_with_impossible_values_is_ignored(self, store: Store, change: dict[str, int]) -> None:
        store.append(JOB, lineage())
        put_lineage(store, 2, **change)
        assert store.records(JOB, Lineage) == [lineage()]

    @pytest.mark.parametrize("name", ["", "latest", "../000000000001-1", "000000000001-1 ", "٠٠٠٠٠٠٠٠٠٠٠١-1"])
    def test_an_impossible_parent_of_a_lineage_is_dropped(self, store: Store, name: str) -> None:
        put_lineage(store, 2, parent=name, left=name)
        assert store.records(JOB, Lineage) == [lineage(2)]

    def test_a_record_that_is_nested_too_deeply_is_ignored(self, store: Store) -> None:
        store.append(JOB, lineage())
        store.create_record(JOB, f"lineages/{store.record_name(lineage(2))}", b'{"a":' + b"[" * 400_000)
        assert store.records(JOB, Lineage) == [lineage()]

    def test_no_record_gets_a_number_beyond_the_largest(self, store: Store) -> None:
        with pytest.raises(
            OSError,
            match=r"lineage 1000000000 of job exceeds the largest number 999999999.*holdfast fork job latest NEW",
        ):
            store.append(JOB, lineage(10**9))
        with pytest.raises(
            OSError,
            match=r"attempt 2147483648 of job exceeds the largest number 2147483647.*holdfast fork job latest NEW",
        ):
            store.acquire_attempt(JOB, "uid", 2**31)
        assert (store.records(JOB, Lineage), store.latest_attempt(JOB)) == ([], 1)
        store.append(JOB, lineage(999_999_999))
        assert store.acquire_attempt(JOB, "uid", 2**31 - 1).number == 2**31 - 1

    def test_digits_of_other_scripts_are_not_numbers(self, store: Store) -> None:
        name = attempt_name(store, 9).replace("0", "٠").replace("9", "٩")
        store.create_record(JOB, name, b"{}")
        store.create_record(JOB, "٠٠٠٠٠٠٠٠٠٠٠٩-1/manifest.json", b"{}")
        assert (store.latest_attempt(JOB), store.checkpoints(JOB)) == (1, [])

    def test_pins_of_an_impossible_attempt_count_until_there_are_others(self, store: Store, url: str) -> None:
        impossible = Pins(attempt=2**53, checkpoints=(FIRST,), at=1.0)
        store.create_record(JOB, f"pins/{2**53:08d}-000001.json", msgspec.json.encode(impossible))
        assert newest_pins(open_store(url), JOB) == impossible
        others = Pins(attempt=1, checkpoints=(SECOND,), at=2.0)
        store.append(JOB, others)
        assert newest_pins(open_store(url), JOB) == others

    def test_endings_of_attempts_are_recorded(self, store: Store, url: str) -> None:
        assert store.records(JOB, Ending) == []
        ended = [
            Ending(attempt=3, reason="interrupted", iterations=7, at=1.0),
            Ending(attempt=1, reason="ValueError", iterations=0, at=2.0),
        ]
        for each in ended:
            store.append(JOB, each)
        assert open_store(url).records(JOB, Ending) == ended[::-1]
        assert store.records(JOB, Ending, since=2) == ended[:1]
        numbers = [store.acquire_attempt(JOB, uid).number for uid in ("second", "third")]
        assert [each.number for each in open_store(url).records(JOB, Attempt)] == [1, *numbers]
        assert [each.uid for each in store.records(JOB, Attempt, since=3)] == ["third"]
        with pytest.raises(Fenced):
            store.append(JOB, Ending(attempt=2, reason="finished", iterations=9, at=3.0))
        assert (store.latest_attempt(JOB), store.records(JOB, Lineage), store.checkpoints(JOB)) == (3, [], [])

    def test_only_the_newest_pins_count_and_earlier_ones_are_removed(self, store: Store, url: str) -> None:
        assert newest_pins(store, JOB) is None
        recorded = [
            Pins(attempt=1, checkpoints=pins, at=1.0) for pins in ((FIRST,), (FIRST, SECOND), (SECOND,), ())
        ]
        for each in recorded:
            store.append(JOB, each)
            assert newest_pins(store, JOB) == newest_pins(open_store(url), JOB) == each
        assert len(list(store.record_files(JOB, "pins"))) == 1
        assert self.unreferenced(store) == []

    def test_only_the_newest_attempt_records_pins(self, store: Store, url: str) -> None:
        newer, kept = open_store(url), Pins(attempt=1, checkpoints=(FIRST,), at=1.0)
        store.append(JOB, kept)
        newer.acquire_attempt(JOB, "second")
        with pytest.raises(Fenced):
            store.append(JOB, Pins(attempt=1, checkpoints=(), at=2.0))
        assert newest_pins(newer, JOB) == kept
        later = Pins(attempt=2, checkpoints=(SECOND,), at=3.0)
        newer.append(JOB, later)
        assert newest_pins(newer, JOB) == later

    def test_pins_that_cannot_be_read_do_not_count_as_none(self, store: Store, url: str) -> None:
        store.append(JOB, Pins(attempt=1, checkpoints=(FIRST,), at=1.0))
        store.create_record(JOB, "pins/00000001-000009.json", b"{")
        with pytest.raises(OSError, match=r"is not a (Holdfast )?record"):
            newest_pins(open_store(url), JOB)

    def test_a_hold_counts_until_it_is_removed(self, store: Store, url: str) -> None:
        commit(store)
        assert store.records(JOB, Hold) == []
        holds = [Hold(uid=uid, checkpoint=FIRST, at=1.0) for uid in ("one", "two")]
        for each in holds:
            store.append(JOB, each)
        assert open_store(url).records(JOB, Hold) == holds
        store.acquire_attempt(JOB, "second")  # a copy is no attempt of the job
        open_store(url).remove_record(JOB, holds[0].name)
        assert store.records(JOB, Hold) == holds[1:]
