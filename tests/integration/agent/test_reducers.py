"""A job of several ranks goes on in a fresh DistributedDataParallel, to the last bit as if it had not stopped."""

import pytest
from torch.nn.parallel import DistributedDataParallel

WAYS = {
    "small buckets": {},
    "one bucket": {"bucket_bytes": 25 << 20},
    "after one iteration": {"at": 1},
    "static graph": {"static_graph": True},
    "static graph after two iterations": {"static_graph": True, "at": 2},
    "static graph with views": {"static_graph": True, "gradient_as_bucket_view": True, "net": {"mixed": True}},
    "gradients are views of buckets": {"gradient_as_bucket_view": True},
    "accumulation": {"accumulate": 2, "gradient_as_bucket_view": True},
    "frozen parameters": {"net": {"frozen": True}},
    "two types": {"net": {"mixed": True}},
    "tied parameters": {"net": {"tied": True}},
    "compiled inside": {"compiled": "inside", "bucket_bytes": 2 << 20},
    "compiled outside": {"compiled": "outside", "bucket_bytes": 2 << 20},
}
if hasattr(DistributedDataParallel, "finalize_backward"):  # since torch 2.15
    WAYS |= {
        "buckets as gradients become ready": {"lazy_bucket_allocation": True},
        "passes finalized by hand": {"by_hand": True},
        "passes finalized by hand, accumulation": {"by_hand": True, "accumulate": 2},
        "passes finalized by hand, static graph": {"by_hand": True, "static_graph": True},
    }


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_fresh_module_sums_in_another_order_than_one_that_has_trained(launcher, world_size):
    for same in launcher.run(world_size, "tests.support.ddp_bucket_workloads.resume", warm=False):
        assert not same[0]


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_warmed_module_goes_on_to_the_last_bit(launcher, world_size):
    assert (
        launcher.run(world_size, "tests.support.ddp_bucket_workloads.resume", warm=True)
        == [[True] * 6] * world_size
    )


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_it_does_so_however_the_module_is_set_up(launcher, how):
    assert launcher.run(3, "tests.support.ddp_bucket_workloads.resume", warm=True, **how) == [[True] * 6] * 3


def test_a_job_in_a_part_of_all_ranks_is_warmed_by_these_alone(launcher):
    assert (
        launcher.run(4, "tests.support.ddp_bucket_workloads.resume", warm=True, subgroup=[0, 2, 3])
        == [[True] * 6] * 4
    )
    assert not launcher.run(4, "tests.support.ddp_bucket_workloads.resume", warm=False, subgroup=[0, 2, 3])[2][0]


def test_there_is_a_layout_from_the_first_backward_pass_that_sums_on(launcher):
    for fresh, accumulating, *later, reported in launcher.run(2, "tests.support.ddp_bucket_workloads.layouts"):
        assert (fresh, accumulating) == (None, None)
        assert later == [reported] * 3
        assert len(reported) > 2


def test_buckets_that_are_never_rebuilt_have_no_layout(launcher):
    for layout, why in launcher.run(2, "tests.support.ddp_bucket_workloads.never_rebuilt"):
        assert layout is None
        assert "find_unused_parameters" in why


@pytest.mark.parametrize("views", [False, True])
def test_asking_for_the_layout_changes_no_bit(launcher, views):
    asked, not_asked = (
        launcher.run(
            3, "tests.support.ddp_bucket_workloads.asked_or_not", asked=asked, gradient_as_bucket_view=views
        )
        for asked in (True, False)
    )
    assert asked == not_asked


@pytest.mark.parametrize("in_no_sync", [False, True])
@pytest.mark.parametrize("static_graph", [False, True])
def test_warming_up_leaves_gradients_hooks_and_random_numbers_alone(launcher, static_graph, in_no_sync):
    launcher.run(
        2, "tests.support.ddp_bucket_workloads.disturbed", static_graph=static_graph, in_no_sync=in_no_sync
    )


def test_a_module_that_has_trained_needs_no_other_rank_to_be_as_it_is(launcher):
    as_it_is, in_another_order, otherwise = launcher.run(3, "tests.support.ddp_bucket_workloads.warmed_before")[0]
    assert (as_it_is, in_another_order) == (None, None)
    assert "contain other parameters" in otherwise


@pytest.mark.parametrize("hook", ["allreduce_hook", "fp16_compress_hook"])
def test_hooks_of_torch_that_keep_no_state_are_no_obstacle(launcher, hook):
    assert launcher.run(2, "tests.support.ddp_bucket_workloads.with_hook", hook=hook) == [None, None]


@pytest.mark.parametrize("static_graph", [False, True])
def test_a_communication_hook_that_may_keep_a_state_is_not_called(launcher, static_graph):
    for why in launcher.run(
        2, "tests.support.ddp_bucket_workloads.with_hook", hook="keep", static_graph=static_graph
    ):
        assert why.startswith("its communication hook keep ")


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("fewer parameters", "it reduces 18 parameters, not the 20 of the checkpoint"),
        ("larger buckets", "its buckets contain other parameters: has bucket_cap_mb changed?"),
        ("called before", "with static_graph it must not have been called before the resume"),
        ("all delayed", "it has no buckets"),
    ],
)
def test_what_cannot_be_brought_about_is_told(launcher, what, why):
    assert launcher.run(2, "tests.support.ddp_bucket_workloads.refused", what=what) == [why, why]


def test_parameters_that_are_not_the_reducers_are_not_counted(launcher):
    assert launcher.run(3, "tests.support.ddp_bucket_workloads.delayed_in_part") == [16, 16, 16]
