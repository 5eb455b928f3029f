import collections
import json
import math

import pytest
import safetensors
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from holdfast import Variables
from holdfast.checkpoint import export as exports
from holdfast.checkpoint.export import export
from holdfast.checkpoint.reading import FileRange
from holdfast.errors import DamagedCheckpoint
from holdfast.format.parity_file import ParityCode
from holdfast.state.registry import Registry
from tests.support.handmade_checkpoints import commit_objects
from tests.support.sharded_checkpoints import RankTensors, ReplicatedTensor, by_rows, commit


class ExportedModel(torch.nn.Module):
    """Shared weights, a buffer that state_dict() leaves out, extra state, odd dtypes."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(30, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.head = torch.nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.register_buffer("wave", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("short", torch.randn(5).to(torch.bfloat16))

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def trained(seed=0):
    torch.manual_seed(seed)
    model = ExportedModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    for _ in range(2):
        model(torch.arange(20)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def made(tmp_path):
    model, optimizer = trained()
    loop = Variables(
        best=math.inf, last=collections.deque([1, 2]), kinds=frozenset([3]), mask=torch.tensor([True])
    )
    written = commit_objects(tmp_path / "store", 7, model=model, optimizer=optimizer, loop=loop)
    return written, model, optimizer


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
            assert found[name].dtype == value.dtype


def test_a_module_alone_is_what_load_file_and_load_state_dict_take(made, tmp_path):
    written, model, _ = made
    target = tmp_path / "model.safetensors"
    result = export(written.store, "job", written.id, target, "safetensors", only="model")
    found = load_file(target)
    same(found, model.state_dict())
    other, _ = trained(seed=1)
    other.load_state_dict(found)
    assert torch.equal(other.head.weight, model.head.weight)
    assert (result.objects, result.tensors, result.size_bytes) == (["model"], len(found), target.stat().st_size)


def test_a_whole_checkpoint_as_safetensors_has_the_users_names_and_says_what_is_left_out(made, tmp_path):
    written, model, optimizer = made
    target = tmp_path / "all.safetensors"
    result = export(written.store, "job", written.id, target, "safetensors")
    found = load_file(target)
    assert torch.equal(found["model.head.weight"], model.head.weight)
    moment = optimizer.state[model.norm.weight]["exp_avg_sq"]
    assert torch.equal(found["optimizer.state.exp_avg_sq.norm.weight"], moment)
    assert not [name for name in found if name.startswith(("rng", "session"))]
    assert "optimizer.param_groups.0.lr" in result.left_out
    assert "loop.best" in result.left_out
    with safetensors.safe_open(target, "pt") as file:
        assert file.metadata() == {"format": "pt", "job": "job", "iteration": "7"}


def test_a_dtype_that_safetensors_lacks_is_named_beside_it(tmp_path):
    written = commit_objects(tmp_path / "store", loop=Variables(wave=torch.randn(2, dtype=torch.complex128)))
    export(written.store, "job", written.id, tmp_path / "x", "safetensors")
    with safetensors.safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata()["view of loop.wave"] == "complex128"
        assert file.get_tensor("loop.wave").shape == (2, 2)


def test_a_torch_file_loads_without_trust_and_trains_on(made, tmp_path):
    written, model, optimizer = made
    target = tmp_path / "all.pt"
    export(written.store, "job", written.id, target, "torch")
    found = torch.load(target, weights_only=True)
    assert list(found) == ["model", "optimizer", "loop"]
    assert found["model"]._metadata == model.state_dict()._metadata
    assert found["loop"]["best"] == math.inf
    assert (found["loop"]["last"], found["loop"]["kinds"]) == ([1, 2], {3})
    other, its_optimizer = trained(seed=1)
    other.load_state_dict(found["model"])
    its_optimizer.load_state_dict(found["optimizer"])
    same(other.state_dict(), model.state_dict())
    for each in (model, other):
        each(torch.arange(9)).sum().backward()
    for each in (optimizer, its_optimizer):
        each.step()
    same(other.state_dict(), model.state_dict())


def test_tied_weights_stay_tied_in_a_torch_file(made, tmp_path):
    written, *_ = made
    export(written.store, "job", written.id, tmp_path / "x", "torch", only="model")
    found = torch.load(tmp_path / "x", weights_only=True)["model"]
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()


def test_a_dcp_directory_loads_in_one_process(made, tmp_path):
    written, model, optimizer = made
    target = tmp_path / "dcp"
    export(written.store, "job", written.id, target, "dcp")
    other, its_optimizer = trained(seed=1)
    state = {"model": other.state_dict(), "optimizer": its_optimizer.state_dict()}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(state, checkpoint_id=target)
    other.load_state_dict(state["model"])
    its_optimizer.load_state_dict(state["optimizer"])
    same(other.state_dict(), model.state_dict())
    moments = (o.state[m.norm.weight]["exp_avg"] for m, o in ((model, optimizer), (other, its_optimizer)))
    assert torch.equal(*moments)
    assert its_optimizer.param_groups[0]["lr"] == 0.125


def test_one_object_needs_no_other_to_be_sound(made, tmp_path):
    written, model, _ = made
    damage(written, "optimizer.state.exp_avg.embed.weight")
    export(written.store, "job", written.id, tmp_path / "x", "safetensors", only="model")
    assert torch.equal(load_file(tmp_path / "x")["norm.weight"], model.norm.weight)
    for kind in exports._WRITERS:
        with pytest.raises(DamagedCheckpoint, match=r"optimizer\.state\.exp_avg\.embed\.weight"):
            export(written.store, "job", written.id, tmp_path / "all", kind)
    assert names(tmp_path) == ["store", "x"]


def test_a_degraded_export_has_all_tensors_but_the_damaged_ones_and_says_so(made, tmp_path):
    written, model, optimizer = made
    lost = ["model.norm.weight", "optimizer.state.exp_avg.embed.weight"]
    stored = {tensor.name for tensor in written.manifest.tensors}
    for name in ("model.norm.weight", "optimizer.state.exp_avg.embed.weight"):
        assert name in stored
        damage(written, name)
    result = export(written.store, "job", written.id, tmp_path / "x", "safetensors", degraded=True)
    found = load_file(tmp_path / "x")
    assert sorted(result.lost) == lost
    assert not set(lost) & found.keys()
    assert torch.equal(found["model.head.weight"], model.head.weight)
    moment = optimizer.state[model.norm.weight]["exp_avg_sq"]
    assert torch.equal(found["optimizer.state.exp_avg_sq.norm.weight"], moment)
    with safetensors.safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata()["lost"] == f"2 of {len(found) + 2} tensors"


def test_a_degraded_export_replaces_low_bytes_where_the_important_ones_are_left(tmp_path):
    torch.manual_seed(1)
    model = torch.nn.Linear(100, 200)
    code = ParityCode(10, 2, is_important=True)
    written = commit_objects(tmp_path / "store", 7, parity=code, model=model)
    weight = next(tensor for tensor in written.manifest.tensors if tensor.name == "model.weight")
    path = written.store.path("job", written.id) / weight.file
    data = bytearray(path.read_bytes())
    block = -(-weight.start // 4096) * 4096
    data[block : block + 4096] = bytes(4096)
    lost = slice((block - weight.start) // 4, (block - weight.start) // 4 + 1024)
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpoint):
        export(written.store, "job", written.id, tmp_path / "x", "safetensors")
    result = export(written.store, "job", written.id, tmp_path / "x", "safetensors", degraded=True)
    (inexact,) = result.inexact
    assert (inexact.tensor, inexact.lost, inexact.numbers, inexact.low_bytes) == ("model.weight", 1024, 20_000, 3)
    assert result.lost == []
    found = load_file(tmp_path / "x")
    assert torch.equal(found["model.bias"], model.bias)
    ratio = found["model.weight"].flatten() / model.weight.flatten()
    assert ((ratio[lost] >= 0.5) & (ratio[lost] <= 2)).all()
    ratio[lost] = 1
    assert (ratio == 1).all()
    with safetensors.safe_open(tmp_path / "x", "pt") as file:
        said = "the low 3 bytes of 1,024 numbers, 5.12 % of those of 1 tensor: model.weight"
        assert file.metadata()["inexact"] == said


def test_a_degraded_export_of_a_sound_checkpoint_is_that_of_any_other(made, tmp_path):
    written, *_ = made
    for name, degraded in (("plain", False), ("degraded", True)):
        result = export(written.store, "job", written.id, tmp_path / name, "safetensors", degraded=degraded)
        assert result.lost == []
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "degraded").read_bytes()


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_formats_that_need_every_tensor_refuse_a_degraded_export(made, tmp_path, kind):
    written, *_ = made
    with pytest.raises(ValueError, match="use --format safetensors with --degraded"):
        export(written.store, "job", written.id, tmp_path / "x", kind, degraded=True)


@pytest.mark.parametrize("kind", exports._WRITERS)
def test_nothing_is_replaced_unasked_and_nothing_but_an_export_at_all(made, tmp_path, kind):
    written, *_ = made
    target = tmp_path / "target"
    export(written.store, "job", written.id, target, kind, only="model")
    with pytest.raises(FileExistsError, match="target exists; use --force to replace it"):
        export(written.store, "job", written.id, target, kind)
    export(written.store, "job", written.id, target, kind, force=True)
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("")
    with pytest.raises(FileExistsError, match="home is a directory, but not a"):
        export(written.store, "job", written.id, home, kind, force=True)
    assert names(tmp_path) == ["home", "store", "target"]
    assert names(home) == ["thesis.tex"]


@pytest.mark.parametrize("kind", exports._WRITERS)
@pytest.mark.parametrize("there_before", [False, True])
def test_an_interrupted_export_leaves_what_was_there(made, tmp_path, kind, there_before, monkeypatch):
    written, *_ = made
    target = tmp_path / "target"
    if there_before:
        export(written.store, "job", written.id, target, kind, only="loop")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    real = exports._WRITERS[kind]

    def interrupted(path, *arguments):
        real(path, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setitem(exports._WRITERS, kind, interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(written.store, "job", written.id, target, kind, force=there_before)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_comes_into_being_meanwhile_is_not_replaced(made, tmp_path, monkeypatch):
    written, *_ = made
    target = tmp_path / "target"
    real = FileRange.view

    def view(run, start, end):
        target.write_text("somebody else's")
        return real(run, start, end)

    monkeypatch.setattr(FileRange, "view", view)
    with pytest.raises(FileExistsError, match="was created during the export"):
        export(written.store, "job", written.id, target, "torch")
    assert target.read_text() == "somebody else's"
    assert names(tmp_path) == ["store", "target"]


def test_an_object_that_is_not_there_is_refused_with_those_that_are(made, tmp_path):
    written, *_ = made
    with pytest.raises(LookupError, match="no object 'modle'; it has model, optimizer, loop"):
        export(written.store, "job", written.id, tmp_path / "x", "torch", only="modle")


@pytest.fixture
def of_three_ranks(tmp_path):
    """Parameters and their moments by rows, the buffers of each rank its own: those of rank 1 are 100 larger."""
    model, optimizer = trained()
    captured = Registry({"model": model, "optimizer": optimizer}).capture({})
    buffers = {f"model.{name}" for name, _ in model.named_buffers()}
    tensors = {}
    for name, tensor in captured.tensors.items():
        if name in buffers or name.startswith("rng"):
            tensors[name] = RankTensors([tensor, tensor + 100, tensor])
        else:
            tensors[name] = by_rows(tensor, 3) if tensor.dim() else ReplicatedTensor(tensor, by=2)
    states = [captured.trees | {"loop": {"rank": rank}} for rank in range(3)]
    return commit(tmp_path / "store", 3, tensors, states), model, optimizer


@pytest.mark.parametrize("kind", exports._WRITERS)
def test_what_several_ranks_stored_is_exported_whole_and_their_own_as_rank_0_had_it(
    of_three_ranks, tmp_path, kind
):
    written, model, optimizer = of_three_ranks
    result = export(written.store, "job", written.id, tmp_path / "x", kind)
    assert result.objects == ["model", "optimizer", "loop"]
    other, its_optimizer = trained(seed=1)
    if kind == "safetensors":
        found = load_file(tmp_path / "x")
        other.load_state_dict({n.removeprefix("model."): t for n, t in found.items() if n.startswith("model.")})
        moment = found["optimizer.state.exp_avg.norm.weight"]
        assert len(found) == result.tensors == len(model.state_dict()) + 3 * len(list(model.parameters()))
    else:
        state = {"model": other.state_dict(), "optimizer": its_optimizer.state_dict()}
        if kind == "dcp":
            with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
                dcp.load(state, checkpoint_id=tmp_path / "x")
        else:
            state = torch.load(tmp_path / "x", weights_only=True)
            assert state["loop"] == {"rank": 0}
        other.load_state_dict(state["model"])
        its_optimizer.load_state_dict(state["optimizer"])
        moment = its_optimizer.state[other.norm.weight]["exp_avg"]
    same(other.state_dict(), model.state_dict())
    assert torch.equal(moment, optimizer.state[model.norm.weight]["exp_avg"])


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def damage(written, name):
    (start,) = (tensor.start for tensor in written.manifest.tensors if tensor.name == name)
    data = bytearray(written.path().read_bytes())
    data[start] ^= 1
    written.path().write_bytes(data)


def test_dcp_holds_as_much_in_a_file_and_in_memory_as_is_asked(made, tmp_path, monkeypatch):
    written, model, optimizer = made
    target, most = tmp_path / "dcp", 1500
    sizes = []
    load = exports.restore.load

    def measured(*arguments, **options):
        loaded = load(*arguments, **options)
        sizes.append(sum(tensor.nbytes for tensor in loaded.tensors.values()))
        return loaded

    monkeypatch.setattr(exports.restore, "load", measured)
    export(written.store, written.job, written.id, target, "dcp", shard_bytes=most)
    assert len(list(target.glob("*.distcp"))) > 3
    assert max(sizes) <= max(most, model.embed.weight.nbytes)
    model_here, optimizer_here = trained(seed=1)
    state = {"model": model_here.state_dict(), "optimizer": optimizer_here.state_dict()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=target)
    same(state["model"], model.state_dict())
    for number, moments in optimizer.state_dict()["state"].items():
        same(state["optimizer"]["state"][number], moments)


@pytest.fixture
def plain(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    return commit_objects(tmp_path / "store", 7, net=model, loop=Variables(epoch=1)), model


def test_hf_is_a_model_directory(plain, tmp_path):
    written, model = plain
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "small"}')
    made = export(written.store, written.job, written.id, tmp_path / "hf", "hf", config=config, shard_bytes=600)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    found = {}
    for file in files:
        found |= load_file(tmp_path / "hf" / file)
    same(found, model.state_dict())
    assert {name for name, file in index["weight_map"].items() if file == files[0]} == {"0.bias", "0.weight"}
    assert (tmp_path / "hf/config.json").read_text() == config.read_text()
    assert made.tensors == 4
    export(written.store, written.job, written.id, tmp_path / "hf", "hf", config=config, force=True)
    assert sorted(each.name for each in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "needs --config"), ("{}", "no model_type"), ("no JSON", "must be a model's config.json")],
)
def test_hf_without_the_configuration_of_a_model_is_refused(plain, tmp_path, content, words):
    written, _ = plain
    config = tmp_path / "config.json"
    config.write_text(content or "")
    with pytest.raises(ValueError, match=words):
        export(
            *(written.store, written.job, written.id, tmp_path / "hf", "hf"),
            config=config if content is not None else None,
        )
    assert not (tmp_path / "hf").exists()
