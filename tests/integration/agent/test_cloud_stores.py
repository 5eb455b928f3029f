"""Checkpoints in Google Cloud Storage and in Azure: late copies, killed jobs, and messages without secrets.

What all object stores share is tested on S3, and by the public contract on each.
"""

import errno
import logging
import socket
from urllib.parse import unquote

import pytest

from holdfast.errors import DamagedCheckpoint
from holdfast.store import bucket, http_place, open_store
from holdfast.store.bucket import Bucket
from holdfast.testing.small_checkpoints import FILE, FIRST, JOB, SECOND, THIRD, commit, read
from tests.support import cloud_servers
from tests.support.cloud_servers import ACCOUNT, ACCOUNT_KEY, TOKEN
from tests.support.object_servers import BUCKET, S3FaultProxy
from tests.support.tiny_job import Trainer, killed_in_process

MIB = 1 << 20
SERVERS = {"gs": "google", "az": "azurite"}


@pytest.fixture(params=SERVERS)
def scheme(request):
    return request.param


@pytest.fixture
def proxy(scheme, request):
    with S3FaultProxy(request.getfixturevalue(SERVERS[scheme]).address) as proxy:
        yield proxy


@pytest.fixture
def store(scheme, proxy, monkeypatch):
    """A store whose requests pass the proxy; attempt 1 has begun."""
    store = open_store(cloud_servers.use(monkeypatch, scheme, proxy.address))
    store.acquire_attempt(JOB, "first")
    return store


def refusal(url):
    with pytest.raises(OSError, match=r".") as caught:
        open_store(url).acquire_attempt(JOB, "first")
    assert caught.value.filename == url
    assert "\n" not in caught.value.strerror
    return caught.value.errno, caught.value.strerror


def test_a_killed_job_goes_on_from_its_bucket_as_if_it_had_never_stopped(scheme, request, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    url = cloud_servers.use(monkeypatch, scheme, request.getfixturevalue(SERVERS[scheme]).address)
    whole = Trainer(tmp_path / "whole").run(until=16).crash().losses
    assert killed_in_process(url, 13) == whole[:13]
    resumed = Trainer(url, seed=5).run(until=16)
    assert resumed.losses == whole[12:]
    resumed.session.close()
    store = open_store(url)
    assert (store.latest_attempt("job"), int(store.checkpoints("job")[-1][:12])) == (2, 16)
    assert store.leftovers("job") == []


def test_an_object_is_created_only_where_there_is_none(store):
    store.bucket.put_new("job/record", b"one")
    store.bucket.put_new("job/record", b"one")
    with pytest.raises(FileExistsError):
        store.bucket.put_new("job/record", b"two")
    assert store.bucket.get("job/record") == b"one"


def test_a_large_payload_is_sent_in_parts_and_copied_by_the_server(store, proxy):
    data = bytes(range(256)) * (40 * MIB // 256)
    commit(store, data=data)
    assert len([r for r in proxy.requests if r.method == "PUT" and len(r.body) > 7 * MIB]) == 3
    proxy.requests.clear()
    writer = store.begin(JOB, SECOND, 1, len(data))
    writer.copy_file(JOB, FIRST, FILE, only_link=True)
    writer.commit(b"{}")
    assert sum(len(request.body) for request in proxy.requests) < 1000
    assert read(store, SECOND) == data


def test_a_deletion_whose_answer_is_lost_is_done(store, proxy):
    commit(store)
    lost = []

    def lose(request):
        if request.method in ("DELETE", "POST") and not lost:
            lost.append(request)
            request.cut = True

    proxy.rules.append(lose)
    store.delete(JOB, FIRST, attempt=1)
    assert lost
    assert store.checkpoints(JOB) == []


def test_a_payload_that_is_gone_is_damage(store):
    commit(store)
    with store.open_file(JOB, FIRST, FILE) as file:
        store.bucket.delete([f"{JOB}/{FIRST}/00000001/{FILE}"])
        with pytest.raises(DamagedCheckpoint, match="the object no longer exists"):
            file.read_into(0, memoryview(bytearray(7)))


@pytest.mark.parametrize("scheme", ["az"], indirect=True)
def test_a_copy_that_azure_completes_later_is_awaited(store, proxy, monkeypatch):
    """Azure may accept a copy before it is made; until then the object is empty."""
    commit(store)
    target = f"{JOB}/{SECOND}/00000001/{FILE}"
    azure, waits = Bucket(store.bucket.place), []

    def accept(request):
        if "x-ms-copy-source" in map(str.lower, request.headers):
            request.answer = (202, "")
            azure.upload(unquote(request.path).partition("/checkpoints/")[2], [b""], None)

    def complete(at_most_seconds):
        waits.append(at_most_seconds)
        azure.upload(target, [b"tensors"], None)

    proxy.rules.append(accept)
    monkeypatch.setattr(store.bucket, "wait", complete)
    writer = store.begin(JOB, SECOND, 1, 7)
    writer.copy_file(JOB, FIRST, FILE)
    writer.commit(b"{}")
    assert len(waits) == 1
    assert read(store, SECOND) == b"tensors"
    monkeypatch.setattr(bucket, "COPY_SECONDS", 0)
    with pytest.raises(OSError, match=r"received 7 bytes for .* in container bucket, but stores 0"):
        store.begin(JOB, THIRD, 1, 7).copy_file(JOB, FIRST, FILE)


@pytest.mark.parametrize("scheme", ["az"], indirect=True)
def test_a_shared_access_signature_for_the_container_is_enough(store, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", cloud_servers.shared_access_signature())
    store = open_store(store.url)
    commit(store)
    writer = store.begin(JOB, SECOND, 1, 7)
    writer.copy_file(JOB, FIRST, FILE, only_link=True)
    writer.commit(b"{}")
    store.delete(JOB, FIRST, attempt=1)
    assert store.checkpoints(JOB) == [SECOND]
    assert read(store, SECOND) == b"tensors"


# Messages


def test_a_bucket_that_is_not_there(scheme, store, proxy):
    noun = {"gs": "bucket", "az": "container"}[scheme]
    server = proxy.address + (f"/{ACCOUNT}" if scheme == "az" else "")
    told = f"{server} has no {noun} no-such: create it, or correct the address of the store"
    assert refusal(store.url.replace(f"//{BUCKET}/", "//no-such/")) == (errno.ENOENT, told)


WRONG = {
    "gs": {"GOOGLE_BEARER_TOKEN": "secret-that-is-wrong"},
    "az": {"AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0LXRoYXQtaXMtd3Jvbmc="},
}


def test_credentials_that_are_wrong_are_not_shown(scheme, store, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    for name, value in WRONG[scheme].items():
        monkeypatch.setenv(name, value)
    number, told = refusal(store.url)
    assert number == errno.EACCES
    assert "rejects the credentials" in told or "denies access" in told
    assert "check the variables that begin with" in told or "the credentials need permission" in told
    for secret in (*WRONG[scheme].values(), "secret-that", TOKEN, ACCOUNT_KEY):
        assert secret not in caplog.text + told


@pytest.mark.parametrize("scheme", ["az"], indirect=True)
def test_a_shared_access_signature_is_not_shown(store, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2023-11-03&sr=c&sp=racwdl&sig=ABCDEFGHsecretIJKLMNOP%3D")
    assert refusal(store.url)[0] == errno.EACCES
    assert "Forbidden" in caplog.text
    assert "IJKLMNOP" not in caplog.text


SETTINGS = {
    "gs": ("GOOGLE_SERVICE_ACCOUNT_KEY", '{"private_key": "a-secret-of-ours'),
    "az": ("AZURE_STORAGE_ACCOUNT_KEY", "a-secret-of-ours!"),
}


def test_settings_that_cannot_be_read_are_one_sentence_without_them(scheme, store, monkeypatch):
    name, value = SETTINGS[scheme]
    monkeypatch.delenv("GOOGLE_BEARER_TOKEN", raising=False)
    monkeypatch.setenv(name, value)
    number, told = refusal(store.url)
    assert number == errno.EINVAL
    assert " cannot be used: " in told
    assert "a-secret" not in told


MISSING = {
    "gs": ("no credentials for bucket bucket at ", "set GOOGLE_APPLICATION_CREDENTIALS"),
    "az": ("no credentials for container bucket at ", "set AZURE_STORAGE_ACCOUNT_KEY"),
}


def test_credentials_that_are_missing(scheme, store, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(http_place, "answers", lambda address: False)
    monkeypatch.setattr("holdfast.store.gcs_and_azure.answers", lambda address: False)
    for name in ("GOOGLE_BEARER_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    start, remedy = MISSING[scheme]
    number, told = refusal(store.url)
    assert number == errno.EACCES
    assert told.startswith(start)
    assert remedy in told


@pytest.mark.parametrize("scheme", ["az"], indirect=True)
def test_an_account_that_is_missing(store, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    told = "AZURE_STORAGE_ACCOUNT_NAME is not set: give the storage account of container bucket"
    assert refusal(store.url) == (errno.EACCES, told)


def test_a_server_that_is_not_there(scheme, store, monkeypatch):
    monkeypatch.setattr(http_place, "REQUESTS_RETRIED_SECONDS", 1)
    monkeypatch.setattr(bucket, "PATIENCE_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = cloud_servers.use(monkeypatch, scheme, f"http://127.0.0.1:{free.getsockname()[1]}")
    number, told = refusal(url)
    assert number == errno.ECONNREFUSED
    assert told.endswith(" refuses connections: check that it runs, and its port")
