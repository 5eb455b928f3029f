"""The drill of docs/server.md and docs/postgresql.md: back up a server in use, restore elsewhere, go on there."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import msgspec
import pytest

from holdfast.client import Client
from holdfast.protocol.wire import Batch, Checkpoint
from tests.support.postgres import binaries
from tests.support.server_fixtures import ScriptedAgent, ServerProcess

pytestmark = pytest.mark.processes
ROOT = Path(__file__).resolve().parents[3]
JOB = "/api/v1/jobs/char-gpt"
MOST = 500
"""Checkpoints that the server lists at once."""
HOLDFAST = Path(sys.executable).with_name("holdfast")


def run(*command: object) -> str:
    """A command as an operator types it, with the programs of PostgreSQL in PATH."""
    folders = [str(HOLDFAST.parent), os.environ["PATH"]]
    if str(command[0]).startswith("pg_"):
        folders.insert(0, str(binaries()))
    ended = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": ":".join(folders)},
    )
    assert ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.fixture
def elsewhere(database_kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where nothing is yet: the path of a file, or the URL of an empty database."""
    if database_kind == "sqlite":
        (tmp_path / "elsewhere").mkdir()
        yield str(tmp_path / "elsewhere" / "holdfast.db")
        return
    cluster = request.getfixturevalue("cluster")
    name = cluster.create()
    yield cluster.url(name)
    cluster.drop(name)


def back_up(database: str, copy: Path) -> None:
    if "://" in database:
        run("pg_dump", "--format=custom", "--file", copy, database)
    else:
        run("holdfast", "db", "backup", copy, "--db", database)


def restore(database: str, copy: Path) -> None:
    if "://" in database:
        run("pg_restore", "--no-owner", "--exit-on-error", "--dbname", database, copy)
    else:
        run("holdfast", "db", "restore", copy, "--db", database)


def signed_in(server: ServerProcess, key: str) -> httpx2.Client:
    client = server.client()
    client.headers["Authorization"] = f"Bearer {key}"
    return client


def client_of(connected: httpx2.Client) -> Client:
    return Client(str(connected.base_url), connected.headers["Authorization"].removeprefix("Bearer "))


def agent_checkpoints(agent: ScriptedAgent) -> list[str]:
    batches = [msgspec.msgpack.decode(body, type=Batch) for body in agent.sent]
    return [event.id for batch in batches for event in batch.events if isinstance(event, Checkpoint)]


class ReportingThread:
    """An agent that reports as fast as the server stores, until it is stopped."""

    def __init__(self, agent: ScriptedAgent) -> None:
        self.agent, self.error = agent, None
        self._stop, self._several = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._report)
        self._thread.start()

    def _report(self) -> None:
        try:
            for number in itertools.count(1):
                if self._stop.is_set():
                    return
                self.agent.train(5)
                if number < MOST / 2:
                    self.agent.checkpoint()
                if number == 3:
                    self._several.set()
        except BaseException as error:
            self.error = error
            self._several.set()

    def wait_for_several(self) -> None:
        self._several.wait()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        assert self.error is None


@pytest.fixture
def keys(serve: Callable[..., ServerProcess], new_database: str) -> tuple[ServerProcess, str, str]:
    """A server with people, and the keys of an agent and of an admin."""
    server = serve(HOLDFAST_ACCOUNTS="1")
    run("holdfast", "user", "add", "ada", "--server-admin", "--db", new_database)
    report = run("holdfast", "token", "create", "agents", "--db", new_database).strip()
    scopes = [word for scope in ("read", "control", "admin") for word in ("--scope", scope)]
    admin = run("holdfast", "token", "create", "admin", "--every-project", *scopes, "--db", new_database).strip()
    return server, report, admin


def test_a_backup_of_a_server_in_use_is_restored_elsewhere_and_the_job_goes_on(
    keys: tuple[ServerProcess, str, str],
    new_database: str,
    elsewhere: str,
    spawn_server: Callable[..., ServerProcess],
    tmp_path: Path,
) -> None:
    server, report_key, admin_key = keys
    with signed_in(server, report_key) as reporting, signed_in(server, admin_key) as operator:
        agent = ScriptedAgent(reporting)
        agent.start()
        agent.train(100)
        checkpoint = agent.checkpoint()
        assert operator.patch(f"{JOB}/checkpoints/{checkpoint}", json={"pinned": True}).status_code == 200
        assert operator.patch(
            f"{JOB}/desired", json={"budget": 0.02}, headers={"If-Match": '"0"'}
        ).status_code == 200  # fmt: skip
        edits = operator.get(f"{JOB}/edits").json()
        load = ReportingThread(agent)
        load.wait_for_several()
        back_up(new_database, tmp_path / "backup")
        load.stop()
        reported = agent.iteration
    server.kill()

    restore(elsewhere, tmp_path / "backup")
    second = spawn_server("--db", elsewhere, "--port", "0", HOLDFAST_ACCOUNTS="1")
    second.wait_for_address()
    with signed_in(second, report_key) as reporting, signed_in(second, admin_key) as operator:
        kept = client_of(operator).checkpoints("char-gpt", limit=MOST)
        assert next(row for row in kept if row.id == checkpoint).pinned
        assert operator.get(f"{JOB}/edits").json() == edits
        assert [person["name"] for person in operator.get("/api/v1/people").json()["people"]] == ["ada"]
        assert {row["name"] for row in operator.get("/api/v1/tokens").json()["tokens"]} == {"agents", "admin"}
        timeline = operator.get(f"{JOB}/timeline", params={"from": 1, "to": 100}).json()
        assert timeline["lineages"]
        position = operator.get(JOB).json()["iteration"]
        assert 100 <= position <= reported
        # what came after the backup is sent again by the agent, as it would after an outage
        for body in agent.sent:
            assert reporting.post(
                "/api/v1/ingest", content=body, headers={"Content-Type": "application/msgpack"}
            ).status_code == 200  # fmt: skip
        assert operator.get(JOB).json()["iteration"] == reported
        ids = [row.id for row in client_of(operator).checkpoints("char-gpt", limit=MOST)]
        assert ids == sorted(set(agent_checkpoints(agent)), reverse=True)
    run("holdfast", "audit", "verify", "--db", elsewhere)


def test_the_documents_have_the_commands_of_the_drill() -> None:
    sqlite, postgresql = ((ROOT / "docs" / name).read_text() for name in ("server.md", "postgresql.md"))
    assert "holdfast db backup" in sqlite
    assert "holdfast db restore" in sqlite
    assert "pg_dump --format=custom --file" in postgresql
    assert "pg_restore --no-owner --exit-on-error --dbname" in postgresql
