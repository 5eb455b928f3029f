from __future__ import annotations

from fake_agent import FakeAgent, over_client
from starlette.testclient import TestClient


def test_a_first_run_gives_the_lines_to_paste(client: TestClient) -> None:
    page = client.get("/").text
    assert "No job has reported yet" in page
    assert "http://127.0.0.1:7117" in page
    assert "session.step(loss=loss)" in page


def test_a_job_is_told_with_its_figures_and_their_windows(client: TestClient, agent: FakeAgent) -> None:
    page = client.get("/").text
    assert 'href="/jobs/char-gpt"' in page
    assert "of 3.5 %, last 240 iterations" in page
    assert "every 40" in page
    assert "checkfreq" in page
    assert "No job has reported yet" not in page


def test_the_search_keeps_what_it_was_asked_for(client: TestClient, agent: FakeAgent) -> None:
    assert 'id="job-char-gpt"' in client.get("/?search=gpt").text
    page = client.get('/?search=<b>"other').text
    assert "No job matches “&lt;b&gt;&#34;other”" in page
    assert 'id="job-char-gpt"' not in page


def test_the_live_part_is_the_same_rows(client: TestClient, agent: FakeAgent) -> None:
    answer = client.get("/fleet/live", headers={"HX-Request": "true"})
    assert answer.text.count("<hx-partial") == 1
    assert 'id="job-char-gpt"' in answer.text
    assert "<html" not in answer.text


def test_living_jobs_keep_their_place(client: TestClient, agent: FakeAgent) -> None:
    other = FakeAgent(over_client(client), job="a-second", started_at=agent.at)
    other.start()
    other.train(3)
    other.send()
    for speaker in (agent, other, agent):
        speaker.train(1)
        speaker.send()
        page = client.get("/").text
        assert page.index('id="job-a-second"') < page.index('id="job-char-gpt"')


def test_a_page_is_never_taken_from_a_cache(client: TestClient) -> None:
    headers = client.get("/").headers
    assert headers["cache-control"] == "no-store"
    assert "HX-Request" in headers["vary"]
