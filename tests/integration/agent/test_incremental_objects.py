"""Incremental checkpoints in a bucket: the server copies the base, and each checkpoint stays complete."""

import pytest
import torch

pytest.importorskip("numpy")

import holdfast
from holdfast.checkpoint import restore
from holdfast.checkpoint.scrub import scrub
from holdfast.format.parity_file import ParityCode
from holdfast.incremental.planner import MOST_COPIED_REGIONS, IncrementalPlanner
from holdfast.store import open_store, s3_copy_by_parts
from holdfast.store.s3_connection import S3Place
from tests.support import object_servers
from tests.support.persist_job import JOB, bytes_of, running


@pytest.fixture
def store(moto, monkeypatch):
    store = open_store(object_servers.use(monkeypatch, moto.address))
    store.acquire_attempt(JOB, "first")
    return store


def checkpoints(store, count, **changes):
    """Return runs of checkpoints of a table in which three rows change, and the bytes of each."""
    tensors = {"table": torch.randn(20_000, 32), "step": torch.zeros(1)}
    states = []
    planner = IncrementalPlanner(True, MOST_COPIED_REGIONS)
    with running(store, tensors=tensors, planner=planner) as job:
        runs = []
        for number in range(count):
            tensors["table"][[number, 7 * number, 100 + number]] += 1
            tensors["step"].add_(1)
            runs.append(job.checkpoint(before=runs[-1] if runs else None, **changes))
            states.append(bytes_of(tensors))
        assert [run.result.reason for run in runs] == [None] * count
    return runs, states


def loaded(store, checkpoint):
    found = restore.load(store, JOB, checkpoint).tensors
    return bytes_of({name: tensor.clone() for name, tensor in found.items()})


@pytest.mark.parametrize("parity", [None, ParityCode(10, 2)], ids=["plain", "parity"])
def test_only_the_first_checkpoint_uploads_the_table_and_the_others_outlive_it(store, monkeypatch, parity):
    uploaded, copied = [], []
    upload, copy = store.bucket.upload, store.bucket.copy

    def recorded(name, parts, pace):
        uploaded.append((name, sum(len(part) for part in parts)))
        return upload(name, parts, pace)

    def recorded_copy(source, target, size_bytes, **options):
        copied.append(target)
        return copy(source, target, size_bytes, **options)

    monkeypatch.setattr(store.bucket, "upload", recorded)
    monkeypatch.setattr(store.bucket, "copy", recorded_copy)
    runs, states = checkpoints(store, 6, parity=parity)
    assert sum(size > 100_000 for _, size in uploaded) == (1 if parity is None else 2)
    by_checkpoint = [sum(f"/{run.id}" in name and ".parity" not in name for name in copied) for run in runs]
    assert by_checkpoint[0] == 0
    assert max(by_checkpoint) <= 3, "the base, and two region files"
    for run in runs[:4]:
        store.delete(JOB, run.id, 1)
    for run, state in zip(runs[4:], states[4:], strict=True):
        restore.verify(store, JOB, run.id)
        assert scrub(store, JOB, run.id).state == "sound"
        assert loaded(store, run.id) == state


def test_a_server_that_copies_no_objects_gets_the_tensors_again(store, monkeypatch):
    monkeypatch.setattr(store.bucket, "_copied", lambda source, target: False)
    runs, states = checkpoints(store, 3)
    assert [run.result.reused_bytes for run in runs] == [0, 0, 0]
    for run, state in zip(runs, states, strict=True):
        assert loaded(store, run.id) == state


def requests_of_checkpoints(monkeypatch, moto, count, *, incremental):
    """Return the requests of each checkpoint of a `Session`, and the bytes that they sent."""
    table = holdfast.Variables(table=torch.randn(20_000, 32))
    with object_servers.S3FaultProxy(moto.address) as proxy:
        root = object_servers.use(monkeypatch, proxy.address)
        options = {"every": 10**9, "keep": count + 1, "incremental": incremental}
        with holdfast.Session("job", store=root, table=table, **options) as session:
            session.resume()
            session.step()
            session.wait(60)  # until memory is allocated
            found = []
            for number in range(count):
                table.table[[number, 7 * number, 100 + number]] += 1
                before = len(proxy.requests)
                session.checkpoint()
                session.step()
                (outcome,) = session.wait(60)
                assert outcome.is_durable, outcome
                found.append(proxy.requests[before:])
    return found


def puts(requests):
    return sum(request.method != "GET" for request in requests)


def test_a_checkpoint_makes_four_requests_more_and_the_first_already_is_a_base(moto, monkeypatch):
    plain = requests_of_checkpoints(monkeypatch, moto, 3, incremental=False)
    found = requests_of_checkpoints(monkeypatch, moto, 20, incremental="auto")
    sent = [sum(len(request.body) for request in requests) for requests in found]
    assert sum(size > 1_000_000 for size in sent) == 1, sent
    layered = [[each for each in requests if each.path.endswith((".base", ".rows"))] for requests in found]
    assert max(map(len, layered)) == 4
    put, put_plain = ([puts(requests) for requests in each] for each in (found, plain))
    assert max(put) <= max(put_plain) + 4
    # retention lists the store as well, sometimes during the next checkpoint
    assert min(map(len, found)) - min(put) <= min(map(len, plain)) - min(put_plain), "no list for a copy"


def test_a_copy_that_the_server_cut_short_is_written_in_full(store, monkeypatch):
    """The list before the commit shows it; the next checkpoint links nothing of what may be damaged."""
    copy, cut = store.bucket.copy, []

    def short(source, target, size_bytes, **options):
        if ".base" in target and not cut:
            cut.append(target)
            store.bucket.upload(target, [b"short"], None)
        else:
            copy(source, target, size_bytes, **options)

    monkeypatch.setattr(store.bucket, "copy", short)
    runs, states = checkpoints(store, 4)
    assert [run.result.reused_bytes > 0 for run in runs] == [False, False, False, True]
    for run, state in zip(runs, states, strict=True):
        assert loaded(store, run.id) == state


def test_a_checkpoint_that_is_gone_is_not_linked(store):
    """Its folder is remembered; that it was removed, the server says."""
    tensors = {"table": torch.randn(20_000, 32)}
    with running(store, tensors=tensors, planner=IncrementalPlanner(True)) as job:
        first = job.checkpoint()
        store.delete(JOB, first.id, 1)
        second = job.checkpoint(before=first)
    assert (second.result.reason, second.result.reused_bytes) == (None, 0)
    assert loaded(store, second.id) == bytes_of(tensors)


def test_what_is_too_large_for_one_request_is_copied_by_parts(moto, monkeypatch):
    monkeypatch.setattr(S3Place, "most_copied_bytes", 1 << 20)
    monkeypatch.setattr(s3_copy_by_parts.copy_by_parts, "__defaults__", (5 << 20,))
    data = bytes(range(256)) * (45 << 10)  # three parts
    with object_servers.S3FaultProxy(moto.address) as proxy:
        store = open_store(object_servers.use(monkeypatch, proxy.address))
        store.bucket.upload("a b/large", [data], None)
        proxy.requests.clear()
        store.bucket.copy("a b/large", "a b/copy", len(data), only_on_server=True)
        assert sum(len(request.body) for request in proxy.requests) < 1000
        assert len(proxy.seen("PUT", "partNumber")) == 3
        assert store.bucket.get("a b/copy") == data


def test_a_server_that_copies_no_parts_gets_the_bytes_again(rclone, monkeypatch):
    """It checks signatures, and answers a part that is to be copied as if it were one without bytes."""
    monkeypatch.setattr(S3Place, "most_copied_bytes", 1 << 20)
    with object_servers.S3FaultProxy(rclone.address) as proxy:
        store = open_store(object_servers.use(monkeypatch, proxy.address))
        store.bucket.upload("a b/large", [bytes(2 << 20)], None)
        proxy.requests.clear()
        store.bucket.copy("a b/large", "a b/copy", 2 << 20)
        assert [request.method for request in proxy.requests[:3]] == ["POST", "PUT", "DELETE"]
        assert store.bucket.get("a b/copy") == bytes(2 << 20)


def refuse_parts(request):
    if "partNumber" in request.path:
        request.answer = (501, "NotImplemented")


def test_a_copy_by_parts_that_fails_leaves_no_parts(moto, monkeypatch):
    monkeypatch.setattr(S3Place, "most_copied_bytes", 1 << 20)
    with object_servers.S3FaultProxy(moto.address) as proxy:
        store = open_store(object_servers.use(monkeypatch, proxy.address))
        store.bucket.upload("large", [bytes(2 << 20)], None)
        proxy.rules.append(refuse_parts)
        with pytest.raises(OSError, match="cannot copy large"):
            store.bucket.copy("large", "copy", 2 << 20, only_on_server=True)
        assert store.url.split("/")[3] not in str(moto.unfinished_uploads())
        store.bucket.copy("large", "copy", 2 << 20)
        assert store.bucket.get("copy") == bytes(2 << 20), "through this machine"
