"""What parity of important bytes costs and saves, through files: damage, repair, degraded load, resumed training.

Part of `make bench-protection`; see `bit_errors.py` for the training.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from benchmarks.bit_errors import Outcome, Training, resumed
from holdfast.checkpoint import restore
from holdfast.checkpoint.restore import LoadedCheckpoint
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.dtypes import stored_as
from holdfast.format.important import contents_of
from holdfast.format.parity_file import PARITY_BLOCK_BYTES, ParityCode
from holdfast.format.parity_stripes import build_parity
from holdfast.store import Store, open_store
from holdfast.system.host_memory import bytes_of
from tests.support.edited_manifests import commit_manifest

JOB, CHECKPOINT, FILE = "job", "000000000001-1", "rank-0.safetensors"
CODES = (ParityCode(10, 2), ParityCode(10, 2, is_important=True))
DAMAGES = ("a bit of a top byte", "1% of the blocks", "10% of the blocks", "60% of the blocks")
"""Blocks are lost in one run."""
STATE_NUMBERS = 4_000_000


def measure(trained: Training, seeds: int) -> dict[str, float]:
    """Print the tables; return the figures."""
    figures: dict[str, float] = {}
    print(f"\n{'state':<6} {'parity':<16} share of the state")
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for code in CODES:
            with tempfile.TemporaryDirectory() as folder:
                file = _written(Path(folder), {"w": torch.zeros(STATE_NUMBERS, dtype=dtype)}, code)[1].files[0]
            assert file.parity is not None
            share = file.parity.size_bytes / file.size_bytes
            print(f"{name:<6} {code!s:<16} {share:.4f}")
            kind = "important_parity_share" if code.is_important else "parity_share"
            figures[f"{kind}_{name}"] = round(share, 4)
    print(f"\n{'parity':<16} {'damage':<28} {'exact':>8} {'degraded':>8} {'refused':>8}  resumed loss (worst)")
    for code in CODES:
        for what in DAMAGES:
            outcomes = [_through_files(trained, code, what, seed) for seed in range(seeds)]
            counts = [sum(state == each for state, _ in outcomes) for each in ("exact", "degraded", "refused")]
            losses = [outcome.resumed_loss for _, outcome in outcomes if outcome is not None]
            loss = f"{statistics.median(losses):.3g} ({max(losses):.3g})" if losses else "-"
            print(
                f"{code!s:<16} {what:<28} " + " ".join(f"{each:>8}" for each in counts) + f"  {loss}", flush=True
            )
            if losses:
                figures[f"loss_{code}_{what}".replace(" ", "_")] = round(statistics.median(losses), 4)
    return figures


def _through_files(trained: Training, code: ParityCode, what: str, seed: int) -> tuple[str, Outcome | None]:
    """Store the weights and moments, damage the file, load it, and resume; return what the load was."""
    named = {
        f"{target}.{n}": tensor
        for target in ("weights", "moments")
        for n, tensor in enumerate(trained.tensors(target))
    }
    with tempfile.TemporaryDirectory() as folder:
        store, manifest = _written(Path(folder), named, code)
        path = Path(folder) / JOB / CHECKPOINT / FILE
        path.write_bytes(_damaged(path.read_bytes(), manifest, what, random.Random(seed)))
        try:
            loaded = restore.load(store, JOB, CHECKPOINT, degraded=True)
        except DamagedCheckpoint:
            return "refused", None
        if not loaded.lost:
            assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in named.items())
        return "degraded" if loaded.lost else "exact", resumed(trained, _overwrite(loaded))


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


def _overwrite(loaded: LoadedCheckpoint) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for target in ("weights", "moments"):
        names = sorted((n for n in loaded.tensors if n.startswith(target)), key=lambda n: int(n.partition(".")[2]))
        found[target] = [loaded.tensors[name] for name in names]
    return found


def _written(folder: Path, named: dict[str, Tensor], code: ParityCode) -> tuple[Store, fmt.Manifest]:
    """Write a checkpoint of one file."""
    store = open_store(folder)
    attempt = store.acquire_attempt(JOB, "benchmark").number
    slots = fmt.lay_out((name, *stored_as(name, tensor)[:2]) for name, tensor in named.items())
    header = fmt.payload_header(slots, {"format": "pt"})
    parts: list[memoryview | bytes] = [header, *(bytes_of(named[slot.name]) for slot in slots)]
    tensors = []
    for slot, data in zip(slots, parts[1:], strict=True):
        digest, chunks = fmt.digest_tensor(memoryview(data))
        start, end = len(header) + slot.start, len(header) + slot.end
        tensors.append(
            fmt.Tensor(
                name=slot.name,
                dtype=slot.dtype,
                shape=slot.shape,
                global_shape=slot.shape,
                offsets=(0,) * len(slot.shape),
                file=FILE,
                start=start,
                end=end,
                digest=digest,
                chunks=chunks,
            )
        )
    size_bytes = sum(map(len, parts))
    file = fmt.File(name=FILE, size_bytes=size_bytes, header_bytes=len(header), header_digest=fmt.digest(header))
    made = fmt.Manifest(
        job=JOB,
        iteration=1,
        lineage=1,
        attempt=attempt,
        kind="final",
        created_at=0.0,
        parent=None,
        world_size=1,
        files=[file],
        tensors=tensors,
        state={},
    )
    parity, entry = build_parity(code, FILE, parts, contents_of(made, file))
    stored = msgspec.structs.replace(file, parity=entry)
    manifest = msgspec.structs.replace(made, files=[stored])
    writer = store.begin(JOB, CHECKPOINT, attempt, size_bytes)
    writer.write(FILE, parts)
    writer.write(entry.name, [parity])
    commit_manifest(writer, manifest)
    return store, manifest
