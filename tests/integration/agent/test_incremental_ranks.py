"""Incremental checkpoints of several ranks: each plans its own part, and other ranks restore it."""

import pytest

pytest.importorskip("numpy")

from holdfast.checkpoint import restore
from holdfast.checkpoint.scrub import scrub
from holdfast.store import open_store

RUNS = ((3, 8), (2, 16), (3, 24))
"""World sizes, and updates until each run ends."""
TRAIN = "tests.support.incremental_workloads.train"


def test_ranks_write_rows_of_their_shards_and_fewer_ranks_restore_them(launcher, tmp_path):
    begun = [launcher.run(world_size, TRAIN, root=str(tmp_path), updates=upto) for world_size, upto in RUNS]
    assert [len(set(ranks)) for ranks in begun] == [1, 1, 1]
    (first, *_), (second, *_), (third, *_) = begun
    assert (first[0], second[0] > 0, third[0] > second[0]) == (0, True, True)
    assert [first[1], second[1], third[1]] == [True] * 3, "the state is not that of the checkpoint"
    assert min(first[2], second[2]) > 0, "all of the state was written"
    store = open_store(tmp_path)
    for checkpoint in store.checkpoints("job"):
        restore.verify(store, "job", checkpoint)
        assert scrub(store, "job", checkpoint).state == "sound"
