"""The end of a sign-in while a page is open: the page and what was typed stay, and a sign-in leads back."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from playwright.sync_api import Browser, Page, expect

from holdfast_server.core.settings import ServerSettings
from tests.support.fake_agent import FakeAgent, over_client
from tests.support.web_fixtures import PATIENCE_MILLISECONDS, serving

pytestmark = pytest.mark.browser

TOKEN = "a-shared-secret-of-some-length"
JOB = "/jobs/expiring"
POINT = "000000000040-1"


@dataclass
class SignedInBrowser:
    """A browser that is signed in to a server with a shared secret."""

    url: str
    browser: Browser
    scripts: bool = True

    def __post_init__(self) -> None:
        self.context = self.browser.new_context(
            viewport={"width": 1440, "height": 900}, java_script_enabled=self.scripts
        )
        self.context.set_default_timeout(PATIENCE_MILLISECONDS)
        self.sign_in(self.context.new_page())

    def sign_in(self, page: Page, then: str = "/") -> None:
        page.goto(f"{self.url}/login?next={then}")
        submit_token(page)
        page.close()

    def open(self, path: str) -> Page:
        page = self.context.new_page()
        page.goto(self.url + path)
        return page

    def sign_out(self) -> None:
        self.context.clear_cookies()


def submit_token(page: Page) -> None:
    page.get_by_label("Shared secret").fill(TOKEN)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(lambda url: "/login" not in url)


@pytest.fixture(scope="module")
def locked_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    database = str(tmp_path_factory.mktemp("locked") / "holdfast.db")
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    with (
        serving(ServerSettings(database=database, token=TOKEN)) as served,
        httpx2.Client(base_url=served.url, headers=bearer, timeout=60) as client,
    ):
        agent = FakeAgent(over_client(client), job="expiring", started_at=time.time() - 60)
        agent.start()
        agent.train(15)
        agent.pace()
        agent.train(85)
        agent.send()
        yield served.url


@pytest.fixture
def signed_in(chromium: Browser, locked_url: str) -> Iterator[SignedInBrowser]:
    browser = SignedInBrowser(locked_url, chromium)
    yield browser
    browser.context.close()


def expect_signed_out(page: Page, path: str) -> None:
    expect(page.locator("#signed-out")).to_be_visible()
    expect(page).to_have_url(re.compile(re.escape(path)))


def test_a_typed_budget_is_still_there_after_a_sign_in_in_the_same_tab(signed_in: SignedInBrowser) -> None:
    page = signed_in.open(f"{JOB}?points=3")
    page.get_by_label("Budget", exact=True).fill("2.25")
    signed_in.sign_out()
    page.get_by_role("button", name="Apply budget").click()
    expect_signed_out(page, JOB)
    expect(page.get_by_text("Not saved: signed out")).to_be_visible()
    expect(page.get_by_label("Budget", exact=True)).to_have_value("2.25")
    page.get_by_role("link", name="Sign in").click()
    submit_token(page)
    expect(page).to_have_url(re.compile(re.escape(f"{JOB}?points=3")))
    expect(page.get_by_label("Budget", exact=True)).to_have_value("2.25")
    expect(page.locator("#signed-out")).to_be_hidden()
    page.get_by_role("button", name="Apply budget").click()
    expect(page.locator("#change-budget")).to_contain_text("saved")


def test_a_sign_in_in_another_tab_takes_the_banner_away(signed_in: SignedInBrowser) -> None:
    page = signed_in.open(JOB)
    page.get_by_label("Budget", exact=True).fill("4.5")
    signed_in.sign_out()
    page.get_by_role("button", name="Checkpoint now").click()
    expect_signed_out(page, JOB)
    signed_in.sign_in(signed_in.context.new_page())
    expect(page.locator("#signed-out")).to_be_hidden()
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    expect(page.get_by_label("Budget", exact=True)).to_have_value("4.5")


@pytest.mark.parametrize("path", ["/", JOB, "/alerts", f"{JOB}/attempts/1"])
def test_an_idle_page_stays(signed_in: SignedInBrowser, locked_url: str, path: str) -> None:
    page = signed_in.open(path)
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    signed_in.sign_out()
    page.context.set_offline(True)
    page.context.set_offline(False)
    expect_signed_out(page, path)
    expect(page.locator("#connection")).to_contain_text("Signed out")
    expect(page.locator("main")).not_to_be_empty()


def test_a_form_that_leaves_the_page_stays_with_its_text(signed_in: SignedInBrowser) -> None:
    path = f"{JOB}/checkpoints/{POINT}"
    page = signed_in.open(path)
    page.get_by_label("Label", exact=True).fill("before the new schedule")
    signed_in.sign_out()
    page.get_by_label("Label", exact=True).press("Enter")
    expect_signed_out(page, path)
    page.get_by_role("link", name="Sign in").click()
    submit_token(page)
    expect(page).to_have_url(re.compile(re.escape(path)))
    expect(page.get_by_label("Label", exact=True)).to_have_value("before the new schedule")


def test_what_is_typed_in_a_dialog_stays(signed_in: SignedInBrowser) -> None:
    page = signed_in.open(JOB)
    expect(page.locator("#timeline")).to_have_attribute("data-state", "drawn")
    page.keyboard.press("m")
    text = page.get_by_role("dialog").get_by_label("Text")
    text.fill("a worse tokenizer")
    signed_in.sign_out()
    text.press("Enter")
    expect(page.get_by_role("dialog").locator("#signed-out")).to_be_visible()
    expect(text).to_have_value("a worse tokenizer")
    page.get_by_role("link", name="Sign in").click()
    submit_token(page)
    expect(page.locator("#timeline")).to_have_attribute("data-state", "drawn")
    page.keyboard.press("m")
    expect(text).to_have_value("a worse tokenizer")


def test_typed_values_are_forgotten_where_the_sign_in_did_not_end(signed_in: SignedInBrowser) -> None:
    page = signed_in.open(JOB)
    field = page.get_by_label("Budget", exact=True)
    saved = field.input_value()
    field.fill("7.5")
    page.goto(signed_in.url)
    page.goto(signed_in.url + JOB)
    expect(field).to_have_value(saved)


def test_without_scripts_a_form_leads_back_to_its_page(chromium: Browser, locked_url: str) -> None:
    signed_in = SignedInBrowser(locked_url, chromium, scripts=False)
    page = signed_in.open(JOB)
    signed_in.sign_out()
    page.get_by_role("button", name="Apply budget").click()
    expect(page).to_have_url(re.compile(re.escape(f"/login?next={JOB}")))
    submit_token(page)
    expect(page).to_have_url(re.compile(re.escape(JOB)))
    signed_in.context.close()


def one_time_link(url: str, database: str, *command: str) -> str:
    options = ["--db", database, "--address", url, "--json"]
    shown = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "user", *command, *options], capture_output=True, check=True
    )
    return str(json.loads(shown.stdout)["link"])


def test_a_visitor_without_a_sign_in_chooses_a_password_by_a_link(chromium: Browser, tmp_path: Path) -> None:
    database = str(tmp_path / "holdfast.db")
    with serving(ServerSettings(database=database, accounts=True)) as served:
        page = chromium.new_page()
        page.goto(one_time_link(served.url, database, "setup-link"))
        page.get_by_label("Name").fill("ada")
        page.get_by_label("Password").fill("a sentence of some words")
        page.get_by_role("main").get_by_role("button").click()
        expect(page).to_have_url(f"{served.url}/")
        page.close()

        page = chromium.new_page()
        page.goto(one_time_link(served.url, database, "reset-link", "ada"))
        page.get_by_label("New password").fill("another sentence of words")
        page.get_by_role("main").get_by_role("button").click()
        expect(page).to_have_url(f"{served.url}/")
        page.close()
