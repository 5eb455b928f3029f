"""Several ranks leave out the same data."""

import pytest

from holdfast.engine.trouble_rule import AFTER_TROUBLE
from holdfast.store import Lineage, open_store
from tests.support.multi_rank import launcher as launcher


@pytest.mark.parametrize("batches", [1, 5], ids=["within an epoch", "across the end of an epoch of 4"])
def test_all_ranks_leave_out_the_same_batches(launcher, tmp_path, batches):
    ranks = launcher.run(
        3, "tests.support.left_out_workloads.train_ranks", store=str(tmp_path), when=4, batches=batches
    )
    at = ranks[0]["at"]
    assert 0 < at <= 4
    for rank in ranks:
        assert rank["lineage"] == 2
        assert rank["samples"] == rank["all"][:at] + rank["all"][at + batches :]


@pytest.mark.parametrize("bad_rank", [0, 2])
def test_all_ranks_go_back_when_the_loss_of_one_is_wrong(launcher, tmp_path, bad_rank):
    ranks = launcher.run(
        3, "tests.support.left_out_workloads.train_ranks", store=str(tmp_path), when=6, bad_rank=bad_rank
    )
    (restored,) = open_store(tmp_path).records("job", Lineage)[1:]
    assert restored.trouble == 6
    at, upto = restored.iteration, 6 + AFTER_TROUBLE
    assert at < 5
    for rank in ranks:
        assert rank["lineage"] == 2
        assert rank["samples"] == rank["all"][:at] + rank["all"][upto:]


def test_all_ranks_train_on_data_that_one_cannot_leave_out_as_it_starts(launcher, tmp_path):
    ranks = launcher.run(
        2, "tests.support.left_out_workloads.start_ranks_of_which_one_cannot", store=str(tmp_path)
    )
    for rank in ranks:
        assert rank["lineage"] == 3
        assert rank["samples"] == rank["all"][rank["at"] : rank["at"] + 2]
    assert [len(each.left_out) for each in open_store(tmp_path).records("job", Lineage)] == [0, 1, 0]
