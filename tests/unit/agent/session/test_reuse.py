"""Sessions that train adapters on a frozen base: the base is stored once."""

import shutil

import pytest
import torch

from holdfast.checkpoint import restore
from holdfast.checkpoint.scrub import scrub
from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import Checkpoint, Notice
from holdfast.store import open_store
from tests.support.session_fixtures import linked as linked
from tests.support.session_fixtures import store as store
from tests.support.small_session import DurableJob

FIRST = checkpoint_id(1, 1)
SHARED = f"rank-0.{FIRST}.safetensors"


class Adapted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.adapter = torch.nn.Linear(600, 600), torch.nn.Linear(600, 2)
        self.base.requires_grad_(False)

    def forward(self, batch):
        return self.adapter(self.base(batch))


def adapted():
    model = Adapted()
    return model, model.adapter.parameters()


class Job(DurableJob):
    def __init__(self, store, **options):
        super().__init__(store, adapted, 600, **options)


def files_of(place, iteration, lineage=1):
    manifest = restore.manifest(open_store(place), "job", checkpoint_id(iteration, lineage))
    return {file.name: file.written_by for file in manifest.files}


def test_a_restart_continues_exactly_from_a_checkpoint_that_shares_a_file_and_shares_it_too(store, tmp_path):
    whole = Job(tmp_path / "whole").run(6).close()
    before = Job(store).run(3).close()
    after = Job(store).run(3).close()
    assert before.losses + after.losses == whole.losses
    for iteration in (2, 3, 4, 5, 6):
        assert files_of(store, iteration)[SHARED] == FIRST


def test_retention_removes_the_checkpoint_that_wrote_the_base_and_no_other_needs_it(store):
    job = Job(store, retention="last 2").run(6)
    assert job.session._saver.retention.wait_idle(60)
    job.close()
    there = open_store(store).checkpoints("job")
    assert there == [checkpoint_id(5, 1), checkpoint_id(6, 1)]
    assert files_of(store, 6)[SHARED] == FIRST
    moved = shutil.copytree(store, store.with_name("another machine"))
    for place in store, moved:
        restore.verify(open_store(place), "job", there[-1])
    resumed = Job(moved)
    assert resumed.session.iteration == 6
    resumed.close()


def test_a_base_that_thaws_is_written_from_then_on_and_shared_again_when_it_freezes(store):
    job = Job(store).run(2)
    with torch.no_grad():
        job.model.base.weight[0, 0] += 1
    job.run(1)
    job.model.base.weight.data[0, 0] += 1
    job.run(3).close()
    assert SHARED in files_of(store, 2)
    third, fourth = (f"rank-0.{checkpoint_id(iteration, 1)}.safetensors" for iteration in (3, 4))
    assert third not in files_of(store, 4)
    assert [name for name in files_of(store, 6) if name != "rank-0.safetensors"]
    found = restore.load(open_store(store), "job", checkpoint_id(6, 1)).tensors
    assert torch.equal(found["model.base.weight"], job.model.base.weight)
    assert fourth not in files_of(store, 3)


def test_after_damage_was_found_the_base_is_written_anew_and_that_one_is_shared(store):
    job = Job(store).run(2)
    job.session._saver.history.mark_damaged(FIRST)
    job.run(3).close()
    third = f"rank-0.{checkpoint_id(3, 1)}.safetensors"
    assert SHARED not in files_of(store, 3)
    assert files_of(store, 3)[third] is None
    assert files_of(store, 4)[third] == files_of(store, 5)[third] == checkpoint_id(3, 1)


def test_a_damaged_base_with_parity_is_repaired_for_all_checkpoints_and_restored(store):
    pytest.importorskip("numpy")
    job = Job(store, parity="10+2").run(3).close()
    place, path = open_store(store), store / "job" / FIRST / SHARED
    data = bytearray(path.read_bytes())
    data[500_000] ^= 1
    path.write_bytes(data)
    resumed = Job(store, parity="10+2")
    assert torch.equal(resumed.model.base.weight, job.model.base.weight)
    resumed.run(2).close()
    anew = f"rank-0.{checkpoint_id(4, 1)}.safetensors"
    assert [*files_of(store, 4), *files_of(store, 5)] == 2 * ["rank-0.safetensors", anew]
    assert scrub(place, "job", checkpoint_id(2, 1), repair=True).state == "repaired"
    assert {scrub(place, "job", each).state for each in place.checkpoints("job")} == {"sound"}


def test_what_was_reused_is_reported(store, linked):
    job = Job(store, **linked).run(2).close()
    first, second = (each for each in job.session._reporter.link.of(Checkpoint) if each.state == "durable")
    assert (first.reused_bytes, second.payload_bytes > second.reused_bytes > 1_400_000) == (0, True)
    assert not [each for each in job.session._reporter.link.of(Notice) if each.code == "reuse"]
