"""`make bench-ingest`: ingest and query rates of the server, compared with MLflow and Trackio."""

from __future__ import annotations

import contextlib
import platform
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Literal

from benchmarks.harness import ROOT, BenchmarkServer, Table, percentiles_ms, run, scratch, settle

from .in_loop import log_call_seconds
from .load import LoadResult, percentile_ms, post_all
from .peers import METRICS, HoldfastPeer, MLflow, Peer, Trackio, started
from .reading import long_run, many_jobs, mlflow_path, mlflow_run, timeline_path
from .waiting import job_name, order_latencies_seconds

BODIES_A_SECOND = {"holdfast": 600, "mlflow": 20, "trackio": 120}
"""More than any server accepts."""
CLIENTS = (1, 4)
VERSIONS = (
    "from importlib.metadata import version; print(*((name, version(name)) for name in ('mlflow', 'trackio')))"
)
PARTS = ("ingest", "reads", "log", "orders")


def main(
    peers: Path = ROOT / ".venv-bench-ingest/bin/python",
    folder: Path = ROOT,
    parts: list[Literal[*PARTS]] = PARTS,
    quick: bool = False,
    rounds: int = 3,
    seconds: float = 4.0,
    long_run: int = 1_000_000,
    fleet: int = 10_000,
    agents: int = 2000,
    orders: int = 300,
) -> dict[str, float]:
    """Measure the chosen parts.

    Args:
        peers: the Python that has the peers
        folder: directory of the databases, on the disk to measure
        parts: those to be run
        quick: small sizes as a smoke test; the figures mean nothing
        seconds: of one turn of one server
        long_run: iterations
        fleet: jobs
        agents: that hold long polls
    """
    if quick:
        rounds, seconds, long_run, fleet, agents, orders = 1, 1.0, 20_000, 200, 100, 20
    figures: dict[str, float] = {}
    with scratch(folder) as made, contextlib.ExitStack() as ours:
        rivals = _rivals(peers.absolute(), parts)  # servers start in another directory
        server = ours.enter_context(started(HoldfastPeer(), made))
        with contextlib.ExitStack() as theirs:
            up = {peer: theirs.enter_context(started(peer, made)) for peer in rivals} | {HoldfastPeer(): server}
            settle(up.values())
            if "ingest" in parts:
                figures |= _ingest(up, rounds, seconds)
            if "reads" in parts:
                figures |= _reads(up, made, long_run, fleet)
        if "log" in parts:
            figures |= _logs(server)
        if "orders" in parts:
            figures |= _waits(server, agents, orders)
        ours.close()
        samples = sum(figures.pop(name, 0) for name in ("samples_taken_in", "samples_read"))
        if samples:
            figures["bytes_per_sample"] = round(HoldfastPeer().disk_bytes(made) / samples, 2)
            print(f"on disk: {figures['bytes_per_sample']} bytes a sample, {samples:,.0f} samples")
    return figures


def _rivals(python: Path, parts: list[str]) -> list[Peer]:
    """Print versions; return the other servers that the chosen parts need."""
    print(f"versions  Python {platform.python_version()}", flush=True)
    if not python.exists():
        return []
    subprocess.run([python, "-c", VERSIONS], check=True)
    rivals: dict[Peer, set[str]] = {MLflow(python): {"ingest", "reads"}, Trackio(python): {"ingest"}}
    return [peer for peer, needed in rivals.items() if needed & set(parts)]


def _ingest(up: dict[Peer, BenchmarkServer], rounds: int, seconds: float) -> dict[str, float]:
    """Measure in turns: each round runs every server with every number of clients."""
    found: dict[tuple[str, int], list[LoadResult]] = defaultdict(list)
    peers = list(up)
    print(f"taking in, medians of {rounds} rounds of {seconds:g} s (1,000 samples a request):")
    for number in range(1, rounds + 1):
        for clients in CLIENTS:
            for peer in peers[number % len(peers) :] + peers[: number % len(peers)]:
                bodies = -(-BODIES_A_SECOND[peer.name] * seconds // clients)
                posts = peer.posts(up[peer].port, clients, int(bodies))
                found[peer.name, clients].append(post_all(posts, seconds))
        print(f"  round {number} of {rounds} done", flush=True)
    rates = {key: statistics.median(load.rate for load in loads) for key, loads in found.items()}
    table = Table(
        {"server  ": "", "clients": "d", "samples/s": ",.0f", "  p50 ms": ".1f", "  p99 ms": ".1f"}, "  "
    )
    for (name, clients), loads in sorted(found.items()):
        table.row(name, clients, rates[name, clients], percentile_ms(loads, 50), percentile_ms(loads, 99))
    samples = sum(load.samples for (name, _), loads in found.items() if name == "holdfast" for load in loads)
    p99_ms = round(percentile_ms(found["holdfast", 4], 99), 1)
    return {"ingest_p99_ms_4": p99_ms, "samples_taken_in": float(samples)} | {
        f"ingest_vs_{name}_{clients}": round(rates["holdfast", clients] / rates[name, clients], 1)
        for name, clients in (("mlflow", 1), ("mlflow", 4), ("trackio", 4))
        if (name, clients) in rates
    }


def _reads(up: dict[Peer, BenchmarkServer], folder: Path, iterations: int, fleet: int) -> dict[str, float]:
    (ours, server), *theirs = reversed(up.items())
    job, memory = long_run(ours, server, iterations)
    megabytes = ", ".join(f"{each / 1e6:.0f}" for each in memory)
    print(f"memory before {10 * iterations:,} samples, and after each tenth of them: {megabytes} MB", flush=True)
    settle([server])
    mine, whole = (
        server.median_ms(timeline_path(job, metric=asked), 15, ours.headers()) for asked in (METRICS[0], None)
    )
    print(f"timeline of {iterations:,} iterations, one metric: {mine:.1f} ms, all ten: {whole:.1f} ms")
    figures = {"server_pss_mb": round(max(memory) / 1e6, 1), "timeline_ms": round(mine, 1)}
    for peer, other in theirs:
        if isinstance(peer, MLflow):
            path = mlflow_path(mlflow_run(peer, other.port, folder, iterations))
            taken = other.median_ms(path, 3)
            figures["timeline_vs_mlflow"] = round(taken / mine, 1)
            print(f"  MLflow's own downsampled call, one metric: {taken:,.0f} ms", flush=True)
    many_jobs(ours, server.port, [f"fleet-{number:05d}" for number in range(fleet)])
    settle([server])
    figures["fleet_ms"] = round(server.median_ms("/", 15, ours.headers()), 1)
    print(f"fleet page of {fleet:,} jobs: {figures['fleet_ms']} ms", flush=True)
    return figures | {"samples_read": 10.0 * iterations}


def _waits(server: BenchmarkServer, agents: int, orders: int) -> dict[str, float]:
    ours = HoldfastPeer()
    many_jobs(ours, server.port, [job_name(number) for number in range(agents)])
    settle([server])
    figures, before = dict[str, float](), server.cpu_seconds()

    def until_all_wait() -> None:
        settle([server])  # orders are not to be measured against the arrival of all agents at once
        figures["poll_cpu_ms"] = round(1000 * (server.cpu_seconds() - before) / agents, 2)

    latencies = order_latencies_seconds(server.port, ours.token, agents, orders, until_all_wait)
    p50, p99 = percentiles_ms(latencies)
    print(f"an edit reaches its agent, one of {agents:,}, in {p50:.1f} ms, p99 {p99:.1f} ms")
    print(f"CPU of a long poll that begins: {figures['poll_cpu_ms']} ms")
    return figures | {"order_p50_ms": round(p50, 1), "order_p99_ms": round(p99, 1)}


def _logs(server: BenchmarkServer) -> dict[str, float]:
    p50, p99 = (1000 * each for each in percentiles_ms(log_call_seconds(server.port)))
    print(f"one call with ten metrics in the loop: {p50:.1f} us, p99 {p99:.1f} us", flush=True)
    return {"log_call_p50_us": round(p50, 2), "log_call_p99_us": round(p99, 2)}


if __name__ == "__main__":
    run(main)
