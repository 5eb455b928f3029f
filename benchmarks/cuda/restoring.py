"""Stage `restore`: a state from the memory tier, the page cache and a disk, to the device."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
from pathlib import Path
from typing import Any

import xxhash

import holdfast
from benchmarks import disk
from benchmarks.checkpoint.ours import JOB, open_session
from benchmarks.checkpoint.training import BenchmarkTraining, differing, pinned_copy_seconds
from benchmarks.harness import output_of, record_calls, run, seconds_of
from holdfast.save.shared_buffers import SupervisorMemory
from holdfast.system.host_memory import bytes_of

from .gpt import scale_of
from .stages import CaseResult, Cases, Context

GIGABYTES, SMALL_BYTES = 8.0, 1 << 24
GOAL_OF_BARE = 0.8
PIECE_BYTES = 1 << 30


def from_files(context: Context) -> CaseResult:
    """Restore from files that the page cache holds, and from a disk; both against the bare copies."""
    training, session = _saved(context, context.disk)
    session.close()

    file = next((context.disk / JOB).glob("*/rank-0.safetensors"))
    size = file.stat().st_size
    target = disk.touched(size)
    warm = _restored(training, context.disk)
    disk.forget_cached(file)
    cold = _restored(training, context.disk)
    to_device = size / _bytes_per_second(context)
    direct = disk.read_uncached(file, target)
    disk.fill_cache(file)  # after the direct read the cache holds nothing
    cached = seconds_of(lambda: disk.fill_cache(file))
    values = {
        "state_gb": size / 1e9, "warm_seconds": warm, "cold_seconds": cold, "bare_to_device_seconds": to_device,
        "bare_disk_seconds": direct, "bare_cached_seconds": cached,
        "warm_of_bare": max(to_device, cached) / warm, "cold_of_bare": max(to_device, direct) / cold,
    }  # fmt: skip
    is_met = min(values["warm_of_bare"], values["cold_of_bare"]) >= GOAL_OF_BARE
    return CaseResult(values, context.judged(is_met))


def _saved(context: Context, store: Path) -> tuple[BenchmarkTraining, holdfast.Session]:
    """Return a training with a durable checkpoint; its session is left open, as a crash would leave it."""
    training = BenchmarkTraining(scale_of(GIGABYTES, context))
    training.iterate()
    session = open_session(store, training, keep=1)
    session.resume()
    session.checkpoint()
    session.step()
    session.wait(120)
    return training, session


def _restored(training: BenchmarkTraining, store: Path) -> float:
    """Return the seconds of a resume into a new model; every byte is compared afterwards."""
    fresh = BenchmarkTraining(training.scale, blank=True)

    def resume() -> None:
        if not session.resume():
            raise RuntimeError("nothing was restored")

    with open_session(store, fresh, keep=1) as session:
        seconds = training.seconds(1, resume)
        if wrong := differing(training, fresh):
            raise RuntimeError(f"{len(wrong)} tensors came back wrong: {', '.join(wrong[:3])}")
    return seconds


def _bytes_per_second(context: Context) -> float:
    """Return the bandwidth of a copy from pinned memory to the device."""
    size = SMALL_BYTES if context.small else PIECE_BYTES
    return size / statistics.median(pinned_copy_seconds(size, context.device, to_device=True))


def from_memory(context: Context) -> CaseResult:
    """Restore from a snapshot in the memory of a supervisor, which outlives the process that took it."""
    shared = context.folder / "slots"
    shared.mkdir()
    with contextlib.closing(SupervisorMemory(shared)) as held:
        saved = _in_process(context, "seed", shared)
        held.release_claims()
        found = _in_process(context, "resume", shared)
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
    return CaseResult(values, context.judged(is_met))


def _in_process(context: Context, role: str, shared: Path) -> Any:
    store, small = context.folder / "store", ["--small"] if context.small else []
    module, environment = "benchmarks.cuda.restoring", {"HOLDFAST_SUPERVISION": str(shared)}
    return output_of(module, role, context.device, store, *small, **environment)


def _digest(training: BenchmarkTraining) -> str:
    whole = xxhash.xxh3_128()
    for _, tensor in training.tensors():
        whole.update(bytes_of(tensor.detach().cpu()))
    return whole.hexdigest()


def main(role: str, device: str, store: Path, small: bool = False) -> dict[str, Any]:
    """Save a state and die, or resume it from memory."""
    context = Context(device, small, store, store)
    if role == "seed":
        training, _ = _saved(context, context.folder)
        print(json.dumps({"digest": _digest(training), "state_bytes": training.state_bytes}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    fresh = BenchmarkTraining(scale_of(GIGABYTES, context), blank=True)
    with open_session(context.folder, fresh, keep=1) as session:
        loads = record_calls(session._memory, "load")
        seconds = fresh.seconds(1, session.resume)
        return {"seconds": seconds, "digest": _digest(fresh), "was_in_memory": bool(loads)}


CASES: Cases = {"page cache and disk": from_files, "memory tier": from_memory}

if __name__ == "__main__":
    run(main, is_helper=True)
