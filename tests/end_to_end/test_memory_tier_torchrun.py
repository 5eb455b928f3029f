"""`holdfast run -- torchrun …`: what all ranks had sealed when one died, all go on from, and nothing less."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.eventually import PATIENCE_SECONDS
from tests.support.job_processes import HOLDFAST, environment, spawned
from tests.support.memory_tier_outcome import MemoryTierOutcome, assert_nothing_left
from tests.support.memory_tier_torchrun_trainer import AT, EVERY, ITERATIONS
from tests.support.multi_rank import RankLauncher
from tests.support.multi_rank import launcher as launcher
from tests.support.restore_faults import HERE, read

pytestmark = pytest.mark.processes


class RankKillCase(NamedTuple):
    kind: str
    ranks: int
    end: str
    start: int
    """What the second start goes on from."""


CASES = [
    RankKillCase("ddp", 2, "killed", AT),
    RankKillCase("ddp", 2, "damaged", AT - EVERY),
    pytest.param(RankKillCase("ddp", 3, "killed", AT), marks=pytest.mark.long),
    pytest.param(RankKillCase("fsdp", 2, "killed", AT), marks=pytest.mark.long),
    pytest.param(RankKillCase("ddp", 2, "unmarked", AT - EVERY), marks=pytest.mark.long),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_rank_that_is_killed_costs_what_came_after_the_last_that_all_had_sealed(
    tmp_path: Path, launcher: RankLauncher, case: RankKillCase
) -> None:
    kind, ranks, end, start = case
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", str(ranks)]
    trainer = [str(HERE / "memory_tier_torchrun_trainer.py"), str(tmp_path), kind, end]
    env = environment(tmp_path / "store") | {
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
    }
    log = tmp_path / "run.log"
    with spawned([*HOLDFAST, "run", "--", *torchrun, *trainer], log, env) as supervisor:
        status = supervisor.wait(PATIENCE_SECONDS)
        assert_nothing_left(supervisor.pid)
    said = log.read_text()
    print(said)
    assert not list(tmp_path.glob("holdfast-run-*"))
    ended = MemoryTierOutcome(status, said, [], tmp_path / "store")
    assert ended.status == 0
    assert ended.from_memory == ([AT] if start == AT else [])
    assert ended.rescued == ([AT] if start == AT else [])
    assert ("in memory is not used" in said) is (end == "damaged")

    undisturbed = launcher.run(ranks, "tests.support.memory_tier_torchrun_trainer.alone", kind=kind)
    for rank, expected in enumerate(undisturbed):
        lines = read(tmp_path / f"ledger-{rank}")
        assert [line for line in lines if line.outcome != expected[line.iteration - 1]] == []
        assert [line.iteration for line in lines if line.attempt == 2] == list(range(start + 1, ITERATIONS + 1))
    assert ended.attempts.keys() == set(range(EVERY, ITERATIONS + 1, EVERY))
    assert ended.attempts[AT] == (1 if ended.rescued else 2), "saved by the rescue or by those who go on"
