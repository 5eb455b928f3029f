import errno
import json
import logging
import math
import os
import signal
import socket
import threading
import types

import pytest
import torch

import holdfast
from holdfast.checkpoint import reading, restore
from holdfast.checkpoint.forking import fork
from holdfast.checkpoint.retention_queue import Protector
from holdfast.engine import boundary, coordination, startup
from holdfast.engine.in_place_restore import CheckpointToRestore
from holdfast.engine.operator import MAX_TRIES
from holdfast.protocol import wire as protocol
from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import Desired, RestoreOrder
from holdfast.retention import parse_retention
from holdfast.save import history
from holdfast.save.copying import HostCopies
from holdfast.save.snapshotter import Snapshotter
from holdfast.server_link.http_client import RequestFailed
from holdfast.store import Lineage, Pins, newest_pins, open_store
from holdfast.store.local import LocalStore, LocalWriter
from holdfast.system import supervisor_channel, supervisor_files
from holdfast.system.preemption import PreemptionHandler
from tests.support.edited_manifests import decode_manifest, encode_manifest
from tests.support.eventually import eventually
from tests.support.fake_server_connection import FakeAgentClient, FakeServerConnection
from tests.support.session_fixtures import linked as linked
from tests.support.session_fixtures import store as store
from tests.support.session_fixtures import uninterrupted as uninterrupted
from tests.support.small_session import iterate, session_of
from tests.support.tiny_job import RandomPoints, Trainer


def committed(store, job="job"):
    return [int(c[:12]) for c in open_store(store).checkpoints(job)]


def damage(store, iteration, lineage=1):
    payload = store / "job" / f"{iteration:012d}-{lineage}" / "rank-0.safetensors"
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)


def test_checkpointing_changes_no_loss(store, uninterrupted):
    trainer = Trainer(store, every=10**9).run()
    trainer.session.close()
    assert dict(trainer.losses) == uninterrupted


@pytest.mark.parametrize("stops", [(3,), (4, 5, 6), (11, 12, 13), (24, 35)])
def test_a_job_that_is_stopped_goes_on_as_if_it_had_not_been(store, uninterrupted, stops):
    seen = {}
    for seed, stop in enumerate((*stops, 36)):
        trainer = Trainer(store, seed=seed).run(until=stop).crash()
        for iteration, loss in trainer.losses:
            assert loss == uninterrupted[iteration], f"iteration {iteration} after stops at {stops}"
            seen[iteration] = loss
        if stop == 36:
            assert trainer.loop.best_loss == min(uninterrupted.values())
    assert seen == uninterrupted


def test_a_resumed_job_loses_only_what_no_checkpoint_holds(store):
    Trainer(store).run(until=11).crash()
    trainer = Trainer(store, seed=9)
    assert trainer.session.resume() == 9
    assert trainer.session.attempt == 2
    assert trainer.session.lineage == 1
    trainer.crash()


def test_a_job_that_ended_finds_all_its_work_done(store):
    Trainer(store).run(until=10).session.close()
    trainer = Trainer(store)
    assert trainer.session.resume() == 10
    trainer.crash()


def test_a_loop_that_failed_leaves_no_half_finished_iteration_behind(store):
    def fail(trainer):
        if trainer.session.iteration == 5:
            raise ZeroDivisionError

    trainer = Trainer(store)
    with pytest.raises(ZeroDivisionError), trainer.session:
        trainer.run(after=fail)
    assert committed(store) == [3]


def test_a_fork_goes_on_exactly_from_where_it_was_forked_and_says_where_that_is(store, uninterrupted, linked):
    Trainer(store, every=5).run(until=20).crash()
    opened = open_store(store)
    made = fork(opened, "job", "000000000015-1", "branch")
    for checkpoint in opened.checkpoints("job"):
        opened.delete("job", checkpoint, 1)
    branch = Trainer(store, job="branch", seed=7, every=5, **linked).run()
    assert branch.losses[0][0] == 16
    assert dict(branch.losses) == {i: loss for i, loss in uninterrupted.items() if i > 15}
    assert (branch.session.lineage, branch.session.attempt) == (2, 2)
    (began,) = branch.link.of(protocol.LineageStarted)
    assert (began.iteration, began.parent, began.origin) == (15, "000000000015-1", made.origin)
    branch.crash()
    again = Trainer(store, job="branch", **linked)
    assert again.session.resume() == 35
    assert again.link.of(protocol.LineageStarted)[0].origin == made.origin
    again.crash()
    assert "000000000015-1" in opened.checkpoints("branch")  # where it began stays


def test_a_damaged_checkpoint_is_passed_over_by_name_and_reason(store, uninterrupted, linked, caplog):
    Trainer(store).run(until=10).crash()
    damage(store, 9)
    trainer = Trainer(store, **linked)
    assert trainer.session.resume() == 6
    assert "checkpoint 000000000009-1 is damaged and passed over: rank-0.safetensors: tensor" in caplog.text
    (event,) = [e for e in trainer.link.of(protocol.Checkpoint) if e.state == "damaged"]
    assert event.id == "000000000009-1"
    trainer.run(until=12).crash()
    assert dict(trainer.losses) == {i: uninterrupted[i] for i in range(7, 13)}
    assert committed(store) == [3, 6, 9, 12]  # the sound 9 took the damaged one's place


@pytest.mark.parametrize("breakage", ["truncate", "no manifest entry", "garbage manifest"])
def test_other_damage_is_passed_over_as_well(store, breakage):
    Trainer(store).run(until=7).crash()
    directory = store / "job" / "000000000006-1"
    if breakage == "truncate":
        payload = directory / "rank-0.safetensors"
        payload.write_bytes(payload.read_bytes()[:-10])
    elif breakage == "no manifest entry":
        manifest = json.loads((directory / "manifest.json").read_text())
        (directory / "manifest.json").write_text(json.dumps(manifest | {"job": "other"}))
    else:
        (directory / "manifest.json").write_text("{")
    trainer = Trainer(store)
    assert trainer.session.resume() == 3
    trainer.crash()


def test_when_nothing_verifies_training_starts_afresh_on_a_lineage_of_its_own(store, linked, caplog):
    Trainer(store).run(until=7).crash()
    damage(store, 3)
    damage(store, 6)
    trainer = Trainer(store, **linked)
    assert (trainer.session.resume(), trainer.session.lineage) == (0, 2)
    (error,) = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert "every checkpoint of job (2) is damaged: training starts over at iteration 0" in error
    assert f"holdfast store export --degraded {store} job 6 FILE" in error
    (notice,) = [e for e in trainer.link.of(protocol.Notice) if e.level == "error"]
    assert notice.code == "all_damaged"
    trainer.crash()


def test_damaged_checkpoints_take_no_place_of_sound_ones_in_retention(store):
    Trainer(store, retention="last 2").run(until=7).crash()
    damage(store, 3)
    damage(store, 6)
    trainer = Trainer(store, retention="last 2").run(until=13)
    trainer.session.close()
    kept = open_store(store).checkpoints("job")
    assert [each for each in kept if each.endswith("-1")] == ["000000000003-1", "000000000006-1"]
    assert kept[-2:] == ["000000000012-2", "000000000013-2"]
    assert len(kept) == 4


def test_a_store_that_cannot_be_written_to_stops_nothing(tmp_path, uninterrupted, linked, caplog, monkeypatch):
    monkeypatch.setattr(history, "RETURN_SECONDS", 60)
    (tmp_path / "file").write_text("")
    trainer = Trainer(tmp_path / "file" / "store", **linked).run(until=8)
    trainer.session.close()
    assert dict(trainer.losses) == {i: uninterrupted[i] for i in range(1, 9)}
    assert "is not writable" in caplog.text
    failed = [e for e in trainer.link.of(protocol.Checkpoint) if e.state == "failed"]
    assert [e.iteration for e in failed][:2] == [3, 6]
    assert "is not writable" in failed[0].reason


def test_a_store_that_cannot_be_written_to_is_reported_once(store, caplog):
    caplog.set_level(logging.INFO, "holdfast")
    store.symlink_to(os.devnull)
    Trainer(store).run(until=8).crash()
    messages = [record.getMessage() for record in caplog.records]
    reason = f"store {store} is not writable: Not a directory"
    assert [each for each in messages if reason in each] == [f"job: {reason}; checkpoints start when it is"]
    assert "job: training starts at iteration 0, without checkpoints for now" in messages
    assert (
        messages[-1] == "job: the iterations after 0 are in no checkpoint: the next attempt starts at iteration 0"
    )


def test_a_start_names_where_it_resumed_its_store_and_its_page(store, linked, caplog):
    caplog.set_level(logging.INFO, "holdfast")
    Trainer(store, **linked).run(until=4).crash()
    Trainer(store).run(until=5).crash()
    messages = [record.getMessage() for record in caplog.records]
    assert [each for each in messages if each.startswith(("job: attempt", "job: dashboard"))] == [
        f"job: attempt 1 starts at iteration 0, lineage 1; checkpoints in {store}",
        "job: dashboard: http://127.0.0.1:1/jobs/job",
        f"job: attempt 2 resumed from iteration 3 (000000000003-1), lineage 1; checkpoints in {store}",
    ]


def test_a_start_names_no_page_of_a_server_that_has_not_answered(store, linked, monkeypatch, caplog):
    def refuse(self, job, *, limit_seconds):
        raise RequestFailed("Connection refused")

    monkeypatch.setattr(FakeAgentClient, "desired", refuse)
    caplog.set_level(logging.INFO, "holdfast")
    Trainer(store, **linked).run(until=1).crash()
    assert "attempt 1 starts" in caplog.text
    assert "dashboard" not in caplog.text


@pytest.mark.parametrize("known", [0, 1, 2])
def test_a_start_in_a_store_that_lacks_attempts_of_the_server_is_warned(store, linked, caplog, known):
    open_store(store).acquire_attempt("job", "ended before its first checkpoint")
    FakeServerConnection.first = Desired(version=1, latest_attempt=known)
    Trainer(store, **linked).run(until=1).crash()
    warned = [each.getMessage() for each in caplog.records if "but the server knows" in each.getMessage()]
    assert warned == [
        f"job: training starts at iteration 0, but the server knows attempt 2 of job, of which this store, "
        f"{store}, has no record: check the store and the working directory"
    ] * (known == 2)


@pytest.mark.parametrize(("known", "expected"), [(0, [5, 10]), (1, [])])
def test_checkpoints_that_the_server_does_not_know_are_described_from_their_manifests(
    store, linked, known, expected
):
    Trainer(store, every=5).run(until=12).crash()
    FakeServerConnection.first = Desired(latest_attempt=known)
    trainer = Trainer(store, every=5, **linked)

    def reported_checkpoints():
        return {each.iteration: each for each in trainer.link.of(protocol.Checkpoint)}

    eventually(lambda: len(reported_checkpoints()) == len(expected), "the descriptions")
    found = reported_checkpoints()
    trainer.crash()
    assert sorted(found) == expected
    for iteration, reported in found.items():
        read = restore.manifest(open_store(store), "job", checkpoint_id(iteration, 1))
        assert (reported.at, reported.kind, reported.state) == (read.created_at, read.kind, "durable")
        assert reported.payload_bytes == sum(file.size_bytes for file in read.files) > 0


def test_checkpoints_are_described_once_to_a_server_whose_data_was_deleted(store, linked):
    FakeServerConnection.first = Desired()
    trainer = Trainer(store, every=5, **linked).run(until=12)
    trainer.link.on_desired(Desired(latest_attempt=1))
    for _ in range(2):
        trainer.link.on_desired(Desired(latest_attempt=0))

    def described():
        reports = trainer.link.of(protocol.Checkpoint)
        return sorted(each.iteration for each in reports if each.state == "durable" and not each.snapshot_seconds)

    eventually(lambda: described() == [5, 10], "the descriptions")
    trainer.crash()
    assert described() == [5, 10]


def test_a_full_disk_is_an_event_and_the_last_good_checkpoint_stays(
    store, uninterrupted, linked, monkeypatch, caplog
):
    real = LocalWriter.write

    def full(self, file, parts, **options):
        if "000000000003-1" in self._temporary.name:
            return real(self, file, parts, **options)
        raise OSError(errno.ENOSPC, "No space left on device", str(self._temporary))

    monkeypatch.setattr(LocalWriter, "write", full)
    trainer = Trainer(store, **linked).run(until=8).crash()
    assert dict(trainer.losses) == {i: uninterrupted[i] for i in range(1, 9)}
    assert committed(store) == [3]
    assert caplog.text.count("No space left on device") == 1
    states = {e.iteration: e.state for e in trainer.link.of(protocol.Checkpoint)}
    assert states == {3: "durable", 6: "failed"}
    assert not list((store / "job").glob(".tmp-*"))


def test_weights_changed_behind_our_back_are_taken_again(store, linked, monkeypatch):
    trainer = Trainer(store, **linked)
    real, meddled = HostCopies.run, threading.Event()

    def meddle(copies):
        real(copies)
        if not meddled.is_set():
            meddled.set()
            with torch.no_grad():
                trainer.model[0].weight.add_(0)

    monkeypatch.setattr(HostCopies, "run", meddle)
    trainer.run(until=6).crash()
    states = [
        (e.iteration, e.state) for e in trainer.link.of(protocol.Checkpoint) if e.state in ("torn", "durable")
    ]
    assert states[:2] == [(3, "torn"), (4, "durable")]
    assert 3 not in committed(store)


def test_weights_exchanged_after_a_boundary_leave_its_checkpoint_as_it_was(store, linked, monkeypatch):
    """Between the end of an iteration and the copy of what only the optimizer changes."""
    trainer = Trainer(store, **linked)
    trainer.run(until=9)
    real, before = Snapshotter._copy_rest, {}

    def exchange(*arguments, **options):
        if not before:
            layer = trainer.model[0]
            before[trainer.session.iteration] = layer.weight.detach().clone()
            layer.weight.data = layer.weight.detach() * 2
        real(*arguments, **options)

    monkeypatch.setattr(Snapshotter, "_copy_rest", exchange)
    trainer.run(until=14).crash()
    loaded = restore.load(open_store(str(store)), "job", checkpoint_id(12, 1))
    assert torch.equal(loaded.tensors["model.0.weight"], before[12])


def test_a_nan_loss_and_a_metric_that_is_no_number_break_nothing(store, linked, caplog):
    trainer = Trainer(store, **linked)
    for loss in (math.nan, torch.tensor(math.inf), torch.ones(2), "text"):
        trainer.session.step(loss=loss)
    trainer.session.close()
    seen = [metrics["loss"] for metrics in trainer.link.samples]
    assert math.isnan(seen[0])
    assert math.isinf(seen[1])
    assert math.isnan(seen[2])
    assert math.isnan(seen[3])
    assert caplog.text.count("metric loss is not a scalar") == 1


def test_a_loop_that_counts_its_own_steps_goes_back_with_its_variables(store):
    first = Trainer(store)
    x, y = torch.ones(8, 8), torch.ones(8)
    assert first.session.resume() == 0
    for _ in range(4):
        first.iterate(x, y)
        first.settle()
    best, losses = first.loop.best_loss, dict(first.losses)
    first.crash()
    second = Trainer(store, seed=3)
    assert second.session.resume() == 3
    second.iterate(x, y)
    assert dict(second.losses)[4] == losses[4]
    assert second.loop.best_loss == best
    second.crash()


def test_the_script_restores_in_place_and_trains_the_same_iterations_again(store, uninterrupted):
    def back_once(trainer):
        if trainer.session.iteration == 14 and trainer.session.lineage == 1:
            trainer.session.restore(6)

    trainer = Trainer(store).run(until=20, after=back_once).crash()
    assert [i for i, _ in trainer.losses] == [*range(1, 16), *range(7, 21)]
    assert all(loss == uninterrupted[i] for i, loss in trainer.losses)
    assert trainer.session.lineage == 2
    assert 15 in committed(store)  # the safety checkpoint of what was left


def test_a_restore_where_there_is_no_checkpoint_names_the_nearest_and_does_nothing(store):
    trainer = Trainer(store).run(until=8)
    with pytest.raises(
        holdfast.NoSuchCheckpoint, match="no checkpoint at iteration 7; the nearest earlier one is at iteration 6"
    ) as e:
        trainer.session.restore(7)
    assert e.value.nearest == "000000000006-1"
    with pytest.raises(holdfast.NoSuchCheckpoint, match="no earlier one"):
        trainer.session.restore(1)
    trainer.crash()


def order(trainer, iteration, *, version=2, fence=1, lineage=1, name="order-1", **more):
    checkpoint = checkpoint_id(iteration, lineage)
    trainer.link.desired = Desired(
        version=version, restore=RestoreOrder(id=name, checkpoint=checkpoint, fence=fence, **more)
    )


def test_an_operators_restore_runs_through_its_states_and_can_be_undone(store, uninterrupted, linked):
    def operator(trainer):
        if trainer.session.iteration == 11 and trainer.session.lineage == 1:
            order(trainer, 6)

    trainer = Trainer(store, **linked).run(until=13, after=operator)
    moves = [(e.state, e.iteration, e.lineage) for e in trainer.link.of(protocol.OrderStateChange)]
    assert moves == [("delivered", 11, 1), ("restoring", 12, 1), ("restored", 6, 2)]
    done = trainer.link.of(protocol.OrderStateChange)[-1]
    assert done.seconds > 0
    assert [i for i, _ in trainer.losses] == [*range(1, 13), *range(7, 14)]
    # undo: back to the safety checkpoint, and on from there
    order(trainer, int(done.safety_checkpoint[:12]), version=3, name="order-2")
    trainer.losses.clear()
    trainer.run(until=15)
    assert trainer.losses[1:] == [(i, uninterrupted[i]) for i in range(13, 16)]
    assert trainer.session.lineage == 3
    trainer.crash()


def test_a_restore_is_carried_out_once_even_if_the_trainer_dies_right_after_noting_it(store, linked, monkeypatch):
    def operator(trainer):
        if trainer.session.iteration == 8:
            order(trainer, 3)

    trainer = Trainer(store, **linked)
    monkeypatch.setattr(trainer.session._training, "apply", lambda *_: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):
        trainer.run(after=operator)
    trainer.crash()
    FakeServerConnection.first = trainer.link.desired
    again = Trainer(store, **linked)
    assert (again.session.resume(), again.session.lineage) == (3, 2)
    again.link.desired = trainer.link.desired
    again.run(until=7)
    assert again.session.iteration == 7
    moves = [
        (e.state, e.iteration, e.lineage, e.safety_checkpoint) for e in again.link.of(protocol.OrderStateChange)
    ]
    safety = checkpoint_id(9, 1)
    assert moves == [("restored", 3, 2, safety)]
    assert [e.left for e in again.link.of(protocol.LineageStarted)] == [safety]
    again.crash()


def test_a_job_that_was_down_takes_its_order_at_its_next_start(store, linked, uninterrupted):
    Trainer(store).run(until=10).crash()
    FakeServerConnection.first = Desired(
        version=5, latest_attempt=1, restore=RestoreOrder(id="o", checkpoint="000000000003-1", fence=1)
    )
    trainer = Trainer(store, **linked)
    assert (trainer.session.resume(), trainer.session.lineage) == (3, 2)
    trainer.link.desired = FakeServerConnection.first
    trainer.run(until=5).crash()
    assert trainer.losses == [(4, uninterrupted[4]), (5, uninterrupted[5])]
    assert [e.state for e in trainer.link.of(protocol.OrderStateChange)] == ["restoring", "restored"]


def told_numbers(trainer):
    """Of the numbers that a server has seen, and the job's own."""
    return trainer.session.attempt, trainer.session.lineage


@pytest.mark.parametrize(
    ("latest_attempt", "latest_lineage"),
    [(1001, 1002), (2**31 - 1, 999_999_999), (2**53, 10**9), (10**300, 10**300), (-5, -5)],
    ids=["a step too far", "the largest", "too large", "no machine's word", "negative"],
)
def test_numbers_far_beyond_the_stores_are_ignored_and_the_job_keeps_its_checkpoints(
    store, linked, caplog, latest_attempt, latest_lineage
):
    FakeServerConnection.first = Desired(version=1, latest_attempt=latest_attempt, latest_lineage=latest_lineage)
    trainer = Trainer(store, **linked).run(until=4)
    trainer.session.restore(3)
    trainer.run(until=5).crash()
    assert told_numbers(trainer) == (1, 2)
    ignored = [message for message in caplog.messages if "the server's number is ignored" in message]
    assert len(ignored) == (2 if latest_attempt > 0 else 0)
    FakeServerConnection.first = None
    again = Trainer(store, **linked)
    assert (again.session.resume(), *told_numbers(again)) == (3, 2, 2)
    again.crash()


def test_numbers_a_little_beyond_the_stores_are_not_used_again(store, linked, caplog):
    FakeServerConnection.first = Desired(version=1, latest_attempt=1000, latest_lineage=1000)
    trainer = Trainer(store, **linked).run(until=4).crash()
    assert told_numbers(trainer) == (1001, 1001)
    assert "is ignored" not in caplog.text
    assert committed(store) == [3]


def test_an_attempt_without_a_writable_store_reports_under_no_number_that_there_cannot_be(
    store, linked, monkeypatch
):
    made = []
    monkeypatch.setattr(FakeServerConnection, "__init__", lambda link, **given: made.append(given["attempt"]))
    monkeypatch.setattr(FakeServerConnection, "events", [], raising=False)
    FakeServerConnection.first = Desired(version=1, latest_attempt=10**300)
    store.parent.mkdir(exist_ok=True)
    store.symlink_to(os.devnull)
    Trainer(store, **linked).crash()
    assert made == [1]


def wanted_at_start(**more):
    return Desired(version=5, restore=RestoreOrder(id="o", checkpoint="000000000003-1", fence=1, **more))


def moves_of(trainer):
    return [(e.state, e.reason) for e in trainer.link.of(protocol.OrderStateChange)]


def test_an_order_that_ends_every_start_is_given_up(store, linked):
    Trainer(store).run(until=10).crash()
    FakeServerConnection.first = wanted_at_start()
    for _ in range(MAX_TRIES):
        trainer = Trainer(store, **linked)
        trainer.session._training.apply = lambda *_: (_ for _ in ()).throw(SystemExit)  # as a kill would
        with pytest.raises(SystemExit):
            trainer.session.resume()
        trainer.crash()
    trainer = Trainer(store, **linked)
    assert (trainer.session.resume(), trainer.session.lineage) == (9, 1)
    ((state, reason),) = moves_of(trainer)
    assert (state, reason) == (
        "failed", "3 starts ended before they carried it out; it is not tried again",
    )  # fmt: skip
    assert reason in notices(trainer, "restore")[0]
    trainer.crash()


def test_an_order_whose_time_is_over_is_not_carried_out(store, linked, uninterrupted):
    Trainer(store).run(until=10).crash()
    FakeServerConnection.first = wanted_at_start(expires_in_seconds=0.0)
    trainer = Trainer(store, **linked)
    assert (trainer.session.resume(), trainer.session.lineage) == (9, 1)
    assert moves_of(trainer) == [("expired", "it expired before the job could carry it out")]
    trainer.run(until=12).crash()
    assert dict(trainer.losses) == {i: uninterrupted[i] for i in range(10, 13)}


def test_the_time_of_an_order_runs_on_while_nobody_can_be_asked(store, linked):
    def operator(trainer):
        if trainer.session.iteration == 5:
            order(trainer, 3, expires_in_seconds=60.0)
            now[0] = 59.0
            trainer.session._operator._clock = lambda: now[0] + 1.0

    now = [0.0]
    trainer = Trainer(store, **linked)
    trainer.session._operator._clock = lambda: now[0]
    trainer.run(until=8, after=operator).crash()
    assert [state for state, _ in moves_of(trainer)] == ["delivered", "expired"]
    assert trainer.session.lineage == 1


def test_an_order_told_again_is_no_news_because_time_has_passed(store, linked):
    trainer = Trainer(store, **linked)
    for left in (60.0, 59.0):
        later = RestoreOrder(id="o", checkpoint="000000000003-1", fence=9, expires_in_seconds=left)
        trainer.link.desired = Desired(version=5, restore=later)
        trainer.session.step()
    trainer.crash()
    assert [each.version for each in trainer.link.of(protocol.DesiredStateApplied)] == [5]


def test_a_fenced_attempt_leaves_an_order_to_the_newer_one(store, linked):
    def operator(trainer):
        if trainer.session.iteration == 5:
            open_store(store).acquire_attempt("job", "newer")
            order(trainer, 3)

    trainer = Trainer(store, **linked)
    told = trainer.link
    trainer.run(until=8, after=operator).crash()
    assert [event.state for event in told.of(protocol.OrderStateChange)] == ["delivered", "restoring"]
    assert "another process has started this job (attempt 2, " in told.of(protocol.Notice)[-1].message
    assert [lineage.order for lineage in open_store(store).records("job", Lineage)] == [None]


@pytest.mark.parametrize("supervised", [True, False])
def test_an_attempt_that_is_fenced_gives_way(store, linked, uninterrupted, monkeypatch, tmp_path, supervised):
    def newer_begins(trainer):
        if trainer.session.iteration == 5:
            open_store(store).acquire_attempt("job", "newer")
            trainer.link.is_fenced = True

    if supervised:
        monkeypatch.setenv(supervisor_channel.VARIABLE, str(tmp_path))
    trainer = Trainer(store, **linked)
    link = trainer.link
    if supervised:
        with pytest.raises(SystemExit) as ended:
            trainer.run(until=9, after=newer_begins)
        assert ended.value.code == supervisor_channel.EXIT_FENCED
        assert trainer.session.iteration == 6
        assert supervisor_files.published_attempt(tmp_path).job == "job"
    else:
        trainer.run(until=9, after=newer_begins)
        assert dict(trainer.losses) == {i: uninterrupted[i] for i in range(1, 10)}
    assert link.closed
    told = len(link.events)
    trainer.crash()
    assert (committed(store), len(link.events)) == ([3], told)


def test_a_server_that_takes_an_attempt_for_fenced_is_not_believed_against_the_store(store, linked):
    trainer = Trainer(store, **linked)
    trainer.link.is_fenced = True
    trainer.run(until=7).crash()
    assert committed(store) == [3, 6]


def test_an_order_that_was_carried_out_while_the_store_took_no_note_is_not_carried_out_again(
    store, linked, monkeypatch
):
    Trainer(store).run(until=10).crash()
    FakeServerConnection.first = wanted_at_start()
    with monkeypatch.context() as patched:
        patched.setattr(
            LocalStore, "acquire_attempt", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EROFS, "no"))
        )
        trainer = Trainer(store, **linked)
        assert trainer.session.resume() == 3
    monkeypatch.setattr(history, "RETURN_SECONDS", 60)
    trainer.run(until=8).crash()
    again = Trainer(store, **linked)
    assert (again.session.resume(), moves_of(again)) == (
        6, [("restored", "carried out before the trainer was restarted")],
    )  # fmt: skip
    again.crash()


def test_an_order_to_a_damaged_checkpoint_fails_and_training_goes_on_untouched(store, linked, uninterrupted):
    def operator(trainer):
        if trainer.session.iteration == 8:
            damage(store, 3)
            order(trainer, 3)

    trainer = Trainer(store, **linked).run(until=12, after=operator).crash()
    assert dict(trainer.losses) == {i: uninterrupted[i] for i in range(1, 13)}
    moves = trainer.link.of(protocol.OrderStateChange)
    assert [m.state for m in moves] == ["delivered", "restoring", "failed"]
    assert "rank-0.safetensors" in moves[-1].reason
    assert trainer.session.lineage == 1


GONE = "000000000006-1 is no longer in store {}: retention removed it; restore iteration 3 or 9 instead"


def test_an_order_to_a_checkpoint_that_retention_removed_names_what_can_be_restored(store, linked):
    def operator(trainer):
        if trainer.session.iteration == 10:
            trainer.session.wait()
            LocalStore(store).delete("job", checkpoint_id(6, 1), 1)
            order(trainer, 6)

    trainer = Trainer(store, **linked).run(until=11, after=operator).crash()
    failed = trainer.link.of(protocol.OrderStateChange)[-1]
    assert (failed.state, failed.reason) == ("failed", GONE.format(store))


def test_an_order_of_the_start_to_a_checkpoint_that_retention_removed_names_what_can_be_restored(store, linked):
    Trainer(store).run(until=10).crash()
    LocalStore(store).delete("job", checkpoint_id(6, 1), 1)
    wanted = RestoreOrder(id="o", checkpoint=checkpoint_id(6, 1), fence=1)
    FakeServerConnection.first = Desired(version=5, latest_attempt=1, restore=wanted)
    trainer = Trainer(store, **linked)
    assert trainer.session.resume() == 9
    trainer.crash()
    assert moves_of(trainer) == [("failed", GONE.format(store))]


def test_a_restore_without_room_for_the_safety_checkpoint_is_refused(store, linked, uninterrupted, monkeypatch):
    def operator(trainer):
        if trainer.session.iteration == 7:
            monkeypatch.setattr(LocalWriter, "write", refuse)
            order(trainer, 3)

    def refuse(self, file, parts, **_):
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = Trainer(store, **linked).run(until=8, after=operator).crash()
    assert dict(trainer.losses) == {i: uninterrupted[i] for i in range(1, 9)}
    failed = trainer.link.of(protocol.OrderStateChange)[-1]
    assert failed.state == "failed"
    assert "no safety checkpoint of the current state: No space left" in failed.reason


def test_a_restore_that_breaks_half_way_goes_back_to_where_it_was(store, linked, uninterrupted, monkeypatch):
    trainer = Trainer(store, **linked)
    real, calls = trainer.scheduler.load_state_dict, []

    def fail_once(state):
        calls.append(state)
        if len(calls) == 1:
            raise KeyError("gamma")
        real(state)

    monkeypatch.setattr(trainer.scheduler, "load_state_dict", fail_once)

    def operator(trainer):
        if trainer.session.iteration == 7 and not calls:
            order(trainer, 3)

    trainer.run(until=12, after=operator).crash()
    assert trainer.losses == [(i, uninterrupted[i]) for i in range(1, 13)]
    assert "training went back to 000000000008-1" in trainer.link.of(protocol.OrderStateChange)[-1].reason


def test_an_order_meant_for_a_later_attempt_is_left_alone(store, linked):
    def operator(trainer):
        if trainer.session.iteration == 7:
            order(trainer, 3, fence=2)

    trainer = Trainer(store, **linked).run(until=9, after=operator).crash()
    assert [m.state for m in trainer.link.of(protocol.OrderStateChange)] == ["delivered"]
    assert trainer.session.iteration == 9


def test_live_settings_are_applied_at_a_boundary_and_acknowledged_with_it(store, linked):
    def operator(trainer):
        if trainer.session.iteration == 4:
            trainer.link.desired = Desired(version=7, every=2, budget=0.2)
        if trainer.session.iteration == 9:
            trainer.link.desired = Desired(version=8, paused=True)
        if trainer.session.iteration == 13:
            trainer.link.desired = Desired(version=9, paused=True, checkpoint_request=1)

    trainer = Trainer(store, **linked).run(until=16, after=operator).crash()
    assert [(e.version, e.iteration) for e in trainer.link.of(protocol.DesiredStateApplied)] == [
        (7, 5),
        (8, 10),
        (9, 14),
    ]
    durable = [e.iteration for e in trainer.link.of(protocol.Checkpoint) if e.state == "durable"]
    assert durable == [3, 5, 7, 9, 14]
    room = {e.state: e.store_free_bytes for e in trainer.link.of(protocol.Checkpoint)}
    assert room["durable"] > 0, "so that somebody is told before the store is full"
    assert room["persisting"] is None
    assert trainer.link.of(protocol.IntervalDecision)[-1].budget == 0.035


def test_clicks_from_before_a_start_are_not_for_it(store, linked):
    FakeServerConnection.first = Desired(version=3, checkpoint_request=2)
    trainer = Trainer(store, **linked)
    trainer.link.desired = FakeServerConnection.first
    trainer.run(until=2).crash()
    assert trainer.link.of(protocol.Checkpoint) == []


def test_the_script_forces_paces_and_pauses(store):
    def script(trainer):
        if trainer.session.iteration == 1:
            trainer.session.checkpoint()
            trainer.session.every(4)

    trainer = Trainer(store).run(until=5, after=script)
    with trainer.session.paused():
        trainer.run(until=9)
    trainer.run(until=12).crash()
    assert committed(store) == [2, 10]


def test_retention_bounds_what_a_store_holds(store):
    trainer = Trainer(store, every=1, keep=4).run(until=30).crash()
    assert len(committed(store)) <= 5
    assert committed(store)[-1] == trainer.session.iteration


class SlowDeletes:
    """Lets no delete of a session's store end before `go` is set."""

    def __init__(self, session, monkeypatch):
        self.begun, self.go = threading.Event(), threading.Event()
        delete = session._saver.history.store.delete

        def wait(*args):
            self.begun.set()
            assert self.go.wait(300)
            delete(*args)

        monkeypatch.setattr(session._saver.history.store, "delete", wait)


def test_a_checkpoint_is_durable_and_the_next_one_begins_while_retention_waits_for_the_store(store, monkeypatch):
    model, optimizer, session = session_of(store, keep=1)
    deletes = SlowDeletes(session, monkeypatch)
    saver = session._saver
    try:
        for _ in range(4):
            iterate(model, optimizer, session)
            assert saver.wait_settled(300)
        assert deletes.begun.wait(300)
        assert saver.under_way == 0
        assert committed(store, "m") == [1, 2, 3, 4]
    finally:
        deletes.go.set()
        session.close()
    assert committed(store, "m") == [4]


def test_sigterm_saves_without_waiting_for_retention(store, monkeypatch, linked):
    model, optimizer, session = session_of(store, keep=1, **linked)
    deletes = SlowDeletes(session, monkeypatch)
    try:
        for _ in range(3):
            iterate(model, optimizer, session)
            session.wait(300)
        assert deletes.begun.wait(300)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            iterate(model, optimizer, session)
        session.close()
    finally:
        session._preemption.cancel()  # or the end of the grace would end this process
        deletes.go.set()
    assert ended.value.code == 143
    notices = [each.message for each in session._reporter.link.of(protocol.Notice) if each.code == "preempted"]
    assert notices == ["SIGTERM received; ending after iteration 4: saved as 000000000004-1"]


def test_a_final_checkpoint_that_is_not_durable_within_the_grace_period_is_given_up(store, monkeypatch, linked):
    model, optimizer, session = session_of(store, **linked)
    released, real = threading.Event(), LocalWriter.write
    try:
        iterate(model, optimizer, session)
        session.wait(300)

        def write(self, *arguments, **options):
            assert released.wait(300)
            return real(self, *arguments, **options)

        monkeypatch.setattr(LocalWriter, "write", write)
        monkeypatch.setattr(PreemptionHandler, "grace_left_seconds", 0.05)
        monkeypatch.setattr(coordination, "FACTOR", 0.0)  # it begins, however long the one before it took
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            iterate(model, optimizer, session)
        notices = [e.message for e in session._reporter.link.of(protocol.Notice) if e.code == "preempted"]
        assert committed(store, "m") == [1]
    finally:
        session._preemption.cancel()  # or the end of the grace would end this process
        released.set()
        session.close()
    assert ended.value.code == 143
    assert notices == ["SIGTERM received; ending after iteration 2: the checkpoint was not durable in time"]


def test_what_a_restore_asks_for_while_retention_runs_is_not_deleted(store, monkeypatch):
    model, optimizer, session = session_of(store, retention="last 1")
    deletes = SlowDeletes(session, monkeypatch)
    session._saver.retention.change(parse_retention("last 9"))
    for _ in range(3):
        iterate(model, optimizer, session)
        session.wait(300)
    session._saver.retention.change(parse_retention("last 1"))
    iterate(model, optimizer, session)
    assert deletes.begun.wait(300)
    session._saver.retention.protect(Protector.SCRIPT, checkpoint_id(3, 1))
    deletes.go.set()
    session.close()
    assert committed(store, "m") == [3, 4]


def test_retention_leaves_the_way_back_from_a_restore(store):
    def back_once(trainer):
        if trainer.session.iteration == 9 and trainer.session.lineage == 1:
            trainer.session.restore(8)

    trainer = Trainer(store, every=1, keep=2).run(until=30, after=back_once).crash()
    assert trainer.session.lineage == 2
    assert {8, 10} <= set(committed(store))  # where lineage 2 began, and what was left for it


def test_a_deletion_by_retention_is_reported_with_its_reason(store, linked):
    trainer = Trainer(store, every=1, retention="last 3", **linked).run(until=9)
    trainer.crash()
    deleted = {}
    for event in trainer.link.of(protocol.Inventory):
        deleted |= event.deleted
        assert not deleted.keys() & set(event.checkpoints)
    assert set(deleted.values()) == {"not kept by 'last 3'"}
    assert "000000000002-1" in deleted


def test_rules_of_retention_are_followed_together(store):
    trainer = Trainer(store, every=1, retention="last 3, every 10").run(until=35).crash()
    assert committed(store) == [1, 10, 20, 30, 33, 34, 35]
    assert trainer.session.iteration == 35


def test_what_checkpoints_may_take_in_all_is_kept_to(store):
    Trainer(store, every=1).run(until=1).crash()
    one_bytes = sum(path.stat().st_size for path in (store / "job").rglob("rank-0.safetensors"))
    trainer = Trainer(store, every=1, retention=f"size {round(4.5 * one_bytes)}B").run(until=20).crash()
    assert committed(store)[-1] == trainer.session.iteration
    taken = sum(path.stat().st_size for path in (store / "job").rglob("rank-0.safetensors"))
    assert (len(committed(store)), taken <= 4.5 * one_bytes) == (4, True)


def test_an_operators_rules_hold_from_the_next_boundary_on_until_they_are_taken_back(store, linked):
    def operator(trainer):
        if trainer.session.iteration == 10:
            trainer.link.desired = Desired(version=2, retention="last 2")
        if trainer.session.iteration == 20:
            trainer.link.desired = Desired(version=3)
        if trainer.session.iteration == 30:
            trainer.link.desired = Desired(version=4, retention="first 2")  # of a server that knows more

    trainer = Trainer(store, every=1, keep=6, **linked).run(until=15, after=operator)
    trainer.session.wait(300)
    assert committed(store) == [13, 14, 15]
    trainer.run(until=40, after=operator).crash()
    assert len(committed(store)) == 6
    (told,) = [each.message for each in trainer.link.of(protocol.Notice) if each.code == "retention"]
    assert "'first 2' is not a rule" in told
    assert told.endswith("the script's retention stays in force")


@pytest.mark.parametrize("rules", ["last 1", "size 1B", "every 1000000", "spaced 1", "last 1, per lineage"])
def test_no_rules_of_a_server_leave_fewer_than_three_checkpoints(store, linked, rules):
    Trainer(store, every=1, keep=6).run(until=9).crash()
    FakeServerConnection.first = Desired(version=2, retention=rules)
    Trainer(store, every=1, keep=6, **linked).run(until=12).crash()
    assert committed(store)[-3:] == [10, 11, 12]
    assert len(committed(store)) in (3, 4)


def test_the_scripts_own_rules_may_leave_fewer(store, linked):
    FakeServerConnection.first = Desired(version=2)
    Trainer(store, every=1, retention="last 1", **linked).run(until=9).crash()
    assert committed(store) == [9]


@pytest.mark.parametrize(
    ("name", "value"), [("every", -5), ("every", 0), ("every", 10**30), ("budget", -1.0), ("budget", 1e300)]
)
def test_a_setting_that_cannot_be_leaves_the_scripts_own_in_force(store, linked, name, value):
    FakeServerConnection.first = Desired(version=2, **{name: value})
    trainer = Trainer(store, every=3, **linked)
    trainer.link.desired = FakeServerConnection.first
    trainer.run(until=7).crash()
    assert committed(store) == [3, 6]
    (told,) = notices(trainer, name)
    assert told.endswith(f"the script's {name} stays in force")


@pytest.mark.parametrize("order", [{"paused": True}, {"every": 10**9}])
def test_a_server_withholds_checkpoints_for_a_day_at_most(store, linked, monkeypatch, order):
    def operator(trainer):
        if trainer.session.iteration == 4:
            trainer.link.desired = Desired(version=2, **order)
        if trainer.session.iteration == 7:
            monkeypatch.setattr(boundary, "MAX_WITHHELD_SECONDS", 0.0)
        if trainer.session.iteration == 8:
            monkeypatch.setattr(boundary, "MAX_WITHHELD_SECONDS", 86400.0)

    trainer = Trainer(store, every=3, **linked).run(until=12, after=operator)
    trainer.crash()
    assert committed(store) == [3, 8]
    (told,) = notices(trainer, "withheld")
    assert told.startswith("settings from the server have suppressed checkpoints for a day")


def test_what_the_script_withholds_itself_is_not_taken(store, linked, monkeypatch):
    monkeypatch.setattr(boundary, "MAX_WITHHELD_SECONDS", 0.0)
    Trainer(store, every=10**9, **linked).run(until=6).crash()
    assert committed(store) == []
    trainer = Trainer(store, **linked)
    trainer.link.desired = Desired(version=2, paused=True)
    with trainer.session.paused():
        trainer.run(until=6)
        assert committed(store) == []
    trainer.crash()


def test_what_an_open_order_names_stays_until_the_order_has_ended(store, linked):
    def operator(trainer):
        order = RestoreOrder(id="a", checkpoint=checkpoint_id(2, 1), fence=9)  # for a later attempt
        if trainer.session.iteration in (2, 12):
            trainer.link.desired = Desired(
                version=trainer.session.iteration, restore=order if trainer.session.iteration == 2 else None
            )

    trainer = Trainer(store, every=1, retention="last 2", **linked).run(until=11, after=operator)
    assert 2 in committed(store)
    trainer.run(until=20, after=operator).crash()
    assert 2 not in committed(store)


def test_the_rules_of_an_operator_hold_before_the_first_boundary(store, linked, monkeypatch):
    Trainer(store, every=1, retention="last 9").run(until=9).crash()
    monkeypatch.setattr(FakeServerConnection, "first", Desired(version=3, retention="last 9"))
    trainer = Trainer(store, every=1, retention="last 1", **linked)
    assert str(trainer.session._saver.retention.rules) == "last 9"
    trainer.crash()
    assert len(committed(store)) == 9


def pin(link, *iterations, version=2):
    link.desired = Desired(version=version, pins=tuple(checkpoint_id(each, 1) for each in iterations))


def at(iteration, act):
    return lambda trainer: act(trainer.link) if trainer.session.iteration == iteration else None


def told_of_pins(trainer):
    return [each.message for each in trainer.link.of(protocol.Notice) if each.code == "pins"]


def test_retention_leaves_what_is_pinned_beside_those_it_keeps_until_it_is_unpinned(store, linked):
    def operator(trainer):
        if trainer.session.iteration == 5:
            pin(trainer.link, 2, 3)
        if trainer.session.iteration == 20:
            pin(trainer.link, 3, version=3)

    trainer = Trainer(store, every=1, keep=4, **linked).run(until=18, after=operator)
    assert {2, 3} < set(committed(store))
    assert len(committed(store)) <= 2 + 5
    trainer.run(until=30, after=operator).crash()
    assert 2 not in committed(store)
    assert 3 in committed(store)
    assert trainer.link.of(protocol.Inventory)[-1].pinned == ["000000000003-1"]
    assert told_of_pins(trainer) == []


def test_a_pin_holds_after_a_restart_with_no_server(store, linked):
    trainer = Trainer(store, every=1, keep=2, **linked).run(until=6, after=at(5, lambda link: pin(link, 5)))
    trainer.crash()
    again = Trainer(store, every=1, keep=2).run(until=20).crash()
    assert again.session.attempt == 2
    assert 5 in committed(store)
    assert newest_pins(open_store(store), "job").attempt == 2  # it has noted for itself what it found


def test_a_server_that_knows_of_no_pins_takes_none_away(store, linked):
    Trainer(store, every=1, keep=2, **linked).run(until=6, after=at(5, lambda link: pin(link, 5))).crash()
    FakeServerConnection.first = Desired(version=1)
    trainer = Trainer(store, every=1, keep=2, **linked).run(until=20).crash()
    assert 5 in committed(store)
    assert trainer.link.of(protocol.Inventory)[0].pinned == ["000000000005-1"]


def test_what_was_pinned_while_the_job_was_down_is_kept_from_its_first_checkpoint_on(store, linked):
    Trainer(store, every=1, keep=12).run(until=6).crash()
    FakeServerConnection.first = Desired(version=1, pins=("000000000003-1",))
    Trainer(store, every=1, keep=1, **linked).run(until=8).crash()
    assert 3 in committed(store)


def test_pins_that_cannot_be_noted_hold_and_are_told_of_once(store, linked, monkeypatch):
    real = LocalStore.append

    def full(self, job, record):
        if isinstance(record, Pins):
            raise OSError(errno.ENOSPC, "no space left")
        real(self, job, record)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "append", full)
        trainer = Trainer(store, every=1, keep=2, **linked).run(until=6, after=at(5, lambda link: pin(link, 5)))
        trainer.run(until=15)
        assert 5 in committed(store)
        (told,) = told_of_pins(trainer)
        assert "no space left; they apply while this attempt runs" in told
    trainer.run(until=16).crash()
    assert newest_pins(open_store(store), "job").checkpoints == ("000000000005-1",)


def test_a_pin_on_what_is_not_in_the_store_is_told_once_and_changes_nothing(store, linked):
    trainer = (
        Trainer(store, every=1, keep=4, **linked).run(until=9, after=at(4, lambda link: pin(link, 777))).crash()
    )
    (told,) = told_of_pins(trainer)
    assert "000000000777-1 is pinned but not in the store" in told
    assert committed(store)[-1] == 9


def test_a_checkpoint_kept_for_an_alert_that_retention_had_deleted_is_no_notice(store, linked):
    def keep(link):
        link.desired = Desired(
            version=2, pins=("000000000003-1", "000000000777-1"), alert_pins=("000000000777-1",)
        )

    trainer = Trainer(store, every=1, keep=2, **linked).run(until=9, after=at(4, keep)).crash()
    assert told_of_pins(trainer) == []
    assert committed(store)[0] == 3


def test_where_the_store_cannot_say_what_is_pinned_nothing_is_deleted(store, linked, monkeypatch):
    real = LocalStore.records

    def unreadable(self, job, kind, since=0):
        if kind is Pins:
            raise OSError(errno.EIO, "cannot be read")
        return real(self, job, kind, since)

    monkeypatch.setattr(LocalStore, "records", unreadable)
    trainer = Trainer(store, every=1, keep=1).run(until=9).crash()
    assert len(committed(store)) == 9
    assert trainer.session.iteration == 9


def test_a_fenced_attempt_trains_on_and_commits_nothing(store, linked, caplog):
    caplog.set_level(logging.INFO, "holdfast")
    old = Trainer(store, **linked).run(until=4)
    new = Trainer(store)
    assert new.session.resume() == 3
    old.run(until=8).session.every(500)
    old.run(until=10).crash()
    assert committed(store) == [3]
    assert "every 500 iterations" not in caplog.text
    place = f"attempt 2, process {os.getpid()} on {socket.gethostname()}"
    after = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert after == [
        f"job: another process has started this job ({place}). This one saves nothing from now on: stop it, or "
        "give it another job name"
    ]
    new.crash()


def test_settings_come_from_argument_then_environment_then_default(store, monkeypatch):
    monkeypatch.setenv("HOLDFAST_BUDGET", "2%")
    monkeypatch.setenv("HOLDFAST_EVERY", "7")
    monkeypatch.setenv("HOLDFAST_STORE", str(store))
    trainer = Trainer(None, every=None, budget=0.1)
    assert trainer.session._controller.settings.budget == 0.1
    assert trainer.session._controller.settings.every == 7
    assert trainer.session._saver.history.store.url == str(store)
    trainer.crash()


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        ("BUDGET", "abc", "HOLDFAST_BUDGET: budget 'abc' is not a number"),
        ("EVERY", "often", "HOLDFAST_EVERY: interval 'often'"), ("KEEP", "0", "HOLDFAST_KEEP: keep='0'"),
        ("DEBUG", "perhaps", "HOLDFAST_DEBUG: debug='perhaps'"), ("POLICY", "weekly", "HOLDFAST_POLICY: policy"),
    ],
)  # fmt: skip
def test_a_setting_of_the_environment_that_makes_no_sense_is_named_by_its_variable(
    store, monkeypatch, name, said, message
):
    monkeypatch.setenv(f"HOLDFAST_{name}", said)
    with pytest.raises(ValueError, match=message):
        Trainer(store, **dict.fromkeys([name.lower()]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": -1}, "outside 0.01% to 100%"), ({"budget": 0}, "outside"), ({"budget": "300"}, "outside"),
        ({"budget": "abc"}, "budget 'abc' is not a number"), ({"every": 0}, "outside 1 to"),
        ({"policy": "weekly"}, "is not one of checkfreq"), ({"keep": 0}, "keep=0"),
        ({"max_in_flight": "two"}, "max_in_flight='two': give a whole number of snapshots in flight"),
        ({"debug": "perhaps"}, "debug='perhaps': give one of 1, true"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_with_the_reason(store, options, message):
    with pytest.raises(ValueError, match=message):
        Trainer(store, **options)


def test_a_job_name_must_be_one(store):
    with pytest.raises(ValueError, match=r"job name '\.\./up'"):
        holdfast.Session("../up", store=store)


def test_one_of_several_ranks_needs_torch_distributed_first(store, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"rank 0 of 4 .* call torch.distributed.init_process_group before"):
        holdfast.Session("job", store=store)


def test_the_supervisors_file_is_told_of_every_iteration(store, tmp_path, monkeypatch):
    path = tmp_path / "progress"
    path.write_bytes(bytes(16))
    monkeypatch.setenv("HOLDFAST_PROGRESS", str(path))
    trainer = Trainer(store).run(until=5)
    layout = supervisor_channel.PROGRESS_LAYOUT
    assert layout.unpack(path.read_bytes()) == (5, 5)
    trainer.crash()
    assert layout.unpack(path.read_bytes()) == (5, -5)  # nothing more is to come


def test_copies_overlap_with_training_and_are_of_their_instant(store, uninterrupted, monkeypatch):
    """Copies are slow enough for the next update to run into them; only every fourth iteration waits for disk."""
    real, waits, waiting = HostCopies.run, [], threading.Event()

    def slow(copies):
        waiting.wait(0.2)  # for the update, but not for ever: some copies are made while there is none
        waiting.clear()
        real(copies)

    monkeypatch.setattr(HostCopies, "run", slow)
    settle = Trainer.settle
    monkeypatch.setattr(Trainer, "settle", lambda self: settle(self) if self.session.iteration % 4 == 0 else None)
    trainer = Trainer(store, every=1)
    wait = trainer.session._saver.snapshots.wait_copied

    def noted():
        waiting.set()
        waits.append(wait())
        return waits[-1]

    monkeypatch.setattr(trainer.session._saver.snapshots, "wait_copied", noted)
    trainer.run(until=12).crash()
    assert max(waits) > 0
    assert dict(trainer.losses) == {i: uninterrupted[i] for i in range(1, 13)}
    newest = committed(store)[-1]
    assert newest > 3
    again = Trainer(store, seed=5).run(until=newest + 3).crash()
    assert dict(again.losses) == {i: uninterrupted[i] for i in range(newest + 1, newest + 4)}


def test_resume_is_exact_whatever_writes_with_several_in_flight(store, uninterrupted, monkeypatch):
    def free(trainer):
        assert trainer.session._saver.snapshots.wait_free(60)

    monkeypatch.setattr(Trainer, "settle", free)
    trainer = Trainer(store, every=1, max_in_flight=3).run(until=12)
    trainer.session.wait(300)
    assert trainer.session._saver.history.head == trainer.session._saver.history.store.checkpoints("job")[-1]
    trainer.crash()
    newest = committed(store)[-1]
    assert newest > 3  # a slot may be free before the checkpoint that held it has settled: then one is left out
    again = Trainer(store, seed=5).run(until=newest + 3).crash()
    assert dict(again.losses) == {i: uninterrupted[i] for i in range(newest + 1, newest + 4)}


def test_what_is_about_to_be_restored_outlives_retention(store, uninterrupted):
    def back_once(trainer):
        if trainer.session.iteration == 9 and trainer.session.lineage == 1:
            trainer.session.restore(3)

    trainer = Trainer(store, keep=1)
    monkey = trainer.session._saver
    trainer.run(until=4)
    monkey.retention.protect(Protector.VERIFICATION, "000000000003-1")
    trainer.run(until=11, after=back_once).crash()
    assert trainer.session.lineage == 2
    assert 3 in committed(store)  # where lineage 2 began
    again = Trainer(store, seed=4)
    assert (again.session.resume(), again.session.lineage) == (9, 2)
    again.crash()


def test_a_restore_refused_for_want_of_a_record_leaves_training_on_its_lineage(store, linked, monkeypatch):
    def operator(trainer):
        if trainer.session.iteration == 7:
            monkeypatch.setattr(type(trainer.session._saver.history.store), "append", refuse)
            order(trainer, 3)

    def refuse(self, job, lineage):
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = Trainer(store, **linked).run(until=12, after=operator).crash()
    assert (trainer.session.lineage, trainer.link.of(protocol.OrderStateChange)[-1].state) == (1, "failed")
    monkeypatch.undo()
    again = Trainer(store)
    assert (again.session.resume(), again.session.lineage) == (12, 1)
    again.crash()


def test_a_loop_left_within_an_iteration_saves_none_of_it(store, uninterrupted):
    trainer = Trainer(store)
    for x, y in trainer.session.batches(trainer.loader, epochs=3):
        if trainer.session.iteration == 5:
            break
        trainer.iterate(x, y)
        trainer.settle()
    trainer.session.close()
    assert committed(store) == [3]
    again = Trainer(store, seed=8).run(until=7).crash()
    assert dict(again.losses) == {i: uninterrupted[i] for i in range(4, 8)}


def test_a_loop_of_its_own_left_after_an_update_saves_none_of_that(store):
    trainer = Trainer(store)
    trainer.session.resume()
    x, y = torch.ones(8, 8), torch.ones(8)
    for _ in range(4):
        trainer.iterate(x, y)
        trainer.settle()
    trainer.model(x).sum().backward()
    trainer.optimizer.step()
    trainer.session.close()
    assert committed(store) == [3]


def test_the_way_back_from_a_restore_survives_a_restart(store):
    def back_once(trainer):
        if trainer.session.iteration == 10 and trainer.session.lineage == 1:
            trainer.session.restore(3)

    Trainer(store, keep=40).run(until=12, after=back_once).crash()
    Trainer(store, keep=2, every=1).run(until=30).crash()
    assert {3, 11} <= set(committed(store))


def test_an_order_to_a_checkpoint_that_does_not_fit_fails_and_the_job_starts_all_the_same(store, linked):
    Trainer(store).run(until=7).crash()
    manifest = store / "job" / "000000000003-1" / "manifest.json"
    changed = decode_manifest(manifest.read_bytes())
    del changed.state["scheduler"]
    manifest.write_bytes(encode_manifest(changed))
    FakeServerConnection.first = Desired(
        version=5, restore=RestoreOrder(id="o", checkpoint="000000000003-1", fence=1)
    )
    trainer = Trainer(store, **linked)
    assert trainer.session.resume() == 6
    _, moved = trainer.link.of(protocol.OrderStateChange)
    assert (moved.state, moved.reason) == (
        "failed",
        f"the checkpoint holds no 'scheduler'; it has {', '.join(changed.state)}. To start with the scheduler of "
        'the script, call session.keep("scheduler") before session.resume(), or give an adapter '
        'keep_settings={"scheduler": None}',
    )
    trainer.crash()


def test_a_script_that_trains_on_two_loaders_goes_on_in_the_right_one(store):
    def seen(trainer, stop=None):
        found = []
        for name, loader in (("a", trainer.loader), ("b", trainer.other)):
            for x, y in trainer.session.batches(loader, epochs=1):
                found.append((name, y.tolist()))
                trainer.iterate(x, y)
                trainer.settle()
                if trainer.session.iteration == stop:
                    return found
        return found

    def make():
        trainer = Trainer(store, every=1, keep=40)
        trainer.other = holdfast.DataLoader(RandomPoints(), batch_size=16, shuffle=True, seed=2)
        return trainer

    first = make()
    before = seen(first, stop=15)
    first.crash()
    second = make()
    after = seen(second)
    assert [name for name, _ in before] == ["a"] * 12 + ["b"] * 3
    assert [name for name, _ in after] == ["b"] * 3
    assert not {tuple(y) for _, y in before[12:]} & {tuple(y) for _, y in after}
    history, in_place = second.session._saver.history, second.session._boundary.in_place_restore
    early, late = (CheckpointToRestore(history, each) for each in ("000000000005-1", "000000000015-1"))
    assert "used another loader" in in_place._why_not_in_place(early)
    assert in_place._why_not_in_place(late) is None
    second.crash()


def test_a_store_that_was_away_at_the_start_keeps_its_history_when_it_comes_back(
    store, tmp_path, linked, monkeypatch
):
    monkeypatch.setattr(history, "RETURN_SECONDS", 60)
    Trainer(store).run(until=7).crash()
    away = tmp_path / "away"
    store.rename(away)
    store.symlink_to(os.devnull)

    def mount(trainer):
        if trainer.session.iteration == 4:
            store.unlink()
            away.rename(store)

    trainer = Trainer(store, **linked).run(until=9, after=mount).crash()
    assert trainer.session.lineage == 2
    assert open_store(store).checkpoints("job") == [
        "000000000003-1", "000000000006-1", "000000000006-2", "000000000009-2"
    ]  # fmt: skip
    assert not list((store / "job").glob("*damaged*"))


def test_what_was_asked_for_outlives_retention_when_the_store_comes_back_late(store, tmp_path, monkeypatch):
    def ask(trainer):
        if trainer.session.iteration == 3:
            trainer.session.checkpoint()

    def mount(trainer):
        if trainer.session.iteration == 2:
            store.unlink()
            away.rename(store)

    monkeypatch.setattr(history, "RETURN_SECONDS", 60)
    Trainer(store, every=1, keep=2).run(until=6, after=ask).crash()
    away = tmp_path / "away"
    store.rename(away)
    store.symlink_to(os.devnull)
    Trainer(store, every=1, keep=2).run(until=14, after=mount).crash()
    kept = open_store(store).checkpoints("job")
    assert "000000000004-1" in kept
    assert "000000000014-2" in kept
    assert len(kept) < 8


def test_what_was_asked_for_outlives_retention_when_the_start_could_not_read_it(store, monkeypatch):
    def ask(trainer):
        if trainer.session.iteration == 3:
            trainer.session.checkpoint()

    def away(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    Trainer(store, every=1, keep=2).run(until=6, after=ask).crash()
    with monkeypatch.context() as patched:
        patched.setattr(restore, "of_kind", away)
        trainer = Trainer(store, every=1, keep=2)
    trainer.run(until=14).crash()
    assert 4 in committed(store)
    assert len(committed(store)) < 8


def test_training_does_not_wait_for_a_store_that_does_not_say_whether_it_is_back(store, linked, monkeypatch):
    store.symlink_to(os.devnull)
    trainer = Trainer(store, **linked)
    asking, answer = [], threading.Event()

    def silent(*_, **__):
        asking.append(threading.current_thread())
        assert threading.current_thread() is threading.main_thread() or answer.wait(300)
        raise OSError(errno.ETIMEDOUT, "no answer")

    monkeypatch.setattr(trainer.session._saver.history.store, "acquire_attempt", silent)
    trainer.run(until=12)
    assert trainer.session.iteration == 12
    answer.set()
    late = trainer.session._saver.history._late_attempt
    assert late.result(300) is None
    assert [thread.name.startswith("holdfast-io-") for thread in asking] == [True]
    trainer.crash()
    assert "no answer" in trainer.link.of(protocol.Checkpoint)[-1].reason


class Outage:
    """A clock that only waiting moves; until it shows `until_seconds`, every use of `broken` fails."""

    def __init__(self, monkeypatch, owner, broken, until_seconds):
        self.seconds, self.pauses, self.asked = 0.0, [], 0
        self._monkeypatch = monkeypatch
        self.breaks(owner, broken, until_seconds)
        time = types.SimpleNamespace(monotonic=lambda: self.seconds, sleep=self.wait)
        monkeypatch.setattr(startup, "time", time)

    def breaks(self, owner, broken, until_seconds):
        real = getattr(owner, broken)

        def answer(*args, **options):
            self.asked += 1
            if self.seconds < until_seconds:
                raise OSError(errno.ESTALE, "Stale file handle")
            return real(*args, **options)

        self._monkeypatch.setattr(owner, broken, answer)

    def wait(self, seconds):
        self.pauses.append(seconds)
        self.seconds += seconds


def notices(trainer, code):
    return [notice.message for notice in trainer.link.of(protocol.Notice) if notice.code == code]


@pytest.mark.parametrize(
    ("owner", "broken"),
    [(LocalStore, "checkpoints"), (LocalStore, "records"), (LocalStore, "open_file"), (reading, "read")],
)
def test_a_start_waits_for_a_store_that_is_away_for_a_moment(
    store, linked, monkeypatch, uninterrupted, owner, broken
):
    Trainer(store).run(until=8).crash()
    outage = Outage(monkeypatch, owner, broken, until_seconds=20)
    trainer = Trainer(store, **linked)
    assert (trainer.session.resume(), trainer.session.lineage) == (6, 1)
    assert 20 <= outage.seconds <= 30
    (told,) = notices(trainer, "store")
    assert f"store {store} does not answer: [Errno {errno.ESTALE}] Stale file handle; retrying for up to" in told
    assert not notices(trainer, "damaged")
    trainer.run(until=10).crash()
    assert trainer.losses == [(i, uninterrupted[i]) for i in range(7, 11)]


def test_a_start_gives_a_store_up_that_stays_away_and_can_be_tried_again(store, linked, monkeypatch):
    Trainer(store).run(until=8).crash()
    outage = Outage(monkeypatch, LocalStore, "checkpoints", until_seconds=40)
    trainer = Trainer(store, **linked)
    outage.asked = 0
    with pytest.raises(OSError, match="Stale file handle"):
        trainer.session.resume()
    assert outage.seconds == pytest.approx(30)
    assert outage.asked == len(outage.pauses) + 1
    assert len(notices(trainer, "store")) == 1
    assert trainer.session.iteration == 0
    assert (trainer.session.resume(), trainer.session.lineage) == (6, 1)
    trainer.crash()


def test_a_start_is_patient_anew_with_a_store_that_was_back_meanwhile(store, linked, monkeypatch):
    Trainer(store).run(until=8).crash()
    outage = Outage(monkeypatch, LocalStore, "checkpoints", until_seconds=20)
    outage.breaks(reading, "read", until_seconds=45)
    trainer = Trainer(store, **linked)
    assert (trainer.session.resume(), trainer.session.lineage) == (6, 1)
    assert 45 <= outage.seconds <= 60
    assert len(notices(trainer, "store")) == 2
    trainer.crash()


@pytest.mark.parametrize("broken", ["records", "open_file"])
def test_an_order_at_the_start_waits_for_a_store_that_is_away_for_a_moment(store, linked, monkeypatch, broken):
    Trainer(store).run(until=10).crash()
    FakeServerConnection.first = Desired(
        version=5, restore=RestoreOrder(id="o", checkpoint="000000000003-1", fence=1)
    )
    Outage(monkeypatch, LocalStore, broken, until_seconds=20)
    trainer = Trainer(store, **linked)
    assert (trainer.session.resume(), trainer.session.lineage) == (3, 2)
    assert [e.state for e in trainer.link.of(protocol.OrderStateChange)] == ["restoring", "restored"]
    trainer.crash()


def test_an_order_that_the_start_could_not_read_stays_open_and_is_carried_out_later(
    store, linked, monkeypatch, uninterrupted
):
    Trainer(store).run(until=10).crash()
    FakeServerConnection.first = Desired(
        version=5, restore=RestoreOrder(id="o", checkpoint="000000000003-1", fence=1)
    )
    real, away = LocalStore.open_file, True

    def unreadable(self, job, checkpoint, *args, **options):
        if away and checkpoint == "000000000003-1":
            raise OSError(errno.EIO, "Input/output error")
        return real(self, job, checkpoint, *args, **options)

    monkeypatch.setattr(LocalStore, "open_file", unreadable)
    outage = Outage(monkeypatch, LocalStore, "checkpoints", until_seconds=0)
    trainer = Trainer(store, **linked)
    assert (trainer.session.resume(), trainer.session.lineage) == (9, 1)
    assert outage.seconds == pytest.approx(30)
    assert not trainer.link.of(protocol.OrderStateChange)
    (told,) = notices(trainer, "restore")
    assert "the requested restore waits: the store is unavailable: [Errno 5]" in told
    away = False
    trainer.link.desired = FakeServerConnection.first
    trainer.run(until=12).crash()
    states = [e.state for e in trainer.link.of(protocol.OrderStateChange)]
    assert states == ["delivered", "restoring", "restored"]
    assert [i for i, _ in trainer.losses] == [10, *range(4, 13)]
    assert dict(trainer.losses) == {i: uninterrupted[i] for i in range(4, 13)}


def test_a_load_state_dict_that_raises_an_error_of_the_system_fails_the_order(store, linked, monkeypatch):
    Trainer(store).run(until=7).crash()
    FakeServerConnection.first = Desired(
        version=5, restore=RestoreOrder(id="o", checkpoint="000000000003-1", fence=1)
    )
    trainer = Trainer(store, **linked)
    real, calls = trainer.loop.load_state_dict, []

    def load(state):
        calls.append(state)
        if len(calls) == 1:
            raise OSError("the script's own")
        real(state)

    trainer.loop.load_state_dict = load
    assert trainer.session.resume() == 6
    moves = [(e.state, e.reason) for e in trainer.link.of(protocol.OrderStateChange)]
    assert [state for state, _ in moves] == ["restoring", "failed"]
    assert moves[1][1].startswith("loop: Variables refused its state: OSError: the script's own. To start with")
    trainer.crash()


def test_where_the_store_is_away_at_the_start_nothing_is_said_of_training(store, caplog):
    store.symlink_to(os.devnull)
    trainer = Trainer(store)
    assert f"store {store} is not writable: Not a directory; checkpoints start when it is" in caplog.text
    assert "training continues" not in caplog.text
    trainer.crash()


def test_a_session_that_is_closed_only_counts(store):
    trainer = Trainer(store).run(until=4)
    trainer.session.close()
    trainer.session.step(loss=1.0)
    assert trainer.session.iteration == 5
    assert committed(store) == [3, 4]


def test_a_checkpoint_of_the_line_that_training_descends_from_is_preferred(store):
    def script(trainer):
        if (trainer.session.iteration, trainer.session.lineage) == (12, 1):
            trainer.session.restore(6)
        if (trainer.session.iteration, trainer.session.lineage) == (10, 2):
            trainer.session.restore(13)

    trainer = Trainer(store, keep=40).run(until=15, after=script).crash()
    assert trainer.session.lineage == 3
    assert restore.find(open_store(store), "job", 9) == "000000000009-1"


def test_a_full_disk_is_a_notice_once_and_so_is_its_end(store, linked, monkeypatch):
    real = LocalWriter.write

    def full(self, file, parts, **options):
        if any(f"{i:012d}" in self._temporary.name for i in (6, 9)):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, file, parts, **options)

    monkeypatch.setattr(LocalWriter, "write", full)
    trainer = Trainer(store, **linked).run(until=16).crash()
    notices = [(n.level, n.message) for n in trainer.link.of(protocol.Notice)]
    assert notices == [
        ("warning", "No space left on device; training continues"),
        ("info", "checkpoints are durable again, from 000000000012-1"),
    ]


def test_checkpoints_that_somebody_asked_for_outlive_retention_and_a_restart(store):
    def ask(trainer):
        if trainer.session.iteration == 3:
            trainer.session.checkpoint()

    Trainer(store, every=1, keep=2).run(until=8, after=ask).crash()
    Trainer(store, every=1, keep=2).run(until=20).crash()
    assert 4 in committed(store)


def test_the_same_version_of_another_database_is_obeyed(store, linked):
    def operator(trainer):
        if trainer.session.iteration == 2:
            trainer.link.desired = Desired(version=3, budget=0.05)
        if trainer.session.iteration == 4:
            trainer.link.desired = Desired(version=3, budget=0.01, latest_attempt=1)
        if trainer.session.iteration == 6:
            trainer.link.desired = Desired(version=3, budget=0.01, latest_attempt=2)

    trainer = Trainer(store, **linked).run(until=8, after=operator).crash()
    assert [e.iteration for e in trainer.link.of(protocol.DesiredStateApplied)] == [3, 5]
    assert trainer.link.of(protocol.IntervalDecision)[-1].budget == 0.01


def test_an_error_that_is_no_text_is_told_all_the_same(store, linked, monkeypatch):
    def refuse(self, file, parts, **_):
        raise OSError(errno.EIO, "Input/output error", "/mnt/\udcff")

    monkeypatch.setattr(LocalWriter, "write", refuse)
    trainer = Trainer(store, **linked).run(until=5).crash()
    failed = [e for e in trainer.link.of(protocol.Checkpoint) if e.state == "failed"]
    assert failed[0].reason == "Input/output error (/mnt/?)"
