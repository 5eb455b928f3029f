"""Stage `exact`: whatever kills or restores a job, each iteration is that of a run that nothing interrupted."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import kill_all

from .exact_job import ExactTraining, Record
from .stages import CaseResult, Cases, Context

KILLS, ITERATIONS = 5, 40
INEXACT = ("loss", "state")
"""What may differ without deterministic kernels."""
MOST_DELAY_SECONDS = 0.1


def killed(context: Context, kills: int = KILLS, *, any_kernels: bool = False) -> CaseResult:
    """Compare a job that is killed at random moments with one that is not."""
    folder = context.folder / f"killed-{any_kernels}"
    kills, iterations = (1, 6) if context.small else (kills, ITERATIONS)
    chance = random.Random(7)
    expected = _started(context, folder / "undisturbed", iterations, 0, any_kernels, None, chance)
    seen: list[Record] = []
    began = time.monotonic()
    for start in range(kills + 1):
        after = chance.randint(2, max(2, iterations // (kills + 1))) if start < kills else None
        seen += _started(context, folder / "killed", iterations, start, any_kernels, after, chance)
    reference = {record["iteration"]: record for record in expected}
    ignored = INEXACT if any_kernels else ()
    wrong = sorted({r["iteration"] for r in seen if _differs(r, reference[r["iteration"]], ignored)})
    missing = sorted(reference.keys() - {record["iteration"] for record in seen})
    repeated = len(seen) - len({record["iteration"] for record in seen})
    return CaseResult(
        {"kills": kills, "iterations": iterations, "repeated": repeated, "seconds": time.monotonic() - began},
        not wrong and not missing,
        f"different: {wrong}, missing: {missing}" if wrong or missing else "",
    )


def one_process(context: Context) -> CaseResult:
    """Restore in place, undo it, and run a second session in the same process."""
    torch.use_deterministic_algorithms(True)
    folder = context.folder / "one-process"
    expected: dict[int, Record] = {}
    wrong: list[int] = []

    def train(records: Iterator[Record], count: int) -> None:
        for record in itertools.islice(records, count):
            if record != expected.setdefault(record["iteration"], record):
                wrong.append(record["iteration"])
            training.session.wait(60)

    for name in ("first", "second"):
        training = ExactTraining(folder / name, context.device, workers=0)
        records = training.records()
        train(records, 8 if name == "first" else 4)
        if name == "first":
            next(records)
            # the step that ends an iteration carries it out: 9 ends and 3 is restored, then 6 ends and 8 is
            for restored, count in ((3, 3), (8, 1)):
                training.session.restore(restored)
                train(records, count)
        records.close()
        training.session.close()
    return CaseResult({"iterations": len(expected)}, not wrong, f"different: {wrong}" if wrong else "")


def _differs(record: Record, expected: Record, ignored: tuple[str, ...]) -> bool:
    return any(record[key] != expected[key] for key in expected if key not in ignored)


def _started(
    context: Context,
    store: Path,
    iterations: int,
    start: int,
    any_kernels: bool,
    kill_after: int | None,
    chance: random.Random,
) -> list[Record]:
    """Run the job; kill it so many iterations later. Return the iterations that it said."""
    command = [
        sys.executable, "-m", "benchmarks.cuda.exact_job", str(store), "--device", context.device,
        "--iterations", str(iterations), "--start", str(start), "--workers", "0" if context.small else "2",
        *(["--any-kernels"] if any_kernels else []), *(["--killed"] if kill_after is not None else []),
    ]  # fmt: skip
    store.parent.mkdir(parents=True, exist_ok=True)
    log = store.parent / f"{store.name}-{start}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    seen = []
    for record in _lines(process):
        seen.append(record)
        if kill_after is not None and len(seen) >= kill_after:
            time.sleep(chance.uniform(0, MOST_DELAY_SECONDS))
            break
    if kill_after is not None:
        kill_all(process.pid)  # with the workers of its loader, which have its output open
        seen += _lines(process)
    status = process.wait()
    if status and kill_after is None:
        raise RuntimeError(f"start {start} ended with {status}: {log.read_text()[-300:]}")
    return seen


def _lines(process: subprocess.Popen[str]) -> Iterator[Record]:
    assert process.stdout is not None
    for line in process.stdout:
        with contextlib.suppress(ValueError):  # cut off by the kill
            yield json.loads(line)


CASES: Cases = {
    "SIGKILLs": killed,
    "one process": one_process,
    "SIGKILL, any kernels": partial(killed, kills=1, any_kernels=True),
}
SMALL_CASES = 2
