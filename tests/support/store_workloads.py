"""Workloads of a store without torch: saves, retention, lineages, restarts."""

from __future__ import annotations

import mmap
import os
import random
import time
from typing import TYPE_CHECKING

from holdfast.checkpoint import restore
from holdfast.errors import HoldfastError
from holdfast.format import manifest as fmt
from holdfast.protocol.ids import checkpoint_id, parse_checkpoint_id
from holdfast.save.draft import Draft
from holdfast.save.writer import write_checkpoint
from holdfast.store import Lineage, Store, open_store
from tests.support.edited_manifests import encode_manifest

if TYPE_CHECKING:
    from tests.support.fork_server import WorkloadChannel

JOB = "job"
FILE = "rank-0.safetensors"


def content(iteration: int, size_bytes: int) -> bytes:
    """Return the expected content of the checkpoint of an iteration."""
    block = random.Random(iteration).randbytes(min(size_bytes, 1 << 16))
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


def save(store: Store, attempt: int, checkpoint: str, size_bytes: int, parent: str | None = None) -> None:
    """What a session's persist does, in one place, through the same seam."""
    iteration, lineage = parse_checkpoint_id(checkpoint)
    memory = mmap.mmap(-1, size_bytes)  # begins at a page, as an arena does
    memory.write(content(iteration, size_bytes))
    payload = memoryview(memory)
    small = min(1000, size_bytes // 2)
    slots = fmt.lay_out([("large", "U8", (size_bytes - small,)), ("small", "U8", (small,))])
    header = fmt.payload_header(slots, {"job": JOB})
    file = fmt.File(
        name=FILE, size_bytes=len(header) + size_bytes, header_bytes=len(header), header_digest=fmt.digest(header)
    )
    tensors = [_tensor(slot, len(header), payload) for slot in slots]
    manifest = fmt.Manifest(
        job=JOB, iteration=iteration, lineage=lineage, attempt=attempt, kind="scheduled", created_at=time.time(),
        parent=parent, world_size=1, files=[file], tensors=tensors, state={},
    )  # fmt: skip
    writer = store.begin(JOB, checkpoint, attempt, file.size_bytes)
    try:
        writer.write(FILE, [header, payload])
        writer.commit(encode_manifest(manifest))
    except BaseException:  # as a backend does
        writer.abort()
        raise


def save_sharing(store: Store, attempt: int, checkpoint: str, size_bytes: int, parent: str | None) -> None:
    """As `save`, with a base that does not change: only a checkpoint without `parent` writes it."""
    iteration, lineage = parse_checkpoint_id(checkpoint)
    slots = fmt.lay_out([("base", "U8", (size_bytes,)), ("small", "U8", (1000,))])
    memory = mmap.mmap(-1, slots[-1].end)
    for slot in slots:
        memory[slot.start : slot.end] = content(0 if slot.name == "base" else iteration, slot.end - slot.start)
    draft = Draft(
        job=JOB, iteration=iteration, lineage=lineage, attempt=attempt, kind="scheduled", created_at=time.time(),
        parent=parent, world_size=1, slots=slots, unchanged={"base"},
    )  # fmt: skip
    write_checkpoint(store, draft, memoryview(memory))


def _tensor(slot: fmt.TensorRange, header_bytes: int, payload: memoryview) -> fmt.Tensor:
    digest, chunks = fmt.digest_tensor(payload[slot.start : slot.end])
    return fmt.Tensor(
        name=slot.name, dtype=slot.dtype, shape=slot.shape, global_shape=slot.shape, offsets=(0,), file=FILE,
        start=header_bytes + slot.start, end=header_bytes + slot.end, digest=digest, chunks=chunks,
    )  # fmt: skip


def resume(stage: WorkloadChannel, store: Store) -> tuple[int, int, int]:
    """Start as a job does, after whatever there was: (attempt, lineage, iteration)."""
    attempt = store.acquire_attempt(JOB, str(os.getpid())).number
    stage.tell("attempt", attempt)
    best = next(restore.candidates(store, JOB), None)
    lineages = store.records(JOB, Lineage)
    if not lineages:
        begin_lineage(stage, store, attempt, 1, parent=None)
        return attempt, 1, 0
    if best is None:
        return attempt, lineages[-1].number, lineages[-1].iteration
    restore.verify(store, JOB, best[0])
    return attempt, lineages[-1].number, parse_checkpoint_id(best[0])[0]


def begin_lineage(stage: WorkloadChannel, store: Store, attempt: int, number: int, parent: str | None) -> None:
    iteration = parse_checkpoint_id(parent)[0] if parent else 0
    store.append(
        JOB,
        Lineage(
            number=number, iteration=iteration, parent=parent, order=None, attempt=attempt, created_at=time.time()
        ),
    )
    stage.tell("ground", number, iteration)


def train(
    stage: WorkloadChannel,
    root: str,
    saves: int = 3,
    keep: int = 2,
    size_bytes: int = 50_000,
    rewind: bool = False,
    stubborn: bool = False,
    shares: bool = False,
) -> None:
    """Save, retire what is older than the `keep` newest, and in the end go back in place and save again.

    A `stubborn` one passes over what the store refuses it, as training does. Checkpoints of one that `shares` have
    a file in common.
    """
    store = open_store(root)
    stage.ready()
    attempt, lineage, iteration = resume(stage, store)
    saved = store.checkpoints(JOB)
    for _ in range(saves):
        iteration += 1
        try:
            _save(stage, store, attempt, saved, checkpoint_id(iteration, lineage), size_bytes, shares)
            _retire(stage, store, attempt, saved, keep)
        except (OSError, HoldfastError) as error:
            if not stubborn:
                raise
            stage.tell("refused", type(error).__name__)
    if rewind:
        target = saved[-2]
        begin_lineage(stage, store, attempt, lineage + 1, parent=target)
        again = checkpoint_id(parse_checkpoint_id(target)[0] + 1, lineage + 1)
        _save(stage, store, attempt, saved, again, size_bytes, shares)
        _retire(stage, store, attempt, saved, keep)
    stage.tell("done")


def _save(
    stage: WorkloadChannel,
    store: Store,
    attempt: int,
    saved: list[str],
    checkpoint: str,
    size_bytes: int,
    shares: bool,
) -> None:
    iteration, lineage = parse_checkpoint_id(checkpoint)
    parent = saved[-1] if saved else None
    saved.append(checkpoint)
    if shares:
        save_sharing(store, attempt, checkpoint, size_bytes, parent)
    else:
        save(store, attempt, checkpoint, size_bytes)
    stage.tell("durable", checkpoint)
    stage.tell("ground", lineage, iteration)


def _retire(stage: WorkloadChannel, store: Store, attempt: int, saved: list[str], keep: int) -> None:
    while len(saved) > keep + 1:  # one more than asked for, so that a lineage's parent outlives the first save
        gone = saved.pop(0)
        stage.tell("retention_queue", gone)
        store.delete(JOB, gone, attempt)
