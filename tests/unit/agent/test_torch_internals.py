"""Private API of torch stays in one module, and a torch that lacks some of it is told of."""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast import torch_internals
from holdfast.state.registry import Registry

PACKAGE = Path(holdfast.__file__).parent
NOT_TORCH = {
    *(("os", "_exit"), ("process", "_args")),
    *(("threading.main_thread()", "_set_native_id"), ("warnings", "_filters_mutated")),
    ("runpy", "_run_module_as_main"),
    *(("item", "_original_module"), ("item", "_forward_module")),
}
"""Of the standard library, and of Lightning Fabric."""


def private_names_of_torch():
    layer = nn.Linear(1, 1)
    holders = [
        layer, torch.optim.SGD(layer.parameters(), lr=1.0), torch.ones(1), torch, dist, dist.Reducer, DTensor,
        DeviceMesh, DistributedDataParallel, torch.utils.data.DataLoader([1]), torch.distributed.distributed_c10d,
    ]  # fmt: skip
    return {name for held in holders for name in dir(held) if name.startswith("_") and not name.endswith("__")}


def own_names(trees):
    """What the package itself defines or assigns."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
                found.add(node.attr)
    return found


def private_uses(tree, torchs, own):
    """Accesses to attributes of other objects that are torch's, or nobody's here; by name as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base, name = ast.unparse(node.value), node.attr
            if base not in ("self", "cls") and (base, name) not in NOT_TORCH:
                yield node.lineno, base, name
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            if len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                base, name = ast.unparse(node.args[0]), str(node.args[1].value)
                if (base, name) not in NOT_TORCH:
                    yield node.lineno, base, name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for part in [*(node.module or "").split("."), *(alias.name for alias in node.names)]:
                yield node.lineno, "torch", part


def offences(source, torchs, own):
    for line, base, name in private_uses(ast.parse(source), torchs, own):
        is_private = name.startswith("_") and (not name.endswith("__") or name == "__create_chunk_list__")
        if is_private and (name in torchs or name not in own):
            yield f"line {line}: {base}.{name}"


@pytest.fixture(scope="module")
def names():
    # adapters use private attributes of their frameworks, under names that torch has as well
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "integrations"]
    files.remove(PACKAGE / "torch_internals.py")
    sources = {path: path.read_text() for path in files}
    return sources, private_names_of_torch(), own_names(map(ast.parse, sources.values()))


def test_no_other_module_uses_private_api_of_torch(names):
    sources, torchs, own = names
    found = [f"{path.name}, {each}" for path, source in sources.items() for each in offences(source, torchs, own)]
    assert [each for each in found if "preemption.py" not in each or "_target" not in each] == []


@pytest.mark.parametrize(
    "line",
    [
        "module._parameters", "ddp._lazy_init_ran", "getattr(module, '_get_fsdp_state')", "tensor._version",
        "torch.distributed._functional", "from torch._inductor import config", "from torch.nn import _reduction",
        "dtensor.__create_chunk_list__()",
    ],
)  # fmt: skip
def test_such_a_use_would_be_seen(names, line):
    _, torchs, own = names
    assert list(offences(line, torchs, own))


def test_this_torch_has_all_of_it():
    missing = [each for each in torch_internals.PRIVATE_APIS if not each.supported()]
    assert missing == ([torch_internals.MESH_ROOT] if torch.__version__ < (2, 8) else [])


@pytest.mark.parametrize("internal", torch_internals.PRIVATE_APIS, ids=lambda internal: internal.name)
def test_what_a_torch_lacks_is_told_with_what_follows(monkeypatch, internal):
    lacking = torch_internals.PrivateApi(internal.name, ("_gone",), internal.owner, internal.without)
    monkeypatch.setattr(torch_internals, "PRIVATE_APIS", (lacking,))
    (told,) = torch_internals.unsupported(distributed=True)
    assert internal.name in told
    assert told.endswith(internal.without)
    assert internal.checked_on


def test_an_owner_that_is_gone_is_not_supported():
    def gone():
        raise AttributeError("moved")

    assert not torch_internals.PrivateApi("a class", ("_x",), gone, "nothing works").supported()


@pytest.fixture
def lacking(monkeypatch):
    """Have this torch lack some of its private API."""

    def without(*internals):
        has_all = torch_internals._has_all
        monkeypatch.setattr(torch_internals, "_has_all", lambda each: each not in internals and has_all(each))

    return without


def test_models_are_walked_in_full_where_their_contents_cannot_be_watched(lacking):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    expected = Registry({"model": model}).capture({})
    lacking(torch_internals.MODULE_CONTENTS)
    registry = Registry({"model": model})
    for _ in range(2):
        found = registry.capture({})
        assert (found.trees, list(found.tensors)) == (expected.trees, list(expected.tensors))
    assert "walked in full" in registry.limitations()[0]


def test_a_checkpoint_is_copied_where_it_cannot_be_told_what_loading_runs(lacking):
    lacking(torch_internals.MODULE_LOADING)
    assert not torch_internals.only_copies(nn.Linear(1, 1))


def test_buckets_that_cannot_be_known_are_said_to_be_so(lacking):
    lacking(torch_internals.DDP_BUCKETS, torch_internals.DDP_PARAMETERS)
    ddp = DistributedDataParallel.__new__(DistributedDataParallel)
    assert "lacks the buckets" in torch_internals.obstacle_to_buckets(ddp)
    assert torch_internals.replicated_parameters(ddp) == []


def test_sharded_tensors_are_refused_where_it_cannot_be_told_what_is_here(lacking):
    lacking(torch_internals.DTENSOR_CHUNKS)
    with pytest.raises(TypeError, match="sharded tensors are refused"):
        torch_internals.chunks_of(None)


def test_a_mesh_is_its_own_root_where_it_does_not_tell(lacking):
    lacking(torch_internals.MESH_ROOT)
    mesh = object()
    assert torch_internals.root_mesh(mesh) is mesh


@pytest.mark.parametrize("names", [("_foreach_copy_",), ("_gone",)], ids=["in one call", "one by one"])
def test_all_copies_are_made_with_and_without_the_call_for_many(names, monkeypatch):
    monkeypatch.setattr(
        torch_internals, "FOREACH_COPY", dataclasses.replace(torch_internals.FOREACH_COPY, names=names)
    )
    sources = [torch.randn(3, requires_grad=True), torch.arange(4), torch.tensor(True), torch.empty(0)]
    targets = [torch.zeros_like(source, requires_grad=False) for source in sources]
    torch_internals.copy_all(targets, sources)
    assert all(map(torch.equal, targets, sources))
    assert not any(target.requires_grad for target in targets)
    torch_internals.copy_all([], [])
