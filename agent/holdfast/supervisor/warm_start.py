"""Warm starts: a restart forks a process that has already imported what the trainer imports.

The trainer publishes its imports after its first iterations. This module then starts `warm_template` in the same
interpreter, and requests a fork from it for the next start. Whatever is not as in a cold start, or not known to
be, leads to a cold start, and a line of the log says why.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from holdfast.supervisor import warm_template
from holdfast.system import process_facts, supervisor_files
from holdfast.system.published_imports import IMPORTS, PublishedImports, published_imports

FORK_SECONDS = 10.0
"""How long a fork may take; it takes milliseconds."""
MIN_FREE_SHARE = 0.05
"""Share of the memory below which the template is given up."""
_FLAGS = re.compile(r"-[uOBEsPIbq]+")
_REFUSED = ("PYTHONINSPECT", "PYTHONPROFILEIMPORTTIME", "PYTHONVERBOSE", "PYTHONTRACEMALLOC")
"""Variables with which an interpreter does more than run the script."""


class ForkedTrainer:
    """A trainer that was forked, with what the supervisor uses of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


class WarmStarts:
    """The template of a supervisor, and the starts from it.

    Args:
        command: the training command.
        folder: the supervisor's folder.
        free_share: returns the share of the memory that is free.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, free_share: Callable[[], float] | None = None
    ) -> None:
        self._command, self._folder = list(command), folder
        self._free_share = free_share or free_memory_share
        self._log = supervisor_files.log_line
        self._environment: Mapping[str, str] = {}
        """The environment of the last start."""
        self._off = False
        self._excluded: list[str] = []
        self._template: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._is_ready = False

    @property
    def pids(self) -> set[int]:
        """Return the processes that outlive a start."""
        return set() if self._template is None else {self._template.pid}

    def fork(self, environment: Mapping[str, str], stdout: int | None, stderr: int | None) -> ForkedTrainer | None:
        """Start the trainer by a fork; `None` if it must be started cold."""
        self._environment = dict(environment)
        self._receive()
        trainer = None
        if self._template is not None and self._is_ready:
            answer = self._request(1 if stdout is None else stdout, 2 if stderr is None else stderr)
            if isinstance(answer, ForkedTrainer):
                trainer = answer
            else:
                self._log(f"cold start: {answer}")
                self._end_template()
        if trainer is None and self._template is None and not self._off:
            if (reason := refusal(self._command, self._environment)) is not None:
                self._turn_off(reason)
            else:
                (self._folder / IMPORTS).write_bytes(b"")  # the trainer then publishes its imports
        return trainer

    def watch(self, trainer: int) -> None:
        """Start the template once the trainer has published its imports; give it up when memory is short."""
        self._receive()
        if self._off:
            return
        if self._template is not None:
            if self._free_share() < MIN_FREE_SHARE:
                self._log("memory is short: the process for warm starts is ended; the next start is cold")
                self._end_template()
            return
        imports = published_imports(self._folder)
        if imports is None or self._free_share() < 2 * MIN_FREE_SHARE:
            return
        if (reason := self._other_process(imports, trainer)) is not None:
            if not process_facts.has_ended(trainer):  # the environment of an ended process cannot be read
                self._turn_off(reason)
            return
        try:
            self._start_template()
        except OSError as error:
            self._turn_off(f"the process for warm starts cannot be started: {error}")

    def take_end(self) -> bool:
        """Return whether the start that has just ended was warm and must be repeated cold."""
        path = self._folder / warm_template.ENDED
        try:
            ended = json.loads(path.read_bytes())
            path.unlink()
        except (OSError, ValueError):
            return False
        self._log(f"starting the trainer again, cold: {ended['reason']}")
        self._excluded.append(ended["name"])
        self._end_template()
        if ended["name"] == "torch" or len(self._excluded) > warm_template.MAX_EXCLUDED:
            self._turn_off("imports depend on what the script sets before them")
        return True

    def close(self) -> None:
        """End the template."""
        self._end_template()

    def _start_template(self) -> None:
        options, words = python_words(self._command)
        with contextlib.suppress(FileNotFoundError):  # another process with the same imports
            (self._folder / IMPORTS).rename(self._folder / "imports-of-template.json")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reading, writing = os.pipe()
        try:
            self._template = subprocess.Popen(  # noqa: S603  the trainer's interpreter
                [
                    self._command[0], *options, warm_template.__file__, str(theirs.fileno()), str(reading),
                    str(self._folder / "imports-of-template.json"), json.dumps(self._excluded), *words,
                ],
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                pass_fds=(theirs.fileno(), reading),
                process_group=0,
                preexec_fn=_die_with_supervisor,
            )  # fmt: skip
            self._line = ours
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(reading)
            os.close(writing)

    def _end_template(self) -> None:
        if self._template is None or self._line is None:
            return
        self._line.close()
        with contextlib.suppress(ProcessLookupError):
            self._template.kill()
        self._template.wait()
        self._template, self._line, self._is_ready = None, None, False

    def _turn_off(self, reason: str) -> None:
        self._log(f"starts are cold: {reason}")
        self._off = True
        with contextlib.suppress(OSError):
            (self._folder / IMPORTS).unlink(missing_ok=True)

    def _receive(self) -> None:
        """Handle what the template has sent."""
        while self._line is not None:
            try:
                content = self._line.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                content = b""
            message = json.loads(
                content or b'{"unusable": "", "reason": "the process with the imports has ended"}'
            )
            if "ready" in message:
                self._is_ready = True
                self._log(f"the next start is warm: {message['ready']:,} modules are imported")
                continue
            self._end_template()
            name, reason = message["unusable"], message["reason"]
            if name in ("", "torch") or len(self._excluded) >= warm_template.MAX_EXCLUDED:
                self._turn_off(f"{name}: {reason}" if name else reason)
                return
            self._log(f"imported anew at each start: {name} ({reason})")
            self._excluded.append(name)
            try:  # a new process: what the import has changed cannot be undone
                self._start_template()
            except OSError as error:
                self._turn_off(f"the process for warm starts cannot be started: {error}")

    def _request(self, stdout: int, stderr: int) -> ForkedTrainer | str:
        """Request a fork; return why there is none."""
        assert self._line is not None
        if self._free_share() < MIN_FREE_SHARE:
            return "memory is short"
        try:
            if any(stat.S_ISREG(os.fstat(fd).st_mode) for fd in (stdout, stderr)):
                return "its output goes to a file"
            request = {
                "environment": dict(self._environment),
                "supervisor": os.getpid(),
                "oom_score": Path("/proc/self/oom_score_adj").read_text().strip(),
                "folder": str(self._folder),
                "attributes": warm_template.inherited_attributes(),
            }
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    socket.send_fds(self._line, [json.dumps(request).encode()], [stdout, stderr, theirs.fileno()])
                ours.settimeout(FORK_SECONDS)
                answer = json.loads(ours.recv(1 << 16) or b'{"cold": "the process with the imports has ended"}')
                if "pid" in answer:
                    ours.sendall(b"\0")
                    return ForkedTrainer(answer["pid"])
        except (OSError, ValueError) as error:  # the fork ends without the supervisor's byte
            return f"no fork: {error}"
        return str(answer["cold"])

    def _other_process(self, imports: PublishedImports, trainer: int) -> str | None:
        """Return why the process that published its imports is not one that this command starts."""
        if imports.pid != trainer:
            return f"the processes that train are started by {shlex.join(self._command[:3])}"
        if imports.orig_argv != self._command or imports.main is None:
            return "the script re-executes itself"
        try:
            content = Path(f"/proc/{trainer}/environ").read_bytes()
        except OSError:
            return "the environment of the trainer cannot be read"
        pairs = (entry.partition(b"=") for entry in content.split(b"\0") if entry)
        if {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs} != self._environment:
            return "the script re-executes itself in another environment"
        return None


def _die_with_supervisor() -> None:
    process_facts.die_with_parent(signal.SIGKILL)


def python_words(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words after the interpreter into its options, and the script or `-m module` with its arguments."""
    words, options = list(command[1:]), []
    while words and words[0].startswith("-") and words[0] != "-m":
        count = 2 if words[0] in ("-W", "-X") else 1
        options += words[:count]
        del words[:count]
    return options, words


def refusal(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return why a command can only be started cold, or `None`."""
    if sys.platform != "linux":
        return "warm starts need Linux"
    name = Path(command[0]).name
    program = shutil.which(command[0], path=environment.get("PATH"))
    if not re.fullmatch(r"python[0-9.]*", name) or program is None or not _is_binary(program):
        return f"{name} starts the processes that train; warm starts need: holdfast run -- python script.py"
    options, words = python_words(command)
    for option in options:
        if option.startswith("-") and option not in ("-W", "-X") and not _FLAGS.fullmatch(option):
            return f"the option {option} of the interpreter"
    if len(words) < 1 + (words[:1] == ["-m"]):
        return "the command names no script"
    if words[0] != "-m" and not (words[0].endswith(".py") and Path(words[0]).is_file()):
        return f"{words[0]} is no file that ends with .py"
    for variable in _REFUSED:
        if environment.get(variable):
            return f"{variable} is set"
    return None


def _is_binary(program: str) -> bool:
    """Return whether a program is a binary: a wrapper, such as pyenv's, may do anything."""
    try:
        with open(program, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def free_memory_share() -> float:
    """Return the share of the memory that is free, of the machine or of the control group."""
    try:
        found = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(found[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        share = free / total
        for folder in _control_groups():
            with contextlib.suppress(OSError, ValueError):  # no limit
                limit = int((folder / "memory.max").read_text())
                used = int((folder / "memory.current").read_text())
                usage = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                share = min(share, (limit - used + int(usage["inactive_file"])) / limit)
    except (OSError, ValueError, KeyError):
        return 1.0
    return share


def _control_groups() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            own = root / line[3:].lstrip("/")
            return [own, *(each for each in own.parents if each.is_relative_to(root))]
    return []
