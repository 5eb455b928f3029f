"""`python -m benchmarks.ingest`: ingest and query rates of the server, compared with MLflow and Trackio."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from .in_loop import log_call_seconds
from .load import LoadResult, percentile_ms, post_all
from .peers import METRICS, HoldfastPeer, MLflow, Peer, Trackio
from .reading import fetch, long_run, many_jobs, median_ms, mlflow_path, mlflow_run, timeline_path
from .running import BenchmarkServer, free_port, running, settle
from .waiting import job_name, order_latencies_seconds

ROOT = Path(__file__).resolve().parents[2]
BODIES_A_SECOND = {"holdfast": 600, "mlflow": 20, "trackio": 120}
"""More than any server accepts."""
CLIENTS = (1, 4)
PARTS = ("ingest", "reads", "log", "orders")
LONG_RUN = 1_000_000
FLEET = 10_000


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    with (
        tempfile.TemporaryDirectory(prefix=".bench-ingest-", dir=options.folder) as made,
        contextlib.ExitStack() as ours,
    ):
        folder = Path(made)
        peers = _peers(options)
        print(f"machine   {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}")
        print(f"versions  {', '.join(_versions(options.peers))}", flush=True)
        server = ours.enter_context(_started(peers[0], folder))
        figures: dict[str, float] = {}
        with contextlib.ExitStack() as theirs:
            up = {peer.name: theirs.enter_context(_started(peer, folder)) for peer in peers[1:]}
            up[peers[0].name] = server
            settle(up.values())
            if "ingest" in options.parts:
                figures |= _ingest(peers, up, options)
            if "reads" in options.parts:
                figures |= _reads(peers, up, folder, options)
        if "log" in options.parts:
            figures |= _logs(server)
        if "orders" in options.parts:
            figures |= _waits(server, options)
        ours.close()
        samples = sum(figures.pop(name, 0) for name in ("samples_taken_in", "samples_read"))
        if samples:
            figures["bytes_per_sample"] = round(HoldfastPeer().disk_bytes(folder) / samples, 2)
            print(f"on disk: {figures['bytes_per_sample']} bytes a sample, {samples:,.0f} samples")
    print(f"figures: {json.dumps(figures)}")


def _ingest(peers: list[Peer], up: dict[str, BenchmarkServer], options: argparse.Namespace) -> dict[str, float]:
    """Measure in turns: each round runs every server with every number of clients."""
    found: dict[tuple[str, int], list[LoadResult]] = defaultdict(list)
    samples = 0
    print(f"taking in, medians of {options.rounds} rounds of {options.seconds:g} s (1,000 samples a request):")
    for number in range(1, options.rounds + 1):
        for clients in CLIENTS:
            for peer in peers[number % len(peers) :] + peers[: number % len(peers)]:
                port = up[peer.name].port
                bodies = -(-BODIES_A_SECOND[peer.name] * options.seconds // clients)
                posts = peer.posts(port, clients, int(bodies))
                load = post_all(posts, options.seconds)
                found[peer.name, clients].append(load)
                samples += load.samples if peer.name == "holdfast" else 0
        print(f"  round {number} of {options.rounds} done", flush=True)
    rates = {key: statistics.median(load.rate for load in loads) for key, loads in found.items()}
    print("  server     clients   samples/s     p50 ms    p99 ms")
    for (name, clients), loads in sorted(found.items()):
        p50, p99 = (percentile_ms(loads, percent) for percent in (50, 99))
        print(f"  {name:<10} {clients:>7}   {rates[name, clients]:>9,.0f}   {p50:>8.1f}  {p99:>8.1f}", flush=True)
    p99_ms = round(percentile_ms(found["holdfast", 4], 99), 1)
    figures = {"ingest_p99_ms_4": p99_ms, "samples_taken_in": float(samples)}
    for name, clients in (("mlflow", 1), ("mlflow", 4), ("trackio", 4)):
        if (name, clients) in rates:
            ratio = rates["holdfast", clients] / rates[name, clients]
            figures[f"ingest_vs_{name}_{clients}"] = round(ratio, 1)
    return figures


def _reads(
    peers: list[Peer], up: dict[str, BenchmarkServer], folder: Path, options: argparse.Namespace
) -> dict[str, float]:
    ours, server = HoldfastPeer(), up["holdfast"]
    figures: dict[str, float] = {}
    job, memory = long_run(ours, server, options.long_run)
    figures["server_pss_mb"] = round(max(memory) / 1e6, 1)
    megabytes = ", ".join(f"{each / 1e6:.0f}" for each in memory)
    print(
        f"memory before {10 * options.long_run:,} samples, and after each tenth of them: {megabytes} MB",
        flush=True,
    )
    settle([server])
    mine, whole = (
        median_ms(fetch(server.port, timeline_path(job, metric=asked), ours.headers()), 15)
        for asked in (METRICS[0], None)
    )
    figures["timeline_ms"] = round(mine, 1)
    print(f"timeline of {options.long_run:,} iterations, one metric: {mine:.1f} ms, all ten: {whole:.1f} ms")
    for peer in peers:
        if isinstance(peer, MLflow):
            port = up["mlflow"].port
            theirs = median_ms(fetch(port, mlflow_path(mlflow_run(peer, port, folder, options.long_run))), 3)
            figures["timeline_vs_mlflow"] = round(theirs / mine, 1)
            print(f"  MLflow's own downsampled call, one metric: {theirs:,.0f} ms", flush=True)
    many_jobs(ours, server.port, [f"fleet-{number:05d}" for number in range(options.fleet)])
    settle([server])
    figures["fleet_ms"] = round(median_ms(fetch(server.port, "/", ours.headers()), 15), 1)
    print(f"fleet page of {options.fleet:,} jobs: {figures['fleet_ms']} ms", flush=True)
    figures["samples_read"] = 10.0 * options.long_run
    return figures


def _waits(server: BenchmarkServer, options: argparse.Namespace) -> dict[str, float]:
    ours = HoldfastPeer()
    many_jobs(ours, server.port, [job_name(number) for number in range(options.agents)])
    settle([server])
    figures, before = dict[str, float](), server.cpu_seconds()

    def until_all_wait() -> None:
        settle([server])  # orders are not to be measured against the arrival of all agents at once
        figures["poll_cpu_ms"] = round(1000 * (server.cpu_seconds() - before) / options.agents, 2)

    latencies = order_latencies_seconds(server.port, ours.token, options.agents, options.orders, until_all_wait)
    cuts = statistics.quantiles(latencies, n=100)
    print(
        f"an edit reaches its agent, one of {options.agents:,}, in {1000 * cuts[49]:.1f} ms, "
        f"p99 {1000 * cuts[98]:.1f} ms"
    )
    print(f"CPU of a long poll that begins: {figures['poll_cpu_ms']} ms")
    return figures | {"order_p50_ms": round(1000 * cuts[49], 1), "order_p99_ms": round(1000 * cuts[98], 1)}


def _logs(server: BenchmarkServer) -> dict[str, float]:
    p50, p99 = log_call_seconds(server.port)
    print(f"one call with ten metrics in the loop: {1e6 * p50:.1f} us, p99 {1e6 * p99:.1f} us", flush=True)
    return {"log_call_p50_us": round(1e6 * p50, 2), "log_call_p99_us": round(1e6 * p99, 2)}


def _started(peer: Peer, folder: Path) -> contextlib.AbstractContextManager[BenchmarkServer]:
    port = free_port()
    return running(
        peer.command(folder, port),
        port=port,
        ready=peer.ready,
        log=folder / f"{peer.name}.log",
        environment=peer.environment(folder, port),
    )


def _here(path: str) -> Path:
    """Resolve the path: servers start in another directory."""
    return Path(path).absolute()


def _peers(options: argparse.Namespace) -> list[Peer]:
    """Return the servers that the chosen parts need."""
    python, found = options.peers, list[Peer]([HoldfastPeer()])
    if python.exists() and not {"ingest", "reads"}.isdisjoint(options.parts):
        found.append(MLflow(python))
    if python.exists() and "ingest" in options.parts:
        found.append(Trackio(python))
    return found


def _versions(python: Path) -> list[str]:
    asked = "from importlib.metadata import version as v; print(f\"mlflow {v('mlflow')}, trackio {v('trackio')}\")"
    found = [f"Python {platform.python_version()}"]
    if python.exists():
        found.append(
            subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
        )
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-ingest", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--peers", type=_here, default=ROOT / ".venv-bench-ingest/bin/python", help="the Python that has the peers"
    )
    add("--folder", type=Path, default=ROOT, help="directory of the databases, on the disk to measure")
    add("--parts", type=_parts, default=PARTS, help=f"of {','.join(PARTS)}, those to be run")
    add("--quick", action="store_true", help="small sizes as a smoke test; the figures mean nothing")
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=4.0, help="of one turn of one server")
    add("--long-run", type=int, default=LONG_RUN, help="iterations")
    add("--fleet", type=int, default=FLEET, help="jobs")
    add("--agents", type=int, default=2000, help="that hold long polls")
    add("--orders", type=int, default=300)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.long_run = 1, 1.0, 20_000
        options.fleet, options.agents, options.orders = 200, 100, 20
    return options


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if not set(parts) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r}: name some of {', '.join(PARTS)}")
    return parts


if __name__ == "__main__":
    main()
