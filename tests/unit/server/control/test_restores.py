from __future__ import annotations

import re
import threading

import pytest

from holdfast.protocol import wire
from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import (
    AttemptFinished,
    Inventory,
    LeftOutData,
    LineageStarted,
    OrderStateChange,
    RestoreModeReport,
)
from holdfast_server.records import restore_orders
from tests.support import database_queries
from tests.support.postgres import ON_SQLITE

JOB = "/api/v1/jobs/char-gpt"


def order(client, **wish):
    return client.post(f"{JOB}/restores", json=wish)


def moved(job, placed, state, **fields):
    job.say(OrderStateChange(at=job.at, order=placed["id"], state=state, iteration=job.iteration,
                             lineage=job.lineage, **fields))  # fmt: skip


def watch(client, now):
    restore_orders.check_timeouts(database_queries.of(client), now)


def read(client, placed):
    return client.get(f"{JOB}/restores/{placed['id']}").json()


def test_an_order_reaches_the_agent_with_its_fence(job, client):
    reply = order(client, iteration=10)
    assert reply.status_code == 201
    placed = reply.json()
    assert (placed["state"], placed["checkpoint"]) == ("requested", "000000000010-1")
    assert (placed["from_iteration"], placed["fence"], placed["who"]) == (30, 1, "operator")
    desired = client.get(f"{JOB}/desired").json()
    assert desired["version"] == 1
    assert desired["restore"] == {
        "id": placed["id"], "checkpoint": "000000000010-1", "fence": 1,
        "expires_in_seconds": restore_orders.EXPIRES_SECONDS, "degraded": False, "skip": None,
    }  # fmt: skip


def test_an_order_may_name_a_checkpoint(job, client):
    assert order(client, checkpoint="000000000020-1").json()["iteration"] == 20


def test_a_restore_can_be_undone_while_the_state_that_it_left_is_in_the_store(job, client):
    placed = order(client, iteration=10).json()
    safety = job.checkpoint(kind="safety")
    moved(job, placed, "restored", safety_checkpoint=safety)
    assert read(client, placed)["undoable"] is True
    assert "Undo…" in client.get("/jobs/char-gpt").text
    job.say(Inventory(at=job.at, checkpoints=["000000000010-1"]))
    assert read(client, placed)["undoable"] is False
    page = client.get("/jobs/char-gpt").text
    assert "undo…" not in page.lower()
    assert "Restored to" in page


def test_an_order_goes_through_its_states_to_restored(job, client):
    placed = order(client, iteration=10).json()
    moved(job, placed, "delivered")
    moved(job, placed, "restoring", safety_checkpoint="000000000030-1")
    job.iteration, job.lineage = 10, 2
    job.say(LineageStarted(at=job.at, lineage=2, iteration=10, parent="000000000010-1", order=placed["id"]))
    moved(job, placed, "restored", seconds=1.5)
    done = read(client, placed)
    assert [one["state"] for one in done["transitions"]] == ["requested", "delivered", "restoring", "restored"]
    assert [one["who"] for one in done["transitions"]] == ["operator", *["agent, attempt 1"] * 3]
    assert (done["new_lineage"], done["seconds"], done["safety_checkpoint"]) == (2, 1.5, "000000000030-1")
    assert client.get(f"{JOB}/desired").json()["restore"] is None
    summary = client.get(JOB).json()
    assert (summary["iteration"], summary["lineage"], summary["lineages"]) == (10, 2, 2)


def test_a_double_click_is_one_order(job, client):
    first = order(client, iteration=10, key="click")
    second = order(client, iteration=10, key="click")
    other_tab = order(client, iteration=10, key="other")
    assert [first.status_code, second.status_code, other_tab.status_code] == [201, 200, 200]
    assert first.json() == second.json() == other_tab.json()
    assert len(client.get(f"{JOB}/restores").json()["restores"]) == 1
    assert client.get(f"{JOB}/desired").json()["version"] == 1


def test_clicks_at_the_same_moment_are_one_order(job, client, settings):
    replies = []
    clicks = [threading.Thread(target=lambda: replies.append(order(client, iteration=10))) for _ in range(8)]
    for click in clicks:
        click.start()
    for click in clicks:
        click.join()
    assert sorted(reply.status_code for reply in replies) == [200] * 7 + [201]
    assert len({reply.json()["id"] for reply in replies}) == 1


def test_a_key_stays_the_same_order_after_it_has_ended(job, client):
    placed = order(client, iteration=10, key="click").json()
    client.post(f"{JOB}/restores/{placed['id']}/cancel")
    again = order(client, iteration=10, key="click")
    assert (again.status_code, again.json()["id"], again.json()["state"]) == (200, placed["id"], "cancelled")


@pytest.mark.parametrize("wish", [{"iteration": 20}, {"checkpoint": "000000000020-1"}])
def test_a_key_is_not_good_for_another_checkpoint(job, client, wish):
    placed = order(client, iteration=10, key="click").json()
    client.post(f"{JOB}/restores/{placed['id']}/cancel")
    reply = order(client, key="click", **wish)
    assert (reply.status_code, reply.json()["error"]) == (422, "invalid_setting")
    assert "000000000010-1" in reply.json()["message"]
    assert str(next(iter(wish.values()))) in reply.json()["message"]
    assert order(client, checkpoint="000000000010-1", key="click").json()["id"] == placed["id"]


def test_a_second_place_to_go_to_waits_for_the_first(job, client):
    placed = order(client, iteration=10).json()
    reply = order(client, iteration=20)
    assert (reply.status_code, reply.json()["error"]) == (409, "open_order")
    assert reply.json()["order"]["id"] == placed["id"]


def test_where_there_is_no_checkpoint_the_nearest_earlier_one_is_offered_and_not_taken(job, client):
    reply = order(client, iteration=17)
    assert (reply.status_code, reply.json()["error"]) == (404, "no_such_checkpoint")
    assert reply.json()["nearest"]["iteration"] == 10
    assert "10" in reply.json()["message"]
    assert client.get(f"{JOB}/restores").json() == {"restores": []}


def test_before_the_first_checkpoint_there_is_nothing_to_offer(job, client):
    reply = order(client, iteration=3)
    assert (reply.status_code, reply.json()["nearest"]) == (404, None)


@pytest.mark.parametrize("state", ["damaged", "torn", "failed", "persisting", "snapshot", "missing"])
def test_only_a_durable_checkpoint_can_be_restored(job, client, state):
    name = job.checkpoint(25, state, reason="the disk said so")
    reply = order(client, checkpoint=name)
    assert (reply.status_code, reply.json()["error"]) == (409, "not_restorable")
    assert state in reply.json()["message"]
    assert order(client, iteration=25).json()["nearest"]["iteration"] == 20


@pytest.mark.parametrize(
    "wish",
    [{}, {"iteration": -1}, {"iteration": 2**60}, {"iteration": "ten"}, {"checkpoint": "../x"}, {"itteration": 1},
     {"iteration": 10, "key": ""}, {"iteration": 10, "key": "k" * 300}],
)  # fmt: skip
def test_what_is_no_restore_is_refused(job, client, wish):
    reply = order(client, **wish)
    assert (reply.status_code, reply.json()["error"]) == (422, "invalid_setting")
    assert client.get(f"{JOB}/restores").json() == {"restores": []}


def test_an_unknown_job_has_no_restores(client):
    assert order(client, iteration=1).status_code == 404
    assert client.get(f"{JOB}/restores").status_code == 404


def test_an_unknown_order_is_not_found(job, client):
    assert client.get(f"{JOB}/restores/nothing").status_code == 404
    assert client.post(f"{JOB}/restores/nothing/cancel").status_code == 404


def test_the_order_of_another_job_is_not_found(job, client, fresh_agent):
    placed = order(client, iteration=10).json()
    fresh_agent(client, job="other", uid="o").start()
    assert client.get(f"/api/v1/jobs/other/restores/{placed['id']}").status_code == 404
    assert client.post(f"/api/v1/jobs/other/restores/{placed['id']}/cancel").status_code == 404


def test_an_order_can_be_cancelled_until_the_agent_restores(job, client):
    placed = order(client, iteration=10).json()
    moved(job, placed, "delivered")
    reply = client.post(f"{JOB}/restores/{placed['id']}/cancel")
    assert (reply.status_code, reply.json()["state"]) == (200, "cancelled")
    assert client.post(f"{JOB}/restores/{placed['id']}/cancel").json()["state"] == "cancelled"
    assert client.get(f"{JOB}/desired").json()["restore"] is None
    assert client.get(f"{JOB}/desired").json()["version"] == 2
    assert order(client, iteration=20).status_code == 201


def test_a_restore_under_way_cannot_be_cancelled(job, client):
    placed = order(client, iteration=10).json()
    moved(job, placed, "restoring")
    reply = client.post(f"{JOB}/restores/{placed['id']}/cancel")
    assert (reply.status_code, reply.json()["error"]) == (409, "not_cancellable")
    assert read(client, placed)["state"] == "restoring"


def cancel(client, placed):
    return client.post(f"{JOB}/restores/{placed['id']}/cancel")


def test_a_restore_whose_attempt_has_ended_can_be_cancelled(job, client):
    placed = order(client, iteration=10).json()
    moved(job, placed, "restoring")
    assert read(client, placed)["cancellable"] is False
    job.say(AttemptFinished(at=job.at, iteration=30, lineage=1, reason="RuntimeError"))
    assert read(client, placed)["cancellable"] is True
    assert (cancel(client, placed).status_code, read(client, placed)["state"]) == (200, "cancelled")
    assert order(client, iteration=20).status_code == 201


def test_a_restore_that_an_earlier_attempt_began_can_be_cancelled_until_the_next_one_is_at_it(job, client):
    placed = order(client, iteration=10).json()
    moved(job, placed, "restoring")
    second = job.restarted()
    second.start(previous_exit="killed by SIGKILL")
    assert client.get(f"{JOB}/desired").json()["restore"]["id"] == placed["id"]
    assert cancel(client, placed).json()["state"] == "cancelled"
    moved(second, placed, "restoring")
    assert cancel(client, placed).status_code == 409


@pytest.mark.parametrize("steps", [["restored"], ["restoring", "restored"]])
def test_a_cancel_that_came_too_late_is_told_as_one(job, client, steps):
    placed = order(client, iteration=10).json()
    moved(job, placed, "delivered")
    cancel(client, placed)
    version = client.get(f"{JOB}/desired").json()["version"]
    for state in steps:
        moved(job, placed, state)
        reopened = client.get(f"{JOB}/desired").json()
        assert (reopened["restore"] is not None) is (state == "restoring")
    done = read(client, placed)
    assert [one["state"] for one in done["transitions"]] == ["requested", "delivered", "cancelled", *steps]
    assert (done["state"], done["transitions"][3]["reason"]) == (
        "restored",
        "the cancel reached the agent too late",
    )
    assert client.get(f"{JOB}/desired").json()["version"] == version + 2 * (len(steps) - 1)


@pytest.mark.parametrize("how", ["told", "noted"])
def test_a_failure_that_was_told_after_the_next_attempt_had_carried_the_order_out_is_overruled(job, client, how):
    placed = order(client, iteration=10).json()
    second = job.restarted()
    moved(job, placed, "restoring")
    moved(job, placed, "failed", reason="a digest is wrong")
    version = client.get(f"{JOB}/desired").json()["version"]
    second.start()
    second.lineage = 2
    if how == "told":
        moved(second, placed, "restored")
    else:
        second.say(begun_by(placed, at=second.at + 1.0))
    done = read(client, placed)
    assert [one["state"] for one in done["transitions"]] == ["requested", "restoring", "failed", "restored"]
    assert (done["state"], done["reason"]) == (
        "restored", "an earlier attempt failed to restore, and reported it late",
    )  # fmt: skip
    assert client.get(f"{JOB}/desired").json()["version"] == version, "it was over already"


def test_a_failure_stays_one_where_the_lineage_is_that_of_the_state_that_could_not_be_put_in_place(job, client):
    placed = order(client, iteration=10).json()
    moved(job, placed, "restoring")
    began = begun_by(placed, at=job.at)
    job.at += 1.0
    moved(job, placed, "failed", reason="a user's load_state_dict")
    moved(job, placed, "restored")
    second = job.restarted()
    second.start()
    second.say(began)
    assert [one["state"] for one in read(client, placed)["transitions"]] == ["requested", "restoring", "failed"]


def begun_by(placed, *, at):
    return LineageStarted(at=at, lineage=2, iteration=10, parent=placed["checkpoint"], order=placed["id"])


def test_what_was_not_carried_out_stays_cancelled(job, client):
    placed = order(client, iteration=10).json()
    cancel(client, placed)
    for state in ("delivered", "failed", "expired", "superseded"):
        moved(job, placed, state)
    assert (read(client, placed)["state"], len(read(client, placed)["transitions"])) == ("cancelled", 2)


def test_a_late_restore_leaves_the_order_that_came_after_the_cancel_open(job, client):
    placed = order(client, iteration=10).json()
    cancel(client, placed)
    later = order(client, iteration=20).json()
    moved(job, placed, "restoring")
    moved(job, placed, "restored")
    assert (read(client, placed)["state"], read(client, later)["state"]) == ("restored", "requested")
    assert client.get(f"{JOB}/desired").json()["restore"]["id"] == later["id"]


@pytest.mark.parametrize("iteration", [10, 20])
def test_an_order_above_the_attempt_that_runs_gives_way_to_a_new_one(job, client, clock, iteration):
    clock.now += 3660
    second = job.restarted()
    second.start()
    stuck = order(client, iteration=10).json()
    moved(second, stuck, "restoring")
    after = job.restarted("third")
    after.attempt = 1
    after.at += 3600
    after.start()
    assert (stuck["fence"], read(client, stuck)["cancellable"]) == (2, True)
    reply = order(client, iteration=iteration)
    assert (reply.status_code, reply.json()["fence"], reply.json()["iteration"]) == (201, 1, iteration)
    assert read(client, stuck)["state"] == "superseded"
    moved(after, reply.json(), "restored")
    assert read(client, reply.json())["state"] == "restored"


@pytest.mark.parametrize("ended", ["restored", "failed", "superseded"])
def test_an_order_that_has_ended_moves_no_more(job, client, ended):
    placed = order(client, iteration=10).json()
    moved(job, placed, ended, reason="so it is")
    for state in ("delivered", "restoring", "restored", "failed", "requested"):
        moved(job, placed, state, reason="late")
    after = read(client, placed)
    assert (after["state"], after["reason"], len(after["transitions"])) == (ended, "so it is", 2)


def test_an_attempt_from_before_the_fence_moves_nothing(job, client):
    second = job.restarted()
    second.start()
    placed = order(client, iteration=10).json()
    assert placed["fence"] == 2
    moved(job, placed, "restored")
    assert read(client, placed)["state"] == "requested"


def test_an_agent_cannot_move_the_order_of_another_job(job, client, fresh_agent):
    placed = order(client, iteration=10).json()
    outsider = fresh_agent(client, job="other", uid="o", attempt=5)
    outsider.start()
    moved(outsider, placed, "restored")
    assert read(client, placed)["state"] == "requested"


def test_an_order_waits_for_the_next_start_of_a_job_that_has_ended(job, client):
    job.say(AttemptFinished(at=job.at, iteration=30, lineage=1, reason="finished"))
    placed = order(client, iteration=10).json()
    second = job.restarted()
    second.start()
    assert client.get(f"{JOB}/desired").json()["restore"]["id"] == placed["id"]
    moved(second, placed, "restored", seconds=2.0)
    assert read(client, placed)["state"] == "restored"


def test_an_order_outlives_the_attempt_that_was_restoring(job, client):
    placed = order(client, iteration=10).json()
    moved(job, placed, "restoring")
    second = job.restarted()
    second.start(previous_exit="killed by SIGKILL")
    assert read(client, placed)["state"] == "restoring"
    moved(second, placed, "restored")
    assert read(client, placed)["state"] == "restored"


def test_an_order_that_the_agent_ends_is_nobodys_edit(job, client):
    placed = order(client, iteration=10).json()
    moved(job, placed, "failed", reason="its digest is wrong")
    assert client.get(f"{JOB}/desired").json()["version"] == 2
    reply = client.patch(f"{JOB}/desired", json={"budget": 0.02}, headers={"If-Match": '"1"'})
    assert reply.status_code == 200


def test_a_restore_is_described_before_it_is_ordered(job, client):
    preview = client.get(f"{JOB}/restores/preview?checkpoint=000000000010-1").json()
    assert (preview["from_iteration"], preview["to_iteration"], preview["iterations_abandoned"]) == (30, 10, 20)
    assert preview["seconds_abandoned"] == pytest.approx(2.0)
    assert (preview["estimated_seconds"], preview["estimated_from"]) == (0.5, "based on its write time")
    assert (preview["alive"], preview["safety_checkpoint"]) == (True, True)
    assert preview["what"] == "in place, at the next iteration boundary"


def test_a_restore_that_was_measured_tells_how_long_the_next_takes(job, client):
    placed = order(client, iteration=10).json()
    moved(job, placed, "restored", seconds=3.0)
    preview = client.get(f"{JOB}/restores/preview?checkpoint=000000000020-1").json()
    assert (preview["estimated_seconds"], preview["estimated_from"]) == (3.0, "the last restore of this job")


def test_a_job_that_is_not_running_goes_back_at_its_next_start(job, client, clock):
    clock.now += 3600
    preview = client.get(f"{JOB}/restores/preview?checkpoint=000000000010-1").json()
    assert (preview["alive"], preview["what"]) == (False, "at the next start of the job")
    assert (preview["mode"], preview["safety_checkpoint"]) == ("next_start", False)


def says(job, mode, reason="the script says so itself", start_seconds=None):
    job.say(
        wire.RestoreModeReport(
            at=job.at, iteration=30, lineage=1, mode=mode, reason=reason, start_seconds=start_seconds
        )
    )


def test_a_script_that_is_started_again_for_it_is_said_to_be_with_what_that_takes(job, client):
    says(job, "relaunch", start_seconds=41.5)
    preview = client.get(f"{JOB}/restores/preview?checkpoint=000000000010-1").json()
    assert (preview["mode"], preview["safety_checkpoint"]) == ("relaunch", True)
    assert preview["what"] == (
        "at once, by a restart of the script through its supervisor: the script says so itself"
    )
    assert (preview["estimated_seconds"], preview["estimated_from"]) == (
        41.5,
        "the start of this attempt, up to its first iteration",
    )
    says(job, "relaunch")
    preview = client.get(f"{JOB}/restores/preview?checkpoint=000000000010-1").json()
    assert (preview["estimated_seconds"], preview["estimated_from"]) == (None, "")


def test_a_script_that_nobody_starts_again_is_said_to_wait(job, client, clock):
    says(job, "next_start")
    shown = client.get(JOB).json()
    assert (shown["restore_mode"], shown["restore_reason"]) == ("next_start", "the script says so itself")
    preview = client.get(f"{JOB}/restores/preview?checkpoint=000000000010-1").json()
    assert "once you start the script again: the script" in preview["what"]
    says(job, "in_place", reason="")
    assert client.get(JOB).json()["restore_mode"] == "in_place"
    says(job, "relaunch")
    clock.now += 3600
    shown = client.get(JOB).json()
    assert (shown["restore_mode"], shown["restore_reason"]) == ("next_start", "")


def test_a_restore_is_undone_once_and_its_undoing_as_well(job, client):
    placed = order(client, iteration=10).json()
    early = client.post(f"{JOB}/restores/{placed['id']}/undo")
    assert (early.status_code, "it is requested" in early.json()["message"]) == (409, True)
    job.checkpoint(30, kind="safety")
    moved(job, placed, "restored", safety_checkpoint=checkpoint_id(30, 1))
    back = client.post(f"{JOB}/restores/{placed['id']}/undo")
    assert (back.status_code, back.json()["checkpoint"]) == (201, checkpoint_id(30, 1))
    again = client.post(f"{JOB}/restores/{placed['id']}/undo")
    assert (again.status_code, again.json()["id"]) == (200, back.json()["id"])
    moved(job, back.json(), "restored", safety_checkpoint=checkpoint_id(10, 1))
    assert client.post(f"{JOB}/restores/{back.json()['id']}/undo").json()["checkpoint"] == checkpoint_id(10, 1)
    assert client.post(f"{JOB}/restores/nothing/undo").status_code == 404


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_an_undoing_that_came_to_nothing_can_be_asked_for_again(job, client, state):
    placed = order(client, iteration=10).json()
    job.checkpoint(30, kind="safety")
    moved(job, placed, "restored", safety_checkpoint=checkpoint_id(30, 1))
    undo = f"{JOB}/restores/{placed['id']}/undo"
    first = client.post(undo).json()
    if state == "cancelled":
        cancel(client, first)
    else:
        moved(job, first, "failed", reason="the safety checkpoint is damaged")
    second = client.post(undo)
    assert (second.status_code, second.json()["id"] != first["id"]) == (201, True)
    assert client.post(undo).json()["id"] == second.json()["id"]


def test_a_cancelled_order_that_an_attempt_died_over_is_over_for_the_next_one(job, client):
    placed = order(client, iteration=10).json()
    moved(job, placed, "delivered")
    cancel(client, placed)
    moved(job, placed, "restoring")
    job.say(AttemptFinished(at=job.at, iteration=30, lineage=1, reason="RanksLost"))
    assert read(client, placed)["state"] == "unknown"
    job.restarted().start()
    assert read(client, placed)["state"] == "cancelled"
    assert client.get(f"{JOB}/desired").json()["restore"] is None


def test_what_retention_took_cannot_be_undone_any_more(job, client):
    placed = order(client, iteration=10).json()
    moved(job, placed, "restored", safety_checkpoint=checkpoint_id(30, 1))  # which is not in the store
    refused = client.post(f"{JOB}/restores/{placed['id']}/undo")
    assert (refused.status_code, refused.json()["error"]) == (409, "not_possible")
    assert "its safety checkpoint is no longer in the store" in refused.json()["message"]


def test_going_back_to_an_abandoned_lineage_gives_up_what_came_after_the_fork(job, client):
    job.iteration, job.lineage = 10, 2
    job.say(LineageStarted(at=job.at, lineage=2, iteration=10, parent="000000000010-1"))
    job.train(5)
    preview = client.get(f"{JOB}/restores/preview?checkpoint=000000000020-1").json()
    assert preview["checkpoint"]["abandoned"] is True
    assert (preview["iterations_abandoned"], preview["to_iteration"]) == (5, 20)
    assert preview["seconds_abandoned"] == pytest.approx(0.5)


def test_what_was_repeated_is_priced_once_as_the_last_attempt_took_it(job, client):
    second = job.restarted()
    second.iteration = 20
    second.start(resumed_from="000000000020-1", previous_exit="killed by SIGKILL")
    second.train(5, seconds=0.5)
    second.train(5, seconds=0.5)
    preview = client.get(f"{JOB}/restores/preview?checkpoint=000000000010-1").json()
    assert preview["iterations_abandoned"] == 20
    assert preview["seconds_abandoned"] == pytest.approx(10 * 0.1 + 10 * 0.5)


def test_what_an_attempt_lost_is_not_given_up_a_second_time(job, client):
    second = job.restarted()
    second.iteration = 20
    second.start(resumed_from="000000000020-1", previous_exit="killed by SIGKILL")
    preview = client.get(f"{JOB}/restores/preview?checkpoint=000000000010-1").json()
    assert (preview["iterations_abandoned"], preview["seconds_abandoned"]) == (10, pytest.approx(1.0))


def test_a_preview_of_an_unknown_checkpoint_offers_the_nearest(job, client):
    reply = client.get(f"{JOB}/restores/preview?checkpoint=000000000017-1")
    assert (reply.status_code, reply.json()["nearest"]["iteration"]) == (404, 10)
    assert client.get(f"{JOB}/restores/preview?checkpoint=x").status_code == 422


def test_an_order_that_nobody_takes_up_within_a_week_ends(job, client, clock):
    placed = order(client, iteration=10).json()
    version = client.get(f"{JOB}/desired").json()["version"]

    def after(seconds):
        watch(client, clock.now + seconds)
        return read(client, placed)["state"]

    assert after(restore_orders.EXPIRES_SECONDS - 1) == "requested"
    assert after(restore_orders.EXPIRES_SECONDS + 1) == after(restore_orders.EXPIRES_SECONDS + 2) == "expired"
    desired = client.get(f"{JOB}/desired").json()
    assert (desired["restore"], desired["version"]) == (None, version + 1)
    last = read(client, placed)["transitions"][-1]
    assert (last["who"], last["reason"]) == ("the server", "no attempt started it within 7 d")
    assert order(client, iteration=20).status_code == 201


def test_an_order_that_is_carried_out_does_not_expire(job, client, clock):
    placed = order(client, iteration=10, expires_seconds=10).json()
    moved(job, placed, "restoring")
    job.say()
    watch(client, clock.now + 19)
    assert read(client, placed)["state"] == "restoring"


@pytest.mark.parametrize("later_seconds", [9, 11])
def test_an_attempt_that_begins_when_its_time_is_over_does_not_take_an_order_over(
    job, client, clock, later_seconds
):
    placed = order(client, iteration=10, expires_seconds=10).json()
    moved(job, placed, "restoring")
    clock.now += later_seconds
    second = job.restarted()
    second.start(previous_exit="killed by SIGKILL")
    state, wanted = read(client, placed)["state"], client.get(f"{JOB}/desired").json()["restore"]
    assert (state, wanted is None) == (("restoring", False) if later_seconds < 10 else ("expired", True))
    if later_seconds > 10:
        assert last(client, placed)["reason"] == "attempt 1 did not finish it in time"


def test_what_an_agent_did_after_its_order_had_expired_is_so(job, client, clock):
    placed = order(client, iteration=10).json()
    watch(client, clock.now + 2 * restore_orders.EXPIRES_SECONDS)
    moved(job, placed, "restored")
    done = read(client, placed)
    assert (done["state"], done["reason"]) == ("restored", "an agent started it after it had expired")


def last(client, placed):
    return read(client, placed)["transitions"][-1]


def test_an_order_may_have_a_time_of_its_own(job, client, clock):
    placed = order(client, iteration=10, expires_seconds=90 * 60).json()
    assert placed["expires_at"] == clock.now + 5400
    clock.now += 5399
    assert client.get(f"{JOB}/desired").json()["restore"]["expires_in_seconds"] == 1
    clock.now += 1
    assert client.get(f"{JOB}/desired").json()["restore"] is None
    watch(client, clock.now)
    assert (last(client, placed)["state"], last(client, placed)["reason"]) == (
        "expired", "no attempt started it within 1 h 30 min",
    )  # fmt: skip


@ON_SQLITE
@pytest.mark.parametrize("seconds", [0, -1, 0.5, 31 * 86400, "soon"])
def test_what_is_no_time_for_an_order_is_refused(job, client, seconds):
    assert order(client, iteration=10, expires_seconds=seconds).status_code == 422
    assert client.get(f"{JOB}/restores").json() == {"restores": []}


def test_an_order_that_is_over_does_not_stand_in_the_way_of_the_next(job, client, clock):
    placed = order(client, iteration=10, expires_seconds=60).json()
    clock.now += 61
    assert order(client, iteration=20).status_code == 201
    assert read(client, placed)["state"] == "expired"


def test_a_restore_whose_agent_falls_silent_is_unknown_until_it_is_heard_of(job, client, clock):
    placed = order(client, iteration=10).json()
    moved(job, placed, "restoring")
    clock.now += 25
    watch(client, clock.now)
    assert (last(client, placed)["state"], last(client, placed)["who"]) == ("unknown", "the server")
    assert read(client, placed)["reason"] == "no contact with attempt 1 for 25 s"
    assert client.get(f"{JOB}/desired").json()["restore"]["id"] == placed["id"]
    assert read(client, placed)["cancellable"] is True
    assert order(client, iteration=20).status_code == 409
    job.say()
    watch(client, clock.now)
    assert (last(client, placed)["state"], last(client, placed)["reason"]) == (
        "restoring", "attempt 1 reports again",
    )  # fmt: skip
    moved(job, placed, "restored")
    assert (read(client, placed)["state"], read(client, placed)["reason"]) == ("restored", None)


@pytest.mark.parametrize("said", ["restored", "failed", "restoring"])
def test_the_next_attempt_tells_what_became_of_an_unknown_restore(job, client, clock, said):
    placed = order(client, iteration=10).json()
    moved(job, placed, "restoring")
    clock.now += 25
    watch(client, clock.now)
    second = job.restarted()
    second.start(previous_exit="killed by SIGKILL")
    watch(client, clock.now)
    assert read(client, placed)["state"] == "unknown"
    moved(second, placed, said)
    assert (last(client, placed)["state"], last(client, placed)["who"]) == (said, "agent, attempt 2")


def test_a_restore_whose_attempt_ends_without_a_word_is_unknown(job, client, clock):
    placed = order(client, iteration=10).json()
    moved(job, placed, "restoring")
    job.say(AttemptFinished(at=job.at, iteration=30, lineage=1, reason="RestoreFailed"))
    assert last(client, placed)["reason"] == "attempt 1 ended (RestoreFailed) without reporting a result"
    watch(client, clock.now)
    assert read(client, placed)["state"] == "unknown"


def test_what_nobody_tells_of_an_unknown_restore_ends_in_time(job, client, clock):
    placed = order(client, iteration=10, expires_seconds=3600).json()
    moved(job, placed, "restoring")
    for later in (25, 3600):
        watch(client, clock.now + later)
    assert [one["state"] for one in read(client, placed)["transitions"]][-2:] == ["unknown", "expired"]
    assert read(client, placed)["reason"] == "no further report of it within 1 h"
    assert client.get(f"{JOB}/desired").json()["restore"] is None


def test_the_attempt_that_takes_a_restore_over_is_named_and_the_one_before_has_no_more_say(job, client):
    placed = order(client, iteration=10).json()
    moved(job, placed, "restoring")
    second = job.restarted()
    second.start(previous_exit="killed by SIGKILL")
    moved(second, placed, "restoring")
    moved(second, placed, "restoring")
    assert (last(client, placed)["who"], last(client, placed)["reason"]) == (
        "agent, attempt 2", "attempt 1 did not finish it",
    )  # fmt: skip
    for state in ("failed", "restoring", "expired"):
        moved(job, placed, state, reason="a newer attempt has begun")
    assert len(read(client, placed)["transitions"]) == 3
    moved(second, placed, "restored")
    assert read(client, placed)["state"] == "restored"


def test_an_unknown_restore_is_shown_as_one(job, client, clock):
    placed = order(client, iteration=10).json()
    moved(job, placed, "restoring")
    clock.now += 25
    watch(client, clock.now)
    page = client.get("/jobs/char-gpt").text
    assert '<section class="restore-status" data-state="unknown"' in page
    assert "no contact with attempt 1 for 25 s" in page
    assert 'data-state="unknown" aria-current="step"' in page


@pytest.mark.parametrize("ended", ["requested", "unknown", "cancelled", "expired"])
def test_the_lineage_that_an_order_began_tells_that_it_was_carried_out(job, client, clock, ended):
    placed = order(client, iteration=10, expires_seconds=3600).json()
    if ended != "requested":
        moved(job, placed, "restoring")
        watch(client, clock.now + 25)
    if ended == "cancelled":
        cancel(client, placed)
    if ended == "expired":
        watch(client, clock.now + 3600)
    assert read(client, placed)["state"] == ended
    second = job.restarted()
    second.iteration, second.lineage = 10, 2
    second.say(LineageStarted(at=job.at, lineage=2, iteration=10, parent="000000000010-1", order=placed["id"]))
    done = read(client, placed)
    assert (done["state"], done["new_lineage"], last(client, placed)["who"]) == ("restored", 2, "agent, attempt 2")
    assert client.get(f"{JOB}/desired").json()["restore"] is None
    safety = "000000000030-1"
    moved(second, placed, "restored", seconds=1.5, safety_checkpoint=safety)
    assert (read(client, placed)["seconds"], read(client, placed)["safety_checkpoint"]) == (1.5, safety)
    assert len(read(client, placed)["transitions"]) == len(done["transitions"])


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("over", ["cancelled", "expired"])
def test_an_order_that_is_over_stays_so_when_who_took_it_up_did_not_finish(job, client, clock, known, over):
    placed = order(client, iteration=10, expires_seconds=3600).json()
    if over == "cancelled":
        cancel(client, placed)
    else:
        watch(client, clock.now + 3600)
    second = job.restarted()
    if known:
        second.start()
    moved(job, placed, "restoring")  # out of the spool of one that is dead
    assert read(client, placed)["state"] == (over if known else "restoring")
    if not known:
        second.start()
        assert last(client, placed)["reason"] == "attempt 1 did not finish it"
    assert read(client, placed)["state"] == over
    assert client.get(f"{JOB}/desired").json()["restore"] is None


def test_what_was_left_for_a_lineage_is_the_way_back_though_who_restored_did_not_live_to_say_so(job, client):
    placed = order(client, iteration=10).json()
    moved(job, placed, "restoring")
    safety = job.checkpoint(kind="safety")
    second = job.restarted()
    second.iteration, second.lineage = 10, 2
    began = LineageStarted(at=job.at, lineage=2, iteration=10, parent="000000000010-1", order=placed["id"],
                           left=safety)  # fmt: skip
    second.say(began)
    done = read(client, placed)
    assert (done["state"], done["safety_checkpoint"], done["undoable"]) == ("restored", safety, True)


def damage(job, checkpoint, iteration):
    reason = "rank-0.safetensors: the low bytes of 1 block are lost, which only a degraded restore replaces"
    job.say(wire.Checkpoint(at=job.at, id=checkpoint, iteration=iteration, lineage=1, kind="scheduled",
                                state="damaged", reason=reason))  # fmt: skip
    return reason


def test_a_damaged_checkpoint_is_restored_by_a_degraded_order_alone(job, client):
    damage(job, "000000000020-1", 20)
    assert order(client, checkpoint="000000000020-1").status_code == 409
    assert order(client, iteration=20).status_code == 404
    placed = order(client, iteration=20, degraded=True).json()
    assert (placed["checkpoint"], placed["degraded"]) == ("000000000020-1", True)
    assert client.get(f"{JOB}/desired").json()["restore"]["degraded"] is True
    assert "degraded" in client.get("/api/v1/audit").text


def test_a_degraded_order_prefers_a_durable_checkpoint_and_other_states_stay_refused(job, client):
    assert order(client, iteration=20, degraded=True).json()["checkpoint"] == "000000000020-1"
    torn = job.checkpoint(25, "torn", reason="the disk said so")
    assert order(client, checkpoint=torn, degraded=True).status_code == 409


def test_an_order_may_leave_out_data(job, client):
    placed = order(client, iteration=10, key="k", skip={"batches": 200, "loader": 0}).json()
    assert placed["skip"] == {"batches": 200, "to_iteration": None, "loader": 0}
    assert client.get(f"{JOB}/desired").json()["restore"]["skip"] == placed["skip"]
    assert order(client, iteration=10, key="k").status_code == 422
    assert order(client, iteration=10).status_code == 409
    left_out = {"iteration": 10, "batches": 200, "loader": 0, "world_size": 1}
    job.say(LineageStarted(at=job.at, lineage=2, iteration=10, parent="000000000010-1", order=placed["id"],
                           left_out=(LeftOutData(**left_out),)))  # fmt: skip
    lineages = client.get(f"{JOB}/timeline").json()["lineages"]
    assert [each["left_out"] for each in lineages] == [[], [left_out]]
    job.lineage, job.iteration = 2, 10
    job.train(1)
    assert client.get(JOB).json()["left_out"] == [left_out]
    head = " ".join(re.sub(r"<[^>]+>", " ", client.get("/jobs/char-gpt").text).split())
    assert "data left out: 200 batches after iteration 10" in head


@pytest.mark.parametrize(
    "skip",
    [
        {"batches": 0},
        {"to_iteration": 10},
        {"to_iteration": -1},
        {},
        {"loader": 0},
        {"batches": 1, "to_iteration": 20},
    ],
    ids=str,
)
def test_an_order_that_leaves_out_nothing_is_refused(job, client, skip):
    assert order(client, iteration=10, skip=skip).status_code == 422


def test_a_restore_by_the_rule_of_a_job_is_an_order_of_the_policy(job, client):
    job.say(LineageStarted(at=job.at, lineage=2, iteration=10, parent="000000000010-1", order="0f" * 16,
                           left="000000000030-1", trouble=13,
                           left_out=(LeftOutData(iteration=10, batches=8),)))  # fmt: skip
    (made,) = client.get(f"{JOB}/restores").json()["restores"]
    assert (made["who"], made["state"], made["iteration"], made["new_lineage"]) == ("policy", "restored", 10, 2)
    assert made["reason"] == "the loss was wrong from iteration 13 on"
    assert made["skip"] == {"batches": 8, "to_iteration": None, "loader": 0}
    assert made["safety_checkpoint"] == "000000000030-1"
    assert "policy" in client.get("/jobs/char-gpt").text


def test_the_dialog_offers_to_leave_out_data(job, client):
    dialog = client.get("/jobs/char-gpt/restore?checkpoint=000000000010-1").text
    assert "Repeat the same data" in dialog
    assert 'name="skip_to" inputmode="numeric" autocomplete="off" value="30"' in dialog
    data = {"checkpoint": "000000000010-1", "key": "k", "data": "skip", "skip_to": "x"}
    refused = client.post("/jobs/char-gpt/restores", data=data)
    assert (refused.status_code, "is not an iteration" in refused.text, 'value="x"' in refused.text) == (
        422,
        True,
        True,
    )
    sent = client.post("/jobs/char-gpt/restores", data=data | {"skip_to": "25"}, follow_redirects=False)
    assert sent.status_code == 303
    (placed,) = client.get(f"{JOB}/restores").json()["restores"]
    assert placed["skip"] == {"batches": None, "to_iteration": 25, "loader": None}


def test_the_dialog_takes_a_number_of_batches_of_a_loader(job, client):
    report = RestoreModeReport(at=job.at, iteration=30, lineage=1, mode="in_place", batches_an_iteration=2)
    job.say(report)
    dialog = client.get("/jobs/char-gpt/restore?checkpoint=000000000010-1").text
    assert re.search(r'name="batches"[^>]* value="40"', dialog)
    data = {"checkpoint": "000000000010-1", "key": "k", "data": "batches", "batches": "0", "loader": "1"}
    refused = client.post("/jobs/char-gpt/restores", data=data)
    assert refused.status_code == 422
    assert "is not a number of batches" in refused.text
    assert 'value="batches" checked' in refused.text
    assert client.post("/jobs/char-gpt/restores", data=data | {"batches": "9", "loader": "x"}).status_code == 422
    sent = client.post("/jobs/char-gpt/restores", data=data | {"batches": "1,200"}, follow_redirects=False)
    assert sent.status_code == 303
    (placed,) = client.get(f"{JOB}/restores").json()["restores"]
    assert placed["skip"] == {"batches": 1200, "to_iteration": None, "loader": 1}


def test_where_iterations_take_different_numbers_of_batches_none_is_suggested(job, client):
    dialog = client.get("/jobs/char-gpt/restore?checkpoint=000000000010-1").text
    assert re.search(r'name="batches"[^>]* value=""', dialog)


def test_a_lineage_is_inexact_for_good_after_a_degraded_restore(job, client):
    reason = damage(job, "000000000020-1", 20)
    page = client.get("/jobs/char-gpt/checkpoints/000000000020-1").text
    assert "Restore degraded…" in page
    dialog = client.get("/jobs/char-gpt/restore?checkpoint=000000000020-1&degraded=true").text
    assert reason in dialog
    assert 'name="degraded" value="true"' in dialog
    assert "marked <b>inexact</b> for good" in dialog
    plain = client.get("/jobs/char-gpt/restore?checkpoint=000000000020-1")
    assert plain.status_code == 422
    data = {"checkpoint": "000000000020-1", "key": "k", "degraded": "true"}
    assert client.post("/jobs/char-gpt/restores", data=data, follow_redirects=False).status_code == 303
    placed = client.get(f"{JOB}/restores").json()["restores"][0]
    assert placed["degraded"] is True
    job.say(LineageStarted(at=job.at, lineage=2, iteration=20, parent="000000000020-1", order=placed["id"],
                           inexact="000000000020-1"))  # fmt: skip
    job.lineage, job.iteration = 2, 20
    made = job.checkpoint()
    assert client.get(JOB).json()["inexact"] == "000000000020-1"
    assert "inexact since the degraded restore" in client.get("/jobs/char-gpt").text
    shown = client.get(f"/jobs/char-gpt/checkpoints/{made}").text
    assert "Inexact: its state descends from the degraded restore" in shown
