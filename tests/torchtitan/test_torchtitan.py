"""torchtitan's own trainer and debug model on CPUs, with Holdfast as its checkpoint manager."""

from types import SimpleNamespace

import pytest
from torch import nn

from benchmarks.integrations.kills import compare, run


@pytest.mark.parametrize(("ranks", "kills"), [(1, 3), (2, 2)])
def test_torchtitan_resumes_exactly(tmp_path, ranks, kills):
    uninterrupted = run("torchtitan", "holdfast", tmp_path / "uninterrupted", ranks=ranks)
    killed = run("torchtitan", "holdfast", tmp_path / "killed", kills=kills, seed=1, ranks=ranks)
    result = compare(uninterrupted, killed, updates=36 // ranks, epoch=12 // ranks)
    assert (len(result.kills), len(result.resume_seconds)) == (kills, kills)
    assert result.exact, result


def test_cuda_graphs_are_refused_with_the_option_that_disables_them(tmp_path):
    with pytest.raises(RuntimeError, match=r"CUDA graphs; set --training\.disable_cuda_graphs"):
        run("torchtitan", "holdfast", tmp_path / "graphs", arguments=["--cuda-graphs"])


@pytest.mark.parametrize("option", ["load_only", "create_seed_checkpoint"])
@pytest.mark.filterwarnings("ignore")
def test_what_holdfast_cannot_follow_is_refused_by_its_name(option):
    from holdfast.integrations.torchtitan import _require_supported

    config = SimpleNamespace(**{name: name == option for name in ("load_only", "create_seed_checkpoint")})
    options = SimpleNamespace(training=SimpleNamespace(disable_cuda_graphs=True))
    with pytest.raises(ValueError, match=f"{option}=True"):
        _require_supported(config, SimpleNamespace(config=options))


@pytest.mark.filterwarnings("ignore")
def test_a_position_in_the_data_of_another_rank_is_refused(monkeypatch):
    from holdfast.integrations import torchtitan

    loaded = []
    fake = SimpleNamespace(
        state_dict=lambda loader: {"at": 7}, load_state_dict=lambda loader, state: loaded.append(state)
    )
    monkeypatch.setattr(torchtitan, "StatefulDataLoader", fake)
    state = torchtitan._LoaderPosition(SimpleNamespace(dp_world_size=2, dp_rank=1)).state_dict()
    torchtitan._LoaderPosition(SimpleNamespace(dp_world_size=2, dp_rank=1)).load_state_dict(state)
    with pytest.raises(ValueError, match="data-parallel rank 0, and would continue at the position of 1"):
        torchtitan._LoaderPosition(SimpleNamespace(dp_world_size=2, dp_rank=0)).load_state_dict(state)
    assert loaded == [{"at": 7}]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"restorable_in_place": True}, "torchtitan cannot go back"), ({"state": {"model": 1}}, "use another name")],
)
@pytest.mark.filterwarnings("ignore")
def test_a_setting_that_the_manager_cannot_follow_is_refused(settings, message):
    from holdfast.integrations.torchtitan import _with_objects

    with pytest.raises(ValueError, match=message):
        _with_objects(settings, {"model": nn.Linear(1, 1)})


@pytest.mark.filterwarnings("ignore")
def test_further_objects_are_saved_with_those_of_torchtitan():
    from holdfast.integrations.torchtitan import _with_objects

    arguments = _with_objects({"state": {"ema": 1}, "every": 3}, {"model": 2})
    assert arguments == {"state": {"model": 2, "ema": 1}, "every": 3, "restorable_in_place": False}
