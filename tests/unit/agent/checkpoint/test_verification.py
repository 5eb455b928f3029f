"""Reading checkpoints back, beside training: what is found, and how it is told."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch

from holdfast.checkpoint import reading, verification
from holdfast.engine import verification_queue
from holdfast.engine.verification_queue import Verifier
from holdfast.format import manifest as fmt
from holdfast.protocol import wire
from holdfast.protocol.wire import VerifyRequest
from holdfast.store import open_store
from holdfast.system import io_pool
from holdfast.telemetry.reporter import Reporter, TrainingPosition
from tests.support.handmade_checkpoints import TensorShard, commit
from tests.support.read_recording_store import ReadRecordingStore

MIB = 1 << 20


def by_name(told):
    columns = ("elements", "norm", "largest", "nan", "inf", "other_norm", "distance")
    rows = zip(*(getattr(told, column) or [None] * len(told.name) for column in columns), strict=True)
    return {name: dict(zip(columns, row, strict=True)) for name, row in zip(told.name, rows, strict=True)}


def flip(written, at, file="rank-0.safetensors"):
    """One bit of a stored file."""
    path = written.path(file)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def some(shift=0.0):
    generator = torch.Generator().manual_seed(3)
    return {
        "model.weight": torch.randn(300, 257, generator=generator) + shift,
        "model.large": torch.randn(5 * MIB + 3, generator=generator) + shift,
        "model.half": (torch.randn(33, 5, generator=generator) + shift).to(torch.bfloat16),
        "model.wave": torch.randn(3, 2, generator=generator, dtype=torch.complex128),
        "model.none": torch.empty(0, 4),
        "model.count": torch.tensor(7),
    }


def test_each_floating_point_tensor_is_summed_up(tmp_path):
    tensors = some()
    tensors["model.large"][4 * MIB :: 1000] = math.nan  # beyond the first chunk
    tensors["model.weight"][3, 4], tensors["model.weight"][5, 6] = math.inf, -math.inf
    written = commit(tmp_path, tensors)
    found = verification.reread(written.store, "job", written.id)
    assert (found.verdict, found.reason) == ("sound", None)
    assert found.read_bytes == found.total_bytes >= sum(file.size_bytes for file in written.manifest.files)
    told = by_name(found.tensors)
    assert told.keys() == tensors.keys() - {"model.count"}
    for name, row in told.items():
        plain = torch.view_as_real(tensors[name]) if tensors[name].is_complex() else tensors[name]
        finite = plain[plain.isfinite()].double()
        assert row["elements"] == plain.numel()
        assert row["norm"] == pytest.approx(finite.norm().item(), rel=1e-12)
        assert row["largest"] == (finite.abs().max().item() if finite.numel() else 0.0)
        assert row["nan"] == int(plain.isnan().sum())
        assert row["inf"] == int(plain.isinf().sum())
    assert told["model.large"]["nan"] > 0
    assert told["model.weight"]["inf"] == 2


def test_how_far_two_checkpoints_are_from_each_other_is_the_norm_of_the_difference(tmp_path):
    before, after = commit(tmp_path, some(), iteration=1), commit(tmp_path, some(0.25), iteration=2)
    found = verification.reread(after.store, "job", after.id, before.id)
    assert (found.verdict, found.other_damaged) == ("sound", None)
    told, first, second = by_name(found.tensors), some(), some(0.25)
    for name in ("model.weight", "model.large", "model.half"):
        difference = second[name].double() - first[name].double()
        assert told[name]["distance"] == pytest.approx(difference.norm().item(), rel=1e-12)
        assert told[name]["other_norm"] == pytest.approx(first[name].double().norm().item(), rel=1e-12)
    assert told["model.wave"]["distance"] == 0.0


def test_a_checkpoint_to_compare_with_is_opened_once_and_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "READ_BYTES", 64 << 10)
    tensors = {f"model.{number}": torch.randn(100_000) for number in range(8)}
    before = commit(tmp_path, {name: tensor + 1 for name, tensor in tensors.items()}, iteration=1)
    after = commit(tmp_path, tensors, iteration=2)
    store, opened = ReadRecordingStore(tmp_path), []
    open_file = store.open_file
    monkeypatch.setattr(
        store, "open_file", lambda *args, **options: opened.append(args[1:]) or open_file(*args, **options)
    )
    assert verification.reread(store, "job", after.id, before.id).verdict == "sound"
    assert opened.count((before.id, "rank-0.safetensors")) == 1
    assert len([read for read in store.reads if read[0] == "rank-0.safetensors"]) > 4
    assert store.open == 0


def test_only_what_differs_is_read_from_the_checkpoint_to_compare_with(tmp_path):
    first = some()
    second = first | {"model.large": first["model.large"].clone()}
    second["model.large"][-1] += 1  # in its last chunk
    before, after = commit(tmp_path, first, iteration=1), commit(tmp_path, second, iteration=2)
    alone, paid = [], []
    verification.reread(after.store, "job", after.id, pace=alone.append)
    found = verification.reread(after.store, "job", after.id, before.id, pace=paid.append)
    large = first["model.large"]
    assert 0 < sum(paid) - sum(alone) <= large.nbytes % fmt.CHUNK_BYTES + 2 * fmt.BLOCK_BYTES
    told = by_name(found.tensors)
    assert {name: row["distance"] for name, row in told.items()} == dict.fromkeys(told, 0.0) | {"model.large": 1.0}
    for name in ("model.weight", "model.large", "model.half"):
        assert told[name]["other_norm"] == pytest.approx(first[name].double().norm().item(), rel=1e-12)


def test_a_header_of_another_length_shifts_what_is_compared(tmp_path):
    tensors = {f"model.{number:03d}": torch.randn(50) for number in range(30)}
    before = commit(tmp_path, tensors, iteration=1)
    after = commit(tmp_path, {**tensors, **{f"a.{'x' * 200}.{i}": torch.ones(1) for i in range(20)}}, iteration=2)
    assert before.manifest.files[0].header_bytes != after.manifest.files[0].header_bytes
    told = by_name(verification.reread(after.store, "job", after.id, before.id).tensors)
    assert math.isnan(told[f"a.{'x' * 200}.0"]["distance"])
    known = [row["distance"] for name, row in told.items() if name in tensors]
    assert all(each == 0.0 or math.isnan(each) for each in known)


def test_shards_are_put_together_and_each_rank_s_own_tensor_is_told_for_itself(tmp_path):
    whole = torch.randn(8, 3)
    shards = [
        {"model.weight": TensorShard(whole[4 * rank : 4 * rank + 4], (8, 3), (4 * rank, 0))} for rank in (0, 1)
    ]
    written = commit(tmp_path, *shards)
    told = by_name(verification.reread(written.store, "job", written.id).tensors)
    assert told["model.weight"]["elements"] == 24
    assert told["model.weight"]["norm"] == pytest.approx(whole.double().norm().item())


@pytest.mark.parametrize("where", ["header", "small", "large"])
def test_one_flipped_bit_is_found_and_named(tmp_path, where):
    written = commit(tmp_path, some())
    tensors = {tensor.name: tensor for tensor in written.manifest.tensors}
    at = {"header": 20, "small": tensors["model.half"].start, "large": tensors["model.large"].end - 1}[where]
    flip(written, at)
    found = verification.reread(written.store, "job", written.id)
    assert found.verdict == "damaged"
    named = {"header": "the header", "small": "tensor model.half", "large": "tensor model.large, bytes"}[where]
    assert f"rank-0.safetensors: {named}" in found.reason
    assert found.tensors is None


def test_a_file_that_is_cut_short_or_gone_is_damage(tmp_path):
    written = commit(tmp_path, some())
    data = written.path().read_bytes()
    written.path().write_bytes(data[:-1])
    assert verification.reread(written.store, "job", written.id).verdict == "damaged"
    written.path().unlink()
    assert verification.reread(written.store, "job", written.id).verdict == "damaged"


def test_what_retention_took_meanwhile_is_gone_and_not_damaged(tmp_path):
    written = commit(tmp_path, some())
    written.store.delete("job", written.id, 1)
    assert verification.reread(written.store, "job", written.id).verdict == "gone"


def test_damage_of_the_other_one_is_not_this_one_s(tmp_path):
    before, after = commit(tmp_path, some(), iteration=1), commit(tmp_path, some(0.25), iteration=2)
    flip(before, 20 + max(tensor.start for tensor in before.manifest.tensors))
    found = verification.reread(after.store, "job", after.id, before.id)
    assert found.verdict == "sound"
    assert "does not match its digest" in found.other_damaged
    assert by_name(found.tensors)["model.weight"]["norm"] > 0


def test_bytes_are_paid_for_before_they_are_read_and_few_are_held(tmp_path):
    written = commit(tmp_path, some())
    paid, told = [], []
    verification.reread(written.store, "job", written.id, pace=paid.append, progress=lambda *now: told.append(now))
    assert sum(paid) >= written.manifest.files[0].size_bytes
    assert max(paid) <= reading.READ_BYTES + fmt.BLOCK_BYTES
    assert [read for read, _ in told] == sorted(read for read, _ in told)


def test_of_too_many_tensors_those_that_are_not_finite_are_told_and_then_the_largest(tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "MAX_REPORTED_TENSORS", 3)
    tensors = {f"model.{number}": torch.ones(number + 1) for number in range(6)}
    tensors["model.0"][0] = math.nan
    written = commit(tmp_path, tensors)
    told = verification.reread(written.store, "job", written.id).tensors
    assert (sorted(told.name), told.left_out) == (["model.0", "model.4", "model.5"], 3)


class EventRecorder:
    """A link that keeps what it is told."""

    def __init__(self):
        self.events, self.changed = [], threading.Condition()

    def event(self, event):
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def wait(self, happened):
        with self.changed:
            assert self.changed.wait_for(lambda: any(map(happened, self.events)), 300)
            return next(filter(happened, self.events))

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def verifying(tmp_path):
    """A verifier of the store at `tmp_path`, with what it says."""
    reporter = Reporter("job", TrainingPosition())
    heard = EventRecorder()
    reporter.connect(heard)
    store = open_store(tmp_path)
    history = SimpleNamespace(store=store, job="job", damaged=set())

    def mark_damaged(checkpoint, *, damaged=True):
        (history.damaged.add if damaged else history.damaged.discard)(checkpoint)

    history.mark_damaged = mark_damaged
    verifier = Verifier(history, SimpleNamespace(protect=lambda who, checkpoint: None), reporter)
    yield SimpleNamespace(verifier=verifier, heard=heard, history=history)
    verifier.close()


def verdict_of(request):
    return lambda event: (
        isinstance(event, wire.VerificationReport) and event.request == request and event.verdict is not None
    )


@pytest.mark.processes
def test_what_is_asked_is_done_once_one_after_the_other_by_another_process(tmp_path, verifying):
    first, second = commit(tmp_path, some(), iteration=1), commit(tmp_path, some(0.25), iteration=2)
    flip(first, 20)
    asked = (VerifyRequest(id=3, checkpoint=first.id), VerifyRequest(id=4, checkpoint=second.id, against=first.id))
    verifying.history.damaged.add(second.id)
    verifying.verifier.follow(asked)
    verifying.verifier.follow(asked)
    damaged, sound = verifying.heard.wait(verdict_of(3)), verifying.heard.wait(verdict_of(4))
    verifying.verifier.follow(asked)
    assert (damaged.verdict, sound.verdict) == ("damaged", "sound")
    assert "the header does not match its digest" in damaged.reason
    assert (sound.against, sound.tensors.left_out) == (first.id, 0)
    told = [(event.request, event.verdict) for event in verifying.heard.of(wire.VerificationReport)]
    assert [each for each in told if each[1] is not None] == [(3, "damaged"), (4, "sound")]
    assert told.index((3, "damaged")) < told.index((4, None))
    (state,) = verifying.heard.of(wire.Checkpoint)
    assert (state.id, state.state) == (first.id, "damaged")
    assert verifying.history.damaged == {first.id}


@pytest.mark.processes
def test_what_is_wanted_no_more_is_left_and_the_next_one_begun(tmp_path, verifying, monkeypatch):
    large, small = commit(tmp_path, some(), iteration=1), commit(tmp_path, {"x": torch.ones(3)}, iteration=2)
    monkeypatch.setattr(verification_queue, "BYTES_PER_SECOND", 1e6)  # 20 s for the large one
    verifying.verifier.follow((VerifyRequest(id=1, checkpoint=large.id),))
    verifying.heard.wait(lambda event: isinstance(event, wire.VerificationReport) and event.read_bytes > 0)
    verifying.verifier.follow((VerifyRequest(id=2, checkpoint=small.id),))
    assert verifying.heard.wait(verdict_of(2)).verdict == "sound"
    assert not any(map(verdict_of(1), verifying.heard.events))


@pytest.mark.processes
def test_a_session_that_ends_leaves_it_undone_at_once(tmp_path, verifying, monkeypatch):
    large = commit(tmp_path, some(), iteration=1)
    monkeypatch.setattr(verification_queue, "BYTES_PER_SECOND", 1e6)
    verifying.verifier.follow((VerifyRequest(id=1, checkpoint=large.id),))
    verifying.heard.wait(lambda event: isinstance(event, wire.VerificationReport) and event.read_bytes > 0)
    verifying.verifier.close()
    assert not any(map(verdict_of(1), verifying.heard.events))
    verifying.verifier.follow((VerifyRequest(id=2, checkpoint=large.id),))
    assert [event.request for event in verifying.heard.of(wire.VerificationReport)][-1] == 1


@pytest.mark.processes
def test_a_process_that_dies_is_told_and_costs_the_checkpoint_no_word(tmp_path, verifying, monkeypatch):
    large = commit(tmp_path, some(), iteration=1)
    monkeypatch.setattr(verification_queue, "BYTES_PER_SECOND", 1e6)
    verifying.verifier.follow((VerifyRequest(id=1, checkpoint=large.id),))
    verifying.heard.wait(lambda event: isinstance(event, wire.VerificationReport) and event.read_bytes > 0)
    verifying.verifier._process.kill()
    told = verifying.heard.wait(verdict_of(1))
    assert (told.verdict, told.reason) == ("failed", "the verification process was killed by SIGKILL")
    assert verifying.heard.of(wire.Checkpoint) == []


def test_closing_does_not_wait_for_a_pool_whose_threads_all_hang(tmp_path):
    written = commit(tmp_path, some())
    history = SimpleNamespace(store=written.store, job="job")
    verifier = Verifier(history, SimpleNamespace(), Reporter("job", TrainingPosition()))
    back = threading.Event()
    hanging = [io_pool.submit(back.wait) for _ in range(io_pool.THREADS)]
    try:
        verifier.follow((VerifyRequest(id=1, checkpoint=written.id),))
        closing = threading.Thread(target=verifier.close, daemon=True)
        closing.start()
        closing.join(300)
        assert not closing.is_alive()
    finally:
        back.set()
        for each in hanging:
            each.result(300)
