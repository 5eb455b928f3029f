"""`python -m benchmarks.parity`: what parity costs, and how fast damage is found and repaired, on one core.

The store is in memory, so that the figures are those of the processor. MB/s are of payload bytes.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable

from holdfast.checkpoint import restore
from holdfast.checkpoint.scrub import scrub
from holdfast.format import manifest as fmt
from holdfast.format.parity_file import PARITY_BLOCK_BYTES, ParityCode
from holdfast.format.parity_stripes import build_parity
from holdfast.store import Store, open_store
from tests.support.edited_manifests import commit_manifest

JOB, CHECKPOINT, FILE = "job", "000000000001-1", "rank-0.safetensors"
CODES = (ParityCode(10, 2), ParityCode(32, 1), ParityCode(32, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=200.0, help="size of the payload")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
    print(f"machine   one core of {platform.machine()}, {platform.system()} {platform.release()}", flush=True)
    size_bytes = int(options.megabytes * 1e6)
    memory = mmap.mmap(-1, size_bytes)
    memory.write(random.Random(1).randbytes(size_bytes))
    payload = memoryview(memory)
    figures: dict[str, float] = {}
    digest = _speed(size_bytes, options.rounds, lambda: fmt.digest_tensor(payload))
    print(f"digests of a payload: {digest:,.0f} MB/s\n")
    print("parity   encode MB/s  scrub MB/s  repair MB/s  restore with repair MB/s  space %")
    for code in CODES:
        found = _measured(code, payload, options.rounds)
        columns = ("encode_mb_s", "scrub_mb_s", "repair_mb_s", "restore_mb_s", "space_percent")
        print(f"{code!s:<8} " + "  ".join(f"{found[name]:10,.1f}" for name in columns), flush=True)
        figures |= {f"{code}_{name}": round(value, 2) for name, value in found.items()}
    print(f"figures: {json.dumps(figures | {'digest_mb_s': round(digest, 2)})}")


def _speed(size_bytes: int, rounds: int, act: Callable[[], object]) -> float:
    took = []
    for _ in range(rounds):
        started = time.perf_counter()
        act()
        took.append(time.perf_counter() - started)
    return size_bytes / 1e6 / statistics.median(took)


def _measured(code: ParityCode, payload: memoryview, rounds: int) -> dict[str, float]:
    size_bytes = len(payload)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as place:
        store = open_store(place)
        stored = _write(store, code, payload)
        file = f"{place}/{JOB}/{CHECKPOINT}/{FILE}"

        def damage() -> None:
            """Overwrite a tenth of a percent of the blocks, each alone in its stripe."""
            count = max(1, size_bytes // PARITY_BLOCK_BYTES // 1000)
            stripes = size_bytes // PARITY_BLOCK_BYTES // code.data_blocks
            with open(file, "r+b") as opened:
                for block in random.Random(2).sample(range(stripes), min(count, stripes)):
                    opened.seek(block * PARITY_BLOCK_BYTES)
                    opened.write(b"?" * PARITY_BLOCK_BYTES)

        def repaired() -> None:
            assert scrub(store, JOB, CHECKPOINT, repair=True).state == "repaired"

        def restored() -> None:
            assert restore.load(store, JOB, CHECKPOINT).repaired

        sound = _speed(size_bytes, rounds, lambda: scrub(store, JOB, CHECKPOINT))
        repair, restoring = [], []
        for _ in range(rounds):
            damage()
            restoring.append(_speed(size_bytes, 1, restored))
            repair.append(_speed(size_bytes, 1, repaired))
        return {
            "encode_mb_s": _speed(size_bytes, rounds, lambda: build_parity(code, FILE, [payload])),
            "scrub_mb_s": sound,
            "repair_mb_s": statistics.median(repair),
            "restore_mb_s": statistics.median(restoring),
            "space_percent": 100 * stored / size_bytes,
        }


def _write(store: Store, code: ParityCode, payload: memoryview) -> int:
    """Commit a checkpoint of one tensor, and return the size of its parity file."""
    size_bytes = len(payload)
    header = fmt.payload_header(fmt.lay_out([("weights", "U8", (size_bytes,))]), {})
    digest, chunks = fmt.digest_tensor(payload)
    found, parity = build_parity(code, FILE, [header, payload])
    file = fmt.File(
        name=FILE, size_bytes=len(header) + size_bytes, header_bytes=len(header), header_digest=fmt.digest(header),
        parity=parity,
    )  # fmt: skip
    tensor = fmt.Tensor(
        name="weights", dtype="U8", shape=(size_bytes,), global_shape=(size_bytes,), offsets=(0,), file=FILE,
        start=len(header), end=len(header) + size_bytes, digest=digest, chunks=chunks,
    )  # fmt: skip
    attempt = store.acquire_attempt(JOB, "benchmark").number
    manifest = fmt.Manifest(
        job=JOB, iteration=1, lineage=1, attempt=attempt, kind="scheduled", created_at=0.0, parent=None,
        world_size=1, files=[file], tensors=[tensor], state={},
    )  # fmt: skip
    writer = store.begin(JOB, CHECKPOINT, attempt, file.stored_bytes)
    writer.write(FILE, [header, payload])
    writer.write(parity.name, [found])
    commit_manifest(writer, manifest)
    return parity.size_bytes


if __name__ == "__main__":
    main()
