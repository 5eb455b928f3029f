"""The job's timeline in a real Chromium: axes, densities, missing samples, lineages, files."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from holdfast.protocol.wire import Batch, Checkpoint, Gap, MachineSample, RestoreOrder
from tests.support.fake_agent import FakeAgent
from tests.support.web_fixtures import PATIENCE_MILLISECONDS, Served

pytestmark = pytest.mark.browser

Open = Callable[..., Page]
numbers = count(1)


@pytest.fixture
def agent(served) -> FakeAgent:  # type: ignore[no-untyped-def]
    """A job with 500 iterations, a crash and a restore behind it."""
    agent: FakeAgent = served.agent(f"line-{next(numbers)}", started_at=time.time() - 600)
    agent.start()
    agent.train(15)
    agent.pace()
    agent.train(285)
    agent.crash(12)
    agent.train(112)
    agent.restore(RestoreOrder(id="none", checkpoint="000000000200-1", fence=1))
    agent.events = [event for event in agent.events if type(event).__name__ != "OrderStateChange"]
    agent.train(300)
    agent.send()
    return agent


def drawn(open_page: Open, agent: FakeAgent, query: str = "", **options: object) -> Page:
    page = open_page(f"/jobs/{agent.job}{query}", **options)
    expect(page.locator("#timeline")).to_have_attribute("data-state", "drawn")
    return page


def window(page: Page) -> str:
    return page.locator("[data-part=window]").inner_text()


def over(page: Page, lane: str, part: float) -> None:
    body = page.locator(f'[data-lane="{lane}"] .lane-body')
    body.scroll_into_view_if_needed()
    box = body.bounding_box()
    assert box
    page.mouse.move(box["x"] + 62 + (box["width"] - 76) * part, box["y"] + box["height"] / 2)


def test_the_axis_is_iterations_or_time_and_the_address_says_which(open_page: Open, agent: FakeAgent) -> None:
    page = drawn(open_page, agent)
    expect(page.locator("[data-part=window]")).to_have_text("iterations 1 – 500 of 500")
    page.get_by_role("button", name="Time", exact=True).click()
    expect(page.locator("[data-part=window]")).to_have_text(re.compile(r"\d\d:\d\d:\d\d – .*\d\d:\d\d:\d\d"))
    expect(page).to_have_url(re.compile("x=time"))
    over(page, "metric", 0.9)
    expect(page.locator(".crosshair span")).to_contain_text("iteration")
    page.reload()
    expect(page.locator("#timeline")).to_have_attribute("data-state", "drawn")  # keys move what is there
    expect(page.locator(".axis-name")).to_have_text("time")
    page.keyboard.press("h")
    expect(page.locator("[data-part=window]")).to_have_text("iterations 1 – 500 of 500")
    expect(page).not_to_have_url(re.compile("x=time"))


def test_a_stretch_of_iterations_is_the_same_stretch_in_time(open_page: Open, agent: FakeAgent) -> None:
    page = drawn(open_page, agent, "?from=300&to=400")
    page.keyboard.press("h")
    expect(page.locator(".axis-name")).to_have_text("time")
    expect(page).to_have_url(re.compile(r"x=time&from=\d+\.?\d*&to="))
    expect(page.locator("[data-part=summary]")).to_contain_text("From ")
    page.keyboard.press("h")
    expect(page.locator("[data-part=window]")).to_have_text(
        re.compile(r"iterations (299|300|301) – (399|400|401) of")
    )


def test_a_stretch_of_abandoned_work_is_the_same_stretch_in_time(open_page: Open, served: Served) -> None:
    agent = served.agent(f"line-{next(numbers)}", started_at=time.time() - 600)
    agent.start()
    agent.train(15)
    agent.pace()
    agent.train(385)
    agent.restore(RestoreOrder(id="none", checkpoint="000000000080-1", fence=1))
    agent.events = [event for event in agent.events if type(event).__name__ != "OrderStateChange"]
    agent.train(5)
    agent.send()
    page = drawn(open_page, agent, "?from=250&to=350")
    page.keyboard.press("h")
    expect(page).to_have_url(re.compile(r"x=time&from=\d+\.?\d*&to=\d"))
    expect(page.locator("[data-part=window]")).to_contain_text(re.compile(r"\d\d:\d\d:\d\d – "))
    expect(page.locator("[data-part=summary]")).to_contain_text("From ")
    page.keyboard.press("h")
    expect(page.locator("[data-part=window]")).to_have_text(
        re.compile(r"iterations (249|250|251) – (349|350|351) of")
    )


def test_a_window_that_follows_goes_on_following_on_the_other_axis(open_page: Open, agent: FakeAgent) -> None:
    page = drawn(open_page, agent, "?from=450&to=500&live=1")
    live = page.get_by_role("button", name="Follow")
    expect(live).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("h")
    expect(page).to_have_url(re.compile(r"x=time&from=.*&live=1"))
    expect(live).to_have_attribute("aria-pressed", "true")


def test_follow_shows_the_current_lineage_after_a_restore_far_back(open_page: Open, served: Served) -> None:
    agent = served.agent(f"line-{next(numbers)}", started_at=time.time() - 600)
    agent.start()
    agent.train(15)
    agent.pace()
    agent.train(3985)
    agent.restore(RestoreOrder(id="none", checkpoint="000000001000-1", fence=1))
    agent.events = [event for event in agent.events if type(event).__name__ != "OrderStateChange"]
    agent.train(20)
    agent.send()
    page = drawn(open_page, agent)
    live, shown = page.get_by_role("button", name="Follow"), page.locator("[data-part=window]")
    expect(live).to_have_attribute("aria-pressed", "true")
    expect(shown).to_have_text("iterations 800 – 1,020 of 4,000")
    agent.train(40)
    agent.send()
    expect(shown).to_have_text("iterations 800 – 1,060 of 4,000")
    page.keyboard.press("0")
    expect(shown).to_have_text("iterations 1 – 4,000 of 4,000")
    expect(live).to_have_attribute("aria-pressed", "false")
    expect(page).to_have_url(re.compile(r"from=1&to=4000"))
    page.reload()
    expect(shown).to_have_text("iterations 1 – 4,000 of 4,000")
    live.click()
    expect(shown).to_have_text("iterations 800 – 1,060 of 4,000")
    page.keyboard.press("h")
    page.keyboard.press("h")
    expect(shown).to_have_text("iterations 800 – 1,060 of 4,000")
    agent.train(2940)
    agent.send()
    expect(shown).to_have_text("iterations 1 – 4,000 of 4,000")


@pytest.mark.parametrize("away", [30, 10**7])
def test_a_job_that_fell_silent_has_a_grey_stretch_that_does_not_grow_for_ever(
    open_page: Open, agent: FakeAgent, away: int
) -> None:
    page = open_page("/")

    def fell_silent(route: Route) -> None:
        answer = route.fetch().json()
        since = answer["times"][1]
        route.fulfill(json={**answer, "silent_since": since, "now": since + away})

    page.route("**/timeline?*", fell_silent)
    page.goto(page.url + f"jobs/{agent.job}?x=time")
    expect(page.locator("[data-part=summary]")).to_contain_text(re.compile(r"No report since \d\d:\d\d:\d\d\."))
    over(page, "metric", 0.99)
    expect(page.locator("[data-part=tip]")).to_contain_text(re.compile(r"No report since \d\d:\d\d:\d\d"))
    over(page, "metric", 0.8)
    expect(page.locator("[data-part=tip]")).to_be_hidden()
    page.unroute_all(behavior="wait")  # an answer that is being changed would outlive the page


DAYS = """async () => {
  const { times } = await import("/static/timeline/canvas.js");
  const { clock } = await import("/static/timeline/format.js");
  const { places } = times(Date.parse("2026-10-22T10:00Z") / 1000, Date.parse("2026-10-28T10:00Z") / 1000, 8);
  return places.map(clock);
}"""


def test_one_clock_shows_all_times_and_days_begin_at_midnight_when_summer_time_ends(
    chromium: Browser, served: Served, agent: FakeAgent
) -> None:
    context = chromium.new_context(timezone_id="Europe/Berlin")
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    page = context.new_page()
    page.goto(f"{served.url}/jobs/{agent.job}?x=time")
    expect(page.locator(".axis-name")).to_have_text("time")
    expect(page.locator("[data-part=window]")).to_contain_text(re.compile(r"\d\d:\d\d:\d\d$"))
    assert page.evaluate(DAYS) == ["00:00:00"] * 6
    page.keyboard.press("u")
    expect(page.locator(".axis-name")).to_have_text("time UTC")
    expect(page.locator("[data-part=window]")).to_contain_text(re.compile(r"\d\d:\d\d:\d\d UTC$"))
    context.close()


@pytest.mark.parametrize(
    ("clipboard", "label"),
    [("undefined", "Copy the address"), ("{ writeText: async (text) => (window.copied = text) }", "Copied")],
)
def test_a_link_is_copied_as_the_window_is_now_and_done_is_shown_only_of_what_is_done(
    chromium: Browser, served: Served, agent: FakeAgent, clipboard: str, label: str
) -> None:
    context = chromium.new_context()
    context.add_init_script(f"Object.defineProperty(navigator, 'clipboard', {{ value: {clipboard} }});")
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    page = context.new_page()
    page.goto(f"{served.url}/jobs/{agent.job}")
    expect(page.locator("#timeline")).to_have_attribute("data-state", "drawn")
    at_once = """() => new Promise((resolve) => {
      const button = document.querySelector("[data-act=copy]");
      const seen = new MutationObserver(() => resolve(button.dataset.done));
      seen.observe(button, { attributeFilter: ["data-done"] });
      document.querySelector("[data-act=zoom-in]").click();
      button.click();
    })"""
    assert label in page.evaluate(at_once)
    if label == "Copied":
        assert re.search(r"from=\d+&to=\d+", page.evaluate("window.copied"))
    context.close()


def test_a_refresh_that_fails_is_shown_until_one_succeeds(open_page: Open, agent: FakeAgent) -> None:
    page = drawn(open_page, agent, expected=("ERR_FAILED",))
    page.route("**/timeline?*", lambda route: route.abort())
    agent.train(5)
    agent.send()
    stale = page.locator("[data-part=stale]")
    expect(stale).to_have_text(re.compile(r"Last updated \d\d:\d\d:\d\d"))
    page.unroute("**/timeline?*")
    agent.train(5)
    agent.send()
    expect(stale).to_be_hidden()
    expect(page.locator("[data-part=window]")).to_contain_text("of 510")


def test_metric_scale_and_table_are_in_the_address(open_page: Open, agent: FakeAgent) -> None:
    page = drawn(open_page, agent)
    page.locator("select[data-part=metric]").select_option("grad_norm")
    expect(page.locator('[data-lane="metric"] .lane-name')).to_have_text("Grad norm")
    page.get_by_role("button", name="log").click()
    page.get_by_role("button", name="Table").click()
    expect(page).to_have_url(re.compile(r"metric=grad_norm&log=1&table=1"))
    page.reload()
    expect(page.locator('[data-lane="metric"] .lane-name')).to_have_text("Grad norm")
    expect(page.get_by_role("button", name="log")).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_role("table", name=re.compile("^Checkpoints in this window"))).to_be_visible()


def test_abandoned_lineages_fold_into_one_row_and_unfold(open_page: Open, agent: FakeAgent) -> None:
    page = drawn(open_page, agent)
    button = page.get_by_role("button", name="Lineages")
    expect(button).to_have_attribute("aria-pressed", "true")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")
    expect(page).to_have_url(re.compile("branches=standing"))
    over(page, "lineages", 0.75)
    box = page.locator('[data-lane="lineages"] canvas').bounding_box()
    assert box
    page.mouse.move(box["x"] + 62 + (box["width"] - 76) * 0.49, box["y"] + 4 + 26 * 1.5)
    expect(page.locator("[data-part=tip]")).to_contain_text("Lost: ")
    page.keyboard.press("e")
    expect(button).to_have_attribute("aria-pressed", "true")


def test_where_samples_were_dropped_there_is_no_data_and_nothing_is_drawn_across(
    open_page: Open, agent: FakeAgent
) -> None:
    agent.train(60)
    agent.samples = type(agent.samples)()
    agent.sequence += 1
    gap = Gap(lineage=agent.lineage, first_iteration=501, last_iteration=560, dropped=60)
    batch = Batch(
        job=agent.job, uid=f"{agent.job}-{agent.attempt}", attempt=agent.attempt, rank=0, sequence=agent.sequence,
        sent_at=agent.at, iteration=agent.iteration, lineage=agent.lineage, gaps=[gap],
    )  # fmt: skip
    agent.ask("/api/v1/ingest", msgspec.msgpack.encode(batch))
    agent.events = []
    agent.train(100)
    agent.send()
    page = drawn(open_page, agent)
    over(page, "metric", 530 / 660)
    expect(page.locator('[data-lane="metric"] .lane-value')).to_have_text("no data")
    expect(page.locator("[data-part=tip]")).to_contain_text("dropped samples of 60 of 60 iterations")
    over(page, "metric", 450 / 660)
    expect(page.locator('[data-lane="metric"] .lane-value')).not_to_have_text("no data")


def test_checkpoints_too_dense_for_bars_are_a_density_until_one_zooms_in(
    open_page: Open, agent: FakeAgent
) -> None:
    agent.interval = 2
    agent.train(500)
    agent.send()
    page = drawn(open_page, agent)
    note = page.locator('[data-lane="pipeline"] .lane-value')
    expect(note).to_contain_text("zoom in for bars")
    expect(page.locator("[data-part=summary]")).to_contain_text(re.compile(r"2\d\d durable checkpoints"))
    over(page, "pipeline", 0.8)
    expect(page.locator("[data-part=tip]")).to_contain_text("Checkpoint of iteration")
    page.goto(f"{page.url.split('?')[0]}?from=600&to=640")
    expect(page.locator("#timeline")).to_have_attribute("data-state", "drawn")
    expect(note).to_have_text("")


INKED_RUNS = """([lane, up]) => {
  const canvas = document.querySelector(lane === "overview" ? ".overview canvas" : `[data-lane="${lane}"] canvas`);
  const ratio = devicePixelRatio;
  const [left, width] = [64 * ratio, canvas.width - 80 * ratio];
  const { data } = canvas.getContext("2d").getImageData(left, canvas.height - up * ratio, width, 1);
  const runs = [];
  for (let x = 0; x < width; x += 1) {
    if (data[4 * x + 3] < 80) continue;
    if (runs.length && x - runs.at(-1)[1] <= 2) runs.at(-1)[1] = x;
    else runs.push([x, x]);
  }
  return runs;
}"""


@pytest.mark.parametrize("interval", [7, 11, 40])
def test_a_constant_interval_looks_constant_at_every_zoom(open_page: Open, served: Served, interval: int) -> None:
    steady = served.agent(f"line-{next(numbers)}", started_at=time.time() - 900, interval=interval)
    steady.start()
    for _ in range(8):
        steady.train(400)
        steady.events = [
            msgspec.structs.replace(event, state="durable", reason=None)
            if isinstance(event, Checkpoint) and event.state == "failed"
            else event
            for event in steady.events
        ]
        steady.send()
    for window in ("", "?from=1&to=2500", "?from=500&to=1300", "?from=1000&to=1240"):
        page = drawn(open_page, steady, window)
        expect(page.locator("[data-part=summary]")).to_contain_text("durable checkpoints")
        for lane, up in (("pipeline", 10), ("overview", 2), ("lineages", 13)):
            runs = page.evaluate(INKED_RUNS, [lane, up])[1:-1]
            starts = [begin for begin, _ in runs]
            apart = [second - first for first, second in itertools.pairwise(starts)]
            assert not apart or max(apart) - min(apart) <= 3, (window, lane, apart)
        page.close()


def test_the_table_lists_every_checkpoint_up_to_its_limit(open_page: Open, agent: FakeAgent) -> None:
    page = drawn(open_page, agent, "?table=1")
    rows = page.get_by_role("table", name=re.compile("^Checkpoints in this window: 1[0-9]$")).locator("tbody tr")
    expect(rows.first).to_be_visible()


def test_what_is_pressed_while_the_other_axis_is_awaited_is_not_lost(open_page: Open, agent: FakeAgent) -> None:
    page = drawn(open_page, agent)
    page.evaluate("""() => { for (const act of ["axis", "log", "table"])
        document.querySelector(`button[data-act=${act}]`).click(); }""")
    for name in ("Log", "Time", "Table"):
        expect(page.get_by_role("button", name=name, exact=True)).to_have_attribute("aria-pressed", "true")
    expect(page).to_have_url(re.compile(r"x=time&log=1&table=1"))
    page.evaluate("""() => { for (const act of ["axis", "axis", "axis"])
        document.querySelector(`button[data-act=${act}]`).click(); }""")
    expect(page.locator("[data-part=window]")).to_have_text("iterations 1 – 500 of 500")


def test_a_link_that_is_copied_at_once_names_the_metric_that_was_chosen(open_page: Open, agent: FakeAgent) -> None:
    page = drawn(open_page, agent)
    page.evaluate("""() => {
      const picker = document.querySelector("[data-part=metric]");
      picker.value = "grad_norm";
      picker.dispatchEvent(new Event("change", { bubbles: true }));
      document.querySelector("button[data-act=copy]").click();
    }""")
    assert "metric=grad_norm" in page.url


def test_going_back_undoes_a_zoom(open_page: Open, agent: FakeAgent) -> None:
    page = drawn(open_page, agent)
    shown = page.locator("[data-part=window]")
    expect(shown).to_have_text("iterations 1 – 500 of 500")
    page.get_by_role("button", name="Zoom in").click()
    expect(page).to_have_url(re.compile("from="))
    zoomed = window(page)
    page.get_by_role("button", name="Zoom in").click()
    expect(page).not_to_have_url(re.compile(f"from={zoomed.split()[1]}&"))
    page.go_back()
    expect(shown).to_have_text(zoomed)
    page.go_back()
    expect(shown).to_have_text("iterations 1 – 500 of 500")
    page.go_forward()
    expect(shown).to_have_text(zoomed)


@pytest.mark.parametrize("width", [1440, 390])
def test_the_button_that_restores_a_selected_point_is_next_to_it(
    open_page: Open, agent: FakeAgent, width: int
) -> None:
    page = drawn(open_page, agent, width=width)
    option = page.locator('[role=option][data-id="000000000080-1"]')
    option.evaluate("element => element.scrollIntoView({ block: 'center' })")
    before = page.locator('[data-lane="metric"]').bounding_box()
    option.click()
    button = page.get_by_role("button", name="Restore to 80…")
    expect(button).to_be_in_viewport()
    assert page.locator('[data-lane="metric"]').bounding_box() == before
    (point, found) = (option.bounding_box(), button.bounding_box())
    assert point
    assert found
    assert 0 < found["y"] - point["y"] < 80
    button.click()
    expect(page.get_by_role("dialog")).to_contain_text("to iteration 80?")


def test_a_lineage_at_another_resolution_is_named(open_page: Open, served: Served) -> None:
    agent = served.agent(f"line-{next(numbers)}", started_at=time.time() - 2000)
    agent.start()
    for _ in range(6):
        agent.train(900)
        agent.send()
    agent.restore(RestoreOrder(id="none", checkpoint="000000005200-1", fence=1))
    agent.events = [event for event in agent.events if type(event).__name__ != "OrderStateChange"]
    agent.train(100)
    agent.send()
    page = drawn(open_page, agent)
    note = page.locator('[data-lane="metric"] .lane-value')
    expect(note).to_have_text(re.compile(r"Each point: mean of \d+ iterations; lineage 2: "))


def test_a_job_without_checkpoints_says_when_one_is_due(open_page: Open, served) -> None:  # type: ignore[no-untyped-def]
    young = served.agent(f"line-{next(numbers)}", started_at=time.time() - 60, interval=500)
    young.start()
    young.train(1)
    young.send()
    page = drawn(open_page, young)
    expect(page.locator("[data-part=summary]")).to_contain_text("Iterations 1 to 1 of 1")
    note = page.locator('[data-lane="pipeline"] .lane-value')
    expect(note).to_have_text("No checkpoint yet; the first is due once the first iterations are profiled")


def test_the_first_checkpoint_of_a_resumed_attempt_is_due_an_interval_after_its_start(
    open_page: Open, served: Served
) -> None:
    resumed = served.agent(
        f"line-{next(numbers)}", started_at=time.time() - 60, interval=500, attempt=2, iteration=782
    )
    resumed.last_checkpoint = 782
    resumed.start(resumed_from="000000000782-1")
    resumed.train(60)  # up to its first report of the interval
    resumed.send()
    note = drawn(open_page, resumed).locator('[data-lane="pipeline"] .lane-value')
    expect(note).to_have_text("No checkpoint yet; the first is due at iteration 1,282, 842 done")


def saved(page: Page, name: str, folder: Path) -> bytes:
    page.locator("[data-part=export] summary").click()
    with page.expect_download() as caught:
        page.get_by_role("button", name=name).click()
    target = folder / caught.value.suggested_filename
    caught.value.save_as(target)
    return target.read_bytes()


def test_the_chart_is_saved_as_a_drawing_and_as_a_picture(
    open_page: Open, agent: FakeAgent, tmp_path: Path
) -> None:
    page = drawn(open_page, agent)
    drawing = saved(page, "Image, SVG", tmp_path).decode()
    assert drawing.startswith("<svg xmlns=")
    assert drawing.endswith("</svg>")
    for words in (agent.job, "Loss", "Iteration time", "Restore points", "attempt 1"):
        assert f">{words}" in drawing
    assert "NaN" not in drawing
    assert "undefined" not in drawing
    assert saved(page, "Image, PNG", tmp_path).startswith(b"\x89PNG")


def test_files_of_the_window_on_show_are_linked(open_page: Open, agent: FakeAgent) -> None:
    page = drawn(open_page, agent, "?from=100&to=150")
    page.locator("[data-part=export] summary").click()
    link = page.get_by_role("link", name="Samples, CSV")
    expect(link).to_have_attribute("href", re.compile(r"/export/samples\.csv\?from=100&to=150$"))
    with page.expect_download() as caught:
        link.click()
    lines = Path(caught.value.path()).read_text().splitlines()
    assert lines[0].startswith("lineage,abandoned,iteration,iterations,at,seconds")
    assert len(lines) == 1 + 51


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("query", ["?x=time", "?branches=standing&table=1"])
def test_every_view_fits_its_screen(open_page: Open, agent: FakeAgent, width: int, query: str) -> None:
    page = drawn(open_page, agent, query, width=width, theme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_second_metric_has_an_axis_of_its_own_and_is_kept_in_the_address(
    open_page: Open, agent: FakeAgent
) -> None:
    page = drawn(open_page, agent)
    page.get_by_label("Second metric").select_option("grad_norm")
    expect(page.locator("[data-lane=metric] .lane-key")).to_contain_text("grad norm, right axis")
    expect(page).to_have_url(re.compile("second=grad_norm"))
    over(page, "metric", 0.5)
    expect(page.locator("[data-lane=metric] .lane-value")).to_have_text(
        re.compile(r"^[0-9.].* · grad_norm [0-9.]+$")
    )
    page.reload()
    expect(page.locator("#timeline")).to_have_attribute("data-state", "drawn")
    expect(page.get_by_label("Second metric")).to_have_value("grad_norm")
    page.get_by_label("Second metric").select_option("none")
    expect(page.locator("[data-lane=metric] .lane-key")).not_to_contain_text("right axis")
    expect(page).not_to_have_url(re.compile("second="))


@pytest.mark.parametrize("width", [1440, 390])
def test_the_machine_of_a_chosen_rank_is_shown_below_and_as_a_table(
    open_page: Open, served: Served, width: int
) -> None:
    agent = served.agent(f"machine-{width}", started_at=time.time() - 120, measures_machine=True)
    agent.start()
    agent.train(400)
    machine = [event for event in agent.events if isinstance(event, MachineSample)]
    agent.send()
    for each in machine:
        each.cpu_share, each.gpu_share, each.gpu_memory_bytes = 0.5, None, None
    other = Batch(
        job=agent.job, uid=f"{agent.job}-1", attempt=1, rank=1, sequence=1, sent_at=agent.at, iteration=400,
        lineage=1, events=machine,
    )  # fmt: skip
    agent.ask("/api/v1/ingest", msgspec.msgpack.encode(other))
    page = drawn(open_page, agent, width=width)
    lanes = page.get_by_role("group", name="Machine", exact=True)
    expect(lanes).to_have_count(0)
    page.get_by_role("button", name="Machine").click()
    expect(lanes.locator(".lane:visible .lane-name")).to_have_text(
        ["Machine", "GPU", "CPU", "Memory", "Disk", "Network"]
    )
    page.get_by_label("Rank", exact=True).select_option("1")
    expect(lanes.locator(".lane:visible .lane-name")).to_have_text(["Machine", "CPU", "Memory", "Disk", "Network"])
    expect(page).to_have_url(re.compile("machine=1"))
    page.get_by_role("button", name="Table", exact=True).click()
    rows = page.get_by_role("table", name=re.compile("^Machine of rank 1, .*20 rows$")).locator("tbody tr")
    expect(rows.first).to_contain_text("50 %")
    page.reload()
    expect(lanes.locator(".lane:visible")).to_have_count(5)
    page.get_by_role("button", name="Machine").click()
    expect(lanes).to_be_hidden()
    expect(page).not_to_have_url(re.compile("machine="))


def test_two_points_that_are_selected_lead_to_their_comparison(open_page: Open, agent: FakeAgent) -> None:
    page = drawn(open_page, agent)
    points = page.get_by_role("listbox", name="Restore points in this window")
    chosen = page.locator("[data-part=selection]")
    points.focus()
    page.keyboard.press("ArrowLeft")
    expect(chosen.get_by_role("link", name="Fork…")).to_have_attribute(
        "href", re.compile(r"/checkpoints/.*#fork$")
    )
    expect(chosen.get_by_role("link", name="Compare with")).to_be_hidden()
    page.keyboard.press("Shift+ArrowLeft")
    page.keyboard.press("Shift+ArrowLeft")
    expect(points.locator("[aria-selected=true]")).to_have_count(2)
    expect(page).to_have_url(re.compile("with="))
    page.reload()
    chosen.get_by_role("link", name="Compare with").click()
    expect(page).to_have_url(re.compile(r"/checkpoints/[0-9-]+\?with=[0-9-]+#compare$"))
    expect(page.get_by_role("table").filter(has_text="Lineage").first).to_be_visible()
