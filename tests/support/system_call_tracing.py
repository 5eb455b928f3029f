"""strace, which sees every system call of a process and can kill, stop or fail it at any of them.

Traps: ordinals (`when=`) count per thread and per system call; a wrapper script must not be what is traced. So the
real process is attached to, at the moment from which its calls matter, and its ordinals begin at 1 there.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MUTATING = (
    "mkdir", "mkdirat", "openat", "write", "writev", "pwrite64", "pwritev", "pwritev2", "fallocate", "ftruncate",
    "fsync", "fdatasync", "sync_file_range", "rename", "renameat", "renameat2", "link", "linkat", "unlink",
    "unlinkat", "rmdir", "close", "flock", "fcntl",
)  # fmt: skip
CALL = re.compile(r"^(\d+) +(\w+)\((.*)")
RELATIVE = re.compile(r'\d+<([^>]*)>, "([^/"][^"]*)"')
"""A name in an open directory."""
NAME = re.compile(r"""[<"](job\b[^">]*)""")
"""In the arguments of a call: what it is done to, below the root of the store."""


def available() -> bool:
    return shutil.which("strace") is not None


@dataclass(frozen=True, slots=True)
class Point:
    """A system call of a run: the `ordinal`-th of its kind on its thread."""

    syscall: str
    ordinal: int
    text: str
    """As strace shows it, for a person to find the place."""

    def __str__(self) -> str:
        return f"{self.syscall} {self.ordinal}: {self.text[:150]}"

    @property
    def kind(self) -> str:
        """What is done to which sort of file, whichever checkpoint and attempt it belongs to."""
        names = (re.sub(r"(\.tmp|\.json)-[\w-]+", r"\1", name) for name in NAME.findall(self.text))
        return " ".join([self.syscall, *(re.sub(r"\d+", "#", name) for name in names)])

    def inject(self, what: str) -> str:
        return f"inject={self.syscall}:{what}:when={self.ordinal}"


@contextlib.contextmanager
def traced(pids: Sequence[int], log: Path, *injections: str) -> Iterator[None]:
    """Trace processes and what they start, into `log`, with faults; begins when it is attached to all."""
    options = [word for injection in injections for word in ("-e", injection)]
    command = ["strace", "-f", "-y", "-s", "64", "-o", str(log), "-e", f"trace={','.join(MUTATING)}", *options]
    attach = [word for pid in pids for word in ("-p", str(pid))]
    with subprocess.Popen([*command, *attach], stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        try:
            for _ in pids:
                if "attached" not in (said := tracer.stderr.readline()):
                    raise ChildProcessError(f"strace: {said}{tracer.stderr.read()}")
            yield
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                tracer.wait(0.5)  # it ends with what it traces
            tracer.terminate()
            tracer.stderr.read()


def points(log: Path, root: Path) -> list[Point]:
    """Every system call of a traced run that changed something under `root`, or gave hold of it."""
    counts: Counter[tuple[str, str]] = Counter()
    found: dict[tuple[str, int], Point] = {}
    for line in log.read_text().splitlines():
        if (call := CALL.match(line)) is None:
            continue
        thread, syscall, arguments = call.groups()
        arguments = RELATIVE.sub(r'"\1/\2"', arguments)
        counts[thread, syscall] += 1
        if str(root) in arguments and not (syscall == "openat" and "O_CREAT" not in arguments):
            at = syscall, counts[thread, syscall]
            found.setdefault(at, Point(*at, arguments.replace(f"{root}/", "")))
    return list(found.values())
