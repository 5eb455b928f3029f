"""Events about the processes of an attempt: totals of its ranks, its configuration, its output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

MAX_CONFIGURATION_ENTRIES = 500
"""Most names of a configuration or an environment."""
MAX_CONFIGURATION_NAME, MAX_CONFIGURATION_VALUE = 120, 1000
"""Characters of a name and of a value."""

ConfigurationSection = Literal["configuration", "environment"]
"""Configuration: what the script reports, such as hyper-parameters. Environment: what the agent collects."""


class ConfigurationReport(msgspec.Struct, kw_only=True, tag="configuration"):
    """One section of an attempt's configuration; it replaces an earlier report of that section."""

    at: float
    section: ConfigurationSection
    values: dict[str, str] = {}
    """Values by name, with the names of nested values joined by dots; secrets are masked."""


MAX_OUTPUT_LINES, MAX_OUTPUT_CHARACTERS = 1000, 1000
"""Lines of an attempt's output that are kept, and characters of each."""


class OutputReport(msgspec.Struct, kw_only=True, tag="output"):
    """Lines of an attempt's output, without escape sequences; secrets are masked."""

    at: float
    first: int
    """Number of the first line, from 0 at the start of the processes; lines between two reports may be missing."""
    lines: list[str] = []


SupervisorState = Literal["restarting", "gave_up", "stopped", "ended"]
"""Stopped: by a signal to the supervisor. Ended: with the exit status 0 of the script."""


class SupervisorReport(msgspec.Struct, kw_only=True, omit_defaults=True, tag="supervisor"):
    """What the supervisor does after a start has ended; repeated until the next start has begun its attempt."""

    at: float
    state: SupervisorState
    reason: str
    """Why the start ended: its exception, or as in `killed by SIGKILL`."""
    start: int = 0
    """Number of the next start in a row without a new iteration, or of the last one when it gave up; 0: starts are
    not counted, as for a restore."""
    limit: int = 0
    """Number of such starts after which the supervisor gives up."""
    delay_seconds: float = 0.0
    """Time until the next start."""
    waits: bool = False
    """Whether the supervisor that gave up waits for a restore request."""


class RankTotals(msgspec.Struct, kw_only=True, tag="rank_work"):
    """Totals of one of several ranks since its last report.

    Of rank 0 only the barrier counts: it also sends samples per iteration.
    """

    at: float
    """Time at which the last of these iterations ended."""
    lineage: int
    first_iteration: int
    last_iteration: int
    iterations: int
    seconds: float
    longest_seconds: float
    stall_seconds: float = 0.0
    data_seconds: float = 0.0
    barrier_iterations: int = 0
    """Number of iterations whose barrier was measured."""
    barrier_seconds: float = 0.0
    """Time from the rank's last gradient to the update: gradient exchange and waiting for other ranks."""


class MachineSample(msgspec.Struct, kw_only=True, omit_defaults=True, tag="machine"):
    """Use of a rank's machine since its sample before; `None`: not measured.

    Disk and network: the largest value of a single disk or network interface, because the system lists a disk
    array and its disks, or a bridge and its interfaces, side by side.
    """

    at: float
    lineage: int
    iteration: int
    gpu_share: float | None = None
    """Share of the last second or less in which the rank's GPU was busy; 1 is all of it."""
    gpu_memory_bytes: float | None = None
    """Memory of the GPU in use, by all processes."""
    cpu_share: float | None = None
    """Use of the CPUs of the host; 1 is all of them."""
    process_cpu_cores: float | None = None
    """CPU time of the rank's process per second: the number of cores that it used."""
    memory_bytes: float | None = None
    """Memory of the host that is not available."""
    process_memory_bytes: float | None = None
    """Resident memory of the rank's process."""
    disk_read_bytes_per_second: float | None = None
    disk_write_bytes_per_second: float | None = None
    disk_busy_share: float | None = None
    """Share of the time in which the busiest disk had requests; 1 is all of it."""
    network_received_bytes_per_second: float | None = None
    network_sent_bytes_per_second: float | None = None


MACHINE_METRICS = tuple(field.name for field in msgspec.structs.fields(MachineSample) if field.default is None)
"""Names of the measured fields of a `MachineSample`."""

# These patterns meet foreign text: each takes linear time, since it limits what can repeat before what must match.
_PREFIX = re.compile(r"\[[\w.]{0,100}\d\]:\s?")
_TRACEBACK = re.compile(rf"(?P<prefix>(?:{_PREFIX.pattern})?)\s*(?:\| )?Traceback \(most recent call last\):\s*")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?::|$)")


def exception_in(lines: Sequence[str]) -> int | None:
    """Return the position of the line that names the exception of the last traceback, before that of a launcher.

    Lines of ranks begin with a prefix, as in `[rank0]: `; the lines of a traceback are those with its prefix.
    """
    found: int | None = None
    begun: set[str] = set()
    """Prefixes of tracebacks of which the exception has not come yet."""
    for position, line in enumerate(lines):
        if (begins := _TRACEBACK.fullmatch(line)) is not None:
            begun.add(begins["prefix"])
            continue
        own = prefix[0] if (prefix := _PREFIX.match(line)) is not None else ""
        for prefix_of_traceback in {own, ""} & begun:
            text = line[len(prefix_of_traceback) :]
            if text.startswith((" ", "\t")):
                continue
            if _EXCEPTION.match(text):
                begun.discard(prefix_of_traceback)
                found = found if found is not None and is_of_launcher(line) else position
            elif not prefix_of_traceback and not own:
                begun.discard("")
    return found


def is_of_launcher(line: str) -> bool:
    """Return whether a line names the exception of a launcher, which follows that of the trainer."""
    return "ChildFailedError" in line


def exception_text(line: str) -> str:
    """Return the message of a line that `exception_in` found, with its type if the message is one word or none."""
    named = _PREFIX.sub("", line, count=1).strip()
    kind, _, message = named.partition(":")
    message = message.strip()
    return message if " " in message else named.removeprefix(kind[: kind.rfind(".") + 1])
