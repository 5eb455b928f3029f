"""A running job that is taken back does again, to the bit, what it did."""

from __future__ import annotations

import pytest

from tests.support.exact_job import ExactJob
from tests.support.training_log import Log, first_difference

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)` before")


@pytest.mark.parametrize(("accumulation", "across"), [(1, False), (4, False), (4, True)])
def test_restores_in_place_one_after_the_other(accumulation, across, tmp_path, undisturbed):
    expected = undisturbed(accumulation, across)
    last = len(expected)
    plan = [(last // 2, 2), (last // 2, last // 2 - 1), (last - 1, 1), (last, last - 2)]
    job = ExactJob(tmp_path, accumulation=accumulation, across=across)
    seen: list[tuple[int, Log]] = []
    for moment in job.moments():
        if moment == "stepped":
            job.settle()
            seen.append((max(job.log), job.log.copy()))
            job.log.clear()
            if plan and job.session.iteration + 1 == plan[0][0]:
                job.session.restore(plan.pop(0)[1])
    job.crash()
    assert not plan
    assert job.session.lineage == 5
    assert [iteration for iteration, _ in seen][-1] == last
    for _, log in seen:
        assert first_difference(expected, log) is None
