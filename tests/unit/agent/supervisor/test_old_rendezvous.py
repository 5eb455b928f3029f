"""The wait for ranks that still run: it needs sessions in a store of torch, and ends with the store."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NoReturn

import pytest
from torch.distributed import PrefixStore, TCPStore

from holdfast.supervisor import old_rendezvous
from holdfast.system.processes import PendingSignals
from holdfast.system.supervisor_channel import SESSIONS_BEGUN
from tests.support.foreign_servers import SILENT, SSH, WEB, other_server


class Signals(PendingSignals):
    """Calls `act` before the first sleep."""

    act: Callable[[], object] = staticmethod(lambda: None)
    sleeps = 0

    def sleep(self, seconds: float | None, *sources: socket.socket) -> None:
        self.sleeps += 1
        if self.sleeps == 1:
            self.act()
        PendingSignals.sleep(self, seconds, *sources)


@pytest.fixture
def signals() -> Iterator[Signals]:
    wake, waker = socket.socketpair()
    with wake, waker:
        yield Signals(wake, waker)


def opened(*, libuv: bool = True) -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=300), False, use_libuv=libuv)


def wait_for(port: int | str, signals: Signals, limit_seconds: float = 1e6) -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1"}
    old_rendezvous.await_end(environment, signals, limit_seconds)


@pytest.mark.parametrize("libuv", [True, False])
def test_the_wait_ends_with_the_store(signals: Signals, libuv: bool, capfd: pytest.CaptureFixture[str]) -> None:
    stores = [opened(libuv=libuv)]
    stores[0].set(SESSIONS_BEGUN, b"1")
    signals.act = stores.clear
    wait_for(stores[0].port, signals)
    assert signals.sleeps
    assert "rank 0 still runs at 127.0.0.1:" in capfd.readouterr().err


def test_a_store_in_which_ranks_still_meet_is_not_waited_for(signals: Signals) -> None:
    store = opened()
    PrefixStore("default_pg", store).set("holdfast/1/end", b"1")
    wait_for(store.port, signals)
    assert not signals.sleeps


def test_a_signal_ends_the_wait(signals: Signals) -> None:
    store = opened()
    store.set(SESSIONS_BEGUN, b"1")

    def stop() -> None:
        signals.stops.append((signal.SIGTERM, 0.0))
        signals.wake_up()

    signals.act = stop
    wait_for(store.port, signals)
    assert signals.sleeps == 1


def test_the_wait_has_a_limit(signals: Signals) -> None:
    store = opened()
    store.set(SESSIONS_BEGUN, b"1")
    wait_for(store.port, signals, 0.01)
    assert signals.sleeps


@pytest.mark.parametrize("answer", [SILENT, SSH, WEB])
def test_what_is_no_store_is_not_waited_for(signals: Signals, answer: bytes) -> None:
    with other_server(answer) as address:
        wait_for(address.rpartition(":")[2], signals)
    assert not signals.sleeps


def test_a_server_that_does_not_respond_is_not_waited_for(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_rendezvous, "CONTACT_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        wait_for(server.getsockname()[1], signals)
    assert not signals.sleeps


def test_a_lookup_without_an_answer_is_not_waited_for(signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, ended = threading.Event(), threading.Event()

    def unanswered(*_: object) -> NoReturn:
        is_over.wait(30)
        ended.set()
        raise socket.gaierror

    monkeypatch.setattr(old_rendezvous, "CONTACT_SECONDS", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", unanswered)
    wait_for(1, signals)
    assert not ended.is_set()
    is_over.set()
    assert ended.wait(30)


@pytest.mark.parametrize("port", ["seven", 1, 70_000])
def test_where_nothing_listens_there_is_no_wait(signals: Signals, port: int | str) -> None:
    wait_for(port, signals)
    old_rendezvous.await_end({}, signals, 1e6)
    assert not signals.sleeps


def test_rank_0_and_a_job_without_ranks_wait_for_nobody(monkeypatch):
    monkeypatch.setattr(old_rendezvous.socket, "create_connection", lambda *_: pytest.fail("connects"))
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for environment in (there, there | {"RANK": "0"}):
        assert old_rendezvous._connect(environment) is None
