"""Workloads for tests of the memory of other hosts: a job that ends, and one that resumes after hosts were lost.

Here a host is a supervisor's folder: ranks with one folder run on one host.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

from holdfast.save.completion_marker import markers_of, put_marker
from holdfast.save.shared_buffers import SharedBuffer
from holdfast.system import supervisor_channel
from tests.support.eventually import eventually
from tests.support.exact_multi_rank_job import DeterministicMultiRankJob, MultiRankJob
from tests.support.memory_tier_workloads import EVERY, FULL_FROM, _full_disk

ENDS_AT = 6
Damage = Literal["flipped", "truncated", "bytes of another iteration", "marker of another iteration", "no marker"]


def loses_hosts_and_goes_on(
    stage: Any,
    store: str,
    before: list[str],
    after: list[str],
    damaged: list[tuple[str, int, Damage]] = [],  # noqa: B006
    **options: Any,
) -> dict[str, Any]:
    """Train until only memory has the newest snapshot; end, and begin again on other hosts.

    `before`, `after`: each rank's host. `damaged`: a host, a rank, and what happens to the newest part of that
    rank in the memory of that host.
    """
    rank = dist.get_rank()
    supervisor_channel.STACKS_SIGNAL = None
    options = {"every": EVERY, "max_in_flight": 1, "peers": 1} | options
    with mock.patch("holdfast.peers.tier.machine_id", _machine_id):
        os.environ[supervisor_channel.VARIABLE] = before[rank]
        first = MultiRankJob(store, **options)
        with _full_disk(FULL_FROM):
            for now in first.moments():
                if now != "stepped" or first.session.iteration % EVERY:
                    continue
                first.session.wait(300)
                sender, iteration = first.session._memory.sender, first.session.iteration
                eventually(lambda: sender.sent_iteration == iteration, "the snapshot to be sent")  # noqa: B023
                if iteration == FULL_FROM:
                    break
            dist.barrier()
            reports = first.session._memory.held_snapshots()
            held = None if reports is None else reports.sample()
            dist.barrier()
            first.crash()
        dist.barrier()
        if rank == 0:
            for host, number, damage in damaged:
                _damage(Path(host), number, damage)
        dist.barrier()
        told: list[str] = []
        os.environ[supervisor_channel.VARIABLE] = after[rank]
        second = MultiRankJob(store, seed=5, **options)
        second.session._reporter.notice = lambda level, code, text: told.append(f"{code}: {text}")
        start = second.session.resume()
        second.run()
        second.session.close()
    return {"held": held, "before": first.log, "log": second.log, "start": start, "told": told}


def _damage(host: Path, rank: int, damage: Damage) -> None:
    newest, older = [marker for marker in markers_of(host, "job") if marker.draft.rank == rank][:2]
    assert newest.draft.iteration > older.draft.iteration
    slot, other = SharedBuffer(host, newest.number), SharedBuffer(host, older.number)
    fd, other_fd = slot.open(), other.open()
    match damage:
        case "flipped":
            os.pwrite(fd, bytes([os.pread(fd, 1, 100)[0] ^ 16]), 100)
        case "truncated":
            os.ftruncate(fd, newest.draft.size_bytes // 2)
        case "bytes of another iteration":
            os.pwrite(fd, os.pread(other_fd, older.draft.size_bytes, 0), 0)
        case "marker of another iteration":
            put_marker(other.marker, slot.marker.read_bytes())
            slot.remove_marker()
        case "no marker":
            slot.remove_marker()
    os.close(fd)
    os.close(other_fd)


def _machine_id() -> str:
    return os.environ[supervisor_channel.VARIABLE]


def trains(stage: Any, store: str, hosts: list[str], kind: str) -> tuple[int, dict[int, Any]]:
    """Train with no checkpoint in the store; return the newest iteration that all sent, and the state of each."""
    supervisor_channel.STACKS_SIGNAL = None
    os.environ[supervisor_channel.VARIABLE] = hosts[dist.get_rank()]
    states = {}
    with mock.patch("holdfast.peers.tier.machine_id", _machine_id), _full_disk(0):
        job = DeterministicMultiRankJob(store, kind=kind, peers=1)
        sender = job.session._memory.sender
        for iteration in range(1, ENDS_AT + 1):
            job.run(iteration)
            states[iteration] = job.state()
            job.session.wait(300)
            eventually(lambda: not sender.is_sending, "the snapshot to be sent")
            dist.barrier()
        sent = torch.tensor(sender.sent_iteration)
        dist.all_reduce(sent, dist.ReduceOp.MIN)
        job.session._close("SIGKILL")
    return int(sent), states


def resumes(stage: Any, store: str, hosts: list[str], kind: str) -> tuple[int, Any, list[str]]:
    """Resume on other hosts; return the iteration, the state and the notices, once a checkpoint is durable."""
    supervisor_channel.STACKS_SIGNAL = None
    os.environ[supervisor_channel.VARIABLE] = hosts[dist.get_rank()]
    told: list[str] = []
    with mock.patch("holdfast.peers.tier.machine_id", _machine_id):
        job = DeterministicMultiRankJob(store, kind=kind, seed=5, peers=1)
        job.session._reporter.notice = lambda level, code, text: told.append(f"{code}: {text}")
        start = job.session.resume()
        state = job.state()
        job.run(start + 3)
        job.session.close()
    return start, state, told
