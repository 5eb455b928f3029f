"""Many simulated ranks commit with the code of a training."""

import pytest

from benchmarks.ranks.world import JOB, LargeJob
from holdfast.checkpoint import restore
from tests.support.simulated_ranks import SimulatedWorld


def test_many_ranks_make_one_checkpoint_of_which_each_has_its_part(tmp_path):
    job = LargeJob(tmp_path, 70, tensors=3)
    job.start()
    for _ in range(2):
        job.commit()
    manifest = restore.verify(job.store, JOB, job.checkpoint)
    assert {tensor.file for tensor in manifest.tensors} == {f"rank-{rank}.safetensors" for rank in range(70)}
    loaded = restore.load(job.store, JOB, job.checkpoint, rank=69)
    assert loaded.state["session"] == {"rank": 69}
    assert {name: tuple(tensor.shape) for name, tensor in loaded.tensors.items()} == {
        "rng.torch": (16,), **dict.fromkeys(loaded.state["model"], (70, 2))
    }  # fmt: skip


def test_ranks_that_wait_in_vain_are_named():
    with pytest.raises(AssertionError, match=r"ranks \[0, 1, 2\] wait in vain"):
        SimulatedWorld(3).run(lambda link: link.receive([(link.rank + 1) % 3], 0))
