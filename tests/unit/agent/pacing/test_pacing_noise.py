"""The controller under loads from outside that come and go: 0, 50 and 100 % of the cores by turns."""

from __future__ import annotations

import pytest

from benchmarks.pacing.noisy import BUDGET, SIMULATED_JOBS, simulated_noise

SEEDS = range(4)


@pytest.mark.parametrize("name", SIMULATED_JOBS)
def test_the_budget_is_kept_while_other_load_comes_and_goes(name: str) -> None:
    runs = [simulated_noise(SIMULATED_JOBS[name], seed) for seed in SEEDS]
    records = [record for record, _ in runs]
    assert min(record.intervals for record in records) >= 40
    assert sum(record.over_seconds for record in records) <= 0.1 * sum(record.seconds for record in records)
    assert max(record.longest_over for record in records) <= 20
    assert max(overhead for _, overhead in runs) <= BUDGET * 1.05


@pytest.mark.parametrize("name", SIMULATED_JOBS)
def test_an_interval_of_one_is_left_within_ten_checkpoints_while_load_comes_and_goes(name: str) -> None:
    runs = [simulated_noise(SIMULATED_JOBS[name], seed, iterations=500)[0] for seed in range(12)]
    assert max(record.every_iteration for record in runs) <= 10


@pytest.mark.parametrize("name", SIMULATED_JOBS)
def test_without_other_load_most_of_the_budget_is_used(name: str) -> None:
    overheads = [simulated_noise(SIMULATED_JOBS[name], seed, iterations=1500, shares=(0.0,))[1] for seed in SEEDS]
    assert sum(overheads) / len(overheads) == pytest.approx(BUDGET * 0.8, rel=0.25)
