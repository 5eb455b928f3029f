"""Checkpoints of a few bytes, for tests of stores."""

JOB = "job"
FIRST, SECOND, THIRD = (f"{iteration:012d}-1" for iteration in (1, 2, 3))
FILE, OTHER_FILE = "rank-0.safetensors", "rank-1.safetensors"


def prepared(store, checkpoint=FIRST, attempt=1, data=b"tensors"):
    """Its writer, with all but the manifest written."""
    writer = store.begin(JOB, checkpoint, attempt, len(data))
    writer.write(FILE, [data[:3], memoryview(data)[3:]])
    return writer


def joined(store, place, checkpoint=FIRST, attempt=1, data=b"others"):
    """The writer of another process, with its file written."""
    writer = store.join(JOB, checkpoint, attempt, place, len(data))
    writer.write(OTHER_FILE, [data])
    writer.make_durable()
    return writer


def commit(store, checkpoint=FIRST, attempt=1, data=b"tensors", **options):
    prepared(store, checkpoint, attempt, data).commit(b"{}", **options)


def read(store, checkpoint=FIRST, file=FILE, job=JOB):
    with store.open_file(job, checkpoint, file) as file:
        data = bytearray(file.size_bytes)
        file.read_into(0, memoryview(data))
    return bytes(data)
