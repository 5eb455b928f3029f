"""`make bench-restore`: time until a job is restored, compared with the limits of the machine.

Compared figures are measured in turns within the same minutes; the figures are ratios of medians.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks import disk
from benchmarks.harness import ROOT, holdfast_server, run, scratch
from holdfast.client import CheckpointInfo, Client, ServerError
from holdfast.save.shared_buffers import SupervisorMemory
from holdfast.supervisor.hang_detector import read_progress

from .job import JOB

HOLDFAST = [sys.executable, "-m", "holdfast.cli"]
ITERATION_SECONDS = 0.05
"""Iteration time of the job that receives restore requests."""
ITERATIONS_BEFORE_KILL = 7
JOBS = "benchmarks.integrations.jobs"
WITH_HOLDFAST = ("--resume-by", "holdfast", "--store", "{store}", "--log", "{store}/updates")
SCRIPTS = {
    "demo": (
        "torch",
        ("examples/char_gpt.py", "--width", "192", "--layers", "3", "--batch-size", "4", "--threads", "1"),
    ),
    "transformers": ("transformers", ("-m", f"{JOBS}.transformers", *WITH_HOLDFAST)),
    "lightning": ("lightning", ("-m", f"{JOBS}.lightning", *WITH_HOLDFAST)),
}
"""Scripts that are killed: the package that each needs, and the words after `python`."""
STARTED = re.compile(r"start \d+: process (\d+),")
Lines = list[dict[str, Any]]


def main(
    folder: Path = ROOT,
    megabytes: float = 500,
    memory_megabytes: float = 1000,
    rounds: int = 7,
    only: list[Literal["relaunch", "scripts", "in-place", "memory", "orders"]] | None = None,
) -> dict[str, float]:
    """Measure all parts, or the chosen ones.

    Args:
        folder: where checkpoints go: the disk that is measured
        megabytes: of the state that is relaunched and restored in place
        memory_megabytes: of the state that is read out of memory
        only: this part; repeatable
    """
    parts: dict[str, Callable[[Path], dict[str, float]]] = {
        "relaunch": lambda place: relaunch(place, megabytes, rounds),
        "scripts": lambda place: scripts(place, rounds),
        "in-place": lambda place: in_place(place, megabytes, rounds),
        "memory": lambda place: memory(place, memory_megabytes, rounds),
        "orders": lambda place: orders(place, rounds),
    }
    figures: dict[str, float] = {}
    with scratch(folder) as made:
        for name in only or parts:
            figures |= parts[name](made / name)
    return figures


def relaunch(folder: Path, megabytes: float, rounds: int) -> dict[str, float]:
    """Measure SIGKILL to the next new iteration, warm and cold, a start without Holdfast, and a raw read."""
    bare, read = list[float](), list[float]()
    ours: dict[str, list[float]] = {"warm": [], "cold": []}
    for number in range(rounds):
        with scratch(folder) as store:
            began = time.monotonic()
            (line,) = _run("bare", megabytes, store)
            bare.append(line["at"] - began)
            for name, found in ours.items():
                found.append(_killed(megabytes, store / name, is_warm=name == "warm"))
            file = max(store.glob(f"cold/{JOB}/*/rank-0.safetensors"))
            read.append(disk.read_uncached(file, disk.touched(file.stat().st_size)))
        back = ", ".join(f"{name} {found[-1]:.2f} s" for name, found in ours.items())
        _progress("relaunch", number, rounds, f"bare start {bare[-1]:.2f} s, raw read {read[-1]:.2f} s, {back}")
    start, device = map(statistics.median, (bare, read))
    print(f"SIGKILL to the next new iteration, a state of {megabytes:g} MB; bare start {start:.2f} s + raw read ")
    print(f"  {device:.2f} s:")
    ratios = {name: _told(f"  {name}", found) / (start + device) for name, found in ours.items()}
    return {"relaunch_vs_bare": round(ratios["warm"], 3), "relaunch_cold_vs_bare": round(ratios["cold"], 3)}


def _told(what: str, seconds: Sequence[float]) -> float:
    """Print and return a median."""
    found = statistics.median(seconds)
    print(f"{what}: {found:.2f} s ({min(seconds):.2f} to {max(seconds):.2f} s)", flush=True)
    return found


def _killed(megabytes: float, store: Path, *, is_warm: bool) -> float:
    """Return seconds from SIGKILL after a durable checkpoint to the end of the next iteration."""
    store.mkdir()
    command = _supervised(_job("supervised", megabytes), is_warm=is_warm)
    with _started(command, store) as process:
        killed_at = 0.0
        for line in _lines(process):
            if line["what"] == "ready":
                if is_warm:
                    _wait_until_warm(process, _log(store))
                killed_at = time.monotonic()
                os.kill(line["pid"], signal.SIGKILL)
            elif line.get("resumed"):
                assert line["iteration"] == 5, line
                return float(line["at"]) - killed_at
    raise RuntimeError("the job did not come back")


def scripts(folder: Path, rounds: int) -> dict[str, float]:
    """Measure SIGKILL to the end of the next iteration of whole training scripts, warm and cold."""
    figures = {}
    for name, (package, words) in SCRIPTS.items():
        if importlib.util.find_spec(package) is None:
            print(f"{name}: not measured, {package} is not installed in {sys.prefix}", flush=True)
            continue
        found: dict[str, list[float]] = {"warm": [], "cold": []}
        for number in range(rounds):
            for kind, seconds in found.items():
                with scratch(folder) as store:
                    seconds.append(_script_killed(store, words, is_warm=kind == "warm"))
            back = ", ".join(f"{kind} {seconds[-1]:.2f} s" for kind, seconds in found.items())
            _progress(name, number, rounds, back)
        for kind, seconds in found.items():
            figures[f"{name}_{kind}_seconds"] = round(_told(f"{name}, {kind}", seconds), 3)
    return figures


def _script_killed(store: Path, words: Sequence[str], *, is_warm: bool) -> float:
    """Return seconds from SIGKILL of a script that has trained to the end of the next start's first iteration."""
    command = [sys.executable, *(word.format(store=store) for word in words)]
    with _started(_supervised(command, is_warm=is_warm), store, PYTHONPATH=str(ROOT)) as process:
        log = _log(store)
        _wait(process, lambda: STARTED.search(log.read_text()))
        trainer = int(STARTED.findall(log.read_text())[-1])
        progress = Path(psutil.Process(trainer).environ()["HOLDFAST_PROGRESS"])
        _wait(process, lambda: _steps(progress) >= ITERATIONS_BEFORE_KILL)
        os.kill(trainer, signal.SIGSTOP)  # some scripts would end before the imports are ready
        if is_warm:
            _wait_until_warm(process, log)
        killed_at = time.monotonic()
        os.kill(trainer, signal.SIGKILL)
        _wait(process, lambda: len(STARTED.findall(log.read_text())) > 1)
        _wait(process, lambda: _steps(progress) >= 1)
        return time.monotonic() - killed_at


def _steps(progress: Path) -> int:
    with disk.opened(progress, os.O_RDONLY) as fd:
        return read_progress(fd)[1]


def _wait_until_warm(process: subprocess.Popen[str], log: Path) -> None:
    _wait(process, lambda: "the next start is warm" in log.read_text())


def _wait(process: subprocess.Popen[str], condition: Callable[[], object]) -> None:
    while not condition():
        if process.poll() is not None:
            raise RuntimeError("the job ended")
        time.sleep(0.002)


def in_place(folder: Path, megabytes: float, rounds: int) -> dict[str, float]:
    """Measure a restore in place and a raw read and copy of the same bytes, both with a cold cache."""
    lines, job = [], [*_job("in_place", megabytes), "--rounds", str(rounds), "--store"]
    with scratch(folder) as store, _started([*job, str(store)], store) as process:
        for number, line in enumerate(_lines(process)):
            lines.append(line)
            beside = f"raw read and copy {line['raw_read'] + line['raw_copy']:.2f} s"
            _progress("in place", number, rounds, f"{beside}, restored in {line['whole']:.2f} s")
    bare = statistics.median(line["raw_read"] + line["raw_copy"] for line in lines)
    back = statistics.median(line["whole"] - line["safety"] for line in lines)
    safety = statistics.median(line["safety"] for line in lines)
    print(f"restore in place of {megabytes:g} MB: read, verified and applied in {back:.2f} s; raw read and copy ")
    print(f"  {bare:.2f} s: {back / bare:.2f} times; and {safety:.2f} s until the previous state is durable")
    ratio, with_safety = back / bare, (back + safety) / bare
    return {"in_place_vs_bare": round(ratio, 3), "in_place_with_safety_vs_bare": round(with_safety, 3)}


def memory(folder: Path, megabytes: float, rounds: int) -> dict[str, float]:
    """Measure a start from memory, and one from disk with a cold cache."""
    found: dict[str, Lines] = {"memory": [], "disk": []}
    with scratch(folder) as store, scratch() as shared, contextlib.closing(SupervisorMemory(shared)) as held:
        environments = {"memory": {"HOLDFAST_SUPERVISION": str(shared)}, "disk": {}}
        for part, environment in environments.items():
            _run("seed", megabytes, store / part, **environment)
        for number in range(rounds):
            held.release_claims()
            # alternate the order: a virtual machine must request idle memory from its host
            for part in sorted(found, reverse=bool(number % 2)):
                place = store / part
                found[part] += _run("resume", megabytes, place, "--store", str(place), **environments[part])
            _progress("memory", number, rounds, ", ".join(f"{k} {v[-1]['whole']:.2f} s" for k, v in found.items()))
    assert all(line["memory"] == (part == "memory") for part, lines in found.items() for line in lines)
    figures = {}
    for what, name in (("load", "memory_tier_speedup"), ("whole", "memory_tier_speedup_of_resume")):
        ours, plain = (statistics.median(line[what] for line in lines) for lines in found.values())
        figures[name] = round(plain / ours, 2)
        result = "verified and at hand" if what == "load" else "resume(), in the objects"
        print(f"{megabytes:g} MB {result}: memory {ours:.3f} s, cold disk {plain:.2f} s: {plain / ours:.1f} times")
    return figures


def orders(folder: Path, rounds: int) -> dict[str, float]:
    """Measure the time from a restore request to the start of the restore."""
    with scratch(folder) as store, holdfast_server(folder) as server, Client(server.url) as client:
        job = _job("ordered", 1, "--iteration-seconds", str(ITERATION_SECONDS))
        with _started(job, store, HOLDFAST_SERVER=server.url) as process:
            longest = max(_ordered(client, process) for _ in range(rounds))
    iteration = f"iterations of {ITERATION_SECONDS * 1000:g} ms"
    print(f"order to restoring, {iteration}: longest of {rounds} {longest:.3f} s")
    return {"order_to_restoring_seconds": round(longest, 3)}


def _ordered(client: Client, process: subprocess.Popen[str]) -> float:
    """Return seconds from the request to the agent's report that it restores."""
    lines = _lines(process)
    first = next(lines)["iteration"]
    while next(lines)["iteration"] < first + 30 or not (durable := _durable(client)):
        pass
    posted_at = time.time()
    order = client.restore(JOB, durable[0].iteration)
    while (done := client.order(JOB, order.id)).state != "restored":
        next(lines)
    return next(step.at for step in done.transitions if step.state == "restoring") - posted_at


def _durable(client: Client) -> list[CheckpointInfo]:
    with contextlib.suppress(ServerError):  # the server does not know the job yet
        return [row for row in client.checkpoints(JOB) if row.state == "durable"]
    return []


def _supervised(command: Sequence[str], *, is_warm: bool) -> list[str]:
    return [*HOLDFAST, "run", *([] if is_warm else ["--no-warm"]), "--", *command]


def _job(role: str, megabytes: float, *more: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.restore.job", role, "--megabytes", f"{megabytes:g}", *more]


def _run(role: str, megabytes: float, store: Path, *more: str, **environment: str) -> Lines:
    """Return the output of a process of the job."""
    with _started(_job(role, megabytes, *more), store, **environment) as process:
        return list(_lines(process))


@contextlib.contextmanager
def _started(command: Sequence[str], store: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    store.mkdir(exist_ok=True)
    log = _log(store)
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, stdin=subprocess.DEVNULL,
            env=kept | {"HOLDFAST_STORE": str(store)} | environment,
        )  # fmt: skip
    try:
        yield process
    except BaseException:  # the log says more
        print(log.read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        process.terminate()
        process.communicate()


def _log(store: Path) -> Path:
    return store.parent / f"{store.name}.log"


def _lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def _progress(what: str, number: int, rounds: int, result: str) -> None:
    print(f"  {what} {number + 1} of {rounds}: {result}", flush=True)


if __name__ == "__main__":
    run(main)
