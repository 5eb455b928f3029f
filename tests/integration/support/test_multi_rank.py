"""That a test hears of what goes wrong in a rank, whichever it is."""

import pytest


def test_ranks_reduce_together_and_each_returns_its_result(launcher):
    found = launcher.run(3, "tests.support.multi_rank_workloads.mean", number=2)
    assert [(each["mean"], each["threads"]) for each in found] == [(3, 1)] * 3
    assert len({each["pid"] for each in found}) == 3


def test_results_may_be_large(launcher):
    first, second = launcher.run(2, "tests.support.multi_rank_workloads.large")
    assert first[-1] + 1 == second[-1] == 1 << 20


@pytest.mark.parametrize("rank", [0, 2])
def test_the_trace_is_that_of_the_rank_that_raised_first(launcher, rank):
    with pytest.raises(ChildProcessError, match=rf"(?s)rank {rank} raised.*KeyError: 'lost'"):
        launcher.run(3, "tests.support.multi_rank_workloads.fail_alone", rank=rank)


def test_a_rank_that_is_killed_is_told(launcher):
    with pytest.raises(ChildProcessError, match="rank 1, status -9"):
        launcher.run(2, "tests.support.multi_rank_workloads.die_alone", rank=1)


def test_a_workload_that_there_is_not_is_told(launcher):
    with pytest.raises(
        ChildProcessError,
        match=r"AttributeError: module 'tests\.support\.multi_rank_workloads' has no attribute 'nothing'",
    ):
        launcher.run(1, "tests.support.multi_rank_workloads.nothing")


def test_ranks_can_be_heard_held_and_killed(launcher):
    with launcher.start(3, "tests.support.multi_rank_workloads.steps") as ranks:
        for rank in ranks:
            rank.hear("ready")
            rank.go_on()
        assert [rank.hear("step 2") for rank in ranks] == [""] * 3
        assert ranks[0].said("step ") == ["0", "1", "2"]
        ranks[1].kill()
        assert ranks[1].wait() == -9
        for rank in (ranks[0], ranks[2]):
            rank.go_on()
        assert [rank.wait() for rank in ranks] == [1, -9, 1]
        with pytest.raises(ChildProcessError, match="it did not say 'step 3'"):
            ranks[0].hear("step 3")


def test_ranks_that_wait_for_ever_are_given_up_and_ended(launcher, monkeypatch):
    monkeypatch.setattr("tests.support.multi_rank.PATIENCE_SECONDS", 0.2)
    with pytest.raises(TimeoutError, match=r"not all have ended after 0\.2 s"):
        launcher.run(2, "tests.support.multi_rank_workloads.steps")
