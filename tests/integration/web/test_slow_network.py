"""What a page shows while an answer of the server is still on its way: a test holds it back."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, Route, expect

from tests.support.web_fixtures import Served

pytestmark = pytest.mark.browser

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def job(served: Served) -> str:
    agent = served.agent("slowly", started_at=time.time() - 60)
    agent.start()
    agent.train(15)
    agent.pace()
    agent.train(185)
    agent.send()
    return "/jobs/slowly"


class HeldAnswers:
    """The answers of an address, which a test sends on."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.routes = page, list[Route]()
        page.route(re.compile(url), lambda route: self.routes.append(route))

    def first(self) -> Route:
        while not self.routes:
            self.page.evaluate("0")  # lets playwright handle its events
        return self.routes.pop(0)


@pytest.mark.parametrize("width", [1440, 390])
def test_that_the_timeline_is_loading_is_written_where_it_appears(open_page: Open, job: str, width: int) -> None:
    page = open_page("/login", width=width)
    held = HeldAnswers(page, r"/timeline\?")
    page.goto(page.url.removesuffix("/login") + job, wait_until="domcontentloaded")
    loading = page.get_by_text("Loading the timeline…")
    expect(loading).to_be_visible()
    box, lanes = loading.bounding_box(), page.locator(".lanes").bounding_box()
    assert box
    assert lanes
    assert lanes["y"] < box["y"] < lanes["y"] + 100
    if width == 1440:
        assert box["y"] < 900
    tools = page.get_by_role("toolbar", name="Timeline", include_hidden=True)
    expect(tools).to_have_attribute("inert", "")
    held.first().continue_()
    expect(page.locator("#timeline")).to_have_attribute("data-state", "drawn")
    expect(loading).to_be_hidden()
    expect(tools).not_to_have_attribute("inert", "")
    page.unroute_all(behavior="ignoreErrors")


def test_the_restore_dialog_opens_at_once(open_page: Open, job: str) -> None:
    page = open_page(job)
    held = HeldAnswers(page, r"/restore\?")
    page.get_by_role("link", name="Restore iteration 160, lineage 1").click()
    dialog = page.get_by_role("dialog", name="Loading…")
    expect(dialog).to_be_visible()
    held.first().continue_()
    dialog = page.get_by_role("dialog", name="Restore slowly to iteration 160?")
    expect(dialog).to_be_visible()
    expect(dialog.get_by_role("link", name="Cancel")).to_be_focused()


def test_a_dialog_that_was_closed_while_it_loaded_stays_closed(open_page: Open, job: str) -> None:
    page = open_page(job)
    held = HeldAnswers(page, r"/restore\?")
    page.get_by_role("link", name="Restore iteration 160, lineage 1").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    with page.expect_response(re.compile(r"/restore\?")) as answer:
        held.first().continue_()
    answer.value.finished()
    page.unroute_all(behavior="wait")
    page.get_by_role("link", name="Restore iteration 120, lineage 1").click()
    expect(page.get_by_role("dialog", name="Restore slowly to iteration 120?")).to_be_visible()


def test_a_dialog_without_an_answer_closes_and_says_so(open_page: Open, job: str) -> None:
    page = open_page(job, expected=("net::ERR_FAILED", "htmx:error"))
    held = HeldAnswers(page, r"/restore\?")
    page.get_by_role("link", name="Restore iteration 160, lineage 1").click()
    expect(page.get_by_role("dialog", name="Loading…")).to_be_visible()
    held.first().abort()
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.get_by_text("The server cannot be reached.")).to_be_visible()
