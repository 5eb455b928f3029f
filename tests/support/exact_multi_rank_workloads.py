"""`exact_multi_rank_job` as workloads of several ranks, so that a test can kill them."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy
import torch
import torch._dynamo
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.checkpoint import restore
from holdfast.distributed.ranks import Ranks
from holdfast.engine import rank_coordination, training
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.save.layout import estimate_checkpoint_bytes
from holdfast.state import ddp_buckets
from holdfast.store import open_store
from tests.support.exact_job import ScriptError, seed_of_start
from tests.support.exact_multi_rank_job import DeterministicMultiRankJob, MultiRankJob, batches_of, local
from tests.support.training_log import Log

if TYPE_CHECKING:
    from tests.support.fork_server import WorkloadChannel


def undisturbed(stage: WorkloadChannel, **options: Any) -> Log:
    """What a job does that nothing interrupts, and that knows nothing of Holdfast."""
    return MultiRankJob(None, **options).run().log


def live(
    stage: WorkloadChannel,
    store: str,
    *,
    start: int,
    death: dict[str, Any] | None,
    meets_always: bool,
    settles_at: int | None = None,
    **options: Any,
) -> None:
    """Train, telling each iteration, until the end or a death: in that iteration, or in the first one after it.

    After iteration `settles_at` all ranks wait until the checkpoints so far are durable.
    """
    _meet(meets_always)
    fellows = _fellows()
    job = MultiRankJob(store, seed=common_seed(store, start), **options)
    with job.session:
        for now in job.moments():
            if now == "recorded":
                _tell(stage, job)
            if now == "stepped" and job.session.iteration == settles_at:
                job.settle()
                dist.barrier()  # what is durable for one rank is so for all
            here = death is not None and (death["rank"], death["moment"]) == (dist.get_rank(), now)
            if here and job.session.iteration + (now != "stepped") >= death["iteration"]:
                die(death["kind"], fellows)


def taken_back(
    stage: WorkloadChannel, store: str, *, seed: int, times: int, by_all: bool, **options: Any
) -> tuple[list[tuple[int, Log]], int]:
    """Train, and have the session go back so often; what each stretch of it did, and the last lineage.

    Each stretch says at which iteration it began.
    """
    _meet(always=True)
    job, chance = MultiRankJob(store, **options), random.Random(seed)
    last, spot = batches_of(dist.get_world_size()), 0
    stretches: list[tuple[int, Log]] = [(0, {})]
    for now in job.moments():
        if now != "stepped":
            continue
        stretches[-1][1].update(job.log)
        job.log.clear()
        if job.session.lineage != len(stretches):
            stretches.append((job.session.iteration, {}))
            spot = 0
        if spot == 0 and len(stretches) <= times and job.session.iteration < last - 3:
            spot = chance.randrange(max(3, job.session.iteration), last - 2)
        if job.session.iteration == spot:
            job.settle()
            dist.barrier()  # what is durable for one rank is so for all
            known = [parse_checkpoint_id(each)[0] for each in job.session._saver.history.store.checkpoints("job")]
            target = chance.choice([iteration for iteration in known if iteration <= last // 2])
            if by_all or dist.get_rank() == 0:
                job.session.restore(target)
    job.crash()
    return stretches, job.session.lineage


def refused(
    stage: WorkloadChannel, store: str, *, damaged_rank: int, **options: Any
) -> tuple[Log, int, list[str]]:
    """Train, and restore a checkpoint in which data of one rank is damaged; return log, lineage and notices."""
    _meet(always=True)
    job = MultiRankJob(store, **options)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("holdfast").addHandler(handler)
    for now in job.moments():
        if now == "stepped" and job.session.iteration == 4:
            job.settle()
            dist.barrier()
            if dist.get_rank() == 0:
                checkpoint = job.session._saver.history.store.checkpoints("job")[0]
                damage(Path(store) / "job" / checkpoint, damaged_rank)
                job.session.restore(parse_checkpoint_id(checkpoint)[0])
    job.crash()
    return job.log, job.session.lineage, told


def damage(checkpoint: Path, rank: int) -> None:
    """Flip a bit of the largest tensor that this rank alone has."""
    manifest = restore.manifest(open_store(checkpoint.parent.parent), checkpoint.parent.name, checkpoint.name)
    tensor = max((each for each in manifest.tensors if each.rank == rank), key=lambda each: each.end - each.start)
    path = checkpoint / tensor.file
    data = bytearray(path.read_bytes())
    data[tensor.start] ^= 16
    path.write_bytes(data)


def estimated(stage: WorkloadChannel, store: str, *, kind: str) -> int:
    """Take a checkpoint, and return the size that this rank expects of one in bytes."""
    job = MultiRankJob(store, kind=kind)
    for now in job.moments():
        if now == "stepped" and job.session.iteration == 6:
            break
    job.settle()
    dist.barrier()
    size_bytes, _ = estimate_checkpoint_bytes(job.session._training.outline(), dist.get_world_size())
    job.crash()
    return size_bytes


def leave(stage: WorkloadChannel, store: str, *, iteration: int, **options: Any) -> None:
    """A checkpoint of that iteration, and no process any more."""
    job = MultiRankJob(store, every=iteration, **options)
    for now in job.moments():
        if now == "stepped" and job.session.iteration == iteration:
            break
    job.settle()
    dist.barrier()
    job.crash()


def resumed(
    stage: WorkloadChannel, store: str, *, without: str | None, iteration: int, until: int, **options: Any
) -> Log:
    """Go on from there, but for one thing that is on every rank as it is on rank 0, or that is not done."""
    job = MultiRankJob(store, seed=99, every=10**9, **options)
    if without == "bucket layout":
        ddp_buckets.restore_buckets = lambda *_: None
    elif without is not None:
        _have_rank_0s(without, job)
    assert job.session.resume() == iteration
    for now in job.moments():
        if now == "stepped" and job.session.iteration == until:
            break
    return job.crash().log


def _have_rank_0s(item: str, job: MultiRankJob) -> None:
    whole = training.Training.apply

    def apply(*args: Any) -> None:
        whole(*args)
        get, put = _ways(job)[item]
        value = [get()]
        dist.broadcast_object_list(value, 0)
        put(value[0])

    training.Training.apply = apply


def _ways(job: MultiRankJob) -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """How to get and how to put back what ranks have of their own."""
    model, ema = job.model, job.ema.module
    body, generator = job.choice.bit_generator, job.noise
    moments = [job.optimizer.state[parameter]["exp_avg"] for parameter in job.optimizer.state]
    return {
        "Python's generator": (random.getstate, random.setstate),
        "NumPy's generator": (numpy.random.get_state, numpy.random.set_state),
        "torch's generator": (torch.get_rng_state, torch.set_rng_state),
        "a torch.Generator": (generator.get_state, generator.set_state),
        "a random.Random": (job.dice.getstate, job.dice.setstate),
        "a numpy.random.Generator": (lambda: body.state, lambda state: setattr(body, "state", state)),
        "buffers": _values(model.buffers()),
        "averaged buffers": _values(ema.buffers()),
        "gradients": _values(p.grad for p in model.parameters() if p.grad is not None),
        "rows of parameters": _values(model.parameters()),
        "rows of moments": _values(moments),
        "rows of averaged weights": _values(ema.parameters()),
        "the loop's best": (lambda: job.loop.best, lambda best: setattr(job.loop, "best", best)),
    }


def _values(tensors: Iterable[torch.Tensor]) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Of one rank; as many of them as another has room for."""
    parts = [tensor.detach() for tensor in local(list(tensors))]

    def put(values: list[torch.Tensor]) -> None:
        for part, value in zip(parts, values, strict=True):
            count = min(part.numel(), value.numel())
            part.flatten()[:count].copy_(value.flatten()[:count])

    return lambda: parts, put


def leg(stage: WorkloadChannel, store: str, *, until: int, **options: Any) -> dict[str, Any]:
    """A part of a quiet job, from where the last one left off; where it began, what it did, where it ended."""
    job = DeterministicMultiRankJob(store, **options)
    begun = job.session.resume(), job.state()
    job.run(until)
    ended = job.session.iteration, job.state()
    job.session.close()
    return {
        "begun": begun, "ended": ended, "part of the data": job.loader.rank, "samples": job.samples,
        "losses": job.losses, "padded": job.loader.padded,
    }  # fmt: skip


def die(kind: str, fellows: list[int]) -> None:
    """An exception, or a signal to this rank ("SIGKILL") or to all of them ("SIGKILL of all")."""
    if kind == "exception":
        raise ScriptError
    signal_name, _, of_all = kind.partition(" ")
    for fellow in [*(fellows if of_all else []), os.getpid()]:
        os.kill(fellow, getattr(signal, signal_name))
    signal.pause()


def common_seed(store: str, start: int) -> int:
    """As rank 0 sees it."""
    seed = torch.tensor(seed_of_start(store, start) if dist.get_rank() == 0 else 0)
    dist.broadcast(seed, 0)
    return int(seed)


def _fellows() -> list[int]:
    """Process numbers of the other ranks."""
    numbers = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    numbers[dist.get_rank()] = os.getpid()
    dist.all_reduce(numbers)
    return [number for number in numbers.tolist() if number != os.getpid()]


def _meet(always: bool) -> None:
    """Have ranks hear of each other at every boundary, however quick iterations are."""
    if always:
        rank_coordination.AGREE_EVERY_SECONDS = 0.0


def _tell(stage: WorkloadChannel, job: MultiRankJob) -> None:
    for iteration, record in job.log.items():
        stage.tell("iteration", json.dumps([iteration, record]))
    job.log.clear()


def _warm_up() -> None:
    """Have Python import here what each process would import by itself, beside ranks that only seem to be there.

    No test has as many: torch remembers what part of a tensor this rank of so many has.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=7)
    with tempfile.TemporaryDirectory() as store, mock.patch("holdfast.distributed.ranks.join", Ranks):
        job = MultiRankJob(store, kind="fsdp", every=10**9)
        moments = job.moments()
        while next(moments) != "recorded":
            pass
        job.crash()
    dist.destroy_process_group()


if __name__ != "__main__":
    _warm_up()
