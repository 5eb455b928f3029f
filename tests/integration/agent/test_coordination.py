"""What is decided at a boundary is done at the same one by all ranks, whatever goes wrong on one of them."""

import itertools

import pytest

from holdfast.checkpoint import restore
from holdfast.store import open_store
from holdfast.system.supervisor_channel import EXIT_RELAUNCH
from holdfast.system.supervisor_files import take_relaunch

WORLD = 3


def all_whole(root):
    store = open_store(root)
    for checkpoint in store.checkpoints("m"):
        manifest = restore.verify(store, "m", checkpoint)
        assert len(manifest.files) == WORLD
    return store.checkpoints("m")


@pytest.mark.parametrize("busy", [None, 0, 1])
@pytest.mark.parametrize("every", [1, 10])
def test_checkpoints_come_exactly_every_so_many_iterations(launcher, tmp_path, every, busy):
    """However quick the iterations are: the ranks meet in time for each of them."""
    taken = launcher.run(
        WORLD, "tests.support.rank_communication_workloads.regularly", store=str(tmp_path), every=every, busy=busy
    )
    assert taken[0] == taken[1] == taken[2]
    at = [iteration for iteration, kind in taken[0] if kind == "scheduled"]
    gaps = {after - before for before, after in itertools.pairwise(at)}
    assert gaps == {every} or (every == 1 and gaps <= {1, 2}), at
    all_whole(tmp_path)


@pytest.mark.parametrize(("step_seconds", "every", "gap"), [(1.0, "10s", 10), (1 / 128, "1s", 128)])
def test_the_clock_of_rank_0_decides_about_an_interval_in_time(launcher, tmp_path, step_seconds, every, gap):
    """Also where the ranks agree several iterations ahead: no checkpoint is early, and none late."""
    taken = launcher.run(
        WORLD, "tests.support.rank_communication_workloads.timed",
        store=str(tmp_path), step_seconds=step_seconds, every=every, steps=4 * gap,
    )  # fmt: skip
    assert taken[0] == taken[1] == taken[2]
    at = [iteration for iteration, kind in taken[0] if kind == "scheduled"]
    assert gap <= at[0] <= gap + max(1, int(0.1 / step_seconds)), (
        "before iterations are measured, once they are past"
    )
    assert {after - before for before, after in itertools.pairwise(at)} == {gap}
    all_whole(tmp_path)


def test_a_checkpoint_that_the_script_of_rank_0_asks_for_is_taken_by_all(launcher, tmp_path):
    taken = launcher.run(WORLD, "tests.support.rank_communication_workloads.asked", store=str(tmp_path))
    assert len(taken[0]) == 1
    assert taken[0] == taken[1] == taken[2]
    assert any(checkpoint.startswith(f"{taken[0][0][0]:012d}") for checkpoint in all_whole(tmp_path))


@pytest.mark.parametrize("what", ["learn", "prices", "choose", "capture"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_fault_of_ours_on_one_rank_holds_no_other_up(launcher, tmp_path, rank, what):
    found = launcher.run(
        WORLD, "tests.support.rank_communication_workloads.break_within", store=str(tmp_path), rank=rank, what=what
    )
    taken = [[iteration for iteration, _ in each] for each, _, _ in found]
    assert taken[0] == taken[1] == taken[2]
    assert {head for _, _, head in found} == {"000000000096-1"}, "checkpoints are taken again once it is over"
    assert "000000000096-1" in all_whole(tmp_path)
    if not (what == "choose" and rank):  # the others do not choose
        assert found[rank][1] or found[0][1]


def test_all_ranks_go_back_at_the_same_boundary(launcher, tmp_path):
    found = launcher.run(WORLD, "tests.support.rank_communication_workloads.restore_back", store=str(tmp_path))
    jumps, lineage, lines = found[0]
    assert found == [(jumps, 2, [])] * WORLD
    assert (len(jumps), lineage, lines) == (1, 2, [])
    all_whole(tmp_path)


@pytest.mark.parametrize("rank", range(WORLD))
def test_none_goes_back_where_one_cannot(launcher, tmp_path, rank):
    found = launcher.run(
        WORLD, "tests.support.rank_communication_workloads.restore_back", store=str(tmp_path), fails_on=rank
    )
    for jumps, lineage, _ in found:
        assert (jumps, lineage) == ([], 1)
    (line,) = [line for _, _, lines in found for line in lines]  # rank 0 tells
    assert "refused: " in line
    assert "does not fit" in line
    all_whole(tmp_path)


def test_operators_orders_are_carried_out_by_all_at_once(launcher, tmp_path):
    found = launcher.run(WORLD, "tests.support.rank_communication_workloads.ordered", store=str(tmp_path))
    taken, jumps, told = found[0]
    assert found == [(taken, jumps, told), (taken, jumps, {}), (taken, jumps, {})]
    kinds = [kind for _, kind in taken]
    assert (kinds.count("requested"), kinds.count("safety")) == (1, 1)
    scheduled = [iteration for iteration, kind in taken if kind == "scheduled"]
    assert 7 in {after - before for before, after in itertools.pairwise(scheduled)}
    ((before, after),) = jumps
    assert told.pop("delivered") < before
    assert told == {"restoring": before, "restored": after}
    all_whole(tmp_path)


def test_all_ranks_end_at_one_boundary_to_be_started_again_for_an_order(launcher, tmp_path):
    found = launcher.run(WORLD, "tests.support.rank_communication_workloads.relaunched", store=str(tmp_path))
    status, iteration, taken = found[0]
    assert found == [(EXIT_RELAUNCH, iteration, taken)] * WORLD
    assert (status, taken[-1]) == (EXIT_RELAUNCH, (iteration, "safety"))
    assert take_relaunch(tmp_path / "supervision").id == "o"
    all_whole(tmp_path)


def test_a_loop_that_does_not_resume_begins_together(launcher, tmp_path):
    assert (
        launcher.run(WORLD, "tests.support.rank_communication_workloads.afresh", store=str(tmp_path))
        == [(10, "000000000010-1")] * WORLD
    )


def test_no_rank_trains_on_with_half_of_a_restore(launcher, tmp_path):
    with launcher.start(
        WORLD, "tests.support.rank_communication_workloads.break_apart", store=str(tmp_path)
    ) as members:
        assert [member.wait() for member in members] == [0, -9, 0]
        assert {member.result()[0] for member in members if member.number != 1} == {"RestoreFailed"}
    all_whole(tmp_path)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_rank_0_knows_how_large_a_checkpoint_of_all_ranks_is(launcher, tmp_path, kind):
    found = launcher.run(
        WORLD, "tests.support.exact_multi_rank_workloads.estimated", store=str(tmp_path), kind=kind
    )  # fmt: skip
    store = open_store(tmp_path)
    manifest = restore.manifest(store, "job", store.checkpoints("job")[-1])
    stored_bytes = sum(file.size_bytes - file.header_bytes for file in manifest.files)
    assert found[0] == pytest.approx(stored_bytes, rel=0.02)
