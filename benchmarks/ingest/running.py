"""Server processes: start, wait until ready, measure, end with all children."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 180.0
SETTLE_SECONDS = 120.0
IDLE_SHARE = 0.1
"""Maximum CPU use of all servers together, in cores, while they count as idle."""


@dataclass(frozen=True, slots=True)
class BenchmarkServer:
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def pss_bytes(self) -> int:
        """Return the memory of the server and its children; shared pages count once."""
        return sum(_pss_bytes(pid) for pid in tree(self.process.pid))

    def cpu_seconds(self) -> float:
        return sum(cpu_seconds(pid) for pid in tree(self.process.pid))


@contextlib.contextmanager
def running(
    command: Sequence[str], *, port: int, ready: str, log: Path, environment: Mapping[str, str]
) -> Iterator[BenchmarkServer]:
    """Start a server with `command` and wait until `ready` answers 200.

    Raises:
        RuntimeError: it ended or did not answer in time; the message has the end of its output.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        _await(process, port, ready, log)
        yield BenchmarkServer(port, process, log)
    finally:
        _end(process)


def settle(servers: Iterable[BenchmarkServer]) -> None:
    """Wait until the servers are idle.

    Workers still import modules when their server is ready, and a server with thousands of jobs that began at the
    same time raises their alerts at the same time.
    """
    some = list(servers)
    end, used = time.monotonic() + SETTLE_SECONDS, sum(server.cpu_seconds() for server in some)
    while time.monotonic() < end:
        time.sleep(1)
        before, used = used, sum(server.cpu_seconds() for server in some)
        if used - before < IDLE_SHARE:
            return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await(process: subprocess.Popen[bytes], port: int, path: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.1)  # the port of another program
    raise RuntimeError(f"{process.args!r} did not start: {log.read_text(errors='replace')[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
    with contextlib.suppress(ProcessLookupError):  # workers that outlive the server
        os.killpg(process.pid, signal.SIGKILL)


def tree(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        here = waiting.pop()
        found.append(here)
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{here}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return found


def cpu_seconds(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _pss_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
