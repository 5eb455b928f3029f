"""Scripts that cannot be taken back while they run: started again for an order, or taken back when they are."""

from __future__ import annotations

import msgspec
import pytest
import torch

import holdfast
from holdfast.protocol import wire
from holdfast.protocol.wire import Desired, RestoreOrder
from holdfast.store import Ending, Lineage, open_store
from holdfast.supervisor.hang_detector import RestartProgress
from holdfast.system import supervisor_channel, supervisor_files
from tests.support.fake_server_connection import FakeServerConnection
from tests.support.session_fixtures import linked as linked
from tests.support.session_fixtures import store as store
from tests.support.session_fixtures import uninterrupted as uninterrupted
from tests.support.tiny_job import Trainer
from tests.unit.agent.session.test_session import committed

POINT = "000000000006-1"
ORDER = RestoreOrder(id="o", checkpoint=POINT, fence=1)


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    """The folder in which a trainer and the supervisor above it tell each other."""
    folder = tmp_path / "supervision"
    folder.mkdir()
    monkeypatch.setenv(supervisor_channel.VARIABLE, str(folder))
    monkeypatch.setenv(supervisor_channel.STARTED_AT, "1000000000.0")
    monkeypatch.setattr(
        supervisor_channel, "enable_stack_dump", lambda rank: None
    )  # which lasts as long as the process
    return folder


def ordered_at(iteration, order=ORDER):
    def operator(trainer):
        if trainer.session.iteration == iteration:
            trainer.link.desired = Desired(version=2, restore=order)

    return operator


def states(trainer):
    return [event.state for event in trainer.link.of(wire.OrderStateChange)]


def notices(trainer, code):
    return [each.message for each in trainer.link.of(wire.Notice) if each.code == code]


def relaunched(store, linked):
    """A script that cannot be taken back, up to where it ends for an order."""
    trainer = Trainer(store, restorable_in_place=False, **linked)
    with pytest.raises(SystemExit) as ended:
        trainer.run(after=ordered_at(10))
    assert ended.value.code == supervisor_channel.EXIT_RELAUNCH
    trainer.session.close()
    return trainer


def test_under_a_supervisor_it_saves_what_is_left_and_ends_to_be_started_again(store, linked, supervised):
    trainer = relaunched(store, linked)
    assert trainer.losses[-1][0] == 11
    assert committed(store)[-1] == 11
    assert states(trainer) == ["delivered"]  # nothing was done yet: it can still be cancelled
    (told,) = notices(trainer, "relaunch")
    assert told == (
        f"restarting the script to restore {POINT}: restorable_in_place is False for this script. The current "
        "state is kept as 000000000011-1"
    )
    assert [ending.reason for ending in open_store(store).records("job", Ending)] == ["relaunched"]
    assert supervisor_files.take_relaunch(supervised) == msgspec.structs.replace(ORDER, fence=1)


@pytest.mark.parametrize("answers", [True, False])
def test_the_next_start_carries_it_out_once_whether_or_not_the_server_can_be_asked(
    store, linked, supervised, uninterrupted, answers
):
    relaunched(store, linked)
    supervisor_files.take_relaunch(supervised)
    FakeServerConnection.first = Desired(version=2, restore=ORDER) if answers else None
    again = Trainer(store, restorable_in_place=False, seed=5, **linked).run(until=9)
    assert dict(again.losses) == {i: uninterrupted[i] for i in (7, 8, 9)}
    (lineage,) = [each for each in open_store(store).records("job", Lineage) if each.order == "o"]
    assert (lineage.iteration, lineage.parent, lineage.left) == (6, POINT, "000000000011-1")
    restored = again.link.of(wire.OrderStateChange)[-1]
    assert (restored.state, restored.safety_checkpoint) == ("restored", "000000000011-1")
    again.crash()
    third = Trainer(store, restorable_in_place=False, **linked)
    assert third.session.resume() == 9
    third.crash()


def test_one_that_is_cancelled_meanwhile_goes_on_where_it_ended(store, linked, supervised, uninterrupted):
    relaunched(store, linked)
    supervisor_files.take_relaunch(supervised)
    FakeServerConnection.first = Desired(version=3)
    again = Trainer(store, restorable_in_place=False, seed=5, **linked).run(until=13)
    assert dict(again.losses) == {i: uninterrupted[i] for i in (12, 13)}
    again.crash()


def test_the_note_is_of_one_start_only(store, linked, supervised):
    relaunched(store, linked)
    assert supervisor_files.take_relaunch(supervised) == ORDER
    assert supervisor_channel.relaunch_order() == ORDER
    assert supervisor_files.take_relaunch(supervised) is None
    assert supervisor_channel.relaunch_order() is None


def test_a_damaged_checkpoint_is_no_reason_to_end(store, linked, supervised):
    def operator(trainer):
        if trainer.session.iteration == 10:
            payload = store / "job" / POINT / "rank-0.safetensors"
            data = bytearray(payload.read_bytes())
            data[-1] ^= 1
            payload.write_bytes(data)
        ordered_at(10)(trainer)

    trainer = Trainer(store, restorable_in_place=False, **linked).run(until=15, after=operator)
    assert states(trainer) == ["delivered", "failed"]
    assert supervisor_files.take_relaunch(supervised) is None
    trainer.crash()


def test_without_a_supervisor_the_order_waits_for_the_next_start(store, linked, uninterrupted):
    trainer = Trainer(store, restorable_in_place=False, retention="last 2", **linked).run(
        until=30, after=ordered_at(10)
    )
    assert states(trainer) == ["delivered"]
    (told,) = notices(trainer, "restore")
    assert told.startswith(
        f"the requested restore of {POINT} waits for the next start: restorable_in_place is False for this script"
    )
    assert told.endswith("restart the script, or run it under `holdfast run`, which does")
    assert 6 in committed(store)
    trainer.crash()
    FakeServerConnection.first = Desired(version=2, restore=ORDER)
    again = Trainer(store, restorable_in_place=False, seed=5, **linked).run(until=8)
    assert dict(again.losses) == {i: uninterrupted[i] for i in (7, 8)}
    again.crash()


def test_how_an_order_would_be_carried_out_is_told_at_the_first_boundary(store, linked, supervised, monkeypatch):
    def told(**options):
        FakeServerConnection.first = None
        trainer = Trainer(store, **options, **linked).run(until=3)
        trainer.crash()
        return trainer.link.of(wire.RestoreModeReport)

    (first,) = told()
    assert (first.mode, first.reason, first.iteration) == ("in_place", "", 1)
    assert first.start_seconds > 0
    monkeypatch.setenv("HOLDFAST_RESTORABLE_IN_PLACE", "no")
    (second,) = told()
    assert (second.mode, second.reason) == ("relaunch", "restorable_in_place is False for this script")
    monkeypatch.delenv(supervisor_channel.VARIABLE)
    monkeypatch.delenv(supervisor_channel.STARTED_AT)
    (third,) = told()
    assert (third.mode, third.start_seconds) == ("next_start", None)


def test_a_loop_that_draws_for_itself_is_seen_to_be_one(store, linked):
    loop = holdfast.Session("job", store=store, model=torch.nn.Linear(1, 1), **linked)
    loop.resume()
    loop.step()
    (told,) = loop._reporter.link.of(wire.RestoreModeReport)
    assert told.mode == "next_start"
    assert "neither draws batches from session.batches(...)" in told.reason
    loop._close("SIGKILL")


def test_a_job_that_was_taken_back_and_starts_again_gets_somewhere():
    progress = RestartProgress()
    progress.begin_start()
    progress.update(100, 100)
    assert progress.end_start()
    progress.restore_to(20)
    progress.begin_start()
    progress.update(30, 10)
    assert progress.end_start()
