"""Sessions that compress their checkpoints, and pause where that costs too much."""

import pytest
import torch
from msgspec.structs import replace

from holdfast.checkpoint import restore
from holdfast.pacing import Controller, PacingSettings
from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import Checkpoint
from holdfast.save.compression import FIRST_PAUSE, Compression
from holdfast.save.run import RunState, WriteResult
from holdfast.store import open_store
from holdfast.telemetry.reporter import Reporter, TrainingPosition
from holdfast.units import FixedInterval
from tests.support.persist_job import empty_run
from tests.support.session_fixtures import linked as linked
from tests.support.session_fixtures import store as store
from tests.support.small_session import DurableJob

pytest.importorskip("numpy")


def dense():
    model = torch.nn.Linear(300, 300)
    return model, model.parameters()


class Job(DurableJob):
    def __init__(self, store, **options):
        super().__init__(store, dense, 300, **options)


def is_compressed(place, iteration):
    manifest = restore.manifest(open_store(place), "job", checkpoint_id(iteration, 1))
    return any(file.encoding is not None for file in manifest.files)


def test_a_restart_continues_exactly_from_a_compressed_checkpoint(store, tmp_path, monkeypatch):
    whole = Job(tmp_path / "whole").run(6).close()
    before = Job(store, compress=True).run(2).close()
    plain = Job(store).run(2).close()
    monkeypatch.setenv("HOLDFAST_COMPRESS", "on")
    after = Job(store).run(2).close()
    assert before.losses + plain.losses + after.losses == whole.losses
    assert [is_compressed(store, iteration) for iteration in range(1, 7)] == 2 * [True] + 2 * [False] + 2 * [True]


def test_the_sizes_before_and_after_compression_are_reported(store, linked):
    job = Job(store, compress=True, **linked).run(1).close()
    (found,) = (each for each in job.session._reporter.link.of(Checkpoint) if each.state == "durable")
    assert 0 < found.payload_bytes < 0.95 * found.raw_bytes


def test_compression_needs_a_flag(store):
    with pytest.raises(ValueError, match="compress='a lot'"):
        Job(store, compress="a lot")


class Judged:
    """Compression as the interval and the profile of a job make it decide."""

    def __init__(self, iteration_seconds=1.0, every=10):
        settings = PacingSettings(every=FixedInterval(every) if not isinstance(every, int) else every)
        self.controller = Controller(settings)
        profile = {"iteration_seconds": iteration_seconds, "persist_seconds": 1.0, "cost_seconds": 0.0}
        self.controller.load_state_dict({"profile": profile})
        self.notices = []
        reporter = Reporter("job", TrainingPosition())
        reporter.notice = lambda *notice: self.notices.append(notice)
        self.compression = Compression(self.controller, reporter)

    def settle(self, persist_seconds, encode_seconds):
        run = empty_run(1)
        written = replace(run.begin_write(), encode_seconds=encode_seconds)
        run.end(RunState.DURABLE, WriteResult(seconds=persist_seconds), written)
        self.compression.settled(run)

    def begin(self, count):
        return [self.compression.begin() for _ in range(count)]


def test_compression_goes_on_while_a_checkpoint_is_durable_before_the_next_is_due():
    judged = Judged()
    judged.settle(8.0, 6.0)
    assert judged.begin(3) == 3 * [True]
    assert not judged.notices


def test_compression_pauses_for_some_checkpoints_if_it_would_lengthen_the_interval():
    judged = Judged()
    judged.settle(12.0, 8.0)
    assert judged.begin(FIRST_PAUSE + 1) == FIRST_PAUSE * [False] + [True]
    ((level, code, text),) = judged.notices
    assert (level, code) == ("info", "compression")
    assert text == (
        "the next 20 checkpoints are not compressed: encoding took 8 s of the 12 s until one was durable, and "
        "allows one every 12 iterations at most, without it every 4 iterations"
    )


def test_each_pause_is_twice_as_long_until_compression_has_paid_for_as_many_checkpoints():
    judged = Judged()
    for expected in (20, 40, 80):
        judged.settle(12.0, 8.0)
        assert judged.begin(expected + 1) == expected * [False] + [True]
    for _ in range(80):
        judged.settle(8.0, 6.0)
    judged.settle(12.0, 8.0)
    assert judged.begin(FIRST_PAUSE + 1) == FIRST_PAUSE * [False] + [True]


def test_a_slow_store_alone_does_not_pause_compression():
    judged = Judged()
    judged.settle(12.0, 0.5)
    assert judged.begin(1) == [True]
