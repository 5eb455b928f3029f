"""What agents and people may write, as those would write it who want a page to run it: shown as text, no more."""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import quote

import msgspec
import pytest
from playwright.sync_api import Browser, Page, expect

from holdfast.protocol import wire
from tests.support.fake_agent import FakeAgent
from tests.support.web_fixtures import Served

pytestmark = pytest.mark.browser

Open = Callable[..., Page]
CORPUS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "'-alert(3)-'",
    "<svg/onload=alert(4)>",
    "{{ 7 * 7 }}${7*7}",
    "</title></textarea></style><iframe srcdoc='<script>parent.alert(5)</script>'>",
    "javascript:alert(6)//",
    '<a href="javascript:alert(7)" autofocus onfocus=alert(8)>x</a>',
    "<hx-partial hx-target='body'><b>taken</b></hx-partial>",
    "<div hx-get='/' hx-trigger='load' hx-on:click='alert(9)'>",
    "\u202e<b>reversed\u2066",
    "<math><mtext><table><mglyph><style><img src=x onerror=alert(10)>",
)
PATHS = (
    "/",
    "/jobs/hostile",
    "/jobs/hostile/plan",
    "/jobs/hostile/goodput",
    "/jobs/hostile/stalls",
    "/alerts",
    "/audit",
)


def hostile(served: Served) -> FakeAgent:
    agent = served.agent("hostile", started_at=time.time() - 200)
    text = "".join(CORPUS)
    agent.start(previous_exit=text, resumed_from=None)
    started = agent.events[0]
    assert isinstance(started, wire.AttemptStarted)
    agent.events[0] = msgspec.structs.replace(started, host=text, versions={text: text})
    agent.train(15)
    agent.pace()
    agent.train(200)
    for name in CORPUS:
        agent.samples.metrics[name] = [1.0] * len(agent.samples.metrics["loss"])
        notice = wire.Notice(
            at=agent.at, iteration=agent.iteration, lineage=1, level="error", code=name, message=name
        )
        agent.events.append(notice)
    paced = next(event for event in reversed(agent.events) if isinstance(event, wire.IntervalDecision))
    agent.events.append(msgspec.structs.replace(paced, policy=CORPUS[0], reason=text))
    made = agent._checkpoint("scheduled")
    agent.open.clear()
    agent.events.append(msgspec.structs.replace(made, state="failed", reason=text))
    agent.send()
    agent.fail(text)
    agent.supervise("gave_up", text, start=5)
    return agent


def watched(page: Page, served: Served) -> list[str]:
    """What a page did that it must not do: dialogs, breaches of its policy, requests to elsewhere."""
    seen: list[str] = []
    page.on("dialog", lambda dialog: (seen.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: None if request.url.startswith(served.url) else seen.append(request.url))
    page.expose_function("reportBreach", lambda breach: seen.append(f"policy {breach}"))
    page.add_init_script(
        "addEventListener('securitypolicyviolation', (event) => reportBreach(`${event.violatedDirective} "
        "${event.blockedURI} ${event.sample}`))"
    )
    return seen


def test_hostile_words_are_shown_and_not_run(chromium: Browser, served: Served) -> None:
    hostile(served)
    context = chromium.new_context()
    page = context.new_page()
    seen = watched(page, served)
    for path in (
        *PATHS,
        *(f"/?search={quote(text)}" for text in CORPUS),
        *(f"/audit?who={quote(text)}" for text in CORPUS),
    ):
        page.goto(served.url + path)
        assert page.locator("iframe, mglyph, [onerror], [onload], [onfocus], [hx-on\\:click]").count() == 0, path
    page.goto(f"{served.url}/jobs/hostile")
    expect(page.locator("#timeline")).to_have_attribute("data-state", "drawn")
    expect(page.locator("#history")).to_contain_text(CORPUS[-1])
    expect(page.locator(".outcome")).to_contain_text("<script>alert(1)</script>")
    page.mouse.move(500, 500)
    page.keyboard.press("t")
    expect(page.locator("[data-part=tables]")).to_be_visible()
    page.locator("#budget").fill(CORPUS[1])
    page.get_by_role("button", name="Apply budget").click()
    expect(page.locator("#budget-error")).to_be_visible()
    page.get_by_label("Restore to iteration").fill(CORPUS[3])
    page.get_by_role("button", name="Find").click()
    expect(page.get_by_role("dialog")).to_contain_text("is not an iteration")
    assert seen == []
    context.close()


def test_the_watch_would_see_what_it_watches_for(chromium: Browser, served: Served) -> None:
    context = chromium.new_context()
    page = context.new_page()
    seen = watched(page, served)
    page.goto(f"{served.url}/")
    page.evaluate("alert(1)")
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=alert(2)>')")
    page.evaluate(
        "new Promise((resolve) => { addEventListener('securitypolicyviolation', resolve, {once: true}); "
        "fetch('http://127.0.0.1:9/').catch(() => null); }).then(() => null)"
    )
    assert any(one.startswith("dialog") for one in seen)
    assert any(one.startswith("policy") for one in seen)
    context.close()
