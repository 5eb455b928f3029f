import collections
import contextlib
import math
import sys

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import reading, restore
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.resharding import copies_for, plan_assembly
from holdfast.format.shards import Region, tensors_for
from tests.support.read_recording_store import ReadRecordingStore
from tests.support.sharded_checkpoints import (
    RankTensors,
    ReplicatedTensor,
    ShardedTensor,
    by_grid,
    by_rows,
    commit,
    commit_manifest,
    flip,
    in_blocks,
    part_of,
    payloads,
)


def bits(tensor):
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.dtype, tuple(tensor.shape), plain.contiguous().reshape(-1).view(torch.uint8).tolist()


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(math.prod(shape)), dtype=dtype)


SPLIT = {
    "rows": by_rows(random(12, 5), 4),
    "uneven": by_rows(random(7, 3), 4),
    "few": by_rows(random(3, 4), 4),  # nothing is left for the last rank
    "vector": by_rows(random(10), 4),
    "columns": by_rows(random(3, 9), 4, dimension=1),
    "grid": by_grid(random(6, 7), 2, 2),
    "deep": by_rows(random(2, 8, 3), 4, dimension=1),
    "none": by_rows(torch.empty(0, 4), 4),
    "bfloat16": by_rows(random(9, 2).to(torch.bfloat16), 4),
    "float8": by_rows(random(9, 2).to(torch.float8_e5m2fnuz), 4),
    "complex64": by_rows(random(5, 2, dtype=torch.complex64), 4),
    "complex128": by_rows(random(5, 2, dtype=torch.complex128), 4),
    "mask": by_rows(random(6) > 0, 4),
    "some": ShardedTensor(random(4, 4), [Region((0, 0), (4, 4)), None, None, None]),
}
WHOLE = {
    "step": ReplicatedTensor(torch.tensor(7), by=3),
    "norm": ReplicatedTensor(random(33), by=1),
    "nothing": ReplicatedTensor(torch.empty(0)),
}
TENSORS = {f"model.{name}": each for name, each in (SPLIT | WHOLE).items()}
SHARDED = [f"model.{name}" for name in SPLIT]


def regions_for(rank, world_size):
    """As one of `world_size` ranks would ask: what was split by columns goes by columns again."""
    columns = ("model.columns", "model.deep")
    return {
        name: by_rows(TENSORS[name].tensor, world_size, int(name in columns)).regions[rank] for name in SHARDED
    }


def load(written, rank=0, world_size=None, **options):
    """As one of so many ranks; whole without."""
    asked = (lambda state, shapes: regions_for(rank, world_size)) if world_size else None
    return restore.load(written.store, "job", written.id, rank=rank, regions=asked, **options)


def asking(written, regions, store=None, **options):
    return restore.load(store or written.store, "job", written.id, regions=lambda *_: regions, **options)


@pytest.fixture
def made(tmp_path):
    return commit(tmp_path, 4, TENSORS)


@pytest.mark.parametrize("world_size", [4, 2, 3, 1, 5, 16])
def test_any_number_of_ranks_finds_every_bit_where_it_belongs(made, world_size):
    for rank in range(world_size):
        found = load(made, rank, world_size).tensors
        assert found.keys() == TENSORS.keys()
        expected = regions_for(rank, world_size)
        for name, each in TENSORS.items():
            part = part_of(each.tensor, expected[name]) if name in expected else each.tensor
            assert bits(found[name]) == bits(part), name


def test_the_other_way_of_splitting_is_as_good(made):
    """Tensor parallelism where there was none, and the other way round."""
    turned = {
        "model.rows": by_rows(TENSORS["model.rows"].tensor, 3, dimension=1),
        "model.columns": by_rows(TENSORS["model.columns"].tensor, 3),
        "model.grid": by_grid(TENSORS["model.grid"].tensor, 1, 3),
    }
    for rank in range(3):
        asked = {name: each.regions[rank] for name, each in turned.items()}
        found = asking(made, asked, rank=rank, only=turned).tensors
        for name, each in turned.items():
            assert bits(found[name]) == bits(part_of(each.tensor, asked[name]))


def test_one_process_puts_all_of_it_together(made):
    found = load(made)
    assert {name: bits(tensor) for name, tensor in found.tensors.items()} == {
        name: bits(each.tensor) for name, each in TENSORS.items()
    }
    assert found.shapes == {n: (str(each.tensor.dtype), tuple(each.tensor.shape)) for n, each in TENSORS.items()}


def test_what_all_ranks_have_may_lie_in_any_file(tmp_path):
    tensors = {f"model.{i}": ReplicatedTensor(random(40 + i), by=i % 3) for i in range(9)}
    written = commit(tmp_path, 3, tensors)
    for rank in range(5):
        found = load(written, rank).tensors
        assert all(bits(found[name]) == bits(each.tensor) for name, each in tensors.items())


def test_several_ranks_may_go_on_from_a_checkpoint_of_one(tmp_path):
    whole = random(10, 6)
    written = commit(tmp_path, 1, {"w": ReplicatedTensor(whole)})
    for rank, region in enumerate(by_rows(whole, 3).regions):
        found = asking(written, {"w": region}, rank=rank)
        assert bits(found.tensors["w"]) == bits(part_of(whole, region))


def test_one_process_reads_all_that_one_wrote_whether_it_may_ask_for_regions_or_not(tmp_path):
    written = commit(tmp_path, 1, {"w": ReplicatedTensor(random(10, 6)), "none": ReplicatedTensor(torch.empty(0))})
    assert bits(asking(written, {}).tensors["w"]) == bits(random(10, 6))
    data = bytearray(written.path().read_bytes())
    data[8] ^= 1
    written.path().write_bytes(data)
    for asked in (None, lambda *_: {}):
        with pytest.raises(DamagedCheckpoint, match="the header does not match"):
            restore.load(written.store, "job", written.id, regions=asked)


def test_a_rank_takes_its_own_and_one_that_is_new_that_of_another(tmp_path):
    own = {
        "rng": RankTensors([random(8) + rank for rank in range(3)]),
        "late": RankTensors([None, torch.ones(2), None]),
    }
    states = [{"rng": {"$tensor": "rng"}, "seen": rank, "same": 1} for rank in range(3)]
    states[1]["grad"] = {"$tensor": "late"}
    written = commit(tmp_path, 3, own | {"w": by_rows(random(6), 3)}, states)
    for rank in range(5):
        found, saved = load(written, rank), rank % 3
        assert found.rank == saved
        assert bits(found.tensors["rng"]) == bits(own["rng"].tensors[saved])
        assert found.state == states[saved]
        assert found.tensors.keys() == {"rng", "w"} | ({"late"} if saved == 1 else set())
        assert found.shapes["rng"] == ("torch.float32", (8,))


def test_who_asks_for_regions_sees_the_trees_of_its_rank_and_global_shapes(made):
    asked = []
    load_with = {"rank": 6, "regions": lambda *told: asked.append(told) or {}}
    restore.load(made.store, "job", made.id, only=["model.complex128", "model.few"], **load_with)
    ((state, shapes),) = asked
    assert shapes == {"model.complex128": ("torch.complex128", (5, 2)), "model.few": ("torch.float32", (3, 4))}
    assert state == made.manifest.state


@pytest.fixture
def large(tmp_path, monkeypatch):
    """Four ranks, each with a row of 40 kB of three tensors; stretches of any size are read around."""
    monkeypatch.setattr(reading, "GAP_BYTES", 0)
    tensors = {name: by_rows(random(4, 10_000) + ord(name), 4) for name in "abc"}
    tensors["own"] = RankTensors([random(10_000) + rank for rank in range(4)])
    return commit(tmp_path, 4, tensors), tensors


def test_only_what_a_rank_needs_is_read(large):
    written, tensors = large
    store = ReadRecordingStore(written.store.root)
    asked = {"a": tensors["a"].regions[2], "b": Region((4, 0), (0, 10_000)), "c": Region((1, 5), (2, 3))}
    found = asking(written, asked, store, rank=3).tensors
    assert [tuple(found[name].shape) for name in "abc"] == [(1, 10_000), (0, 10_000), (2, 3)]
    assert bits(found["own"]) == bits(tensors["own"].tensors[3])
    sizes = collections.Counter()
    for file, _, length, _ in store.reads:
        sizes[file] += length
    needed = {"rank-1.safetensors": 40_000, "rank-2.safetensors": 80_000, "rank-3.safetensors": 40_000}
    assert sizes.keys() == needed.keys()
    assert all(0 <= sizes[file] - size < 5 * fmt.BLOCK_BYTES for file, size in needed.items())


def test_what_lies_between_is_read_along_when_that_is_quicker(tmp_path):
    tensors = {
        f"x{i:02}": RankTensors([random(10)] * 2) if i % 2 else ReplicatedTensor(random(10) + i) for i in range(40)
    }
    written = commit(tmp_path, 2, tensors)
    store = ReadRecordingStore(tmp_path)
    found = restore.load(store, "job", written.id, rank=1).tensors
    assert all(
        bits(found[n]) == bits(each.tensor) for n, each in tensors.items() if isinstance(each, ReplicatedTensor)
    )
    assert sorted(file for file, *_ in store.reads) == ["rank-0.safetensors", "rank-1.safetensors"]


def meets(tensor, region):
    sides = zip(tensor.offsets, tensor.shape, *region, strict=True)
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in sides)


def test_a_flipped_bit_matters_to_those_ranks_that_need_it(tmp_path):
    tensors = {
        "rows": by_rows(random(7, 3), 4),
        "grid": by_grid(random(6, 7), 2, 2),
        "own": RankTensors([random(5) + rank for rank in range(4)]),
        "shared": ReplicatedTensor(random(5), by=2),
    }
    written = commit(tmp_path, 4, tensors)
    asked = {"rows": Region((3, 0), (3, 2)), "grid": Region((0, 2), (3, 3))}
    refused = []
    for tensor in written.manifest.tensors:
        flip(written, tensor)
        needed = meets(tensor, asked[tensor.name]) if tensor.name in asked else tensor.rank in (None, 1)
        found = pytest.raises(DamagedCheckpoint, match=f"{tensor.file}: tensor {tensor.name} does not match")
        with found if needed else contextlib.nullcontext():
            asking(written, asked, rank=5)
        with found:
            restore.verify(written.store, "job", written.id)
        refused += [tensor] if needed else []
        flip(written, tensor)
    assert 0 < len(refused) < len(written.manifest.tensors)
    restore.verify(written.store, "job", written.id)


def test_a_missing_file_is_damage_to_those_that_need_it(large):
    written, tensors = large
    written.path("rank-2.safetensors").unlink()
    asked = {name: tensors[name].regions[1] for name in "abc"}
    asking(written, asked, rank=1)
    for problem in (lambda: load(written), lambda: restore.verify(written.store, "job", written.id)):
        with pytest.raises(DamagedCheckpoint, match=r"rank-2\.safetensors"):
            problem()


@pytest.mark.parametrize("asked", [None, Region((0, 0), (1, 3))])
def test_a_manifest_that_lacks_a_shard_is_damaged(tmp_path, asked):
    whole = commit(tmp_path / "whole", 4, {"w": by_rows(random(8, 3), 4)})
    lacking = [tensor for tensor in whole.manifest.tensors if tensor.file != "rank-3.safetensors"]
    files = [file for file in whole.manifest.files if file.name != "rank-3.safetensors"]
    manifest = msgspec.structs.replace(whole.manifest, tensors=lacking, files=files)
    whole.store.acquire_attempt("job", "again")
    manifest = msgspec.structs.replace(manifest, iteration=2, attempt=2)
    commit_manifest(whole.store, manifest, payloads(4, {"w": by_rows(random(8, 3), 4)}))
    regions = (lambda *_: {"w": asked}) if asked else None
    expected = "tensor w: 6 of its 24 elements are missing: only rank-0.safetensors, rank-1"
    with pytest.raises(DamagedCheckpoint, match=expected):
        restore.load(whole.store, "job", "000000000002-1", regions=regions)
    with pytest.raises(DamagedCheckpoint, match=expected):
        restore.verify(whole.store, "job", "000000000002-1")


def test_a_region_that_is_a_shard_takes_no_copy_and_no_planner(made):
    stored = tensors_for(made.manifest, 0)["model.uneven"]
    shard = stored[1]
    read = torch.zeros(shard.shape)
    found = plan_assembly("model.uneven", stored, Region(torch.Size(shard.offsets), torch.Size(shard.shape)))
    assert found.build({id(shard): read}) is read
    (whole,) = tensors_for(made.manifest, 0)["model.norm"]
    assert plan_assembly("model.norm", [whole]).build({id(whole): read}) is read


@pytest.mark.parametrize("rank", [None, 0, 1, 2, 3])
def test_as_many_ranks_as_before_and_a_torch_without_distributed_need_no_planner(made, monkeypatch, rank):
    monkeypatch.setitem(sys.modules, "torch.distributed.checkpoint.planner_helpers", None)
    asked = {} if rank is None else {f"model.{name}": each.regions[rank] for name, each in SPLIT.items()}
    asked.pop("model.some", None)
    found = asking(made, asked, rank=rank or 0).tensors
    for name, each in TENSORS.items():
        part = part_of(each.tensor, asked[name]) if name in asked else each.tensor
        assert bits(found[name]) == bits(part)
    with pytest.raises(ImportError):
        asking(made, {"model.rows": Region((1, 0), (5, 5))})


@pytest.mark.parametrize(
    "region",
    [Region((0, 0), (7, 4)), Region((7, 0), (1, 3)), Region((-1, 0), (2, 3)), Region((0, 0), (-1, 3)),
     Region((0,), (7,)), Region((0, 0, 0), (7, 3, 1))],
)  # fmt: skip
def test_a_region_that_is_none_is_refused(made, region):
    with pytest.raises(ValueError, match=r"model\.uneven: .* is outside of \(7, 3\)"):
        asking(made, {"model.uneven": region})


@st.composite
def partitions(draw):
    """A tensor of up to three dimensions, cut into blocks, and a region of it."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    blocks = in_blocks(draw, shape, 6)
    edges = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return shape, blocks, Region(tuple(a for a, _ in edges), tuple(b - a for a, b in edges))


@given(partitions())
@settings(max_examples=100, deadline=None)
def test_whatever_it_is_cut_into_a_region_is_filled_with_what_belongs_there(build):
    shape, blocks, region = build
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    written = payloads(len(blocks), {"w": ShardedTensor(tensor, blocks)})
    stored = [each.part.tensors[0] for each in written]
    read = {id(shard): part_of(tensor, block) for shard, block in zip(stored, blocks, strict=True)}
    assert torch.equal(plan_assembly("w", stored, region).build(read), part_of(tensor, region))
    assert torch.equal(plan_assembly("w", stored).build(read), tensor)
    assert sum(math.prod(copy.shape) for copy in copies_for(stored, region)) == math.prod(region.shape)


def test_all_is_put_together_in_host_memory_wherever_the_script_makes_its_tensors(made, tmp_path):
    of_one = commit(
        tmp_path / "one",
        1,
        {"model.rows": ReplicatedTensor(random(12, 5)), "nothing": ReplicatedTensor(torch.empty(0))},
    )
    torch.set_default_device("meta")
    try:
        whole, part, alone = load(made), load(made, 1, 3), load(of_one)
    finally:
        torch.set_default_device(None)
    for found in (whole, part, alone):
        assert {tensor.device.type for tensor in found.tensors.values()} == {"cpu"}
    expected = regions_for(1, 3)
    for name, each in TENSORS.items():
        assert bits(whole.tensors[name]) == bits(each.tensor)
        assert name not in expected or bits(part.tensors[name]) == bits(part_of(each.tensor, expected[name]))
