"""Hundreds of simulated ranks that die, fail, are slow and lose touch: complete checkpoints only."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.ranks.world import JOB, LargeJob
from holdfast.checkpoint import restore
from holdfast.distributed.ranks import RanksLost
from holdfast.protocol.ids import checkpoint_id
from holdfast.save.draft import Draft
from holdfast.save.run import NotPrepared
from holdfast.save.two_phase_commit import RankCommit
from holdfast.save.writer import write_checkpoint
from holdfast.store import LocalStore
from tests.support.simulated_ranks import MortalFiles, RankDied, SimulatedLink, SimulatedWorld
from tests.support.trial_pool import LONG

CHECKPOINTS = 2
"""Taken in each world: the structure is sent with the first."""
MOST_OPERATIONS = 60
"""About what a rank has in messages and file operations for them."""
ERRORS = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    OSError(errno.EIO, os.strerror(errno.EIO)),
    NotPrepared("the copy is torn", torn=True),
]


class FaultyWorld:
    """One start of a job, with what goes wrong in it."""

    def __init__(self, job: LargeJob, seed: int) -> None:
        self.job, chance = job, random.Random(seed)
        ranks = range(job.world_size)
        leaders = [rank for rank in ranks if rank % 8 == 0]
        victims = [chance.choice(chance.choice([ranks, leaders])) for _ in range(chance.choice([0, 1, 1, 2, 3]))]
        deaths = {rank: chance.randrange(MOST_OPERATIONS) for rank in victims}
        slow = frozenset(chance.sample(ranks, chance.choice([0, 1, 5])))
        self.world = SimulatedWorld(
            job.world_size, chance, deaths=deaths, late=chance.choice([0, 0.02]), slow=slow
        )
        failing = chance.sample(ranks, chance.choice([0, 0, 1, 2]))
        self.errors = {(chance.randrange(CHECKPOINTS), rank): chance.choice(ERRORS) for rank in failing}
        self.faults = Counter(slow=len(slow))
        self.outcomes: list[list[object]] = []

    def run(self) -> None:
        for number in range(CHECKPOINTS):
            self.job.iteration += 1
            self.outcomes.append(self.world.run(lambda link, number=number: self._take(link, number)))
        self.faults["errors"] += len(self.errors)
        self.faults["deaths"] += len(self.world.dead)
        self.faults["late"] += self.world.late_messages

    def _take(self, link: SimulatedLink, number: int) -> None:
        rank, job = link.rank, self.job
        store = LocalStore(job.root, MortalFiles(self.world, rank))

        def write(draft: Draft) -> Draft:
            if (error := self.errors.get((number, rank))) is not None:
                raise error
            return write_checkpoint(store, draft, job.payload(rank))

        RankCommit(link, store, known=job.known[rank]).commit(number, job.draft(rank), None, write)

    def wrong(self) -> list[str]:
        """What contradicts that a checkpoint is complete, or that no rank believes in one that is not."""
        found, first = [], self.job.iteration - CHECKPOINTS + 1
        listed = self.job.store.checkpoints(JOB)
        for number, outcomes in enumerate(self.outcomes):
            checkpoint, kinds = checkpoint_id(first + number, 1), {type(each) for each in outcomes}
            if checkpoint in listed:
                manifest = restore.verify(self.job.store, JOB, checkpoint)
                if {tensor.file for tensor in manifest.tensors} != {
                    f"rank-{rank}.safetensors" for rank in range(self.job.world_size)
                }:
                    found.append(f"{checkpoint} lacks the part of a rank")
                if not kinds <= {type(None), RankDied, RanksLost} or isinstance(outcomes[0], RanksLost):
                    found.append(f"{checkpoint} is there, but a rank was told otherwise: {kinds}")
            elif None in outcomes:
                found.append(f"{checkpoint} is not there, but a rank was told that it is")
            if not kinds <= {type(None), RankDied, RanksLost, NotPrepared, OSError} and not any(
                issubclass(kind, NotPrepared) for kind in kinds
            ):
                found.append(f"{checkpoint} ended with {kinds}")
            if not self.world.dead:
                found += self._wrong_without_deaths(number, outcomes)
        return found

    def _wrong_without_deaths(self, number: int, outcomes: list[object]) -> list[str]:
        errors = {rank: error for (at, rank), error in self.errors.items() if at == number}
        if not errors:
            return [f"a rank was told {each!r}" for each in outcomes if each is not None]
        named = min(errors, key=lambda rank: (getattr(errors[rank], "errno", 0) == errno.ENOSPC, rank))
        return [
            f"rank {rank} was told {told!r} instead of the error of rank {named}"
            for rank, told in enumerate(outcomes)
            if told is not errors.get(rank)
            and not (
                rank not in errors and isinstance(told, NotPrepared) and str(told).startswith(f"rank {named}: ")
            )
        ]


@pytest.mark.parametrize(
    ("world_size", "worlds", "least_faults"), [(70, 15, 50), pytest.param(256, 160, 2000, marks=LONG)]
)
def test_whatever_happens_to_ranks_there_are_complete_checkpoints_only(
    tmp_path: Path, world_size: int, worlds: int, least_faults: int
) -> None:
    job, wrong, faults, durable = LargeJob(tmp_path, world_size, tensors=3), list[str](), Counter[str](), 0
    job.start()
    for seed in range(worlds):
        faulty = FaultyWorld(job, seed)
        faulty.run()
        wrong += [f"world {seed}: {each}" for each in faulty.wrong()]
        faults += faulty.faults
        durable += len(job.store.checkpoints(JOB))
        for checkpoint in job.store.checkpoints(JOB):
            job.store.delete(JOB, checkpoint, job.attempt)
        job.start()
        wrong += [f"world {seed} leaves {path.name}" for path in (tmp_path / JOB).glob(".tmp-*")]
    print(f"{worlds} worlds of {world_size} ranks, {dict(faults)}, {durable} checkpoints, {len(wrong)} violations")
    assert not wrong, "\n".join(wrong)
    assert sum(faults.values()) >= least_faults
    assert durable >= worlds // 4
