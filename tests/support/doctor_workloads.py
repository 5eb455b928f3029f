"""What the ranks of a doctor's test run."""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist

from holdfast.commands.doctor.examination import examine
from holdfast.commands.doctor.findings import Hosts
from holdfast.distributed.side_group import SideGroup


def examined(stage: Any, *, hosts: list[str], stores: list[str], disk: str) -> list[tuple[str, str, int, str]]:
    """Examine with a host name and a store of each rank. Return check, state, rank and text of all findings."""
    rank = dist.get_rank()
    socket.gethostname = lambda: hosts[rank]
    ranks = SideGroup()
    try:
        findings = examine(
            Hosts.gathered(ranks), store=stores[rank], disk=disk, size_bytes=1 << 20, state_bytes=None,
            server=None, token=None,
        )  # fmt: skip
    finally:
        ranks.close()
    return [(each.check, each.state, each.rank, each.measured) for each in findings]
