"""What the checks of `holdfast doctor` find, on each rank and together."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from holdfast.distributed.ranks import Ranks, RanksLost
from holdfast.errors import describe_error

FindingState = Literal["ok", "skipped", "warning", "problem"]
STATES: tuple[FindingState, ...] = ("ok", "skipped", "warning", "problem")
"""From best to worst: a check of several ranks has the worst state. A warning means lower speed or safety; a
problem means that checkpoints fail.
"""


class Finding(msgspec.Struct, kw_only=True):
    """What one rank found in one check."""

    check: str
    state: FindingState = "ok"
    measured: str = ""
    remedy: str | None = None
    """What to change."""
    bytes_per_second: float | None = None
    rank: int = 0
    host: str = ""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Where the ranks of this job are."""

    ranks: Ranks
    by_rank: tuple[str, ...]
    """Host name of each rank."""

    @classmethod
    def gathered(cls, ranks: Ranks) -> Hosts:
        return cls(ranks, tuple(name.decode() for name in ranks.gather(socket.gethostname().encode())))

    @property
    def name(self) -> str:
        """Name of this host."""
        return self.by_rank[self.ranks.rank]

    @property
    def names(self) -> list[str]:
        """All hosts, in the order of their first ranks."""
        return list(dict.fromkeys(self.by_rank))

    def ranks_on(self, host: str) -> list[int]:
        return [rank for rank, name in enumerate(self.by_rank) if name == host]

    @property
    def leads_host(self) -> bool:
        """Whether this is the first rank of its host, which examines what the ranks of a host share."""
        return self.ranks_on(self.name)[0] == self.ranks.rank


def run_check(hosts: Hosts, name: str, check: Callable[[], Finding | None]) -> list[Finding]:
    """Run a check on all ranks at the same time, and return their findings; `None` of a rank is left out.

    Raises:
        RanksLost: a rank has ended.
    """
    try:
        found = check()
    except RanksLost:
        raise
    except Exception as error:  # whatever fails here would fail in training
        found = Finding(check=name, state="problem", measured=describe_error(error), remedy=remedy_for(error))
    if found is not None:
        found.rank, found.host = hosts.ranks.rank, hosts.name
    gathered = hosts.ranks.gather(msgspec.json.encode(found))
    return [each for data in gathered if (each := msgspec.json.decode(data, type=Finding | None)) is not None]


def remedy_for(error: Exception) -> str | None:
    """Return what to change after an error whose text does not say it."""
    if isinstance(error, PermissionError):
        return "give the training user permission to read and write there"
    if isinstance(error, ModuleNotFoundError):
        return f"install {error.name} where training runs"
    return None
