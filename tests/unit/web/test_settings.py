"""Budget, interval, pause and checkpoint now, as forms with and without scripts."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html import unescape

import pytest
from starlette.testclient import TestClient

from holdfast.pacing import MAX_BUDGET, MIN_BUDGET, PacingSettings
from holdfast.protocol.wire import IntervalDecision
from holdfast_server.records import desired_state
from tests.support.clock import FakeClock
from tests.support.fake_agent import FakeAgent

JOB = "/jobs/char-gpt"
HTMX = {"HX-Request": "true"}


def version_in(page: str) -> str:
    found = re.search(r'name="version" value="(\d+)"', page)
    assert found
    return found[1]


def test_a_budget_is_saved_and_later_shown_as_applied(client: TestClient, agent: FakeAgent) -> None:
    answer = client.post(f"{JOB}/budget", data={"version": "0", "budget": "2"})
    assert (answer.status_code, answer.headers["location"]) == (303, f"{JOB}#controls")
    assert "saved v1 → waiting for delivery" in client.get(JOB).text
    agent.obey(agent.desired())
    agent.send()
    page = client.get(JOB).text
    assert "saved v1 → applied at iteration 400" in page
    assert "Ceiling of 2 %" in page or "2 % decides the" in page


def test_the_scripts_own_budget_applied_as_it_is_makes_no_version(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/budget", data={"version": "0", "budget": "3.5"})
    assert agent.desired().version == 0
    client.post(f"{JOB}/budget", data={"version": "0", "budget": "2"})
    assert (agent.desired().version, agent.desired().budget) == (1, 0.02)


def test_while_an_interval_is_fixed_the_preview_is_of_the_default_policy(
    client: TestClient, agent: FakeAgent
) -> None:
    fixed(agent)
    plan = client.get("/api/v1/jobs/char-gpt/preview?budget=0.02").json()["plan"]
    assert plan["policy"] == PacingSettings().policy


def test_with_htmx_the_answer_is_the_controls_alone(client: TestClient, agent: FakeAgent) -> None:
    answer = client.post(f"{JOB}/budget", data={"version": "0", "budget": "2"}, headers=HTMX)
    assert answer.status_code == 200
    assert "<html" not in answer.text
    assert "saved v1" in answer.text
    assert version_in(answer.text) == "1"


@pytest.mark.parametrize("typed", ["-1", "0", "300", "abc", "", "nan"])
@pytest.mark.parametrize("headers", [{}, HTMX], ids=["plain", "htmx"])
def test_a_refused_budget_is_shown_beside_the_field(
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


def test_a_policy_that_gains_training_time_is_advised_and_applied(client: TestClient, agent: FakeAgent) -> None:
    page = client.get(JOB).text
    (form,) = re.findall(r'<form class="advice".*?</form>', page, re.DOTALL)
    assert "The policy goodput would gain" in re.sub(r"\s+", " ", form)
    applied = client.post(
        f"{JOB}/policy", data={"version": "0", "policy": "goodput", "mode": "automatic"}, headers=HTMX
    )
    assert applied.status_code == 200
    assert agent.desired().policy == "goodput"


def test_limits_are_saved_and_an_empty_field_is_the_scripts(client: TestClient, agent: FakeAgent) -> None:
    typed = {"version": "0", "max_unsaved_work": "5 min", "write_budget": "1.5TB/day"}
    answer = client.post(f"{JOB}/limits", data=typed, headers=HTMX)
    assert answer.status_code == 200
    assert 'name="max_unsaved_work" autocomplete="off" value="5 min"' in answer.text
    assert 'name="write_budget" autocomplete="off" value="1.5TB/day"' in answer.text
    assert agent.desired().max_unsaved_seconds == 300
    again = client.post(f"{JOB}/limits", data=typed | {"version": "1"}, headers=HTMX)
    assert version_in(again.text) == "1", "it changes nothing"
    client.post(f"{JOB}/limits", data={"version": "1", "max_unsaved_work": "5 min", "write_budget": ""})
    assert (agent.desired().write_bytes_per_second, agent.desired().max_unsaved_seconds) == (None, 300)
    client.post(f"{JOB}/undo", data={"version": "2", "edit": "1"})
    assert (agent.desired().write_bytes_per_second, agent.desired().max_unsaved_seconds) == (None, None)


@pytest.mark.parametrize(("field", "typed"), [("max_unsaved_work", "soon"), ("write_budget", "2TB/moon")])
def test_a_refused_limit_is_shown_beside_the_field(
    client: TestClient, agent: FakeAgent, field: str, typed: str
) -> None:
    answer = client.post(f"{JOB}/limits", data={"version": "0", field: typed}, headers=HTMX)
    assert answer.status_code == 422
    shown = re.search(r'id="(?:unsaved-work|write-budget)-error" role="alert">([^<]*)<', answer.text)
    assert shown
    assert unescape(shown[1]).startswith(f"{field} {typed!r}")
    assert agent.desired().version == 0


@pytest.mark.parametrize("typed", ["0", "-3", "2.5", "often", ""])
def test_a_refused_interval_is_shown_beside_the_field(client: TestClient, agent: FakeAgent, typed: str) -> None:
    answer = client.post(f"{JOB}/interval", data={"version": "0", "every": typed}, headers=HTMX)
    assert answer.status_code == 422
    assert 'id="every-error"' in answer.text
    assert agent.desired().version == 0


def test_a_fixed_interval_and_the_way_back(client: TestClient, agent: FakeAgent) -> None:
    answer = client.post(f"{JOB}/interval", data={"version": "0", "every": "50"}, headers=HTMX)
    assert "Fixed at every 50 iterations" in answer.text
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


def test_a_probe_of_the_data_and_its_answer(client: TestClient, agent: FakeAgent) -> None:
    answer = client.post(f"{JOB}/probe", data={"version": "0"}, headers=HTMX)
    assert "saved v1 → waiting for delivery" in answer.text
    assert agent.desired().probe_request == 1
    agent.obey(agent.desired())
    agent.send()
    page = client.get(JOB).text
    assert re.search(
        r'id="change-probe"[^>]*><span class="change-status" data-state="applied".*applied at iteration 400', page
    )
    assert "a batch takes 42 ms to load: 30 ms fetching and 12 ms preparing" in page


def test_clicks_that_follow_each_other_before_the_page_knows_are_no_conflict(
    client: TestClient, agent: FakeAgent
) -> None:
    forms = {"interval": {"every": "50"}, "checkpoint": {}, "pause": {"paused": "true"}, "probe": {}}
    for form, fields in forms.items():
        assert client.post(f"{JOB}/{form}", data=fields | {"version": "0"}, headers=HTMX).status_code == 200
    desired = agent.desired()
    assert (desired.version, desired.every, desired.paused, desired.probe_request) == (4, 50, True, 1)


def test_a_conflict_says_who_changed_what_and_gives_the_version_to_retry_from(
    client: TestClient, agent: FakeAgent
) -> None:
    client.post(f"{JOB}/budget", data={"version": "0", "budget": "2"})
    answer = client.post(f"{JOB}/budget", data={"version": "0", "budget": "5"}, headers=HTMX)
    assert answer.status_code == 409
    assert re.search(
        r"operator saved version 1 at <time [^>]*>\d\d:\d\d:\d\d UTC</time>: budget .* → 2 %", answer.text
    )
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


def test_the_preview_shows_what_to_expect_and_changes_nothing(client: TestClient, agent: FakeAgent) -> None:
    answer = client.get(f"{JOB}/preview?budget=1")
    assert answer.status_code == 200
    assert '<td class="predicted">134 iterations</td>' in answer.text
    assert "predicted" in answer.text
    assert agent.desired().version == 0


def test_the_most_unsaved_work_now_is_expected_the_same_way_as_what_will_be(
    client: TestClient, agent: FakeAgent
) -> None:
    agent.train(7)
    agent.send()
    answer = client.get(f"{JOB}/preview?every=40").text
    row = re.search(r"Maximum loss on a crash</th><td[^>]*>([^<]+)</td><td[^>]*>([^<]+)</td>", answer)
    assert row
    assert row[1] == row[2] == "46 iterations"


def test_the_range_that_the_field_takes_is_said(client: TestClient, agent: FakeAgent) -> None:
    assert f"Field: {MIN_BUDGET:.2%}–{MAX_BUDGET:.0%}".replace("%", "") in client.get(JOB).text


def test_an_interval_in_time_is_set_shown_and_reverted(client: TestClient, agent: FakeAgent) -> None:
    assert '<td class="predicted">10 min</td>' in client.get(f"{JOB}/preview?every=10min").text
    answer = client.post(f"{JOB}/interval", data={"version": "0", "every": "10min"}, headers=HTMX).text
    assert "Fixed at every 10 min" in answer
    assert re.search(r'id="every"[^>]* value="10 min"', answer)
    assert (agent.desired().every, agent.desired().interval_seconds) == (None, 600.0)
    agent.obey(agent.desired())
    agent.pace()
    agent.send()
    page = client.get(JOB).text
    assert re.search(r"<b>10 min</b><span class=\"of\">fixed</span>", page)
    assert "every 10 min" in client.get("/").text
    client.post(f"{JOB}/interval", data={"version": "1", "every": "10 min 30 s"}, headers=HTMX)
    assert agent.desired().interval_seconds == 630.0
    client.post(f"{JOB}/interval", data={"version": "2", "every": "50"}, headers=HTMX)
    assert (agent.desired().every, agent.desired().interval_seconds) == (50, None)
    assert client.post(f"{JOB}/undo", data={"version": "3", "edit": "3"}, headers=HTMX).status_code == 200
    assert agent.desired().interval_seconds == 630.0


def test_the_preview_of_a_fixed_interval(client: TestClient, agent: FakeAgent) -> None:
    assert '<td class="predicted">20 iterations</td>' in client.get(f"{JOB}/preview?every=20").text


@pytest.mark.parametrize("query", ["budget=-1", "budget=300", "budget=abc", "every=0", "every=x"])
def test_the_preview_of_something_impossible_says_why(client: TestClient, agent: FakeAgent, query: str) -> None:
    answer = client.get(f"{JOB}/preview?{query}")
    assert answer.status_code == 422
    assert "field-error" in answer.text


def test_settings_of_an_unknown_job_are_refused(client: TestClient) -> None:
    for path in ("budget", "interval", "checkpoint", "probe"):
        data = {"version": "0", "budget": "2", "every": "5"}
        assert client.post(f"/jobs/unknown/{path}", data=data).status_code == 404
    assert client.get("/jobs/unknown/preview?budget=2").status_code == 404


def test_another_site_cannot_press_our_buttons(client: TestClient, agent: FakeAgent) -> None:
    answer = client.post(
        f"{JOB}/budget", data={"version": "0", "budget": "9"}, headers={"Sec-Fetch-Site": "cross-site"}
    )
    assert answer.status_code == 403
    assert agent.desired().version == 0


def test_a_policy_is_chosen_and_given_back_to_the_script(client: TestClient, agent: FakeAgent) -> None:
    answer = client.post(f"{JOB}/policy", data={"version": "0", "policy": "goodput"}, headers=HTMX)
    assert agent.desired().policy == "goodput"
    assert '<option value="goodput" selected>' in answer.text
    assert "a checkpoint costs 320 ms" in answer.text
    client.post(f"{JOB}/policy", data={"version": "1", "policy": ""})
    assert agent.desired().policy is None


def test_an_unknown_policy_is_refused(client: TestClient, agent: FakeAgent) -> None:
    answer = client.post(f"{JOB}/policy", data={"version": "0", "policy": "luck"}, headers=HTMX)
    assert answer.status_code == 422
    assert agent.desired().version == 0


def test_an_interval_for_a_while_ends_by_itself(client: TestClient, agent: FakeAgent, clock: FakeClock) -> None:
    asked = {"version": "0", "every": "50", "hold": "2 h"}
    answer = client.post(f"{JOB}/interval", data=asked, headers=HTMX)
    assert "Fixed at every 50 iterations until" in answer.text
    end = datetime.fromtimestamp(clock.now + 7200, UTC)
    assert f"interval automatic → every 50 until {end:%Y-%m-%d %H:%M:%S} UTC" in client.get(JOB).text
    desired_state.end_overrides(client.app.state.services.database, clock.now + 7199)  # type: ignore[attr-defined]
    assert agent.desired().every == 50
    desired_state.end_overrides(client.app.state.services.database, clock.now + 7200)  # type: ignore[attr-defined]
    assert agent.desired().every is None
    page = client.get(JOB).text
    assert f"interval every 50 until {end:%Y-%m-%d %H:%M:%S} UTC → automatic" in page
    assert "the server, " in page


def test_a_time_that_no_interval_is_held_for_is_refused(client: TestClient, agent: FakeAgent) -> None:
    for hold in ("1 s", "90 d", "soon"):
        answer = client.post(f"{JOB}/interval", data={"version": "0", "every": "50", "hold": hold}, headers=HTMX)
        assert answer.status_code == 422, hold
    assert agent.desired().version == 0


def test_a_change_is_delivered_when_the_agent_asks_for_the_next(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/budget", data={"version": "0", "budget": "2"})
    assert "saved v1 → waiting for delivery" in client.get(JOB).text
    client.get(f"/api/v1{JOB}/desired?after=0&wait=0.01")
    assert "saved v1 → waiting for delivery" in client.get(JOB).text
    client.get(f"/api/v1{JOB}/desired?after=1&wait=0.01")
    assert "saved v1 → delivered, applies at the next iteration" in client.get(JOB).text
    agent.obey(agent.desired())
    agent.send()
    assert "saved v1 → applied at iteration 400" in client.get(JOB).text


def test_a_version_that_was_never_made_is_not_delivered(client: TestClient, agent: FakeAgent) -> None:
    client.get(f"/api/v1{JOB}/desired?after=7&wait=0.01")
    client.post(f"{JOB}/budget", data={"version": "0", "budget": "2"})
    assert "waiting for delivery" in client.get(JOB).text


@pytest.mark.parametrize(
    ("path", "data", "field", "before"),
    [
        ("budget", {"budget": "2"}, "budget", None),
        ("policy", {"policy": "goodput"}, "policy", None),
        ("interval", {"every": "50", "hold": "2 h"}, "every", None),
        ("pause", {"paused": "true"}, "paused", False),
        ("retention", {"retention": "last 5"}, "retention", None),
    ],
)
def test_a_change_is_undone(
    client: TestClient, agent: FakeAgent, path: str, data: dict[str, str], field: str, before: object
) -> None:
    answer = client.post(f"{JOB}/{path}", data={"version": "0", **data}, headers=HTMX)
    assert f'action="{JOB}/undo"' in answer.text
    client.post(f"{JOB}/undo", data={"version": "1", "edit": "1"}, headers=HTMX)
    assert getattr(agent.desired(), field) == before
    client.post(f"{JOB}/undo", data={"version": "2", "edit": "2"}, headers=HTMX)
    assert getattr(agent.desired(), field) != before


def test_rules_of_retention_are_ordered_and_refused_beside_the_field(client: TestClient, agent: FakeAgent) -> None:
    refused = client.post(f"{JOB}/retention", data={"version": "0", "retention": "lst 5"}, headers=HTMX)
    assert (refused.status_code, "&#39;lst 5&#39; is not a rule" in refused.text) == (422, True)
    assert 'value="lst 5"' in refused.text
    client.post(f"{JOB}/retention", data={"version": "0", "retention": "every 1000,Last 5"}, headers=HTMX)
    assert agent.desired().retention == "last 5, every 1000"
    client.post(f"{JOB}/retention", data={"version": "1", "retention": " "}, headers=HTMX)
    assert agent.desired().retention is None


def hold(client: TestClient, version: str, every: str, for_time: str = "") -> None:
    asked = {"version": version, "every": every, "hold": for_time}
    assert client.post(f"{JOB}/interval", data=asked, headers=HTMX).status_code == 200


def test_an_interval_for_a_while_comes_back_for_what_is_left_of_it(
    client: TestClient, agent: FakeAgent, clock: FakeClock
) -> None:
    begun = clock.now
    hold(client, "0", "50", "2 h")
    clock.now += 1800
    hold(client, "1", "20")
    clock.now += 1800
    assert client.post(f"{JOB}/undo", data={"version": "2", "edit": "2"}, headers=HTMX).status_code == 200
    assert agent.desired().every == 50
    desired_state.end_overrides(client.app.state.services.database, begun + 7198)  # type: ignore[attr-defined]
    assert agent.desired().every == 50
    desired_state.end_overrides(client.app.state.services.database, begun + 7200)  # type: ignore[attr-defined]
    assert agent.desired().every is None


def test_an_interval_whose_time_is_over_does_not_come_back(
    client: TestClient, agent: FakeAgent, clock: FakeClock
) -> None:
    hold(client, "0", "50", "2 h")
    hold(client, "1", "20")
    clock.now += 7200
    client.post(f"{JOB}/undo", data={"version": "2", "edit": "2"}, headers=HTMX)
    assert (agent.desired().version, agent.desired().every) == (3, None)


def test_what_the_server_ended_does_not_come_back_without_end(
    client: TestClient, agent: FakeAgent, clock: FakeClock
) -> None:
    hold(client, "0", "50", "2 h")
    clock.now += 7200
    desired_state.end_overrides(client.app.state.services.database, clock.now)  # type: ignore[attr-defined]
    client.post(f"{JOB}/undo", data={"version": "2", "edit": "2"}, headers=HTMX)
    assert (agent.desired().version, agent.desired().every) == (2, None)


def test_to_hold_an_interval_without_end_is_a_change_that_can_be_undone(
    client: TestClient, agent: FakeAgent, clock: FakeClock
) -> None:
    hold(client, "0", "50", "2 h")
    hold(client, "1", "50")
    (newest, *_) = client.get(f"/api/v1{JOB}/edits").json()["edits"]
    assert re.fullmatch(r"interval every 50 until .* UTC → every 50", newest["summary"])
    client.post(f"{JOB}/undo", data={"version": "2", "edit": "2"}, headers=HTMX)
    clock.now += 7200
    desired_state.end_overrides(client.app.state.services.database, clock.now)  # type: ignore[attr-defined]
    assert agent.desired().every is None


def test_a_refusal_keeps_what_was_chosen(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/budget", data={"version": "0", "budget": "2"})
    asked = {"version": "0", "every": "50", "hold": "8 h"}
    refused = client.post(f"{JOB}/interval", data=asked, headers=HTMX)
    assert refused.status_code == 409
    assert '<option value="8 h" selected>' in refused.text
    refused = client.post(f"{JOB}/interval", data={"version": "1", "every": "0", "hold": "24 h"}, headers=HTMX)
    assert refused.status_code == 422
    assert '<option value="24 h" selected>' in refused.text
    refused = client.post(f"{JOB}/policy", data={"version": "0", "policy": "goodput"}, headers=HTMX)
    assert refused.status_code == 409
    assert '<option value="goodput" selected>' in refused.text
    assert "Press the button again to replace version 1" in refused.text
    assert agent.desired().version == 1


def test_a_button_that_turned_round_meanwhile_changes_nothing(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/pause", data={"version": "0", "paused": "true"})
    answer = client.post(f"{JOB}/pause", data={"version": "0", "paused": "true"}, headers=HTMX)
    assert "Resume checkpoints" in answer.text
    assert (agent.desired().paused, agent.desired().version) == (True, 1)


def test_a_pause_that_was_ended_meanwhile_is_not_to_be_pressed_again(client: TestClient, agent: FakeAgent) -> None:
    for version, paused in enumerate(("true", "false")):
        client.post(f"{JOB}/pause", data={"version": str(version), "paused": paused})
    refused = client.post(f"{JOB}/pause", data={"version": "0", "paused": "true"}, headers=HTMX)
    assert refused.status_code == 409
    assert "Not applied." in refused.text
    assert "Press the button again" not in refused.text


def test_buttons_have_names_by_which_the_focus_finds_them_again(client: TestClient, agent: FakeAgent) -> None:
    answer = client.post(f"{JOB}/interval", data={"version": "0", "every": "50"}, headers=HTMX)
    buttons = re.findall(r"<button[^>]*>", answer.text)
    names = [re.findall(r' id="([^"]+)"', button) for button in buttons]
    assert len(buttons) >= 8
    assert all(len(name) == 1 for name in names)
    assert len({name for (name,) in names}) == len(buttons)


def test_what_was_done_cannot_be_undone(client: TestClient, agent: FakeAgent) -> None:
    answer = client.post(f"{JOB}/checkpoint", data={"version": "0"}, headers=HTMX)
    assert f'action="{JOB}/undo"' not in answer.text
    assert client.post(f"{JOB}/undo", data={"version": "1", "edit": "1"}, headers=HTMX).status_code == 422
    assert client.post(f"{JOB}/undo", data={"version": "1", "edit": "9"}, headers=HTMX).status_code == 422
    assert agent.desired().version == 1


def test_an_undo_of_what_an_operator_has_changed_since_is_a_conflict(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/budget", data={"version": "0", "budget": "2"})
    client.post(f"{JOB}/budget", data={"version": "1", "budget": "4"})
    answer = client.post(f"{JOB}/undo", data={"version": "1", "edit": "1"}, headers=HTMX)
    assert answer.status_code == 409
    assert "Not applied." in answer.text
    assert agent.desired().budget == 0.04


def test_how_much_of_the_measured_overhead_is_since_the_change_is_said(
    client: TestClient, agent: FakeAgent
) -> None:
    client.post(f"{JOB}/budget", data={"version": "0", "budget": "2"})
    agent.obey(agent.desired())
    agent.train(80)
    agent.pace()
    agent.send()
    assert "measured over 240 iterations, 80 of them since the change" in client.get(JOB).text


def fixed(agent: FakeAgent) -> None:
    """Report an interval as an agent does whose interval is set by its script or by an operator."""
    agent.pace()
    paced = agent.events[-1]
    assert isinstance(paced, IntervalDecision)
    paced.policy = "fixed"
    agent.send()


def test_an_interval_that_the_script_fixes_is_said_to_be_so(client: TestClient, agent: FakeAgent) -> None:
    assert '<p class="window">Automatic</p>' in client.get(JOB).text
    fixed(agent)
    page = client.get(JOB).text
    assert '<p class="window">Fixed by the script</p>' in page
    assert '<p class="window">No effect: interval fixed</p>' in page
    assert '<option value="">Default: from the script</option>' in page
    assert "Ceiling of" not in page
    assert "within the budget" not in page


def test_an_interval_that_an_operator_fixes_names_the_operator(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/interval", data={"version": "0", "mode": "fixed", "every": "30"})
    agent.obey(agent.desired())
    fixed(agent)
    page = client.get(JOB).text
    assert '<p class="window">Fixed by <bdi>operator</bdi></p>' in page
    assert "Default: fixed" not in page
    assert "within the budget" not in page
    client.post(f"{JOB}/interval", data={"version": "1", "mode": "automatic"})
    page = client.get(JOB).text
    assert '<p class="window">Automatic</p>' in page  # which the agent has yet to apply
    agent.obey(agent.desired())
    agent.send()
    assert '<option value="">Default: checkfreq</option>' in client.get(JOB).text
