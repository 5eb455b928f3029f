"""Fork server: start processes that already have torch imported.

Starting Python with torch takes seconds; forking a process that has imported it takes milliseconds. This makes
tests of hundreds of crash points affordable. A fork server has one thread and no Holdfast state, so a forked
process behaves like a fresh one. A reaper process waits for each forked process, because the fork server must stay
free for the next request.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 300.0
"""Timeout in seconds for one step, long enough for a busy machine."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_PTRACER, ANYBODY = 1, 36, 0x59616D61, -1


class ForkServer:
    """Fork server that imports `modules` before the first fork; workloads are `module.function` in them."""

    def __init__(self, *modules: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno()), *modules]
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork has only the one that forks
        environment = os.environ | one_thread | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._line = ours

    @contextlib.contextmanager
    def spawn(self, workload: str, log: Path, /, **options: Any) -> Iterator[ForkedProcess]:
        """Start a process that runs `workload` and logs to `log`; kill it and its descendants at the end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        order = json.dumps({"workload": workload, "log": str(log), "options": options}).encode()
        socket.send_fds(self._line, [order], [theirs.fileno()])
        theirs.close()
        process = ForkedProcess(ours, log)
        try:
            yield process
        finally:
            process.destroy()

    def close(self) -> None:
        self._line.close()
        self._process.wait()


class ForkedProcess:
    """A forked process, as the test that started it sees it."""

    def __init__(self, line: socket.socket, log: Path) -> None:
        self._line, self._log, self._text = line, log, ""
        self.told: list[str] = []
        """Lines that the workload has sent."""
        self.status: int | None = None
        """Exit status, or the negative number of a signal; `None` until the process has ended."""
        self._reaper, self.pid = map(int, self._next("born ").split())

    def await_ready(self) -> None:
        """Wait until the workload reaches the part under test."""
        self._next("ready")

    def fileno(self) -> int:
        """File descriptor of the channel, for `select` over several processes."""
        return self._line.fileno()

    def let_go(self) -> None:
        self._line.sendall(b"go\n")

    def wait(self) -> int:
        self.status = int(self._next("exit "))
        return self.status

    def all(self, prefix: str) -> list[str]:
        """Return the rest of each received line that begins with `prefix`."""
        return [line.removeprefix(prefix) for line in self.told if line.startswith(prefix)]

    @property
    def refused(self) -> bool:
        """Whether the process ended with an uncaught OSError."""
        return self.status == 1 and "Error: [Errno" in self._log.read_text().rstrip().rpartition("\n")[2]

    def listen(self, seconds: float = 0.0) -> bool:
        """Receive pending lines; return False when none arrived within `seconds`."""
        if not select.select([self._line], [], [], seconds)[0]:
            return False
        if not (data := self._line.recv(1 << 16)):
            raise ChildProcessError(f"the fork server or its reaper is gone; {self.account()}")
        self._text += data.decode()
        *lines, self._text = self._text.split("\n")
        self.told += lines
        return bool(lines)

    def run(self) -> int:
        """Run the workload to its end and return the exit status."""
        self.await_ready()
        self.let_go()
        return self.wait()

    def wait_alone(self, seconds: float) -> bool:
        """Wait until its descendants have ended too; return False on timeout."""
        deadline = time.monotonic() + seconds
        while not self.all("alone") and (left := deadline - time.monotonic()) > 0:
            self.listen(left)
        return bool(self.all("alone"))

    def kin(self) -> list[int]:
        """Return the ids of the process and its descendants."""
        parents = {pid: _parent(pid) for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))}
        kin, found = {self._reaper}, True
        while found:
            found = {pid for pid, parent in parents.items() if parent in kin and pid not in kin}
            kin |= found
        return sorted(kin - {self._reaper})

    def destroy(self) -> None:
        while not self.all("alone"):
            for pid in self.kin():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.listen(0.05)
        self._line.close()

    def _next(self, prefix: str) -> str:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := self.all(prefix)):
            self.listen(max(0.0, deadline - time.monotonic()))
            if prefix == "ready" and (ended := self.all("exit ")):
                raise ChildProcessError(f"it ended with {ended[0]} before {prefix!r}; {self.account()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {PATIENCE_SECONDS:g} s for {prefix!r}; {self.account()}")
        return found[0]

    def account(self) -> str:
        said = self._log.read_text()[-3000:] if self._log.exists() else ""
        return f"it sent {self.told[-8:]} and wrote:\n{said}"


class WorkloadChannel:
    """Channel from a workload to its test. It uses no system call into which tests inject faults."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def tell(self, *words: object) -> None:
        self._line.sendall((" ".join(map(str, words)) + "\n").encode())

    def ready(self) -> None:
        """Announce that the part under test begins; return once a tracer is attached."""
        self.tell("ready")
        # poll: Python handles a signal that arrives just before a system call only after that call returns
        while not select.select([self._line], [], [], 1.0)[0]:
            pass
        assert self._line.recv(8) == b"go\n"


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_long(value))


def _main(line: socket.socket, modules: list[str]) -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the test process, however that ends
    for module in modules:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # let the kernel reap the reapers
    while True:
        order, descriptors, _, _ = socket.recv_fds(line, 1 << 16, 1)
        if not order:
            return
        theirs = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            line.close()
            _mind(json.loads(order), theirs)
        theirs.close()


def _mind(order: dict[str, Any], line: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the process become children of the reaper
    pid = os.fork()
    if pid == 0:
        _live(order, line)
    line.sendall(f"born {os.getpid()} {pid}\n".encode())
    # stop when all children have ended or the test has closed the channel
    with contextlib.suppress(ChildProcessError, BrokenPipeError):
        while True:
            ended, status = os.wait()
            if ended == pid:
                line.sendall(f"exit {os.waitstatus_to_exitcode(status)}\n".encode())
    with contextlib.suppress(BrokenPipeError):
        line.sendall(b"alone\n")
    os._exit(0)


def _live(order: dict[str, Any], line: socket.socket) -> None:
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_PTRACER, ANYBODY)  # let strace attach where the Yama security module restricts ptrace
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # show where it hangs before the test times out
    faulthandler.dump_traceback_later(PATIENCE_SECONDS - 5, exit=False)
    module, _, function = order["workload"].rpartition(".")
    status = 1
    try:
        getattr(sys.modules[module], function)(WorkloadChannel(line), **order["options"])
        status = 0
    except BaseException:  # do not return into the parent's stack, which the fork has copied
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
