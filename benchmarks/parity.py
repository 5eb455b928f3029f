"""`python -m benchmarks.parity`: what parity costs, and how fast damage is found and repaired, on one core.

The store is in memory, so that the figures are those of the processor. MB/s are of payload bytes.
"""

from __future__ import annotations

import os
import random
import statistics

import torch

from benchmarks.harness import Table, in_turns, median_seconds, memory_folder, run, scratch
from holdfast.checkpoint import restore
from holdfast.checkpoint.scrub import scrub
from holdfast.format import manifest as fmt
from holdfast.format.parity_file import PARITY_BLOCK_BYTES, ParityCode
from holdfast.format.parity_stripes import build_parity
from holdfast.system.host_memory import bytes_of
from tests.support.handmade_checkpoints import commit

CODES = (ParityCode(10, 2), ParityCode(32, 1), ParityCode(32, 2))
COLUMNS = ("encode_mb_s", "scrub_mb_s", "repair_mb_s", "restore_mb_s", "space_percent")


def main(megabytes: float = 200.0, rounds: int = 5) -> dict[str, float]:
    """Measure each code.

    Args:
        megabytes: size of the payload
    """
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
    payload = torch.frombuffer(bytearray(random.Random(1).randbytes(int(megabytes * 1e6))), dtype=torch.uint8)
    (seconds,) = median_seconds(rounds, lambda: fmt.digest_tensor(bytes_of(payload)))
    figures = {"digest_mb_s": round(megabytes / seconds, 2)}
    print(f"digests of a payload: {figures['digest_mb_s']:,.0f} MB/s, on one core\n")
    table = Table({"parity": ""} | dict.fromkeys(COLUMNS, ",.1f"))
    for code in CODES:
        found = _measured(code, payload, rounds)
        table.row(str(code), *found)
        figures |= {f"{code}_{name}": round(value, 2) for name, value in zip(COLUMNS, found, strict=True)}
    return figures


def _measured(code: ParityCode, payload: torch.Tensor, rounds: int) -> list[float]:
    """Return the values of the columns."""
    size_bytes, data = payload.nbytes, bytes_of(payload)
    with scratch(memory_folder()) as place:
        made = commit(place, {"weights": payload}, parity=code)
        checkpoint = made.store, made.job, made.id

        def damage() -> None:
            """Overwrite a tenth of a percent of the blocks, each alone in its stripe."""
            count = max(1, size_bytes // PARITY_BLOCK_BYTES // 1000)
            stripes = size_bytes // PARITY_BLOCK_BYTES // code.data_blocks
            with made.path().open("r+b") as opened:
                for block in random.Random(2).sample(range(stripes), min(count, stripes)):
                    opened.seek(block * PARITY_BLOCK_BYTES)
                    opened.write(b"?" * PARITY_BLOCK_BYTES)

        def repair() -> None:
            assert scrub(*checkpoint, repair=True).state == "repaired"

        def restored() -> None:
            assert restore.load(*checkpoint).repaired

        _, restoring, repairing = in_turns(rounds, damage, restored, repair)
        sound, encoding = median_seconds(
            rounds, lambda: scrub(*checkpoint), lambda: build_parity(code, "rank-0.safetensors", [data])
        )
        seconds = encoding, sound, statistics.median(repairing), statistics.median(restoring)
        (file,) = made.manifest.files
        return [*(size_bytes / 1e6 / each for each in seconds), 100 * file.parity.size_bytes / size_bytes]


if __name__ == "__main__":
    run(main)
