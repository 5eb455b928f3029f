"""Pinning and labelling from the page of a checkpoint, without scripts and with."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from html import unescape

import pytest
from playwright.sync_api import Page, expect
from starlette.testclient import TestClient

from holdfast.protocol import wire
from tests.support.clock import FakeClock
from tests.support.fake_agent import FakeAgent, over_client
from tests.support.web_fixtures import Served

POINT = "000000000120-1"
JOB = "/jobs/char-gpt"
PAGE = f"{JOB}/checkpoints/{POINT}"
Open = Callable[..., Page]


def words(html: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html)))


def test_a_checkpoint_is_pinned_and_unpinned_from_its_page(client: TestClient, agent: FakeAgent) -> None:
    page = client.get(PAGE).text
    assert "Not pinned" in page
    assert ">Pin</button>" in page
    done = client.post(f"{PAGE}/pin", data={"pinned": "true"})
    assert (done.status_code, done.headers["location"]) == (303, f"{PAGE}#retention-section")
    page = client.get(PAGE).text
    assert "Pinned by operator" in words(page)
    assert ">Unpin</button>" in page
    row = client.get(JOB).text.partition(f'id="row-{POINT}"')[2].partition("</tr>")[0]
    assert 'title="Pinned by operator; retention keeps it">★' in row
    client.post(f"{PAGE}/pin", data={"pinned": "false"})
    assert "Not pinned" in client.get(PAGE).text
    assert client.get(f"/api/v1{JOB}/desired").json()["pins"] == []


def test_how_far_a_pin_has_come_is_shown_and_not_guessed(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{PAGE}/pin", data={"pinned": "true"})
    assert "pin: saved v1 → waiting for delivery" in words(client.get(PAGE).text)
    agent.events.append(wire.DesiredStateApplied(at=agent.at, version=1, iteration=401, lineage=1))
    agent.send()
    assert "pin: saved v1 → applied at iteration 401" in words(client.get(PAGE).text)
    other = words(client.get(f"{JOB}/checkpoints/000000000160-1").text)
    assert "saved v1" not in other


def test_the_history_shows_who_pinned(client: TestClient, agent: FakeAgent) -> None:
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
    assert "a label has at most 64 characters; this one has 65" in refused.text


def test_what_is_not_in_the_store_is_not_offered_a_pin_and_refused_one(
    client: TestClient, agent: FakeAgent
) -> None:
    agent.events.append(wire.Inventory(at=agent.at, checkpoints=["000000000400-1"]))
    agent.send()
    page = client.get(PAGE).text
    for offer in (">Pin</button>", 'id="label"', 'id="compare"', 'id="verify"'):
        assert offer not in page
    assert "It is no longer in the store; its measurements stay here." in words(page)
    refused = client.post(f"{PAGE}/pin", data={"pinned": "true"})
    assert refused.status_code == 409
    assert "is missing: only a durable checkpoint can be pinned" in words(refused.text)
    assert client.post(f"{JOB}/checkpoints/000000000121-1/pin", data={"pinned": "true"}).status_code == 404


def test_a_checkpoint_that_retention_deleted_is_retired(client: TestClient, agent: FakeAgent) -> None:
    kept = [f"{iteration:012d}-1" for iteration in range(160, 401, 40)]
    agent.events.append(wire.Inventory(at=agent.at, checkpoints=kept, deleted={POINT: "keep last 7"}))
    agent.send()
    page = words(client.get(PAGE).text)
    assert "retired" in page
    assert "missing" not in page
    assert "deleted by retention: keep last 7" in page
    assert "is retired: deleted by retention" in words(client.get(f"{JOB}/restore?checkpoint={POINT}").text)
    compared = words(client.get(f"{JOB}/checkpoints/000000000160-1?with={POINT}").text)
    assert "State durable retired" in compared


def fork_of(client: TestClient, job: str) -> None:
    """A job that says it was forked from the checkpoint."""
    origin = wire.Origin(job="char-gpt", checkpoint=POINT, digest="9f86d081884c7d65")
    fork = FakeAgent(over_client(client), job=job, iteration=120, lineage=2, attempt=2)
    fork.start(resumed_from=POINT)
    fork.events.append(wire.LineageStarted(at=fork.at, lineage=2, iteration=120, parent=POINT, origin=origin))
    fork.events.append(wire.Inventory(at=fork.at, checkpoints=[POINT]))
    fork.send()


def test_a_fork_is_shown_at_its_iteration_and_says_where_it_comes_from(
    client: TestClient, agent: FakeAgent
) -> None:
    fork_of(client, "branch")
    row = client.get(JOB).text.partition(f'id="row-{POINT}"')[2].partition("</tr>")[0]
    assert '→ <a href="/jobs/branch">branch</a>' in row
    assert "Forks: branch from iteration 120" in words(client.get(f"{JOB}/points").text)
    for number in range(6):
        fork_of(client, f"branch-{number}")
    points = client.get(f"{JOB}/points").text
    row = points.partition(f'id="row-{POINT}"')[2].partition("</tr>")[0]
    assert f'→ <a href="{PAGE}">7 forks</a>' in row
    assert "and 2 more." in words(points)
    assert "branch started here" in words(client.get(PAGE).text)
    child = client.get("/jobs/branch").text
    assert f'forked from <a href="{PAGE}">char-gpt at iteration 120</a>' in child
    copy = words(client.get(f"/jobs/branch/checkpoints/{POINT}").text)
    assert f"The job was forked from char-gpt , checkpoint {POINT} ; this checkpoint is the copy." in copy
    assert "forked from" in client.get("/jobs/branch/live").text
    again = FakeAgent(over_client(client), job="branch", iteration=120, lineage=3, attempt=3)
    again.start(resumed_from=POINT)
    again.events.append(wire.LineageStarted(at=again.at, lineage=3, iteration=120, parent=POINT))
    again.send()
    assert "lineage <b>3</b></span>" in client.get("/jobs/branch").text, "numbers go on from those of the origin"


def test_the_command_of_a_fork_is_shown_and_a_name_that_cannot_be_is_refused(
    client: TestClient, agent: FakeAgent
) -> None:
    assert f"holdfast fork char-gpt {POINT} NEW" in client.get(PAGE).text
    assert f"holdfast fork char-gpt {POINT} lr-3e4</code>" in client.get(f"{PAGE}?fork=lr-3e4").text
    refused = client.get(f"{PAGE}?fork=a%20b%3Brm").text
    assert "job name &#39;a b;rm&#39;: use 1 to 100 letters" in refused
    assert f"holdfast fork char-gpt {POINT} NEW" in refused
    assert "the name is too long" in client.get(f"{PAGE}?fork={'x' * 500}").text


def panel(client: TestClient) -> str:
    return words(client.get(PAGE).text.partition('id="verify"')[2].partition("</section>")[0])


def says(agent: FakeAgent, verdict: wire.Verdict | None = None, request: int = 1, **more: object) -> None:
    agent.events.append(
        wire.VerificationReport(
            at=agent.at, request=request, checkpoint=POINT, verdict=verdict, host="node-3",
            **more,  # type: ignore[arg-type]
        )
    )  # fmt: skip
    agent.send()


def test_a_checkpoint_is_read_back_from_its_page_and_each_step_is_said(
    client: TestClient, agent: FakeAgent
) -> None:
    assert "Not verified yet" in panel(client)
    done = client.post(f"{PAGE}/verify")
    assert (done.status_code, done.headers["location"]) == (303, f"{PAGE}#verify")
    assert "Waiting for delivery. Requested by operator" in panel(client)
    says(agent, read_bytes=30_000_000, total_bytes=102_400_000)
    assert "Reading on node-3 , 30 MB of 102 MB" in panel(client)
    part = client.get(f"{PAGE}/verification")
    assert 'value="30000000"' in part.text
    assert "HX-Refresh" not in part.headers
    says(agent, "sound", read_bytes=102_400_000, total_bytes=102_400_000, seconds=1.5)
    assert client.get(f"{PAGE}/verification").headers["HX-Refresh"] == "true"
    assert "sound Last verified" in panel(client)
    assert "All bytes match their digests: 102 MB read in 1.5 s" in panel(client)
    assert "hx-trigger" not in client.get(PAGE).text.partition('id="verify"')[2].partition("</section>")[0]
    assert "Verify again" in panel(client)


def test_damage_is_named_and_nothing_offers_to_restore_it(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{PAGE}/verify")
    reason = "rank-0.safetensors: tensor <b>model.0</b> does not match its digest"
    agent.events.append(
        wire.Checkpoint(
            at=agent.at, id=POINT, iteration=120, lineage=1, kind="scheduled", state="damaged", reason=reason
        )
    )
    says(agent, "damaged", reason=reason)
    page = client.get(PAGE).text
    assert "tensor &lt;b&gt;model.0&lt;/b&gt; does not match its digest" in page
    assert "A restart skips it unless parity can repair it." in page
    assert "Restore…</a>" not in page
    assert "damaged" in client.get(JOB).text.partition(f'id="row-{POINT}"')[2].partition("</tr>")[0]
    assert client.get(f"{JOB}/restore?checkpoint={POINT}").status_code == 422


def test_with_no_one_in_contact_the_page_says_when_it_is_read_and_how_to_do_it_by_hand(
    client: TestClient, agent: FakeAgent, clock: FakeClock
) -> None:
    clock.now += 3600
    client.post(f"{PAGE}/verify")
    assert "The job is not running; its next start verifies the checkpoint." in panel(client)
    assert f"holdfast store verify STORE --job char-gpt --checkpoint {POINT}" in panel(client)
    client.post(f"{PAGE}/verify/cancel")
    assert "Cancelled: cancelled by operator." in panel(client)
    assert client.get(f"/api/v1{JOB}/desired").json()["verify"] == []


def test_a_store_that_is_away_says_nothing_of_the_checkpoint(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{PAGE}/verify")
    says(agent, "failed", reason="the store is away")
    assert "The read failed, so the state of the checkpoint is unknown: the store is away" in panel(client)
    assert "Not verified yet" in panel(client)


def test_what_cannot_be_read_is_not_offered_to_be_and_refused(client: TestClient, agent: FakeAgent) -> None:
    agent.events.append(wire.Inventory(at=agent.at, checkpoints=["000000000400-1"]))
    agent.send()
    assert ">Verify</button>" not in client.get(PAGE).text
    refused = client.post(f"{PAGE}/verify")
    assert refused.status_code == 409
    assert "is missing: only checkpoints in the store can be verified" in words(refused.text)


def norms(**more: object) -> wire.TensorNorms:
    columns = {
        "name": ["model.0.weight", "model.<i>.bias", "optimizer.exp_avg"], "elements": [1200, 40, 1240],
        "norm": [2.5, 3.0, 0.004], "largest": [0.5, 1.0, 0.001], "nan": [0, 0, 2], "inf": [0, 0, 1],
    }  # fmt: skip
    return wire.TensorNorms(**columns | more)  # type: ignore[arg-type]


def test_tensors_are_shown_with_what_is_not_finite_first(client: TestClient, agent: FakeAgent) -> None:
    assert "No summary yet; run Verify to create one." in words(client.get(PAGE).text)
    client.post(f"{PAGE}/verify")
    says(agent, "sound", tensors=norms(left_out=1))
    page = client.get(PAGE).text
    table = page.partition('class="rows tensors"')[2].partition("</table>")[0]
    assert table.index("optimizer.exp_avg") < table.index("model.0.weight")
    assert "2 NaN, 1 inf" in table
    assert "model.&lt;i&gt;.bias" in table
    assert "1 smaller tensor not shown" in page


def test_two_are_compared_by_the_difference_once_both_were_read(client: TestClient, agent: FakeAgent) -> None:
    other = "000000000160-1"
    page = client.get(f"{PAGE}?with={other}").text
    assert "No summary yet for either checkpoint; run Verify to create one." in words(page)
    done = client.post(f"{PAGE}/verify", data={"against": other})
    assert done.headers["location"] == f"{PAGE}?with={other}#verify"
    assert "Compare values" not in client.get(f"{PAGE}?with={other}").text
    beside = {"other_norm": [2.0, 3.0, 0.004], "distance": [0.5, 0.03, 0.0]}
    says(agent, "sound", against=other, tensors=norms(**beside))
    page = words(client.get(f"{PAGE}?with={other}").text)
    assert f"Tensor difference from {other}" in page
    assert "Change: norm of the difference relative to the other norm." in page
    assert "model.0.weight 1,200 25 % 2.5 2 0.5 none" in page


@pytest.mark.browser
def test_the_page_follows_a_checkpoint_that_is_read_back(served: Served, open_page: Open) -> None:
    agent = served.agent("read-back")
    agent.start()
    agent.train(15)
    agent.pace()
    agent.train(385)
    agent.at = time.time()
    agent.send()
    page = open_page(f"/jobs/read-back/checkpoints/{POINT}")
    page.get_by_role("button", name="Verify").click()
    expect(page.locator("#verify")).to_contain_text("Requested by operator")
    says(agent, read_bytes=1000, total_bytes=4000)
    expect(page.get_by_role("progressbar")).to_have_attribute("value", "1000")
    says(agent, "sound", read_bytes=4000, total_bytes=4000, seconds=0.5, tensors=norms())
    expect(page.locator("#verify")).to_contain_text("All bytes match their digests")
    expect(page.get_by_role("table").filter(has_text="optimizer.exp_avg")).to_be_visible()


def test_the_other_checkpoint_of_a_comparison_is_chosen_from_a_list(client: TestClient, agent: FakeAgent) -> None:
    page = client.get(PAGE).text
    listed = re.findall(r'<option value="(\d+-\d+)"', page)
    assert listed[:2] == ["000000000360-1", "000000000320-1"]
    assert "000000000120-1" not in listed
    assert '<option value="000000000080-1" selected>80, lineage 1</option>' in page


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
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Iteration 120 before the new data")
    expect(page.get_by_role("button", name="Unpin")).to_be_visible()

    page = open_page(f"/jobs/pinned?sel={POINT}")
    name = "Iteration 120, before the new data, pinned, durable, lineage 1"
    expect(page.get_by_role("option", name=name)).to_have_count(1)
    expect(page.locator("[data-part=selected-facts]")).to_contain_text("before the new data · pinned · durable")
    page.locator("[data-part=selection]").get_by_role("link", name="Iteration 120").click()
    expect(page.get_by_role("button", name="Unpin")).to_be_visible()
