"""A value that operators change while ranks die: each iteration uses the recorded value, on all ranks."""

import bisect
from pathlib import Path

import pytest

from holdfast.protocol.field_types import MAX_ITERATION
from holdfast.store import Lineage, RecordedValue, open_store
from holdfast.store.records import ancestry
from tests.support.multi_rank import RankLauncher
from tests.support.value_workloads import lines

pytestmark = pytest.mark.crash

WORK = "tests.support.value_workloads.train"
WORLD = 2


@pytest.mark.timeout(480)
@pytest.mark.parametrize(("kills", "changes"), [(8, 50), pytest.param(20, 200, marks=pytest.mark.long)])
def test_each_iteration_uses_the_recorded_value_on_all_ranks(tmp_path: Path, kills: int, changes: int) -> None:
    launcher = RankLauncher("tests.support.value_workloads")
    try:
        for seed in range(kills):
            with launcher.start(
                WORLD, WORK, place=str(tmp_path), seed=seed, changes=changes, to_the_end=False
            ) as ranks:
                assert any(rank.wait() for rank in ranks)
        launcher.run(WORLD, WORK, place=str(tmp_path), seed=kills, changes=changes, to_the_end=True)
    finally:
        launcher.close()
    used = [lines(tmp_path / f"used-{rank}") for rank in range(WORLD)]
    recorded = RecordedValues(tmp_path / "store")
    wrong = [
        (rank, attempt, lineage, iteration, value, expected)
        for rank, iterations in enumerate(used)
        for attempt, lineage, iteration, value in iterations
        if value != (expected := recorded.at(attempt, lineage, iteration))
    ]
    assert wrong == []
    assert recorded.changes >= changes
    assert len({lineage for _, lineage, *_ in used[0]}) > 2
    iterations = {(lineage, iteration) for _, lineage, iteration, _ in used[0]}
    assert len(used[0]) > len(iterations), "nothing was repeated"


class RecordedValues:
    """What the records of a store say: the last of a change counts, in the lineages that training comes from.

    An attempt knows the records up to its own: operators also change values while iterations are repeated.
    """

    def __init__(self, path: Path) -> None:
        store = open_store(path)
        self._records, self._lineages = store.records("job", RecordedValue), store.records("job", Lineage)
        self._known: dict[tuple[int, int], list[tuple[int, float]]] = {}

    @property
    def changes(self) -> int:
        return len({each.change for each in self._records})

    def at(self, attempt: int, lineage: int, iteration: int) -> float:
        """Return the value of an iteration in an attempt."""
        if (attempt, lineage) not in self._known:
            records = [each for each in self._records if each.attempt <= attempt]
            last = {each.change: each.number for each in records}
            path = self._path(lineage, MAX_ITERATION)
            self._known[attempt, lineage] = [(0, 1.0)] + [
                (each.iteration, 1.0 if each.value is None else float(each.value))
                for each in records
                if each.number == last[each.change] and each.iteration <= path.get(each.lineage, -1)
            ]
        values = self._known[attempt, lineage]
        return values[bisect.bisect_left([at for at, _ in values], iteration) - 1][1]

    def _path(self, lineage: int, most: int) -> dict[int, int]:
        """Return the last iteration that counts by lineage; a start at iteration 0 repeats the one before it."""
        path = {number: min(last, most) for number, last, _ in ancestry(self._lineages, lineage)}
        oldest = min(path)
        return path | (self._path(oldest - 1, path[oldest]) if oldest > 1 else {})
