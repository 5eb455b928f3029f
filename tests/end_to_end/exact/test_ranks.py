"""Whatever becomes of a job of several ranks: each iteration of each rank comes out as if nothing had."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import restore
from holdfast.store import open_store
from tests.support.exact_job import SAMPLES
from tests.support.exact_multi_rank_job import EPOCHS, batches_of
from tests.support.multi_rank import RankLauncher
from tests.support.training_log import Log, first_difference

MOMENTS = ("drawn", "backward", "updated", "recorded", "stepped")
KINDS = ("SIGKILL", "SIGKILL of all", "SIGTERM of all", "exception")
MORE = [pytest.param("ddp", 4, marks=pytest.mark.long), pytest.param("fsdp", 4, marks=pytest.mark.long)]
JOBS = [("ddp", 3), ("fsdp", 2), *MORE]


@dataclass(frozen=True)
class PlannedRankKill:
    kind: str
    rank: int
    iteration: int
    moment: str


def deaths(chance: random.Random, world_size: int, count: int) -> list[PlannedRankKill]:
    """So many in a row; the first and the last batch and the epoch's edge are likelier than others."""
    last = batches_of(world_size)
    spots = [1, last // 2, last // 2 + 1, last, *range(1, last + 1)]
    return [
        PlannedRankKill(chance.choice(KINDS), chance.randrange(world_size), spot, chance.choice(MOMENTS))
        for spot in sorted(chance.choices(spots, k=count))
    ]


def once(logs: list[Log]) -> list[int]:
    """The samples of all ranks, in the order in which they are dealt out."""
    found: list[int] = []
    for iteration in sorted(logs[0]):
        shares = [list(map(int, log[iteration]["samples"].split(","))) for log in logs]
        found += [index for turn in zip(*shares, strict=True) for index in turn]
    return found


@pytest.mark.parametrize(("kind", "world_size"), JOBS)
def test_an_undisturbed_run_takes_every_sample_once_an_epoch(kind, world_size, undisturbed_ranks):
    seen = once(undisturbed_ranks(kind, world_size))
    padding = -SAMPLES % world_size
    assert sorted(seen[:SAMPLES]) == list(range(SAMPLES))
    assert seen[SAMPLES : SAMPLES + padding] == seen[:padding]
    assert len(seen) == EPOCHS * (SAMPLES + padding)


@pytest.mark.parametrize(("kind", "world_size"), JOBS)
def test_a_job_whose_ranks_die_goes_on_as_if_they_had_not(kind, world_size, ranks, undisturbed_ranks, tmp_path):
    last = batches_of(world_size)
    plan = [
        PlannedRankKill("SIGKILL", 1, 1, "backward"),
        PlannedRankKill("exception", 0, last // 2, "updated"),
        PlannedRankKill("SIGKILL of all", world_size - 1, last // 2 + 1, "drawn"),
        PlannedRankKill("SIGTERM of all", 0, last - 1, "recorded"),
        PlannedRankKill("SIGKILL", 0, last, "stepped"),
    ]
    judge(ranks, tmp_path, undisturbed_ranks(kind, world_size), plan, kind=kind)


@pytest.mark.parametrize(
    ("kind", "world_size", "options"),
    [
        ("fsdp", 2, {"accumulation": 2}),
        ("ddp", 3, {"syncs_buffers": True, "own_head": True, "workers": 2}),
        pytest.param("ddp", 3, {"accumulation": 2}, marks=pytest.mark.long),
        pytest.param("ddp", 3, {"syncs_buffers": True}, marks=pytest.mark.long),
        pytest.param("ddp", 3, {"own_head": True}, marks=pytest.mark.long),
        pytest.param("ddp", 3, {"workers": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_so_does_one_of_another_kind(kind, world_size, options, ranks, undisturbed_ranks, tmp_path):
    plan = [PlannedRankKill("SIGKILL of all", 1, 5, "stepped"), PlannedRankKill("exception", 1, 8, "backward")]
    judge(ranks, tmp_path, undisturbed_ranks(kind, world_size, **options), plan, kind=kind, **options)


@pytest.mark.parametrize(("kind", "damaged"), [("ddp", False), ("fsdp", True)])
def test_compressed_checkpoints_with_parity_resume_exactly_also_repaired(
    kind, damaged, ranks, undisturbed_ranks, tmp_path
):
    pytest.importorskip("numpy")
    # a budget that a job this small keeps: compression pauses otherwise
    options = {"kind": kind, "compress": True, "parity": "10+2", "budget": 1.0, "every": 2, "settles_at": 4}
    death = PlannedRankKill("SIGKILL", 1, 6, "backward")
    newest = []

    def damage() -> None:
        store = open_store(str(tmp_path))
        checkpoint = store.checkpoints("job")[-1]
        manifest = restore.manifest(store, "job", checkpoint)
        newest.append(manifest.iteration)
        assert {file.name.partition(".")[0] for file in manifest.files if file.encoding} == {"rank-0", "rank-1"}
        for file in manifest.files if damaged else ():
            path = store.root / "job" / checkpoint / file.name
            data = bytearray(path.read_bytes())
            data[5000] ^= 1
            path.write_bytes(data)

    begun = judge(ranks, tmp_path, undisturbed_ranks(kind, 2), [death], between=damage, **options)
    assert begun == [1, newest[0] + 1]


@pytest.mark.parametrize(("kind", "world_size"), [("ddp", 3), ("fsdp", 2)])
def test_checkpoints_of_each_iteration_change_no_bit(kind, world_size, ranks, undisturbed_ranks, tmp_path):
    """Beside a run that knows nothing of Holdfast."""
    expected = undisturbed_ranks(kind, world_size)
    judge(ranks, tmp_path, expected, [], kind=kind, max_in_flight=3)
    taken = len(open_store(str(tmp_path)).checkpoints("job"))
    assert taken > 3  # more than the last: three may be in flight, however slow the disk is


@pytest.mark.parametrize(
    ("kind", "world_size", "by_all"),
    [
        ("ddp", 3, False),
        ("fsdp", 2, True),
        pytest.param("ddp", 3, True, marks=pytest.mark.long),
        pytest.param("fsdp", 2, False, marks=pytest.mark.long),
    ],
)
def test_all_ranks_are_taken_back_together_and_do_again_what_they_did(
    kind, world_size, by_all, ranks, undisturbed_ranks, tmp_path
):
    expected, times = undisturbed_ranks(kind, world_size), 10
    options = {"store": str(tmp_path), "seed": world_size, "times": times, "by_all": by_all}
    found = ranks.run(world_size, "tests.support.exact_multi_rank_workloads.taken_back", kind=kind, **options)
    spots = [[(begun, max(log)) for begun, log in stretches] for stretches, _ in found]
    assert spots == [spots[0]] * world_size
    assert [lineage for _, lineage in found] == [times + 1] * world_size
    for number, (stretches, _) in enumerate(found):
        for begun, log in stretches:
            assert sorted(log) == list(range(begun + 1, max(log) + 1))
            assert first_difference(expected[number], log) is None
    assert spots[0][-1][1] == batches_of(world_size)


@pytest.mark.parametrize(
    ("kind", "world_size", "damaged_rank"),
    [
        ("ddp", 3, 1),
        ("fsdp", 2, 0),
        pytest.param("ddp", 3, 0, marks=pytest.mark.long),
        pytest.param("fsdp", 2, 1, marks=pytest.mark.long),
    ],
)
def test_what_one_rank_cannot_verify_is_refused_by_all_and_training_goes_on(
    kind, world_size, damaged_rank, ranks, undisturbed_ranks, tmp_path
):
    found = ranks.run(
        world_size,
        "tests.support.exact_multi_rank_workloads.refused",
        kind=kind,
        store=str(tmp_path),
        damaged_rank=damaged_rank,
    )
    assert [log for log, _, _ in found] == undisturbed_ranks(kind, world_size)
    assert [lineage for _, lineage, _ in found] == [1] * world_size
    (refusal,) = [text for _, _, told in found for text in told if "refused" in text]  # rank 0 tells, once
    assert f"rank-{damaged_rank}.safetensors" in refusal


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "world_size"), JOBS)
def test_twenty_deaths_change_no_bit(kind, world_size, ranks, undisturbed_ranks, tmp_path):
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", time.time_ns() % 2**32))
    print(f"repeat these deaths with HOLDFAST_TEST_SEED={seed}")
    chance = random.Random(f"{seed} {kind} {world_size}")
    expected = undisturbed_ranks(kind, world_size)
    for case, count in enumerate([1, 3, 4, 5, 7]):
        plan = deaths(chance, world_size, count)
        options = {"every": chance.choice([1, 2, 3]), "meets_always": chance.random() < 0.7}
        judge(ranks, tmp_path / str(case), expected, plan, kind=kind, **options)


def judge(
    launcher: RankLauncher,
    place: Path,
    expected: list[Log],
    plan: list[PlannedRankKill],
    between: Callable[[], None] = lambda: None,
    **options: Any,
) -> list[int]:
    """Put a job through these deaths and to its end, each start in new processes with other random numbers.

    `between` is called after each death. Returns the first iteration after each start.
    """
    begun = []
    seen: list[Log] = [{} for _ in expected]
    for number, death in enumerate([*plan, None]):
        orders = {"start": number, "death": asdict(death) if death is not None else None}
        orders |= {"store": str(place), "meets_always": True} | options
        with launcher.start(len(expected), "tests.support.exact_multi_rank_workloads.live", **orders) as ranks:
            statuses = [rank.wait() for rank in ranks]
            account = "\n".join(rank.account() for rank in ranks)
            logs = [dict(map(json.loads, rank.said("iteration "))) for rank in ranks]
        assert (statuses[death.rank] != 0) if death is not None else not any(statuses), account
        begun.append(min(logs[0], default=0))
        for rank, log in enumerate(logs):
            difference = first_difference(expected[rank], log)
            assert difference is None, f"rank {rank}: {difference}; start {number} of {plan} with {options}"
            seen[rank] |= log
        if death is not None:
            between()
    assert seen == expected
    return begun
