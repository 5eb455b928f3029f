"""Runs stages one after the other, each in a process group that is ended at its limit."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO

from benchmarks.harness import ROOT, kill_all, memory_folder, scratch

from .results import ResultFile, Row, figures_of, table_of
from .stages import STAGES, Stage, by_name

SOURCES = ("agent", "series", "migrations", "server", "web")
REPORT_SECONDS = 5.0
"""Kept for the table at the end."""
LEAST_SECONDS = 15.0
"""A stage is not started with less time than this; on a CPU, in tests, there is no such limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverOptions:
    device: str
    small: bool
    minutes: float
    names: Sequence[str]
    folder: Path | None
    disk: Path


class Driver:
    def __init__(self, options: DriverOptions, results: ResultFile) -> None:
        self._options, self._results = options, results
        self._until = time.monotonic() + 60 * options.minutes - REPORT_SECONDS

    def run(self) -> int:
        """Run what is missing; print the table and the figures whatever happens. Return the exit status."""
        try:
            with scratch() as made:
                environment = environment_of(made, self._options.device)
                self._results.add({"run": facts(self._options, environment)})
                for stage in self._chosen():
                    self._run(stage, environment)
        finally:
            print("\n".join(["", *table_of(self._results)]))
            print(f"figures: {json.dumps(figures_of(self._results))}", flush=True)
        ended = [self._results.end(stage.name) for stage in self._chosen()]
        return 0 if all(end and end["end"] == "complete" for end in ended) else 1

    def _chosen(self) -> list[Stage]:
        return [by_name(name) for name in self._options.names] or [each for each in STAGES if not each.by_name]

    def _run(self, stage: Stage, environment: dict[str, str]) -> None:
        end = self._results.end(stage.name)
        if end is not None and end["end"] == "complete":
            return
        left = self._until - time.monotonic()
        if left < (0 if self._options.small else LEAST_SECONDS):
            self._results.add({"stage": stage.name, "end": "not run", "reason": "no time was left"})
            return
        print(f"{stage.name}: about {stage.estimate_seconds} s, {left:.0f} s are left", flush=True)
        limit = left if self._options.small else min(left, stage.limit_seconds)
        began = time.monotonic()
        ended, reason = self._in_process(stage, environment, limit)
        seconds = round(time.monotonic() - began, 1)
        self._results.add({"stage": stage.name, "end": ended, "seconds": seconds, "reason": reason})

    def _in_process(self, stage: Stage, environment: dict[str, str], limit: float) -> tuple[str, str]:
        """Run a stage, and add its rows as they come; return how it ended, and why."""
        options = self._options
        place = scratch(options.folder or memory_folder())
        with place as folder, scratch(options.disk) as disk, tempfile.TemporaryFile("w+") as log:
            ended = self._followed(self._command(stage, folder, disk), environment, limit, log, stage.name)
            log.seek(0)
            last = [line.strip() for line in log.read().splitlines() if line.strip()][-3:]
        if ended == "complete":
            failed = [case for case, row in self._results.cases(stage.name).items() if "error" in row]
            return ("failed", f"cases failed: {', '.join(failed)}") if failed else ("complete", "")
        return ended, " / ".join(last)[-500:] or ended

    def _command(self, stage: Stage, folder: Path, disk: Path) -> list[str]:
        return [
            sys.executable, "-m", "benchmarks.cuda", "--stage", stage.name, "--device", self._options.device,
            "--folder", str(folder), "--disk", str(disk),
            *(["--small"] if self._options.small else []),
            *(f"--done={case}" for case in self._results.done(stage.name)),
        ]  # fmt: skip

    def _followed(
        self, command: list[str], environment: dict[str, str], limit: float, log: IO[str], stage: str
    ) -> str:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            text=True, start_new_session=True,
        )  # fmt: skip
        until = time.monotonic() + limit
        try:
            for line in _lines(process, until):
                with contextlib.suppress(ValueError):  # output of a library
                    row: Row = json.loads(line)
                    self._results.add({"stage": stage, "device": self._options.device, **row})
                    print(f"  {row['case']}", flush=True)
            if time.monotonic() >= until:
                return "time limit"
            return "complete" if process.wait(LEAST_SECONDS) == 0 else f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            return "time limit"
        finally:
            kill_all(process.pid)
            process.wait()


def _lines(process: subprocess.Popen[str], until: float) -> Iterator[str]:
    """Yield lines of output until it ends or the time is over."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    output = process.stdout
    assert output is not None

    def read() -> None:
        with output:
            for line in output:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (left := until - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=left)
        except queue.Empty:
            return
        if line is None:
            return
        yield line


def environment_of(folder: Path, device: str) -> dict[str, str]:
    """Return an environment that runs the source tree, and describes it where it is not installed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    paths = [ROOT, *(ROOT / name for name in SOURCES)]
    try:
        metadata.version("holdfast")
    except metadata.PackageNotFoundError:
        described = folder / "holdfast-0.dist-info"
        described.mkdir()
        (described / "METADATA").write_text("Metadata-Version: 2.1\nName: holdfast\nVersion: 0\n")
        paths.append(folder)
    given = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    # a fixed workspace makes the kernels of cuBLAS deterministic
    return kept | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *given]),
        "PYTHONUNBUFFERED": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **({"OMP_NUM_THREADS": "1"} if device == "cpu" else {}),
    }


def facts(options: DriverOptions, environment: dict[str, str]) -> Row:
    """Describe the machine, in a process of its own: the driver must not use the device."""
    program = (
        "import json, sys, torch; cuda = sys.argv[1] != 'cpu' and torch.cuda.is_available();"
        "print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda if cuda else None,"
        "'name': torch.cuda.get_device_name() if cuda else 'CPU'}))"
    )
    command = [sys.executable, "-c", program, options.device]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if said.returncode:
        sys.exit(f"torch cannot be used here: {said.stderr[-300:]}")
    known = json.loads(said.stdout.splitlines()[-1])
    if options.device == "cuda" and known["cuda"] is None:
        sys.exit("torch finds no CUDA device here; --device cpu --small runs the stages without one")
    return {
        **known,
        "at": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "python": sys.version.split()[0],
        "cores": len(os.sched_getaffinity(0)),
        "commit": _commit(),
        "small": options.small,
    }


def _commit() -> str:
    with contextlib.suppress(OSError):  # no git
        command = ["git", "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return ""
