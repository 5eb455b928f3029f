"""A restore of a checkpoint of which only the important bytes are left: on request alone, and marked for good."""

import msgspec
import pytest

from holdfast.checkpoint import restore
from holdfast.checkpoint.forking import fork
from holdfast.protocol import wire
from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import Desired, RestoreOrder
from holdfast.store import Lineage, open_store
from tests.support.edited_manifests import decode_manifest, encode_manifest
from tests.support.fake_server_connection import FakeServerConnection
from tests.support.session_fixtures import linked as linked
from tests.support.session_fixtures import store as store
from tests.support.session_fixtures import uninterrupted as uninterrupted
from tests.support.tiny_job import Trainer

NEWEST, EARLIER = checkpoint_id(9, 1), checkpoint_id(6, 1)


@pytest.fixture(autouse=True)
def important(monkeypatch):
    monkeypatch.setenv("HOLDFAST_PARITY", "important 4+2")
    monkeypatch.setattr("holdfast.format.important.SMALL_BYTES", 64)


def lose_low_bytes(store, checkpoint):
    """Change a less significant byte of the largest floating-point tensor."""
    manifest = restore.manifest(open_store(store), "job", checkpoint)
    numbers = [each for each in manifest.tensors if each.dtype == "F32" and each.end - each.start >= 64]
    tensor = max(numbers, key=lambda each: each.end - each.start)
    path = open_store(store).path("job", checkpoint) / tensor.file
    data = bytearray(path.read_bytes())
    data[tensor.start] ^= 0xFF
    path.write_bytes(data)


def order(checkpoint, *, degraded=True, name="o", version=5):
    return Desired(
        version=version, latest_attempt=1,
        restore=RestoreOrder(id=name, checkpoint=checkpoint, fence=1, degraded=degraded),
    )  # fmt: skip


@pytest.fixture
def damaged(store):
    Trainer(store).run(until=10).crash()
    lose_low_bytes(store, NEWEST)
    return store


def inexact_of(store):
    opened = open_store(store)
    marked = {each: restore.manifest(opened, "job", each).inexact for each in opened.checkpoints("job")}
    return {each.number: each.inexact for each in opened.records("job", Lineage)}, marked


def test_a_start_passes_over_what_only_a_degraded_restore_can_use_and_names_it(damaged, caplog):
    trainer = Trainer(damaged)
    assert trainer.session.resume() == 6
    trainer.crash()
    assert f"checkpoint {NEWEST} is damaged and passed over" in caplog.text
    assert "which only a degraded restore replaces" in caplog.text
    assert set(inexact_of(damaged)[0].values()) == {None}


def test_an_order_that_is_not_degraded_fails(damaged, linked):
    FakeServerConnection.first = order(NEWEST, degraded=False)
    trainer = Trainer(damaged, **linked)
    assert trainer.session.resume() == 6
    failed = trainer.link.of(wire.OrderStateChange)[-1]
    assert (failed.state, "which only a degraded restore replaces" in failed.reason) == ("failed", True)
    trainer.crash()


def test_a_degraded_restore_at_a_start_marks_everything_after_it(damaged, linked, tmp_path):
    FakeServerConnection.first = order(NEWEST)
    trainer = Trainer(damaged, **linked)
    assert (trainer.session.resume(), trainer.session.lineage) == (9, 2)
    trainer.link.desired = FakeServerConnection.first
    trainer.run(until=15).crash()
    assert [e.state for e in trainer.link.of(wire.OrderStateChange)] == ["restoring", "restored"]
    assert [e.inexact for e in trainer.link.of(wire.LineageStarted)] == [NEWEST]
    (notice,) = [e.message for e in trainer.link.of(wire.Notice) if e.code == "inexact"]
    assert notice.startswith(f"degraded restore of {NEWEST}: replaced the low 3 bytes of ")
    lineages, marked = inexact_of(damaged)
    assert lineages == {1: None, 2: NEWEST}
    assert {each: inexact for each, inexact in marked.items() if inexact} == {
        each: NEWEST for each in marked if each.endswith("-2")
    }
    FakeServerConnection.first = None
    again = Trainer(damaged)
    again.session.resume()
    again.run(until=19).crash()
    assert again.session.lineage == 2
    newest = max(inexact_of(damaged)[1])
    assert inexact_of(damaged)[1][newest] == NEWEST
    made = fork(open_store(damaged), "job", newest, "copy")
    assert restore.manifest(open_store(damaged), "copy", made.checkpoint).inexact == NEWEST
    assert open_store(damaged).records("copy", Lineage)[0].inexact == NEWEST


def test_a_degraded_restore_in_place_is_undone_exactly(store, linked, uninterrupted):
    def operator(trainer):
        if trainer.session.iteration == 11 and trainer.session.lineage == 1:
            lose_low_bytes(store, NEWEST)
            trainer.link.desired = order(NEWEST)

    trainer = Trainer(store, **linked).run(until=13, after=operator)
    done = trainer.link.of(wire.OrderStateChange)[-1]
    assert (done.state, trainer.session.lineage) == ("restored", 2)
    assert inexact_of(store)[0] == {1: None, 2: NEWEST}
    trainer.link.desired = order(done.safety_checkpoint, degraded=False, name="undo", version=6)
    trainer.losses.clear()
    trainer.run(until=16)
    assert trainer.losses[1:] == [(i, uninterrupted[i]) for i in range(13, 17)]
    assert inexact_of(store)[0] == {1: None, 2: NEWEST, 3: None}
    trainer.crash()


def test_a_degraded_order_of_a_sound_checkpoint_restores_it_exactly(store, linked):
    Trainer(store).run(until=10).crash()
    FakeServerConnection.first = order(EARLIER)
    trainer = Trainer(store, **linked)
    assert trainer.session.resume() == 6
    trainer.crash()
    assert inexact_of(store)[0] == {1: None, 2: None}


def test_an_exact_manifest_has_no_word_of_it(store):
    Trainer(store).run(until=4).crash()
    manifest = restore.manifest(open_store(store), "job", checkpoint_id(3, 1))
    assert b"inexact" not in encode_manifest(manifest)
    marked = msgspec.structs.replace(manifest, inexact=NEWEST)
    assert decode_manifest(encode_manifest(marked)).inexact == NEWEST
