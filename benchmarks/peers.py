"""`python -m benchmarks.peers`: what sending snapshots to another host costs, next to the same job without it.

Two ranks under DistributedDataParallel, each with a supervisor's memory of its own, as if on two hosts, so that
both send and receive over the loopback interface. They train in turn without Holdfast, with it, and with
`peers=1`, at the shortest interval that the budget allows (policy `checkfreq`). Figures, each the median of the
rounds:

- `overhead`, `peers_overhead`: time that an iteration takes longer than without Holdfast, as a share.
- `settled_overhead`, `peers_settled_overhead`: the same of the second half, without the allocations of the first
  checkpoints; this is what the sessions report.
- `measured_overhead`, `peers_measured_overhead`: what the sessions report, which the budget limits.
- `sent_share`: snapshots that the other rank held at the end, of those that became durable.
"""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
from benchmarks.harness import free_port, meeting_place, output_of, print_figures, run, scratch
from holdfast.peers.replica_sender import ReplicaSender
from holdfast.save.shared_buffers import SupervisorMemory
from holdfast.system import supervisor_channel

RANKS = 2
MODES = ("bare", "alone", "peers")


def train(folder: Path, mode: str, number: int, seconds: float, width: int) -> dict[str, float]:
    """Train for some time; return the mean seconds of an iteration, and what the session measured."""
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session = None if mode == "bare" else holdfast.Session(
        f"{mode}-{number}", store=folder / "store", model=model, optimizer=optimizer, peers=int(mode == "peers"),
        keep=2, write_budget="10TB/h", policy="checkfreq",
    )  # fmt: skip
    batch, times, began = torch.randn(64, width), list[float](), time.perf_counter()
    goes_on = torch.ones(1)
    while goes_on:
        started = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if session is not None:
            session.step()
        times.append(time.perf_counter() - started)
        goes_on = torch.tensor([float(time.perf_counter() - began < seconds)])
        dist.broadcast(goes_on, 0)
    found = {"seconds": statistics.fmean(times[5:]), "settled": statistics.fmean(times[len(times) // 2 :])}
    if session is not None:
        found["measured"] = session.measured_overhead or 0.0
        session.wait()
        found["durable"] = len(list((folder / "store" / session.job).glob("[0-9]*")))
        session.close()
    return found


def work(folder: Path, rounds: int, seconds: float, width: int) -> dict[str, Any]:
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    memory = folder / f"host-{dist.get_rank()}"
    memory.mkdir()
    held = SupervisorMemory(memory)
    os.environ[supervisor_channel.VARIABLE] = str(memory)
    sent = list[bool]()
    send = ReplicaSender._send

    def sending(sender: ReplicaSender, run: Any) -> bool:
        sent.append(send(sender, run))
        return sent[-1]

    with (
        mock.patch("holdfast.peers.tier.machine_id", return_value=str(memory)),
        mock.patch.object(ReplicaSender, "_send", sending),
    ):
        results = [
            {mode: train(folder, mode, number, seconds, width) for mode in MODES} for number in range(rounds)
        ]
    held.close()
    return {"rounds": results, "sent": sent}


def main(rounds: int = 3, seconds: float = 60.0, width: int = 1024, folder: Path | None = None) -> Any:
    """Run both ranks; return the figures.

    Args:
        seconds: of training, for each mode in each round
        width: of the layers; the state has 48 bytes times its square
        folder: set for the process of a rank
    """
    if folder is not None:
        return work(folder, rounds, seconds, width)
    with scratch() as place, ThreadPoolExecutor(RANKS) as pool:
        options = f"--rounds={rounds}", f"--seconds={seconds}", f"--width={width}", f"--folder={place}"
        port = free_port()
        environments = [meeting_place(rank, RANKS, port) | {"OMP_NUM_THREADS": "1"} for rank in range(RANKS)]
        ranks = [pool.submit(output_of, "benchmarks.peers", *options, **each) for each in environments]
        found, _ = (rank.result() for rank in ranks)
    figures = {"iteration_seconds": statistics.median(each["bare"]["seconds"] for each in found["rounds"])}
    for mode, prefix in (("alone", ""), ("peers", "peers_")):
        for name, of in (("overhead", "seconds"), ("settled_overhead", "settled")):
            slower = [each[mode][of] / each["bare"][of] - 1 for each in found["rounds"]]
            figures[f"{prefix}{name}"] = statistics.median(slower)
        measured = [each[mode]["measured"] for each in found["rounds"]]
        figures[f"{prefix}measured_overhead"] = statistics.median(measured)
    figures["snapshots_sent"] = sum(found["sent"])
    figures["sent_share"] = sum(found["sent"]) / max(1, len(found["sent"]))
    print_figures(figures)
    return figures


if __name__ == "__main__":
    run(main)
