"""`make bench-codecs`: sizes and costs of encoded checkpoints of real training states, side by side.

Every method encodes the same states, trained for at least 200 iterations, in blocks of 16 MiB, on one core. The
base is the checkpoint `--distance` iterations earlier. MB/s are of raw bytes, the fastest of some rounds; CPU
is that of encoding. Metadata is the share of the stored bytes.
"""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from benchmarks.harness import Table, cost_of, output_of, run

from . import checkpoints, differences, reading, training
from .methods import LIMITED, Block, Method, blocks, has_zipnn, methods
from .training import DISTANCES, States

COLUMNS = {
    f"{'':<20}": "", "   ratio": ".2f", "encode MB/s": ",.0f", "decode MB/s": ",.0f", "CPU s/GB": ".2f",
    "metadata": ".2%",
}  # fmt: skip
BY_DISTANCE = ("planes", "XOR + planes", "difference + planes", "chosen", "Merkle tree", "chunk digests")
LIMITS = {"without a base": 2.0, "with a base": differences.LEAST_GAIN_OF_BASE, "with a base, limited": LIMITED}


class Result(NamedTuple):
    ratio: float
    encode_mb_s: float
    decode_mb_s: float | None
    cpu_seconds_per_gb: float
    metadata_share: float


def main(
    distance: Literal[*DISTANCES] = 10, rounds: int = 3, incremental: Path | None = None
) -> dict[str, float]:  # fmt: skip
    """Measure all methods on all states.

    Args:
        distance: iterations from the base
        incremental: Python that runs `benchmarks.codecs.incremental` as well
    """
    torch.set_num_threads(1)
    print(f"versions  torch {torch.__version__}, zipnn {version('zipnn') if has_zipnn() else 'not installed'}")
    print(f"base      {distance} iterations earlier", flush=True)
    trained = states()
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, list(every)[:1])
    results = {each.name: side_by_side(each, distance, rounds) for each in trained}
    ratios_by_distance(trained)
    os.sched_setaffinity(0, every)
    slowdown = {each.name: restores(each, distance, rounds) for each in trained}
    print(f"a sample that finds nothing takes {100 * reading.off_overhead(rounds):.2f} % of a write")
    figures = checkpoints.figures(512 << 20, rounds) | {
        "adam_fp32_ratio_with_base": results["GPT, AdamW, fp32"]["difference + planes"].ratio,
        "adam_bf16_ratio": results["GPT, AdamW, bf16 and fp32"]["planes"].ratio,
        "embedding_merkle_ratio": results["EmbeddingBag, SparseAdam"]["chunk digests"].ratio,
        "embedding_difference_ratio": results["EmbeddingBag, SparseAdam"]["chosen"].ratio,
        "restore_slowdown_with_base": slowdown["GPT, AdamW, fp32"]["with a base"],
        "metadata_share": max(each["chosen"].metadata_share for each in results.values()),
        "lora_reuse_ratio": results["LoRA on a frozen GPT"]["whole tensors"].ratio,
    }
    # incremental checkpoints need the libraries of the tests
    more = output_of("benchmarks.codecs.incremental", python=incremental.absolute()) if incremental else {}
    return figures | more


def states() -> list[States]:
    found: list[States] = []

    def add(name: str, job: training.Job, warm_up: int = 200) -> States:
        started = time.perf_counter()
        found.append(training.train(name, job, warm_up))
        size = sum(tensor.nbytes for tensor in found[-1].base.values()) / 1e6
        took = time.perf_counter() - started
        print(f"trained   {name}: {warm_up} iterations, {size:.1f} MB, {took:.0f} s", flush=True)
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
    data, found = blocks(each.later[distance], each.base), {}
    print(f"\nrestores from the disk, {each.name}")
    for name, limit in LIMITS.items():
        cost = reading.restore_cost(data, limit, rounds)
        found[name] = cost.slowdown
        print(
            f"  {name:<20} {cost.slowdown:5.2f} times the time of a plain one at {cost.plain_mb_s:,.0f} MB/s;"
            f" CPU s/GB {cost.cpu_seconds_per_gb:.2f}, plain {cost.plain_cpu_seconds_per_gb:.2f}",
            flush=True,
        )
    return found


def side_by_side(each: States, distance: int, rounds: int) -> dict[str, Result]:
    print(f"\n{each.name}")
    table, data, results = Table(COLUMNS, "  "), blocks(each.later[distance], each.base), {}
    for method in methods():
        results[method.name] = measured(method, data, rounds)
        table.row(method.name, *results[method.name])
    return results


def measured(method: Method, data: list[Block], rounds: int) -> Result:
    raw_bytes = sum(len(block.data) for block in data)
    costs, decoding = [], []
    encoded = [method.encode(block) for block in data]
    for _ in range(rounds):
        *cost, encoded = cost_of(lambda: [method.encode(block) for block in data], time.thread_time)
        costs.append(cost)
        if (decode := method.decode) is not None:
            pairs = list(zip(encoded, data, strict=True))
            seconds, _, decoded = cost_of(lambda: [decode(*pair) for pair in pairs])  # noqa: B023
            decoding.append(seconds)
    if method.decode is not None and method.name != "whole tensors":
        for found, block in zip(decoded, data, strict=True):
            assert np.array_equal(np.frombuffer(found, np.uint8), block.data), method.name
    stored = max(1, sum(each.stored_bytes for each in encoded))
    seconds, cpu = map(min, zip(*costs, strict=True))
    return Result(
        raw_bytes / stored,
        raw_bytes / 1e6 / seconds,
        raw_bytes / 1e6 / min(decoding) if decoding else None,
        cpu / raw_bytes * 1e9,
        sum(each.metadata_bytes for each in encoded) / stored,
    )


def ratios_by_distance(trained: list[States]) -> None:
    print("\nratio by distance of the base, in iterations")
    columns = {f"{distance:>7}": ".2f" for distance in DISTANCES}
    table = Table({f"{'state':<32}": "", f"{'method':<20}": ""} | columns)
    for each in trained:
        of_distance = [blocks(each.later[distance], each.base) for distance in DISTANCES]
        for method in [each for each in methods() if each.name in BY_DISTANCE]:
            stored = [sum(method.encode(block).stored_bytes for block in data) for data in of_distance]
            raw_bytes = sum(len(block.data) for block in of_distance[0])
            table.row(each.name, method.name, *(raw_bytes / max(1, size) for size in stored))


if __name__ == "__main__":
    run(main)
