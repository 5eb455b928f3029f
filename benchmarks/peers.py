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

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
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


def work(folder: Path, rounds: int, seconds: float, width: int) -> None:
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
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps({"rounds": results, "sent": sent}))
    held.close()


def run(rounds: int, seconds: float, width: int) -> dict[str, float]:
    """Run both ranks; return the figures."""
    with tempfile.TemporaryDirectory() as place:
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        arguments = [str(rounds), str(seconds), str(width)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peers", "--work", place, *arguments],
                env=environment | {"RANK": str(rank)},
            )
            for rank in range(RANKS)
        ]
        statuses = [rank.wait() for rank in ranks]
        if any(statuses):
            raise SystemExit("a rank failed")
        found = json.loads(Path(place, "results.json").read_text())
    bare = [each["bare"]["seconds"] for each in found["rounds"]]
    figures = {"iteration_seconds": statistics.median(bare)}
    for mode, prefix in (("alone", ""), ("peers", "peers_")):
        for name, of in (("overhead", "seconds"), ("settled_overhead", "settled")):
            slower = [each[mode][of] / each["bare"][of] - 1 for each in found["rounds"]]
            figures[f"{prefix}{name}"] = statistics.median(slower)
        figures[f"{prefix}measured_overhead"] = statistics.median(
            each[mode]["measured"] for each in found["rounds"]
        )
    figures["snapshots_sent"] = sum(found["sent"])
    figures["sent_share"] = sum(found["sent"]) / max(1, len(found["sent"]))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, for each mode in each round")
    parser.add_argument(
        "--width", type=int, default=1024, help="of the layers; the state has 48 bytes times its square"
    )
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        folder, rounds, seconds, width = options.work
        work(Path(folder), int(rounds), float(seconds), int(width))
        return
    figures = run(options.rounds, options.seconds, options.width)
    for name, value in figures.items():
        print(f"{name:28} {value:.4f}")
    print("figures:", json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
