"""Bytes that checkpoints send to a store, counted there, as a share of the write budget.

A session trains in real time under `checkfreq` with an overhead budget that does not decide. Nothing is deleted,
so that the files in the store are all that was written; a file that several checkpoints link counts once.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import free_port, in_process, meeting_place, scratch

WRITE_BUDGET_BYTES = 4_000_000
"""Per second."""
SECONDS = 25.0
ITERATION_SECONDS = 0.03
FEWEST_CHECKPOINTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCase:
    """Settings of a session that change what it writes."""

    ranks: int = 1
    frozen: bool = False
    """Half of the model is frozen: files with it are linked."""
    settings: tuple[tuple[str, Any], ...] = ()


CASES = {
    "plain": WrittenCase(),
    "compressed": WrittenCase(settings=(("compress", True),)),
    "parity 4+2": WrittenCase(settings=(("parity", "4+2"),)),
    "frozen weights, linked": WrittenCase(frozen=True),
    "two ranks": WrittenCase(ranks=2),
}


def written_share(case: WrittenCase, folder: Path, seconds: float = SECONDS) -> tuple[float, int]:
    """Train, and return what was written as a share of the write budget, and the number of checkpoints.

    From the first planned checkpoint to the last: those before it measure, as soon as possible.
    """
    with scratch(folder) as store, contextlib.ExitStack() as started:
        port = free_port()
        ranks = [in_process(_train, rank, port, case, store, seconds) for rank in range(case.ranks)]
        for rank in [started.enter_context(each) for each in ranks]:
            rank.result(seconds + 120)
        return _share(store)


def _share(store: Path) -> tuple[float, int]:
    checkpoints = sorted((path.stat().st_mtime, path.parent) for path in store.rglob("manifest.json"))
    planned = checkpoints[3:-1]  # neither those before the first plan nor the final one
    if len(planned) < FEWEST_CHECKPOINTS:
        raise RuntimeError(f"only {len(checkpoints)} checkpoints: too few to measure what they write")
    counted = {status.st_ino for status in _files(checkpoints[:3])}
    later = {status.st_ino: status.st_size for status in _files(planned[1:])}
    written = sum(size for number, size in later.items() if number not in counted)
    return written / (planned[-1][0] - planned[0][0]) / WRITE_BUDGET_BYTES, len(planned)


def _files(checkpoints: list[tuple[float, Path]]) -> list[os.stat_result]:
    return [path.stat() for _, folder in checkpoints for path in folder.rglob("*") if path.is_file()]


def _train(rank: int, port: int, case: WrittenCase, store: Path, seconds: float) -> None:
    import torch

    import holdfast

    torch.set_num_threads(1)
    torch.manual_seed(1)
    if case.ranks > 1:
        os.environ |= meeting_place(rank, case.ranks, port)
        torch.distributed.init_process_group("gloo")
    layers = [torch.nn.Linear(400, 400), torch.nn.Linear(400, 400)]
    layers[0].requires_grad_(not case.frozen)
    inner = torch.nn.Sequential(*layers)
    model = inner if case.ranks == 1 else torch.nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(layer for layer in inner.parameters() if layer.requires_grad)
    session = holdfast.Session(
        "written", model=model, optimizer=optimizer, store=store, policy="checkfreq", budget=1.0, keep=500,
        write_budget=float(WRITE_BUDGET_BYTES), **dict(case.settings),
    )  # fmt: skip
    with session:
        session.resume()
        ends = time.monotonic() + seconds
        stop = torch.zeros(1)
        while not stop.item():
            optimizer.zero_grad()
            model(torch.randn(8, 400)).square().mean().backward()
            optimizer.step()
            time.sleep(ITERATION_SECONDS)
            session.step()
            stop.fill_(time.monotonic() > ends)
            if case.ranks > 1:
                torch.distributed.broadcast(stop, 0)


def figures(folder: Path) -> dict[str, float]:
    """Print the share of each case, and return the largest."""
    print(f"bytes counted at a store, with a write budget of {WRITE_BUDGET_BYTES / 1e6:g} MB/s:")
    shares = []
    for name, case in CASES.items():
        share, checkpoints = written_share(case, folder)
        shares.append(share)
        print(f"  {share:.3f} of the write budget in {checkpoints} checkpoints: {name}", flush=True)
    return {"written_at_store_of_write_budget": round(max(shares), 3)}
