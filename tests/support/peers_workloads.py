"""Workloads for tests of the memory of other hosts: a job that ends, and one that resumes after hosts were lost.

Here a host is a supervisor's folder: ranks with one folder run on one host.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch.distributed as dist

from holdfast.save.completion_marker import markers_of, put_marker
from holdfast.save.shared_buffers import SharedBuffer
from holdfast.system import supervisor_channel
from tests.support.eventually import eventually
from tests.support.exact_multi_rank_job import MultiRankJob
from tests.support.memory_tier_workloads import EVERY, FULL_FROM, _full_disk

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
    return {"before": first.log, "log": second.log, "start": start, "told": told}


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
