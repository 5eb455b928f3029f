"""Checkpoints of a few bytes, to test stores with."""

from __future__ import annotations

from holdfast.store import CheckpointWriter, Lineage, Store

JOB = "job"
FIRST, SECOND, THIRD = (f"{iteration:012d}-1" for iteration in (1, 2, 3))
FILE, OTHER_FILE = "rank-0.safetensors", "rank-1.safetensors"


def prepared(
    store: Store, checkpoint: str = FIRST, attempt: int = 1, data: bytes = b"tensors"
) -> CheckpointWriter:
    """Return a writer with everything but the manifest written."""
    writer = store.begin(JOB, checkpoint, attempt, len(data))
    writer.write(FILE, [data[:3], memoryview(data)[3:]])
    return writer


def joined(
    store: Store, folder: str, checkpoint: str = FIRST, attempt: int = 1, data: bytes = b"others"
) -> CheckpointWriter:
    """Return the writer of another process, with its file written."""
    writer = store.join(JOB, checkpoint, attempt, folder, len(data))
    writer.write(OTHER_FILE, [data])
    writer.make_durable()
    return writer


def commit(
    store: Store, checkpoint: str = FIRST, attempt: int = 1, data: bytes = b"tensors", *, replace: bool = False
) -> None:
    prepared(store, checkpoint, attempt, data).commit(b"{}", replace=replace)


def read(store: Store, checkpoint: str = FIRST, file: str = FILE, job: str = JOB) -> bytes:
    with store.open_file(job, checkpoint, file) as opened:
        data = bytearray(opened.size_bytes)
        opened.read_into(0, memoryview(data))
    return bytes(data)


def lineage(number: int = 1, attempt: int = 1) -> Lineage:
    return Lineage(number=number, iteration=0, parent=None, order="o", attempt=attempt, created_at=1.0)
