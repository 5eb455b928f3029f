"""Processes that are born with everything imported.

A start of Python with torch takes seconds, a fork of one that has started takes milliseconds: that is what makes
a sweep over hundreds of crash points affordable. A nursery has one thread and no state of holdfast's, so that what
it hatches is as good as a fresh process. Each hatchling has a minder that waits for it, since the nursery
must be free for the next.
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
"""Of a machine that is busy with other things; nothing takes so long where all is well."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_PTRACER, ANYBODY = 1, 36, 0x59616D61, -1


class Nursery:
    """`modules` are imported before the first hatchling; workloads are `module.function` in them."""

    def __init__(self, *modules: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno()), *modules]
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork has only the one that forks
        environment = os.environ | one_thread | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._line = ours

    @contextlib.contextmanager
    def hatch(self, workload: str, log: Path, /, **options: Any) -> Iterator[Hatchling]:
        """A process that will run `workload` with `options`, its stderr in `log`, gone with its kin at the end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        order = json.dumps({"workload": workload, "log": str(log), "options": options}).encode()
        socket.send_fds(self._line, [order], [theirs.fileno()])
        theirs.close()
        hatchling = Hatchling(ours, log)
        try:
            yield hatchling
        finally:
            hatchling.destroy()

    def close(self) -> None:
        self._line.close()
        self._process.wait()


class Hatchling:
    """One process, as its parent in spirit sees it."""

    def __init__(self, line: socket.socket, log: Path) -> None:
        self._line, self._log, self._text = line, log, ""
        self.told: list[str] = []
        """What the workload has said, line by line."""
        self.status: int | None = None
        """Its exit status; the negative number of a signal."""
        self._minder, self.pid = map(int, self._next("born ").split())

    def await_ready(self) -> None:
        """Until the workload has come to the part that matters."""
        self._next("ready")

    def fileno(self) -> int:
        """To wait for several at once."""
        return self._line.fileno()

    def let_go(self) -> None:
        self._line.sendall(b"go\n")

    def wait(self) -> int:
        self.status = int(self._next("exit "))
        return self.status

    def all(self, prefix: str) -> list[str]:
        """The rest of each line told that begins with `prefix`."""
        return [line.removeprefix(prefix) for line in self.told if line.startswith(prefix)]

    @property
    def refused(self) -> bool:
        """It ended by an OSError that nobody caught."""
        return self.status == 1 and "Error: [Errno" in self._log.read_text().rstrip().rpartition("\n")[2]

    def listen(self, seconds: float = 0.0) -> bool:
        """Take in what was said; False when it said nothing for `seconds`."""
        if not select.select([self._line], [], [], seconds)[0]:
            return False
        if not (data := self._line.recv(1 << 16)):
            raise ChildProcessError(f"the nursery or its minder is gone; {self.account()}")
        self._text += data.decode()
        *lines, self._text = self._text.split("\n")
        self.told += lines
        return bool(lines)

    def run(self) -> int:
        """Let it do all it has to."""
        self.await_ready()
        self.let_go()
        return self.wait()

    def wait_alone(self, seconds: float) -> bool:
        """Wait until what it started is gone as well; False when that takes too long."""
        deadline = time.monotonic() + seconds
        while not self.all("alone") and (left := deadline - time.monotonic()) > 0:
            self.listen(left)
        return bool(self.all("alone"))

    def kin(self) -> list[int]:
        """It, what it started, and what those started."""
        parents = {pid: _parent(pid) for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))}
        kin, found = {self._minder}, True
        while found:
            found = {pid for pid, parent in parents.items() if parent in kin and pid not in kin}
            kin |= found
        return sorted(kin - {self._minder})

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
        return f"it told {self.told[-8:]} and wrote:\n{said}"


class Stage:
    """What a workload has to talk with: nothing of it is a system call that faults are injected into."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def tell(self, *words: object) -> None:
        self._line.sendall((" ".join(map(str, words)) + "\n").encode())

    def ready(self) -> None:
        """The part that matters begins: what traces it is attached before this returns."""
        self.tell("ready")
        # by turns: of a signal that comes just before a system call, Python takes notice only after that
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
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # whatever happens to the tests, nothing of theirs goes on
    for module in modules:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # minders need nobody to wait for them
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
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # what the hatchling leaves behind becomes the minder's
    pid = os.fork()
    if pid == 0:
        _live(order, line)
    line.sendall(f"born {os.getpid()} {pid}\n".encode())
    with contextlib.suppress(ChildProcessError, BrokenPipeError):  # all have ended; or nobody listens any more
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
    _prctl(PR_SET_PTRACER, ANYBODY)  # or strace may not attach where Yama guards
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.dump_traceback_later(PATIENCE_SECONDS - 5, exit=False)  # what it waits for, for who waits for it
    module, _, function = order["workload"].rpartition(".")
    status = 1
    try:
        getattr(sys.modules[module], function)(Stage(line), **order["options"])
        status = 0
    except BaseException:  # a fork's edge: the parent's stack must not go on in the child
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
