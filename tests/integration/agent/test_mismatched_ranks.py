"""Ranks whose states do not belong together are told so: no checkpoint is put together of them."""

import pytest


@pytest.fixture
def store(tmp_path):
    return str(tmp_path / "store")


@pytest.mark.parametrize("how", ["twice", "not at all"])
def test_ranks_that_count_iterations_otherwise_have_no_checkpoint_in_common(launcher, store, how):
    found = launcher.run(2, "tests.support.mismatched_ranks_workloads.miscounting", store=store, how=how)
    states, told = found[0]
    assert states
    assert all(one == other for one, other in states)
    assert any("every rank must call session.step() after the same batches" in each for each in told)


def test_pipeline_stages_of_the_same_names_are_not_taken_for_replicas(launcher, store):
    for checkpoints, _ in (
        found := launcher.run(4, "tests.support.mismatched_ranks_workloads.stages", store=store)
    ):
        assert checkpoints == []
    assert any("have different values for replicated state" in told for told in found[0][1])


def test_an_optimizers_plain_tensors_of_a_sharded_parameter_are_each_ranks_own(launcher, store):
    before = launcher.run(2, "tests.support.mismatched_ranks_workloads.local_state", store=store)
    after = launcher.run(2, "tests.support.mismatched_ranks_workloads.local_state", store=store)
    assert [moments for _, moments in after] == [moments for _, moments in before]
    assert before[0][1] != before[1][1]
    assert [start for start, _ in after] != [0, 0]


@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_parameters_that_are_not_reduced_are_each_ranks_own(launcher, store, how):
    before = launcher.run(2, "tests.support.mismatched_ranks_workloads.trained_later", store=store, how=how)
    after = launcher.run(2, "tests.support.mismatched_ranks_workloads.trained_later", store=store, how=how)
    assert [weight for _, weight in after] == [weight for _, weight in before]
    assert before[0][1] != before[1][1]
    assert [start for start, _ in after] != [0, 0]


def test_replicas_that_have_drifted_apart_are_refused(launcher, store):
    (checkpoints, told), _ = launcher.run(
        2, "tests.support.mismatched_ranks_workloads.unsynchronised", store=store
    )
    assert [each for each in checkpoints if not each.startswith("000000000001")] == []
    assert any("check that every forward pass calls the DistributedDataParallel" in each for each in told)
    assert any("that every update reduces gradients over all ranks" in each for each in told)


@pytest.mark.parametrize("how", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_gradients_that_fully_shard_has_not_synchronised_are_refused(launcher, store, how):
    for checkpoints, _ in (
        found := launcher.run(2, "tests.support.mismatched_ranks_workloads.accumulating", store=store, how=how)
    ):
        assert checkpoints
        assert [each for each in checkpoints if int(each.partition("-")[0]) % 2] == []
    assert any(f"{how}(True)" in each for each in found[0][1])


@pytest.mark.parametrize("how", ["itself", "compiled", "below another"])
def test_a_replicated_module_is_found_in_what_is_given(launcher, store, how):
    for own, reducers, told in launcher.run(
        2, "tests.support.mismatched_ranks_workloads.given", store=store, how=how
    ):
        assert own == []
        assert list(reducers.values()) == [[[3, 2, 1, 0]]]
        assert not any("DistributedDataParallel" in each for each in told)


def test_a_replicated_module_is_asked_for_where_the_one_inside_is_given(launcher, store):
    for own, reducers, told in launcher.run(
        2, "tests.support.mismatched_ranks_workloads.given", store=store, how="the one inside"
    ):
        assert len(own) == 4
        assert reducers == {}
        assert any("pass it as Session(model=...)" in each and "to the last bit" in each for each in told)
        assert any("the ranks train separate models, unless the script averages" in each for each in told)


def test_what_is_not_supported_says_what_is(launcher):
    for model, optimizer in launcher.run(2, "tests.support.mismatched_ranks_workloads.not_supported"):
        assert "Session(model=...): FullyShardedDataParallel is not supported" in model
        assert "fully_shard" in model
        assert "Session(optimizer=...): ZeroRedundancyOptimizer is not supported" in optimizer


def test_a_sharded_model_of_another_shape_is_refused_by_name(launcher, store):
    assert launcher.run(2, "tests.support.mismatched_ranks_workloads.larger", store=store, width=4) == [None, None]
    for said in launcher.run(2, "tests.support.mismatched_ranks_workloads.larger", store=store, width=6):
        assert (
            "model.weight: (6, 4) of torch.float32 in the model, (4, 4) of torch.float32 in the checkpoint" in said
        )


@pytest.mark.parametrize(("where", "iteration"), [("within an iteration", 10), ("between two", 11)])
def test_a_rank_that_leaves_the_loop_alone_does_not_wait_for_ever(launcher, store, where, iteration):
    assert launcher.run(2, "tests.support.mismatched_ranks_workloads.leaving", store=store, where=where) == [
        iteration,
        11,
    ]
