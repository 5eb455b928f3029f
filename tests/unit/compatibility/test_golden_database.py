"""A server of today opens the database of the first release and answers as that release did.

A failure means that an upgrade loses or changes what is stored. Before the first release, `python -m tools.golden
database` makes the file anew; after it, a migration has to bring it up to date.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from holdfast_server.core.settings import ServerSettings
from holdfast_server.db import Database
from holdfast_web import create_app
from tests.support.accounts_server import BASE_URL, PASSWORD, AccountsServer
from tests.support.clock import FakeClock
from tests.support.golden_job import differences
from tests.support.golden_server import PATHS, fill, responses
from tests.support.postgres import check_matches_models

GOLDEN = Path(__file__).parents[2] / "golden"
KEPT = json.loads((GOLDEN / "database.json").read_text())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A copy of the golden database."""
    copy = tmp_path / "holdfast.db"
    copy.write_bytes(gzip.decompress((GOLDEN / "database.gz").read_bytes()))
    return copy


@pytest.fixture
def client(path: Path) -> Iterator[TestClient]:
    app = create_app(ServerSettings(database=str(path), accounts=False), clock=FakeClock(KEPT["now"]))
    with TestClient(app, base_url=BASE_URL) as client:
        yield client


def test_the_golden_database_is_upgraded_to_the_tables_of_today(path: Path) -> None:
    database = Database(str(path))
    database.prepare()
    database.release()
    check_matches_models(str(path))


def test_a_server_answers_from_the_golden_database_as_it_did(client: TestClient) -> None:
    assert KEPT["responses"].keys() <= set(PATHS)
    assert differences(KEPT["responses"], responses(client)) == []


def test_people_of_the_golden_database_still_sign_in(path: Path) -> None:
    clock = FakeClock(KEPT["now"] + 3600)
    app = create_app(ServerSettings(database=str(path), accounts=True), clock=clock)
    with TestClient(app, base_url=BASE_URL, follow_redirects=False) as client:
        assert AccountsServer(client, clock).sign_in("ada", PASSWORD).status_code == 303
        assert AccountsServer(client, clock).sign_in("ada", "wrong").status_code != 303


def test_a_job_of_the_golden_database_goes_on(client: TestClient) -> None:
    """Its page renders, a setting changes, and a restore is requested."""
    assert client.get("/jobs/char-gpt").status_code == 200
    version = client.get("/api/v1/jobs/char-gpt/desired").json()["version"]
    headers = {"If-Match": f'"{version}"'}
    assert client.patch("/api/v1/jobs/char-gpt/desired", json={"budget": 0.01}, headers=headers).status_code == 200
    checkpoints = client.get("/api/v1/jobs/char-gpt/checkpoints").json()["checkpoints"]
    wanted = next(row["id"] for row in checkpoints if row["restorable"])
    assert client.post("/api/v1/jobs/char-gpt/restores", json={"checkpoint": wanted}).status_code == 201


def test_what_fills_the_golden_database_still_runs(tmp_path: Path) -> None:
    """The tool makes the file anew with the same requests."""
    clock = FakeClock()
    app = create_app(ServerSettings(database=str(tmp_path / "new.db"), accounts=False), clock=clock)
    with TestClient(app, base_url=BASE_URL) as client:
        fill(client, clock)
        now = responses(client)
    assert now.keys() == KEPT["responses"].keys()
