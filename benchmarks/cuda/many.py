"""Stage `many`: several processes on one device, and two ranks on one device."""

from __future__ import annotations

import collections
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from benchmarks.harness import ROOT, free_port, meeting_place

from .stages import CaseResult, Cases, Context

PROCESSES = 12


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
        port = free_port()
        started = [_start(context, backend, backend, **meeting_place(rank, 2, port)) for rank in range(2)]
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


def main(device: str, store: str, backend: str = "") -> None:
    if backend:
        dist.init_process_group(backend)
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


CASES: Cases = {"12 processes": processes, "two ranks": ranks}

if __name__ == "__main__":
    main(*sys.argv[1:])
