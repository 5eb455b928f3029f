"""Every page at every width of a window, and zoomed: nothing reaches beyond the window, no control is cut."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from tests.support.web_fixtures import Served

pytestmark = pytest.mark.browser

Open = Callable[..., Page]
JOB = "/jobs/wide"
POINT = "000000000400-1"
WIDTHS = (360, 390, 576, 720, 768, 960, 1024, 1152, 1200, 1440, 1920)
"""Of phones, tablets and laptops; 1440 pixels at 125, 150 and 200 % are 1152, 960 and 720."""
PAGES = [
    "/", "/?group=project&sort=risk", "/login", "/alerts?state=all", "/audit", "/settings",
    "/projects/default/alert-rules", "/projects/default/alert-channels", JOB, f"{JOB}/plan",
    f"{JOB}/goodput?window=all", f"{JOB}/stalls", f"{JOB}/ranks", f"{JOB}/restore?checkpoint={POINT}",
    f"{JOB}/checkpoints/{POINT}?with=000000000360-1",
]  # fmt: skip
CUT = """() => [...document.querySelectorAll("button, a, select, th, td, .button")].filter((element) =>
  element.offsetParent && getComputedStyle(element).overflowX !== "visible"
  && element.scrollWidth > element.clientWidth + 1).map((element) => element.outerHTML)"""


@pytest.fixture(scope="module")
def many(served: Served) -> Served:
    """Jobs of different names and states."""
    agent = served.agent("wide", started_at=time.time() - 300)
    agent.start()
    agent.train(15)
    agent.pace()
    agent.train(585)
    agent.crash(12)
    agent.train(100)
    agent.send()
    for name in ("sweep-000", "a-job-whose-name-is-as-long-as-a-name-may-be-in-a-fleet-of-many-jobs-with-seeds-1"):
        other = served.agent(name, started_at=time.time() - 300)
        other.start()
        other.train(30)
        other.send()
    return served


@pytest.mark.parametrize("path", PAGES)
def test_nothing_is_wider_than_the_window_or_cut(many: Served, open_page: Open, path: str) -> None:
    page = open_page(path)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width, width
        assert page.evaluate(CUT) == [], width


def test_in_a_row_of_the_fleet_the_focus_is_seen_at_what_has_it(many: Served, open_page: Open) -> None:
    page = open_page("/")
    row = page.locator("#job-wide")
    looks = []
    for control in (row.locator(".select-row"), row.locator(".job-name")):
        page.keyboard.press("Tab")  # focus by script is shown as it is after a key
        control.focus()
        looks.append(row.screenshot())
    assert looks[0] != looks[1]
