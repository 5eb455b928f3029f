"""Pinning and labelling from the page of a checkpoint, without scripts and with."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape

import pytest
from fake_agent import FakeAgent
from playwright.sync_api import Page, expect
from starlette.testclient import TestClient

from conftest import Served
from holdfast import protocol

POINT = "000000000120-1"
JOB = "/jobs/char-gpt"
PAGE = f"{JOB}/checkpoints/{POINT}"
Open = Callable[..., Page]


def words(html: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html)))


def test_a_checkpoint_is_pinned_and_unpinned_from_its_page(client: TestClient, agent: FakeAgent) -> None:
    page = client.get(PAGE).text
    assert "not pinned" in page
    assert ">Pin</button>" in page
    done = client.post(f"{PAGE}/pin", data={"pinned": "true"})
    assert (done.status_code, done.headers["location"]) == (303, f"{PAGE}#keep")
    page = client.get(PAGE).text
    assert "pinned by operator" in words(page)
    assert ">Unpin</button>" in page
    row = client.get(JOB).text.partition(f'id="row-{POINT}"')[2].partition("</tr>")[0]
    assert 'title="pinned by operator: retention leaves it">★' in row
    client.post(f"{PAGE}/pin", data={"pinned": "false"})
    assert "not pinned" in client.get(PAGE).text
    assert client.get(f"/api/v1{JOB}/desired").json()["pins"] == []


def test_how_far_a_pin_has_come_is_said_and_not_guessed(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{PAGE}/pin", data={"pinned": "true"})
    assert "pin: saved v1 → on its way to the job" in words(client.get(PAGE).text)
    agent.events.append(protocol.Applied(at=agent.at, version=1, iteration=401, lineage=1))
    agent.send()
    assert "pin: saved v1 → applied at iteration 401" in words(client.get(PAGE).text)
    other = words(client.get(f"{JOB}/checkpoints/000000000160-1").text)
    assert "saved v1" not in other


def test_the_history_tells_who_pinned(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{PAGE}/pin", data={"pinned": "true"})
    assert f"pin {POINT}" in words(client.get(f"{JOB}/history").text)


def test_a_label_is_shown_on_the_page_and_in_the_list(client: TestClient, agent: FakeAgent) -> None:
    done = client.post(f"{PAGE}/label", data={"label": "<b>before</b>"})
    assert done.status_code == 303
    for page in (PAGE, JOB):
        assert "&lt;b&gt;before&lt;/b&gt;" in client.get(page).text
    client.post(f"{PAGE}/label", data={"label": ""})
    assert "before" not in client.get(JOB).text.partition(f'id="row-{POINT}"')[2].partition("</tr>")[0]


def test_a_label_that_cannot_be_stands_in_its_field_with_the_reason(client: TestClient, agent: FakeAgent) -> None:
    refused = client.post(f"{PAGE}/label", data={"label": "x" * 65})
    assert refused.status_code == 422
    assert f'value="{"x" * 65}"' in refused.text
    assert "a label has at most 64 characters, and this one 65" in refused.text


def test_what_is_not_in_the_store_is_not_offered_a_pin_and_refused_one(
    client: TestClient, agent: FakeAgent
) -> None:
    agent.events.append(protocol.Inventory(at=agent.at, checkpoints=["000000000400-1"]))
    agent.send()
    assert ">Pin</button>" not in client.get(PAGE).text
    refused = client.post(f"{PAGE}/pin", data={"pinned": "true"})
    assert refused.status_code == 422
    assert "is missing: one that is durable can be pinned" in words(refused.text)
    assert client.post(f"{JOB}/checkpoints/000000000121-1/pin", data={"pinned": "true"}).status_code == 422


@pytest.mark.browser
def test_a_pin_and_a_label_show_on_the_timeline(served: Served, open_page: Open) -> None:
    agent = served.agent("pinned")
    agent.start()
    agent.train(15)
    agent.pace()
    agent.train(385)
    agent.send()
    page = open_page(f"/jobs/pinned/checkpoints/{POINT}", scripts=False)
    page.get_by_role("button", name="Pin", exact=True).click()
    page.get_by_label("Label").fill("before the new data")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Iteration 120 before the new data")
    expect(page.get_by_role("button", name="Unpin")).to_be_visible()

    page = open_page(f"/jobs/pinned?sel={POINT}")
    name = "Iteration 120, before the new data, pinned, durable, lineage 1"
    expect(page.get_by_role("option", name=name)).to_have_count(1)
    expect(page.locator("[data-part=selected-facts]")).to_contain_text("before the new data · pinned · durable")
    page.locator("[data-part=selection]").get_by_role("link", name="Iteration 120").click()
    expect(page.get_by_role("button", name="Unpin")).to_be_visible()
