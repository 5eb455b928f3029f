"""Pipeline stages: disjoint parts of one state, on any number of ranks and stages."""

import pytest
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from holdfast.checkpoint.export import export
from holdfast.store import open_store
from tests.support import pipeline_workloads
from tests.support.training_log import digest

JOB = "tests.support.pipeline_workloads"


@pytest.fixture
def store(tmp_path):
    return str(tmp_path / "store")


def together(found, key="state"):
    """What all ranks have, in one dict; the same name has the same value on each."""
    merged = {}
    for each in found:
        for name, value in each[key].items():
            assert merged.setdefault(name, value) == value
    return merged


@pytest.mark.parametrize(("ranks", "per_rank"), [(2, 1), (4, 1), (2, 2)])
def test_a_pipeline_that_is_killed_five_times_has_the_losses_of_one_that_is_not(
    launcher, store, tmp_path, ranks, per_rank
):
    options = {"per_rank": per_rank}
    expected = launcher.run(ranks, f"{JOB}.train", store=str(tmp_path / "other"), **options)
    log = tmp_path / "log"
    for number, iteration in enumerate([2, 5, 8, 10, 16]):  # none is the last of an epoch of 6
        kill_at = [number % ranks, iteration]
        with pytest.raises(ChildProcessError):
            launcher.run(ranks, f"{JOB}.train", store=store, log=str(log), kill_at=kill_at, **options)
    found = launcher.run(ranks, f"{JOB}.train", store=store, log=str(log), **options)
    losses = expected[-1]["losses"]
    logged = [line.split() for line in log.read_text().splitlines()]
    assert all(losses[int(iteration)] == loss for iteration, loss in logged)
    assert {int(iteration) for iteration, _ in logged} == losses.keys()
    assert all(each["start"] > 0 for each in found)
    assert [each["state"] for each in found] == [each["state"] for each in expected]


def test_training_goes_on_with_another_number_of_stages(launcher, store):
    launcher.run(4, f"{JOB}.train", store=store, until=5, groups=2)
    one = launcher.run(1, f"{JOB}.train", store=store, until=8, groups=2)
    assert [each["start"] for each in one] == [5]
    two = launcher.run(2, f"{JOB}.resumed", store=store, per_rank=2, groups=2)
    assert [each["start"] for each in two] == [8] * 2
    assert together(two) == together(one)


def test_stages_on_four_ranks_are_one_state_on_one_and_on_two(launcher, store):
    before = together(launcher.run(4, f"{JOB}.train", store=store, until=5))
    for ranks, per_rank in [(1, 1), (2, 1), (2, 2), (1, 4)]:
        found = launcher.run(ranks, f"{JOB}.resumed", store=store, per_rank=per_rank)
        assert [each["start"] for each in found] == [5] * ranks
        assert together(found) == before


def test_stages_are_restored_in_place(launcher, store):
    for each in launcher.run(2, f"{JOB}.restored_in_place", store=store, per_rank=2):
        assert [(iteration, state) for iteration, state in each["restored"]] == [(3, each["states"][0])]
        assert each["said"] == []  # the stages are found among what the session has


def test_stages_with_an_optimizer_each(launcher, store):
    before = together(launcher.run(2, f"{JOB}.train", store=store, per_rank=2, until=3, parts=True))
    for ranks, per_rank in [(4, 1), (1, 1), (2, 1), (1, 4)]:
        found = launcher.run(ranks, f"{JOB}.resumed", store=store, per_rank=per_rank, parts=True)
        assert together(found) == before


@pytest.mark.parametrize("kind", ["safetensors", "hf", "dcp"])
def test_an_export_has_the_stages_of_all_ranks(launcher, store, tmp_path, kind):
    before = together(launcher.run(2, f"{JOB}.train", store=store, until=3))
    opened, config = open_store(store), tmp_path / "config.json"
    config.write_text('{"model_type": "small"}')
    options = {"config": config} if kind == "hf" else {}
    target = tmp_path / "exported"
    export(opened, "job", opened.checkpoints("job")[-1], target, kind, **options)
    if kind == "dcp":
        found = {"model": pipeline_workloads.Model().state_dict()}
        with pytest.warns(UserWarning, match="single process"):
            dcp.load(found, checkpoint_id=target)
        found = found["model"]
    elif kind == "hf":
        found = load_file(target / "model.safetensors")
    else:
        found = {n.removeprefix("model."): t for n, t in load_file(target).items() if n.startswith("model.")}
    names = {name for name in before if not name.startswith("moments of ")}
    assert {name: digest(found[name]) for name in names} == {name: before[name] for name in names}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_stages_with_data_parallelism_beside(launcher, store, tmp_path, kind):
    options = {"ranks": 2, "kind": kind, "norm": False}
    expected = launcher.run(4, f"{JOB}.train", store=str(tmp_path / "other"), **options)
    launcher.run(4, f"{JOB}.train", store=store, until=7, **options)
    found = launcher.run(4, f"{JOB}.train", store=store, **options)
    assert [each["start"] for each in found] == [7] * 4
    assert all(each["losses"].items() <= expected[rank]["losses"].items() for rank, each in enumerate(found))
    assert [each["state"] for each in found] == [each["state"] for each in expected]
    before = together(found)
    for world_size, layout in [(1, {}), (2, {"ranks": 2}), (2, {"ranks": 1, "kind": "ddp"}), (4, {"ranks": 4})]:
        found = launcher.run(world_size, f"{JOB}.resumed", store=store, norm=False, **layout)
        assert together(found) == before


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("tied", "'head.bias' is in stages of the ranks 0 and 1"),
        ("renamed", "'0.bias' is in stages of the ranks 0 and 1"),
        ("one rank", "rank 0 was given stages of a pipeline as nothing, rank 1 as model"),
        ("same list", "both have 'layers."),
        ("none", "give the stages of this rank"),
    ],
)
def test_stages_that_are_no_parts_of_one_model_are_refused_by_name(launcher, store, how, words):
    world_size = 1 if how in ("same list", "none") else 2  # what one rank sees alone
    for error in launcher.run(world_size, f"{JOB}.refused", store=store, how=how):
        assert words in error


def test_a_layer_that_no_rank_has_is_named(launcher, store):
    launcher.run(2, f"{JOB}.train", store=store, until=2)
    for error in launcher.run(2, f"{JOB}.refused", store=store, how="missing"):
        assert "layers.3.bias" in error


def test_a_notice_is_due_where_learning_shapes_changes_the_state(launcher):
    [[(is_due, changed), (is_due_with_shapes, expected)]] = launcher.run(1, f"{JOB}.learning")
    assert is_due == (changed != expected)
    assert not is_due_with_shapes
