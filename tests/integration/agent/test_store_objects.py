"""Checkpoints in a bucket: late requests, lost answers, servers that fail, and what people are told."""

import errno
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading

import pytest

from holdfast.errors import DamagedCheckpoint, Fenced
from holdfast.store import Lineage, bucket, http_place, open_store, read_manifest
from holdfast.store.bucket import Unanswered
from holdfast.system import io_pool
from holdfast.testing.small_checkpoints import FILE, FIRST, JOB, SECOND, THIRD, commit, prepared, read
from tests.support import object_servers
from tests.support.object_servers import BUCKET, KEY, Rclone, S3FaultProxy, running

MIB = 1 << 20
LARGE = random.Random(1).randbytes(20 * MIB)


@pytest.fixture
def impatient(monkeypatch):
    """Gives up after a second what it would try for a minute."""
    monkeypatch.setattr(http_place, "REQUESTS_RETRIED_SECONDS", 1)
    monkeypatch.setattr(http_place, "TRANSFERS_RETRIED_SECONDS", 1)
    monkeypatch.setattr(bucket, "PATIENCE_SECONDS", 1)


@pytest.fixture
def at(monkeypatch):
    """Opens an empty store at an address."""
    return lambda address: open_store(object_servers.use(monkeypatch, address))


@pytest.fixture
def store(at, moto):
    store = at(moto.address)
    store.acquire_attempt(JOB, "first")
    return store


@pytest.fixture
def proxy(moto):
    with S3FaultProxy(moto.address) as proxy:
        yield proxy


@pytest.fixture
def behind(at, proxy):
    """A store whose requests pass the proxy; attempt 1 has begun."""
    store = at(proxy.address)
    store.acquire_attempt(JOB, "first")
    return store


def objects(store):
    return [name for name in store.bucket.sizes(f"{JOB}/") if "/attempts/" not in name]


class Held:
    """A rule that keeps the first request of a kind waiting until it is let go; the server hears of it then."""

    def __init__(self, method, name):
        self._method, self._name = method, name
        self.arrived, self.go = threading.Event(), threading.Event()

    def __call__(self, request):
        wanted = request.method == self._method and request.name.endswith(self._name)
        if wanted and not self.arrived.is_set():
            self.arrived.set()
            assert self.go.wait(300)


def times(count, method, mark, **change):
    """A rule that changes the first `count` requests of a kind."""
    left = [count]

    def rule(request):
        if request.method == method and mark in request.path and left[0]:
            left[0] -= 1
            for name, value in change.items():
                setattr(request, name, value)

    return rule


def in_thread(call):
    """(thread, what it raised)"""
    raised = []

    def run():
        try:
            call()
        except Exception as error:  # the test looks which it was
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


# What is late


def test_a_manifest_that_arrives_when_a_newer_attempt_has_begun_is_no_checkpoint(proxy, behind, monkeypatch, moto):
    commit(behind, FIRST)
    held = Held("PUT", f"{SECOND}/00000001/manifest.json")
    proxy.rules.append(held)
    writer = prepared(behind, SECOND)
    thread, raised = in_thread(lambda: writer.commit(b"{}"))
    assert held.arrived.wait(300)
    newer = open_store(behind.url)
    newer.acquire_attempt(JOB, "second")
    held.go.set()
    thread.join()
    assert isinstance(raised[0], Fenced)
    writer.abort()
    assert f"{JOB}/{SECOND}/00000001/manifest.json" in objects(newer)
    for reader in (newer, open_store(behind.url)):
        assert reader.checkpoints(JOB) == [FIRST]
        with pytest.raises(DamagedCheckpoint):
            read_manifest(reader, JOB, SECOND)
    commit(newer, SECOND, attempt=2, data=b"newer")
    assert read(newer, SECOND) == b"newer"
    newer.acquire_attempt(JOB, "third")
    assert {name.split("/")[2] for name in objects(newer) if SECOND in name} == {"00000002"}


def test_a_lineage_that_arrives_when_a_newer_attempt_has_begun_is_none(proxy, behind):
    held = Held("PUT", "lineages/000001-00000001.json")
    proxy.rules.append(held)
    old, new = (Lineage(number=1, iteration=0, parent=None, order=None, attempt=n, created_at=1.0) for n in (1, 2))
    thread, raised = in_thread(lambda: behind.append(JOB, old))
    assert held.arrived.wait(300)
    newer = open_store(behind.url)
    newer.acquire_attempt(JOB, "second")
    newer.append(JOB, new)
    held.go.set()
    thread.join()
    assert isinstance(raised[0], Fenced)
    assert newer.records(JOB, Lineage) == open_store(behind.url).records(JOB, Lineage) == [new]
    newer.acquire_attempt(JOB, "third")
    assert objects(newer) == [f"{JOB}/lineages/000001-00000002.json"]


def test_an_attempt_that_stalls_before_it_notes_what_it_saw_takes_nothing_from_the_next(proxy, behind):
    held = Held("PUT", "00000002-slow.seen.json")
    proxy.rules.append(held)
    slow = open_store(behind.url)
    writer = prepared(behind, SECOND)
    thread, raised = in_thread(lambda: slow.acquire_attempt(JOB, "slow"))
    assert held.arrived.wait(300)
    writer._put(b"{}")  # the old attempt looked before the slow one began, and its manifest comes now
    newer = open_store(behind.url)
    newer.acquire_attempt(JOB, "third")
    assert newer.checkpoints(JOB) == [SECOND]
    held.go.set()
    thread.join()
    assert raised == []
    assert newer.checkpoints(JOB) == slow.checkpoints(JOB) == [SECOND]
    assert read(newer, SECOND) == b"tensors"
    with pytest.raises(Fenced):
        commit(slow, THIRD, attempt=2)


def test_an_attempt_fenced_before_its_manifest_leaves_nothing(store):
    writer = prepared(store)
    open_store(store.url).acquire_attempt(JOB, "second")
    with pytest.raises(Fenced):
        writer.commit(b"{}")
    writer.abort()
    assert objects(store) == []


def test_a_fenced_attempt_sends_no_payload(proxy, behind):
    open_store(behind.url).acquire_attempt(JOB, "second")
    with pytest.raises(Fenced, match="attempt 2 of job has started; attempt 1"):
        prepared(behind)
    assert proxy.seen("PUT", FILE) == []


def test_a_checkpoint_begun_again_gets_a_folder_of_its_own(store):
    prepared(store).abort()
    commit(store)
    assert objects(store) == [f"{JOB}/{FIRST}/00000001-2/{name}" for name in ("manifest.json", FILE)]


# Lost answers and servers that fail for a while


def test_a_manifest_whose_answer_is_lost_is_committed(proxy, behind):
    proxy.rules.append(times(1, "PUT", "manifest.json", cut=True))
    commit(behind)
    assert len(proxy.seen("PUT", "manifest.json")) == 2
    assert (behind.checkpoints(JOB), read(behind)) == ([FIRST], b"tensors")


def test_a_manifest_of_which_nobody_knows_whether_it_arrived_is_left_to_the_next_attempt(
    impatient, proxy, behind, monkeypatch
):
    proxy.rules.append(times(1000, "PUT", "manifest.json", cut=True))
    writer = prepared(behind)
    with pytest.raises(Unanswered):
        writer.commit(b"{}")
    writer.abort()
    assert (behind.checkpoints(JOB), read(behind)) == ([FIRST], b"tensors")  # it had arrived, and is whole


def test_a_manifest_that_is_refused_leaves_nothing(proxy, behind):
    proxy.rules.append(times(1000, "PUT", "manifest.json", answer=(403, "AccessDenied")))
    writer = prepared(behind)
    with pytest.raises(PermissionError):
        writer.commit(b"{}")
    writer.abort()
    assert objects(behind) == []


def test_a_deletion_broken_off_in_the_middle_leaves_no_torn_checkpoint(proxy, behind):
    commit(behind)
    deleted = []

    def refuse_from_the_second_on(request):
        if request.method == "DELETE":
            deleted.append(request.name)
            request.answer = (403, "AccessDenied") if len(deleted) > 1 else None

    proxy.rules.append(refuse_from_the_second_on)
    with pytest.raises(PermissionError):
        behind.delete(JOB, FIRST, attempt=1)
    proxy.rules.clear()
    assert behind.checkpoints(JOB) == []
    assert objects(behind) == [f"{JOB}/{FIRST}/00000001/{FILE}"]
    behind.acquire_attempt(JOB, "second")
    assert objects(behind) == []


def test_where_conditions_are_enforced_nothing_is_overwritten(store):
    store.bucket.put_new("job/record", b"one")
    store.bucket.put_new("job/record", b"one")
    with pytest.raises(FileExistsError):
        store.bucket.put_new("job/record", b"two")
    assert store.bucket.get("job/record") == b"one"


def test_a_server_that_knows_no_conditions_is_asked_without(impatient, proxy, at):
    def refuse(request):
        if "if-none-match" in map(str.lower, request.headers):
            request.answer = 501, "NotImplemented"

    proxy.rules.append(refuse)
    store = at(proxy.address)
    store.acquire_attempt(JOB, "first")
    commit(store)
    assert read(store) == b"tensors"


@pytest.mark.parametrize(
    "trouble",
    [
        lambda: times(4, "PUT", "partNumber", answer=(503, "SlowDown")),
        lambda: times(3, "PUT", "partNumber", unheard=True),
        lambda: times(2, "PUT", "partNumber", cut=True),
        lambda: times(1, "POST", "uploadId", cut=True),
        lambda: times(2, "POST", "uploads", answer=(500, "InternalError")),
    ],
    ids=["503 for parts", "parts unheard", "answers to parts lost", "last answer lost", "500 at first"],
)
@pytest.mark.parametrize("server", ["rclone", "moto"])
def test_an_upload_survives_a_server_that_fails_for_a_while(trouble, server, request, at):
    with S3FaultProxy(request.getfixturevalue(server).address) as proxy:
        store = at(proxy.address)
        store.acquire_attempt(JOB, "first")
        proxy.rules.append(trouble())
        commit(store, data=LARGE)
        assert read(store) == LARGE


@pytest.mark.parametrize(
    "trouble",
    [
        times(2, "GET", FILE, answer=(503, "SlowDown")),
        times(2, "GET", FILE, unheard=True),
        times(2, "GET", FILE, cut_at=1 * MIB),
    ],
    ids=["503", "unheard", "cut in the middle"],
)
def test_reading_survives_a_server_that_fails_for_a_while(trouble, proxy, behind):
    commit(behind, data=LARGE)
    proxy.rules.append(trouble)
    assert read(behind) == LARGE


def test_reading_survives_it_where_a_server_answers_200_to_ranges(rclone, at):
    with S3FaultProxy(rclone.address) as proxy:
        store = at(proxy.address)
        store.acquire_attempt(JOB, "first")
        commit(store, data=LARGE)
        for trouble in ({"cut_at": 1 * MIB}, {"answer": (503, "SlowDown")}, {"unheard": True}):
            proxy.rules[:] = [times(2, "GET", "X-Amz-Signature", **trouble)]
            assert read(store) == LARGE


def test_an_upload_that_is_refused_leaves_no_parts_behind(proxy, behind, moto):
    refused = threading.Event()

    def refuse(request):
        if "partNumber=2" in request.path:
            request.answer = 403, "AccessDenied"
            refused.set()

    proxy.rules.append(refuse)
    writer = behind.begin(JOB, FIRST, 1, len(LARGE))
    with pytest.raises(PermissionError, match="denies access to bucket bucket: the credentials need permission"):
        writer.write(FILE, [LARGE])
    writer.abort()
    assert refused.is_set()
    assert [key for key in moto.unfinished_uploads() if key in writer._folder.path] == []
    assert objects(behind) == []


def broken_off():
    """A pace that ends the upload before its second part."""
    calls = itertools.count()

    def pace(size_bytes):
        if next(calls):
            raise RuntimeError("training has ended")

    return pace


def test_an_upload_that_pace_breaks_off_leaves_no_parts_behind(store, moto):
    writer = store.begin(JOB, FIRST, 1, len(LARGE))
    with pytest.raises(RuntimeError, match="training has ended"):
        writer.write(FILE, [LARGE], pace=broken_off())
    assert [key for key in moto.unfinished_uploads() if store.url.partition(f"{BUCKET}/")[2] in key] == []


def test_what_pace_raised_is_told_where_the_upload_cannot_be_ended_either(proxy, behind):
    proxy.rules.append(times(1, "DELETE", "uploadId", answer=(404, "NoSuchUpload")))
    writer = behind.begin(JOB, FIRST, 1, len(LARGE))
    with pytest.raises(RuntimeError, match="training has ended"):
        writer.write(FILE, [LARGE], pace=broken_off())
    assert proxy.seen("DELETE", "uploadId")


def test_files_of_all_processes_are_copied_from_a_checkpoint_without_a_list(store, monkeypatch):
    writer = store.begin(JOB, FIRST, 1, 14)
    there = open_store(store.url)
    for process, file in ((store, FILE), (there, "other")):
        joined = process.join(JOB, FIRST, 1, writer.folder, 7)
        joined.write(file, [b"tensors"])
        joined.make_durable()
    writer.commit(b"{}")
    second = store.begin(JOB, SECOND, 1, 14)
    part = there.join(JOB, SECOND, 1, second.folder, 7)
    part.copy_file(JOB, FIRST, FILE, only_link=True, size_bytes=7)  # of the other process
    with monkeypatch.context() as without_lists:
        without_lists.setattr(store, "find", lambda *_: pytest.fail("a list was requested"))
        second.copy_file(JOB, FIRST, "other", only_link=True, size_bytes=7)
    second.copy_file(JOB, FIRST, FILE, only_link=True, size_bytes=7)
    second.commit(b"{}")
    assert [name.rpartition("/")[2] for name in objects(store) if f"/{SECOND}/" in name] == sorted(
        [FILE, "other", "manifest.json"]
    )


def test_an_object_that_is_not_as_long_as_what_was_sent_is_not_committed(store):
    writer = store.begin(JOB, FIRST, 1, 7)
    writer.write(FILE, [b"tensors"])
    store.bucket.upload(f"{JOB}/{FIRST}/00000001/{FILE}", [b"ten"], None)
    with pytest.raises(OSError, match=r"received 7 bytes for .* but stores 3"):
        writer.commit(b"{}")
    assert store.checkpoints(JOB) == []
    joined = store.join(JOB, FIRST, 1, writer.folder, 7)
    joined.write("other", [b"tensors"])
    joined.make_durable()
    store.bucket.upload(f"{JOB}/{FIRST}/00000001/other", [b"ten"], None)
    with pytest.raises(OSError, match=r"received 7 bytes for .* but stores 3"):
        joined.make_durable()


# Processes that die


UPLOAD = """
import sys
sys.path[:0] = {path!r}
from holdfast.store import open_store
store = open_store(sys.argv[1])
attempt = store.acquire_attempt("job", "dying").number
writer = store.begin("job", "000000000002-1", attempt, {size})
writer.write("rank-0.safetensors", [bytes({size})])
writer.commit(b"{{}}")
print("durable", flush=True)
"""


@pytest.mark.parametrize(
    ("method", "mark"),
    [
        ("PUT", "-dying.json"),
        ("PUT", ".seen.json"),
        ("POST", "uploads="),
        ("PUT", "partNumber=2"),
        ("POST", "uploadId="),
        ("PUT", "manifest.json"),
        (None, None),
    ],
)
@pytest.mark.parametrize("heard", [True, False], ids=["heard", "unheard"])
def test_an_uploader_killed_anywhere_leaves_no_torn_checkpoint_and_the_next_cleans_up(
    method, mark, heard, proxy, behind, monkeypatch
):
    commit(behind)

    def kill(request):
        if request.method == method and mark in request.path:
            process.send_signal(signal.SIGKILL)
            process.wait()
            request.cut, request.unheard = True, not heard

    program = UPLOAD.format(path=sys.path, size=len(LARGE))
    proxy.rules.append(kill)
    process = subprocess.Popen([sys.executable, "-c", program, behind.url], stdout=subprocess.PIPE, text=True)
    said = process.communicate()[0]
    proxy.rules.clear()
    assert (process.returncode, said) == ((-9, "") if method else (0, "durable\n"))
    store = open_store(behind.url)
    committed = [FIRST, SECOND] if method is None or (mark == "manifest.json" and heard) else [FIRST]
    for _ in range(2):
        assert store.checkpoints(JOB) == committed
        for checkpoint in committed:
            assert len(read(store, checkpoint)) == store.bucket.sizes(f"{JOB}/{checkpoint}/").popitem()[1]
        latest = store.acquire_attempt(JOB, "next").number
    assert {name.split("/")[1] for name in objects(store)} == set(committed)
    commit(store, THIRD, attempt=latest)
    assert read(store, THIRD) == b"tensors"


def test_a_server_killed_during_an_upload_and_started_again_costs_that_checkpoint_at_most(tmp_path, at, impatient):
    with running(Rclone(tmp_path)) as server:
        store = at(server.address)
        store.acquire_attempt(JOB, "first")
        commit(store)
        writer = store.begin(JOB, SECOND, 1, len(LARGE))
        paced = []

        def kill(size_bytes):
            if len(paced) == 1:
                server.kill()
            paced.append(size_bytes)

        with pytest.raises(OSError, match="refuses connections: check that it runs") as caught:
            writer.write(FILE, [LARGE], pace=kill)
        assert caught.value.errno == errno.ECONNREFUSED
        writer.abort()
        with pytest.raises(Unanswered):
            store.checkpoints(JOB)
        server.start()
        assert (store.checkpoints(JOB), read(store)) == ([FIRST], b"tensors")
        commit(store, SECOND, data=LARGE)
        assert read(open_store(store.url), SECOND) == LARGE


def test_a_server_that_comes_back_in_time_costs_nothing(tmp_path, at):
    with running(Rclone(tmp_path)) as server:
        store = at(server.address)
        store.acquire_attempt(JOB, "first")
        server.kill()
        back = threading.Timer(0.5, server.start)
        back.start()
        commit(store, data=LARGE)
        back.join()
        assert read(store) == LARGE


# Away is not damaged


def test_a_store_that_is_away_says_nothing_about_its_checkpoints(impatient, proxy, behind):
    commit(behind)
    file = behind.open_file(JOB, FIRST, FILE)
    proxy.rules.append(times(10_000, "GET", "", answer=(503, "SlowDown")))
    for ask in (
        lambda: read_manifest(behind, JOB, FIRST),
        lambda: behind.open_file(JOB, FIRST, FILE),
        lambda: file.read_into(0, memoryview(bytearray(7))),
        lambda: behind.checkpoints(JOB),
    ):
        with pytest.raises(
            OSError, match="answers 503 SlowDown for bucket bucket: it is overloaded, full or failing"
        ):
            ask()


def test_an_object_that_is_gone_is_damage(store):
    commit(store)
    with store.open_file(JOB, FIRST, FILE) as file:
        store.bucket.delete([f"{JOB}/{FIRST}/00000001/{FILE}"])
        with pytest.raises(DamagedCheckpoint, match=rf"{store.url}/.*{FILE}: the object no longer exists"):
            file.read_into(0, memoryview(bytearray(7)))
    with pytest.raises(DamagedCheckpoint, match="there is no such object"):
        read(store)


def test_an_object_that_became_shorter_is_damage(store, rclone, at):
    for each in (store, at(rclone.address)):
        attempt = each.acquire_attempt(JOB, "second").number
        commit(each, attempt=attempt)
        with each.open_file(JOB, FIRST, FILE) as file:
            each.bucket.upload(f"{JOB}/{FIRST}/{attempt:08d}/{FILE}", [b"ten"], None)
            with pytest.raises(DamagedCheckpoint, match="ends at byte 3"):
                file.read_into(0, memoryview(bytearray(7)))


def test_a_record_that_is_none_is_passed_over_or_named(store, caplog):
    lineage = Lineage(number=2, iteration=0, parent=None, order=None, attempt=1, created_at=1.0)
    store.append(JOB, lineage)
    store.bucket.put_new(f"{JOB}/lineages/000001-00000001.json", b"")
    store.bucket.put_new(f"{JOB}/attempts/00000001 copy.json", b"{}")
    store.bucket.put_new(f"{JOB}/notes/README", b"")
    store.bucket.put_new("README", b"")
    assert store.records(JOB, Lineage) == [lineage]
    assert "000001-00000001.json is not a Holdfast record" in caplog.text
    assert (store.latest_attempt(JOB), store.jobs(), store.checkpoints(JOB)) == (1, [JOB], [])
    store.bucket.put_new(f"{JOB}/attempts/00000002-x.seen.json", b"[]")
    with pytest.raises(OSError, match="is not a Holdfast record") as caught:
        store.checkpoints(JOB)
    assert caught.value.filename == f"{store.url}/{JOB}/attempts/00000002-x.seen.json"


# What people are told


def refusal(store, kind=OSError):
    with pytest.raises(kind) as caught:
        store.acquire_attempt(JOB, "first")
    assert caught.value.filename == store.url
    assert "\n" not in caught.value.strerror
    return caught.value.errno, caught.value.strerror


def test_a_bucket_that_is_not_there(rclone, at):
    store = at(rclone.address)
    store = open_store(store.url.replace(f"//{BUCKET}/", "//no-such/"))
    told = f"{rclone.address} has no bucket no-such: create it, or correct the address of the store"
    assert refusal(store, FileNotFoundError) == (errno.ENOENT, told)


def test_keys_that_are_wrong(rclone, at, monkeypatch):
    store = at(rclone.address)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    _, told = refusal(store, PermissionError)
    assert told.startswith(f"{rclone.address} rejects the signature for bucket {BUCKET}")
    assert "check AWS_SECRET_ACCESS_KEY" in told
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"{KEY}X")
    told = f"{rclone.address} does not know the access key: check AWS_ACCESS_KEY_ID"
    assert refusal(open_store(store.url), PermissionError) == (errno.EACCES, told)


def test_keys_that_are_missing(rclone, at, monkeypatch):
    store = at(rclone.address)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "AWS_SECRET_ACCESS_KEY is not set" in refusal(store, PermissionError)[1]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    told = refusal(open_store(store.url), PermissionError)[1]
    assert told.startswith(f"no credentials for bucket {BUCKET} at {rclone.address}: set AWS_ACCESS_KEY_ID and ")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert refusal(open_store(store.url), PermissionError)[1] == told


def test_a_server_that_wants_no_keys(tmp_path, monkeypatch, at):
    class Open(Rclone):
        def command(self, port):
            return [word for word in super().command(port) if not word.startswith(("--auth-key", KEY))]

    with running(Open(tmp_path)) as server:
        store = at(server.address)
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        store.acquire_attempt(JOB, "first")
        commit(store)
        assert read(store) == b"tensors"


def test_a_server_that_is_not_there(impatient, at):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    told = f"{address} refuses connections: check that it runs, and its port"
    assert refusal(at(address)) == (errno.ECONNREFUSED, told)
    told = "the host name of http://no-such-host.invalid cannot be resolved: check AWS_ENDPOINT_URL"
    assert refusal(at("http://no-such-host.invalid")) == (errno.EHOSTUNREACH, told)


def test_a_server_that_does_not_answer(impatient, at, monkeypatch):
    monkeypatch.setattr(http_place, "REQUEST_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert refusal(at(address)) == (errno.ETIMEDOUT, f"{address} did not answer in time")


def test_an_address_that_is_none(impatient, at, rclone):
    assert (
        "its address may need to begin with http://" in refusal(at(rclone.address.replace("http:", "https:")))[1]
    )
    told = "AWS_ENDPOINT_URL '127.0.0.1:9000' is not a URL: it must begin with http:// or https://"
    assert refusal(at("127.0.0.1:9000")) == (errno.EINVAL, told)


def test_what_obstore_stumbles_over_is_an_error_like_others(impatient, at, rclone, monkeypatch):
    store = at(rclone.address)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a\nb")  # no header can hold it
    assert refusal(store)[1].startswith(f"{rclone.address} and bucket {BUCKET}: ")


@pytest.mark.parametrize(
    ("answer", "number", "told"),
    [
        ((507, "InsufficientStorage"), errno.ENOSPC, "has no space left in bucket bucket"),
        ((403, "QuotaExceeded"), errno.ENOSPC, "has no space left in bucket bucket"),
        ((403, "AccessDenied"), errno.EACCES, "denies access to bucket bucket"),
        ((400, "ExpiredToken"), errno.EACCES, "renew AWS_SESSION_TOKEN"),
        ((400, "AuthorizationHeaderMalformed"), errno.EINVAL, "in another region .* set AWS_REGION"),
        ((500, "InternalError"), errno.EAGAIN, "answers 500 InternalError for bucket bucket"),
        ((418, "Teapot"), errno.EIO, "answers 418 Teapot for bucket bucket"),
    ],
)
def test_what_a_server_refuses_is_one_sentence(answer, number, told, impatient, proxy, behind):
    proxy.rules.append(times(10_000, "PUT", FILE, answer=answer))
    writer = behind.begin(JOB, FIRST, 1, 7)
    with pytest.raises(OSError, match=f"{proxy.address} {told}|{told}") as caught:
        writer.write(FILE, [b"tensors"])
    assert caught.value.errno == number
    writer.abort()
    assert objects(behind) == []


def test_the_certificates_to_trust_are_named_when_they_cannot_be_read(at, rclone, monkeypatch):
    store = at(rclone.address)
    monkeypatch.setenv("AWS_CA_BUNDLE", "/no/such.pem")
    assert refusal(store)[1] == "AWS_CA_BUNDLE '/no/such.pem' cannot be read: No such file or directory"


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix", "s3://bucket/a//b", "s3://bucket/../b", "s3:/bucket/a"])
def test_an_address_that_names_no_bucket_is_refused(url):
    with pytest.raises(ValueError, match=r"give a bucket and a prefix, as in s3://my-bucket/checkpoints"):
        open_store(url)


def test_a_prefix_is_optional_and_its_slashes_do_not_matter():
    assert open_store("s3://bucket").url == open_store("s3://bucket/").url == "s3://bucket"
    assert open_store("s3://bucket/a/b/").url == "s3://bucket/a/b"


def test_without_obstore_it_is_said_how_to_get_it():
    probe = (
        "import sys; sys.modules['obstore'] = None\n"
        "from importlib.machinery import PathFinder\n"
        "real = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, *rest: None if name == 'obstore' else real(name, *rest)\n"
        "del sys.modules['obstore']\n"
        "from holdfast.store import open_store\n"
        "open_store('s3://bucket/prefix')"
    )
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    told = "ValueError: store 's3://bucket/prefix': object stores need obstore: pip install obstore, or install "
    assert told in ended.stderr


def test_nothing_is_imported_before_it_is_used():
    probe = (
        "import sys, holdfast.store\n"
        "assert not {'torch', 'obstore', 'urllib.request'} & sys.modules.keys()\n"
        "holdfast.store.open_store('s3://bucket/prefix')\n"
        "assert not {'torch', 'obstore'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)


def test_a_forked_process_is_refused(store):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # should it hang
        signal.alarm(20)
        try:
            store.checkpoints(JOB)
        except OSError as error:
            os.write(writing, error.strerror.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    assert os.read(reading, 1000).decode().startswith(f"bucket {BUCKET} cannot be used after a fork")


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is the whole process's elsewhere")
def test_training_goes_before_uploads(store):
    program = (
        "import os; from holdfast.store import open_store; open_store('s3://bucket/prefix').jobs()\n"
        "for thread in os.listdir('/proc/self/task'):\n"
        "    print(open(f'/proc/self/task/{thread}/stat').read(), end='')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    threads = [line.partition("(")[2].rpartition(")") for line in ended.stdout.splitlines()]
    niceness = [(name, int(rest.split()[16])) for name, _, rest in threads]
    assert ("python", 0) in niceness
    assert niceness.count(("tokio-rt-worker", io_pool.NICENESS)) >= os.cpu_count()
