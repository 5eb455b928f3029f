from __future__ import annotations

import json
import math
from pathlib import Path

import numpy
import pytest
import torch

from holdfast import Session, Variables
from holdfast.store import Lineage, open_store
from tests.support.fake_server import Holdfast
from tests.support.handmade_checkpoints import TensorShard, commit, commit_objects
from tests.support.sharded_checkpoints import RankTensors, ReplicatedTensor, by_rows
from tests.support.sharded_checkpoints import commit as commit_ranks


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two lineages: 10 and 20 on the first; the second began at 10 and has 15."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9)
    model(torch.randn(6, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    loop = Variables(best=math.inf, names=["a", "b"], seen={3}, long=list(range(50)), score=numpy.float64(0.5))
    loop.again = loop.names
    for iteration, lineage in ((10, 1), (20, 1), (15, 2)):
        commit_objects(tmp_path, iteration, lineage, model=model, optimizer=optimizer, loop=loop)
    job = open_store(tmp_path)
    for number, parent in ((1, None), (2, "000000000010-1")):
        lineage = Lineage(number=number, iteration=0, parent=parent, order=None, attempt=1, created_at=0.0)
        job.append("job", lineage)
    return tmp_path


def shown(holdfast: Holdfast, *arguments: object) -> dict:
    result = holdfast("store", "show", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_checkpoint_is_shown_as_a_person_reads_it(holdfast: Holdfast, store: Path) -> None:
    result = holdfast("store", "show", store, "job", "000000000010-1")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["state", "after", "iteration", "10", "of", "lineage", "1"] in lines
    assert ["model", "7", "216", "B"] in lines
    assert ["model.0.weight", "F32", "4×8", "128", "B"] in lines
    assert ["optimizer.param_groups.0.lr", "0.125"] in lines
    assert ["loop.best", "inf"] in lines
    assert ["loop.long", "50", "values"] in lines


def test_the_rows_that_an_incremental_checkpoint_wrote_are_shown(holdfast: Holdfast, tmp_path: Path) -> None:
    loop = Variables(table=torch.zeros(20_000, 32))
    with Session("job", store=tmp_path, every=10**9, incremental=True, loop=loop) as session:
        session.resume()
        for row in (3, 4):
            loop.table[row] += 1
            session.checkpoint()
            session.step()
            session.wait(60)
    first, second, *_ = open_store(tmp_path).checkpoints("job")
    assert shown(holdfast, tmp_path, "job", first)["changed"] == []
    row = {"name": "loop.table", "rows": 1, "written_bytes": 128, "linked_bytes": 2_559_872}
    assert shown(holdfast, tmp_path, "job", second)["changed"] == [row]
    lines = [line.split() for line in holdfast("store", "show", tmp_path, "job", second).stdout.splitlines()]
    assert ["loop.table", "1", "128", "B", "2.56", "MB"] in lines
    (region,) = (tmp_path / "job" / second).glob("*.rows")
    region.unlink()
    region.write_bytes(b"damaged")
    assert shown(holdfast, tmp_path, "job", second)["changed"] == []


def test_the_same_as_json_has_every_tensor_largest_first(holdfast: Holdfast, store: Path) -> None:
    found = shown(holdfast, store, "job", "10")
    sizes = [tensor["size_bytes"] for tensor in found["tensors"]]
    assert sizes == sorted(sizes, reverse=True)
    count = {"name": "model.1.num_batches_tracked", "dtype": "I64", "shape": [], "size_bytes": 8}
    assert count | {"shards": 1, "own": False} in found["tensors"]
    assert found["values"]["optimizer.param_groups.0.momentum"] == 0.9
    assert found["values"]["loop.names"] == ["a", "b"]
    assert found["values"]["loop.seen"] == [3]
    assert found["values"]["loop.score"] == 0.5
    assert not [name for name in found["values"] if name.startswith(("rng", "session"))]


@pytest.mark.parametrize(
    ("named", "found"),
    [("latest", "000000000015-2"), ("20", "000000000020-1"), ("10", "000000000010-1"), ("000000000015-2",) * 2],
)
def test_a_checkpoint_is_named_by_name_iteration_or_latest(
    holdfast: Holdfast, store: Path, named: str, found: str
) -> None:
    assert shown(holdfast, store, "job", named)["checkpoint"] == found


def test_what_is_not_there_is_refused_with_what_is_near(holdfast: Holdfast, store: Path) -> None:
    near = holdfast("store", "show", store, "job", "17")
    assert (near.exit_code, "the nearest earlier one is at iteration 15" in near.stderr) == (1, True)
    assert "has no checkpoint 000000000019-1" in holdfast("store", "show", store, "job", "000000000019-1").stderr
    assert holdfast("store", "show", store, "job", "newest").exit_code == 2
    assert "it has: job" in holdfast("store", "show", store, "jab", "latest").stderr
    tensor = holdfast("store", "show", store, "job", "latest", "model.0.wieght")
    assert (tensor.exit_code, "did you mean model.0.weight" in tensor.stderr) == (1, True)


def test_a_tensor_is_summed_up(holdfast: Holdfast, tmp_path: Path) -> None:
    odd = torch.tensor([[3.0, -4.0, math.nan], [math.inf, 0.0, -math.inf]])
    commit(tmp_path, {"model.odd": odd})
    found = shown(holdfast, tmp_path, "job", "1", "model.odd")
    assert (found["dtype"], found["shape"], found["size_bytes"]) == ("float32", [2, 3], 24)
    assert (found["nan"], found["infinite"]) == (1, 2)
    assert (found["minimum"], found["maximum"], found["norm"]) == (-4.0, 3.0, 5.0)
    assert found["mean"] == pytest.approx(-1 / 3)
    text = holdfast("store", "show", tmp_path, "job", "1", "model.odd").stdout
    assert "model.odd: float32, 2×3, 24 B, matches its digest" in text
    assert "first     3, -4, nan, inf, 0, -inf" in text


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(0, 3), {"minimum": None, "mean": None, "norm": 0.0, "first": []}),
        (torch.tensor(7), {"minimum": 7.0, "maximum": 7.0, "first": [7]}),
        (torch.tensor([True, False]), {"mean": 0.5, "first": [True, False]}),
        (torch.tensor([3 + 4j], dtype=torch.complex128), {"maximum": 5.0, "first": ["(3+4j)"]}),
        (torch.full((10,), 0.5, dtype=torch.bfloat16), {"mean": 0.5, "first": [0.5] * 8}),
    ],
    ids=["empty", "scalar", "bool", "complex", "bfloat16"],
)
def test_any_kind_of_tensor_can_be_looked_into(
    holdfast: Holdfast, tmp_path: Path, tensor: torch.Tensor, expected: dict
) -> None:
    commit(tmp_path, {"x": tensor})
    found = shown(holdfast, tmp_path, "job", "1", "x")
    assert {name: found[name] for name in expected} == expected
    assert holdfast("store", "show", tmp_path, "job", "1", "x").exit_code == 0


def test_a_tensor_that_several_ranks_wrote_is_shown_whole(holdfast: Holdfast, tmp_path: Path) -> None:
    halves = [{"w": TensorShard(torch.full((2, 3), float(rank)), (4, 3), (2 * rank, 0))} for rank in range(2)]
    commit(tmp_path, *halves)
    found = shown(holdfast, tmp_path, "job", "1", "w")
    assert (found["shape"], found["mean"]) == ([4, 3], 0.5)


@pytest.fixture
def of_four_ranks(tmp_path: Path) -> Path:
    tensors = {
        "model.w": by_rows(torch.arange(28.0).reshape(7, 4), 4),
        "model.step": ReplicatedTensor(torch.tensor(3), by=2),
        "model.mean": RankTensors([torch.full((3,), float(rank)) for rank in range(4)]),
        "late.grad": RankTensors([None, torch.ones(5), None, None]),
    }
    states = [{"model": {"$tensor": "model.w"}, "loop": {"seen": rank}} for rank in range(4)]
    commit_ranks(tmp_path, 4, tensors, states)
    return tmp_path


def test_a_checkpoint_of_several_ranks_shows_each_tensor_once(holdfast: Holdfast, of_four_ranks: Path) -> None:
    found = shown(holdfast, of_four_ranks, "job", "1")
    assert (found["world_size"], list(found["files"])) == (4, [f"rank-{rank}.safetensors" for rank in range(4)])
    assert found["tensors"] == [
        {"name": "model.w", "dtype": "F32", "shape": [7, 4], "size_bytes": 112, "shards": 4, "own": False},
        {"name": "model.mean", "dtype": "F32", "shape": [3], "size_bytes": 12, "shards": 1, "own": True},
        {"name": "model.step", "dtype": "I64", "shape": [], "size_bytes": 8, "shards": 1, "own": False},
    ]
    assert found["objects"] == [
        {"name": "model", "tensors": 3, "size_bytes": 132},
        {"name": "loop", "tensors": 0, "size_bytes": 0},
    ]
    assert found["values"] == {"loop.seen": 0}


def test_how_several_ranks_stored_a_tensor_is_told(holdfast: Holdfast, of_four_ranks: Path) -> None:
    text = holdfast("store", "show", of_four_ranks, "job", "1").stdout
    lines = [line.split() for line in text.splitlines()]
    assert "on 4 ranks" in text
    assert ", 3 tensors, 4 files" in text
    assert ["TENSOR", "DTYPE", "SHAPE", "SIZE", "STORED"] in lines
    assert ["model.w", "F32", "7×4", "112", "B", "in", "4", "shards"] in lines
    assert ["model.mean", "F32", "3", "12", "B", "by", "each", "rank"] in lines
    assert ["model.step", "I64", "scalar", "8", "B", "once"] in lines


def test_a_tensor_of_each_rank_is_summed_up_as_rank_0_had_it(holdfast: Holdfast, of_four_ranks: Path) -> None:
    assert shown(holdfast, of_four_ranks, "job", "1", "model.mean")["maximum"] == 0.0
    assert shown(holdfast, of_four_ranks, "job", "1", "model.w")["maximum"] == 27.0
    refused = holdfast("store", "show", of_four_ranks, "job", "1", "late.grad")
    assert (refused.exit_code, "has no tensor 'late.grad'" in refused.stderr) == (1, True)


def test_only_a_damaged_tensor_is_refused(holdfast: Holdfast, tmp_path: Path) -> None:
    made = commit(tmp_path, {"a": torch.zeros(100), "b": torch.zeros(100)})
    (start,) = (tensor.start for tensor in made.manifest.tensors if tensor.name == "b")
    data = bytearray(made.path().read_bytes())
    data[start] = 1
    made.path().write_bytes(data)
    assert holdfast("store", "show", tmp_path, "job", "1", "a").exit_code == 0
    refused = holdfast("store", "show", tmp_path, "job", "1", "b")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "damaged: rank-0.safetensors: tensor b does not match its digest" in refused.stderr
