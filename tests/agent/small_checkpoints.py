"""Checkpoints of a few bytes, written and read as a session would: for tests of stores."""

JOB = "job"
FIRST, SECOND, THIRD = (f"{iteration:012d}-1" for iteration in (1, 2, 3))
FILE = "rank-0.safetensors"


def prepared(store, checkpoint=FIRST, attempt=1, data=b"tensors"):
    """Its writer, with all but the manifest written."""
    writer = store.begin(JOB, checkpoint, attempt, len(data))
    writer.write(FILE, [data[:3], memoryview(data)[3:]])
    return writer


def commit(store, checkpoint=FIRST, attempt=1, data=b"tensors", **options):
    prepared(store, checkpoint, attempt, data).commit(b"{}", **options)


def read(store, checkpoint=FIRST):
    with store.open_file(JOB, checkpoint, FILE) as file:
        data = bytearray(file.size_bytes)
        file.read_into(0, memoryview(data))
    return bytes(data)
