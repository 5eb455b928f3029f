"""Going back to an iteration, as a dialog and as a page."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from holdfast.protocol import wire
from holdfast.protocol.value_rules import define
from holdfast.protocol.values import ValueReport
from tests.support.fake_agent import FakeAgent

JOB = "/jobs/char-gpt"
HTMX = {"HX-Request": "true"}
POINT = "000000000120-1"


def key_in(page: str) -> str:
    found = re.search(r'name="key" value="([0-9a-f]{32})"', page)
    assert found
    return found[1]


@pytest.mark.parametrize("query", [f"checkpoint={POINT}", "iteration=120"])
def test_the_dialog_says_exactly_what_will_happen(client: TestClient, agent: FakeAgent, query: str) -> None:
    answer = client.get(f"{JOB}/restore?{query}", headers=HTMX)
    assert answer.status_code == 200
    text = re.sub(r"<[^>]+>|\s+", " ", answer.text)
    text = re.sub(r" +", " ", text)
    assert "Restore char-gpt to iteration 120?" in text
    assert "From Iteration 400, lineage 1" in text
    assert "Discarded (recoverable) 280 iterations" in text
    assert "Estimated time predicted" in text
    assert "A safety checkpoint is taken first" in text
    assert "You can undo this restore until the third restore from now" in text
    assert "their restore points can be restored until retention deletes them" in text
    assert "A new lineage starts at iteration 120" in text
    assert "<html" not in answer.text


def test_the_dialog_says_when_the_script_has_to_be_started_again(client: TestClient, agent: FakeAgent) -> None:
    agent.events.append(
        wire.RestoreModeReport(
            at=agent.at,
            iteration=400,
            lineage=1,
            mode="relaunch",
            reason="it draws for itself",
            start_seconds=41.0,
        )
    )
    agent.send()
    page = client.get(f"{JOB}/restore?checkpoint={POINT}", headers=HTMX).text
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    assert "When at once, by a restart of the script through its supervisor: it draws for itself" in text
    assert "41 s the start of this attempt, up to its first iteration" in text
    client.post(f"{JOB}/restores", data={"checkpoint": POINT, "key": "k"})
    assert "Restarts the script: it draws for itself" in client.get(JOB).text


def said(code: str) -> wire.Notice:
    return wire.Notice(at=0.0, iteration=400, lineage=1, level="warning", code=code, message="giving up")


def test_a_waiting_supervisor_starts_a_failed_job_at_once_and_the_pages_say_so(
    client: TestClient, agent: FakeAgent
) -> None:
    def page(path: str) -> str:
        return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", client.get(path, headers=HTMX).text))

    agent.fail("RuntimeError: no data")
    dialog = f"{JOB}/restore?checkpoint={POINT}"
    assert "When as soon as its supervisor starts the script again" in page(dialog)
    agent.supervise("gave_up", "no data", start=5)
    assert "When at the next start of the job" in page(dialog)
    assert "Start the script again" in page(JOB)
    agent.supervise("gave_up", "no data", said("waits"), start=5, waits=True)
    assert "at once: the waiting holdfast run on node-3 starts the script" in page(dialog)
    assert "attempt 1 failed on node-3, 1 rank, supervised" in page(dialog)
    assert "holdfast run on node-3 waits: restore to 360 to start again Restore to 360…" in page(JOB)
    assert "Start the script again" not in page(JOB)
    agent.supervise("gave_up", "no data", said("wait_ended"), start=5)
    assert "starts the script" not in page(dialog)
    assert "Start the script again" in page(JOB)
    agent.supervise("gave_up", "no data", said("waits"), start=5, waits=True)
    agent.crash(40)
    agent.send()
    assert "in place, at the next iteration boundary" in page(dialog)


def test_a_restore_at_a_start_began_where_it_was_requested(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/restores", data={"checkpoint": POINT, "key": "k"})
    order = agent.desired().restore
    assert order
    agent.attempt, agent.iteration = 2, 0
    agent.report_order(order.id, "restoring")
    agent.send()
    assert "to 120 from 400" in client.get(JOB).text


def test_without_scripts_the_dialog_is_a_page(client: TestClient, agent: FakeAgent) -> None:
    answer = client.get(f"{JOB}/restore?checkpoint={POINT}")
    assert answer.status_code == 200
    assert "<html" in answer.text


def test_enter_held_down_does_not_restore(client: TestClient, agent: FakeAgent) -> None:
    for page in (client.get(f"{JOB}/restore?checkpoint={POINT}", headers=headers).text for headers in (HTMX, {})):
        (focused,) = re.findall(r"<(\w+)[^>]* autofocus>([^<]+)<", page)
        assert focused == ("a", "Cancel")


def test_a_checkpoints_own_page_leads_to_the_page_of_the_restore(client: TestClient, agent: FakeAgent) -> None:
    page = client.get(f"{JOB}/checkpoints/{POINT}").text
    (link,) = re.findall(r"<a[^>]*>Restore…</a>", page)
    assert f'href="{JOB}/restore?checkpoint={POINT}"' in link
    assert "hx-" not in link


def test_an_iteration_without_a_checkpoint_is_offered_the_nearest_earlier_one(
    client: TestClient, agent: FakeAgent
) -> None:
    answer = client.get(f"{JOB}/restore?iteration=139", headers=HTMX)
    assert answer.status_code == 422
    assert "Iteration 139 has no restore point." in answer.text
    assert f"restore?checkpoint={POINT}" in answer.text
    assert 'name="key"' not in answer.text
    assert agent.desired().restore is None


def test_before_the_first_checkpoint_nothing_is_offered(client: TestClient, agent: FakeAgent) -> None:
    answer = client.get(f"{JOB}/restore?iteration=3", headers=HTMX)
    assert answer.status_code == 422
    assert "No earlier restore point exists." in answer.text


@pytest.mark.parametrize("typed", ["-5", "0", "soon", "1e3", "9" * 20])
def test_what_is_no_iteration_is_refused(client: TestClient, agent: FakeAgent, typed: str) -> None:
    answer = client.get(f"{JOB}/restore", params={"iteration": typed}, headers=HTMX)
    assert answer.status_code == 422
    assert "is not an iteration" in answer.text


def test_an_iteration_may_be_typed_as_it_is_shown(client: TestClient, agent: FakeAgent) -> None:
    agent.train(900)
    agent.send()
    assert client.get(f"{JOB}/restore?iteration=1,200", headers=HTMX).status_code == 200


def test_a_checkpoint_that_failed_cannot_be_chosen(client: TestClient, agent: FakeAgent) -> None:
    failed = next(number for number in range(40, 4000, 40) if number % 29 == 7)
    agent.train(failed + 20 - agent.iteration if failed > 380 else 0)
    agent.send()
    answer = client.get(f"{JOB}/restore?checkpoint={failed:012d}-1", headers=HTMX)
    assert answer.status_code == 422
    assert "no space left on device" in answer.text


def test_an_order_goes_all_the_way_to_restored_and_can_be_undone(client: TestClient, agent: FakeAgent) -> None:
    key = key_in(client.get(f"{JOB}/restore?checkpoint={POINT}", headers=HTMX).text)
    answer = client.post(f"{JOB}/restores", data={"checkpoint": POINT, "key": key}, headers=HTMX)
    assert answer.status_code == 200
    assert answer.headers["hx-trigger"] == "holdfast:restore-requested"
    assert "Restoring to iteration 120" in answer.text
    agent.obey(agent.desired())
    agent.send()
    page = client.get(JOB).text
    assert "Restored to iteration 120" in page
    assert "lineage 1 → lineage 2" in page
    assert "restore?checkpoint=000000000400-1" in page
    undo = client.get(f"{JOB}/restore?checkpoint=000000000400-1", headers=HTMX).text
    assert "Undo the restore of char-gpt to 120?" in undo
    assert "Restore to 400</button>" in undo


def test_a_second_click_is_the_same_order(client: TestClient, agent: FakeAgent) -> None:
    for _ in range(2):
        answer = client.post(f"{JOB}/restores", data={"checkpoint": POINT, "key": "one-click"})
        assert (answer.status_code, answer.headers["location"]) == (303, f"{JOB}#restore-status")
    assert len(client.get(f"/api/v1{JOB}/restores").json()) == 1


def test_another_order_while_one_is_open_is_refused_with_the_reason(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/restores", data={"checkpoint": POINT, "key": "first"})
    other = {"checkpoint": "000000000080-1", "key": "second"}
    answer = client.post(f"{JOB}/restores", data=other, headers=HTMX)
    assert answer.status_code == 409
    assert "a restore to iteration 120 is already requested" in answer.text


def test_an_order_can_be_cancelled_until_it_is_under_way(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/restores", data={"checkpoint": POINT, "key": "first"})
    cancel = re.search(r'action="(/jobs/char-gpt/restores/[^"]+/cancel)"', client.get(JOB).text)
    assert cancel
    assert client.post(cancel[1], headers=HTMX).status_code == 200
    assert agent.desired().restore is None
    assert "cancelled" in client.get(JOB).text


def test_a_failed_order_shows_its_reason(client: TestClient, agent: FakeAgent) -> None:
    client.post(f"{JOB}/restores", data={"checkpoint": POINT, "key": "first"})
    restore = agent.desired().restore
    assert restore
    agent.report_order(restore.id, "failed", reason="digest of model.wte.weight differs")
    agent.send()
    page = client.get(JOB).text
    assert "Not restored to" in page
    assert "digest of model.wte.weight differs" in page


def test_orders_of_an_unknown_job_are_refused(client: TestClient) -> None:
    assert client.get("/jobs/unknown/restore?iteration=5").status_code == 404
    answer = client.post("/jobs/unknown/restores", data={"checkpoint": POINT, "key": "x"})
    assert answer.status_code == 404


def test_the_dialog_says_which_values_change(client: TestClient, agent: FakeAgent) -> None:
    definition = define("lr_scale", 1.0, 0.01, 10.0, ())

    def report(iteration: int, value: float, change: str | None = None) -> None:
        here = {"at": agent.at, "iteration": iteration, "lineage": 1}
        is_default = value == definition.default
        report = ValueReport(**here, definition=definition, value=value, is_default=is_default, change=change)
        agent.events.append(report)
        agent.send()

    def put(value: float) -> str:
        return client.put("/api/v1/jobs/char-gpt/values/lr_scale", json={"value": value}).json()["changes"][0][
            "id"
        ]

    report(0, 1.0)
    assert 'id="restore-values"' not in client.get(f"{JOB}/restore?checkpoint={POINT}").text
    report(100, 0.5, put(0.5))
    report(300, 0.2, put(0.2))
    page = client.get(f"{JOB}/restore?checkpoint={POINT}").text
    assert "lr_scale 0.2 → <b>0.5</b>" in re.sub(r"\s+", " ", page)
    put(0.5)  # an open change is discarded
    assert 'id="restore-values"' not in client.get(f"{JOB}/restore?checkpoint={POINT}").text
    put(4.0)
    assert "lr_scale 4 → <b>0.5</b>" in re.sub(r"\s+", " ", client.get(f"{JOB}/restore?checkpoint={POINT}").text)
