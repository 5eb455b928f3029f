"""What parity of important bytes costs and saves, through files: damage, repair, degraded load, resumed training.

Part of `make bench-protection`; see `bit_errors.py` for the training.
"""

from __future__ import annotations

import random
import statistics

import torch

from benchmarks.bit_errors import TARGETS, Outcome, Training, resumed
from benchmarks.harness import Table, scratch
from holdfast.checkpoint import restore
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.parity_file import PARITY_BLOCK_BYTES, ParityCode
from tests.support.handmade_checkpoints import commit

STATES = ("exact", "degraded", "refused")
CODES = (ParityCode(10, 2), ParityCode(10, 2, is_important=True))
DAMAGES = ("a bit of a top byte", "1% of the blocks", "10% of the blocks", "60% of the blocks")
"""Blocks are lost in one run."""
STATE_NUMBERS = 4_000_000


def measure(trained: Training, seeds: int) -> dict[str, float]:
    """Print the tables; return the figures."""
    figures: dict[str, float] = {}
    print()
    table = Table({"state ": "", "parity          ": "", "share of the state": ".4f"})
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for code in CODES:
            with scratch() as folder:
                (file,) = commit(
                    folder, {"w": torch.zeros(STATE_NUMBERS, dtype=dtype)}, parity=code
                ).manifest.files
            share = file.parity.size_bytes / file.size_bytes
            table.row(name, code, share)
            kind = "important_parity_share" if code.is_important else "parity_share"
            figures[f"{kind}_{name}"] = round(share, 4)
    print()
    table = Table(
        {"parity          ": "", f"{'damage':<20}": ""} | dict.fromkeys(STATES, "d") | {"loss": "", "worst": ""}
    )
    for code in CODES:
        for what in DAMAGES:
            outcomes = [_through_files(trained, code, what, seed) for seed in range(seeds)]
            counts = [sum(state == each for state, _ in outcomes) for each in STATES]
            losses = [outcome.resumed_loss for _, outcome in outcomes if outcome is not None]
            worst = (f"{statistics.median(losses):.3g}", f"{max(losses):.3g}") if losses else (None, None)
            table.row(code, what, *counts, *worst)
            if losses:
                figures[f"loss_{code}_{what}".replace(" ", "_")] = round(statistics.median(losses), 4)
    return figures


def _through_files(trained: Training, code: ParityCode, what: str, seed: int) -> tuple[str, Outcome | None]:
    """Store the weights and moments, damage the file, load it, and resume; return what the load was."""
    named = {f"{target}.{n}": each for target in TARGETS for n, each in enumerate(trained.tensors(target))}
    with scratch() as folder:
        made = commit(folder, named, parity=code)
        made.path().write_bytes(_damaged(made.path().read_bytes(), made.manifest, what, random.Random(seed)))
        try:
            loaded = restore.load(made.store, made.job, made.id, degraded=True)
        except DamagedCheckpoint:
            return "refused", None
        if not loaded.lost:
            assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in named.items())
        found = {target: [loaded.tensors[n] for n in named if n.startswith(target)] for target in TARGETS}
        return "degraded" if loaded.lost else "exact", resumed(trained, found)


def _damaged(data: bytes, manifest: fmt.Manifest, what: str, rng: random.Random) -> bytes:
    found = bytearray(data)
    blocks = -(-len(data) // PARITY_BLOCK_BYTES)
    if what == DAMAGES[0]:
        tensor = max(manifest.tensors, key=lambda each: each.end - each.start)
        number = rng.randrange((tensor.end - tensor.start) // 4)
        found[tensor.start + 4 * number + 3] ^= 1 << rng.randrange(8)
        return bytes(found)
    count = max(1, round(blocks * float(what.split("%")[0]) / 100))
    first = rng.randrange(1, blocks - count) * PARITY_BLOCK_BYTES
    end = min(len(found), first + count * PARITY_BLOCK_BYTES)
    found[first:end] = rng.randbytes(end - first)
    return bytes(found)
