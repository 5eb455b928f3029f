"""Whatever kills a job, and however often: each iteration comes out as in a run that nothing interrupted."""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.exact_job import EPOCHS, SAMPLES, ExactJob, ScriptError, seed_of_start
from tests.support.fork_server import ForkServer
from tests.support.training_log import Log, first_difference

MOMENTS = ("drawn", "backward", "updated", "stepped")
SHAPES = [(1, False), (4, False), (4, True)]
"""(accumulation, whether iterations end between its batches)"""
pytestmark = pytest.mark.filterwarnings(  # the first update of a job may be one that the scaler skips
    "ignore:Detected call of `lr_scheduler.step\\(\\)` before"
)


@dataclass(frozen=True)
class PlannedKill:
    kind: str
    iteration: int
    moment: str


def deaths(chance: random.Random, last: int, at_most: int) -> list[PlannedKill]:
    """Some in a row, anywhere in the job; a quarter of the cases have three or more."""
    count = chance.choice([1, 1, 2, 3 if at_most > 3 else at_most])
    kinds, spots = ("SIGKILL", "SIGTERM", "exception"), sorted(chance.choices(range(1, last + 1), k=count))
    return [PlannedKill(chance.choice(kinds), spot, chance.choice(MOMENTS)) for spot in spots]


def once(log: Log) -> list[int]:
    return [int(index) for record in log.values() for index in record["samples"].split(",")]


@pytest.mark.parametrize(("accumulation", "across"), SHAPES)
def test_an_undisturbed_run_takes_every_sample_once_an_epoch(accumulation, across, undisturbed):
    seen = once(undisturbed(accumulation, across))
    assert sorted(seen[:SAMPLES]) == list(range(SAMPLES))
    assert len(seen) > (EPOCHS - 1) * SAMPLES


@pytest.mark.parametrize(("accumulation", "across"), SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_a_script_that_fails_goes_on_as_if_it_had_not(seed, accumulation, across, tmp_path, undisturbed):
    """Errors of the script, in this process: objects are made anew each time, from another random state."""
    expected, chance = undisturbed(accumulation, across), random.Random(seed)
    seen: Log = {}
    plan = [*deaths(chance, len(expected), 3), None]
    for number, death in enumerate(plan):
        seed = seed_of_start(tmp_path, number)
        job = ExactJob(tmp_path, seed=seed, accumulation=accumulation, across=across)
        try:
            for moment in job.moments():
                job.settle()
                at = job.session.iteration + (moment != "stepped")
                if death is not None and at >= death.iteration and moment == death.moment:
                    raise ScriptError
        except ScriptError:
            pass
        assert first_difference(expected, job.log) is None, f"after {plan[:number]}"
        seen |= job.log
        job.crash()
    assert seen == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("accumulation", "across"), SHAPES)
def test_a_process_that_is_killed_goes_on_as_if_it_had_not_been(
    accumulation, across, workers, tmp_path, undisturbed, fork_server
):
    expected = undisturbed(accumulation, across)
    plan = [PlannedKill("SIGKILL", 2, "backward"), PlannedKill("SIGTERM", len(expected) - 1, "updated")]
    judge(fork_server, tmp_path, expected, plan, accumulation=accumulation, across=across, workers=workers)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_two_hundred_deaths_change_no_bit(accumulation, workers, tmp_path, undisturbed, fork_server):
    """Twenty-five cases each: the eight tests together are two hundred."""
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", time.time_ns() % 2**32))
    print(f"repeat these deaths with HOLDFAST_TEST_SEED={seed}")
    chance = random.Random(f"{seed} {accumulation} {workers}")
    for case in range(25):
        across = accumulation > 1 and chance.random() < 0.3
        expected = undisturbed(accumulation, across)
        plan = deaths(chance, len(expected), 5)
        options = {"accumulation": accumulation, "across": across, "workers": workers}
        judge(fork_server, tmp_path / str(case), expected, plan, every=chance.choice([1, 2, 5]), **options)


def judge(fork_server: ForkServer, place: Path, expected: Log, plan: list[PlannedKill], **options: Any) -> None:
    """Put a job through these deaths and to its end."""
    place.mkdir(exist_ok=True)
    seen: Log = {}
    for number, death in enumerate([*plan, None]):
        spot = (death.kind, death.iteration, death.moment) if death else (None, 0, "")
        orders = dict(zip(("death", "iteration", "moment"), spot, strict=True))
        with fork_server.spawn(
            "tests.support.exact_job_process.live",
            place / "log",
            store=str(place / "store"),
            start=number,
            **orders,
            **options,
        ) as process:
            status = process.run()
            log = dict(map(json.loads, process.all("iteration ")))
            assert status == 0 or death is not None, process.account()
        difference = first_difference(expected, log)
        assert difference is None, f"{difference}; start {number} of {plan} with {options}"
        seen |= log
    assert sorted(seen) == sorted(expected), f"iterations are missing after {plan} with {options}"
