"""What one job page costs the server: SQL statements and CPU time."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import event
from sqlalchemy.engine import Engine
from starlette.testclient import TestClient

from benchmarks.harness import BenchmarkServer
from holdfast_server.core.settings import ServerSettings
from holdfast_web import create_app

WARM_REQUESTS = 20
REQUESTS = 150


def cpu_ms(server: BenchmarkServer, path: str) -> float:
    """Return the CPU time of the server for one request, with the connection kept open."""
    server.median_ms(path, WARM_REQUESTS)
    before = server.cpu_seconds()
    server.median_ms(path, REQUESTS - 1)
    return 1000 * (server.cpu_seconds() - before) / REQUESTS


def statements(database: Path, path: str) -> int:
    """Return how many SQL statements a request executes, on a database that no server uses."""
    seen: list[str] = []

    def note(*arguments: object) -> None:
        seen.append(str(arguments[2]))

    url = "http://127.0.0.1:7117"
    with TestClient(create_app(ServerSettings(database=str(database))), base_url=url) as client:
        client.get(path)  # what only the first request does
        event.listen(Engine, "before_cursor_execute", note)
        answer = client.get(path)
        event.remove(Engine, "before_cursor_execute", note)
    if answer.status_code != 200:
        raise RuntimeError(f"the server answered {answer.status_code}")
    return len(seen)
