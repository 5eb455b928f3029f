from __future__ import annotations

import math
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from starlette.testclient import TestClient

import holdfast_web
from holdfast.protocol.field_types import ChangedTensor
from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.verdicts import VerdictLevel
from holdfast.protocol.wire import AttemptFinished, IntervalDecision, Inventory, OutputReport
from holdfast_web.shared.render import _environment, tab_icon
from tests.support.clock import FakeClock
from tests.support.fake_agent import FakeAgent, over_client

JOB = "/jobs/char-gpt"
TEMPLATES = Path(holdfast_web.__file__).parent / "job"


def test_the_page_shows_overhead_interval_unsaved_work_and_the_newest_restore_point(
    client: TestClient, agent: FakeAgent
) -> None:
    page = client.get(JOB).text
    assert "Over the last 240 iterations" in page
    assert "of 3.5 % budget" in page
    assert "a checkpoint costs 320 ms" in page
    assert "lost if the job crashes now" in page
    assert "Restore iteration 360, lineage 1" in page


def test_a_job_that_has_only_begun_has_a_page(client: TestClient) -> None:
    young = FakeAgent(over_client(client), job="young")
    young.start()
    young.send()
    page = client.get("/jobs/young").text
    assert "No checkpoint yet." in page
    assert "Profiling the first iterations" in page
    assert "No changes; using the script's settings" in page
    young.train(1)
    young.send()
    assert client.get("/jobs/young").status_code == 200


@pytest.mark.parametrize(("loss", "text"), [(math.nan, "NaN"), (math.inf, "∞")])
def test_a_loss_that_is_no_number_breaks_no_page(
    client: TestClient, agent: FakeAgent, loss: float, text: str
) -> None:
    assert "wide alarm" not in client.get("/").text
    agent.train(1)
    agent.samples.metrics["loss"][-1] = loss
    agent.send()
    assert client.get(JOB).status_code == 200
    assert re.search(rf'<td class="num wide alarm" data-label="Loss">{text}</td>', client.get("/").text)


def test_an_unknown_job_is_a_page_that_says_so(client: TestClient) -> None:
    answer = client.get("/jobs/unknown")
    assert answer.status_code == 404
    assert "job &#39;unknown&#39; not found" in answer.text


def test_a_crash_is_shown_with_what_ended_the_attempt(client: TestClient, agent: FakeAgent) -> None:
    agent.crash(7)
    agent.send()
    assert "1 restart" in client.get(JOB).text


def test_the_live_part_brings_every_region_but_the_forms(client: TestClient, agent: FakeAgent) -> None:
    answer = client.get(f"{JOB}/live", headers={"HX-Request": "true"}).text
    regions = (
        "head",
        "kpis",
        "restore-status",
        "restore-points",
        "history",
        "change-budget",
        "change-interval",
        "change-pause",
    )
    for region in regions:
        assert f'hx-target="#{region}"' in answer
    assert 'name="budget"' not in answer


def test_more_restore_points_are_shown_when_asked_for(client: TestClient, agent: FakeAgent) -> None:
    agent.train(400)
    agent.send()
    first = client.get(JOB).text
    assert first.count("data-checkpoint=") == 12
    assert "?points=36#restore-points" in first
    assert client.get(f"{JOB}?points=36").text.count("data-checkpoint=") > 12
    assert client.get(f"{JOB}/points?points=36").text.count("data-checkpoint=") > 12


def test_what_retention_took_is_not_offered_as_a_restore_point(client: TestClient, agent: FakeAgent) -> None:
    page = client.get(JOB).text
    assert page.count(">durable</span>") > 1
    kept = "000000000200-1"
    agent.events.append(Inventory(at=agent.at, checkpoints=[kept]))
    agent.send()
    page = client.get(JOB).text
    assert page.count(">durable</span>") == 1
    assert f'data-checkpoint="{kept}"' in page


def fill_the_disk(agent: FakeAgent, checkpoints: int) -> None:
    for _ in range(checkpoints):
        agent.train(1)
        made = agent._checkpoint("scheduled")
        agent.open.clear()
        agent.events.append(msgspec.structs.replace(made, state="failed", reason="No space left on device"))
    agent.send()


def test_a_full_disk_is_one_red_line_and_no_page_full_of_rows(client: TestClient, agent: FakeAgent) -> None:
    line = "15 checkpoints failed since the last durable checkpoint: <bdi>No space left on device</bdi>"
    assert "failed since" not in client.get(JOB).text
    fill_the_disk(agent, 15)
    for path in (JOB, f"{JOB}/live", f"{JOB}/points"):
        page = client.get(path).text
        assert line in page
        assert 'data-state="failed"' not in page
        assert "Restore iteration 360, lineage 1" in page
    assert "15 checkpoints failed, No space left on device" in client.get(JOB).text
    assert "15 checkpoints failed" in client.get("/").text
    agent.train(agent.interval + 10)
    agent.send()
    assert "failed since" not in client.get(JOB).text


def test_a_job_that_was_interrupted_is_stopped_and_not_finished(client: TestClient, agent: FakeAgent) -> None:
    agent.events.append(AttemptFinished(at=agent.at, iteration=400, lineage=1, reason="interrupted"))
    agent.send()
    page = client.get(JOB).text
    assert 'data-status="stopped"' in page
    assert "interrupted at iteration 400" in page
    assert ">1 stopped</a>" in client.get("/").text


def test_the_reason_of_the_interval_and_the_cost_are_of_one_profile(client: TestClient, agent: FakeAgent) -> None:
    agent.pace()
    paced = agent.events[-1]
    assert isinstance(paced, IntervalDecision)
    paced.reason = "a checkpoint costs 5 ms (measured), 0.05 % of 40 iterations"
    agent.send()
    page = client.get(JOB).text
    assert "4.97 ms" not in page
    assert "a checkpoint costs 320 ms, 3.33 % of 40 iterations" in page
    assert re.search(r"Checkpoint cost</th><td[^>]*>320 ms</td>", page)


def test_the_page_says_what_a_change_of_the_interval_waits_for(client: TestClient, agent: FakeAgent) -> None:
    agent.interval = 20
    agent.pace()
    paced = agent.events[-1]
    assert isinstance(paced, IntervalDecision)
    waits = (
        "measured overhead 6.67 % is over the budget: the interval grows if it still is after 2 more checkpoints"
    )
    paced.pending = waits
    agent.send()
    page = client.get(JOB).text
    assert f"6.67 % of 20 iterations; {waits}" in page
    agent.pace()
    agent.send()
    assert "more checkpoints" not in client.get(JOB).text


def test_the_page_says_when_a_shorter_interval_comes(client: TestClient, agent: FakeAgent) -> None:
    agent.interval = 60
    agent.pace()
    agent.send()
    reason = (
        "suggest every 39 iterations: the interval shrinks if the overhead stays clearly below half the budget"
    )
    assert reason in client.get(JOB).text


def test_where_the_newest_figures_agree_the_policys_own_reason_is_shown(
    client: TestClient, agent: FakeAgent
) -> None:
    agent.interval = 39
    agent.pace()
    agent.send()
    assert "as often as the budget of 3.5 % allows" in client.get(JOB).text
    agent.paused = True
    agent.pace()
    agent.send()
    assert (
        client.get(f"/api/v1{JOB}").json()["interval_reason"]
        == "a checkpoint costs 320 ms: every 39 keeps the budget"
    )


def test_what_went_well_is_history_after_two_minutes(
    client: TestClient, agent: FakeAgent, clock: FakeClock
) -> None:
    client.post(f"{JOB}/restores", data={"checkpoint": "000000000120-1", "key": "once"})
    agent.obey(agent.desired())
    agent.send()
    clock.now = agent.at + 119
    assert "Restored to" in client.get(JOB).text
    clock.now = agent.at + 121
    page = client.get(JOB).text
    assert "Restored to" not in page
    assert '<div id="restore-status" aria-live="polite"></div>' in page
    assert "to 120 from 400" in page


def test_the_settings_list_holds_the_newest_changes_and_none_that_changed_nothing(
    client: TestClient, agent: FakeAgent
) -> None:
    budgets = [str(number) for number in range(1, 11)]
    for version, budget in enumerate([*budgets, "10"]):
        client.post(f"{JOB}/budget", data={"version": str(version), "budget": budget})
    page = client.get(JOB).text
    assert "10 % → 10 %" not in page
    assert "saved v10" in page
    shown = re.findall(r"<b>v(\d+)</b>", page)
    assert shown == ["10", "9", "8", "7", "6", "5", "4", "3"]
    for path in (f"{JOB}?edits=24", f"{JOB}/history?edits=24", f"{JOB}/live?edits=24"):
        page = client.get(path).text
        assert len(re.findall(r"<b>v(\d+)</b>", page)) == 10
        assert "history?edits=" not in page
        assert 'name="edits" value="24"' in page


def test_after_a_restore_the_lineage_that_goes_on_comes_first(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/restores", data={"checkpoint": "000000000120-1", "key": "once"})
    agent.obey(agent.desired())
    agent.train(60)
    agent.send()
    page = client.get(f"{JOB}/points").text
    assert page.index('data-checkpoint="000000000160-2"') < page.index('data-checkpoint="000000000360-1"')


def test_a_parameter_that_is_not_understood_is_a_page_that_says_so(client: TestClient, agent: FakeAgent) -> None:
    answer = client.get(f"{JOB}?points=many")
    assert answer.status_code == 422
    assert "points" in answer.text
    assert "<html" in answer.text


def test_the_panel_of_goodput_shows_every_bucket_and_what_it_is(client: TestClient, agent: FakeAgent) -> None:
    part = client.get(f"{JOB}/goodput?window=all", headers={"HX-Request": "true"}).text
    assert "<html" not in part
    assert "spent on training progress" in part
    assert '<rect data-bucket="productive" x="' in part
    assert "iterations that a crash or a restore discarded" in part
    assert " style=" not in part
    page = client.get(f"{JOB}/goodput").text
    assert "<title>Goodput of char-gpt" in page
    assert 'href="/jobs/char-gpt/goodput?window=7d"' in page


def test_windows_that_there_are_not_are_shown(client: TestClient, agent: FakeAgent) -> None:
    for path in ("goodput?window=2d", "ranks?window=7d"):
        answer = client.get(f"{JOB}/{path}")
        assert answer.status_code == 422
        assert "use one of" in answer.text


def test_no_age_and_no_counter_is_read_aloud_as_it_goes_on(client: TestClient, agent: FakeAgent) -> None:
    page = client.get(JOB).text
    ages = [moment for moment in re.findall(r"<time [^>]*>", page) if "data-as=" not in moment]
    assert ages
    assert all('aria-live="off"' in age for age in ages)
    assert re.search(r'id="connection"[^>]* role="status".*<span class="counts" aria-hidden="true">', page)


def test_the_size_of_a_checkpoint_says_how_much_of_it_was_written(client: TestClient, agent: FakeAgent) -> None:
    agent.train(1)
    made = msgspec.structs.replace(
        agent._checkpoint("scheduled"), state="durable", payload_bytes=54_000_000_000, reused_bytes=53_850_000_000,
        snapshot_seconds=0.1, stall_seconds=0.01, persist_seconds=3.0, durable_iteration=agent.iteration,
    )  # fmt: skip
    agent.open.clear()
    agent.events.append(made)
    agent.send()
    pages = (client.get(f"/jobs/char-gpt{rest}").text for rest in ("", f"/checkpoints/{made.id}"))
    job, page = (" ".join(re.sub(r"<[^>]+>", " ", each).split()) for each in pages)
    assert "54 GB 150 MB written" in job
    assert "54 GB 150 MB written, 53.9 GB unchanged since earlier checkpoints" in page
    assert "50 MB/s" in page
    (row,) = [
        each
        for each in client.get("/api/v1/jobs/char-gpt/checkpoints").json()["checkpoints"]
        if each["id"] == made.id
    ]
    assert row["reused_bytes"] == 53_850_000_000


def test_the_page_of_a_compressed_checkpoint_has_its_size_before_compression(
    client: TestClient, agent: FakeAgent
) -> None:
    agent.train(1)
    made = msgspec.structs.replace(
        agent._checkpoint("scheduled"), state="durable", payload_bytes=8_300_000_000, raw_bytes=10_000_000_000
    )
    agent.open.clear()
    agent.events.append(made)
    agent.send()
    page = " ".join(re.sub(r"<[^>]+>", " ", client.get(f"/jobs/char-gpt/checkpoints/{made.id}").text).split())
    assert "8.3 GB compressed, 10 GB uncompressed" in page


def test_the_page_of_an_incremental_checkpoint_has_its_changed_rows_by_tensor(
    client: TestClient, agent: FakeAgent
) -> None:
    agent.train(1)
    rows = ChangedTensor(
        name="model.weight",
        rows=400_000,
        row_bytes=128,
        changed_rows=2_000,
        stored_rows=6_000,
        size_bytes=51_200_000,
    )
    changed = [rows, msgspec.structs.replace(rows, name="x" * 2000)]
    agent.open.clear()
    made = msgspec.structs.replace(agent._checkpoint("scheduled"), state="durable", changed=changed)
    agent.events.append(made)
    agent.send()
    page = " ".join(re.sub(r"<[^>]+>", " ", client.get(f"/jobs/char-gpt/checkpoints/{made.id}").text).split())
    assert (
        "Changed rows Tensor Rows Changed Written Linked model.weight 400,000 2,000 0.5 % 768 kB 50.4 MB" in page
    )
    assert "xxx" not in page, "a name that is too long"
    assert "but the same amount is stored" in page
    assert "Changed rows" not in client.get(f"/jobs/char-gpt/checkpoints/{checkpoint_id(400, 1)}").text
    listed = client.get("/api/v1/jobs/char-gpt/checkpoints").json()["checkpoints"]
    (found,) = (each["changed"] for each in listed if each["id"] == made.id)
    assert [(each["name"], each["changed_rows"]) for each in found] == [("model.weight", 2_000)]


def ended(agent: FakeAgent, reason: str) -> None:
    agent.fail(reason)
    if reason != "finished":
        agent.supervise("gave_up", reason, start=5)


@pytest.mark.parametrize(
    ("reason", "title"),
    [("RuntimeError: out of memory", "Failed at iteration 400"), ("finished", "Finished at iteration 400")],
)
def test_the_page_of_a_job_that_has_ended_says_why_and_how_to_go_on_and_has_no_live_controls(
    client: TestClient, agent: FakeAgent, reason: str, title: str
) -> None:
    assert "Newest readable checkpoint" not in client.get(JOB).text
    ended(agent, reason)
    page = client.get(JOB).text
    assert title in page
    assert "Newest readable checkpoint" in page
    assert "It continues from iteration 360" in page
    assert "holdfast fork char-gpt 000000000360-1 NEW" in page
    assert page.count("RuntimeError: out of memory") == (2 if reason != "finished" else 0)  # verdict and card
    for control in ("request-checkpoint", "toggle-checkpoints", "request-probe", "budget-range"):
        assert f'id="{control}"' not in page
    assert "Settings take effect when it runs again" in page


def test_a_job_that_its_supervisor_restarts_says_so_and_offers_no_command(
    client: TestClient, agent: FakeAgent, clock: FakeClock
) -> None:
    def card() -> str:
        page = client.get(JOB).text
        return page[page.index('<section class="panel outcome"') : page.index('id="alerts"')]

    clock.now = agent.at
    agent.fail("OutOfMemoryError")
    assert "Reading output…" in card()
    assert "OutOfMemoryError at iteration 400" in card()
    agent.supervise("restarting", "CUDA out of memory", start=3, limit=5, delay_seconds=4.0)
    for words in ("Restarting, start 3 of 5", "CUDA out of memory", "node-3</bdi> starts the script again"):
        assert words in card()
    assert "It continues from iteration 360. After 5 starts without a new iteration, it gives up" in card()
    assert "Restarting on node-3, start 3 of 5 (CUDA out of memory)" in client.get("/").text
    lines = ["Traceback (most recent call last):", "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"]
    agent.events.append(OutputReport(at=agent.at, first=0, lines=lines))
    agent.send()
    assert "<code>torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB</code>" in card()
    for hint in ("Start the script again", "holdfast fork", "train.py"):
        assert hint not in client.get(JOB).text
    agent.crash(10, "exit status 1")
    started, agent.events = agent.events, [OutputReport(at=agent.at, first=0, lines=["importing torch"])]
    agent.send()
    assert "holdfast run</code> has started the script again" in card()  # its host is not known yet
    agent.events = started
    agent.send()
    assert "node-3</bdi> has started the script again" in card()
    agent.train(20)
    agent.send()
    assert '<section class="panel outcome"' not in client.get(JOB).text
    agent.fail("OutOfMemoryError")
    agent.supervise("gave_up", "CUDA out of memory", start=5, waits=True)
    assert "gave up after 5 starts without a new iteration" in card()
    assert "waits: restore to 360 to start again" in card()


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("a GPU ran out of memory: CUDA out of memory", "<bdi>A GPU ran out of memory: CUDA out of memory</bdi>"),
        ("CUDA out of memory", "<code>torch.OutOfMemoryError: CUDA out of memory</code>"),
    ],
)
def test_the_cause_stands_in_place_of_the_exception_that_it_explains(
    client: TestClient, agent: FakeAgent, reason: str, shown: str
) -> None:
    lines = ["Traceback (most recent call last):", "torch.OutOfMemoryError: CUDA out of memory"]
    agent.fail("OutOfMemoryError")
    agent.events = [OutputReport(at=agent.at, first=0, lines=lines)]
    agent.send()
    agent.supervise("gave_up", reason, start=5)
    page = client.get(JOB).text
    assert shown in page[page.index('<section class="panel outcome"') :]


def test_unsaved_work_and_the_last_durable_checkpoint_come_first(client: TestClient, agent: FakeAgent) -> None:
    page = client.get(JOB).text
    tiles = page[page.index('<dl class="kpis">') : page.index('id="timeline"')]
    places = [
        tiles.index(f">{name}<") for name in ("Unsaved work", "Last durable", "Overhead", "Interval", "Goodput")
    ]
    assert places == sorted(places)


def test_goodput_names_the_time_that_it_is_a_share_of(client: TestClient, agent: FakeAgent) -> None:
    page = client.get(JOB).text
    assert "Of 2 min, spent on training progress" in page
    assert "last hour" not in page


def test_the_interval_says_what_it_waits_for_while_the_overhead_is_over_the_budget(
    client: TestClient, agent: FakeAgent
) -> None:
    agent.interval = 4
    agent.pace()
    agent.events[-1].pending = "the interval grows if the next 2 windows are over the budget too"  # type: ignore[union-attr]
    agent.send()
    assert "the interval grows if the next 2 windows are over the budget too" in client.get(JOB).text
    agent.pace()
    agent.send()
    assert "latest measurements suggest every 39 iterations: the interval grows if" in client.get(JOB).text


@pytest.mark.parametrize(
    ("measured", "alerts", "tone"),
    [(0.038, [], ""), (0.04, [], " near"), (0.06, [], " over"), (0.038, [1], " over")],
)
def test_the_overhead_is_red_far_over_the_budget_or_while_an_alert_fires(
    measured: float, alerts: list[int], tone: str
) -> None:
    template = _environment.from_string(
        '{% from "shared/_bullet.html" import bullet %}{{ bullet(measured, 0.035, alerts) }}'
    )
    assert f'class="bullet{tone}"' in template.render(measured=measured, alerts=alerts)


def test_a_silent_job_says_how_to_go_on(client: TestClient, agent: FakeAgent, clock: FakeClock) -> None:
    advice = "If its process has ended, start the script again: it resumes from 360"
    assert advice not in client.get(JOB).text
    clock.now = agent.at + 3600
    assert advice in client.get(JOB).text


def test_title_and_icon_follow_the_verdict(client: TestClient, agent: FakeAgent, clock: FakeClock) -> None:
    clock.now = agent.at
    page = client.get(JOB).text
    assert "<title>char-gpt · Holdfast</title>" in page
    assert re.search(r'<link rel="icon" href="/static/[0-9a-f]+/favicon.svg"', page)
    agent.fail("OutOfMemoryError")
    agent.supervise("gave_up", "OutOfMemoryError", start=5)
    for path, title in ((JOB, "✗ char-gpt · Holdfast"), ("/", "✗ 1 critical, Fleet · Holdfast")):
        page = client.get(path).text
        assert f"<title>{title}</title>" in page
        assert re.search(rf' data-title="{title}" data-icon="/static/[0-9a-f]+/favicon-critical.svg"', page)


def test_each_level_of_a_verdict_has_an_icon(client: TestClient) -> None:
    for level in get_args(VerdictLevel):
        assert client.get(tab_icon(level)).headers["content-type"] == "image/svg+xml"


def test_the_next_step_of_a_verdict_leads_to_its_place(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/pause", data={"version": "0", "paused": "true"})
    agent.obey(agent.desired())
    agent.train(40)
    agent.send()
    page = client.get(JOB).text
    assert '<a class="next-step" href="#controls">Resume checkpoints</a>' in page
    assert set(re.findall(r'href="#([\w-]+)"', page)) <= set(re.findall(r' id="([\w-]+)"', page))
    places = re.findall(r"'\w+': '([\w-]+)'", (TEMPLATES / "_head.html").read_text())
    assert len(places) == 9
    assert {*places} - {"ranks"} <= set(re.findall(r' id="([\w-]+)"', page))
