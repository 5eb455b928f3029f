"""Spikes of the loss: what is one, what raises an alert, and the checkpoint to restore."""

from __future__ import annotations

import itertools
import re
import tracemalloc

import numpy as np
import pytest
from sqlalchemy import update

from holdfast.protocol.analyses import SAME_LOSSES
from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import AttemptFinished, Inventory, LineageStarted
from holdfast_server import models
from holdfast_server.alerts import evaluation, facts
from holdfast_server.alerts.conditions import KINDS
from holdfast_server.alerts.loss_spikes import LEAST_SAMPLES, LossHistory, find_spikes
from holdfast_server.samples import sample_codec
from holdfast_server.samples.limits import START_LOSSES, RecentSamples, latest

LIMIT, WINDOW = KINDS["loss_spike"].limit, KINDS["loss_spike"].window
JOB = "/api/v1/jobs/char-gpt"


def noisy(count, *, seed=0, spread=0.1):
    return 2.5 + spread * np.random.default_rng(seed).standard_normal(count)


def spikes_of(losses, **options):
    iterations = np.arange(1, len(losses) + 1)
    found = find_spikes(iterations, np.asarray(losses), limit=LIMIT, window=WINDOW, **options)
    return [spike.iteration for spike in found]


def test_noise_is_no_spike_and_a_value_far_above_it_is_one():
    losses = noisy(2000)
    assert spikes_of(losses) == []
    losses[1499] = 9.0
    assert spikes_of(losses) == [1500]


def test_a_loss_that_stays_high_is_one_spike_at_its_first_iteration():
    losses = noisy(2000)
    losses[1499:1560] += 5
    assert spikes_of(losses) == [1500]


def test_values_that_the_window_has_had_are_no_spike():
    losses = noisy(2000)
    losses[300::60] = 6.0
    assert spikes_of(losses) == [301]


def test_a_fall_is_no_spike():
    losses = noisy(1000)
    losses[500:] -= 2
    assert spikes_of(losses) == []


def test_a_loss_that_hardly_changes_does_not_spike_with_each_rounding():
    assert spikes_of(1 + 1e-6 * noisy(1000)) == []


def test_a_rise_that_is_small_beside_the_loss_at_the_start_is_no_spike():
    losses = 4e-7 * np.exp(0.3 * noisy(1000))
    losses[499:540] = 1.1e-5
    assert spikes_of(losses) == [500]
    assert spikes_of(losses, start=8.0) == []
    losses[699:] = 0.5
    assert spikes_of(losses, start=8.0) == [700]


def test_with_few_losses_nothing_is_a_spike():
    assert spikes_of([2.0] * (LEAST_SAMPLES - 1) + [100.0]) == []


def test_losses_that_are_not_finite_are_left_out():
    losses = noisy(1000)
    losses[400:600] = np.nan
    losses[700] = np.inf
    assert spikes_of(losses) == []


@pytest.mark.parametrize(("replayed_until", "found"), [(0, 1500), (1499, 1500), (1500, None), (9000, None)])
def test_iterations_that_a_restore_repeats_raise_nothing(replayed_until, found):
    losses = noisy(1510)
    losses[1499] = 9.0
    at = np.arange(1510.0)
    history = LossHistory(np.arange(1, 1511), losses, at, replayed_until=replayed_until)
    spike = history.newest_spike(LIMIT, WINDOW)
    assert (spike and spike.iteration) == found


@pytest.mark.parametrize(("after", "found"), [(20, 1480), (5, None)])
def test_a_repeated_spike_from_which_the_loss_does_not_return_counts(after, found):
    losses = noisy(1479 + after)
    losses[1479:] = 2.5e4
    history = LossHistory(np.arange(1, 1480 + after), losses, np.arange(1479.0 + after), replayed_until=1600)
    spike = history.newest_spike(LIMIT, WINDOW)
    assert (spike and spike.iteration) == found


def test_a_job_keeps_the_scale_of_its_first_losses():
    recent = latest(RecentSamples(), [0.1] * 3, [np.nan, 8.0, 9.0], {})
    recent = latest(recent, [0.1] * 300, [1e-6] * 300, {})
    assert recent.start_losses == [8.0, 9.0] + [1e-6] * (START_LOSSES - 2)
    assert latest(recent, [0.1], [7.0], {}).start_losses == recent.start_losses


# ---- from the reports to the alert ---------------------------------------------------------------


@pytest.fixture
def look(client, clock):
    def look(seconds=0.0):
        clock.now += seconds
        evaluation.evaluate(client.app.state.services.database, clock.now)

    return look


@pytest.fixture
def trained(agent, client):
    """A job at iteration 300 with a checkpoint every 50 iterations."""
    agent.start()
    agent.losses = iter(noisy(10_000).tolist())
    train(agent, 300)
    return agent


def train(agent, iterations, *, loss=None):
    """Report a batch of iterations up to each checkpoint."""
    end = agent.iteration + iterations
    while agent.iteration < end:
        count = min(50 - agent.iteration % 50, end - agent.iteration)
        agent.train(count, loss=list(itertools.islice(agent.losses, count)) if loss is None else loss)
        if agent.iteration % 50 == 0:
            agent.checkpoint()


def alerts(client, kind):
    found = client.get("/api/v1/alerts", params={"state": "all"}).json()["alerts"]
    return [alert for alert in found if alert["kind"] == kind]


def test_a_spike_raises_one_alert_that_names_the_last_good_checkpoint(trained, client, look):
    train(trained, 1, loss=9.0)
    train(trained, 5)
    for _ in range(3):
        look(1)
    (alert,) = alerts(client, "loss_spike")
    assert (alert["iteration"], alert["lineage"], alert["last_good"]) == (301, 1, checkpoint_id(250, 1))
    assert re.fullmatch(
        r"the loss was 9 at iteration 301, usually 2\.\d+: \S+ × the usual noise higher \(limit 6\)",
        alert["message"],
    )
    (trouble,) = client.get(f"{JOB}/timeline").json()["troubles"]
    assert (trouble["iteration"], trouble["last_good"], trouble["abandoned"]) == (
        301,
        checkpoint_id(250, 1),
        False,
    )


def test_a_fleet_is_checked_with_the_losses_of_few_jobs_in_memory(client, fresh_agent, look, monkeypatch):
    monkeypatch.setattr(evaluation, "LOSSES_AT_ONCE", 2)
    held = []

    def read_losses(*asked):
        found = facts_read_losses(*asked)
        held.append(sorted(found))
        return found

    facts_read_losses = facts.read_losses
    monkeypatch.setattr(facts, "read_losses", read_losses)
    for number in range(5):
        agent = fresh_agent(client, job=f"job-{number}")
        agent.start()
        agent.train(300, loss=noisy(300).tolist())
        agent.train(1, loss=9.0)
    look(1)
    assert held == [["job-0", "job-1"], ["job-2", "job-3"], ["job-4"]]
    assert sorted(alert["job"] for alert in alerts(client, "loss_spike")) == [f"job-{n}" for n in range(5)]


def test_of_many_chunks_only_the_losses_asked_for_are_in_memory():
    metrics, rows, chunks, first = ("loss", *(f"metric {number}" for number in range(60))), 1000, 20, 15_001
    values = np.random.default_rng(0).random((len(sample_codec.BUILT_IN) + len(metrics), rows))
    of_chunk = [
        sample_codec.pack(sample_codec.Table(np.arange(rows) + 1 + rows * number, metrics, values))
        for number in range(chunks)
    ]
    tracemalloc.start()
    try:
        iterations, losses, at = facts._join_losses(of_chunk, first)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (iterations[0], iterations[-1]) == (first, rows * chunks)
    assert np.array_equal(losses, np.tile(values[len(sample_codec.BUILT_IN)], 5))
    assert np.array_equal(at, np.tile(values[0], 5))
    assert peak < chunks * values.nbytes / 2


@pytest.fixture
def sent(client, empty_database, monkeypatch):
    """The events of messages to a channel, oldest first."""
    row = {"name": "on call", "kind": "webhook", "target": "https://hooks.example.org/x", "secret": ""}
    add_channel(client.app.state.services.database, row)
    return lambda: [
        (delivery["event"], delivery["alert"])
        for delivery in reversed(
            client.get("/api/v1/projects/default/alert-channels/c/deliveries").json()["deliveries"]
        )
    ]


def add_channel(database, row):
    def add(session):
        session.add(
            models.AlertChannelRecord(
                **row, id="c", project="default", least_severity="info", created_at=0.0, created_by="operator"
            )
        )

    database.write(add)


def test_no_message_is_sent_about_a_spike_that_is_over_within_ten_iterations(trained, client, clock, look, sent):
    train(trained, 1, loss=9.0)
    train(trained, 4)
    look(1)
    assert (alerts(client, "loss_spike")[0]["state"], sent()) == ("firing", [])
    train(trained, 400)
    hold(trained, clock, look, seconds=120)
    assert (alerts(client, "loss_spike")[0]["state"], sent()) == ("resolved", [])


def test_a_message_is_sent_once_about_a_spike_that_lasts(trained, client, clock, look, sent):
    train(trained, 4, loss=2.5e4)
    look(1)
    assert (alerts(client, "loss_spike")[0]["state"], sent()) == ("firing", [])
    train(trained, 6, loss=2.5e4)
    look(1)
    (alert,) = alerts(client, "loss_spike")
    assert alert["message"].endswith("; it is still high 10 iterations later")
    assert sent() == [("firing", alert["id"])]
    hold(trained, clock, look, seconds=120, loss=2.5e4)
    assert sent() == [("firing", alert["id"])]
    rows = models.AlertDeliveryRecord
    delivered = update(rows).values(state="delivered", payload=b"x", tries=1, ended_at=clock.now)
    client.app.state.services.database.write(lambda session: session.execute(delivered))
    train(trained, 400)
    hold(trained, clock, look, seconds=120)
    assert sent() == [("firing", alert["id"]), ("resolved", alert["id"])]


def test_the_loss_at_the_start_is_the_scale_of_a_job(agent, client, look):
    agent.start()
    agent.losses = iter([8.0] * 30 + (4e-7 * np.exp(0.3 * noisy(1000))).tolist())
    train(agent, 400)
    train(agent, 15, loss=1.1e-5)
    look(1)
    assert alerts(client, "loss_spike") == []


def test_the_dialog_offers_the_last_good_checkpoint_before_an_iteration(trained, client):
    dialog = " ".join(client.get("/jobs/char-gpt/restore?before=300").text.split())
    assert "to iteration 250?" in dialog
    assert f"The trouble at 300</b>: {SAME_LOSSES}" in dialog
    assert "to iteration 300?" in client.get("/jobs/char-gpt/restore?before=302").text
    refused = client.get("/jobs/char-gpt/restore?before=51")
    assert (refused.status_code, "no good checkpoint from before iteration 51" in refused.text) == (422, True)


def test_one_checkpoint_is_offered_from_before_the_first_of_several_troubles(trained, client, clock, look):
    train(trained, 60, loss=4e5)
    look(1)
    train(trained, 60, loss=float("nan"))
    look(1)
    clock.now += 61
    train(trained, 1, loss=float("nan"))
    look()
    assert [alert["last_good"] for alert in alerts(client, "loss_nan")] == [checkpoint_id(250, 1)]
    expected = {"iteration": 301, "reason": "before the spike at 301", "checkpoint": checkpoint_id(250, 1)}
    assert client.get(f"{JOB}/timeline").json()["last_good"] == expected
    for query in ("before=361", "iteration=200"):
        dialog = " ".join(client.get(f"/jobs/char-gpt/restore?{query}").text.split())
        assert f"The spike at 301</b>: {SAME_LOSSES}" in dialog
    assert "give the same losses" not in client.get("/jobs/char-gpt/restore?iteration=400").text
    previews = [
        client.get(f"{JOB}/restores/preview", params={"checkpoint": checkpoint_id(iteration, 1)}).json()["repeats"]
        for iteration in (250, 400)
    ]
    assert previews == ["the spike at 301", ""]
    dialog = " ".join(client.get("/jobs/char-gpt/restore?before=361").text.split())
    assert "to iteration 250?" in dialog
    assert "before the spike at 301" in dialog
    trained.say(AttemptFinished(at=trained.at, iteration=421, lineage=1, reason="FloatingPointError: loss"))
    page = " ".join(client.get("/jobs/char-gpt").text.split())
    assert "Restore to 250…</a><small>before the spike at 301</small>" in page
    assert "after the spike at 301: its weights may be wrong" in page


def test_the_first_loss_that_is_not_finite_is_named_exactly_where_buckets_are_wider(trained, client):
    train(trained, 41)
    train(trained, 900, loss=float("nan"))
    found = client.get(f"{JOB}/timeline", params={"points": 50}).json()
    assert found["bucketed"]
    assert (found["last_good"]["iteration"], found["last_good"]["checkpoint"]) == (342, checkpoint_id(300, 1))


def pins(client):
    return client.get(f"{JOB}/desired").json()["pins"]


def delete(agent, *iterations):
    """Report that retention deleted checkpoints."""
    left = [checkpoint_id(each, 1) for each in range(50, agent.iteration + 1, 50) if each not in iterations]
    deleted = {checkpoint_id(each, 1): "spaced 12" for each in iterations}
    agent.say(Inventory(at=agent.at, checkpoints=left, deleted=deleted))


def test_the_offered_checkpoint_is_pinned_while_its_alert_is_open(trained, client, look):
    train(trained, 60, loss=9.0)
    look(1)
    assert pins(client) == [checkpoint_id(250, 1)]
    (row,) = [row for row in client.get(f"{JOB}/checkpoints").json()["checkpoints"] if row["pinned"]]
    assert (row["id"], row["pinned_by"]) == (checkpoint_id(250, 1), "alert 1")
    assert "Kept for alert 1;" in client.get("/jobs/char-gpt").text
    page = client.get(f"/jobs/char-gpt/checkpoints/{checkpoint_id(250, 1)}").text
    assert "until the alert that offers to" in page
    refused = client.patch(f"{JOB}/checkpoints/{checkpoint_id(250, 1)}", json={"pinned": False})
    assert (refused.status_code, pins(client)) == (409, [checkpoint_id(250, 1)])
    assert "is kept for an open alert" in refused.json()["message"]
    client.put("/api/v1/projects/default/alert-rules/loss_spike", json={"enabled": False})
    look(1)
    assert (alerts(client, "loss_spike")[0]["state"], pins(client)) == ("resolved", [])
    acts = [row for row in client.get("/api/v1/audit").json()["entries"] if row["who"] == "alert 1"]
    assert [row["action"] for row in acts] == ["checkpoint.keep"]


def test_what_an_alert_keeps_is_no_version_of_the_settings_and_reaches_the_agent(trained, client, look):
    assert client.patch(f"{JOB}/desired", json={"budget": 0.02}, headers={"If-Match": '"0"'}).status_code == 200
    train(trained, 60, loss=9.0)
    poll = {"after": 1, "alert_pins": ""}
    assert client.get(f"{JOB}/desired", params=poll).status_code == 204
    look(1)
    desired = client.get(f"{JOB}/desired", params=poll).json()
    assert (desired["version"], desired["pins"], desired["alert_pins"]) == (1, *[[checkpoint_id(250, 1)]] * 2)
    assert client.get(f"{JOB}/desired", params=poll | {"alert_pins": checkpoint_id(250, 1)}).status_code == 204
    assert client.get(f"{JOB}/desired", params={"after": 1}).status_code == 204, "an older agent"
    delete(trained, 250)
    look(1)
    client.put("/api/v1/projects/default/alert-rules/loss_spike", json={"enabled": False})
    look(1)
    assert client.get(f"{JOB}/desired", params={"after": 1, "alert_pins": "x"}).json()["pins"] == []
    assert [edit["version"] for edit in client.get(f"{JOB}/edits").json()["edits"]] == [1]
    acts = [row["action"] for row in client.get("/api/v1/audit").json()["entries"] if row["job"] == "char-gpt"]
    assert acts == ["checkpoint.keep", "settings.edit"]


def test_the_pin_of_a_person_outlives_the_alert(trained, client, look):
    train(trained, 60, loss=9.0)
    look(1)
    pinned = client.patch(f"{JOB}/checkpoints/{checkpoint_id(250, 1)}", json={"pinned": True}).json()
    assert pinned["pinned_by"] == "operator"
    client.put("/api/v1/projects/default/alert-rules/loss_spike", json={"enabled": False})
    look(1)
    assert pins(client) == [checkpoint_id(250, 1)]


def test_after_a_deletion_the_next_older_checkpoint_is_offered_and_at_last_none(trained, client, look):
    train(trained, 60, loss=9.0)
    look(1)
    delete(trained, 250)
    look(1)
    assert alerts(client, "loss_spike")[0]["last_good"] == checkpoint_id(200, 1)
    assert pins(client) == [checkpoint_id(200, 1)]
    assert "to iteration 200?" in client.get("/jobs/char-gpt/restore?before=301").text
    delete(trained, 50, 100, 150, 200, 250)
    look(1)
    assert (alerts(client, "loss_spike")[0]["last_good"], pins(client)) == (None, [])
    page = " ".join(client.get("/jobs/char-gpt").text.split())
    assert "No checkpoint from before iteration 301 is left." in page
    assert "restore?before=" not in page


def test_a_checkpoint_is_kept_from_the_first_loss_that_is_not_finite_on(trained, client, look):
    train(trained, 60, loss=float("nan"))
    look(1)
    assert (alerts(client, "loss_nan"), pins(client)) == ([], [checkpoint_id(250, 1)])
    train(trained, 1)
    look(1)
    assert pins(client) == []


def hold(agent, clock, look, *, seconds=900, loss=None):
    """Train and evaluate for a while."""
    for _ in range(seconds // 30):
        clock.now += 30
        train(agent, 10, loss=loss)
        look()


def test_an_alert_stays_open_while_the_loss_stays_high_and_ends_when_it_returns(trained, client, clock, look):
    train(trained, 10, loss=2.5e4)
    look(1)
    hold(trained, clock, look, loss=2.5e4)
    (alert,) = alerts(client, "loss_spike")
    assert (alert["state"], alert["iteration"], alert["last_good"]) == ("firing", 301, checkpoint_id(250, 1))
    hold(trained, clock, look, seconds=120)
    (alert,) = alerts(client, "loss_spike")
    assert (alert["state"], alert["resolved_why"]) == ("resolved", "back to normal")


def test_an_alert_ends_when_the_job_is_restored_to_before_it_and_says_so(trained, client, clock, look):
    train(trained, 60, loss=2.5e4)
    look(1)
    trained.iteration, trained.lineage = 250, 2
    trained.say(LineageStarted(at=trained.at, lineage=2, iteration=250, parent=checkpoint_id(250, 1)))
    train(trained, 10)
    look(1)
    (alert,) = alerts(client, "loss_spike")
    assert (alert["state"], alert["resolved_why"]) == ("resolved", "restored to iteration 250")
    assert pins(client) == []
    assert client.get(f"{JOB}/timeline").json()["last_good"] is None


def test_the_end_of_the_job_ends_an_alert_but_the_page_still_names_the_checkpoint(trained, client, look):
    train(trained, 60, loss=2.5e4)
    look(1)
    trained.say(AttemptFinished(at=trained.at, iteration=360, lineage=1, reason="FloatingPointError: loss"))
    look(1)
    look(61)
    (alert,) = alerts(client, "loss_spike")
    assert (alert["state"], alert["resolved_why"]) == ("resolved", "the job ended")
    assert "Restore to 250…" in " ".join(client.get("/jobs/char-gpt").text.split())


def test_limit_and_window_of_the_rule_apply(trained, client, look):
    rule = "/api/v1/projects/default/alert-rules/loss_spike"
    assert client.put(rule, json={"limit": 1000, "window": 100}).json()["window"] == 100
    train(trained, 1, loss=9.0)
    look(1)
    assert alerts(client, "loss_spike") == []
    assert client.put(rule, json={"window": 5}).status_code == 422
    refused = client.put("/api/v1/projects/default/alert-rules/silent", json={"window": 100})
    assert (refused.status_code, refused.json()["field"]) == (422, "window")


def test_after_a_restore_to_before_it_the_same_spike_raises_nothing(trained, client, look):
    train(trained, 1, loss=9.0)
    train(trained, 20)
    look(1)
    parent = checkpoint_id(250, 1)
    trained.iteration, trained.lineage = 250, 2
    trained.say(LineageStarted(at=trained.at, lineage=2, iteration=250, parent=parent))
    train(trained, 50)
    train(trained, 1, loss=9.0)
    train(trained, 5)
    look(1)
    assert len(alerts(client, "loss_spike")) == 1
    (trouble,) = client.get(f"{JOB}/timeline").json()["troubles"]
    assert trouble["abandoned"]


def test_a_loss_that_is_no_number_names_the_last_finite_one_and_a_checkpoint_before(trained, client, clock, look):
    train(trained, 60, loss=float("nan"))
    look(1)
    clock.now += 61
    train(trained, 1, loss=float("nan"))
    look()
    (alert,) = alerts(client, "loss_nan")
    assert (alert["iteration"], alert["last_good"]) == (301, checkpoint_id(250, 1))
    assert "the last finite one was at iteration 300" in alert["message"]


def test_the_page_of_a_job_that_failed_on_a_wrong_loss_offers_the_last_good_checkpoint(trained, client):
    train(trained, 60, loss=float("nan"))
    trained.say(AttemptFinished(at=trained.at, iteration=360, lineage=1, reason="FloatingPointError: loss"))
    page = " ".join(client.get("/jobs/char-gpt").text.split())
    assert "/jobs/char-gpt/restore?before=301" in page
    assert "Restore to 250…" in page
