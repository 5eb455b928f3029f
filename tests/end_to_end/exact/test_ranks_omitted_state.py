"""Proof that the oracle sees what is new with several ranks: each of it, left out of a resume, makes it differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.multi_rank import RankLauncher
from tests.support.training_log import first_difference

BEGIN, END = 5, 8
"""Where the checkpoint is, which with two batches to an update is between these; where a resume is judged."""
JOBS: dict[tuple[str, int], dict[str, Any]] = {
    ("ddp", 3): {"accumulation": 2},
    ("ddp", 4): {},
    ("fsdp", 2): {},
    ("fsdp", 4): {},
}
OWN = {
    "Python's generator": "random state of Python",
    "NumPy's generator": "random state of NumPy",
    "torch's generator": "random state of torch",
    "a torch.Generator": "noise",
    "a random.Random": "dice",
    "a numpy.random.Generator": "choice",
    "buffers": "buffers",
    "averaged buffers": "ema",
    "the loop's best": "loop",
}
ITEMS = [
    *((("ddp", 3), item, named) for item, named in {**OWN, "gradients": "optimizer"}.items()),
    (("ddp", 4), "bucket layout", "parameters"),
    (("ddp", 3), "bucket layout", "parameters"),
    (("fsdp", 2), "rows of parameters", "parameters"),
    (("fsdp", 2), "rows of moments", "optimizer"),
    (("fsdp", 2), "rows of averaged weights", "ema"),
    (("fsdp", 2), "torch's generator", "random state of torch"),
    (("fsdp", 2), "buffers", "buffers"),
]


@pytest.fixture(scope="module")
def left(ranks: RankLauncher, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """Stores of jobs that were killed after iteration BEGIN."""
    stores = {}
    for (kind, world_size), options in JOBS.items():
        stores[kind, world_size] = tmp_path_factory.mktemp("left out")
        where = {"store": str(stores[kind, world_size]), "iteration": BEGIN}
        ranks.run(world_size, "tests.support.exact_multi_rank_workloads.leave", kind=kind, **where, **options)
    return stores


def differences(job, without, left, ranks, undisturbed_ranks):
    """By rank, of what comes after the resume."""
    (kind, world_size), options = job, JOBS[job]
    where = {"store": str(left[job]), "iteration": BEGIN, "until": END, "without": without}
    logs = ranks.run(world_size, "tests.support.exact_multi_rank_workloads.resumed", kind=kind, **where, **options)
    expected = undisturbed_ranks(kind, world_size, **options)
    assert all(sorted(log) == list(range(BEGIN + 1, END + 1)) for log in logs)
    return [first_difference(*pair) for pair in zip(expected, logs, strict=True)]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_nothing_left_out_makes_no_difference(job, left, ranks, undisturbed_ranks):
    assert not any(differences(job, None, left, ranks, undisturbed_ranks))


@pytest.mark.parametrize(("job", "item", "named"), ITEMS, ids=str)
def test_each_item_left_out_is_seen_and_named(job, item, named, left, ranks, undisturbed_ranks):
    found = differences(job, item, left, ranks, undisturbed_ranks)
    assert any(named in difference.partition(": ")[2].split(", ") for difference in found if difference)
