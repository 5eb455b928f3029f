"""The page of stores."""

from __future__ import annotations

import re

from starlette.testclient import TestClient

from holdfast.protocol.store_shares import StoreReport
from tests.support.clock import FakeClock
from tests.support.fake_agent import FakeAgent, over_client


def test_stores_come_by_load_or_by_address(client: TestClient, clock: FakeClock) -> None:
    """`b` is at 90 % of its limit, `a` at 10 %, and `c` has none."""
    for place, rate in {"a": 10e6, "b": 90e6, "c": 400e6}.items():
        agent = FakeAgent(over_client(client), job=f"job-{place}", started_at=clock.now - 60)
        agent.start()
        agent.events.append(
            StoreReport(
                at=clock.now, store=place * 32, address=f"s3://{place}", host="node", checkpoint_bytes=10**9,
                writing=True, bytes_per_second=rate,
            )
        )  # fmt: skip
        agent.send()
        if place != "c":
            client.put("/api/v1/store-limits", json={"target": f"s3://{place}", "limit": "100MB/s"})
    page = client.get("/stores").text
    assert re.findall(r"<bdi>s3://(\w)</bdi></a>", page) == ["c", "b", "a"]
    assert 'href="/account?by=store"' in page
    assert re.findall(r'data-label="Load">([^<]*)<', page) == ["–", "90.0 %", "10.0 %"]
    by_address = client.get("/stores?sort=address").text
    assert re.findall(r"<bdi>s3://(\w)</bdi></a>", by_address) == ["a", "b", "c"]
    assert client.get("/stores?sort=size").status_code == 422
