"""Stage `many`: several processes on one device, and two ranks on one device."""

from __future__ import annotations

import collections
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

from .stages import CaseResult, Context

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 12


def cases(context: Context) -> list[tuple[str, Callable[[], CaseResult]]]:
    return [("12 processes", partial(processes, context)), ("two ranks", partial(ranks, context))]


def processes(context: Context) -> CaseResult:
    """Start processes that each multiply matrices and take a checkpoint; return the reasons of failures."""
    number = 2 if context.small else PROCESSES
    started = [_start(context, f"alone-{each}") for each in range(number)]
    reasons = collections.Counter(filter(None, map(_reason, started)))
    values = {"processes": number, "failed": sum(reasons.values())}
    return CaseResult(values, not reasons, "; ".join(f"{count} × {reason}" for reason, count in reasons.items()))


def ranks(context: Context) -> CaseResult:
    """Run two ranks on the device, over NCCL if it allows that, else over gloo."""
    notes: list[str] = []
    for backend in ("nccl", "gloo") if context.device == "cuda" else ("gloo",):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        started = [_start(context, backend, backend, **settings, RANK=str(rank)) for rank in range(2)]
        reasons = [reason for reason in map(_reason, started) if reason]
        if not reasons:
            return CaseResult({"backend": backend}, True, "; ".join(notes))
        notes.append(f"{backend}: {reasons[0]}")
    return CaseResult({"backend": "none"}, False, "; ".join(notes))


def _start(context: Context, name: str, *more: str, **settings: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.cuda.many", context.device, str(context.folder / name), *more]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _reason(process: subprocess.Popen[str]) -> str:
    """Wait for a process; return the last line of its error, or an empty text."""
    output, _ = process.communicate()
    if process.returncode == 0:
        return ""
    lines = [line.strip() for line in output.splitlines() if "Error" in line or "error" in line]
    return f"exit status {process.returncode}: {(lines or output.splitlines() or [''])[-1][:200]}"


def main() -> None:
    device, store, *backend = sys.argv[1:]
    if backend:
        dist.init_process_group(backend[0])
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).to(device)
    if backend:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = holdfast.Session("many", store=store, server="", every=1, model=model, optimizer=optimizer)
    with session:
        for _ in range(3):
            model(torch.ones(64, 512, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
            session.wait(60)
    if backend:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
