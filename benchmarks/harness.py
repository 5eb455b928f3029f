"""What the benchmarks share: command lines, figures, tables, times, temporary folders, processes and servers.

A benchmark ends with `run(main)`. The parameters of `main` are its options, its docstring describes them, and it
returns its figures. This module imports no torch: some drivers must leave memory to what they measure.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import multiprocessing
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import urllib3

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS, SETTLE_SECONDS, ANSWER_SECONDS = 180.0, 120.0, 300.0
IDLE_SHARE = 0.1
"""Maximum CPU use of all servers together, in cores, while they count as idle."""
PRIVATE = ("Pss_Anon:", "Pss_Shmem:")
"""Memory without mapped files."""


# ---------------------------------------------------------------- command lines, figures and tables


def run(main: Callable[..., Any], *, is_helper: bool = False) -> None:
    """Run a benchmark with the options of the command line, and print its figures as the last line.

    SIGTERM ends it like an error, so that it cleans up. A helper is a process of another benchmark.
    """
    options = vars(parser_of(main).parse_args())
    if not is_helper:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
        print(f"machine   {machine()}", flush=True)
    if (figures := main(**options)) is not None:
        print(f"figures: {json.dumps(rounded(figures))}", flush=True)


def machine() -> str:
    names = re.search(r"model name\s*: (.+)", _read("/proc/cpuinfo"))
    gigabytes, load = psutil.virtual_memory().total / 1e9, os.getloadavg()[0]
    system = f"{platform.system()} {platform.release()}, load {load:.1f}"
    return f"{len(os.sched_getaffinity(0))} cores of {names[1] if names else '?'}, {gigabytes:.0f} GB, {system}"


def parser_of(main: Callable[..., Any]) -> argparse.ArgumentParser:
    """Return a parser with an option for each parameter, and an argument for each one without a default.

    Lists take several words, and also numbers and choices that commas separate.
    """
    described = dict(re.findall(r"^ +(\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(main) or "", re.MULTILINE))
    parser = argparse.ArgumentParser(
        description=sys.modules[main.__module__].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = typing.get_type_hints(main)
    for name, parameter in inspect.signature(main).parameters.items():
        flag, default, kind = "--" + name.replace("_", "-"), parameter.default, kinds[name]
        if isinstance(kind, types.UnionType):
            kind = typing.get_args(kind)[0]
        words: dict[str, Any] = {"help": " ".join(described.get(name, "").split()).replace("%", "%%")}
        if default is not inspect.Parameter.empty:
            words |= {"default": default, "dest": name}
        if kind is bool:
            words["action"] = "store_false" if default else "store_true"
            flag = flag.replace("--", "--no-", 1) if default else flag
        elif typing.get_origin(kind) is list:
            values = _values(typing.get_args(kind)[0])
            words |= {"nargs": "+", "action": functools.partial(_Words, **values)}
            words |= {"metavar": f"{{{','.join(map(str, values['choices']))}}}"} if "choices" in values else {}
        else:
            words |= _values(kind)
        parser.add_argument(flag if "dest" in words else name, **words)
    return parser


def _values(kind: Any) -> dict[str, Any]:
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        return {"choices": choices, "type": type(choices[0])}
    return {"type": kind}


class _Words(argparse.Action):
    """Adds to a list, which replaces the default."""

    def __init__(self, *arguments: Any, type: Any, choices: Sequence[Any] = (), **options: Any) -> None:  # noqa: A002
        super().__init__(*arguments, **options)
        self._type, self._choices = type, choices

    def __call__(self, parser: Any, options: Any, words: Any, flag: Any = None) -> None:
        parts = words if self._type is str and not self._choices else [p for w in words for p in w.split(",")]
        try:
            found = [self._type(part) for part in parts]
        except ValueError as error:
            parser.error(f"{flag}: {error}")
        if unknown := [word for word in found if self._choices and word not in self._choices]:
            parser.error(f"{flag}: {unknown[0]!r} is none of {', '.join(map(str, self._choices))}")
        before = getattr(options, self.dest)
        setattr(options, self.dest, found if before is self.default else [*before, *found])


def rounded(value: Any, digits: int = 5) -> Any:
    """Round all numbers of figures, which may be nested."""
    if isinstance(value, dict):
        return {name: rounded(each, digits) for name, each in value.items()}
    return round(value, digits) if isinstance(value, float) else value


def print_figures(figures: Mapping[str, float]) -> None:
    width = max(map(len, figures))
    print("\n".join(f"{name:<{width}} {value:12.4g}" for name, value in figures.items()))


class Table:
    """Prints a head, and rows as they come. A column is as wide as its title, or as the spaces around it say.

    The first columns, of which the format is empty, are text.
    """

    def __init__(self, formats: Mapping[str, str], indent: str = "") -> None:
        """`formats`: of numbers, by title."""
        self._formats, self._indent = formats, indent
        self._print([title.strip() for title in formats])

    def row(self, *cells: Any) -> None:
        """Print a row; `None` is a dash."""
        pairs = zip(cells, self._formats.values(), strict=True)
        self._print(["–" if cell is None else format(cell, form) if form else str(cell) for cell, form in pairs])

    def _print(self, cells: Sequence[str]) -> None:
        pairs = zip(cells, self._formats.items(), strict=True)
        aligned = (cell.rjust(len(title)) if form else cell.ljust(len(title)) for cell, (title, form) in pairs)
        print(self._indent + "  ".join(aligned).rstrip(), flush=True)


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return lines of cells in columns that are as wide as the widest cell; the first `left` are text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


# ---------------------------------------------------------------- times


def seconds_of(act: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how long a call takes."""
    started = clock()
    act()
    return clock() - started


def cost_of(act: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> tuple[float, float, Any]:
    """Return how long a call takes, its CPU time by a clock, and its result."""
    started, used = time.perf_counter(), clock()
    result = act()
    return time.perf_counter() - started, clock() - used, result


def in_turns(
    rounds: int, *acts: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Call each function once a round, so that slow changes of the machine meet all; return their seconds."""
    taken: list[list[float]] = [[] for _ in acts]
    for _ in range(rounds):
        for act, found in zip(acts, taken, strict=True):
            found.append(seconds_of(act, clock))
    return taken


def median_seconds(rounds: int, *acts: Callable[[], object]) -> list[float]:
    return list(map(statistics.median, in_turns(rounds, *acts)))


def percentiles_ms(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return 1000 * cuts[49], 1000 * cuts[98]


def record_calls(owner: Any, name: str, into: list[float] | None = None) -> list[float]:
    """Replace a function of a module, class or object; return a list to which each call adds its seconds."""
    original, found = getattr(owner, name), [] if into is None else into

    @functools.wraps(original)
    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(*arguments, **options)
        finally:
            found.append(time.perf_counter() - began)

    setattr(owner, name, timed)
    return found


# ---------------------------------------------------------------- folders and processes


@contextlib.contextmanager
def scratch(parent: Path | str | None = None) -> Iterator[Path]:
    """Make a folder, on the disk of `parent`; an interrupted job may still write into it while it is removed."""
    if parent is not None:
        Path(parent).mkdir(parents=True, exist_ok=True)
    place = Path(parent).resolve() if parent is not None else None
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=place, ignore_cleanup_errors=True) as made:
        yield Path(made)


def memory_folder() -> str | None:
    """Return a folder in memory, or `None` for the default one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def output_of(module: str, *arguments: object, python: object = sys.executable, **environment: str) -> Any:
    """Run a module in a process of its own, and return its figures: the JSON of its last line."""
    command = [python, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if not done.stdout.strip() or done.returncode > 0:
        raise RuntimeError(f"{module} ended with {done.returncode}: {done.stderr[-400:]}")
    return json.loads(done.stdout.splitlines()[-1].removeprefix("figures: "))


@contextlib.contextmanager
def in_process(act: Callable[..., Any], *arguments: Any) -> Iterator[Future[Any]]:
    """Call a function in a new process; the future has what it returns."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool.submit(act, *arguments)


@contextlib.contextmanager
def talking(target: Callable[..., None], *arguments: Any, patience: float = 10.0) -> Iterator[Connection]:
    """Run a function with a connection as its first argument in a new process; yield the other end."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join(patience)
        process.kill()
        process.join()


@contextlib.contextmanager
def running(target: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Run a function in a thread, with an event as its last argument that is set at the end."""
    ended = threading.Event()
    thread = threading.Thread(target=target, args=(*arguments, ended))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def meeting_place(rank: int, world_size: int = 1, port: int | None = None) -> dict[str, str]:
    """Return the environment of a rank."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    return ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}


def family(pid: int) -> list[int]:
    """Return a process and its live descendants."""
    found = [pid]
    for each in found:  # which grows
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            found += map(int, _read(children).split())
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its descendants, with children that ended."""
    return sum(sum(map(int, _stat(each)[11:15])) for each in family(pid)) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int, kinds: tuple[str, ...] = PRIVATE) -> int:
    """Return the memory of a process and its descendants: private pages, and a part of shared ones."""
    lines = "".join(_read(f"/proc/{each}/smaps_rollup") for each in family(pid)).splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(kinds))


@contextlib.contextmanager
def peak_memory(
    pid: int, kinds: tuple[str, ...] = PRIVATE, every_seconds: float = 0.01
) -> Iterator[types.SimpleNamespace]:
    """Sample the memory of a process and its descendants; `bytes` is the peak."""
    peak = types.SimpleNamespace(bytes=0)

    def sample(ended: threading.Event) -> None:
        while True:
            peak.bytes = max(peak.bytes, memory_bytes(pid, kinds))
            if ended.wait(every_seconds):
                return

    with running(sample):
        yield peak


def _stat(pid: int) -> list[str]:
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str | Path) -> str:
    with contextlib.suppress(OSError):  # it has ended
        return Path(path).read_text()
    return ""


# ---------------------------------------------------------------- servers


@dataclass(frozen=True, slots=True)
class BenchmarkServer:
    port: int
    pid: int
    http: urllib3.HTTPConnectionPool

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, method: str = "GET", **options: Any) -> urllib3.BaseHTTPResponse:
        """Return the answer to a request, over a connection that is kept open; RuntimeError if it is an error."""
        answer = self.http.request(method, path, **options)
        if answer.status >= 300:
            raise RuntimeError(f"{path} answered {answer.status}: {answer.data[:500]!r}")
        return answer

    def median_ms(self, path: str, times: int, headers: Mapping[str, str] | None = None) -> float:
        """Return the median time until a whole answer has arrived, without that of the first request."""
        (found,) = in_turns(times + 1, lambda: self.ask(path, headers=headers))
        return 1000 * statistics.median(found[1:])

    def pss_bytes(self) -> int:
        """Return the memory of the server and its children; shared pages count once."""
        return memory_bytes(self.pid, ("Pss:",))

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)


def connected(port: int, pid: int = 0) -> BenchmarkServer:
    """Return the server at a port."""
    http = urllib3.HTTPConnectionPool("127.0.0.1", port, timeout=ANSWER_SECONDS, retries=False)
    return BenchmarkServer(port, pid, http)


@contextlib.contextmanager
def serving(
    command: Sequence[str], *, port: int, log: Path, ready: str = "/readyz", environment: Mapping[str, str] = {}
) -> Iterator[BenchmarkServer]:  # fmt: skip
    """Start a server and wait until `ready` answers 200; end it with all its children.

    Raises:
        RuntimeError: it ended or did not answer in time; the message has the end of its output.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ | environment,
            cwd=log.parent, start_new_session=True,
        )  # fmt: skip
    server = connected(port, process.pid)
    try:
        end = time.monotonic() + START_SECONDS
        while not _is_ready(server, ready):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command!r} did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)  # the port of another program
        yield server
    finally:
        end_group(process)


@contextlib.contextmanager
def holdfast_server(folder: Path, *options: object, **environment: str) -> Iterator[BenchmarkServer]:
    """Start our server, with its database in a folder."""
    port = free_port()
    command = [sys.executable, "-m", "holdfast_server", "--port", port, "--db", folder / "bench.db", *options]
    with serving(list(map(str, command)), port=port, log=folder / "log", environment=environment) as server:
        yield server


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


def end_group(process: subprocess.Popen[Any], *, at_once: bool = False) -> None:
    """End a process that leads a group, and what is left of the group."""
    for number in (signal.SIGKILL,) if at_once else (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)


def kill_all(pid: int) -> None:
    """Kill a process, its descendants, also those in sessions of their own, and what is left of its group."""
    for kill, each in [*((os.kill, each) for each in family(pid)), (os.killpg, pid)]:
        with contextlib.suppress(ProcessLookupError):
            kill(each, signal.SIGKILL)


def _is_ready(server: BenchmarkServer, path: str) -> bool:
    with contextlib.suppress(urllib3.exceptions.HTTPError):
        return server.http.request("GET", path, timeout=10).status == 200
    return False
