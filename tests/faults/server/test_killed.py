"""Servers and databases die under load, again and again: what was acknowledged is there, once.

Every batch carries a stall at an iteration of its own: the rows say which batches were stored, and how often.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count

import httpx2
import pytest

from holdfast.protocol.wire import Stall
from tests.support.load_balancer import LoadBalancer
from tests.support.postgres import ON_POSTGRES, ON_SQLITE, ask

pytestmark = pytest.mark.processes

SEED = int(os.environ.get("HOLDFAST_TEST_SEED", time.time_ns() % 2**32))
ITERATIONS = 3
"""In each batch."""
AGENTS = 20


def sizes(total, parts):
    """(kills, agents): a few, and for `make test-long` so many in all, each part on a database of its own."""
    part = (total // parts, AGENTS)
    return pytest.mark.parametrize(
        "size",
        [
            (2, 4),
            *(pytest.param(part, marks=pytest.mark.long, id=f"part-{n + 1}-of-{parts}") for n in range(parts)),
        ],
    )


@dataclass
class Process:
    """A server that starts as a user's does: nothing of it is imported beforehand."""

    process: subprocess.Popen[str]
    url: str

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(request, new_database, tmp_path):
    """The tests' own quick way; for `make test-long`, which tells how long a start takes, the real one."""
    if request.node.get_closest_marker("long") is None:
        yield request.getfixturevalue("serve")
        return
    started: list[Process] = []

    def start(*arguments: str) -> Process:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast_server", "--db", new_database, "--port", "0", *arguments],
            stdout=subprocess.PIPE, text=True, env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        )  # fmt: skip
        assert process.stdout is not None
        address = next(found for line in process.stdout if (found := re.search(r"is at (http://[^ ]+)", line)))
        started.append(Process(process, address[1]))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.kill()


class Load:
    """Agents that report without pause, and send again what was not acknowledged, as real ones do."""

    def __init__(self, url, fresh_agent, agents):
        self._url, self._fresh_agent = url, fresh_agent
        self.acknowledged = dict.fromkeys((f"job-{number}" for number in range(agents)), 0)
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._report, args=(job,)) for job in self.acknowledged]

    def _report(self, job):
        with httpx2.Client(base_url=self._url, timeout=30) as client:
            agent = self._fresh_agent(client, job=job)
            for number in count(1):
                stall = Stall(at=1.0, iteration=number, lineage=1, kind="snapshot_wait", seconds=0.1)
                send = partial(agent.train, ITERATIONS, stall)
                while not _acknowledged(send):
                    if self._over.wait(random.uniform(0, 0.2)):
                        return
                    send = partial(agent.send, agent.sent[-1])
                with self._changed:
                    self.acknowledged[job] = number
                    self._changed.notify_all()
                if self._over.is_set():
                    return

    def wait_for(self, batches):
        """Until every agent has had so many more acknowledged."""
        with self._changed:
            goal = {job: count + batches for job, count in self.acknowledged.items()}
            reached = self._changed.wait_for(
                lambda: all(self.acknowledged[job] >= count for job, count in goal.items()), timeout=300
            )
            assert reached, f"the agents came to {self.acknowledged}, not to {goal}"

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join()

    def check(self, database):
        """Nothing acknowledged is missing, nothing is there twice; of each agent one batch may be in doubt."""
        rows = ask(database, "SELECT job, iteration, count(*) FROM stalls GROUP BY job, iteration")
        assert [row for row in rows if row[2] != 1] == [], "stored twice"
        stored = {job: {iteration for name, iteration, _ in rows if name == job} for job in self.acknowledged}
        for job, last in self.acknowledged.items():
            assert set(range(1, last + 1)) <= stored[job], f"acknowledged and lost, of {job}"
            assert stored[job] <= set(range(1, last + 2))
        counted = dict(ask(database, "SELECT job, sum(iterations) FROM attempts GROUP BY job"))
        assert counted == {job: ITERATIONS * len(iterations) for job, iterations in stored.items()}
        chunks = dict(ask(database, "SELECT job, sum(rows) FROM chunks GROUP BY job"))
        assert chunks == counted, "samples are missing, or there twice"
        return sum(map(len, stored.values()))


def _acknowledged(send):
    try:
        send()
    except (httpx2.TransportError, AssertionError):  # it died in the middle, or says that it cannot
        return False
    return True


@contextmanager
def told(what) -> Iterator[list[float]]:
    """Collects how long it took to be ready again, and says so at the end."""
    print(f"\nHOLDFAST_TEST_SEED={SEED}")
    random.seed(SEED)
    seconds: list[float] = []
    yield seconds
    print(
        f"{what}: {len(seconds)} times, ready again after {statistics.median(seconds):.2f} s in the middle, "
        f"{statistics.quantiles(seconds, n=10)[-1]:.2f} s nine times in ten, {max(seconds):.2f} s at worst"
    )


def ready_again(server_url) -> float:
    """Seconds until the server says so."""
    started = time.perf_counter()
    with httpx2.Client(base_url=server_url, timeout=30) as client:
        while True:
            try:
                if client.get("/readyz").status_code == 200:
                    return time.perf_counter() - started
            except httpx2.TransportError:
                pass


def port_of(url):
    return url.rpartition(":")[2]


@ON_SQLITE
@sizes(200, 5)
def test_a_server_that_is_killed_has_kept_what_it_acknowledged_once(start, fresh_agent, new_database, size):
    kills, agents = size
    server = start()
    with told("server killed") as seconds, Load(server.url, fresh_agent, agents) as load:
        for _ in range(kills):
            load.wait_for(random.randint(1, 4))
            server.kill()
            began = time.perf_counter()
            server = start("--port", port_of(server.url))
            ready_again(server.url)
            seconds.append(time.perf_counter() - began)
        load.wait_for(1)
    print(f"{load.check(new_database)} batches stored, each once")
    assert ask(new_database, "PRAGMA integrity_check") == [("ok",)]


@ON_POSTGRES
@sizes(50, 2)
def test_a_database_that_crashes_has_kept_what_was_acknowledged_once(
    start, fresh_agent, new_database, cluster, size
):
    crashes, agents = size
    server = start()
    with told("PostgreSQL crashed") as seconds, Load(server.url, fresh_agent, agents) as load:
        for _ in range(crashes):
            load.wait_for(random.randint(1, 4))
            cluster.crash()
            cluster.start()
            seconds.append(ready_again(server.url))
        load.wait_for(1)
    print(f"{load.check(new_database)} batches stored, each once")


@pytest.fixture
def balancer() -> Iterator[LoadBalancer]:
    balancer = LoadBalancer()
    yield balancer
    balancer.close()


@ON_POSTGRES
@sizes(50, 2)
def test_one_of_three_servers_may_be_killed_at_any_time(start, fresh_agent, new_database, balancer, size):
    kills, agents = size
    servers = [start() for _ in range(3)]
    balancer.servers = [server.url for server in servers]
    with told("one of three servers killed") as seconds, Load(balancer.url, fresh_agent, agents) as load:
        for number in range(kills):
            load.wait_for(random.randint(1, 4))
            killed = number % len(servers)
            servers[killed].kill()
            # The others go on alone meanwhile.
            load.wait_for(1)
            began = time.perf_counter()
            servers[killed] = start("--port", port_of(servers[killed].url))
            ready_again(servers[killed].url)
            seconds.append(time.perf_counter() - began)
        load.wait_for(1)
    print(f"{load.check(new_database)} batches stored, each once")
