"""Where the time went, rank by rank and wait by wait; and one checkpoint by itself."""

from __future__ import annotations

import re
from html import unescape

import msgspec
import pytest
from starlette.testclient import TestClient

from holdfast.protocol import wire
from holdfast_server.queries import timeline
from holdfast_web.job import panels
from tests.support.clock import FakeClock
from tests.support.fake_agent import FakeAgent
from tests.support.web_fixtures import NOW

JOB = "/jobs/char-gpt"
HTMX = {"HX-Request": "true"}


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def test_stalls_are_shown_by_kind_over_the_time(client: TestClient, agent: FakeAgent, clock: FakeClock) -> None:
    agent._stall("restore", 2.5)
    agent._stall("restore", 1.5)
    agent.send()
    clock.now = agent.at + 1000
    part = client.get(f"{JOB}/stalls?window=1h", headers=HTMX).text
    assert "<html" not in part
    assert re.search(r"restore</th><td class=\"num\">4 s</td><td class=\"num\">4 s</td>", part)
    assert '<rect data-stall="restore"' in part
    assert "restore 4 s" in part


def test_a_job_that_never_waited_says_so(client: TestClient) -> None:
    from tests.support.fake_agent import over_client

    young = FakeAgent(over_client(client), job="young", started_at=NOW)
    young.start()
    young.send()
    assert "No single wait in this window" in client.get("/jobs/young/stalls").text


def test_the_waterfall_puts_each_bucket_where_the_one_before_it_ends(
    client: TestClient, agent: FakeAgent, clock: FakeClock
) -> None:
    clock.now = agent.at
    part = client.get(f"{JOB}/goodput?window=all", headers=HTMX).text
    rows = re.findall(
        r'<td class="waterfall"><svg[^>]*><rect data-bucket="\w+" x="([\d.]+)" y="0" width="([\d.]+)"', part
    )
    assert len(rows) >= 3
    first = rows[0]
    assert float(first[0]) == 0
    assert float(rows[1][0]) == pytest.approx(float(first[1]), abs=0.01)


def ranks(agent: FakeAgent, slow: int, factor: float) -> None:
    for rank in range(4):
        own = 10.0 * (factor if rank == slow else 1.0)
        work = wire.RankTotals(
            at=agent.at, lineage=1, first_iteration=1, last_iteration=40, iterations=40, seconds=20.0,
            longest_seconds=1.0, barrier_iterations=40, barrier_seconds=20.0 - own,
        )  # fmt: skip
        batch = wire.Batch(
            job=agent.job, uid=f"{agent.job}-1", attempt=1, rank=rank, sequence=900 + rank, sent_at=agent.at,
            iteration=agent.iteration, lineage=1, events=[work],
        )  # fmt: skip
        agent.ask("/api/v1/ingest", msgspec.msgpack.encode(batch))


def test_the_slowest_rank_comes_first_and_its_cells_are_the_darkest(
    client: TestClient, agent: FakeAgent, clock: FakeClock
) -> None:
    clock.now = agent.at
    ranks(agent, slow=2, factor=1.5)
    part = client.get(f"{JOB}/ranks?window=1h", headers=HTMX).text
    rows = re.findall(r'<th scope="row">(\d+)(.*?)</tr>', part, re.DOTALL)
    assert rows[0][0] == "2"
    steps = {rank: set(re.findall(r'data-step="(\w+)"', row)) - {"none"} for rank, row in rows}
    assert steps["2"] == {"4"}
    assert steps["1"] == {"0"}
    assert "+50 % vs. median" in rows[0][1]


def test_the_page_of_the_ranks_keeps_its_rows(
    client: TestClient, agent: FakeAgent, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panels, "RANKS_SHOWN", 2)
    clock.now = agent.at
    ranks(agent, slow=2, factor=1.5)

    def rows(html: str) -> int:
        return len(re.findall(r'<th scope="row">', html))

    panel = client.get(f"{JOB}/ranks?window=1h", headers=HTMX).text
    assert (rows(panel), "Show all 4 ranks" in panel) == (2, True)
    page = client.get(f"{JOB}/ranks").text
    assert (rows(page), "Show all" in page) == (4, False)
    asked = re.findall(r'hx-get="([^"]+)"', page)
    assert len(asked) >= 3
    for part in asked:
        assert rows(client.get(unescape(part), headers=HTMX).text) == 4
    for part in re.findall(r'hx-get="([^"]+)"', panel):
        assert rows(client.get(unescape(part), headers=HTMX).text) == 2


def test_a_checkpoint_shows_how_it_was_made_and_what_came_of_it(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/restores", data={"checkpoint": "000000000120-1", "key": "once"})
    agent.obey(agent.desired())
    agent.train(60)
    agent.send()
    page = words(client.get(f"{JOB}/checkpoints/000000000120-1").text)
    assert "Size 102 MB" in page
    assert "Snapshot 140 ms" in page
    assert "previous: 80 , 40 iterations earlier; next: 160" in page
    assert "lineage 2 Started here" in page
    assert "restored Restore requested by operator at iteration 400" in page
    child = words(client.get(f"{JOB}/checkpoints/000000000160-2").text)
    assert "lineage 2 Started at iteration 120 from checkpoint 000000000120-1" in child
    assert "lineage 1 Started with the job" in child


def test_a_checkpoint_shows_of_its_restores_however_many_others_there_were_since(
    client: TestClient, agent: FakeAgent, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "MAX_ORDERS", 1)
    for number, checkpoint in enumerate(("000000000120-1", "000000000080-1")):
        clock.now += 1
        client.post(f"{JOB}/restores", data={"checkpoint": checkpoint, "key": str(number)})
        agent.obey(agent.desired())
        agent.send()
    page = words(client.get(f"{JOB}/checkpoints/000000000120-1").text)
    assert "restored Restore requested by operator at iteration 400" in page


def test_the_settings_then_are_those_that_the_agent_had(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/budget", data={"version": "0", "budget": "2"})
    agent.obey(agent.desired())
    agent.send()
    client.post(f"{JOB}/budget", data={"version": "1", "budget": "4"})
    agent.train(200)
    agent.send()
    (newest,) = client.get(f"/api/v1{JOB}/checkpoints?limit=1").json()["checkpoints"]
    before = words(client.get(f"{JOB}/checkpoints/000000000360-1").text)
    assert "Settings at that time: budget script default (3.5 %), interval automatic." in before
    after = words(client.get(f"{JOB}/checkpoints/{newest['id']}").text)
    assert "Settings at that time: budget 2 %, interval automatic." in after


def test_two_checkpoints_stand_side_by_side(client: TestClient, agent: FakeAgent) -> None:
    page = words(client.get(f"{JOB}/checkpoints/000000000120-1?with=000000000080-1").text)
    assert "40 iterations and" in page
    assert "Size 102 MB 102 MB" in page


@pytest.mark.parametrize("path", ["000000000121-1", "000000000120-1?with=000000000121-1", "nonsense"])
def test_a_checkpoint_that_is_not_there_is_a_page_that_says_so(
    client: TestClient, agent: FakeAgent, path: str
) -> None:
    answer = client.get(f"{JOB}/checkpoints/{path}")
    assert answer.status_code in (404, 422)
    assert "<html" in answer.text
