"""Hosts for tests: namespaces of this machine, each with processes, memory, a local disk and a network of its own.

    with Hosts(folder) as hosts:
        with hosts.start(0) as first, first.spawned([...], folder / "first.log", env) as process:
            first.take_away()

A bridge connects them. The folder of the test is shared, as a store on a file server would be, except for `disk`
in it, which is another file system on each host. What runs on a host ends with it, and the hosts end with the
test, however it ends: each lives as long as the pipe to its first process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from tests.support import job_processes

ENTER = ["--user", "--net", "--mount", "--preserve-credentials"]
BRIDGE = "ip link set lo up && ip link add bridge type bridge && ip link set bridge up && echo ready && read _"
FIRST_PROCESS = """
mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs "$1" && echo "$2" > "$1/.boot_id" &&
mount --bind "$1/.boot_id" /proc/sys/kernel/random/boot_id && hostname "$3" && ip link set lo up && echo ready &&
read _
"""
"""Mounts what is the host's own, and waits: all processes of the host end with it."""


def why_not() -> str | None:
    """Why there can be no hosts here."""
    try:
        tried = subprocess.run(["unshare", "-Urnm", "true"], capture_output=True, text=True)
    except OSError as error:
        return f"NO HOSTS CAN BE MADE HERE ({error})"
    said = tried.stderr.strip().rpartition("\n")[2]
    return f"NO HOSTS CAN BE MADE HERE, which takes `unshare -Urnm` ({said})" if tried.returncode else None


class Hosts:
    """The network that hosts are connected to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.disk = folder, folder / "disk"
        self._started = 0
        self._cables: dict[int, Callable[[], None]] = {}
        """What unplugs each host, by number."""
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.disk.mkdir(exist_ok=True)
        self._bridge = self._held.enter_context(_until_closed(["unshare", "-Urnm", "sh", "-c", BRIDGE]))
        return self

    def __exit__(self, *error: object) -> None:
        for unplug in self._cables.values():
            unplug()
        self._held.close()

    @contextlib.contextmanager
    def start(self, number: int) -> Iterator[Host]:
        """Start a host with the address of its number; one that was taken away starts anew, empty."""
        if number in self._cables:
            self._cables.pop(number)()
        self._started += 1
        cable, name = f"cable{self._started}", f"host-{number}"
        program = ["sh", "-c", FIRST_PROCESS, "sh", str(self.disk), str(uuid.uuid4()), name]
        private = ["unshare", "-n", "-m", "-p", "-u", "--fork", "--kill-child", "--mount-proc"]
        with _until_closed(["nsenter", "-t", str(self._bridge.pid), *ENTER, *private, *program]) as starting:
            (first,) = psutil.Process(starting.pid).children()
            network = os.open(f"/proc/{first.pid}/ns/net", os.O_RDONLY)  # it answers until it is unplugged

            def unplug() -> None:
                self._ip("link", "del", cable, check=False)
                with contextlib.suppress(OSError):  # it was unplugged before
                    os.close(network)

            self._cables[number] = unplug
            host = Host(number, first.pid, starting, unplug)
            plug = ["peer", "name", "eth0", "address", f"02:00:00:00:00:{number + 1:02x}", "netns", str(first.pid)]
            self._ip("link", "add", cable, "type", "veth", *plug)
            self._ip("link", "set", cable, "master", "bridge", "up")
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
            try:
                yield host
            finally:
                host.take_away()

    def _ip(self, *arguments: str, check: bool = True) -> None:
        command = ["nsenter", "-t", str(self._bridge.pid), *ENTER, "ip", *arguments]
        subprocess.run(command, check=check, capture_output=not check)


class Host:
    """One of the hosts; `pid` is that of its first process, as this machine knows it."""

    def __init__(
        self, number: int, pid: int, starting: subprocess.Popen[bytes], unplug: Callable[[], None]
    ) -> None:
        self.number, self.pid, self.address = number, pid, f"10.77.0.{number + 1}"
        self._starting, self._unplug, self._is_away = starting, unplug, False

    def run(self, *command: str, check: bool = True) -> None:
        """Run a command on this host."""
        subprocess.run(self._inside(command), check=check)

    @contextlib.contextmanager
    def spawned(
        self, command: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A process on this host; where the test fails, its log ends with the stacks of all processes there."""
        entered = self._inside(["env", "-C", str(Path.cwd()), *command])
        with job_processes.spawned(entered, log, dict(env)) as process:
            try:
                yield process
            except BaseException:
                if not self._is_away:
                    self.run("sh", "-c", "kill -ABRT -1", check=False)  # PYTHONFAULTHANDLER
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(10)
                raise

    def take_away(self, *, silently: bool = False) -> None:
        """Lose the host with its processes, its memory and its disk.

        Its connections are closed, or stay open `silently`, as when the power fails.
        """
        if self._is_away:
            return
        self._is_away = True
        if silently:
            self._unplug()
        self._starting.kill()  # its child, the first process, dies with it
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(self.pid).wait()

    def _inside(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", "-t", str(self.pid), *ENTER, "--pid", "--uts", *command]


@contextlib.contextmanager
def _until_closed(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ready once it says so, and ends when its input is closed."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.stdin.close()
