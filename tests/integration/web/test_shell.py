"""What every page has: its places, its keys, its themes and its times; and what it does without a server."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, Error, Page, Route, expect

from holdfast.client import Client
from holdfast.protocol.store_shares import StoreReport
from holdfast_server.core.settings import ServerSettings
from holdfast_web import create_app
from tests.support.fake_agent import FakeAgent
from tests.support.web_fixtures import PATIENCE_MILLISECONDS, Served, free_listener

pytestmark = pytest.mark.browser

Open = Callable[..., Page]


def reported(served: Served, job: str, iterations: int = 60) -> FakeAgent:
    agent = served.agent(job, started_at=time.time() - 60)
    agent.start()
    agent.train(iterations)
    agent.send()
    return agent


def test_keys_lead_everywhere(open_page: Open, served: Served) -> None:
    reported(served, "keys-1")
    reported(served, "keys-2")
    page = open_page("/?search=keys-&sort=name")
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("Keyboard shortcuts")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.get_by_role("link", name="keys-2", exact=True)).to_be_focused()
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/jobs/keys-1$"))
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    page.keyboard.press("g")
    page.keyboard.press("a")
    expect(page).to_have_url(re.compile("/alerts$"))
    page.keyboard.press("g")
    page.keyboard.press("f")
    expect(page).to_have_url(re.compile("/$"))


TABLE = ".rows tbody tr"
FOCUSED = "rows => rows.findIndex(row => row.contains(document.activeElement))"


@pytest.mark.parametrize(
    ("path", "listed"),
    [
        ("/audit", TABLE), ("/projects/default/alert-rules", TABLE), ("/stores", TABLE),
        ("/account?by=job", TABLE), ("/alerts?state=all", ".alerts > li"), ("/report", ".report .log > li"),
    ],
)  # fmt: skip
def test_j_and_k_go_through_every_list(open_page: Open, served: Served, path: str, listed: str) -> None:
    for number in range(3):
        failed = reported(served, f"listed-{number}")
        failed.events.append(StoreReport(at=failed.at, address=f"s3://{number}", host="node"))
        failed.fail("ValueError: no")
        failed.supervise("gave_up", "ValueError: no", start=5)
    with Client(served.url) as client:
        for budget in (0.02, 0.03, 0.04):
            client.edit("listed-0", budget=budget)
    page = open_page(path)
    rows = page.locator(listed)
    expect(rows.nth(2)).to_be_visible()
    for key, place in (("j", 0), ("j", 1), ("j", 2), ("k", 1)):
        page.keyboard.press(key)
        assert rows.evaluate_all(FOCUSED) == place, (key, place)
    assert page.evaluate("!document.activeElement.matches('button, summary')")


def test_on_a_phone_the_controls_are_a_tap_away(open_page: Open, served: Served) -> None:
    reported(served, "tapped")
    page = open_page("/jobs/tapped", width=390)
    expect(page.locator("#attempts table")).to_have_count(1)
    links = page.get_by_role("link", name="Controls", exact=True)
    expect(links.first).to_be_in_viewport()
    links.first.click()
    expect(page.locator("#budget")).to_be_in_viewport()
    page.locator("#history").scroll_into_view_if_needed()
    expect(links.first).not_to_be_in_viewport()
    links.last.click()
    expect(page.locator("#budget")).to_be_in_viewport()


def test_a_skip_link_leads_to_the_controls(open_page: Open, served: Served) -> None:
    reported(served, "skipped")
    page = open_page("/jobs/skipped")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to controls")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#controls")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Guide: Overhead budget")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_label("Budget", exact=True)).to_be_focused()


@pytest.mark.parametrize("panel", ["log", "plan", "recent"])
def test_a_folded_panel_opens_where_a_link_leads_to_it(open_page: Open, served: Served, panel: str) -> None:
    reported(served, "folded")
    page = open_page("/jobs/folded")
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    folded = page.locator(f"#{panel}")
    expect(folded).not_to_have_attribute("open", "")
    for _ in range(2):  # the second click leaves the hash as it is
        page.locator(f".local-nav a[href='#{panel}']").click()
        expect(folded).to_have_attribute("open", "")
        expect(folded.get_by_role("link", name=re.compile("^(Show the output|Compare intervals)$"))).to_have_count(
            0
        )
        folded.locator("summary").click()
        expect(folded).not_to_have_attribute("open", "")
    page.evaluate("location.hash = '#attempts'")
    page.evaluate("hash => (location.hash = hash)", panel)
    expect(folded).to_have_attribute("open", "")
    page = open_page(f"/jobs/folded#{panel}")
    expect(page.locator(f"#{panel}")).to_have_attribute("open", "")
    expect(page.get_by_role("link", name=re.compile("^(Show the output|Compare intervals)$"))).to_have_count(0)


def test_keys_of_one_character_can_be_switched_off_and_on_again(open_page: Open, served: Served) -> None:
    reported(served, "keyless")
    page = open_page("/jobs/keyless")
    expect(page.locator("#timeline")).to_have_attribute("data-state", "drawn")
    page.keyboard.press("?")
    page.get_by_label("Enable single-key shortcuts").uncheck()
    page.keyboard.press("Escape")
    page.reload()
    expect(page.locator("#timeline")).to_have_attribute("data-state", "drawn")
    table = page.locator("[data-part=tables]")
    page.keyboard.press("t")
    page.keyboard.press("?")
    assert not page.locator("#keys").is_visible()
    assert table.is_hidden()
    page.get_by_role("button", name="Keyboard shortcuts", exact=True).click()
    page.get_by_label("Enable single-key shortcuts").check()
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    expect(table).to_be_visible()


def test_a_key_in_a_field_is_a_letter(open_page: Open, served: Served) -> None:
    reported(served, "letters")
    page = open_page("/")
    page.keyboard.press("/")
    page.keyboard.type("ga?")
    expect(page.locator("#search")).to_have_value("ga?")
    expect(page).to_have_url(re.compile(r"/\?search=ga%3F$"))


def test_the_theme_goes_from_the_systems_to_light_to_dark_and_back(open_page: Open) -> None:
    page = open_page("/", theme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    button, seen = page.locator("[data-theme-toggle]"), []
    for name in ("system", "light", "dark"):
        expect(button).to_have_attribute("aria-label", f"Theme: {name}")
        seen.append(page.evaluate(ground))
        page.reload()
        assert page.evaluate(ground) == seen[-1]
        button.click()
    expect(button).to_have_attribute("aria-label", "Theme: system")
    assert seen[0] == seen[2] != seen[1]


def test_times_are_shown_where_the_reader_is_and_in_utc_when_asked(chromium: Browser, served: Served) -> None:
    reported(served, "clocks")
    context = chromium.new_context(timezone_id="Asia/Tokyo")
    page = context.new_page()
    page.goto(f"{served.url}/jobs/clocks/checkpoints/000000000040-1")
    time_of = page.locator("time[data-as=stamp]").first
    at = float(time_of.get_attribute("data-at") or 0)
    tokyo = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at + 9 * 3600))
    utc = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    expect(time_of).to_have_text(tokyo)
    time_of.hover()
    expect(time_of).to_have_attribute("title", f"{tokyo} local · {utc} UTC")
    page.keyboard.press("u")
    expect(time_of).to_have_text(f"{utc} UTC")
    page.reload()
    expect(time_of).to_have_text(f"{utc} UTC")
    context.close()


def test_on_a_phone_the_places_are_within_reach_of_a_thumb(open_page: Open, served: Served) -> None:
    reported(served, "thumb")
    page = open_page("/jobs/thumb", width=390)
    bar = page.get_by_role("navigation", name="Main")
    box = bar.bounding_box()
    assert box
    assert box["y"] + box["height"] == 900
    for link in bar.get_by_role("link").all():
        target = link.bounding_box()
        assert target
        assert min(target["width"], target["height"]) >= 44
    bar.get_by_role("link", name="Alerts").click()
    expect(page.get_by_role("heading", name="Alerts", exact=True)).to_be_visible()


class Restartable:
    """A server that goes away and comes back at the same address."""

    def __init__(self, database: Path) -> None:
        # keep the port bound while the server is away
        self.place = socket.socket()
        self.place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.place.bind(("127.0.0.1", 0))
        self.port = self.place.getsockname()[1]
        self.listener = free_listener(self.port)
        self.settings = ServerSettings(database=str(database), port=self.port)

    def start(self) -> None:
        self.server = uvicorn.Server(
            uvicorn.Config(create_app(self.settings), log_level="error", timeout_graceful_shutdown=1)
        )
        sockets = {"sockets": [self.listener]}
        self.thread = threading.Thread(target=self.server.run, kwargs=sockets, name="restartable")
        self.thread.start()

    def stop(self) -> None:
        """Uvicorn closes the socket that it was given."""
        self.server.should_exit = True
        self.thread.join()

    def again(self) -> None:
        self.listener = free_listener(self.port)
        self.start()


@pytest.fixture
def restartable(tmp_path: Path) -> Iterator[Restartable]:
    server = Restartable(tmp_path / "holdfast.db")
    server.start()
    yield server
    server.stop()
    server.place.close()


def test_pages_shows_that_the_server_is_gone_and_come_back_with_it(
    chromium: Browser, restartable: Restartable
) -> None:
    served = Served(f"http://127.0.0.1:{restartable.port}", Path(restartable.settings.database))
    agent = reported(served, "outlives", 90)
    context = chromium.new_context()
    job, fleet = context.new_page(), context.new_page()
    job.goto(f"{served.url}/jobs/outlives")
    fleet.goto(f"{served.url}/")
    for page in (job, fleet):
        expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    restartable.stop()
    for page in (job, fleet):
        page.bring_to_front()
        expect(page.locator("#connection")).to_have_attribute("data-state", re.compile("reconnecting|stale"))
    job.bring_to_front()
    job.locator("#budget").fill("2")
    expect(job.locator("[data-draft=budget]")).to_have_text("Not saved yet")
    job.get_by_role("button", name="Apply budget").click()
    expect(job.locator("[data-draft=budget]")).to_have_text("No answer; the change may have been saved")
    expect(job.get_by_role("alert").filter(has_text="cannot be reached")).to_be_visible()
    restartable.again()
    agent.train(5)
    agent.send()
    expect(job.locator("#connection")).to_have_attribute("data-state", "live")
    expect(job.locator("#head")).to_contain_text("iteration 95")
    expect(job.locator("[data-draft=budget]")).to_have_text("Not saved: apply again")
    expect(job.locator("#budget")).to_have_value("2")
    job.get_by_role("button", name="Apply budget").click()
    expect(job.locator("#change-budget")).to_contain_text("saved v1")
    fleet.bring_to_front()
    expect(fleet.locator("#connection")).to_have_attribute("data-state", "live")
    expect(fleet.locator("#job-outlives")).to_contain_text("95")
    context.close()


DEAF = """(() => {
  const now = Date.now.bind(Date);
  window.later = 0;
  Date.now = () => now() + window.later;
  window.EventSource = class extends EventSource {
    constructor(url) {
      super(url);
      window.opened = (window.opened ?? 0) + 1;
    }
    addEventListener(name, call) {
      super.addEventListener(name, (event) => window.deaf || call(event));
    }
  };
})()"""


def test_a_stream_that_falls_silent_without_an_error_is_opened_again(chromium: Browser, served: Served) -> None:
    reported(served, "silent")
    context = chromium.new_context()
    context.add_init_script(DEAF)
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    page = context.new_page()
    page.goto(f"{served.url}/jobs/silent")
    chip = page.locator("#connection")
    expect(chip).to_have_attribute("data-state", "live")
    page.evaluate("Object.assign(window, { deaf: true, later: 16_000 })")
    expect(chip).to_have_attribute("data-state", re.compile("reconnecting|stale"))
    assert page.evaluate("window.opened") >= 2
    page.evaluate("window.deaf = false")
    expect(chip).to_have_attribute("data-state", "live")
    context.close()


@pytest.mark.parametrize("path", ["/jobs/unanswered", "/"])
def test_a_page_whose_questions_are_refused_says_so_though_its_stream_lives(
    open_page: Open, served: Served, path: str
) -> None:
    agent = reported(served, "unanswered")
    page = open_page(path, expected=("status of 503",))
    chip = page.locator("#connection")
    expect(chip).to_have_attribute("data-state", "live")
    page.route("**/live?*", lambda route: route.fulfill(status=503))
    agent.train(1)
    agent.send()
    expect(chip).to_have_text(re.compile(r"No answer\d+ s|Stale since .*"))
    page.evaluate("(now => { Date.now = () => now() + 21_000; })(Date.now.bind(Date))")
    expect(chip).to_have_attribute("data-state", "stale")
    page.unroute("**/live?*")
    expect(chip).to_have_attribute("data-state", "live")


STATES_OF_THE_CHIP = """() => {
  const chip = document.querySelector("#connection");
  window.states = [];
  new MutationObserver(() => states.push(chip.dataset.state)).observe(chip, { attributeFilter: ["data-state"] });
}"""


def test_the_connection_does_not_alternate_while_ticks_arrive_and_requests_fail(
    open_page: Open, served: Served
) -> None:
    agent = reported(served, "flapping")
    page = open_page("/jobs/flapping", expected=("ERR_FAILED", "Failed to fetch"))
    chip = page.locator("#connection")
    expect(chip).to_have_attribute("data-state", "live")
    page.evaluate(STATES_OF_THE_CHIP)
    page.route("**/live?*", lambda route: route.abort())
    for _ in range(5):
        with page.expect_request("**/live?*"):
            agent.train(1)
            agent.send()
    expect(chip).to_have_attribute("data-state", "reconnecting")
    assert page.evaluate("states") == ["reconnecting"]
    page.unroute("**/live?*")
    expect(chip).to_have_attribute("data-state", "live")


def test_a_question_that_is_never_answered_is_shown(open_page: Open, served: Served) -> None:
    agent = reported(served, "unending")
    page = open_page("/jobs/unending", expected=("htmx:error: timeout",))
    chip = page.locator("#connection")
    expect(chip).to_have_attribute("data-state", "live")
    held: list[Route] = []
    page.route("**/live?*", lambda route: held.append(route))
    with page.expect_request("**/live?*"):
        agent.train(1)
        agent.send()
    page.evaluate("(now => { Date.now = () => now() + 9_000; })(Date.now.bind(Date))")
    expect(chip).to_have_text(re.compile(r"No answer\d+ s|Stale since .*"))
    page.unroute("**/live?*")
    for route in held:
        with suppress(Error):  # the page may have given it up meanwhile
            route.continue_()
    expect(chip).to_have_attribute("data-state", "live")


GROUPS = """() => {
  const row = (name) => `<tr id="job-${name}"><td><a href="#">${name}</a></td></tr>`;
  const group = (...names) => `<tbody><tr class="group-row"></tr>${names.map(row).join("")}</tbody>`;
  const swap = (when) => document.dispatchEvent(new CustomEvent(`htmx:${when}:swap`, { detail: { ctx: {} } }));
  const fleet = document.querySelector("#fleet");
  fleet.innerHTML = `<table class="jobs">${group("a", "b")}${group("c", "d")}</table>`;
  fleet.querySelector("a").focus();
  swap("before");
  const [first, second] = fleet.querySelector("table").tBodies;
  first.append(first.rows[1], document.querySelector("#job-d"));
  second.insertAdjacentHTML("beforeend", row("e"));
  swap("after");
  return [first, second].map((one) => [...one.rows].map((each) => each.id.slice(4)).join());
}"""


def test_a_row_that_is_held_in_its_place_stays_within_its_group(open_page: Open, served: Served) -> None:
    reported(served, "grouped")
    page = open_page("/")
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    assert page.evaluate(GROUPS) == [",a,b,d", ",c,e"]


def test_what_is_not_copied_is_selected_and_said_to_be(open_page: Open, served: Served) -> None:
    reported(served, "by-hand")
    page = open_page("/")
    copied = """() => new Promise((resolve) => {
      Object.defineProperty(navigator, "clipboard", { value: undefined });
      const html = '<code id="word">holdfast</code><button id="copy" data-copy="#word">Copy</button>';
      document.querySelector("main").insertAdjacentHTML("beforeend", html);
      const button = document.querySelector("#copy");
      new MutationObserver(() => resolve(button.textContent)).observe(button, { childList: true });
      button.click();
    })"""
    assert page.evaluate(copied) == "Selected; press Ctrl+C"
    assert page.evaluate("String(getSelection())") == "holdfast"


def test_all_keys_and_the_button_that_closes_them_fit_the_window(open_page: Open, served: Served) -> None:
    reported(served, "keys-fit")
    page = open_page("/jobs/keys-fit")
    expect(page.locator("#timeline")).to_have_attribute("data-state", "drawn")
    page.keyboard.press("?")
    expect(page.get_by_role("button", name="Close", exact=True)).to_be_in_viewport(ratio=1)
    expect(page.locator("#keys kbd", has_text="U")).to_be_in_viewport(ratio=1)


def test_without_scripts_a_page_has_no_empty_room_and_no_dead_buttons(open_page: Open, served: Served) -> None:
    reported(served, "plain")
    page = open_page("/jobs/plain", scripts=False)
    expect(page.get_by_role("heading", name="Timeline")).to_be_visible()
    for dead in ("#connection", "#timeline .tools", "#timeline .lanes", "#timeline .overview"):
        expect(page.locator(dead)).to_be_hidden()
    for panel in ("goodput", "stalls"):
        box = page.locator(f"#{panel}").bounding_box()
        assert box
        assert box["height"] < 120


def test_a_panel_whose_first_load_failed_is_loaded_later(open_page: Open, served: Served) -> None:
    agent = reported(served, "retried")
    page = open_page("/", expected=("ERR_FAILED", "Failed to fetch"))
    page.route("**/stalls", lambda route: route.abort())
    page.goto(page.url + "jobs/retried")
    page.locator("#stalls").scroll_into_view_if_needed()
    expect(page.locator("#stalls")).to_have_attribute("data-failed", "")
    page.unroute("**/stalls")
    page.evaluate("(now => { Date.now = () => now() + 16_000; })(Date.now.bind(Date))")
    agent.train(1)
    agent.send()
    expect(page.locator("#stalls .panel-head")).to_be_visible()
