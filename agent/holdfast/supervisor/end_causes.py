"""Why a start of a trainer ended, by rules over its output and its exit: in words, and what to do.

Only lines count that name an exception that ended the script or a rank, or that a library writes before it aborts
the process: what a script logs about an error that it handled is no cause. Where no rule matches, it is unknown.
"""

from __future__ import annotations

import re
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.protocol.tracebacks import exception_in, is_of_launcher

Reaction = Literal["restart", "elsewhere", "stop"]
"""`elsewhere`: the host is at fault, so that a restart on it may fail again. `stop`: every start fails in the same
way until something is changed."""


@dataclass(frozen=True, slots=True)
class EndCause:
    """A cause, and the rule that finds it in a line of output."""

    name: str
    words: str
    """The cause as the beginning of a reason."""
    pattern: re.Pattern[str] | None = None
    """Found in a line that counts; `None` if the output does not show it."""
    reaction: Reaction = "restart"

    def describe(self, reason: str) -> str:
        """Return the cause with the reason that it explains."""
        return f"{self.words}: {reason}"


def _rule(name: str, words: str, pattern: str, reaction: Reaction = "restart") -> EndCause:
    return EndCause(name, words, re.compile(pattern), reaction)


HOST_FAULT_SECONDS = 24 * 3600.0
HOST_MEMORY = EndCause("host_memory_kill", "the host or container ran out of memory: the kernel killed a process")
RULES = (
    _rule(
        "gpu_memory_fault", "a GPU has a memory fault",
        r"uncorrectable ECC error|CUDA_ERROR_ECC_UNCORRECTABLE|\bXid \([^)]{1,40}\): (?:48|63|64|94|95),",
        "elsewhere",
    ),
    _rule(
        "gpu_lost", "a GPU no longer responds",
        r"fallen off the bus|GPU is lost|\bXid \([^)]{1,40}\): (?:79|119|120),", "elsewhere",
    ),
    _rule(
        "gpu_link_fault", "the link between GPUs has a fault",
        r"uncorrectable NVLink error|\bXid \([^)]{1,40}\): 74,", "elsewhere",
    ),
    _rule("gpu_missing", "no GPU can be used", r"no CUDA-capable device is detected", "elsewhere"),
    _rule(
        "syntax_error", "the script cannot be compiled", r"^(?:SyntaxError|IndentationError|TabError): ", "stop",
    ),
    _rule("import_error", "an import failed", r"^(?:ImportError|ModuleNotFoundError): ", "stop"),
    _rule(
        "device_memory", "a GPU ran out of memory",
        r"(?:CUDA|HIP|XPU) out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
    ),
    _rule(
        "device_assert", "an assertion on the GPU failed, such as that an index is in range",
        r"device-side assert triggered",
    ),
    _rule(
        "device_access", "the GPU accessed memory that is not allocated",
        r"an illegal memory access was encountered",
    ),
    _rule("device_launch", "a kernel on the GPU failed", r"CUDA error: unspecified launch failure"),
    _rule(
        "shared_memory", "the shared memory (/dev/shm) is full",
        r"insufficient shared memory \(shm\)|out of shared memory|/torch_\d+_\d+\S*: No space left on device",
    ),
    _rule("disk_full", "a disk is full", r"\[Errno 28\] No space left on device"),
    _rule("disk_quota", "a disk quota is exceeded", r"\[Errno 122\] Disk quota exceeded"),
    _rule(
        "host_memory", "the host or container has too little memory",
        r"^MemoryError\b|ArrayMemoryError: "
        r"|DefaultCPUAllocator: .{0,40}allocate|\[Errno 12\] Cannot allocate memory",
    ),
    _rule("open_files", "too many files are open", r"\[Errno 24\] Too many open files"),
    _rule("port_in_use", "a network port is in use", r"EADDRINUSE|[Aa]ddress already in use"),
    _rule(
        "collective_timeout", "a collective operation timed out, since a rank hangs or is lost",
        r"Watchdog caught collective operation timeout",
    ),
    _rule(
        "rank_lost", "the connection to another rank was lost",
        r"ncclRemoteError|remote process exited or there was a network error"
        r"|gloo/transport/.{1,120} Connection (?:closed|reset) by peer",
    ),
)  # fmt: skip
"""From the cause that explains the others to the one that follows from them: the first that matches counts."""

_RANK = re.compile(r"(?:\[default\d{1,6}\]:)?\[rank\d{1,6}\]:\s?")
"""The prefix with which torch prints the exception that ends a rank; torchrun may add another."""
_NAMED = re.compile(r"[A-Za-z_][\w.]{0,200}:\s")
_ABORTING = re.compile(
    r"ProcessGroup\w{1,20}\.cpp:\d|^\s{0,20}what\(\): |\bNVRM: Xid |^ERROR: Unexpected bus error"
)
"""Lines of libraries about an error that ends the process."""
_PLACE, _UNCOMPILED = (
    re.compile(r'  File "[^"]{1,1000}", line \d'),
    re.compile(r"(?:Syntax|Indentation|Tab)Error: "),
)
"""Python prints these about the script itself, without a traceback."""
CONTINUED_LINES = 3
"""Lines after an exception that belong to its text: those of NCCL have several."""
ABORTED = (-signal.SIGABRT, -signal.SIGBUS)
"""Ends of a process that libraries abort, or that has no shared memory."""


def cause_in(lines: Sequence[str]) -> str:
    """Return the name of the cause that the output of an ended start shows; empty if it is unknown."""
    relevant = list(_relevant(lines, exception_in(lines)))
    for rule in RULES:
        if rule.pattern is not None and any(rule.pattern.search(line) for line in relevant):
            return rule.name
    return ""


def _relevant(lines: Sequence[str], exception: int | None) -> Iterator[str]:
    is_launcher = exception is not None and is_of_launcher(lines[exception])
    for position, line in enumerate(lines):
        text = _RANK.sub("", line, count=1)
        ended = exception is not None and 0 <= position - exception <= CONTINUED_LINES and not is_launcher
        ended |= text != line and _NAMED.match(text) is not None
        if (exception is None or is_launcher) and _UNCOMPILED.match(line):
            ended |= any(_PLACE.match(above) for above in lines[max(0, position - 3) : position])
        if ended or _ABORTING.search(text):
            yield text


def end_cause(
    name: str, status: int, was_hung: bool, was_killed: bool, finished_iterations: int
) -> EndCause | None:
    """Return the cause of an end; `None` if it is unknown.

    Args:
        name: the cause that the output shows.
        status: return code, as `subprocess` has it.
        was_killed: whether the kernel killed a process of the start for lack of memory.
        finished_iterations: how many iterations the start has finished.
    """
    if status == 0 or was_hung:
        return None
    if was_killed:
        return HOST_MEMORY
    if status < 0 and status not in ABORTED:
        return None
    cause = next((rule for rule in RULES if rule.name == name), None)
    return None if cause is not None and cause.reaction == "stop" and finished_iterations else cause


class HostFaults:
    """Counts the ends that are the fault of this host.

    Args:
        limit: number of ends within HOST_FAULT_SECONDS after which the host is to be left; 0: never.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._times: deque[float] = deque(maxlen=max(1, limit))

    def reach_limit(self, cause: EndCause | None, now: float) -> bool:
        """Count an end, and return whether the host is to be left."""
        if cause is None or cause.reaction != "elsewhere" or not self._limit:
            return False
        self._times.append(now)
        return len(self._times) == self._limit and now - self._times[0] <= HOST_FAULT_SECONDS


def kernel_kills() -> int:
    """Return how many processes of this control group the kernel has killed for lack of memory; 0 if unknown."""
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            counters = _text(f"/sys/fs/cgroup{path}/memory.events")
        elif controllers == "memory":
            counters = _text(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
        else:
            continue
        for counter in counters.splitlines():
            name, _, value = counter.partition(" ")
            if name == "oom_kill" and value.isdecimal():
                return int(value)
    return 0


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
