"""`make bench-codecs`: sizes and costs of encoded checkpoints of real training states, side by side.

Every method encodes the same states, trained for at least 200 iterations, in blocks of 16 MiB, on one core. The
base is the checkpoint `--distance` iterations earlier. MB/s are of raw bytes, the fastest of some rounds; CPU
is that of encoding. Metadata is the share of the stored bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch

from . import checkpoints, differences, reading, training
from .methods import LIMITED, Block, Encoded, Method, blocks, has_zipnn, methods
from .training import DISTANCES, States

COLUMNS = f"  {'':<20} {'ratio':>8} {'encode MB/s':>12} {'decode MB/s':>12} {'CPU s/GB':>9} {'metadata':>9}"
BY_DISTANCE = (
    "planes",
    "XOR + planes",
    "difference + planes",
    "chosen",
    "Merkle tree",
    "chunk digests",
)


@dataclass(frozen=True, slots=True)
class Result:
    ratio: float
    encode_mb_s: float
    decode_mb_s: float
    cpu_seconds_per_gb: float
    metadata_share: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--distance", type=int, default=10, choices=DISTANCES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--incremental", help="Python that runs `benchmarks.codecs.incremental` as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"machine   one core of {platform.machine()}, {platform.system()} {platform.release()}")
    print(f"versions  torch {torch.__version__}, zipnn {version('zipnn') if has_zipnn() else 'not installed'}")
    print(f"base      {options.distance} iterations earlier", flush=True)
    trained = states()
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, list(every)[:1])
    results = {each.name: side_by_side(each, options.distance, options.rounds) for each in trained}
    ratios_by_distance(trained)
    os.sched_setaffinity(0, every)
    slowdown = {each.name: restores(each, options.distance, options.rounds) for each in trained}
    print(f"a sample that finds nothing takes {100 * reading.off_overhead(options.rounds):.2f} % of a write")
    figures = checkpoints.figures(512 << 20, options.rounds) | {
        "adam_fp32_ratio_with_base": results["GPT, AdamW, fp32"]["difference + planes"].ratio,
        "adam_bf16_ratio": results["GPT, AdamW, bf16 and fp32"]["planes"].ratio,
        "embedding_merkle_ratio": results["EmbeddingBag, SparseAdam"]["chunk digests"].ratio,
        "embedding_difference_ratio": results["EmbeddingBag, SparseAdam"]["chosen"].ratio,
        "restore_slowdown_with_base": slowdown["GPT, AdamW, fp32"]["with a base"],
        "metadata_share": max(each["chosen"].metadata_share for each in results.values()),
        "lora_reuse_ratio": results["LoRA on a frozen GPT"]["whole tensors"].ratio,
    }
    if options.incremental:
        figures |= incremental_figures(options.incremental)
    print(f"figures: {json.dumps({name: round(value, 4) for name, value in figures.items()})}")


def incremental_figures(python: str) -> dict[str, float]:
    """Run the benchmark of incremental checkpoints, which needs the libraries of the tests."""
    command = [python, "-m", "benchmarks.codecs.incremental"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        *_, last = (print(line, end="", flush=True) or line for line in process.stdout)
    assert process.returncode == 0, command
    found: dict[str, float] = json.loads(last.removeprefix("figures: "))
    return found


def states() -> list[States]:
    found: list[States] = []

    def add(name: str, job: training.Job, warm_up: int = 200) -> States:
        started = time.perf_counter()
        found.append(training.train(name, job, warm_up))
        size = sum(tensor.nbytes for tensor in found[-1].base.values()) / 1e6
        print(
            f"trained   {name}: {warm_up} iterations, {size:.1f} MB, {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        return found[-1]

    add("GPT, AdamW, fp32", training.gpt_fp32())
    bf16 = add("GPT, AdamW, bf16 and fp32", training.gpt_bf16())
    start = bf16.later[max(DISTANCES)]
    add("the same from there at lr 1e-6", training.gpt_bf16(1e-6, start))
    add("LoRA on a frozen GPT", training.lora())
    add("EmbeddingBag, SparseAdam", training.embeddings(sparse=True), 2000)
    add("EmbeddingBag, AdamW", training.embeddings(sparse=False), 2000)
    return found


def restores(each: States, distance: int, rounds: int) -> dict[str, float]:
    """Print what restores cost; return their times relative to a plain one, by use of the base."""
    data = blocks(each.later[distance], each.base)
    print(f"\nrestores from the disk, {each.name}")
    any_gain = differences.LEAST_GAIN_OF_BASE
    limits = {"without a base": 2.0, "with a base": any_gain, "with a base, limited": LIMITED}
    found = {}
    for name, limit in limits.items():
        cost = reading.restore_cost(data, limit, rounds)
        found[name] = cost.slowdown
        print(
            f"  {name:<20} {cost.slowdown:5.2f} times the time of a plain one at {cost.plain_mb_s:,.0f} MB/s;"
            f" CPU s/GB {cost.cpu_seconds_per_gb:.2f}, plain {cost.plain_cpu_seconds_per_gb:.2f}",
            flush=True,
        )
    return found


def side_by_side(each: States, distance: int, rounds: int) -> dict[str, Result]:
    print(f"\n{each.name}\n{COLUMNS}")
    data = blocks(each.later[distance], each.base)
    results = {}
    for method in methods():
        if "zipnn" in method.name and not has_zipnn():
            continue
        results[method.name] = result = measured(method, data, rounds)
        decoding = f"{result.decode_mb_s:12,.0f}" if result.decode_mb_s else f"{'-':>12}"
        print(
            f"  {method.name:<20} {result.ratio:8.2f} {result.encode_mb_s:12,.0f} {decoding}"
            f" {result.cpu_seconds_per_gb:9.2f} {100 * result.metadata_share:8.2f}%",
            flush=True,
        )
    return results


def measured(method: Method, data: list[Block], rounds: int) -> Result:
    raw_bytes = sum(len(block.data) for block in data)
    encoding, cpu, decoding = [], [], []
    encoded: list[Encoded] = [method.encode(block) for block in data]
    for _ in range(rounds):
        started, used = time.perf_counter(), time.thread_time()
        encoded = [method.encode(block) for block in data]
        encoding.append(time.perf_counter() - started)
        cpu.append(time.thread_time() - used)
        if method.decode is not None:
            started = time.perf_counter()
            decoded = [method.decode(found, block) for found, block in zip(encoded, data, strict=True)]
            decoding.append(time.perf_counter() - started)
    if method.decode is not None and method.name != "whole tensors":
        for found, block in zip(decoded, data, strict=True):
            assert np.array_equal(np.frombuffer(found, np.uint8), block.data), method.name
    stored = sum(each.stored_bytes for each in encoded)
    return Result(
        raw_bytes / max(1, stored),
        raw_bytes / 1e6 / min(encoding),
        raw_bytes / 1e6 / min(decoding) if decoding else 0.0,
        min(cpu) / raw_bytes * 1e9,
        sum(each.metadata_bytes for each in encoded) / max(1, stored),
    )


def ratios_by_distance(trained: list[States]) -> None:
    print(
        f"\nratio by distance of the base, in iterations\n  {'':<32} {'':<20}"
        + "".join(f"{d:>9}" for d in DISTANCES)
    )
    for each in trained:
        of_distance = {distance: blocks(each.later[distance], each.base) for distance in DISTANCES}
        for method in methods():
            if method.name in BY_DISTANCE:
                ratios = [
                    sum(len(block.data) for block in data)
                    / max(1, sum(method.encode(block).stored_bytes for block in data))
                    for data in of_distance.values()
                ]
                print(
                    f"  {each.name:<32} {method.name:<20}" + "".join(f"{ratio:9.2f}" for ratio in ratios),
                    flush=True,
                )


if __name__ == "__main__":
    main()
