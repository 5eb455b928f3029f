"""Stage `restore`: a state from the memory tier, the page cache and a disk, to the device."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

import holdfast
from benchmarks.checkpoint.training import BenchmarkTraining, differing
from benchmarks.restore import raw
from holdfast.save.shared_buffers import SupervisorMemory
from holdfast.system.host_memory import bytes_of

from .gpt import scale_of
from .stages import CaseResult, Context

ROOT = Path(__file__).resolve().parents[2]
GIGABYTES, SMALL_BYTES = 8.0, 1 << 24
GOAL_OF_BARE = 0.8
JOB = "restored"
PIECE_BYTES = 1 << 30


def cases(context: Context) -> list[tuple[str, Callable[[], CaseResult]]]:
    return [("page cache and disk", partial(from_files, context)), ("memory tier", partial(from_memory, context))]


def from_files(context: Context) -> CaseResult:
    """Restore from files that the page cache holds, and from a disk; both against the bare copies."""
    training, session = _saved(context, context.disk)
    session.close()

    file = next((context.disk / JOB).glob("*/rank-0.safetensors"))
    size = file.stat().st_size
    target = raw.touched(raw.padded(size))
    warm = _restored(training, context.disk)
    raw.forget(file)
    cold = _restored(training, context.disk)
    to_device = size / _bytes_per_second(context)
    disk = raw.read(file, target)
    _filled(file)  # after the direct read the cache holds nothing
    cached = _filled(file)
    values = {
        "state_gb": size / 1e9, "warm_seconds": warm, "cold_seconds": cold, "bare_to_device_seconds": to_device,
        "bare_disk_seconds": disk, "bare_cached_seconds": cached,
        "warm_of_bare": max(to_device, cached) / warm, "cold_of_bare": max(to_device, disk) / cold,
    }  # fmt: skip
    is_met = min(values["warm_of_bare"], values["cold_of_bare"]) >= GOAL_OF_BARE
    return CaseResult(values, None if context.small else is_met)


def _saved(context: Context, store: Path) -> tuple[BenchmarkTraining, holdfast.Session]:
    """Return a training with a durable checkpoint; its session is left open, as a crash would leave it."""
    training = BenchmarkTraining(scale_of(GIGABYTES, context))
    training.iterate()
    session = _session(store, training)
    session.resume()
    session.checkpoint()
    session.step()
    session.wait(120)
    return training, session


def _restored(training: BenchmarkTraining, store: Path) -> float:
    """Return the seconds of a resume into a new model; every byte is compared afterwards."""
    fresh = BenchmarkTraining(training.scale, blank=True)
    with _session(store, fresh) as session:
        training.synchronize()
        began = time.perf_counter()
        if not session.resume():
            raise RuntimeError("nothing was restored")
        training.synchronize()
        seconds = time.perf_counter() - began
        if wrong := differing(training, fresh):
            raise RuntimeError(f"{len(wrong)} tensors came back wrong: {', '.join(wrong[:3])}")
    return seconds


def _session(store: Path, training: BenchmarkTraining) -> holdfast.Session:
    return holdfast.Session(
        JOB, store=store, server="", every=10**9, keep=1, model=training.model, optimizer=training.optimizer
    )


def _filled(file: Path) -> float:
    """Read a file through the page cache; return the seconds."""
    buffer = bytearray(8 << 20)
    began = time.perf_counter()
    with file.open("rb", buffering=0) as source:
        while source.readinto(buffer):
            pass
    return time.perf_counter() - began


def _bytes_per_second(context: Context) -> float:
    """Return the bandwidth of a copy from pinned memory to the device."""
    size = SMALL_BYTES if context.small else PIECE_BYTES
    here = torch.empty(size, dtype=torch.uint8, pin_memory=context.device == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=context.device)
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        there.copy_(here, non_blocking=True)
        if context.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return size / statistics.median(seconds[1:])


def from_memory(context: Context) -> CaseResult:
    """Restore from a snapshot in the memory of a supervisor, which outlives the process that took it."""
    shared = context.folder / "slots"
    shared.mkdir()
    held = SupervisorMemory(shared)
    try:
        saved = _in_process(context, "seed", shared)
        held.release_claims()
        found = _in_process(context, "resume", shared)
    finally:
        held.close()
    if found["digest"] != saved["digest"]:
        raise RuntimeError("other bytes came back")
    to_device = saved["state_bytes"] / _bytes_per_second(context)
    of_bare = to_device / found["seconds"]
    values = {
        "state_gb": saved["state_bytes"] / 1e9,
        "seconds": found["seconds"],
        "bare_to_device_seconds": to_device,
        "of_bare": of_bare,
        "was_in_memory": found["was_in_memory"],
    }
    is_met = found["was_in_memory"] and of_bare >= GOAL_OF_BARE
    return CaseResult(values, None if context.small else is_met)


def _in_process(context: Context, role: str, shared: Path) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "benchmarks.cuda.restoring", role, context.device, str(context.folder / "store"),
        *(["--small"] if context.small else []),
    ]  # fmt: skip
    environment = os.environ | {"HOLDFAST_SUPERVISION": str(shared)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise RuntimeError(f"{role} ended with {done.returncode}: {done.stderr[-400:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _digest(training: BenchmarkTraining) -> str:
    whole = xxhash.xxh3_128()
    for _, tensor in training.tensors():
        whole.update(bytes_of(tensor.detach().cpu()))
    return whole.hexdigest()


def main() -> None:
    """Save a state and die, or resume it from memory."""
    role, device, store, *small = sys.argv[1:]
    context = Context(device, bool(small), Path(store), Path(store))
    if role == "seed":
        training, _ = _saved(context, context.folder)

        print(json.dumps({"digest": _digest(training), "state_bytes": training.state_bytes}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    fresh = BenchmarkTraining(scale_of(GIGABYTES, context), blank=True)
    session = _session(context.folder, fresh)
    loads: list[str] = []
    load = session._memory.load

    def noted(*arguments: Any, **options: Any) -> Any:
        loads.append("memory")
        return load(*arguments, **options)

    session._memory.load = noted  # type: ignore[method-assign]
    fresh.synchronize()
    began = time.perf_counter()
    session.resume()
    fresh.synchronize()
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "digest": _digest(fresh), "was_in_memory": bool(loads)}), flush=True)
    session.close()


if __name__ == "__main__":
    main()
