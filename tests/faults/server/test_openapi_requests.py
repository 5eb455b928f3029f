"""Whatever is sent to a server over HTTP, nothing that its OpenAPI document does not list is answered."""

from __future__ import annotations

import gzip
import json
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator

import httpx2
import msgspec
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from holdfast_server.core.settings import ServerSettings
from holdfast_web import create_app

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
NO_STREAMS = ("/stream",)
DELETES_THE_JOB = "DELETE /api/v1/jobs/{job}"
"""Asked of jobs that are nowhere alone: the others go on with the one that is there."""


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    """Of a server with a job, on a port of its own."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(ServerSettings(database=str(tmp_path_factory.mktemp("openapi") / "holdfast.db")))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    batch = {
        "job": "char-gpt", "uid": "first", "attempt": 1, "rank": 0, "sequence": 0, "sent_at": 1.79e9,
        "iteration": 10, "lineage": 1,
        "events": [{"type": "attempt_started", "at": 1.79e9, "iteration": 0, "lineage": 1}],
    }  # fmt: skip
    httpx2.post(f"{url}/api/v1/ingest", json=batch).raise_for_status()
    yield url
    server.should_exit = True
    thread.join()
    listener.close()


def attack(address: str, cases: int, *, part: int = 0, parts: int = 1) -> Counter[str]:
    """Every operation of a part, so many times: how many requests of each were answered."""
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    answered: Counter[str] = Counter()
    found = [found.ok() for found in schema.get_all_operations()]
    for operation in [each for each in found if not each.path.endswith(NO_STREAMS)][part::parts]:

        @seed(1)
        @settings(
            max_examples=cases, deadline=None, database=None, phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def hold(case):
            if case.operation.label == DELETES_THE_JOB:
                case.path_parameters["job"] = f"no-{case.path_parameters['job']}"
            if isinstance(case.query, dict) and "wait" in case.query:
                case.query["wait"] = "0"
            case.call_and_validate(checks=CHECKS)
            answered[case.operation.label] += 1

        hold()
    return answered


# schemathesis draws with `random` where hypothesis would rather have its own.
ITS_OWN_AFFAIR = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")


@ITS_OWN_AFFAIR
def test_nothing_undocumented_is_answered(address):
    assert attack(address, 2).total() >= 60


@ITS_OWN_AFFAIR
@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_nothing_undocumented_is_answered_whatever_is_tried(address, part):
    answered = attack(address, 200, part=part, parts=4)
    assert answered.total() >= 1000
    print(f"\n{len(answered)} operations, {answered.total()} requests, {min(answered.values())} at least of each")


def hostile(number: int) -> tuple[bytes, dict[str, str]]:
    """A body that somebody might send who means no good, or whose disk is failing."""
    luck = random.Random(number)
    good = {"job": "char-gpt", "uid": "u", "attempt": 1, "rank": 0, "sequence": number, "sent_at": 1.0,
            "iteration": 1, "lineage": 1}  # fmt: skip
    odd = luck.choice([
        None, -1, 2**63, 2**64 - 1, -(2**63), 1e308, float("nan"), float("inf"), "", "x" * 5000, "\x00", "\ud7ff",
        [], {}, [[]] * 50, True, "../../etc/passwd", "<script>", "'; DROP TABLE jobs; --",
    ])  # fmt: skip
    field = luck.choice([*good, "samples", "events", "protocol", "unknown"])
    packed = msgspec.msgpack.encode({**good, field: odd})
    kinds = (
        lambda: (luck.randbytes(luck.randrange(1, 3000)), "application/msgpack", ""),
        lambda: (packed[: luck.randrange(len(packed))], "application/msgpack", ""),
        lambda: (packed, "application/msgpack", ""),
        lambda: (json.dumps({**good, field: odd}).encode(errors="replace"), "application/json", ""),
        lambda: (b"[" * luck.randrange(1, 200_000), "application/json", ""),
        lambda: (b"\x91" * luck.randrange(1, 200_000), "application/msgpack", ""),
        lambda: (b"\xdf" + struct.pack(">I", luck.getrandbits(32)) + packed, "application/msgpack", ""),
        lambda: (
            gzip.compress(b"\x00" * luck.choice([10, 10**6, 9 * 2**20, 3 * 10**7])),
            "application/msgpack",
            "gzip",
        ),
        lambda: (gzip.compress(packed)[: luck.randrange(1, 40)], "application/msgpack", "gzip"),
        lambda: (packed, luck.choice(["text/html", "", "application/xml", "a/b; c=d"]), ""),
        lambda: (packed, "application/msgpack", luck.choice(["br", "deflate", "gzip, gzip", "zstd", "x" * 500])),
        lambda: (_mutated(packed, luck), "application/msgpack", ""),
    )
    body, kind, encoding = luck.choice(kinds)()
    return body, {"Content-Type": kind, **({"Content-Encoding": encoding} if encoding else {})}


def _mutated(body: bytes, luck: random.Random) -> bytes:
    changed = bytearray(body)
    for _ in range(luck.randrange(1, 8)):
        changed[luck.randrange(len(changed))] = luck.randrange(256)
    return bytes(changed)


TARGETS = (
    ("POST", "/api/v1/ingest"),
    ("PATCH", "/api/v1/jobs/char-gpt/desired"),
    ("POST", "/api/v1/jobs/char-gpt/restores"),
    ("PUT", "/api/v1/projects/default/alert-rules/silent"),
    ("POST", "/api/v1/projects/default/alert-channels"),
    ("POST", "/api/v1/tokens"),
)


def throw(address: str, bodies: int) -> None:
    with httpx2.Client(base_url=address, timeout=300) as client:
        document = client.get("/openapi.json").json()["paths"]
        templates = [path.replace("char-gpt", "{job}").replace("/default/", "/{project}/") for _, path in TARGETS]
        for number in range(bodies):
            place = 0 if number % 2 else number // 2 % len(TARGETS)
            method, path = TARGETS[place]
            body, headers = hostile(number)
            reply = client.request(method, path, content=body, headers={**headers, "If-Match": '"0"'})
            template = templates[place].replace("/silent", "/{rule}")
            known = document[template][method.lower()]["responses"]
            assert reply.status_code < 500, (number, path, reply.text)
            assert str(reply.status_code) in known, (number, path, reply.status_code)
        assert client.get("/readyz").status_code == 200


def test_hostile_bodies_are_refused_in_words(address):
    throw(address, 50)


@pytest.mark.long
def test_a_thousand_hostile_bodies_are_refused_in_words(address):
    throw(address, 1000)
