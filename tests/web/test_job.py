from __future__ import annotations

import math

import pytest
from fake_agent import FakeAgent, over_client
from starlette.testclient import TestClient

from holdfast.protocol import Inventory

JOB = "/jobs/char-gpt"


def test_the_page_tells_overhead_interval_exposure_and_the_newest_restore_point(
    client: TestClient, agent: FakeAgent
) -> None:
    page = client.get(JOB).text
    assert "over the last 240 iterations" in page
    assert "of 3.5 % budget" in page
    assert "a checkpoint costs 320 ms" in page
    assert "if it died now" in page
    assert "Restore iteration 360, lineage 1" in page


def test_a_job_that_has_only_begun_has_a_page(client: TestClient) -> None:
    young = FakeAgent(over_client(client), job="young")
    young.start()
    young.send()
    page = client.get("/jobs/young").text
    assert "No checkpoint yet." in page
    assert "profiling the first iterations" in page
    assert "Nobody has changed anything" in page
    young.train(1)
    young.send()
    assert client.get("/jobs/young").status_code == 200


@pytest.mark.parametrize(("loss", "text"), [(math.nan, "NaN"), (math.inf, "∞")])
def test_a_loss_that_is_no_number_breaks_no_page(
    client: TestClient, agent: FakeAgent, loss: float, text: str
) -> None:
    agent.train(1)
    agent.samples.metrics["loss"][-1] = loss
    agent.send()
    assert client.get(JOB).status_code == 200
    assert text in client.get("/").text


def test_an_unknown_job_is_a_page_that_says_so(client: TestClient) -> None:
    answer = client.get("/jobs/nobody")
    assert answer.status_code == 404
    assert "no job &#39;nobody&#39; has reported here" in answer.text


def test_a_crash_is_told_with_what_ended_the_attempt(client: TestClient, agent: FakeAgent) -> None:
    agent.crash(7)
    agent.send()
    assert "1 restart" in client.get(JOB).text


def test_the_live_part_brings_every_region_but_the_forms(client: TestClient, agent: FakeAgent) -> None:
    answer = client.get(f"{JOB}/live", headers={"HX-Request": "true"}).text
    regions = ("head", "kpis", "order", "restore-points", "history", "ack-budget", "ack-interval", "ack-pause")
    for region in regions:
        assert f'hx-target="#{region}"' in answer
    assert 'name="budget"' not in answer


def test_more_restore_points_are_shown_when_asked_for(client: TestClient, agent: FakeAgent) -> None:
    agent.train(400)
    agent.send()
    first = client.get(JOB).text
    assert first.count("data-checkpoint=") == 12
    assert "?points=36#restore-points" in first
    assert client.get(f"{JOB}?points=36").text.count("data-checkpoint=") > 12
    assert client.get(f"{JOB}/points?points=36").text.count("data-checkpoint=") > 12


def test_what_retention_took_is_not_offered_as_a_restore_point(client: TestClient, agent: FakeAgent) -> None:
    page = client.get(JOB).text
    assert page.count("durable</span>") > 1
    kept = "000000000200-1"
    agent.events.append(Inventory(at=agent.at, checkpoints=[kept]))
    agent.send()
    page = client.get(JOB).text
    assert page.count("durable</span>") == 1
    assert f'data-checkpoint="{kept}"' in page


def test_after_a_restore_the_lineage_that_goes_on_comes_first(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/restores", data={"checkpoint": "000000000120-1", "key": "once"})
    agent.obey(agent.desired())
    agent.train(60)
    agent.send()
    page = client.get(f"{JOB}/points").text
    assert page.index('data-checkpoint="000000000160-2"') < page.index('data-checkpoint="000000000360-1"')


def test_a_parameter_that_is_not_understood_is_a_page_that_says_so(client: TestClient, agent: FakeAgent) -> None:
    answer = client.get(f"{JOB}?points=many")
    assert answer.status_code == 422
    assert "points" in answer.text
    assert "<html" in answer.text
