import msgspec
import pytest
import torch
from safetensors.torch import load as load_safetensors

from holdfast.errors import DamagedCheckpoint, UnknownFormat
from holdfast.format import manifest as fmt
from holdfast.format.shards import saved_rank, state_for, tensors_for
from tests.support.edited_manifests import decode_manifest, encode_manifest


def test_slots_lie_back_to_back_and_are_aligned_to_their_elements():
    slots = fmt.lay_out([("b", "BOOL", (3,)), ("a", "F64", (2,)), ("c", "BF16", (5,)), ("e", "F32", (0, 4))])
    assert [s.name for s in slots] == ["e", "a", "c", "b"]
    assert [s.start for s in slots] == [0, *[s.end for s in slots[:-1]]]
    assert all(s.start % fmt.ITEM_BYTES[s.dtype] == 0 for s in slots)


def test_tensors_of_whole_cache_lines_begin_with_one_whatever_lies_beside_them():
    slots = fmt.lay_out(
        [("odd", "I64", (1,)), ("w", "F32", (64, 3)), ("b", "BF16", (32,)), ("head", "F32", (10,))]
    )
    assert [s.name for s in slots] == ["b", "w", "odd", "head"]
    assert [s.start % fmt.LINE_BYTES for s in slots if not (s.end - s.start) % fmt.LINE_BYTES] == [0, 0]


def test_a_payload_opens_with_plain_safetensors():
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    slots = fmt.lay_out([("x", "I16", (2, 3)), ("scalar", "F32", ()), ("empty", "F32", (0,))])
    data = torch.tensor(2.5).numpy().tobytes() + tensor.numpy().tobytes()
    found = load_safetensors(fmt.payload_header(slots, {"job": "j"}) + data)
    assert torch.equal(found["x"], tensor)
    assert found["scalar"].item() == 2.5
    assert found["empty"].shape == (0,)


def test_the_data_section_is_aligned_to_a_cache_line():
    for name in ("a", "ab", "a long name of a tensor"):
        assert len(fmt.payload_header(fmt.lay_out([(name, "F32", (1,))]), {})) % 64 == 0


def manifest(**changes):
    values = {
        "job": "j", "iteration": 7, "lineage": 1, "attempt": 1, "kind": "scheduled", "created_at": 0.0,
        "parent": None, "world_size": 1, "files": [], "tensors": [], "state": {},
    }  # fmt: skip
    return fmt.Manifest(**values | changes)


def test_a_manifest_comes_back_as_it_was():
    before = manifest(state={"model": {"w": {"$tensor": "model.w"}}}, timings={"write_seconds": 0.25})
    assert decode_manifest(encode_manifest(before)) == before


def test_a_future_format_is_named_with_the_way_out():
    data = msgspec.json.decode(encode_manifest(manifest()))
    with pytest.raises(UnknownFormat, match="format 3; this Holdfast reads format 2: upgrade holdfast"):
        decode_manifest(msgspec.json.encode(data | {"format": 3}))


def test_an_earlier_format_is_named_with_the_way_out():
    with pytest.raises(UnknownFormat, match=r"format 1; .* reads format 2.*: give the job another name"):
        decode_manifest(b'{"format": 1}')


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": 2}', b"\xff\xfe", b'{"format": 2, "job": 3}'])
def test_what_is_no_manifest_is_damaged(data):
    with pytest.raises(DamagedCheckpoint, match="is not a manifest"):
        decode_manifest(data)


def tensor(name, rank=None, file="rank-0.safetensors"):
    return fmt.Tensor(
        name=name, dtype="U8", shape=(1,), global_shape=(1,), offsets=(0,), file=file, start=0, end=1, digest="",
        rank=rank,
    )  # fmt: skip


@pytest.mark.parametrize(("rank", "saved"), [(0, 0), (1, 1), (2, 2), (3, 0), (7, 1)])
def test_a_rank_sees_what_all_share_and_what_the_saved_one_in_its_place_had(rank, saved):
    shards = [tensor("w", file=f"rank-{number}.safetensors") for number in range(3)]
    own = [tensor("rng", number, f"rank-{number}.safetensors") for number in range(3)]
    made = manifest(
        world_size=3,
        tensors=[*shards, *own, tensor("late", 1)],
        state={"loop": 0, "gradients": {}},
        rank_states={"1": {"loop": 1, "late": {"$tensor": "late"}}, "2": {"gradients": fmt.ABSENT}},
    )
    assert saved_rank(made, rank) == saved
    late = {"late": [tensor("late", 1)]} if saved == 1 else {}
    assert tensors_for(made, rank) == {"w": shards, "rng": [own[saved]]} | late
    states = [
        {"loop": 0, "gradients": {}},
        {"loop": 1, "gradients": {}, "late": {"$tensor": "late"}},
        {"loop": 0},
    ]
    assert state_for(made, rank) == states[saved]


def test_a_ranks_own_tensor_goes_before_a_shared_one_of_its_name():
    made = manifest(world_size=2, tensors=[tensor("w", 1, "rank-1.safetensors"), tensor("w")])
    assert tensors_for(made, 0)["w"] == [tensor("w")]
    assert tensors_for(made, 1)["w"] == [tensor("w", 1, "rank-1.safetensors")]
