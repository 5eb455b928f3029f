"""The pages in a real Chromium, against the real application; the tests play the agent."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import count

import pytest
from playwright.sync_api import Page, expect

from holdfast.protocol.wire import AttemptFinished, AttemptStarted
from tests.support.fake_agent import FakeAgent
from tests.support.web_fixtures import Served

pytestmark = pytest.mark.browser

Open = Callable[..., Page]
INK = """selector => {
  const canvas = document.querySelector(selector);
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let inked = 0;
  for (let index = 3; index < data.length; index += 4) if (data[index] > 0) inked += 1;
  return inked;
}"""
LANES = ("metric", "seconds", "overhead", "pipeline", "stalls", "lineages", "events", "axis")
numbers = count(1)


@pytest.fixture
def agent(served) -> FakeAgent:  # type: ignore[no-untyped-def]
    """A job with 1,000 iterations, a NaN, a crash and a restore behind it."""
    agent: FakeAgent = served.agent(f"job-{next(numbers)}", started_at=time.time() - 300)
    agent.start()
    agent.train(15)
    agent.pace()
    agent.train(585, nan_at=range(300, 303))
    agent.send()
    agent.crash(12)
    agent.train(400)
    agent.send()
    return agent


def job_page(open_page: Open, agent: FakeAgent, query: str = "", **options: object) -> Page:
    page = open_page(f"/jobs/{agent.job}{query}", **options)
    expect(page.locator("#timeline")).to_have_attribute("data-state", "drawn")
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    return page


def obey(agent: FakeAgent) -> None:
    agent.obey(agent.desired())
    agent.train(3)
    agent.send()


def lane_point(page: Page, lane: str, part: float) -> tuple[float, float]:
    box = page.locator(f'[data-lane="{lane}"] .lane-body').bounding_box()
    assert box
    return box["x"] + 70 + (box["width"] - 90) * part, box["y"] + box["height"] / 2


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_the_timeline_draws_every_lane(open_page: Open, agent: FakeAgent, theme: str, width: int) -> None:
    page = job_page(open_page, agent, theme=theme, width=width)
    for lane in LANES:
        page.wait_for_function(f"selector => ({INK})(selector) > 40", arg=f'[data-lane="{lane}"] canvas')
    expect(page.locator("[data-part=summary]")).to_contain_text("durable checkpoints")
    expect(page.locator("[data-part=window]")).to_contain_text("of 988")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_the_fleet_fits_and_is_live(open_page: Open, agent: FakeAgent, theme: str, width: int) -> None:
    page = open_page("/", theme=theme, width=width)
    row = page.locator(f"#job-{agent.job}")
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    agent.train(7)
    agent.send()
    expect(row).to_contain_text("995")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_search_narrows_the_fleet_without_a_reload(open_page: Open, agent: FakeAgent) -> None:
    page = open_page("/")
    page.keyboard.press("/")
    page.keyboard.type("no such job")
    expect(page.get_by_text("No job matches")).to_be_visible()
    page.locator("#search").fill(agent.job)
    expect(page.locator(f"#job-{agent.job}")).to_be_visible()


def test_the_page_follows_a_running_job(open_page: Open, agent: FakeAgent) -> None:
    page = job_page(open_page, agent)
    agent.train(25)
    agent.send()
    expect(page.locator("[data-part=window]")).to_contain_text("of 1,013")
    expect(page.locator("#head")).to_contain_text("iteration 1,013")
    agent.interval = 61
    agent.pace()
    agent.send()
    expect(page.locator("#budget-preview")).to_contain_text("61 iterations")


def test_dragging_zooms_and_the_address_keeps_the_window(open_page: Open, agent: FakeAgent) -> None:
    page = job_page(open_page, agent)
    page.mouse.move(*lane_point(page, "metric", 0.4))
    page.mouse.down()
    page.mouse.move(*lane_point(page, "metric", 0.6), steps=4)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"from=\d+&to=\d+"))
    window = page.locator("[data-part=window]").inner_text()
    assert "iterations 1 –" not in window
    page.reload()
    expect(page.locator("[data-part=window]")).to_have_text(window)
    page.mouse.dblclick(*lane_point(page, "metric", 0.5))
    expect(page.locator("[data-part=window]")).to_contain_text("iterations 1 –")
    expect(page.get_by_role("button", name="Follow")).to_have_attribute("aria-pressed", "true")


def test_the_keys_move_the_window_and_the_selection(open_page: Open, agent: FakeAgent) -> None:
    page = job_page(open_page, agent)
    page.keyboard.press("w")
    expect(page.locator("[data-part=window]")).not_to_contain_text("iterations 1 –")
    page.keyboard.press("0")
    page.get_by_role("listbox", name="Restore points").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("[data-part=selected-title]")).to_contain_text("Iteration")
    expect(page.locator("[role=option][aria-selected=true]")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("Restore")
    expect(page.get_by_role("dialog").get_by_role("link", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(page.locator("[data-part=selection]")).to_be_hidden()


def test_hovering_shows_the_values_of_all_lanes(open_page: Open, agent: FakeAgent) -> None:
    page = job_page(open_page, agent)
    page.mouse.move(*lane_point(page, "metric", 0.8))
    for lane, unit in (("metric", "."), ("seconds", "ms"), ("overhead", "%")):
        expect(page.locator(f'[data-lane="{lane}"] .lane-value')).to_contain_text(unit)


def test_a_nan_is_seen_on_the_curve_and_in_the_table(open_page: Open, agent: FakeAgent) -> None:
    page = job_page(open_page, agent, "?from=290&to=320")
    page.get_by_role("button", name="Table").click()
    table = page.get_by_role("table", name=re.compile("^Iterations"))
    expect(table.get_by_role("row", name=re.compile(r"^301 NaN"))).to_be_visible()
    page.locator('[data-lane="metric"]').scroll_into_view_if_needed()
    page.mouse.move(*lane_point(page, "metric", 11.2 / 30))
    expect(page.locator('[data-lane="metric"] .lane-value')).to_have_text("NaN")


def test_a_budget_is_previewed_then_saved_then_applied(open_page: Open, agent: FakeAgent) -> None:
    page = job_page(open_page, agent)
    page.locator("#budget").fill("1")
    expect(page.locator("#budget-preview")).to_contain_text("134 iterations")
    assert agent.desired().version == 0
    page.get_by_role("button", name="Apply budget").click()
    expect(page.locator("#change-budget")).to_contain_text("saved v1 → waiting for delivery")
    assert agent.desired().budget == 0.01
    obey(agent)
    expect(page.locator("#change-budget")).to_contain_text("saved v1 → applied at iteration 988")
    expect(page.locator("#kpis")).to_contain_text("of 1 % budget")


def test_the_slider_and_the_field_are_one_setting(open_page: Open, agent: FakeAgent) -> None:
    page = job_page(open_page, agent)
    page.locator("#budget-range").evaluate(
        "range => { range.value = 1000; range.dispatchEvent(new Event('input', {bubbles: true})); }"
    )
    expect(page.locator("#budget")).to_have_value("20")
    expect(page.locator("#budget-preview")).to_contain_text("7 iterations")


@pytest.mark.parametrize("typed", ["-1", "0", "300", "abc"])
def test_a_refused_budget_shows_its_reason(open_page: Open, agent: FakeAgent, typed: str) -> None:
    page = job_page(open_page, agent)
    page.locator("#budget").fill(typed)
    page.get_by_role("button", name="Apply budget").click()
    expect(page.locator("#budget-error")).to_contain_text(f"'{typed}'")
    expect(page.locator("#budget")).to_have_value(typed)
    expect(page.locator("#budget")).to_be_focused()
    assert agent.desired().version == 0


def test_a_reason_is_shown_once_and_goes_when_something_else_is_typed(open_page: Open, agent: FakeAgent) -> None:
    page = job_page(open_page, agent)
    page.locator("#budget").fill("300")
    page.get_by_role("button", name="Apply budget").click()
    expect(page.locator("#budget-error")).to_be_visible()
    with page.expect_response(re.compile("/preview\\?")):
        agent.train(1)
        agent.send()
    errors = page.locator("#controls .field-error:visible")
    expect(page.locator("#budget-preview .field-error")).to_have_count(1)
    expect(errors).to_have_count(1)
    page.locator("#budget").fill("3000")
    expect(page.locator("#budget-error")).to_have_count(0)
    expect(errors).to_contain_text("'3000'")
    page.locator("#budget").fill("3")
    expect(errors).to_have_count(0)
    expect(page.locator("#budget")).not_to_have_attribute("aria-invalid", "true")


def test_figures_in_the_budget_panel_stay_on_one_line(open_page: Open, agent: FakeAgent) -> None:
    page = job_page(open_page, agent)
    page.locator("#budget").fill("0.03")
    expect(page.locator("#budget-preview")).to_contain_text("4,445 iterations")
    lines = "cells => cells.map(cell => { const all = document.createRange(); all.selectNodeContents(cell);"
    lines += " return new Set([...all.getClientRects()].map(box => Math.round(box.bottom / 10))).size; })"
    assert set(page.locator(".compare td").evaluate_all(lines)) <= {0, 1}
    table = page.locator("#budget-preview table")
    assert table.evaluate("table => table.scrollWidth <= table.parentElement.clientWidth")


def test_the_fleet_goes_on_page_by_page_and_stays_live_on_each(open_page: Open, served: Served) -> None:
    for number in range(3):
        other = served.agent(f"paged-{number}", started_at=time.time() - 60)
        other.start()
        other.train(2)
        other.send()
    page = open_page("/?search=paged-&sort=name&size=2")
    expect(page.locator(".jobs tbody tr")).to_have_count(2)
    page.get_by_role("link", name="Next").click()
    expect(page.locator("#job-paged-2")).to_be_visible()
    assert "page=2" in page.url
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    other.train(5)
    other.send()
    expect(page.locator("#job-paged-2 td[data-label='Iteration']")).to_contain_text("7")
    expect(page.locator(".jobs tbody tr")).to_have_count(1)
    page.get_by_label("Jobs per page").select_option("25")
    expect(page.locator(".jobs tbody tr")).to_have_count(3)


def test_the_panels_of_a_job_fill_themselves(open_page: Open, agent: FakeAgent) -> None:
    page = job_page(open_page, agent)
    panel = page.locator("#goodput")
    panel.scroll_into_view_if_needed()  # it loads when it is visible
    expect(panel.locator(".share-bar rect[data-bucket=productive]")).to_be_visible()
    panel.get_by_role("link", name="1h").click()
    expect(panel.locator("[aria-current]")).to_have_text("1h")
    expect(page.locator("#ranks")).to_have_count(0)


def test_several_jobs_are_given_one_budget_with_the_keyboard(open_page: Open, served: Served) -> None:
    agents = [served.agent(f"bulk-{number}") for number in range(3)]
    for each in agents:
        each.start()
        each.train(2)
        each.send()
    page = open_page("/?search=bulk-", width=390)
    button = page.get_by_role("button", name="Set…").first
    expect(button).to_be_hidden()
    for name in ("bulk-0", "bulk-2"):
        page.get_by_label(f"Select {name}").focus()
        page.keyboard.press("Space")
    agents[0].train(5)
    agents[0].send()
    expect(page.locator("#job-bulk-0 td[data-label='Iteration']")).to_contain_text("7")
    expect(page.get_by_label("Select bulk-0")).to_be_checked()  # the news takes no tick away
    page.get_by_role("textbox", name="Budget", exact=True).fill("2")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Set the budget of 2 jobs").click()
    expect(page.get_by_role("status")).to_contain_text("2 jobs changed")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_role("link", name="Back to the fleet").click()
    expect(page).to_have_url(f"{served.url}/?search=bulk-")
    assert [each.desired().budget for each in agents] == [0.02, None, 0.02]
    page.get_by_label("Select bulk-1").check()
    page.get_by_role("textbox", name="Write budget").fill("1GB/s")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Set the write budget of 1 job").click()
    expect(page.get_by_role("status")).to_contain_text("1 job changed")
    assert [each.desired().write_bytes_per_second for each in agents] == [None, 1e9, None]


def test_while_the_server_is_down_a_selection_stays_and_so_does_the_focus_of_a_search(
    open_page: Open, served: Served
) -> None:
    for number in range(2):
        each = served.agent(f"stays-{number}")
        each.start()
        each.train(2)
        each.send()
    page = open_page("/", expected=("net::ERR_FAILED",))
    page.keyboard.press("/")
    page.keyboard.type("stays-")
    expect(page.locator("tr[data-row]")).to_have_count(2)
    page.keyboard.press("Enter")
    page.keyboard.type("1")  # into the field, which still has the focus
    expect(page.locator("tr[data-row]")).to_have_count(1)
    page.keyboard.press("Backspace")
    expect(page.locator("tr[data-row]")).to_have_count(2)
    expect(page).to_have_url(f"{served.url}/?search=stays-")
    page.locator(".view-options summary").click()
    page.keyboard.press("Escape")
    expect(page.get_by_label("Labels")).to_be_hidden()
    page.get_by_label("Select all 2 jobs that match").check()
    rows = page.locator(".select-row")
    expect(page.locator(".select-row:checked")).to_have_count(2)
    rows.first.uncheck()
    expect(page.locator(".selected-count")).to_be_visible()
    rows.first.check()
    page.route("**/readyz", lambda route: route.abort())
    page.get_by_role("button", name="Pause checkpoints…").click()
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached; nothing was changed")
    expect(page.locator(".select-row:checked")).to_have_count(2)
    page.unroute("**/readyz")
    page.get_by_role("button", name="Pause checkpoints…").click()
    page.get_by_role("button", name="Pause checkpoints of 2 jobs").click()
    expect(page.get_by_role("status")).to_contain_text("2 jobs paused")


@pytest.mark.parametrize("width", [1440, 1024])
def test_in_a_row_of_the_fleet_a_long_name_is_cut_and_a_critical_verdict_has_up_to_three_lines(
    open_page: Open, served: Served, width: int
) -> None:
    name = "two-lines-" + "a-name-of-a-sweep-" * 4
    other = served.agent(name, started_at=time.time() - 60)
    other.start()
    started = other.events[0]
    assert isinstance(started, AttemptStarted)
    started.owner, started.labels = "ada", {"team": "vision-and-language", "data": "imagenet-22k-crops"}
    other.train(15)
    other.pace()
    other.train(60)
    other.events.append(
        AttemptFinished(at=other.at, iteration=75, lineage=1, reason="OutOfMemoryError: " + "x" * 90)
    )
    other.send()
    page = open_page("/?search=two-lines-", width=width)
    row = page.locator(f"#job-{name}")
    expect(row).to_have_count(1)
    assert row.evaluate("row => getComputedStyle(row).display") == "table-row"
    assert 60 <= row.evaluate("row => row.offsetHeight") <= 80
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    link = page.get_by_role("link", name=name, exact=True)
    assert link.evaluate("link => link.scrollWidth > link.clientWidth")
    expect(link).to_have_attribute("title", f"{name} on node-3")
    verdict = row.locator(".verdict bdi")
    assert verdict.evaluate("text => text.parentElement.getBoundingClientRect().width") >= 180


def test_on_a_phone_no_figure_of_the_fleet_lies_over_another(open_page: Open, agent: FakeAgent) -> None:
    page = open_page("/", width=390)
    cells = page.locator(f"#job-{agent.job} td")
    assert cells.count() == 10
    wide = "cells => cells.filter(cell => cell.scrollWidth > cell.clientWidth).map(cell => cell.dataset.label)"
    assert cells.evaluate_all(wide) == []


@pytest.mark.parametrize("width", [380, 390, 720])
def test_on_a_phone_the_whole_verdict_is_to_be_read(open_page: Open, agent: FakeAgent, width: int) -> None:
    page = open_page("/", width=width)
    verdict = page.locator(f"#job-{agent.job} .verdict > span")
    expect(verdict).to_be_visible()
    assert verdict.evaluate("text => text.scrollWidth <= text.clientWidth && text.clientWidth >= 180")


TOP = """async (rows) => {
  const { topOf } = await import("/static/timeline/overhead.js");
  return topOf(rows.map(([budget, measured_overhead]) => ({ budget, measured_overhead })));
}"""


@pytest.mark.parametrize(
    ("rows", "least", "most"),
    [
        ([(0.035, 0.01)] * 20, 0.04, 0.06),
        ([(0.035, 0.03)] * 20 + [(1.0, 0.04)] * 3, 0.05, 0.2),
        ([(0.035, 0.01)] * 40 + [(0.035, 9.0)], 0.04, 0.1),
        ([(0.02, None)], 0.02, 0.03),
        ([(0.01, 0.3)] * 5, 0.3, 0.4),
    ],
)  # fmt: skip
def test_one_high_value_does_not_flatten_the_overhead(
    open_page: Open, agent: FakeAgent, rows: list[tuple[float, float | None]], least: float, most: float
) -> None:
    page = job_page(open_page, agent)
    assert least <= page.evaluate(TOP, [list(row) for row in rows]) <= most


def test_a_conflict_is_shown_and_can_be_retried(open_page: Open, agent: FakeAgent) -> None:
    page = job_page(open_page, agent)
    other = job_page(open_page, agent)
    page.locator("#budget").fill("5")
    other.locator("#budget").fill("2")
    other.get_by_role("button", name="Apply budget").click()
    expect(other.locator("#change-budget")).to_contain_text("saved v1")
    page.get_by_role("button", name="Apply budget").click()
    expect(page.get_by_role("alert").filter(has_text="Not applied")).to_contain_text("→ 2 %")
    page.get_by_role("button", name="Apply budget").click()
    expect(page.locator("#change-budget")).to_contain_text("saved v2")


def test_of_two_browsers_that_restore_a_job_the_later_is_shown_of_the_other(
    open_page: Open, agent: FakeAgent
) -> None:
    quicker, later = job_page(open_page, agent), job_page(open_page, agent)
    for page, iteration in ((quicker, 400), (later, 440)):
        page.get_by_role("option", name=re.compile(f"Iteration {iteration}, durable")).click()
        page.get_by_role("button", name=f"Restore to {iteration}").click()
        expect(page.get_by_role("dialog")).to_contain_text(f"to iteration {iteration}")
    for page, iteration in ((quicker, 400), (later, 440)):
        page.get_by_role("dialog").get_by_role("button", name=f"Restore to {iteration}").click()
    expect(later.get_by_role("dialog")).to_contain_text("a restore to iteration 400 is already requested")
    for page in (quicker, later):
        expect(page.locator("#restore-status")).to_contain_text("Restoring to iteration 400")
    obey(agent)
    for page in (quicker, later):
        expect(page.locator("#restore-status li[aria-current=step]")).to_contain_text("restored")


def test_an_interval_a_pause_and_a_checkpoint_are_acknowledged(open_page: Open, agent: FakeAgent) -> None:
    page = job_page(open_page, agent)
    page.locator("#every").fill("50")
    page.get_by_role("button", name="Apply interval").click()
    expect(page.locator("#change-interval")).to_contain_text("saved v1")
    page.get_by_role("button", name="Checkpoint now").click()
    expect(page.locator("#change-checkpoint")).to_contain_text("saved v2")
    page.get_by_role("button", name="Pause checkpoints").click()
    expect(page.locator("#change-pause")).to_contain_text("saved v3")
    page.get_by_role("button", name="Profile data loading").click()
    expect(page.locator("#change-probe")).to_contain_text("saved v4")
    obey(agent)
    for name in ("interval", "checkpoint", "pause", "probe"):
        expect(page.locator(f"#change-{name}")).to_contain_text("applied at iteration 988")
    expect(page.get_by_role("button", name="Resume checkpoints")).to_be_visible()
    expect(page.locator("#history").get_by_text("30 ms fetching and 12 ms preparing")).to_be_visible()
    # by key, since lines that appear above may move the button away from a pointer
    page.get_by_role("button", name="Back to automatic", exact=True).press("Enter")
    expect(page.locator("#change-interval")).to_contain_text("saved v5")


def test_a_restore_from_the_timeline_to_restored_and_its_undo(open_page: Open, agent: FakeAgent) -> None:
    page = job_page(open_page, agent)
    page.get_by_role("option", name=re.compile("Iteration 400, durable")).click()
    page.get_by_role("button", name="Restore to 400").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("588 iterations")
    expect(dialog).to_contain_text("A safety checkpoint")
    dialog.get_by_role("button", name="Restore to 400").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator("#restore-status")).to_contain_text("Restoring to iteration 400")
    obey(agent)
    expect(page.locator("#restore-status li[aria-current=step]")).to_contain_text("restored")
    expect(page.locator("#head")).to_contain_text("lineage 2")
    expect(page.locator("[data-part=summary]")).to_contain_text("2 lineages")
    page.locator("#restore-status").get_by_role("link", name="Undo").click()
    expect(page.get_by_role("dialog")).to_contain_text(f"Undo the restore of {agent.job} to 400?")
    expect(page.get_by_role("button", name="Restore to 988")).to_be_visible()


def test_an_iteration_without_a_restore_point_is_offered_an_earlier_one(open_page: Open, agent: FakeAgent) -> None:
    page = job_page(open_page, agent)
    page.get_by_label("Restore to iteration").fill("417")
    page.get_by_role("button", name="Find").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Iteration 417 has no restore point.")
    dialog.get_by_role("link", name="Show iteration 400").click()
    expect(dialog).to_contain_text("to iteration 400?")
    dialog.get_by_role("link", name="Cancel").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert agent.desired().restore is None


def test_a_lost_server_is_shown_and_found_again(open_page: Open, agent: FakeAgent) -> None:
    page = job_page(open_page, agent, expected=("ERR_INTERNET_DISCONNECTED", "Failed to fetch"))
    page.context.set_offline(True)
    agent.train(5)
    agent.send()
    expect(page.locator("#connection")).to_have_attribute("data-state", re.compile("reconnecting|stale"))
    page.context.set_offline(False)
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    expect(page.locator("#head")).to_contain_text("iteration 993")


def test_without_scripts_a_budget_is_set_and_a_restore_is_ordered(open_page: Open, agent: FakeAgent) -> None:
    page = open_page(f"/jobs/{agent.job}", scripts=False)
    page.locator("#budget").fill("2")
    page.get_by_role("button", name="Apply budget").click()
    expect(page.locator("#change-budget")).to_contain_text("saved v1")
    page.get_by_role("link", name=re.compile("^Restore iteration 868,")).click()
    page.get_by_role("button", name="Restore to 868").click()
    expect(page.locator("#restore-status")).to_contain_text("Restoring to iteration 868")
    assert agent.desired().restore is not None


def test_an_empty_job_says_what_it_waits_for(open_page: Open, served) -> None:  # type: ignore[no-untyped-def]
    young: FakeAgent = served.agent("just-born", started_at=time.time())
    young.start()
    young.send()
    page = open_page("/jobs/just-born")
    expect(page.locator("[data-part=summary]")).to_contain_text("No iterations reported yet")
    young.train(2)
    young.send()
    expect(page.locator("#timeline")).to_have_attribute("data-state", "drawn")


MARKS = """async () => {
  const { curveOf } = await import("/static/timeline/model.js");
  const job = location.pathname.split("/").at(-1);
  const timeline = await (await fetch(`/api/v1/jobs/${job}/timeline?points=600`)).json();
  return { bucketed: timeline.bucketed, odd: curveOf(timeline, "loss").nonFinite };
}"""
RED = """() => {
  const canvas = document.querySelector('[data-lane="metric"] canvas');
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const bad = getComputedStyle(document.documentElement).getPropertyValue("--bad").trim();
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(bad.slice(at, at + 2), 16));
  let found = 0;
  for (let at = 0; at < data.length; at += 4) {
    if (data[at] === red && data[at + 1] === green && data[at + 2] === blue && data[at + 3] === 255) found += 1;
  }
  return found;
}"""


@pytest.mark.parametrize("nan_at", [range(0), range(2500, 2501)])
def test_a_single_nan_in_thousands_of_iterations_is_marked(open_page: Open, served, nan_at: range) -> None:  # type: ignore[no-untyped-def]
    agent = served.agent(f"job-{next(numbers)}", started_at=time.time() - 3600)
    agent.start()
    agent.train(5000, nan_at=nan_at)
    agent.send()
    page = job_page(open_page, agent)
    marks = page.evaluate(MARKS)
    assert marks["bucketed"] is True
    assert len(marks["odd"]) == len(nan_at)
    if nan_at:
        page.wait_for_function(f"() => ({RED})() > 40")
        assert 2500 <= marks["odd"][0]["from"] < 2550
    else:
        assert page.evaluate(RED) == 0
