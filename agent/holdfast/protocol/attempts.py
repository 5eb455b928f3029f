"""Responses on the attempts of a job: their configuration, and how two of them differ."""

from __future__ import annotations

from msgspec import Struct

from holdfast.protocol.timeline import AttemptInfo
from holdfast.protocol.wire import ConfigurationSection


class AttemptSummary(AttemptInfo, kw_only=True, frozen=True):
    finished_at: float | None = None
    pid: int = 0
    world_size: int = 1


class AttemptName(Struct, kw_only=True, frozen=True):
    job: str
    attempt: int


class ValueDifference(Struct, kw_only=True, frozen=True):
    """A value that two attempts do not share; `None`: the attempt has no such value."""

    section: ConfigurationSection
    name: str
    before: str | None
    """Value of the attempt that is compared with."""
    after: str | None


class AttemptConfiguration(Struct, kw_only=True, frozen=True):
    """The configuration of an attempt, and how it differs from that of another attempt."""

    job: str
    attempt: int
    configuration: dict[str, str]
    """What the script reported with `session.config`."""
    environment: dict[str, str]
    """What the agent collected: versions, devices, host, command, commit."""
    against: AttemptName | None = None
    """The attempt that is compared with; `None` without one."""
    differences: list[ValueDifference] = []


class AttemptOutput(Struct, kw_only=True, frozen=True):
    """The last lines of output of an attempt under `holdfast run`."""

    job: str
    attempt: int
    first: int
    """Number of the first line, from 0 at the start of the processes."""
    lines: list[str]
    exception: int | None = None
    """Position in `lines` of the exception that ended the attempt; `None` if none is found."""
