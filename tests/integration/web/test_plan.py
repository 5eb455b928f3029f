"""The plan: every interval weighed, on the job's page and on one of its own for those without scripts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from html import unescape
from itertools import count
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from starlette.testclient import TestClient
from typer.testing import CliRunner

from holdfast.cli import app as cli
from holdfast.pacing import FailureHistory, PacingSettings, Profile
from holdfast.pacing.failures import FailureEstimate
from holdfast.pacing.what_if import compare_intervals
from holdfast.server_link.json_client import JsonClient
from holdfast_web.job.plan_plot import draw
from tests.support.fake_agent import FakeAgent, over_client

JOB = "/jobs/char-gpt"
HTMX = {"HX-Request": "true"}
Open = Callable[..., Page]
numbers = count(1)


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def answer(client: TestClient, **asked: str) -> str:
    reply = client.get(f"{JOB}/plan/answer", params=asked)
    assert reply.status_code == 200
    return reply.text


def test_the_job_page_has_the_plan_closed_and_a_way_to_it_without_scripts(
    client: TestClient, agent: FakeAgent
) -> None:
    page = client.get(JOB).text
    details = re.search(r'<details class="panel plan"[^>]*>', page)
    assert details
    assert " open" not in details[0]
    assert f'href="{JOB}/plan"' in page
    assert "plan-plot" not in page


def test_opened_it_is_a_part_of_the_page_and_by_itself_a_page(client: TestClient, agent: FakeAgent) -> None:
    part, page = client.get(f"{JOB}/plan", headers=HTMX).text, client.get(f"{JOB}/plan").text
    assert ("<html" in part, "<html" in page) == (False, True)
    for shown in (part, page):
        assert 'class="what-if"' in shown
        assert 'class="plan-plot"' in shown


def test_the_page_and_the_command_give_the_same_advice(
    client: TestClient, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    (form,) = re.findall(r'<form class="advice".*?</form>', client.get(JOB).text, re.DOTALL)
    advised = re.match(r"(The policy .* would gain [\d.]+ %) of the time", text_of(form))
    assert advised

    def send(self: JsonClient, method: str, path: str, *_: Any, **__: Any) -> Any:
        return client.request(method, f"/api/v1{path}").json()

    monkeypatch.setattr(JsonClient, "send", send)
    told = CliRunner().invoke(cli, ["plan", "--job", "char-gpt"])
    assert told.exit_code == 0, told.output
    assert f"{advised[1]} of the time." in " ".join(told.stdout.split())


def test_the_answer_is_shown_in_words_first(client: TestClient, agent: FakeAgent) -> None:
    said = text_of(answer(client))
    assert re.match(
        r"Optimum: every 2,\d{3} iterations , \d+ min \d+ s, where \d\d\.\d+ % of the time is training", said
    )
    assert re.search(
        r"In force: every 40 iterations, [\d.]+ % ; it loses 0\.\d+ GPU-hours/day vs. the optimum", said
    )
    assert "A crash loses" in said


def test_an_override_is_priced_in_gpu_hours_and_gpus(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/interval", data={"version": "0", "every": "40"})
    said = text_of(answer(client, ranks="16384", mtbf="3.09h", every="100"))
    found = re.search(r"In force, fixed: every 40 iterations, [\d.]+ % ; it loses ([\d,]+) GPU-hours/day", said)
    assert found
    assert int(found[1].replace(",", "")) > 1000
    assert re.search(r"equal to [\d,]+ of 16,384 GPUs idle", said)
    assert "Every 100 iterations: " in said


def test_a_page_with_an_override_shows_its_price_unasked(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/interval", data={"version": "0", "every": "50"})
    page = client.get(JOB).text
    assert re.search(r'<details class="panel plan" id="plan" open [^>]*hx-trigger="load"', page)
    assert f'set to automatic. <a href="{JOB}/plan">Show the cost</a>' in page


def apply_forms(page: str) -> dict[str, tuple[str, dict[str, str]]]:
    """Return the action and the fields of each form by the name of its button."""
    found = {}
    for form in re.findall(r'<form class="apply-plan".*?</form>', page):
        action, name = re.search(r'action="([^"]+)"', form)[1], re.search(r'aria-label="([^"]+)"', form)[1]  # type: ignore[index]
        found[name] = action, dict(re.findall(r'name="(\w+)" value="([^"]*)"', form))
    return found


def test_an_interval_of_the_plan_is_applied_and_undone(client: TestClient, agent: FakeAgent) -> None:
    action, fields = apply_forms(answer(client, every="100"))["Apply every 100 iterations"]
    assert (action, fields) == (f"{JOB}/interval", {"version": "0", "every": "100"})
    applied = client.post(action, data=fields)
    assert (applied.status_code, applied.headers["location"]) == (303, f"{JOB}#controls")
    assert "Fixed at every 100" in text_of(client.get(JOB).text)
    assert client.post(action, data=fields | {"every": "120"}).status_code == 409
    assert "Apply every 100 iterations" in apply_forms(answer(client, every="100"))
    assert client.post(f"{JOB}/undo", data={"version": "1", "edit": "1"}).status_code == 303
    assert "Fixed at every 100" not in text_of(client.get(JOB).text)


def test_a_policy_of_the_plan_ends_a_fixed_interval(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/interval", data={"version": "0", "every": "40"})
    action, fields = apply_forms(answer(client))["Apply policy goodput"]
    assert (action, fields) == (f"{JOB}/policy", {"version": "1", "policy": "goodput", "mode": "automatic"})
    assert client.post(action, data=fields).status_code == 303
    desired = client.get(f"/api/v1{JOB}").json()["desired"]
    assert (desired["policy"], desired["every"]) == ("goodput", None)


def test_the_typed_budget_is_applied_with_an_interval_or_a_policy(client: TestClient, agent: FakeAgent) -> None:
    def desired() -> tuple[object, ...]:
        found = client.get(f"/api/v1{JOB}").json()["desired"]
        return found["budget"], found["policy"], found["every"]

    offers = apply_forms(answer(client, budget="2"))
    action, fields = offers["Apply policy checkfreq, budget 2 %"]  # the policy is in force, the budget is not
    assert client.post(action, data=fields).status_code == 303
    assert desired() == (0.02, "checkfreq", None)
    action, fields = apply_forms(answer(client, budget="0.5", every="300"))[
        "Apply every 300 iterations, budget 0.5 %"
    ]
    assert client.post(action, data=fields).status_code == 303
    assert desired() == (0.005, "checkfreq", 300)
    assert "Apply policy goodput" in apply_forms(answer(client, budget="0.5"))


def test_what_is_in_force_is_not_offered(client: TestClient, agent: FakeAgent) -> None:
    offers = apply_forms(answer(client))
    assert "Apply policy goodput" in offers
    assert "Apply policy checkfreq" not in offers
    assert "Apply every 40 iterations" not in offers


def test_optimum_and_choices_are_marked_by_shapes_and_words(client: TestClient, agent: FakeAgent) -> None:
    drawn = answer(client, every="100")
    marks = dict(re.findall(r'<svg class="mark" data-kind="(\w+)"[^>]*><(\w+)', drawn))
    assert marks == {"asked": "path", "present": "path", "best": "circle"}
    labels = [text_of(label) for label in re.findall(r"<text y=[^>]*>([^<]*)", drawn)]
    assert labels[0] == "every 100"
    assert labels[1] == "in force, every 40"
    assert re.fullmatch(r"optimum, every [\d,]+", labels[2])
    assert 'class="limit"' in drawn
    assert "above the budget of 3.5 %" in text_of(drawn)
    assert "style=" not in drawn


def test_the_table_has_the_policies_and_who_decides_in_whose_place(client: TestClient, agent: FakeAgent) -> None:
    drawn = answer(client)
    rows = [text_of(row) for row in re.findall(r'<th scope="row">(.*?)</th>', drawn)]
    assert rows[:2] == ["optimum", "in force"]
    assert {"checkfreq", "goodput", "half the optimum", "twice the optimum"} <= set(rows)
    assert "fixed" not in rows
    assert "fixed: not applicable here; checkfreq is used." in text_of(drawn)


def test_measured_and_assumed_figures_look_different(client: TestClient, agent: FakeAgent) -> None:
    def origins(**asked: str) -> dict[str, tuple[str, str]]:
        name = r'<dt>(?:<span class="term"[^>]*>)?([^<]*)(?:</span>)?'
        pattern = name + r' <span class="tag" data-kind="(\w+)">(\w+)</span>'
        found = re.findall(pattern, answer(client, **asked))
        return {name: (kind, origin) for name, kind, origin in found}

    now = origins()
    assert now["Checkpoint cost"] == now["Iteration time"] == ("measured", "measured")
    assert now["Time between failures"] == now["Restart time"] == ("predicted", "assumed")
    assert origins(mtbf="3h")["Time between failures"] == ("predicted", "stated")
    figures = re.findall(r"<td[^>]*>(.*?)</td>", answer(client))
    shares = [figure for figure in figures if "%" in figure]
    assert shares
    assert all('class="predicted"' in figure for figure in shares)


def test_the_iteration_time_says_which_waits_it_leaves_out(client: TestClient, agent: FakeAgent) -> None:
    drawn = text_of(answer(client))
    assert "without checkpoints and rare long waits; the maximum loss on a crash counts both" in drawn


def test_failures_are_shown_with_the_time_that_they_were_seen_in(client: TestClient, agent: FakeAgent) -> None:
    assert "0 failures in 2 min" in text_of(answer(client))
    agent.crash(12)
    agent.train(20)
    agent.send()
    text = text_of(answer(client))
    assert re.search(r"Time between failures estimated .* 1 failure in \d+ min .*; 90 % confidence:", text)
    assert re.search(r"Restart time measured [\d.]+ s last restart", text)


@pytest.mark.parametrize(
    ("field", "typed"),
    [("budget", "300"), ("budget", "<b>"), ("every", "0"), ("mtbf", "0"), ("ranks", "many"), ("restart", "-1")],
)
def test_what_cannot_be_is_shown_and_stays_in_its_field(
    client: TestClient, agent: FakeAgent, field: str, typed: str
) -> None:
    for path, headers in ((f"{JOB}/plan/answer", HTMX), (f"{JOB}/plan", {}), (f"{JOB}/plan", HTMX)):
        reply = client.get(path, params={field: typed}, headers=headers)
        assert reply.status_code == 422
        error = re.search(r'id="plan-error" role="alert">([^<]+)<', reply.text)
        assert error
        assert repr(typed) in unescape(error[1])
        assert "plan-plot" not in reply.text
    fields = re.search(rf'<input id="plan-{field}"[^>]*>', reply.text)
    assert fields
    assert f'value="{typed}"' in unescape(fields[0])
    assert 'aria-invalid="true"' in fields[0]
    assert "<b>" not in fields[0]


def test_a_budget_is_in_percent_here_and_the_link_to_the_data_asks_the_same(
    client: TestClient, agent: FakeAgent
) -> None:
    drawn = answer(client, budget="2", ranks="64")
    link = re.search(r'href="(/api/v1/jobs/char-gpt/plan\?[^"]+)"', drawn)
    assert link
    found = client.get(unescape(link[1])).json()["comparison"]
    assert (found["budget"], found["world_size"]) == (0.02, 64)
    assert "above the budget of 2 %" in text_of(drawn)


def test_a_job_that_was_not_measured_yet_says_what_it_waits_for(client: TestClient) -> None:
    assert client.get(f"{JOB}/plan").status_code == 404
    young = FakeAgent(over_client(client))
    young.start()
    young.send()
    assert "No plan: the job is still measuring its iterations" in text_of(answer(client))


def test_a_paused_job_has_nothing_in_force(client: TestClient, agent: FakeAgent) -> None:
    agent.paused = True
    agent.pace()
    agent.send()
    drawn = answer(client)
    assert "No interval is set: no checkpoints are taken." in text_of(drawn)
    assert 'data-kind="present"' not in drawn


def test_the_picture_puts_the_optimum_highest_and_everything_inside() -> None:
    profile = Profile(iteration_seconds=1, persist_seconds=120, cost_seconds=5)
    history = FailureHistory(failures=FailureEstimate(world_size=16_384, mean_seconds=11_124), restart_seconds=300)
    picture = draw(compare_intervals(profile, PacingSettings(), history, current=1800, requested=[200]))
    assert [mark.kind for mark in picture.marks] == ["asked", "present", "best"]
    asked, present, best = picture.marks
    assert asked.x < best.x < present.x
    assert best.y < min(asked.y, present.y)
    for mark in picture.marks:
        assert 0 <= mark.x <= 100
        assert picture.top <= mark.y <= picture.top + picture.height
    assert picture.budget is not None
    assert 0 < picture.budget < best.x
    heights = [float(point.split(",")[1]) for point in picture.points.split()]
    top = heights.index(min(heights))
    assert heights[: top + 1] == sorted(heights[: top + 1], reverse=True)
    assert heights[top:] == sorted(heights[top:])
    at = [float(point.split(",")[0]) / 10 for point in picture.points.split()][top]
    assert at == pytest.approx(best.x, abs=3)


@pytest.mark.parametrize(
    ("present", "asked", "lines"),
    [(1800, 200, [22, 22, -11]), (60, 70, [-11, 22, -11]), (300, 360, [38, 22, -11])],
)
def test_labels_keep_out_of_each_other_s_way(present: int, asked: int, lines: list[int]) -> None:
    profile = Profile(iteration_seconds=1, cost_seconds=5)
    history = FailureHistory(failures=FailureEstimate(world_size=16_384, mean_seconds=11_124), restart_seconds=300)
    picture = draw(compare_intervals(profile, PacingSettings(), history, current=present, requested=[asked]))
    assert [mark.label for mark in picture.marks] == lines


@pytest.fixture
def trained(served) -> FakeAgent:  # type: ignore[no-untyped-def]
    agent: FakeAgent = served.agent(f"planned-{next(numbers)}", started_at=time.time() - 300)
    agent.start()
    agent.train(15)
    agent.pace()
    agent.train(385)
    agent.send()
    return agent


def opened(open_page: Open, agent: FakeAgent, **options: object) -> Page:
    page = open_page(f"/jobs/{agent.job}", **options)
    page.locator("#plan summary").click()
    expect(page.locator(".plan-plot")).to_be_visible()
    return page


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_it_is_drawn_within_the_page(open_page: Open, trained: FakeAgent, theme: str, width: int) -> None:
    page = opened(open_page, trained, theme=theme, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    plot = page.locator(".plan-plot").bounding_box()
    curve = page.locator(".plan-plot .curve").bounding_box()
    assert plot
    assert curve
    assert curve["width"] > 0.8 * plot["width"]
    for kind in ("present", "best"):
        mark = page.locator(f'.mark[data-kind="{kind}"] > :first-child').bounding_box()
        label = page.locator(f'.mark[data-kind="{kind}"] text').bounding_box()
        assert mark
        assert label
        for box in (mark, label):
            assert plot["x"] <= box["x"] <= box["x"] + box["width"] <= plot["x"] + plot["width"]
            assert plot["y"] <= box["y"] <= box["y"] + box["height"] <= plot["y"] + plot["height"]
    colours = page.evaluate(
        """() => ["circle", "path"].map((mark) =>
            getComputedStyle(document.querySelector(`.mark > ${mark}`)).fill)"""
    )
    assert len(set(colours)) == 2
    assert "rgb(0, 0, 0)" not in colours


@pytest.mark.browser
def test_what_is_typed_is_answered_at_once_and_stays(open_page: Open, trained: FakeAgent) -> None:
    page = opened(open_page, trained)
    page.locator("#plan-every").fill("100")
    expect(page.locator('.mark[data-kind="asked"]')).to_contain_text("every 100")
    page.locator("#plan-mtbf").fill("never")
    expect(page.locator("#plan-error")).to_contain_text("'never' is not a time")
    page.locator("#plan-mtbf").fill("3h")
    expect(page.locator("#plan-error")).to_have_count(0)
    expect(page.locator(".fact-grid")).to_contain_text("stated")
    page.locator("#plan-mtbf").press("Enter")
    expect(page.locator("#plan-mtbf")).to_have_value("3h")
    assert page.url.endswith(f"/jobs/{trained.job}")


@pytest.mark.browser
def test_an_override_opens_it_with_the_page(open_page: Open, trained: FakeAgent) -> None:
    page = open_page(f"/jobs/{trained.job}")
    page.locator("#every").fill("50")
    page.get_by_role("button", name="Apply interval").click()
    expect(page.locator("#change-interval")).to_contain_text("saved v1")
    page.reload()
    expect(page.locator(".plan-summary")).to_contain_text("In force, fixed")


@pytest.mark.browser
def test_it_follows_the_job_and_leaves_what_is_typed(open_page: Open, trained: FakeAgent) -> None:
    page = opened(open_page, trained)
    page.locator("#plan-mtbf").fill("3h")
    expect(page.locator(".fact-grid")).to_contain_text("stated")
    trained.interval = 61
    trained.pace()
    trained.send()
    expect(page.locator('.mark[data-kind="present"]')).to_contain_text("every 61")
    expect(page.locator("#plan-mtbf")).to_have_value("3h")
    expect(page.locator("#plan")).to_have_attribute("open", "")


@pytest.mark.browser
def test_without_scripts_it_is_asked_on_a_page_of_its_own(open_page: Open, trained: FakeAgent) -> None:
    page = open_page(f"/jobs/{trained.job}", scripts=False)
    page.locator("#plan summary").click()
    page.get_by_role("link", name="Compare intervals").click()
    page.locator("#plan-ranks").fill("64")
    page.get_by_role("button", name="Calculate").click()
    expect(page.locator(".fact-grid")).to_contain_text("64")
    expect(page.locator("#plan-ranks")).to_have_value("64")
    page.locator("#plan-budget").fill("300")
    page.get_by_role("button", name="Calculate").click()
    expect(page.locator("#plan-error")).to_contain_text("outside")
    expect(page.locator("#plan-budget")).to_have_value("300")
