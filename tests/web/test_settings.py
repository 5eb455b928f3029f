"""Budget, interval, pause and checkpoint now, as forms with and without scripts."""

from __future__ import annotations

import re
from html import unescape

import pytest
from fake_agent import FakeAgent
from starlette.testclient import TestClient

from holdfast.pacing import MAX_BUDGET, MIN_BUDGET

JOB = "/jobs/char-gpt"
HTMX = {"HX-Request": "true"}


def version_in(page: str) -> str:
    found = re.search(r'name="version" value="(\d+)"', page)
    assert found
    return found[1]


def test_a_budget_is_saved_and_later_told_as_applied(client: TestClient, agent: FakeAgent) -> None:
    answer = client.post(f"{JOB}/budget", data={"version": "0", "budget": "2"})
    assert (answer.status_code, answer.headers["location"]) == (303, f"{JOB}#controls")
    assert "saved v1 → on its way to the job" in client.get(JOB).text
    agent.obey(agent.desired())
    agent.send()
    page = client.get(JOB).text
    assert "saved v1 → applied at iteration 400" in page
    assert "2 % in force" in page


def test_with_htmx_the_answer_is_the_controls_alone(client: TestClient, agent: FakeAgent) -> None:
    answer = client.post(f"{JOB}/budget", data={"version": "0", "budget": "2"}, headers=HTMX)
    assert answer.status_code == 200
    assert "<html" not in answer.text
    assert "saved v1" in answer.text
    assert version_in(answer.text) == "1"


@pytest.mark.parametrize("typed", ["-1", "0", "300", "abc", "", "nan"])
@pytest.mark.parametrize("headers", [{}, HTMX], ids=["plain", "htmx"])
def test_a_refused_budget_is_told_beside_the_field(
    client: TestClient, agent: FakeAgent, typed: str, headers: dict[str, str]
) -> None:
    answer = client.post(f"{JOB}/budget", data={"version": "0", "budget": typed}, headers=headers)
    assert answer.status_code == 422
    error = re.search(r'id="budget-error" role="alert">([^<]+)<', answer.text)
    assert error
    assert repr(typed) in unescape(error[1])
    assert (
        f'name="budget" inputmode="decimal" autocomplete="off" value="{typed}" aria-invalid="true"' in answer.text
    )
    assert ("<html" in answer.text) is not bool(headers)
    assert agent.desired().version == 0


@pytest.mark.parametrize("typed", ["0", "-3", "2.5", "often", ""])
def test_a_refused_interval_is_told_beside_the_field(client: TestClient, agent: FakeAgent, typed: str) -> None:
    answer = client.post(f"{JOB}/interval", data={"version": "0", "every": typed}, headers=HTMX)
    assert answer.status_code == 422
    assert 'id="every-error"' in answer.text
    assert agent.desired().version == 0


def test_a_fixed_interval_and_the_way_back(client: TestClient, agent: FakeAgent) -> None:
    answer = client.post(f"{JOB}/interval", data={"version": "0", "every": "50"}, headers=HTMX)
    assert "every 50, fixed by hand" in answer.text
    assert agent.desired().every == 50
    client.post(f"{JOB}/interval", data={"version": "1", "every": "50", "mode": "automatic"})
    assert agent.desired().every is None


def test_pausing_and_resuming(client: TestClient, agent: FakeAgent) -> None:
    answer = client.post(f"{JOB}/pause", data={"version": "0", "paused": "true"}, headers=HTMX)
    assert agent.desired().paused
    assert "Resume checkpoints" in answer.text
    client.post(f"{JOB}/pause", data={"version": "1", "paused": "false"})
    assert not agent.desired().paused


def test_a_checkpoint_on_request(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/checkpoint", data={"version": "0"})
    assert agent.desired().checkpoint_request == 1
    agent.obey(agent.desired())
    agent.send()
    assert "saved v1 → applied at iteration 400" in client.get(JOB).text


def test_a_conflict_says_who_changed_what_and_gives_the_version_to_retry_from(
    client: TestClient, agent: FakeAgent
) -> None:
    client.post(f"{JOB}/budget", data={"version": "0", "budget": "2"})
    answer = client.post(f"{JOB}/budget", data={"version": "0", "budget": "5"}, headers=HTMX)
    assert answer.status_code == 409
    assert re.search(r"operator made it version 1 at \d\d:\d\d:\d\d UTC: budget .* → 2%", answer.text)
    assert 'value="5"' in answer.text
    retried = client.post(f"{JOB}/budget", data={"version": version_in(answer.text), "budget": "5"})
    assert retried.status_code == 303
    assert agent.desired().budget == 0.05


def test_a_form_without_its_version_changes_nothing(client: TestClient, agent: FakeAgent) -> None:
    for data in ({"budget": "2"}, {"budget": "2", "version": "newest"}):
        answer = client.post(f"{JOB}/budget", data=data)
        assert answer.status_code == 422
        assert "<html" in answer.text
    assert agent.desired().version == 0


def test_the_preview_tells_what_to_expect_and_changes_nothing(client: TestClient, agent: FakeAgent) -> None:
    answer = client.get(f"{JOB}/preview?budget=1")
    assert answer.status_code == 200
    assert '<td class="predicted">134 iterations</td>' in answer.text
    assert "predicted" in answer.text
    assert agent.desired().version == 0


def test_what_is_most_at_risk_now_is_expected_the_same_way_as_what_will_be(
    client: TestClient, agent: FakeAgent
) -> None:
    agent.train(7)
    agent.send()
    answer = client.get(f"{JOB}/preview?every=40").text
    row = re.search(r"Most at risk</th><td>([^<]+)</td><td[^>]*>([^<]+)</td>", answer)
    assert row
    assert row[1] == row[2] == "46 iterations"


def test_the_range_that_the_field_takes_is_said(client: TestClient, agent: FakeAgent) -> None:
    assert f"The field takes {MIN_BUDGET:.2%}–{MAX_BUDGET:.0%}".replace("%", "") in client.get(JOB).text


def test_the_preview_of_a_fixed_interval(client: TestClient, agent: FakeAgent) -> None:
    assert '<td class="predicted">20 iterations</td>' in client.get(f"{JOB}/preview?every=20").text


@pytest.mark.parametrize("query", ["budget=-1", "budget=300", "budget=abc", "every=0", "every=x"])
def test_the_preview_of_something_impossible_says_why(client: TestClient, agent: FakeAgent, query: str) -> None:
    answer = client.get(f"{JOB}/preview?{query}")
    assert answer.status_code == 422
    assert "field-error" in answer.text


def test_settings_of_an_unknown_job_are_refused(client: TestClient) -> None:
    for path in ("budget", "interval", "checkpoint"):
        data = {"version": "0", "budget": "2", "every": "5"}
        assert client.post(f"/jobs/nobody/{path}", data=data).status_code == 404
    assert client.get("/jobs/nobody/preview?budget=2").status_code == 404


def test_another_site_cannot_press_our_buttons(client: TestClient, agent: FakeAgent) -> None:
    answer = client.post(
        f"{JOB}/budget", data={"version": "0", "budget": "9"}, headers={"Sec-Fetch-Site": "cross-site"}
    )
    assert answer.status_code == 403
    assert agent.desired().version == 0
