"""Which requests wait in the event loop, and which run in threads."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import event
from sqlalchemy.pool import Pool

from holdfast_server.control import control
from holdfast_server.db.request_threads import THREADS
from holdfast_server.queries import exports
from tests.support.endpoint_table import ENDPOINTS

JOB = "/api/v1/jobs/char-gpt"
SHARED_ANSWERS = {("GET", "/api/v1/jobs/{job}/timeline"), ("GET", "/jobs/{job}/live")}
STREAMS = {("GET", "/api/v1/jobs/{job}/stream"), ("GET", "/fleet/stream")}
REPORTS_AND_POLLS = {("POST", "/api/v1/ingest"), ("GET", "/api/v1/jobs/{job}/desired")}
HEALTH_CHECKS = {("GET", "/healthz"), ("GET", "/readyz")}


def test_only_what_waits_for_others_is_asynchronous():
    asynchronous = {(one.method, one.path) for one in ENDPOINTS.endpoints if one.threads is None}
    assert asynchronous == SHARED_ANSWERS | STREAMS | REPORTS_AND_POLLS | HEALTH_CHECKS


@pytest.fixture
def connections():
    """The thread that took each connection in use."""
    in_use = {}

    def taken(_, record, __):
        in_use[record] = threading.current_thread().name

    def returned(_, record):
        in_use.pop(record, None)

    event.listen(Pool, "checkout", taken)
    event.listen(Pool, "checkin", returned)
    yield in_use
    event.remove(Pool, "checkout", taken)
    event.remove(Pool, "checkin", returned)


def test_agents_that_wait_hold_neither_a_thread_nor_a_connection(client, agent, monkeypatch, connections):
    agent.start()
    count = 4 * THREADS["agents"]
    looked, all_wait, newer_desired = [], threading.Event(), control.newer_desired

    def looking(*asked, **options):
        found = newer_desired(*asked, **options)
        looked.append(found)
        if len(looked) == count:
            all_wait.set()
        return found

    monkeypatch.setattr(control, "newer_desired", looking)
    polls = [threading.Thread(target=client.get, args=(f"{JOB}/desired?after=0&wait=60",)) for _ in range(count)]
    for poll in polls:
        poll.start()
    assert all_wait.wait(300)
    held = [name for name in list(connections.values()) if name.startswith("holdfast-agents")]
    assert client.get(f"{JOB}/desired").status_code == 200
    client.patch(f"{JOB}/desired", json={"budget": 0.02}, headers={"If-Match": '"0"'})
    for poll in polls:
        poll.join()
    assert held == []


def test_an_export_holds_no_connection_between_two_parts(client, agent, monkeypatch, connections):
    agent.start()
    agent.train(20)
    monkeypatch.setattr(exports, "PART_ITERATIONS", 7)
    database = client.app.state.services.database
    parts = exports.csv_of(database, exports.samples(database, "char-gpt", None, None))
    here = threading.current_thread().name
    held = [here in list(connections.values()) for _ in parts]
    assert held == [False] * 4, "the names of the columns, and three parts"
