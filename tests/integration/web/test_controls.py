"""Changing a job from its page in a real browser: how far a change has come, taking it back, and two at once."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from holdfast.protocol.value_rules import define
from holdfast.protocol.values import ValueReport
from tests.support.fake_agent import FakeAgent
from tests.support.web_fixtures import Served

pytestmark = pytest.mark.browser

Open = Callable[..., Page]


@pytest.fixture
def agent(served: Served, request: pytest.FixtureRequest) -> FakeAgent:
    name = re.sub(r"[^a-z0-9-]", "-", request.node.name.lower())[:80]
    agent = served.agent(name, started_at=time.time() - 100)
    agent.start()
    agent.train(15)
    agent.pace()
    agent.train(185)
    agent.send()
    return agent


def live(open_page: Open, agent: FakeAgent, **options: object) -> Page:
    page = open_page(f"/jobs/{agent.job}", **options)
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    expect(page.locator("#timeline")).to_have_attribute("data-state", "drawn")  # nothing moves any more
    return page


def ask_for_more(agent: FakeAgent, after: int) -> None:
    """The long poll of an agent that holds a version."""
    agent.ask(f"/api/v1/jobs/{agent.job}/desired?after={after}&wait=0.01")


def test_a_change_is_a_draft_then_saved_then_delivered_then_applied_then_taken_back(
    open_page: Open, agent: FakeAgent
) -> None:
    page = live(open_page, agent)
    line = page.locator("#change-budget")
    page.locator("#budget").fill("1")
    expect(page.locator("[data-draft=budget]")).to_have_text("Not saved yet")
    page.get_by_role("button", name="Apply budget").click()
    expect(line).to_contain_text("saved v1 → waiting for delivery")
    expect(page.locator("[data-draft=budget]")).to_be_hidden()
    ask_for_more(agent, 1)
    expect(line).to_contain_text("delivered, applies at the next iteration")
    agent.obey(agent.desired())
    agent.train(70)
    agent.send()
    expect(line).to_contain_text("applied at iteration 200")
    expect(line).to_contain_text("of them since the change")
    page.get_by_role("button", name="Undo budget").click()
    expect(line).to_contain_text("saved v2")
    expect(page.locator("#budget")).to_have_value("1")
    assert agent.desired().budget is None


TYPE_MEANWHILE = """() => {
  const fetch = window.fetch;
  window.fetch = (...asked) => {
    if (String(asked[0]?.url ?? asked[0]).endsWith("/controls")) {
      const field = document.querySelector("#every");
      field.value = "50";
      field.dispatchEvent(new Event("input", { bubbles: true }));
      document.body.dataset.asked = "for the controls";
    }
    return fetch(...asked);
  };
}"""


def test_what_is_typed_while_the_controls_are_on_their_way_stays(open_page: Open, agent: FakeAgent) -> None:
    page = live(open_page, agent)
    page.evaluate(TYPE_MEANWHILE)
    page.evaluate("() => htmx.trigger('#controls', 'holdfast:controls')")
    expect(page.locator("body")).to_have_attribute("data-asked", "for the controls")
    expect(page.locator("#every-preview")).to_contain_text("50 iterations")
    expect(page.locator("#every")).to_have_value("50")


def test_a_policy_with_its_reason_and_an_interval_for_a_while(open_page: Open, agent: FakeAgent) -> None:
    page = live(open_page, agent)
    expect(page.locator("#why-interval")).to_contain_text("a checkpoint costs 320 ms")
    page.get_by_label("Policy", exact=True).select_option("goodput")
    page.get_by_role("button", name="Apply policy", exact=True).click()
    expect(page.locator("#change-policy")).to_contain_text("saved v1")
    page.locator("#every").fill("50")
    expect(page.locator("#every-preview")).to_contain_text("50 iterations")
    page.get_by_label("Duration", exact=True).select_option("2 h")
    page.get_by_role("button", name="Apply interval").click()
    expect(page.get_by_text("Fixed at every 50 iterations until")).to_be_visible()
    desired = agent.desired()
    assert (desired.policy, desired.every) == ("goodput", 50)


def test_who_comes_second_to_a_restore_is_shown_who_was_first(open_page: Open, agent: FakeAgent) -> None:
    first, second = live(open_page, agent), live(open_page, agent)
    for page, iteration in ((first, 80), (second, 120)):
        page.get_by_role("link", name=f"Restore iteration {iteration}, lineage 1").click()
        expect(page.get_by_role("dialog")).to_contain_text("attempt 1 is running on node-3, 1 rank, supervised")
        expect(page.get_by_role("dialog")).to_contain_text("All bytes are checked against their digests")
    first.get_by_role("button", name="Restore to 80").click()
    expect(first.locator("#restore-status")).to_contain_text("Restoring to iteration 80")
    expect(second.locator("#restore-status")).to_contain_text("Restoring to iteration 80")
    second.get_by_role("button", name="Restore to 120").click()
    refusal = second.get_by_role("dialog").get_by_role("alert")
    expect(refusal).to_contain_text("a restore to iteration 80 is")
    second.keyboard.press("Escape")
    second.get_by_role("button", name="Cancel").click()
    expect(first.locator("#restore-status")).to_contain_text("cancelled")
    assert agent.desired().restore is None


@pytest.mark.parametrize("width", [1440, 390])
def test_the_progress_of_a_restore_and_its_cancel_button_stay_in_view(
    open_page: Open, agent: FakeAgent, width: int
) -> None:
    page = live(open_page, agent, width=width)
    row = page.get_by_role("link", name="Restore iteration 80, lineage 1")
    row.click()
    page.get_by_role("button", name="Restore to 80").click()
    cancel = page.locator("#restore-status").get_by_role("button", name="Cancel")
    expect(cancel).to_be_in_viewport(ratio=1)
    expect(page.locator("#restore-status li[aria-current=step]")).to_be_in_viewport(ratio=1)
    page.evaluate("scrollTo(0, 0)")
    expect(cancel).to_be_in_viewport(ratio=1)
    agent.obey(agent.desired())
    agent.send()
    expect(page.locator("#restore-status").get_by_role("link", name="Undo")).to_be_in_viewport(ratio=1)


def test_the_controls_follow_what_the_agent_applied(open_page: Open, agent: FakeAgent) -> None:
    page = live(open_page, agent)
    head = page.locator("[aria-labelledby=budget-title] .window")
    expect(head).to_contain_text("3.5 %")
    page.locator("#budget").fill("2.1")
    page.get_by_role("button", name="Apply budget").click()
    expect(page.locator("#change-budget")).to_contain_text("saved v1")
    expect(head).to_contain_text("3.5 %")
    agent.obey(agent.desired())
    agent.send()
    expect(page.locator("#kpis")).to_contain_text("of 2.1 % budget")
    expect(head).to_contain_text("2.1 %")
    expect(page.locator("#every")).to_have_value(str(agent.interval))
    expect(page.locator("#budget-preview td").first).to_have_text("")
    expect(page.locator("#budget-preview tbody tr").first).to_contain_text(f"{agent.interval} iterations")


UNDER_THE_POINTER = """() => new Promise((resolve) => {
  const seen = new Set();
  const [x, y] = window.clicked;
  const until = performance.now() + 1000;
  const look = () => {
    const button = document.elementFromPoint(x, y)?.closest("button");
    seen.add(button?.id ?? "");
    if (performance.now() < until) requestAnimationFrame(look);
    else resolve([...seen]);
  };
  look();
})"""


@pytest.mark.parametrize("name", ["apply-interval", "apply-policy", "apply-budget", "apply-retention"])
def test_nothing_else_comes_under_the_pointer_within_a_second_of_a_click(
    open_page: Open, agent: FakeAgent, name: str
) -> None:
    page = live(open_page, agent)
    if name == "apply-policy":
        page.locator("#policy").select_option("goodput")
    else:
        page.locator({"apply-interval": "#every", "apply-budget": "#budget"}.get(name, "#retention")).fill(
            "last 5" if name == "apply-retention" else "5"
        )
    button = page.locator(f"#{name}")
    button.evaluate("element => element.scrollIntoView({ block: 'center' })")
    page.evaluate(
        "() => addEventListener('pointerdown', (event) => (window.clicked = [event.clientX, event.clientY]))"
    )
    button.click()
    assert page.evaluate(UNDER_THE_POINTER) == [name]
    assert agent.desired().version == 1


def test_an_operator_restores_from_a_phone(open_page: Open, agent: FakeAgent) -> None:
    page = open_page(f"/?search={agent.job}", width=390)
    page.get_by_role("link", name=agent.job, exact=True).click()
    page.get_by_role("link", name="Restore iteration 80, lineage 1").click()
    button = page.get_by_role("button", name="Restore to 80")
    expect(button).to_be_in_viewport()
    button.click()
    expect(page.locator("#restore-status")).to_contain_text("Restoring to iteration 80")
    agent.obey(agent.desired())
    agent.send()
    expect(page.locator("#restore-status li[aria-current=step]")).to_contain_text("restored")
    expect(page.locator("#restore-status").get_by_role("link", name="Undo")).to_be_visible()


def test_rows_keep_their_places_while_an_operator_points_at_them(open_page: Open, served: Served) -> None:
    agents = []
    for name in ("held-a", "held-b"):
        agent = served.agent(name, started_at=time.time() - 60)
        agent.start()
        agent.train(20 if name == "held-a" else 10)
        agent.send()
        agents.append(agent)
    names = "rows => rows.map(row => row.id)"
    page = open_page("/?search=held-&sort=iteration")
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    rows = page.locator(".jobs tbody tr")
    assert rows.evaluate_all(names) == ["job-held-a", "job-held-b"]
    page.locator("#job-held-b").hover()
    agents[1].train(30)
    agents[1].send()
    expect(page.locator("#job-held-b")).to_contain_text("40")
    expect(page.get_by_text("Sorting paused")).to_be_visible()
    assert rows.evaluate_all(names) == ["job-held-a", "job-held-b"]
    page.locator("h1").hover()
    agents[1].train(1)
    agents[1].send()
    expect(page.locator("#job-held-b")).to_contain_text("41")
    expect(rows.first).to_have_id("job-held-b")


def test_a_choice_is_in_the_address_without_what_says_nothing(open_page: Open) -> None:
    page = open_page("/?search=held-&sort=&status=")
    page.get_by_label("Sort by", exact=True).select_option("unsaved")
    expect(page).to_have_url(re.compile(r"/\?sort=unsaved&search=held-$"))


def restored(agent: FakeAgent, iteration: int) -> None:
    agent.ask(f"/api/v1/jobs/{agent.job}/restores", b'{"iteration": %d}' % iteration)
    agent.obey(agent.desired())
    agent.train(20)
    agent.send()


def test_the_steps_of_a_restore_stay_open_while_the_page_is_refreshed(open_page: Open, agent: FakeAgent) -> None:
    restored(agent, 120)
    page = live(open_page, agent)
    first = page.locator("#history li").filter(has_text="to 120").locator("details")
    first.locator("summary").click()
    expect(first).to_have_attribute("open", "")
    restored(agent, 80)
    later = page.locator("#history li").filter(has_text="to 80").locator("details")
    expect(later).to_be_visible()
    expect(first).to_have_attribute("open", "")
    expect(later).not_to_have_attribute("open", "")
    first.locator("summary").click()
    restored(agent, 40)
    expect(page.locator("#history li").filter(has_text="to 40")).to_be_visible()
    expect(first).not_to_have_attribute("open", "")


@pytest.mark.parametrize(("width", "theme"), [(1440, "light"), (390, "dark")])
def test_an_operator_lowers_a_value_and_takes_it_back(
    open_page: Open, agent: FakeAgent, width: int, theme: str
) -> None:
    definition = define("lr_scale", 1.0, 0.01, 10.0, ())

    def report(value: float, change: str | None = None) -> None:
        here = {"at": agent.at, "iteration": agent.iteration, "lineage": agent.lineage}
        is_default = value == definition.default
        agent.events.append(
            ValueReport(**here, definition=definition, value=value, is_default=is_default, change=change)
        )
        agent.train(1)
        agent.send()

    page = live(open_page, agent, width=width, theme=theme)
    report(1.0)  # the page is open already
    field, line = page.get_by_label("lr_scale", exact=True), page.locator("#change-value-1")
    field.fill("20")
    page.get_by_role("button", name="Apply lr_scale").click()
    expect(page.locator("#value-1-error")).to_have_text("lr_scale is 0.01 to 10, not 20")
    slider = page.locator("#value-1-range")
    slider.evaluate("slider => { slider.value = 566; slider.dispatchEvent(new Event('input', {bubbles: true})) }")
    expect(field).to_have_value("0.5")
    page.get_by_role("button", name="Apply lr_scale").click()
    expect(line).to_contain_text("saved → waiting for delivery")
    (change,) = agent.desired().values
    ask_for_more(agent, agent.desired().version)
    expect(line).to_contain_text("delivered")
    report(0.5, change.id)
    expect(line).to_contain_text("applied at iteration 201")
    expect(page.locator("#in-force-1")).to_have_text("In force: 0.5")
    history = page.locator("#value-history")
    expect(history).to_contain_text("lr_scale 1 (script) → 0.5")
    history.get_by_role("button", name="Undo").click()
    expect(line).to_contain_text("saved → waiting for delivery")
    assert [each.value for each in agent.desired().values] == [None]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
